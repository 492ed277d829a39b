"""Columns: what the database calls them, and what they are in the words of Kafka Connect.

A column is described in one way, `Native`, wherever the description comes from: the table map of
the binlog or the server's information_schema. So the two give the same types and the same values.

Choices, by options of a capture:
- `decimal`: precise (Connect's Decimal, the default), string, or double.
- `unsigned_bigint`: long (a JSON number, exact whatever its size, the default; but what is beyond
  2^63-1 fits no int64 of Avro) or precise (Connect's Decimal).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.capture.source import CaptureError
from penstock.client.table_schemas import TableColumn, ValueType

# Kinds of columns.
TINY, SHORT, INT24, LONG, LONGLONG = "tinyint", "smallint", "mediumint", "int", "bigint"
FLOAT, DOUBLE, DECIMAL, BIT, YEAR = "float", "double", "decimal", "bit", "year"
DATE, TIME, DATETIME, TIMESTAMP = "date", "time", "datetime", "timestamp"
OLD_TIME, OLD_DATETIME, OLD_TIMESTAMP = "time (old)", "datetime (old)", "timestamp (old)"
STRING, BINARY, ENUM, SET, JSON = "string", "binary", "enum", "set", "json"
GEOMETRY, POINT, UUID, INET6, INET4 = "geometry", "point", "uuid", "inet6", "inet4"

INTEGERS: Final = {TINY: 1, SHORT: 2, INT24: 3, LONG: 4, LONGLONG: 8}
# Kinds that the binlog shows as plain BINARY(n).
DISGUISED: Final = {UUID: 16, INET6: 16, INET4: 4}


@dataclass(frozen=True, slots=True)
class Native:
    """One column as the database has it."""

    name: str
    kind: str
    optional: bool = True
    unsigned: bool = False
    # DECIMAL: digits in all; BIT: bits; BINARY(n), ENUM, SET: bytes.
    size: int = 0
    # DECIMAL: digits after the point; times: digits of the fraction.
    scale: int = 0
    # Values of varying size: how many bytes say how long one is. 0: fixed size.
    prefix: int = 0
    # BINARY(n): the binlog leaves trailing zero bytes out.
    padded: bool = False
    # MariaDB's COMPRESSED columns.
    compressed: bool = False
    charset: str = ""
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Modes:
    """The user's choices of how values are written."""

    decimal: str = "precise"
    unsigned_bigint: str = "long"


_INTEGER_TYPES: Final = {
    (TINY, False): "int16",
    (TINY, True): "int16",
    (SHORT, False): "int16",
    (SHORT, True): "int32",
    (INT24, False): "int32",
    (INT24, True): "int32",
    (LONG, False): "int32",
    (LONG, True): "int64",
    (LONGLONG, False): "int64",
    (LONGLONG, True): "int64",
}
_DECIMAL: Final = "org.apache.kafka.connect.data.Decimal"
_GEOMETRY_FIELDS: Final = (("wkb", ValueType("bytes")), ("srid", ValueType("int32")))
_POINT_FIELDS: Final = (("x", ValueType("double")), ("y", ValueType("double")), *_GEOMETRY_FIELDS)
_PLAIN: Final = {
    FLOAT: ValueType("float"),
    DOUBLE: ValueType("double"),
    YEAR: ValueType("int32", "io.debezium.time.Year"),
    DATE: ValueType("int32", "io.debezium.time.Date"),
    TIME: ValueType("int64", "io.debezium.time.MicroTime"),
    OLD_TIME: ValueType("int64", "io.debezium.time.MicroTime"),
    OLD_DATETIME: ValueType("int64", "io.debezium.time.Timestamp"),
    TIMESTAMP: ValueType("string", "io.debezium.time.ZonedTimestamp"),
    OLD_TIMESTAMP: ValueType("string", "io.debezium.time.ZonedTimestamp"),
    STRING: ValueType("string"),
    BINARY: ValueType("bytes"),
    JSON: ValueType("string", "io.debezium.data.Json"),
    GEOMETRY: ValueType("struct", "io.debezium.data.geometry.Geometry", fields=_GEOMETRY_FIELDS),
    POINT: ValueType("struct", "io.debezium.data.geometry.Point", fields=_POINT_FIELDS),
    UUID: ValueType("string", "io.debezium.data.Uuid"),
    INET6: ValueType("string"),
    INET4: ValueType("string"),
}


# Kinds that have another name for people: the binlog does not tell a VARCHAR from a TEXT.
_WORDS: Final = {
    STRING: "text",
    OLD_TIME: TIME,
    OLD_DATETIME: DATETIME,
    OLD_TIMESTAMP: TIMESTAMP,
}


