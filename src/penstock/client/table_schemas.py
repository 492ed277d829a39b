"""Schemas of captured tables: what a capture publishes in the log, and readers look up by id.

Each JSON change event begins with `{"schema_id":N,`: the id of the schema that its rows were
written with. The schemas are in the compacted topic `__penstock_schemas`, in the layout of
Confluent's Schema Registry (`schemaType` JSON). The text of a schema is a JSON Schema of the event
with the annotations of Confluent's JSON Schema converter (`connect.type`, `connect.parameters`,
`title`, ...), plus an `x-penstock` object with what Connect has no word for: the table, the kind of
database, the key, the database's own names of the types.

A subject is `TOPIC-value`; where several tables may share a topic each has a subject of its own,
`TOPIC-TABLE.Envelope`. A schema stands in the log before the first event that names its id.

`PublishedSchemas` reads them. It works on the embedded broker and on Apache Kafka.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import orjson

from penstock.client.connection import Cluster
from penstock.client.errors import OffsetGoneError
from penstock.client.metadata import Metadata
from penstock.errors import PenstockError

SCHEMAS_TOPIC: Final = "__penstock_schemas"
# One partition; a table with very many columns, or labels of an enum, has a long schema.
SCHEMAS_TOPIC_CONFIG: Final[Mapping[str, str]] = {
    "cleanup.policy": "compact",
    "max.message.bytes": str(20 << 20),
}
# The first field of an event: the id of its schema.
SCHEMA_ID: Final = "schema_id"
JSON_SCHEMA, AVRO_SCHEMA = "JSON", "AVRO"
# Schemas that a reader has in memory.
CACHED_MAX: Final = 1_000
# A parameter of an int64 whose values go up to 2^64-1.
UNSIGNED: Final = "unsigned"

_EVENT_ID: Final = re.compile(rb'\{"schema_id":(\d{1,10})[,}]')
_VALUE, _ENVELOPE = "-value", ".Envelope"
_PENSTOCK: Final = "x-penstock"
_TYPE, _INDEX = "connect.type", "connect.index"
_VERSION, _PARAMETERS = "connect.version", "connect.parameters"
_NULL: Final[Mapping[str, Any]] = {"type": "null"}
# Types of Connect in JSON: the JSON type, and Connect's own name where that does not tell it.
_JSON_TYPES: Final[Mapping[str, tuple[str, str | None]]] = {
    "int8": ("integer", "int8"),
    "int16": ("integer", "int16"),
    "int32": ("integer", "int32"),
    "int64": ("integer", "int64"),
    "float": ("number", "float32"),
    "double": ("number", "float64"),
    "boolean": ("boolean", None),
    "string": ("string", None),
    "bytes": ("string", "bytes"),
    "array": ("array", None),
    "struct": ("object", None),
}
_CONNECT_TYPES: Final = {told: name for name, told in _JSON_TYPES.items()}


class SchemaError(PenstockError):
    """A published schema is missing, or is not one of a table."""


class UnknownSchemaError(SchemaError):
    """An event names a schema that the log does not have."""

    advice = (
        f"The topic {SCHEMAS_TOPIC} must be kept and moved with the topics of events. Take a new "
        "snapshot to have the tables' schemas published again: penstock capture snapshot --all"
    )


class AmbiguousSchemaError(SchemaError):
    """Several tables share a topic, so that it has no one schema."""

    def __init__(self, topic: str, tables: Iterable[str]) -> None:
        self.topic = topic
        self.tables = tuple(tables)
        super().__init__(
            f"the topic {topic} has events of several tables: {', '.join(self.tables)}",
            advice="Write the schema by hand, or give each table a topic of its own.",
        )


@dataclass(frozen=True, slots=True)
class ValueType:
    """What a column holds, in the words of Kafka Connect's schemas, as Debezium uses them."""

    # int8, int16, int32, int64, float, double, boolean, string, bytes, array, struct
    name: str
    # A semantic type such as io.debezium.time.MicroTimestamp, with its version and parameters.
    semantic: str | None = None
    version: int = 1
    parameters: Mapping[str, str] = field(default_factory=dict)
    # Of an array: what its elements are; each may be null.
    items: ValueType | None = None
    # Of a struct: its fields; each may be null.
    fields: tuple[tuple[str, ValueType], ...] = ()

    def as_json_schema(self) -> dict[str, Any]:
        """The JSON Schema of a value, as Confluent's converter writes it."""
        json_type, connect_type = _JSON_TYPES[self.name]
        schema: dict[str, Any] = {"type": json_type}
        if self.semantic is not None:
            schema["title"] = self.semantic
        if connect_type is not None:
            schema[_TYPE] = connect_type
        if self.semantic is not None or self.version != 1:
            schema[_VERSION] = self.version
        if self.parameters:
            schema[_PARAMETERS] = dict(self.parameters)
        if self.name == "array" and self.items is not None:
            schema["items"] = _optional(self.items.as_json_schema())
        if self.name == "struct":
            schema["properties"] = {
                name: _optional(kind.as_json_schema(), index)
                for index, (name, kind) in enumerate(self.fields)
            }
        return schema

    @classmethod
    def from_json_schema(cls, schema: Mapping[str, Any]) -> ValueType:
        """What `as_json_schema` has written; whether null is allowed is not part of it."""
        schema, _ = _required(schema)
        json_type, connect_type = schema.get("type"), schema.get(_TYPE)
        name = _CONNECT_TYPES.get((str(json_type), connect_type))
        if name is None:
            raise SchemaError(f"type {json_type!r} with {_TYPE} {connect_type!r} is unknown")
        items = schema.get("items")
        return cls(
            name,
            schema.get("title"),
            schema.get(_VERSION, 1),
            dict(schema.get(_PARAMETERS, {})),
            cls.from_json_schema(items) if name == "array" and items is not None else None,
            tuple(
                (field_name, cls.from_json_schema(inner))
                for field_name, inner in _properties(schema)
            )
            if name == "struct"
            else (),
        )


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table as it was at one place of the stream."""

    name: str
    type: ValueType
    optional: bool = True
    # The database's own name of the type, for people.
    native: str = ""


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A table as its events show it, between two changes of the table."""

    # `schema.name` (PostgreSQL), `database.name` (MariaDB, MySQL), `name` (SQLite).
    table: str
    # "postgresql", "mariadb", "mysql", "sqlite"
    kind: str
    # The columns of `before` and `after`, in their order.
    columns: tuple[TableColumn, ...]
    # The columns of the record's key; () if it has none.
    key: tuple[str, ...]
    # Columns of the key that rows do not show, or show changed (masked): as the key has them.
    key_only: tuple[TableColumn, ...] = ()

    @property
    def key_columns(self) -> tuple[TableColumn, ...]:
        """The columns of the record's key, with the types that they have there."""
        known = {column.name: column for column in (*self.columns, *self.key_only)}
        return tuple(known[name] for name in self.key)

    def as_json_schema(self) -> dict[str, Any]:
        """The JSON Schema of the table's events."""
        row = _object(self.columns)
        row["title"] = f"{self.table}.Value"
        about: dict[str, Any] = {"table": self.table, "kind": self.kind, "key": list(self.key)}
        about["native"] = _native(self.columns)
        if self.key_only:
            about["key_only"] = {**_object(self.key_only), "native": _native(self.key_only)}
        return {
            "type": "object",
            "title": f"{self.table}.Envelope",
            "properties": {
                SCHEMA_ID: {"type": "integer", _TYPE: "int32", _INDEX: 0},
                "before": _optional({"$ref": "#/definitions/Value"}, 1),
                "after": _optional({"$ref": "#/definitions/Value"}, 2),
                "source": {"type": "object", _INDEX: 3},
                "transaction": _optional({"type": "object"}, 4),
                "op": {"type": "string", _INDEX: 5},
                **{
                    name: _optional({"type": "integer", _TYPE: "int64"}, index)
                    for index, name in enumerate(("ts_ms", "ts_us", "ts_ns"), start=6)
                },
            },
            "definitions": {"Value": row},
            _PENSTOCK: about,
        }

    @classmethod
    def from_json_schema(cls, document: Mapping[str, Any]) -> TableSchema:
        """What `as_json_schema` has written; SchemaError if it is anything else."""
        try:
            about = document[_PENSTOCK]
            key_only = about.get("key_only")
            return cls(
                about["table"],
                about["kind"],
                _columns(document["definitions"]["Value"], about["native"]),
                tuple(about["key"]),
                () if key_only is None else _columns(key_only, key_only["native"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise SchemaError(f"not the schema of a captured table: {error!r}") from error


class SchemaRecord(NamedTuple):
    """A record of the topic of schemas: one version of a subject."""

    subject: str
    version: int
    id: int
    text: str
    # JSON or AVRO.
    kind: str

    def encode(self) -> tuple[bytes, bytes]:
        """Key and value."""
        key = {"keytype": "SCHEMA", "subject": self.subject, "version": self.version, "magic": 1}
        value: dict[str, Any] = {
            "subject": self.subject,
            "version": self.version,
            "id": self.id,
        }
        if self.kind != AVRO_SCHEMA:
            # Confluent leaves it out of what is Avro.
            value["schemaType"] = self.kind
        return orjson.dumps(key), orjson.dumps({**value, "schema": self.text, "deleted": False})

    @classmethod
    def decode(cls, value: bytes | None) -> SchemaRecord | None:
        """None for what is no schema: registries keep their settings there, too."""
        try:
            told = orjson.loads(value or b"null")
            if told.get("deleted"):
                return None
            kind = told.get("schemaType") or AVRO_SCHEMA
            return cls(told["subject"], told["version"], told["id"], told["schema"], kind)
        except (ValueError, AttributeError, KeyError):
            return None


class SchemaRecords:
    """Reads the topic of schemas, again and again, each time what has come since.

    What is not committed is read, too: schemas are written before the events that name them, and
    nobody's open transaction must hide them.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._next = 0

    def news(self) -> Iterator[tuple[int, SchemaRecord]]:
        """Offsets and records that were not told yet; nothing while there is no topic."""
        try:
            yield from self._from(self._next)
        except OffsetGoneError:
            # The topic was made anew.
            self._next = 0
            yield from self._from(0)

    def find(self, id_: int, offset: int) -> str | None:
        """The text of a schema that was at this offset; compaction may have left another copy."""
        for start in (offset, 0):
            with suppress(OffsetGoneError):
                for _, record in self._read(start):
                    if record.id == id_:
                        return record.text
        return None

    def _from(self, start: int) -> Iterator[tuple[int, SchemaRecord]]:
        for offset, record in self._read(start):
            self._next = offset + 1
            yield offset, record

    def _read(self, start: int) -> Iterator[tuple[int, SchemaRecord]]:
        if not Metadata(self._cluster).topics([SCHEMAS_TOPIC]):
            return
        # It needs pyarrow, which the base install has not.
        from penstock.client.reading import read_batches

        for _, batch in read_batches(
            self._cluster,
            SCHEMAS_TOPIC,
            start={0: start} if start else None,
            partitions=[0],
            isolation="read_uncommitted",
        ):
            offsets, values = batch.column("offset").to_pylist(), batch.column("value").to_pylist()
            for offset, value in zip(offsets, values, strict=True):
                record = SchemaRecord.decode(value)
                if record is not None:
                    yield offset, record


@dataclass(frozen=True, slots=True)
class PublishedSchema:
    """A schema as it was published for a topic."""

    id: int
    # From 1, rising with each change of the table; one that comes again has a new version and the
    # id that it had.
    version: int
    subject: str
    schema: TableSchema


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is kept in memory of each version."""

    id: int
    version: int
    subject: str
    table: str
    offset: int


class PublishedSchemas:
    """The schemas that captures have published, read from the log as they are asked for.

    One thread uses it. It keeps some of the schemas in memory, and where the others are.
    """

    def __init__(self, cluster: Cluster, *, cached_max: int = CACHED_MAX) -> None:
        self._records = SchemaRecords(cluster)
        self._cached: OrderedDict[int, TableSchema] = OrderedDict()
        self._cached_max = cached_max
        # By topic: subjects and their versions. By id: where it is in the log, and the text's hash.
        self._topics: dict[str, dict[tuple[str, int], _Entry]] = {}
        self._places: dict[int, tuple[int, int]] = {}
        # Ids that stand for several schemas: nothing is read with either.
        self._ambiguous: set[int] = set()

    def by_id(self, id_: int) -> TableSchema:
        """The schema that an event names; UnknownSchemaError if the log does not have it."""
        if id_ in self._ambiguous:
            raise _ambiguous(id_)
        found = self._cached.get(id_)
        if found is not None:
            self._cached.move_to_end(id_)
            return found
        if id_ not in self._places:
            self._look()
            if id_ in self._ambiguous:
                raise _ambiguous(id_)
        found = self._cached.get(id_) or self._read(id_)
        if found is None:
            raise UnknownSchemaError(f"schema {id_} is not in the topic {SCHEMAS_TOPIC}")
        return found

    def latest(self, topic: str) -> PublishedSchema | None:
        """The schema of the events that are written now; None where nothing is published.

        It looks into the log each time. AmbiguousSchemaError where several tables share the topic.
        """
        self._look()
        # Of each subject the last version; a table may have had another subject before.
        last: dict[str, _Entry] = {}
        for entry in self._topics.get(topic, {}).values():
            if entry.subject not in last or entry.version > last[entry.subject].version:
                last[entry.subject] = entry
        tables = sorted({entry.table for entry in last.values()})
        if len(tables) > 1:
            raise AmbiguousSchemaError(topic, tables)
        newest = max(last.values(), key=lambda entry: entry.offset, default=None)
        return None if newest is None else self._published(newest)

    def history(self, topic: str) -> tuple[PublishedSchema, ...]:
        """Everything that was published for a topic, of all its tables, the oldest first."""
        self._look()
        entries = sorted(self._topics.get(topic, {}).values(), key=lambda entry: entry.offset)
        return tuple(self._published(entry) for entry in entries)

    def _published(self, entry: _Entry) -> PublishedSchema:
        return PublishedSchema(entry.id, entry.version, entry.subject, self.by_id(entry.id))

    def _look(self) -> None:
        """Take in what was published since."""
        for offset, record in self._records.news():
            topic = topic_of_subject(record.subject)
            if record.kind != JSON_SCHEMA or topic is None:
                continue
            digest = hash(record.text)
            known = self._places.setdefault(record.id, (offset, digest))
            if known[1] != digest:
                self._ambiguous.add(record.id)
                self._cached.pop(record.id, None)
                continue
            schema = self._cached.get(record.id) or _schema_of(record.text)
            if schema is None:
                del self._places[record.id]
                continue
            self._keep(record.id, schema)
            entries = self._topics.setdefault(topic, {})
            at = record.subject, record.version
            if at not in entries or entries[at].id != record.id:
                entries[at] = _Entry(
                    record.id, record.version, record.subject, schema.table, offset
                )

    def _read(self, id_: int) -> TableSchema | None:
        """A schema that is not in memory any more."""
        place = self._places.get(id_)
        text = None if place is None else self._records.find(id_, place[0])
        schema = None if text is None else _schema_of(text)
        if schema is not None:
            self._keep(id_, schema)
        return schema

    def _keep(self, id_: int, schema: TableSchema) -> None:
        self._cached[id_] = schema
        self._cached.move_to_end(id_)
        while len(self._cached) > self._cached_max:
            self._cached.popitem(last=False)


def event_schema_id(value: bytes) -> int | None:
    """The id that an event begins with; None if it names no schema."""
    found = _EVENT_ID.match(value)
    return int(found[1]) if found else None


def subject_of(topic: str, record_name: str | None = None) -> str:
    """The subject of a topic's values; with a name, of one of the tables that share the topic."""
    if record_name is None:
        return f"{topic}{_VALUE}"
    return f"{topic}-{quote(record_name, safe='').replace('-', '%2D')}{_ENVELOPE}"


def topic_of_subject(subject: str) -> str | None:
    """The topic whose values a subject is about; None if it is about something else."""
    if subject.endswith(_VALUE):
        return subject.removesuffix(_VALUE)
    if subject.endswith(_ENVELOPE):
        return subject.rpartition("-")[0] or None
    return None


def _ambiguous(id_: int) -> SchemaError:
    return SchemaError(
        f"the topic {SCHEMAS_TOPIC} has two schemas with the id {id_}",
        advice="Was it merged from two clusters? Take a new snapshot into new topics.",
    )


def _schema_of(text: str) -> TableSchema | None:
    """None for a JSON schema that somebody else has put there."""
    try:
        return TableSchema.from_json_schema(orjson.loads(text))
    except (ValueError, SchemaError):
        return None


def _optional(schema: Mapping[str, Any], index: int | None = None) -> dict[str, Any]:
    """A schema that allows null, too."""
    made: dict[str, Any] = {"oneOf": [dict(_NULL), dict(schema)]}
    if index is not None:
        made[_INDEX] = index
    return made


def _required(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """A schema without null, and whether it allowed it."""
    choices = schema.get("oneOf")
    if choices is None:
        return schema, False
    (inner,) = [choice for choice in choices if choice != _NULL]
    return inner, True


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The fields of an object in their order."""
    return sorted(schema["properties"].items(), key=lambda item: item[1][_INDEX])


def _object(columns: Iterable[TableColumn]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for index, column in enumerate(columns):
        schema = column.type.as_json_schema()
        properties[column.name] = (
            _optional(schema, index) if column.optional else {**schema, _INDEX: index}
        )
    return {"type": "object", "properties": properties}


def _native(columns: Iterable[TableColumn]) -> dict[str, str]:
    return {column.name: column.native for column in columns}


def _columns(schema: Mapping[str, Any], native: Mapping[str, str]) -> tuple[TableColumn, ...]:
    return tuple(
        TableColumn(name, ValueType.from_json_schema(inner), _required(inner)[1], native[name])
        for name, inner in _properties(schema)
    )
