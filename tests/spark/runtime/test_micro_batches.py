"""The loop of micro-batches, over a log that is a number: nothing is skipped, whatever fails."""

from __future__ import annotations

import random
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock.spark.runtime import micro_batches
from penstock.spark.runtime.checkpoint import Checkpoint
from penstock.spark.runtime.micro_batches import MicroBatch, MicroBatches, Report, Source
from penstock.spark.source.planning import Range
from penstock.spark.source.task import Task
from tests.waiting import eventually

TOPIC = "numbers"


class Log:
    """How many records there are; more whenever somebody looks."""

    def __init__(self, rng: random.Random, last: int) -> None:
        self.rng = rng
        self.last = last
        self.end = 0

    def grow(self) -> int:
        self.end = min(self.last, self.end + self.rng.randrange(5))
        return self.end


class FakeReader:
    """What a loop asks of `StreamReader`."""

    log: Log

    def __init__(self, *_: Any) -> None:
        self._target: int | None = None

    def getDefaultReadLimit(self) -> ReadAllAvailable:  # noqa: N802
        return ReadAllAvailable()

    def initialOffset(self) -> dict[str, dict[str, int]]:  # noqa: N802
        return {TOPIC: {"0": 0}}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self.log.grow()

    def latestOffset(self, _start: Any, _limit: Any) -> dict[str, dict[str, int]]:  # noqa: N802
        return {TOPIC: {"0": self.log.grow() if self._target is None else self._target}}

    def reportLatestOffset(self) -> None:  # noqa: N802
        return None

    def partitions(self, start: Any, end: Any) -> list[Task]:
        return [Task((Range(TOPIC, 0, start[TOPIC]["0"], end[TOPIC]["0"]),))]

    def commit(self, _end: Any) -> None: ...

    def stop(self) -> None: ...


class FakeSpark:
    """Neither jobs nor Java."""

    def __getattr__(self, _name: str) -> FakeSpark:
        return self

    def __call__(self, *_: Any, **_more: Any) -> FakeSpark:
        return self


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, seed: int) -> Log:
    found = FakeReader.log = Log(random.Random(seed), 200)
    monkeypatch.setattr(micro_batches, "StreamReader", FakeReader)
    monkeypatch.setattr(micro_batches, "IDLE_S", 0.0)
    return found


def loop(folder: Path, run: Any, **more: Any) -> MicroBatches:
    spark: Any = FakeSpark()
    options: Any = None
    found = MicroBatches(
        spark, "loop", Checkpoint(str(folder)), [Source(options, options, 0)], run, **more
    )
    found.start()
    return found


def test_each_record_is_in_one_micro_batch_whatever_fails(tmp_path: Path, log: Log) -> None:
    """Failures before a micro-batch counts, and after it counts and before that is noted."""
    counted: dict[int, tuple[int, int]] = {}

    def run(batch: MicroBatch) -> None:
        (range_,) = batch.ranges[0] if batch.ranges else (Range(TOPIC, 0, 0, 0),)
        if log.rng.random() < 0.2:
            raise RuntimeError("before")
        span = range_.start, range_.end
        # What was written under a number is the same the second time.
        assert counted.setdefault(batch.batch_id, span) == span
        if log.rng.random() < 0.2:
            raise RuntimeError("after")

    starts = 0
    while sum(end - start for start, end in counted.values()) < log.last:
        starts += 1
        running = loop(tmp_path, run)
        eventually(lambda: not running.is_active or log.end == log.last)  # noqa: B023
        running.wait(0)
        assert isinstance(running.error(), RuntimeError | None)
    assert starts > 1
    spans = [counted[number] for number in sorted(counted)]
    assert spans[0][0] == 0
    assert all(one[1] == two[0] for one, two in pairwise(spans))


def test_once_ends_with_what_there_was(tmp_path: Path, log: Log) -> None:
    done: list[int] = []
    for _ in range(3):
        running = loop(tmp_path, lambda batch: done.append(batch.batch_id), once=True)
        eventually(lambda: not running.is_active)  # noqa: B023
        assert running.error() is None
    assert done == list(range(len(done)))
    planned, is_done = Checkpoint(str(tmp_path)).last(1)
    assert is_done
    assert planned is not None
    assert planned.ends == [{TOPIC: {"0": log.end}}]


