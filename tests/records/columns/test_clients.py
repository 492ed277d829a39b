"""Other clients' batches into columns, and ours into other clients: through a real broker."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from penstock.records import compression
from penstock.records.columns.decode import Decoded, decode
from penstock.records.columns.encode import from_lists
from penstock.records.columns.partition import partitions_of
from penstock.testing.broker import Broker
from tests.broker.protocol_client import BY_NAME_VERSION, ProtocolClient
from tests.broker.requests import fetch, one

with warnings.catch_warnings():
    # It reads its schemas by a function that Python 3.11 calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import KafkaConsumer
    from kafka import TopicPartition as PythonPartition

CODECS = sorted(compression.CODES)
TIMEOUT_S = 60.0
Row = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int]
# Of now: the broker deletes what is older than a week.
NOW_MS = int(time.time() * 1000)
ROWS: list[Row] = [
    (
        None if i % 7 == 0 else b"key %d" % i,
        None if i % 5 == 0 else b"value %d " % i * (i % 40),
        [("first", b"%d" % i), ("second", None)][: i % 3],
        NOW_MS + i * 17 % 100,
    )
    for i in range(300)
]


@pytest.fixture(scope="module")
def client() -> Iterator[ProtocolClient]:
    with Broker() as broker, closing(ProtocolClient(broker.bootstrap)) as connected:
        yield connected


def read(
    client: ProtocolClient, topic: str, end: int, *, partition: int = 0, committed: bool = False
) -> list[Row]:
    """The whole partition up to `end`; waits until it is there."""
    rows: list[Row] = []
    at = 0
    deadline = time.monotonic() + TIMEOUT_S
    while at < end:
        assert time.monotonic() < deadline, f"{at} of {end}"
        level = int(committed)
        asked = fetch(topic, {partition: at}, max_wait_ms=100, isolation_level=level)
        found = one(client.call(asked, BY_NAME_VERSION))
        aborted = [(a.producer_id, a.first_offset) for a in found.aborted_transactions or ()]
        decoded = decode(found.records or b"", first_offset=at, aborted=aborted, headers=True)
        rows += as_rows(decoded)
        at = decoded.next_offset
    assert at == end
    return rows


def as_rows(decoded: Decoded) -> list[Row]:
    decoded.batch.validate(full=True)
    times = decoded.batch["timestamp"].cast(pa.timestamp("ms", tz="UTC")).cast(pa.int64())
    return [
        (row["key"], row["value"], [(h["key"], h["value"]) for h in row["headers"]], at)
        for row, at in zip(decoded.batch.to_pylist(), times.to_pylist(), strict=True)
    ]


def produce(producer: Producer, topic: str, rows: list[Row], partition: int = -1) -> None:
    for key, value, headers, at in rows:
        listed: list[Any] = list(headers)
        producer.produce(
            topic, value, key, partition=partition, headers=listed or None, timestamp=at
        )


@pytest.mark.parametrize("codec", CODECS)
def test_librdkafka_writes_and_we_decode(client: ProtocolClient, codec: str) -> None:
    topic = client.topic()
    producer = Producer(
        {"bootstrap.servers": client.bootstrap, "compression.type": codec, "linger.ms": 20}
    )
    produce(producer, topic, ROWS, partition=0)
    assert producer.flush(TIMEOUT_S) == 0
    assert read(client, topic, len(ROWS)) == ROWS


@pytest.mark.parametrize("codec", CODECS)
def test_we_encode_and_others_read(client: ProtocolClient, codec: str) -> None:
    topic = client.topic()
    packed = from_lists(
        [row[0] for row in ROWS],
        [row[1] for row in ROWS],
        headers=[row[2] for row in ROWS],
        timestamps_ms=[row[3] for row in ROWS],
        codec=codec,
        max_batch_bytes=9000,
    )
    assert len(packed) > 3
    client.fill(topic, *(batch.data for batch in packed))
    assert read_by_librdkafka(client.bootstrap, topic, len(ROWS)) == ROWS
    if codec in {"none", "gzip"}:
        assert read_by_kafka_python(client.bootstrap, topic, len(ROWS)) == ROWS


def read_by_librdkafka(bootstrap: str, topic: str, count: int) -> list[Row]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "none",
            "enable.auto.commit": False,
            "check.crcs": True,
        }
    )
    found: list[Row] = []
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        deadline = time.monotonic() + TIMEOUT_S
        while len(found) < count and time.monotonic() < deadline:
            for message in consumer.consume(count - len(found), 1.0):
                assert message.error() is None
                headers: list[Any] = list(message.headers() or [])
                found.append((message.key(), message.value(), headers, message.timestamp()[1]))  # type: ignore[arg-type, unused-ignore]
    finally:
        consumer.close()
    return found


def read_by_kafka_python(bootstrap: str, topic: str, count: int) -> list[Row]:
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, check_crcs=True)
    found: list[Row] = []
    try:
        consumer.assign([PythonPartition(topic, 0)])
        consumer.seek_to_beginning()
        deadline = time.monotonic() + TIMEOUT_S
        while len(found) < count and time.monotonic() < deadline:
            for records in consumer.poll(timeout_ms=1000).values():
                found += [(r.key, r.value, list(r.headers), r.timestamp) for r in records]
    finally:
        consumer.close()
    return found


def test_transactions_of_librdkafka(client: ProtocolClient) -> None:
    topic = client.topic()
    producer = Producer({"bootstrap.servers": client.bootstrap, "transactional.id": topic})
    producer.init_transactions(TIMEOUT_S)
    expected: list[Row] = []
    for number, commit in enumerate([True, False, False, True, False]):
        rows = ROWS[number * 20 : number * 20 + 20]
        producer.begin_transaction()
        produce(producer, topic, rows, partition=0)
        assert producer.flush(TIMEOUT_S) == 0
        if commit:
            producer.commit_transaction(TIMEOUT_S)
            expected += rows
        else:
            producer.abort_transaction(TIMEOUT_S)
    # Twenty records and a marker each.
    assert read(client, topic, 105, committed=True) == expected
    assert len(read(client, topic, 105)) == 100


def test_keys_go_where_librdkafka_puts_them(client: ProtocolClient) -> None:
    topic = client.topic(partitions=5)
    client.wait_served(topic, 5)
    keys = [b"%d" % i * (i % 9 + 1) for i in range(200)]
    producer = Producer({"bootstrap.servers": client.bootstrap, "partitioner": "murmur2_random"})
    produce(producer, topic, [(key, b"", [], NOW_MS) for key in keys])
    assert producer.flush(TIMEOUT_S) == 0
    placed = partitions_of(pa.array(keys, pa.binary()), 5).tolist()
    for partition in range(5):
        expected = [key for key, at in zip(keys, placed, strict=True) if at == partition]
        found = read(client, topic, len(expected), partition=partition)
        assert [row[0] for row in found] == expected
