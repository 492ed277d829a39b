"""Keys of any type as 64-bit numbers, and whether two of them are the same.

The numbers stand in files, so what they are for a key must never change. Nulls are values like
others here, and the same as each other; so is NaN, and 0.0 and -0.0 are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.records.columns.compiled import kernel

Numbers: TypeAlias = npt.NDArray[np.uint64]
Flags: TypeAlias = npt.NDArray[np.bool_]

_SEED: Final = 0x9E3779B97F4A7C15
_BYTES: Final = "Array(uint8, 1, 'C', readonly=True)"
_OFFSETS: Final = "Array(int64, 1, 'C', readonly=True)"
_NO_NULLS: Final = np.zeros(0, np.uint8)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A column without parts: numbers, or bytes by offsets. `valid` is empty if none is null."""

    numbers: Numbers | None
    offsets: npt.NDArray[np.int64]
    data: npt.NDArray[np.uint8]
    valid: npt.NDArray[np.uint8]


@kernel(f"void(uint64[::1], {_OFFSETS}, {_BYTES}, {_BYTES})")
def _fold_bytes(out: Any, offsets: Any, data: Any, valid: Any) -> None:
    """Add a column of bytes to the hashes so far; eight bytes at a time."""
    for row in range(len(out)):
        h = out[row] ^ np.uint64(0x2545F4914F6CDD1D)
        if len(valid) == 0 or valid[row]:
            at, end = offsets[row], offsets[row + 1]
            h ^= np.uint64(end - at) * np.uint64(0x9FB21C651E98DF25)
            while at < end:
                word = np.uint64(0)
                step = min(np.int64(8), end - at)
                for byte in range(step):
                    word |= np.uint64(data[at + byte]) << np.uint64(8 * byte)
                h ^= word
                h *= np.uint64(0xBF58476D1CE4E5B9)
                h ^= h >> np.uint64(29)
                at += step
        else:
            # Else null would be the same as no bytes.
            h ^= np.uint64(0xD6E8FEB86659FD93)
        h *= np.uint64(0x94D049BB133111EB)
        out[row] = h ^ (h >> np.uint64(32))


@kernel(f"void(uint8[::1], {_OFFSETS}, {_BYTES}, {_OFFSETS}, {_BYTES})")
def _compare_bytes(out: Any, left: Any, left_data: Any, right: Any, right_data: Any) -> None:
    """Clear what is not the same."""
    for row in range(len(out)):
        if not out[row]:
            continue
        size = left[row + 1] - left[row]
        if size != right[row + 1] - right[row]:
            out[row] = 0
            continue
        for byte in range(size):
            if left_data[left[row] + byte] != right_data[right[row] + byte]:
                out[row] = 0
                break


def hashes(columns: Sequence[pa.Array]) -> Numbers:
    """One number for each row; the same for the same keys."""
    assert columns
    out = np.full(len(columns[0]), _SEED, np.uint64)
    for column in columns:
        for leaf in _leaves(column):
            if leaf.numbers is None:
                _fold_bytes(out, leaf.offsets, leaf.data, leaf.valid)
            else:
                _fold_numbers(out, leaf)
    return out


def _fold_numbers(out: Numbers, leaf: _Leaf) -> None:
    assert leaf.numbers is not None
    with np.errstate(over="ignore"):
        out ^= leaf.numbers
        if len(leaf.valid):
            # Else null would be the same as 0.
            out ^= (np.uint64(1) - leaf.valid.astype(np.uint64)) * np.uint64(0xD6E8FEB86659FD93)
        out ^= out >> np.uint64(30)
        out *= np.uint64(0xBF58476D1CE4E5B9)
        out ^= out >> np.uint64(27)
        out *= np.uint64(0x94D049BB133111EB)
        out ^= out >> np.uint64(31)


