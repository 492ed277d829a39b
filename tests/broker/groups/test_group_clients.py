"""Groups with real clients: who reads what, what is read after deaths and restarts.

Records are numbers, a few in every partition; a group has done its work when each of them was read
once. Consumers commit by hand, so that a test knows what is committed.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from time import monotonic
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from penstock.broker.groups.classic import EMPTY, STABLE, ClassicGroup
from penstock.testing.broker import Broker
from penstock.testing.kafka_tools import KafkaTools
from tests.broker import clients
from tests.broker.raw import RawClient
from tests.broker.requests import batch, create, delete, new_name, produce
from tests.broker.waits import TIMEOUT_S

PARTITIONS = 6
PER_PARTITION = 5
# librdkafka's wait between two looks: a poll that finds something returns at once.
POLL_S = 0.02


class Topic:
    """A topic full of numbers."""

    def __init__(self, broker: Broker, name: str | None = None) -> None:
        self.name = name or new_name()
        self.values: set[int] = set()
        with RawClient(broker.bootstrap) as client:
            client.call(create(self.name, PARTITIONS))
            self.fill(client)

    def fill(self, client: RawClient) -> set[int]:
        """More of them, in all partitions; the new ones."""
        new: set[int] = set()
        for number in range(PARTITIONS):
            first = len(self.values) + len(new)
            values = range(first, first + PER_PARTITION)
            client.call(produce(self.name, {number: batch(*(b"%d" % v for v in values))}), 12)
            new.update(values)
        self.values |= new
        return new


def consumer(broker: Broker, group: str, **settings: Any) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 6_000,
            "heartbeat.interval.ms": 100,
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
    )


def read(consumers: list[Consumer], wanted: set[int]) -> list[int]:
    """Poll all of them in turn until every wanted number was read; all that was, in order."""
    got: list[int] = []
    deadline = monotonic() + TIMEOUT_S
    while not wanted <= set(got):
        assert monotonic() < deadline, f"{wanted - set(got)} did not come"
        for one in consumers:
            while (message := one.poll(POLL_S)) is not None:
                error, value = message.error(), message.value()
                assert error is None or error.retriable(), error
                if error is None and value is not None:
                    got.append(int(value))
    return got


def poll_until(consumers: list[Consumer], condition: Callable[[], bool]) -> None:
    deadline = monotonic() + TIMEOUT_S
    while not condition():
        assert monotonic() < deadline, "it did not happen in time"
        for one in consumers:
            one.poll(POLL_S)


def numbers_of(one: Consumer) -> set[int]:
    return {place.partition for place in one.assignment()}


def share_all(consumers: list[Consumer]) -> bool:
    """Whether each partition has one reader, and each reader has some."""
    shares = [numbers_of(one) for one in consumers]
    together = [number for share in shares for number in share]
    return all(shares) and sorted(together) == list(range(PARTITIONS))


def group_of(broker: Broker, name: str) -> tuple[str, int]:
    """A group's state and generation."""

    def look(server: Any) -> tuple[str, int]:
        group = server.coordination.groups.get(name)
        assert isinstance(group, ClassicGroup)
        return group.state, group.generation

    return broker.call(look)


def committed(broker: Broker, group: str, topic: str) -> dict[int, int]:
    with closing(consumer(broker, group)) as one:
        places = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        return {place.partition: place.offset for place in one.committed(places, TIMEOUT_S)}


@pytest.fixture
def topic(shared: Broker) -> Topic:
    return Topic(shared)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


# ---- sharing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "cooperative-sticky"])
def test_members_share_the_work_and_go_on_where_they_were(
    shared: Broker, topic: Topic, stack: ExitStack, strategy: str
) -> None:
    group = new_name("g")
    members = [
        stack.enter_context(
            closing(consumer(shared, group, partition_assignment_strategy=strategy))
        )
        for _ in range(3)
    ]
    for one in members:
        one.subscribe([topic.name])
    poll_until(members, lambda: share_all(members))
    # Read from the start, whatever was read on the way here.
    with RawClient(shared.bootstrap) as client:
        new = topic.fill(client)
    got = read(members, new)
    assert len(got) == len(set(got))
    for one in members:
        one.commit(asynchronous=False)
    assert committed(shared, group, topic.name) == dict.fromkeys(
        range(PARTITIONS), 2 * PER_PARTITION
    )
    # One leaves: the others take over what it had, and read nothing twice.
    members[0].close()
    poll_until(members[1:], lambda: share_all(members[1:]))
    with RawClient(shared.bootstrap) as client:
        new = topic.fill(client)
    assert sorted(read(members[1:], new)) == sorted(new)


