"""Joins of changing tables by equal keys, inner and left.

With L and R what was there, and -, + what goes and comes on either side, the join changes by

    -  (L- with R)  +  (L+ with R after)  +  (L that stays) with (R-, R+)

which gives each row that goes or comes exactly once. A left join has beside it the rows of the left
side whose key has no row on the right, before and after.

A side is either rows with signs, of which a key can have many, or a changelog whose primary key is
the key of the join: then its present rows are kept here, and need no stage of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.spark.state import Shard
from penstock.spark.views import set_aside
from penstock.spark.views.columns import (
    SIGN,
    Indices,
    Mask,
    distinct,
    kept,
    key_fields,
    key_names,
    keys_of,
    loosened,
    mask,
    nulls,
    numbered,
    one_way,
    pairs,
    taken,
    written_as,
)
from penstock.spark.views.lists import CODE, Lists
from penstock.spark.views.netting import newest, take_in

LEFT: Final = "left"
RIGHT: Final = "right"


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a join: the columns that go on, and those that tell its rows apart."""

    schema: pa.Schema
    identity: tuple[str, ...]
    # A changelog whose primary key is the key of the join.
    raw: bool

    def told(self) -> str:
        return ", ".join(f"{field.name} {field.type}" for field in self.schema)


@dataclass(frozen=True, slots=True)
class _Found:
    """What a micro-batch does to a side, each with CODE, the number of the key."""

    old: pa.Table
    new: pa.Table
    stays: pa.Table
    minus: pa.Table
    plus: pa.Table