def same(left: Sequence[pa.Array], right: Sequence[pa.Array]) -> Flags:
    """Which rows are the same in two lists of columns of the same types."""
    out = np.ones(len(left[0]), np.uint8)
    for mine, yours in zip(left, right, strict=True):
        for one, other in zip(_leaves(mine), _leaves(yours), strict=True):
            if len(one.valid) or len(other.valid):
                out &= _valid(one, len(out)) == _valid(other, len(out))
            if one.numbers is not None:
                out &= one.numbers == other.numbers
            else:
                _compare_bytes(out, one.offsets, one.data, other.offsets, other.data)
    return out.view(np.bool_)


def _valid(leaf: _Leaf, count: int) -> npt.NDArray[np.uint8]:
    return leaf.valid if len(leaf.valid) else np.ones(count, np.uint8)


# ---- columns -----------------------------------------------------------------------------


def _leaves(column: pa.Array) -> list[_Leaf]:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _leaves(column.dictionary_decode())
    if isinstance(column, pa.ExtensionArray):
        return _leaves(column.storage)
    valid = _NO_NULLS
    if column.null_count:
        valid = np.asarray(column.is_valid().cast(pa.uint8()))
    if pa.types.is_struct(kind):
        # Its parts are null where it is.
        parts = [leaf for part in column.flatten() for leaf in _leaves(part)]
        return [_fixed(np.zeros(len(column), np.uint64), valid), *parts]
    if pa.types.is_null(kind):
        return [_fixed(np.zeros(len(column), np.uint64), np.zeros(len(column), np.uint8))]
    if pa.types.is_decimal(kind):
        return _of_decimals(column, valid)
    if pa.types.is_floating(kind):
        floats = np.array(column.cast(pa.float64()).fill_null(0.0), np.float64) + 0.0
        floats[np.isnan(floats)] = np.nan
        return [_fixed(floats.view(np.uint64), valid)]
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_temporal(kind):
        return [_fixed(_integers(column), valid)]
    return [_of_bytes(_as_bytes(column), valid)]


def _fixed(numbers: Numbers, valid: npt.NDArray[np.uint8]) -> _Leaf:
    return _Leaf(numbers, np.zeros(0, np.int64), np.zeros(0, np.uint8), valid)


def _integers(column: pa.Array) -> Numbers:
    kind = column.type
    if pa.types.is_temporal(kind):
        column = column.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
    if column.null_count:
        column = column.fill_null(0)
    plain = np.asarray(column)
    if plain.dtype == np.uint64:
        return plain
    return plain.astype(np.int64).view(np.uint64)


def _of_decimals(column: pa.Array, valid: npt.NDArray[np.uint8]) -> list[_Leaf]:
    kind = column.type
    if kind.bit_width < 128:
        column = column.cast(pa.decimal128(kind.precision, kind.scale))
    words = column.type.bit_width // 64
    whole = np.frombuffer(column.buffers()[1], np.uint64, words * (column.offset + len(column)))
    parts = whole[words * column.offset :].reshape(-1, words)
    leaves = []
    for at in range(words):
        numbers = parts[:, at].copy()
        if len(valid):
            numbers *= valid
        leaves.append(_fixed(numbers, valid))
    return leaves


def _as_bytes(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_fixed_size_binary(kind):
        column = column.cast(pa.binary())
    elif pa.types.is_nested(kind):
        # Lists and maps are rare as keys: by their text.
        texts = [None if each is None else repr(each) for each in column.to_pylist()]
        column = pa.array(texts, pa.string())
    return column.cast(pa.large_binary())


def _of_bytes(column: pa.Array, valid: npt.NDArray[np.uint8]) -> _Leaf:
    if column.null_count:
        column = column.fill_null(b"")
    _, offsets, data = column.buffers()
    at = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    if not len(column):
        at = np.zeros(1, np.int64)
    plain = np.frombuffer(data, np.uint8) if data is not None and data.size else _NO_NULLS
    return _Leaf(None, at, plain, valid)
