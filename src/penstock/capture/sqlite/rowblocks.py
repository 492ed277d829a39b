"""Rows of a changelog to blocks: their fragments one after the other in one piece of memory.

SQLite's values come as objects, so their fragments are still made one by one; but what follows,
from putting rows together to envelopes, is done for all of them at once. What a block cannot hold
(a change of the key, a moment that is none) ends it, and goes the other way; as do rows so large
that a block would hold but a few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np

from penstock.capture import kernels
from penstock.capture.blocks import Block
from penstock.capture.source import Change, Table
from penstock.capture.sqlite.tables import Definition
from penstock.capture.sqlite.triggers import OP_DELETE, OP_INSERT, OP_REREAD, OP_UPDATE
from penstock.capture.sqlite.values import DAY_MS, EPOCH_DAY, Blocks, DecodeLog, log_flattener

# Below that, setting up a block costs more than it saves: values are objects already.
ROWS_MIN: Final = 300
# What goes into one block, at most.
_ROWS_MAX: Final = 1_000
_BYTES_MAX: Final = 4 << 20
# So many are flattened first, to see how large they are.
_ROWS_FIRST: Final = 50

_KERNEL_OPS: Final = np.empty(4, np.int64)
_KERNEL_OPS[[OP_INSERT, OP_UPDATE, OP_DELETE, OP_REREAD]] = (
    kernels.CREATED,
    kernels.UPDATED_BOTH,
    kernels.DELETED,
    kernels.UPDATED,
)
_op_of: Final[Callable[[Any], int]] = itemgetter(1)
_at_of: Final[Callable[[Any], Any]] = itemgetter(2)

Rows = Sequence[tuple[Any, ...]]


class RowBlocks:
    """Makes changes of rows of one table's changelog."""

    def __init__(
        self, definition: Definition, table: Table, decode: DecodeLog, *, rows_min: int = ROWS_MIN
    ) -> None:
        self._rows_min = rows_min
        self._table = table
        self._decode = decode
        self._flatten = log_flattener(definition)
        names = [column.name for column in table.columns]
        self._keys = np.array([names.index(name) for name in table.key], np.int64)
        count = len(names)
        none, one, both = [0] * count, list(range(count + 1)), list(range(2 * count + 1))
        # By operation: which of a row's fragments begins at each of its places.
        steps = np.zeros((4, 2 * count + 1), np.int64)
        steps[OP_INSERT] = steps[OP_REREAD] = none + one
        steps[OP_UPDATE] = both
        steps[OP_DELETE] = one + [count] * count
        self._steps = steps

    def changes(self, rows: Rows, blocks: Blocks) -> Iterator[list[Change] | Block]:
        """All of them, in order: blocks where they are ordinary, and lists."""
        least = self._rows_min
        at, step, most = 0, least, _ROWS_MAX
        while len(rows) - at >= least:
            block = self._block(rows[at : at + most], blocks)
            if block:
                yield block
                at += len(block)
                step, most = least, min(4 * max(len(block), least), _ROWS_MAX)
            else:
                # Where many rows are odd, there is no use in looking at each.
                yield self._decode(rows[at : at + step], blocks)
                at += step
                step *= 2
        if at < len(rows):
            yield self._decode(rows[at:], blocks)

    def _block(self, rows: Rows, blocks: Blocks) -> Block | None:
        """A block of the first of these rows; None: of none."""
        moments = list(map(_at_of, rows))
        if {*map(type, moments)} != {float}:
            return None
        # As `ts_us_of` has it, to the millisecond.
        times = np.rint((np.array(moments) - EPOCH_DAY) * DAY_MS).astype(np.int64)
        if times.min() <= 0:
            return None
        data, ends, count = self._flattened(rows)
        whole, rows = len(rows), rows[:count]
        logged = np.fromiter(map(_op_of, rows), np.int64, len(rows))
        steps = self._steps[logged]
        first = np.zeros(len(rows), np.int64)
        np.cumsum(steps[:-1, -1], out=first[1:])
        places, ops = ends[first[:, None] + steps], _KERNEL_OPS[logged]
        if count < whole or len(data) > _BYTES_MAX:
            fits = int(np.searchsorted(places[:, -1], _BYTES_MAX, side="right"))
            if fits < self._rows_min:
                return None
            places, ops = places[:fits], ops[:fits]
        address = int(np.frombuffer(data, np.uint8).ctypes.data)
        made = kernels.same_keys(address, places, ops, self._keys)
        if not made:
            return None
        used = data[: int(places[made - 1, -1])]
        arrays = places[:made], ops[:made], times[:made]
        return Block(self._table, used, *arrays, blocks.pieces, int(times[made - 1]) * 1000)

    def _flattened(self, rows: Rows) -> tuple[bytes, Any, int]:
        """The fragments of the first of these rows, where each ends, and how many rows these are:
        all, or more than fit, at most twice as many; or fewer, if too few would fit."""
        texts: list[bytes] = []
        lengths = [np.zeros(1, np.int64)]
        at, more, size, least = 0, _ROWS_FIRST, 0, self._rows_min
        while at < len(rows) and size * least <= _BYTES_MAX * min(at, least):
            parts: list[str] = []
            some = rows[at : at + more]
            self._flatten(some, parts.extend)
            text = "".join(parts)
            sizes = map(len, parts if text.isascii() else map(str.encode, parts))
            lengths.append(np.fromiter(sizes, np.int64, len(parts)))
            texts.append(text.encode())
            at += len(some)
            size += len(texts[-1])
            # As many as still fit if they are like those before, and a few.
            more = min(at, (_BYTES_MAX - size) * at // max(size, 1) + 10)
        return b"".join(texts), np.cumsum(np.concatenate(lengths)), at
