"""The same broker for clients of other makers: kafka-python, aiokafka, Apache Kafka's Java client.

Each speaks its own dialect of the protocol: older versions of the requests, or only the newest.
"""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AsyncPartition

from conformance.clients import TIMEOUT_S, Member, drive, fill, read_to_end, values
from conformance.scenario import Cluster, scenario
from conformance.scenarios.groups_consumer import group_of
from conformance.scenarios.offsets import committed
from conformance.scenarios.transactions import COMMITTED, seen
from penstock.testing.java_client import NewRecord

with warnings.catch_warnings():
    # It reads its schemas by a function that Python 3.11 calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import KafkaConsumer, KafkaProducer
    from kafka import TopicPartition as PythonPartition

TIMEOUT_MS = int(TIMEOUT_S * 1000)


# ---- kafka-python ------------------------------------------------------------------------------


@scenario(expected={"read": ["0", "1", "2", "3"], "committed": 4, "goes on": ["4"]})
def kafka_python_in_a_group(cluster: Cluster) -> Any:
    """A member by kafka-python reads, commits and goes on where it was."""
    topic, group = cluster.topic(), cluster.name("group")
    fill(cluster, topic, 4)
    first = python_member(cluster, topic, group, 4)
    offset = committed(cluster, group, topic)
    fill(cluster, topic, 1, first=4)
    return {
        "read": first,
        "committed": offset,
        "goes on": python_member(cluster, topic, group, 1),
    }


def python_member(cluster: Cluster, topic: str, group: str, count: int) -> list[str]:
    consumer = KafkaConsumer(
        topic,
        bootstrap_servers=cluster.bootstrap,
        group_id=group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        consumer_timeout_ms=TIMEOUT_MS,
        fetch_max_wait_ms=50,
    )
    try:
        messages = [message for _, message in zip(range(count), consumer, strict=False)]
        consumer.commit()
    finally:
        consumer.close(autocommit=False)
    return [message.value.decode() for message in messages]


@scenario(expected={"committed": ["a"], "uncommitted": ["a", "b"], "offset": 5})
def kafka_python_transactions(cluster: Cluster) -> Any:
    """kafka-python commits and aborts transactions, offsets of a group included."""
    source, topic, group = cluster.topic(), cluster.topic(), cluster.name("group")
    producer = KafkaProducer(
        bootstrap_servers=cluster.bootstrap, transactional_id=cluster.name("txn")
    )
    try:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, value=b"a", partition=0)
        place = PythonPartition(source, 0)
        producer.send_offsets_to_transaction({place: python_offset(5)}, group)
        producer.commit_transaction()
        producer.begin_transaction()
        producer.send(topic, value=b"b", partition=0)
        producer.flush()
        producer.abort_transaction()
    finally:
        producer.close(TIMEOUT_S)
    return {**seen(cluster, topic), "offset": committed(cluster, group, source)}


def python_offset(offset: int) -> Any:
    from kafka.structs import OffsetAndMetadata

    return OffsetAndMetadata(offset, "", -1)


# ---- aiokafka ----------------------------------------------------------------------------------


@scenario(expected={"read": ["0", "1", "2", "3"], "committed": 4})
def aiokafka_in_a_group(cluster: Cluster) -> Any:
    """A member by aiokafka reads and commits."""
    topic, group = cluster.topic(), cluster.name("group")
    fill(cluster, topic, 4)

    async def work() -> list[str]:
        consumer = AIOKafkaConsumer(
            topic,
            bootstrap_servers=cluster.bootstrap,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            fetch_max_wait_ms=50,
        )
        await consumer.start()
        try:
            texts = [(await consumer.getone()).value.decode() for _ in range(4)]
            await consumer.commit()
        finally:
            await consumer.stop()
        return texts

    read = asyncio.run(asyncio.wait_for(work(), TIMEOUT_S))
    return {"read": read, "committed": committed(cluster, group, topic)}


