"""Small micro-batches of a flow, over a plan that is prepared once.

The function is called once for them, and what it gives is analysed, optimised and turned into what
Spark runs once. A micro-batch then is one job of one task, which is told what to read and under
which number (`penstock.spark.source.told`); Spark evaluates every expression, as ever.

Such a plan must be free of shuffles, since Spark takes the files of a shuffle for those of all
runs of a plan; all shards come to one task instead. And there must be nothing in it that Spark
computes once for a plan, as the current time, or rows of a table. Where a flow has any of that,
where much is to be read, and where the job fails for any reason, the micro-batch is run by stages:
what comes out is the same, and so are errors.

**Time.** In one task there is no stage that ends before the operators begin. So, unless there is
one operator through which all streams go, timed streams are read once by themselves, first, by a
part of the plan that gives no rows (`Scout`).
"""

from __future__ import annotations

import logging
from functools import reduce
from typing import TYPE_CHECKING, Final

from penstock.spark.flows import inputs
from penstock.spark.flows.dead_letters import Verdict
from penstock.spark.flows.declare import Topic
from penstock.spark.flows.parts import Aside, Part
from penstock.spark.flows.versions import physical
from penstock.spark.flows.writing import Counts, first_of
from penstock.spark.runtime.spark_internals import are_threads_pinned, cloned, unrepeatable
from penstock.spark.sink.prepared import PreparedFailedError, PreparedRows, PreparedTooMuchError
from penstock.spark.source.frames import Reader, Scout, frame
from penstock.spark.source.told import Told, ToldVersion
from penstock.spark.state import watching
from penstock.spark.state.context import Batch, entered

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.spark.flows.declare import Stream
    from penstock.spark.flows.operated import Operated
    from penstock.spark.flows.running import Running
    from penstock.spark.runtime.micro_batches import MicroBatch, Source

log = logging.getLogger(__name__)

# More are read by several tasks.
PREPARED_RECORDS: Final = 20_000
# After so many failures in a row it is not tried any more.
MOST_FAILURES: Final = 3


