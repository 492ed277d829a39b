"""How a case is measured: micro-batches of a stated size, both systems by turns.

Each system has one checkpoint for the whole case, so that its state is that of a stream that has
run for a while. A round feeds the topics and lets each system read what is new, as several
micro-batches; the first of them pays for planning and is not counted.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

import orjson
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from benchmarks.broker.clients import BUILD
from benchmarks.broker.servers import Penstock
from benchmarks.broker.workloads import progress
from benchmarks.frame import Asked, Cells
from benchmarks.processing import usage
from benchmarks.spark.data import spark_session
from penstock.client.connection import Cluster
from penstock.client.topics import create
from penstock.client.writer import LogWriter
from penstock.spark.flows.declare import Batch, Flow
from penstock.spark.flows.inputs import Place
from penstock.spark.flows.running import Running
from penstock.spark.state.bounds import UnboundedStateWarning

# All partitions are fed, with times that are not of the clock.
warnings.simplefilter("ignore", UnboundedStateWarning)

FOLDER: Final = BUILD / "data" / "processing"
PARTITIONS: Final = 4
TIMEOUT_S: Final = 600.0
_STEP_S: Final = 0.02
_MOST_TRIES: Final = 5
# Micro-batches before the first that count: Java compiles, beside them, what it runs often, and
# takes half of the processor time of the first twenty for it.
_WARMING: Final = 24


@dataclass(frozen=True, slots=True)
class Nowhere:
    """An output that computes the rows and keeps none."""

    target: str = "nowhere"
    reads_once: bool = True

    def write(self, rows: DataFrame, batch: Batch) -> int:
        rows.write.format("noop").mode("overwrite").save()
        return 0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One that ran."""

    events: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run has shown."""

    batches: Sequence[MicroBatch]
    cpu_s: float

    @property
    def rate(self) -> float:
        """Events/s, without the first micro-batch."""
        counted = [each for each in self.batches[1:] if each.events] or list(self.batches)
        return sum(each.events for each in counted) / sum(each.seconds for each in counted)

    @property
    def cpu_us(self) -> float:
        """Processor time of an event, the first micro-batch included."""
        return self.cpu_s * 1e6 / max(1, sum(each.events for each in self.batches))


@dataclass
class Bench:
    """The broker and the session of a case."""

    bootstrap: str
    broker_pid: int
    spark: Any
    folder: Path
    writer: LogWriter
    cluster: Cluster

    def topics(self, *names: str, partitions: int = PARTITIONS) -> None:
        for name in names:
            create(
                self.cluster,
                name,
                partitions=partitions,
                config={"retention.ms": "-1"},
                exists_ok=True,
            )

    def start(self, flow: Flow) -> tuple[Running, Any]:
        """A flow of ours over all there is, as `penstock run` runs it; its query."""
        place = Place(self.bootstrap, {}, lambda topic: topic)
        checkpoint = str(self.folder / f"ours-{flow.name}")
        running = Running(self.spark, flow, place, checkpoint, once=True)
        running.start(running.plan())
        query = next(each for each in self.spark.streams.active if each.name == running.title)
        return running, query

    def ours(self, flow: Flow) -> Ran:
        for tries_left in range(_MOST_TRIES - 1, -1, -1):
            before = usage.cpu_s(without=self.broker_pid)
            running, query = self.start(flow)
            try:
                return self._await(query, before)
            except Exception as error:
                # Spark waits ten seconds for Python, which is not enough on a machine that is
                # very busy. `penstock run` tries again, and so do we.
                if not tries_left or "failed to connect back" not in str(error):
                    raise
            finally:
                running.stop(TIMEOUT_S)
        raise AssertionError

    def plain(self, rows: DataFrame, name: str) -> Ran:
        """Spark's own query over all there is, to nowhere."""
        before = usage.cpu_s(without=self.broker_pid)
        query = (
            rows.writeStream.format("noop")
            .outputMode("append")
            .option("checkpointLocation", str(self.folder / f"plain-{name}"))
            .trigger(availableNow=True)
            .start()
        )
        return self._await(query, before)

    def _await(self, query: Any, before: float) -> Ran:
        if not query.awaitTermination(TIMEOUT_S):
            query.stop()
            raise RuntimeError("the query did not come to its end in time")
        if query.exception() is not None:
            raise RuntimeError(str(query.exception())[:2000])
        spent = usage.cpu_s(without=self.broker_pid) - before
        return Ran(batches_of(query), spent)

    def read(self, topic: str, schema: str, limit: int) -> DataFrame:
        """A topic of JSON by Spark's own connector."""
        records: DataFrame = (
            self.spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.bootstrap)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", limit)
            .load()
        )
        parsed = F.from_json(F.col("value").cast("string"), schema)
        return records.select(parsed.alias("row"), "timestamp").select("row.*", "timestamp")


