"""Sorted runs: rows by the hash of their keys, never changed, looked up and merged by the thousand.

A run also says which keys are deleted. Of several runs the newest that has a key counts, so a
change is a small new run, and all runs before it stay as they are. When there are too many, the
newest are merged into one, such that each is at least twice as large as all after it together:
their number grows with the logarithm of the rows, and each row is written a few times in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.records.columns.compiled import kernel
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


_HASHES: Final = "Array(uint64, 1, 'C', readonly=True)"
# A group of hashes that begin alike and is larger is sorted as NumPy does.
_FEW: Final = 32


@kernel(f"int64[::1]({_HASHES})")
def order_of(numbers: Any) -> Any:
    """How to sort hashes, stable: first by as many bits as there are hashes, then what is left."""
    count = len(numbers)
    bits = 1
    while (1 << bits) < count and bits < 24:
        bits += 1
    shift = np.uint64(64 - bits)
    starts = np.zeros((1 << bits) + 1, np.int64)
    for row in range(count):
        starts[np.int64(numbers[row] >> shift) + 1] += 1
    for at in range(1 << bits):
        starts[at + 1] += starts[at]
    order = np.empty(count, np.int64)
    for row in range(count):
        group = np.int64(numbers[row] >> shift)
        order[starts[group]] = row
        starts[group] += 1
    # Each start has become the start of the next group.
    begin = np.int64(0)
    for at in range(1 << bits):
        end = starts[at]
        if end - begin > _FEW:
            some = order[begin:end].copy()
            order[begin:end] = some[np.argsort(numbers[some], kind="mergesort")]
        else:
            for next_ in range(begin + 1, end):
                row = order[next_]
                place = next_
                while place > begin and numbers[order[place - 1]] > numbers[row]:
                    order[place] = order[place - 1]
                    place -= 1
                order[place] = row
        begin = end
    return order


@kernel(f"int64[::1]({_HASHES}, {_HASHES})")
def first_at_least(there: Any, numbers: Any) -> Any:
    """Where in sorted hashes the first is that is not before each number.

    Hashes are spread evenly, so a number tells about where it is: two guesses, and steps that
    double from there until it is found between two of them.
    """
    count, none = np.int64(len(there)), np.int64(0)
    found = np.empty(len(numbers), np.int64)
    width = float(count) / 18446744073709551616.0
    for row in range(len(numbers)):
        number = numbers[row]
        at = min(np.int64(float(number) * width), count - 1)
        off = (float(number) - float(there[at])) * width
        at = min(max(at + np.int64(off), none), count - 1)
        step = np.int64(1)
        if there[at] < number:
            low, high = at + 1, at + 1
            while high < count and there[high] < number:
                low = high + 1
                high += step
                step *= 2
            high = min(high, count)
        else:
            low, high = at, at
            while low > 0 and there[low - 1] >= number:
                high = low - 1
                low = max(low - step, none)
                step *= 2
        while low < high:
            middle = (low + high) >> 1
            if there[middle] < number:
                low = middle + 1
            else:
                high = middle
        found[row] = low
    return found


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


def made(rows: pa.RecordBatch, key: Sequence[str], dead: Flags | None = None) -> Run:
    """A run of rows that no two have the same key of; StateError if two have.

    Those that are `dead` say that their keys are deleted.
    """
    unsorted = hashes([rows.column(name) for name in key])
    order = order_of(unsorted)
    numbers = unsorted[order]
    rows = rows.take(pa.array(order))
    dead = None if dead is None else dead[order]
    twins = np.flatnonzero(numbers[1:] == numbers[:-1])
    if len(twins):
        keys = [rows.column(name) for name in key]
        alike = same([each.take(pa.array(twins)) for each in keys],
                     [each.take(pa.array(twins + 1)) for each in keys])  # fmt: skip
        twins = twins[alike]
    if len(twins):
        if dead is None or not (dead[twins] & dead[twins + 1]).all():
            names = {name: rows.column(name)[int(twins[0])].as_py() for name in key}
            raise StateError(
                f"two rows with the key {names} were put into one table at once",
                advice="An operator puts each key once; this is a mistake in it.",
            )
        # To delete twice is no mistake.
        left = np.ones(len(numbers), np.bool_)
        left[twins + 1] = False
        numbers, rows, dead = numbers[left], rows.filter(pa.array(left)), dead[left]
    return Run(numbers, rows, dead)


def find(run: Run, numbers: Numbers, keys: Sequence[pa.Array], key: Sequence[str]) -> Places:
    """Where each key is in a run; -1 where it is not."""
    found = np.full(len(numbers), -1, np.int64)
    if not len(run):
        return found
    at = first_at_least(run.hashes, numbers)
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
