"""Groups of changing rows: count, sum, avg, min, max, count distinct, each with exact retraction.

A group is kept as one row of partial results, from which what the group says is made both before
and after. Sums are exact: integers and decimals as they are, floats as in `exact`. What is taken
away may have been the smallest: so min and max keep all values of a group with how often each is
there, and count distinct does too. Which of them is next, min and max know from a short list
(`best`).

Sums are kept wider than they are told, so that one which does not fit for a while is right again
when something is taken away, wherever micro-batches end. A group of which a result does not fit is
set aside (`set_aside`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import PenstockError
from penstock.spark.state import KeyedTable, Shard
from penstock.spark.state.numbering import whole
from penstock.spark.views import exact, set_aside
from penstock.spark.views.best import VALUE, Best
from penstock.spark.views.columns import (
    DELETED,
    NULLS,
    SIGN,
    Indices,
    kept,
    key_fields,
    key_names,
    keys_of,
    loosened,
    mask,
    numbered,
    one_way,
    same,
    shown,
    signed,
    taken,
    written_as,
)
from penstock.spark.views.lists import CODE
from penstock.spark.views.netting import INPUT, emptied

Function = Literal["count", "sum", "avg", "min", "max", "count distinct"]
FUNCTIONS: Final = ("count", "sum", "avg", "min", "max", "count distinct")
_MOST_DIGITS: Final = 38
# Of decimals with so many digits there cannot be enough rows to go past the most. Sums of others
# are kept with twice as many.
_SAFE_DIGITS: Final = 27
_WIDE_DIGITS: Final = 76
_HALF: Final = 32
_LOW: Final = (1 << _HALF) - 1
_COUNT: Final = "_count"
_TIMES: Final = "_times"


# Where the state was another once: part of what a flow is compared by when it starts again.
_KEPT_AS: Final = {"min": " kept by value", "max": " kept by value"}


class AggregateError(PenstockError):
    """A column cannot be put together in this way."""


@dataclass(frozen=True, slots=True)
class Aggregated:
    """One result of a group: `argument` is a column of the rows, None in count(*)."""

    name: str
    function: Function
    argument: str | None = None
    # Of the argument.
    kind: pa.DataType | None = None
    # As it was written, and where, for messages.
    text: str = field(default="", compare=False)
    place: str = field(default="", compare=False)

    @property
    def type(self) -> pa.DataType:
        """What comes out, as in Spark."""
        kind = self.kind
        by_value = self.function in {"min", "max", "count distinct"}
        if by_value and kind is not None and pa.types.is_nested(kind):
            raise AggregateError(
                f"{self.told} is not possible: its argument is {shown(kind)}",
                advice="Use one of its parts, or to_json(...) of it.",
            )
        if self.function in {"count", "count distinct"}:
            return pa.int64()
        assert kind is not None
        if self.function in {"min", "max"}:
            return kind
        if pa.types.is_decimal(kind):
            more = 10 if self.function == "sum" else 4
            scale = kind.scale + (0 if self.function == "sum" else 4)
            digits = min(_MOST_DIGITS, kind.precision + more)
            return pa.decimal128(digits, min(scale, digits))
        if pa.types.is_integer(kind) and self.function == "sum":
            return pa.int64()
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            return pa.float64()
        raise AggregateError(
            f"{self.told} is not possible: its argument is {shown(kind)}",
            advice="Sums and averages are of numbers; use cast(... as ...) if it holds some.",
        )

    @property
    def told(self) -> str:
        return self.text.replace("`", "") or f"{self.function} of {self.argument}"

    @property
    def is_wide(self) -> bool:
        """Whether its sum may for a while have more digits than a decimal of Spark has."""
        if self.kind is None or self.function not in {"sum", "avg"}:
            return False
        return bool(pa.types.is_decimal(self.kind) and self.kind.precision > _SAFE_DIGITS)

    @property
    def kept_as(self) -> str:
        return " kept wide" if self.is_wide else _KEPT_AS.get(self.function, "")

    @property
    def summed(self) -> pa.DataType:
        """How a sum is kept; of integers these are the lower halves, beside the upper ones."""
        assert self.kind is not None
        if self.is_wide:
            return pa.decimal256(_WIDE_DIGITS, self.kind.scale)
        if pa.types.is_decimal(self.kind):
            return pa.decimal128(_MOST_DIGITS, self.kind.scale)
        return pa.int64() if pa.types.is_integer(self.kind) else exact.TYPE


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Rows with signs by the columns `key`; without a key one row, there even if nothing is."""

    key: tuple[str, ...]
    key_types: tuple[pa.DataType, ...]
    results: tuple[Aggregated, ...]
    # As the output of a view instead of rows with signs.
    net: bool = False
    # Rows may have failed, and results not fit: see `set_aside`.
    guarded: bool = False
    # What it is grouped by, as it was written.
    texts: tuple[str, ...] = field(default=(), compare=False)
    kind: str = "aggregate"

    @property
    def describes(self) -> str:
        kinds = ", ".join(f"{n} {k}" for n, k in zip(self.key, self.key_types, strict=True))
        told = ", ".join(
            f"{each.function} of {each.kind or 'rows'}{each.kept_as}" for each in self.results
        )
        return f"by {kinds or 'nothing'}{written_as(self.key_types)}: {told or 'distinct'}"

    @property
    def shown(self) -> pa.Schema:
        keys = [pa.field(n, k) for n, k in zip(self.key, self.key_types, strict=True)]
        return pa.schema([*keys, *(pa.field(each.name, each.type) for each in self.results)])

    @property
    def out(self) -> pa.Schema:
        out = self.shown.append(pa.field(DELETED if self.net else SIGN, pa.bool_()))
        return set_aside.with_field(out) if self.guarded and not self.net else out

    def _kept(self) -> pa.Schema:
        fields = [*key_fields(self.key_types), pa.field(_COUNT, pa.int64())]
        for at, each in enumerate(self.results):
            if each.function in {"sum", "avg"}:
                fields.append(pa.field(f"_sum{at}", each.summed))
                if pa.types.is_integer(each.summed):
                    fields.append(pa.field(f"_top{at}", pa.int64()))
            elif each.function in {"min", "max"}:
                fields.append(pa.field(f"_end{at}", each.type))
            if each.argument is not None and each.function not in {"min", "max"}:
                fields.append(pa.field(f"_some{at}", pa.int64()))
        return pa.schema(fields)

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        if INPUT not in inputs:
            return self._nothing(shard)
        rows = loosened(inputs[INPUT])
        if self.guarded:
            rows = set_aside.of_signed(shard.state, "rows", rows, self.key, self.key_types)
            if not len(rows):
                return self._nothing(shard)
        weights = np.where(mask(rows[SIGN]), 1, -1).astype(np.int64)
        numbers, first = numbered(rows, self.key)
        groups = None
        if self.key:
            groups = one_way(taken(rows.select(list(self.key)), first), self.key)
        keys = keys_of(groups, self.key) if groups is not None else _the_one()
        table = shard.state.table("groups", self._kept(), key_names(len(self.key)))
        old = table.get(keys)
        columns: dict[str, pa.Array] = {name: whole(keys[name]) for name in keys.column_names}
        columns[_COUNT] = _plus(old, _COUNT, _sums(numbers, weights, len(keys)))
        work = _Work(shard, rows, numbers, weights, keys, old, columns, self.key_types)
        for at, each in enumerate(self.results):
            work.add(at, each)
        new = pa.table(columns).select(self._kept().names)
        there = new[_COUNT].to_numpy() > 0
        stays = there if self.key else np.ones(1, np.bool_)
        table.change(kept(new, stays), kept(keys, ~stays))
        was = mask(old["_found"])
        places = None
        if self.guarded:
            last = np.zeros(len(keys), np.int64)
            last[numbers] = np.arange(len(rows), dtype=np.int64)
            places = set_aside.at_of(rows).take(pa.array(last))
        return self._told(shard, _Groups(groups, keys, old, new, was, stays, places))

    def _nothing(self, shard: Shard) -> pa.Table:
        """Without rows nothing changes; but a result without groups is there from the start."""
        if self.key or shard.number != 0:
            return self.out.empty_table()
        table = shard.state.table("groups", self._kept(), key_names(0))
        if len(table):
            return self.out.empty_table()
        columns = {
            field.name: pa.array([0], field.type)
            if pa.types.is_integer(field.type) and not field.name.startswith("_end")
            else pa.nulls(1, field.type)
            for field in self._kept()
        }
        new = pa.table(columns, schema=self._kept())
        table.put(new)
        none, all_ = np.zeros(1, np.bool_), np.ones(1, np.bool_)
        at = pa.nulls(1, pa.string())
        return self._told(shard, _Groups(None, _the_one(), new, new, none, all_, at))

    def _told(self, shard: Shard, found: _Groups) -> pa.Table:
        before, not_before = self._results(found.groups, found.old)
        after, not_after = self._results(found.groups, found.new)
        was, stays = found.was, found.stays
        if self.guarded:
            self._set_aside(shard, found, after, not_after)
            was = was & ~not_before.is_valid().to_numpy(zero_copy_only=False)
            stays = stays & ~not_after.is_valid().to_numpy(zero_copy_only=False)
        names = [each.name for each in self.results]
        unchanged = was & stays & same(before, after, names)
        if self.net:
            rows = after.append_column(DELETED, pa.array(~stays))
            return emptied(kept(rows, (was | stays) & ~unchanged), self.key)
        names = self.shown.names
        if self.guarded:
            names = [*names, set_aside.AT]
            before, after = (each.append_column(names[-1], found.at) for each in (before, after))
        minus, plus = kept(before, was & ~unchanged), kept(after, stays & ~unchanged)
        return signed(minus, plus, names).select(self.out.names)

    def _results(self, groups: pa.Table | None, state: pa.Table) -> tuple[pa.Table, pa.Array]:
        """What groups say; and why they do not, of those of which a result does not fit."""
        keys = list(groups.columns) if groups is not None else []
        wrong = pa.nulls(len(state), pa.string())
        made = []
        for at, each in enumerate(self.results):
            result, unfit = _result(at, each, state)
            made.append(result)
            if unfit is None or not unfit.any():
                continue
            if not self.guarded:
                raise _too_large(each)
            reason = f"{each.place}{each.told} does not fit {shown(each.type)}"
            wrong = pc.coalesce(wrong, pc.if_else(pa.array(unfit), reason, None))
        if not keys and not made:
            return pa.table({"_": pa.nulls(len(state))}).drop_columns(["_"]), wrong
        return pa.table([*keys, *made], schema=self.shown), wrong

    def _set_aside(self, shard: Shard, found: _Groups, after: pa.Table, wrong: pa.Array) -> None:
        """Note groups of which a result does not fit, and forget others."""
        bad = found.stays & wrong.is_valid().to_numpy(zero_copy_only=False)
        texts = self.texts or self.key
        named = after.select(list(self.key)).rename_columns(list(texts)) if self.key else None
        told = np.full(len(bad), None, object)
        for number in np.flatnonzero(bad).tolist():
            own = named.slice(number, 1).to_pylist()[0] if named is not None else {}
            told[number] = set_aside.told(own)
        why = {
            set_aside.FAILED: wrong,
            set_aside.ROW: pa.array(told, pa.string()),
            set_aside.AT: found.at,
        }
        set_aside.of_groups(shard.state, self.key_types, found.keys, bad, pa.table(why))


