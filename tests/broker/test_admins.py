"""The admin clients of Java, confluent-kafka, kafka-python and aiokafka."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewTopic as AsyncTopic
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka import TopicCollection as Topics
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
)

from penstock.testing.broker import Broker
from penstock.testing.java_client import JavaClient, NewRecord
from penstock.testing.kafka_tools import JavaClientError, KafkaTools
from tests.broker.clients import KcatClient
from tests.broker.raw import RawClient
from tests.broker.requests import batch, create, new_name, produce

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka.admin import KafkaAdminClient
    from kafka.admin import NewTopic as PythonTopic

# Its makers have no types yet.
SPEC: Any = OffsetSpec
UNKNOWN_TOPIC, EXISTS, INVALID_PARTITIONS, INVALID_CONFIG = 3, 36, 37, 40
OUT_OF_RANGE, BAD_NAME, BAD_REPLICATION = 1, 17, 38
TIMES = (1_700_000_000_000, 1_700_000_009_000, 1_700_000_005_000)


@pytest.fixture
def filled(client: RawClient) -> str:
    """A topic of three records, the second the latest by its time."""
    topic = new_name()
    client.call(create(topic))
    for n, at in enumerate(TIMES):
        client.call(produce(topic, batch(b"%d" % n, at_ms=at)), 12)
    return topic


# ---- Java ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def java(shared: Broker, kafka_tools: KafkaTools) -> Iterator[JavaClient]:
    with kafka_tools.java_client(shared.bootstrap) as client:
        yield client


def java_code(call: Any, *args: Any, **kwargs: Any) -> int:
    with pytest.raises(JavaClientError) as error:
        call(*args, **kwargs)
    return error.value.code


def test_java_makes_shows_grows_and_deletes_topics(java: JavaClient) -> None:
    topic = new_name()
    made = java.create_topic(topic, 3, {"retention.ms": "4000"}, replication_factor=1)
    assert made["partitions"] == 3
    assert java.list_topics()[topic].hex == made["topic_id"].replace("-", "")
    shown = java.describe_topic(topic)
    assert [part["partition"] for part in shown["partitions"]] == [0, 1, 2]
    by_id = java.describe_topic(java.list_topics()[topic])
    assert by_id["name"] == topic
    assert java_code(java.create_topic, topic, 1) == EXISTS
    java.create_partitions(topic, 5, validate_only=True)
    assert len(java.describe_topic(topic)["partitions"]) == 3
    java.create_partitions(topic, 5)
    assert len(java.describe_topic(topic)["partitions"]) == 5
    assert java_code(java.create_partitions, topic, 2) == INVALID_PARTITIONS
    java.delete_topics(topic)
    assert topic not in java.list_topics()
    assert java_code(java.delete_topics, topic) == UNKNOWN_TOPIC
    again = new_name()
    java.create_topic(again)
    java.delete_topics(java.list_topics()[again])
    assert java_code(java.describe_topic, again) == UNKNOWN_TOPIC


def test_java_is_told_why_not(java: JavaClient) -> None:
    assert java_code(java.create_topic, "no/slash", 1) == BAD_NAME
    assert java_code(java.create_topic, new_name(), 1, replication_factor=3) == BAD_REPLICATION
    assert java_code(java.create_topic, new_name(), 1, {"no.such": "1"}) == INVALID_CONFIG
    name = new_name()
    java.create_topic(name, 2, validate_only=True)
    assert name not in java.list_topics()


def test_java_changes_settings(java: JavaClient) -> None:
    topic = new_name()
    java.create_topic(topic, 1, {"retention.ms": "4000"})
    configs = java.describe_configs(topic)
    assert configs["retention.ms"]["value"] == "4000"
    assert configs["retention.ms"]["source"] == "DYNAMIC_TOPIC_CONFIG"
    assert configs["max.message.bytes"]["source"] == "DEFAULT_CONFIG"
    java.alter_configs(
        topic,
        ("set", "max.message.bytes", "2000"),
        ("delete", "retention.ms", None),
        ("append", "cleanup.policy", "compact"),
    )
    configs = java.describe_configs(topic)
    assert configs["max.message.bytes"]["value"] == "2000"
    assert configs["retention.ms"]["value"] == "604800000"
    assert set(configs["cleanup.policy"]["value"].split(",")) == {"compact", "delete"}
    assert java_code(java.alter_configs, topic, ("set", "retention.ms", "x")) == INVALID_CONFIG
    assert java.describe_configs("1", resource_type="broker")["num.partitions"]["value"] == "1"


def test_java_lists_offsets_and_deletes_records(java: JavaClient, filled: str) -> None:
    places: dict[str | int, tuple[int, int]] = {
        "earliest": (0, -1), "latest": (3, -1), "max_timestamp": (1, TIMES[1]),
        "earliest_local": (0, -1), TIMES[0]: (0, TIMES[0]), TIMES[0] + 1: (1, TIMES[1]),
        TIMES[1] + 1: (-1, -1),
    }  # fmt: skip
    for place, expected in places.items():
        listed = java.list_offset(filled, 0, place)
        assert (listed.offset, listed.timestamp_ms) == expected, place
    assert java.list_offset(filled, 0, "latest", read_committed=True).offset == 3
    assert java.delete_records(filled, 0, 2) == 2
    assert java.list_offset(filled, 0, "earliest").offset == 2
    assert java_code(java.delete_records, filled, 0, 99) == OUT_OF_RANGE
    assert java.delete_records(filled, 0, -1) == 3
    assert [r.value for r in java.consume(filled, [0])] == []


def test_java_shows_the_cluster_and_its_directories(
    java: JavaClient, shared: Broker, filled: str
) -> None:
    cluster = java.describe_cluster()
    assert cluster["cluster_id"] == shared.call(lambda server: server.store.cluster_id)
    (node,) = cluster["nodes"]
    assert f"{node['host']}:{node['port']}" == shared.bootstrap
    assert cluster["controller"] == node["id"] == 1
    ((folder, shown),) = java.describe_log_dirs(1).items()
    assert folder == shared.data
    assert shown["total_bytes"] >= shown["usable_bytes"] > 0
    assert shown["partitions"][f"{filled}-0"]["size_bytes"] == 3 * len(batch(b"0", at_ms=TIMES[0]))


def test_java_shows_producers(java: JavaClient) -> None:
    topic = new_name()
    java.create_topic(topic)
    records = [NewRecord(b"x", timestamp_ms=TIMES[0], partition=0)] * 3
    java.produce(topic, records, {"enable.idempotence": "true", "client.id": topic})
    (shown,) = java.describe_producers(topic, 0)
    assert (shown["producer_epoch"], shown["last_sequence"]) == (0, 2)
    assert shown["last_timestamp"] == TIMES[0]


# ---- confluent-kafka -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def confluent(shared: Broker) -> AdminClient:
    return AdminClient({"bootstrap.servers": shared.bootstrap})


def settled(futures: Any) -> Any:
    """The result of the only thing that was asked for."""
    (future,) = futures.values()
    return future.result(60)


def confluent_code(futures: Any) -> int:
    with pytest.raises(KafkaException) as error:
        settled(futures)
    found: KafkaError = error.value.args[0]
    return int(found.code())


def test_confluent_makes_shows_grows_and_deletes_topics(confluent: AdminClient) -> None:
    name = new_name()
    settled(confluent.create_topics([NewTopic(name, 2, 1, config={"retention.ms": "4000"})]))
    shown = settled(confluent.describe_topics(Topics([name])))
    assert (shown.name, len(shown.partitions)) == (name, 2)
    assert [node.id for node in shown.partitions[0].isr] == [1]
    assert name in confluent.list_topics(timeout=60).topics
    assert confluent_code(confluent.create_topics([NewTopic(name, 1, 1)])) == EXISTS
    settled(confluent.create_partitions([NewPartitions(name, 4)]))
    assert len(settled(confluent.describe_topics(Topics([name]))).partitions) == 4
    too_few = confluent.create_partitions([NewPartitions(name, 1)])
    assert confluent_code(too_few) == INVALID_PARTITIONS
    too_many = confluent.create_topics([NewTopic(new_name(), 1, 3)])
    assert confluent_code(too_many) == BAD_REPLICATION
    settled(confluent.delete_topics([name]))
    assert confluent_code(confluent.delete_topics([name])) == UNKNOWN_TOPIC
    checked = new_name()
    settled(confluent.create_topics([NewTopic(checked, 1, 1)], validate_only=True))
    assert checked not in confluent.list_topics(timeout=60).topics


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_confluent_changes_settings(confluent: AdminClient) -> None:
    name = new_name()
    settled(confluent.create_topics([NewTopic(name, 1, 1, config={"retention.ms": "4000"})]))

    def values() -> dict[str, str]:
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)
        return {k: e.value for k, e in settled(confluent.describe_configs([resource])).items()}

    assert values()["retention.ms"] == "4000"
    step = ConfigEntry("segment.bytes", "4096", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, name, incremental_configs=[step])
    settled(confluent.incremental_alter_configs([resource]))
    assert (values()["retention.ms"], values()["segment.bytes"]) == ("4000", "4096")
    whole = ConfigResource(ConfigResource.Type.TOPIC, name, set_config={"flush.ms": "9"})
    settled(confluent.alter_configs([whole]))
    # The older call replaces all that was set.
    assert values()["flush.ms"] == "9"
    assert (values()["retention.ms"], values()["segment.bytes"]) == ("604800000", "268435456")
    bad = ConfigResource(ConfigResource.Type.TOPIC, name, set_config={"flush.ms": "x"})
    assert confluent_code(confluent.alter_configs([bad])) == INVALID_CONFIG
    broker = ConfigResource(ConfigResource.Type.BROKER, "1")
    assert settled(confluent.describe_configs([broker]))["num.partitions"].value == "1"


def test_confluent_lists_offsets_and_deletes_records(confluent: AdminClient, filled: str) -> None:
    place = TopicPartition(filled, 0)
    for spec, expected in (
        (SPEC.earliest(), 0), (SPEC.latest(), 3), (SPEC.max_timestamp(), 1),
        (SPEC.for_timestamp(TIMES[0] + 1), 1),
    ):  # fmt: skip
        listed = settled(confluent.list_offsets({place: spec}))
        assert listed.offset == expected
    level = IsolationLevel.READ_COMMITTED
    listed = settled(confluent.list_offsets({place: SPEC.latest()}, isolation_level=level))
    assert listed.offset == 3
    deleted = settled(confluent.delete_records([TopicPartition(filled, 0, 2)]))
    assert deleted.low_watermark == 2
    assert settled(confluent.list_offsets({place: SPEC.earliest()})).offset == 2


def test_confluent_shows_the_cluster(confluent: AdminClient, shared: Broker) -> None:
    cluster = confluent.describe_cluster().result(60)
    assert cluster.cluster_id == shared.call(lambda server: server.store.cluster_id)
    assert [f"{node.host}:{node.port}" for node in cluster.nodes] == [shared.bootstrap]
    assert cluster.controller.id == 1


# ---- the others ------------------------------------------------------------------------------


def test_kafka_python_administers(shared: Broker, filled: str) -> None:
    admin = KafkaAdminClient(bootstrap_servers=shared.bootstrap)
    name = new_name()
    try:
        admin.create_topics([PythonTopic(name, 2, 1)])
        assert name in admin.list_topics()
        (shown,) = admin.describe_topics([name])
        assert len(shown["partitions"]) == 2
        admin.delete_topics([name])
        assert name not in admin.list_topics()
        assert admin.describe_cluster()["cluster_id"] == shared.call(lambda s: s.store.cluster_id)
    finally:
        admin.close()


def test_aiokafka_administers(shared: Broker) -> None:
    name = new_name()

    async def run() -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=shared.bootstrap)
        await admin.start()
        try:
            await admin.create_topics([AsyncTopic(name, 2, 1)])
            assert name in await admin.list_topics()
            (shown,) = await admin.describe_topics([name])
            assert len(shown["partitions"]) == 2
            await admin.delete_topics([name])
            assert name not in await admin.list_topics()
        finally:
            await admin.close()

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.processes
def test_kcat_shows_the_cluster(shared: Broker, filled: str) -> None:
    told = json.loads(KcatClient(shared.bootstrap).listing())
    assert [broker["name"] for broker in told["brokers"]] == [shared.bootstrap]
    (shown,) = [topic for topic in told["topics"] if topic["topic"] == filled]
    assert [part["leader"] for part in shown["partitions"]] == [1]
