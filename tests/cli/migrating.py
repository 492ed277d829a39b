"""What the tests of `penstock migrate` share: filling, reading and comparing clusters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple, Self

import pytest
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec, ResourceType

import penstock
from penstock.cli.migration import copier, ends

TIMEOUT_S = 60.0
WAIT_S = 0.02
WRITTEN_MAX = 5000


class Row(NamedTuple):
    """A record as both sides must have it; the offset may differ."""

    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: tuple[tuple[str, bytes | None], ...]


@cache
def admin(bootstrap: str) -> AdminClient:
    """One for each address: it must outlive its answers. `clients` lets go of them."""
    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})


@pytest.fixture(scope="module", autouse=True)
def clients() -> Iterator[None]:
    """For modules that import this: none of their clients looks for a broker that is gone."""
    yield
    admin.cache_clear()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For modules that import this: a consumer waits until it has as many records as it is asked
    for, or until the time is over, and here there are never as many."""
    for module in (copier, ends):
        monkeypatch.setattr(module, "WAIT_S", WAIT_S)


def create(bootstrap: str, name: str, partitions: int = 1, **settings: str) -> str:
    config = {setting.replace("_", "."): value for setting, value in settings.items()}
    new = NewTopic(name, num_partitions=partitions, config=config)
    admin(bootstrap).create_topics([new])[name].result(TIMEOUT_S)
    return name


def setting(bootstrap: str, topic: str, name: str) -> str | None:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    entries = admin(bootstrap).describe_configs([resource])[resource].result(TIMEOUT_S)
    value: str | None = entries[name].value
    return value


def producer(bootstrap: str, **settings: Any) -> Producer:
    named = {name.replace("_", "."): value for name, value in settings.items()}
    return Producer({"bootstrap.servers": bootstrap, "log_level": 0, "linger.ms": 1, **named})


def fill(bootstrap: str, topic: str, values: Sequence[bytes | None], partition: int = 0,
         **more: Any) -> None:  # fmt: skip
    writer = producer(bootstrap)
    for value in values:
        writer.produce(topic, value, partition=partition, **more)
    assert writer.flush(TIMEOUT_S) == 0


def numbers(first: int, count: int) -> list[bytes]:
    return [str(number).encode() for number in range(first, first + count)]


def read(bootstrap: str, topic: str, partition: int = 0, start: int = 0) -> list[Message]:
    """The committed records of a partition from an offset to the end."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "log_level": 0,
            "group.id": "unused",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 50,
        }
    )
    found: list[Message] = []
    try:
        consumer.assign([TopicPartition(topic, partition, start)])
        deadline = monotonic() + TIMEOUT_S
        while True:
            assert monotonic() < deadline, f"the end did not come; {len(found)} records did"
            for message in consumer.consume(5000, WAIT_S):
                error = message.error()
                if error is None:
                    found.append(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    return found
                else:
                    assert error.retriable(), error
    finally:
        consumer.close()


def extent(bootstrap: str, topic: str, partitions: int, *, committed: bool = True) -> int:
    """The offsets of a topic that committed records and markers take; 0 if it is not there.

    Or, with those that belong to an open transaction, all of them.
    """
    client = admin(bootstrap)
    if topic not in client.list_topics(timeout=TIMEOUT_S).topics:
        return 0
    latest: Any = OffsetSpec
    wanted = {TopicPartition(topic, number): latest.latest() for number in range(partitions)}
    level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
    try:
        futures = client.list_offsets(wanted, isolation_level=level)
        return sum(int(future.result(TIMEOUT_S).offset) for future in futures.values())
    except KafkaException:
        # It has just been made, and has no leaders yet.
        return 0


def rows(bootstrap: str, topic: str, partition: int = 0, start: int = 0) -> list[Row]:
    found = []
    for message in read(bootstrap, topic, partition, start):
        headers: Any = message.headers() or ()
        key: Any = message.key()
        value: Any = message.value()
        found.append(Row(key, value, message.timestamp()[1], tuple(headers)))
    return found


def values(bootstrap: str, topic: str, partition: int = 0, start: int = 0) -> list[bytes | None]:
    return [row.value for row in rows(bootstrap, topic, partition, start)]


def commit(bootstrap: str, group: str, *places: TopicPartition) -> None:
    wanted = [ConsumerGroupTopicPartitions(group, list(places))]
    future = admin(bootstrap).alter_consumer_group_offsets(wanted)[group]
    for part in future.result(TIMEOUT_S).topic_partitions:
        assert part.error is None, part.error


def committed(bootstrap: str, group: str) -> dict[tuple[str, int], tuple[int, str | None]]:
    wanted = [ConsumerGroupTopicPartitions(group)]
    future = admin(bootstrap).list_consumer_group_offsets(wanted)[group]
    return {
        (part.topic, part.partition): (part.offset, part.metadata)
        for part in future.result(TIMEOUT_S).topic_partitions
    }


class Command:
    """`penstock migrate` in a process of its own, to be killed or interrupted."""

    def __init__(self, *args: str) -> None:
        place = str(Path(penstock.__file__).parent.parent)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", "migrate", *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": place},
        )

    def kill(self) -> None:
        self.process.kill()
        self._collect()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait(self) -> tuple[int, bytes, str]:
        out, err = self._collect()
        return self.process.returncode, out, err.decode()

    def _collect(self) -> tuple[bytes, bytes]:
        return self.process.communicate(timeout=TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.kill()


class Writer:
    """A producer that writes numbers to partitions in turn, until it is told to stop.

    It pauses after each, and stops by itself before there is too much to read back.
    """

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        self._producer = producer(bootstrap)
        self._topic, self._partitions = topic, partitions
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.count = 0

    def _run(self) -> None:
        while not self._stop.wait(0.001) and self.count < WRITTEN_MAX:
            number = self.count
            self._producer.produce(
                self._topic, str(number), str(number % 7), partition=number % self._partitions
            )
            self._producer.poll(0)
            self.count += 1
        assert self._producer.flush(TIMEOUT_S) == 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()


def until(condition: Callable[[], Any]) -> None:
    """Wait for a condition that takes its time by itself."""
    deadline = monotonic() + TIMEOUT_S
    while not condition():
        assert monotonic() < deadline, "it did not happen in time"
