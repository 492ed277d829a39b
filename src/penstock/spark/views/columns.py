"""Columns by the thousand: keys that may be null, rows numbered by key, compared, matched.

State is kept by keys that are never null: a null becomes the zero of its type, and a column
`_nulls` says which of them were null, so that null and zero are two keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.state import numbering
from penstock.spark.state.numbering import one_of_equals, whole

SIGN: Final = "_plus"
PRESENT: Final = "_present"
DELETED: Final = "_deleted"
NULLS: Final = "_nulls"

Indices = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


def shown(kind: pa.DataType) -> str:
    """A type as Spark names it."""
    from pyspark.sql.pandas.types import from_arrow_type

    return from_arrow_type(kind).simpleString()


def loose(schema: pa.Schema) -> pa.Schema:
    """The same, but everything may be null: what goes and comes is put beside what was kept."""
    return pa.schema([field.with_nullable(True).remove_metadata() for field in schema])


def loosened(rows: pa.Table) -> pa.Table:
    return pa.Table.from_arrays(rows.columns, schema=loose(rows.schema))


def mask(column: pa.ChunkedArray | pa.Array) -> Mask:
    """A column of booleans, null counting as false."""
    found: Mask = whole(column).fill_null(False).to_numpy(zero_copy_only=False).astype(np.bool_)
    return found


def numbered(rows: pa.Table, key: Sequence[str]) -> tuple[Indices, Indices]:
    """A number for each row, the same where the key is, nulls too; and where each is first.

    Without a key all rows are one.
    """
    numbers, different = numbering.numbered([rows[name] for name in key], len(rows))
    first = np.empty(different, np.int64)
    # Of several the last assignment stays.
    first[numbers[::-1]] = np.arange(len(rows) - 1, -1, -1, dtype=np.int64)
    return numbers, first


def one_way(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    """Rows whose columns of a key are written in one way: what is one key is shown as one."""
    for name in names:
        at = rows.schema.get_field_index(name)
        if pa.types.is_floating(rows.schema.field(at).type):
            column = one_of_equals(whole(rows[name]))
            rows = rows.set_column(at, rows.schema.field(at), column)
    return rows


def distinct(values: Indices) -> Indices:
    """Each value once, in order. By sorting: NumPy's own way for integers takes twice as long."""
    ordered = np.sort(values)
    first = np.ones(len(ordered), np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    found: Indices = ordered[first]
    return found


def zero(kind: pa.DataType) -> pa.Scalar[Any]:
    """The value that stands for null in keys."""
    if pa.types.is_boolean(kind):
        return pa.scalar(False)
    if pa.types.is_decimal(kind):
        return pa.scalar(Decimal(0), kind)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pa.scalar("", kind)
    if pa.types.is_binary(kind):
        return pa.scalar(b"", kind)
    if pa.types.is_date(kind):
        return pa.scalar(date(1970, 1, 1), kind)
    if pa.types.is_timestamp(kind):
        zone = UTC if kind.tz is not None else None
        return pa.scalar(datetime(1970, 1, 1, tzinfo=zone), kind)
    return pa.scalar(0, kind)


def key_fields(kinds: Sequence[pa.DataType]) -> list[pa.Field[Any]]:
    """The fields of a key in state."""
    return [*(pa.field(f"_k{at}", kind) for at, kind in enumerate(kinds)),
            pa.field(NULLS, pa.int64())]  # fmt: skip


def key_names(count: int) -> list[str]:
    return [*(f"_k{at}" for at in range(count)), NULLS]


def written_as(kinds: Iterable[pa.DataType]) -> str:
    """How keys of these types are written, where they were written in another way once.

    Part of what a flow is compared by when it starts again: under other keys of its topic, what is
    there already would stay for ever.
    """
    return " in microseconds" if any(map(pa.types.is_timestamp, kinds)) else ""


def keys_of(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """The keys of rows as state has them."""
    nulls = np.zeros(len(rows), np.int64)
    columns: list[pa.Array] = []
    for at, name in enumerate(key):
        column = one_of_equals(whole(rows[name]))
        if column.null_count:
            missing = column.is_null().to_numpy(zero_copy_only=False)
            nulls |= missing.astype(np.int64) << at
            column = column.fill_null(zero(column.type))
        columns.append(column)
    return pa.table([*columns, pa.array(nulls)], names=key_names(len(key)))


def same(left: pa.Table, right: pa.Table, names: Sequence[str]) -> Mask:
    """Which rows of two tables of the same length are equal: null equals null, NaN equals NaN."""
    equal = np.ones(len(left), np.bool_)
    for name in names:
        one, other = whole(left[name]), whole(right[name])
        if pa.types.is_nested(one.type):
            pairs = zip(one.to_pylist(), other.to_pylist(), strict=True)
            equal &= np.fromiter((a == b for a, b in pairs), np.bool_, len(one))
            continue
        found = mask(pc.equal(one, other))
        if one.null_count and other.null_count:
            found |= mask(one.is_null()) & mask(other.is_null())
        if pa.types.is_floating(one.type):
            found |= mask(pc.is_nan(one)) & mask(pc.is_nan(other))
        equal &= found
    return equal


def pairs(left: Indices, right: Indices) -> tuple[Indices, Indices]:
    """The positions of all pairs whose numbers are the same."""
    order = np.argsort(right, kind="stable")
    there = right[order]
    start = np.searchsorted(there, left, "left")
    count = np.searchsorted(there, left, "right") - start
    total = int(count.sum())
    of_left = np.repeat(np.arange(len(left), dtype=np.int64), count)
    before = np.repeat(np.cumsum(count) - count, count)
    at = np.arange(total, dtype=np.int64) - before + np.repeat(start, count)
    return of_left, order[at].astype(np.int64)


def taken(rows: pa.Table, at: Indices) -> pa.Table:
    return rows.take(pa.array(at))


def kept(rows: pa.Table, which: Mask) -> pa.Table:
    return rows if which.all() else rows.filter(pa.array(which))


def signed(minus: pa.Table, plus: pa.Table, names: Sequence[str]) -> pa.Table:
    """Rows that are gone and rows that have come, in one table."""
    parts = []
    for rows, sign in ((minus, False), (plus, True)):
        column = pa.array(np.full(len(rows), sign))
        parts.append(rows.select(list(names)).append_column(SIGN, column))
    return pa.concat_tables(parts).combine_chunks()


def nulls(schema: pa.Schema, count: int) -> pa.Table:
    """Rows of nothing."""
    return pa.table([pa.nulls(count, field.type) for field in schema], schema=schema)
