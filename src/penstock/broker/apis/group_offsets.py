"""Committed offsets: committed, asked for, deleted.

An offset is told to nobody before it is durable: whoever has it might go on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from uuid import UUID

from penstock.broker.apis.context import RequestContext
from penstock.broker.apis.groups import MAX_GROUP_ID_LENGTH
from penstock.broker.catalog import ApiError, Topic
from penstock.broker.groups.offsets import NewOffset
from penstock.broker.journal import Entry
from penstock.errors import StorageError
from penstock.wire import decoder, encoder, response_header
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from penstock.wire.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
)
from penstock.wire.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
)
from penstock.wire.zero import ZERO_UUID

if TYPE_CHECKING:
    from penstock.broker.server import Broker

_IDS_FROM_VERSION: Final = 10
_SEVERAL_GROUPS_FROM_VERSION: Final = 8
_NO_OFFSET: Final = -1
# Clients ask again.
_UNAVAILABLE: Final = ErrorCode.COORDINATOR_NOT_AVAILABLE

# A topic as a client names it, and the partitions that it asks about.
Wanted = tuple[str, UUID, Sequence[int]]


def offset_commit(broker: Broker, frame: memoryview, at: int, context: RequestContext) -> None:
    """Commit offsets. Clients do this often, so no task is made for it."""
    request, _ = decoder(OffsetCommitRequest, context.version)(frame, at)
    slot = context.connection.open_slot()
    offsets = _new_offsets(broker, request, context.version)

    def answer(codes: list[ErrorCode]) -> None:
        response = _commit_response(request, offsets, codes, context)
        body = encoder(OffsetCommitResponse, context.version)(response)
        header = response_header(context.api_key, context.version, context.correlation_id)
        slot.answer((header, body))

    def done(error: StorageError | None) -> None:
        if error is not None:
            broker.warn_now_and_then("committing offsets", error)
        answer(codes if error is None else [_UNAVAILABLE] * len(offsets))

    try:
        codes, entries = _commit(broker, request, context.version, offsets)
        broker.coordination.commit_then(entries, done)
    except ApiError as error:
        answer([error.code] * len(offsets))
    except StorageError as error:
        done(error)


def _new_offsets(broker: Broker, request: OffsetCommitRequest, version: int) -> list[NewOffset]:
    known_ids = broker.catalog.by_id
    offsets: list[NewOffset] = []
    for topic in request.topics:
        name = topic.name
        if version >= _IDS_FROM_VERSION:
            known = known_ids.get(topic.topic_id)
            # No topic has an empty name, so the coordinator does not find one either.
            name = "" if known is None else known.name
        offsets += [
            NewOffset(
                name,
                part.partition_index,
                part.committed_offset,
                part.committed_leader_epoch,
                part.committed_metadata,
            )
            for part in topic.partitions
        ]
    return offsets


def _commit(
    broker: Broker, request: OffsetCommitRequest, version: int, offsets: list[NewOffset]
) -> tuple[list[ErrorCode], list[Entry]]:
    if len(request.group_id) > MAX_GROUP_ID_LENGTH:
        raise ApiError(ErrorCode.INVALID_GROUP_ID, "no group can be named so")
    now_ms = broker.clock.now_ms()
    retention_ms = request.retention_time_ms
    return broker.coordination.groups.commit(
        request.group_id,
        request.member_id,
        request.generation_id_or_member_epoch,
        request.group_instance_id,
        offsets,
        version=version,
        now_ms=now_ms,
        elapsed_ms=broker.clock.elapsed_ms(),
        expire_ms=None if retention_ms < 0 else now_ms + retention_ms,
    )


def _commit_response(
    request: OffsetCommitRequest,
    offsets: list[NewOffset],
    codes: list[ErrorCode],
    context: RequestContext,
) -> OffsetCommitResponse:
    by_id = context.version >= _IDS_FROM_VERSION
    topics: list[OffsetCommitResponseTopic] = []
    at = 0
    for topic in request.topics:
        parts: list[OffsetCommitResponsePartition] = []
        for part in topic.partitions:
            code = codes[at]
            if by_id and not offsets[at].topic:
                code = ErrorCode.UNKNOWN_TOPIC_ID
            parts.append(
                OffsetCommitResponsePartition(partition_index=part.partition_index, error_code=code)
            )
            at += 1
        topics.append(
            OffsetCommitResponseTopic(name=topic.name, topic_id=topic.topic_id, partitions=parts)
        )
    return OffsetCommitResponse(topics=topics, throttle_time_ms=context.throttle_ms)


# ---- asked for -------------------------------------------------------------------------------


async def offset_fetch(
    broker: Broker, request: OffsetFetchRequest, context: RequestContext
) -> OffsetFetchResponse:
    # Looked up first: what is committed during the wait is not safe after it.
    response = _look_up(broker, request, context.version)
    try:
        await broker.coordination.commit()
    except StorageError as error:
        broker.warn_now_and_then("looking up committed offsets", error)
        return _unavailable(request)
    return response


def _look_up(broker: Broker, request: OffsetFetchRequest, version: int) -> OffsetFetchResponse:
    stable = request.require_stable
    if version >= _SEVERAL_GROUPS_FROM_VERSION:
        groups = [_fetch(broker, group, version, stable) for group in request.groups]
        return OffsetFetchResponse(groups=groups)
    wanted: list[Wanted] | None = None
    if request.topics is not None:
        wanted = [(topic.name, ZERO_UUID, topic.partition_indexes) for topic in request.topics]
    topics = _committed(broker, request.group_id, wanted, stable)
    return OffsetFetchResponse(
        topics=[
            OffsetFetchResponseTopic(
                name=topic.name,
                partitions=[_older(part) for part in topic.partitions],
            )
            for topic in topics
        ]
    )


def _unavailable(request: OffsetFetchRequest) -> OffsetFetchResponse:
    """Clients ask again. Each version has another place for the error."""
    code = _UNAVAILABLE
    return OffsetFetchResponse(
        error_code=code,
        groups=[
            OffsetFetchResponseGroup(group_id=group.group_id, error_code=code)
            for group in request.groups
        ],
        topics=[
            OffsetFetchResponseTopic(
                name=topic.name,
                partitions=[
                    OffsetFetchResponsePartition(
                        partition_index=number, committed_offset=_NO_OFFSET, error_code=code
                    )
                    for number in topic.partition_indexes
                ],
            )
            for topic in request.topics or ()
        ],
    )


def _older(part: OffsetFetchResponsePartitions) -> OffsetFetchResponsePartition:
    return OffsetFetchResponsePartition(
        partition_index=part.partition_index,
        committed_offset=part.committed_offset,
        committed_leader_epoch=part.committed_leader_epoch,
        metadata=part.metadata,
        error_code=part.error_code,
    )


def _fetch(
    broker: Broker, request: OffsetFetchRequestGroup, version: int, stable: bool
) -> OffsetFetchResponseGroup:
    """What one group is told."""
    group = broker.coordination.groups.get(request.group_id)
    code = ErrorCode.NONE
    if group is not None:
        code = group.check_fetch(request.member_id, request.member_epoch)
    if code:
        return OffsetFetchResponseGroup(group_id=request.group_id, error_code=code)
    wanted: list[Wanted] | None = None
    if request.topics is not None:
        wanted = []
        for topic in request.topics:
            name = topic.name
            if version >= _IDS_FROM_VERSION:
                known = broker.catalog.by_id.get(topic.topic_id)
                name = "" if known is None else known.name
            wanted.append((name, topic.topic_id, topic.partition_indexes))
    topics = _committed(broker, request.group_id, wanted, stable)
    if version >= _IDS_FROM_VERSION:
        _say_unknown_ids(topics)
    return OffsetFetchResponseGroup(group_id=request.group_id, topics=topics)


def _say_unknown_ids(topics: list[OffsetFetchResponseTopics]) -> None:
    for topic in topics:
        if not topic.name:
            for part in topic.partitions:
                part.error_code = ErrorCode.UNKNOWN_TOPIC_ID


def _committed(
    broker: Broker, group_id: str, wanted: list[Wanted] | None, stable: bool
) -> list[OffsetFetchResponseTopics]:
    """A group's offsets in these partitions, or all that it has."""
    if wanted is None:
        wanted = _everything(broker, group_id)
    return [
        OffsetFetchResponseTopics(
            name=name,
            topic_id=topic_id,
            partitions=[_one(broker, group_id, name, number, stable) for number in numbers],
        )
        for name, topic_id, numbers in wanted
    ]


