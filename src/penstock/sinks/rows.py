"""Rows and keys as text, for stores that hold documents: from Arrow and back without loss.

A row is a JSON object. What JSON lacks is text: decimals as they are written, times as ISO 8601,
bytes in base64, numbers that are none as "NaN", "Infinity" and "-Infinity". A date or time outside
of the years 1 to 9999, which ISO 8601 has no common way for, is its number of days or
microseconds since 1970, a time of a day that no day has its number of microseconds. The schema says
what to read it as.

A key is text in two ways: `sortable_keys`, whose order is that of the keys, and `readable_keys`,
for people and their programs: "42", "DE:4711".
"""

from __future__ import annotations

import base64
import datetime as dt
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import reduce
from typing import Any, Final
from urllib.parse import unquote

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.sinks.contract import MAX_REFUSED, Changes, Key, Refused
from penstock.sinks.schema import Schema
from penstock.sinks.times import DAY_RANGE, DAY_US, US_RANGE, Unfit

_ODD_FLOATS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_OFFSET: Final = 1 << 63
_DECIMAL_OFFSET: Final = 10**38


# ---- rows ------------------------------------------------------------------------------------


def columns_of(table: pa.Table) -> list[list[Any]]:
    """The columns as lists of what JSON can say."""
    return [_json_values(table.column(at).combine_chunks()) for at in range(table.num_columns)]


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """The rows as what JSON can say."""
    names = table.column_names
    return [
        dict(zip(names, values, strict=True)) for values in zip(*columns_of(table), strict=True)
    ]


def encoded_rows(table: pa.Table) -> list[bytes]:
    """The rows as JSON."""
    dumps = orjson.dumps
    return [dumps(row) for row in rows_of(table)]


def table_from(rows: Sequence[Mapping[str, Any]], schema: Schema) -> pa.Table:
    """Back from rows; columns that a row does not have are null."""
    columns = [
        _arrow_values([row.get(field.name) for row in rows], field.type) for field in schema.fields
    ]
    return pa.table(columns, schema=schema.arrow)


def _json_values(column: pa.Array) -> list[Any]:
    kind, types = column.type, pa.types
    if types.is_floating(kind):
        values: list[Any] = column.to_pylist()
        finite = pc.all(pc.is_finite(column), min_count=0).as_py()
        return values if finite is not False else [_json_float(value) for value in values]
    if types.is_binary(kind):
        encode = base64.b64encode
        return [
            None if value is None else encode(value).decode("ascii") for value in column.to_pylist()
        ]
    if types.is_date32(kind):
        return _json_times(column, pa.int32(), DAY_RANGE)
    if types.is_timestamp(kind):
        return _json_times(column, pa.int64(), US_RANGE)
    if types.is_time64(kind):
        return _json_times(column, pa.int64(), (0, DAY_US - 1))
    if types.is_decimal(kind):
        return list(column.cast(pa.string()).to_pylist())
    return list(column.to_pylist())


