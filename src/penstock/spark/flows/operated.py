"""Micro-batches of a flow that keeps state by operators of ours (`penstock.spark.state`).

All streams of the flow are one query: Spark streams their records, each with the number of its
stream, and for each micro-batch they part again, are typed, and the function is called on them.
What it returns is written as that of any flow, and while it is computed the operators write their
state, under the number of the micro-batch.

**Exactly once.** State is there before the output is: the tasks that give the output write the
state first, and only when all have ended is the output committed. So a micro-batch that failed is
run again from the state before it, and its own is written anew, the same; and one that the sink
recognises as written, and skips, has its state already. One case is left: Spark does not compute
what it can show to be of no use, as an output that a filter makes empty. So after each micro-batch
it is looked whether every shard of every operator has its state; if not, it is computed by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark import reading
from penstock.spark.flows import inputs
from penstock.spark.flows.writing import Counts, observed
from penstock.spark.state import layout, store
from penstock.spark.state.context import Batch, Planning, entered

if TYPE_CHECKING:
    from penstock.spark.flows.declare import Stream
    from penstock.spark.flows.running import Running

# The number of a record's stream.
STREAM: Final = "_penstock_stream"


def united(records: list[DataFrame]) -> DataFrame:
    """The records of all streams in one frame."""
    if len(records) == 1:
        return records[0]
    numbered = [rows.withColumn(STREAM, F.lit(at)) for at, rows in enumerate(records)]
    return reduce(lambda a, b: a.unionByName(b), numbered)


@dataclass(frozen=True, slots=True)
class _Part:
    """One stream of a micro-batch."""

    declared: Stream
    # With the bad ones, if it is typed.
    rows: DataFrame
    # Counts the bad ones while they pass, if they go to a topic.
    bad: Observation | None


class Operated:
    """Runs the micro-batches of one generation of a flow."""

    def __init__(self, running: Running, planned: Planning) -> None:
        self._running = running
        flow = running.flow
        # Each operator reads its inputs again, and so does each output.
        self._reads_often = (
            len(flow.streams) > 1 or len(planned.operators) > 1 or running.shares
        )  # fmt: skip
        self._layout = layout.begin(running.checkpoint, flow.shards)

    def __call__(self, records: DataFrame, batch_id: int) -> Counts:
        with _keeping() as kept:
            if self._reads_often:
                kept.append(records := records.persist())
            parts = [
                self._part(records, at, each)
                for at, each in enumerate(self._running.flow.streams)
            ]  # fmt: skip
            batch = Batch(
                folder=self._layout.folder,
                batch_id=batch_id,
                shards=self._layout.shards,
                shares=self._running.shares,
            )
            counts = self._run(parts, batch, kept)
            return self._with_letters(parts, counts, batch_id)

    def _part(self, records: DataFrame, at: int, declared: Stream) -> _Part:
        if len(self._running.flow.streams) > 1:
            records = records.where(F.col(STREAM) == at).drop(STREAM)
        if not declared.is_typed:
            return _Part(declared, records, None)
        rows = inputs.typed(records, declared.reading, metrics=f"input-{at}")
        bad = None
        if declared.dead_letters is not None:
            bad = Observation()
            rows = rows.observe(bad, F.count(reading.ERROR).alias("records"))
        return _Part(declared, rows, bad)

    def _run(self, parts: list[_Part], batch: Batch, kept: list[DataFrame]) -> Counts:
        running = self._running
        seen = [running.seen_of(each.rows, each.declared) for each in parts]
        try:
            with entered(batch):
                results = running.call(running.frames(seen))
            counts = running.write(running.united(results, []), batch.batch_id, with_letters=False)
        finally:
            if batch.shares:
                kept.extend(batch.made.values())
        for name, rows in batch.made.items():
            place = store.Place(f"{batch.folder}/{name}")
            if not store.is_whole(place, batch.shards, batch.batch_id):
                rows.write.format("noop").mode("overwrite").save()
        return counts

    def _with_letters(self, parts: list[_Part], counts: Counts, batch_id: int) -> Counts:
        """Write what could not be read, if there is any."""
        letters = []
        for each in parts:
            if each.declared.dead_letters is None:
                continue
            # After a replay nothing was computed, and so nothing counted.
            known = None if each.bad is None or counts.skipped else observed(each.bad, "records")
            if known != 0:
                letters.append(reading.dead_letters(each.rows, each.declared.dead_letters))
        if not letters:
            return counts
        if not self._reads_often and not counts.skipped:
            self._running.note_second_reading(batch_id)
        whole = reduce(lambda a, b: a.unionByName(b), letters)
        return counts.plus(0, self._running.write_letters(whole, batch_id))


@contextmanager
def _keeping() -> Iterator[list[DataFrame]]:
    """Frames that are kept in memory for a while."""
    kept: list[DataFrame] = []
    try:
        yield kept
    finally:
        for each in kept:
            each.unpersist()
