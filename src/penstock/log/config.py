"""Topic settings: Kafka's names, Kafka's defaults, and the few that are Penstock's own.

`TopicConfig` is what the engine reads: frozen, validated, with units in its names. `SETTINGS`
is the same as a table for those who list, describe and change settings by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Final, Literal

from penstock.errors import ConfigError
from penstock.records import compression

Durability = Literal["disk", "os", "memory"]

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
NO_LIMIT: Final = -1
_MAX_LONG: Final = 0x7FFFFFFFFFFFFFFF
_MAX_INT: Final = 0x7FFFFFFF
DISCARD_OLDEST: Final = "discard-oldest"
# As batches come.
PRODUCER: Final = "producer"
# What compression.type calls the codecs.
_STORED_CODECS: Final = {
    "uncompressed": compression.NONE,
    "gzip": compression.GZIP,
    "snappy": compression.SNAPPY,
    "lz4": compression.LZ4,
    "zstd": compression.ZSTD,
}
# Each of them is asked for its place on every commit.
MAX_OVERFLOW_GROUPS: Final = 100


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as users see it: its name, kind, default and meaning."""

    name: str
    kind: Literal["int", "long", "double", "bool", "string", "list"]
    default: Any
    doc: str
    check: Callable[[Any], bool] = field(default=lambda _value: True)
    accepts: str = ""

    def parse(self, text: str) -> Any:
        """The value that `text` stands for; ConfigError with what is accepted otherwise."""
        try:
            value = _PARSERS[self.kind](text.strip())
        except ValueError:
            wanted = self.accepts or _KINDS[self.kind]
            raise ConfigError(f"{self.name}={text!r} is not accepted; expected {wanted}") from None
        if not self.check(value):
            wanted = self.accepts or f"a valid {self.kind}"
            raise ConfigError(f"{self.name}={text!r} is not accepted; expected {wanted}")
        return value

    def render(self, value: Any) -> str:
        if self.kind == "bool":
            return "true" if value else "false"
        if self.kind == "list":
            return ",".join(value)
        return str(value)


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _parse_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


_PARSERS: Final[dict[str, Callable[[str], Any]]] = {
    "int": int,
    "long": int,
    "double": float,
    "bool": _parse_bool,
    "string": str,
    "list": _parse_list,
}


_KINDS: Final = {
    "int": "a whole number",
    "long": "a whole number",
    "double": "a number",
    "bool": "true or false",
    "string": "a word",
    "list": "words with commas between them",
}


def _between(low: int, high: int) -> dict[str, Any]:
    return {"check": lambda v: low <= v <= high, "accepts": f"a number from {low} to {high}"}


def _one_of(*names: str) -> dict[str, Any]:
    return {"check": lambda v: v in names, "accepts": "one of " + ", ".join(names)}


def _gzip_level(value: int) -> bool:
    return value == -1 or 1 <= value <= 9


def _cleanup(value: tuple[str, ...]) -> bool:
    return bool(value) and set(value) <= {"delete", "compact"}


