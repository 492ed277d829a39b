"""A sink's query: from its start at the store's position, micro-batch by micro-batch.

Spark's checkpoint of the query is a folder that is emptied at each start. While the query runs it
tells how far the present micro-batch goes: Spark writes that down before it runs it, and the last
record alone would not tell, since offsets have gaps.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.client.metadata import Metadata
from penstock.sinks.contract import Changes, Position, Refused, Sink
from penstock.sinks.errors import OutOfStepError, StoreAwayError
from penstock.sinks.spec import SinkSpec
from penstock.spark.flows.dead_letters import (
    DeadLetterGuard,
    DeadLetterLimit,
    Remedy,
    described,
)
from penstock.spark.flows.errors import UnknownTopicError
from penstock.spark.flows.inputs import FORMAT, Place
from penstock.spark.flows.progress import Progress
from penstock.spark.flows.running import Gate, GateClosedError
from penstock.spark.flows.supervisor import Failure
from penstock.spark.flows.trouble import explain
from penstock.spark.flows.turns import is_idle
from penstock.spark.sinking.errors import FeedingError, NothingToLearnFromError
from penstock.spark.sinking.learning import parser_of
from penstock.spark.sinking.letters import Letters
from penstock.spark.sinking.parsing import Parser
from penstock.spark.sinking.starting import Store, end_of, last_fed_s, starting
from penstock.spark.sinking.task import RESULT, Findings, Task

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

COMMIT_WAIT_S: Final = 10.0
_STEP_S: Final = 0.02
_KEPT_COUNTS: Final = 1000


@dataclass(slots=True)
class Applied:
    """What a sink has come to, for those who watch."""

    position: Position | None = None
    # The newest record that is in the store, in seconds since 1970.
    newest_s: float = 0.0
    put: int = 0
    deleted: int = 0


class Feeding:
    """Feeds one sink, from a start to its end."""

    def __init__(
        self,
        spark: SparkSession,
        spec: SinkSpec,
        place: Place,
        checkpoint: Path,
        *,
        once: bool = False,
        rebuild: bool = False,
        known_id: str = "",
        make: Callable[[str], None] = lambda topic: None,
    ) -> None:
        """`make` makes the topic, if that is for somebody here to do."""
        self._spark = spark
        self.spec = spec
        self._place = place
        self._make = make
        self._checkpoint = checkpoint
        self._once = once
        self._rebuild = rebuild
        # Of the topic that the store was filled from, and of the one that is read.
        self._known_id = known_id
        self.topic_id = ""
        self._gate = Gate()
        self._guard = DeadLetterGuard(
            DeadLetterLimit(spec.max_dead_share, spec.max_dead_letters), _remedy(spec), once=once
        )
        self._query: StreamingQuery | None = None
        self._error: BaseException | None = None
        self._written: dict[int, int] = {}
        self._sink: Sink | None = None
        self._parser: Parser | None = None
        self._letters: Letters | None = None
        self._cluster: Any = None
        self._topic = ""
        self._since = Position()
        self.progress = Progress()
        self.applied = Applied()

    # ---- the start -----------------------------------------------------------------------

    def start(self) -> None:
        """Open the store and start the query; it runs when this returns."""
        self._make(self.spec.topic)
        self._topic = self._place.resolve(self.spec.topic)
        self._cluster = self._place.cluster()
        metadata = Metadata(self._cluster)
        if self._topic not in metadata.topics([self._topic]):
            raise UnknownTopicError(
                f"sink {self.spec.name!r} reads topic {self._topic!r}, which does not exist at "
                f"{self._place.bootstrap}",
                advice="It is made by the flow or the capture that writes it, or by `penstock "
                f"topics create {self._topic}`. Is the name right?",
            )
        live = self.spec.sink()
        self._sink = live.beside() if self._rebuild else live
        if self._rebuild:
            live.close()
        stored = self._sink.stored_schema()
        parser = parser_of(self.spec, self._cluster, self._topic, stored)
        self._since = self._open(parser)
        self._letters = Letters(self._cluster, self.spec.letters, self.spec.name)
        self.applied.position = self._since
        fed_s = last_fed_s(self._checkpoint, self._since)
        store = Store(self.spec.name, self._sink.target, self._since, self._known_id, fed_s)
        begin = starting(self._cluster, metadata, self._topic, store)
        self.topic_id = str(metadata.topic_id(self._topic))
        shutil.rmtree(self._checkpoint, ignore_errors=True)
        options = self._place.source(self.spec.topic, {
            "startingOffsets": orjson.dumps(begin).decode(),
            "maxOffsetsPerTrigger": str(self.spec.max_records),
            "includeHeaders": "false",
        })  # fmt: skip
        records = self._spark.readStream.format(FORMAT).options(**options).load()
        writer = records.writeStream.queryName(self.title)
        writer = writer.option("checkpointLocation", str(self._checkpoint))
        if self._once or self._rebuild:
            writer = writer.trigger(availableNow=True)
        elif self.spec.every:
            writer = writer.trigger(processingTime=self.spec.every)
        # Batches are counted anew, as their checkpoint is.
        self.progress.batch_id = -1
        self._query = writer.foreachBatch(self._guarded).start()

    @property
    def title(self) -> str:
        """The query's name in Spark."""
        return f"sink {self.spec.name}{' (rebuild)' if self._rebuild else ''}"

    def _open(self, parser: Parser) -> Position:
        """Open the store for these columns, and read all columns that it has."""
        assert self._sink is not None
        position = self._sink.open(parser.schema)
        merged = self._sink.stored_schema() or parser.schema
        types = {field.name: field for field in merged.fields}
        columns = [replace(each, field=types.get(each.name, each.field)) for each in parser.columns]
        self._parser = replace(parser, columns=tuple(columns))
        return position

    # ---- micro-batches -------------------------------------------------------------------

    def _guarded(self, records: DataFrame, batch_id: int) -> None:
        self._gate.enter()
        done = False
        try:
            self._written[batch_id] = self._on_batch(records, batch_id)
            while len(self._written) > _KEPT_COUNTS:
                del self._written[next(iter(self._written))]
            done = True
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._gate.leave(batch_id, done=done)

    def _on_batch(self, records: DataFrame, batch_id: int) -> int:
        assert self._sink is not None
        assert self._letters is not None
        assert self._parser is not None
        end = replace(self._end_of(batch_id), ids={self._topic: self.topic_id})
        position = self._since.merged(end)
        found = self._findings(records)
        while found.new:
            log.info("sink %s: new columns %s", self.spec.name, ", ".join(found.new))
            grown = [*self._parser.columns, *found.new.values()]
            self._open(replace(self._parser, columns=tuple(grown)))
            found = self._findings(records)
        if found.by_row and not self._parser.by_row:
            log.info("sink %s: records are keyed otherwise than its rows", self.spec.name)
            self._parser = replace(self._parser, by_row=True)
        letters = self._letters
        before = letters.written
        unread = found.letters.num_rows
        told = [_first(found.letters)] if unread else []

        def first() -> str:
            return told[0] if told else ""

        # Before anything is written: what stops the sink is read again when that was mended.
        self._guard.check(found.records, unread, first)
        letters.unread(found.letters)
        changes = found.changes(self._since, position)

        def aside(refused: Sequence[Refused]) -> None:
            told.extend(map(_refused, refused[:1]))
            self._guard.check(found.records, unread + len(refused), first)
            letters.refused(refused, changes.deletes.column_names)

        done = self._sink.apply(changes, aside)
        self._since = position
        dead = letters.written - before
        self.progress.dead_letters += dead
        self._guard.committed(found.records, dead, first, is_judged=True)
        self._note(changes, position)
        return done.rows

    def _findings(self, records: DataFrame) -> Findings:
        assert self._parser is not None
        told = records.mapInArrow(Task(self._parser), RESULT).toArrow()
        rows = zip(told.column("kind").to_pylist(), told.column("data").to_pylist(), strict=True)
        return Findings(self._parser.schema, rows)

    def _note(self, changes: Changes, position: Position) -> None:
        self.applied.position = position
        self.applied.put += changes.upserts.num_rows
        self.applied.deleted += changes.deletes.num_rows
        for origin in (changes.upserted_at, changes.deleted_at):
            newest = pc.max(origin.column("timestamp")).as_py()
            if newest is not None:
                self.applied.newest_s = max(self.applied.newest_s, newest.timestamp())

    def _end_of(self, batch_id: int) -> Position:
        try:
            return end_of(self._checkpoint, batch_id)
        except (OSError, IndexError, ValueError) as error:
            raise FeedingError(
                f"sink {self.spec.name!r}: {self._checkpoint} does not tell where micro-batch "
                f"{batch_id} ends",
                advice="The folder must be on the machine of the driver, and nobody else's.",
            ) from error

    # ---- watching ------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        return self._query is not None and bool(self._query.isActive)

    @property
    def is_waiting(self) -> bool:
        """Whether the query has looked for records, and found none."""
        return self._query is not None and is_idle(self._query)

    def failure(self) -> Failure | None:
        """Why the query ended; None if it came to its end, or was stopped."""
        query = self._query
        found = query.exception() if query is not None else None
        if found is None and query is not None and not self._gate.is_closed:
            wrong = self._guard.at_end()
            return None if wrong is None else self.explain(wrong)
        if found is None or isinstance(self._error, GateClosedError):
            return None
        if self._gate.is_closed and self._error is None:
            return None
        return self.explain(self._error or found)

    def explain(self, error: BaseException) -> Failure:
        log.debug("sink %s failed", self.spec.name, exc_info=error)
        found = explain(error, flow=self.spec.name, checkpoint=str(self._checkpoint))
        # A store that was put back, from a backup or by a failover, is fed again from where it is.
        again = found.retriable or isinstance(error, OutOfStepError)
        # A store that was never reached, in a run that is to end: its address may be wrong.
        if self._once and self.applied.position is None:
            again = again and not isinstance(error, StoreAwayError)
        # Whoever makes the topic, or writes to it first, may come after us.
        waits = isinstance(error, UnknownTopicError | NothingToLearnFromError) and not self._once
        # Nothing has been written yet: a run with an end has nothing to do.
        nothing = isinstance(error, NothingToLearnFromError)
        is_idle = nothing and self._once and not self._rebuild
        if is_idle:
            log.warning("%s: nothing to do", error)
        return replace(found, retriable=again, waits=waits, is_idle=is_idle)

    def poll(self) -> bool:
        """Take in what Spark reports; whether a micro-batch was completed since the last time."""
        last = self._query.lastProgress if self._query is not None else None
        if last is None or self._query is None:
            return False
        reports = [last]
        if int(last["batchId"]) > self.progress.batch_id + 1:
            reports = list(self._query.recentProgress)
        fresh = [self.progress.take(orjson.loads(each.json), self._written) for each in reports]
        return any(fresh)

    def switch(self) -> None:
        """Of a rebuild that has come to its end: put what was built in the place of the old."""
        assert self._sink is not None
        self._sink.switch()

    # ---- the end -------------------------------------------------------------------------

    def stop(self, timeout_s: float) -> None:
        """End the query after the micro-batch that runs; break it off after the time limit."""
        query = self._query
        if query is not None and query.isActive:
            if self._gate.close(timeout_s):
                deadline = time.monotonic() + COMMIT_WAIT_S
                while time.monotonic() < deadline and query.status["isTriggerActive"]:
                    time.sleep(_STEP_S)
            query.stop()
        self.close()

    def close(self) -> None:
        """Give connections back."""
        if self._sink is not None:
            self._sink.close()
        if self._cluster is not None:
            self._cluster.close()


def _remedy(spec: SinkSpec) -> Remedy:
    mend = f"mend `fields`, `key` or `format` of [sinks.{spec.name}]"
    return Remedy(
        f"If it is not the records that are wrong, {mend}, and start again: nothing of this "
        "micro-batch is in the store, and its records are read again. (Another type of a column "
        f"takes `penstock sinks rebuild {spec.name}`.) If it is, let them be put "
        "aside: max_dead_share = 1, and a higher max_dead_letters.",
        f"If it is not the records that are wrong, {mend}. `penstock sinks redrive {spec.name}` "
        f"sends back what is in {spec.letters}.",
    )


def _first(letters: pa.Table) -> str:
    """Where the first record stood that could not be read, and why."""
    order = [("partition", "ascending"), ("offset", "ascending")]
    (row,) = letters.sort_by(order).slice(0, 1).to_pylist()
    return described(row["topic"], row["partition"], row["offset"], row["reason"])


def _refused(row: Refused) -> str:
    return described(row.topic, row.partition, row.offset, row.reason)
