"""Changes in columns: what a source may give instead of a list of `Change`, where it has many.

A `Block` holds changes of one table and one transaction as arrays: the fragments of all rows in one
piece of memory, and where each of them stands. It is a sequence of changes all the same, which are
made when somebody looks at them; who works on the arrays is much faster. `Several` puts blocks and
lists into one sequence, in order. A `RowBlock` is the same for rows of a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, overload

from penstock.capture.kernels import DELETED, UPDATED_BOTH
from penstock.capture.source import CREATE, DELETE, UPDATE, Change, Row, Table

_OPS = (CREATE, UPDATE, UPDATE, DELETE)
# Below that, setting up a block costs more than it saves.
ROWS_MIN: Final = 12


class Block(Sequence[Change]):
    """Changes of one table, all of them inserts, updates and deletes; no update of the key, no
    value that is unavailable."""

    __slots__ = ("fragments", "numbers", "ops", "pieces", "places", "table", "ts_us")

    def __init__(
        self,
        table: Table,
        fragments: bytes,
        places: Any,
        ops: Any,
        numbers: Any,
        pieces: tuple[bytes, ...],
        ts_us: int,
    ) -> None:
        self.table = table
        self.fragments = fragments
        # By row: where each fragment begins, of what it was and then of what it is; and the end.
        self.places = places
        # As `kernels` has them.
        self.ops = ops
        # Of each row; the source block is these pieces with the row's number between each two.
        self.numbers = numbers
        self.pieces = pieces
        self.ts_us = ts_us

    def __len__(self) -> int:
        return len(self.ops)

    @overload
    def __getitem__(self, at: int) -> Change: ...
    @overload
    def __getitem__(self, at: slice) -> list[Change]: ...
    def __getitem__(self, at: int | slice) -> Change | list[Change]:
        if isinstance(at, slice):
            return [self._change(place) for place in range(*at.indices(len(self)))]
        place = range(len(self))[at]
        return self._change(place)

    def __iter__(self) -> Iterator[Change]:
        return map(self._change, range(len(self)))

    def _change(self, at: int) -> Change:
        op = int(self.ops[at])
        columns = len(self.table.columns)
        before = self._row(at, 0) if op in (UPDATED_BOTH, DELETED) else None
        after = self._row(at, columns) if op != DELETED else None
        source = (b"%d" % int(self.numbers[at])).join(self.pieces)
        return Change(self.table, _OPS[op], before, after, source, self.ts_us)

    def _row(self, at: int, first: int) -> Row:
        places = self.places[at, first : first + len(self.table.columns) + 1].tolist()
        data = self.fragments
        return tuple(data[a:b] for a, b in pairwise(places))

    @property
    def weight(self) -> int:
        return len(self.fragments) + int(self.places.nbytes) + 64 * len(self)


class RowBlock(Sequence[Row]):
    """Rows of a snapshot of one table, in the same way."""

    __slots__ = ("_columns", "fragments", "places")

    def __init__(self, columns: int, fragments: bytes, places: Any) -> None:
        self._columns = columns
        self.fragments = fragments
        # As those of a block in which all rows are inserted.
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> RowBlock: ...
    def __getitem__(self, at: int | slice) -> Row | RowBlock:
        if isinstance(at, slice):
            return RowBlock(self._columns, self.fragments, self.places[at])
        places = self.places[at, self._columns :].tolist()
        data = self.fragments
        return tuple(data[a:b] for a, b in pairwise(places))

    @property
    def weight(self) -> int:
        return len(self.fragments) + int(self.places.nbytes)


def in_blocks(
    raw: Sequence[bytes],
    block_of: Callable[[Sequence[bytes]], RowBlock],
    rows_of: Callable[[Sequence[bytes]], list[Row]],
) -> Iterator[Sequence[Row]]:
    """Rows in blocks where they are ordinary; the others in lists, in their place. `block_of` makes
    a block of as many as are ordinary from the first on, which may be none."""
    at, step, most = 0, ROWS_MIN, len(raw)
    while len(raw) - at >= ROWS_MIN:
        block = block_of(raw[at : at + most])
        if block:
            yield block
            at += len(block)
            step, most = ROWS_MIN, max(4 * len(block), 4 * ROWS_MIN)
        else:
            # Where many rows are odd, there is no use in looking at each.
            yield rows_of(raw[at : at + step])
            at += step
            step *= 2
    if at < len(raw):
        yield rows_of(raw[at:])


class Several(Sequence[Change]):
    """Lists and blocks of changes, one after the other."""

    __slots__ = ("segments",)

    def __init__(self, segments: list[list[Change] | Block]) -> None:
        self.segments = segments

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    @overload
    def __getitem__(self, at: int) -> Change: ...
    @overload
    def __getitem__(self, at: slice) -> list[Change]: ...
    def __getitem__(self, at: int | slice) -> Change | list[Change]:
        return list(self)[at]

    def __iter__(self) -> Iterator[Change]:
        for segment in self.segments:
            yield from segment


def segments_of(changes: Sequence[Change]) -> Sequence[Sequence[Change]]:
    """The lists and blocks that changes consist of."""
    return changes.segments if isinstance(changes, Several) else (changes,)