_ALL: Final = (
    Setting("cleanup.policy", "list", ("delete",),
            "What happens to old records: `delete` drops whole segments by age or size, "
            "`compact` keeps the latest record of each key; both may be combined.",
            _cleanup, "delete, compact or both"),
    Setting("retention.ms", "long", 7 * DAY_MS,
            "How long records are kept, counted from a segment's newest record; -1 for ever.",
            **_between(-1, _MAX_LONG)),
    Setting("retention.bytes", "long", NO_LIMIT,
            "How many bytes a partition keeps before its oldest segments go; -1 without limit.",
            **_between(-1, _MAX_LONG)),
    Setting("segment.bytes", "int", 256 << 20,
            "A segment that would grow past this is closed and a new one opened.",
            **_between(1024, _MAX_INT)),
    Setting("segment.ms", "long", 7 * DAY_MS,
            "A segment that spans more time than this is closed and a new one opened.",
            **_between(1, _MAX_LONG)),
    Setting("index.interval.bytes", "int", 4096,
            "About every how many bytes the offset index gets an entry.", **_between(0, _MAX_INT)),
    Setting("max.message.bytes", "int", 1_048_588,
            "The largest record batch that a producer may send.", **_between(0, _MAX_INT)),
    Setting("message.timestamp.type", "string", "CreateTime",
            "Whether a record carries its producer's time or the log's.",
            **_one_of("CreateTime", "LogAppendTime")),
    Setting("message.timestamp.before.max.ms", "long", _MAX_LONG,
            "How far a producer's timestamp may lie in the past.", **_between(0, _MAX_LONG)),
    Setting("message.timestamp.after.max.ms", "long", HOUR_MS,
            "How far a producer's timestamp may lie in the future.", **_between(0, _MAX_LONG)),
    Setting("min.cleanable.dirty.ratio", "double", 0.5,
            "Compaction starts when this share of the log's bytes has not been compacted.",
            lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    Setting("min.compaction.lag.ms", "long", 0,
            "A record stays uncompacted at least this long.", **_between(0, _MAX_LONG)),
    Setting("max.compaction.lag.ms", "long", _MAX_LONG,
            "A record is compacted at the latest after this long.", **_between(1, _MAX_LONG)),
    Setting("delete.retention.ms", "long", DAY_MS,
            "How long a tombstone stays after compaction has met it.", **_between(0, _MAX_LONG)),
    Setting("file.delete.delay.ms", "long", 60_000,
            "Accepted for compatibility: readers keep removed files open as long as they need.",
            **_between(0, _MAX_LONG)),
    Setting("flush.messages", "long", _MAX_LONG,
            "Accepted for compatibility: `durability` decides when records are synced.",
            **_between(1, _MAX_LONG)),
    Setting("flush.ms", "long", _MAX_LONG,
            "Accepted for compatibility: `durability` decides when records are synced.",
            **_between(0, _MAX_LONG)),
    Setting("compression.type", "string", PRODUCER,
            "How batches are stored: `producer` as their producer compressed them, otherwise in "
            "this codec. Batches that came in another one are compressed anew.",
            **_one_of(PRODUCER, *_STORED_CODECS)),
    Setting("compression.gzip.level", "int", -1,
            "The level of compression.type=gzip; -1: the codec's default.", _gzip_level,
            "-1 or a number from 1 to 9"),
    Setting("compression.lz4.level", "int", 9,
            "The level of compression.type=lz4.", **_between(1, 17)),
    Setting("compression.zstd.level", "int", 3,
            "The level of compression.type=zstd.", **_between(-131_072, 22)),
    Setting("min.insync.replicas", "int", 1,
            "There is one replica; the embedded broker accepts only 1.", **_between(1, 1)),
    Setting("unclean.leader.election.enable", "bool", False,
            "Accepted for compatibility: there is one replica, and nothing to elect."),
    Setting("preallocate", "bool", False,
            "Accepted for compatibility: segments grow as they are written."),
    Setting("segment.jitter.ms", "long", 0,
            "Accepted for compatibility: segments are closed when they are due.",
            **_between(0, _MAX_LONG)),
    Setting("segment.index.bytes", "int", 10 << 20,
            "Accepted for compatibility: an index is as large as its segment needs.",
            **_between(4, _MAX_INT)),
    Setting("leader.replication.throttled.replicas", "list", (),
            "Accepted for compatibility: nothing is replicated."),
    Setting("follower.replication.throttled.replicas", "list", (),
            "Accepted for compatibility: nothing is replicated."),
    Setting("remote.storage.enable", "bool", False,
            "Move closed segments to the broker's archive; they stay readable from there."),
    Setting("local.retention.ms", "long", -2,
            "How long an archived segment also stays on the local disk; -2: as retention.ms.",
            **_between(-2, _MAX_LONG)),
    Setting("local.retention.bytes", "long", -2,
            "How many bytes stay local once archived; -2: as retention.bytes.",
            **_between(-2, _MAX_LONG)),
    Setting("durability", "string", "disk",
            "When acks=all is answered: `disk` after fsync (survives power loss), `os` once the "
            "operating system has it (survives a process crash), `memory` never on disk.",
            **_one_of("disk", "os", "memory")),
    Setting("errors.deadletterqueue.group.enable", "bool", True,
            "Whether share groups may write their dead letters here."),
    Setting("overflow", "string", DISCARD_OLDEST,
            "What happens at the bound of retention.bytes or retention.ms: `discard-oldest` drops "
            "the oldest segments; `block` makes producers wait, and `reject` answers them with a "
            "retriable error, while a group of overflow.groups still needs the data.",
            **_one_of(DISCARD_OLDEST, "block", "reject")),
    Setting("overflow.groups", "list", (),
            "The groups, by name, whose unread records are not dropped with `block` and `reject`.",
            lambda v: len(v) <= MAX_OVERFLOW_GROUPS, f"at most {MAX_OVERFLOW_GROUPS} names"),
)  # fmt: skip

SETTINGS: Final[dict[str, Setting]] = {setting.name: setting for setting in _ALL}

# Kafka's name of the broker setting that is a topic setting's default, where it is not the same.
_BROKER_NAMES: Final = {
    **{
        f"log.{name}": name
        for name in (
            "segment.bytes", "index.interval.bytes", "retention.bytes", "retention.ms",
            "cleanup.policy", "preallocate", "message.timestamp.type",
            "message.timestamp.before.max.ms", "message.timestamp.after.max.ms",
        )
    },
    **{
        f"log.cleaner.{name}": name
        for name in ("delete.retention.ms", "min.compaction.lag.ms", "max.compaction.lag.ms")
    },
    "log.roll.ms": "segment.ms",
    "log.roll.jitter.ms": "segment.jitter.ms",
    "log.index.size.max.bytes": "segment.index.bytes",
    "log.flush.interval.messages": "flush.messages",
    "log.flush.interval.ms": "flush.ms",
    "log.segment.delete.delay.ms": "file.delete.delay.ms",
    "log.cleaner.min.cleanable.ratio": "min.cleanable.dirty.ratio",
    "log.local.retention.ms": "local.retention.ms",
    "log.local.retention.bytes": "local.retention.bytes",
    "message.max.bytes": "max.message.bytes",
}  # fmt: skip
_SAME_NAMES: Final = (
    "compression.type", "compression.gzip.level", "compression.lz4.level",
    "compression.zstd.level", "min.insync.replicas", "unclean.leader.election.enable",
)  # fmt: skip
# Topic settings by the names under which a broker has their defaults, as Kafka names them.
TOPIC_SETTING_OF: Final[dict[str, str]] = {**_BROKER_NAMES, **{name: name for name in _SAME_NAMES}}


# What is held in memory is bounded, and let go in small pieces, unless the topic says otherwise.
_MEMORY_BOUNDS: Final = {"retention.bytes": 128 << 20, "segment.bytes": 16 << 20}
# A full topic makes room by whole segments: unless it says otherwise it has several.
_GUARDED_SEGMENTS: Final = 8
_SMALLEST_GUARDED_SEGMENT: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The settings of one topic as the engine uses them."""

    cleanup_policy: tuple[str, ...] = ("delete",)
    retention_ms: int = 7 * DAY_MS
    retention_bytes: int = NO_LIMIT
    segment_bytes: int = 256 << 20
    segment_ms: int = 7 * DAY_MS
    index_interval_bytes: int = 4096
    max_message_bytes: int = 1_048_588
    message_timestamp_type: str = "CreateTime"
    message_timestamp_before_max_ms: int = _MAX_LONG
    message_timestamp_after_max_ms: int = HOUR_MS
    min_cleanable_dirty_ratio: float = 0.5
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = _MAX_LONG
    delete_retention_ms: int = DAY_MS
    remote_storage_enable: bool = False
    local_retention_ms: int = -2
    local_retention_bytes: int = -2
    durability: Durability = "disk"
    compression_type: str = PRODUCER
    compression_gzip_level: int = -1
    compression_lz4_level: int = 9
    compression_zstd_level: int = 3
    overflow: str = DISCARD_OLDEST
    overflow_groups: tuple[str, ...] = ()

    @property
    def compacted(self) -> bool:
        return "compact" in self.cleanup_policy

    @property
    def deleted_by_age(self) -> bool:
        return "delete" in self.cleanup_policy

    @property
    def append_time(self) -> bool:
        return self.message_timestamp_type == "LogAppendTime"

    @property
    def codec(self) -> int | None:
        """The codec in which batches are stored; None: in that of their producer."""
        return _STORED_CODECS.get(self.compression_type)

    @property
    def codec_level(self) -> int | None:
        """How thoroughly it compresses; None where that cannot be said."""
        match self.codec:
            case compression.GZIP:
                return None if self.compression_gzip_level < 0 else self.compression_gzip_level
            case compression.LZ4:
                return self.compression_lz4_level
            case compression.ZSTD:
                return self.compression_zstd_level
        return None

    @property
    def guarded(self) -> bool:
        """Whether records stay until the groups of `overflow_groups` have read them."""
        return self.overflow != DISCARD_OLDEST


def _like(name: str) -> str:
    close = get_close_matches(name, SETTINGS, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def parse_settings(overrides: Mapping[str, str]) -> dict[str, Any]:
    """Values by name; ConfigError for an unknown name or a value that is not accepted."""
    values: dict[str, Any] = {}
    for name, text in overrides.items():
        setting = SETTINGS.get(name)
        if setting is None:
            raise ConfigError(
                f"there is no topic setting {name!r}{_like(name)}",
                advice="`penstock topics describe TOPIC --all` lists them.",
            )
        values[name] = setting.parse(text)
    if values.get("remote.storage.enable") and "compact" in values.get("cleanup.policy", ()):
        raise ConfigError("a compacted topic cannot be archived: its segments are rewritten")
    if values.get("remote.storage.enable") and values.get("durability") == "memory":
        raise ConfigError("a topic in memory cannot be archived")
    if "compact" in values.get("cleanup.policy", ()) and values.get("durability") == "memory":
        raise ConfigError(
            "a topic in memory cannot be compacted: that is done by another process, on files",
            advice="Use durability=os or disk.",
        )
    return values


def topic_config(overrides: Mapping[str, str], defaults: TopicConfig | None = None) -> TopicConfig:
    """The settings of a topic from its overrides on top of the broker's defaults."""
    base = defaults or TopicConfig()
    values = parse_settings(overrides)
    if values.get("durability", base.durability) == "memory":
        values = {**_MEMORY_BOUNDS, **values}
        if values["retention.bytes"] < 0:
            raise ConfigError("a topic in memory needs a bound: retention.bytes cannot be -1")
    changes = {
        attribute: values[name]
        for name in values
        if (attribute := name.replace(".", "_")) in TopicConfig.__dataclass_fields__
    }
    config = _replace(base, changes)
    if config.guarded:
        _check_guarded(config)
        if "segment.bytes" not in overrides and config.retention_bytes > 0:
            piece = max(config.retention_bytes // _GUARDED_SEGMENTS, _SMALLEST_GUARDED_SEGMENT)
            config = replace(config, segment_bytes=min(config.segment_bytes, piece))
    return config


def _check_guarded(config: TopicConfig) -> None:
    """ConfigError if a topic cannot wait for its groups."""
    how = f"overflow={config.overflow}"
    if not config.overflow_groups:
        raise ConfigError(
            f"{how} needs overflow.groups",
            advice="Name the groups whose unread records must not be dropped.",
        )
    if not config.deleted_by_age:
        raise ConfigError(
            f"{how} is not for a topic that is only compacted: nothing is dropped at a bound there",
            advice="Add delete to cleanup.policy, or leave overflow out.",
        )
    if config.retention_bytes < 0 and config.retention_ms < 0:
        raise ConfigError(
            f"{how} needs a bound: retention.bytes and retention.ms are both -1",
            advice="Set retention.bytes.",
        )
    if not config.retention_bytes or not config.retention_ms:
        raise ConfigError(f"{how} needs room: neither retention.bytes nor retention.ms can be 0")


def _replace(base: TopicConfig, changes: Mapping[str, Any]) -> TopicConfig:
    current = {name: getattr(base, name) for name in TopicConfig.__dataclass_fields__}
    return TopicConfig(**{**current, **changes})
