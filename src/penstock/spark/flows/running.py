"""One flow while it runs: built from its declaration, started, watched and stopped.

There are three ways. If the function treats each row by itself and reads one stream, a loop of ours
runs its micro-batches (`penstock.spark.runtime.micro_batches`): small ones over a plan that is
prepared once (`prepared`), large ones by stages, with the function run on each. So it is if the
function keeps state by operators of ours, over any number of streams (`operated`). Otherwise the
function is run once, on the stream, in a query of Spark's, and Spark keeps its state; what it gives
and the dead letters are united in one plan, so that they still are one query, one checkpoint and
one transaction per micro-batch.

Either way a micro-batch ends in `write`: all topics in one transaction of the sink, then the other
outputs, each of which takes a batch a second time without harm.

**Stopping.** Spark's own stop breaks off the micro-batch that runs. So a gate stands before each:
when it is closed no further one begins, the one inside is waited for, and then the query is stopped
while it is idle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Final

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, Observation, SparkSession

from penstock.spark import reading, sql
from penstock.spark.flows import inputs, offsets, planning, plans, published, table_inputs
from penstock.spark.flows.batch_counts import BatchCounts
from penstock.spark.flows.changed import source_of
from penstock.spark.flows.dead_letters import NO_LIMIT, DeadLetterGuard, Remedy, Verdict
from penstock.spark.flows.declare import Flow, Output, Stream, Table, Topic
from penstock.spark.flows.durations import microseconds
from penstock.spark.flows.errors import UnknownTopicError, UserCodeError
from penstock.spark.flows.folder import Fingerprint
from penstock.spark.flows.gate import Gate, GateClosedError
from penstock.spark.flows.heartbeats import Heartbeats
from penstock.spark.flows.inputs import Place
from penstock.spark.flows.old_rows import Ask, OldRowsWatch
from penstock.spark.flows.operated import Operated
from penstock.spark.flows.outputs import COLUMNS, make_topics, topic_rows
from penstock.spark.flows.plans import BatchOf, Plan
from penstock.spark.flows.prepared import Prepared
from penstock.spark.flows.progress import Progress
from penstock.spark.flows.published import NotPublishedError, SchemaWatch
from penstock.spark.flows.spark_query import FlowQuery, SparkQuery
from penstock.spark.flows.supervisor import Failure
from penstock.spark.flows.trouble import explain
from penstock.spark.flows.versions import physical
from penstock.spark.flows.writing import (
    BAD,
    Counts,
    TopicWriter,
    counted,
    counting,
    first_letter,
    first_of,
    observed,
)
from penstock.spark.reasons import reason
from penstock.spark.runtime.checkpoint import Checkpoint, opened
from penstock.spark.runtime.micro_batches import MicroBatch, MicroBatches, Source
from penstock.spark.runtime.spark_internals import cloned
from penstock.spark.sink.prepared import PreparedRows
from penstock.spark.state import watching
from penstock.spark.state.bounds import warn_of_rest
from penstock.spark.state.context import Planning, entered

log = logging.getLogger(__name__)

MEND_ADVICE: Final = (
    "Mend the schema of the stream, then start again: nothing of this micro-batch was written, and "
    "its records are read again. If the records are wrong, and not the schema, let the flow put "
    "them aside: max_dead_share=1."
)
MEND_ADVICE_ASIDE: Final = "If it is not the records that are wrong, mend the schema of the stream."


class Running:
    """A generation of a flow, from its start to its end."""

    def __init__(
        self,
        spark: SparkSession,
        flow: Flow,
        place: Place,
        checkpoint: str,
        *,
        generation: int = 1,
        once: bool = False,
        stops_at_dead_letters: bool = True,
    ) -> None:
        self._spark = spark
        self.flow = flow.of_generation(generation)
        self.generation = generation
        self.checkpoint = checkpoint
        self.place = place
        self._once = once
        self._gate = Gate()
        # Whether a stop has broken off the micro-batch that ran: nothing of it is to count.
        self._is_broken_off = False
        self._query: FlowQuery | None = None
        # What went wrong inside a micro-batch, before Java made text of it.
        self._error: BaseException | None = None
        self._counts = BatchCounts()
        self._snapshots = [table_inputs.Snapshot(spark, place, each) for each in flow.tables]
        # Topics whose columns might have been published, and are not.
        self._unpublished: list[str] = []
        self._watch_schemas: SchemaWatch | None = None
        self._writer: TopicWriter | None = None
        self._heartbeats: Heartbeats | None = None
        self._old_rows: OldRowsWatch | None = None
        # Who knows of tables whose updates come without the old row.
        self.ask: Ask | None = None
        # Whether its outputs are being built anew, beside those that count.
        self.is_rebuild = False
        # Whether this generation has read anything before, so that there must be a checkpoint.
        self.has_run = False
        self.progress = Progress()
        letters = ", ".join(sorted(self.flow.dead_letter_topics))
        self.guard = DeadLetterGuard(
            self.flow.dead_letter_limit if stops_at_dead_letters else NO_LIMIT,
            Remedy(
                MEND_ADVICE, f"{MEND_ADVICE_ASIDE} `penstock flows redrive {flow.name}` sends back "
                f"what is in {letters}." if letters else MEND_ADVICE_ASIDE,
            ),
            once=once,
        )  # fmt: skip

    # ---- planning ------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Ask the function for its DataFrames, and see what they need."""
        for declared in self.flow.inputs:
            inputs.check_schema(declared)
        inputs.check_topics(self.place, self.flow.name, [each.topic for each in self.flow.inputs])
        self._resolve()
        frames: list[DataFrame] = []
        letters: list[DataFrame] = []
        records: list[DataFrame] = []
        for at, each in enumerate(self.flow.inputs):
            if isinstance(each, Table):
                frames.append(table_inputs.table_rows(self._spark, self.place, each))
                continue
            opened = self._open(each, len(records))
            records.append(opened)
            frames.append(self._seen(opened, each, metrics=f"input-{at}"))
            if each.dead_letters is not None:
                bad = inputs.typed(
                    opened,
                    each.reading,
                    metrics=f"dead-letters-{at}",
                    time=each.time,
                    rules=each.time_rules,
                )
                letters.append(reading.dead_letters(bad, each.dead_letters, self.flow.name))
        given = zip(frames, self.flow.inputs, strict=True)
        planned = Planning(
            streams=[rows for rows, each in given if isinstance(each, Stream)],
            reads=plans.reads_of(self.flow.streams, self.place.resolve),
        )
        with entered(planned):
            results = self._asked(frames)
        plans.check_streaming(self.flow, results)
        rowwise = all(map(planning.is_rowwise, results.values()))
        spark_operators = [
            text for rows in results.values() for text in planning.operators(rows)
        ]  # fmt: skip
        timed = [f"time of {each.topic}: {each.time}" for each in self.flow.streams if each.time]
        is_operated = bool(planned.operators or timed)
        if is_operated and not rowwise:
            plans.refuse_both(self.flow, planned.operators or timed, spark_operators)
        with entered(planned):
            plans.warn_of_spark(self.flow, results.values())
            warn_of_rest(planned, self.flow.name, self.flow.where, self._partitions)
        ids, cluster = inputs.topic_ids(self.place, self.flow.streams)
        made_from = Fingerprint(
            streams=tuple(self.place.resolve(each.topic) for each in self.flow.streams),
            outputs=tuple(f"{name}: {self._target(output)}" if name else self._target(output)
                          for name, output in self.flow.outputs.items()),
            mode=self.flow.mode,
            ids=ids,
            cluster=cluster,
            operators=(*timed, *planned.operators, *spark_operators),
            windows=tuple(planning.time_windows(results.values())) if spark_operators else (),
            parts=tuple(planned.parts),
            source=source_of(self.flow),
        )  # fmt: skip
        columns = plans.columns_of(self.flow, self.generation, results)
        old_rows = plans.old_rows_of(self.flow, results.values())
        watch, reads_each_once = None, False
        if is_operated:
            # Several outputs, each for itself, would compute what they share once for each.
            reads_each_once = not self.shares and planning.reads_each_once(
                results.values(), len(self.flow.streams)
            )
            if reads_each_once and planning.is_one_operator(results.values()):
                watch = self._watch(planned)
        if is_operated or (rowwise and len(records) == 1):
            # Only to see that they can be written.
            self.united(results, [])
            packed = planned.packed if watch is not None else set()
            sources = [
                self.source(each, number, bounded=is_operated, watch=watch, packs=number in packed)
                for number, each in enumerate(self.flow.streams)
            ]
            operated = planned if is_operated else None
            return Plan(
                made_from, operated, sources=sources, watch=watch,
                reads_each_once=reads_each_once, columns=columns, old_rows=old_rows,
            )  # fmt: skip
        return Plan(
            made_from, None, rows=self.united(results, letters), columns=columns,
            old_rows=old_rows,
        )  # fmt: skip

    def _resolve(self) -> None:
        """Give inputs of captured tables what is published of their schemas."""
        asking = {at for at, each in enumerate(self.flow.inputs) if published.is_asking(each)}
        if not asking:
            return
        with self.place.cluster() as cluster:
            found = [
                published.resolved(cluster, self.place.resolve(each.topic), each)
                for each in self.flow.inputs
            ]
        for at in asking:
            inputs.check_schema(found[at])
        self._unpublished = [
            each.topic for at, each in enumerate(found)
            if self.flow.inputs[at].reading.format == "published" and each.reading.format == "raw"
        ]  # fmt: skip
        self.flow = replace(self.flow, inputs=tuple(found))
        self._snapshots = [
            table_inputs.Snapshot(self._spark, self.place, each) for each in self.flow.tables
        ]

    def _partitions(self, topic: str) -> int:
        return inputs.partitions_of(self.place, topic)

    def _open(self, declared: Stream, number: int, **more: Any) -> DataFrame:
        replay = self.generation > 1
        return inputs.open_stream(
            self._spark, self.place, declared, replay=replay, number=number, **more
        )

    def source(self, declared: Stream, number: int, **more: Any) -> Source:
        """A stream as the driver and its tasks read it, without a query of Spark's."""
        replay = self.generation > 1
        options = inputs.stream_options(self.place, declared, replay=replay, number=number, **more)
        return inputs.source(options, number)

    def _watch(self, planned: Planning) -> str | None:
        """Where the source tells how far time has come, if one job is enough for a micro-batch."""
        streams = self.flow.streams
        is_one = len(planned.operators) == 1
        if not is_one or not all(inputs.is_watchable(self.place, each) for each in streams):
            return None
        return f"{self.checkpoint.rstrip('/')}/{watching.FOLDER}"

    def _target(self, output: Topic | Output) -> str:
        """What an output is called in the fingerprint: without the generation."""
        return output.target

    def _seen(self, records: DataFrame, declared: Stream, *, metrics: str) -> DataFrame:
        """What the function sees of a stream, or of a micro-batch of it."""
        if declared.reading.format == "raw":
            return inputs.without_heartbeats(records)
        if declared.reading.format == "text":
            return inputs.as_text(inputs.without_heartbeats(records))
        rows = inputs.typed(
            records,
            declared.reading,
            metrics=metrics,
            time=declared.time,
            rules=declared.time_rules,
        )
        if declared.dead_letters is None:
            rows = inputs.failing(rows, "the record at")
        return inputs.visible(rows)

    def _asked(self, frames: list[DataFrame]) -> dict[str, DataFrame]:
        """What the function gives; NotPublishedError if it misses columns of a captured table."""
        try:
            return self.call(frames)
        except AnalysisException as error:
            # UNRESOLVED_COLUMN, CANNOT_RESOLVE_STAR_EXPAND and others.
            if not self._unpublished or "RESOLVE" not in str(error.getCondition()):
                raise
            topics = ", ".join(self._unpublished)
            raise NotPublishedError(
                f"flow {self.flow.name!r}: no schema is published for {topics}, so that there are "
                f"only the columns of raw records: {reason(error)}"
            ) from error

    def call(self, frames: list[DataFrame]) -> dict[str, DataFrame]:
        given = self.flow.function(*frames)
        wanted = self.flow.outputs
        results = given if isinstance(given, Mapping) else {"": given}
        place = f"{self.flow.where}: flow {self.flow.name!r}"
        if set(results) != set(wanted):
            told = ", ".join(sorted(map(repr, results))) if isinstance(given, Mapping) else "one"
            expected = ", ".join(map(repr, wanted)) if "" not in wanted else "one DataFrame"
            raise UserCodeError(
                f"{place} returns {told} where {expected} should be",
                advice="Return a DataFrame for output=, or a dict with the names of outputs=.",
            )
        for name, rows in results.items():
            if not isinstance(rows, DataFrame):
                raise UserCodeError(
                    f"{place} returns {type(rows).__name__}"
                    f"{f' as {name!r}' if name else ''}, not a DataFrame"
                )
        return {name: results[name] for name in wanted}

    def united(self, results: Mapping[str, DataFrame], letters: list[DataFrame]) -> DataFrame:
        """All rows to be written in one frame: records for topics, other outputs in columns."""
        others = [name for name in results if not isinstance(self.flow.outputs[name], Topic)]
        parts = []
        for name, rows in results.items():
            output = self.flow.outputs[name]
            if isinstance(output, Topic):
                parts.append(topic_rows(rows, output, physical(output.name, self.generation)))
            else:
                column = _column(others.index(name))
                parts.append(sql.select(rows, {column: sql.struct(rows.columns)}))
        parts += letters
        return reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), parts)

    # ---- the query -----------------------------------------------------------------------

    def start(self, plan: Plan) -> None:
        """Start the query; it runs when this returns."""
        checkpoint = opened(self._spark, self.checkpoint, self.flow.name, has_run=self.has_run)
        make_topics(self.place, self.flow, self.generation)
        query_id = checkpoint.query_id() if plan.rows is None else None
        self._writer = TopicWriter(self.place, self.flow, self.generation, query_id)
        self._start_watching(plan)
        # Last of all: what comes before may fail, and nobody would stop it.
        if plan.rows is not None:
            self._query = self._spark_query(plan.rows)
        else:
            self._query = loop = self._micro_batches(plan, checkpoint)
            loop.start()

    def _start_watching(self, plan: Plan) -> None:
        """Look after what its inputs are like, and keep their time going."""
        if not self._once and any(each.reading.published for each in self.flow.inputs):
            watched = [(self.place.resolve(each.topic), each) for each in self.flow.inputs]
            self._watch_schemas = SchemaWatch(self.place.cluster(), self.flow.name, watched)
        if plan.old_rows:
            self._old_rows = OldRowsWatch(self.place, self.flow.name, plan.old_rows, self.ask)
            self._old_rows.start()
        idle = {self.place.resolve(each.topic): each.idle_us for each in self.flow.streams
                if each.idle_us is not None}  # fmt: skip
        if idle and not self._once:
            avro = [self.place.resolve(each.topic) for each in self.flow.streams
                    if each.reading.format == "avro"]  # fmt: skip
            self._heartbeats = Heartbeats(self.place, idle, avro=avro)
            self._heartbeats.start()

    def _spark_query(self, rows: DataFrame) -> SparkQuery:
        """What Spark keeps state for is a query of Spark's."""
        streams = self.flow.streams
        self._counts.readings = [1 if each.dead_letters is None else 2 for each in streams]
        writer = rows.writeStream.queryName(self.title)
        writer = writer.option("checkpointLocation", self.checkpoint).outputMode(self.flow.mode)
        if self._once:
            writer = writer.trigger(availableNow=True)
        elif self.flow.every is not None:
            writer = writer.trigger(processingTime=self.flow.every)

        def on_batch(rows: DataFrame, batch_id: int) -> None:
            self._guarded(batch_id, lambda: self._on_rows(rows, batch_id))

        return SparkQuery(writer.foreachBatch(on_batch).start())

    def _micro_batches(self, plan: Plan, checkpoint: Checkpoint) -> MicroBatches:
        """All else is run by our own loop."""
        on_batch: Callable[[MicroBatch], Counts] = partial(self._on_one_stream, Prepared(self))
        if plan.operated is not None:
            on_batch = Operated(
                self, plan.operated, plan.watch, reads_each_once=plan.reads_each_once
            )

        def run(batch: MicroBatch) -> None:
            self._guarded(batch.batch_id, lambda: on_batch(batch))
            read = sum(each.records for each in batch.counts().values())
            self._counts.guess_read(batch.batch_id, read)

        every = self.flow.every
        return MicroBatches(
            cloned(self._spark), self.title, checkpoint, plan.sources, run, once=self._once,
            every_s=None if every is None else microseconds(every, "every") / 1e6,
        )  # fmt: skip

    @property
    def title(self) -> str:
        """The query's name in Spark: two generations of a flow may run at a time."""
        return self.flow.name if self.generation == 1 else f"{self.flow.name} g{self.generation}"

    def _guarded(self, batch_id: int, work: Callable[[], Counts]) -> None:
        """A micro-batch behind the gate, with its error kept before Java makes text of it."""
        self._gate.enter()
        done = False
        try:
            counts = work()
            self._counts.note_written(batch_id, counts.rows)
            self.progress.dead_letters += counts.dead_letters
            done = True
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._gate.leave(batch_id, done=done)

    def _on_one_stream(self, prepared: Prepared, batch: MicroBatch) -> Counts:
        """A micro-batch of a flow of rows alone: over the prepared plan, if it is small."""
        counts = prepared.run(batch)
        return self._on_records(batch) if counts is None else counts

    def _on_records(self, batch: MicroBatch) -> Counts:
        """A micro-batch of records: the function is run on it.

        With one output the bad records are only counted on the way, and read a second time if
        there are any. What several outputs need is kept meanwhile: otherwise each would read, and
        parse, everything again.
        """
        (records,), batch_id = batch.frames(), batch.batch_id
        declared = self.flow.streams[0]
        rows, bad = records, None
        if declared.is_typed:
            rows = inputs.typed(
                records, declared.reading, metrics="input", rules=declared.time_rules
            )
        kept = rows = rows.persist() if self.shares else rows
        try:
            seen = rows
            if declared.dead_letters is not None and not self.shares:
                bad = Observation()
                seen = rows.observe(bad, *counting())
            verdict = Verdict(self.guard, lambda: counted(bad), lambda: first_of([rows]))
            results = self.call(self.frames([self.seen_of(seen, declared)]))
            counts = self.write(
                self.united(results, []), batch_id, with_letters=False, verdict=verdict
            )
            # After a replay nothing was computed, and so nothing counted.
            known = None if bad is None or counts.skipped else observed(bad, BAD)
            written = 0
            if declared.dead_letters is not None and known != 0:
                assert self._writer is not None
                letters = reading.dead_letters(rows, declared.dead_letters, self.flow.name)
                written = self.write_letters(letters, batch_id)
                counts = counts.plus(0, written)
            if not counts.skipped:
                if bad is None and written:
                    # What several outputs share is kept, so this reads nothing.
                    every = rows.count()
                    verdict = Verdict(
                        self.guard, lambda: (every, written), lambda: first_of([rows])
                    )
                self.note_valued(batch_id, self.settle(batch_id, verdict))
            return counts
        finally:
            if self.shares:
                kept.unpersist()

    @property
    def shares(self) -> bool:
        """Whether several read the same rows, or somebody of whom we do not know how often."""
        outputs = self.flow.outputs.values()
        return len(outputs) > 1 or not all(map(_reads_once, outputs))

    def frames(self, seen: Sequence[DataFrame]) -> list[DataFrame]:
        """What the function is given: streams, and tables as they are now, in their order."""
        tables, streams = iter(self._snapshots), iter(seen)
        return [
            next(streams) if isinstance(each, Stream) else next(tables).rows()
            for each in self.flow.inputs
        ]

    def seen_of(self, rows: DataFrame, declared: Stream) -> DataFrame:
        if not declared.is_typed:
            return self._seen(rows, declared, metrics="input")
        if declared.dead_letters is None:
            rows = inputs.failing(rows, "the record at")
        return inputs.visible(rows)

    def _on_rows(self, rows: DataFrame, batch_id: int) -> Counts:
        """A micro-batch of what the function gave."""
        writer = self._writer
        assert writer is not None
        verdict = Verdict(
            self.guard,
            lambda: self._counted(batch_id),
            lambda: first_letter(rows, writer.letter_topics),
        )
        counts = self.write(rows, batch_id, with_letters=True, verdict=verdict)
        if not counts.skipped:
            self.settle(batch_id, verdict)
        return counts

    def _counted(self, batch_id: int) -> tuple[int | None, int] | None:
        """What there was to read, at most, and the dead letters among what was written."""
        assert self._writer is not None
        seen = self._writer.letters_seen
        dead = None if seen is None else observed(seen, "letters")
        if dead is None:
            return None
        # The plan reads a stream once more for its dead letters.
        return offsets.records_of(self.checkpoint, batch_id, each_topic_once=True), dead

    def write(
        self,
        rows: DataFrame,
        batch_id: int,
        *,
        with_letters: bool,
        verdict: Verdict | None = None,
    ) -> Counts:
        """Write a micro-batch; the verdict may stop it before any of it counts.

        Where there is no topic among the outputs it is for the caller to ask it afterwards.
        """
        others = [each for each in self.flow.outputs.values() if not isinstance(each, Topic)]
        assert self._writer is not None
        self._check_wanted()
        check = self._before_commit(verdict)
        if not others:
            return self._writer.write(rows, batch_id, with_letters=with_letters, check=check)
        kept = rows.persist() if self.shares or with_letters else rows
        try:
            counts = Counts()
            if "topic" in rows.columns:
                records = kept.where("topic is not null").select(*COLUMNS)
                counts = self._writer.write(
                    records, batch_id, with_letters=with_letters, check=check
                )
            batch = BatchOf(self.flow.name, batch_id, self.checkpoint, self.place, self.is_rebuild)
            for at, output in enumerate(others):
                column = _column(at)
                part = kept.where(f"{column} IS NOT NULL").select(f"{column}.*")
                counts = counts.plus(output.write(part, batch))
            return counts
        finally:
            if kept is not rows:
                kept.unpersist()

    def write_letters(self, letters: DataFrame, batch_id: int) -> int:
        """Write what goes aside, in a transaction of its own; how many there were."""
        assert self._writer is not None
        self._check_wanted()
        return self._writer.write_letters(letters, batch_id)

    def settle(self, batch_id: int, verdict: Verdict) -> int | None:
        """Judge a micro-batch that was committed; how many records it had, if that is known.

        Where it is not yet, as in the first one of all, Spark's report of it tells.
        """
        records, dead = verdict.after_commit()
        if records is None and dead:
            self._counts.note_unjudged(batch_id, dead, verdict.first() if self._once else "")
        return records

    def note_valued(self, batch_id: int, records: int | None) -> None:
        """How many records of a batch had a value, if that is known."""
        if records is not None and not any(each.where for each in self.flow.streams):
            self._counts.note_valued(batch_id, records)

    def write_prepared(self, rows: PreparedRows, batch_id: int, verdict: Verdict) -> Counts:
        """Write a micro-batch by a plan that is prepared; PreparedFailedError if that fails."""
        assert self._writer is not None
        self._check_wanted()
        return self._writer.write_prepared(rows, batch_id, self._before_commit(verdict))

    def _before_commit(self, verdict: Verdict | None) -> Callable[[], None]:
        """What may refuse a micro-batch whose records were sent."""

        def check() -> None:
            self._check_wanted()
            if verdict is not None:
                verdict.before_commit()

        return check

    def _check_wanted(self) -> None:
        """GateClosedError in a micro-batch that was broken off: another run of it may have begun,
        whose transactional id would be taken away."""
        if self._is_broken_off:
            raise GateClosedError

    @property
    def is_stopping(self) -> bool:
        """Whether no further micro-batch is to begin."""
        return self._gate.is_closed

    def note_read(self, batch_id: int, records: int) -> None:
        """However often a batch was read, it has so many records."""
        self._counts.note_read(batch_id, records)

    # ---- watching ------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        return self._query is not None and self._query.is_active

    @property
    def is_waiting(self) -> bool:
        """Whether the query has looked for records, and found none."""
        return self._query is not None and self._query.is_idle

    def failure(self) -> Failure | None:
        """Why the query ended; None if it came to its end, or was stopped."""
        query = self._query
        found = query.error() if query is not None else None
        if found is None and query is not None and not self._gate.is_closed:
            wrong = self.guard.at_end()
            return None if wrong is None else self.explain(wrong)
        if found is None or isinstance(self._error, GateClosedError):
            return None
        if self._gate.is_closed and self._error is None:
            return None
        return self.explain(self._error or found)

    def explain(self, error: BaseException) -> Failure:
        log.debug("flow %s failed", self.flow.name, exc_info=error)
        found = explain(error, flow=self.flow.name, checkpoint=self.checkpoint)
        # Whoever makes the topic may come after us; a run with an end does not wait for others.
        waits = isinstance(error, UnknownTopicError | NotPublishedError) and not self._once
        return replace(found, waits=waits)

    @property
    def note(self) -> Failure | None:
        """What is wrong with the input of a flow that runs all the same."""
        watches = (self._watch_schemas, self._old_rows)
        found = [each.found for each in watches if each is not None and each.found is not None]
        return Failure(*found[0]) if found else None

    @property
    def wants_restart(self) -> bool:
        """Whether it is to be planned anew, for what it reads has more columns now."""
        return self._watch_schemas is not None and self._watch_schemas.wants_restart

    def poll(self) -> bool:
        """Take in what Spark reports; whether a micro-batch was completed since the last time."""
        if self._query is None:
            return False
        if self._watch_schemas is not None:
            self._watch_schemas.look()
        reports = self._query.reports()
        return max([self._counts.take(each, self.progress, self.guard) for each in reports],
                   default=False)  # fmt: skip

    # ---- stopping ------------------------------------------------------------------------

    def stop(self, timeout_s: float) -> None:
        """End the query after the micro-batch that runs; break it off after the time limit."""
        query = self._query
        if query is not None and query.is_active:
            if self._gate.close(timeout_s):
                query.wait(self._gate.last_done)
            else:
                log.warning(
                    "flow %s: the micro-batch did not end within %.0f s and is broken off; it runs "
                    "again at the next start",
                    self.flow.name,
                    timeout_s,
                )
                self._is_broken_off = True
            query.stop()
        self.close()

    def close(self) -> None:
        """Let go of what was kept for the micro-batches."""
        if self._heartbeats is not None:
            self._heartbeats.close()
        if self._old_rows is not None:
            self._old_rows.close()
        if self._watch_schemas is not None:
            self._watch_schemas.close()
        for each in self._snapshots:
            each.close()
        if self._writer is not None:
            self._writer.close()


def _column(number: int) -> str:
    return f"_penstock_output_{number}"


def _reads_once(output: Topic | Output) -> bool:
    """Whether an output computes its rows exactly once; others may say so by `reads_once`."""
    return isinstance(output, Topic) or bool(getattr(output, "reads_once", False))
