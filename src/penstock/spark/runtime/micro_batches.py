"""Runs the micro-batches of a flow one after the other, in a thread, without a query of Spark's.

A query of Spark's plans, optimises and starts each micro-batch anew, and asks a process of its own
what there is to read. Here the driver asks the log itself, by the same source (`StreamReader`),
writes down what the micro-batch reads (`checkpoint`), and lets the flow run it, over a plan that
was prepared once or by stages, as its size demands.

**Stopping.** A stop lets the micro-batch that runs come to its end. If that takes too long, its
Spark jobs are cancelled, and those that it submits afterwards: a micro-batch may be busy planning
when it is broken off, and its first job would wait for executors that no cluster gives. It is run
again at the next start. A thread that does not end even so, since no job is what it waits for, is
left behind; it begins nothing any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock.spark.runtime.checkpoint import Checkpoint, Offsets, Planned
from penstock.spark.runtime.spark_internals import cancel_group, restore_active_session
from penstock.spark.source.frames import Count, Counter, Key, Reader, frame
from penstock.spark.source.options import Options
from penstock.spark.source.planning import Range
from penstock.spark.source.stream import StreamReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.types import StructType

log = logging.getLogger(__name__)

POOL: Final = "flows"
# How long a flow without an interval rests when there is nothing to read.
IDLE_S: Final = 0.02
# Longer, the longer nothing has come.
MOST_IDLE_S: Final = 0.1
_IDLE_AFTER: Final = 50
# How long a stop waits for the thread, and how often it cancels the thread's jobs meanwhile.
CANCEL_S: Final = 10.0
_CANCEL_AGAIN_S: Final = 0.2
# How often it is looked whether Java still answers.
JAVA_S: Final = 2.0
# Reports of micro-batches that nobody has asked for yet.
_REPORTS_KEPT: Final = 200


@dataclass(frozen=True)
class Source:
    """A stream of a flow, as it is read."""

    options: Options
    schema: StructType
    # The number of the stream in its flow.
    number: int


class MicroBatch:
    """What is to be done in one micro-batch."""

    def __init__(
        self,
        spark: SparkSession,
        batch_id: int,
        sources: Sequence[Source],
        tasks: Sequence[tuple[tuple[Range, ...], ...]],
        counter: Counter,
    ) -> None:
        self.spark = spark
        self.batch_id = batch_id
        self._sources = sources
        # Of each stream what each of its tasks reads.
        self.tasks = tasks
        self.counter = counter

    @property
    def task_count(self) -> int:
        """In how many tasks the streams are read."""
        return sum(map(len, self.tasks))

    @property
    def records(self) -> int:
        """The most that there can be: offsets that compaction took away count as well."""
        return sum(each.size for some in self.ranges.values() for each in some)

    @property
    def ranges(self) -> Mapping[int, list[Range]]:
        """What is read of each stream, one range for a partition, however many tasks read it."""
        return {number: _whole(tasks) for number, tasks in enumerate(self.tasks) if tasks}

    def frames(self) -> list[DataFrame]:
        """The records of each stream, to be read by stages."""
        return [
            frame(
                self.spark,
                Reader(
                    source.options, source.schema, source.number, tuple(tasks),
                    self.counter.accumulator,
                ),
            )
            for source, tasks in zip(self._sources, self.tasks, strict=True)
        ]  # fmt: skip

    def counts(self) -> Mapping[Key, Count]:
        """What was read so far."""
        return self.counter.counts()


def _whole(tasks: Iterable[Iterable[Range]]) -> list[Range]:
    found: dict[tuple[str, int], Range] = {}
    for each in (each for ranges in tasks for each in ranges):
        known = found.get(each.place, each)
        start, end = min(known.start, each.start), max(known.end, each.end)
        found[each.place] = Range(each.topic, each.partition, start, end)
    return list(found.values())


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


@dataclass(slots=True)
class Report:
    """What a micro-batch came to, in the words of Spark's own reports."""

    batch_id: int
    seconds: float
    sources: list[dict[str, Any]]
    ran: bool = True
    # When it began.
    timestamp: str = field(default_factory=_now)

    def as_dict(self) -> dict[str, Any]:
        took_ms = int(self.seconds * 1000)
        duration = {"triggerExecution": took_ms}
        return {
            "batchId": self.batch_id,
            "timestamp": self.timestamp,
            "durationMs": duration | ({"addBatch": took_ms} if self.ran else {}),
            "sources": self.sources,
            "stateOperators": [],
        }


