"""Transactions with the client libraries that people use: confluent-kafka, aiokafka and Java.

librdkafka and aiokafka speak the older form, Apache Kafka's Java client the newer one, or the
older where the broker does not offer more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import monotonic
from typing import Any, Final
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AsyncPartition
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from penstock.testing.broker import Broker
from penstock.testing.java import JavaClientError
from penstock.testing.java_client import JavaClient, NewRecord
from penstock.testing.kafka_tools import KafkaTools
from tests.broker.raw import RawClient
from tests.broker.transactions.raw_producer import read
from tests.broker.waits import wait_until

TIMEOUT_S: Final = 60.0
TRANSFORMED: Final = 60


@pytest.fixture
def name() -> str:
    return f"txn-{uuid4().hex[:8]}"


def confluent(broker: Broker, name: str, **settings: Any) -> Producer:
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "transactional.id": name,
            "linger.ms": 0,
            "log_level": 0,
            **settings,
        }
    )
    producer.init_transactions(TIMEOUT_S)
    return producer


def send(producer: Producer, topic: str, *values: bytes) -> None:
    for value in values:
        producer.produce(topic, value)
    assert not producer.flush(TIMEOUT_S)


# ---- confluent-kafka ---------------------------------------------------------------------


def test_confluent_commits_and_aborts(
    shared: Broker, client: RawClient, topic: str, name: str
) -> None:
    producer = confluent(shared, name)
    producer.begin_transaction()
    send(producer, topic, b"a", b"b")
    assert read(client, topic) == []
    producer.commit_transaction(TIMEOUT_S)
    assert read(client, topic) == [b"a", b"b"]
    producer.begin_transaction()
    send(producer, topic, b"void")
    producer.abort_transaction(TIMEOUT_S)
    producer.begin_transaction()
    send(producer, topic, b"c")
    producer.commit_transaction(TIMEOUT_S)
    assert read(client, topic) == [b"a", b"b", b"c"]
    assert read(client, topic, committed=False) == [b"a", b"b", b"void", b"c"]


def test_confluent_is_fenced_by_its_successor(
    shared: Broker, client: RawClient, topic: str, name: str
) -> None:
    zombie = confluent(shared, name)
    zombie.begin_transaction()
    send(zombie, topic, b"lost")
    successor = confluent(shared, name)
    successor.begin_transaction()
    send(successor, topic, b"good")
    with pytest.raises(KafkaException) as caught:
        zombie.commit_transaction(TIMEOUT_S)
    assert caught.value.args[0].fatal()
    successor.commit_transaction(TIMEOUT_S)
    assert read(client, topic) == [b"good"]


def test_confluent_goes_on_after_its_transaction_took_too_long(
    shared: Broker, client: RawClient, topic: str, name: str
) -> None:
    producer = confluent(shared, name, **{"transaction.timeout.ms": 1_000})
    producer.begin_transaction()
    send(producer, topic, b"late")
    wait_until(
        shared,
        lambda server: server.coordination.transactions.transactions[name].state == "CompleteAbort",
    )
    with pytest.raises(KafkaException):
        producer.commit_transaction(TIMEOUT_S)
    assert read(client, topic) == []
    again = confluent(shared, name)
    again.begin_transaction()
    send(again, topic, b"in time")
    again.commit_transaction(TIMEOUT_S)
    assert read(client, topic) == [b"in time"]


def test_confluent_consumes_transforms_and_produces_over_a_restart(name: str) -> None:
    """Each input record gives one output record, exactly once, though the broker is killed."""
    with Broker(default_partitions=2) as broker:
        source = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0})
        for number in range(TRANSFORMED):
            source.produce("in", b"%d" % number)
        assert not source.flush(TIMEOUT_S)
        done = transform(broker, name, stop_after=TRANSFORMED // 2)
        broker.crash()
        broker.start()
        done += transform(broker, name, stop_after=TRANSFORMED - done)
        assert done == TRANSFORMED
        with RawClient(broker.bootstrap) as client:
            seen = read(client, "out", 0) + read(client, "out", 1)
        assert sorted(seen) == sorted(b"%d!" % number for number in range(TRANSFORMED))


def transform(broker: Broker, name: str, *, stop_after: int) -> int:
    """Read `in`, write `out`, a few records in each transaction; every third is aborted."""
    producer = confluent(broker, name)
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": name,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "session.timeout.ms": 6_000,
            "log_level": 0,
        }
    )
    consumer.subscribe(["in"])
    done = attempts = 0
    deadline = monotonic() + TIMEOUT_S
    while done < stop_after:
        assert monotonic() < deadline, f"{done} of {stop_after}"
        messages = consumer.consume(min(5, stop_after - done), 0.2)
        if not messages:
            continue
        attempts += 1
        producer.begin_transaction()
        for message in messages:
            producer.produce("out", (message.value() or b"") + b"!")
        positions = consumer.position(consumer.assignment())
        read_so_far = [place for place in positions if place.offset >= 0]
        metadata = consumer.consumer_group_metadata()
        producer.send_offsets_to_transaction(read_so_far, metadata, TIMEOUT_S)
        if attempts % 3:
            producer.commit_transaction(TIMEOUT_S)
            done += len(messages)
            continue
        producer.abort_transaction(TIMEOUT_S)
        for place in consumer.committed(consumer.assignment(), TIMEOUT_S):
            start = max(place.offset, 0)
            consumer.seek(TopicPartition(place.topic, place.partition, start))
    consumer.close()
    return done


# ---- aiokafka ----------------------------------------------------------------------------


def test_aiokafka_commits_aborts_and_sends_offsets(
    shared: Broker, client: RawClient, topic: str, name: str
) -> None:
    place = AsyncPartition(topic, 0)

    async def run() -> tuple[int | None, list[bytes | None]]:
        producer = AIOKafkaProducer(bootstrap_servers=shared.bootstrap, transactional_id=name)
        await producer.start()
        try:
            async with producer.transaction():
                await producer.send_and_wait(topic, b"a")
                await producer.send_offsets_to_transaction({place: 5}, f"g-{name}")
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"void")
            await producer.abort_transaction()
            async with producer.transaction():
                await producer.send_and_wait(topic, b"b")
        finally:
            await producer.stop()
        consumer = AIOKafkaConsumer(
            bootstrap_servers=shared.bootstrap,
            group_id=f"g-{name}",
            enable_auto_commit=False,
            isolation_level="read_committed",
        )
        await consumer.start()
        try:
            consumer.assign([place])
            committed = await consumer.committed(place)
            consumer.seek(place, 0)
            values = [(await consumer.getone()).value for _ in range(2)]
        finally:
            await consumer.stop()
        return committed, values

    assert asyncio.run(run()) == (5, [b"a", b"b"])
    assert read(client, topic) == [b"a", b"b"]


# ---- Java --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 2], ids=["older", "newer"])
def offering(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A broker that offers the older form of transactions only, and one that offers both."""
    with Broker(transaction_version=request.param) as broker:
        yield broker


