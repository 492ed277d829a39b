"""Values as they stand in a change event to Arrow columns of the types that they are.

A `ValueType` says what a column holds. Four questions are answered for it:

- `wire_type`: how its values stand in JSON, for whoever parses it: a decimal as text, base64 of its
  digits, a date as a whole number, a moment with a zone as text;
- `flow_type`: the column that a flow gets;
- `stored_field`: the column that a store gets;
- `conversion`: a function from the first to any type that can hold the values, or None.

A conversion takes a whole column. What its target cannot hold exactly is null in the answer, and
marked: nothing is rounded, wrapped around or cut. `shown` says what such a value was.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.client.table_schemas import UNSIGNED, ValueType
from penstock.sinks.schema import json_field
from penstock.spark.reading import wire_times
from penstock.spark.reading.wire_decimals import DIGITS_MAX, WHOLE, digits_of, scaled, unscaled
from penstock.spark.reading.wire_times import CLOCK, DAY_US, INSTANT, LOCAL

Mask = npt.NDArray[np.bool_]

DECIMAL: Final = "org.apache.kafka.connect.data.Decimal"
VARIABLE: Final = "io.debezium.data.VariableScaleDecimal"
JSON: Final = "io.debezium.data.Json"
# Of a number that says its own scale: what a column can hold of all scales.
ANY_SCALE: Final = pa.decimal128(DIGITS_MAX, 18)
_UNSIGNED: Final = pa.decimal128(20, 0)
_MAX_SHOWN: Final = 60
# What stands for a large value that an update did not touch.
_UNAVAILABLE: Final = b"__debezium_unavailable_value"

_DATES: Final = frozenset({"io.debezium.time.Date", "org.apache.kafka.connect.data.Date"})
# How many of the numbers are a microsecond, or how many microseconds each is.
_MILLIS: Final = {"us": 1000}
_MICROS: Final[dict[str, int]] = {}
_NANOS: Final = {"per_us": 1000}
_LOCAL: Final = {
    "io.debezium.time.Timestamp": _MILLIS,
    "org.apache.kafka.connect.data.Timestamp": _MILLIS,
    "io.debezium.time.MicroTimestamp": _MICROS,
    "io.debezium.time.NanoTimestamp": _NANOS,
}
_CLOCKS: Final = {
    "io.debezium.time.Time": _MILLIS,
    "org.apache.kafka.connect.data.Time": _MILLIS,
    "io.debezium.time.MicroTime": _MICROS,
    "io.debezium.time.NanoTime": _NANOS,
}
_DURATIONS: Final = {
    "io.debezium.time.MicroDuration": _MICROS,
    "io.debezium.time.NanoDuration": _NANOS,
}
_INSTANT: Final = "io.debezium.time.ZonedTimestamp"

_INTEGERS: Final = {"int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(),
                    "int64": pa.int64()}  # fmt: skip
_FLOATS: Final = {"float": pa.float32(), "float32": pa.float32(), "double": pa.float64(),
                  "float64": pa.float64()}  # fmt: skip


class Converted(NamedTuple):
    """A column, and which values of it did not fit and are null; None if all did."""

    values: pa.Array
    unfit: Mask | None = None


Conversion = Callable[[pa.Array], Converted]


# ---- types -------------------------------------------------------------------------------


def wire_type(kind: ValueType) -> pa.DataType:
    """How values stand in JSON."""
    if _is_unsigned(kind):
        return _UNSIGNED
    if kind.name in _INTEGERS:
        return _INTEGERS[kind.name]
    if kind.name in _FLOATS:
        return _FLOATS[kind.name]
    if kind.name == "boolean":
        return pa.bool_()
    if kind.name == "array":
        return pa.list_(pa.field("element", wire_type(_items(kind))))
    if kind.name == "struct" and kind.fields:
        return pa.struct([pa.field(name, wire_type(inner)) for name, inner in kind.fields])
    return pa.string()


def flow_type(kind: ValueType) -> pa.DataType:
    """The type of the column that a flow gets."""
    semantic = kind.semantic
    if semantic in _DATES:
        return pa.date32()
    if semantic in _LOCAL:
        return LOCAL
    if semantic == _INSTANT:
        return INSTANT
    if semantic in _CLOCKS or semantic in _DURATIONS:
        return pa.string()
    if semantic == VARIABLE:
        return ANY_SCALE
    if semantic == DECIMAL:
        return _decimal_type(kind)
    if kind.name == "bytes":
        return pa.binary()
    if kind.name == "array":
        return pa.list_(pa.field("element", flow_type(_items(kind))))
    if kind.name == "struct" and kind.fields:
        return pa.struct([pa.field(name, flow_type(inner)) for name, inner in kind.fields])
    return wire_type(kind)


def stored_field(name: str, kind: ValueType) -> pa.Field:
    """The column that a store gets."""
    if kind.semantic in _CLOCKS:
        return pa.field(name, CLOCK)
    found = flow_type(kind)
    if kind.semantic == JSON or pa.types.is_nested(found):
        return json_field(name)
    return pa.field(name, found)


def _decimal_type(kind: ValueType) -> pa.DataType:
    scale = _scale(kind)
    given = int(kind.parameters.get("connect.decimal.precision", DIGITS_MAX))
    # A scale below zero leaves digits out before the point.
    digits = min(max(given - min(scale, 0), scale, 1), DIGITS_MAX)
    return pa.decimal128(digits, min(max(scale, 0), DIGITS_MAX))


def _is_unsigned(kind: ValueType) -> bool:
    """Whether a whole number may be larger than 2^63-1."""
    return kind.name == "int64" and UNSIGNED in kind.parameters


def _scale(kind: ValueType) -> int:
    return int(kind.parameters.get("scale", 0))


def _items(kind: ValueType) -> ValueType:
    return kind.items or ValueType("string")


# ---- conversions -------------------------------------------------------------------------


def conversion(kind: ValueType, into: pa.DataType, *, json: bool = False) -> Conversion | None:
    """What makes values of this kind a column of a type, or of JSON texts; None if nothing does
    without changing what they say.

    Wider numbers, and text for whatever has one, can be had of any; and what the events hold of a
    time, a whole number.
    """
    if json:
        return partial(_as_json, kind) if pa.types.is_string(into) else None
    if pa.types.is_string(into):
        return partial(_as_text, kind)
    semantic = kind.semantic
    if semantic in (DECIMAL, VARIABLE) or _is_unsigned(kind):
        return _decimals(kind, into)
    if kind.name == "array":
        return _lists(kind, into)
    if kind.name == "struct":
        return _structs(kind, into)
    if kind.name == "bytes":
        return _bytes if pa.types.is_binary(into) else None
    if kind.name == "boolean":
        return _same if pa.types.is_boolean(into) else None
    if kind.name in _FLOATS:
        return _floats(kind, into)
    if (made := _times(kind, into)) is not None:
        return made
    if kind.name == "string":
        return _texts(into)
    return _integers(kind, into) if kind.name in _INTEGERS else None


def _same(values: pa.Array) -> Converted:
    return Converted(values)


def _checked(values: pa.Array, unfit: Mask) -> Converted:
    return Converted(values, unfit if unfit.any() else None)


def _times(kind: ValueType, into: pa.DataType) -> Conversion | None:
    semantic = kind.semantic or ""
    if semantic in _DATES and pa.types.is_date32(into):
        return lambda values: _checked(*wire_times.dates(values))
    if semantic in _LOCAL and into == LOCAL:
        return lambda values: _checked(*wire_times.moments(values, **_LOCAL[semantic]))
    if semantic == _INSTANT and into == INSTANT:
        return lambda values: _checked(*wire_times.instants(values))
    if semantic in _CLOCKS and into == CLOCK:
        return lambda values: _checked(*wire_times.clocks(values, **_CLOCKS[semantic]))
    return None


def _integers(kind: ValueType, into: pa.DataType) -> Conversion | None:
    own = _INTEGERS[kind.name]
    types = pa.types
    if types.is_signed_integer(into):
        return _same if into == own else partial(_whole, into)
    if types.is_decimal128(into):
        return lambda values: _checked(*scaled(_wide(values), 0, into))
    if types.is_floating(into):
        return partial(_whole_floats, into)
    if into == INSTANT and kind.semantic is None:
        # Seconds since 1970, as Spark reads them in JSON.
        return partial(_seconds, into)
    return None


def _whole_floats(into: pa.DataType, values: pa.Array) -> Converted:
    """Whole numbers as floats, up to where these have a gap."""
    numbers = np.asarray(values.fill_null(0) if values.null_count else values).astype(np.int64)
    limit = 1 << (24 if into == pa.float32() else 53)
    there = np.asarray(values.is_valid())
    unfit = there & ((numbers > limit) | (numbers < -limit))
    made = pa.array(np.where(unfit, 0, numbers).astype(into.to_pandas_dtype()), mask=~there | unfit)
    return _checked(made, unfit)


def _seconds(into: pa.DataType, values: pa.Array) -> Converted:
    made, unfit = wire_times.moments(values, us=1_000_000)
    return _checked(made.cast(into), unfit)


def _texts(into: pa.DataType) -> Conversion | None:
    """Of texts that somebody wants as what they spell: SQLite has times and decimals so."""
    if into == INSTANT:
        return lambda values: _checked(*wire_times.spelled_instants(values))
    if pa.types.is_date32(into):
        return lambda values: _checked(*wire_times.spelled_dates(values))
    return partial(_spelled_decimals, into) if pa.types.is_decimal128(into) else None


_NUMBER: Final = r"^-?[0-9]{1,38}(?:\.[0-9]{1,38})?$"


def _spelled_decimals(into: pa.DataType, texts: pa.Array) -> Converted:
    fits = np.asarray(pc.fill_null(pc.match_substring_regex(texts, _NUMBER), False))
    plain = pc.if_else(pa.array(fits), texts, pa.scalar(None, pa.string()))
    at = np.asarray(pc.fill_null(pc.find_substring(plain, "."), -1)).astype(np.int64)
    sizes = np.asarray(pc.fill_null(pc.binary_length(plain), 0)).astype(np.int64)
    digits = pc.replace_substring(plain, ".", "")
    size = np.asarray(pc.fill_null(pc.binary_length(pc.utf8_ltrim(digits, "-")), 0))
    fits &= size <= DIGITS_MAX
    scales = np.where(at < 0, 0, sizes - at - 1)
    numbers = pc.if_else(pa.array(fits), digits, None).cast(WHOLE)
    made, unfit = _by_scale(numbers, scales, into)
    return _checked(made, unfit | (np.asarray(texts.is_valid()) & ~fits))


def _by_scale(
    numbers: pa.Array, scales: npt.NDArray[np.int64], into: pa.DataType
) -> tuple[pa.Array, Mask]:
    """Numbers that have each a scale of its own."""
    made = pa.nulls(len(numbers), into)
    unfit: Mask = np.zeros(len(numbers), np.bool_)
    for scale in np.unique(scales[np.asarray(numbers.is_valid())]).tolist():
        part, bad = scaled(pc.if_else(pa.array(scales == scale), numbers, None), scale, into)
        made, unfit = pc.coalesce(made, part), unfit | bad
    return made, unfit


def _whole(into: pa.DataType, values: pa.Array) -> Converted:
    """Whole numbers of another size."""
    numbers = np.asarray(values.fill_null(0) if values.null_count else values)
    bounds = np.iinfo(into.to_pandas_dtype())
    unfit = (numbers < bounds.min) | (numbers > bounds.max)
    there = np.asarray(values.is_valid())
    made = pa.array(np.where(unfit, 0, numbers).astype(bounds.dtype), mask=~there | unfit)
    return _checked(made, unfit & there)


def _wide(values: pa.Array) -> pa.Array:
    return values.cast(WHOLE)


def _floats(kind: ValueType, into: pa.DataType) -> Conversion | None:
    own = _FLOATS[kind.name]
    if into == own:
        return _same
    if into == pa.float64():
        # By its digits, which are what the database shows of it.
        return lambda values: Converted(values.cast(pa.string()).cast(into))
    if into == INSTANT:
        return lambda values: _checked(*wire_times.seconds(values))
    return partial(_float_decimals, into) if pa.types.is_decimal128(into) else None


# Digits by which a double tells all decimals apart.
_SURE: Final = 10**15
_EXACT_POWER: Final = 22


def _float_decimals(into: pa.DataType, values: pa.Array) -> Converted:
    """Floats as the decimals that they show: SQLite has decimals so."""
    if values.type != pa.float64():
        values = values.cast(pa.string()).cast(pa.float64())
    there = np.asarray(values.is_valid())
    given = np.asarray(values.fill_null(0.0) if values.null_count else values)
    scale = int(into.scale)
    if scale > _EXACT_POWER:
        return _spelled_floats(into, given, there)
    with np.errstate(over="ignore", invalid="ignore"):
        whole = np.rint(given * 10.0**scale)
        sure = np.abs(whole) < _SURE
        exact = sure & (whole / 10.0**scale == given)
    if (there & ~sure).any():
        return _spelled_floats(into, given, there)
    numbers = pa.array(np.where(exact, whole, 0).astype(np.int64), mask=~(there & exact))
    made, unfit = scaled(_wide(numbers), scale, into)
    return _checked(made, unfit | (there & ~exact))


def _spelled_floats(into: pa.DataType, given: npt.NDArray[np.float64], there: Mask) -> Converted:
    digits = [f"{Decimal(repr(x)):f}" if np.isfinite(x) else "" for x in given.tolist()]
    return _spelled_decimals(into, pa.array(digits, pa.string(), mask=~there))


def _decimals(kind: ValueType, into: pa.DataType) -> Conversion | None:
    if pa.types.is_decimal128(into):
        return partial(_decimal_values, kind, into)
    if pa.types.is_signed_integer(into) and (_is_unsigned(kind) or _scale(kind) <= 0):
        return partial(_whole_decimals, kind, into)
    return None


def _decimal_values(kind: ValueType, into: pa.DataType, values: pa.Array) -> Converted:
    if _is_unsigned(kind):
        return _checked(*scaled(_wide(values), 0, into))
    if kind.semantic == DECIMAL:
        numbers, unread = unscaled(values)
        made, unfit = scaled(numbers, _scale(kind), into)
        return _checked(made, unfit | unread)
    numbers, scales, unread = _variable(values)
    made, unfit = _by_scale(numbers, scales, into)
    return _checked(made, unfit | unread)


def _variable(values: pa.StructArray) -> tuple[pa.Array, npt.NDArray[np.int64], Mask]:
    """The numbers of VariableScaleDecimal, their scales, and which cannot be read."""
    at = {field.name: number for number, field in enumerate(values.type)}
    scale = pc.struct_field(values, [at["scale"]])
    numbers, unread = unscaled(pc.struct_field(values, [at["value"]]))
    there = np.asarray(values.is_valid())
    unread |= there & ~(np.asarray(scale.is_valid()) & np.asarray(numbers.is_valid()))
    kept = pc.if_else(pa.array(there & ~unread), numbers, None) if unread.any() else numbers
    return kept, np.asarray(scale.fill_null(0)).astype(np.int64), unread


def _whole_decimals(kind: ValueType, into: pa.DataType, values: pa.Array) -> Converted:
    made, unfit = _decimal_values(kind, WHOLE, values)
    ends = np.iinfo(into.to_pandas_dtype())
    low, high = pa.scalar(int(ends.min), WHOLE), pa.scalar(int(ends.max), WHOLE)
    fits = pc.and_(pc.greater_equal(made, low), pc.less_equal(made, high))
    over = ~np.asarray(pc.fill_null(fits, True))
    kept = pc.if_else(pa.array(~over), made, None) if over.any() else made
    return _checked(kept.cast(into), over if unfit is None else over | unfit)


def _bytes(texts: pa.Array) -> Converted:
    """Of base64."""
    given = texts.to_pylist()
    try:
        return Converted(pa.array([None if each is None else _read(each) for each in given],
                                  pa.binary()))  # fmt: skip
    except ValueError:
        pass
    unfit = np.array([not _is_base64(each) for each in given], np.bool_)
    kept = [None if each is None or bad else _read(each)
            for each, bad in zip(given, unfit.tolist(), strict=True)]  # fmt: skip
    return Converted(pa.array(kept, pa.binary()), unfit)


_read: Final = partial(binascii.a2b_base64, strict_mode=True)


def _is_base64(text: str | None) -> bool:
    try:
        return text is None or _read(text) is not None
    except ValueError:
        return False


def _lists(kind: ValueType, into: pa.DataType) -> Conversion | None:
    if not pa.types.is_list(into):
        return None
    inner = conversion(_items(kind), into.value_type)
    return None if inner is None else partial(_list_values, inner, into)


def _list_values(inner: Conversion, into: pa.DataType, values: pa.ListArray) -> Converted:
    values = _from_zero(values)
    made, unfit = inner(values.values)
    mask = values.is_null() if values.null_count else None
    whole = pa.ListArray.from_arrays(values.offsets, made, type=into, mask=mask)
    if unfit is None:
        return Converted(whole)
    owners = np.asarray(pc.list_parent_indices(values))
    return _without(whole, _owners(owners, unfit[: len(owners)], len(values)))


def _from_zero(values: pa.ListArray) -> pa.ListArray:
    """The same lists, whose elements are all those that there are."""
    lengths = values.value_lengths().fill_null(0)
    ends = np.concatenate([[0], np.cumsum(np.asarray(lengths))]).astype(np.int32)
    mask = values.is_null() if values.null_count else None
    return pa.ListArray.from_arrays(pa.array(ends), values.flatten(), type=values.type, mask=mask)


def _owners(owners: npt.NDArray[np.int64], unfit: Mask, count: int) -> Mask:
    found = np.zeros(count, np.bool_)
    found[owners[unfit]] = True
    return found


def _without(values: pa.Array, unfit: Mask) -> Converted:
    if not unfit.any():
        return Converted(values)
    at = np.where(unfit, 0, np.arange(len(values)))
    return Converted(values.take(pa.array(at, mask=unfit)), unfit)


def _structs(kind: ValueType, into: pa.DataType) -> Conversion | None:
    if not pa.types.is_struct(into):
        return None
    known = dict(kind.fields)
    made: list[tuple[str, Conversion]] = []
    for field in into:
        inner = conversion(known[field.name], field.type) if field.name in known else None
        if inner is None:
            return None
        made.append((field.name, inner))
    return partial(_struct_values, made, into)


def _struct_values(
    inner: Sequence[tuple[str, Conversion]], into: pa.DataType, values: pa.StructArray
) -> Converted:
    parts = [convert(_child(values, name)) for name, convert in inner]
    mask = values.is_null() if values.null_count else None
    whole = pa.StructArray.from_arrays(
        [part.values for part in parts], fields=list(into), mask=mask
    )
    unfit = [part.unfit for part in parts if part.unfit is not None]
    return _without(whole, np.logical_or.reduce(unfit)) if unfit else Converted(whole)


def _child(values: pa.StructArray, name: str) -> pa.Array:
    return pc.struct_field(values, [values.type.get_field_index(name)])


# ---- text --------------------------------------------------------------------------------


def _as_text(kind: ValueType, values: pa.Array) -> Converted:
    """The text of each value, as a person would write it."""
    semantic = kind.semantic or ""
    if semantic == DECIMAL:
        return _with_words(values, _decimal_texts(unscaled(values), _scale(kind)))
    if semantic == VARIABLE:
        numbers, scales, unread = _variable(values)
        made = pa.nulls(len(values), pa.string())
        for scale in np.unique(scales[np.asarray(numbers.is_valid())]).tolist():
            part = pc.if_else(pa.array(scales == scale), numbers, None)
            texts, unfit = _decimal_texts((part, np.zeros(len(values), np.bool_)), scale)
            made = pc.coalesce(made, texts)
            unread = unread if unfit is None else unread | unfit
        at = [field.name for field in values.type].index("value")
        return _with_words(pc.struct_field(values, [at]), _checked(made, unread))
    if semantic in _DATES:
        days, unfit = wire_times.dates(values)
        return _checked(days.cast(pa.string()), unfit)
    if semantic in _LOCAL:
        moments, unfit = wire_times.moments(values, **_LOCAL[semantic])
        return _checked(wire_times.texts_of(moments), unfit)
    if semantic in _CLOCKS:
        return _checked(*wire_times.clock_texts(values, **_CLOCKS[semantic]))
    if semantic in _DURATIONS:
        return _checked(*wire_times.duration_texts(values, **_DURATIONS[semantic]))
    if kind.name in ("array", "struct"):
        return _as_json(kind, values)
    if kind.name in _FLOATS:
        return Converted(_float_texts(values))
    return Converted(values if pa.types.is_string(values.type) else values.cast(pa.string()))


# What stands in the place of a decimal's bytes where PostgreSQL has no number.
_NOT_A_NUMBER: Final = {"NaN": "NaN", "Inf": "Infinity", "-Inf": "-Infinity"}


def _with_words(values: pa.StringArray, texts: Converted) -> Converted:
    """The texts of decimals, and of those that are not numbers."""
    if texts.unfit is None:
        return texts
    words = [_NOT_A_NUMBER.get(each) for each in values.filter(pa.array(texts.unfit)).to_pylist()]
    filled = np.full(len(values), None, object)
    filled[texts.unfit] = words
    kept = pa.array(filled, pa.string())
    return _checked(pc.coalesce(texts.values, kept), texts.unfit & ~np.asarray(kept.is_valid()))


def _decimal_texts(numbers: tuple[pa.Array, Mask], scale: int) -> Converted:
    plain, unread = numbers
    if 0 <= scale <= DIGITS_MAX:
        return _checked(digits_of(plain.view(pa.decimal128(DIGITS_MAX, scale))), unread)
    made, unfit = scaled(plain, scale, pa.decimal128(DIGITS_MAX, max(0, min(scale, DIGITS_MAX))))
    return _checked(digits_of(made), unfit | unread)


def _float_texts(values: pa.Array) -> pa.StringArray:
    """Infinities and what is no number in Debezium's words."""
    made = values.cast(pa.string())
    for word, found in (
        ("NaN", "nan"),
        ("NaN", "-nan"),
        ("Infinity", "inf"),
        ("-Infinity", "-inf"),
    ):
        is_so = pc.equal(made, found)
        made = pc.if_else(is_so, word, made) if pc.any(is_so).as_py() else made
    return made


