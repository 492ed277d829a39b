"""Replicas: where they are, who leads, and moving them.

Each partition has one replica, on this broker and in its one log directory, and it leads. So
everything that would move a replica either changes nothing or is refused, as on a cluster of
Apache Kafka with one node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.broker.apis.context import RequestContext
from penstock.broker.catalog import ApiError
from penstock.broker.config import NODE_ID
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ReassignablePartitionResponse,
    ReassignableTopicResponse,
)
from penstock.wire.messages.alter_replica_log_dirs import (
    AlterReplicaLogDirPartitionResult,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopicResult,
)
from penstock.wire.messages.elect_leaders import (
    ElectLeadersRequest,
    ElectLeadersResponse,
    PartitionResult,
    ReplicaElectionResult,
)
from penstock.wire.messages.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)

if TYPE_CHECKING:
    from penstock.broker.server import Broker

# Kafka's ElectionType: of the preferred replica, or of one that is not in sync.
_ELECTIONS: Final = (0, 1)


def alter_replica_log_dirs(
    broker: Broker, request: AlterReplicaLogDirsRequest, context: RequestContext
) -> AlterReplicaLogDirsResponse:
    """There is one log directory, in which every replica is already."""
    # A replica that is named twice goes to the last directory that is named for it.
    directories = {
        (topic.name, number): directory.path
        for directory in request.dirs
        for topic in directory.topics
        for number in topic.partitions
    }
    results: dict[str, list[AlterReplicaLogDirPartitionResult]] = {}
    for (name, number), path in directories.items():
        code = ErrorCode.NONE
        if path != broker.store.folder:
            code = ErrorCode.LOG_DIR_NOT_FOUND
        elif broker.topics.partition(name, number) is None:
            code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        results.setdefault(name, []).append(
            AlterReplicaLogDirPartitionResult(partition_index=number, error_code=code)
        )
    return AlterReplicaLogDirsResponse(
        results=[
            AlterReplicaLogDirTopicResult(topic_name=name, partitions=partitions)
            for name, partitions in results.items()
        ]
    )


def elect_leaders(
    broker: Broker, request: ElectLeadersRequest, context: RequestContext
) -> ElectLeadersResponse:
    """No election is ever needed: the only replica leads."""
    is_known_type = request.election_type in _ELECTIONS
    if request.topic_partitions is not None:
        results = [
            ReplicaElectionResult(
                topic=topic.topic,
                partition_result=[
                    _election(broker, topic.topic, number, request.election_type)
                    for number in topic.partitions
                ],
            )
            for topic in request.topic_partitions
        ]
    elif is_known_type:
        # All topics, but only those partitions that needed an election.
        results = [ReplicaElectionResult(topic=name) for name in broker.catalog.topics]
    else:
        results = []
    return ElectLeadersResponse(
        error_code=ErrorCode.NONE if is_known_type else ErrorCode.INVALID_REQUEST,
        replica_election_results=results,
    )


def _election(broker: Broker, topic: str, number: int, election_type: int) -> PartitionResult:
    if election_type not in _ELECTIONS:
        code, message = ErrorCode.INVALID_REQUEST, f"Unknown election type {election_type}"
    elif topic not in broker.catalog.topics:
        code, message = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"No such topic as {topic}"
    elif broker.topics.partition(topic, number) is None:
        code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        message = f"No such partition as {topic}-{number}"
    else:
        code = ErrorCode.ELECTION_NOT_NEEDED
        message = "Leader election not needed for topic partition."
    return PartitionResult(partition_id=number, error_code=code, error_message=message)


def alter_partition_reassignments(
    broker: Broker, request: AlterPartitionReassignmentsRequest, context: RequestContext
) -> AlterPartitionReassignmentsResponse:
    """Partitions can only be assigned to this broker, where they are."""
    responses = []
    for topic in request.topics:
        partitions = []
        for item in topic.partitions:
            result = ReassignablePartitionResponse(
                partition_index=item.partition_index, error_message=None
            )
            try:
                _reassign(broker, topic.name, item.partition_index, item.replicas)
            except ApiError as error:
                # Without a message where the code says everything.
                result.error_code, result.error_message = error.code, str(error) or None
            partitions.append(result)
        responses.append(ReassignableTopicResponse(name=topic.name, partitions=partitions))
    return AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=request.allow_replication_factor_change,
        error_message=None,
        responses=responses,
    )


def _reassign(broker: Broker, topic: str, number: int, replicas: list[int] | None) -> None:
    """ApiError unless the replicas are what they are; None ends a reassignment."""
    if topic not in broker.catalog.topics:
        raise ApiError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"Unable to find a topic named {topic}."
        )
    if broker.topics.partition(topic, number) is None:
        raise ApiError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"Unable to find partition {topic}:{number}."
        )
    if replicas is None:
        raise ApiError(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, "")
    if not replicas:
        raise ApiError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            "The manual partition assignment includes an empty replica list.",
        )
    for replica in replicas:
        if replica != NODE_ID:
            raise ApiError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"The manual partition assignment includes broker {replica}, but no such broker "
                "is registered.",
            )
    if len(replicas) > 1:
        raise ApiError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"The manual partition assignment includes the broker {NODE_ID} more than once.",
        )


def list_partition_reassignments(
    broker: Broker, request: ListPartitionReassignmentsRequest, context: RequestContext
) -> ListPartitionReassignmentsResponse:
    """Always none: there is no broker to move a replica to."""
    return ListPartitionReassignmentsResponse(error_message=None)