@scenario(expected={"committed": ["a"], "uncommitted": ["a", "b"], "offset": 5})
def aiokafka_transactions(cluster: Cluster) -> Any:
    """aiokafka commits and aborts transactions, offsets of a group included."""
    source, topic, group = cluster.topic(), cluster.topic(), cluster.name("group")

    async def work() -> None:
        producer = AIOKafkaProducer(
            bootstrap_servers=cluster.bootstrap, transactional_id=cluster.name("txn")
        )
        await producer.start()
        try:
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"a", partition=0)
            await producer.send_offsets_to_transaction({AsyncPartition(source, 0): 5}, group)
            await producer.commit_transaction()
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"b", partition=0)
            await producer.abort_transaction()
        finally:
            await producer.stop()

    asyncio.run(asyncio.wait_for(work(), TIMEOUT_S))
    return {**seen(cluster, topic), "offset": committed(cluster, group, source)}


# ---- Apache Kafka's Java client ------------------------------------------------------------------


@scenario(
    expected={
        "classic": {"read": ["0", "1", "2", "3"], "partitions": [0, 1], "committed": 2},
        "consumer": {"read": ["0", "1", "2", "3"], "partitions": [0, 1], "committed": 2},
    }
)
def java_in_a_group(cluster: Cluster) -> Any:
    """A member by the Java client reads and commits, by either protocol."""
    observed = {}
    for protocol in ("classic", "consumer"):
        topic = cluster.topic(2)
        group = group_of(cluster)
        for number in range(2):
            fill(cluster, topic, 2, number, first=number * 2)
        config = {"group.id": group, "group.protocol": protocol, "fetch.max.wait.ms": "50"}
        answer = cluster.java.call(
            "consume_as_member", config, topics=[topic], count=4, commit=True
        )
        observed[protocol] = {
            "read": sorted(java_value(record) for record in answer["records"]),
            "partitions": answer["partitions"],
            "committed": committed(cluster, group, topic),
        }
    return observed


def java_value(record: dict[str, Any]) -> str:
    from base64 import b64decode

    return b64decode(record["value"]).decode()


@scenario(expected={"committed": ["a", "b"], "uncommitted": ["a", "c", "b"], "java": ["a", "b"]})
def java_transactions(cluster: Cluster) -> Any:
    """The Java client, with the newest form of transactions, commits and aborts."""
    topic = cluster.topic()
    config = {"transactional.id": cluster.name("txn")}
    for texts, ends_with in (("a", "commit"), ("c", "abort"), ("b", "commit")):
        records = [NewRecord(text.encode(), partition=0) for text in texts]
        cluster.java.produce(topic, records, config, transaction=ends_with)
    read = cluster.java.consume(topic, read_committed=True)
    return {**seen(cluster, topic), "java": [(r.value or b"").decode() for r in read]}


@scenario(expected={"shares": [2, 2], "all": [0, 1, 2, 3]})
def members_of_different_makers(cluster: Cluster) -> Any:
    """Members by librdkafka and by kafka-python form one group and share its partitions."""
    topic, group = cluster.topic(4), cluster.name("group")
    # It leads the group: kafka-python may deal out partitions that it does not know of yet.
    member = Member(cluster, group, [topic], heartbeat_interval_ms=200)
    drive([member], lambda: len(member.partitions) == 4)
    consumer = KafkaConsumer(
        bootstrap_servers=cluster.bootstrap,
        group_id=group,
        enable_auto_commit=False,
        heartbeat_interval_ms=200,
        fetch_max_wait_ms=50,
    )
    cluster.at_end(lambda: consumer.close(autocommit=False))
    consumer.subscribe([topic])

    def theirs() -> list[int]:
        consumer.poll(20)
        return [part.partition for part in consumer.assignment()]

    drive([member], lambda: len(theirs()) == 2 and len(member.partitions) == 2)
    return {
        "shares": [len(member.partitions), len(theirs())],
        "all": sorted(member.partitions + theirs()),
    }


@scenario(expected={"java": ["0", "1"], "librdkafka": ["0", "1"]})
def written_by_java(cluster: Cluster) -> Any:
    """What the Java client writes, it and others read."""
    topic = cluster.topic()
    records = [NewRecord(str(number).encode(), partition=0) for number in range(2)]
    cluster.java.produce(topic, records, {"compression.type": "zstd"})
    return {
        "java": [(record.value or b"").decode() for record in cluster.java.consume(topic)],
        "librdkafka": values(read_to_end(cluster, topic, **COMMITTED)),
    }
