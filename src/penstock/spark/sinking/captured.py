"""Rows of change events whose schemas are known, as the columns of a store.

Which schema an event has is told by its id, or by Connect's schema around it. The values of all
rows of one schema become a column together, by `penstock.spark.reading.wire_values`; only where one
of them is not what its schema says are they looked at one by one.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from decimal import Context, Decimal
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa

from penstock.client.table_schemas import TableColumn, TableSchema, ValueType
from penstock.errors import ConfigError
from penstock.sinks.errors import SchemaChangedError
from penstock.sinks.fields import Column
from penstock.sinks.schema import Schema, is_json, wider
from penstock.spark.reading.wire_values import DECIMAL, conversion, shown, stored_field, wire_type
from penstock.spark.sinking.values import UNAVAILABLE, Bad

# What tells the schema of a record: an id, the schema block around it, or nothing.
Told = int | bytes | None

_WIDE: Final = Context(prec=100)
_WORDS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MARKER: Final = UNAVAILABLE.encode()
_MARKER_64: Final = base64.b64encode(_MARKER).decode()
_MARKER_CODES: Final = list(_MARKER)
# The value that was not sent, where it is bytes or an array of numbers.
OTHER_MARKERS: Final = (_MARKER_64.encode(), orjson.dumps(_MARKER_CODES))


def columns_of(schema: TableSchema) -> list[Column]:
    """The columns that a store gets of a table."""
    return [Column(stored_field(each.name, each.type)) for each in schema.columns]


def merged(stored: Schema, schema: TableSchema, store: str) -> list[Column]:
    """The columns of a store that has some already: those, wider where the table's are, and new
    ones. SchemaChangedError if a column cannot become what it is in the table."""
    own = {column.name: column.field for column in columns_of(schema)}
    fields = []
    for field in stored.fields:
        new = own.pop(field.name, None)
        try:
            # JSON can say any value.
            kept = field if new is None or is_json(field) else wider(
                field, new, store, is_key=field.name in stored.key
            )  # fmt: skip
        except SchemaChangedError:
            assert new is not None
            native = next(each.native for each in schema.columns if each.name == field.name)
            raise SchemaChangedError(
                f"{store}: column {field.name!r} of table {schema.table} is {native or new.type}; "
                f"the store has it as {field.type}, which cannot become {new.type}"
            ) from None
        fields.append(kept)
    return [Column(field) for field in (*fields, *own.values())]


def check(columns: Sequence[Column], schema: TableSchema, sink: str) -> None:
    """ConfigError if columns that the user wrote are none of the table, or cannot hold its."""
    known = {column.name: column for column in schema.columns}
    for column in columns:
        own = known.get(column.name)
        if own is None:
            raise ConfigError(
                f"sink {sink!r}: table {schema.table} has no column {column.name!r}",
                advice=f"Its columns are {', '.join(known)}.",
            )
        if conversion(own.type, column.field.type, json=is_json(column.field)) is None:
            fitting = stored_field(own.name, own.type).type
            raise ConfigError(
                f"sink {sink!r}: column {column.name!r} is written {column.field.type}, and table "
                f"{schema.table} has {own.native or own.type.name}, which is {fitting} here",
                advice="Write a type that can hold it, or leave fields out to have the table's.",
            )


def says_more(own: TableColumn | None, column: Column) -> bool:
    """Whether the schema around a row says more of a column than the JSON of its values does."""
    if own is None:
        return False
    meant = own.type.semantic is not None or own.type.name in ("array", "struct", "bytes")
    json = is_json(column.field)
    return meant and conversion(own.type, column.field.type, json=json) is not None


def unavailable(row: Mapping[str, Any]) -> bool:
    """Whether a row has a value that the database did not send."""
    for value in row.values():
        if value in (UNAVAILABLE, _MARKER_64):
            return True
        if type(value) is list and value in ([UNAVAILABLE], _MARKER_CODES):
            return True
    return False


def column_of(
    rows: Sequence[Mapping[str, Any]], column: Column, known: TableColumn | None
) -> tuple[pa.Array, Bad]:
    """A column of rows of one schema, and which of its values are not what it holds."""
    name, kind = column.name, column.field.type
    values = [row.get(name) for row in rows]
    if known is None:
        # Of another time than the table's schema now: there are no values, or nobody knows them.
        return pa.nulls(len(values), kind), {}
    convert = conversion(known.type, kind, json=is_json(column.field))
    if convert is None:
        told = known.native or known.type.semantic or known.type.name
        why = f"field {name} is {told} in this event, and cannot be read as {kind}"
        return pa.nulls(len(values), kind), {
            at: why for at, value in enumerate(values) if value is not None
        }
    wire, bad = _wire(values, known.type, name)
    made, unfit = convert(wire)
    if bad and known.type.name == "array" and is_json(column.field):
        made = _with_nested(made, values, known.type, bad)
    if unfit is not None:
        for at in np.flatnonzero(unfit).tolist():
            told = shown(known.type, values[at])
            bad.setdefault(at, f"field {name} does not fit {kind}: {told}")
    return made, bad


def _wire(values: list[Any], kind: ValueType, name: str) -> tuple[pa.Array, Bad]:
    """Values of JSON as they stand there; those that are something else are null."""
    target = wire_type(kind)
    if set(map(type, values)) <= _EXPECTED.get(kind.name, frozenset()):
        try:
            return pa.array(values, target), {}
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            pass
    bad: Bad = {}
    kept: list[Any] = []
    for at, value in enumerate(values):
        made = None
        if value is not None:
            try:
                made = _as_wire(value, kind)
                pa.scalar(made, target)
            except (ValueError, TypeError, pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
                made = None
                bad[at] = (
                    f"field {name} is not {_called(kind)}: {shown(ValueType('string'), value)}"
                )
        kept.append(made)
    return pa.array(kept, target), bad


def _with_nested(made: pa.Array, values: list[Any], kind: ValueType, bad: Bad) -> pa.Array:
    """JSON of arrays, of more than one dimension too, which an array's type does not say."""
    texts = made.to_pylist()
    for at in list(bad):
        leaves: list[Any] = []
        shape = _shape(values[at], leaves) if type(values[at]) is list else ""
        flat, wrong = _wire(leaves, kind.items or ValueType("string"), "")
        convert = conversion(kind.items or ValueType("string"), pa.string(), json=True)
        assert convert is not None
        found, unfit = convert(flat)
        if shape and not wrong and unfit is None:
            parts = [text or "null" for text in found.to_pylist()]
            texts[at] = shape % tuple(parts)
            del bad[at]
    return pa.array(texts, pa.string())


