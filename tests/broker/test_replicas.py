"""Reassignments, elections, log directories and the quorum of a cluster with one broker."""

from __future__ import annotations

from penstock.broker.config import NODE_ID
from penstock.testing.broker import Broker
from penstock.wire.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    ReassignablePartition,
    ReassignableTopic,
)
from penstock.wire.messages.alter_replica_log_dirs import (
    AlterReplicaLogDir,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirTopic,
)
from penstock.wire.messages.describe_log_dirs import DescribeLogDirsRequest
from penstock.wire.messages.describe_quorum import (
    DescribeQuorumRequest,
    RequestPartitionData,
    RequestTopicData,
)
from penstock.wire.messages.elect_leaders import ElectLeadersRequest, TopicPartitions
from penstock.wire.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from penstock.wire.messages.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsTopics,
)
from tests.broker.protocol_client import error_name
from tests.broker.raw import RawClient
from tests.broker.requests import DELETE, SET, TOPIC_RESOURCE, create, metadata, new_name

BROKER = 4
UNKNOWN = "UNKNOWN_TOPIC_OR_PARTITION"


# ---- reassignments ---------------------------------------------------------------------------


def reassigned(client: RawClient, topic: str, number: int, replicas: list[int] | None) -> str:
    partition = ReassignablePartition(partition_index=number, replicas=replicas)
    request = AlterPartitionReassignmentsRequest(
        topics=[ReassignableTopic(name=topic, partitions=[partition])]
    )
    answer = client.call(request)
    assert not answer.error_code
    (result,) = answer.responses
    assert result.name == topic
    return error_name(result.partitions[0].error_code)


def test_a_partition_can_only_be_assigned_to_this_broker(client: RawClient, topic: str) -> None:
    refused = "INVALID_REPLICA_ASSIGNMENT"
    assert reassigned(client, topic, 0, [NODE_ID]) == "NONE"
    for replicas in ([], [7], [NODE_ID, 7], [NODE_ID, NODE_ID], [-1]):
        assert reassigned(client, topic, 0, replicas) == refused
    assert reassigned(client, topic, 1, [NODE_ID]) == UNKNOWN
    assert reassigned(client, new_name(), 0, [NODE_ID]) == UNKNOWN
    told = client.call(metadata(topic)).topics[0].partitions[0]
    assert (told.leader_id, told.replica_nodes, told.isr_nodes) == (NODE_ID, [NODE_ID], [NODE_ID])


def test_there_is_no_reassignment_to_end(client: RawClient, topic: str) -> None:
    assert reassigned(client, topic, 0, None) == "NO_REASSIGNMENT_IN_PROGRESS"
    assert reassigned(client, new_name(), 0, None) == UNKNOWN


def test_no_reassignment_is_under_way(client: RawClient, topic: str) -> None:
    assert reassigned(client, topic, 0, [NODE_ID]) == "NONE"
    for name in (None, topic, new_name()):
        one_topic = ListPartitionReassignmentsTopics(name=name or "", partition_indexes=[0])
        request = ListPartitionReassignmentsRequest(topics=[one_topic] if name else None)
        answer = client.call(request)
        assert (answer.error_code, answer.error_message, answer.topics) == (0, None, [])


def test_throttles_of_reassignments_are_removed_though_there_are_none(
    client: RawClient, topic: str
) -> None:
    """As Kafka's tool does when a reassignment is complete."""
    rates = ("leader.replication.throttled.rate", "follower.replication.throttled.rate")
    replicas = ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas")
    moving = "replica.alter.log.dirs.io.max.bytes.per.second"
    own, other = str(NODE_ID), "77"
    for kind, name, operation, settings, expected in (
        (BROKER, own, DELETE, (*rates, moving), "NONE"),
        (TOPIC_RESOURCE, topic, DELETE, replicas, "NONE"),
        (BROKER, own, DELETE, (*rates, "num.partitions"), "INVALID_REQUEST"),
        (BROKER, own, SET, rates, "INVALID_REQUEST"),
        (BROKER, other, DELETE, rates, "INVALID_REQUEST"),
    ):
        configs = [
            AlterableConfig(
                name=item, config_operation=operation, value="1" if operation == SET else None
            )
            for item in settings
        ]
        resource = AlterConfigsResource(resource_type=kind, resource_name=name, configs=configs)
        answer = client.call(IncrementalAlterConfigsRequest(resources=[resource]))
        assert error_name(answer.responses[0].error_code) == expected