@pytest.fixture
def java(offering: Broker, kafka_tools: KafkaTools) -> Iterator[JavaClient]:
    with kafka_tools.java_client(offering.bootstrap) as client:
        yield client


def values_of(java: JavaClient, topic: str, *, read_committed: bool = True) -> list[bytes | None]:
    return [record.value for record in java.consume(topic, read_committed=read_committed)]


def test_java_commits_and_aborts(offering: Broker, java: JavaClient, name: str) -> None:
    topic, config = f"t-{name}", {"transactional.id": name}
    java.create_topic(topic, 1)
    epochs = []
    for values, end in ((b"ab", "commit"), (b"c", "abort"), (b"d", "commit")):
        java.produce(topic, [NewRecord(bytes([v])) for v in values], config, transaction=end)
        epochs.append(
            offering.call(
                lambda server: server.coordination.transactions.transactions[name].ids.epoch
            )
        )
    assert values_of(java, topic) == [b"a", b"b", b"d"]
    assert values_of(java, topic, read_committed=False) == [b"a", b"b", b"c", b"d"]
    # The newer form takes another epoch with each end.
    newer = offering.config.transaction_version == 2
    assert epochs == ([1, 2, 3] if newer else [0, 0, 0])


def test_java_is_fenced(offering: Broker, java: JavaClient, name: str) -> None:
    topic, config = f"t-{name}", {"transactional.id": name}
    java.create_topic(topic, 1)
    java.produce(topic, [NewRecord(b"a")], config, transaction="commit")
    other = {**config, "client.id": "another"}
    java.produce(topic, [NewRecord(b"b")], other, transaction="commit")
    with pytest.raises(JavaClientError):
        java.produce(topic, [NewRecord(b"zombie")], config, transaction="commit")
    assert values_of(java, topic) == [b"a", b"b"]
