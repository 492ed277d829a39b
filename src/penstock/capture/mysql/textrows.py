"""Rows of a result set into fragments, by code that is made for each table, or by compiled code for
many rows at once, where every column is of a kind that it knows.

A row of the text protocol is one value behind the other, each with its length before it, or the
byte 251 for null. The SELECT asks for each column in the form whose text is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from penstock.capture import kernels
from penstock.capture.blocks import RowBlock
from penstock.capture.mysql import types
from penstock.capture.mysql.binlog import length_encoded
from penstock.capture.mysql.codegen import Names, text_recipe
from penstock.capture.mysql.types import Modes, Native
from penstock.capture.source import NULL, Row

# What is decoded at once by compiled code, at most: memory for it is kept.
_BYTES_MAX: Final = 256 << 10
_CODES: Final = {
    types.STRING: kernels.TEXT,
    types.ENUM: kernels.TEXT,
    types.SET: kernels.TEXT,
    types.JSON: kernels.TEXT,
    types.DATE: kernels.DATE,
    types.TIMESTAMP: kernels.TIMESTAMP_UTC,
}

# data, where the row begins -> the row
DecodeText = Callable[[bytes, int], Row]


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def selected(native: Native) -> str:
    """The expression that asks for a column."""
    name = quoted(native.name)
    if native.kind == types.FLOAT:
        # The text of a FLOAT has six digits; as a double it has all.
        return f"CAST({name} AS DOUBLE)"
    return _unpadded(native, name)


def _unpadded(native: Native, name: str) -> str:
    """Texts of ZEROFILL columns, which are unsigned, begin with zeros; those of sums do not."""
    return f"({name} + 0)" if native.unsigned and native.kind in types.INTEGERS else name


def selected_mysql(native: Native) -> str:
    """As `selected`; CAST AS DOUBLE came to MySQL late."""
    name = quoted(native.name)
    return f"({name} + 0e0)" if native.kind == types.FLOAT else _unpadded(native, name)


def row_decoder(columns: Sequence[Native], modes: Modes) -> DecodeText:
    """A function that reads one row of these columns."""
    names = Names({"NULL": NULL, "length": length_encoded})
    lines = ["def decode(d, p):"]
    for i, native in enumerate(columns):
        value = text_recipe(native, modes, names)
        lines += [
            "    n = d[p]",
            "    if n < 251:",
            "        p += 1",
            "        q = p + n",
            f"        v{i} = {value.format(x='d[p:q]')}",
            "        p = q",
            "    elif n == 251:",
            f"        v{i} = NULL",
            "        p += 1",
            "    else:",
            "        n, p = length(d, p)",
            "        q = p + n",
            f"        v{i} = {value.format(x='d[p:q]')}",
            "        p = q",
        ]
    lines.append("    return (" + "".join(f"v{i}, " for i in range(len(columns))) + ")")
    made: Callable[..., Any] = names.compile("\n".join(lines), "decode")
    return made


def code_of(native: Native, modes: Modes) -> int | None:
    """How compiled code reads values of a column; None: not at all."""
    kind = native.kind
    if types.is_precise_bigint(native, modes):
        return None
    if kind in types.INTEGERS:
        return kernels.COPY
    if kind == types.DECIMAL:
        return kernels.DECIMAL if modes.decimal == "precise" else None
    if kind == types.DATETIME:
        return kernels.TIMESTAMP_US if native.scale > 3 else kernels.TIMESTAMP_MS
    return _CODES.get(kind)


class TextBlocks:
    """Decodes rows of one table, many at once."""

    def __init__(self, codes: Sequence[int]) -> None:
        self._codes = np.array(codes, np.int64)
        self._room = np.empty(0, np.uint8)

    def block(self, messages: Sequence[bytes]) -> RowBlock:
        """A block of the first of these: as many as are ordinary, which may be none."""
        ends = np.cumsum(np.fromiter(map(len, messages), np.int64, len(messages)))
        ends = ends[: int(np.searchsorted(ends, _BYTES_MAX))]
        data = b"".join(messages[: len(ends)])
        columns = len(self._codes)
        needed = kernels.GROWTH * len(data) + kernels.VALUE_BYTES * columns * len(ends)
        if len(self._room) < needed:
            self._room = np.empty(needed, np.uint8)
        out = self._room
        places = np.empty((len(ends), 2 * columns + 1), np.int64)
        made = kernels.decode_texts(
            np.frombuffer(data, np.uint8).ctypes.data if data else 0,
            ends,
            self._codes,
            out.ctypes.data,
            places,
        )
        used = int(places[made - 1, -1]) if made else 0
        return RowBlock(columns, out[:used].tobytes(), places[:made])


def text_blocks(columns: Sequence[Native], modes: Modes) -> TextBlocks | None:
    """The decoder of a table; None if there is a column that it does not know."""
    codes = [code_of(native, modes) for native in columns]
    known = [code for code in codes if code is not None]
    return TextBlocks(known) if known and len(known) == len(codes) else None
