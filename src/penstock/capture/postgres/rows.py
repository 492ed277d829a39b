"""Many rows at once: frames of the stream or lines of COPY of one relation to a block, by the
compiled decoder.

A relation can be read so if every column is of a type that the decoder knows; most are. What is out
of the ordinary in a single row (a large value that was not sent, NaN, a date before Christ, a NULL
that should not be, a change of the key) ends the block before it, and goes the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from penstock.capture import kernels
from penstock.capture.blocks import Block, RowBlock
from penstock.capture.postgres import values
from penstock.capture.postgres.pgoutput import PAD
from penstock.capture.postgres.types import Coding
from penstock.capture.source import Table

# What is decoded at once, at most: memory for it is kept.
BYTES_MAX: Final = 256 << 10
# A row that is larger is a block by itself, and not worth it.
ROW_BYTES_MAX: Final = 64 << 10

_BY_FUNCTION: Final = {
    values.timestamp_us: kernels.TIMESTAMP_US,
    values.timestamptz: kernels.TIMESTAMPTZ,
    values.date_days: kernels.DATE,
    values.boolean: kernels.BOOLEAN,
    values.floating: kernels.FLOAT,
}
_DECIMAL: Final = "org.apache.kafka.connect.data.Decimal"


def code_of(coding: Coding) -> int | None:
    """How the compiled decoder reads values of a column; None: not at all."""
    if coding.labels is not None:
        return None
    if coding.inline == "{v}":
        return kernels.COPY
    if coding.inline == "b'\"%b\"' % {v}":
        return kernels.QUOTE
    if coding.convert in _BY_FUNCTION:
        return _BY_FUNCTION[coding.convert]
    if coding.convert is values.text and coding.inline in ("", "text({v})"):
        return kernels.TEXT
    parameters = coding.type.parameters
    if coding.type.semantic == _DECIMAL and "connect.decimal.precision" in parameters:
        return kernels.DECIMAL if int(parameters["scale"]) >= 0 else None
    return None


class RowBlocks:
    """Decodes frames of one relation."""

    def __init__(self, table: Table, codes: Sequence[int], keys: Sequence[int]) -> None:
        self._table = table
        self._codes = np.array(codes, np.int64)
        self._needed = np.array([not column.optional for column in table.columns], np.int64)
        self._keys = np.array(keys, np.int64)
        self._room = np.empty(0, np.uint8)

    def block(self, frames: Sequence[bytes], pieces: tuple[bytes, ...], ts_us: int) -> Block:
        """A block of the first of these frames: as many as are ordinary, which may be none."""
        data = b"".join(frames)
        ends = np.cumsum(np.fromiter(map(len, frames), np.int64, len(frames)))
        columns, count = len(self._codes), len(frames)
        needed = kernels.GROWTH * len(data) + kernels.VALUE_BYTES * 2 * columns * count
        if len(self._room) < needed:
            self._room = np.empty(needed, np.uint8)
        out = self._room
        places = np.empty((count, 2 * columns + 1), np.int64)
        ops, numbers = np.empty(count, np.int64), np.empty(count, np.int64)
        address = np.frombuffer(data, np.uint8).ctypes.data
        made = kernels.decode_rows(
            address,
            ends,
            len(PAD),
            self._codes,
            self._needed,
            out.ctypes.data,
            places,
            ops,
            numbers,
        )
        if made and len(self._keys):
            made = kernels.same_keys(out.ctypes.data, places[:made], ops[:made], self._keys)
        used = int(places[made - 1, -1]) if made else 0
        return Block(
            self._table,
            out[:used].tobytes(),
            places[:made],
            ops[:made],
            numbers[:made],
            pieces,
            ts_us,
        )

    def lines(self, lines: Sequence[bytes]) -> RowBlock:
        """A block of the first of these lines of COPY: as many as are ordinary, maybe none."""
        sizes = np.fromiter(map(len, lines), np.int64, len(lines))
        ends = np.cumsum(sizes)
        ends = ends[: int(np.searchsorted(ends, BYTES_MAX))]
        data = b"".join(lines[: len(ends)])
        columns, most = len(self._codes), int(sizes[: len(ends)].max(initial=0))
        needed = kernels.GROWTH * len(data) + kernels.VALUE_BYTES * columns * len(ends)
        if len(self._room) < needed + most:
            self._room = np.empty(needed + most, np.uint8)
        out = self._room
        places = np.empty((len(ends), 2 * columns + 1), np.int64)
        made = kernels.decode_lines(
            np.frombuffer(data, np.uint8).ctypes.data if data else 0,
            ends,
            self._codes,
            self._needed,
            out.ctypes.data + needed,
            out.ctypes.data,
            places,
        )
        used = int(places[made - 1, -1]) if made else 0
        return RowBlock(columns, out[:used].tobytes(), places[:made])


def row_blocks(table: Table, codings: Sequence[Coding], keys: Sequence[int]) -> RowBlocks | None:
    """The decoder of a relation; None if there is a column that it does not know."""
    codes: list[Any] = [code_of(coding) for coding in codings]
    return None if None in codes or not codes else RowBlocks(table, codes, keys)
