"""Rows to checksums, and ranges of them to the keys that differ.

A checksum of a row has 64 bits; that two different rows of the same key have the same one happens
once in 10^19. Sums of them do not depend on the order in which a store gives its rows, and with
sums over the sorted keys the sum of any range is one subtraction.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.records.columns.compiled import kernel, load_byte, load_int32
from penstock.sinks.schema import Schema, is_json

Numbers = NDArray[np.uint64]

_FIRST: Final = np.uint64(0x9E3779B97F4A7C15)
_SECOND: Final = np.uint64(0xBF58476D1CE4E5B9)
_THIRD: Final = np.uint64(0x94D049BB133111EB)
_NULL: Final = np.uint64(0x5851F42D4C957F2D)
_NAN: Final = np.uint64(0x7FF8000000000000)
# Keys lie below this, so that the end of the last range is a number, too.
_KEYS: Final = 1 << 63


@kernel("void(int64, int64, int64, uint64[::1])")
def _hash_texts(offsets: int, data: int, first: int, out: Any) -> None:
    """One number for each text of an Arrow array, the first of which is number `first`."""
    for at in range(len(out)):
        start = load_int32(offsets + (first + at) * 4)
        end = load_int32(offsets + (first + at + 1) * 4)
        found = np.uint64(0xCBF29CE484222325)
        for place in range(start, end):
            found = (found ^ np.uint64(load_byte(data + place))) * np.uint64(0x100000001B3)
        out[at] = found ^ np.uint64(end - start)


def _mixed(numbers: Numbers) -> Numbers:
    """Each bit of the input changes half of those of the output."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _SECOND
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _THIRD
    mixed: Numbers = numbers ^ (numbers >> np.uint64(31))
    return mixed


def canonical(text: str | None) -> str | None:
    """JSON in one way of writing: stores that know it write it in their own."""
    if text is None:
        return None
    try:
        return orjson.dumps(orjson.loads(text), option=orjson.OPT_SORT_KEYS).decode()
    except orjson.JSONDecodeError:
        return text


def _column(array: pa.Array, field: pa.Field) -> Numbers:
    kind = array.type
    if is_json(field):
        array = pa.array([canonical(each) for each in array.to_pylist()], pa.string())
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        found: Numbers = np.zeros(len(array), np.uint64)
        _, offsets, data = array.buffers()
        if len(array) and offsets is not None:
            _hash_texts(offsets.address, data.address if data else 0, array.offset, found)
    elif pa.types.is_decimal(kind):
        words = np.frombuffer(array.buffers()[1], np.uint64).reshape(-1, 2)
        words = words[array.offset : array.offset + len(array)]
        found = _mixed(words[:, 0] + _FIRST) ^ words[:, 1]
    elif pa.types.is_floating(kind):
        values = pc.fill_null(array, 0.0).to_numpy(zero_copy_only=False).astype(np.float64) + 0.0
        found = values.view(np.uint64)
        found = np.where(np.isnan(values), _NAN, found)
    else:
        if pa.types.is_date32(kind):
            array = array.view(pa.int32())
        elif pa.types.is_temporal(kind):
            array = array.view(pa.int64())
        whole = pc.fill_null(array.cast(pa.int64()), 0)
        found = whole.to_numpy(zero_copy_only=False).view(np.uint64)
    found = _mixed(found + _FIRST)
    if array.null_count:
        found = np.where(array.is_null().to_numpy(zero_copy_only=False), _NULL, found)
    return found


def checksums(rows: pa.RecordBatch, fields: list[pa.Field]) -> Numbers:
    """One number for each row, of these columns."""
    total: Numbers = np.zeros(rows.num_rows, np.uint64)
    for field in fields:
        total = _mixed(total * _THIRD + _column(rows.column(field.name), field))
    return total


