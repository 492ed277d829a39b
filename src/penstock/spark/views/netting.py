"""Changes at the two ends of a view: a changelog into rows that come and go, and back.

Between the stages of a view rows travel with a sign: what is gone (the row as it was) and what has
come. A stage gives for each row's identity at most one of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.spark.state import KeyedTable, Shard
from penstock.spark.views import set_aside
from penstock.spark.views.columns import (
    DELETED,
    PRESENT,
    SIGN,
    Mask,
    kept,
    key_fields,
    key_names,
    keys_of,
    loosened,
    mask,
    numbered,
    one_way,
    same,
    signed,
    taken,
    written_as,
)

INPUT: Final = "rows"


@dataclass(frozen=True, slots=True)
class Changes:
    """What became of some keys: the newest rows, the rows that were kept, and what differs."""

    newest: pa.Table
    old: pa.Table
    found: Mask
    minus: Mask
    plus: Mask


def newest(rows: pa.Table, key: tuple[str, ...]) -> pa.Table:
    """The last row of each key."""
    numbers, first = numbered(rows, key)
    last = np.zeros(len(first), np.int64)
    last[numbers] = np.arange(len(rows), dtype=np.int64)
    return taken(rows, last)


def take_in(
    table: KeyedTable, old: pa.Table, rows: pa.Table, keys: pa.Table, values: tuple[str, ...]
) -> Changes:
    """Bring a table up to the newest rows, one for each key; what has changed by that.

    `old` is what the table has for the keys.
    """
    found, present = mask(old["_found"]), mask(rows[PRESENT])
    unchanged = found & present & same(old, rows, values)
    minus, plus = found & ~unchanged, present & ~unchanged
    columns = [*keys.columns, *(rows[name] for name in values)]
    fresh = pa.table(columns, names=[*keys.column_names, *values])
    table.change(kept(fresh, plus), kept(keys, found & ~present))
    return Changes(rows, old, found, minus, plus)


@dataclass(frozen=True, slots=True)
class Latest:
    """The present row of each primary key, and what a micro-batch changes in it.

    What a row was before is taken from here and never from the event: an event may come twice, and
    those of a compacted topic do not tell.
    """

    key: tuple[str, ...]
    # Of key and values; the values are what is kept.
    schema: pa.Schema
    # As the output of a view (upserts and deletions) instead of rows with signs.
    net: bool = False
    # Rows may have failed, and say where they come from: see `set_aside`.
    guarded: bool = False
    kind: str = "table"

    @property
    def describes(self) -> str:
        written = written_as(self.schema.field(name).type for name in self.key)
        return f"present rows by {', '.join(self.key)}{written}: {_told(self.schema)}"

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(name for name in self.schema.names if name not in self.key)

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        if INPUT not in inputs:
            return self.out.empty_table()
        rows = one_way(newest(loosened(inputs[INPUT]), self.key), self.key)
        kinds = [self.schema.field(name).type for name in self.key]
        values = (self.schema.field(name) for name in self.values)
        kept_as = pa.schema([*key_fields(kinds), *values])
        table = shard.state.table("rows", kept_as, key_names(len(self.key)))
        keys = keys_of(rows, self.key)
        if self.guarded:
            rows = set_aside.of_changelog(shard.state, "rows", kinds, keys, rows)
        changes = take_in(table, table.get(keys), rows, keys, self.values)
        if self.net:
            return self._net(changes)
        old = changes.old.select(list(self.values))
        names = [*self.schema.names, *([set_aside.AT] if self.guarded else [])]
        for name in names:
            if name not in self.values:
                old = old.append_column(name, rows[name])
        found = signed(kept(old, changes.minus), kept(rows, changes.plus), names)
        return found.select(self.out.names)

    @property
    def out(self) -> pa.Schema:
        mark = pa.field(DELETED if self.net else SIGN, pa.bool_())
        out = self.schema.append(mark)
        return set_aside.with_field(out) if self.guarded and not self.net else out

    def _net(self, changes: Changes) -> pa.Table:
        shown = changes.newest.select(self.schema.names)
        gone = changes.minus & ~changes.plus
        rows = shown.append_column(DELETED, pa.array(gone))
        return emptied(kept(rows, gone | changes.plus), self.key)


@dataclass(frozen=True, slots=True)
class Net:
    """What goes and comes under the same identity, as one change; nothing if nothing changes."""

    identity: tuple[str, ...]
    schema: pa.Schema
    guarded: bool = False
    kind: str = "changes"

    @property
    def describes(self) -> str:
        return f"net changes by {', '.join(self.identity)}"

    @property
    def out(self) -> pa.Schema:
        return self.schema.append(pa.field(DELETED, pa.bool_()))

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        if INPUT not in inputs:
            return self.out.empty_table()
        rows = loosened(inputs[INPUT])
        if self.guarded:
            kinds = [self.schema.field(name).type for name in self.identity]
            rows = set_aside.of_signed(shard.state, "rows", rows, self.identity, kinds)
            if not len(rows):
                return self.out.empty_table()
        plus = mask(rows[SIGN])
        numbers, first = numbered(rows, self.identity)
        old, new = (np.full(len(first), -1, np.int64) for _ in range(2))
        at = np.arange(len(rows), dtype=np.int64)
        old[numbers[~plus]] = at[~plus]
        new[numbers[plus]] = at[plus]
        both = (old >= 0) & (new >= 0)
        shown = rows.select(self.schema.names)
        changed = np.ones(len(first), np.bool_)
        changed[both] = ~same(taken(shown, old[both]), taken(shown, new[both]), self.schema.names)
        which = np.where(new >= 0, new, old)[changed]
        gone = (new < 0)[changed]
        return emptied(taken(shown, which).append_column(DELETED, pa.array(gone)), self.identity)


def emptied(rows: pa.Table, key: tuple[str, ...]) -> pa.Table:
    """Deletions have only a key."""
    gone = mask(rows[DELETED])
    if not gone.any():
        return rows
    for at, name in enumerate(rows.column_names):
        if name not in key and name != DELETED:
            column = rows[name]
            values = pa.compute.if_else(pa.array(gone), pa.scalar(None, column.type), column)
            rows = rows.set_column(at, rows.schema.field(at), values)
    return rows


def _told(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