def _everything(broker: Broker, group_id: str) -> list[Wanted]:
    offsets = broker.coordination.groups.offsets
    numbers: dict[str, set[int]] = {}
    for name, number in [*offsets.of(group_id), *offsets.pending_places(group_id)]:
        numbers.setdefault(name, set()).add(number)
    topics = broker.catalog.topics
    found: list[tuple[Topic, list[int]]] = [
        (topics[name], sorted(parts)) for name, parts in numbers.items() if name in topics
    ]
    groups = broker.coordination.groups
    return [
        (topic.name, topic.id, told)
        for topic, parts in found
        if (
            told := [
                number
                for number in parts
                if groups.committed_at(group_id, topic.name, number) is not None
                or offsets.is_pending(group_id, topic.name, number)
            ]
        )
    ]


def _one(
    broker: Broker, group_id: str, topic: str, number: int, stable: bool
) -> OffsetFetchResponsePartitions:
    groups = broker.coordination.groups
    if stable and groups.offsets.is_pending(group_id, topic, number):
        return OffsetFetchResponsePartitions(
            partition_index=number,
            committed_offset=_NO_OFFSET,
            error_code=ErrorCode.UNSTABLE_OFFSET_COMMIT,
        )
    found = groups.committed_at(group_id, topic, number)
    if found is None:
        return OffsetFetchResponsePartitions(partition_index=number, committed_offset=_NO_OFFSET)
    return OffsetFetchResponsePartitions(
        partition_index=number,
        committed_offset=found.offset,
        committed_leader_epoch=found.leader_epoch,
        metadata=found.metadata,
    )


# ---- deleted ---------------------------------------------------------------------------------


async def offset_delete(
    broker: Broker, request: OffsetDeleteRequest, context: RequestContext
) -> OffsetDeleteResponse:
    """Forget offsets of topics that the group does not read any more."""
    places = [
        (topic.name, part.partition_index) for topic in request.topics for part in topic.partitions
    ]
    codes, entries = broker.coordination.groups.delete_offsets(request.group_id, places)
    await broker.coordination.commit(entries)
    answers = iter(codes)
    return OffsetDeleteResponse(
        topics=[
            OffsetDeleteResponseTopic(
                name=topic.name,
                partitions=[
                    OffsetDeleteResponsePartition(
                        partition_index=part.partition_index, error_code=next(answers)
                    )
                    for part in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )
