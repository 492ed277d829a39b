"""What a column of a PostgreSQL type is in Debezium's words, and the code that makes its JSON.

`coding` knows a type by its name in `pg_catalog`, or by that of a well-known extension. Domains are
what they are made of, arrays hold what their elements are. Everything else (composite types,
ranges, geometric types but `point`, PostGIS, unknown extensions) is the string that PostgreSQL
itself prints: never another type than it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import orjson

from penstock.capture.postgres import values
from penstock.capture.postgres.values import Convert
from penstock.client.table_schemas import ValueType
from penstock.errors import ConfigError

_DECIMAL_MODES: Final = ("precise", "string", "double")
_INTERVAL_MODES: Final = ("numeric", "string")


@dataclass(frozen=True, slots=True)
class TypeModes:
    """How types with more than one form are written; the names are Debezium's settings."""

    decimal: str = "precise"
    interval: str = "string"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("decimal.handling.mode", self.decimal, _DECIMAL_MODES),
            ("interval.handling.mode", self.interval, _INTERVAL_MODES),
        ):
            if value not in known:
                raise ConfigError(f"{name}={value} is unknown", advice=f"One of {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class NativeType:
    """A row of pg_type, and what it refers to."""

    oid: int
    schema: str
    name: str
    # b base, c composite, d domain, e enum, p pseudo, r range, m multirange
    kind: str = "b"
    # Of an array its elements', of a domain its base type's.
    of: int = 0
    is_array: bool = False
    delimiter: str = ","
    typmod: int = -1
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Coding:
    """The type, and how its JSON is made: an expression of `{v}`, or a function."""

    type: ValueType
    # Looks its value up in `labels`; a label that is not there means that the type has grown.
    labels: Mapping[bytes, bytes] | None = None
    convert: Convert = values.text
    inline: str = ""


_STRING: Final = Coding(ValueType("string"), inline="text({v})")
_INLINE_FLOAT: Final = "({v} if {v}[-1] < 58 else floating({v}))"


def _plain(name: str) -> Coding:
    return Coding(ValueType(name), convert=bytes, inline="{v}")


def _named(
    name: str, semantic: str, convert: Convert, parameters: Mapping[str, str] | None = None
) -> Coding:
    return Coding(ValueType(name, semantic, parameters=parameters or {}), convert=convert)


_POINT_FIELDS: Final = (
    ("x", ValueType("double")),
    ("y", ValueType("double")),
    ("wkb", ValueType("bytes")),
    ("srid", ValueType("int32")),
)

_BUILTIN: Final[Mapping[str, Coding]] = {
    "int2": _plain("int16"),
    "int4": _plain("int32"),
    "int8": _plain("int64"),
    "oid": _plain("int64"),
    "float4": Coding(ValueType("float"), convert=values.floating, inline=_INLINE_FLOAT),
    "float8": Coding(ValueType("double"), convert=values.floating, inline=_INLINE_FLOAT),
    "bool": Coding(
        ValueType("boolean"),
        convert=values.boolean,
        inline="(TRUE if {v} == b't' else FALSE)",
    ),
    "bytea": Coding(ValueType("bytes"), convert=values.bytea),
    "uuid": Coding(
        ValueType("string", "io.debezium.data.Uuid"),
        convert=values.text,
        inline="b'\"%b\"' % {v}",
    ),
    "json": _named("string", "io.debezium.data.Json", values.text),
    "jsonb": _named("string", "io.debezium.data.Json", values.text),
    "xml": _named("string", "io.debezium.data.Xml", values.text),
    "tsvector": _named("string", "io.debezium.data.Tsvector", values.text),
    "date": _named("int32", "io.debezium.time.Date", values.date_days),
    "timestamptz": _named("string", "io.debezium.time.ZonedTimestamp", values.timestamptz),
    "timetz": _named("string", "io.debezium.time.ZonedTime", values.timetz),
    "point": Coding(
        ValueType("struct", "io.debezium.data.geometry.Point", fields=_POINT_FIELDS),
        convert=values.point,
    ),
}

_EXTENSIONS: Final[Mapping[str, Coding]] = {
    "hstore": _named("string", "io.debezium.data.Json", values.hstore),
    "ltree": _named("string", "io.debezium.data.Ltree", values.text),
    "vector": Coding(
        ValueType("array", "io.debezium.data.DoubleVector", items=ValueType("double")),
        convert=bytes,
        inline="{v}",
    ),
    "halfvec": Coding(
        ValueType("array", "io.debezium.data.FloatVector", items=ValueType("float")),
        convert=bytes,
        inline="{v}",
    ),
}


def coding(oid: int, typmod: int, types: Mapping[int, NativeType], modes: TypeModes) -> Coding:
    """How the values of a column of this type are written."""
    native = types.get(oid)
    if native is None:
        return _STRING
    if native.kind == "d":
        return coding(native.of, native.typmod if typmod < 0 else typmod, types, modes)
    if native.kind == "e":
        return _enum(native)
    if native.is_array:
        return _array(native, typmod, types, modes)
    if native.kind == "b" and native.schema == "pg_catalog":
        return _parameterised(native.name, typmod, modes) or _BUILTIN.get(native.name, _STRING)
    if native.kind == "b":
        return _EXTENSIONS.get(native.name, _STRING)
    return _STRING


# What SQL calls types of pg_catalog, and what stands behind their modifier.
_SQL_NAMES: Final[Mapping[str, tuple[str, str]]] = {
    "bit": ("bit", ""),
    "bool": ("boolean", ""),
    "bpchar": ("character", ""),
    "char": ('"char"', ""),
    "float4": ("real", ""),
    "float8": ("double precision", ""),
    "int2": ("smallint", ""),
    "int4": ("integer", ""),
    "int8": ("bigint", ""),
    "time": ("time", " without time zone"),
    "timetz": ("time", " with time zone"),
    "timestamp": ("timestamp", " without time zone"),
    "timestamptz": ("timestamp", " with time zone"),
    "varbit": ("bit varying", ""),
    "varchar": ("character varying", ""),
}
_LENGTHS: Final = frozenset(("bpchar", "varchar"))
_DIGITS: Final = frozenset(("time", "timetz", "timestamp", "timestamptz", "bit", "varbit"))


def native_name(oid: int, typmod: int, types: Mapping[int, NativeType]) -> str:
    """A type in SQL, as `format_type` has it. It is made of what the stream tells, not asked for:
    it is part of the published schema, and the catalog may be ahead of the stream."""
    native = types.get(oid)
    if native is None:
        return f"oid {oid}"
    if native.is_array:
        return native_name(native.of, typmod, types) + "[]"
    if native.schema not in ("pg_catalog", "public"):
        return f"{native.schema}.{native.name}"
    if native.schema == "public":
        return native.name
    name, rest = _SQL_NAMES.get(native.name, (native.name, ""))
    return f"{name}{_modifier(native.name, typmod)}{rest}"


def _modifier(name: str, typmod: int) -> str:
    if typmod < 0:
        return ""
    if name == "numeric":
        precision, scale = _numeric_shape(typmod)
        return f"({precision},{scale})"
    if name in _LENGTHS:
        return f"({typmod - 4})"
    if name == "interval":
        # Its upper half says which fields it has.
        return "" if typmod & 0xFFFF == 0xFFFF else f"({typmod & 0xFFFF})"
    return f"({typmod})" if name in _DIGITS else ""


def _numeric_shape(typmod: int) -> tuple[int, int]:
    """Precision and scale, which has eleven bits with a sign: PostgreSQL 15 knows negative ones."""
    return (typmod - 4) >> 16 & 0xFFFF, ((typmod - 4 & 0x7FF) ^ 1024) - 1024


def _enum(native: NativeType) -> Coding:
    return Coding(
        ValueType(
            "string", "io.debezium.data.Enum", parameters={"allowed": ",".join(native.labels)}
        ),
        labels={label.encode(): orjson.dumps(label) for label in native.labels},
    )


def _array(
    native: NativeType, typmod: int, types: Mapping[int, NativeType], modes: TypeModes
) -> Coding:
    # An array's modifier is that of its elements.
    element = coding(native.of, typmod, types, modes)
    return Coding(
        ValueType("array", items=element.type),
        convert=values.array(element.convert, native.delimiter.encode()),
    )


def _parameterised(name: str, typmod: int, modes: TypeModes) -> Coding | None:
    """The types whose form depends on their modifier or on the settings."""
    if name == "numeric":
        return _numeric(typmod, modes)
    if name == "money":
        return _money(modes)
    if name == "interval":
        if modes.interval == "string":
            return _named("string", "io.debezium.time.Interval", values.interval_iso)
        return _named("int64", "io.debezium.time.MicroDuration", values.interval_us)
    if name == "timestamp":
        if 0 <= typmod <= 3:
            return _named("int64", "io.debezium.time.Timestamp", values.timestamp_ms)
        return _named("int64", "io.debezium.time.MicroTimestamp", values.timestamp_us)
    if name == "time":
        if 0 <= typmod <= 3:
            return _named("int32", "io.debezium.time.Time", values.time_ms)
        return _named("int64", "io.debezium.time.MicroTime", values.time_us)
    if name in ("bit", "varbit"):
        if name == "bit" and typmod in (-1, 1):
            return Coding(ValueType("boolean"), convert=values.one_bit)
        length = {"length": str(typmod if typmod > 0 else 2**31 - 1)}
        return _named("bytes", "io.debezium.data.Bits", values.bits, length)
    return None


def _numeric(typmod: int, modes: TypeModes) -> Coding:
    if modes.decimal == "string":
        return Coding(ValueType("string"), inline="b'\"%b\"' % {v}")
    if modes.decimal == "double":
        return Coding(ValueType("double"), convert=values.floating, inline=_INLINE_FLOAT)
    if typmod < 0:
        fields = (("scale", ValueType("int32")), ("value", ValueType("bytes")))
        return Coding(
            ValueType("struct", "io.debezium.data.VariableScaleDecimal", fields=fields),
            convert=values.variable_decimal,
        )
    precision, scale = _numeric_shape(typmod)
    return Coding(
        ValueType(
            "bytes",
            "org.apache.kafka.connect.data.Decimal",
            parameters={"scale": str(scale), "connect.decimal.precision": str(precision)},
        ),
        convert=values.decimal(scale),
    )


def _money(modes: TypeModes) -> Coding:
    if modes.decimal == "string":
        return Coding(ValueType("string"), convert=values.money_text)
    if modes.decimal == "double":
        return Coding(ValueType("double"), convert=values.money_number)
    return _named("bytes", "org.apache.kafka.connect.data.Decimal", values.money, {"scale": "2"})
