"""Rows that come again: kept once for each key and time.

    deduplicated(orders, key=["order_id"], within="10 minutes")

A row is a copy if a row of the same key was kept whose event time is less than `within` away.

**order="time"** (the default) keeps the earliest by event time, of equal times the first in the
log. Rows come out once the watermark has passed their time, so that no earlier one can come: the
answer is the same on every replay, wherever the copies are.

**order="log"** keeps the first in the log, and lets it through at once. Copies in the same
partition (as those with the same record key are) give the same on every replay; where they are
spread over partitions, which one is first depends on how fast partitions are read.

Kept are the times of what was let through, until the watermark is `within` past them or a little
more, and by "time" the rows that wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numba
import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.state import KeyedTable, Shard, apply
from penstock.spark.state.keyed import FOUND
from penstock.spark.state.operator import HINT
from penstock.spark.state.schemas import shown
from penstock.spark.windows.clock import WATERMARK, Clock
from penstock.spark.windows.declare import (
    PLACE,
    TIME,
    by_schema,
    checked_keys,
    checked_time,
    is_whole,
    key_text,
    length,
    micros,
    refused,
)
from penstock.spark.windows.grouping import Bools, Ints, codes, integers
from penstock.spark.windows.spans import Span

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Order = Literal["time", "log"]

ROWS: Final = "rows"
KEY: Final = "_penstock_key"
AT: Final = "_penstock_at"
# Times of a key that are kept are at least `within` apart, so that no two are in one such span.
SPAN: Final = "_penstock_span"
_SEEN: Final = pa.schema([(KEY, pa.string()), (SPAN, pa.int64()), (AT, pa.int64())])
_SWEPT: Final = f"{HINT}swept"
# All that was seen is gone through after so many parts of `within`.
_SWEEPS: Final = 8


def deduplicated(
    rows: DataFrame,
    *,
    key: Sequence[str],
    within: Span,
    time: str = TIME,
    order: Order = "time",
    name: str | None = None,
) -> DataFrame:
    """The rows without copies of the same key within a time (see the module)."""
    checked_keys(rows, key, "key")
    checked_time(rows, time)
    if not key:
        raise refused("key= names no column", "Say what makes two rows the same.")
    if order not in ("time", "log"):
        raise refused(f"order={order!r} is not known", 'It is "time" or "log".')
    if order == "log" and not all(each in rows.columns for each in PLACE):
        raise refused(
            'order="log" needs the place of rows in the log',
            f"Let the columns {', '.join(PLACE)} of the stream pass.",
        )
    kept = [each for each in rows.columns if each != WATERMARK]
    operator = Deduplicated(
        by_schema(rows, kept), tuple(key), length(within, "within"), order, is_whole()
    )
    ready = rows.withColumns({KEY: key_text(rows, key), AT: micros(rows, time)})
    schema = rows.select(*(F.col(f"`{each}`") for each in kept)).schema
    return apply(
        {ROWS: ready.where(F.col(AT).isNotNull())},
        operator,
        key=list(key),
        schema=schema,
        name=name,
        waits=True,
    )


@dataclass(frozen=True)
class Deduplicated:
    """The operator."""

    schema: pa.Schema
    key: tuple[str, ...]
    within_us: int
    order: Order
    whole: bool

    @property
    def kind(self) -> str:
        return "deduplicate"

    @property
    def describes(self) -> str:
        columns = shown(self.schema)
        return (
            f"once for each {', '.join(self.key)} within {self.within_us} us, by {self.order}: "
            f"{columns}"
        )

    @property
    def _waiting(self) -> pa.Schema:
        return pa.schema([*self.schema, (KEY, pa.string()), (AT, pa.int64())])

    @property
    def _seen(self) -> pa.Schema:
        columns = [self.schema.field(each) for each in self.key]
        return pa.schema([*_SEEN, *columns])

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        clock = Clock.of(shard, inputs, whole=self.whole)
        fresh = inputs.get(ROWS)
        rows = (
            self._waiting.empty_table()
            if fresh is None
            else fresh.select(self._waiting.names).cast(self._waiting)
        )
        clock.refuse_strays(integers(rows[AT]))
        if self.order == "time":
            waiting = shard.state.value("waiting")
            rows = rows if waiting is None else pa.concat_tables([waiting, rows])
            ready = integers(rows[AT]) < clock.watermark_us
            if fresh is not None or ready.any():
                shard.state.keep("waiting", rows.filter(pa.array(~ready)).combine_chunks())
            rows = rows.filter(pa.array(ready))
            places = [each for each in PLACE if each in rows.column_names]
            rows = rows.sort_by([(AT, "ascending"), *((each, "ascending") for each in places)])
        seen = shard.state.table("seen", self._seen, [KEY, SPAN])
        if len(rows):
            spans = integers(rows[AT]) // self.within_us
            rows = rows.append_column(SPAN, pa.array(spans))
            rows = rows.filter(pa.array(self._chosen(self._near(seen, rows), rows)))
            seen.put(rows.select(self._seen.names))
        self._forget(shard, seen, clock)
        clock.keep(shard)
        return rows.select(self.schema.names)

    def _near(self, seen: KeyedTable, rows: pa.Table) -> pa.Table:
        """What was let through of the same keys in about the same time."""
        asked = [
            pa.table({KEY: rows[KEY], SPAN: pa.array(integers(rows[SPAN]) + step)})
            for step in (-1, 0, 1)
        ]
        found = seen.get(pa.concat_tables(asked))
        return found.filter(found[FOUND]).select([KEY, AT])

    def _forget(self, shard: Shard, seen: KeyedTable, clock: Clock) -> None:
        """Nothing that comes is before the watermark, so within the time of nothing older."""
        kept = shard.state.value(_SWEPT)
        before = None if kept is None else kept["upto_us"][0].as_py()
        if before is not None and clock.watermark_us - before < self.within_us // _SWEEPS:
            return
        shard.state.keep(_SWEPT, pa.table({"upto_us": [clock.watermark_us]}))
        every = seen.scan()
        over = integers(every[AT]) + self.within_us <= clock.watermark_us
        if over.any():
            seen.delete(every.filter(pa.array(over)))

    def _chosen(self, seen: pa.Table, rows: pa.Table) -> Bools:
        keys = pa.chunked_array([*seen[KEY].chunks, *rows[KEY].chunks], pa.string())
        numbers = codes([keys], len(keys))
        at = np.concatenate([integers(seen[AT]), integers(rows[AT])])
        spans = at // self.within_us
        # The spans of each key in their order, each once.
        order = np.lexsort((spans, numbers))
        key_steps, steps = np.diff(numbers[order]), np.diff(spans[order])
        begins = np.concatenate([[True], (key_steps != 0) | (steps != 0)])
        places = np.empty(len(order), dtype=np.int64)
        places[order] = np.cumsum(begins) - 1
        follows = np.concatenate([[False], (key_steps == 0) & (steps == 1)])[begins]
        return _walk(places, at, np.append(follows, False), len(seen), self.within_us)


@numba.njit(cache=True)
def _walk(places: Ints, at: Ints, follows: Bools, known: int, within_us: int) -> Bools:
    """Which rows to keep, one after the other, if none is near; the first are known to be kept.

    Rows of a key in the same span have one place. What is near is there, or in the span before or
    after, of which `follows` says whether a place has the one before it as such.
    """
    times = np.zeros(len(follows), dtype=np.int64)
    taken = np.zeros(len(follows), dtype=np.bool_)
    kept = np.zeros(len(places) - known, dtype=np.bool_)
    for row in range(len(places)):
        place = places[row]
        if row >= known:
            if taken[place]:
                continue
            if follows[place] and taken[place - 1] and at[row] - times[place - 1] < within_us:
                continue
            after = place + 1
            if follows[after] and taken[after] and times[after] - at[row] < within_us:
                continue
            kept[row - known] = True
        taken[place] = True
        times[place] = at[row]
    return kept