def keys_of(rows: pa.Table | pa.RecordBatch, schema: Schema) -> Numbers:
    """The checksum of each row's key."""
    fields = list(schema.key_arrow)
    batches = rows.to_batches() if isinstance(rows, pa.Table) else [rows]
    parts = [checksums(batch, fields) >> np.uint64(1) for batch in batches]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def rows_of(rows: pa.Table | pa.RecordBatch, schema: Schema) -> Numbers:
    """The checksum of each row."""
    fields = list(schema.fields)
    batches = rows.to_batches() if isinstance(rows, pa.Table) else [rows]
    parts = [checksums(batch, fields) for batch in batches]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


class Digest:
    """The checksums of one side's rows."""

    def __init__(self) -> None:
        self._keys: list[Numbers] = []
        self._rows: list[Numbers] = []
        self._gone: list[NDArray[np.bool_]] = []
        self.keys: Numbers = np.zeros(0, np.uint64)
        self.rows: Numbers = np.zeros(0, np.uint64)

    def put(self, keys: Numbers, rows: Numbers) -> None:
        self.add(keys, rows, gone=np.zeros(len(keys), np.bool_))

    def take_out(self, keys: Numbers) -> None:
        """Rows that were put before are not there any more."""
        self.add(keys, np.zeros(len(keys), np.uint64), gone=np.ones(len(keys), np.bool_))

    def add(self, keys: Numbers, rows: Numbers, *, gone: NDArray[np.bool_]) -> None:
        """Rows that are there, and keys that are gone, in the order of the log."""
        if len(keys):
            self._keys.append(keys)
            self._rows.append(rows)
            self._gone.append(gone)

    def sort(self, *, last_counts: bool) -> Digest:
        """Order it by key; of a log only the last row of each key counts."""
        if not self._keys:
            return self
        keys, rows = np.concatenate(self._keys), np.concatenate(self._rows)
        gone = np.concatenate(self._gone)
        self._keys, self._rows, self._gone = [], [], []
        order = np.argsort(keys, kind="stable")
        keys, rows, gone = keys[order], rows[order], gone[order]
        if last_counts:
            chosen = ~gone
            chosen[:-1] &= keys[:-1] != keys[1:]
            keys, rows = keys[chosen], rows[chosen]
        self.keys, self.rows = keys, rows
        return self

    def drop(self, keys: Numbers) -> None:
        """Without these keys; it stays ordered."""
        kept = ~np.isin(self.keys, keys)
        self.keys, self.rows = self.keys[kept], self.rows[kept]

    def row(self, key: int) -> list[int]:
        """The checksums of the rows of a key."""
        low, high = np.searchsorted(self.keys, np.uint64(key)), np.searchsorted(
            self.keys, np.uint64(key), side="right"
        )  # fmt: skip
        return [int(each) for each in self.rows[low:high]]


class _Sums:
    """How many rows a range has, and the sum of their checksums."""

    def __init__(self, digest: Digest) -> None:
        self._keys = digest.keys
        self._sums = np.zeros(len(digest.keys) + 1, np.uint64)
        np.cumsum(_mixed(_mixed(digest.keys + _FIRST) + digest.rows), out=self._sums[1:])

    def of(self, low: Numbers, high: Numbers) -> tuple[NDArray[np.int64], Numbers]:
        begin, end = np.searchsorted(self._keys, low), np.searchsorted(self._keys, high)
        return end - begin, self._sums[end] - self._sums[begin]


def differing(one: Digest, other: Digest) -> Numbers:
    """The keys whose rows are not the same: ranges that differ are halved until they are keys."""
    sides = _Sums(one), _Sums(other)
    low, high = np.array([0], np.uint64), np.array([_KEYS], np.uint64)
    width = _KEYS
    while True:
        counts, sums = zip(*(side.of(low, high) for side in sides), strict=True)
        unlike = (counts[0] != counts[1]) | (sums[0] != sums[1])
        low, high = low[unlike], high[unlike]
        if width == 1 or not len(low):
            found: Numbers = np.sort(low)
            return found
        width //= 2
        middle = low + np.uint64(width)
        low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