_BARE: Final = frozenset({*_INTEGERS, *_FLOATS, "boolean"})


def _as_json(kind: ValueType, values: pa.Array) -> Converted:
    """Each value as JSON."""
    if kind.semantic == JSON:
        return _documents(values)
    if kind.name == "array":
        return _json_lists(kind, values)
    if kind.name == "struct" and kind.semantic != VARIABLE and kind.fields:
        return _json_objects(kind, values)
    texts, unfit = _as_text(kind, values)
    is_number = kind.semantic in (DECIMAL, VARIABLE) or _is_unsigned(kind)
    if is_number or (kind.name in _BARE and flow_type(kind) == wire_type(kind)):
        if kind.name in _FLOATS or kind.semantic in (DECIMAL, VARIABLE):
            odd = pc.match_substring_regex(texts, "[Ny]")
            texts = pc.if_else(odd, _quoted(texts), texts)
        return Converted(texts, unfit)
    return Converted(_quoted(texts), unfit)


def _documents(texts: pa.Array) -> Converted:
    """JSON that stands in strings: each must be some."""
    given = texts.to_pylist()
    try:
        found = orjson.loads(f"[{','.join(text for text in given if text is not None)}]")
        if len(found) == len(given) - texts.null_count:
            return Converted(texts)
    except ValueError:
        pass
    return _without(texts, np.array([not _is_json(text) for text in given], np.bool_))