class _Stream:
    """One stream on the driver: where it stands, and what there is to read."""

    def __init__(self, source: Source) -> None:
        self.reader = StreamReader(source.options, source.schema)
        self.limit: ReadLimit = self.reader.getDefaultReadLimit()
        self.at: Offsets | None = None

    def begin(self, at: Offsets | None) -> None:
        self.at = self.reader.initialOffset() if at is None else at

    def next_end(self) -> Offsets:
        assert self.at is not None
        return self.reader.latestOffset(self.at, self.limit)

    def tasks(self, start: Offsets, end: Offsets) -> tuple[tuple[Range, ...], ...]:
        return tuple(each.ranges for each in self.reader.partitions(start, end))  # type: ignore[attr-defined]


class MicroBatches:
    """The loop of one flow."""

    def __init__(
        self,
        spark: SparkSession,
        name: str,
        checkpoint: Checkpoint,
        sources: Sequence[Source],
        run: Callable[[MicroBatch], None],
        *,
        once: bool = False,
        every_s: float | None = None,
    ) -> None:
        self._spark = spark
        self._name = name
        self._checkpoint = checkpoint
        self._sources = sources
        self._run_batch = run
        self._once = once
        self._every_s = every_s
        self._streams: list[_Stream] = []
        self._counter = Counter(spark)
        self._stop = threading.Event()
        self._reports: list[Report] = []
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"flow {name}", daemon=True)
        # Never used again: jobs of a group that was cancelled are refused from then on.
        self._group = f"penstock flow {name} {uuid4()}"
        self._is_left = False
        # Whether it has looked for records, and found none.
        self.is_idle = False
        self._asked_s = time.monotonic()

    def start(self) -> None:
        """Begin; it runs when this returns."""
        self._thread.start()

    @property
    def is_active(self) -> bool:
        """Whether it goes on; not if its thread was left behind by a stop."""
        return self._thread.is_alive() and not self._is_left

    def error(self) -> BaseException | None:
        """Why it has ended; None if it came to its end, or was stopped."""
        return self._error

    def reports(self) -> list[dict[str, Any]]:
        """What became of the micro-batches since this was last asked.

        An error of py4j's if Java is gone, which nobody notices otherwise while there is nothing
        to read.
        """
        now = time.monotonic()
        if now - self._asked_s >= JAVA_S or not self.is_active:
            self._asked_s = now
            jvm: Any = self._spark.sparkContext._jvm
            jvm.java.lang.System.nanoTime()
        with self._lock:
            found, self._reports = self._reports, []
        return [each.as_dict() for each in found]

    def wait(self, _batch_id: int) -> None:
        """Until it is noted that a micro-batch is done: it is, when its thread has ended."""
        self._stop.set()
        self._thread.join(CANCEL_S)

    def stop(self) -> None:
        """End it; the micro-batch that runs is broken off."""
        self._stop.set()
        deadline = time.monotonic() + CANCEL_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            # Again and again: Spark itself refuses later jobs, but not later stages of shuffles.
            cancel_group(self._spark, self._group)
            self._thread.join(_CANCEL_AGAIN_S)
        if self._thread.is_alive():
            self._is_left = True
            log.warning(
                "flow %s: the micro-batch that was broken off has not ended within %.0f s, though "
                "its Spark jobs are cancelled; it is left behind",
                self._name, CANCEL_S,
            )  # fmt: skip

    # ---- the loop ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            context = self._spark.sparkContext
            context.setLocalProperty("spark.scheduler.pool", POOL)
            context.setJobGroup(self._group, self._name, interruptOnCancel=False)
            self._streams = [_Stream(each) for each in self._sources]
            self._loop()
        except BaseException as error:
            self._error = error
        finally:
            for each in self._streams:
                each.reader.stop()

    def _loop(self) -> None:
        planned, is_done = self._checkpoint.last(len(self._streams))
        starts: Iterable[Offsets | None] = [None] * len(self._streams)
        if planned is not None:
            starts = planned.ends if is_done else planned.starts
        for stream, at in zip(self._streams, starts, strict=True):
            stream.begin(at)
            if self._once:
                stream.reader.prepareForTriggerAvailableNow()
                stream.limit = _available_now(stream.limit)
        number = 0
        if planned is not None:
            number = planned.batch_id + 1
            if not is_done:
                self._do(planned)
        idle = 0
        while not self._stop.is_set():
            began = time.monotonic()
            following = self._plan(number)
            # To ask the log may have taken longer than a stop waits: a successor may run by now.
            if self._stop.is_set():
                return
            if following is None:
                if self._once:
                    return
                if not self.is_idle:
                    self._report(Report(number, 0.0, self._told(self._starts(), None), ran=False))
                self.is_idle = True
                idle += 1
            else:
                self.is_idle, idle = False, 0
                self._checkpoint.begin(following)
                self._do(following)
                number += 1
            self._rest(began, idle)

    def _rest(self, began: float, idle: int) -> None:
        if self._every_s is not None and not self._once:
            # At the same moments always, as Spark's trigger has them.
            now = time.time()
            due = (now // self._every_s + 1) * self._every_s
            if time.monotonic() - began < self._every_s:
                self._stop.wait(due - now)
        elif idle:
            self._stop.wait(IDLE_S if idle < _IDLE_AFTER else MOST_IDLE_S)

    def _starts(self) -> list[Offsets]:
        return [each.at or {} for each in self._streams]

    def _plan(self, number: int) -> Planned | None:
        """The next micro-batch; None if there is nothing to read."""
        starts = self._starts()
        ends = [each.next_end() for each in self._streams]
        # The first one writes down where it begins, even if there is nothing.
        if ends == starts and number > 0:
            return None
        return Planned(number, starts, ends)

    def _do(self, planned: Planned) -> None:
        began, timestamp = time.monotonic(), _now()
        starts = [
            stream.at if start is None else start
            for stream, start in zip(self._streams, planned.starts, strict=True)
        ]
        tasks = [
            stream.tasks(start or {}, end) if start != end else ()
            for stream, start, end in zip(self._streams, starts, planned.ends, strict=True)
        ]
        self._counter.begin()
        batch = MicroBatch(self._spark, planned.batch_id, self._sources, tasks, self._counter)
        try:
            self._run_batch(batch)
        finally:
            restore_active_session()
        self._checkpoint.done(planned.batch_id)
        for stream, end in zip(self._streams, planned.ends, strict=True):
            stream.at = end
            stream.reader.commit(end)
        seconds = time.monotonic() - began
        told = self._told(planned.ends, batch)
        self._report(Report(planned.batch_id, seconds, told, timestamp=timestamp))

    def _told(self, ends: Sequence[Offsets], batch: MicroBatch | None) -> list[dict[str, Any]]:
        counts = {} if batch is None else batch.counts()
        found = []
        for number, (stream, end) in enumerate(zip(self._streams, ends, strict=True)):
            read = sum(each.records for key, each in counts.items() if key[0] == number)
            latest = stream.reader.reportLatestOffset() or end
            found.append({"endOffset": end, "latestOffset": latest, "numInputRows": read})
        return found

    def _report(self, report: Report) -> None:
        with self._lock:
            self._reports.append(report)
            del self._reports[:-_REPORTS_KEPT]


def _available_now(limit: ReadLimit) -> ReadLimit:
    """All that there was at the start, by as much at once as the stream says."""
    from pyspark.sql.streaming.datasource import ReadMaxRows

    return limit if isinstance(limit, ReadMaxRows) else ReadAllAvailable()
