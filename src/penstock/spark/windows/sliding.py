"""Sliding windows: for each event what happened in the time up to it.

    sliding(payments, "5 minutes", by=["card"], values={"n": count(), "spent": sum("amount")})

Each event comes out once, with all its columns, `window_start` and `window_end` (which is its own
time), and the values over the events of its key from `window_start` to `window_end`, both inside
(SQL's RANGE BETWEEN INTERVAL ... PRECEDING AND CURRENT ROW): itself and those of the same time are
among them. It comes when the watermark has passed its time, so that none of them is missing.

Kept are the events that wait and those within the length of the window before the watermark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.state import Shard, apply
from penstock.spark.state.numbering import numbered, whole
from penstock.spark.state.schemas import shown
from penstock.spark.windows import exact
from penstock.spark.windows.aggregates import Aggregate, Avg, Count, First, Max, Min, Sum, divided
from penstock.spark.windows.clock import WATERMARK, Clock
from penstock.spark.windows.declare import (
    PLACE,
    TIME,
    by_schema,
    checked_keys,
    checked_time,
    checked_values,
    is_whole,
    key_text,
    length,
    micros,
    refused,
    spark_schema,
    value_of,
)
from penstock.spark.windows.errors import WindowError
from penstock.spark.windows.grouping import Bools, Ints, codes, integers, placed_in
from penstock.spark.windows.merging import END, FINAL, START
from penstock.spark.windows.multisets import Distinct
from penstock.spark.windows.spans import Span

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROWS: Final = "rows"
KEY: Final = "_penstock_key"
AT: Final = "_penstock_at"
_TIME: Final = pa.timestamp("us", "UTC")
_FIT: Final = (Count, Sum, Avg, Min, Max, First, Distinct)


def sliding(
    rows: DataFrame,
    size: Span,
    *,
    by: Sequence[str] = (),
    values: Mapping[str, Aggregate],
    time: str = TIME,
    name: str | None = None,
) -> DataFrame:
    """Each event with values over the events of its key in the time up to it (see the module)."""
    checked_keys(rows, by, "by")
    checked_time(rows, time)
    kept = [each for each in rows.columns if each != WATERMARK]
    bound = checked_values(rows, values, kept, places=1)
    for label, each in bound.items():
        if not isinstance(each, _FIT):
            raise refused(
                f"{label!r} cannot be had for each event: it is {type(each).__name__}",
                "Take count, sum, avg, min, max, first, last or distinct, or hopping windows.",
            )
    operator = Sliding(
        by_schema(rows, kept), tuple(bound.items()), length(size, "size"), is_whole()
    )
    ready = rows.withColumns(
        {KEY: key_text(rows, by), AT: micros(rows, time)}
        | {f"_penstock_{at}": value_of(each) for at, each in enumerate(values.values())}
    )
    return apply(
        {ROWS: ready.where(F.col(AT).isNotNull())},
        operator,
        key=list(by),
        schema=spark_schema(operator.schema),
        name=name,
        waits=True,
    )


@dataclass(frozen=True)
class Sliding:
    """The operator."""

    columns: pa.Schema
    values: tuple[tuple[str, Aggregate], ...]
    size_us: int
    whole: bool

    @property
    def kind(self) -> str:
        return "sliding"

    @property
    def describes(self) -> str:
        values = ", ".join(f"{name} = {each}" for name, each in self.values)
        columns = shown(self.columns)
        return f"{self.size_us} us before each event ({columns}): {values}"

    @property
    def schema(self) -> pa.Schema:
        values = [(name, each.result) for name, each in self.values]
        more = [(START, _TIME), (END, _TIME), *values, (FINAL, pa.bool_())]
        return pa.schema([*self.columns, *(pa.field(*each) for each in more)])

    @property
    def _kept(self) -> pa.Schema:
        values = [(f"_penstock_{at}", each.type or pa.int32())
                  for at, (_, each) in enumerate(self.values)]  # fmt: skip
        more = [(KEY, pa.string()), (AT, pa.int64()), *values]
        return pa.schema([*self.columns, *(pa.field(*each) for each in more)])

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        clock = Clock.of(shard, inputs, whole=self.whole)
        fresh = inputs.get(ROWS)
        kept = shard.state.value(ROWS)
        rows = self._kept.empty_table() if kept is None else kept
        if fresh is not None:
            clock.refuse_strays(integers(fresh[AT]))
            rows = pa.concat_tables([rows, fresh.select(self._kept.names).cast(self._kept)])
        keys, at = codes([rows[KEY]], len(rows)), integers(rows[AT])
        due = (at >= clock.watermark_before_us) & (at < clock.watermark_us)
        found = self._of_due(rows, keys, at, due)
        if fresh is not None or due.any():
            stays = at >= clock.watermark_us - self.size_us
            shard.state.keep(ROWS, rows.filter(pa.array(stays)).combine_chunks())
        clock.keep(shard)
        return found

    def _of_due(self, rows: pa.Table, keys: Ints, at: Ints, due: Bools) -> pa.Table:
        """What comes out; only keys of which something is due are put in order."""
        if not due.any():
            return self.schema.empty_table()
        wanted = np.zeros(int(keys.max()) + 1, dtype=np.bool_)
        wanted[keys[due]] = True
        chosen = np.flatnonzero(wanted[keys])
        some = rows.take(pa.array(chosen)).append_column("_k", pa.array(keys[chosen]))
        some = some.append_column("_due", pa.array(due[chosen]))
        places = [(each, "ascending") for each in PLACE if each in rows.column_names]
        some = some.sort_by([("_k", "ascending"), (AT, "ascending"), *places])
        is_due = np.asarray(whole(some["_due"]).to_numpy(zero_copy_only=False), dtype=np.bool_)
        return self._finished(
            some, integers(some["_k"]), integers(some[AT]), np.flatnonzero(is_due)
        )

    def _finished(self, rows: pa.Table, keys: Ints, at: Ints, due: Ints) -> pa.Table:
        low = placed_in(keys, at, keys[due], at[due] - self.size_us, "left")
        high = placed_in(keys, at, keys[due], at[due], "right")
        events = rows.select(self.columns.names).take(pa.array(due))
        columns = [*events.columns, pa.array(at[due] - self.size_us).cast(_TIME),
                   pa.array(at[due]).cast(_TIME)]  # fmt: skip
        for number, (_, each) in enumerate(self.values):
            columns.append(_over(each, whole(rows[f"_penstock_{number}"]), low, high))
        columns.append(pa.array(np.ones(len(due), dtype=np.bool_)))
        return pa.table(columns, schema=self.schema)


def _over(each: Aggregate, values: pa.Array, low: Ints, high: Ints) -> pa.Array:
    """An aggregate over ranges of values."""
    valid = np.asarray(values.is_valid().to_numpy(zero_copy_only=False), dtype=np.bool_)
    count = _between(np.asarray(valid, dtype=np.int64), low, high)
    if isinstance(each, Count):
        return pa.array(count)
    if isinstance(each, Distinct):
        numbers, _ = numbered([values], len(values), null_is_value=False)
        return pa.array(_distinct(numbers, low, high))
    if isinstance(each, First):
        return values.take(_first_valid(valid, low, high, last=each.last))
    if isinstance(each, Min):
        return _extreme(values, valid, low, high, greatest=isinstance(each, Max))
    assert isinstance(each, Sum)
    return _sums(each, values, count, low, high)


def _between(values: Any, low: Ints, high: Ints) -> Any:
    """Sums of ranges, from sums of all up to each place."""
    upto = np.concatenate([np.zeros(1, dtype=values.dtype), np.cumsum(values)])
    return upto[high] - upto[low]


def _sums(each: Sum, values: pa.Array, count: Ints, low: Ints, high: Ints) -> pa.Array:
    average = isinstance(each, Avg)
    none = count == 0
    if pa.types.is_floating(each.type):
        numbers = np.asarray(values.cast(pa.float64()).fill_null(0.0).to_numpy())
        limbs, wild, lost = exact.limbs_of(numbers)
        sums = [_between(limb, low, high) for limb in limbs]
        total, without = _wild_between(wild, low, high), _between(lost, low, high)
        rounded = exact.finished(sums, total, without, count if average else None)
        return pa.array(rounded, mask=none)
    # Numbers without end of Python: exact, whatever comes together.
    zero = [0 if value is None else value for value in values.to_pylist()]
    totals = _between(np.array([*zero, 0], dtype=object)[:-1], low, high).tolist()
    pairs = list(zip(totals, count.tolist(), strict=True))
    if pa.types.is_integer(each.type):
        found = [t / n if average and n else (t if n else None) for t, n in pairs]
    elif average:
        found = [divided(t, n, each.result.scale) for t, n in pairs]
    else:
        found = [t if n else None for t, n in pairs]
    try:
        return pa.array(found, each.result)
    except (OverflowError, pa.ArrowInvalid) as error:
        raise WindowError(
            f"the sum of {each.column!r} in a window does not fit into {each.result}",
            advice="Cast the column to a decimal with room for the sum.",
        ) from error


def _wild_between(wild: exact.Floats, low: Ints, high: Ints) -> exact.Floats:
    nan = _between(np.isnan(wild).astype(np.int64), low, high) > 0
    up = _between((wild == np.inf).astype(np.int64), low, high) > 0
    down = _between((wild == -np.inf).astype(np.int64), low, high) > 0
    found = np.where(up, np.inf, np.where(down, -np.inf, 0.0))
    return np.where(nan | (up & down), np.nan, found)


def _first_valid(valid: Bools, low: Ints, high: Ints, *, last: bool) -> pa.Array:
    """The first or last place in each range that has a value; null if none has."""
    places = np.flatnonzero(valid)
    if not len(places):
        return pa.nulls(len(low), pa.int64())
    if last:
        rank = np.searchsorted(places, high, side="left") - 1
        found = places[np.maximum(rank, 0)]
        none = (rank < 0) | (found < low)
    else:
        rank = np.searchsorted(places, low, side="left")
        found = places[np.minimum(rank, len(places) - 1)]
        none = (rank >= len(places)) | (found >= high)
    return pa.array(found, mask=none)


def _extreme(values: pa.Array, valid: Bools, low: Ints, high: Ints, *, greatest: bool) -> pa.Array:
    """The least or greatest of each range, of any type: by ranks, over spans of powers of two."""
    if pa.types.is_floating(values.type):
        numbers = np.asarray(values.to_numpy(zero_copy_only=False)) + 0.0
        valid = valid & ~np.isnan(numbers)
        values = pa.array(numbers, values.type, mask=~valid)
    order = integers(pc.sort_indices(values))
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[order] = np.arange(len(values))
    ranks = np.where(valid, -ranks if greatest else ranks, len(values))
    tables = [ranks]
    while 2 ** len(tables) <= len(ranks):
        half = tables[-1]
        step = 2 ** (len(tables) - 1)
        tables.append(np.minimum(half[:-step], half[step:]))
    level = np.frexp((high - low).astype(np.float64))[1] - 1
    best = np.empty(len(low), dtype=np.int64)
    for number in np.unique(level):
        of = level == number
        table = tables[number]
        best[of] = np.minimum(table[low[of]], table[high[of] - 2**number])
    none = best == len(values)
    return values.take(pa.array(order[np.abs(np.where(none, 0, best))], mask=none))


@numba.njit(cache=True)
def _distinct(values: Ints, low: Ints, high: Ints) -> Ints:
    """How many different values each range has, by a tree over the last place of each value."""
    size = len(values)
    tree = np.zeros(size + 1, dtype=np.int64)
    last = np.full(size + 1, -1, dtype=np.int64)
    order = np.argsort(high, kind="mergesort")
    found = np.zeros(len(low), dtype=np.int64)
    done = 0
    for query in order:
        while done < high[query]:
            value = values[done]
            if value >= 0:
                if last[value] >= 0:
                    at = last[value] + 1
                    while at <= size:
                        tree[at] -= 1
                        at += at & -at
                last[value] = done
                at = done + 1
                while at <= size:
                    tree[at] += 1
                    at += at & -at
            done += 1
        total = 0
        at = high[query]
        while at > 0:
            total += tree[at]
            at -= at & -at
        at = low[query]
        while at > 0:
            total -= tree[at]
            at -= at & -at
        found[query] = total
    return found
