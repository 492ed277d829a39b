"""Decimals as Kafka Connect writes them in JSON, base64 of the unscaled number, to Arrow's.

All at once: texts of the same length are decoded together, as bytes of a matrix. Nothing is
rounded: a number that its column cannot hold with all its digits is marked.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Mask = npt.NDArray[np.bool_]

# The digits that Arrow's decimals have at most, and their bytes.
DIGITS_MAX: Final = 38
_BYTES: Final = 16
WHOLE: Final = pa.decimal128(DIGITS_MAX, 0)

_BAD: Final = 255
_CODES: Final = np.full(256, _BAD, np.uint8)
_CODES[list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")] = np.arange(64)
_PAD: Final = ord("=")


def unscaled(texts: pa.StringArray) -> tuple[pa.Array, Mask]:
    """The numbers whose bytes these are, without a point, and which of them are none, or have more
    than 38 digits. Null stays null."""
    count = len(texts)
    there = np.asarray(texts.is_valid())
    _, where, data = texts.buffers()
    ends = np.frombuffer(where, np.int32)[texts.offset : texts.offset + count + 1]
    starts, sizes = ends[:-1].astype(np.int64), np.diff(ends)
    text = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    numbers = np.zeros((count, _BYTES), np.uint8)
    bad: Mask = there.copy()
    for size in np.unique(sizes[there]).tolist():
        if not size or size % 4 or size > 24:
            continue
        rows = np.flatnonzero(there & (sizes == size))
        letters = text[starts[rows][:, None] + np.arange(size)]
        pads = (letters[:, -1] == _PAD).astype(np.int64) + (letters[:, -2] == _PAD)
        for pad in np.unique(pads).tolist():
            chosen = pads == pad
            made, fine = _bytes_of(letters[chosen], pad)
            numbers[rows[chosen]] = made
            bad[rows[chosen]] = ~fine
    numbers[bad] = 0
    halves = numbers.view("<u8")
    low, high = halves[:, 0], halves[:, 1].view(np.int64)
    bad |= ~_has_38_digits(low, high)
    numbers[bad] = 0
    return _decimals(numbers, there & ~bad), bad


def _bytes_of(letters: npt.NDArray[np.uint8], pad: int) -> tuple[npt.NDArray[np.uint8], Mask]:
    """Sixteen bytes for each row of letters, the lowest first; and which rows are base64."""
    count, size = letters.shape
    codes = _CODES[letters]
    if pad:
        codes[:, -pad:] = 0
    fine: Mask = ~(codes == _BAD).any(axis=1)
    groups = codes.reshape(count, size // 4, 4).astype(np.uint32)
    joined = groups[:, :, 0] << 18 | groups[:, :, 1] << 12 | groups[:, :, 2] << 6 | groups[:, :, 3]
    big = np.stack([joined >> 16, joined >> 8, joined], axis=2).astype(np.uint8)
    big = big.reshape(count, -1)
    if pad:
        # The bits that no byte has must be zero.
        fine &= ~big[:, -pad:].any(axis=1)
        big = big[:, :-pad]
    width = big.shape[1]
    sign = np.where(big[:, :1] & 0x80, 0xFF, 0).astype(np.uint8)
    if width > _BYTES:
        extra = width - _BYTES
        fine &= (big[:, :extra] == sign).all(axis=1) & ((big[:, extra] ^ sign[:, 0]) < 0x80)
        big, width = big[:, extra:], _BYTES
    made = np.repeat(sign, _BYTES, axis=1)
    made[:, :width] = big[:, ::-1]
    return made, fine


def _has_38_digits(low: npt.NDArray[Any], high: npt.NDArray[Any]) -> Mask:
    """Whether numbers of two halves are between -10^38 and 10^38."""
    top = 10**DIGITS_MAX
    top_high, top_low = top >> 64, np.uint64(top & (1 << 64) - 1)
    under = (high < top_high) | ((high == top_high) & (low < top_low))
    bottom = -top
    bottom_high, bottom_low = bottom >> 64, np.uint64(bottom & (1 << 64) - 1)
    above = (high > bottom_high) | ((high == bottom_high) & (low > bottom_low))
    both: Mask = under & above
    return both


def _decimals(numbers: npt.NDArray[Any], there: Mask) -> pa.Array:
    valid = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
    buffers = [valid, pa.py_buffer(np.ascontiguousarray(numbers))]
    return pa.Array.from_buffers(WHOLE, len(numbers), buffers)


def scaled(numbers: pa.Array, scale: int, into: pa.Decimal128Type) -> tuple[pa.Array, Mask]:
    """Numbers without a point, of which `scale` digits stand behind it, as decimals; and which do
    not fit without losing a digit: these are null."""
    there = np.asarray(numbers.is_valid())
    shift = int(into.scale) - scale
    fits = np.asarray(pc.fill_null(_below(numbers, DIGITS_MAX - max(shift, 0)), True))
    if abs(shift) > DIGITS_MAX:
        fits &= np.asarray(pc.fill_null(pc.equal(numbers, pa.scalar(0, WHOLE)), True))
        numbers, shift = _zeros(numbers), 0
    kept = _only(numbers, fits)
    if shift > 0:
        made = _seen_as(kept.cast(pa.decimal128(DIGITS_MAX, shift)), WHOLE)
    elif shift < 0:
        longer = pa.decimal128(DIGITS_MAX, -shift)
        exact = _seen_as(kept, longer)
        made = exact.cast(WHOLE, safe=False)
        same = pc.equal(_again(made, -shift), _seen_as(exact, WHOLE))
        fits &= np.asarray(pc.fill_null(same, True))
    else:
        made = kept
    fits &= np.asarray(pc.fill_null(_below(made, int(into.precision)), True))
    return _seen_as(_only(made, fits), into), there & ~fits


def _again(numbers: pa.Array, shift: int) -> pa.Array:
    return _seen_as(numbers.cast(pa.decimal128(DIGITS_MAX, shift)), WHOLE)


def _zeros(numbers: pa.Array) -> pa.Array:
    zeros = np.zeros((len(numbers), _BYTES), np.uint8)
    return _decimals(zeros, np.asarray(numbers.is_valid()))


def _below(numbers: pa.Array, digits: int) -> pa.BooleanArray:
    """Whether numbers have at most so many digits."""
    if digits >= DIGITS_MAX:
        return pc.is_valid(numbers)
    if digits < 0:
        return pc.equal(numbers, pa.scalar(0, WHOLE))
    top = pa.scalar(10**digits, WHOLE)
    bottom = pa.scalar(-(10**digits), WHOLE)
    return pc.and_(pc.less(numbers, top), pc.greater(numbers, bottom))


def _seen_as(numbers: pa.Array, kind: pa.DataType) -> pa.Array:
    """The same bytes as another decimal."""
    return numbers if numbers.type == kind else numbers.view(kind)


def _only(numbers: pa.Array, keep: Mask) -> pa.Array:
    if keep.all():
        return numbers
    return pc.if_else(pa.array(keep), numbers, pa.scalar(None, numbers.type))


def digits_of(numbers: pa.Array) -> pa.StringArray:
    """Decimals as text: all digits of their scale, no exponent."""
    scale = int(numbers.type.scale)
    if scale <= 0:
        plain: pa.StringArray = numbers.cast(pa.decimal128(DIGITS_MAX, 0)).cast(pa.string())
        return plain
    text = _seen_as(numbers, WHOLE).cast(pa.string())
    is_negative = pc.starts_with(text, "-")
    digits = pc.utf8_lpad(pc.utf8_ltrim(text, "-"), scale + 1, "0")
    whole = pc.utf8_slice_codeunits(digits, 0, -scale)
    part = pc.utf8_slice_codeunits(digits, -scale)
    sign = pc.if_else(is_negative, "-", "")
    made: pa.StringArray = pc.binary_join_element_wise(sign, whole, ".", part, "")
    return made
