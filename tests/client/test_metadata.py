"""What a cluster has: topics, leaders and offsets, asked of both brokers."""

from __future__ import annotations

import pytest

from penstock.client import topics
from penstock.client.connection import Cluster
from penstock.client.errors import ClientError, RefusedError
from penstock.client.metadata import EARLIEST, LATEST, NO_OFFSET, Metadata, offsets
from penstock.client.producing import Sender
from penstock.client.transacting import Transaction
from penstock.records.record import BatchOptions, simple_batch
from penstock.wire.errors import ErrorCode
from tests.client.conftest import MakeTopic, unique


def test_topics_are_made_described_and_deleted(cluster: Cluster) -> None:
    name = unique("made")
    assert topics.create(cluster, name, partitions=3, config={"retention.ms": "7000"})
    assert not topics.create(cluster, name, exists_ok=True)
    with pytest.raises(RefusedError) as caught:
        topics.create(cluster, name)
    assert caught.value.code == ErrorCode.TOPIC_ALREADY_EXISTS
    assert topics.configs(cluster, name)["retention.ms"] == "7000"
    assert topics.partition_counts(cluster, [name, unique("nowhere")]) == {name: 3}
    topics.add_partitions(cluster, name, 5)
    assert topics.partition_counts(cluster, [name]) == {name: 5}
    topics.delete(cluster, [name])
    topics.delete(cluster, [unique("nowhere")], missing_ok=True)
    with pytest.raises(RefusedError, match="UNKNOWN_TOPIC"):
        topics.delete(cluster, [unique("nowhere")], timeout_s=0.1)


def test_topics_are_found_by_name_and_pattern(cluster: Cluster) -> None:
    prefix = unique("found")
    names = [f"{prefix}-{letter}" for letter in "abc"]
    for name in names:
        topics.create(cluster, name, partitions=2)
    metadata = Metadata(cluster)
    assert metadata.topics(pattern=f"{prefix}-[ab]") == names[:2]
    assert metadata.topics(pattern=prefix) == []
    assert metadata.topics([names[1], unique("nowhere")]) == [names[1]]
    assert set(names) <= set(metadata.topics())
    assert metadata.partitions(names[0]) == [0, 1]
    assert metadata.topic_id(names[0]) != metadata.topic_id(names[1])
    with pytest.raises(ClientError, match="regular expression"):
        metadata.topics(pattern="(")


def test_leaders_are_found(cluster: Cluster, bootstrap: str, make_topic: MakeTopic) -> None:
    name = make_topic(2)
    host, port = Metadata(cluster).leader(name, 1)
    assert f"{host}:{port}" == bootstrap
    metadata = Metadata(cluster, timeout_s=0.2)
    with pytest.raises(RefusedError, match="no such partition"):
        metadata.leader(name, 2)
    with pytest.raises(RefusedError, match="UNKNOWN_TOPIC"):
        metadata.leader(unique("nowhere"), 0)


def test_offsets_by_place_and_time(cluster: Cluster, make_topic: MakeTopic) -> None:
    name = make_topic(2)
    with Sender(cluster) as sender:
        for time_ms in (1_000, 2_000, 3_000):
            sender.send(name, 0, simple_batch([b"a", b"b"], timestamp_ms=time_ms))
    asked = {(name, 0): LATEST, (name, 1): EARLIEST}
    assert offsets(cluster, asked) == {(name, 0): 6, (name, 1): 0}
    assert offsets(cluster, {(name, 0): 1_500}) == {(name, 0): 2}
    assert offsets(cluster, {(name, 0): 3_001}) == {(name, 0): NO_OFFSET}
    with pytest.raises(RefusedError):
        offsets(cluster, {(unique("nowhere"), 0): LATEST}, timeout_s=0.1)


def test_what_is_not_decided_is_beyond_the_end(cluster: Cluster, make_topic: MakeTopic) -> None:
    name = make_topic()
    transaction = Transaction(cluster, unique("txn"))
    ids = transaction.init()
    transaction.add_partitions([(name, 0)])
    batch = simple_batch([b"a"], options=BatchOptions(0, *ids, 0, transactional=True))
    with Sender(cluster, transactional_id=transaction.transactional_id) as sender:
        sender.send(name, 0, batch)
    place = {(name, 0): LATEST}
    assert offsets(cluster, place)[name, 0] == 0
    assert offsets(cluster, place, isolation="read_uncommitted")[name, 0] == 1
    transaction.end(commit=False)
