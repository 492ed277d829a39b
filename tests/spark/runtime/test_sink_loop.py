"""A sink's loop by itself, in a thread: what is in the store is what the topic says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from penstock.client import topics
from penstock.client.connection import Cluster
from penstock.sinks.contract import Applied, Aside, Changes, Sink
from penstock.sinks.spec import SinkSpec
from penstock.spark.runtime.freshness import Freshness
from penstock.spark.runtime.sink_loop import LogAddress, Report, SinkLoop, Start, interval_s
from penstock.testing import Broker
from tests.spark.sinking.changelog import Changelog, table
from tests.spark.sinking.managed import rows_in
from tests.waiting import eventually


class Running:
    """A loop that runs in a thread."""

    def __init__(self, spec: SinkSpec, broker: Broker, start: Start) -> None:
        self.reports: list[Report] = []
        self.loop = SinkLoop(spec, LogAddress(broker.bootstrap), start, self.reports.append)
        self._thread = threading.Thread(target=self.loop.run)
        self._thread.start()

    @property
    def last(self) -> Report:
        return self.reports[-1] if self.reports else Report()

    def until(self, check: Callable[[Report], Any]) -> Report:
        """The first report that is so."""

        def found() -> Report | None:
            report = self.last
            if check(report):
                return report
            assert report.failure is None, report.failure
            return None

        report = eventually(found)
        assert report is not None
        return report

    def end(self) -> Report:
        self.loop.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.last


@contextmanager
def running(spec: SinkSpec, broker: Broker, **start: Any) -> Iterator[Running]:
    run = Running(spec, broker, Start(spec.topic, **start))
    try:
        yield run
    finally:
        run.end()


def run_once(spec: SinkSpec, broker: Broker) -> Report:
    reports: list[Report] = []
    start = Start(spec.topic, once=True)
    SinkLoop(spec, LogAddress(broker.bootstrap), start, reports.append).run()
    return reports[-1]


def at_end(broker: Broker, topic: str) -> Callable[[Report], bool]:
    """Whether a report's position is the end of the topic."""
    from penstock.client.metadata import LATEST, Metadata, offsets

    with Cluster(broker.bootstrap) as cluster:
        places = [(topic, number) for number in Metadata(cluster).partitions(topic)]
        ends = offsets(cluster, dict.fromkeys(places, LATEST))
    return lambda report: report.position is not None and dict(report.position.offsets) == ends


def test_a_column_that_was_taken_for_whole_numbers_stops_the_sink(
    log_broker: Broker, topic: str, tmp_path: Path
) -> None:
    with Cluster(log_broker.bootstrap) as cluster:
        topics.create(cluster, topic, partitions=1)
    producer = Producer({"bootstrap.servers": log_broker.bootstrap})

    def feed(*values: float) -> None:
        for value in values:
            row = {"id": len(fed), "n": value, "name": "x"}
            producer.produce(topic, json.dumps(row).encode(), str(len(fed)).encode())
            fed.append(value)
        assert producer.flush(60) == 0

    fed: list[float] = []
    feed(1, 2)
    url = f"sqlite:///{tmp_path}/shop.db?table=orders"
    spec = SinkSpec("orders", topic, url, ("id",))
    assert run_once(spec, log_broker).state == "ended"
    feed(3, 2.5)
    failure = run_once(spec, log_broker).failure
    assert failure is not None
    assert f"column 'n' has 2.5 at {topic}-0, offset 3" in failure.message
    assert not failure.retriable
    # Nothing of that transaction is there, and what is to be written can be copied.
    assert len(rows_in(tmp_path / "shop.db")) == 2
    fields = "id bigint, n double, name string"
    assert f'fields = "{fields}"' in failure.advice
    assert "`penstock sinks rebuild orders`" in failure.advice
    mended = SinkSpec("orders", topic, url, ("id",), fields)
    reports: list[Report] = []
    loop = SinkLoop(mended, LogAddress(log_broker.bootstrap),
                    Start(topic, rebuild=True), reports.append)  # fmt: skip
    loop.run()
    loop.switch()
    assert reports[-1].failure is None
    assert [row["n"] for row in rows_in(tmp_path / "shop.db").values()] == fed


def test_it_follows_and_goes_on_from_the_position_of_the_store(
    log_broker: Broker, topic: str, tmp_path: Path, seed: int
) -> None:
    store = tmp_path / "shop.db"
    log = Changelog(log_broker.bootstrap, topic, seed, partitions=3)
    begun = time.time()
    log.feed(300, bad=0.05)
    spec = SinkSpec("orders", topic, f"sqlite:///{store}", max_records=50)
    with running(spec, log_broker) as run:
        run.until(at_end(log_broker, topic))
        assert rows_in(store) == table(log_broker.bootstrap, topic)
        log.feed(200)
        report = run.until(at_end(log_broker, topic))
        assert rows_in(store) == table(log_broker.bootstrap, topic)
        assert report.freshness is not None
        # Ages are counted in bins that are 8% wide.
        oldest_s = 1.08 * (time.time() - begun)
        assert 0 < report.freshness[0] <= report.freshness[1] <= oldest_s
        run.until(lambda report: report.is_idle)
    assert run.last.state == "ended"
    assert run.last.progress.batches >= 500 // 50
    assert run.last.progress.dead_letters > 0
    # Nobody feeds it; then a run with an end takes what has come, a column more among it.
    log.feed(100, extra=True)
    report = run_once(spec, log_broker)
    assert (report.state, report.failure) == ("ended", None)
    wanted = table(log_broker.bootstrap, topic)
    assert rows_in(store) == {key: {"note": None, **row} for key, row in wanted.items()}
    # And one with nothing to do ends, too.
    report = run_once(spec, log_broker)
    assert (report.state, report.progress.batches) == ("ended", 0)


