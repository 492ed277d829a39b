"""The envelope in Avro, each event with the id of its schema (Confluent's wire format).

A record's key and value begin with a zero byte and the schema's id in four; what follows is plain
Avro. Schemas are made as Confluent's converter makes them of Connect's: `connect.name`,
`connect.version` and `connect.parameters` hold what Avro has no word for, decimals are Avro's own.

The writer of a row is generated for its table: general Avro writers look types up for each value,
which costs several times as much.
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
from penstock.capture.source import (
    NULL,
    TRUNCATE,
    UNAVAILABLE,
    CaptureError,
    Fragment,
    Row,
)
from penstock.client.table_schemas import TableColumn, ValueType

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
_INTEGERS: Final = frozenset(("int8", "int16", "int32", "int64"))
_FLOAT: Final = struct.Struct("<f").pack
_DOUBLE: Final = struct.Struct("<d").pack


# ---- schemas -----------------------------------------------------------------------------


def avro_type(column: ValueType, name: str) -> Any:
    """The Avro schema of a type; `name` is what a record would be called."""
    made: dict[str, Any]
    if column.name == "array":
        items = avro_type(column.items or ValueType("string"), f"{name}_item")
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


def _field(name: str, column: ValueType, optional: bool, record: str) -> dict[str, Any]:
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


def _varint(rest: int) -> bytes:
    made = bytearray()
    while rest >= 0x80:
        made.append((rest & 0x7F) | 0x80)
        rest >>= 7
    made.append(rest)
    return bytes(made)


# Fourteen bits at a time: as the end of a number, and with more to follow.
_ENDS: Final = [_varint(number) for number in range(1 << 14)]
_MORE: Final = [bytes(((n & 0x7F) | 0x80, (n >> 7) | 0x80)) for n in range(1 << 14)]


def long(value: int) -> bytes:
    """A whole number: zigzag, then seven bits in each byte."""
    rest = (value << 1) ^ (value >> 63)
    if rest < 0x4000:
        if rest < 0:
            raise OverflowError(f"{value} does not fit 64 bits")
        return _ENDS[rest]
    if rest < 0x10000000:
        return _MORE[rest & 0x3FFF] + _ENDS[rest >> 14]
    if rest < 0x40000000000:
        return _MORE[rest & 0x3FFF] + _MORE[rest >> 14 & 0x3FFF] + _ENDS[rest >> 28]
    if rest >= 1 << 64:
        raise OverflowError(f"{value} does not fit 64 bits")
    return _MORE[rest & 0x3FFF] + _MORE[rest >> 14 & 0x3FFF] + long_rest(rest >> 28)


def long_rest(rest: int) -> bytes:
    """The upper bits of a large number."""
    return _varint(rest)


def text(value: str) -> bytes:
    data = value.encode()
    return long(len(data)) + data


def raw(value: str) -> bytes:
    data = base64.b64decode(value)
    return long(len(data)) + data


def _number(value: Any) -> float:
    """JSON has no word for what is not a number; Debezium writes its name."""
    return float(value)


def writer(column: ValueType) -> Write:
    """A function that writes a value as orjson reads it."""
    match column.name:
        case name if name in _INTEGERS:
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
            return _array(_nullable(writer(column.items or ValueType("string"))))
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


def fragment_writer(column: ValueType) -> WriteFragment:
    """A function that writes a fragment which is not null."""
    if column.name in _INTEGERS:
        return lambda part: long(int(part))
    if column.name == "string":
        return _text_fragment
    if column.name == "bytes":
        return lambda part: raw(orjson.loads(part))
    if column.name == "boolean":
        return lambda part: b"\x01" if part == b"true" else b"\x00"
    write = writer(column)
    return lambda part: write(orjson.loads(part))


def record_writer(columns: tuple[TableColumn, ...], what: str) -> Callable[[Row], bytes]:
    """A function that writes the fragments of a record's fields, generated for them.

    Generated, so that the frequent cases (null, a number, a text without escapes) cost no call of a
    function. Old rows that the database did not log in full have nulls where none are allowed:
    these become the empty value of their type.
    """
    scope: dict[str, Any] = {
        "NULL": NULL,
        "long": long,
        "lengths": _TEXT_LENGTHS,
        "limit": len(_TEXT_LENGTHS),
    }
    terms = []
    for at, column in enumerate(columns):
        name = f"a{at}"
        present = _PRESENT if column.optional else b""
        scope[f"w{at}"] = fragment_writer(column.type)
        scope[f"n{at}"] = _ABSENT if column.optional else _nothing(column.type)
        scope[f"p{at}"] = present
        plus = f"p{at} + " if present else ""
        if column.type.name in _INTEGERS:
            term = f"{plus}long(int({name}))"
        elif column.type.name == "string":
            quick = f"{plus}lengths[len({name})] + {name}[1:-1]"
            is_quick = f"len({name}) < limit and {name}[:1] == b'\"' and b'\\\\' not in {name}"
            term = f"({quick} if {is_quick} else {plus}w{at}({name}))"
        else:
            term = f"{plus}w{at}({name})"
        terms.append(f"n{at} if {name} == NULL else {term}")
    if not columns:
        return lambda row: b""
    names = ", ".join(f"a{at}" for at in range(len(columns)))
    lines = [f"def write(row):\n    {names}, = row\n    return b''.join(("]
    lines += [f"        {term}," for term in terms]
    exec("\n".join([*lines, "    ))"]), scope)  # names and bytes above only, nothing of the user's
    quick_write: Callable[[Row], bytes] = scope["write"]

    def write(row: Row) -> bytes:
        try:
            return quick_write(row)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise _misfit(columns, row, what, error) from error

    return write


def _misfit(
    columns: tuple[TableColumn, ...], row: Row, what: str, error: Exception
) -> CaptureError:
    """Which column's value is at fault."""
    for column, part in zip(columns, row, strict=True):
        try:
            if part != NULL:
                fragment_writer(column.type)(part)
        except (ValueError, TypeError, AttributeError, OverflowError) as reason:
            shown = part[:80].decode(errors="replace")
            if b'"NaN"' in part or b'Inf"' in part:
                return CaptureError(
                    f"{what}.{column.name}: Avro's decimal cannot say {shown}",
                    advice="Set the option decimal.handling.mode to string or double.",
                )
            kind = column.type.name
            return CaptureError(f"{what}.{column.name}: {shown} is no {kind}: {reason}")
    return CaptureError(f"{what}: a row that does not fit its schema: {error}")


