"""Micro-batches of a flow that keeps state by operators of ours (`penstock.spark.state`).

Small micro-batches go over a plan that is prepared once (`prepared`). For others the streams are
read, typed, and the function is called on them. What it returns is written as that of any flow, and
while it is computed the operators write their state, under the number of the micro-batch.

**Exactly once.** State is there before the output is: the tasks that give the output write the
state first, and only when all have ended is the output committed. So a micro-batch that failed is
run again from the state before it, and its own is written anew, the same; and one that the sink
recognises as written, and skips, has its state already. One case is left: Spark does not compute
what it can show to be of no use, as an output that a filter makes empty. So after each micro-batch
it is looked whether every shard of every operator has its state; if not, it is computed by itself.

**Time.** Where all streams have an event time and go through one operator, the tasks that read them
tell how far time has come, and one job does it all (`penstock.spark.state.watching`). Otherwise
streams with an event time are looked at first, by themselves, to tell that
(`penstock.spark.state.time`). Only where a micro-batch has rows that may be late are they put in
the order of the log to tell which. Late records are read once more, as they are, and written with
the dead letters.

**Rows that cannot be computed.** Where operators can set such rows aside (views), a micro-batch
that fails because of what is in its rows is run once more, guarded, and so are those that follow
as long as any row is set aside (`penstock.spark.views.set_aside`).

**Small ones.** A stage for each operator is too much for a micro-batch of few records: operators
that follow each other then share a task (`penstock.spark.state.chaining`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.client.metadata import Metadata
from penstock.spark import reading
from penstock.spark.flows import inputs
from penstock.spark.flows.dead_letters import Verdict
from penstock.spark.flows.parts import PLACE, Aside, Part
from penstock.spark.flows.prepared import Prepared
from penstock.spark.flows.stream_parts import rows_at_once
from penstock.spark.flows.writing import Counts, counting, first_of
from penstock.spark.reading.decoding import SPAN
from penstock.spark.state import inspecting, layout, row_errors, store, watching
from penstock.spark.state import time as clock
from penstock.spark.state.applying import title_of
from penstock.spark.state.chaining import TooMuchError
from penstock.spark.state.context import Batch, Planning, entered
from penstock.spark.state.files import Files, is_because_of
from penstock.spark.state.inspecting import note_key, operators
from penstock.spark.state.packing import BLOB_BYTES

if TYPE_CHECKING:
    from penstock.spark.flows.declare import Stream
    from penstock.spark.flows.running import Running
    from penstock.spark.runtime.micro_batches import MicroBatch

# Adaptive execution makes a job of each shuffle and each kept frame, and plans anew after it, to
# choose what is fixed here: one task for each shard. What is kept is kept for a moment only. And
# streams that Spark unites in the code that it makes could not be told apart any more.
SETTINGS: Final = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage.union.enabled": "false",
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
}
# What the source gives is as Java would give it.
_AS_READ: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.useLargeVarTypes": "false",
}
# To keep to a number of bytes Spark adds up all columns after each row that it sends to Python,
# which took as long as all else that it does with the row. So the rows sent at once are few enough
# that the largest records which the topics take are not too much.
_ARROW_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
_ARROW_ROWS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
_NO_LIMIT: Final = (1 << 31) - 1
# Packed ones are large, always.
_AT_ONCE_PACKED: Final = (64 << 20) // BLOB_BYTES
# In a plan as text.
_ALIAS: Final = re.compile(r"SubqueryAlias (.*)")
# Operators that follow each other share one task up to so many records, and as long as the state
# of all shards may be in one process: beyond that, stages that several tasks share are quicker.
TOGETHER_RECORDS: Final = 250_000
TOGETHER_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class _Packs:
    """A micro-batch of which the source may pack rows, once it is known what is wanted of them."""

    watch: watching.Watch
    now: watching.Now
    # The streams whose source can do that.
    streams: set[int]

    def packable(self, parts: list[Part]) -> dict[int, DataFrame]:
        found = {at: inputs.packed(parts[at].rows, parts[at].declared) for at in self.streams}
        return {at: rows for at, rows in found.items() if rows is not None}

    def begin(self, batch: Batch) -> None:
        self.watch.begin(replace(self.now, packings=batch.packings, shards=batch.shards))


class Operated:
    """Runs the micro-batches of one generation of a flow."""

    def __init__(
        self,
        running: Running,
        planned: Planning,
        watch: str | None = None,
        *,
        reads_each_once: bool = False,
    ) -> None:
        self._running = running
        self._watch = None if watch is None else watching.Watch(watch)
        self._reads_each_once = reads_each_once
        flow = running.flow
        # Each operator reads its inputs again, and so does each output.
        self._reads_often = (
            len(flow.streams) > 1 or len(planned.operators) > 1 or running.shares
        )  # fmt: skip
        self.layout = layout.begin(running.checkpoint, flow.shards)
        self._is_settled = False
        self._prepared = Prepared(running, self)
        # The operators whose keys are written down.
        self._noted: set[str] = set()
        # The operators that several read; another list if all work in one task.
        self._shared: dict[bool, list[str]] = {}
        # Whether so much was made of few records that one task could not hold it.
        self._is_much = False
        # Whether rows that cannot be computed are set aside; None as long as nobody has looked
        # whether any are. And whether anything in the flow can do that.
        self._can_guard = planned.can_guard
        self._guarded: bool | None = None if planned.can_guard else False
        # How much the operators keep, by the last micro-batch.
        self._kept_bytes: int | None = None
        # Whether rows look the same if they do not come by way of Java.
        self._may_pack = False
        self._packed = planned.packed
        # How many rows go to Python at once, and how many if they are packed; as Spark does it if
        # somebody has set it.
        self._at_once = 0
        self._sent_at_once = 0
        # Whether a stream that tells its time is read before it is known what is needed of it.
        self._reads_first = False
        self.times = clock.TimesFolder(f"{self.layout.folder}/{layout.TIME}")
        self.lateness_us = {
            at: each.lateness_us for at, each in enumerate(flow.streams) if each.time is not None
        }

    def __call__(self, micro_batch: MicroBatch) -> Counts:
        self._settle(micro_batch.spark)
        if self._guarded is None:
            self._guarded = self._note_set_aside(micro_batch.batch_id)
        fits = self._prepared.fits(micro_batch) and not self._guarded
        if fits and self._is_small(micro_batch):
            counts = self._prepared.run(micro_batch)
            if counts is not None:
                return counts
        while True:
            try:
                counts = self._once(micro_batch)
                break
            except Exception as error:
                # What was kept of it is written anew.
                if not self._is_much and is_because_of(TooMuchError, error):
                    # It may be so again: from now on by stages.
                    self._is_much = True
                elif not self._guarded and self._can_guard and row_errors.is_of_row(error):
                    self._guarded = True
                else:
                    raise
        if self._guarded:
            self._guarded = self._note_set_aside()
        return counts

    def _once(self, micro_batch: MicroBatch) -> Counts:
        if not self._guarded:
            return self._staged(micro_batch)
        with row_errors.as_written(micro_batch.spark):
            return self._staged(micro_batch)

    def _note_set_aside(self, before: int = inspecting.NEWEST) -> bool:
        """Whether rows are set aside, in the state before a micro-batch."""
        count = inspecting.count_set_aside(self.layout, before)
        self._running.progress.note_set_aside(count)
        return count > 0

    def _staged(self, micro_batch: MicroBatch) -> Counts:
        batch_id = micro_batch.batch_id
        with _keeping() as kept:
            if self._watch is not None:
                return self._in_one_job(self._watch, micro_batch, kept)
            is_kept = self._reads_often
            if self._reads_each_once and not self.lateness_us:
                is_kept = False
            records = micro_batch.frames()
            if is_kept:
                records = [rows.persist() for rows in records]
                kept.extend(records)
            parts = self._parts(records)
            watermark_us = None
            if self.lateness_us:
                parts, watermark_us = self._timed(parts, batch_id, kept)
            batch = self._batch(micro_batch, watermark_us)
            verdict = self.verdict(parts, lambda: self._counted(parts, micro_batch.records))
            counts = self._run(parts, batch, kept, verdict=verdict)
            return self.with_letters(parts, counts, batch_id, verdict)

    def verdict(
        self, parts: list[Part], count: Callable[[], tuple[int | None, int] | None]
    ) -> Verdict:
        def first() -> str:
            return first_of(each.rows for each in parts if each.declared.is_typed)

        return Verdict(self._running.guard, count, first)

    def _counted(self, parts: list[Part], records: int) -> tuple[int | None, int] | None:
        """The records of a micro-batch and the bad ones; None if nothing was computed.

        None, too, of a flow without dead letters: there is nothing to judge.
        """
        if not any(each.declared.dead_letters is not None for each in parts):
            return None
        every: int | None = 0
        dead = 0
        for each in parts:
            if each.declared.dead_letters is None:
                continue
            found: tuple[int | None, int] | None = each.bad_and_all
            if found is None:
                return None
            every = None if every is None or found[0] is None else every + found[0]
            dead += found[1]
        return records if every is None else every, dead

    def _settle(self, session: SparkSession) -> None:
        """Set what suits micro-batches, in the session that was made for this flow alone."""
        if self._is_settled:
            return
        settings = micro_batch_settings(session, self._running)
        if _ARROW_ROWS in settings:
            self._at_once = self._sent_at_once = int(settings[_ARROW_ROWS])
        for name, value in settings.items():
            session.conf.set(name, value)
        self._may_pack = all(session.conf.get(each) == wanted for each, wanted in _AS_READ.items())
        self._is_settled = True

    def _send(self, session: SparkSession, *, packed: bool) -> None:
        """Let as many rows go to Python at once as they are large."""
        wanted = min(self._at_once, _AT_ONCE_PACKED) if packed else self._at_once
        if wanted != self._sent_at_once:
            session.conf.set(_ARROW_ROWS, str(wanted))
            self._sent_at_once = wanted

    # ---- time ----------------------------------------------------------------------------

    def _timed(
        self, parts: list[Part], batch_id: int, kept: list[DataFrame]
    ) -> tuple[list[Part], int]:
        """How far time has come, and which rows are late."""
        times = self.times_before(batch_id)
        for at in self.lateness_us:
            if not self._reads_often or not inputs.is_typed(parts[at].records):
                parts[at] = replace(parts[at], rows=parts[at].rows.persist())
                kept.append(parts[at].rows)
        count = F.count(reading.ERROR).alias("bad")
        looks = [
            clock.spans_of(parts[at].rows, at)
            if SPAN in parts[at].rows.columns
            else clock.blocks_of(parts[at].rows, at, count)
            for at in self.lateness_us
        ]
        found = reduce(lambda a, b: a.unionByName(b), looks).collect()
        found.sort(key=lambda row: (row["topic"], row["partition"], row["begin"]))
        for at in self.lateness_us:
            bad = sum(row["bad"] for row in found if row["number"] == at)
            parts[at] = replace(parts[at], bad_count=bad)
        seen = [
            clock.Seen(
                row["number"],
                (row["topic"], row["partition"]),
                row["least"],
                row["latest"],
                row["behind"],
            )
            for row in found
            if row["latest"] is not None
        ]
        for at, lateness_us in self.lateness_us.items():
            if times.may_any_be_late([each for each in seen if each.number == at], lateness_us):
                before = times.before(at)
                split = clock.with_late(parts[at].rows, lateness_us, before, times.watermark_us)
                # A heartbeat may be behind, but is nothing that could be late.
                late_rows = split.where(F.col(clock.LATE) & inputs.has_value())
                # Only these are kept, so that no more than positions and times is sorted.
                told = late_rows.select(*PLACE, clock.TIME, clock.BEFORE, clock.BEHIND).persist()
                kept.append(told)
                sums = (F.min("offset"), F.max("offset"), F.count("offset"))
                counted = told.groupBy("partition").agg(*sums).collect()
                if counted:
                    late_at = {number: (first, last) for number, first, last, _ in counted}
                    late = sum(row[3] for row in counted)
                    parts[at] = replace(parts[at], told=told, late=late, late_at=late_at)
        after = times.advanced(seen, self.lateness_us)
        self.times.write(batch_id, after)
        self._running.progress.note_time(sum(each.late for each in parts), after.watermark_us)
        return parts, after.watermark_us

    def _in_one_job(
        self, watch: watching.Watch, micro_batch: MicroBatch, kept: list[DataFrame]
    ) -> Counts:
        """A micro-batch of which the source tells how far time has come, and what is late."""
        batch_id, tasks = micro_batch.batch_id, micro_batch.task_count
        now = watching.Now(batch_id, self.lateness_us, self.times_before(batch_id))
        batch = self._watched(watch, micro_batch)
        hearing = _Hearing(watch, batch_id, tasks)
        watch.begin(now)
        is_kept = self._reads_first
        records = micro_batch.frames()
        parts = self._read(records, kept) if is_kept else self._parts(records)
        try:
            may_pack = self._may_pack and not is_kept
            packs = _Packs(watch, now, self._packed) if may_pack else None
            verdict = self.verdict(parts, hearing.counted)
            counts = self._run(parts, batch, kept, packs, verdict=verdict)
        except Exception as error:
            if is_kept or not is_because_of(watching.UnreadError, error):
                raise
            # Spark has left rows out that are of no use to the function: that may be so again.
            self._reads_first = is_kept = True
            hearing.whole = None
            watch.begin(now)
            parts = self._read(records, kept)
            verdict = self.verdict(parts, hearing.counted)
            batch = self._watched(watch, micro_batch)
            counts = self._run(parts, batch, kept, verdict=verdict)
        heard = hearing.heard()
        if heard.tasks != tasks:
            # After a replay nothing was computed.
            is_kept = True
            watch.begin(now)
            parts = self._read(records, kept)
            heard = watch.heard(batch_id)
        after = heard.after(now)
        self.times.write(batch_id, after)
        parts = [
            part.with_told(heard.of(at), kept, is_kept=is_kept) for at, part in enumerate(parts)
        ]
        self._running.note_read(batch_id, sum(each.read for each in heard.parts))
        self._running.progress.note_time(sum(each.late for each in parts), after.watermark_us)
        return self.with_letters(parts, counts, batch_id, verdict)

    def _batch(
        self, micro_batch: MicroBatch, watermark_us: int | Callable[[], int] | None
    ) -> Batch:
        return Batch(
            folder=self.layout.folder,
            batch_id=micro_batch.batch_id,
            shards=self.layout.shards,
            watermark_us=watermark_us,
            together=self._is_small(micro_batch),
            guarded=bool(self._guarded),
        )

    def _is_small(self, micro_batch: MicroBatch) -> bool:
        """Whether one task is enough for all operators: by the records, and what is kept."""
        if self._is_much:
            return False
        if self._kept_bytes is None:
            places = [
                store.Place(f"{self.layout.folder}/{name}")
                for name in operators(self.layout)
            ]  # fmt: skip
            self._kept_bytes = store.size(places, self.layout.shards)[1]
        if self._kept_bytes > TOGETHER_BYTES or not Files(self.layout.folder).is_local:
            return False
        return micro_batch.records <= TOGETHER_RECORDS

    def _watched(self, watch: watching.Watch, micro_batch: MicroBatch) -> Batch:
        told = watching.Watermark(watch, micro_batch.batch_id, micro_batch.task_count)
        return self._batch(micro_batch, told)

    def _read(self, records: list[DataFrame], kept: list[DataFrame]) -> list[Part]:
        """Read all streams, whatever is needed of them."""
        records = [rows.persist() for rows in records]
        kept += records
        for rows in records:
            rows.write.format("noop").mode("overwrite").save()
        return self._parts(records)

    @property
    def is_watched(self) -> bool:
        """Whether all streams have a time and go through one operator."""
        return self._watch is not None

    def times_before(self, batch_id: int) -> clock.Times:
        times = self.times.before(batch_id)
        return clock.Times(self._partitions()) if times is None else times

    def _partitions(self) -> dict[int, dict[clock.Part, int | None]]:
        """The partitions of the timed streams as they are when the flow first runs."""
        streams = self._running.flow.streams
        found: dict[int, dict[clock.Part, int | None]] = {}
        with self._running.place.cluster() as cluster:
            metadata = Metadata(cluster)
            for at in self.lateness_us:
                topic = self._running.place.resolve(streams[at].topic)
                found[at] = {(topic, number): None for number in metadata.partitions(topic)}
        return found

    # ---- rows ----------------------------------------------------------------------------

    def _parts(self, records: list[DataFrame]) -> list[Part]:
        streams = self._running.flow.streams
        return [self._part(records[at], at, each) for at, each in enumerate(streams)]

    def _part(self, records: DataFrame, at: int, declared: Stream) -> Part:
        if not declared.is_typed:
            return Part(declared, records, records)
        rows = inputs.typed(
            records,
            declared.reading,
            metrics=f"input-{at}",
            time=declared.time,
            rules=declared.time_rules,
        )
        bad = None
        if declared.dead_letters is not None and declared.time is None:
            bad = Observation()
            rows = rows.observe(bad, *counting())
        return Part(declared, rows, records, bad)

    def _run(
        self,
        parts: list[Part],
        batch: Batch,
        kept: list[DataFrame],
        packs: _Packs | None = None,
        *,
        verdict: Verdict,
    ) -> Counts:
        running, batch_id = self._running, batch.batch_id
        assert isinstance(batch_id, int)
        rows = [each.on_time for each in parts]
        if packs is not None:
            rows = [inputs.guarded(each) for each in rows]
            batch.packable = packs.packable(parts)
        seen = [
            running.seen_of(own, each.declared) for own, each in zip(rows, parts, strict=True)
        ]  # fmt: skip
        batch.streams = seen
        with entered(batch):
            results = running.call(running.frames(seen))
        if packs is not None and batch.packings:
            packs.begin(batch)
        if self._at_once:
            self._send(parts[0].rows.sparkSession, packed=bool(batch.packings))
        # The same in each micro-batch, and it takes as long as several steps of planning.
        shared = self._shared.get(batch.together)
        if shared is None:
            shared = self._shared[batch.together] = shared_by(results.values(), batch)
        kept += [batch.made[name].persist() for name in shared if name in batch.made]
        counts = running.write(
            running.united(results, []), batch_id, with_letters=False, verdict=verdict
        )
        self.complete(batch, batch_id)
        return counts

    def complete(self, batch: Batch, batch_id: int) -> None:
        """See to it that all operators have written their state."""
        for name, made in batch.made.items():
            if name not in self._noted:
                note_key(batch.folder, name, batch.keys[name])
                self._noted.add(name)
            place = store.Place(f"{batch.folder}/{name}")
            if not store.is_whole(place, batch.shards, batch_id):
                made.write.format("noop").mode("overwrite").save()
        places = [store.Place(f"{batch.folder}/{name}") for name in batch.made]
        kept_rows, self._kept_bytes = store.size(places, batch.shards)
        self._running.progress.note_state(kept_rows, self._kept_bytes)

    def with_letters(
        self, parts: list[Part], counts: Counts, batch_id: int, verdict: Verdict
    ) -> Counts:
        """Write what could not be read, and what is late, if there is any."""
        counts = Aside(self._running).written(parts, counts, batch_id)
        if not counts.skipped:
            self._running.settle(batch_id, verdict)
        return counts


@dataclass(slots=True)
class _Hearing:
    """What the tasks of a micro-batch have told; asked for once when all have."""

    watch: watching.Watch
    batch_id: int
    tasks: int
    whole: watching.Heard | None = None

    def heard(self) -> watching.Heard:
        if self.whole is not None:
            return self.whole
        heard = self.watch.heard(self.batch_id)
        self.whole = heard if heard.tasks == self.tasks else None
        return heard

    def counted(self) -> tuple[int, int] | None:
        """The records and the bad ones, if all tasks have told."""
        heard = self.heard()
        if heard.tasks != self.tasks:
            return None
        return sum(each.read for each in heard.parts), sum(each.bad for each in heard.parts)


def shared_by(results: Iterable[DataFrame], batch: Batch) -> list[str]:
    """The operators with several readers: what they give is kept, so that they work once."""
    plans = [str(rows._jdf.queryExecution().analyzed().toString()) for rows in results]
    read = Counter(name.strip("`") for plan in plans for name in _ALIAS.findall(plan))
    return [name for name in batch.made if read[title_of(name)] > 1]


def micro_batch_settings(session: SparkSession, running: Running) -> dict[str, str]:
    """What suits micro-batches of a flow with operators."""
    given = session.sparkContext.getConf()
    if given.contains(_ARROW_BYTES) or given.contains(_ARROW_ROWS):
        return dict(SETTINGS)
    most = rows_at_once(running.place, running.flow.streams)
    return {**SETTINGS, _ARROW_BYTES: str(_NO_LIMIT), _ARROW_ROWS: str(most)}


@contextmanager
def _keeping() -> Iterator[list[DataFrame]]:
    """Frames that are kept in memory for a while."""
    kept: list[DataFrame] = []
    try:
        yield kept
    finally:
        for each in kept:
            each.unpersist()
