"""What the tasks of an enrichment do: a table by key, and events looked up in it by columns.

Both operators keep one row for each key. The one for the time of the event keeps beside it what the
watermark has not passed: events that wait, and changes that do not count yet. When it passes them,
each event is looked up among the changes of its key that have come to count by its time (sorted, by
bisection), and where there is none, in the table of before; afterwards the last of the changes are
the table. So no version is kept that no event can ask for.

Beside a row stands whose it is, by the key of its record: a deletion, or a move to another key,
takes away its own row and not the one that has come into its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.records.columns.compiled import kernel
from penstock.spark.state import KeyedTable, Shard
from penstock.spark.state.numbering import numbered, whole
from penstock.spark.state.schemas import shown
from penstock.spark.state.waiting import micros, plain, released, writable
from penstock.spark.windows.clock import Clock

GONE: Final = "_gone"
# From when a row is valid; when the change was made; and from when it counts: the later of them.
FROM: Final = "_from"
KNOWN: Final = "_known"
AT: Final = "_at"
TIME: Final = "_time"
WATERMARK: Final = "_watermark_end"
# Whose row it is: a hash of the key of the record; or nobody says.
OWNER: Final = "_owner"
ANYBODY: Final = 0
_WAITING: Final = "events"
_COMING: Final = "changes"


def key_name(number: int) -> str:
    return f"_k{number}"


def sent_name(column: str) -> str:
    """What a column of the events is called on its way: their order is of no use, so unsorted."""
    return f"_e_{column}"


def kept_name(column: str) -> str:
    """What a column of the table is called on its way and in the state."""
    return f"_c_{column}"


@dataclass(frozen=True, slots=True)
class Shape:
    """What goes in and what comes out."""

    # Of the events.
    events: tuple[str, ...]
    # Of the table, and what they are called in the result.
    columns: tuple[tuple[str, str], ...]
    keys: tuple[str, ...]
    inner: bool
    # The table in the state: keys, columns, from when the row is valid, and whose it is.
    kept: pa.Schema
    out: pa.Schema

    def result(self, events: pa.Table, found: pa.Table, there: Any) -> pa.Table:
        """Events beside the rows that were found for them."""
        columns = [events[sent_name(each)] for each in self.events]
        columns += [found[kept_name(old)] for old, _ in self.columns]
        rows = pa.table(columns, names=self.out.names)
        return rows.filter(there) if self.inner else rows

    def describes(self, version: str) -> str:
        return f"{version} row of {shown(self.kept)}"


@dataclass(frozen=True, slots=True)
class Latest:
    """Events with the row that is there now."""

    shape: Shape

    @property
    def kind(self) -> str:
        return "enrich"

    @property
    def describes(self) -> str:
        return self.shape.describes("latest")

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        shape = self.shape
        events, changes = inputs.get("events"), inputs.get("changes")
        table = shard.state.table("rows", shape.kept, shape.keys)
        if changes is not None:
            _take_over(table, shape, _with_keys(changes, shape.keys))
        if events is None:
            return shape.out.empty_table()
        found = table.get(events.select(list(shape.keys)))
        return shape.result(events, found, found["_found"])


@dataclass(frozen=True, slots=True)
class AsOf:
    """Events with the row that was valid at their time, once the watermark has passed it."""

    shape: Shape
    # In batch, without a watermark: all there is is here.
    everything: bool

    @property
    def kind(self) -> str:
        return "enrich"

    @property
    def describes(self) -> str:
        # Events that wait have all their columns.
        columns = list(self.shape.out)[: len(self.shape.events)]
        return f"{self.shape.describes('as of')}, for events of {shown(columns)}"

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        shape = self.shape
        passed = self._passed(shard, inputs)
        if passed is not None:
            clock = Clock.at(shard, passed)
            for name, time in (("events", sent_name(TIME)), ("changes", AT)):
                if name in inputs:
                    # What has no time was always there.
                    clock.refuse_strays(micros(inputs[name][time].drop_null()))
            clock.keep(shard)
        events = released(shard, _WAITING, inputs.get("events"), sent_name(TIME), passed)
        changes = released(shard, _COMING, inputs.get("changes"), AT, passed)
        if changes is not None:
            changes = _without_retracted(_with_keys(changes, shape.keys), shape.keys)
        if changes is None or not len(changes):
            if events is None or not len(events):
                return shape.out.empty_table()
            table = shard.state.table("rows", shape.kept, shape.keys)
            found = table.get(events.select(list(shape.keys)))
            return shape.result(events, found, found["_found"])
        return self._joined(shard, events, changes)

    def _passed(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> int | None:
        """The watermark; None if it has passed everything."""
        if shard.watermark_us is not None:
            return shard.watermark_us
        for rows in inputs.values():
            if sent_name(WATERMARK) in rows.column_names and len(rows):
                return int(micros(rows[sent_name(WATERMARK)].slice(0, 1))[0])
        return None if self.everything else np.iinfo(np.int64).min

    def _joined(self, shard: Shard, events: pa.Table | None, changes: pa.Table) -> pa.Table:
        shape = self.shape
        table = shard.state.table("rows", shape.kept, shape.keys)
        asked = changes.select(list(shape.keys))
        if events is not None:
            asked = pa.concat_tables([asked, plain(events.select(list(shape.keys)))])
        at = micros(changes[AT])
        course = _course(table, shape, changes, asked, at)
        result = shape.out.empty_table()
        if events is not None and len(events):
            picked = look_up(
                course.numbers[len(changes) :],
                micros(events[sent_name(TIME)]),
                course.starts,
                at[course.order],
                course.state,
                course.there,
            )
            found = course.rows.take(pa.array(picked, mask=picked < 0))
            result = shape.result(events, found, pa.array(picked >= 0))
        course.keep(table)
        return result


@dataclass(frozen=True, slots=True)
class _Course:
    """Which row of each key holds after each of its changes."""

    # Of the key of each row that was asked for; -1 if one of its columns is null.
    numbers: Any
    # Those of before by the number of their key, and whether they are; the changes after them.
    rows: pa.Table
    there: Any
    # The changes by key and time, where each key begins, and what holds after each.
    order: Any
    starts: Any
    state: Any

    def keep(self, table: KeyedTable) -> None:
        """What holds after the last change of each key is the table from now on."""
        changed = self.starts[1:] > self.starts[:-1]
        last = self.state[self.starts[1:][changed] - 1]
        known = np.flatnonzero(changed)
        # An index below the number of keys is the row of before.
        put = last[last >= len(self.there)]
        lost = known[(last < 0) & self.there[known]]
        table.change(self.rows.take(pa.array(put)), self.rows.take(pa.array(lost)))


def _course(
    table: KeyedTable, shape: Shape, changes: pa.Table, asked: pa.Table, at: Any | None
) -> _Course:
    """Of changes, whose keys are the first in `asked`, from when they count; None: as they come."""
    numbers, count = numbered([asked[each] for each in shape.keys], len(asked), null_is_value=False)
    # Any row of each key.
    first = np.zeros(count, np.int64)
    named = np.flatnonzero(numbers >= 0)
    first[numbers[named]] = named
    before = table.get(asked.take(pa.array(first)))
    there = before["_found"].combine_chunks().to_numpy(zero_copy_only=False)
    own = numbers[: len(changes)]
    # Stable, so that of changes at the same time the last in the log counts.
    order = np.lexsort((own,) if at is None else (at, own))
    always = [np.zeros(each, np.int64) for each in (len(changes), count)]
    valid, valid_before = always if at is None else [micros(e[FROM]) for e in (changes, before)]
    starts = np.searchsorted(own[order], np.arange(count + 1))
    state = settle(
        starts,
        order,
        valid,
        changes[GONE].combine_chunks().to_numpy(zero_copy_only=False),
        writable(whole(changes[OWNER]), ANYBODY),
        there,
        valid_before,
        writable(whole(before[OWNER]), ANYBODY),
    )
    kept = [plain(each.select(shape.kept.names)) for each in (before, changes)]
    return _Course(numbers, pa.concat_tables(kept), there, order, starts, state)


@kernel(
    "int64[:](int64[:], int64[:], int64[:], boolean[:], int64[:], boolean[:], int64[:], int64[:])"
)
def settle(
    starts: Any, order: Any, valid: Any, gone: Any, owner: Any, there: Any, valid_before: Any,
    owner_before: Any,
) -> Any:  # fmt: skip
    """Which row holds after each change, in their order by key and time; -1 if none does.

    Rows of before are numbered by key, changes after them. A change that is valid from earlier on
    than what holds already is none: it corrects the past, which has been told. Nor is a deletion
    of a row that does not hold any more, for another has its place.
    """
    count = len(starts) - 1
    state = np.empty(len(order), np.int64)
    for key in range(count):
        holds, since, whose = np.int64(-1), np.int64(-(1 << 63)), np.int64(0)
        if there[key]:
            holds, since, whose = np.int64(key), valid_before[key], owner_before[key]
        for at in range(starts[key], starts[key + 1]):
            change = order[at]
            if valid[change] >= since:
                if not gone[change]:
                    holds = np.int64(count + change)
                    since, whose = valid[change], owner[change]
                elif owner[change] == whose or owner[change] == ANYBODY or whose == ANYBODY:
                    # As in the next micro-batch, which finds nothing.
                    holds, since = np.int64(-1), np.int64(-(1 << 63))
            state[at] = holds
    return state


@kernel("int64[:](int64[:], int64[:], int64[:], int64[:], int64[:], boolean[:])")
def look_up(numbers: Any, times: Any, starts: Any, at: Any, state: Any, there: Any) -> Any:
    """The row that holds at the time of each event, by the numbers of their keys; -1 if none."""
    found = np.empty(len(numbers), np.int64)
    for each in range(len(numbers)):
        key = numbers[each]
        if key < 0:
            found[each] = -1
            continue
        low, high = starts[key], starts[key + 1]
        while low < high:
            middle = (low + high) >> 1
            if at[middle] <= times[each]:
                low = middle + 1
            else:
                high = middle
        if low > starts[key]:
            found[each] = state[low - 1]
        else:
            found[each] = key if there[key] else -1
    return found


def _with_keys(changes: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Without those whose key is not known: tombstones after deletions, of keys of another kind."""
    kept = None
    for each in keys:
        if changes[each].null_count:
            own = pc.is_valid(changes[each])
            kept = own if kept is None else pc.and_(kept, own)
    return plain(changes if kept is None else changes.filter(kept))


