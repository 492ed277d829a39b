"""Leaders and coordinators move: a node of three dies, and comes back, while we write and read."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from penstock.client import topics
from penstock.client.connection import Cluster
from penstock.client.fetching import Fetcher
from penstock.client.metadata import Metadata, Place
from penstock.client.writer import LogWriter
from penstock.testing.apache_kafka import ApacheKafkaCluster
from tests.client.conftest import KEEP
from tests.client.reader import read_topic, take
from tests.harness.profiles import FAILOVER_RECORDS
from tests.waiting import eventually

PARTITIONS = 3
STEP = 100
# How much has been written when the node dies, and when it comes back.
DIES_AT, RETURNS_AT = FAILOVER_RECORDS // 3, FAILOVER_RECORDS * 7 // 12


class Work:
    """Writes numbers, in transactions or without, and counts what was acknowledged."""

    def __init__(self, bootstrap: str, topic: str, transactional_id: str | None) -> None:
        self.bootstrap = bootstrap
        self.topic = topic
        self.written = 0
        self.failure: BaseException | None = None
        self._id = transactional_id

    def run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self.failure = error

    def _write(self) -> None:
        with (
            Cluster(self.bootstrap) as cluster,
            LogWriter(cluster, transactional_id=self._id) as writer,
        ):
            for first in range(0, FAILOVER_RECORDS, STEP):
                numbers = [b"%d" % number for number in range(first, first + STEP)]
                writer.begin()
                writer.write(self.topic, numbers, numbers)
                writer.commit()
                self.written = first + STEP


class Reading:
    """Follows a topic until all is there."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.bootstrap = bootstrap
        self.topic = topic
        self.seen: list[int] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._read()
        except BaseException as error:
            self.failure = error

    def _read(self) -> None:
        positions: dict[Place, int] = {(self.topic, number): 0 for number in range(PARTITIONS)}
        with Cluster(self.bootstrap) as cluster, Fetcher(cluster) as fetcher:
            while len(self.seen) < FAILOVER_RECORDS:
                for place, got in fetcher.fetch(positions, 500).items():
                    positions[place], records = take(got.data, positions[place], got.aborted)
                    self.seen += [int(record.value or b"") for record in records]


def start(runs: list[Callable[[], None]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=run, daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    return threads


# Three Java processes take their time to start.
@pytest.mark.timeout(300)
@pytest.mark.java
def test_a_node_of_three_dies_and_comes_back() -> None:
    quick = {"transaction.state.log.num.partitions": "3"}
    with ApacheKafkaCluster(quick) as kafka, Cluster(kafka.bootstrap) as cluster:
        for name in ("plain", "exact"):
            topics.create(cluster, name, partitions=PARTITIONS, replication=3, config=KEEP)
        works = [Work(kafka.bootstrap, "plain", None), Work(kafka.bootstrap, "exact", "id")]
        readings = [Reading(kafka.bootstrap, work.topic) for work in works]
        parts: list[Work | Reading] = [*works, *readings]
        threads = start([part.run for part in parts])

        def reached(count: int) -> bool:
            failures = [part.failure for part in parts if part.failure is not None]
            assert not failures, failures
            return all(work.written >= count for work in works)

        eventually(lambda: reached(DIES_AT), 120)
        _, port = Metadata(cluster).leader("exact", 0)
        victim = next(node for node in kafka.nodes.values() if node.bootstrap.endswith(f":{port}"))
        victim.kill()
        eventually(lambda: reached(RETURNS_AT), 120)
        victim.start()
        eventually(lambda: reached(FAILOVER_RECORDS), 120)
        for thread in threads:
            thread.join(120)
        assert [part.failure for part in parts] == [None] * 4
        for work, reading in zip(works, readings, strict=True):
            assert sorted(reading.seen) == list(range(FAILOVER_RECORDS))
            for records in read_topic(cluster, work.topic).values():
                numbers = [int(record.value or b"") for record in records]
                assert numbers == sorted(numbers)
