"""Many rows under one key: the state of a join's side.

    key, bucket -> buckets, [rows]

The rows of a key are one list. Where a list would become long it is parted into buckets by a hash
of what tells the rows apart, so that a change of a key with a million rows does not write a million
rows: only its bucket. Bucket 0 says how many buckets the key has, and is all there is to most keys.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.state import KeyedTable, State
from penstock.spark.views.columns import (
    Indices,
    Mask,
    distinct,
    key_fields,
    key_names,
    numbered,
    one_way,
    taken,
)

# A longer list is parted, into as many buckets as bring lists to about a quarter of this.
LONG_LIST: Final = 256
MOST_BUCKETS: Final = 1 << 16
# The number of the key that a row is under.
CODE: Final = "_code"
# How it is written is part of what buckets are known by.
_UTC: Final = ZoneInfo("UTC")
_BUCKET, _BUCKETS, _ROWS = "_bucket", "_buckets", "_rows"


@dataclass(frozen=True, slots=True)
class Some:
    """The rows of some keys: all, or those in the buckets of the rows that were asked about."""

    # With a column CODE: the position of the row's key.
    rows: pa.Table
    # The unit of each row (a key and a bucket), and the units: which key, which bucket.
    unit: Indices
    unit_code: Indices
    unit_bucket: Indices
    # By key.
    buckets: Indices


@dataclass(slots=True)
class Lists:
    """Rows under keys, each told apart from others of its key by the columns `identity`."""

    table: KeyedTable
    schema: pa.Schema
    identity: tuple[str, ...]
    width: int

    @classmethod
    def of(
        cls,
        state: State,
        name: str,
        *,
        key: Sequence[pa.DataType],
        schema: pa.Schema,
        identity: Sequence[str],
    ) -> Lists:
        fields = [
            *key_fields(key),
            pa.field(_BUCKET, pa.int32()),
            pa.field(_BUCKETS, pa.int32()),
            pa.field(_ROWS, pa.list_(pa.struct(list(schema)))),
        ]
        names = [*key_names(len(key)), _BUCKET]
        return cls(state.table(name, pa.schema(fields), names), schema, tuple(identity), len(key))

    # ---- reading -------------------------------------------------------------------------

    def get(self, keys: pa.Table, changed: pa.Table, everything: Mask) -> Some:
        """The rows of keys; of a key that is not in `everything` at least the buckets of `changed`.

        `changed` has the columns of the identity and CODE, which is a position in `keys`.
        """
        count = len(keys)
        codes = np.arange(count, dtype=np.int64)
        zero = np.zeros(count, np.int64)
        first = self._units(keys, codes, zero)
        buckets = first[_BUCKETS].fill_null(1).to_numpy().astype(np.int64)
        parts, unit_code, unit_bucket = [first], [codes], [zero]
        if (buckets > 1).any():
            more = self._further(buckets, changed, everything)
            if len(more[0]):
                parts.append(self._units(keys, *more))
                unit_code.append(more[0])
                unit_bucket.append(more[1])
        rows, unit = self._flat(pa.concat_tables(parts))
        code, bucket = np.concatenate(unit_code), np.concatenate(unit_bucket)
        return Some(rows.append_column(CODE, pa.array(code[unit])), unit, code, bucket, buckets)

    def _units(self, keys: pa.Table, code: Indices, bucket: Indices) -> pa.Table:
        wanted = keys if len(code) == len(keys) and not bucket.any() else taken(keys, code)
        wanted = wanted.append_column(_BUCKET, pa.array(bucket.astype(np.int32)))
        return self.table.get(wanted).select([_BUCKETS, _ROWS])

    def _further(
        self, buckets: Indices, changed: pa.Table, everything: Mask
    ) -> tuple[Indices, Indices]:
        """The units beside bucket 0 that are needed."""
        large = np.flatnonzero((buckets > 1) & everything)
        code = np.repeat(large, buckets[large] - 1)
        bucket = np.concatenate([np.arange(1, n) for n in buckets[large]] or [np.empty(0, int)])
        of_rows = changed[CODE].to_numpy().astype(np.int64)
        some = np.flatnonzero((buckets[of_rows] > 1) & ~everything[of_rows])
        if len(some):
            own = of_rows[some]
            hashes = _hashes(taken(changed, some), self.identity) % buckets[own]
            pair = np.unique(np.stack([own, hashes]), axis=1)
            pair = pair[:, pair[1] > 0]
            code, bucket = np.concatenate([code, pair[0]]), np.concatenate([bucket, pair[1]])
        return code.astype(np.int64), bucket.astype(np.int64)

    def _flat(self, units: pa.Table) -> tuple[pa.Table, Indices]:
        lists = units[_ROWS].combine_chunks()
        if isinstance(lists, pa.ChunkedArray):
            lists = pa.concat_arrays(lists.chunks)
        unit = pc.list_parent_indices(lists).to_numpy().astype(np.int64)
        inner = pc.list_flatten(lists)
        return pa.Table.from_arrays(inner.flatten(), schema=self.schema), unit

    # ---- writing -------------------------------------------------------------------------

    def put(self, keys: pa.Table, some: Some, rows: pa.Table, touched: Indices) -> None:
        """Keep `rows` (with CODE) as what is in the units of `some` that have a key in `touched`.

        Rows that were in `some` and are not in `rows` are forgotten.
        """
        if not len(touched):
            return
        is_touched = np.zeros(len(keys), np.bool_)
        is_touched[touched] = True
        code = rows[CODE].to_numpy().astype(np.int64)
        which = is_touched[code]
        if not which.all():
            rows, code = rows.filter(pa.array(which)), code[which]
        bucket = self._bucket_of(rows, code, some.buckets)
        # Units that had rows, or have some now. Bucket 0 of a parted key stays, even if empty.
        stride = np.int64(MOST_BUCKETS)
        units = np.flatnonzero(is_touched[some.unit_code])
        had = some.unit_code[units] * stride + some.unit_bucket[units]
        have = code * stride + bucket
        self._write(keys, rows, have, distinct(np.concatenate([had, have])), some.buckets)
        self._part_long(keys, have, some.buckets)

    def _bucket_of(self, rows: pa.Table, code: Indices, buckets: Indices) -> Indices:
        bucket = np.zeros(len(rows), np.int64)
        parted = np.flatnonzero(buckets[code] > 1)
        if len(parted):
            bucket[parted] = _hashes(taken(rows, parted), self.identity) % buckets[code[parted]]
        return bucket

    def _write(
        self, keys: pa.Table, rows: pa.Table, have: Indices, units: Indices, buckets: Indices
    ) -> None:
        order = np.argsort(have, kind="stable")
        sizes = np.searchsorted(have[order], units, "right") - np.searchsorted(have[order], units)
        stay = (sizes > 0) | ((units % MOST_BUCKETS == 0) & (buckets[units // MOST_BUCKETS] > 1))
        offsets = np.concatenate([[0], np.cumsum(sizes[stay])]).astype(np.int32)
        ordered = taken(rows.select(self.schema.names), order).combine_chunks()
        inner = pa.StructArray.from_arrays(
            [_one(column) for column in ordered.columns], fields=list(self.schema)
        )
        code = units // MOST_BUCKETS
        named = taken(keys, code).append_column(
            _BUCKET, pa.array((units % MOST_BUCKETS).astype(np.int32))
        )
        many = pa.array(buckets[code[stay]].astype(np.int32))
        lists = pa.ListArray.from_arrays(pa.array(offsets), inner)
        rows = named.filter(pa.array(stay)).append_column(_BUCKETS, many)
        self.table.change(rows.append_column(_ROWS, lists), named.filter(pa.array(~stay)))

    def _part_long(self, keys: pa.Table, have: Indices, buckets: Indices) -> None:
        """Part the lists that have become long into more buckets."""
        units, sizes = np.unique(have, return_counts=True)
        long = distinct(units[sizes > LONG_LIST] // MOST_BUCKETS)
        long = long[buckets[long] < MOST_BUCKETS]
        if not len(long):
            return
        few = taken(keys, long)
        empty = pa.schema([*self.schema, pa.field(CODE, pa.int64())]).empty_table()
        some = self.get(few, empty, np.ones(len(long), np.bool_))
        code = some.rows[CODE].to_numpy().astype(np.int64)
        wanted = np.bincount(code, minlength=len(long)) * 4 // LONG_LIST
        more = np.minimum(2 ** np.ceil(np.log2(wanted)), MOST_BUCKETS).astype(np.int64)
        more = np.maximum(more, some.buckets)
        have = code * MOST_BUCKETS + self._bucket_of(some.rows, code, more)
        had = some.unit_code * MOST_BUCKETS + some.unit_bucket
        self._write(few, some.rows, have, distinct(np.concatenate([had, have])), more)


def _one(column: pa.ChunkedArray) -> pa.Array:
    joined = column.combine_chunks()
    return joined if isinstance(joined, pa.Array) else pa.concat_arrays(joined.chunks)


def _hashes(rows: pa.Table, names: Sequence[str]) -> Indices:
    """A hash for each row that is the same in all processes; for the rows of large keys only."""
    numbers, first = numbered(rows, names)
    different = one_way(taken(rows.select(list(names)), first), names)
    values = zip(*(map(_in_utc, different[name].to_pylist()) for name in names), strict=True)
    found = np.fromiter((zlib.crc32(repr(each).encode()) for each in values), np.int64, len(first))
    return found[numbers]


def _in_utc(value: object) -> object:
    """A time with a zone of Python's own: Arrow's versions give zones of different classes."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(_UTC)
    return value