def test_partitions_that_are_added_are_read(
    log_broker: Broker, topic: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.spark.runtime.sink_loop.METADATA_S", 0.1)
    store = tmp_path / "shop.db"
    log = Changelog(log_broker.bootstrap, topic, seed, partitions=1)
    log.feed(50)
    with running(SinkSpec("orders", topic, f"sqlite:///{store}"), log_broker) as run:
        run.until(at_end(log_broker, topic))
        with Cluster(log_broker.bootstrap) as cluster:
            topics.add_partitions(cluster, topic, 3)
        producer = Producer({"bootstrap.servers": log_broker.bootstrap})
        for number in range(1000, 1020):
            event = {"op": "c", "before": None, "after": {"id": number, "name": "n", "amount": 1}}
            key = json.dumps({"id": number})
            producer.produce(topic, json.dumps(event), key, partition=number % 3)
        assert producer.flush(60) == 0
        run.until(at_end(log_broker, topic))
    assert rows_in(store) == table(log_broker.bootstrap, topic)


def test_a_topic_that_is_made_again_while_it_is_read(
    log_broker: Broker, topic: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.spark.runtime.sink_loop.METADATA_S", 0.1)
    log = Changelog(log_broker.bootstrap, topic, seed, partitions=1)
    log.feed(20)
    spec = SinkSpec("orders", topic, f"sqlite:///{tmp_path}/shop.db")
    with running(spec, log_broker) as run:
        run.until(at_end(log_broker, topic))
        with Cluster(log_broker.bootstrap) as cluster:
            topics.delete(cluster, [topic])
        # Longer than the old one: its offsets tell nothing.
        Changelog(log_broker.bootstrap, topic, seed, partitions=1).feed(200)
        eventually(lambda: run.last.state == "failed")
    failure = run.last.failure
    assert failure is not None
    assert "made again" in failure.message
    assert "rebuild orders" in failure.advice
    assert not failure.retriable


def test_one_with_an_interval_writes_once_in_each(
    log_broker: Broker, topic: str, tmp_path: Path, seed: int
) -> None:
    log = Changelog(log_broker.bootstrap, topic, seed)
    log.feed(10)
    spec = SinkSpec("orders", topic, f"sqlite:///{tmp_path}/shop.db", every="1 hour")
    with running(spec, log_broker) as run:
        run.until(lambda report: report.put)
        log.feed(10)
        # It is told to stop while it waits for its turn.
        run.end()
    assert run.last.state == "ended"
    assert run.last.progress.batches == 1
    assert interval_s("500 milliseconds") == 0.5
    assert interval_s("2 minutes") == 120
    assert interval_s("") == 0


def test_a_stop_waits_for_the_transaction_that_runs(
    log_broker: Broker, topic: str, tmp_path: Path, seed: int
) -> None:
    log = Changelog(log_broker.bootstrap, topic, seed, partitions=1)
    log.feed(30)
    inside, go_on = threading.Event(), threading.Event()

    class Slow(SinkSpec):
        def sink(self) -> Sink:
            made: Any = SinkSpec.sink(self)
            apply = made.apply

            def slowly(changes: Changes, aside: Aside) -> Applied:
                inside.set()
                assert go_on.wait(60)
                done: Applied = apply(changes, aside)
                return done

            made.apply = slowly
            sink: Sink = made
            return sink

    store = tmp_path / "shop.db"
    with running(Slow("orders", topic, f"sqlite:///{store}"), log_broker) as run:
        assert inside.wait(60)
        run.loop.stop()
        assert run.last.state == "running"
        go_on.set()
        run.until(lambda report: report.state == "ended")
    assert rows_in(store) == table(log_broker.bootstrap, topic)


def test_how_fresh_a_store_is() -> None:
    import numpy as np
    import pyarrow as pa

    now = 1_000_000.0
    freshness = Freshness(lambda: now)
    assert freshness.percentiles() is None
    ages_s = np.linspace(0.01, 1.0, 1000)
    times = pa.array(((now - ages_s) * 1e6).astype(np.int64)).cast(pa.timestamp("us", "UTC"))
    freshness.add([times.slice(0, 300), times.slice(300)])
    told = freshness.percentiles()
    assert told is not None
    # Bins are 8% wide.
    assert told == pytest.approx(np.quantile(ages_s, [0.5, 0.99]), rel=0.09)
    now += 30
    freshness.add([pa.array([int((now - 10) * 1e6)]).cast(pa.timestamp("us", "UTC"))])
    told = freshness.percentiles()
    assert told is not None
    assert told[0] == pytest.approx(0.5, rel=0.1)
    # What is older than a minute counts no more.
    now += 45
    told = freshness.percentiles()
    assert told is not None
    assert told == pytest.approx((10, 10), rel=0.09)
    now += 100
    assert freshness.percentiles() is None
