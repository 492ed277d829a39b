"""Settings of groups: Kafka's names, and the few that are Penstock's own.

`GroupSettings` is what the coordinators read: frozen, validated, with units in its names.
`GROUP_SETTINGS` is the same as a table for those who list, describe and change settings by name.
A group has settings whether or not it has members, or was ever there: they wait for it.

Kafka's bounds come from its broker's configuration; here they are wide, so that a test need not
wait for the shortest session that makes sense in production.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from penstock.errors import ConfigError
from penstock.log.config import Setting

_SECOND_MS: Final = 1_000
_HOUR_MS: Final = 3_600_000
_MAX_COUNT: Final = 1_000
_MAX_LOCKS: Final = 100_000
_MAX_STANDBYS: Final = 100
_BY_DURATION: Final = "by_duration:"
DEAD_LETTER_TOPIC: Final = "errors.deadletterqueue.topic.name"
_DURATION: Final = re.compile(
    r"P(?:(\d+)D)?(?:T(?=\d)(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?", re.IGNORECASE
)


def duration_ms(text: str) -> int | None:
    """Milliseconds of an ISO 8601 duration such as P1DT12H; None if it is none."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return round((((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000)


def _is_reset(value: str) -> bool:
    if value.startswith(_BY_DURATION):
        return duration_ms(value.removeprefix(_BY_DURATION)) is not None
    return value in ("earliest", "latest")


def _between(low: int, high: int) -> dict[str, Any]:
    return {"check": lambda v: low <= v <= high, "accepts": f"a number from {low} to {high}"}


_SESSION: Final = _between(_SECOND_MS, _HOUR_MS)
_HEARTBEAT: Final = _between(100, 10 * 60 * _SECOND_MS)
_DELAY: Final = _between(0, 10 * 60 * _SECOND_MS)

_ALL: Final = (
    Setting("consumer.session.timeout.ms", "int", 45_000,
            "How long a member of a consumer group may be silent before it is left out.",
            **_SESSION),
    Setting("consumer.heartbeat.interval.ms", "int", 5_000,
            "How often a member of a consumer group is told to report.", **_HEARTBEAT),
    Setting("share.session.timeout.ms", "int", 45_000,
            "How long a member of a share group may be silent before it is left out.",
            **_SESSION),
    Setting("share.heartbeat.interval.ms", "int", 5_000,
            "How often a member of a share group is told to report.", **_HEARTBEAT),
    Setting("streams.session.timeout.ms", "int", 45_000,
            "How long a member of a streams group may be silent before it is left out.",
            **_SESSION),
    Setting("streams.heartbeat.interval.ms", "int", 5_000,
            "How often a member of a streams group is told to report.", **_HEARTBEAT),
    Setting("streams.num.standby.replicas", "int", 0,
            "How many processes keep a copy of the state of each task, besides the one that runs "
            "it.", **_between(0, _MAX_STANDBYS)),
    Setting("streams.initial.rebalance.delay.ms", "int", 3_000,
            "How long a streams group waits for more members, from its first, before it assigns "
            "tasks.", **_DELAY),
    Setting("streams.assignment.interval.ms", "int", 1_000,
            "How long a streams group waits after it has assigned tasks, before it does so again.",
            **_DELAY),
    Setting("share.auto.offset.reset", "string", "latest",
            "Where a share group begins in a partition it has not read before: `earliest`, "
            "`latest`, or `by_duration:` and how far back, such as by_duration:PT1H.",
            _is_reset, "earliest, latest or by_duration:PnDTnHnMnS"),
    Setting("share.isolation.level", "string", "read_uncommitted",
            "Whether records of a transaction are delivered only once it is committed.",
            lambda v: v in ("read_committed", "read_uncommitted"),
            "read_committed or read_uncommitted"),
    Setting("share.record.lock.duration.ms", "int", 30_000,
            "How long a consumer has for a record before it is delivered to another.",
            **_between(100, _HOUR_MS)),
    Setting("share.delivery.count.limit", "int", 5,
            "How often a record is delivered before it is given up.", **_between(1, _MAX_COUNT)),
    Setting("share.partition.max.record.locks", "int", 2_000,
            "How many records of a partition may be in the hands of consumers at once.",
            **_between(1, _MAX_LOCKS)),
    Setting("share.renew.acknowledge.enable", "bool", True,
            "Whether a consumer may ask for more time for a record."),
    Setting("share.ordered.by.key", "bool", False,
            "Deliver a record only when the one before it with the same key is finished. "
            "Penstock's own."),
    Setting(DEAD_LETTER_TOPIC, "string", "",
            "The topic that records go to which were rejected or delivered too often, not one "
            "that the group reads; empty: they are dropped from the queue, and stay in their "
            "topic."),
    Setting("errors.deadletterqueue.copy.record.enable", "bool", True,
            "Whether a dead letter holds the record's key, value and headers, or only says "
            "where it is."),
)  # fmt: skip

GROUP_SETTINGS: Final[dict[str, Setting]] = {setting.name: setting for setting in _ALL}


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings of one group."""

    consumer_session_timeout_ms: int = 45_000
    consumer_heartbeat_interval_ms: int = 5_000
    share_session_timeout_ms: int = 45_000
    share_heartbeat_interval_ms: int = 5_000
    streams_session_timeout_ms: int = 45_000
    streams_heartbeat_interval_ms: int = 5_000
    streams_num_standby_replicas: int = 0
    streams_initial_rebalance_delay_ms: int = 3_000
    streams_assignment_interval_ms: int = 1_000
    share_auto_offset_reset: str = "latest"
    share_isolation_level: str = "read_uncommitted"
    share_record_lock_duration_ms: int = 30_000
    share_delivery_count_limit: int = 5
    share_partition_max_record_locks: int = 2_000
    share_renew_acknowledge_enable: bool = True
    share_ordered_by_key: bool = False
    errors_deadletterqueue_topic_name: str = ""
    errors_deadletterqueue_copy_record_enable: bool = True

    @property
    def read_committed(self) -> bool:
        return self.share_isolation_level == "read_committed"

    @property
    def reset_back_ms(self) -> int | None:
        """How far back a share group begins, if it is to begin at a time."""
        reset = self.share_auto_offset_reset
        if not reset.startswith(_BY_DURATION):
            return None
        return duration_ms(reset.removeprefix(_BY_DURATION))


DEFAULT_SETTINGS: Final = GroupSettings()


def group_settings(overrides: Mapping[str, str]) -> GroupSettings:
    """The settings of a group from what was set for it; ConfigError if that is not acceptable."""
    return _group_settings(tuple(sorted(overrides.items()))) if overrides else DEFAULT_SETTINGS


def _known(name: str) -> Setting:
    setting = GROUP_SETTINGS.get(name)
    if setting is None:
        close = get_close_matches(name, GROUP_SETTINGS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"there is no group setting {name!r}{hint}")
    return setting


def _group_settings(overrides: tuple[tuple[str, str], ...]) -> GroupSettings:
    values = {name.replace(".", "_"): _known(name).parse(text) for name, text in overrides}
    settings = GroupSettings(**values)
    for kind in ("consumer", "share", "streams"):
        session_ms = getattr(settings, f"{kind}_session_timeout_ms")
        if session_ms <= getattr(settings, f"{kind}_heartbeat_interval_ms"):
            raise ConfigError(
                f"{kind}.session.timeout.ms must be greater than {kind}.heartbeat.interval.ms"
            )
    return settings
