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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.client.metadata import Metadata
from penstock.spark import reading, sql
from penstock.spark.flows import inputs, offsets
from penstock.spark.flows.dead_letters import Verdict
from penstock.spark.flows.late import late_letters
from penstock.spark.flows.stream_parts import apart_of, parted, rows_at_once
from penstock.spark.flows.writing import BAD, Counts, counted, counting, first_of, observed
from penstock.spark.reading.decoding import ASIDE, SPAN, TIME
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

# Adaptive execution makes a job of each shuffle and each kept frame, and plans anew after it, to
# choose what is fixed here: one task for each shard. What is kept is kept for a moment only. And
# streams that Spark unites in the code that it makes could not be told apart any more.
_SETTINGS: Final = {
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
_PLACE: Final = ["topic", "partition", "offset"]


@dataclass(frozen=True, slots=True)
class _Part:
    """One stream of a micro-batch."""

    declared: Stream
    # With the bad ones, if it is typed.
    rows: DataFrame
    # As they were read; as they are in the log, unless the source has typed them.
    records: DataFrame
    # Counts the bad ones while they pass, if they go to a topic.
    bad: Observation | None = None
    # How many there are, if that is known from elsewhere, and how many records in all.
    bad_count: int | None = None
    count: int | None = None
    # Where the late rows are and how late, and how many; None where none is.
    told: DataFrame | None = None
    late: int = 0
    # The first and last of them in each partition.
    late_at: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def bad_and_all(self) -> tuple[int | None, int] | None:
        """All records, if their number is known, and the bad ones; None if nothing is known."""
        if self.bad_count is not None:
            return self.count, self.bad_count
        return counted(self.bad)

    @property
    def on_time(self) -> DataFrame:
        if self.told is None:
            return self.rows
        return self.rows.join(self.told.select(*_PLACE), _PLACE, "left_anti")


@dataclass(frozen=True, slots=True)
class _Packs:
    """A micro-batch of which the source may pack rows, once it is known what is wanted of them."""

    watch: watching.Watch
    now: watching.Now
    # The streams whose source can do that.
    streams: set[int]

    def packable(self, parts: list[_Part]) -> dict[int, DataFrame]:
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
        self._layout = layout.begin(running.checkpoint, flow.shards)
        self._is_settled = False
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
        self._times = clock.TimesFolder(f"{self._layout.folder}/{layout.TIME}")
        self._lateness_us = {
            at: each.lateness_us for at, each in enumerate(flow.streams) if each.time is not None
        }

    def __call__(self, records: DataFrame, batch_id: int) -> Counts:
        self._settle(records.sparkSession)
        if self._guarded is None:
            self._guarded = self._note_set_aside(batch_id)
        while True:
            try:
                counts = self._once(records, batch_id)
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
                read = offsets.records_of(self._running.checkpoint, batch_id)
                if read is not None:
                    # Spark counts them each time.
                    self._running.note_read(batch_id, read)
        if self._guarded:
            self._guarded = self._note_set_aside()
        return counts

    def _once(self, records: DataFrame, batch_id: int) -> Counts:
        if not self._guarded:
            return self._micro_batch(records, batch_id)
        with row_errors.as_written(records.sparkSession):
            return self._micro_batch(records, batch_id)

    def _note_set_aside(self, before: int = inspecting.NEWEST) -> bool:
        """Whether rows are set aside, in the state before a micro-batch."""
        count = inspecting.count_set_aside(self._layout, before)
        self._running.progress.note_set_aside(count)
        return count > 0

    def _micro_batch(self, records: DataFrame, batch_id: int) -> Counts:
        with _keeping() as kept:
            if self._watch is not None:
                return self._in_one_job(self._watch, records, batch_id, kept)
            is_kept = self._reads_often
            apart = None
            if self._reads_each_once and not self._lateness_us:
                apart = apart_of(records, self._moved(batch_id))
            if apart is not None:
                is_kept = False
                parts = self._parts(apart)
            else:
                if is_kept:
                    kept.append(records := records.persist())
                parts = self._parts([records] * len(self._running.flow.streams))
            watermark_us = None
            if self._lateness_us:
                parts, watermark_us = self._timed(parts, batch_id, kept)
            batch = self._batch(batch_id, watermark_us)
            verdict = self._verdict(parts, lambda: self._counted(parts, batch_id))
            counts = self._run(parts, batch, kept, verdict=verdict)
            return self._with_letters(parts, counts, batch_id, verdict, is_kept=is_kept)

    def _verdict(
        self, parts: list[_Part], count: Callable[[], tuple[int | None, int] | None]
    ) -> Verdict:
        def first() -> str:
            return first_of(each.rows for each in parts if each.declared.is_typed)

        return Verdict(self._running.guard, count, first)

    def _counted(self, parts: list[_Part], batch_id: int) -> tuple[int | None, int] | None:
        """The records of a micro-batch and the bad ones; None if nothing was computed."""
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
        if every is None:
            every = offsets.records_of(self._running.checkpoint, batch_id)
        return every, dead

    def _moved(self, batch_id: int) -> list[bool]:
        """Of which streams there is anything in a micro-batch: of all in the first."""
        streams = len(self._running.flow.streams)
        moved = None if streams == 1 else offsets.moved(self._running.checkpoint, batch_id)
        return moved if moved is not None and len(moved) == streams else [True] * streams

    def _settle(self, session: SparkSession) -> None:
        """Set what suits micro-batches, in the session that Spark made for this query alone."""
        if self._is_settled:
            return
        settings = dict(_SETTINGS)
        given = session.sparkContext.getConf()
        if not given.contains(_ARROW_BYTES) and not given.contains(_ARROW_ROWS):
            most = rows_at_once(self._running.place, self._running.flow.streams)
            settings |= {_ARROW_BYTES: str(_NO_LIMIT), _ARROW_ROWS: str(most)}
            self._at_once = self._sent_at_once = most
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
        self, parts: list[_Part], batch_id: int, kept: list[DataFrame]
    ) -> tuple[list[_Part], int]:
        """How far time has come, and which rows are late."""
        times = self._times_before(batch_id)
        for at in self._lateness_us:
            if not self._reads_often or not inputs.is_typed(parts[at].records):
                parts[at] = replace(parts[at], rows=parts[at].rows.persist())
                kept.append(parts[at].rows)
        count = F.count(reading.ERROR).alias("bad")
        looks = [
            clock.spans_of(parts[at].rows, at)
            if SPAN in parts[at].rows.columns
            else clock.blocks_of(parts[at].rows, at, count)
            for at in self._lateness_us
        ]
        found = reduce(lambda a, b: a.unionByName(b), looks).collect()
        found.sort(key=lambda row: (row["topic"], row["partition"], row["begin"]))
        for at in self._lateness_us:
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
        for at, lateness_us in self._lateness_us.items():
            if times.may_any_be_late([each for each in seen if each.number == at], lateness_us):
                before = times.before(at)
                split = clock.with_late(parts[at].rows, lateness_us, before, times.watermark_us)
                # A heartbeat may be behind, but is nothing that could be late.
                late_rows = split.where(F.col(clock.LATE) & inputs.has_value())
                # Only these are kept, so that no more than positions and times is sorted.
                told = late_rows.select(*_PLACE, clock.TIME, clock.BEFORE, clock.BEHIND).persist()
                kept.append(told)
                sums = (F.min("offset"), F.max("offset"), F.count("offset"))
                counted = told.groupBy("partition").agg(*sums).collect()
                if counted:
                    late_at = {number: (first, last) for number, first, last, _ in counted}
                    late = sum(row[3] for row in counted)
                    parts[at] = replace(parts[at], told=told, late=late, late_at=late_at)
        after = times.advanced(seen, self._lateness_us)
        self._times.write(batch_id, after)
        self._running.progress.note_time(sum(each.late for each in parts), after.watermark_us)
        return parts, after.watermark_us

    def _in_one_job(
        self, watch: watching.Watch, records: DataFrame, batch_id: int, kept: list[DataFrame]
    ) -> Counts:
        """A micro-batch of which the source tells how far time has come, and what is late."""
        now = watching.Now(batch_id, self._lateness_us, self._times_before(batch_id))
        tasks = _tasks_of(records)
        batch = self._watched(watch, batch_id, tasks)
        hearing = _Hearing(watch, batch_id, tasks)
        watch.begin(now)
        apart = None if self._reads_first else apart_of(records, self._moved(batch_id))
        is_kept = apart is None
        parts = self._read(records, kept) if apart is None else self._parts(apart)
        try:
            may_pack = self._may_pack and not is_kept
            packs = _Packs(watch, now, self._packed) if may_pack else None
            verdict = self._verdict(parts, hearing.counted)
            counts = self._run(parts, batch, kept, packs, verdict=verdict)
        except Exception as error:
            if is_kept or not is_because_of(watching.UnreadError, error):
                raise
            # Spark has left rows out that are of no use to the function: that may be so again.
            self._reads_first = is_kept = True
            hearing.whole = None
            watch.begin(now)
            parts = self._read(records, kept)
            verdict = self._verdict(parts, hearing.counted)
            batch = self._watched(watch, batch_id, tasks)
            counts = self._run(parts, batch, kept, verdict=verdict)
        heard = hearing.heard()
        if heard.tasks != tasks:
            # After a replay nothing was computed.
            is_kept = True
            watch.begin(now)
            parts = self._read(records, kept)
            heard = watch.heard(batch_id)
        after = heard.after(now)
        self._times.write(batch_id, after)
        parts = [
            self._with_told(part, heard.of(at), kept, is_kept=is_kept)
            for at, part in enumerate(parts)
        ]
        self._running.note_read(batch_id, sum(each.read for each in heard.parts))
        self._running.progress.note_time(sum(each.late for each in parts), after.watermark_us)
        return self._with_letters(parts, counts, batch_id, verdict, is_kept=self._reads_often)

    def _batch(self, batch_id: int, watermark_us: int | Callable[[], int] | None) -> Batch:
        return Batch(
            folder=self._layout.folder,
            batch_id=batch_id,
            shards=self._layout.shards,
            watermark_us=watermark_us,
            together=self._is_small(batch_id),
            guarded=bool(self._guarded),
        )

    def _is_small(self, batch_id: int) -> bool:
        """Whether one task is enough for all operators: by the records, and what is kept."""
        if self._is_much:
            return False
        if self._kept_bytes is None:
            places = [
                store.Place(f"{self._layout.folder}/{name}")
                for name in operators(self._layout)
            ]  # fmt: skip
            self._kept_bytes = store.size(places, self._layout.shards)[1]
        if self._kept_bytes > TOGETHER_BYTES or not Files(self._layout.folder).is_local:
            return False
        records = offsets.records_of(self._running.checkpoint, batch_id)
        return records is not None and records <= TOGETHER_RECORDS

    def _watched(self, watch: watching.Watch, batch_id: int, tasks: int) -> Batch:
        return self._batch(batch_id, watching.Watermark(watch, batch_id, tasks))

    def _read(self, records: DataFrame, kept: list[DataFrame]) -> list[_Part]:
        """Read all streams, whatever is needed of them."""
        kept.append(records := records.persist())
        records.write.format("noop").mode("overwrite").save()
        return self._parts([records] * len(self._running.flow.streams))

    def _with_told(
        self, part: _Part, told_of: list[watching.Told], kept: list[DataFrame], *, is_kept: bool
    ) -> _Part:
        """With what the source has told of rows that go aside."""
        bad = sum(each.bad for each in told_of)
        late = sum(each.late for each in told_of)
        is_told = part.declared.late is not None and late > 0
        goes_aside = is_told or (part.declared.dead_letters is not None and bad > 0)
        if goes_aside and not is_kept:
            kept.append(part.rows.persist())
        told = None
        if is_told:
            named = {clock.BEFORE: f"{ASIDE}.before", clock.BEHIND: f"{ASIDE}.behind"}
            rows = part.rows.where(f"{ASIDE} IS NOT NULL")
            told = sql.select(rows, named, *_PLACE, TIME)
        late_at = {each.partition: each.late_at for each in told_of if each.late_at}
        return replace(part, bad_count=bad, told=told, late=late, late_at=late_at)

    def _times_before(self, batch_id: int) -> clock.Times:
        times = self._times.before(batch_id)
        return clock.Times(self._partitions()) if times is None else times

    def _partitions(self) -> dict[int, dict[clock.Part, int | None]]:
        """The partitions of the timed streams as they are when the flow first runs."""
        streams = self._running.flow.streams
        found: dict[int, dict[clock.Part, int | None]] = {}
        with self._running.place.cluster() as cluster:
            metadata = Metadata(cluster)
            for at in self._lateness_us:
                topic = self._running.place.resolve(streams[at].topic)
                found[at] = {(topic, number): None for number in metadata.partitions(topic)}
        return found

    # ---- rows ----------------------------------------------------------------------------

    def _parts(self, records: list[DataFrame]) -> list[_Part]:
        streams = self._running.flow.streams
        return [self._part(records[at], at, each) for at, each in enumerate(streams)]

    def _part(self, records: DataFrame, at: int, declared: Stream) -> _Part:
        if len(self._running.flow.streams) > 1:
            records = parted(records, at, timed=declared.time is not None)
        if not declared.is_typed:
            return _Part(declared, records, records)
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
        return _Part(declared, rows, records, bad)

    def _run(
        self,
        parts: list[_Part],
        batch: Batch,
        kept: list[DataFrame],
        packs: _Packs | None = None,
        *,
        verdict: Verdict,
    ) -> Counts:
        running = self._running
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
            shared = self._shared[batch.together] = _shared(results.values(), batch)
        kept += [batch.made[name].persist() for name in shared if name in batch.made]
        counts = running.write(
            running.united(results, []), batch.batch_id, with_letters=False, verdict=verdict
        )
        for name, made in batch.made.items():
            if name not in self._noted:
                note_key(batch.folder, name, batch.keys[name])
                self._noted.add(name)
            place = store.Place(f"{batch.folder}/{name}")
            if not store.is_whole(place, batch.shards, batch.batch_id):
                made.write.format("noop").mode("overwrite").save()
        places = [store.Place(f"{batch.folder}/{name}") for name in batch.made]
        kept_rows, self._kept_bytes = store.size(places, batch.shards)
        running.progress.note_state(kept_rows, self._kept_bytes)
        return counts

    def _as_read(self, part: _Part) -> DataFrame:
        """At least the late records of a stream as they are in the log."""
        if not inputs.is_typed(part.records):
            return part.records
        running = self._running
        spark = part.records.sparkSession
        return inputs.read_again(spark, running.place, part.declared, part.late_at)

    def _with_letters(
        self, parts: list[_Part], counts: Counts, batch_id: int, verdict: Verdict, *, is_kept: bool
    ) -> Counts:
        """Write what could not be read, and what is late, if there is any."""
        counts = self._written_aside(parts, counts, batch_id, is_kept=is_kept)
        if not counts.skipped:
            self._running.settle(batch_id, verdict)
        return counts

    def _written_aside(
        self, parts: list[_Part], counts: Counts, batch_id: int, *, is_kept: bool
    ) -> Counts:
        aside = [
            late_letters(self._as_read(each), each.told, each.declared.late)
            for each in parts
            if each.declared.late is not None and each.told is not None
        ]
        letters = []
        again = set()
        for at, each in enumerate(parts):
            if each.declared.late is not None and not inputs.is_typed(each.records):
                again |= {at} if each.late_at else set()
            if each.declared.dead_letters is None:
                continue
            # After a replay nothing was computed, and so nothing counted.
            known = each.bad_count
            if each.bad is not None and not counts.skipped:
                known = observed(each.bad, BAD)
            if known != 0:
                letters.append(
                    reading.dead_letters(
                        each.rows, each.declared.dead_letters, self._running.flow.name
                    )
                )
                again |= set() if self._lateness_us else {at}
        if not letters and not aside:
            return counts
        if again and not is_kept and not counts.skipped:
            self._running.note_second_reading(batch_id, again)
        whole = reduce(lambda a, b: a.unionByName(b), [*letters, *aside])
        written = self._running.write_letters(whole, batch_id)
        late = sum(each.late for each in parts if each.declared.late is not None)
        return counts.plus(0, max(0, written - late))


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


def _tasks_of(records: DataFrame) -> int:
    """In how many tasks the rows of a micro-batch are read."""
    return int(records._jdf.logicalPlan().rdd().getNumPartitions())


def _shared(results: Iterable[DataFrame], batch: Batch) -> list[str]:
    """The operators with several readers: what they give is kept, so that they work once."""
    plans = [str(rows._jdf.queryExecution().analyzed().toString()) for rows in results]
    read = Counter(name.strip("`") for plan in plans for name in _ALIAS.findall(plan))
    return [name for name in batch.made if read[title_of(name)] > 1]


@contextmanager
def _keeping() -> Iterator[list[DataFrame]]:
    """Frames that are kept in memory for a while."""
    kept: list[DataFrame] = []
    try:
        yield kept
    finally:
        for each in kept:
            each.unpersist()
