"""A random changelog in a topic, and the table that it says, read by another client."""

from __future__ import annotations

import json
import random
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from penstock.client.connection import Cluster
from penstock.client.topics import create

Row = dict[str, Any]


class Changelog:
    """Writes change events as capture does."""

    def __init__(self, bootstrap: str, topic: str, seed: int, *, partitions: int = 2) -> None:
        self._bootstrap = bootstrap
        self.topic = topic
        self._random = random.Random(seed)
        self._count = 0
        with Cluster(bootstrap) as cluster:
            create(cluster, topic, partitions=partitions)

    def feed(
        self, changes: int, *, keys: int = 200, extra: bool = False, bad: float = 0.02
    ) -> None:
        """So many changes: new rows, updates, deletions; a part `bad` cannot be read."""
        producer = Producer({"bootstrap.servers": self._bootstrap, "linger.ms": 5})
        for _ in range(changes):
            self._count += 1
            key = self._random.randrange(keys)
            row: Row = {"id": key, "name": f"name {self._count} 🦆", "amount": self._count / 4}
            if extra:
                row["note"] = f"note {self._count}"
            name = json.dumps({"id": key}).encode()
            chance = self._random.random()
            if chance < bad:
                numbered = [("n", str(self._count).encode())]
                value = b'{"op":"u","after":'
                producer.produce(self.topic, value, name, headers=list(numbered))
            elif chance < 0.2:
                gone = {"op": "d", "before": row, "after": None}
                producer.produce(self.topic, json.dumps(gone).encode(), name)
                producer.produce(self.topic, None, name)
            else:
                event = {"op": "u", "before": None, "after": row, "source": {"ts_ms": 1}}
                producer.produce(self.topic, json.dumps(event).encode(), name)
            producer.poll(0)
        assert producer.flush(60) == 0


def records(bootstrap: str, topic: str) -> list[Any]:
    """All records of a topic, by librdkafka."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "oracle",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    found = []
    try:
        for number in consumer.list_topics(topic, timeout=60).topics[topic].partitions:
            place = TopicPartition(topic, number, 0)
            _, end = consumer.get_watermark_offsets(place, timeout=60)
            consumer.assign([place])
            at = 0
            while at < end:
                message = consumer.poll(60)
                assert message is not None
                assert message.error() is None
                at = (message.offset() or 0) + 1
                found.append(message)
    finally:
        consumer.close()
    return found


def table(bootstrap: str, topic: str) -> dict[int, Row]:
    """What the changelog says."""
    rows: dict[int, Row] = {}
    for message in records(bootstrap, topic):
        key = json.loads(message.key() or b"")["id"]
        value = message.value()
        try:
            event = None if value is None else json.loads(value)
        except ValueError:
            continue
        if event is None or event["op"] == "d":
            rows.pop(key, None)
        else:
            rows[key] = event["after"]
    return rows