@dataclass(frozen=True, slots=True)
class _Groups:
    """Groups that have changed: as they are shown, as they are kept, and what was kept of them."""

    groups: pa.Table | None
    keys: pa.Table
    old: pa.Table
    new: pa.Table
    was: Any
    stays: Any
    # Where the last change of each stands.
    at: pa.Array | None


def _the_one() -> pa.Table:
    return pa.table({"_nulls": pa.array([0], pa.int64())})


def _sums(numbers: Indices, values: Indices, count: int) -> Indices:
    found = np.zeros(count, np.int64)
    np.add.at(found, numbers, values)
    return found


def _plus(old: pa.Table, name: str, more: Indices) -> pa.Array:
    return pa.array(whole(old[name]).fill_null(0).to_numpy() + more)


@dataclass(slots=True)
class _Work:
    """A micro-batch of one shard on its way into the groups."""

    shard: Shard
    rows: pa.Table
    numbers: Indices
    weights: Indices
    keys: pa.Table
    old: pa.Table
    columns: dict[str, pa.Array]
    key_types: tuple[pa.DataType, ...]

    def add(self, at: int, each: Aggregated) -> None:
        if each.argument is None:
            return
        column = whole(self.rows[each.argument])
        there = ~column.is_null().to_numpy(zero_copy_only=False)
        if each.function == "count distinct":
            self.columns[f"_some{at}"] = self._distinct(at, column, there)
            return
        if each.function in {"min", "max"}:
            self.columns[f"_end{at}"] = self._end(at, each, column, there)
            return
        count = _sums(self.numbers[there], self.weights[there], len(self.keys))
        self.columns[f"_some{at}"] = _plus(self.old, f"_some{at}", count)
        if each.function == "count":
            return
        if pa.types.is_integer(each.summed):
            self._integers(at, column)
        else:
            self.columns[f"_sum{at}"] = self._sum(f"_sum{at}", each, column)

    def _integers(self, at: int, column: pa.Array) -> None:
        """Halves of 32 bits are added up apart: whole numbers could go past 64 bits unnoticed."""
        numbers = column.cast(pa.int64()).fill_null(0).to_numpy()
        for name, half in ((f"_sum{at}", numbers & _LOW), (f"_top{at}", numbers >> _HALF)):
            more = _sums(self.numbers, half * self.weights, len(self.keys))
            self.columns[name] = _plus(self.old, name, more)

    def _sum(self, name: str, each: Aggregated, column: pa.Array) -> pa.Array:
        old, kind = whole(self.old[name]), each.summed
        if kind == exact.TYPE:
            return exact.added(old, self.numbers, column, self.weights)
        # What was there takes part as a row of its own: sums of decimals keep their type.
        signed_ = pc.if_else(pa.array(self.weights > 0), column, pc.negate(column)).cast(kind)
        parts = pa.concat_arrays([old.fill_null(Decimal(0)), signed_])
        groups = np.concatenate([np.arange(len(old), dtype=np.int64), self.numbers])
        summed = (
            pa.table([pa.array(groups), parts], names=["g", "v"])
            .group_by("g")
            .aggregate([("v", "sum")])
        )
        return whole(summed.sort_by("g")["v_sum"].cast(kind))

    def _times(self, column: pa.Array, there: Any) -> tuple[pa.Table, Indices]:
        """How often each value of each group comes or goes: CODE, value and the difference."""
        some = pa.table([pa.array(self.numbers[there]), column.filter(pa.array(there))],
                        names=[CODE, VALUE])  # fmt: skip
        numbers, first = numbered(some, (CODE, VALUE))
        change = _sums(numbers, self.weights[there], len(first))
        changed = change != 0
        return kept(taken(some, first), changed), change[changed]

    def _occurring(self, at: int, column: pa.Array, there: Any) -> _Occurring:
        """How often each value that comes or goes was there, and is now; the latter is kept."""
        values, change = self._times(column, there)
        code = values[CODE].to_numpy()
        kinds = [*self.key_types, column.type]
        names = key_names(len(self.key_types))
        schema = pa.schema([*key_fields(kinds), pa.field(_TIMES, pa.int64())])
        table = self.shard.state.table(f"values{at}", schema, key_names(len(kinds)))
        own = keys_of(values, [VALUE])
        groups = taken(self.keys, code)
        keys = pa.table([*(groups[name] for name in names[:-1]), own["_k0"], groups[names[-1]]],
                        names=key_names(len(kinds)))  # fmt: skip
        before = whole(table.get(keys)[_TIMES]).fill_null(0).to_numpy()
        after = before + change
        stays = after > 0
        table.change(kept(keys.append_column(_TIMES, pa.array(after)), stays), kept(keys, ~stays))
        return _Occurring(table, values, (before > 0), (after > 0))

    def _distinct(self, at: int, column: pa.Array, there: Any) -> pa.Array:
        found = self._occurring(at, column, there)
        step = found.is_there.astype(np.int64) - found.was_there.astype(np.int64)
        code = found.values[CODE].to_numpy()
        return _plus(self.old, f"_some{at}", _sums(code, step, len(self.keys)))

    def _end(self, at: int, each: Aggregated, column: pa.Array, there: Any) -> pa.Array:
        """The smallest or largest value of each group."""
        found = self._occurring(at, column, there)
        come = kept(found.values, found.is_there & ~found.was_there)
        gone = kept(found.values, found.was_there & ~found.is_there)
        if not len(come) and not len(gone):
            return whole(self.old[f"_end{at}"])
        best = Best(self.shard.state, f"best{at}", self.key_types, column.type,
                    largest=each.function == "max")  # fmt: skip

        def everything(codes: Indices) -> pa.Table:
            return _values_of(found.table, taken(self.keys, codes), len(self.key_types), codes)

        return best.changed(self.keys, come, gone, everything)