def _is_json(text: str | None) -> bool:
    try:
        return text is None or orjson.loads(text) is not ...
    except ValueError:
        return False


_ODD: Final = r'["\\\x00-\x1f]'


def _quoted(texts: pa.Array) -> pa.Array:
    odd = pc.match_substring_regex(texts, _ODD)
    if pc.any(odd).as_py():
        made = [None if text is None else orjson.dumps(text).decode() for text in texts.to_pylist()]
        return pa.array(made, pa.string())
    return pc.binary_join_element_wise('"', texts, '"', "")


def _json_lists(kind: ValueType, values: pa.Array) -> Converted:
    values = _from_zero(values)
    made, unfit = _as_json(_items(kind), values.values)
    parts = pa.ListArray.from_arrays(values.offsets, pc.fill_null(made, "null"))
    joined = pc.binary_join_element_wise("[", pc.binary_join(parts, ","), "]", "")
    if values.null_count:
        joined = pc.if_else(values.is_valid(), joined, None)
    if unfit is None:
        return Converted(joined)
    owners = np.asarray(pc.list_parent_indices(values))
    return _without(joined, _owners(owners, unfit, len(values)))


def _json_objects(kind: ValueType, values: pa.Array) -> Converted:
    pieces: list[Any] = []
    unfit: list[Mask] = []
    for number, (name, inner) in enumerate(kind.fields):
        made = _as_json(inner, _child(values, name))
        pieces += [f"{',' if number else '{'}{orjson.dumps(name).decode()}:",
                   pc.fill_null(made.values, "null")]  # fmt: skip
        if made.unfit is not None:
            unfit.append(made.unfit)
    joined = pc.binary_join_element_wise(*pieces, "}", "")
    if values.null_count:
        joined = pc.if_else(values.is_valid(), joined, None)
    return _without(joined, np.logical_or.reduce(unfit)) if unfit else Converted(joined)


