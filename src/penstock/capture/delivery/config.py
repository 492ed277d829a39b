"""The settings of a capture, as they stand in `[capture.NAME]` of a penstock.toml.

    [capture.shop]
    url = "postgresql://capture@localhost/shop"
    include = ["public.*"]
    partitions = 4

`CaptureConfig.from_mapping` makes one of such a table and complains of whatever it cannot take,
naming the key and what it may be; nothing is touched before that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from penstock.capture.delivery.fields import Fields
from penstock.capture.events import filters
from penstock.capture.events.settings import (
    ALGORITHMS,
    AVRO,
    DELETES,
    ENVELOPE,
    ERROR,
    FILL,
    HEADER,
    JSON,
    MARK,
    OPERATIONS,
    SKIP,
    WARN,
    EventSettings,
    Hash,
    OutboxSettings,
    Placement,
    Route,
)
from penstock.capture.source import CaptureError, SourceSettings
from penstock.errors import ConfigError

INITIAL, INITIAL_ONLY, NO_DATA = "initial", "initial_only", "no_data"
WHEN_NEEDED, ALWAYS = "when_needed", "always"
SNAPSHOT_MODES: Final = (INITIAL, INITIAL_ONLY, NO_DATA, WHEN_NEEDED, ALWAYS)
CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")
_PREFIX: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
_HOUR_MS: Final = 3_600_000
_UNSAFE_INTERNAL: Final = "__penstock"


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """How topics are made that are not there yet."""

    partitions: int = 1
    # -1: the broker's default.
    replication: int = -1
    # Further settings of topics of tables, such as retention.ms.
    config: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SnapshotSettings:
    """What is read of tables as they are, beside their changes."""

    mode: str = INITIAL
    # Tables that appear later are read, too, while the stream goes on.
    new_tables: bool = True
    # A condition in the database's SQL, by table.
    where: Mapping[str, str] = field(default_factory=dict)
    # Rows of the first chunk of an incremental snapshot; later ones adapt to the time they take.
    chunk_rows: int = 2_048
    chunk_rows_max: int = 65_536
    chunk_ms: int = 500


@dataclass(frozen=True, slots=True)
class DeliverySettings:
    """How changes are put together into transactions of the log."""

    # Each source transaction exactly once; else at least once.
    transactions: bool = True
    # A source transaction must be written within this time; brokers allow 15 minutes at most
    # unless their transaction.max.timeout.ms says otherwise.
    transaction_timeout_ms: int = 900_000
    # A log transaction is ended when it has so much, or when nothing more is there; where changes
    # come so fast that waiting is worth it, when it has waited for so long.
    batch_changes: int = 20_000
    batch_bytes: int = 16 << 20
    linger_ms: int = 10
    # What may wait between the database and the log.
    buffer_bytes: int = 32 << 20
    codec: str = "lz4"
    # Positions without changes are recorded this often.
    position_ms: int = 1_000
    # How often others are heard and told.
    control_ms: int = 250
    status_ms: int = 1_000
    # The first and the longest pause before another attempt.
    retry_ms: int = 200
    retry_max_ms: int = 30_000


@dataclass(frozen=True, slots=True)
class CaptureConfig:
    """All settings of one capture."""

    name: str
    source: SourceSettings
    events: EventSettings
    snapshot: SnapshotSettings = SnapshotSettings()
    topics: TopicSettings = TopicSettings()
    delivery: DeliverySettings = DeliverySettings()
    # Where files are kept for as long as it runs; None: the system's place for temporary ones.
    state_dir: str | None = None

    @property
    def transactional_id(self) -> str:
        return f"penstock-capture-{self.name}"

    @classmethod
    def from_mapping(cls, name: str, data: Mapping[str, Any]) -> Self:
        """The settings that stand in a table; ConfigError if they are not acceptable."""
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot be the name of a capture",
                advice="Small letters, digits and _, beginning with a letter, at most 40: slots "
                "and triggers in the database are named after it.",
            )
        fields = Fields(f"capture.{name}", data)
        prefix = fields.text("prefix", name)
        if not _PREFIX.fullmatch(prefix) or prefix.startswith(_UNSAFE_INTERNAL):
            raise fields.wrong("prefix", "letters, digits, '.', '_' and '-', at most 100")
        snapshot_workers = fields.number("snapshot_workers", 2, 1, 64)
        made = cls(
            name,
            _source(name, prefix, fields, snapshot_workers),
            _events(prefix, fields),
            _snapshot(fields),
            _topics(fields),
            _delivery(fields),
            fields.optional_text("state_dir") or None,
        )
        fields.done()
        return made


def _source(name: str, prefix: str, fields: Fields, workers: int) -> SourceSettings:
    return SourceSettings(
        name=name,
        url=fields.text("url"),
        include=fields.texts("include", ("*",)),
        exclude=fields.texts("exclude"),
        topic_prefix=prefix,
        idle_ms=fields.number("idle_ms", 100, 1, 60_000),
        heartbeat_ms=fields.number("heartbeat_ms", 10_000, 0, _HOUR_MS),
        snapshot_workers=workers,
        options=fields.table("options", _plain),
    )


def _events(prefix: str, fields: Fields) -> EventSettings:
    columns = fields.inner("columns") or Fields(fields.path("columns"), {})
    outbox = fields.inner("outbox")
    skip = fields.texts("skip", ("t",))
    if not set(skip) <= {*OPERATIONS, "none"}:
        raise fields.wrong("skip", "a list of " + ", ".join(OPERATIONS))
    made = EventSettings(
        prefix=prefix,
        format=fields.choice("format", JSON, (JSON, AVRO)),
        schemas=fields.flag("schemas", False),
        publish_schemas=fields.flag("publish_schemas", True),
        tombstones=fields.flag("tombstones", True),
        skip=frozenset(skip) - {"none"},
        truncates=fields.choice("truncates", DELETES, (DELETES, SKIP)),
        unavailable=fields.choice("unavailable", MARK, (MARK, FILL)),
        keys=fields.table("keys", _names),
        column_include=columns.texts("include"),
        column_exclude=columns.texts("exclude"),
        mask=columns.table("mask", _mask),
        hash=columns.table("hash", _hash),
        truncate=columns.table("truncate", _length),
        filters=fields.table("filters", _filter),
        routes=tuple(_route(item) for item in fields.inners("routes")),
        topics=fields.table("topics", _plain),
        transaction_metadata=fields.flag("transaction_metadata", False),
        outbox=_outbox(outbox) if outbox else None,
    )
    columns.done()
    if made.schemas and made.format == AVRO:
        raise ConfigError(
            f'{fields.path("schemas")} goes with format = "json" only',
            advice="Avro events name their schema by its id; leave schemas out.",
        )
    if made.unavailable == FILL and made.format == AVRO:
        raise ConfigError(
            f'{fields.path("unavailable")} = "fill" goes with format = "json" only',
            advice='Set unavailable = "mark", or have PostgreSQL log whole rows '
            "(REPLICA IDENTITY FULL).",
        )
    return made


def _snapshot(fields: Fields) -> SnapshotSettings:
    mode = fields.choice("snapshot", INITIAL, SNAPSHOT_MODES)
    return SnapshotSettings(
        mode=mode,
        # Who wants no rows of tables that are there wants none of later ones, unless told.
        new_tables=fields.flag("snapshot_new_tables", mode != NO_DATA),
        where=fields.table("snapshot_where", _plain),
        chunk_rows=fields.number("chunk_rows", 2_048, 1, 1_000_000),
        chunk_rows_max=fields.number("chunk_rows_max", 65_536, 1, 1_000_000),
        chunk_ms=fields.number("chunk_ms", 500, 10, 60_000),
    )


def _topics(fields: Fields) -> TopicSettings:
    return TopicSettings(
        partitions=fields.number("partitions", 1, 1, 1_000),
        replication=fields.number("replication", -1, -1, 15),
        config=fields.table("topic_config", _plain),
    )


def _delivery(fields: Fields) -> DeliverySettings:
    return DeliverySettings(
        transactions=fields.flag("transactions", True),
        transaction_timeout_ms=fields.number("transaction_timeout_ms", 900_000, 1_000, _HOUR_MS),
        batch_changes=fields.number("batch_changes", 20_000, 1, 1_000_000),
        batch_bytes=fields.number("batch_bytes", 16 << 20, 1, 1 << 30),
        linger_ms=fields.number("linger_ms", 10, 0, 60_000),
        buffer_bytes=fields.number("buffer_bytes", 32 << 20, 1 << 10, 1 << 32),
        codec=fields.choice("codec", "lz4", CODECS),
        position_ms=fields.number("position_ms", 1_000, 0, _HOUR_MS),
        control_ms=fields.number("control_ms", 250, 10, 60_000),
        status_ms=fields.number("status_ms", 1_000, 10, 60_000),
        retry_ms=fields.number("retry_ms", 200, 1, 60_000),
        retry_max_ms=fields.number("retry_max_ms", 30_000, 1, _HOUR_MS),
    )


def _outbox(fields: Fields) -> OutboxSettings:
    plain = OutboxSettings("x")
    made = OutboxSettings(
        table=fields.text("table"),
        id=fields.text("id", plain.id),
        key=fields.text("key", plain.key),
        route_by=fields.text("route_by", plain.route_by),
        payload=fields.text("payload", plain.payload),
        topic=fields.text("topic", plain.topic),
        additional=tuple(_placement(fields, item) for item in fields.texts("additional")),
        expand_json=fields.flag("expand_json", False),
        tombstone_on_empty=fields.flag("tombstone_on_empty", False),
        on_update=fields.choice("on_update", WARN, (WARN, ERROR)),
    )
    fields.done()
    return made


def _placement(fields: Fields, text: str) -> Placement:
    column, _, rest = text.partition(":")
    place, _, alias = rest.partition(":")
    if not column or place not in {HEADER, ENVELOPE}:
        raise fields.wrong("additional", "a list of COLUMN:header:ALIAS or COLUMN:envelope:ALIAS")
    return Placement(column, place, alias or column)


def _route(fields: Fields) -> Route:
    text, replacement = fields.text("pattern"), fields.text("replacement")
    fields.done()
    try:
        pattern = re.compile(text)
        # Groups that the pattern does not have are found here, not in the middle of a stream.
        re.compile(f"(?:{text})|").sub(replacement, "")
    except (re.error, IndexError) as error:
        raise ConfigError(
            f"{fields.path('pattern')} {text!r} with replacement {replacement!r}: {error}",
            advice="A regular expression of Python, with \\1 for its first group.",
        ) from error
    return Route(pattern, replacement)


def _plain(path: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{path} must be a text, not {value!r}")
    return value


def _names(path: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{path} must be a list of columns, not {value!r}")
    return tuple(value)


def _mask(path: str, value: Any) -> str | int:
    if isinstance(value, str) or (type(value) is int and 0 <= value <= 1_000):
        return value
    raise ConfigError(f"{path} must be a text, or a number of asterisks up to 1000, not {value!r}")


def _length(path: str, value: Any) -> int:
    if type(value) is int and 0 <= value <= 1 << 30:
        return value
    raise ConfigError(f"{path} must be a number of characters, not {value!r}")


def _hash(path: str, value: Any) -> Hash:
    if isinstance(value, str):
        value = {"salt": value}
    fields = Fields(path, value)
    algorithm = fields.text("algorithm", "sha256").lower().replace("-", "")
    if algorithm not in ALGORITHMS:
        raise fields.wrong("algorithm", "one of " + ", ".join(ALGORITHMS))
    salt = fields.optional_text("salt")
    fields.done()
    return Hash(algorithm, salt)


def _filter(path: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{path} must be an expression, not {value!r}")
    try:
        filters.parse(value, path)
    except CaptureError as error:
        raise ConfigError(str(error), advice=error.advice) from error
    return value
