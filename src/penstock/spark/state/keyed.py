"""A table by key: what operators keep, looked up and changed by the thousand.

Below it are sorted runs (`runs`). What a micro-batch changes is a run of its own, and only that,
and what is merged with it, is written; see `store`.

**Merging** large runs takes longer than all else that a micro-batch does with a table, and nobody
waits for it: a table says the same with any number of runs, only slower the more there are. So it
is done between two micro-batches (`merge_meanwhile`), and what it gives takes the place of the runs
it was made from when the table is asked for again (`adopt`). Where it does not come to that in
time the runs stay, until they are too many and are merged at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.spark.state.files import StateError
from penstock.spark.state.hashing import hashes
from penstock.spark.state.runs import Places, Run, find, made, merged, one_batch

log: Final = logging.getLogger(__name__)
FOUND: Final = "_found"
# Runs are merged so that each is at least so many times as large as all after it.
_GROWTH: Final = 2
# So few rows are merged at once.
_FEW: Final = 1 << 15
# If there are more runs, nothing is put off any longer.
_MOST_RUNS: Final = 16

# One run of several, with a word on where it is written.
Merging = Future[tuple[Run, Any]]
# Begins to make one; whether what is deleted in all of them can be forgotten.
Merge = Callable[[Sequence[Run], bool], Merging]


@dataclass(frozen=True, slots=True)
class _Merged:
    """Runs of which one is being made, and where they begin."""

    first: int
    runs: Sequence[Run]
    made: Merging


class KeyedTable:
    """Rows by a key of one or more columns."""

    def __init__(self, schema: pa.Schema, key: Sequence[str], runs: Sequence[Run] = ()) -> None:
        missing = [name for name in key if name not in schema.names]
        if missing or not key:
            raise StateError(f"a table by key has no column {', '.join(missing) or 'as its key'}")
        self.schema = schema
        self.key = tuple(key)
        # From the oldest to the newest.
        self.runs = list(runs)
        # How many of them are of versions before.
        self._known = len(self.runs)
        self._merging: _Merged | None = None
        # What was merged since the last version, by identity, and where it is written.
        self.written: dict[int, tuple[Run, Any]] = {}
        self._whole: pa.Table | None = None

    def get(self, keys: pa.Table) -> pa.Table:
        """For each row of `keys` the row that is kept, in the same order; nulls where none is.

        The key's columns are those that were asked for. A column `_found` says whether there is
        such a row.
        """
        asked = self._keys(keys)
        count = asked.num_rows
        which, where = self._look_up(asked)
        parts: list[pa.Table] = []
        places = np.empty(count, np.int64)
        filled = 0
        others = [each for each in self.schema.names if each not in self.key]
        for number, run in enumerate(self.runs):
            mine = np.flatnonzero(which == number)
            if len(mine):
                taken = run.rows.select(others).take(pa.array(where[mine]))
                parts.append(pa.Table.from_batches([taken]))
                places[mine] = np.arange(filled, filled + len(mine))
                filled += len(mine)
        nowhere = np.flatnonzero(which < 0)
        places[nowhere] = filled
        columns = {name: asked.column(name) for name in self.key}
        for name in others:
            kind = self.schema.field(name).type
            pieces = [each for part in parts for each in part[name].chunks]
            if len(nowhere):
                pieces.append(pa.nulls(1, kind))
            whole = pa.concat_arrays(pieces) if pieces else pa.nulls(0, kind)
            columns[name] = whole.take(pa.array(places)) if count else whole.slice(0, 0)
        found = pa.array(which >= 0)
        return pa.table(
            [*(columns[name] for name in self.schema.names), found],
            names=[*self.schema.names, FOUND],
        )

    def put(self, rows: pa.Table) -> None:
        """Keep rows, of which no two have the same key, in the place of those with their keys."""
        self.change(rows, None)

    def delete(self, keys: pa.Table) -> None:
        """Forget the rows with these keys, as far as they are there."""
        self.change(None, keys)

    def change(self, rows: pa.Table | None, gone: pa.Table | None) -> None:
        """Keep rows and forget others, with keys that are not among theirs.

        At once this is one run; one after the other it would be two, to be merged.
        """
        parts: list[pa.RecordBatch] = []
        if rows is not None and len(rows):
            parts.append(one_batch(rows.select(self.schema.names).cast(self.schema)))
        kept = sum(map(len, parts))
        if gone is not None and len(gone) and self.runs:
            parts.append(self._nothing(gone))
        if not parts:
            return
        both = parts[0] if len(parts) == 1 else _joined(parts)
        dead = np.arange(both.num_rows) >= kept if both.num_rows > kept else None
        self._add(made(both, self.key, dead))

    def _nothing(self, keys: pa.Table) -> pa.RecordBatch:
        """Rows that have only keys."""
        asked = self._keys(keys)
        columns = [
            asked.column(field.name)
            if field.name in self.key
            else pa.nulls(asked.num_rows, field.type)
            for field in self.schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=_loose(self.schema))

    def scan(self) -> pa.Table:
        """All rows, in no order that means anything, but always in the same."""
        if self._whole is None:
            if not self.runs:
                self._whole = self.schema.empty_table()
            else:
                whole = merged(self.runs, self.key, forget=True).rows
                self._whole = pa.Table.from_batches([whole]).cast(self.schema)
        return self._whole

    def __len__(self) -> int:
        return len(self.scan())

    # ---- runs ----------------------------------------------------------------------------

    def settle(self) -> None:
        """Merge the newest runs if they have few rows, or are too many; the table is a version."""
        self.adopt(wait=len(self.runs) > _MOST_RUNS)
        first = self._unsettled
        tail = self.runs[first:]
        if sum(map(len, tail)) <= _FEW or len(self.runs) > _MOST_RUNS:
            self.runs[first:] = _one(tail, self.key, forget=first == 0)
        self._known = len(self.runs)

    def merge_meanwhile(self, merge: Merge) -> None:
        """Let somebody merge the newest runs, if that is to be done, while nobody waits for it."""
        first = self._unsettled
        tail = tuple(self.runs[first:])
        if self._merging is None and len(tail) > 1:
            self._merging = _Merged(first, tail, merge(tail, first == 0))

    def adopt(self, *, wait: bool = False) -> None:
        """Take what was merged meanwhile, if it is there."""
        found = self._merging
        # What is waited for and not begun is done here as well.
        if found is None or not (found.made.done() or (wait and not found.made.cancel())):
            self._merging = None if wait else found
            return
        self._merging = None
        try:
            one, place = found.made.result()
        except Exception as error:
            # Nobody needs it. What lasts is told by whoever has to merge at once, in the end.
            log.warning("runs of a table stay as they are for now: %s", error)
            return
        self.replace(found.first, len(found.runs), one, place)

    def replace(self, first: int, count: int, one: Run, place: Any) -> None:
        """Take one run for several, which is written already."""
        self.written[id(one)] = (one, place)
        self.runs[first : first + count] = [one] if len(one) else []
        self._known = len(self.runs)

    @property
    def _merged_up_to(self) -> int:
        """The first of the runs that nobody is merging."""
        found = self._merging
        return 0 if found is None else found.first + len(found.runs)

    @property
    def _unsettled(self) -> int:
        """From which run on all should be one, of those that nobody is merging."""
        begin = self._merged_up_to
        return begin + _first_unsettled(self.runs[begin:])

    def _keys(self, keys: pa.Table) -> pa.RecordBatch:
        wanted = pa.schema([self.schema.field(name).with_nullable(True) for name in self.key])
        return one_batch(keys.select(list(self.key)).cast(wanted))

    def _add(self, run: Run) -> None:
        self._whole = None
        self.runs.append(run)
        # Whoever puts a few rows many times does not look them up in as many runs.
        if len(self.runs) > self._known + 1 and len(self.runs[-2]) <= len(run):
            first = self._known + _first_unsettled(self.runs[self._known :])
            self.runs[first:] = _one(self.runs[first:], self.key, forget=first == 0)

    def _look_up(self, asked: pa.RecordBatch) -> tuple[Places, Places]:
        """For each key the number of the run that has it, -1 if none, and where it is there."""
        count = asked.num_rows
        which = np.full(count, -1, np.int64)
        where = np.zeros(count, np.int64)
        if not count or not self.runs:
            return which, where
        keys = [asked.column(name) for name in self.key]
        numbers = hashes(keys)
        rows = np.arange(count)
        for at in range(len(self.runs) - 1, -1, -1):
            run = self.runs[at]
            places = find(run, numbers, keys, self.key)
            hit = places >= 0
            if not hit.any():
                continue
            mine = rows[hit]
            where[mine] = places[hit]
            which[mine] = at
            if run.dead is not None:
                which[mine[run.dead[places[hit]]]] = -1
            left = ~hit
            if not left.any():
                break
            rows, numbers = rows[left], numbers[left]
            keys = [each.filter(pa.array(left)) for each in keys]
        return which, where


def _joined(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    schema = _loose(parts[0].schema)
    tables = [pa.Table.from_arrays(each.columns, schema=schema) for each in parts]
    return one_batch(pa.concat_tables(tables))


def _loose(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])


def _one(runs: Sequence[Run], key: Sequence[str], *, forget: bool) -> list[Run]:
    """Runs as one, or none if nothing is left."""
    if len(runs) < 2:
        return list(runs)
    one = merged(runs, key, forget=forget)
    return [one] if len(one) else []


def _first_unsettled(runs: Sequence[Run]) -> int:
    """From which run on all should be one; the last if nothing is to be merged."""
    first, after = len(runs) - 1, len(runs[-1]) if runs else 0
    while first > 0 and len(runs[first - 1]) < _GROWTH * after:
        first -= 1
        after += len(runs[first])
    return max(first, 0)
