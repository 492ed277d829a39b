"""Kafka's own Streams library on the embedded broker: words counted exactly once, under kills.

Two instances of an application share its tasks; one is killed while it works, another takes its
place. Every change of a count is written, so the counts of a word must be 1, 2, 3 and so on to the
number that a plain count of the lines gives: nothing lost, nothing twice.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import Consumer, Producer

from penstock.testing.broker import Broker
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


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker() as broker:
        yield broker


@pytest.mark.java
@pytest.mark.timeout(60 + 120 * STREAMS_KILLS)
@pytest.mark.parametrize("protocol", some(["streams", "classic"], test=1))
def test_words_are_counted_once_though_instances_are_killed(
    broker: Broker, protocol: str, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    lines, counts, application = new_name("lines"), new_name("counts"), new_name("app")
    with RawClient(broker.bootstrap) as client:
        client.call(create(lines, 3))
        client.call(create(counts, 2))
    set_group(
        broker,
        application,
        streams_session_timeout_ms=str(SESSION_MS),
        streams_heartbeat_interval_ms="500",
        streams_initial_rebalance_delay_ms="500",
    )
    settings = {
        **SETTINGS,
        "group.protocol": protocol,
        **(CLASSIC if protocol == "classic" else {}),
    }
    producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    expected = Counter[str]()

    def write_lines() -> None:
        for _ in range(LINES):
            words = rng.choices(WORDS, k=4)
            expected.update(words)
            producer.produce(lines, " ".join(words), key=str(rng.random()))
        producer.flush()

    numbers = count(1)
    with ExitStack() as stack:
        reader = Counts(broker.bootstrap, counts)
        stack.callback(reader.close)

        def start() -> WordCountApp:
            folder = tmp_path / f"instance-{next(numbers)}"
            return stack.enter_context(
                WordCountApp(broker.bootstrap, application, lines, counts, folder, settings)
            )

        write_lines()
        apps = [start(), start()]
        eventually(lambda: all(app.is_running for app in apps))
        for _ in range(STREAMS_KILLS):
            write_lines()
            # While it works: some of what was written is counted, not all.
            eventually(partial(reader.has_more_than, reader.total()))
            apps.pop(rng.randrange(2)).kill()
            apps.append(start())
        write_lines()
        eventually(lambda: reader.total() >= expected.total(), timeout_s=120)
        assert all(app.states for app in apps)
    assert reader.found == {word: list(range(1, n + 1)) for word, n in expected.items()}
