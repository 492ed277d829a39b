"""What tests of Spark share: topics, records, another client's view of them, and queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from confluent_kafka import KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.testing.reading import Isolation, read_messages

# Two slow cores may run two Sparks at once.
PATIENCE_S = 120.0
# librdkafka tells of every connection that a stopped broker closes.
_QUIET = {"log_level": 0}


class Served(Protocol):
    """A broker of either kind: ours, or Apache Kafka."""

    @property
    def bootstrap(self) -> str: ...


class Record(NamedTuple):
    """A record as clients see it."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: tuple[tuple[str, bytes | None], ...] = ()


def client(broker: Served, **settings: Any) -> dict[str, Any]:
    return {"bootstrap.servers": broker.bootstrap, **_QUIET, **settings}


def create(broker: Served, topic: str, partitions: int = 1, **config: str) -> None:
    settings = {name.replace("_", "."): value for name, value in config.items()}
    admin = AdminClient(client(broker))
    made = admin.create_topics([NewTopic(topic, partitions, 1, config=settings)])
    made[topic].result(PATIENCE_S)


def add_partitions(broker: Served, topic: str, total: int) -> None:
    admin = AdminClient(client(broker))
    admin.create_partitions([NewPartitions(topic, total)])[topic].result(PATIENCE_S)


def delete(broker: Served, topic: str) -> None:
    admin = AdminClient(client(broker))
    admin.delete_topics([topic])[topic].result(PATIENCE_S)


def delete_records(broker: Served, topic: str, partition: int, before: int) -> None:
    """As retention does: the log starts at `before` then."""
    place = TopicPartition(topic, partition, before)
    admin = AdminClient(client(broker))
    admin.delete_records([place])[place].result(PATIENCE_S)


def feed(
    broker: Served,
    topic: str,
    records: Sequence[tuple[bytes | None, bytes | None]],
    *,
    partition: int | None = None,
    headers: Sequence[tuple[str, bytes | None]] = (),
    timestamp_ms: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write records and wait until they are there."""
    producer = Producer(client(broker, **(settings or {})))
    failed: list[KafkaError] = []
    extra: dict[str, Any] = {}
    if partition is not None:
        extra["partition"] = partition
    if timestamp_ms is not None:
        extra["timestamp"] = timestamp_ms
    if headers:
        extra["headers"] = list(headers)
    for key, value in records:
        producer.produce(
            topic,
            value,
            key,
            on_delivery=lambda error, _: failed.append(error) if error else None,
            **extra,
        )
    assert producer.flush(PATIENCE_S) == 0
    assert not failed, failed


def feed_transaction(
    broker: Served, topic: str, values: Sequence[bytes], *, commit: bool, name: str
) -> None:
    producer = Producer(client(broker, **{"transactional.id": name}))
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, partition=0)
    producer.flush(PATIENCE_S)
    if commit:
        producer.commit_transaction(PATIENCE_S)
    else:
        producer.abort_transaction(PATIENCE_S)


def consumed(broker: Served, topic: str, isolation: Isolation = "read_committed") -> list[Record]:
    """All records, as confluent-kafka reads them."""
    return as_read(read_messages(broker.bootstrap, topic, isolation=isolation))


def as_read(messages: Sequence[Message]) -> list[Record]:
    """Messages of confluent-kafka as records that can be compared."""
    return [
        Record(
            message.partition() or 0,
            message.offset() or 0,
            message.key(),
            message.value(),
            message.timestamp()[1],
            tuple(cast(Any, message.headers()) or ()),
        )
        for message in messages
    ]


def as_record(row: Row) -> Record:
    headers: tuple[tuple[str, bytes | None], ...] = ()
    if "headers" in row:
        headers = tuple((item.key, _bytes(item.value)) for item in row.headers or ())
    millis = round(row.timestamp.timestamp() * 1000)
    return Record(row.partition, row.offset, _bytes(row.key), _bytes(row.value), millis, headers)


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)


def in_order(rows: Sequence[Row]) -> list[Record]:
    return sorted(map(as_record, rows), key=lambda record: record[:2])


def table(spark: SparkSession, broker: Served, topic: str, **options: Any) -> DataFrame:
    return (
        spark.read.format("penstock")
        .option("kafka.bootstrap.servers", broker.bootstrap)
        .options(**{"subscribe": topic, **options})
        .load()
    )


def stream(spark: SparkSession, broker: Served, topic: str | None, **options: Any) -> DataFrame:
    chosen = {} if topic is None else {"subscribe": topic}
    return (
        spark.readStream.format("penstock")
        .option("kafka.bootstrap.servers", broker.bootstrap)
        .options(**{"startingOffsets": "earliest", **chosen, **options})
        .load()
    )


class Collected:
    """A running query, and the rows of each of its micro-batches."""

    def __init__(self, frame: DataFrame, checkpoint: Path, **trigger: Any) -> None:
        self.batches: dict[int, list[Row]] = {}
        self.query: StreamingQuery = (
            frame.writeStream.foreachBatch(self._take)
            .option("checkpointLocation", str(checkpoint))
            .trigger(**(trigger or {"availableNow": True}))
            .start()
        )

    def _take(self, frame: DataFrame, number: int) -> None:
        self.batches[number] = frame.collect()

    def finish(self) -> list[Record]:
        """Wait for the end of an AvailableNow query."""
        assert self.query.awaitTermination(int(PATIENCE_S)), "it does not end"
        return self.records()

    def records(self) -> list[Record]:
        return in_order([row for rows in self.batches.values() for row in rows])

    def stop(self) -> None:
        self.query.stop()
