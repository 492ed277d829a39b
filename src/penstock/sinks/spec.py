"""What a user says of a sink, in `penstock.toml` or in Python:

    [sinks.orders]
    topic = "shop.public.orders"
    url = "sqlite:///shop.db"          # the table is called as the sink, unless ?table= says so
    key = "id"                         # or ["region", "id"]; from the records' keys if left out
    fields = "id bigint, total decimal(10,2), placed timestamp"

Without `fields` the columns are found out: from the schema block of change events if they have one,
else from the first records; then columns that appear later are added in the same way. `format` is
"debezium" for change events as capture writes them, "json" for rows as JSON objects; found out if
left out.

Further settings: `options` of the store; `dead_letters`, the topic for what cannot be read or taken
(TOPIC.dead unless said otherwise); `max_records` of one micro-batch; `every`, the least time
between two; `max_lag`, the delay from which an alarm is raised; `alert_webhook`, the URL that is
told when an alarm begins and ends, by a POST of JSON; `time_unit` of times that are numbers ("us",
"ms" or "s"); `decimals`, "precise" for Connect's base64, or "text"; `max_dead_letters` of one
micro-batch, and `max_dead_share` of the recent records, beyond which the sink stops.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Final

from penstock.errors import ConfigError
from penstock.sinks import stores
from penstock.sinks.contract import MAX_REFUSED, Sink
from penstock.sinks.errors import MissingPackageError
from penstock.sinks.fields import UNITS, from_text

MAX_RECORDS: Final = 200_000
MAX_DEAD_SHARE: Final = 0.5
MAX_LAG_S: Final = 300.0
FORMATS: Final = ("debezium", "json")
DECIMALS: Final = ("precise", "text")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_WEB: Final = re.compile(r"https?://[^\s/]+(/\S*)?")
_EVERY: Final = re.compile(r"\d+ (milli)?(second|minute|hour)s?")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
_SETTINGS: Final = (
    "topic", "url", "key", "fields", "format", "options", "dead_letters", "max_records", "every",
    "max_lag", "time_unit", "decimals", "alert_webhook", "max_dead_letters", "max_dead_share",
    "on_schema_change",
)  # fmt: skip
# Options of stores that lead elsewhere than the rest of the URL.
_WHERE: Final = ("host", "hostaddr", "port", "dbname", "service", "options", "endpoint", "region")
# Those that may have a password in them, and are never shown.
_SECRET: Final = ("url", "alert_webhook")


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """A declared sink."""

    name: str
    topic: str
    url: str = field(repr=False)
    key: tuple[str, ...] = ()
    fields: str = ""
    format: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    dead_letters: str = ""
    max_records: int = MAX_RECORDS
    every: str = ""
    max_lag_s: float = MAX_LAG_S
    time_unit: str = ""
    decimals: str = ""
    alert_webhook: str = field(default="", repr=False)
    # More dead letters than this in one micro-batch, or than this share of the recent records.
    max_dead_letters: int = MAX_REFUSED
    max_dead_share: float = MAX_DEAD_SHARE
    # What is done when the captured table is altered: "follow", "stop" or "ignore".
    on_schema_change: str = ""

    @property
    def shown(self) -> str:
        """The store for people: without password."""
        return stores.parse(self.url, self.options, self.name).shown

    @property
    def place(self) -> tuple[str, ...]:
        """Where its rows are, as far as can be told from here: a sink with the same place is a
        second writer of the same table."""
        address = stores.parse(self.url, self.options, self.name)
        if address.scheme.startswith("webhook+"):
            # Many may call the same address; each has what it has sent in a file of its own.
            return ("webhook", address.option("state") or self.name)
        with self.sink() as sink:
            return (sink.target, *(f"{each}={address.option(each)}" for each in _WHERE))

    @property
    def letters(self) -> str:
        return self.dead_letters or f"{self.topic}.dead"

    def sink(self) -> Sink:
        """The store; nothing is asked of it yet."""
        made = stores.open_sink(self.url, self.options, name=self.name)
        made.max_refused = self.max_dead_letters
        return made


def from_config(name: str, found: Any) -> SinkSpec:
    """A sink from its table in the project file; ConfigErrors begin with the setting's path."""
    path = f"sinks.{name}"
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{path}: {name!r} is no name for a sink",
            advice="Use up to 100 letters, digits, dots, dashes and underscores.",
        )
    if not isinstance(found, Mapping):
        # What stands there may be a URL with its password.
        raise ConfigError(f"{path} must be a table of settings")
    for each in found:
        if each not in _SETTINGS:
            near = get_close_matches(str(each), _SETTINGS, 1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"{path}.{each} is no setting of a sink",
                advice=f"{hint}There are {', '.join(_SETTINGS)}.",
            )
    settings = _Settings(path, found)
    options = found.get("options", {})
    if not isinstance(options, Mapping):
        raise ConfigError(f"{path}.options must be a table of the store's options")
    spec = SinkSpec(
        name=name,
        topic=settings.text("topic", needed=True, pattern=_TOPIC),
        url=settings.text("url", needed=True),
        key=settings.names("key"),
        fields=settings.text("fields"),
        format=settings.choice("format", FORMATS),
        options=dict(options),
        dead_letters=settings.text("dead_letters", pattern=_TOPIC),
        max_records=settings.number("max_records", MAX_RECORDS),
        every=settings.text("every", pattern=_EVERY),
        max_lag_s=settings.seconds("max_lag", MAX_LAG_S),
        time_unit=settings.choice("time_unit", tuple(UNITS)),
        decimals=settings.choice("decimals", DECIMALS),
        alert_webhook=settings.text("alert_webhook", pattern=_WEB),
        max_dead_letters=settings.number("max_dead_letters", MAX_REFUSED),
        max_dead_share=settings.share("max_dead_share", MAX_DEAD_SHARE),
        on_schema_change=settings.choice("on_schema_change", ("follow", "stop", "ignore")),
    )
    _check(spec, path)
    return spec


