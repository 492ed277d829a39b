"""The envelope in Avro, each event with the id of its schema (Confluent's wire format).

A record's key and value begin with a zero byte and the schema's id in four; what follows is plain
Avro. Schemas are made as Confluent's converter makes them of Connect's: `connect.name`,
`connect.version` and `connect.parameters` hold what Avro has no word for, decimals are Avro's own.

An encoder is a list of functions, one for each column, made for the table: general Avro writers
look types up for each value, which costs ten times as much.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import orjson

from penstock.capture.events.encoding import Moment, Order
from penstock.capture.events.json import picker
from penstock.capture.events.naming import field_name, schema_name
from penstock.capture.events.registry import SchemaRegistry
from penstock.capture.events.schema import TRANSACTION, Field, source_fields, source_name
from penstock.capture.events.settings import EventSettings
from penstock.capture.events.shape import Shape
from penstock.capture.source import NULL, UNAVAILABLE, CaptureError, ColumnType, Fragment, Row

Write = Callable[[Any], bytes]
WriteFragment = Callable[[Fragment], bytes]

DECIMAL: Final = "org.apache.kafka.connect.data.Decimal"
DECIMAL_PRECISION: Final = 64
_ABSENT: Final = b"\x00"
_PRESENT: Final = b"\x02"
_MARKER: Final = orjson.loads(UNAVAILABLE)
_PRIMITIVES: Final = {
    "int8": "int",
    "int16": "int",
    "int32": "int",
    "int64": "long",
    "float": "float",
    "double": "double",
    "boolean": "boolean",
    "string": "string",
    "bytes": "bytes",
}
_FLOAT: Final = struct.Struct("<f").pack
_DOUBLE: Final = struct.Struct("<d").pack


# ---- schemas -----------------------------------------------------------------------------


def avro_type(column: ColumnType, name: str) -> Any:
    """The Avro schema of a type; `name` is what a record would be called."""
    made: dict[str, Any]
    if column.name == "array":
        items = avro_type(column.items or ColumnType("string"), f"{name}_item")
        made = {"type": "array", "items": ["null", items]}
    elif column.name == "struct":
        fields = [
            _optional(field_name(inner), avro_type(kind, f"{name}_{field_name(inner)}"))
            for inner, kind in column.fields
        ]
        made = {"type": "record", "name": name, "fields": fields}
    elif column.name in _PRIMITIVES:
        made = {"type": _PRIMITIVES[column.name]}
        if column.name in {"int8", "int16"}:
            made["connect.type"] = column.name
    else:
        raise CaptureError(f"{name}: {column.name!r} is no type that events can hold")
    if column.semantic == DECIMAL:
        made["logicalType"] = "decimal"
        made["scale"] = int(column.parameters.get("scale", "0"))
        precision = column.parameters.get("connect.decimal.precision")
        made["precision"] = int(precision) if precision else DECIMAL_PRECISION
    if column.semantic:
        made["connect.name"] = column.semantic
        made["connect.version"] = column.version
    if column.parameters:
        made["connect.parameters"] = dict(column.parameters)
    return made["type"] if list(made) == ["type"] else made


def _optional(name: str, kind: Any) -> dict[str, Any]:
    return {"name": name, "type": ["null", kind], "default": None}


def _field(name: str, column: ColumnType, optional: bool, record: str) -> dict[str, Any]:
    kind = avro_type(column, f"{record}_{field_name(name)}")
    return (
        _optional(field_name(name), kind) if optional else {"name": field_name(name), "type": kind}
    )


def _record(full_name: str, fields: list[dict[str, Any]]) -> dict[str, Any]:
    space, _, name = full_name.rpartition(".")
    made: dict[str, Any] = {"type": "record", "name": name}
    if space:
        made["namespace"] = space
    return {**made, "fields": fields, "connect.name": full_name}


def key_schema(shape: Shape, prefix: str) -> dict[str, Any]:
    base = schema_name(f"{prefix}.{shape.table.full_name}")
    fields = [
        _field(column.name, column.type, column.optional, "Key") for column in shape.key_columns
    ]
    return _record(f"{base}.Key", fields)


def envelope_schema(
    shape: Shape, prefix: str, kind: str, fields: tuple[Field, ...]
) -> dict[str, Any]:
    base = schema_name(f"{prefix}.{shape.table.full_name}")
    row = _record(
        f"{base}.Value",
        [_field(column.name, column.type, column.optional, "Value") for column in shape.columns],
    )
    source = _record(
        source_name(kind),
        [_field(item.name, item.type, item.optional, "Source") for item in fields],
    )
    block = _record(
        "event.block", [_field(item.name, item.type, False, "block") for item in TRANSACTION]
    )
    return _record(
        f"{base}.Envelope",
        [
            _optional("before", row),
            # A record is defined once and named from then on.
            _optional("after", f"{base}.Value"),
            {"name": "source", "type": source},
            _optional("transaction", block),
            {"name": "op", "type": "string"},
            *(_optional(name, "long") for name in ("ts_ms", "ts_us", "ts_ns")),
        ],
    )


# ---- values ------------------------------------------------------------------------------


def long(value: int) -> bytes:
    """A whole number: zigzag, seven bits at a time."""
    rest = (value << 1) ^ (value >> 63)
    if not 0 <= rest < 1 << 64:
        raise OverflowError(f"{value} does not fit 64 bits")
    if rest < 0x80:
        return _ONE_BYTE[rest]
    made = bytearray()
    while rest >= 0x80:
        made.append((rest & 0x7F) | 0x80)
        rest >>= 7
    made.append(rest)
    return bytes(made)


_ONE_BYTE: Final = [bytes((number,)) for number in range(0x80)]


def text(value: str) -> bytes:
    data = value.encode()
    return long(len(data)) + data


def raw(value: str) -> bytes:
    data = base64.b64decode(value)
    return long(len(data)) + data


def _number(value: Any) -> float:
    """JSON has no word for what is not a number; Debezium writes its name."""
    return float(value)


def writer(column: ColumnType) -> Write:
    """A function that writes a value as orjson reads it."""
    match column.name:
        case "int8" | "int16" | "int32" | "int64":
            return long
        case "float":
            return lambda value: _FLOAT(_number(value))
        case "double":
            return lambda value: _DOUBLE(_number(value))
        case "boolean":
            return lambda value: b"\x01" if value else b"\x00"
        case "bytes":
            return raw
        case "array":
            return _array(_nullable(writer(column.items or ColumnType("string"))))
        case "struct":
            return _struct([(name, _nullable(writer(kind))) for name, kind in column.fields])
    return text


def _nullable(write: Write) -> Write:
    return lambda value: _ABSENT if value is None else _PRESENT + write(value)


def _array(write: Write) -> Write:
    def array(value: Iterable[Any]) -> bytes:
        items = [write(item) for item in value]
        return long(len(items)) + b"".join(items) + b"\x00" if items else b"\x00"

    return array


def _struct(fields: list[tuple[str, Write]]) -> Write:
    return lambda value: b"".join([write(value.get(name)) for name, write in fields])


def fragment_writer(column: ColumnType, *, optional: bool, what: str) -> WriteFragment:
    """A function that writes a fragment, without a detour where there is a short way."""
    if column.name in {"int8", "int16", "int32", "int64"}:
        plain: WriteFragment = lambda part: long(int(part))  # noqa: E731
    elif column.name == "string":
        plain = _text_fragment
    elif column.name == "bytes":
        plain = lambda part: raw(orjson.loads(part))  # noqa: E731
    elif column.name == "boolean":
        plain = lambda part: b"\x01" if part == b"true" else b"\x00"  # noqa: E731
    else:
        write = writer(column)
        plain = lambda part: write(orjson.loads(part))  # noqa: E731

    def written(part: Fragment) -> bytes:
        if part == NULL:
            if not optional:
                # Old rows that the database did not log in full.
                return _nothing(column)
            return _ABSENT
        try:
            return _PRESENT + plain(part) if optional else plain(part)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            shown = part[:80].decode(errors="replace")
            raise CaptureError(f"{what}: {shown} is no {column.name}: {error}") from error

    return written


def _text_fragment(part: Fragment) -> bytes:
    if part[:1] == b'"' and b"\\" not in part:
        return long(len(part) - 2) + part[1:-1]
    value = orjson.loads(part)
    if not isinstance(value, str):
        raise TypeError("not a text")
    return text(value)


def _nothing(column: ColumnType) -> bytes:
    """The empty value of a type, where null is not allowed."""
    match column.name:
        case "float":
            return _FLOAT(0.0)
        case "double":
            return _DOUBLE(0.0)
        case "struct":
            return b"\x00" * len(column.fields)
    return b"\x00"


class AvroEncoder:
    """The events of one table in Avro."""

    def __init__(
        self,
        shape: Shape,
        settings: EventSettings,
        kind: str,
        source: Fragment,
        moment: Moment,
        registry: SchemaRegistry,
    ) -> None:
        self._moment = moment
        name, prefix = shape.table.full_name, settings.prefix
        self._pick_key = picker(shape.key)
        self._key_parts = [
            fragment_writer(column.type, optional=column.optional, what=f"{name}.{column.name}")
            for column in shape.key_columns
        ]
        self._row_parts = [
            fragment_writer(column.type, optional=column.optional, what=f"{name}.{column.name}")
            for column in shape.columns
        ]
        self._columns = shape.columns
        self._source_fields = source_fields(kind, source)
        self._source_parts: Mapping[str, Write] = {
            item.name: _nullable(writer(item.type)) if item.optional else writer(item.type)
            for item in self._source_fields
        }
        self._source: tuple[Fragment, bytes] = (b"", b"")
        self._key_head = self._value_head = b""
        if shape.key:
            self._key_head = registry.head(f"{shape.topic}-key", key_schema(shape, prefix))
        self._value_head = registry.head(
            f"{shape.topic}-value", envelope_schema(shape, prefix, kind, self._source_fields)
        )
        self.whole_key = registry.head(f"{shape.topic}-truncate", "null") if shape.key else b""

    def key(self, row: Row) -> bytes:
        parts = zip(self._key_parts, self._pick_key(row), strict=True)
        return self._key_head + b"".join([write(part) for write, part in parts])

    def row(self, shown: Row) -> bytes:
        return b"".join([write(part) for write, part in zip(self._row_parts, shown, strict=True)])

    def value(
        self,
        op: str,
        before: bytes | None,
        after: bytes | None,
        source: Fragment,
        order: Order | None,
    ) -> bytes:
        ns = self._moment.ns
        return b"".join(
            (
                self._value_head,
                _ABSENT if before is None else _PRESENT + before,
                _ABSENT if after is None else _PRESENT + after,
                self._source_block(source),
                _ABSENT if order is None else _PRESENT + text(order.id) + long(order.total),
                b"" if order is None else long(order.in_table),
                text(op),
                _PRESENT + long(ns // 1_000_000),
                _PRESENT + long(ns // 1_000),
                _PRESENT + long(ns),
            )
        )

    def unavailable(self, place: int) -> Fragment:
        column = self._columns[place]
        if column.type.name == "string":
            return UNAVAILABLE
        if column.type.name == "bytes":
            return b'"%b"' % base64.b64encode(_MARKER.encode())
        items = column.type.items
        if column.type.name == "array" and (items is None or items.name == "string"):
            return b"[" + UNAVAILABLE + b"]"
        return NULL

    def row_of_key(self, key: bytes) -> bytes | None:
        return None

    def _source_block(self, source: Fragment) -> bytes:
        """Many events share one block: it is written once."""
        last, made = self._source
        if source is last or source == last:
            return made
        block = orjson.loads(source)
        try:
            made = b"".join(
                [
                    write(block.get(item.name, item.default))
                    for item, write in zip(
                        self._source_fields, self._source_parts.values(), strict=True
                    )
                ]
            )
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise CaptureError(f"a source block that does not fit its schema: {error}") from error
        self._source = (source, made)
        return made
