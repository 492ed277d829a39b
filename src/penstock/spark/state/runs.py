"""Sorted runs: rows by the hash of their keys, never changed, looked up and merged by the thousand.

A run also says which keys are deleted. Of several runs the newest that has a key counts, so a
change is a small new run, and all runs before it stay as they are. When there are too many, the
newest are merged into one, such that each is at least twice as large as all after it together:
their number grows with the logarithm of the rows, and each row is written a few times in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.spark.state.files import StateError
from penstock.spark.state.hashing import Flags, Numbers, hashes, same

HASH: Final = "_penstock_hash"
DEAD: Final = "_penstock_dead"
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """Rows sorted by the hash of their keys; no two have the same key."""

    hashes: Numbers
    rows: pa.RecordBatch
    # Which keys are deleted; None if none is.
    dead: Flags | None = None

    def __len__(self) -> int:
        return len(self.hashes)

    def to_batch(self) -> pa.RecordBatch:
        """As it stands in a file."""
        names, columns = [HASH], [pa.array(self.hashes)]
        if self.dead is not None:
            names, columns = [*names, DEAD], [*columns, pa.array(self.dead)]
        return pa.RecordBatch.from_arrays(
            [*columns, *self.rows.columns],
            schema=pa.schema(
                [pa.field(n, c.type) for n, c in zip(names, columns, strict=True)]
                + list(self.rows.schema)
            ),
        )

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> Run:
        names = batch.schema.names
        dead = np.asarray(batch.column(DEAD)) if DEAD in names else None
        shown = [name for name in names if name not in {HASH, DEAD}]
        return cls(np.asarray(batch.column(HASH)), batch.select(shown), dead)


def one_batch(rows: pa.Table) -> pa.RecordBatch:
    """A table in one piece."""
    batches = rows.combine_chunks().to_batches()
    if len(batches) > 1:
        raise StateError(
            f"a shard has {rows.nbytes:,} bytes, of which one column is too large for one piece",
            advice="Divide the state into more shards, with `penstock flows rescale`.",
        )
    if batches:
        return batches[0]
    return pa.RecordBatch.from_arrays(
        [pa.array([], field.type) for field in rows.schema], schema=rows.schema
    )


def made(rows: pa.RecordBatch, key: Sequence[str], *, dead: bool = False) -> Run:
    """A run of rows that no two have the same key of; StateError if two have."""
    unsorted = hashes([rows.column(name) for name in key])
    order = np.argsort(unsorted, kind="stable")
    numbers = unsorted[order]
    rows = rows.take(pa.array(order))
    twins = np.flatnonzero(numbers[1:] == numbers[:-1])
    if len(twins):
        keys = [rows.column(name) for name in key]
        alike = same([each.take(pa.array(twins)) for each in keys],
                     [each.take(pa.array(twins + 1)) for each in keys])  # fmt: skip
        if dead and alike.any():
            # To delete twice is no mistake.
            left = np.ones(len(numbers), np.bool_)
            left[twins[alike] + 1] = False
            numbers, rows = numbers[left], rows.filter(pa.array(left))
        elif alike.any():
            names = {name: rows.column(name)[int(twins[alike][0])].as_py() for name in key}
            raise StateError(
                f"two rows with the key {names} were put into one table at once",
                advice="An operator puts each key once; this is a mistake in it.",
            )
    return Run(numbers, rows, np.ones(len(numbers), np.bool_) if dead else None)


def find(run: Run, numbers: Numbers, keys: Sequence[pa.Array], key: Sequence[str]) -> Places:
    """Where each key is in a run; -1 where it is not. Quickest if the numbers are sorted."""
    found = np.full(len(numbers), -1, np.int64)
    if not len(run):
        return found
    at = np.searchsorted(run.hashes, numbers, side="left")
    asked = np.arange(len(numbers))
    columns = [run.rows.column(name) for name in key]
    while len(asked):
        inside = at < len(run)
        asked, at = asked[inside], at[inside]
        hit = run.hashes[at] == numbers[asked]
        asked, at = asked[hit], at[hit]
        if not len(asked):
            break
        taken = pa.array(at)
        mine = keys if len(asked) == len(numbers) else [k.take(pa.array(asked)) for k in keys]
        alike = same([each.take(taken) for each in columns], mine)
        found[asked[alike]] = at[alike]
        # Another key with the same hash: the next one may be it.
        asked, at = asked[~alike], at[~alike] + 1
    return found


def merged(runs: Sequence[Run], key: Sequence[str], *, forget: bool) -> Run:
    """Runs, from the oldest to the newest, as one; `forget` leaves deleted keys out."""
    if len(runs) == 1:
        [only] = runs
        if only.dead is None or not forget:
            return only
        left = ~only.dead
        return Run(only.hashes[left], only.rows.filter(pa.array(left)))
    newest_first = list(reversed(runs))
    numbers = np.concatenate([each.hashes for each in newest_first])
    # Stable: of the same key the newest comes first. Presorted pieces are only merged.
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    rows = one_batch(pa.Table.from_batches([each.rows for each in newest_first]))
    left = _first_of_each(numbers, order, [rows.column(name) for name in key])
    dead = None
    if any(each.dead is not None for each in newest_first):
        flags = [
            np.zeros(len(each), np.bool_) if each.dead is None else each.dead
            for each in newest_first
        ]
        dead = np.concatenate(flags)[order]
        if forget:
            left &= ~dead
            dead = None
    if dead is not None:
        dead = dead[left]
    taken = order[left]
    return Run(numbers[left], rows.take(pa.array(taken)), dead)


def _first_of_each(numbers: Numbers, order: Places, keys: Sequence[pa.Array]) -> Flags:
    """Which of the sorted rows are the first with their key."""
    left = np.ones(len(numbers), np.bool_)
    repeats = np.flatnonzero(numbers[1:] == numbers[:-1]) + 1
    if not len(repeats):
        return left
    starts = np.ones(len(numbers), np.bool_)
    starts[repeats] = False
    firsts = np.maximum.accumulate(np.where(starts, np.arange(len(numbers)), 0))[repeats]
    alike = same([each.take(pa.array(order[repeats])) for each in keys],
                 [each.take(pa.array(order[firsts])) for each in keys])  # fmt: skip
    left[repeats[alike]] = False
    # Different keys with the same hash, which happens about never: one by one.
    for first in sorted(set(firsts[~alike].tolist())):
        members = [first, *repeats[firsts == first].tolist()]
        kept: list[int] = []
        for member in members:
            mine = [each.take(pa.array(order[[member]])) for each in keys]
            known = any(
                same(mine, [each.take(pa.array(order[[other]])) for each in keys])[0]
                for other in kept
            )
            left[member] = not known
            if not known:
                kept.append(member)
    return left