def _text_fragment(part: Fragment) -> bytes:
    if part[:1] == b'"' and b"\\" not in part:
        return long(len(part) - 2) + part[1:-1]
    value = orjson.loads(part)
    if not isinstance(value, str):
        raise TypeError("not a text")
    return text(value)


# What stands before a text whose fragment, with its quotes, has a length: found by that length.
_TEXT_LENGTHS: Final = [b"", b"", *(long(number) for number in range(4_096))]


def _nothing(column: ValueType) -> bytes:
    """The empty value of a type, where null is not allowed."""
    match column.name:
        case "float":
            return _FLOAT(0.0)
        case "double":
            return _DOUBLE(0.0)
        case "struct":
            return b"\x00" * len(column.fields)
    return b"\x00"


def plain_record(
    full_name: str, fields: Iterable[Field]
) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], bytes]]:
    """The schema of a record that is no row of a table, and what writes one from its values."""
    listed = list(fields)
    name = full_name.rpartition(".")[2]
    schema = _record(
        full_name, [_field(item.name, item.type, item.optional, name) for item in listed]
    )
    writers = [
        (item.name, _nullable(writer(item.type)) if item.optional else writer(item.type))
        for item in listed
    ]
    return schema, lambda values: b"".join([write(values.get(key)) for key, write in writers])


_OPS: Final = {op: text(op) for op in "cudrtm"}


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
        self._stamped, self._stamp = -1, b""
        name, prefix = shape.table.full_name, settings.prefix
        self._pick_key = picker(shape.key)
        self._key_parts = record_writer(shape.key_columns, name)
        self.row: Callable[[Row], bytes] = record_writer(shape.columns, name)
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
        return self._key_head + self._key_parts(self._pick_key(row))

    def value(
        self,
        op: str,
        before: bytes | None,
        after: bytes | None,
        source: Fragment,
        order: Order | None,
    ) -> bytes:
        moment = self._moment
        if order is None:
            place = _ABSENT
        else:
            place = _PRESENT + text(order.id) + long(order.total) + long(order.in_table)
        if moment.ns != self._stamped:
            self._stamped = moment.ns
            self._stamp = b"".join(
                [_PRESENT + long(moment.ns // unit) for unit in (1_000_000, 1_000, 1)]
            )
        return b"".join(
            (
                self._value_head,
                _ABSENT if before is None else _PRESENT + before,
                _ABSENT if after is None else _PRESENT + after,
                self._source_block(source),
                place,
                _OPS[op],
                self._stamp,
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

    def gone(
        self, key: bytes, event: bytes, source: Fragment, orders: Callable[[], Order] | None
    ) -> bytes | None:
        return None

    def truncate(self, source: Fragment, order: Order | None, *, is_expanded: bool) -> bytes:
        # Its schema is Debezium's, which has no place for it.
        return self.value(TRUNCATE, None, None, source, order)

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
