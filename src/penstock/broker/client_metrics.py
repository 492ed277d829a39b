"""Subscriptions to client metrics, as admins set them (KIP-714): kept, shown and checked.

They have no effect as long as nothing here receives the metrics of clients; see `telemetry`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from penstock.broker.catalog import ApiError, Topic
from penstock.broker.journal import Entry, Key
from penstock.broker.telemetry import PUSH_INTERVAL_MS
from penstock.errors import ConfigError
from penstock.log.config import Setting
from penstock.wire.errors import ErrorCode

MAX_SUBSCRIPTIONS: Final = 1_000
_METRICS: Final = "metrics"
_INTERVAL: Final = "interval.ms"
_MATCH: Final = "match"
_MIN_INTERVAL_MS: Final = 100
_MAX_INTERVAL_MS: Final = 3_600_000
# What clients can be chosen by.
_ATTRIBUTES: Final = frozenset(
    {
        "client_instance_id",
        "client_id",
        "client_software_name",
        "client_software_version",
        "client_source_address",
        "client_source_port",
    }
)
SUBSCRIPTION_SETTINGS: Final[dict[str, Setting]] = {
    setting.name: setting
    for setting in (
        Setting(
            _METRICS,
            "list",
            (),
            "Prefixes of the names of metrics; `*`: all of them.",
            check=lambda items: len(set(items)) == len(items),
            accepts="a list without duplicates",
        ),
        Setting(_INTERVAL, "int", PUSH_INTERVAL_MS, "How often clients push their metrics."),
        Setting(
            _MATCH,
            "list",
            (),
            "Which clients: ATTRIBUTE=REGEX; none: all of them.",
            check=lambda items: len(set(items)) == len(items),
            accepts="a list without duplicates",
        ),
    )
}


class ClientMetricsCoordinator:
    """The subscriptions of one broker, by name."""

    kinds: Final = frozenset({"client-metrics"})
    next_due_ms: Final = None

    def __init__(self) -> None:
        self.subscriptions: dict[str, Mapping[str, str]] = {}

    def change_settings(self, name: str, settings: Mapping[str, str]) -> list[Entry]:
        """Give a subscription these settings, without any remove it; ApiError if one is wrong."""
        _check(settings)
        if name not in self.subscriptions and len(self.subscriptions) >= MAX_SUBSCRIPTIONS:
            raise ApiError(
                ErrorCode.POLICY_VIOLATION,
                f"the broker holds at most {MAX_SUBSCRIPTIONS} subscriptions to client metrics",
            )
        return [(("client-metrics", name), dict(settings) or None)]

    # ---- as a coordinator ------------------------------------------------------------------

    def replay(self, key: Key, value: Any) -> None:
        """Apply one entry."""
        if value is None:
            self.subscriptions.pop(str(key[1]), None)
        else:
            self.subscriptions[str(key[1])] = value

    def reset(self) -> None:
        """Be as new: everything is about to be replayed."""
        self.subscriptions.clear()

    def begin(self, now_ms: int, elapsed_ms: int, *, lost: bool) -> Iterable[Entry]:
        """Nothing follows from a start."""
        return ()

    def topic_deleted(self, topic: Topic) -> Iterable[Entry]:
        """Subscriptions know no topics."""
        return ()

    def tick(self, now_ms: int, elapsed_ms: int) -> Iterable[Entry]:
        """Nothing is ever due."""
        return ()


def _check(settings: Mapping[str, str]) -> None:
    values = {}
    for name, text in settings.items():
        setting = SUBSCRIPTION_SETTINGS.get(name)
        if setting is None:
            raise ApiError(
                ErrorCode.INVALID_REQUEST, f"Unknown client metrics configuration: {name}"
            )
        try:
            values[name] = setting.parse(text)
        except ConfigError as error:
            raise ApiError(ErrorCode.INVALID_CONFIG, str(error)) from error
    if not _MIN_INTERVAL_MS <= values.get(_INTERVAL, PUSH_INTERVAL_MS) <= _MAX_INTERVAL_MS:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"Invalid value {values[_INTERVAL]} for {_INTERVAL}, interval must be between "
            f"{_MIN_INTERVAL_MS} and {_MAX_INTERVAL_MS} (1 hour)",
        )
    for pattern in values.get(_MATCH, ()):
        _check_pattern(pattern)


def _check_pattern(pattern: str) -> None:
    attribute, _, regex = pattern.partition("=")
    try:
        re.compile(regex.strip())
    except re.error:
        attribute = ""
    if attribute.strip() not in _ATTRIBUTES or not regex or "=" in regex:
        raise ApiError(ErrorCode.INVALID_CONFIG, f"Illegal client matching pattern: {pattern}")