@dataclass(frozen=True, slots=True)
class _Occurring:
    """Values of groups that come and go."""

    # All values of all groups.
    table: KeyedTable
    # CODE and the value.
    values: pa.Table
    was_there: Any
    is_there: Any


def _values_of(table: KeyedTable, groups: pa.Table, width: int, codes: Indices) -> pa.Table:
    """All values of some groups, with the codes given for them: the whole table is looked at."""
    rows = table.scan()
    names = [*(f"_k{at}" for at in range(width)), NULLS]
    own = pa.concat_tables([groups.select(names), rows.select(names)])
    numbers, _ = numbered(own, names)
    of_group = np.full(int(numbers.max()) + 1, -1, np.int64)
    of_group[numbers[: len(groups)]] = codes
    code = of_group[numbers[len(groups) :]]
    found = pa.table([pa.array(code), rows[f"_k{width}"]], names=[CODE, VALUE])
    return kept(found, code >= 0)


# What groups say, and of which of them it does not fit its type; None if of none.
_Told = tuple[pa.Array, Any]


def _result(at: int, each: Aggregated, state: pa.Table) -> _Told:
    """What a group says, from what is kept of it."""
    if each.function == "count" and each.argument is None:
        return whole(state[_COUNT]), None
    if each.function in {"min", "max"}:
        return whole(state[f"_end{at}"]), None
    some = whole(state[f"_some{at}"])
    if each.function in {"count", "count distinct"}:
        return some, None
    counts = some.fill_null(0).to_numpy()
    none = counts == 0
    total = whole(state[f"_sum{at}"])
    if pa.types.is_integer(total.type):
        return _of_halves(total, whole(state[f"_top{at}"]), counts, each)
    if total.type == exact.TYPE:
        divisor = counts.tolist() if each.function == "avg" else None
        return pa.array(exact.rounded(total, divisor), each.type, mask=none), None
    if each.function == "sum":
        return _fitted(pc.if_else(pa.array(none), pa.scalar(None, total.type), total), each)
    return _decimal_average(total.to_pylist(), counts.tolist(), each)


