"""Schemas as Kafka Connect's JSON converter writes them, for the envelope that Debezium defines.

A field of a struct is the schema of its value with the field's name added. The order of the
entries (type, fields or items, optional, name, version, parameters, default, field) is Connect's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from penstock.capture.events.naming import schema_name
from penstock.capture.events.shape import Shape
from penstock.capture.source import Fragment
from penstock.client.table_schemas import TableColumn, ValueType

ENVELOPE_VERSION: Final = 2
BLOCK_VERSION: Final = 1
SNAPSHOT: Final = ValueType(
    "string",
    "io.debezium.data.Enum",
    1,
    {
        "allowed": "true,first,first_in_data_collection,last_in_data_collection,last,"
        "false,incremental"
    },
)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a struct of ours."""

    name: str
    type: ValueType
    optional: bool = False
    default: Any = None


_STRING: Final = ValueType("string")
_INT64: Final = ValueType("int64")
_INT32: Final = ValueType("int32")

_COMMON: Final = (
    Field("version", _STRING),
    Field("connector", _STRING),
    Field("name", _STRING),
    Field("ts_ms", _INT64),
    Field("snapshot", SNAPSHOT, True, "false"),
    Field("db", _STRING),
    Field("sequence", _STRING, True),
    Field("ts_us", _INT64, True),
    Field("ts_ns", _INT64, True),
)
_POSTGRES: Final = (
    Field("schema", _STRING),
    Field("table", _STRING),
    Field("txId", _INT64, True),
    Field("lsn", _INT64, True),
    Field("xmin", _INT64, True),
    Field("origin", _STRING, True),
    Field("origin_lsn", _INT64, True),
)
_BINLOG: Final = (
    Field("table", _STRING, True),
    Field("server_id", _INT64),
    Field("gtid", _STRING, True),
    Field("file", _STRING),
    Field("pos", _INT64),
    Field("row", _INT32),
    Field("thread", _INT64, True),
    Field("query", _STRING, True),
)
_SQLITE: Final = (Field("table", _STRING, True),)
_KINDS: Final[Mapping[str, tuple[Field, ...]]] = {
    "postgresql": _POSTGRES,
    "mysql": _BINLOG,
    "mariadb": _BINLOG,
    "sqlite": _SQLITE,
}

TRANSACTION: Final = (
    Field("id", _STRING),
    Field("total_order", _INT64),
    Field("data_collection_order", _INT64),
)


def source_fields(kind: str, source: Fragment) -> tuple[Field, ...]:
    """The fields of a source block: those that its kind has in Debezium, and what else it holds.

    What it lacks although Debezium has it is optional.
    """
    block: Mapping[str, Any] = orjson.loads(source)
    known = (*_COMMON, *_KINDS.get(kind, ()))
    fields = [
        Field(item.name, item.type, item.optional or item.name not in block, item.default)
        for item in known
    ]
    names = {item.name for item in known}
    fields += [
        Field(name, _guessed(value), True) for name, value in block.items() if name not in names
    ]
    return tuple(fields)


def _guessed(value: Any) -> ValueType:
    if isinstance(value, bool):
        return ValueType("boolean")
    if isinstance(value, int):
        return _INT64
    return ValueType("double") if isinstance(value, float) else _STRING


def source_name(kind: str) -> str:
    return f"io.debezium.connector.{kind}.Source"


def type_schema(
    column: ValueType, *, optional: bool, default: Any = None, field: str | None = None
) -> dict[str, Any]:
    """The schema of a value."""
    made: dict[str, Any] = {"type": column.name}
    if column.name == "array":
        made["items"] = type_schema(column.items or _STRING, optional=True)
    elif column.name == "struct":
        made["fields"] = [
            type_schema(inner, optional=True, field=name) for name, inner in column.fields
        ]
    made["optional"] = optional
    if column.semantic:
        made["name"] = column.semantic
        made["version"] = column.version
    if column.parameters:
        made["parameters"] = dict(column.parameters)
    if default is not None:
        made["default"] = default
    if field is not None:
        made["field"] = field
    return made


def struct_schema(
    fields: Iterable[dict[str, Any]],
    name: str,
    *,
    optional: bool,
    version: int | None = None,
    field: str | None = None,
) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "struct", "fields": list(fields), "optional": optional}
    made["name"] = name
    if version is not None:
        made["version"] = version
    if field is not None:
        made["field"] = field
    return made


def column_schemas(columns: Iterable[TableColumn]) -> list[dict[str, Any]]:
    return [
        type_schema(column.type, optional=column.optional, field=column.name) for column in columns
    ]


def block_schema(
    fields: Iterable[Field], name: str, *, optional: bool, field: str
) -> dict[str, Any]:
    made = [
        type_schema(item.type, optional=item.optional, default=item.default, field=item.name)
        for item in fields
    ]
    return struct_schema(made, name, optional=optional, version=BLOCK_VERSION, field=field)


def key_schema(shape: Shape, prefix: str) -> dict[str, Any]:
    name = schema_name(f"{prefix}.{shape.table.full_name}.Key")
    # What a key is made of is there, whatever the database says of the column.
    return struct_schema(column_schemas(shape.key_columns), name, optional=False)


def envelope_schema(shape: Shape, prefix: str, kind: str, source: Fragment) -> dict[str, Any]:
    """The schema of the whole value."""
    base = f"{prefix}.{shape.table.full_name}"
    rows = column_schemas(shape.columns)
    row_name = schema_name(f"{base}.Value")
    fields = [
        struct_schema(rows, row_name, optional=True, field="before"),
        struct_schema(rows, row_name, optional=True, field="after"),
        block_schema(
            source_fields(kind, source), source_name(kind), optional=False, field="source"
        ),
        block_schema(TRANSACTION, "event.block", optional=True, field="transaction"),
        type_schema(_STRING, optional=False, field="op"),
        *(type_schema(_INT64, optional=True, field=name) for name in ("ts_ms", "ts_us", "ts_ns")),
    ]
    name = schema_name(f"{base}.Envelope")
    return struct_schema(fields, name, optional=False, version=ENVELOPE_VERSION)
