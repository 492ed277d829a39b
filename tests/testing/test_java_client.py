"""The Java client through its wrapper, against a real Apache Kafka: the yardstick itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from uuid import UUID, uuid4

import pytest

from penstock.testing.apache_kafka import ApacheKafka
from penstock.testing.java_client import JavaClient, NewRecord
from penstock.testing.kafka_tools import JavaClientError, KafkaTools
from tests.waiting import eventually

UNKNOWN_TOPIC, TOPIC_EXISTS, INVALID_PARTITIONS, INVALID_CONFIG = 3, 36, 37, 40


# Of today: older records would be taken by retention, sooner or later.
NOW_MS = time.time_ns() // 1_000_000


@pytest.fixture
def client(kafka_tools: KafkaTools, apache_kafka: ApacheKafka) -> Iterator[JavaClient]:
    with kafka_tools.java_client(apache_kafka.bootstrap) as java_client:
        yield java_client


@pytest.fixture
def topic(client: JavaClient) -> str:
    name = f"t-{uuid4().hex}"
    client.create_topic(name, 2)

    def leaders_answer() -> bool:
        try:
            return all(client.list_offset(name, number, "latest").offset == 0 for number in (0, 1))
        except JavaClientError:
            return False

    # A record without an acknowledgement is lost where the leader does not know of it yet.
    eventually(leaders_answer)
    return name


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_what_is_produced_is_consumed(
    client: JavaClient, topic: str, codec: str, acks: str
) -> None:
    records = [
        NewRecord(b"v1", b"k1", [("h", b"x"), ("h", b""), ("n", None)], NOW_MS, 1),
        NewRecord(None, b"tombstone", (), NOW_MS + 1, 1),
        NewRecord(b"\xff\x00", None, (), NOW_MS + 2, 1),
    ]
    config = {"compression.type": codec, "acks": acks, "enable.idempotence": "false"}
    sent = client.produce(topic, records, config)
    assert [place.partition for place in sent] == [1, 1, 1]
    if acks != "0":
        assert [place.offset for place in sent] == [0, 1, 2]
    received = client.consume(topic, [1], max_records=3)
    assert [
        NewRecord(r.value, r.key, list(r.headers), r.timestamp_ms, r.partition) for r in received
    ] == [NewRecord(r.value, r.key, list(r.headers), r.timestamp_ms, 1) for r in records]
    assert {record.timestamp_type for record in received} == {"CreateTime"}


def test_consume_from_offsets_and_to_the_end(client: JavaClient, topic: str) -> None:
    for partition in (0, 1):
        client.produce(topic, [NewRecord(b"%d" % i, partition=partition) for i in range(5)])
    received = client.consume(topic, {0: 3, 1: 4})
    assert sorted((r.partition, r.offset) for r in received) == [(0, 3), (0, 4), (1, 4)]
    assert client.consume(topic, {0: 5}) == []
    with pytest.raises(JavaClientError) as outside:
        client.consume(topic, {0: 9}, max_records=1)
    assert outside.value.error == "OffsetOutOfRangeException"


def test_waiting_for_more_than_there_is_times_out(client: JavaClient, topic: str) -> None:
    with pytest.raises(TimeoutError, match="only 0 records"):
        client.consume(topic, [0], max_records=1, timeout_s=0.2)


def test_an_idempotent_producer_goes_on_from_call_to_call(client: JavaClient, topic: str) -> None:
    config = {"enable.idempotence": "true"}
    client.produce(topic, [NewRecord(b"a", partition=0)], config)
    client.produce(topic, [NewRecord(b"b", partition=0)], config)
    (producer,) = client.describe_producers(topic, 0)
    assert producer["last_sequence"] == 1
    client.produce(topic, [NewRecord(b"c", partition=0)], {**config, "client.id": "another"})
    assert len(client.describe_producers(topic, 0)) == 2


def test_transactions_hide_what_was_aborted(client: JavaClient, topic: str) -> None:
    config = {"transactional.id": topic}
    for value, end in ((b"kept", "commit"), (b"dropped", "abort")):
        client.produce(topic, [NewRecord(value, partition=0)], config, transaction=end)
    committed = client.consume(topic, [0], read_committed=True)
    assert [record.value for record in committed] == [b"kept"]
    everything = client.consume(topic, [0])
    assert [record.value for record in everything] == [b"kept", b"dropped"]


def test_topics_are_created_listed_described_grown_deleted(client: JavaClient) -> None:
    first, second = (f"t-{uuid4().hex}" for _ in range(2))
    created = client.create_topic(first, 2, {"retention.ms": "1000"}, replication_factor=1)
    assert created["partitions"] == 2
    assert created["configs"]["retention.ms"]["value"] == "1000"
    client.create_topic(second, validate_only=True)
    # What the controller has done, a node of Kafka knows a moment later.
    topic_id = eventually(lambda: client.list_topics().get(first))
    assert topic_id is not None
    assert second not in client.list_topics()
    assert UUID(created["topic_id"]) == topic_id
    client.create_partitions(first, 3)

    def partitions(by: str | UUID) -> list[int]:
        description = client.describe_topic(by)
        assert description["name"] == first
        return [each["partition"] for each in description["partitions"]]

    eventually(lambda: partitions(first) == [0, 1, 2])
    eventually(lambda: partitions(topic_id) == [0, 1, 2])
    client.delete_topics(topic_id)
    client.create_topic(second)
    eventually(lambda: second in client.list_topics())
    client.delete_topics(second)
    eventually(lambda: not {first, second} & set(client.list_topics()))


def test_errors_carry_kafkas_code(client: JavaClient, topic: str) -> None:
    with pytest.raises(JavaClientError) as exists:
        client.create_topic(topic)
    assert (exists.value.error, exists.value.code) == ("TopicExistsException", TOPIC_EXISTS)
    assert not exists.value.says_retriable
    with pytest.raises(JavaClientError) as fewer:
        client.create_partitions(topic, 1)
    assert fewer.value.code == INVALID_PARTITIONS
    with pytest.raises(JavaClientError) as config:
        client.alter_configs(topic, ("set", "retention.ms", "soon"))
    assert config.value.code == INVALID_CONFIG
    with pytest.raises(JavaClientError) as unknown:
        client.describe_topic("never-created")
    assert unknown.value.code == UNKNOWN_TOPIC
    assert unknown.value.says_retriable
    # One bad name does not hide the good one.
    results = client.call("delete_topics", topics=[topic, "never-created"])["results"]
    assert results[topic] == {}
    assert results["never-created"]["code"] == UNKNOWN_TOPIC
    with pytest.raises(JavaClientError, match="unknown op: dance"):
        client.call("dance")


def test_configs_are_described_and_altered(client: JavaClient, topic: str) -> None:
    assert client.describe_configs(topic)["cleanup.policy"]["source"] == "DEFAULT_CONFIG"
    client.alter_configs(
        topic, ("append", "cleanup.policy", "compact"), ("set", "segment.bytes", "1048576")
    )
    # The controller answers, and the broker that is asked hears of the change a little later.
    eventually(
        lambda: client.describe_configs(topic)["cleanup.policy"]["value"] == "delete,compact"
    )
    segment_bytes = client.describe_configs(topic)["segment.bytes"]
    assert segment_bytes["source"] == "DYNAMIC_TOPIC_CONFIG"
    client.alter_configs(topic, ("delete", "segment.bytes", None))
    eventually(lambda: client.describe_configs(topic)["segment.bytes"]["value"] == "1073741824")
    assert client.describe_configs("1", resource_type="broker")["node.id"]["read_only"]


def test_offsets_by_place_and_by_time(client: JavaClient, topic: str) -> None:
    base_ms = NOW_MS
    times_ms = [base_ms, base_ms + 50, base_ms + 20]
    client.produce(topic, [NewRecord(b"", timestamp_ms=time, partition=0) for time in times_ms])

    def offset(at: str | int) -> int:
        return client.list_offset(topic, 0, at).offset

    assert (offset("earliest"), offset("latest")) == (0, 3)
    assert client.list_offset(topic, 0, "max_timestamp").timestamp_ms == base_ms + 50
    assert offset("max_timestamp") == 1
    assert (offset(base_ms), offset(base_ms + 10), offset(base_ms + 51)) == (0, 1, -1)
    assert client.delete_records(topic, 0, 2) == 2
    assert offset("earliest") == 2
    assert client.delete_records(topic, 0, -1) == 3


def test_the_cluster_and_its_directories(
    client: JavaClient, topic: str, apache_kafka: ApacheKafka
) -> None:
    cluster = client.describe_cluster()
    (node,) = cluster["nodes"]
    assert f"{node['host']}:{node['port']}" == apache_kafka.bootstrap
    assert cluster["controller"] == node["id"]
    client.produce(topic, [NewRecord(b"x" * 100, partition=0)])
    directory = client.describe_log_dirs(node["id"])[str(apache_kafka.log_dir)]
    assert directory["partitions"][f"{topic}-0"]["size_bytes"] > 100
    assert directory["usable_bytes"] > 0
