"""The work of one sink: fetch, decode, apply with the position, again. No Spark in here.

A loop runs in a thread of a resident task, or of the driver. The store has the position: a loop
begins where the store is, and after a failure another one does.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.client.connection import Cluster
from penstock.client.errors import OffsetGoneError
from penstock.client.metadata import EARLIEST, LATEST, Metadata, Place, offsets
from penstock.client.table_schemas import PublishedSchemas, UnknownSchemaError
from penstock.client.tail import Piece, Tail
from penstock.sinks.contract import Changes, Position, Refused, Sink
from penstock.sinks.errors import OutOfStepError, StoreAwayError
from penstock.sinks.fields import as_word
from penstock.sinks.spec import SinkSpec
from penstock.spark.flows.dead_letters import (
    DeadLetterGuard,
    DeadLetterLimit,
    Remedy,
    described,
)
from penstock.spark.flows.errors import UnknownTopicError
from penstock.spark.flows.progress import Progress
from penstock.spark.flows.supervisor import Failure
from penstock.spark.flows.trouble import explain
from penstock.spark.runtime.freshness import Freshness
from penstock.spark.sinking import captured
from penstock.spark.sinking.errors import (
    FeedingError,
    NothingToLearnFromError,
    NoWholeNumbersError,
)
from penstock.spark.sinking.findings import Findings
from penstock.spark.sinking.learning import parser_of
from penstock.spark.sinking.letters import Letters
from penstock.spark.sinking.opening import END, check_there, opening, skip, tell_altered
from penstock.spark.sinking.parsing import Parser
from penstock.spark.sinking.starting import Store, carried, starting

log = logging.getLogger(__name__)

# How soon a change is reported; how long an idle loop waits for records before it looks around.
REPORT_S: Final = 0.1
IDLE_S: Final = 0.5
# How often new partitions, and a topic that was made again, are looked for.
METADATA_S: Final = 5.0
_EVERY: Final = re.compile(r"(\d+) (milli)?(second|minute|hour)s?")
_UNIT_S: Final = {"second": 1.0, "minute": 60.0, "hour": 3600.0}

State = Literal["starting", "running", "ended", "switched", "failed"]


@dataclass(frozen=True, slots=True)
class LogAddress:
    """Where the log is, and how to get in."""

    bootstrap: str
    # As the source takes them: `kafka.` and the client's own name.
    options: Mapping[str, str] = field(default_factory=dict)

    def cluster(self) -> Cluster:
        from penstock.spark.flows.inputs import Place as FlowPlace

        return FlowPlace(self.bootstrap, self.options, str).cluster()


@dataclass(frozen=True, slots=True)
class Start:
    """How a loop is to begin."""

    # The topic as it is called in the log: of what a flow writes, the version that counts.
    topic: str
    # End when all that is there at the start has been read.
    once: bool = False
    # Fill a store beside the one that is there.
    rebuild: bool = False
    # The topic and the cluster that the store was filled from, for stores that do not know; and
    # when the store was at which position last, as far as that was written down.
    known_id: str = ""
    known_cluster: str = ""
    fed: tuple[tuple[Position, float], ...] = ()
    # Where a sink that cannot be rebuilt begins, "beginning" or "end": it forgets what it has sent.
    anew: str = ""


@dataclass(slots=True)
class Report:
    """How a loop gets on."""

    state: State = "starting"
    progress: Progress = field(default_factory=Progress)
    position: Position | None = None
    # The topic that is read: an older version as long as the store is filled from that.
    topic: str = ""
    topic_id: str = ""
    cluster_id: str = ""
    # The newest record that is in the store, in seconds since 1970.
    newest_s: float = 0.0
    put: int = 0
    deleted: int = 0
    # Nothing was there to read when it last looked.
    is_idle: bool = False
    # From a record's time until it was in the store, over the last minute.
    freshness: tuple[float, float] | None = None
    failure: Failure | None = None


class SinkLoop:
    """Feeds one sink, from a start to its end, in the thread that calls `run`."""

    def __init__(
        self,
        spec: SinkSpec,
        log_address: LogAddress,
        start: Start,
        report: Callable[[Report], None],
    ) -> None:
        self.spec = spec
        self._address = log_address
        self._start = start
        self._tell = report
        self.report = Report()
        self._told_s = 0.0
        self._stop = Event()
        # When it last came by, for those who watch that it does not hang.
        self.seen_s = time.monotonic()
        self._freshness = Freshness()
        self._guard = DeadLetterGuard(
            DeadLetterLimit(spec.max_dead_share, spec.max_dead_letters), _remedy(spec),
            once=start.once,
        )  # fmt: skip
        self._interval_s = interval_s(spec.every)
        self._cluster: Cluster | None = None
        self._sink: Sink | None = None
        self._looked_s = 0.0

    def stop(self) -> None:
        """End after the transaction that runs; from any thread."""
        self._stop.set()

    def run(self) -> None:
        """Until it is stopped, has read all it was asked for, or fails; errors are reported."""
        try:
            self._open()
            self._state("running")
            self._feed()
        except BaseException as error:
            self._failed(error)
        else:
            # What was built beside is still to be put in the place of the old.
            if not self._start.rebuild or self._stop.is_set():
                self.close()
            self._state("ended")

    def switch(self) -> None:
        """Of a rebuild that has ended: put what was built in the place of the old."""
        try:
            assert self._sink is not None
            self._sink.switch()
        except BaseException as error:
            self._failed(error)
        else:
            self.close()
            self._state("switched")

    def close(self) -> None:
        """Give connections back; may be called twice."""
        if self._sink is not None:
            self._sink.close()
        if self._cluster is not None:
            self._cluster.close()

    # ---- the start -----------------------------------------------------------------------

    def _open(self) -> None:
        topic = self.report.topic = self._start.topic
        cluster = self._cluster = self._address.cluster()
        self._metadata = Metadata(cluster)
        if topic not in self._metadata.topics([topic]):
            raise UnknownTopicError(
                f"sink {self.spec.name!r} reads topic {topic!r}, which does not exist at "
                f"{self._address.bootstrap}",
                advice="It is made by the flow or the capture that writes it, or by `penstock "
                f"topics create {topic}`. Is the name right?",
            )
        start = self._start
        opened = opening(self.spec, topic, rebuild=start.rebuild, anew=start.anew)
        self._sink, self.report.topic = opened.sink, opened.topic
        check_there(opened, self.spec.name, self._metadata)
        topic = opened.topic
        parser = parser_of(self.spec, cluster, topic, self._sink.stored_schema())
        self._since = self._open_store(parser)
        if start.anew == END:
            self._since = skip(self._sink, parser.schema, cluster, self._metadata, topic)
        self._letters = Letters(cluster, self.spec.letters, self.spec.name)
        self.report.position = self._since
        positions = self._begin()
        self._until: Mapping[Place, int] | None = None
        if self._start.once or self._start.rebuild:
            self._until = self._offsets(positions, LATEST)
        self._tail = Tail(cluster, positions, until=self._until)

    def _begin(self) -> dict[Place, int]:
        """Where to go on in each partition; an error if the log lacks what the store does."""
        assert self._cluster is not None
        assert self._sink is not None
        topic, at, start = self.report.topic, self._since, self._start
        fed_s = max((s for position, s in start.fed if at.reaches(position)), default=0.0)
        store = Store(
            self.spec.name, self._sink.target, at, start.known_id, start.known_cluster, fed_s
        )
        there = carried(self._cluster, self._metadata, topic, store)
        if there is not None and self._sink.relocate(there):
            log.info("sink %s goes on in another cluster, at %s", self.spec.name, there)
            self._since = self.report.position = there
            store = replace(store, position=there, topic_id="")
        begin = starting(self._cluster, self._metadata, topic, store)[topic]
        self.report.topic_id = str(self._metadata.topic_id(topic))
        self.report.cluster_id = self._metadata.cluster_id()
        known = {(topic, int(number)): offset for number, offset in begin.items()}
        first = {place: at for place, at in known.items() if at == EARLIEST}
        return known | (self._offsets(first, EARLIEST) if first else {})

    def _offsets(self, places: Mapping[Place, int], which: int) -> dict[Place, int]:
        assert self._cluster is not None
        return offsets(
            self._cluster, dict.fromkeys(places, which), isolation="read_committed",
            metadata=self._metadata,
        )  # fmt: skip

    def _open_store(self, parser: Parser) -> Position:
        """Open the store for these columns, and read all columns that it has."""
        assert self._sink is not None
        position = self._sink.open(parser.schema)
        merged = self._sink.stored_schema() or parser.schema
        types = {column.name: column for column in merged.fields}
        columns = [replace(each, field=types.get(each.name, each.field)) for each in parser.columns]
        self._parser = replace(parser, columns=tuple(columns))
        return position

    # ---- the loop ------------------------------------------------------------------------

    def _feed(self) -> None:
        try:
            while not self._stop.is_set() and not self._tail.is_done:
                self.seen_s = time.monotonic()
                began_s = time.monotonic()
                pieces = self._take()
                if pieces:
                    self._apply(pieces, began_s)
                else:
                    self._note_idle()
                self._watch_topic()
                self._wait_for_turn(began_s)
        finally:
            self._tail.close()
        wrong = None if self._stop.is_set() else self._guard.at_end()
        if wrong is not None:
            raise wrong

    def _take(self) -> list[Piece]:
        wait_s = REPORT_S if self._is_untold else IDLE_S
        try:
            return self._tail.take(self.spec.max_records, wait_s)
        except OffsetGoneError:
            # It says why, unless the offset is there by now: who refused it did not lead for long.
            self._follow(self._begin())
            return []

    def _follow(self, positions: Mapping[Place, int]) -> None:
        assert self._cluster is not None
        self._tail.close()
        self._tail = Tail(self._cluster, positions, until=self._until)

    def _watch_topic(self) -> None:
        """Now and then: partitions that are new, and a topic that was deleted and made again."""
        now = time.monotonic()
        if now - self._looked_s < METADATA_S or self._until is not None:
            return
        first, self._looked_s = not self._looked_s, now
        if first:
            return
        topic = self.report.topic
        self._metadata.forget({topic})
        there = {(topic, number) for number in self._metadata.partitions(topic)}
        if str(self._metadata.topic_id(topic)) != self.report.topic_id:
            self._begin()
        new = there - self._tail.positions.keys()
        if new:
            log.info("sink %s: %d new partitions of %s", self.spec.name, len(new), topic)
            added = self._offsets(dict.fromkeys(new, EARLIEST), EARLIEST)
            self._follow({**self._tail.positions, **added})

    def _wait_for_turn(self, began_s: float) -> None:
        """A sink with an interval writes once in each."""
        if self._interval_s and self._until is None:
            next_s = (began_s // self._interval_s + 1) * self._interval_s
            while not self._stop.is_set() and (left := next_s - time.monotonic()) > 0:
                self._told_if_due()
                self.seen_s = time.monotonic()
                self._stop.wait(min(left, IDLE_S))

    # ---- a transaction -------------------------------------------------------------------

    def _apply(self, pieces: Sequence[Piece], began_s: float) -> None:
        assert self._sink is not None
        topic = self.report.topic
        end = Position(dict(self._tail.positions), {topic: self.report.topic_id})
        position = self._since.merged(end)
        found = self._parsed(pieces)
        before = self._letters.written
        unread = found.letters.num_rows
        told = [_first(found.letters)] if unread else []

        def first() -> str:
            return told[0] if told else ""

        # Before anything is written: what stops the sink is read again when that was mended.
        self._guard.check(found.records, unread, first)
        self._letters.unread(found.letters)
        changes = found.changes(self._since, position)

        def aside(refused: Sequence[Refused]) -> None:
            told.extend(map(_refused, refused[:1]))
            self._guard.check(found.records, unread + len(refused), first)
            self._letters.refused(refused, changes.deletes.column_names)

        done = self._sink.apply(changes, aside)
        self._since = position
        dead = self._letters.written - before
        self._guard.committed(found.records, dead, first, is_judged=True)
        times = [piece.records.column("timestamp") for piece in pieces if piece.records.num_rows]
        self._freshness.add(times)
        progress = self.report.progress
        progress.dead_letters += dead
        progress.batches += 1
        progress.batch_id += 1
        progress.rows_in += sum(piece.records.num_rows for piece in pieces)
        progress.rows_out += done.rows
        took_s = max(time.monotonic() - began_s, 1e-3)
        progress.batch_ms = round(1000 * took_s)
        progress.in_per_s = found.records / took_s
        progress.out_per_s = done.rows / took_s
        self._note(changes, position)

    def _parsed(self, pieces: Sequence[Piece]) -> Findings:
        """What the records come to, for a store with all the columns that they have."""
        found = self._parse(pieces)
        while found.new or found.unknown:
            if found.unknown:
                self._open_store(self._followed(self._parser, found.unknown))
            if found.new:
                log.info("sink %s: new columns %s", self.spec.name, ", ".join(found.new))
                grown = [*self._parser.columns, *found.new.values()]
                self._open_store(replace(self._parser, columns=tuple(grown)))
            found = self._parse(pieces)
        if found.fractions:
            raise _no_whole_numbers(self.spec.name, found.fractions, self._parser)
        if found.by_row and not self._parser.by_row:
            log.info("sink %s: records are keyed otherwise than its rows", self.spec.name)
            self._parser = replace(self._parser, by_row=True)
        return found

    def _followed(self, parser: Parser, ids: Sequence[int]) -> Parser:
        """The parser that knows schemas which were published since, with the columns that the
        table has by them."""
        assert self._cluster is not None
        columns = parser.columns
        schemas = dict(parser.schemas)
        published = PublishedSchemas(self._cluster)
        for id_ in ids:
            try:
                schema = schemas[id_] = published.by_id(id_)
            except UnknownSchemaError as error:
                log.warning("sink %s: %s", self.spec.name, error)
                schemas[id_] = None
                continue
            tell_altered(self.spec, parser.schemas, schema)
            if not parser.grows or self.spec.on_schema_change == "ignore":
                continue
            before = {column.name: column for column in columns}
            stored = replace(parser, columns=columns).schema
            store = f"sink {self.spec.name!r}"
            grown = captured.merged(stored, schema, store)
            # How values of columns stand that no schema tells stays as it was.
            columns = tuple(replace(before.get(each.name, each), field=each.field)
                            for each in grown)  # fmt: skip
            changed = [each.name for each in columns
                       if each.name not in before
                       or before[each.name].field.type != each.field.type]  # fmt: skip
            if changed:
                log.info("sink %s: table %s was altered: %s", self.spec.name, schema.table,
                         ", ".join(changed))  # fmt: skip
        return replace(parser, columns=columns, schemas=schemas)

    def _parse(self, pieces: Sequence[Piece]) -> Findings:
        tables: dict[Place, list[pa.RecordBatch]] = {}
        for piece in pieces:
            if piece.records.num_rows:
                tables.setdefault(piece.partition, []).append(piece.records)
        parsed = [
            self._parser.parse(_with_place(place, pa.Table.from_batches(batches)))
            for place, batches in tables.items()
        ]
        return Findings(self._parser.schema, parsed)

    # ---- what is told --------------------------------------------------------------------

    def _note(self, changes: Changes, position: Position) -> None:
        report = self.report
        report.position = position
        report.put += changes.upserts.num_rows
        report.deleted += changes.deletes.num_rows
        report.is_idle = False
        for origin in (changes.upserted_at, changes.deleted_at):
            newest = pc.max(origin.column("timestamp")).as_py() if origin.num_rows else None
            if newest is not None:
                report.newest_s = max(report.newest_s, newest.timestamp())
        self._is_untold = True
        self._told_if_due()

    def _note_idle(self) -> None:
        report = self.report
        if not report.is_idle or report.progress.in_per_s:
            report.is_idle = True
            report.progress.in_per_s = report.progress.out_per_s = 0.0
            self._is_untold = True
        self._told_if_due()

    _is_untold = False

    def _told_if_due(self) -> None:
        now = time.monotonic()
        if self._is_untold and now - self._told_s >= REPORT_S:
            self._told_s = now
            self._is_untold = False
            self.report.freshness = self._freshness.percentiles()
            self._tell(replace(self.report, progress=replace(self.report.progress)))

    def _state(self, state: State) -> None:
        self.report.state = state
        self.report.freshness = self._freshness.percentiles()
        self._tell(replace(self.report, progress=replace(self.report.progress)))

    def _failed(self, error: BaseException) -> None:
        log.debug("sink %s failed", self.spec.name, exc_info=error)
        failure = failure_of(
            error, self.spec.name, once=self._start.once, reached=self.report.position is not None
        )
        # Nothing has been written yet: a run with an end has nothing to do.
        nothing = isinstance(error, NothingToLearnFromError)
        if nothing and self._start.once and not self._start.rebuild:
            log.warning("%s: nothing to do", error)
            failure = replace(failure, is_idle=True)
        self.close()
        self.report.failure = failure
        self._state("failed")


def failure_of(error: BaseException, name: str, *, once: bool, reached: bool) -> Failure:
    """Why a sink has failed, and whether it is worth another try; `reached`: its store was."""
    found = explain(error, flow=name, checkpoint="")
    # A store that was put back, from a backup or by a failover, is fed again from where it is.
    again = found.retriable or isinstance(error, OutOfStepError)
    # A store that was never reached, in a run that is to end: its address may be wrong.
    if once and not reached:
        again = again and not isinstance(error, StoreAwayError)
    # Whoever makes the topic, or writes to it first, may come after us.
    waits = isinstance(error, UnknownTopicError | NothingToLearnFromError) and not once
    return replace(found, retriable=again, waits=waits)


def _remedy(spec: SinkSpec) -> Remedy:
    mend = f"mend `fields`, `key` or `format` of [sinks.{spec.name}]"
    return Remedy(
        f"If it is not the records that are wrong, {mend}, and start again: nothing of this "
        "transaction is in the store, and its records are read again. (Another type of a column "
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


def _no_whole_numbers(
    sink: str, fractions: Mapping[str, str], parser: Parser
) -> NoWholeNumbersError:
    """What to write, so that nobody has to find it out."""
    told = "; ".join(f"column {name!r} has {what}" for name, what in fractions.items())
    fields = ", ".join(
        f"{each.name} {'double' if each.name in fractions else as_word(each.field)}"
        for each in parser.columns
    )
    return NoWholeNumbersError(
        f"sink {sink!r}: {told}; it was taken for whole numbers, which the first records have",
        advice=f'Write fields = "{fields}" (decimal(18,2) for money) in [sinks.{sink}], and then '
        f"`penstock sinks rebuild {sink}`. Nothing is lost: the store is filled from the topic.",
    )


def interval_s(every: str) -> float:
    """`5 seconds` in seconds; 0 for no interval."""
    match = _EVERY.fullmatch(every)
    if match is None:
        if every:
            raise FeedingError(f"{every!r} is no interval such as '5 seconds'")
        return 0.0
    return int(match[1]) * _UNIT_S[match[3]] * (0.001 if match[2] else 1.0)


def _with_place(place: Place, records: pa.Table) -> pa.Table:
    topic, number = place
    count = records.num_rows
    repeated: Any = pa.array(np.full(count, number, np.int32))
    return (
        records.drop_columns(["timestampType"])
        .append_column("topic", pa.repeat(pa.scalar(topic), count))
        .append_column("partition", repeated)
    )