def _shape(value: Any, leaves: list[Any]) -> str:
    """The brackets of an array, with a place for each element that is none."""
    if type(value) is not list:
        leaves.append(value)
        return "%s"
    return f"[{','.join(_shape(each, leaves) for each in value)}]"


_NONE: Final = type(None)
_WHOLE: Final = frozenset({int, _NONE})
# The Python types whose values Arrow takes without changing them.
_EXPECTED: Final[Mapping[str, frozenset[type]]] = {
    **dict.fromkeys(("int8", "int16", "int32", "int64"), _WHOLE),
    **dict.fromkeys(("float", "double", "float32", "float64"), frozenset({int, float, _NONE})),
    "boolean": frozenset({bool, _NONE}),
    "string": frozenset({str, _NONE}),
    "bytes": frozenset({str, _NONE}),
}


def _as_wire(value: Any, kind: ValueType) -> Any:
    """One value, if it is what its kind has in JSON."""
    if value is None:
        return None
    if kind.name == "array":
        if type(value) is not list:
            raise TypeError(value)
        items = kind.items or ValueType("string")
        return [_as_wire(each, items) for each in value]
    if kind.name == "struct" and kind.fields:
        if type(value) is not dict:
            raise TypeError(value)
        return {name: _as_wire(value.get(name), inner) for name, inner in kind.fields}
    if kind.name in ("float", "double", "float32", "float64") and type(value) is str:
        if value not in _WORDS:
            raise ValueError(value)
        return _WORDS[value]
    if kind.name == "string" and kind.semantic is None and type(value) is not str:
        return orjson.dumps(value).decode()
    if kind.semantic == DECIMAL and type(value) in (int, float, Decimal):
        # Connect writes them so if it is asked to (decimal.format).
        return _unscaled(value, int(kind.parameters.get("scale", 0)))
    if type(value) not in _EXPECTED.get(kind.name, frozenset({str})):
        raise TypeError(value)
    return value


def _unscaled(value: Any, scale: int) -> str:
    """A number as Connect writes decimals by default; ValueError if it has more digits."""
    number = (value if isinstance(value, Decimal) else Decimal(repr(value))).scaleb(scale, _WIDE)
    whole = int(number)
    if whole != number:
        raise ValueError(value)
    data = whole.to_bytes(whole.bit_length() // 8 + 1, "big", signed=True)
    return base64.b64encode(data).decode()


def _called(kind: ValueType) -> str:
    return str(wire_type(kind)) if kind.semantic is None else kind.semantic.rpartition(".")[2]
