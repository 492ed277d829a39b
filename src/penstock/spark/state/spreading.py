"""To which shard a row belongs, told in Python as Spark tells it: `pmod(xxhash64(key), shards)`.

What goes from one operator to the next in the same task never meets Spark on its way, and yet its
state has to be where Spark's own hash would send the row: the next micro-batch may go through
stages again. A null does not change the hash of the columns before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.records.columns.compiled import helper, kernel

Hashes = npt.NDArray[np.uint64]

# That of Spark's function `xxhash64`.
_SEED: Final = 42
_ONE: Final = np.uint64(0x9E3779B185EBCA87)
_TWO: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_THREE: Final = np.uint64(0x165667B19E3779F9)
_FOUR: Final = np.uint64(0x85EBCA77C2B2AE63)
_FIVE: Final = np.uint64(0x27D4EB2F165667C5)
# Decimals of so many digits are hashed as 64-bit numbers, and longer ones as bytes.
_LONG_DIGITS: Final = 18
# Bytes of a decimal in Arrow.
_WIDTH: Final = 16
_BYTES: Final = "Array(uint8, 1, 'C', readonly=True)"
_OFFSETS: Final = "Array(int64, 1, 'C', readonly=True)"
_NUMBERS: Final = "Array(uint64, 1, 'C', readonly=True)"


@helper
def _turned(value: Any, bits: int) -> Any:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@helper
def _finished(value: Any) -> Any:
    value = (value ^ (value >> np.uint64(33))) * _TWO
    value = (value ^ (value >> np.uint64(29))) * _THREE
    return value ^ (value >> np.uint64(32))


@helper
def _word(data: Any, at: int, size: int) -> Any:
    found = np.uint64(0)
    for byte in range(size):
        found |= np.uint64(data[at + byte]) << np.uint64(8 * byte)
    return found


@helper
def _mixed(value: Any, word: Any) -> Any:
    """One of four lanes of a long text."""
    return _turned(value + word * _TWO, 31) * _ONE


@helper
def _merged(value: Any, lane: Any) -> Any:
    return (value ^ (_turned(lane * _TWO, 31) * _ONE)) * _ONE + _FOUR


@kernel(f"void(uint64[::1], {_NUMBERS}, {_BYTES})")
def _fold_longs(out: Any, numbers: Any, valid: Any) -> None:
    """Take a column of 64-bit numbers into the hashes so far."""
    for row in range(len(out)):
        if len(valid) and not valid[row]:
            continue
        found = out[row] + _FIVE + np.uint64(8)
        found ^= _turned(numbers[row] * _TWO, 31) * _ONE
        out[row] = _finished(_turned(found, 27) * _ONE + _FOUR)


@kernel(f"void(uint64[::1], {_NUMBERS}, {_BYTES})")
def _fold_ints(out: Any, numbers: Any, valid: Any) -> None:
    """The same for 32 bits, which stand in the lower halves."""
    for row in range(len(out)):
        if len(valid) and not valid[row]:
            continue
        found = out[row] + _FIVE + np.uint64(4)
        found ^= (numbers[row] & np.uint64(0xFFFFFFFF)) * _ONE
        out[row] = _finished(_turned(found, 23) * _TWO + _THREE)


@kernel(f"void(uint64[::1], {_OFFSETS}, {_BYTES}, {_BYTES})")
def _fold_bytes(out: Any, offsets: Any, data: Any, valid: Any) -> None:
    """The same for texts and bytes."""
    for row in range(len(out)):
        if len(valid) and not valid[row]:
            continue
        seed, at, end = out[row], offsets[row], offsets[row + 1]
        size = end - at
        if size >= 32:
            a, b, c, d = seed + _ONE + _TWO, seed + _TWO, seed, seed - _ONE
            while at + 32 <= end:
                a = _mixed(a, _word(data, at, 8))
                b = _mixed(b, _word(data, at + 8, 8))
                c = _mixed(c, _word(data, at + 16, 8))
                d = _mixed(d, _word(data, at + 24, 8))
                at += 32
            found = _turned(a, 1) + _turned(b, 7) + _turned(c, 12) + _turned(d, 18)
            found = _merged(_merged(_merged(_merged(found, a), b), c), d)
        else:
            found = seed + _FIVE
        found += np.uint64(size)
        while at + 8 <= end:
            found ^= _turned(_word(data, at, 8) * _TWO, 31) * _ONE
            found = _turned(found, 27) * _ONE + _FOUR
            at += 8
        if at + 4 <= end:
            found = _turned(found ^ (_word(data, at, 4) * _ONE), 23) * _TWO + _THREE
            at += 4
        while at < end:
            found = _turned(found ^ (np.uint64(data[at]) * _FIVE), 11) * _ONE
            at += 1
        out[row] = _finished(found)


def can_tell(kind: pa.DataType) -> bool:
    """Whether the hash of such a column is known here: that of a list or struct is not."""
    return bool(
        pa.types.is_boolean(kind)
        or pa.types.is_signed_integer(kind)
        or kind in (pa.float32(), pa.float64())
        or pa.types.is_date32(kind)
        or (pa.types.is_timestamp(kind) and kind.unit == "us")
        or pa.types.is_decimal128(kind)
        or _is_bytes(kind)
    )


def shards_of(rows: pa.Table, key: Sequence[str], shards: int) -> npt.NDArray[np.int64]:
    """The shard of each row by the columns of its key; without one it is shard 0."""
    if not key or not len(rows):
        return np.zeros(len(rows), np.int64)
    columns = [pa.concat_arrays(rows[name].chunks) for name in key]
    return shards_of_columns(columns, shards)


def shards_of_columns(key: Sequence[pa.Array], shards: int) -> npt.NDArray[np.int64]:
    """The same for keys by their columns, of which there is at least one."""
    found: npt.NDArray[np.int64] = np.mod(hashes(key).view(np.int64), shards)
    return found


def spread(rows: pa.Table, key: Sequence[str], shards: int) -> list[pa.Table]:
    """The rows of each shard, in their order."""
    # NumPy sorts numbers of 16 bits by counting them.
    shard = shards_of(rows, key, shards).astype(np.int16)
    sorted_ = rows.take(pa.array(np.argsort(shard, kind="stable")))
    ends = np.concatenate([[0], np.cumsum(np.bincount(shard, minlength=shards))]).tolist()
    return [sorted_.slice(begin, end - begin) for begin, end in pairwise(ends)]


def hashes(columns: Sequence[pa.Array]) -> Hashes:
    """Spark's `xxhash64` of rows, as bits."""
    out = np.full(len(columns[0]), _SEED, np.uint64)
    for each in columns:
        _fold(out, each)
    return out


