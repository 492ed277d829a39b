"""Retention, compaction and the archive as a client sees them, on a running broker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.log.partition import Partition, PartitionId
from penstock.testing import Broker

PATIENCE_S = 60.0
VALUE = b"v" * 500
# What is written is recent, so the times of records can be told from now.
FIRST_MS = 1_700_000_000_000


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(archive=str(tmp_path / "archive"), housekeeping_interval_ms=20) as broker:
        yield broker


def create(broker: Broker, topic: str, **settings: str) -> None:
    config = {name.replace("_", "."): value for name, value in settings.items()}
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1, config=config)])[topic].result(PATIENCE_S)


def produce(broker: Broker, topic: str, count: int, keys: int) -> None:
    # Without batching, so that there is something to cut between records.
    producer = Producer({"bootstrap.servers": broker.bootstrap, "batch.num.messages": 10})
    for number in range(count):
        key = b"k%d" % (number % keys)
        producer.produce(topic, VALUE + b"%d" % number, key=key, timestamp=FIRST_MS + number)
    assert producer.flush(PATIENCE_S) == 0


def consume(broker: Broker, topic: str, until_offset: int) -> list[Message]:
    consumer = Consumer(
        {"bootstrap.servers": broker.bootstrap, "group.id": "none", "auto.offset.reset": "error"}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[Message] = []
    while not found or (found[-1].offset() or 0) < until_offset:
        message = consumer.poll(PATIENCE_S)
        assert message is not None, f"nothing after {len(found)} records"
        assert message.error() is None, message.error()
        found.append(message)
    consumer.close()
    return found


def wait_for(broker: Broker, topic: str, condition: Callable[[Partition], bool]) -> Any:
    """Until the partition is as wanted; housekeeping gets it there."""
    id_ = PartitionId(topic, 0)
    pause = threading.Event()
    for _ in range(int(PATIENCE_S * 50)):
        if broker.call(lambda server: condition(server.store.partitions[id_])):
            return
        pause.wait(0.02)
    pytest.fail(f"{broker.call(lambda server: repr(server.store.partitions[id_]))} stayed so")


def test_archived_records_are_still_read(broker: Broker) -> None:
    create(
        broker,
        "events",
        segment_bytes="20000",
        remote_storage_enable="true",
        local_retention_bytes="0",
        retention_ms="-1",
    )
    produce(broker, "events", 400, keys=400)
    wait_for(broker, "events", lambda partition: partition.segments[0].base_offset > 300)
    found = consume(broker, "events", until_offset=399)
    assert [message.offset() for message in found] == list(range(400))
    assert [message.value() for message in found] == [VALUE + b"%d" % at for at in range(400)]
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "none"})
    wanted = TopicPartition("events", 0, FIRST_MS + 123)
    assert consumer.offsets_for_times([wanted], PATIENCE_S)[0].offset == 123
    assert consumer.get_watermark_offsets(TopicPartition("events", 0)) == (0, 400)
    consumer.close()
    broker.restart()
    assert len(consume(broker, "events", until_offset=399)) == 400


@pytest.mark.processes
def test_compaction_keeps_the_latest_record_of_each_key(broker: Broker) -> None:
    create(
        broker,
        "table",
        cleanup_policy="compact",
        segment_bytes="20000",
        min_cleanable_dirty_ratio="0.01",
    )
    produce(broker, "table", 2000, keys=10)
    wait_for(broker, "table", lambda partition: partition.size_bytes < 200_000)
    found = consume(broker, "table", until_offset=1999)
    offsets = [message.offset() or 0 for message in found]
    assert offsets == sorted(offsets)
    latest = {message.key(): message.value() for message in found}
    assert latest == {b"k%d" % (at % 10): VALUE + b"%d" % at for at in range(1990, 2000)}
    assert all(message.value() == VALUE + b"%d" % (message.offset() or 0) for message in found)


def test_retention_by_size_removes_the_oldest(broker: Broker) -> None:
    create(broker, "ring", segment_bytes="20000", retention_bytes="60000", retention_ms="-1")
    produce(broker, "ring", 1000, keys=1000)
    wait_for(broker, "ring", lambda partition: partition.log_start > 500)
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "none"})
    low, high = consumer.get_watermark_offsets(TopicPartition("ring", 0))
    consumer.close()
    assert low > 500
    assert high == 1000