class Prepared:
    """The prepared plan of one generation of a flow; with its operators, if it has any."""

    def __init__(self, running: Running, operated: Operated | None = None) -> None:
        self._running = running
        self._operated = operated
        self._rows: PreparedRows | None = None
        self._batch: Batch | None = None
        self._watch: watching.Watch | None = None
        self._sources: list[Source] = []
        self._session: SparkSession | None = None
        # Why there is none.
        self._reason: str | None = None
        self._failures = 0
        # Of so many records one task could not hold what they came to.
        self._too_many: int | None = None

    def fits(self, micro_batch: MicroBatch) -> bool:
        """Whether a micro-batch is small, and there may be a plan for it."""
        records = micro_batch.records
        is_small = micro_batch.task_count > 0 and records <= PREPARED_RECORDS
        if self._too_many is not None and records >= self._too_many:
            return False
        return self._reason is None and is_small

    def run(self, micro_batch: MicroBatch) -> Counts | None:
        """Run a micro-batch; None if it is to be run by stages."""
        if not self.fits(micro_batch):
            return None
        if self._rows is None and self._reason is None:
            self._reason = self._unfit() or self._tried(micro_batch)
            if self._reason is not None:
                log.debug("flow %s is run by stages: %s", self._running.flow.name, self._reason)
        if self._rows is None or self._reason is not None:
            return None
        try:
            counts = self._written(micro_batch)
        except PreparedFailedError as error:
            if self._running.is_stopping:
                raise
            self._note_failure(error, micro_batch)
            return None
        self._failures = 0
        return counts

    def _note_failure(self, error: PreparedFailedError, micro_batch: MicroBatch) -> None:
        """What is wrong is told by the stages, which fail in their turn if it was no accident."""
        log.debug("flow %s: a prepared plan failed", self._running.flow.name, exc_info=error)
        if isinstance(error, PreparedTooMuchError):
            self._too_many = micro_batch.records
            return
        self._failures += 1
        if self._failures >= MOST_FAILURES:
            self._reason = "its job has failed several times"
            log.warning(
                "flow %s: micro-batches are run by stages from now on: small ones have failed %d "
                "times in a row: %s",
                self._running.flow.name, self._failures, str(error).partition("\n")[0][:300],
            )  # fmt: skip

    # ---- the plan ------------------------------------------------------------------------

    def _tried(self, micro_batch: MicroBatch) -> str | None:
        """Prepare the plan; why it cannot be used.

        What fails here may be right by stages, as a function that counts its rows; what is not
        fails there as well, and says so.
        """
        if not are_threads_pinned(micro_batch.spark):
            return "what a thread says to its jobs reaches those of others"
        try:
            return self._prepare(micro_batch)
        except Exception as error:
            log.debug("flow %s: no plan", self._running.flow.name, exc_info=error)
            self._batch = self._watch = None
            return f"its plan cannot be prepared: {str(error).partition(chr(10))[0][:300]}"

    def _unfit(self) -> str | None:
        """Why a flow cannot have such a plan, as far as its declaration says."""
        flow = self._running.flow
        if flow.tables:
            return "it reads a table"
        if not all(isinstance(each, Topic) for each in flow.outputs.values()):
            return "it has outputs that are not topics"
        if not flow.exactly_once:
            return "it writes at least once"
        for each in flow.streams:
            if each.time is not None and not inputs.is_watchable(self._running.place, each):
                return f"the source does not tell the time of {each.topic}"
            if each.is_typed and not inputs.is_typed_by_source(each):
                return f"Spark reads the values of {each.topic}"
        return None

    def _prepare(self, micro_batch: MicroBatch) -> str | None:
        """Call the function, and have Spark plan what it gives; why it cannot be used."""
        from penstock.spark.flows.operated import SETTINGS, micro_batch_settings, shared_by

        running, operated = self._running, self._operated
        flow = running.flow
        session = self._session = cloned(micro_batch.spark)
        # Where nothing is kept in memory as a whole, Spark's own limits hold.
        settings = SETTINGS if operated is None else micro_batch_settings(session, running)
        for name, value in settings.items():
            session.conf.set(name, value)
        if any(each.time is not None for each in flow.streams):
            is_watched = operated is not None and operated.is_watched
            folder = watching.FOLDER if is_watched else watching.PREPARED
            self._watch = watching.Watch(f"{running.checkpoint.rstrip('/')}/{folder}")
        watch = None if self._watch is None else self._watch.folder
        self._sources = [
            running.source(each, number, bounded=True, watch=None if each.time is None else watch)
            for number, each in enumerate(flow.streams)
        ]
        counted = micro_batch.counter.accumulator
        seen = [
            running.seen_of(self._typed(frame(session, self._reader(at, counted)), at, each), each)
            for at, each in enumerate(flow.streams)
        ]
        batch = None
        if operated is None:
            results = running.call(running.frames(seen))
        else:
            batch = self._batch = Batch(
                folder=operated.layout.folder,
                batch_id=ToldVersion(running.checkpoint),
                shards=operated.layout.shards,
                watermark_us=None
                if self._watch is None
                else watching.ToldWatermark(self._watch, running.checkpoint),
                together=True,
                prepared=True,
                streams=seen,
            )
            with entered(batch):
                results = running.call(running.frames(seen))
            if shared_by(results.values(), batch):
                return "several of its outputs read the same operator"
        rows = running.united(results, [])
        if self._watch is not None and not (operated is not None and operated.is_watched):
            rows = self._scouted(rows)
        rows = rows.coalesce(1)
        reason = unrepeatable(rows)
        if reason is None:
            names = [physical(each.name, running.generation) for each in flow.topics]
            self._rows = PreparedRows(rows, names)
        return reason

    def _reader(self, at: int, counted: object = None) -> Reader:
        source, checkpoint = self._sources[at], self._running.checkpoint
        return Reader(source.options, source.schema, at, None, counted, checkpoint)  # type: ignore[arg-type]

    def _scouted(self, rows: DataFrame) -> DataFrame:
        """With the timed streams read before all else."""
        assert self._session is not None
        scouts = [
            self._session.range(0, 1, 1, 1).mapInArrow(Scout(**vars(self._reader(at))), rows.schema)
            for at, each in enumerate(self._running.flow.streams)
            if each.time is not None
        ]
        return reduce(lambda a, b: a.unionByName(b), [*scouts, rows])

    def _typed(self, records: DataFrame, at: int, declared: Stream) -> DataFrame:
        if not declared.is_typed:
            return records
        return inputs.typed(
            records,
            declared.reading,
            metrics=f"input-{at}",
            time=declared.time,
            rules=declared.time_rules,
        )

    # ---- a micro-batch -------------------------------------------------------------------

    def _written(self, micro_batch: MicroBatch) -> Counts | None:
        running, operated, batch_id = self._running, self._operated, micro_batch.batch_id
        assert self._rows is not None
        streams = running.flow.streams
        ranges = micro_batch.ranges
        timed = [at for at, each in enumerate(streams) if each.time is not None and at in ranges]
        now = None
        if self._watch is not None:
            assert operated is not None
            now = watching.Now(batch_id, operated.lateness_us, operated.times_before(batch_id))
            self._watch.begin(now)
        said = Told(batch_id, ranges, len(timed), running.checkpoint)
        said.tell(micro_batch.spark.sparkContext)
        verdict = Verdict(
            running.guard,
            lambda: self._counted(micro_batch),
            lambda: self._first(micro_batch),
        )
        counts = running.write_prepared(self._rows, batch_id, verdict)
        if counts.skipped:
            # It was written by a run that did not come to its end: what is missing is found there.
            return None
        heard = None if self._watch is None else self._watch.heard(batch_id)
        if heard is not None and heard.tasks != len(timed):
            return None
        if self._batch is not None and operated is not None:
            operated.complete(self._batch, batch_id)
        late = 0
        if heard is not None and now is not None and operated is not None:
            after = heard.after(now)
            operated.times.write(batch_id, after)
            late = sum(each.late for each in heard.parts)
            running.progress.note_time(late, after.watermark_us)
        bad = [self._bad(micro_batch, at) for at in range(len(streams))]
        if late or any(each != 0 for each in bad):
            counts = self._with_letters(micro_batch, heard, counts)
        records = running.settle(batch_id, verdict)
        if operated is None:
            running.note_valued(batch_id, records)
        return counts

    def _counted(self, micro_batch: MicroBatch) -> tuple[int, int] | None:
        """The records of streams with dead letters, and the bad ones; None if not all were read.

        None, too, of a flow without them: there is nothing to judge. As by stages a record without
        a value counts only where there is an event time.
        """
        streams = self._running.flow.streams
        mine = {at: each for at, each in enumerate(streams) if each.dead_letters is not None}
        if not mine:
            return None
        bad = [self._bad(micro_batch, at) for at in mine]
        known = [each for each in bad if each is not None]
        if len(known) < len(bad):
            return None
        every = sum(
            each.valued if mine[key[0]].time is None else each.records
            for key, each in micro_batch.counts().items()
            if key[0] in mine
        )
        return every, sum(known)

    def _first(self, micro_batch: MicroBatch) -> str:
        """Where the first record stood that could not be read, and why."""
        return first_of(each.rows for each in self._parts(micro_batch) if each.declared.is_typed)

    def _bad(self, micro_batch: MicroBatch, at: int) -> int | None:
        """How many records of a stream go to dead letters; None if not all of it was read."""
        if self._running.flow.streams[at].dead_letters is None:
            return 0
        counts = micro_batch.counts()
        keys = [(at, *each.place, each.start) for each in micro_batch.ranges.get(at, ())]
        if not all(key in counts for key in keys):
            return None
        return sum(counts[key].bad for key in keys)

    def _parts(self, micro_batch: MicroBatch) -> list[Part]:
        """The streams of a micro-batch, to be read once more for what goes aside."""
        parts = []
        for at, declared in enumerate(self._running.flow.streams):
            source = self._sources[at]
            some = micro_batch.ranges.get(at)
            tasks = () if some is None else (tuple(some),)
            reader = Reader(source.options, source.schema, at, tasks)
            records = frame(micro_batch.spark, reader)
            typed = self._typed(records, at, declared)
            bad = self._bad(micro_batch, at)
            parts.append(Part(declared, typed, records, bad_count=bad))
        return parts

    def _with_letters(
        self, micro_batch: MicroBatch, heard: watching.Heard | None, counts: Counts
    ) -> Counts:
        """Write what could not be read, and what is late."""
        kept: list[DataFrame] = []
        try:
            parts = self._parts(micro_batch)
            if heard is not None:
                parts = [
                    part.with_told(heard.of(at), kept, is_kept=False)
                    if part.declared.time is not None else part
                    for at, part in enumerate(parts)
                ]  # fmt: skip
            return Aside(self._running).written(parts, counts, micro_batch.batch_id)
        finally:
            for each in kept:
                each.unpersist()