def test_every_group_reads_everything(shared: Broker, topic: Topic, stack: ExitStack) -> None:
    for _ in range(3):
        members = [
            stack.enter_context(closing(consumer(shared, group)))
            for group in [new_name("g")] * 2
        ]  # fmt: skip
        for one in members:
            one.subscribe([topic.name])
        assert set(read(members, topic.values)) == topic.values


def test_members_that_start_together_need_few_rounds(
    shared: Broker, topic: Topic, stack: ExitStack
) -> None:
    group = new_name("g")
    members = [stack.enter_context(closing(consumer(shared, group))) for _ in range(PARTITIONS)]
    for one in members:
        one.subscribe([topic.name])
    poll_until(members, lambda: share_all(members))
    state, generation = group_of(shared, group)
    # One that was slow to start, on a machine that has other things to do, costs a second one.
    assert (state, generation <= 3) == (STABLE, True)


def test_a_pattern_finds_topics_that_come_later(shared: Broker, stack: ExitStack) -> None:
    prefix = new_name("pattern")
    first = Topic(shared, f"{prefix}-a")
    Topic(shared, f"other-{prefix}")
    member = stack.enter_context(
        closing(
            consumer(shared, new_name("g"), topic_metadata_refresh_interval_ms=100)
        )
    )  # fmt: skip
    member.subscribe([f"^{prefix}-.*"])
    assert set(read([member], first.values)) == first.values
    second = Topic(shared, f"{prefix}-b")
    poll_until([member], lambda: len(member.assignment()) == 2 * PARTITIONS)
    names = {place.topic for place in member.assignment()}
    assert names == {first.name, second.name}


def test_consumers_that_assign_themselves_commit_too(shared: Broker, topic: Topic) -> None:
    group = new_name("g")
    with closing(consumer(shared, group)) as one:
        one.assign([TopicPartition(topic.name, 2)])
        read([one], set(range(2 * PER_PARTITION, 3 * PER_PARTITION)))
        one.commit(asynchronous=False)
    with closing(consumer(shared, group)) as one:
        places = one.committed([TopicPartition(topic.name, 2, metadata="")], TIMEOUT_S)
        assert places[0].offset == PER_PARTITION


def test_a_topic_made_anew_is_read_from_its_start(shared: Broker, topic: Topic) -> None:
    group = new_name("g")
    with closing(consumer(shared, group)) as one:
        one.subscribe([topic.name])
        read([one], topic.values)
        one.commit(asynchronous=False)
    with RawClient(shared.bootstrap) as client:
        client.call(delete(topic.name))
    again = Topic(shared, topic.name)
    with closing(consumer(shared, group)) as one:
        one.subscribe([topic.name])
        assert set(read([one], again.values)) == again.values


# ---- deaths and restarts -----------------------------------------------------------------------

DOOMED = """
import sys
from confluent_kafka import Consumer
bootstrap, group, topic = sys.argv[1:]
one = Consumer({
    "bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest",
    "enable.auto.commit": False, "session.timeout.ms": 1500, "heartbeat.interval.ms": 100,
})
one.subscribe([topic])
while True:
    message = one.poll(0.1)
    if message is not None and message.error() is None:
        print(message.partition(), message.offset(), flush=True)
        one.commit(message, asynchronous=False)
"""