def _fold(out: Hashes, column: pa.Array) -> None:
    kind = column.type
    assert can_tell(kind), f"{kind} cannot be hashed as Spark does"
    valid = np.zeros(0, np.uint8)
    if column.null_count:
        valid = np.asarray(column.is_valid()).view(np.uint8)
    if _is_bytes(kind) or (pa.types.is_decimal(kind) and kind.precision > _LONG_DIGITS):
        if pa.types.is_decimal(kind):
            column = _as_bytes(column)
        offsets, data = _buffers(column)
        _fold_bytes(out, offsets, data, valid)
    elif pa.types.is_decimal(kind):
        _fold_longs(out, _unscaled(column), valid)
    elif pa.types.is_floating(kind):
        numbers = _plain(np.asarray(column.fill_null(0.0)))
        if kind == pa.float64():
            _fold_longs(out, numbers.view(np.uint64), valid)
        else:
            _fold_ints(out, numbers.view(np.uint32).astype(np.uint64), valid)
    else:
        is_long = kind == pa.int64() or pa.types.is_timestamp(kind)
        whole = column.cast(pa.int8()) if pa.types.is_boolean(kind) else column
        if not is_long and not pa.types.is_integer(whole.type):
            whole = whole.cast(pa.int32())
        numbers = np.asarray(whole.cast(pa.int64()).fill_null(0)).view(np.uint64)
        (_fold_longs if is_long else _fold_ints)(out, numbers, valid)


def _plain(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """With one zero and one NaN, whatever their bits were."""
    found: npt.NDArray[Any] = numbers + numbers.dtype.type(0)
    found[np.isnan(found)] = np.nan
    return found


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def _buffers(column: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Where each text begins, one more than there are, and all of them."""
    is_large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    _, offsets, data = column.buffers()
    width = np.int64 if is_large else np.int32
    found = np.zeros(len(column) + 1, np.int64)
    if offsets is not None and offsets.size:
        start = column.offset
        found = np.frombuffer(offsets, width)[start : start + len(column) + 1].astype(np.int64)
    nothing = np.zeros(0, np.uint8)
    return found, nothing if data is None else np.frombuffer(data, np.uint8)


def _unscaled(column: pa.Array) -> Hashes:
    """The digits of short decimals as numbers: the lower half of each."""
    start = column.offset
    halves = np.frombuffer(column.buffers()[1], np.uint64)[2 * start : 2 * (start + len(column))]
    return np.ascontiguousarray(halves[::2])


def _as_bytes(column: pa.Array) -> pa.Array:
    """Long decimals as Java's `BigInteger.toByteArray` writes their digits."""
    start = column.offset
    data = bytes(column.buffers()[1])
    found: list[bytes | None] = []
    for at, valid in enumerate(column.is_valid().to_pylist(), start):
        if not valid:
            found.append(None)
            continue
        number = int.from_bytes(data[_WIDTH * at : _WIDTH * (at + 1)], "little", signed=True)
        size = (number if number >= 0 else ~number).bit_length() // 8 + 1
        found.append(number.to_bytes(size, "big", signed=True))
    return pa.array(found, pa.binary())
