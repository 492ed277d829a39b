"""Which JSON values can be read in bulk, as lines, by Arrow's reader.

Arrow takes more than Spark's parser does: this sees what it would take wrongly, for a whole block
at once, in a few passes over its bytes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.spark.reading.json_records import SHORT, has_half_pair, is_long_or_deep

_OPEN, _CLOSE = ord("{"), ord("}")
# What can stand before a word that Arrow takes for a number.
_BEFORE_WORD: Final = np.zeros(256, np.bool_)
_BEFORE_WORD[list(b" \t\r\n:,[-")] = True
_BLANKS: Final = np.zeros(256, np.bool_)
_BLANKS[list(b" \t\r\n")] = True
# The digit after `\ud` in the first and in the second half of a surrogate pair.
_HIGH: Final = np.zeros(256, np.bool_)
_HIGH[list(b"89abAB")] = True
_LOW: Final = np.zeros(256, np.bool_)
_LOW[list(b"cdefCDEF")] = True

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def could_be_lines(lines: pa.BinaryArray) -> Mask:
    """Which values can go to Arrow's reader: they look like one object, and have nothing that it
    would take and Spark not."""
    count = len(lines)
    _, where, data = lines.buffers()
    offsets = np.frombuffer(where, np.int32)[lines.offset : lines.offset + count + 1]
    size = int(offsets[-1])
    if not size:
        return np.zeros(count, np.bool_)
    text = np.frombuffer(data, np.uint8)
    # Values that are null have no newline; whoever calls leaves them out.
    first = np.minimum(offsets[:-1], size - 1)
    last = np.maximum(offsets[1:] - 2, first)
    plain: Mask = (text[first] == _OPEN) & (text[last] == _CLOSE)
    if not plain.all():
        plain = _without_blanks(text, first, last)
    plain[_rows_at(offsets, np.flatnonzero(text[:size] == 0))] = False
    plain[_rows_at(offsets, _words(text[:size]))] = False
    bytes_ = memoryview(data)
    for which, is_odd in (
        (np.diff(offsets) > SHORT, is_long_or_deep),
        (_rows_at(offsets, _lone_halves(text[:size])), has_half_pair),
        (slice(0) if _is_utf8(lines) else slice(None), _is_not_utf8),
    ):
        for row in np.arange(count)[which].tolist():
            if plain[row] and is_odd(bytes(bytes_[offsets[row] : offsets[row + 1]])):
                plain[row] = False
    return plain


def _is_utf8(lines: pa.BinaryArray) -> bool:
    try:
        lines.cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True


def _is_not_utf8(value: bytes) -> bool:
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return True
    return False


def _sequences(text: npt.NDArray[np.uint8], signs: bytes) -> Rows:
    """The places of some bytes in a text; most often there are none, which is seen at once."""
    places = np.flatnonzero(text[: len(text) - len(signs)] == signs[0])
    for number, sign in enumerate(signs[1:], 1):
        places = places[text[places + number] == sign]
    return places


def _lone_halves(text: npt.NDArray[np.uint8]) -> Rows:
    """Where there may be half a surrogate pair, as an escape whose other half is not beside it."""
    places = _sequences(text, rb"\u")
    last = len(text) - 1

    def is_half(where: Rows, kinds: Mask) -> Mask:
        at = np.clip(where, 0, last - 3)
        found: Mask = (at == where) & (text[at] == ord("\\")) & (text[at + 1] == ord("u"))
        found &= ((text[at + 2] | 0x20) == ord("d")) & kinds[text[at + 3]]
        return found

    highs, lows = is_half(places, _HIGH), is_half(places, _LOW)
    # A backslash before may be the one that is meant, and then this is no escape.
    unclear = (highs | lows) & (text[places - 1] == ord("\\"))
    unclear |= highs & ~is_half(places + 6, _LOW)
    unclear |= lows & ~is_half(places - 6, _HIGH)
    lone: Rows = places[unclear]
    return lone


def _words(text: npt.NDArray[np.uint8]) -> Rows:
    """Where there may be NaN or Infinity as a number; in quotes they are not meant."""
    places = np.concatenate([_sequences(text, b"NaN"), _sequences(text, b"Inf")])
    words: Rows = places[_BEFORE_WORD[text[places - 1]]]
    return words


def _rows_at(offsets: npt.NDArray[np.int32], places: Rows) -> Rows:
    """The values that bytes belong to."""
    return np.searchsorted(offsets, places, side="right") - 1


def _without_blanks(text: npt.NDArray[np.uint8], first: Any, last: Any) -> Mask:
    """Whether values are in braces, but for blanks around them; a few blanks, for speed."""
    for _ in range(4):
        first = np.minimum(first + _BLANKS[text[first]], last)
        last = np.maximum(last - _BLANKS[text[last]], first)
    braces: Mask = (text[first] == _OPEN) & (text[last] == _CLOSE)
    return braces