def _check(spec: SinkSpec, path: str) -> None:
    try:
        spec.sink().close()
    except MissingPackageError:
        # Whoever is to feed it says so.
        pass
    except ConfigError as error:
        raise ConfigError(f"{path}.{_wrong(spec, error)}: {error}", advice=error.advice) from None
    if spec.fields:
        try:
            names = [each.name for each in from_text(spec.fields)]
        except ConfigError as error:
            raise ConfigError(f"{path}.fields: {error}", advice=error.advice) from None
        for each in spec.key:
            if each not in names:
                raise ConfigError(
                    f"{path}.key: {each!r} is none of the fields",
                    advice=f"They are {', '.join(names)}.",
                )


def _wrong(spec: SinkSpec, error: ConfigError) -> str:
    """The setting that a store complains of: the option without which it does not, or the URL."""
    for name in spec.options:
        others = {each: value for each, value in spec.options.items() if each != name}
        try:
            replace(spec, options=others).sink().close()
        except ConfigError as other:
            if str(other) == str(error):
                continue
        return f"options.{name}"
    return "url"


@dataclass(frozen=True, slots=True)
class _Settings:
    """Settings by name, each checked."""

    path: str
    found: Mapping[str, Any]

    def text(
        self, name: str, *, needed: bool = False, pattern: re.Pattern[str] | None = None
    ) -> str:
        value = self.found.get(name)
        if value is None:
            if needed:
                raise ConfigError(f"{self.path}.{name} is missing")
            return ""
        if not isinstance(value, str) or not value.strip():
            told = "" if name in _SECRET else f", not {value!r}"
            raise ConfigError(f"{self.path}.{name} must be a text{told}")
        if pattern is not None and not pattern.fullmatch(value):
            raise ConfigError(
                f"{self.path}.{name} cannot be {value!r}"
                if pattern is not _WEB
                else f"{self.path}.{name} must be a URL with http:// or https://"
            )
        return value

    def names(self, name: str) -> tuple[str, ...]:
        value = self.found.get(name, ())
        many = [value] if isinstance(value, str) else value
        if not isinstance(many, list | tuple) or not all(isinstance(x, str) and x for x in many):
            raise ConfigError(f"{self.path}.{name} must be a column, or a list of columns")
        return tuple(many)

    def choice(self, name: str, known: tuple[str, ...]) -> str:
        value = self.text(name)
        if value and value not in known:
            raise ConfigError(
                f"{self.path}.{name} must be one of {', '.join(known)}, not {value!r}"
            )
        return value

    def number(self, name: str, otherwise: int) -> int:
        value = self.found.get(name, otherwise)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self.path}.{name} must be a number from 1, not {value!r}")
        return value

    def share(self, name: str, otherwise: float) -> float:
        value = self.found.get(name, otherwise)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise ConfigError(
                f"{self.path}.{name} must be a number above 0, up to 1, not {value!r}",
                advice="0.5 is half of the records; with 1 the sink never stops for them.",
            )
        return float(value)

    def seconds(self, name: str, otherwise: float) -> float:
        value = self.found.get(name, otherwise)
        match = _DURATION.fullmatch(str(value)) if not isinstance(value, bool) else None
        if match is None:
            raise ConfigError(f"{self.path}.{name} must be a duration as 30s, not {value!r}")
        return float(match[1]) * _SECONDS[match[2]]