def is_precise_bigint(native: Native, modes: Modes) -> bool:
    return native.kind == LONGLONG and native.unsigned and modes.unsigned_bigint == "precise"


def column_type(native: Native, modes: Modes) -> ValueType:
    """What Kafka Connect calls it."""
    kind = native.kind
    if is_precise_bigint(native, modes):
        return ValueType("bytes", _DECIMAL, parameters={"scale": "0"})
    if kind in INTEGERS:
        return ValueType(_INTEGER_TYPES[kind, native.unsigned])
    if kind == DECIMAL:
        if modes.decimal != "precise":
            return ValueType(modes.decimal)
        shape = {"scale": str(native.scale), "connect.decimal.precision": str(native.size)}
        return ValueType("bytes", _DECIMAL, parameters=shape)
    if kind == BIT:
        if native.size == 1:
            return ValueType("boolean")
        return ValueType("bytes", "io.debezium.data.Bits", parameters={"length": str(native.size)})
    if kind == DATETIME:
        name = "MicroTimestamp" if native.scale > 3 else "Timestamp"
        return ValueType("int64", f"io.debezium.time.{name}")
    if kind in (ENUM, SET):
        name = "Enum" if kind == ENUM else "EnumSet"
        allowed = {"allowed": ",".join(native.values)}
        return ValueType("string", f"io.debezium.data.{name}", parameters=allowed)
    return _PLAIN[kind]


def column(native: Native, modes: Modes) -> TableColumn:
    # The same words wherever the description comes from: they are part of the published schema.
    return TableColumn(native.name, column_type(native, modes), native.optional, spelled(native))


def spelled(native: Native) -> str:
    """The type in words, as far as the binlog tells it, too."""
    kind = _WORDS.get(native.kind, native.kind)
    shape = ""
    if kind == DECIMAL:
        shape = f"({native.size},{native.scale})"
    elif kind == BIT:
        shape = f"({native.size})"
    elif kind in (TIME, DATETIME, TIMESTAMP) and native.scale:
        shape = f"({native.scale})"
    is_unsigned = native.unsigned and (kind in INTEGERS or kind == DECIMAL)
    return f"{kind}{shape}{' unsigned' if is_unsigned else ''}"


# -- from information_schema -----------------------------------------------------------------------

_ENUM_VALUE: Final = re.compile(r"'((?:[^']|'')*)'")
_TEXTS: Final = frozenset({"char", "varchar", "tinytext", "text", "mediumtext", "longtext"})
_BYTES: Final = frozenset(
    {"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob", "vector"}
)
_SHAPES: Final = frozenset(
    {"geometry", "linestring", "polygon", "multipoint", "multilinestring", "multipolygon",
     "geometrycollection", "geomcollection"}
)  # fmt: skip
_SAME: Final = frozenset({*INTEGERS, FLOAT, DOUBLE, YEAR, DATE, JSON, POINT, UUID, INET6, INET4})
_TIMES: Final = frozenset({TIME, DATETIME, TIMESTAMP})


@dataclass(frozen=True, slots=True)
class Described:
    """A row of information_schema.columns, as far as it is needed."""

    name: str
    data_type: str
    column_type: str
    nullable: bool
    precision: int = 0
    scale: int = 0
    fraction: int = 0
    charset: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


def described(what: Described, table: str) -> Native:
    """The column that information_schema describes."""
    kind, shape = what.data_type.lower(), what.column_type.lower()
    common: dict[str, Any] = {
        "name": what.name,
        "optional": what.nullable,
        "compressed": "compressed" in shape,
    }
    if kind in _SAME:
        return Native(kind=kind, unsigned="unsigned" in shape, **common)
    if kind == "decimal":
        unsigned = "unsigned" in shape
        return Native(
            kind=DECIMAL, size=what.precision, scale=what.scale, unsigned=unsigned, **common
        )
    if kind == "bit":
        return Native(kind=BIT, size=what.precision, **common)
    if kind in _TIMES:
        return Native(kind=kind, scale=what.fraction, **common)
    if kind in _TEXTS:
        return Native(kind=STRING, charset=what.charset, **common)
    if kind in _BYTES:
        return Native(kind=BINARY, **common)
    if kind in (ENUM, SET):
        values = tuple(v.replace("''", "'") for v in _ENUM_VALUE.findall(what.column_type))
        return Native(kind=kind, values=values, charset=what.charset, **common)
    if kind in _SHAPES:
        return Native(kind=GEOMETRY, **common)
    raise CaptureError(
        f"column {what.name} of {table} has the type {what.column_type}, which is not supported",
        advice=f"Leave the table out with --exclude '{table}', or change the column's type.",
    )