@pytest.mark.processes
def test_a_dead_members_partitions_move(shared: Broker, topic: Topic) -> None:
    group = new_name("g")
    command = [sys.executable, "-c", DOOMED, shared.bootstrap, group, topic.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as doomed:
        try:
            assert doomed.stdout is not None
            # It has read two records and committed one: then it dies without a word.
            line = doomed.stdout.readline() + doomed.stdout.readline()
            doomed.send_signal(signal.SIGKILL)
            rest = doomed.stdout.read()
        finally:
            doomed.kill()
    seen = [tuple(map(int, text.split())) for text in (line + rest).splitlines() if " " in text]
    done = {number * PER_PARTITION + offset for number, offset in seen}
    with closing(consumer(shared, group)) as heir:
        heir.subscribe([topic.name])
        got = read([heir], topic.values - done)
    # What was committed is not read again; the last one may have died with it.
    assert len(done & set(got)) <= 1
    assert len(got) == len(set(got))


def test_a_static_member_that_restarts_disturbs_nobody(
    shared: Broker, topic: Topic, stack: ExitStack
) -> None:
    group = new_name("g")

    def start(name: str) -> Consumer:
        one = consumer(shared, group, group_instance_id=name, session_timeout_ms=30_000)
        one.subscribe([topic.name])
        return one

    other = stack.enter_context(closing(start("a")))
    first = start("b")
    poll_until([other, first], lambda: share_all([other, first]))
    before, generation = numbers_of(first), group_of(shared, group)
    first.close()
    again = stack.enter_context(closing(start("b")))
    poll_until([other, again], lambda: share_all([other, again]))
    assert numbers_of(again) == before
    assert group_of(shared, group) == generation


def test_an_instance_that_is_started_twice_is_fenced(
    shared: Broker, topic: Topic, stack: ExitStack
) -> None:
    group = new_name("g")
    first, second = (
        stack.enter_context(closing(consumer(shared, group, group_instance_id="one")))
        for _ in range(2)
    )
    first.subscribe([topic.name])
    poll_until([first], lambda: share_all([first]))
    second.subscribe([topic.name])
    poll_until([second], lambda: share_all([second]))
    deadline = monotonic() + TIMEOUT_S
    error: KafkaError | None = None
    while error is None and monotonic() < deadline:
        try:
            message = first.poll(POLL_S)
            error = message.error() if message is not None else None
        except KafkaException as raised:
            error = raised.args[0]
    assert error is not None
    assert error.code() in (KafkaError._FATAL, KafkaError.FENCED_INSTANCE_ID)


@pytest.mark.parametrize("end", ["stop", "crash"])
def test_members_and_offsets_outlive_the_broker(stack: ExitStack, end: str) -> None:
    broker = stack.enter_context(Broker(durability="disk"))
    topic, group = Topic(broker), new_name("g")
    members = [stack.enter_context(closing(consumer(broker, group))) for _ in range(2)]
    for one in members:
        one.subscribe([topic.name])
    poll_until(members, lambda: share_all(members))
    with RawClient(broker.bootstrap) as client:
        new = topic.fill(client)
    read(members, new)
    for one in members:
        one.commit(asynchronous=False)
    before = committed(broker, group, topic.name)
    generation = group_of(broker, group)
    getattr(broker, end)()
    broker.start()
    assert committed(broker, group, topic.name) == before
    assert group_of(broker, group) == generation
    with RawClient(broker.bootstrap) as client:
        more = topic.fill(client)
    assert sorted(read(members, more)) == sorted(more)
    for one in members:
        one.commit(asynchronous=False)
    # They never knew.
    assert group_of(broker, group) == generation


def test_a_broker_that_stops_does_not_wait_for_members_that_wait(stack: ExitStack) -> None:
    minute_ms = 60_000
    broker = stack.enter_context(
        Broker(group_initial_delay_ms=minute_ms, group_initial_delay_max_ms=minute_ms)
    )
    topic = Topic(broker)
    member = stack.enter_context(closing(consumer(broker, "g")))
    member.subscribe([topic.name])

    def waits() -> bool:
        return broker.call(lambda server: _has_members(server.coordination.groups.get("g")))

    poll_until([member], waits)
    broker.stop()
    broker.start()
    poll_until([member], waits)


def _has_members(group: Any) -> bool:
    return isinstance(group, ClassicGroup) and bool(group.members)


# ---- other clients -----------------------------------------------------------------------------


def test_kafka_python(shared: Broker, topic: Topic) -> None:
    group = new_name("g")

    def start() -> Any:
        return clients.KafkaConsumer(  # type: ignore[attr-defined]
            topic.name,
            bootstrap_servers=shared.bootstrap,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            consumer_timeout_ms=int(TIMEOUT_S * 1000),
        )

    with closing(start()) as one:
        got = {int(next(one).value) for _ in topic.values}
        one.commit()
    assert got == topic.values
    assert group_of(shared, group)[0] == EMPTY
    with RawClient(shared.bootstrap) as client:
        new = topic.fill(client)
    with closing(start()) as one:
        assert {int(next(one).value) for _ in new} == new


def test_aiokafka(shared: Broker, topic: Topic) -> None:
    group = new_name("g")

    async def work(count: int) -> tuple[set[int], set[int]]:
        one, other = (
            AIOKafkaConsumer(
                topic.name,
                bootstrap_servers=shared.bootstrap,
                group_id=group,
                auto_offset_reset="earliest",
                enable_auto_commit=False,
                heartbeat_interval_ms=100,
            )
            for _ in range(2)
        )
        await asyncio.gather(one.start(), other.start())
        try:
            got: set[int] = set()
            while len(got) < count:
                for member in (one, other):
                    found = await member.getmany(timeout_ms=50)
                    got |= {int(record.value) for part in found.values() for record in part}
                    await member.commit()
            shares = [{place.partition for place in member.assignment()} for member in (one, other)]
            assert not shares[0] & shares[1]
            return got, shares[0] | shares[1]
        finally:
            await asyncio.gather(one.stop(), other.stop())

    got, numbers = asyncio.run(asyncio.wait_for(work(len(topic.values)), TIMEOUT_S))
    assert got == topic.values
    assert numbers == set(range(PARTITIONS))
    with RawClient(shared.bootstrap) as client:
        new = topic.fill(client)
    got, _ = asyncio.run(asyncio.wait_for(work(len(new)), TIMEOUT_S))
    assert got == new


@pytest.mark.parametrize("assignor", ["RangeAssignor", "CooperativeStickyAssignor"])
def test_java(shared: Broker, topic: Topic, kafka_tools: KafkaTools, assignor: str) -> None:
    group = new_name("g")
    config = {
        "group.id": group,
        "group.protocol": "classic",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": "false",
        "partition.assignment.strategy": f"org.apache.kafka.clients.consumer.{assignor}",
    }
    with kafka_tools.java_client(shared.bootstrap) as java:
        answer = java.call(
            "consume_as_member", config, topics=[topic.name], count=len(topic.values), commit=True
        )
        assert answer["partitions"] == list(range(PARTITIONS))
        assert len(answer["records"]) == len(topic.values)
        offsets = java.call("list_group_offsets", group=group, require_stable=True)["offsets"]
    expected = {f"{topic.name}-{number}": PER_PARTITION for number in range(PARTITIONS)}
    assert offsets == expected
    assert group_of(shared, group)[0] == EMPTY


def test_an_administrator(shared: Broker, topic: Topic, stack: ExitStack) -> None:
    group, unread = new_name("g"), new_name("g")
    member = stack.enter_context(closing(consumer(shared, group, client_id="me")))
    member.subscribe([topic.name])
    poll_until([member], lambda: share_all([member]))
    admin = AdminClient({"bootstrap.servers": shared.bootstrap})
    listed = admin.list_consumer_groups().result(TIMEOUT_S).valid
    assert any(one.group_id == group and one.state.name == "STABLE" for one in listed)
    told = admin.describe_consumer_groups([group])[group].result(TIMEOUT_S)
    (described,) = told.members
    assert (described.client_id, told.partition_assignor) == ("me", "range")
    assert {p.partition for p in described.assignment.topic_partitions} == set(range(PARTITIONS))
    # Offsets of a group can be set while it has no members.
    offsets = ConsumerGroupTopicPartitions(unread, [TopicPartition(topic.name, 0, 3)])
    admin.alter_consumer_group_offsets([offsets])[unread].result(TIMEOUT_S)
    asked = ConsumerGroupTopicPartitions(unread)
    found = admin.list_consumer_group_offsets([asked])[unread].result(TIMEOUT_S)
    assert [(p.partition, p.offset) for p in found.topic_partitions] == [(0, 3)]
    deleted = admin.delete_consumer_groups([group, unread])
    deleted[unread].result(TIMEOUT_S)
    with pytest.raises(KafkaException) as refused:
        deleted[group].result(TIMEOUT_S)
    assert refused.value.args[0].code() == KafkaError.NON_EMPTY_GROUP
