"""Kafka's own Streams library on the embedded broker: words counted exactly once, under kills.

Two instances of an application share its tasks; one is killed while it works, and another takes its
place, or the broker is killed and started again. Every change of a count is written, so the counts
of a word must be 1, 2, 3 and so on to the number that a plain count of the lines gives: nothing
lost, nothing twice.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import Consumer, Producer

from penstock.testing.broker import Broker
from penstock.testing.process import BrokerProcess
from tests.broker.groups.word_count_app import WordCountApp
from tests.broker.raw import RawClient
from tests.broker.requests import create, new_name
from tests.broker.shares.members import set_group
from tests.harness.profiles import STREAMS_KILLS, some
from tests.waiting import eventually

LINES: Final = 150
WORDS: Final = ("to", "be", "or", "not", "that", "is", "the", "question")
# A dead instance is found out after this; its transactions are ended a little sooner.
SESSION_MS: Final = 3_000
SETTINGS: Final = {
    "processing.guarantee": "exactly_once_v2",
    "commit.interval.ms": "100",
    "statestore.cache.max.bytes": "0",
    "producer.transaction.timeout.ms": "2000",
}
# Classic members say for themselves how long they may be silent.
CLASSIC: Final = {
    "consumer.session.timeout.ms": str(SESSION_MS),
    "consumer.heartbeat.interval.ms": "500",
}


class Counts:
    """The counts that the application has written, as one who reads committed sees them."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": new_name("reader"),
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "log_level": 0,
            }
        )
        self._consumer.subscribe([topic])
        self.found: dict[str, list[int]] = {}

    def close(self) -> None:
        self._consumer.close()

    def total(self) -> int:
        """How many changes of counts there are by now."""
        for message in self._consumer.consume(1_000, 0.2):
            assert not message.error(), message.error()
            word, number = message.key(), message.value()
            assert word is not None
            assert number is not None
            self.found.setdefault(str(word, "ascii"), []).append(int(number))
        return sum(map(len, self.found.values()))

    def has_more_than(self, number: int) -> bool:
        return self.total() > number


class WordCounting:
    """An application on a broker: lines are written, instances come and go, counts are read."""

    def __init__(self, stack: ExitStack, bootstrap: str, folder: Path, rng: random.Random) -> None:
        self.bootstrap = bootstrap
        self.application = new_name("app")
        self.expected = Counter[str]()
        self.apps: list[WordCountApp] = []
        self._stack, self._folder, self._rng = stack, folder, rng
        self._lines, counts = new_name("lines"), new_name("counts")
        with RawClient(bootstrap) as client:
            client.call(create(self._lines, 3))
            client.call(create(counts, 2))
        self._counts = counts
        set_group(
            self,
            self.application,
            streams_session_timeout_ms=str(SESSION_MS),
            streams_heartbeat_interval_ms="500",
            streams_initial_rebalance_delay_ms="500",
            streams_num_standby_replicas="1",
        )
        self._producer = Producer({"bootstrap.servers": bootstrap, "log_level": 0})
        self.reader = Counts(bootstrap, counts)
        stack.callback(self.reader.close)
        self._numbers = count(1)

    def start(self, protocol: str) -> None:
        """One more instance."""
        settings = {**SETTINGS, "group.protocol": protocol}
        if protocol == "classic":
            settings |= CLASSIC
        folder = self._folder / f"instance-{next(self._numbers)}"
        app = WordCountApp(
            self.bootstrap, self.application, self._lines, self._counts, folder, settings
        )
        self.apps.append(self._stack.enter_context(app))

    def kill(self) -> None:
        """One instance, while it works."""
        self.apps.pop(self._rng.randrange(len(self.apps))).kill()

    def write(self) -> None:
        for _ in range(LINES):
            words = self._rng.choices(WORDS, k=4)
            self.expected.update(words)
            self._producer.produce(self._lines, " ".join(words), key=str(self._rng.random()))
        self._producer.flush()

    def write_and_wait_for_some(self) -> None:
        """More lines, of which some are counted on return, but hardly all."""
        self.write()
        eventually(partial(self.reader.has_more_than, self.reader.total()), timeout_s=120)

    def check(self) -> None:
        """Everything is counted, and nothing twice."""
        expected = self.expected
        eventually(lambda: self.reader.total() >= expected.total(), timeout_s=120)
        found = {word: list(range(1, n + 1)) for word, n in expected.items()}
        assert self.reader.found == found


@pytest.mark.java
@pytest.mark.timeout(60 + 120 * STREAMS_KILLS)
@pytest.mark.parametrize("protocol", some(["streams", "classic"], test=1))
def test_words_are_counted_once_though_instances_are_killed(
    protocol: str, tmp_path: Path, seed: int
) -> None:
    with Broker() as broker, ExitStack() as stack:
        run = WordCounting(stack, broker.bootstrap, tmp_path, random.Random(seed))
        run.write()
        for _ in range(2):
            run.start(protocol)
        eventually(lambda: all(app.is_running for app in run.apps))
        for _ in range(STREAMS_KILLS):
            run.write_and_wait_for_some()
            run.kill()
            run.start(protocol)
        run.write()
        run.check()


@pytest.mark.proof
@pytest.mark.java
@pytest.mark.timeout(60 + 120 * STREAMS_KILLS)
def test_words_are_counted_once_though_the_broker_is_killed(tmp_path: Path, seed: int) -> None:
    """Its members go on in their group, with the tasks and epochs that they were told."""
    with BrokerProcess(tmp_path / "data") as broker, ExitStack() as stack:
        run = WordCounting(stack, broker.bootstrap, tmp_path, random.Random(seed))
        for _ in range(2):
            run.start("streams")
        eventually(lambda: all(app.is_running for app in run.apps))
        for _ in range(STREAMS_KILLS):
            run.write_and_wait_for_some()
            broker.kill()
            broker.start()
        run.write()
        run.check()
        assert all(app.is_running for app in run.apps)
