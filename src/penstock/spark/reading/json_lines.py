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
    suspects = [
        np.flatnonzero(np.diff(offsets) > SHORT),
        np.unique(_rows_at(offsets, _escaped_halves(text[:size]))),
    ]
    try:
        lines.cast(pa.string())
    except pa.ArrowInvalid:
        suspects = [np.flatnonzero(plain)]
    for row in np.concatenate(suspects).tolist():
        if plain[row] and _is_odd(lines[row].as_py()):
            plain[row] = False
    return plain


def _sequences(text: npt.NDArray[np.uint8], signs: bytes) -> Rows:
    """The places of some bytes in a text; most often there are none, which is seen at once."""
    places = np.flatnonzero(text[: len(text) - len(signs)] == signs[0])
    for number, sign in enumerate(signs[1:], 1):
        places = places[text[places + number] == sign]
    return places


def _escaped_halves(text: npt.NDArray[np.uint8]) -> Rows:
    """Where there may be a half of a surrogate pair, as an escape."""
    places = _sequences(text, rb"\u")
    halves: Rows = places[(text[np.minimum(places + 2, len(text) - 1)] | 0x20) == ord("d")]
    return halves


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


def _is_odd(value: bytes) -> bool:
    if is_long_or_deep(value) or has_half_pair(value):
        return True
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return True
    return False
