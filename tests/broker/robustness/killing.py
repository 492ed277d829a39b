"""Kills a broker under load, starts it again and looks whether it has kept its word."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.testing.history import History, Place
from penstock.testing.process import BrokerProcess
from penstock.wire.messages.create_topics import CreatableTopicConfig, CreateTopicsRequest
from penstock.wire.messages.metadata import MetadataRequest
from tests.broker import requests as rq
from tests.broker.raw import RawClient
from tests.broker.robustness.disks import verify
from tests.broker.robustness.load import (
    IdempotentProducer,
    PlainProducer,
    StubbornProducer,
    TopicChurn,
    Worker,
)
from tests.broker.robustness.watch import eventually

TOPICS: Final[dict[str, dict[str, str]]] = {
    # Small segments: kills fall into rolls, retention and compaction all the time.
    "on-disk": {"durability": "disk", "segment_bytes": "40000"},
    "in-cache": {"durability": "os", "segment_bytes": "40000"},
    "short": {"durability": "disk", "segment_bytes": "20000", "retention_bytes": "60000"},
    "compacted": {
        "durability": "os", "segment_bytes": "20000", "cleanup_policy": "compact",
        "min_cleanable_dirty_ratio": "0.01",
    },
}  # fmt: skip
COMPACTED: Final = frozenset({"compacted"})


@dataclass
class Report:
    """What happened, for those who read the output."""

    lives: int = 0
    acknowledged: int = 0
    read: int = 0
    topics_made: int = 0
    topics_deleted: int = 0


def create(name: str, settings: dict[str, str]) -> CreateTopicsRequest:
    """A topic of two partitions; settings as keywords, with `_` for `.`."""
    request = rq.create(name, 2)
    request.topics[0].configs = [
        CreatableTopicConfig(name=key.replace("_", "."), value=value)
        for key, value in settings.items()
    ]
    return request


class KillTest:
    """A broker process, its load, and the history of both."""

    def __init__(
        self, data: Path, seed: int, topics: dict[str, dict[str, str]] = TOPICS, **settings: Any
    ) -> None:
        self.rng = random.Random(seed)
        self.history = History()
        self.report = Report()
        self.broker = BrokerProcess(data, housekeeping_interval_ms=50, **settings)
        self._seed = seed
        self._topics = topics
        self._workers: list[Worker] = []
        self._churn: TopicChurn | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """The broker with its topics, and the load on it; both are gone afterwards."""
        with self.broker:
            with RawClient(self.broker.bootstrap) as client:
                for name, settings in self._topics.items():
                    (made,) = client.call(create(name, settings)).topics
                    assert not made.error_code, made
            self._make_workers()
            for worker in self._workers:
                worker.start()
            try:
                yield
            finally:
                for worker in self._workers:
                    worker.stopping.set()
                for worker in self._workers:
                    worker.stop()

    def _make_workers(self) -> None:
        address, history, seed = self.broker.bootstrap, self.history, self._seed
        places = [Place(name, number) for name in self._topics for number in range(2)]
        lasting = [place for place in places if place.topic in {"on-disk", "in-cache"}]
        # Without acks=all only these promise anything when the process is killed.
        in_cache = [place for place in places if self._topics[place.topic]["durability"] == "os"]
        self._churn = TopicChurn(address, history, (seed, "churn"))
        self._workers = [
            IdempotentProducer(address, history, (seed, "idempotent"), lasting),
            PlainProducer(address, history, (seed, "all"), places, -1),
            PlainProducer(address, history, (seed, "one"), in_cache, 1),
            StubbornProducer(address, history, (seed, "stubborn"), Place("on-disk", 0)),
            self._churn,
        ]  # fmt: skip

    def kill_once(self) -> None:
        """Wait for some acknowledgements, kill, start, read everything and compare."""
        self.wait_for_load()
        self.broker.kill()
        while self.rng.random() < 0.25:
            # Again, somewhere in its recovery.
            self.broker.launch()
            threading.Event().wait(self.rng.uniform(0.1, 0.8))
            self.broker.kill()
            self.report.lives += 1
        self.broker.start()
        self.verify()
        self.report.lives += 1

    def wait_for_load(self) -> None:
        """Wait until some more records are acknowledged."""
        target = self.history.acknowledged_count + self.rng.randint(20, 400)
        eventually(lambda: self._has_come_to(target), "the load goes on", 120)

    def _has_come_to(self, acknowledged: int) -> bool:
        for worker in self._workers:
            worker.check()
        return self.history.acknowledged_count >= acknowledged

    def verify(self) -> None:
        """Everything that was acknowledged is there, where it was and as it was."""
        assert self._churn is not None
        with self._churn.still, RawClient(self.broker.bootstrap) as client:
            self._check_topics(self._churn, client)
            self.report.read = verify(client, self.history, compacted=COMPACTED)
        self.report.acknowledged = self.history.acknowledged_count
        self.report.topics_made, self.report.topics_deleted = self._churn.made, self._churn.deleted

    def stop_cleanly(self) -> None:
        """The end: a clean stop, and nothing in the log of all its lives that is a bug."""
        assert self.broker.stop() == 0
        log = self.broker.log_text()
        found = log.find("Traceback")
        assert found < 0, log[max(0, found - 500) : found + 3000]

    def _check_topics(self, churn: TopicChurn, client: RawClient) -> None:
        """Topics whose making or deletion was answered are there, or not."""
        there = {topic.name for topic in client.call(MetadataRequest(topics=None)).topics}
        for name, state in churn.states.items():
            if state == "unknown":
                churn.settle(name, there=name in there)
            else:
                assert (name in there) == (state == "there"), f"{name} is not {state}"
