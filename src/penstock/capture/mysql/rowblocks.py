"""Row events of the binlog to blocks, by compiled code.

A table can be read so if it has a key and every column is of a kind that the code knows; most are.
An event with anything out of the ordinary in it (a date that is none, text that is not UTF-8, a
change of the key, columns that are missing) goes the interpreted way as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from penstock.capture import kernels
from penstock.capture.blocks import Block
from penstock.capture.mysql import rowkernels, types
from penstock.capture.mysql.binlog import DELETES, INSERTS, RowsHead
from penstock.capture.mysql.charsets import UTF8
from penstock.capture.mysql.types import Modes, Native
from penstock.capture.mysql.values import decimal_shape
from penstock.capture.source import Table

# Events of fewer bytes have few rows, and setting up costs more than it saves.
_BYTES_MIN: Final = 1 << 10
# Larger ones have few large rows: servers cut events at 8 KiB. Memory for one is kept.
_BYTES_MAX: Final = 64 << 10
_ROOM_MAX: Final = 64 << 20
# A row that has fewer is not expected, and goes the other way.
_ROW_BYTES_MIN: Final = 4
_DIGITS_MAX: Final = 18


def stored(native: Native, modes: Modes) -> tuple[int, int, int, int] | None:
    """How compiled code reads a column; None: not at all."""
    kind, digits = native.kind, (native.scale + 1) // 2
    if types.is_precise_bigint(native, modes):
        return None
    if kind in types.INTEGERS:
        size = types.INTEGERS[kind]
        return (rowkernels.UNSIGNED if native.unsigned else rowkernels.SIGNED, size, 0, size)
    if kind == types.STRING and native.charset in UTF8 and native.prefix and not native.compressed:
        return (rowkernels.TEXT, native.prefix, 0, native.prefix)
    if kind == types.DECIMAL and modes.decimal == "precise" and native.size <= _DIGITS_MAX:
        size = sum(width for width, _ in decimal_shape(native.size, native.scale))
        return (rowkernels.DECIMAL, native.size - native.scale, native.scale, size)
    if kind == types.DATE:
        return (rowkernels.DATE, 0, 0, 3)
    if kind == types.DATETIME:
        return (rowkernels.DATETIME, 0, native.scale, 5 + digits)
    if kind == types.TIMESTAMP:
        return (rowkernels.TIMESTAMP, 0, native.scale, 4 + digits)
    return None


class RowBlocks:
    """Decodes row events of one table."""

    def __init__(self, table: Table, columns: Sequence[Sequence[int]], keys: Sequence[int]) -> None:
        self._table = table
        self._columns = np.array(columns, np.int64)
        self._keys = np.array(keys, np.int64)
        self._room = np.empty(0, np.uint8)
        self._row_bytes_min = max((len(columns) + 7) // 8, _ROW_BYTES_MIN)

    def block(
        self, kind: int, head: RowsHead, source: tuple[bytes, bytes], ts_us: int
    ) -> Block | None:
        """The changes of an event; None if it must be read the other way."""
        size, columns = len(head.data) - head.at, len(self._columns)
        if not _BYTES_MIN <= size <= _BYTES_MAX or not _is_whole(head, columns):
            return None
        op = (
            kernels.CREATED
            if kind in INSERTS
            else kernels.DELETED
            if kind in DELETES
            else kernels.UPDATED_BOTH
        )
        most = size // self._row_bytes_min
        needed = kernels.GROWTH * size + kernels.VALUE_BYTES * 2 * columns * most
        if needed > _ROOM_MAX:
            return None
        if len(self._room) < needed:
            self._room = np.empty(needed, np.uint8)
        out = self._room
        places = np.empty((most, 2 * columns + 1), np.int64)
        address = np.frombuffer(head.data, np.uint8).ctypes.data
        made = rowkernels.decode_images(
            address + head.at,
            address + len(head.data),
            self._columns,
            op,
            out.ctypes.data,
            places,
        )
        if made <= 0:
            return None
        places, ops = places[:made].copy(), np.full(made, op, np.int64)
        if kernels.same_keys(out.ctypes.data, places, ops, self._keys) < made:
            return None
        used = int(places[-1, -1])
        numbers = np.arange(made, dtype=np.int64)
        return Block(self._table, out[:used].tobytes(), places, ops, numbers, source, ts_us)


def _is_whole(head: RowsHead, columns: int) -> bool:
    """Whether rows have all columns."""
    if head.columns != columns:
        return False
    ones = (1 << columns) - 1
    before, after = (int.from_bytes(bits, "little") & ones for bits in (head.before, head.after))
    return before == after == ones


def row_blocks(
    table: Table, columns: Sequence[Native], keys: Sequence[int], modes: Modes
) -> RowBlocks | None:
    """The decoder of a table; None if there is a column that it does not know."""
    codes: list[Any] = [stored(native, modes) for native in columns]
    return None if not keys or None in codes else RowBlocks(table, codes, keys)
