"""All records of a topic, as another client than ours reads them: what tests compare with.

librdkafka, by way of confluent-kafka, knows nothing of how Penstock writes. It is asked for the end
of each partition; a fetch at the end answers at once, so that nobody waits half a second for it.

Apache Kafka tells of a commit before all partitions know of it. So where committed records end
before the log does, there is a short wait: the rest may be of a transaction that is still open.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from penstock.errors import PenstockError

TIMEOUT_S: Final = 60.0
# How long the end of transactions may take to arrive.
SETTLE_S: Final = 1.0
_READING: Final = {
    "group.id": "penstock-testing",
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "earliest",
    # How long the broker waits for more at the end, which is nothing to wait for.
    "fetch.wait.max.ms": 1,
    "fetch.error.backoff.ms": 20,
    "log_level": 0,
}


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A record as it was read from a topic."""

    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes | None]
    timestamp: datetime
    partition: int
    offset: int

    def json(self) -> Any:
        return None if self.value is None else json.loads(self.value)


Isolation = Literal["read_committed", "read_uncommitted"]


def read_topic(bootstrap: str, topic: str) -> list[TopicRecord]:
    """All committed records that are there now, by partition and offset."""
    return [_record(each) for each in read_messages(bootstrap, topic)]


def read_messages(
    bootstrap: str,
    topic: str,
    *,
    isolation: Isolation = "read_committed",
    timeout_s: float = TIMEOUT_S,
) -> list[Message]:
    """The same as confluent-kafka's own messages; none if there is no such topic."""
    consumer = Consumer({**_READING, "bootstrap.servers": bootstrap, "isolation.level": isolation})
    try:
        known = consumer.list_topics(topic, timeout=timeout_s).topics[topic]
        if known.error is not None:
            return []
        ends = _ends(bootstrap, topic, sorted(known.partitions), timeout_s)
        consumer.assign([TopicPartition(topic, number, 0) for number in ends])
        found = _read(consumer, topic, ends, timeout_s)
    finally:
        consumer.close()
    return sorted(found, key=lambda each: (each.partition() or 0, each.offset() or 0))


def _ends(bootstrap: str, topic: str, numbers: list[int], timeout_s: float) -> dict[int, int]:
    """Where the log of each partition ends, with what is not committed."""
    consumer = Consumer(
        {**_READING, "bootstrap.servers": bootstrap, "isolation.level": "read_uncommitted"}
    )
    try:
        places = [TopicPartition(topic, number) for number in numbers]
        return {each.partition: consumer.get_watermark_offsets(each, timeout_s)[1]
                for each in places}  # fmt: skip
    finally:
        consumer.close()


def _read(consumer: Consumer, topic: str, ends: dict[int, int], timeout_s: float) -> list[Message]:
    found: list[Message] = []
    began = time.monotonic()
    # Partitions to be read on, and those of them whose committed records have come to an end.
    left, behind = set(ends), set[int]()
    while left and not (left == behind and time.monotonic() - began > SETTLE_S):
        if time.monotonic() - began > timeout_s:
            raise PenstockError(f"topic {topic} could not be read to its end: {len(found)} records")
        message = consumer.poll(0.1)
        if message is None:
            continue
        number, error = message.partition() or 0, message.error()
        if error is None:
            found.append(message)
            behind.discard(number)
        elif error.code() != KafkaError._PARTITION_EOF:
            raise PenstockError(f"reading {topic}: {error.str()}")
        elif (message.offset() or 0) >= ends[number]:
            left.discard(number)
            behind.discard(number)
        else:
            behind.add(number)
    return found


def _record(message: Message) -> TopicRecord:
    headers: Any = message.headers() or ()
    return TopicRecord(
        message.key(),
        message.value(),
        dict(headers),
        datetime.fromtimestamp(message.timestamp()[1] / 1000, UTC),
        message.partition() or 0,
        message.offset() or 0,
    )