def _json_float(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _json_times(column: pa.Array, number: pa.DataType, bounds: tuple[int, int]) -> list[Any]:
    numbers = column.cast(pa.int64()) if number == pa.int64() else column.cast(number)
    ordinary = pc.and_(pc.greater_equal(numbers, bounds[0]), pc.less_equal(numbers, bounds[1]))
    if pc.all(ordinary, min_count=0).as_py() is False:
        kept = column.filter(pc.fill_null(ordinary, True))
        texts = iter(_iso(kept))
        odd = zip(numbers.to_pylist(), ordinary.to_pylist(), strict=True)
        return [value if fits is False else next(texts) for value, fits in odd]
    return _iso(column)


def _iso(column: pa.Array) -> list[Any]:
    text = column.cast(pa.string())
    if pa.types.is_timestamp(column.type):
        text = pc.binary_replace_slice(text.cast(pa.binary()), 10, 11, b"T").cast(pa.string())
    return list(text.to_pylist())


def _arrow_values(values: list[Any], kind: pa.DataType) -> pa.Array:
    types = pa.types
    if types.is_floating(kind):
        return pa.array([_ODD_FLOATS.get(v, v) if type(v) is str else v for v in values], kind)
    if types.is_binary(kind):
        decode = base64.b64decode
        return pa.array([None if v is None else decode(v) for v in values], kind)
    if types.is_temporal(kind):
        return _arrow_times(values, kind)
    if types.is_decimal(kind):
        return pa.array([None if v is None else Decimal(v) for v in values], kind)
    return pa.array(values, kind)


def _arrow_times(values: list[Any], kind: pa.DataType) -> pa.Array:
    if not any(type(value) is int for value in values):
        return _from_iso(values, kind)
    number = pa.int32() if pa.types.is_date32(kind) else pa.int64()
    texts = _from_iso([v if type(v) is str else None for v in values], kind)
    numbers = pa.array([v if type(v) is int else None for v in values], number)
    return pc.coalesce(texts.cast(number), numbers).cast(kind)


def _from_iso(texts: list[str | None], kind: pa.DataType) -> pa.Array:
    if pa.types.is_time64(kind):
        # Arrow does not read them.
        read = dt.time.fromisoformat
        return pa.array([None if text is None else read(text) for text in texts], kind)
    return pa.array(texts, pa.string()).cast(kind)


# ---- keys ------------------------------------------------------------------------------------


def keys_of(table: pa.Table, schema: Schema) -> list[Key]:
    """The keys of the rows as Python has them."""
    columns = [_python_values(table.column(name)) for name in schema.key]
    return list(zip(*columns, strict=True))


def _python_values(column: pa.ChunkedArray) -> list[Any]:
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):
        # Python has no time beyond the year 9999: it is told by its number.
        return _plain(column)


def sortable_keys(table: pa.Table, schema: Schema) -> list[str]:
    """One text for each key; they are in order as the keys are, and widening a number in the
    schema does not change them."""
    last = len(schema.key) - 1
    columns = []
    for at, name in enumerate(schema.key):
        column = table.column(name).combine_chunks()
        columns.append(_sortable(_plain(column), column.type, last=at == last))
    if last == 0:
        return columns[0]
    return ["".join(parts) for parts in zip(*columns, strict=True)]


def sortable_key(key: Key, schema: Schema) -> str:
    """The text of one key, which may be the beginning of one: a bound of a scan."""
    fields = [schema.field(name) for name in schema.key[: len(key)]]
    arrays = [pa.array([value], field.type) for value, field in zip(key, fields, strict=True)]
    last = len(schema.key) - 1
    return "".join(
        _sortable(_plain(array), array.type, last=at == last)[0] for at, array in enumerate(arrays)
    )