def batches_of(query: Any) -> list[MicroBatch]:
    """The micro-batches that a query has run: their events by the offsets."""
    found = []
    for each in query.recentProgress:
        report = orjson.loads(each.json)
        took = report.get("durationMs") or {}
        if "addBatch" in took:
            events = sum(
                _total(source.get("endOffset")) - _total(source.get("startOffset"))
                for source in report["sources"]
            )
            found.append(MicroBatch(events, took["triggerExecution"] / 1000))
    return found


def _total(offsets: Any) -> int:
    """The sum of the offsets of all partitions."""
    if isinstance(offsets, str):
        offsets = orjson.loads(offsets)
    if isinstance(offsets, Mapping):
        return sum(_total(each) for each in offsets.values())
    return offsets if isinstance(offsets, int) else 0


@contextmanager
def bench(name: str) -> Iterator[Bench]:
    """A broker on an empty folder, and the session."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    server = Penstock(folder / "broker", "os")
    server.start()
    try:
        spark = spark_session()
        with Cluster(server.address) as cluster, LogWriter(cluster) as writer:
            yield Bench(server.address, server.pid, spark, folder, writer, cluster)
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Case:
    """An operator under measurement."""

    name: str
    # Events of all inputs in a micro-batch.
    per_batch: int
    # Makes topics, and what is there before: tables, queries.
    prepare: Callable[[Bench], None]
    # Adds the events of so many micro-batches, from the given number on.
    feed: Callable[[Bench, int, int], None]
    flow: Callable[[int], Flow]
    plain: Callable[[Bench, int], DataFrame] | None = None
    batches: int = 4
    # Micro-batches before those that count.
    warming: int = _WARMING
    # What is asked of a first run of ours, before anything is measured.
    loading: Callable[[], Flow] | None = None
    systems: tuple[str, ...] = ("penstock", "plain")


def measure(case: Case, asked: Asked, bench: Bench, *, fed: int = 0) -> tuple[Cells, int]:
    """Events/s and processor time, by system; and up to where the topics are fed."""
    cells: Cells = {case.name: {}, f"{case.name}_cpu": {}}
    batches = 3 if asked.quick else case.batches
    for turn in range(asked.rounds + 1):
        wanted = case.warming if turn == 0 else batches
        case.feed(bench, fed, wanted)
        bench.writer.flush()
        fed += wanted
        for system in case.systems:
            if system == "penstock":
                ran = bench.ours(case.flow(case.per_batch))
            elif case.plain is not None:
                ran = bench.plain(case.plain(bench, case.per_batch), case.name)
            else:
                continue
            note(case.name, system, ran, warming=turn == 0)
            if turn:
                cells[case.name].setdefault(system, []).append(ran.rate)
                # What a process had used is lost if another one than its parent sees it end.
                if ran.cpu_s > 0:
                    cells[f"{case.name}_cpu"].setdefault(system, []).append(ran.cpu_us)
    return cells, fed


def note(name: str, system: str, ran: Ran, *, warming: bool = False) -> None:
    shown = ", ".join(f"{each.events / each.seconds / 1000:.0f}k" for each in ran.batches)
    progress(
        f"  {name} {system}: {ran.rate:,.0f} events/s, {ran.cpu_us:.1f} us of processor time each"
        f" [{shown}]{' (warming up)' if warming else ''}"
    )


def part(*cases: Callable[[Asked], Case]) -> Callable[[Asked], Cells]:
    """Cases that are measured one after the other, each on a broker of its own."""

    def run(asked: Asked) -> Cells:
        cells: Cells = {}
        for make in cases:
            case = make(asked)
            with bench(case.name) as one:
                case.prepare(one)
                one.writer.flush()
                if case.loading is not None:
                    note(case.name, "penstock", one.ours(case.loading()), warming=True)
                found, _ = measure(case, asked, one)
                cells.update(found)
        return cells

    return run


def wait_until_over(running: Running, look: Callable[[], None]) -> None:
    """Look again and again while a flow runs; RuntimeError if it fails."""
    deadline = monotonic() + TIMEOUT_S
    while running.is_active:
        look()
        if monotonic() > deadline:
            raise RuntimeError("the flow did not come to its end in time")
        sleep(_STEP_S)
    failure = running.failure()
    if failure is not None:
        raise RuntimeError(str(failure))
