"""The operator of windows: panes merged by key, windows emitted when they are due.

Two times rule it. The **watermark**: nothing before it comes any more. And **due**, the watermark
and what lateness is allowed: windows that end up to it are emitted as final. Without allowed
lateness they are the same, and a final window never changes. With it a window that is due stays
until the watermark has passed its end, and is emitted again, with the next revision, whenever
events have changed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.state import Shard
from penstock.spark.state.numbering import whole
from penstock.spark.state.schemas import shown
from penstock.spark.state.store import KeyedTable
from penstock.spark.windows.aggregates import Aggregate
from penstock.spark.windows.clock import Clock
from penstock.spark.windows.grouping import Bools, Groups, by_codes, codes, integers
from penstock.spark.windows.multisets import Counts, Multiset
from penstock.spark.windows.shapes import Panes, Placed, Shape

ROWS: Final = "rows"
KEY: Final = "_key"
PANE: Final = "_pane"
FIRST: Final = "_first"
LAST: Final = "_last"
SET: Final = "_set"
_CHANGED: Final = "_changed"
_COUNT: Final = "_count"
_REVISION: Final = "_revision"
START: Final = "window_start"
END: Final = "window_end"
FINAL: Final = "is_final"
REVISION: Final = "revision"
_TIME: Final = pa.timestamp("us", "UTC")


def prefix(number: int) -> str:
    """With what the columns of an aggregate begin."""
    return f"_{number}_"


@dataclass(frozen=True)
class Windows:
    """Windows over partial aggregates."""

    by: pa.Schema
    values: tuple[tuple[str, Aggregate], ...]
    shape: Shape
    early: bool
    allowed_us: int
    # Nothing comes after these rows, and nobody has said how far time has come: all are final.
    whole: bool

    @property
    def kind(self) -> str:
        return "windows"

    @property
    def describes(self) -> str:
        values = ", ".join(f"{name} = {each}" for name, each in self.values)
        by = shown(self.by)
        return f"{self.shape} by [{by}]: {values}; {self.allowed_us} us of lateness"

    # ---- what is kept --------------------------------------------------------------------

    @property
    def _wide(self) -> list[tuple[str, Aggregate]]:
        return [
            (prefix(at), each)
            for at, (_, each) in enumerate(self.values)
            if not isinstance(each, Multiset)
        ]

    @property
    def sets(self) -> dict[str, Multiset]:
        """What is counted, once for all aggregates over the same counts."""
        found: dict[str, Multiset] = {}
        for _, each in self.values:
            if isinstance(each, Multiset):
                found.setdefault(each.shared, each)
        return found

    @property
    def _kept(self) -> pa.Schema:
        fields = [(KEY, pa.string()), *self._by_fields, (PANE, pa.int64())]
        fields += [(FIRST, pa.int64()), (LAST, pa.int64()), (_CHANGED, pa.int64())]
        for at, each in self._wide:
            fields += [(at + end, kind) for end, (kind, _) in each.fields().items()]
        return pa.schema(fields)

    @property
    def _by_fields(self) -> list[tuple[str, pa.DataType]]:
        return [(each.name, each.type) for each in self.by]

    def _set_schema(self, counted: Multiset) -> pa.Schema:
        value = pa.int64() if counted.counted == pa.float64() else counted.counted
        return pa.schema([(KEY, pa.string()), *self._by_fields, (PANE, pa.int64()),
                          ("_value", value), (_COUNT, pa.int64())])  # fmt: skip

    @property
    def schema(self) -> pa.Schema:
        """Of what comes out."""
        found = [*self._by_fields, (START, _TIME), (END, _TIME)]
        found += [(name, each.result) for name, each in self.values]
        found += [(FINAL, pa.bool_())]
        return pa.schema([*found, (REVISION, pa.int32())] if self.allowed_us else found)

    # ---- a micro-batch -------------------------------------------------------------------

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        clock = Clock.of(shard, inputs, whole=self.whole, allowed_us=self.allowed_us)
        kept = shard.state.table("panes", self._kept, [KEY, PANE])
        if ROWS in inputs:
            self._take(shard, kept, inputs[ROWS], clock)
        rows = kept.scan()
        if not len(rows):
            clock.keep(shard)
            return self.schema.empty_table()
        panes = self._panes(rows)
        wanted = self._relevant(rows, panes, clock, shard.version)
        found = self._emitted(shard, rows, panes, wanted, clock)
        self._forget(shard, kept, rows, panes, clock)
        clock.keep(shard)
        return found

    def _panes(self, rows: pa.Table) -> Panes:
        return Panes(
            codes([rows[KEY]], len(rows)),
            integers(rows[PANE]),
            integers(rows[FIRST]),
            integers(rows[LAST]),
        )

    def _take(self, shard: Shard, kept: KeyedTable, rows: pa.Table, clock: Clock) -> None:
        """Merge what a micro-batch brings into what is kept."""
        sets = self.sets
        numbers = integers(rows[SET])
        fresh = self._arrived(rows.filter(pa.array(numbers == 0)), shard.version)
        # Between windows that do not meet there are panes that are in none.
        lies = np.isin(np.arange(len(fresh)), self.shape.placed(self._panes(fresh)).rows)
        fresh = fresh.filter(pa.array(lies))
        # The session of a pane may have begun before, but cannot have ended.
        over = self.shape.done(self._panes(fresh), clock.watermark_before_us)
        clock.refuse_strays(integers(fresh[FIRST]), over)
        kept.put(self._with_kept(kept, fresh))
        for number, (name, counted) in enumerate(sets.items(), start=1):
            schema = self._set_schema(counted)
            of_set = rows.filter(pa.array(numbers == number))
            values = whole(of_set[f"_set_{number}"])
            of_set = of_set.filter(values.is_valid())
            values = values.drop_null().cast(counted.counted)
            if counted.counted == pa.float64():
                values = values.view(pa.int64())
            columns = [of_set[each] for each in (KEY, *self.by.names, PANE)]
            counts = pa.table([*columns, values, of_set[_COUNT]], schema=schema)
            table = shard.state.table(f"counts {name}", schema, [KEY, PANE, "_value"])
            before = whole(table.get(counts)[_COUNT]).fill_null(0) if len(counts) else None
            if before is not None:
                total = pc.add(before, whole(counts[_COUNT]))
                table.put(counts.set_column(len(schema) - 1, _COUNT, total))

    def _arrived(self, rows: pa.Table, version: int) -> pa.Table:
        columns = [whole(rows[each]) for each in (KEY, *self.by.names, PANE, FIRST, LAST)]
        columns.append(pa.array(np.full(len(rows), version, dtype=np.int64)))
        for at, each in self._wide:
            columns += each.arrived(rows, at).values()
        return pa.table(columns, schema=self._kept)

    def _with_kept(self, kept: KeyedTable, fresh: pa.Table) -> pa.Table:
        before = kept.get(fresh.select([KEY, PANE])) if len(kept) else None
        if before is None:
            return fresh
        found = before.filter(before["_found"]).select(self._kept.names)
        both = pa.concat_tables([found, fresh])
        groups = by_codes(codes([both[KEY], both[PANE]], len(both)))
        return self._merged(both, groups)

    def _merged(self, rows: pa.Table, groups: Groups) -> pa.Table:
        if groups.are_single:
            return rows.take(pa.array(groups.firsts))
        first, last, changed = groups.merged(
            [(rows[FIRST], "min"), (rows[LAST], "max"), (rows[_CHANGED], "max")]
        )
        at_first = pa.array(groups.firsts)
        columns = [whole(rows[each].take(at_first)) for each in (KEY, *self.by.names, PANE)]
        columns += [first, last, changed]
        for at, each in self._wide:
            columns += each.merged(rows, at, groups).values()
        return pa.table(columns, schema=self._kept)

    # ---- what comes out ------------------------------------------------------------------

    def _relevant(self, rows: pa.Table, panes: Panes, clock: Clock, version: int) -> Bools:
        """The panes that windows to be emitted now may be made of."""
        if not self.early and not self.allowed_us:
            return self.shape.reached(panes, clock.due_before_us, clock.due_us)
        return np.ones(len(rows), dtype=np.bool_)

    def _emitted(
        self, shard: Shard, rows: pa.Table, panes: Panes, wanted: Bools, clock: Clock
    ) -> pa.Table:
        chosen = np.flatnonzero(wanted)
        some = Panes(*(each[chosen] for each in
                       (panes.keys, panes.starts, panes.firsts, panes.lasts)))  # fmt: skip
        placed = self.shape.placed(some)
        at = chosen[placed.rows]
        groups = by_codes(codes([pa.array(panes.keys[at]), pa.array(placed.starts)], len(at)))
        starts, ends = placed.starts[groups.firsts], placed.ends[groups.firsts]
        touched = np.zeros(groups.count, dtype=np.bool_)
        touched[groups.ids[integers(rows[_CHANGED])[at] == shard.version]] = True
        final = ends <= clock.due_us
        closes = final & (ends > clock.due_before_us)
        emits = (
            closes
            | (touched & (final if self.allowed_us else False))
            | (touched & ~final if self.early else False)
        )
        if not emits.any():
            return self.schema.empty_table()
        inside = emits[groups.ids]
        windows = by_codes(groups.ids[inside])
        picked = np.flatnonzero(emits)
        whole_ = self._merged(rows.take(pa.array(at[inside])), windows)
        return self._finished(
            shard, whole_, Placed(at[inside], starts[picked], ends[picked]), windows,
            final[picked], panes,
        )  # fmt: skip

    def _finished(
        self, shard: Shard, rows: pa.Table, placed: Placed, windows: Groups,
        final: Bools, panes: Panes,
    ) -> pa.Table:  # fmt: skip
        """Rows of windows; `placed.rows` says which panes they are made of."""
        counts = {
            name: self._counts(shard, name, counted, rows, placed, windows, panes)
            for name, counted in self.sets.items()
        }
        columns = [whole(rows[each]) for each in self.by.names]
        columns += [pa.array(each).cast(_TIME) for each in (placed.starts, placed.ends)]
        for number, (_, each) in enumerate(self.values):
            if isinstance(each, Multiset):
                columns.append(each.of_counts(counts[each.shared]))
            else:
                columns.append(each.finished(rows, prefix(number)))
        columns.append(pa.array(final))
        if self.allowed_us:
            columns.append(self._revisions(shard, rows, placed, final))
        found = pa.table(columns, schema=self.schema)
        # Joins inside come in any order; a micro-batch that is run again must give the same.
        return found.take(pc.sort_indices(
            pa.table({"k": whole(rows[KEY]), "s": pa.array(placed.starts)}),
            sort_keys=[("k", "ascending"), ("s", "ascending")],
        ))  # fmt: skip

    def _counts(
        self, shard: Shard, name: str, counted: Multiset, rows: pa.Table, placed: Placed,
        windows: Groups, panes: Panes,
    ) -> Counts:  # fmt: skip
        """The counted values of windows: those of their panes, added up."""
        kept = shard.state.table(
            f"counts {name}", self._set_schema(counted), [KEY, PANE, "_value"]
        ).scan()
        every = shard.state.table("panes", self._kept, [KEY, PANE]).scan()
        # Numbers for (key, pane), the same in both tables.
        keys = pa.chunked_array([*every[KEY].chunks, *kept[KEY].chunks], pa.string())
        starts = np.concatenate([panes.starts, integers(kept[PANE])])
        numbers = codes([keys, pa.array(starts)], len(starts))
        mine, theirs = numbers[: len(every)][placed.rows], numbers[len(every) :]
        order = np.argsort(theirs, kind="stable")
        left = np.searchsorted(theirs[order], mine, side="left")
        count = np.searchsorted(theirs[order], mine, side="right") - left
        window = np.repeat(windows.ids, count)
        turn = np.arange(len(window)) - np.repeat(np.cumsum(count) - count, count)
        at = order[np.repeat(left, count) + turn]
        values, times = whole(kept["_value"]).take(pa.array(at)), integers(kept[_COUNT])[at]
        groups = by_codes(codes([pa.array(window), values], len(at)))
        (total,) = groups.merged([(pa.array(times), "sum")])
        window = window[groups.firsts]
        values = values.take(pa.array(groups.firsts))
        if counted.counted == pa.float64():
            values = values.view(pa.float64())
        sorted_ = integers(pc.sort_indices(
            pa.table({"w": pa.array(window), "v": values}),
            sort_keys=[("w", "ascending"), ("v", "ascending")],
        ))  # fmt: skip
        window = window[sorted_]
        edges = np.arange(windows.count)
        return Counts(
            values.take(pa.array(sorted_)),
            integers(total)[sorted_],
            np.searchsorted(window, edges, side="left").astype(np.int64),
            np.searchsorted(window, edges, side="right").astype(np.int64),
        )

    def _revisions(self, shard: Shard, rows: pa.Table, placed: Placed, final: Bools) -> pa.Array:
        """How often each window has been final before; null while it is not."""
        schema = pa.schema([(KEY, pa.string()), *self._by_fields, (PANE, pa.int64()),
                            (END, pa.int64()), (_REVISION, pa.int32())])  # fmt: skip
        table = shard.state.table("revisions", schema, [KEY, PANE])
        keys = pa.table(
            [*(rows[each] for each in (KEY, *self.by.names)), pa.array(placed.starts),
             pa.array(placed.ends), pa.array(np.zeros(len(rows), dtype=np.int32))],
            schema=schema,
        )  # fmt: skip
        before = whole(table.get(keys)[_REVISION]).fill_null(-1)
        now = pc.add(before, pa.scalar(1, pa.int32()))
        chosen = keys.set_column(len(schema) - 1, _REVISION, now).filter(pa.array(final))
        if len(chosen):
            table.put(chosen)
        return pc.if_else(pa.array(final), now, pa.scalar(None, pa.int32()))

    def _forget(
        self, shard: Shard, kept: KeyedTable, rows: pa.Table, panes: Panes, clock: Clock
    ) -> None:
        """Drop what no window needs that may still change or come."""
        done = self.shape.done(panes, clock.watermark_us)
        if not done.any():
            return
        gone = rows.filter(pa.array(done)).select([KEY, PANE])
        kept.delete(gone)
        for name, counted in self.sets.items():
            schema = self._set_schema(counted)
            table = shard.state.table(f"counts {name}", schema, [KEY, PANE, "_value"])
            every = table.scan()
            numbers = codes(
                [pa.chunked_array([*gone[KEY].chunks, *every[KEY].chunks], pa.string()),
                 pa.chunked_array([*gone[PANE].chunks, *every[PANE].chunks], pa.int64())],
                len(gone) + len(every),
            )  # fmt: skip
            leaves = np.isin(numbers[len(gone) :], numbers[: len(gone)])
            if leaves.any():
                table.delete(every.filter(pa.array(leaves)).select([KEY, PANE, "_value"]))
        if self.allowed_us and "revisions" in shard.state.tables:
            revisions = shard.state.tables["revisions"]
            every = revisions.scan()
            over = integers(every[END]) <= clock.watermark_us
            if over.any():
                revisions.delete(every.filter(pa.array(over)).select([KEY, PANE]))