def _of_halves(low: pa.Array, top: pa.Array, counts: Indices, each: Aggregated) -> _Told:
    """Sum or average of integers whose halves were added up apart."""
    lows, tops = (half.fill_null(0).to_numpy() for half in (low, top))
    carried = tops + (lows >> _HALF)
    none = counts == 0
    fits = (carried >= -(1 << (_HALF - 1))) & (carried < 1 << (_HALF - 1))
    if each.function == "avg":
        wide = carried.astype(np.float64) * 2.0**_HALF + (lows & _LOW)
        exactly = ((carried << _HALF) | (lows & _LOW)).astype(np.float64)
        sums = np.where(fits, exactly, wide)
        return pa.array(sums / np.where(none, 1, counts), pa.float64(), mask=none), None
    sums = (np.where(fits, carried, 0) << _HALF) | (lows & _LOW)
    return pa.array(sums, pa.int64(), mask=none | ~fits), None if fits.all() else ~fits


def _too_large(each: Aggregated) -> AggregateError:
    advice = "Cast the column to fewer digits, or to double."
    if each.kind is not None and pa.types.is_integer(each.kind):
        advice = "Sum wider numbers: sum(cast(... as decimal(28, 0)))."
    return AggregateError(f"{each.told} does not fit {shown(each.type)} any more", advice=advice)


