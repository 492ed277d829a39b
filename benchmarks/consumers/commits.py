"""How many committed offsets a second: consumers that each wait for every commit."""

from __future__ import annotations

import threading
from time import perf_counter

from confluent_kafka import Consumer, TopicPartition

from benchmarks.consumers.kafka import create_topic


class _Committer(threading.Thread):
    def __init__(self, bootstrap: str, topic: str, number: int, seconds: float) -> None:
        super().__init__(daemon=True)
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": f"committers-{topic}-{number}",
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )
        self._place = (topic, number)
        self._seconds = seconds
        self.done = 0
        self.took_s = 0.0

    def run(self) -> None:
        topic, number = self._place
        # The first one looks for the coordinator.
        self._consumer.commit(offsets=[TopicPartition(topic, number, 0)], asynchronous=False)
        begun = perf_counter()
        while (now := perf_counter()) < begun + self._seconds:
            offset = TopicPartition(topic, number, self.done + 1)
            self._consumer.commit(offsets=[offset], asynchronous=False)
            self.done += 1
        self.took_s = now - begun
        self._consumer.close()


def measure(bootstrap: str, consumers: int, seconds: float, name: str) -> float:
    """Commits a second of all consumers together."""
    topic = f"commits-{name}"
    create_topic(bootstrap, topic, consumers)
    group = [_Committer(bootstrap, topic, at, seconds) for at in range(consumers)]
    for one in group:
        one.start()
    for one in group:
        one.join()
    return sum(one.done / one.took_s for one in group if one.took_s)
