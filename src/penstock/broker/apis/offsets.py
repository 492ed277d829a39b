"""Where things are in the log: by time, by leader epoch, and what producers last wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.broker.apis.context import RequestContext
from penstock.broker.apis.fetch import READ_COMMITTED, check_epoch
from penstock.errors import LogError
from penstock.log.partition import Partition
from penstock.log.tiering import max_lookup, time_lookup
from penstock.log.timesearch import TimestampedOffset
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    ProducerState,
)
from penstock.wire.messages.describe_producers import (
    PartitionResponse as ProducersOfPartition,
)
from penstock.wire.messages.describe_producers import (
    TopicResponse as ProducersOfTopic,
)
from penstock.wire.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from penstock.wire.messages.offset_for_leader_epoch import (
    EpochEndOffset,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderTopicResult,
)

if TYPE_CHECKING:
    from penstock.broker.server import Broker

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5
PLACES_FROM_VERSION: Final = {
    LATEST: 1, EARLIEST: 1, MAX_TIMESTAMP: 7, EARLIEST_LOCAL: 8, LATEST_TIERED: 9
}  # fmt: skip


async def list_offsets(
    broker: Broker, request: ListOffsetsRequest, context: RequestContext
) -> ListOffsetsResponse:
    topics: list[ListOffsetsTopicResponse] = []
    committed = request.isolation_level == READ_COMMITTED
    for topic in request.topics:
        answers = [
            await _list_one(broker, topic.name, item, context.version, committed=committed)
            for item in topic.partitions
        ]
        topics.append(ListOffsetsTopicResponse(name=topic.name, partitions=answers))
    return ListOffsetsResponse(topics=topics)


async def _list_one(
    broker: Broker, topic: str, item: ListOffsetsPartition, version: int, *, committed: bool
) -> ListOffsetsPartitionResponse:
    answer = ListOffsetsPartitionResponse(
        partition_index=item.partition_index, timestamp=-1, offset=-1, leader_epoch=-1
    )
    partition = broker.partition(topic, item.partition_index)
    if item.timestamp < 0 and version < PLACES_FROM_VERSION.get(item.timestamp, 1 << 15):
        answer.error_code = ErrorCode.UNSUPPORTED_VERSION
        return answer
    if partition is None:
        answer.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return answer
    answer.error_code = check_epoch(partition, item.current_leader_epoch)
    if answer.error_code:
        return answer
    try:
        found = await _lookup(broker, partition, item.timestamp, committed=committed)
    except LogError:
        answer.error_code = ErrorCode.KAFKA_STORAGE_ERROR
        return answer
    if isinstance(found, int):
        answer.offset = found
        answer.leader_epoch = partition.leader_epoch
    elif found is not None:
        answer.offset, answer.timestamp, answer.leader_epoch = found
    return answer


async def _lookup(
    broker: Broker, partition: Partition, timestamp_ms: int, *, committed: bool
) -> TimestampedOffset | int | None:
    if timestamp_ms == LATEST:
        return partition.stable if committed else partition.visible
    if timestamp_ms == EARLIEST:
        return partition.log_start
    if timestamp_ms == EARLIEST_LOCAL:
        return max(partition.log_start, partition.segments[0].base_offset)
    if timestamp_ms == LATEST_TIERED:
        tiered = partition.archived.segments
        return tiered[-1].last_offset if tiered else -1
    found = await _by_time(broker, partition, timestamp_ms)
    if committed and found is not None and found.offset >= partition.stable:
        # As in Kafka: what its reader cannot fetch yet is not there.
        return None
    return found


async def _by_time(
    broker: Broker, partition: Partition, timestamp_ms: int
) -> TimestampedOffset | None:
    if timestamp_ms == MAX_TIMESTAMP:
        archived = max_lookup(partition)
        if archived is None:
            return partition.max_timestamp()
        return await broker.loop.run_in_executor(None, archived.load)
    archived = time_lookup(partition, timestamp_ms)
    if archived is not None:
        found = await broker.loop.run_in_executor(None, archived.load)
        if found is not None:
            return found
    return partition.offset_for_time(timestamp_ms)


def offset_for_leader_epoch(
    broker: Broker, request: OffsetForLeaderEpochRequest, context: RequestContext
) -> OffsetForLeaderEpochResponse:
    topics: list[OffsetForLeaderTopicResult] = []
    for topic in request.topics:
        ends: list[EpochEndOffset] = []
        for item in topic.partitions:
            end = EpochEndOffset(partition=item.partition, leader_epoch=-1, end_offset=-1)
            ends.append(end)
            partition = broker.partition(topic.topic, item.partition)
            if partition is None:
                end.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                continue
            end.error_code = check_epoch(partition, item.current_leader_epoch)
            if not end.error_code:
                end.leader_epoch, end.end_offset = _end_of_epoch(partition, item.leader_epoch)
        topics.append(OffsetForLeaderTopicResult(topic=topic.topic, partitions=ends))
    return OffsetForLeaderEpochResponse(topics=topics)


def _end_of_epoch(partition: Partition, epoch: int) -> tuple[int, int]:
    """Where an epoch ended; the present one goes on, whether or not it has records yet."""
    if epoch == partition.leader_epoch:
        return epoch, partition.visible
    latest = partition.epochs.latest
    if latest < epoch < partition.leader_epoch:
        # Nothing was written in it: it ended where the one before it did.
        return (latest if latest >= 0 else epoch), partition.visible
    return partition.epochs.end_of(epoch, partition.visible)


def describe_producers(
    broker: Broker, request: DescribeProducersRequest, context: RequestContext
) -> DescribeProducersResponse:
    topics: list[ProducersOfTopic] = []
    for topic in request.topics:
        answers: list[ProducersOfPartition] = []
        for number in topic.partition_indexes:
            answer = ProducersOfPartition(partition_index=number, error_message=None)
            answers.append(answer)
            partition = broker.partition(topic.name, number)
            if partition is None:
                answer.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                continue
            answer.active_producers = [
                ProducerState(
                    producer_id=producer_id,
                    producer_epoch=known.epoch,
                    last_sequence=known.last_sequence,
                    last_timestamp=known.last_timestamp_ms,
                    coordinator_epoch=known.txn.coordinator_epoch,
                    current_txn_start_offset=known.txn.first_offset,
                )
                for producer_id, known in partition.producers.by_id.items()
            ]
        topics.append(ProducersOfTopic(name=topic.name, partitions=answers))
    return DescribeProducersResponse(topics=topics)
