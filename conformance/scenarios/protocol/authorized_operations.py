"""What a client may do to topics, groups and the cluster, where nobody restricts it."""

from __future__ import annotations

from typing import Any

from conformance.scenario import scenario
from conformance.scenarios.protocol.groups_classic import group_name
from conformance.scenarios.protocol.groups_consumer import Member, ask, known_topic, share_beat
from penstock.wire.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from penstock.wire.messages.describe_cluster import DescribeClusterRequest
from penstock.wire.messages.describe_groups import DescribeGroupsRequest
from penstock.wire.messages.describe_topic_partitions import (
    DescribeTopicPartitionsRequest,
    TopicRequest,
)
from penstock.wire.messages.share_group_describe import ShareGroupDescribeRequest
from tests.broker.group_requests import commit
from tests.broker.protocol_client import ProtocolClient, error_name
from tests.broker.requests import metadata, new_name


@scenario()
def operations_in_metadata(client: ProtocolClient) -> Any:
    """Of topics, and up to version 10 of the cluster; unknown names have them, unknown ids not."""
    topic, unknown = client.topic(), new_name()
    outcomes = []
    for version in range(8, 14):
        for flag in (True, False):
            request = metadata(topic, unknown, "no/slash")
            request.include_topic_authorized_operations = flag
            request.include_cluster_authorized_operations = flag and version <= 10
            answer = client.call(request, version)
            of_topics = sorted(
                (error_name(item.error_code), item.topic_authorized_operations)
                for item in answer.topics
            )
            outcomes.append((version, flag, of_topics, answer.cluster_authorized_operations))
    by_id = metadata(client.ids[topic])
    by_id.include_topic_authorized_operations = True
    outcomes += [item.topic_authorized_operations for item in client.call(by_id).topics]
    return outcomes


@scenario()
def operations_on_the_cluster(client: ProtocolClient) -> Any:
    """They are described if the request asks for them."""
    return [
        client.call(
            DescribeClusterRequest(include_cluster_authorized_operations=flag), version
        ).cluster_authorized_operations
        for version in (0, 1, 2)
        for flag in (True, False)
    ]


@scenario()
def operations_on_described_topics(client: ProtocolClient) -> Any:
    """DescribeTopicPartitions has no such flag: they are always there."""
    names = [TopicRequest(name=client.topic()), TopicRequest(name=new_name())]
    answer = client.call(DescribeTopicPartitionsRequest(topics=names))
    return sorted(
        (error_name(item.error_code), item.topic_authorized_operations) for item in answer.topics
    )


@scenario()
def operations_on_classic_groups(client: ProtocolClient) -> Any:
    """Of groups without an error: up to version 5 an unknown group is dead, which is none."""
    group, unknown = group_name(client), new_name("g")
    client.call(commit(group, client.topic(), {0: 0}), 9)
    outcomes = []
    for version in (3, 5, 6):
        for flag in (True, False):
            request = DescribeGroupsRequest(
                groups=[group, unknown], include_authorized_operations=flag
            )
            outcomes.append(operations_of(client.call(request, version)))
    return outcomes


@scenario()
def operations_on_groups_that_the_broker_assigns(client: ProtocolClient) -> Any:
    """Consumer groups and share groups: of those that exist."""
    topic, consumers, sharers = known_topic(client), new_name("g"), new_name("s")
    Member(client, consumers, "one", [topic]).beat()
    share_beat(client, sharers, "one", 0, [topic])
    requests = [
        request(group_ids=[group, new_name()], include_authorized_operations=flag)
        for flag in (True, False)
        for request, group in (
            (ConsumerGroupDescribeRequest, consumers),
            (ShareGroupDescribeRequest, sharers),
        )
    ]
    return [operations_of(ask(client, request)) for request in requests]


def operations_of(answer: Any) -> list[tuple[str, int]]:
    """Kafka describes groups in any order."""
    return sorted(
        (error_name(group.error_code), group.authorized_operations) for group in answer.groups
    )
