"""Requests about classic groups and committed offsets, as tests write them. Touches nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from penstock.wire.messages.delete_groups import DeleteGroupsRequest
from penstock.wire.messages.describe_groups import DescribeGroupsRequest
from penstock.wire.messages.heartbeat import HeartbeatRequest
from penstock.wire.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from penstock.wire.messages.leave_group import LeaveGroupRequest, MemberIdentity
from penstock.wire.messages.list_groups import ListGroupsRequest
from penstock.wire.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from penstock.wire.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from penstock.wire.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
)
from penstock.wire.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment
from tests.broker.requests import name_and_id


def join(
    group: str,
    member: str = "",
    *,
    instance: str | None = None,
    protocols: Mapping[str, bytes] | None = None,
    protocol_type: str = "consumer",
    session_ms: int = 30_000,
    rebalance_ms: int = 30_000,
) -> JoinGroupRequest:
    sent = {"range": b"r"} if protocols is None else protocols
    return JoinGroupRequest(
        group_id=group,
        session_timeout_ms=session_ms,
        rebalance_timeout_ms=rebalance_ms,
        member_id=member,
        group_instance_id=instance,
        protocol_type=protocol_type,
        protocols=[
            JoinGroupRequestProtocol(name=name, metadata=data) for name, data in sent.items()
        ],
    )


def sync(
    group: str,
    member: str,
    generation: int,
    assignments: Mapping[str, bytes] | None = None,
    *,
    instance: str | None = None,
    protocol_type: str | None = "consumer",
    protocol: str | None = "range",
) -> SyncGroupRequest:
    return SyncGroupRequest(
        group_id=group,
        generation_id=generation,
        member_id=member,
        group_instance_id=instance,
        protocol_type=protocol_type,
        protocol_name=protocol,
        assignments=[
            SyncGroupRequestAssignment(member_id=id_, assignment=data)
            for id_, data in (assignments or {}).items()
        ],
    )


def heartbeat(
    group: str, member: str, generation: int, instance: str | None = None
) -> HeartbeatRequest:
    return HeartbeatRequest(
        group_id=group, generation_id=generation, member_id=member, group_instance_id=instance
    )


def leave(group: str, *members: tuple[str, str | None]) -> LeaveGroupRequest:
    """Members by id and instance id; in old versions only the first, by id."""
    return LeaveGroupRequest(
        group_id=group,
        member_id=members[0][0] if members else "",
        members=[MemberIdentity(member_id=id_, group_instance_id=name) for id_, name in members],
    )


def commit(
    group: str,
    topic: str | UUID,
    offsets: Mapping[int, int],
    *,
    member: str = "",
    generation: int = -1,
    instance: str | None = None,
    metadata: str | None = "",
) -> OffsetCommitRequest:
    name, id_ = name_and_id(topic)
    return OffsetCommitRequest(
        group_id=group,
        generation_id_or_member_epoch=generation,
        member_id=member,
        group_instance_id=instance,
        topics=[
            OffsetCommitRequestTopic(
                name=name,
                topic_id=id_,
                partitions=[
                    OffsetCommitRequestPartition(
                        partition_index=number, committed_offset=offset, committed_metadata=metadata
                    )
                    for number, offset in offsets.items()
                ],
            )
        ],
    )


def committed(
    group: str, topic: str | UUID | None, *numbers: int, stable: bool = False
) -> OffsetFetchRequest:
    """One group's offsets in some partitions of a topic; everything it has, without a topic."""
    older: list[OffsetFetchRequestTopic] | None = None
    topics: list[OffsetFetchRequestTopics] | None = None
    if topic is not None:
        name, id_ = name_and_id(topic)
        older = [OffsetFetchRequestTopic(name=name, partition_indexes=list(numbers))]
        topics = [
            OffsetFetchRequestTopics(name=name, topic_id=id_, partition_indexes=list(numbers))
        ]
    return OffsetFetchRequest(
        group_id=group,
        topics=older,
        groups=[OffsetFetchRequestGroup(group_id=group, topics=topics)],
        require_stable=stable,
    )


def committed_by(groups: Sequence[tuple[str, str, Sequence[int]]]) -> OffsetFetchRequest:
    """Of several groups at once, each with a topic and its partitions."""
    return OffsetFetchRequest(
        groups=[
            OffsetFetchRequestGroup(
                group_id=group,
                topics=[OffsetFetchRequestTopics(name=topic, partition_indexes=list(numbers))],
            )
            for group, topic, numbers in groups
        ]
    )


def forget(group: str, topic: str, *numbers: int) -> OffsetDeleteRequest:
    parts = [OffsetDeleteRequestPartition(partition_index=number) for number in numbers]
    return OffsetDeleteRequest(
        group_id=group, topics=[OffsetDeleteRequestTopic(name=topic, partitions=parts)]
    )


def describe(*groups: str) -> DescribeGroupsRequest:
    return DescribeGroupsRequest(groups=list(groups))


def list_groups(states: Sequence[str] = (), types: Sequence[str] = ()) -> ListGroupsRequest:
    return ListGroupsRequest(states_filter=list(states), types_filter=list(types))


def delete_groups(*groups: str) -> DeleteGroupsRequest:
    return DeleteGroupsRequest(groups_names=list(groups))


def subscription(*topics: str) -> bytes:
    """What a consumer says when it joins: the topics that it wants."""
    names = b"".join(len(name).to_bytes(2) + name.encode() for name in topics)
    return b"\0\3" + len(topics).to_bytes(4) + names + b"\xff\xff\xff\xff"


def offsets_of(answer: Any) -> Any:
    """What is told of committed offsets: offset, metadata and error for each partition."""
    groups = answer.groups or [answer]
    return [
        (
            group.error_code,
            [
                (part.partition_index, part.committed_offset, part.metadata, part.error_code)
                for topic in sorted(group.topics, key=lambda one: str(one.name))
                for part in sorted(topic.partitions, key=lambda one: int(one.partition_index))
            ],
        )
        for group in groups
    ]