def _without_retracted(changes: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Without rows that were to be valid later on and were taken back before."""
    gone = changes[GONE].combine_chunks().to_numpy(zero_copy_only=False)
    valid = micros(changes[FROM])
    taken_back = np.flatnonzero(gone & (valid > micros(changes[KNOWN])))
    if not len(taken_back):
        return changes
    numbers, _ = numbered([changes[each] for each in keys], len(changes))
    kept = np.ones(len(changes), np.bool_)
    for at in taken_back:
        kept[: at + 1] &= ~((numbers[: at + 1] == numbers[at]) & (valid[: at + 1] == valid[at]))
    return changes.filter(pa.array(kept))


def _take_over(table: KeyedTable, shape: Shape, changes: pa.Table) -> None:
    """Changes in the order of the log, into the table or out of it."""
    if not pc.any(changes[GONE]).as_py():
        table.put(_last(changes, shape.keys))
        return
    # What a row was in between is of no use: it may have had the place before another, that stands
    # before it in the log, in another partition.
    changes = _last(changes, [*shape.keys, OWNER])
    _course(table, shape, changes, changes.select(list(shape.keys)), None).keep(table)


def _last(rows: pa.Table, by: Sequence[str]) -> pa.Table:
    """The last of the rows with the same values, in their order."""
    numbers, count = numbered([rows[each] for each in by], len(rows))
    last = np.zeros(count, np.int64)
    # Of several at the same place the last one stays.
    last[numbers] = np.arange(len(numbers))
    return rows.take(pa.array(np.sort(last)))
