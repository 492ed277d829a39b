"""A topic with records and a group that reads it, for the tests of `penstock groups`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from uuid import uuid4

from confluent_kafka import Consumer, Message, Producer, TopicPartition

from tests.cli.runner import Ran, run

TIMEOUT_S: Final = 60.0
FIRST_MS: Final = int(time.time() * 1000) - 3_600_000
STEP_MS: Final = 60_000


class TopicAndGroup:
    """A topic and a group of this test's own, on a broker of any kind."""

    def __init__(
        self,
        at: str,
        partitions: int = 2,
        records: int = 10,
        step_ms: int = STEP_MS,
        **settings: str,
    ) -> None:
        self.at = at
        self.topic = f"t-{uuid4().hex[:8]}"
        self.group = f"g-{uuid4().hex[:8]}"
        options = [f"-c{name.replace('_', '.')}={value}" for name, value in settings.items()]
        self.run("topics", "create", self.topic, "-p", str(partitions), *options).ok()
        producer = Producer({"bootstrap.servers": at})
        for number in range(partitions):
            for n in range(records):
                producer.produce(
                    self.topic, b"x" * 100, partition=number, timestamp=FIRST_MS + n * step_ms
                )
        producer.flush(TIMEOUT_S)

    def run(self, *args: str, stdin: bytes = b"") -> Ran:
        return run(*args, "--bootstrap", self.at, stdin=stdin)

    def groups(self, *args: str) -> Ran:
        return self.run("groups", *args)

    def reset(self, *args: str) -> Ran:
        return self.groups("reset", self.group, *args)

    def plan(self, *args: str) -> list[tuple[int, int | None, int]]:
        """Partition, old and new offset of each step."""
        rows = self.reset("--json", *args).ok().json["partitions"]
        return [(row["partition"], row["old"], row["new"]) for row in rows]

    def commit(self, *offsets: int) -> None:
        consumer = Consumer({"bootstrap.servers": self.at, "group.id": self.group})
        places = [TopicPartition(self.topic, n, offset) for n, offset in enumerate(offsets)]
        for place in consumer.commit(offsets=places, asynchronous=False) or ():
            assert place.error is None
        consumer.close()

    @contextmanager
    def member(self, **settings: str) -> Iterator[Callable[[], Message | None]]:
        """A consumer that has joined the group and got partitions; what gives its records."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.at,
                "group.id": self.group,
                "client.id": "reader",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                **{name.replace("_", "."): value for name, value in settings.items()},
            }
        )
        try:
            consumer.subscribe([self.topic])
            first = None
            deadline = time.monotonic() + TIMEOUT_S
            while not consumer.assignment():
                assert time.monotonic() < deadline, "no partitions were assigned"
                first = consumer.poll(0.1)
            # What assigns the partitions may bring the first record along.
            early = [first] if first is not None else []
            yield lambda: early.pop() if early else consumer.poll(0.1)
        finally:
            consumer.close()

    def described(self, *args: str) -> Any:
        (view,) = self.groups("describe", self.group, "--json", "--sample", "0", *args).ok().json
        return view