def test_a_stop_ends_it_between_two(tmp_path: Path, log: Log) -> None:
    log.last = 1 << 30
    done: list[int] = []
    running = loop(tmp_path, lambda batch: done.append(batch.batch_id))
    eventually(lambda: len(done) > 3)
    running.wait(0)
    running.stop()
    assert not running.is_active
    planned, is_done = Checkpoint(str(tmp_path)).last(1)
    assert planned is not None
    assert (planned.batch_id, is_done) == (done[-1], True)
    assert [each["batchId"] for each in running.reports() if "addBatch" in each["durationMs"]] == (
        done[-len(done) :]
    )


def test_a_job_that_is_submitted_after_the_stop_is_cancelled_too(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The micro-batch was still being planned, and the cluster never runs a task of its job."""
    began, planned = threading.Event(), threading.Event()
    jobs: list[threading.Event] = []

    def run(_: MicroBatch) -> None:
        began.set()
        assert planned.wait(60)
        jobs.append(threading.Event())
        assert jobs[0].wait(60)
        raise RuntimeError("cancelled")

    def cancel() -> None:
        for each in jobs:
            each.set()
        # Only now, when there was nothing yet to cancel.
        planned.set()

    monkeypatch.setattr(micro_batches, "cancel_group", lambda *_: cancel())
    running = loop(tmp_path, run)
    assert began.wait(60)
    running.stop()
    assert not running.is_active
    assert str(running.error()) == "cancelled"
    found, is_done = Checkpoint(str(tmp_path)).last(1)
    assert found is not None
    assert (found.batch_id, is_done) == (0, False)


def test_what_does_not_end_is_left_behind_and_begins_nothing(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, goes_on = threading.Event(), threading.Event()
    done: list[int] = []

    def run(batch: MicroBatch) -> None:
        began.set()
        assert goes_on.wait(60)
        done.append(batch.batch_id)

    monkeypatch.setattr(micro_batches, "cancel_group", lambda *_: None)
    monkeypatch.setattr(micro_batches, "CANCEL_S", 0.05)
    running = loop(tmp_path, run)
    assert began.wait(60)
    running.stop()
    assert not running.is_active
    goes_on.set()
    running.wait(0)
    eventually(lambda: Checkpoint(str(tmp_path)).last(1)[1])
    assert done == [0]


def test_what_outlives_its_stop_begins_nothing(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has asked the log, and the answer came when a successor was running."""
    is_asked, may_go_on = threading.Event(), threading.Event()

    def ask(reader: FakeReader, *_: Any) -> dict[str, dict[str, int]]:
        is_asked.set()
        may_go_on.wait(60)
        return {TOPIC: {"0": log.last}}

    monkeypatch.setattr(FakeReader, "latestOffset", ask)
    running = loop(tmp_path, lambda _: None)
    assert is_asked.wait(60)
    running._stop.set()
    may_go_on.set()
    running.wait(0)
    assert (running.error(), Checkpoint(str(tmp_path)).last(1)) == (None, (None, False))


def test_a_report_has_the_time_at_which_its_micro_batch_began(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(f"2026-01-01T00:00:{second:02}.000Z" for second in range(60))
    monkeypatch.setattr(micro_batches, "_now", lambda: next(times))
    ran: list[str] = []
    running = loop(tmp_path, lambda _: ran.append(next(times)), once=True)
    eventually(lambda: not running.is_active)
    told = [each["timestamp"] for each in running.reports() if "addBatch" in each["durationMs"]]
    assert len(told) == len(ran) > 0
    assert all(began < during for began, during in zip(told, ran, strict=True))


def test_a_report_is_as_spark_tells_it() -> None:
    told = Report(3, 0.25, [], timestamp="2026-01-01T00:00:00.000Z").as_dict()
    assert told["durationMs"] == {"triggerExecution": 250, "addBatch": 250}
    assert "addBatch" not in Report(3, 0.0, [], ran=False).as_dict()["durationMs"]
