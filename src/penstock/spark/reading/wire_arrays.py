"""Arrays of more than one dimension, which the type of a captured array does not tell.

PostgreSQL has one type for arrays of all dimensions, and each value has its own. So a column is
read as arrays of one dimension, unless somebody writes another type, `array<array<int>>`, or the
JSON of whatever there is, `string`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from penstock.client.table_schemas import ValueType
from penstock.spark.reading.wire_values import Converted, conversion, shown, wire_type


def as_deep_as(kind: ValueType, into: pa.DataType) -> ValueType:
    """The kind of arrays that have as many dimensions as a type."""
    while kind.name == "array" and _dimensions(kind) < _depth(into):
        kind = replace(kind, items=kind)
    return kind


def loose_arrays(kind: ValueType, into: pa.DataType, texts: pa.Array) -> Converted:
    """Values that come as JSON, each of its own dimensions, as a type; or as text of any."""
    convert = conversion(kind, into)
    assert convert is not None
    made: list[Any] = []
    unfit = np.zeros(len(texts), np.bool_)
    for at, text in enumerate(texts.to_pylist()):
        value = None if text is None else _read(text)
        if value is None:
            made.append(None)
            unfit[at] = text is not None
            continue
        if pa.types.is_string(into):
            found = _as_text(_items(kind), value)
        else:
            found = _one(convert, kind, value)
        made.append(found)
        unfit[at] = found is None
    return Converted(pa.array(made, into), unfit if unfit.any() else None)


def unfit_array(name: str, kind: ValueType, wanted: str, text: str) -> str:
    """Why an array is none of a type."""
    value = _read(text)
    if value is None:
        return f"field {name} is not {wanted}: {shown(ValueType('string'), text)}"
    dimensions = _dimensions_of(value)
    if dimensions == wanted.count("array<"):
        return f"field {name} does not fit {wanted}: {shown(kind, value)}"
    element = wanted.replace("array<", "").rstrip(">")
    deeper = f"{'array<' * dimensions}{element}{'>' * dimensions}"
    return (
        f"field {name} has {dimensions} dimension{'s' * (dimensions > 1)} and is read as {wanted}: "
        f"{shown(ValueType('string'), text)}; write the columns by hand, with {name} {deeper}, or "
        f"{name} string for the JSON of any"
    )


def _read(text: str) -> list[Any] | None:
    try:
        found = orjson.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def _one(convert: Any, kind: ValueType, value: list[Any]) -> Any:
    try:
        wire = pa.array([value], wire_type(kind))
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return None
    made, unfit = convert(wire)
    return None if unfit is not None else made[0].as_py()


def _as_text(items: ValueType, value: list[Any]) -> str | None:
    leaves: list[Any] = []
    shape = _shape(value, leaves)
    try:
        flat = pa.array(leaves, wire_type(items))
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return None
    convert = conversion(items, pa.string(), json=True)
    assert convert is not None
    made, unfit = convert(flat)
    return None if unfit is not None else shape % tuple(text or "null" for text in made.to_pylist())


def _shape(value: Any, leaves: list[Any]) -> str:
    """The brackets of an array, with a place for each element that is none."""
    if type(value) is not list:
        leaves.append(value)
        return "%s"
    return f"[{','.join(_shape(each, leaves) for each in value)}]"


def _items(kind: ValueType) -> ValueType:
    inner = kind.items or ValueType("string")
    return _items(inner) if inner.name == "array" else inner


def _dimensions(kind: ValueType) -> int:
    return 0 if kind.name != "array" else 1 + (_dimensions(kind.items) if kind.items else 0)


def _dimensions_of(value: Any) -> int:
    if not isinstance(value, list):
        return 0
    return 1 + max(map(_dimensions_of, value), default=0)


def _depth(kind: pa.DataType) -> int:
    return 1 + _depth(kind.value_type) if pa.types.is_list(kind) else 0
