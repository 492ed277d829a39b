"""Where share groups are in their partitions: shown, moved and forgotten.

Only a group without members can be moved: otherwise what its members have in their hands would be
finished by nobody, or twice. It may be moved before it has had any: then it begins there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.broker.apis.context import RequestContext
from penstock.broker.catalog import ApiError, Topic
from penstock.broker.journal import Entry
from penstock.broker.shares.coordinator import Queue
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.alter_share_group_offsets import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsResponse,
    AlterShareGroupOffsetsResponsePartition,
    AlterShareGroupOffsetsResponseTopic,
)
from penstock.wire.messages.delete_share_group_offsets import (
    DeleteShareGroupOffsetsRequest,
    DeleteShareGroupOffsetsResponse,
    DeleteShareGroupOffsetsResponseTopic,
)
from penstock.wire.messages.describe_share_group_offsets import (
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsRequestGroup,
    DescribeShareGroupOffsetsResponse,
    DescribeShareGroupOffsetsResponseGroup,
    DescribeShareGroupOffsetsResponsePartition,
    DescribeShareGroupOffsetsResponseTopic,
)

if TYPE_CHECKING:
    from penstock.broker.server import Broker

_NO_OFFSET = -1


def _check_group(
    broker: Broker, group: str, *, must_be_there: bool = True, must_be_empty: bool = False
) -> None:
    """ApiError if there is no such share group and must be, or it has members and must not."""
    known = broker.coordination.groups.get(group)
    if known is not None and known.kind != "share":
        raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"{group!r} is a {known.kind} group")
    if must_be_there and known is None and not broker.coordination.shares.queues_of(group):
        raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"there is no share group {group!r}")
    if must_be_empty and known is not None and not known.is_empty:
        raise ApiError(ErrorCode.NON_EMPTY_GROUP, f"share group {group!r} has members")


async def _settle(broker: Broker, entries: list[Entry] | None = None) -> None:
    """Make what is about to be told, and what was asked for, safe."""
    broker.coordination.write([*broker.coordination.shares.changes(), *(entries or ())])
    await broker.coordination.commit()


# ---- showing -----------------------------------------------------------------------------------


async def describe(
    broker: Broker, request: DescribeShareGroupOffsetsRequest, context: RequestContext
) -> DescribeShareGroupOffsetsResponse:
    groups: list[DescribeShareGroupOffsetsResponseGroup] = []
    for wanted in request.groups:
        group = DescribeShareGroupOffsetsResponseGroup(group_id=wanted.group_id)
        groups.append(group)
        try:
            _check_group(broker, wanted.group_id)
            group.topics = _describe(broker, wanted)
        except ApiError as error:
            group.error_code, group.error_message = error.code, str(error)
    await _settle(broker)
    return DescribeShareGroupOffsetsResponse(groups=groups)


def _describe(
    broker: Broker, wanted: DescribeShareGroupOffsetsRequestGroup
) -> list[DescribeShareGroupOffsetsResponseTopic]:
    shares = broker.coordination.shares
    places: dict[str, list[int]] = {}
    if wanted.topics is None:
        for queue in shares.queues_of(wanted.group_id):
            places.setdefault(queue.topic, []).append(queue.number)
    else:
        places = {topic.topic_name: topic.partitions for topic in wanted.topics}
    results: list[DescribeShareGroupOffsetsResponseTopic] = []
    for name, numbers in sorted(places.items()):
        topic = broker.catalog.topics.get(name)
        result = DescribeShareGroupOffsetsResponseTopic(topic_name=name)
        if topic is not None:
            result.topic_id = topic.id
        result.partitions = [
            _describe_one(broker, wanted.group_id, topic, number) for number in sorted(numbers)
        ]
        results.append(result)
    return results


def _describe_one(
    broker: Broker, group: str, topic: Topic | None, number: int
) -> DescribeShareGroupOffsetsResponsePartition:
    result = DescribeShareGroupOffsetsResponsePartition(
        partition_index=number, start_offset=_NO_OFFSET
    )
    partition = broker.partition(topic.name, number) if topic is not None else None
    if topic is None or partition is None:
        result.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return result
    queue: Queue | None = broker.coordination.shares.queue(group, str(topic.id), number)
    if queue is not None:
        queue.share.cut(partition.log_start)
        result.start_offset = queue.share.start
        result.lag = queue.share.lag(partition.visible)
        result.leader_epoch = partition.leader_epoch
    return result


# ---- moving ------------------------------------------------------------------------------------


async def alter(
    broker: Broker, request: AlterShareGroupOffsetsRequest, context: RequestContext
) -> AlterShareGroupOffsetsResponse:
    """Begin anew at an offset. As in Kafka that also makes the group, if it is not there yet."""
    _check_group(broker, request.group_id, must_be_there=False, must_be_empty=True)
    groups = broker.coordination.groups
    entries = groups.found_share_group(request.group_id, broker.clock.now_ms())
    topics: list[AlterShareGroupOffsetsResponseTopic] = []
    for wanted in request.topics:
        topic = broker.catalog.topics.get(wanted.topic_name)
        result = AlterShareGroupOffsetsResponseTopic(topic_name=wanted.topic_name)
        if topic is not None:
            result.topic_id = topic.id
        topics.append(result)
        for item in wanted.partitions:
            part = AlterShareGroupOffsetsResponsePartition(partition_index=item.partition_index)
            result.partitions.append(part)
            partition = broker.partition(wanted.topic_name, item.partition_index)
            if topic is None or partition is None:
                part.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                part.error_message = "there is no such partition"
            elif item.start_offset < 0 or item.start_offset > partition.visible:
                part.error_code = ErrorCode.OFFSET_OUT_OF_RANGE
                part.error_message = f"the partition ends at {partition.visible}"
            else:
                entries += broker.coordination.shares.move(
                    request.group_id, topic, item.partition_index, item.start_offset
                )
    await _settle(broker, entries)
    return AlterShareGroupOffsetsResponse(responses=topics)


async def delete(
    broker: Broker, request: DeleteShareGroupOffsetsRequest, context: RequestContext
) -> DeleteShareGroupOffsetsResponse:
    _check_group(broker, request.group_id, must_be_empty=True)
    entries: list[Entry] = []
    topics: list[DeleteShareGroupOffsetsResponseTopic] = []
    for wanted in request.topics:
        result = DeleteShareGroupOffsetsResponseTopic(topic_name=wanted.topic_name)
        topics.append(result)
        topic = broker.catalog.topics.get(wanted.topic_name)
        if topic is None:
            result.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            result.error_message = "there is no such topic"
            continue
        result.topic_id = topic.id
        entries += broker.coordination.shares.forget(request.group_id, str(topic.id))
    await _settle(broker, entries)
    return DeleteShareGroupOffsetsResponse(responses=topics)
