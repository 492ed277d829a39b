"""What is answered about replicas: moving them, leaders, log directories, the metadata quorum."""

from __future__ import annotations

from typing import Any

from conformance.scenario import scenario
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
from tests.broker.protocol_client import ProtocolClient, error_name
from tests.broker.requests import DELETE, metadata, new_name

NO_BROKER = 77


def said(message: str | None, topic: str) -> str | None:
    """A message, which Kafka's tools print, without the name of the topic."""
    return message and message.replace(topic, "TOPIC")


def broker_id(client: ProtocolClient) -> int:
    return int(client.call(metadata()).brokers[0].node_id)


@scenario()
def assigning_partitions(client: ProtocolClient) -> Any:
    """A partition stays with the only broker; unknown brokers, none, or one twice are refused."""
    topic, own = client.topic(2), broker_id(client)
    outcomes = []
    for version in (0, 1):
        for name, number, replicas in (
            (topic, 0, [own]), (topic, 1, []), (topic, 0, [NO_BROKER]), (topic, 0, [own, own]),
            (topic, 1, [own, NO_BROKER]), (topic, 0, [-1]), (topic, 0, None), (topic, 2, [own]),
            (topic, -1, None), (new_name(), 0, [own]), (new_name(), 0, None),
        ):  # fmt: skip
            partition = ReassignablePartition(partition_index=number, replicas=replicas)
            request = AlterPartitionReassignmentsRequest(
                allow_replication_factor_change=version == 0,
                topics=[ReassignableTopic(name=name, partitions=[partition])],
            )
            answer = client.call(request, version)
            (result,) = answer.responses[0].partitions
            outcomes.append(
                (error_name(answer.error_code), answer.allow_replication_factor_change,
                 result.partition_index, error_name(result.error_code),
                 said(result.error_message, name))
            )  # fmt: skip
    partition = client.call(metadata(topic)).topics[0].partitions[0]
    outcomes.append(partition.replica_nodes == partition.isr_nodes == [own])
    return outcomes


@scenario()
def reassignments_of_partitions(client: ProtocolClient) -> Any:
    """None is under way, neither of all topics nor of one that exists or does not."""
    outcomes = []
    for name in (None, client.topic(), new_name()):
        one_topic = ListPartitionReassignmentsTopics(name=name or "", partition_indexes=[0])
        request = ListPartitionReassignmentsRequest(topics=[one_topic] if name else None)
        answer = client.call(request)
        outcomes.append((error_name(answer.error_code), answer.error_message, len(answer.topics)))
    return outcomes


@scenario()
def throttles_that_are_removed(client: ProtocolClient) -> Any:
    """Kafka's tool removes them from broker and topics after a reassignment, set or not."""
    topic, own = client.topic(), str(broker_id(client))
    kinds = ("leader.replication.throttled", "follower.replication.throttled")
    outcomes = []
    for kind, name, settings in (
        (4, own, [f"{kind}.rate" for kind in kinds]),
        (4, own, ["replica.alter.log.dirs.io.max.bytes.per.second"]),
        (2, topic, [f"{kind}.replicas" for kind in kinds]),
    ):
        configs = [
            AlterableConfig(name=setting, config_operation=DELETE, value=None)
            for setting in settings
        ]
        resource = AlterConfigsResource(resource_type=kind, resource_name=name, configs=configs)
        answer = client.call(IncrementalAlterConfigsRequest(resources=[resource]))
        outcomes.append(error_name(answer.responses[0].error_code))
    return outcomes


@scenario()
def elections_of_leaders(client: ProtocolClient) -> Any:
    """None is needed; unknown partitions and unknown types of elections are refused."""
    topic, unknown = client.topic(2), new_name()
    wanted = [
        TopicPartitions(topic=topic, partitions=[0, 1, 2]),
        TopicPartitions(topic=unknown, partitions=[0]),
    ]
    outcomes = []
    for version, kind in ((0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)):
        answer = client.call(ElectLeadersRequest(election_type=kind, topic_partitions=wanted),
                             version)  # fmt: skip
        results = {
            result.topic: [
                (
                    item.partition_id,
                    error_name(item.error_code),
                    said(item.error_message, result.topic),
                )
                for item in result.partition_result
            ]
            for result in answer.replica_election_results
        }
        outcomes.append((error_name(answer.error_code), results[topic], results[unknown]))
    return outcomes