# ---- elections -------------------------------------------------------------------------------


def test_no_election_is_needed(client: RawClient, topic: str) -> None:
    unknown = new_name()
    partitions = [
        TopicPartitions(topic=topic, partitions=[0, 1]),
        TopicPartitions(topic=unknown, partitions=[0]),
    ]
    for election in (0, 1):
        answer = client.call(
            ElectLeadersRequest(election_type=election, topic_partitions=partitions)
        )
        assert answer.error_code == 0
        assert [
            (result.topic, [error_name(item.error_code) for item in result.partition_result])
            for result in answer.replica_election_results
        ] == [(topic, ["ELECTION_NOT_NEEDED", UNKNOWN]), (unknown, [UNKNOWN])]


def test_of_all_partitions_none_is_elected(client: RawClient, topic: str) -> None:
    answer = client.call(ElectLeadersRequest(topic_partitions=None))
    results = {r.topic: r.partition_result for r in answer.replica_election_results}
    assert topic in results
    assert not any(results.values())


def test_an_unknown_type_of_election_is_refused(client: RawClient, topic: str) -> None:
    partitions = [TopicPartitions(topic=topic, partitions=[0])]
    answer = client.call(ElectLeadersRequest(election_type=2, topic_partitions=partitions))
    assert error_name(answer.error_code) == "INVALID_REQUEST"
    (result,) = answer.replica_election_results[0].partition_result
    assert error_name(result.error_code) == "INVALID_REQUEST"
    answer = client.call(ElectLeadersRequest(election_type=2, topic_partitions=None))
    assert error_name(answer.error_code) == "INVALID_REQUEST"
    assert answer.replica_election_results == []


# ---- log directories -------------------------------------------------------------------------


def test_replicas_are_in_the_one_log_directory(client: RawClient, topic: str) -> None:
    own = client.call(DescribeLogDirsRequest(topics=None)).results[0].log_dir
    unknown = new_name()
    moves = [(own, topic, [0, 1]), ("/elsewhere", topic, [2]), (own, unknown, [0])]
    answer = client.call(
        AlterReplicaLogDirsRequest(
            dirs=[
                AlterReplicaLogDir(
                    path=path, topics=[AlterReplicaLogDirTopic(name=name, partitions=numbers)]
                )
                for path, name, numbers in moves
            ]
        )
    )
    assert {
        (result.topic_name, item.partition_index): error_name(item.error_code)
        for result in answer.results
        for item in result.partitions
    } == {
        (topic, 0): "NONE",
        (topic, 1): UNKNOWN,
        (topic, 2): "LOG_DIR_NOT_FOUND",
        (unknown, 0): UNKNOWN,
    }


# ---- the quorum ------------------------------------------------------------------------------


def quorum(topic: str = "__cluster_metadata", *partitions: int) -> DescribeQuorumRequest:
    numbers = [RequestPartitionData(partition_index=number) for number in partitions or (0,)]
    return DescribeQuorumRequest(topics=[RequestTopicData(topic_name=topic, partitions=numbers)])


def test_the_quorum_is_this_broker(shared: Broker, client: RawClient) -> None:
    before = client.call(quorum()).topics[0].partitions[0].high_watermark
    client.call(create(new_name()))
    answer = client.call(quorum())
    (told,) = answer.topics[0].partitions
    assert (told.error_code, told.leader_id, told.observers) == (0, NODE_ID, [])
    assert told.high_watermark > before
    (voter,) = told.current_voters
    assert (voter.replica_id, voter.log_end_offset) == (NODE_ID, told.high_watermark)
    assert voter.last_fetch_timestamp == voter.last_caught_up_timestamp > 0
    (node,) = answer.nodes
    (listener,) = node.listeners
    assert (node.node_id, f"{listener.host}:{listener.port}") == (NODE_ID, shared.bootstrap)


def test_only_the_metadata_has_a_quorum(client: RawClient, topic: str) -> None:
    for request in (quorum(topic), quorum("__cluster_metadata", 1), quorum(new_name(), 0, 1)):
        answer = client.call(request)
        assert (answer.error_code, answer.nodes) == (0, [])
        codes = {error_name(item.error_code) for item in answer.topics[0].partitions}
        assert codes == {UNKNOWN}
