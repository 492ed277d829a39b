"""DescribeQuorum: the quorum of the cluster's metadata, which is this broker alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.broker.apis.context import RequestContext
from penstock.broker.config import NODE_ID
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.describe_quorum import (
    DescribeQuorumRequest,
    DescribeQuorumResponse,
    Listener,
    Node,
    ReplicaState,
    ResponsePartitionData,
    ResponseTopicData,
)

if TYPE_CHECKING:
    from penstock.broker.server import Broker

# Kafka's name of the topic that holds the metadata, which is the only one to ask for.
CLUSTER_METADATA: Final = "__cluster_metadata"
_LISTENER: Final = "PLAINTEXT"


def describe_quorum(
    broker: Broker, request: DescribeQuorumRequest, context: RequestContext
) -> DescribeQuorumResponse:
    """One voter, which leads, and no observers."""
    wanted = [
        (topic.topic_name, [item.partition_index for item in topic.partitions])
        for topic in request.topics
    ]
    if wanted != [(CLUSTER_METADATA, [0])]:
        return _unknown(wanted)
    log = broker.metadata_log.partition
    now_ms = broker.clock.now_ms()
    leader = ReplicaState(
        replica_id=NODE_ID,
        log_end_offset=log.log_end,
        last_fetch_timestamp=now_ms,
        last_caught_up_timestamp=now_ms,
    )
    quorum = ResponsePartitionData(
        partition_index=0,
        leader_id=NODE_ID,
        leader_epoch=broker.leader_epoch,
        high_watermark=log.visible,
        current_voters=[leader],
    )
    host, port = broker.advertised
    return DescribeQuorumResponse(
        topics=[ResponseTopicData(topic_name=CLUSTER_METADATA, partitions=[quorum])],
        nodes=[Node(node_id=NODE_ID, listeners=[Listener(name=_LISTENER, host=host, port=port)])],
    )


def _unknown(wanted: list[tuple[str, list[int]]]) -> DescribeQuorumResponse:
    return DescribeQuorumResponse(
        topics=[
            ResponseTopicData(
                topic_name=topic,
                partitions=[
                    ResponsePartitionData(
                        partition_index=number,
                        error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                        error_message="This server does not host this topic-partition.",
                    )
                    for number in numbers
                ],
            )
            for topic, numbers in wanted
        ]
    )
