"""Queues with the clients that people use: confluent-kafka's and Java's share consumers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest
from confluent_kafka import AcknowledgeType, ShareConsumer

from penstock.testing.broker import Broker
from penstock.testing.java_client import JavaClient
from penstock.testing.java_share import JavaShareConsumer
from penstock.testing.kafka_tools import KafkaTools
from tests.broker.requests import new_name
from tests.broker.shares.members import fill, lag_of, new_queue, numbered, set_group
from tests.broker.shares.test_dead_letters import letters, told
from tests.broker.waits import wait_until

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def java(shared: Broker, kafka_tools: KafkaTools) -> Iterator[JavaClient]:
    with kafka_tools.java_client(shared.bootstrap) as client:
        yield client


def share_consumer(broker: Broker, group: str, topic: str, **config: Any) -> Any:
    consumer = ShareConsumer(
        {"bootstrap.servers": broker.bootstrap, "group.id": group, "log_level": 0, **config}
    )
    consumer.subscribe([topic])
    return consumer


def polled(consumer: Any, count: int) -> list[Any]:
    """So many messages, in as many polls as it takes."""
    messages: list[Any] = []
    deadline = monotonic() + TIMEOUT_S
    while len(messages) < count:
        assert monotonic() < deadline, f"{len(messages)} of {count} messages came"
        messages += consumer.poll(0.2) or []
    assert not any(message.error() for message in messages)
    return messages


# ---- confluent-kafka ---------------------------------------------------------------------------


def test_confluent_takes_and_acknowledges(shared: Broker) -> None:
    topic, group = new_queue(shared, partitions=2)
    fill(shared, topic, *numbered(10))
    fill(shared, topic, *numbered(10, 10), partition=1)
    consumer = share_consumer(shared, group, topic)
    assert sorted(int(m.value()) for m in polled(consumer, 20)) == list(range(20))
    # What came is acknowledged by the next poll.
    consumer.poll(0.1)
    consumer.close()
    assert lag_of(shared, group) == 0


def test_confluent_answers_for_each_record(shared: Broker) -> None:
    dlq = new_name("dlq.")
    topic, group = new_queue(shared, errors_deadletterqueue_topic_name=dlq)
    fill(shared, topic, *numbered(4))
    consumer = share_consumer(shared, group, topic, **{"share.acknowledgement.mode": "explicit"})
    kinds = [
        AcknowledgeType.ACCEPT,
        AcknowledgeType.RELEASE,
        AcknowledgeType.REJECT,
        AcknowledgeType.ACCEPT,
    ]
    for message, kind in zip(polled(consumer, 4), kinds, strict=True):
        consumer.acknowledge(message, kind)
    consumer.commit_sync(10)
    (again,) = polled(consumer, 1)
    assert again.value() == b"1"
    consumer.acknowledge(again, AcknowledgeType.ACCEPT)
    consumer.commit_sync(10)
    consumer.close()
    assert [letter.value for letter in letters(shared, dlq, 1)] == [b"2"]
    wait_until(shared, lambda server: _start(server, group) == 4)


def test_confluent_consumers_share_one_partition(shared: Broker) -> None:
    """Four consumers on one partition: each record once, and all of them get some."""
    topic, group = new_queue(shared, share_partition_max_record_locks="40")
    count = 400
    for first in range(0, count, 10):
        fill(shared, topic, *numbered(10, first))
    seen: Counter[int] = Counter()
    shares: Counter[int] = Counter()
    lock = threading.Lock()

    def work(name: int) -> None:
        consumer = share_consumer(shared, group, topic, **{"max.poll.records": 10})
        deadline = monotonic() + TIMEOUT_S
        # Until all are acknowledged: what a consumer that leaves has not is another's again.
        while monotonic() < deadline and (sum(seen.values()) < count or lag_of(shared, group) > 0):
            for message in consumer.poll(0.1) or []:
                with lock:
                    seen[int(message.value())] += 1
                    shares[name] += 1
        consumer.poll(0)
        consumer.close()

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == Counter(range(count))
    assert len(shares) > 1


# ---- Java --------------------------------------------------------------------------------------


def test_java_takes_and_acknowledges(shared: Broker, java: JavaClient) -> None:
    topic, group = new_queue(shared, partitions=2)
    fill(shared, topic, *numbered(10))
    fill(shared, topic, *numbered(10, 10), partition=1)
    values: list[int] = []
    with JavaShareConsumer(java, group, [topic], explicit=False) as consumer:
        while len(values) < 20:
            taken = consumer.poll()
            assert taken
            assert {item.delivery_count for item in taken} == {1}
            values += [int(item.record.value or b"") for item in taken]
        assert set(consumer.commit().values()) == {None}
    assert sorted(values) == list(range(20))
    assert lag_of(shared, group) == 0


def test_java_answers_for_each_record(shared: Broker, java: JavaClient) -> None:
    dlq = new_name("dlq.")
    topic, group = new_queue(shared, errors_deadletterqueue_topic_name=dlq)
    fill(shared, topic, *numbered(4))
    with JavaShareConsumer(java, group, [topic]) as consumer:
        taken = consumer.poll()
        kinds = ["accept", "release", "reject", "renew"]
        consumer.acknowledge(*zip(taken, kinds, strict=True))
        assert consumer.commit() == {f"{topic}-0": None}
        # The client gives out once more what was renewed; it was not delivered again.
        again: dict[bytes | None, int] = {}
        while len(again) < 2:
            for item in consumer.poll():
                again[item.record.value] = item.delivery_count
                consumer.acknowledge((item, "accept"))
            assert consumer.commit() == {f"{topic}-0": None}
        assert again == {b"1": 2, b"3": 1}
    (letter,) = letters(shared, dlq, 1)
    assert (letter.value, told(letter)["group"]) == (b"2", group)
    wait_until(shared, lambda server: _start(server, group) == 4)


@pytest.mark.parametrize("mode", ["batch_optimized", "record_limit"])
def test_java_takes_as_much_as_it_asks_for(shared: Broker, java: JavaClient, mode: str) -> None:
    topic, group = new_queue(shared)
    fill(shared, topic, *numbered(20))
    config = {"max.poll.records": "5", "share.acquire.mode": mode}
    with JavaShareConsumer(java, group, [topic], config) as consumer:
        taken = consumer.poll()
        locked = shared.call(lambda server: _queue(server, group).share.locked)
        assert locked == (5 if mode == "record_limit" else 20)
        consumer.acknowledge(*((item, "accept") for item in taken))
        consumer.commit()


def test_java_sees_ordered_records_one_by_one(shared: Broker, java: JavaClient) -> None:
    topic, group = new_queue(shared, share_ordered_by_key="true")
    fill(shared, topic, *numbered(5), key=b"same")
    with JavaShareConsumer(java, group, [topic]) as consumer:
        for number in range(5):
            (taken,) = consumer.poll()
            assert taken.record.value == b"%d" % number
            consumer.acknowledge((taken, "accept"))
            consumer.commit()


def test_java_begins_anew_after_the_broker_has(broker: Broker, kafka_tools: KafkaTools) -> None:
    topic, group = new_queue(broker)
    fill(broker, topic, *numbered(3))
    with (
        kafka_tools.java_client(broker.bootstrap) as java,
        JavaShareConsumer(java, group, [topic]) as consumer,
    ):
        taken = consumer.poll()
        consumer.acknowledge((taken[0], "accept"), (taken[1], "release"), (taken[2], "accept"))
        assert consumer.commit() == {f"{topic}-0": None}
        broker.crash()
        broker.start()
        (again,) = consumer.poll()
        assert (again.record.value, again.delivery_count) == (b"1", 2)
        consumer.acknowledge((again, "accept"))
        consumer.commit()


def test_java_sets_and_shows_group_settings(shared: Broker, java: JavaClient) -> None:
    group = new_name("g")
    java.alter_configs(group, ("set", "share.delivery.count.limit", "7"), resource_type="group")
    shown = java.describe_configs(group, resource_type="group")
    assert shown["share.delivery.count.limit"]["value"] == "7"
    assert shown["share.delivery.count.limit"]["source"] == "DYNAMIC_GROUP_CONFIG"
    assert shown["share.auto.offset.reset"]["source"] == "DEFAULT_CONFIG"
    set_group(shared, group, share_delivery_count_limit="8")


def _queue(server: Any, group: str) -> Any:
    return server.coordination.shares.queues_of(group)[0]


def _start(server: Any, group: str) -> int:
    return int(_queue(server, group).share.start)