# ---- what did not fit --------------------------------------------------------------------


def shown(kind: ValueType, value: Any) -> str:
    """What a value says, for people: any value, also what no type here can hold."""
    try:
        text = _told(kind, value)
    except (ValueError, TypeError, KeyError, ArithmeticError):
        text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _told(kind: ValueType, value: Any) -> str:
    semantic = kind.semantic or ""
    if semantic == DECIMAL:
        return _number(value, _scale(kind))
    if semantic == VARIABLE:
        return _number(value["value"], value["scale"])
    if semantic in _DATES:
        return _far(int(value) * DAY_US).partition("T")[0] if abs(value) < 2**31 - 1 else (
            f"{'-' if value < 0 else ''}infinity"
        )  # fmt: skip
    if semantic in _LOCAL:
        unit = _LOCAL[semantic]
        us = int(value) * unit.get("us", 1) // unit.get("per_us", 1)
        return _far(us)
    if semantic in _CLOCKS:
        clock = wire_times.clock_texts(pa.array([value], pa.int64()), **_CLOCKS[semantic])
        return str(clock[0][0].as_py())
    if kind.name == "array" and isinstance(value, list):
        items = _items(kind)
        return f"[{', '.join('null' if x is None else shown(items, x) for x in value)}]"
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _number(text: str, scale: int) -> str:
    if text in _NOT_A_NUMBER:
        return _NOT_A_NUMBER[text]
    data = base64.b64decode(text, validate=True)
    if data == _UNAVAILABLE:
        return _UNAVAILABLE.decode()
    number = int.from_bytes(data, "big", signed=True)
    digits = str(abs(number))
    if not 0 < scale <= 20_000:
        return f"{Decimal(number).scaleb(-scale)}" if scale else str(number)
    digits = digits.rjust(scale + 1, "0")
    return f"{'-' if number < 0 else ''}{digits[:-scale]}.{digits[-scale:]}"


# What PostgreSQL's timestamps call infinity is beyond these, in Debezium.
_NEVER_US: Final = 9_223_372_036_825_200_000
_ALWAYS_US: Final = -9_223_372_036_832_400_000


def _far(us: int) -> str:
    """A moment of any year, in ISO 8601."""
    if us >= _NEVER_US or us <= _ALWAYS_US:
        return "infinity" if us > 0 else "-infinity"
    days, rest = divmod(us, DAY_US)
    # 400 years have always the same number of days.
    era, day = divmod(days, 146_097)
    plain = str(np.datetime64(day, "D"))
    year = int(plain[:4]) + 400 * era
    clock = str(np.datetime64(rest, "us"))[10:]
    return f"{year:05d}{plain[4:]}{clock}" if year < 0 else f"{year:04d}{plain[4:]}{clock}"
