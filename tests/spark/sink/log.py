"""Topics and what is in them, for tests of the sink on any broker."""

from __future__ import annotations

import warnings
from typing import Any
from uuid import uuid4

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.client import topics
from penstock.client.connection import Cluster
from penstock.client.metadata import LATEST, offsets
from penstock.spark.sink import marks
from tests.spark.feeding import PATIENCE_S, Record

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kafka.partitioner.default import murmur2


def partition_of(key: bytes, count: int) -> int:
    """Where another client puts a key."""
    return int((murmur2(key) & 0x7FFFFFFF) % count)


def make_topic(bootstrap: str, partitions: int = 3, **config: str) -> str:
    name = f"out-{uuid4().hex[:12]}"
    settings = {key.replace("_", "."): value for key, value in config.items()}
    with Cluster(bootstrap) as cluster:
        topics.create(cluster, name, partitions=partitions, config=settings)
    return name


def committed(bootstrap: str, topic: str) -> list[Record]:
    """All committed records, as another client reads them."""
    settings: dict[str, Any] = {
        "bootstrap.servers": bootstrap,
        "group.id": "none",
        "enable.partition.eof": True,
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "log_level": 0,
    }
    consumer = Consumer(settings)
    described = consumer.list_topics(topic, PATIENCE_S).topics[topic]
    consumer.assign(
        [TopicPartition(topic, part, OFFSET_BEGINNING) for part in described.partitions]
    )
    at_end: set[int] = set()
    found: list[Record] = []
    while len(at_end) < len(described.partitions):
        message = consumer.poll(PATIENCE_S)
        assert message is not None, f"nothing after {len(found)} records of {topic}"
        error = message.error()
        if error is not None:
            assert error.code() == KafkaError._PARTITION_EOF, error
            at_end.add(message.partition() or 0)
            continue
        headers: Any = message.headers() or ()
        found.append(
            Record(
                message.partition() or 0,
                message.offset() or 0,
                message.key(),
                message.value(),
                message.timestamp()[1],
                tuple(headers),
            )
        )
    consumer.close()
    return sorted(found, key=lambda record: record[:2])


def finished(writer: DataStreamWriter) -> StreamingQuery:
    """Run a stream over all that is there, to its end.

    Spark gives the Python process of a source ten seconds to start, which is not always enough on
    a machine that is busy; then one starts the query again.
    """
    for _ in range(5):
        query = writer.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(200)
        except StreamingQueryException as error:
            if "failed to connect back" not in str(error):
                raise
        else:
            return query
    raise AssertionError("no Python process of the source has started in time")


def values(bootstrap: str, topic: str) -> list[bytes | None]:
    return sorted((record.value for record in committed(bootstrap, topic)), key=lambda v: v or b"")


def end_of_marks(bootstrap: str) -> int:
    place = (marks.TOPIC, marks.PARTITION)
    with Cluster(bootstrap) as cluster:
        marks.make_topic(cluster)
        return offsets(cluster, {place: LATEST}, isolation="read_uncommitted")[place]