@dataclass(frozen=True, slots=True)
class Join:
    """Both sides by the columns `key`, which have the same names and types in both."""

    key: tuple[str, ...]
    key_types: tuple[pa.DataType, ...]
    left: Side
    right: Side
    outer: bool
    # Rows may have failed, and say where they come from: see `set_aside`.
    guarded: bool = False
    kind: str = "join"

    @property
    def describes(self) -> str:
        how = "left" if self.outer else "inner"
        kinds = ", ".join(map(str, self.key_types))
        sides = (f"{'table ' if each.raw else ''}{each.told()}" for each in (self.left, self.right))
        written = written_as(self.key_types if self.left.raw or self.right.raw else ())
        return f"{how} join by {kinds}{written}: {' with '.join(sides)}"

    @property
    def out(self) -> pa.Schema:
        fields = [*self.left.schema, *self.right.schema, pa.field(SIGN, pa.bool_())]
        out = pa.schema(fields)
        return set_aside.with_field(out) if self.guarded else out

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        parts = []
        left, right = (loosened(inputs[each]) if each in inputs else None for each in (LEFT, RIGHT))
        if self.guarded:
            left = self._good(shard, LEFT, self.left, left)
            right = self._good(shard, RIGHT, self.right, right)
        if left is not None and self.outer and not self.left.raw:
            left, alone = self._without_key(left)
            parts.append(alone)
        if left is not None or right is not None:
            parts.append(self._joined(shard, left, right))
        if not parts:
            return self.out.empty_table()
        return pa.concat_tables(parts).combine_chunks()

    def _good(self, shard: Shard, name: str, side: Side, rows: pa.Table | None) -> pa.Table | None:
        """The rows of a side that did not fail; of a changelog this is told later."""
        if rows is None or side.raw:
            return rows
        rows = set_aside.of_signed(shard.state, name, rows, self.key, self.key_types)
        return rows if len(rows) else None

    def _without_key(self, left: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Rows whose key is null have no other side: they need no state."""
        lacks = np.zeros(len(left), np.bool_)
        for name in self.key:
            lacks |= mask(left[name].is_null())
        alone = kept(left, lacks)
        return kept(left, ~lacks), self._beside_nothing(alone, mask(alone[SIGN]))

    def _joined(self, shard: Shard, left: pa.Table | None, right: pa.Table | None) -> pa.Table:
        given = [each for each in (left, right) if each is not None]
        together = pa.concat_tables([each.select(list(self.key)) for each in given])
        numbers, first = numbered(together, self.key)
        keys = keys_of(taken(together, first), self.key)
        of_left = numbers[: len(left)] if left is not None else numbers[:0]
        of_right = numbers[len(of_left) :]
        lefts = self._changed(shard, LEFT, self.left, keys, left, of_left, of_right)
        rights = self._changed(shard, RIGHT, self.right, keys, right, of_right, of_left)
        parts = [
            self._beside(lefts.minus, rights.old, plus=False),
            self._beside(lefts.plus, rights.new, plus=True),
            self._beside(lefts.stays, rights.minus, plus=False),
            self._beside(lefts.stays, rights.plus, plus=True),
        ]
        if self.outer:
            before, after = _lacks(rights.old, len(keys)), _lacks(rights.new, len(keys))
            stays = lefts.stays
            if self.guarded:
                stays = stays.append_column(set_aside.AT, _reason_of(stays, rights, len(keys)))
            parts += [
                self._alone(lefts.minus, before, plus=False),
                self._alone(lefts.plus, after, plus=True),
                self._alone(stays, before & ~after, plus=False),
                self._alone(stays, after & ~before, plus=True),
            ]
        return pa.concat_tables([each for each in parts if len(each)] or parts[:1])

    # ---- one side ------------------------------------------------------------------------

    def _changed(
        self,
        shard: Shard,
        name: str,
        side: Side,
        keys: pa.Table,
        rows: pa.Table | None,
        own: Indices,
        others: Indices,
    ) -> _Found:
        if side.raw:
            return self._of_table(shard, name, side, keys, rows, own)
        lists = Lists.of(
            shard.state, name, key=self.key_types, schema=side.schema, identity=side.identity
        )
        empty = pa.schema([*side.schema, pa.field(SIGN, pa.bool_())]).empty_table()
        fresh = rows.select([*side.schema.names, SIGN]) if rows is not None else empty
        fresh = fresh.append_column(CODE, pa.array(own))
        at = set_aside.at_of(rows) if rows is not None else pa.nulls(0, pa.string())
        # Whether a left row is alone takes all of its right side.
        asked = np.full(len(keys), self.outer and name == RIGHT)
        asked[others] = True
        some = lists.get(keys, fresh, asked)
        plus = mask(fresh[SIGN])
        gone, come = kept(fresh.drop_columns([SIGN]), ~plus), kept(fresh.drop_columns([SIGN]), plus)
        stays = _without(some.rows, gone, (*side.identity, CODE))
        new = pa.concat_tables([stays, come])
        lists.put(keys, some, new, distinct(own))
        if self.guarded:
            gone = gone.append_column(set_aside.AT, at.filter(pa.array(~plus)))
            come = come.append_column(set_aside.AT, at.filter(pa.array(plus)))
        return _Found(some.rows, new, stays, gone, come)

    def _of_table(
        self,
        shard: Shard,
        name: str,
        side: Side,
        keys: pa.Table,
        rows: pa.Table | None,
        own: Indices,
    ) -> _Found:
        """A side of which each key has one row at most: the changelog itself."""
        schema = pa.schema([*key_fields(self.key_types), *side.schema])
        table = shard.state.table(name, schema, key_names(len(self.key)))
        codes = np.arange(len(keys), dtype=np.int64)
        names = tuple(side.schema.names)
        whole = table.get(keys)
        found = mask(whole["_found"])
        old = whole.select(list(names)).append_column(CODE, pa.array(codes))
        before = kept(old, found)
        if rows is None:
            nothing = before.slice(0, 0)
            return _Found(before, before, before, nothing, nothing)
        fresh = newest(rows.append_column(CODE, pa.array(own)), self.key)
        fresh = one_way(fresh, side.identity)
        touched = fresh[CODE].to_numpy()
        if self.guarded:
            fresh = set_aside.of_changelog(
                shard.state, name, self.key_types, taken(keys, touched), fresh
            )
        changes = take_in(table, taken(whole, touched), fresh, taken(keys, touched), names)
        minus = kept(taken(old, touched), changes.minus)
        plus = kept(fresh.select([*names, CODE]), changes.plus)
        is_gone = np.zeros(len(keys), np.bool_)
        is_gone[touched[changes.minus]] = True
        stays = kept(old, found & ~is_gone)
        new = pa.concat_tables([stays, plus])
        if self.guarded:
            at = set_aside.at_of(fresh)
            minus = minus.append_column(set_aside.AT, at.filter(pa.array(changes.minus)))
            plus = plus.append_column(set_aside.AT, at.filter(pa.array(changes.plus)))
        return _Found(before, new, stays, minus, plus)

    # ---- rows that come out --------------------------------------------------------------

    def _beside(self, left: pa.Table, right: pa.Table, *, plus: bool) -> pa.Table:
        if not len(left) or not len(right):
            return self.out.empty_table()
        one, other = pairs(left[CODE].to_numpy(), right[CODE].to_numpy())
        lefts = taken(left.select(self.left.schema.names), one)
        rights = taken(right.select(self.right.schema.names), other)
        columns = [*lefts.columns, *rights.columns, pa.array(np.full(len(one), plus))]
        if self.guarded:
            # Of one of the two: the other was there before.
            is_left = set_aside.AT in left.column_names
            rows, at = (left, one) if is_left else (right, other)
            columns.append(set_aside.at_of(rows).take(pa.array(at)))
        return pa.table(columns, schema=self.out)

    def _alone(self, left: pa.Table, lacks: Mask, *, plus: bool) -> pa.Table:
        if not len(left):
            return self.out.empty_table()
        rows = kept(left, lacks[left[CODE].to_numpy()])
        return self._beside_nothing(rows, np.full(len(rows), plus))

    def _beside_nothing(self, left: pa.Table, plus: Mask) -> pa.Table:
        lefts = left.select(self.left.schema.names)
        rights = nulls(self.right.schema, len(left))
        columns = [*lefts.columns, *rights.columns, pa.array(plus)]
        if self.guarded:
            columns.append(set_aside.at_of(left))
        return pa.table(columns, schema=self.out)


def _reason_of(left: pa.Table, rights: _Found, count: int) -> pa.Array:
    """Where the change stands, of the right side, by which left rows have become or were alone."""
    changed = pa.concat_tables([rights.minus, rights.plus])
    last = np.full(count, -1, np.int64)
    last[changed[CODE].to_numpy()] = np.arange(len(changed))
    at = last[left[CODE].to_numpy()]
    return set_aside.at_of(changed).take(pa.array(at, mask=at < 0))


def _lacks(rows: pa.Table, count: int) -> Mask:
    """Which keys have no row."""
    lacks = np.ones(count, np.bool_)
    lacks[rows[CODE].to_numpy()] = False
    return lacks


def _without(rows: pa.Table, gone: pa.Table, identity: tuple[str, ...]) -> pa.Table:
    if not len(rows) or not len(gone):
        return rows
    names = list(identity)
    numbers, _ = numbered(pa.concat_tables([rows.select(names), gone.select(names)]), names)
    return kept(rows, ~np.isin(numbers[: len(rows)], numbers[len(rows) :]))