@scenario()
def elections_of_all_leaders(client: ProtocolClient) -> Any:
    """Every topic is named, with the partitions that needed an election: none."""
    topic = client.topic()
    outcomes: list[Any] = []
    for kind in (0, 1, 2):
        answer = client.call(ElectLeadersRequest(election_type=kind, topic_partitions=None))
        results = {r.topic: len(r.partition_result) for r in answer.replica_election_results}
        outcomes.append((error_name(answer.error_code), results.get(topic)))
    answer = client.call(ElectLeadersRequest(topic_partitions=[]))
    outcomes.append((error_name(answer.error_code), len(answer.replica_election_results)))
    return outcomes


@scenario()
def moving_replicas_between_log_directories(client: ProtocolClient) -> Any:
    """A replica may be moved to where it is; unknown directories and partitions are refused."""
    topic, unknown = client.topic(2), new_name()
    own = client.call(DescribeLogDirsRequest(topics=None)).results[0].log_dir
    outcomes = []
    for version in (1, 2):
        moves = [(own, topic, [0, 1, 2]), ("/no/such/directory", topic, [1]), (own, unknown, [0])]
        directories: dict[str, AlterReplicaLogDir] = {}
        for path, name, numbers in moves:
            directory = directories.setdefault(path, AlterReplicaLogDir(path=path))
            directory.topics.append(AlterReplicaLogDirTopic(name=name, partitions=numbers))
        request = AlterReplicaLogDirsRequest(dirs=list(directories.values()))
        answer = client.call(request, version)
        outcomes.append(
            sorted(
                (result.topic_name == topic, item.partition_index, error_name(item.error_code))
                for result in answer.results
                for item in result.partitions
            )
        )
    return outcomes


@scenario()
def the_metadata_quorum(client: ProtocolClient) -> Any:
    """One voter, which leads and is up to date; no observers."""
    own = broker_id(client)
    outcomes = []
    for version in (0, 1, 2):
        answer = client.call(quorum_of(("__cluster_metadata", [0])), version)
        (quorum,) = answer.topics[0].partitions
        (voter,) = quorum.current_voters
        outcomes.append(
            (error_name(answer.error_code), answer.topics[0].topic_name, quorum.partition_index,
             error_name(quorum.error_code), quorum.leader_id == own, quorum.leader_epoch > 0,
             quorum.high_watermark > 0, voter.replica_id == own,
             voter.log_end_offset >= quorum.high_watermark, voter.last_fetch_timestamp > 0,
             voter.last_caught_up_timestamp > 0, len(quorum.observers),
             [(node.node_id == own, len(node.listeners)) for node in answer.nodes])
        )  # fmt: skip
    return outcomes


@scenario()
def quorums_of_other_topics(client: ProtocolClient) -> Any:
    """Only the metadata has a quorum."""
    topic = client.topic()
    outcomes = []
    requests: list[list[tuple[str, list[int]]]] = [
        [(topic, [0])], [("__cluster_metadata", [1])], [("__cluster_metadata", [0, 1])],
        [("__cluster_metadata", [0]), (topic, [0])], [("__cluster_metadata", [])], [],
    ]  # fmt: skip
    for topics in requests:
        answer = client.call(quorum_of(*topics))
        codes = [
            (item.partition_index, error_name(item.error_code), item.leader_id)
            for told in answer.topics
            for item in told.partitions
        ]
        outcomes.append((error_name(answer.error_code), codes, len(answer.nodes)))
    return outcomes


def quorum_of(*topics: tuple[str, list[int]]) -> DescribeQuorumRequest:
    return DescribeQuorumRequest(
        topics=[
            RequestTopicData(
                topic_name=name,
                partitions=[RequestPartitionData(partition_index=number) for number in numbers],
            )
            for name, numbers in topics
        ]
    )
