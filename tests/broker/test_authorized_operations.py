"""What a client may do to topics, groups and the cluster: everything, told if it is asked for."""

from __future__ import annotations

import pytest

from penstock.wire.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from penstock.wire.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from penstock.wire.messages.describe_cluster import DescribeClusterRequest
from penstock.wire.messages.describe_groups import DescribeGroupsRequest
from penstock.wire.messages.describe_topic_partitions import (
    DescribeTopicPartitionsRequest,
    TopicRequest,
)
from penstock.wire.messages.metadata import MetadataRequest
from penstock.wire.messages.share_group_describe import ShareGroupDescribeRequest
from penstock.wire.messages.share_group_heartbeat import ShareGroupHeartbeatRequest
from tests.broker.group_requests import commit
from tests.broker.raw import RawClient
from tests.broker.requests import metadata, new_name

# Kafka's codes of operations: read 3, write 4, create 5, delete 6, alter 7, describe 8, ...
ON_TOPIC = 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 10 | 1 << 11
ON_GROUP = 1 << 3 | 1 << 6 | 1 << 8 | 1 << 10 | 1 << 11
ON_CLUSTER = 1 << 5 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12
NOT_ASKED = -(1 << 31)


def asked_of(topic: str, *, of_topic: bool, of_cluster: bool) -> MetadataRequest:
    request = metadata(topic)
    request.include_topic_authorized_operations = of_topic
    request.include_cluster_authorized_operations = of_cluster
    return request


@pytest.mark.parametrize("version", range(8, 14))
def test_of_topics_and_the_cluster_in_metadata(client: RawClient, topic: str, version: int) -> None:
    told = client.call(asked_of(topic, of_topic=True, of_cluster=version <= 10), version)
    assert told.topics[0].topic_authorized_operations == ON_TOPIC
    assert told.cluster_authorized_operations == (ON_CLUSTER if version <= 10 else NOT_ASKED)
    told = client.call(asked_of(topic, of_topic=False, of_cluster=False), version)
    assert told.topics[0].topic_authorized_operations == NOT_ASKED
    assert told.cluster_authorized_operations == NOT_ASKED


def test_of_topics_that_are_not_there_or_are_made(client: RawClient) -> None:
    unknown = new_name()
    request = asked_of(unknown, of_topic=True, of_cluster=False)
    assert client.call(request).topics[0].topic_authorized_operations == ON_TOPIC
    request.allow_auto_topic_creation = True
    assert client.call(request).topics[0].topic_authorized_operations == ON_TOPIC
    request.topics = None
    told = client.call(request).topics
    assert {topic.topic_authorized_operations for topic in told} == {ON_TOPIC}


@pytest.mark.parametrize("version", range(3))
def test_of_the_cluster(client: RawClient, version: int) -> None:
    for flag, operations in ((True, ON_CLUSTER), (False, NOT_ASKED)):
        request = DescribeClusterRequest(include_cluster_authorized_operations=flag)
        assert client.call(request, version).cluster_authorized_operations == operations


def test_of_described_topics_always(client: RawClient, topic: str) -> None:
    names = [TopicRequest(name=topic), TopicRequest(name=new_name())]
    told = client.call(DescribeTopicPartitionsRequest(topics=names)).topics
    assert [item.topic_authorized_operations for item in told] == [ON_TOPIC, ON_TOPIC]


def test_of_classic_groups(client: RawClient, topic: str) -> None:
    group, unknown = new_name("g"), new_name("g")
    client.call(commit(group, topic, {0: 0}), 9)
    for flag, operations in ((True, ON_GROUP), (False, NOT_ASKED)):
        request = DescribeGroupsRequest(groups=[group, unknown], include_authorized_operations=flag)
        told = client.call(request, 6).groups
        assert [item.authorized_operations for item in told] == [operations, NOT_ASKED]
        # Before version 6 an unknown group is dead, which is no error.
        told = client.call(request, 5).groups
        assert [item.authorized_operations for item in told] == [operations, operations]


def test_of_groups_whose_partitions_the_broker_assigns(client: RawClient, topic: str) -> None:
    consumers, sharers = new_name("g"), new_name("s")
    client.call(
        ConsumerGroupHeartbeatRequest(
            group_id=consumers,
            member_id="one",
            rebalance_timeout_ms=30_000,
            subscribed_topic_names=[topic],
            topic_partitions=[],
        )
    )
    client.call(
        ShareGroupHeartbeatRequest(
            group_id=sharers, member_id="one", subscribed_topic_names=[topic]
        )
    )
    for kind, group in (
        (ConsumerGroupDescribeRequest, consumers),
        (ShareGroupDescribeRequest, sharers),
    ):
        for flag, operations in ((True, ON_GROUP), (False, NOT_ASKED)):
            request = kind(group_ids=[group, new_name()], include_authorized_operations=flag)
            known, unknown = client.call(request).groups
            assert (known.error_code, known.authorized_operations) == (0, operations)
            assert unknown.authorized_operations == NOT_ASKED