def _plain(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Times and dates as numbers, decimals as Python has them."""
    if pa.types.is_date32(column.type):
        return list(column.cast(pa.int32()).to_pylist())
    if pa.types.is_temporal(column.type):
        return list(column.cast(pa.int64()).to_pylist())
    return list(column.to_pylist())


def _sortable(values: list[Any], kind: pa.DataType, *, last: bool) -> list[str]:
    types = pa.types
    if types.is_string(kind):
        if last:
            return values
        return [v.replace("\x01", "\x01\x02").replace("\x00", "\x01\x01") + "\x00" for v in values]
    if types.is_binary(kind):
        return [v.hex() + ("" if last else "\x00") for v in values]
    if types.is_boolean(kind):
        return ["1" if value else "0" for value in values]
    if types.is_decimal(kind):
        return [sortable_decimal(value, kind.scale) for value in values]
    return [f"{value + _OFFSET:016x}" for value in values]


def sortable_decimal(value: Decimal, scale: int) -> str:
    """The text of a decimal, in order as the numbers are."""
    return f"{_unscaled(value, scale) + _DECIMAL_OFFSET:039d}"


def _unscaled(value: Decimal, scale: int) -> int:
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    number: int = int("".join(map(str, digits))) * 10 ** (scale + exponent)
    return -number if sign else number


def readable_keys(table: pa.Table, schema: Schema) -> list[str]:
    """One text for each key: its only column, or its columns with ":" between."""
    columns = []
    for name in schema.key:
        column = table.column(name).combine_chunks()
        values = column.to_pylist() if pa.types.is_binary(column.type) else _json_values(column)
        columns.append(_readable(values, column.type, several=len(schema.key) > 1))
    if len(columns) == 1:
        return columns[0]
    return [":".join(parts) for parts in zip(*columns, strict=True)]


def readable_key(key: Key, schema: Schema) -> str:
    """The text of one key."""
    table = pa.table([[value] for value in key], schema=schema.key_arrow)
    return readable_keys(table, schema)[0]


def _readable(values: list[Any], kind: pa.DataType, *, several: bool) -> list[str]:
    if pa.types.is_string(kind):
        if not several:
            return values
        return [value.replace("%", "%25").replace(":", "%3A") for value in values]
    if pa.types.is_binary(kind):
        return [value.hex() for value in values]
    if pa.types.is_boolean(kind):
        return ["true" if value else "false" for value in values]
    if several and pa.types.is_temporal(kind):
        return [str(value).replace(":", "%3A") for value in values]
    return [str(value) for value in values]


def comparable_key(key: Key, schema: Schema) -> Key:
    """A key that can be compared with others: times as numbers, for Python does not have all."""
    fields = [schema.field(name) for name in schema.key]
    return tuple(
        _plain(pa.array([value], field.type))[0] for value, field in zip(key, fields, strict=True)
    )


def comparable_from_readable(text: str, schema: Schema) -> Key:
    """Such a key from what `readable_keys` gives."""
    several = len(schema.key) > 1
    parts = [unquote(part) for part in text.split(":")] if several else [text]
    return tuple(
        _key_value(part, schema.field(name).type)
        for part, name in zip(parts, schema.key, strict=True)
    )


def _key_value(text: str, kind: pa.DataType) -> Any:
    types = pa.types
    simple: Iterable[tuple[Callable[[pa.DataType], bool], Callable[[str], Any]]] = (
        (types.is_string, str),
        (types.is_integer, int),
        (types.is_binary, bytes.fromhex),
        (types.is_boolean, lambda value: value == "true"),
        (types.is_decimal, Decimal),
    )
    for test, convert in simple:
        if test(kind):
            return convert(text)
    number = text.lstrip("-").isdigit()
    return _plain(_arrow_values([int(text) if number else text], kind))[0]


# ---- rows that do not fit ---------------------------------------------------------------------


def fitting(
    changes: Changes,
    schema: Schema,
    unfit: Callable[[pa.Table], list[Unfit]],
    most: int = MAX_REFUSED,
) -> tuple[Changes, list[Refused]]:
    """Changes without what a store has no place for, and the rows that this takes out: one more
    than `most` of them, if there are so many, since that is an error. A key that
    it cannot hold is in none of its rows: nothing is to be deleted."""
    gone = _any(unfit(changes.deletes))
    if gone is not None:
        changes = replace(
            changes,
            deletes=changes.deletes.filter(pc.invert(gone)),
            deleted_at=changes.deleted_at.filter(pc.invert(gone)),
        )
    found = unfit(changes.upserts)
    bad = _any(found)
    if bad is None:
        return changes, []
    refused = [
        refused_upsert(changes, schema, at, next(why for mask, why in found if mask[at].as_py()))
        for at in pc.indices_nonzero(bad).to_pylist()[: most + 1]
    ]
    kept = pc.invert(bad)
    fits = replace(
        changes,
        upserts=changes.upserts.filter(kept),
        upserted_at=changes.upserted_at.filter(kept),
    )
    return fits, refused


def _any(unfit: list[Unfit]) -> pa.ChunkedArray | None:
    """The rows that do not fit for whatever reason; None if all do."""
    masks = [pc.fill_null(mask, False) for mask, _ in unfit]
    masks = [mask for mask in masks if pc.any(mask).as_py()]
    return reduce(pc.or_, masks) if masks else None


def refused_upsert(changes: Changes, schema: Schema, row: int, reason: str) -> Refused:
    """The row of the upserts that the store cannot take."""
    return refused_row(changes.upserts, changes.upserted_at, schema, row, reason)


def refused_delete(changes: Changes, schema: Schema, row: int, reason: str) -> Refused:
    """The row of the deletes that the store cannot take."""
    return refused_row(changes.deletes, changes.deleted_at, schema, row, reason)


def refused_row(
    table: pa.Table, origin: pa.Table, schema: Schema, row: int, reason: str
) -> Refused:
    """A row that the store cannot take, with its place in the log."""
    key = keys_of(table.slice(row, 1), schema)[0]
    place = origin.slice(row, 1).to_pylist()[0]
    return Refused(key, reason, place["topic"], place["partition"], place["offset"])
