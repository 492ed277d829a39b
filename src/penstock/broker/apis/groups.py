"""Classic groups: join, sync, heartbeat, leave; and all kinds of groups listed, shown, deleted.

Joins and syncs are answered when the group is ready, which may be much later: the state machine
is given a callable for it. No answer leaves before the state that it tells of is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar
from uuid import uuid4

from penstock.broker.apis.authorized_operations import ON_GROUP
from penstock.broker.apis.context import RequestContext
from penstock.broker.catalog import ApiError
from penstock.broker.groups.classic import DEAD, ClassicGroup
from penstock.broker.groups.classic_member import JoinAnswer, JoinCall, SyncAnswer, SyncCall
from penstock.broker.groups.streams.group import NOT_READY
from penstock.errors import StorageError
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.delete_groups import (
    DeletableGroupResult,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
)
from penstock.wire.messages.describe_groups import (
    DescribedGroup,
    DescribedGroupMember,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
)
from penstock.wire.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from penstock.wire.messages.join_group import (
    JoinGroupRequest,
    JoinGroupResponse,
    JoinGroupResponseMember,
)
from penstock.wire.messages.leave_group import (
    LeaveGroupRequest,
    LeaveGroupResponse,
    MemberResponse,
)
from penstock.wire.messages.list_groups import (
    ListedGroup,
    ListGroupsRequest,
    ListGroupsResponse,
)
from penstock.wire.messages.sync_group import SyncGroupRequest, SyncGroupResponse

if TYPE_CHECKING:
    from penstock.broker.server import Broker

# From these versions on clients know what it is about.
_KNOWN_ID_FROM_VERSION: Final = 4
_NULL_PROTOCOL_FROM_VERSION: Final = 7
_SKIP_ASSIGNMENT_FROM_VERSION: Final = 9
_SYNC_PROTOCOL_FROM_VERSION: Final = 5
_SEVERAL_LEAVE_FROM_VERSION: Final = 3
_NOT_FOUND_FROM_VERSION: Final = 6
# Kafka has no bound; no name that people give is as long as this.
MAX_GROUP_ID_LENGTH: Final = 1_024

T = TypeVar("T")


async def join_group(
    broker: Broker, request: JoinGroupRequest, context: RequestContext
) -> JoinGroupResponse:
    """Be a member of a group, in its next generation."""
    answer: asyncio.Future[JoinAnswer] = broker.loop.create_future()
    try:
        group = _joined_group(broker, request)
    except ApiError as error:
        code = error.code
        if code == ErrorCode.GROUP_ID_NOT_FOUND:
            # It is there, but of another kind.
            code = ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        return _join_response(JoinAnswer(code, request.member_id), context.version)
    now_ms, elapsed_ms = broker.clock.now_ms(), broker.clock.elapsed_ms()
    entries = group.join(_join_call(request, context), now_ms, elapsed_ms, resolver(answer))
    broker.coordination.write(entries)
    broker.coordination.groups.drop_if_void(group.id)
    outcome = await answer
    await broker.coordination.commit()
    return _join_response(outcome, context.version)


def _joined_group(broker: Broker, request: JoinGroupRequest) -> ClassicGroup:
    """The group that someone joins; ApiError if that cannot be."""
    limits = broker.config.limits
    if not 0 < len(request.group_id) <= MAX_GROUP_ID_LENGTH:
        raise ApiError(ErrorCode.INVALID_GROUP_ID, "no group can be named so")
    timeout_ms = request.session_timeout_ms
    if not limits.min_session_timeout_ms <= timeout_ms <= limits.max_session_timeout_ms:
        raise ApiError(ErrorCode.INVALID_SESSION_TIMEOUT, "the session is too short or too long")
    groups = broker.coordination.groups
    if request.member_id and groups.get(request.group_id) is None:
        raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID, "there is no such group")
    group = groups.get_or_make(request.group_id, "classic")
    assert isinstance(group, ClassicGroup)
    return group


def _join_call(request: JoinGroupRequest, context: RequestContext) -> JoinCall:
    client_id = context.client_id or ""
    name = client_id if request.group_instance_id is None else request.group_instance_id
    rebalance_timeout_ms = request.rebalance_timeout_ms
    if context.version < 1:
        rebalance_timeout_ms = request.session_timeout_ms
    return JoinCall(
        request.member_id,
        request.group_instance_id,
        client_id,
        f"/{context.connection.peer_host}",
        request.session_timeout_ms,
        max(rebalance_timeout_ms, 0),
        request.protocol_type,
        {item.name: bytes(item.metadata) for item in request.protocols},
        f"{name}-{uuid4()}",
        must_know_id=context.version >= _KNOWN_ID_FROM_VERSION,
        can_skip_assignment=context.version >= _SKIP_ASSIGNMENT_FROM_VERSION,
    )


def _join_response(answer: JoinAnswer, version: int) -> JoinGroupResponse:
    protocol = answer.protocol
    if protocol is None and version < _NULL_PROTOCOL_FROM_VERSION:
        protocol = ""
    return JoinGroupResponse(
        error_code=answer.code,
        generation_id=answer.generation,
        protocol_type=answer.protocol_type,
        protocol_name=protocol,
        leader=answer.leader,
        skip_assignment=answer.skip_assignment,
        member_id=answer.member_id,
        members=[
            JoinGroupResponseMember(member_id=id_, group_instance_id=instance_id, metadata=metadata)
            for id_, instance_id, metadata in answer.members
        ],
    )


async def sync_group(
    broker: Broker, request: SyncGroupRequest, context: RequestContext
) -> SyncGroupResponse:
    """Get one's assignment; the leader brings everybody's."""
    answer: asyncio.Future[SyncAnswer] = broker.loop.create_future()
    agreed = (request.protocol_type, request.protocol_name)
    if context.version >= _SYNC_PROTOCOL_FROM_VERSION and None in agreed:
        raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, "the protocol is not named")
    group = _members_group(broker, request.group_id)
    call = SyncCall(
        request.member_id,
        request.generation_id,
        request.group_instance_id,
        request.protocol_type,
        request.protocol_name,
        {item.member_id: bytes(item.assignment) for item in request.assignments},
    )
    now_ms, elapsed_ms = broker.clock.now_ms(), broker.clock.elapsed_ms()
    entries = group.sync(call, now_ms, elapsed_ms, resolver(answer))
    broker.coordination.write(entries)
    outcome = await answer
    await broker.coordination.commit()
    return SyncGroupResponse(
        error_code=outcome.code,
        protocol_type=outcome.protocol_type,
        protocol_name=outcome.protocol,
        assignment=outcome.assignment,
    )


def heartbeat(
    broker: Broker, request: HeartbeatRequest, context: RequestContext
) -> HeartbeatResponse:
    """Tells nothing that could be taken back: the generation was told before."""
    group = _members_group(broker, request.group_id)
    code = group.heartbeat(
        request.member_id,
        request.generation_id,
        request.group_instance_id,
        broker.clock.elapsed_ms(),
    )
    broker.coordination.arm()
    return HeartbeatResponse(error_code=code)


async def leave_group(
    broker: Broker, request: LeaveGroupRequest, context: RequestContext
) -> LeaveGroupResponse:
    """Be a member no longer; an administrator may send several members away."""
    if context.version < _SEVERAL_LEAVE_FROM_VERSION:
        leaving: list[tuple[str, str | None]] = [(request.member_id, None)]
    else:
        leaving = [(member.member_id, member.group_instance_id) for member in request.members]
    try:
        group = _members_group(broker, request.group_id)
    except ApiError as error:
        if error.code != ErrorCode.UNKNOWN_MEMBER_ID:
            raise
        codes: list[ErrorCode] = [error.code] * len(leaving)
    else:
        now_ms, elapsed_ms = broker.clock.now_ms(), broker.clock.elapsed_ms()
        codes, entries = group.leave(leaving, now_ms, elapsed_ms)
        broker.coordination.write(entries)
        broker.coordination.groups.drop_if_void(group.id)
        await broker.coordination.commit()
    if context.version < _SEVERAL_LEAVE_FROM_VERSION:
        return LeaveGroupResponse(error_code=codes[0])
    return LeaveGroupResponse(
        members=[
            MemberResponse(member_id=member_id, group_instance_id=instance_id, error_code=code)
            for (member_id, instance_id), code in zip(leaving, codes, strict=True)
        ]
    )


def _members_group(broker: Broker, group_id: str) -> ClassicGroup:
    """The classic group that a member speaks of; ApiError if there is none."""
    if not group_id:
        raise ApiError(ErrorCode.INVALID_GROUP_ID, "a group's id is empty")
    group = broker.coordination.groups.get(group_id)
    if not isinstance(group, ClassicGroup):
        raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID, "there is no such classic group")
    return group


def resolver(future: asyncio.Future[T]) -> Callable[[T], None]:
    """What a state machine calls to give an answer that someone awaits."""

    def reply(answer: T) -> None:
        # Whoever waited may have been cancelled.
        if not future.done():
            future.set_result(answer)

    return reply


# ---- all kinds of groups ---------------------------------------------------------------------


async def describe_groups(
    broker: Broker, request: DescribeGroupsRequest, context: RequestContext
) -> DescribeGroupsResponse:
    described = [_described(broker, group_id, context.version) for group_id in request.groups]
    try:
        await broker.coordination.commit()
    except StorageError as error:
        broker.warn_now_and_then("describing groups", error)
        code = ErrorCode.COORDINATOR_NOT_AVAILABLE
        described = [DescribedGroup(group_id=name, error_code=code) for name in request.groups]
    if request.include_authorized_operations:
        for group in described:
            if not group.error_code:
                group.authorized_operations = ON_GROUP
    return DescribeGroupsResponse(groups=described)


def _described(broker: Broker, group_id: str, version: int) -> DescribedGroup:
    group = broker.coordination.groups.get(group_id)
    if group is None or group.kind != "classic":
        known = version >= _NOT_FOUND_FROM_VERSION
        what = "not found" if group is None else "not a classic group"
        return DescribedGroup(
            group_id=group_id,
            group_state=DEAD,
            error_code=ErrorCode.GROUP_ID_NOT_FOUND if known else ErrorCode.NONE,
            error_message=f"Group {group_id} {'' if group is None else 'is '}{what}."
            if known
            else None,
        )
    told = group.describe()
    return DescribedGroup(
        group_id=group_id,
        group_state=told.state,
        protocol_type=told.protocol_type,
        protocol_data=told.protocol,
        members=[
            DescribedGroupMember(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                member_metadata=member.metadata,
                member_assignment=member.assignment,
            )
            for member in told.members
        ],
    )


async def list_groups(
    broker: Broker, request: ListGroupsRequest, context: RequestContext
) -> ListGroupsResponse:
    states = {state.lower() for state in request.states_filter}
    types = {type_.lower() for type_ in request.types_filter}
    groups = [
        ListedGroup(
            group_id=group.id,
            protocol_type=group.protocol_type,
            group_state=group.state,
            group_type=group.kind,
        )
        for group in broker.coordination.groups.groups.values()
        if (not states or _filtered_as(group.state) in states)
        and (not types or group.kind in types)
    ]
    await broker.coordination.commit()
    return ListGroupsResponse(groups=groups)


def _filtered_as(state: str) -> str:
    """How a filter names a state, as Kafka spells it in lower case."""
    return "not_ready" if state == NOT_READY else state.lower()


async def delete_groups(
    broker: Broker, request: DeleteGroupsRequest, context: RequestContext
) -> DeleteGroupsResponse:
    codes: dict[str, ErrorCode] = {}
    try:
        for group_id in request.groups_names:
            code, entries = broker.coordination.groups.delete(group_id)
            if code in (ErrorCode.NONE, ErrorCode.GROUP_ID_NOT_FOUND):
                # Of a queue something may be known though no group is left.
                of_queue = broker.coordination.shares.forget(group_id)
                code, entries = ErrorCode.NONE if of_queue else code, [*entries, *of_queue]
            broker.coordination.write(entries)
            codes[group_id] = code
        await broker.coordination.commit()
    except StorageError as error:
        broker.warn_now_and_then("deleting groups", error)
        codes = dict.fromkeys(request.groups_names, ErrorCode.COORDINATOR_NOT_AVAILABLE)
    return DeleteGroupsResponse(
        results=[
            DeletableGroupResult(group_id=group_id, error_code=code)
            for group_id, code in codes.items()
        ]
    )
