"""Two streams joined within a time of each other: searches and clicks, orders and payments.

    from penstock.spark import within

    within(searches, clicks, on=["user"], bound=("0 s", "10 minutes"), how="left")

A row of the left and a row of the right match if the columns of `on` are equal and the event time
of the right is within `bound` of that of the left, ends included: ("-5 minutes", "10 minutes") is
from five minutes before to ten minutes after. Each pair comes out once, as soon as both rows are
there. With "left" or "full" a row that has no match comes out alone, with nulls for the other side,
once the watermark says that none can come any more. A null in `on` equals nothing.

What comes out: the columns of `on`, then all others of the left and of the right; where names clash
those of the right begin with `right_` (or what `prefix` says), as does its event time.

**What follows a join.** A pair comes when the later of the two does, so its `_time`, that of the
left, may be long past for a window or another join after it. Make it the later of both first,
withColumn("_time", F.greatest("_time", "right__time")); to the time of a row that came alone add
the end of the bound, for so long it has waited.

Kept are the rows of each side that something may still match: of the left until the watermark is
past its time and the end of the bound, of the right likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.state import Shard, apply
from penstock.spark.state.numbering import numbered, whole
from penstock.spark.state.schemas import shown
from penstock.spark.windows.clock import WATERMARK, Clock
from penstock.spark.windows.declare import (
    TIME,
    by_schema,
    checked_keys,
    checked_time,
    is_whole,
    length,
    micros,
    refused,
    spark_schema,
)
from penstock.spark.windows.grouping import Bools, Ints, integers, placed_in
from penstock.spark.windows.spans import Span

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

How = Literal["inner", "left", "full"]

LEFT: Final = "left"
RIGHT: Final = "right"
AT: Final = "_penstock_at"
_MATCHED: Final = "_penstock_matched"


def within(
    left: DataFrame,
    right: DataFrame,
    *,
    on: Sequence[str],
    bound: tuple[Span, Span],
    how: How = "inner",
    time: str = TIME,
    prefix: str = "right_",
    name: str | None = None,
) -> DataFrame:
    """Pairs of rows of two streams with equal `on` and times within a bound (see the module)."""
    for rows in (left, right):
        checked_keys(rows, on, "on")
        checked_time(rows, time)
    if not on:
        raise refused("on= names no column", "Say what must be equal in both streams.")
    if how not in ("inner", "left", "full"):
        raise refused(f"how={how!r} is not known", 'It is "inner", "left" or "full".')
    if None in bound:
        raise refused(
            f"bound={bound!r} does not bound the times on both sides, so that all rows would be "
            f"kept for ever",
            'Give two lengths of time, such as ("-5 minutes", "10 minutes").',
        )
    low, high = (length(each, "bound", least=None) for each in bound)
    if low > high:
        raise refused(f"bound={bound!r} ends before it begins", "Give the earlier time first.")
    for each in on:
        if left.schema[each].dataType != right.schema[each].dataType:
            kinds = [side.schema[each].dataType.simpleString() for side in (left, right)]
            raise refused(
                f"{each!r} is {kinds[0]} on the left and {kinds[1]} on the right",
                "Cast one of them.",
            )
    mine = [each for each in left.columns if each not in (*on, WATERMARK)]
    theirs = [each for each in right.columns if each not in (*on, WATERMARK)]
    renamed = {each: prefix + each if each in (*mine, *on) else each for each in theirs}
    clash = [each for each in renamed.values() if [*mine, *renamed.values()].count(each) > 1]
    if clash:
        raise refused(f"two columns would be named {clash[0]!r}", "Give another prefix=.")
    operator = Within(
        tuple(on),
        by_schema(left, [*on, *mine]),
        by_schema(right, [*on, *theirs]),
        tuple(renamed.values()),
        low,
        high,
        how,
        is_whole(),
    )
    inputs = {LEFT: left.withColumn(AT, micros(left, time)),
              RIGHT: right.withColumn(AT, micros(right, time))}  # fmt: skip
    return apply(
        {each: rows.where(F.col(AT).isNotNull()) for each, rows in inputs.items()},
        operator,
        key=list(on),
        schema=spark_schema(operator.schema),
        name=name,
        waits=True,
    )


@dataclass(frozen=True)
class Within:
    """The operator: rows of both sides are kept while something may match them."""

    on: tuple[str, ...]
    left: pa.Schema
    right: pa.Schema
    # The columns of the right, without those of `on`, as they come out.
    renamed: tuple[str, ...]
    low_us: int
    high_us: int
    how: How
    whole: bool

    @property
    def kind(self) -> str:
        return "join"

    @property
    def describes(self) -> str:
        sides = [shown(side) for side in (self.left, self.right)]
        return (
            f"{self.how} join on {', '.join(self.on)} within {self.low_us} to {self.high_us} us: "
            f"({sides[0]}) with ({sides[1]})"
        )

    @property
    def schema(self) -> pa.Schema:
        theirs = [each for each in self.right if each.name not in self.on]
        return pa.schema(
            [*((each.name, each.type) for each in self.left),
             *((name, each.type) for name, each in zip(self.renamed, theirs, strict=True))]
        )  # fmt: skip

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        clock = Clock.of(shard, inputs, whole=self.whole)
        sides = {}
        for name, schema in ((LEFT, self.left), (RIGHT, self.right)):
            kept_schema = pa.schema([*schema, (AT, pa.int64()), (_MATCHED, pa.bool_())])
            fresh = inputs.get(name)
            fresh = kept_schema.empty_table() if fresh is None else _fresh(fresh, kept_schema)
            clock.refuse_strays(integers(fresh[AT]))
            sides[name] = _Side(shard.state.value(name) or kept_schema.empty_table(), fresh)
        left, right = sides[LEFT], sides[RIGHT]
        numbers = self._keys([left, right])
        pairs = _matches(left, right, numbers, self.low_us, self.high_us)
        found = [self._paired(left.rows, right.rows, pairs)]
        for name, side, at in ((LEFT, left, pairs[0]), (RIGHT, right, pairs[1])):
            matched = side.matched.copy()
            matched[at] = True
            over = side.at + (self.high_us if name == LEFT else -self.low_us) < clock.watermark_us
            # What has a null in its key can match nothing: it is over at once.
            over |= numbers[name] < 0
            if self.how == "full" or (self.how == "left" and name == LEFT):
                found.append(self._alone(side.rows.filter(pa.array(over & ~matched)), name))
            rows = side.rows.set_column(side.rows.num_columns - 1, _MATCHED, pa.array(matched))
            if over.any() or len(side.fresh) or len(at):
                shard.state.keep(name, rows.filter(pa.array(~over)).combine_chunks())
        clock.keep(shard)
        return pa.concat_tables(found)

    def _keys(self, sides: Sequence[_Side]) -> dict[str, Ints]:
        """A number for the key of each row, the same on both sides; -1 if there is a null."""
        left, right = (side.rows for side in sides)
        columns = [
            pa.chunked_array([*left[each].chunks, *right[each].chunks], self.left.field(each).type)
            for each in self.on
        ]
        numbers, _ = numbered(columns, len(left) + len(right), null_is_value=False)
        return {LEFT: numbers[: len(left)], RIGHT: numbers[len(left) :]}

    def _paired(self, left: pa.Table, right: pa.Table, pairs: tuple[Ints, Ints]) -> pa.Table:
        mine = left.select(self.left.names).take(pa.array(pairs[0]))
        rest = [each for each in self.right.names if each not in self.on]
        theirs = right.select(rest).take(pa.array(pairs[1]))
        return pa.table([*mine.columns, *theirs.columns], schema=self.schema)

    def _alone(self, rows: pa.Table, name: str) -> pa.Table:
        """Rows of one side, without the other."""
        others = [each for each in self.right.names if each not in self.on]
        own = set(self.left.names) if name == LEFT else {*self.on}
        named = dict(zip(self.renamed, others, strict=True)) if name == RIGHT else {}
        columns = [
            rows[named.get(field.name, field.name)]
            if field.name in own or field.name in named
            else pa.nulls(len(rows), field.type)
            for field in self.schema
        ]
        return pa.table(columns, schema=self.schema)


def _fresh(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    no = pa.array(np.zeros(len(rows), dtype=np.bool_))
    columns = [no if each.name == _MATCHED else rows[each.name] for each in schema]
    return pa.table(columns, schema=schema)


class _Side:
    """The rows of one side: those kept first, then those that came."""

    def __init__(self, kept: pa.Table, fresh: pa.Table) -> None:
        self.kept = len(kept)
        self.fresh = fresh
        self.rows = pa.concat_tables([kept, fresh])
        self.at: Ints = integers(self.rows[AT])
        self.matched: Bools = np.asarray(
            whole(self.rows[_MATCHED]).to_numpy(zero_copy_only=False), dtype=np.bool_
        )

    @property
    def is_fresh(self) -> Bools:
        return np.arange(len(self.rows)) >= self.kept


def _matches(
    left: _Side, right: _Side, numbers: Mapping[str, Ints], low_us: int, high_us: int
) -> tuple[Ints, Ints]:
    """The pairs of rows of which at least one is new.

    New ones of the left with all of the right, and kept ones of the left with new ones of the
    right: each is a range in the other side, sorted by key and time.
    """
    parts = [
        _ranges(left, right, numbers, left.is_fresh, np.ones(len(right.at), dtype=np.bool_),
                low_us, high_us),
        _ranges(left, right, numbers, ~left.is_fresh, right.is_fresh, low_us, high_us),
    ]  # fmt: skip
    found = (np.concatenate([each[0] for each in parts]),
             np.concatenate([each[1] for each in parts]))  # fmt: skip
    order = np.lexsort((found[1], found[0]))
    return found[0][order], found[1][order]


def _ranges(
    left: _Side, right: _Side, numbers: Mapping[str, Ints], of_left: Bools, of_right: Bools,
    low_us: int, high_us: int,
) -> tuple[Ints, Ints]:  # fmt: skip
    mine = np.flatnonzero(of_left & (numbers[LEFT] >= 0))
    theirs = np.flatnonzero(of_right & (numbers[RIGHT] >= 0))
    if not len(mine) or not len(theirs):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    order = theirs[np.lexsort((right.at[theirs], numbers[RIGHT][theirs]))]
    # Key and time as one number: the order of the sorted right, and where the left would be in it.
    sorted_keys, sorted_at = numbers[RIGHT][order], right.at[order]
    first = placed_in(sorted_keys, sorted_at, numbers[LEFT][mine], left.at[mine] + low_us, "left")
    end = placed_in(sorted_keys, sorted_at, numbers[LEFT][mine], left.at[mine] + high_us, "right")
    count = np.maximum(end - first, 0)
    rows = np.repeat(mine, count)
    turn = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
    return rows, order[np.repeat(first, count) + turn]
