"""The same flow on a Spark cluster and three nodes of Apache Kafka, both of which lose a machine.

A Spark master and two workers, as separate processes; a flow file run by `penstock run --master`;
records written while it runs. In the middle a worker dies with its executor, then a Kafka node.
What comes out must be what a computation over the whole input says, with nothing twice: one output
is record by record, the other counts within windows, which needs state that moves to the worker
that is left.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from conformance.scenario import REQUEST_TIMEOUT_S
from penstock.testing.apache_kafka import ApacheKafkaCluster
from penstock.testing.broker import Broker
from penstock.testing.reading import read_topic
from penstock.testing.spark_cluster import SparkCluster, quick_java_options
from tests.spark.interpreted import INTERPRETED
from tests.waiting import eventually

PARTITIONS: Final = 3
STEP: Final = 600
PATIENCE_S: Final = 240.0
MINUTE_MS: Final = 60_000
FIRST_MS: Final = 1_760_000_040_000

FLOWS: Final = """
from pyspark.sql import functions as F

from penstock.spark import flow, stream, topic

numbers = stream("numbers", json="n long, at timestamp")


@flow(inputs=numbers, output=topic("doubled", key="n"))
def doubled(numbers):
    return numbers.selectExpr("n", "n * 2 AS twice")


@flow(inputs=numbers, output=topic("counted"))
def counted(numbers):
    return (
        numbers.withWatermark("at", "10 seconds")
        .groupBy(F.window("at", "1 minute"))
        .agg(F.count("*").alias("count"), F.sum("n").alias("sum"))
        .selectExpr("unix_millis(window.start) AS start", "count", "sum")
    )
"""


class Input:
    """Numbers, each with an event time a little later than the one before."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "message.timeout.ms": int(PATIENCE_S * 1000),
                "reconnect.backoff.max.ms": 500,
            }
        )
        self._failures: list[str] = []
        self.count = 0

    def write(self, count: int) -> None:
        for n in range(self.count, self.count + count):
            event = {"n": n, "at": f"{_text(FIRST_MS + n * 100)}"}
            self._producer.produce(
                "numbers", orjson.dumps(event), partition=n % PARTITIONS, on_delivery=self._told
            )
            self._producer.poll(0)
        assert self._producer.flush(PATIENCE_S) == 0
        assert not self._failures, self._failures
        self.count += count

    def _told(self, error: KafkaError | None, _: Message) -> None:
        if error is not None:
            self._failures.append(str(error))

    def windows(self) -> dict[int, tuple[int, int]]:
        """Count and sum per minute, of minutes that the watermark has closed."""
        found: dict[int, tuple[int, int]] = {}
        last = FIRST_MS + (self.count - 1) * 100
        for n in range(self.count):
            start = (FIRST_MS + n * 100) // MINUTE_MS * MINUTE_MS
            if start + MINUTE_MS <= last - 10_000:
                count, total = found.get(start, (0, 0))
                found[start] = (count + 1, total + n)
        return found


def _text(ms: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def read(bootstrap: str, topic: str) -> list[Any]:
    """All committed values of a topic, as JSON."""
    return [each.json() for each in read_topic(bootstrap, topic)]


@contextmanager
def flows(folder: Path, master: str, bootstrap: str) -> Iterator[subprocess.Popen[bytes]]:
    """`penstock run` on the cluster."""
    file = folder / "flows.py"
    file.write_text(FLOWS)
    command = [
        *(sys.executable, "-m", "penstock.cli", "run", str(file), "--plain"),
        *("--master", master, "--bootstrap", bootstrap, "--data", str(folder / "data")),
        *("--conf", "spark.executor.memory=700m", "--conf", "spark.driver.memory=700m"),
        *("--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.sql.shuffle.partitions=2"),
        *("--conf", f"spark.executor.extraJavaOptions={quick_java_options()}"),
        *(word for each in INTERPRETED.items() for word in ("--conf", "=".join(each))),
    ]
    with (folder / "run.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def make_topics(bootstrap: str, *, replication: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    names = ["numbers", "doubled", "counted"]
    made = admin.create_topics(
        [
            NewTopic(name, num_partitions=PARTITIONS, replication_factor=replication)
            for name in names
        ]
    )
    for future in made.values():
        future.result(REQUEST_TIMEOUT_S)


class Work:
    """The flow on a cluster, fed and followed until what comes out is what must come out."""

    def __init__(self, folder: Path, bootstrap: str, running: subprocess.Popen[bytes]) -> None:
        self._log = folder / "run.log"
        self._bootstrap = bootstrap
        self._running = running
        self.source = Input(bootstrap)

    def passed_on(self) -> int:
        assert self._running.poll() is None, self._log.read_text()[-3000:]
        return len(read(self._bootstrap, "doubled"))

    def wait_until_read(self) -> None:
        eventually(lambda: self.passed_on() >= self.source.count, PATIENCE_S, 0.5)

    def finish(self) -> None:
        """Stop the flow when all windows are closed, and compare."""
        bootstrap, source = self._bootstrap, self.source
        eventually(
            lambda: len(read(bootstrap, "counted")) >= len(source.windows()), PATIENCE_S, 0.5
        )
        self._running.send_signal(signal.SIGTERM)
        assert self._running.wait(PATIENCE_S) == 0, self._log.read_text()[-3000:]
        doubled = Counter((row["n"], row["twice"]) for row in read(bootstrap, "doubled"))
        assert doubled == Counter((n, 2 * n) for n in range(source.count))
        counted = [(row["start"], (row["count"], row["sum"])) for row in read(bootstrap, "counted")]
        assert sorted(counted) == sorted(source.windows().items())


@pytest.mark.timeout(900)
@pytest.mark.java
def test_a_worker_dies(tmp_path: Path) -> None:
    """On the embedded broker; `make proof` also loses a node of Apache Kafka."""
    with Broker() as broker, SparkCluster() as spark:
        make_topics(broker.bootstrap, replication=1)
        with flows(tmp_path, spark.master, broker.bootstrap) as running:
            work = Work(tmp_path, broker.bootstrap, running)
            work.source.write(STEP)
            work.wait_until_read()
            work.source.write(STEP)
            spark.kill_worker()
            work.source.write(STEP)
            work.wait_until_read()
            work.finish()


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.java
def test_a_worker_and_a_broker_die(tmp_path: Path) -> None:
    quick = {"offsets.topic.num.partitions": "3", "transaction.state.log.num.partitions": "3"}
    with ApacheKafkaCluster(quick) as kafka, SparkCluster() as spark:
        make_topics(kafka.bootstrap, replication=3)
        with flows(tmp_path, spark.master, kafka.bootstrap) as running:
            work = Work(tmp_path, kafka.bootstrap, running)
            work.source.write(STEP)
            work.wait_until_read()
            work.source.write(STEP)
            spark.kill_worker()
            work.source.write(STEP)
            work.wait_until_read()
            kafka.nodes[2].kill()
            work.source.write(STEP)
            work.wait_until_read()
            work.finish()
