"""How long a group takes from joining to reading: members that all start at once.

Each member notes when it has its first record. There are as many partitions as in the largest
group, each with one record, so everyone gets something to read. What counts is the last member.
"""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any

from confluent_kafka import Consumer

from benchmarks.consumers.kafka import create_topic, produce_to_each

PARTITIONS = 50
PATIENCE_S = 90.0


class _Member(threading.Thread):
    def __init__(self, bootstrap: str, group: str, topic: str, protocol: str) -> None:
        super().__init__(daemon=True)
        settings: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "group.protocol": protocol,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
        self._consumer = Consumer(settings)
        self._topic = topic
        self._over = threading.Event()
        self.first_at: float | None = None
        self.ready = threading.Event()

    def run(self) -> None:
        self._consumer.subscribe([self._topic])
        while not self._over.is_set():
            message = self._consumer.poll(0.1)
            if message is not None and message.error() is None and self.first_at is None:
                self.first_at = perf_counter()
                self.ready.set()
        self._consumer.close()

    def stop(self) -> None:
        self._over.set()


def measure(bootstrap: str, members: int, protocol: str, name: str) -> float:
    """Seconds until the last of the members has its first record."""
    topic = f"rebalance-{name}"
    create_topic(bootstrap, topic, PARTITIONS)
    produce_to_each(bootstrap, topic, PARTITIONS)
    group = [_Member(bootstrap, f"group-{name}", topic, protocol) for _ in range(members)]
    begun = perf_counter()
    for member in group:
        member.start()
    deadline = begun + PATIENCE_S
    complete = all(member.ready.wait(max(deadline - perf_counter(), 0)) for member in group)
    for member in group:
        member.stop()
    for member in group:
        member.join()
    firsts = [member.first_at for member in group if member.first_at is not None]
    if not complete:
        raise RuntimeError(f"only {len(firsts)} of {members} members got a record")
    return max(firsts) - begun
