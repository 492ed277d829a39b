"""Groups that the broker assigns partitions to, with real clients on a real broker.

librdkafka (confluent-kafka) and Apache Kafka's Java client, with `group.protocol=consumer`; the
heartbeats of confluent-kafka's ShareConsumer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from time import monotonic
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions

from penstock.broker.groups.consumer import ConsumerGroup
from penstock.broker.groups.share import ShareGroup
from penstock.testing.broker import Broker
from penstock.testing.java_client import JavaClient
from penstock.testing.kafka_tools import KafkaTools
from tests.broker.raw import RawClient
from tests.broker.requests import create, delete, new_name

TIMEOUT_S = 60.0


class Crowd:
    """Consumers of one test, polled together; whatever two of them had at once is noted."""

    def __init__(self, broker: Broker, group: str) -> None:
        self.broker, self.group = broker, group
        self.consumers: dict[str, Consumer] = {}
        self.owned: dict[str, set[tuple[str, int]]] = {}
        self.got: list[tuple[str, int, int]] = []
        self.clashes: list[Any] = []

    def add(self, name: str, *topics: str, **more: Any) -> Consumer:
        config = {
            "bootstrap.servers": self.broker.bootstrap,
            "group.id": self.group,
            "group.protocol": "consumer",
            "client.id": name,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
            **{key.replace("_", "."): value for key, value in more.items()},
        }
        consumer = Consumer(config)
        self.owned[name] = set()
        consumer.subscribe(
            list(topics),
            on_assign=lambda _, parts: self._assigned(name, parts),
            on_revoke=lambda _, parts: self._revoked(name, parts),
            on_lost=lambda _, parts: self._revoked(name, parts),
        )
        self.consumers[name] = consumer
        return consumer

    def _assigned(self, name: str, partitions: Iterable[TopicPartition]) -> None:
        new = {(part.topic, part.partition) for part in partitions}
        for other, owned in self.owned.items():
            if other != name and owned & new:
                self.clashes.append((name, other, owned & new))
        self.owned[name] |= new

    def _revoked(self, name: str, partitions: Iterable[TopicPartition]) -> None:
        self.owned[name] -= {(part.topic, part.partition) for part in partitions}

    def until(self, condition: Callable[[], bool]) -> None:
        """Poll all until something holds."""
        deadline = monotonic() + TIMEOUT_S
        while not condition():
            assert monotonic() < deadline, (self.owned, len(self.got))
            for consumer in self.consumers.values():
                message = consumer.poll(0.01)
                if message is None:
                    continue
                error = message.error()
                if error is None:
                    place = message.topic(), message.partition(), message.offset()
                    assert None not in place
                    self.got.append(place)  # type: ignore[arg-type]
                elif error.code() not in TRANSIENT:
                    raise KafkaException(error)

    def until_owned(self, *counts: int) -> None:
        """Poll all until they have so many partitions each, in any order."""
        self.until(lambda: sorted(map(len, self.owned.values())) == sorted(counts))

    def close(self, name: str) -> None:
        self.consumers.pop(name).close()
        self.owned.pop(name)


# While the broker is away, and for topics that are gone.
TRANSIENT = {
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}


@pytest.fixture
def crowd(broker: Broker) -> Iterator[Crowd]:
    crowd = Crowd(broker, new_name("g"))
    yield crowd
    for name in list(crowd.consumers):
        crowd.close(name)
    assert not crowd.clashes


def topic(broker: Broker, partitions: int, name: str | None = None) -> str:
    name = name or new_name()
    with RawClient(broker.bootstrap) as client:
        result = client.call(create(name, partitions)).topics[0]
    assert not result.error_code, result.error_message
    return name


def fill(broker: Broker, name: str, partitions: int, each: int = 10) -> int:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    for number in range(partitions):
        for at in range(each):
            producer.produce(name, b"%d" % at, partition=number)
    assert producer.flush(TIMEOUT_S) == 0
    return partitions * each


def commit_start(broker: Broker, group: str, name: str, partitions: int) -> None:
    """Let members begin at a committed 0 instead of asking for the beginning.

    librdkafka may ask twice while it joins, and leaves the timer of the second question running
    when the first is answered: if it goes off while the broker is away, the member reads from the
    beginning again, whatever it had read.
    """
    committer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group, "log_level": 0})
    places = [TopicPartition(name, number, 0) for number in range(partitions)]
    committer.commit(offsets=places, asynchronous=False)
    committer.close()


def group_of(broker: Broker, group_id: str) -> ConsumerGroup:
    group = broker.server.coordination.groups.get(group_id)
    assert isinstance(group, ConsumerGroup)
    return group


def test_members_come_and_go_and_everything_is_read_once(broker: Broker, crowd: Crowd) -> None:
    name = topic(broker, 6)
    written = fill(broker, name, 6)
    crowd.add("one", name)
    crowd.until(lambda: len(crowd.got) == written)
    crowd.consumers["one"].commit(asynchronous=False)
    crowd.add("two", name)
    crowd.add("three", name)
    crowd.until_owned(2, 2, 2)
    crowd.close("one")
    crowd.until_owned(3, 3)
    written += fill(broker, name, 6)
    crowd.until(lambda: len(crowd.got) >= written)
    assert len(set(crowd.got)) == len(crowd.got) == written


def test_more_members_than_partitions(broker: Broker, crowd: Crowd) -> None:
    name = topic(broker, 2)
    for member in "abcd":
        crowd.add(member, name)
    crowd.until_owned(0, 0, 1, 1)
    crowd.close(next(member for member, owned in crowd.owned.items() if owned))
    crowd.until_owned(0, 1, 1)


def test_patterns_and_topics_that_come_grow_and_go(broker: Broker, crowd: Crowd) -> None:
    prefix = new_name()
    topic(broker, 1, f"{prefix}-1")
    topic(broker, 1, f"other-{prefix}")
    crowd.add("one", f"^{prefix}-[0-9]+")
    crowd.until_owned(1)
    topic(broker, 2, f"{prefix}-22")
    crowd.until_owned(3)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    for future in admin.create_partitions([NewPartitions(f"{prefix}-22", 4)]).values():
        future.result()
    crowd.until_owned(5)
    with RawClient(broker.bootstrap) as client:
        client.call(delete(f"{prefix}-1"))
    crowd.until_owned(4)
    assert {name for name, _ in crowd.owned["one"]} == {f"{prefix}-22"}


def test_a_broker_that_crashes_in_between_is_not_noticed(broker: Broker, crowd: Crowd) -> None:
    name = topic(broker, 4)
    commit_start(broker, crowd.group, name, 4)
    for member in "ab":
        crowd.add(member, name)
    crowd.until_owned(2, 2)
    written = fill(broker, name, 4)
    crowd.until(lambda: len(crowd.got) == written)
    before = {member: set(owned) for member, owned in crowd.owned.items()}
    epochs = {id_: m.standing.epoch for id_, m in group_of(broker, crowd.group).members.items()}
    broker.crash()
    broker.start()
    written += fill(broker, name, 4)
    crowd.until(lambda: len(crowd.got) >= written)
    assert crowd.owned == before
    after = group_of(broker, crowd.group).members
    assert {id_: member.standing.epoch for id_, member in after.items()} == epochs
    assert len(set(crowd.got)) == len(crowd.got) == written


def test_a_broker_that_crashes_in_a_rebalance(broker: Broker, crowd: Crowd) -> None:
    name = topic(broker, 4)
    crowd.add("a", name)
    crowd.until_owned(4)
    crowd.add("b", name)
    crowd.until(lambda: len(group_of(broker, crowd.group).members) == 2)
    broker.crash()
    broker.start()
    crowd.until_owned(2, 2)


def test_a_static_member_comes_back_to_its_partitions(broker: Broker, crowd: Crowd) -> None:
    name = topic(broker, 4)
    crowd.add("a", name, group_instance_id="i-a")
    crowd.add("b", name, group_instance_id="i-b")
    crowd.until_owned(2, 2)
    before = {member: set(owned) for member, owned in crowd.owned.items()}
    crowd.close("a")
    crowd.until(lambda: crowd.owned == {"b": before["b"]})
    crowd.add("a", name, group_instance_id="i-a")
    crowd.until_owned(2, 2)
    assert crowd.owned == before


def test_a_dead_member_is_replaced_where_it_stopped(broker: Broker, crowd: Crowd) -> None:
    name = topic(broker, 2)
    admin = broker.call(
        lambda server: server.coordination.groups.change_settings(
            crowd.group,
            {"consumer.session.timeout.ms": "1000", "consumer.heartbeat.interval.ms": "200"},
        )
    )
    broker.call(lambda server: server.coordination.write(admin))
    written = fill(broker, name, 2)
    crowd.add("a", name)
    crowd.until(lambda: len(crowd.got) == written)
    crowd.consumers["a"].commit(asynchronous=False)
    # A member that is never heard of again.
    with RawClient(broker.bootstrap) as client:
        join_by_hand(client, crowd.group, name)
        crowd.until_owned(1)
        crowd.until_owned(2)
    written += fill(broker, name, 2)
    crowd.until(lambda: len(crowd.got) >= written)
    assert len(set(crowd.got)) == len(crowd.got) == written


def join_by_hand(client: RawClient, group: str, name: str) -> None:
    from penstock.wire.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest

    answer = client.call(
        ConsumerGroupHeartbeatRequest(
            group_id=group,
            member_id="ghost",
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=[name],
            topic_partitions=[],
        )
    )
    assert not answer.error_code, answer.error_message


# ---- Java ------------------------------------------------------------------------------------


@pytest.fixture
def java(broker: Broker, kafka_tools: KafkaTools) -> Iterator[JavaClient]:
    with kafka_tools.java_client(broker.bootstrap) as client:
        yield client


def test_java_reads_beside_librdkafka(broker: Broker, crowd: Crowd, java: JavaClient) -> None:
    name = topic(broker, 4)
    written = fill(broker, name, 4)
    config = {
        "group.id": crowd.group,
        "group.protocol": "consumer",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": "false",
    }
    read = java.call(
        "consume_as_member", config, topics=[name], group=crowd.group, count=written, commit=True
    )
    assert len(read["records"]) == written
    assert read["partitions"] == [0, 1, 2, 3]
    # It has left, and what it has committed counts.
    written = fill(broker, name, 4, each=3)
    crowd.add("one", name)
    crowd.until_owned(4)
    crowd.until(lambda: len(crowd.got) == written)


# ---- share groups ----------------------------------------------------------------------------


def test_share_consumers_become_members(broker: Broker) -> None:
    from confluent_kafka import ShareConsumer

    name, group_id = topic(broker, 2), new_name("s")
    config = {"bootstrap.servers": broker.bootstrap, "group.id": group_id, "log_level": 0}

    def members() -> dict[str, int]:
        group = broker.server.coordination.groups.get(group_id)
        if not isinstance(group, ShareGroup):
            return {}
        return {id_: len(group.partitions_of(id_)) for id_ in list(group.members)}

    with ExitStack() as stack:
        for _ in range(3):
            consumer = ShareConsumer(config)
            stack.callback(consumer.close)
            consumer.subscribe([name])
            consumer.poll(0.1)
        deadline = monotonic() + TIMEOUT_S
        while len(members()) < 3 or 0 in members().values():
            assert monotonic() < deadline, members()
    deadline = monotonic() + TIMEOUT_S
    while members():
        assert monotonic() < deadline, members()
