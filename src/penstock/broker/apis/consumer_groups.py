"""Heartbeats and descriptions of the groups whose partitions the broker assigns.

Consumer groups (KIP-848) and share groups (KIP-932). A heartbeat is also how a member joins
(epoch 0) and leaves (epoch -1; -2 for a static member that will be back). Requests are checked
here as far as that can be done without knowing the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID, uuid4

from penstock.broker.apis.authorized_operations import ON_GROUP
from penstock.broker.apis.context import RequestContext
from penstock.broker.apis.groups import MAX_GROUP_ID_LENGTH
from penstock.broker.catalog import ApiError
from penstock.broker.groups.assigned import AssignedGroup
from penstock.broker.groups.assignors import CONSUMER_ASSIGNORS, Partitions, by_topic
from penstock.broker.groups.consumer import ConsumerGroup
from penstock.broker.groups.members import AWAY, JOINING, LEAVING, Answer, Beat, Member
from penstock.broker.groups.share import ShareGroup
from penstock.wire.errors import ErrorCode
from penstock.wire.messages import consumer_group_describe as consumer_description
from penstock.wire.messages import share_group_describe as share_description
from penstock.wire.messages.consumer_group_describe import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
)
from penstock.wire.messages.consumer_group_heartbeat import (
    Assignment,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    RequestTopicPartitions,
    ResponseTopicPartitions,
)
from penstock.wire.messages.share_group_describe import (
    ShareGroupDescribeRequest,
    ShareGroupDescribeResponse,
)
from penstock.wire.messages.share_group_heartbeat import (
    Assignment as ShareAssignment,
)
from penstock.wire.messages.share_group_heartbeat import (
    ShareGroupHeartbeatRequest,
    ShareGroupHeartbeatResponse,
)
from penstock.wire.messages.share_group_heartbeat import (
    TopicPartitions as ShareTopicPartitions,
)

if TYPE_CHECKING:
    from penstock.broker.server import Broker

# From this version on clients make their member ids themselves.
_OWN_IDS_FROM_VERSION: Final = 1
# How a member of the newer protocol is told from a classic one in the same group.
_CONSUMER_MEMBER: Final = 1

G = TypeVar("G", bound=AssignedGroup)


# ---- consumer groups -------------------------------------------------------------------------


async def consumer_group_heartbeat(
    broker: Broker, request: ConsumerGroupHeartbeatRequest, context: RequestContext
) -> ConsumerGroupHeartbeatResponse:
    """A member joins, is heard of, or leaves; it is told what to read when that has changed."""
    try:
        _check_consumer(request, context.version)
        _check_sizes(broker, request.subscribed_topic_names, request.topic_partitions)
        beat = _consumer_beat(request, context)
        answer = await _beat(broker, request.group_id, ConsumerGroup, beat)
    except ApiError as error:
        return ConsumerGroupHeartbeatResponse(error_code=error.code, error_message=str(error))
    assignment = None
    if answer.assigned is not None:
        assignment = Assignment(
            topic_partitions=[
                ResponseTopicPartitions(topic_id=topic, partitions=numbers)
                for topic, numbers in by_topic(answer.assigned).items()
            ]
        )
    return ConsumerGroupHeartbeatResponse(
        member_id=answer.member_id,
        member_epoch=answer.epoch,
        heartbeat_interval_ms=answer.interval_ms,
        assignment=assignment,
    )


def _check_consumer(request: ConsumerGroupHeartbeatRequest, version: int) -> None:
    """ApiError if no member may send this."""
    may_be_new = version < _OWN_IDS_FROM_VERSION and request.member_epoch == JOINING
    if not request.member_id.strip() and not may_be_new:
        raise _invalid("a member id is missing")
    _check_names(request.group_id, request.instance_id, request.rack_id)
    if request.member_epoch == JOINING:
        if request.rebalance_timeout_ms < 0:
            raise _invalid("who joins must say how long a rebalance may take")
        if request.topic_partitions is None or request.topic_partitions:
            raise _invalid("who joins owns no partitions")
        if request.subscribed_topic_names is None and request.subscribed_topic_regex is None:
            raise _invalid("who joins must say what it wants to read")
    elif request.member_epoch == AWAY and request.instance_id is None:
        raise _invalid("only a member with an instance id can be away")
    elif request.member_epoch < AWAY:
        raise _invalid(f"there is no member epoch {request.member_epoch}")
    assignor = request.server_assignor
    if assignor is not None and assignor not in CONSUMER_ASSIGNORS:
        known = ", ".join(CONSUMER_ASSIGNORS)
        raise ApiError(
            ErrorCode.UNSUPPORTED_ASSIGNOR, f"there is no assignor {assignor!r}, but: {known}"
        )


def _consumer_beat(request: ConsumerGroupHeartbeatRequest, context: RequestContext) -> Beat:
    names = request.subscribed_topic_names
    timeout_ms = request.rebalance_timeout_ms
    return Beat(
        request.member_id or str(uuid4()),
        request.member_epoch,
        context.client_id or "",
        f"/{context.connection.peer_host}",
        request.instance_id,
        request.rack_id,
        None if timeout_ms < 0 else timeout_ms,
        None if names is None else frozenset(names),
        request.subscribed_topic_regex,
        request.server_assignor,
        _owned(request.topic_partitions),
    )


def _owned(topics: list[RequestTopicPartitions] | None) -> Partitions | None:
    if topics is None:
        return None
    return frozenset((topic.topic_id, number) for topic in topics for number in topic.partitions)


# ---- share groups ----------------------------------------------------------------------------


async def share_group_heartbeat(
    broker: Broker, request: ShareGroupHeartbeatRequest, context: RequestContext
) -> ShareGroupHeartbeatResponse:
    """A member joins, is heard of, or leaves; it is told what to read when that has changed."""
    names = request.subscribed_topic_names
    try:
        if not request.member_id.strip():
            raise _invalid("a member id is missing")
        _check_names(request.group_id, None, request.rack_id)
        _check_sizes(broker, names, None)
        if request.member_epoch == JOINING and not names:
            raise _invalid("who joins must say what it wants to read")
        if request.member_epoch < LEAVING:
            raise _invalid(f"there is no member epoch {request.member_epoch}")
        beat = Beat(
            request.member_id,
            request.member_epoch,
            context.client_id or "",
            f"/{context.connection.peer_host}",
            rack_id=request.rack_id,
            names=None if names is None else frozenset(names),
        )
        answer = await _beat(broker, request.group_id, ShareGroup, beat)
    except ApiError as error:
        return ShareGroupHeartbeatResponse(error_code=error.code, error_message=str(error))
    assignment = None
    if answer.assigned is not None:
        assignment = ShareAssignment(
            topic_partitions=[
                ShareTopicPartitions(topic_id=topic, partitions=numbers)
                for topic, numbers in by_topic(answer.assigned).items()
            ]
        )
    return ShareGroupHeartbeatResponse(
        member_id=answer.member_id,
        member_epoch=answer.epoch,
        heartbeat_interval_ms=answer.interval_ms,
        assignment=assignment,
    )


# ---- both ------------------------------------------------------------------------------------


def _check_names(group_id: str, instance_id: str | None, rack_id: str | None) -> None:
    """ApiError if one of these cannot be a name."""
    if not group_id.strip() or len(group_id) > MAX_GROUP_ID_LENGTH:
        raise _invalid("no group can be named so")
    if instance_id is not None and not instance_id.strip():
        raise _invalid("an instance id must not be empty")
    if rack_id is not None and not rack_id.strip():
        raise _invalid("a rack id must not be empty")


def _check_sizes(
    broker: Broker, names: list[str] | None, owned: list[RequestTopicPartitions] | None
) -> None:
    """ApiError if someone names more topics or partitions than there can be."""
    limits = broker.config.limits
    if names is not None and len(names) > limits.max_topics:
        raise _invalid(f"there are at most {limits.max_topics} topics to subscribe to")
    if owned is not None and sum(len(item.partitions) for item in owned) > limits.max_partitions:
        raise _invalid(f"there are at most {limits.max_partitions} partitions to own")


def _invalid(message: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, message)


async def _beat(broker: Broker, group_id: str, kind: type[G], beat: Beat) -> Answer:
    """One heartbeat; what it is answered is durable on return."""
    groups = broker.coordination.groups
    group = groups.get(group_id)
    if beat.epoch == JOINING:
        group = groups.get_or_make(group_id, kind.kind)
    if not isinstance(group, kind):
        raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"there is no {kind.kind} group {group_id!r}")
    now_ms, elapsed_ms = broker.clock.now_ms(), broker.clock.elapsed_ms()
    handle = group.leave if beat.epoch in (LEAVING, AWAY) else group.heartbeat
    try:
        answer, entries = handle(beat, now_ms, elapsed_ms)
    except ApiError:
        groups.drop_if_void(group_id)
        raise
    await broker.coordination.commit(entries)
    return answer


# ---- descriptions ----------------------------------------------------------------------------


async def consumer_group_describe(
    broker: Broker, request: ConsumerGroupDescribeRequest, context: RequestContext
) -> ConsumerGroupDescribeResponse:
    """Consumer groups with their members, what those read and are meant to read."""
    described = [
        _described(broker, group_id, ConsumerGroup, consumer_description, _consumer_member)
        for group_id in request.group_ids
    ]
    await broker.coordination.commit()
    if request.include_authorized_operations:
        _authorize(described)
    return ConsumerGroupDescribeResponse(groups=described)


async def share_group_describe(
    broker: Broker, request: ShareGroupDescribeRequest, context: RequestContext
) -> ShareGroupDescribeResponse:
    """Share groups with their members and what those read."""
    described = [
        _described(broker, group_id, ShareGroup, share_description, _share_member)
        for group_id in request.group_ids
    ]
    await broker.coordination.commit()
    if request.include_authorized_operations:
        _authorize(described)
    return ShareGroupDescribeResponse(groups=described)


def _authorize(described: list[Any]) -> None:
    """Fill in what may be done to groups that exist."""
    for group in described:
        if not group.error_code:
            group.authorized_operations = ON_GROUP


def _described(
    broker: Broker,
    group_id: str,
    kind: type[AssignedGroup],
    messages: Any,
    describe: Callable[[Broker, Member], Any],
) -> Any:
    """One group; `messages` is the module whose structs say it."""
    group = broker.coordination.groups.get(group_id)
    if not isinstance(group, kind):
        return messages.DescribedGroup(
            group_id=group_id,
            error_code=ErrorCode.GROUP_ID_NOT_FOUND,
            error_message=f"there is no {kind.kind} group {group_id!r}",
            group_state="",
        )
    heading = group.heading
    return messages.DescribedGroup(
        group_id=group_id,
        group_state=group.state,
        group_epoch=heading.epoch,
        assignment_epoch=heading.target_epoch,
        assignor_name=heading.assignor,
        members=[describe(broker, member) for member in group.members.values()],
    )


def _consumer_member(broker: Broker, member: Member) -> consumer_description.Member:
    profile, standing = member.profile, member.standing
    return consumer_description.Member(
        member_id=member.id,
        instance_id=profile.instance_id,
        rack_id=profile.rack_id,
        member_epoch=standing.epoch,
        client_id=profile.client_id,
        client_host=profile.client_host,
        subscribed_topic_names=sorted(profile.names),
        subscribed_topic_regex=profile.regex,
        assignment=consumer_description.Assignment(
            topic_partitions=_topics(
                broker, standing.assigned, consumer_description.TopicPartitions
            )
        ),
        target_assignment=consumer_description.Assignment(
            topic_partitions=_topics(broker, standing.target, consumer_description.TopicPartitions)
        ),
        member_type=_CONSUMER_MEMBER,
    )


def _share_member(broker: Broker, member: Member) -> share_description.Member:
    profile, standing = member.profile, member.standing
    return share_description.Member(
        member_id=member.id,
        rack_id=profile.rack_id,
        member_epoch=standing.epoch,
        client_id=profile.client_id,
        client_host=profile.client_host,
        subscribed_topic_names=sorted(profile.names),
        assignment=share_description.Assignment(
            topic_partitions=_topics(broker, standing.assigned, share_description.TopicPartitions)
        ),
    )


T = TypeVar("T")


def _topics(broker: Broker, partitions: Partitions, struct: Callable[..., T]) -> list[T]:
    """Partitions with the names of their topics; without topics that are gone."""
    known: Iterable[tuple[UUID, list[int]]] = by_topic(partitions).items()
    by_id = broker.catalog.by_id
    return [
        struct(topic_id=topic, topic_name=by_id[topic].name, partitions=numbers)
        for topic, numbers in known
        if topic in by_id
    ]