def _fitted(total: pa.Array, each: Aggregated) -> _Told:
    try:
        return total.cast(each.type), None
    except pa.ArrowInvalid:
        unfit = _past(total.to_pylist(), each)
        fitting = pc.if_else(pa.array(unfit), pa.scalar(None, total.type), total)
        return fitting.cast(each.type), unfit


def _decimal_average(sums: list[Any], counts: list[int], each: Aggregated) -> _Told:
    step = Decimal(1).scaleb(-each.type.scale)
    with localcontext(prec=2 * _WIDE_DIGITS):
        found = [
            (total / count).quantize(step, ROUND_HALF_UP) if count else None
            for total, count in zip(sums, counts, strict=True)
        ]
    unfit = _past(found, each)
    if not unfit.any():
        return pa.array(found, each.type), None
    return pa.array(found, pa.decimal256(_WIDE_DIGITS, each.type.scale), mask=unfit).cast(
        each.type
    ), unfit


def _past(values: list[Any], each: Aggregated) -> Any:
    """Which decimals have more digits than their type."""
    limit = Decimal(10) ** (each.type.precision - each.type.scale)
    return np.array([value is not None and abs(value) >= limit for value in values], np.bool_)


__all__ = ["FUNCTIONS", "Aggregate", "AggregateError", "Aggregated", "Function"]
