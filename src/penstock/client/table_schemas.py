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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.client.connection import Cluster
from penstock.errors import PenstockError

SCHEMAS_TOPIC: Final = "__penstock_schemas"
# The first field of an event: the id of its schema.
SCHEMA_ID: Final = "schema_id"
JSON_SCHEMA: Final = "JSON"
# A parameter of an int64 whose values go up to 2^64-1.
UNSIGNED: Final = "unsigned"

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


@dataclass(frozen=True, slots=True)
class PublishedSchema:
    """A schema as it was published for a topic."""

    id: int
    # From 1, rising with each change of the table; one that comes again has a new version and the
    # id that it had.
    version: int
    subject: str
    schema: TableSchema


class PublishedSchemas:
    """The schemas that captures have published, read from the log as they are asked for.

    One thread uses it. It keeps some of the schemas in memory, and where the others are.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def by_id(self, id_: int) -> TableSchema:
        """The schema that an event names; UnknownSchemaError if the log does not have it."""
        raise NotImplementedError

    def latest(self, topic: str) -> PublishedSchema | None:
        """The schema of the events that are written now; None where nothing is published.

        AmbiguousSchemaError where several tables share the topic.
        """
        raise NotImplementedError

    def history(self, topic: str) -> tuple[PublishedSchema, ...]:
        """Everything that was published for a topic, of all its tables, the oldest first."""
        raise NotImplementedError


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
