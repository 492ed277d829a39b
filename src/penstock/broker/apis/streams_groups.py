"""Heartbeats and descriptions of the groups of Kafka Streams applications (KIP-1071).

A heartbeat is also how a member joins (epoch 0) and leaves (epoch -1). Requests are checked here as
far as that can be done without knowing the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from penstock.broker.apis.authorized_operations import ON_GROUP
from penstock.broker.apis.context import RequestContext
from penstock.broker.apis.groups import MAX_GROUP_ID_LENGTH
from penstock.broker.catalog import ApiError, check_name
from penstock.broker.config import Limits
from penstock.broker.groups.members import AWAY, JOINING, LEAVING
from penstock.broker.groups.streams.group import StreamsGroup
from penstock.broker.groups.streams.internal_topics import ConfiguredTopology, Problem, Status
from penstock.broker.groups.streams.members import (
    Served,
    StreamsAnswer,
    StreamsBeat,
    StreamsMember,
)
from penstock.broker.groups.streams.tasks import TaskId, Tasks, by_subtopology, tasks_of
from penstock.broker.groups.streams.topology import InternalTopic, Subtopology, Topology
from penstock.wire.errors import ErrorCode
from penstock.wire.messages import streams_group_describe as description
from penstock.wire.messages import streams_group_heartbeat as beats
from penstock.wire.messages.streams_group_describe import (
    StreamsGroupDescribeRequest,
    StreamsGroupDescribeResponse,
)
from penstock.wire.messages.streams_group_heartbeat import (
    StreamsGroupHeartbeatRequest,
    StreamsGroupHeartbeatResponse,
)

if TYPE_CHECKING:
    from penstock.broker.server import Broker

# Topics of Kafka's coordinators: no application reads or writes them.
_KAFKAS_OWN_TOPICS: Final = frozenset(
    {"__consumer_offsets", "__transaction_state", "__share_group_state"}
)
_MAX_SUBTOPOLOGIES: Final = 1_000
# Of members and subtopologies, which are written with what members have: a topic's name is no
# longer, and Kafka Streams uses numbers for these and UUIDs for those.
_MAX_ID_LENGTH: Final = 249
# Internal topics that cannot be made are tried again after so many intervals of heartbeats.
_PAUSE_INTERVALS: Final = 2


async def streams_group_heartbeat(
    broker: Broker, request: StreamsGroupHeartbeatRequest, context: RequestContext
) -> StreamsGroupHeartbeatResponse:
    """A member joins, is heard of, or leaves; it is told its tasks when they have changed."""
    try:
        _check(request, broker.config.limits)
        beat = _beat(request, context, broker.config.limits)
        answer = await _send(broker, request.group_id, beat)
    except ApiError as error:
        return StreamsGroupHeartbeatResponse(
            error_code=error.code, error_message=str(error), status=[]
        )
    return _response(answer)


async def _send(broker: Broker, group_id: str, beat: StreamsBeat) -> StreamsAnswer:
    """One heartbeat; what it is answered is durable on return."""
    groups = broker.coordination.groups
    group = groups.get(group_id)
    if beat.epoch == JOINING:
        group = groups.get_or_make(group_id, StreamsGroup.kind)
    if not isinstance(group, StreamsGroup):
        raise ApiError(
            ErrorCode.GROUP_ID_NOT_FOUND, _not_found(group_id, group is not None, "Streams group")
        )
    now_ms, elapsed_ms = broker.clock.now_ms(), broker.clock.elapsed_ms()
    handle = group.leave if beat.epoch == LEAVING else group.heartbeat
    try:
        answer, entries = handle(beat, now_ms, elapsed_ms)
    except ApiError:
        groups.drop_if_void(group_id)
        raise
    await broker.coordination.commit(entries)
    if not answer.missing:
        return answer
    interval_ms = groups.settings(group_id).streams_heartbeat_interval_ms
    broker.internal_topics.make(answer.missing, _PAUSE_INTERVALS * interval_ms)
    return replace(answer, statuses=tuple(_with_failures(broker, answer)))


def _with_failures(broker: Broker, answer: StreamsAnswer) -> Iterable[Problem]:
    """What a member is told, with the reasons why internal topics could not be made."""
    reasons = {topic.name: broker.internal_topics.failure(topic.name) for topic in answer.missing}
    told = ", ".join(f"{name} ({reason})" for name, reason in reasons.items() if reason)
    for problem in answer.statuses:
        if told and problem.status == Status.MISSING_INTERNAL_TOPICS:
            yield Problem(problem.status, f"{problem.detail}; Creation failed: {told}.")
        else:
            yield problem


def _not_found(group_id: str, is_other: bool, what: str = "Group") -> str:
    if is_other:
        return f"Group {group_id} is not a streams group."
    return f"{what} {group_id} not found."


# ---- requests --------------------------------------------------------------------------------


def _check(request: StreamsGroupHeartbeatRequest, limits: Limits) -> None:
    """ApiError if no member may send this."""
    topology = request.topology
    parts: list[beats.Subtopology] = [] if topology is None else topology.subtopologies
    _check_sizes(parts, limits)
    _check_topics(parts)
    if any(part.source_topic_regex for part in parts):
        raise _invalid("Regular expressions for source topics are not supported yet.")
    for name, text in (
        ("MemberId", request.member_id),
        ("GroupId", request.group_id),
        ("InstanceId", request.instance_id),
        ("RackId", request.rack_id),
    ):
        if text is not None and not text.strip():
            raise _invalid(f"{name} can't be empty.")
    if len(request.group_id) > MAX_GROUP_ID_LENGTH:
        raise _invalid("no group can be named so")
    if len(request.member_id) > _MAX_ID_LENGTH:
        raise _invalid(f"a member's id has at most {_MAX_ID_LENGTH} characters")
    owned = (request.active_tasks, request.standby_tasks, request.warmup_tasks)
    if request.member_epoch == JOINING:
        _check_joining(request)
    elif request.member_epoch == AWAY and request.instance_id is None:
        raise _invalid("InstanceId can't be null.")
    elif request.member_epoch < AWAY:
        raise _invalid(
            f"MemberEpoch is {request.member_epoch}, but must be greater than or equal to -2."
        )
    if None in owned and any(tasks is not None for tasks in owned):
        raise _invalid("If one task-type is non-null, all must be non-null.")
    if request.member_epoch != JOINING and topology is not None:
        raise _invalid("Topology can only be provided when (re-)joining.")
    if request.instance_id is not None:
        raise _invalid("Static members are not supported yet.")


def _check_joining(request: StreamsGroupHeartbeatRequest) -> None:
    if request.rebalance_timeout_ms == -1:
        raise _invalid("RebalanceTimeoutMs must be provided in first request.")
    for name, tasks in (
        ("ActiveTasks", request.active_tasks),
        ("StandbyTasks", request.standby_tasks),
        ("WarmupTasks", request.warmup_tasks),
    ):
        if tasks is None or tasks:
            raise _invalid(f"{name} must be empty when (re-)joining.")
    if request.topology is None:
        raise _invalid("Topology must be non-null when (re-)joining.")
    for part in request.topology.subtopologies:
        for topic in part.state_changelog_topics:
            if topic.partitions != 0:
                raise _bad_topology(
                    f"Changelog topic {topic.name} must have an undefined partition count, but it "
                    f"is set to {topic.partitions}."
                )


def _check_sizes(parts: list[beats.Subtopology], limits: Limits) -> None:
    """ApiError if a topology names more than an application can have."""
    if len(parts) > _MAX_SUBTOPOLOGIES:
        raise _bad_topology(f"a topology has at most {_MAX_SUBTOPOLOGIES} subtopologies")
    if any(len(part.subtopology_id) > _MAX_ID_LENGTH for part in parts):
        raise _bad_topology(f"a subtopology's id has at most {_MAX_ID_LENGTH} characters")
    named = sum(
        len(part.source_topics)
        + len(part.repartition_sink_topics)
        + len(part.repartition_source_topics)
        + len(part.state_changelog_topics)
        + sum(
            len(group.source_topics) + len(group.repartition_source_topics)
            for group in part.copartition_groups
        )
        for part in parts
    )
    if named > limits.max_topics:
        raise _bad_topology(f"a topology names at most {limits.max_topics} topics")


def _check_topics(parts: Iterable[beats.Subtopology]) -> None:
    """ApiError if an application cannot have topics of these names."""
    names = dict.fromkeys(
        name
        for part in parts
        for name in (
            *part.source_topics,
            *part.repartition_sink_topics,
            *(topic.name for topic in part.repartition_source_topics),
            *(topic.name for topic in part.state_changelog_topics),
        )
    )
    own = [name for name in names if name in _KAFKAS_OWN_TOPICS]
    if own:
        raise _bad_topology(
            f"Use of Kafka internal topics {','.join(own)} in a Kafka Streams topology is "
            "prohibited."
        )
    illegal = [name for name in names if not _is_name(name)]
    if illegal:
        raise _bad_topology(f"Topic names {','.join(illegal)} are not valid topic names.")


def _is_name(name: str) -> bool:
    try:
        check_name(name)
    except ApiError:
        return False
    return True


def _beat(
    request: StreamsGroupHeartbeatRequest, context: RequestContext, limits: Limits
) -> StreamsBeat:
    timeout_ms, endpoint, tags = (
        request.rebalance_timeout_ms,
        request.user_endpoint,
        request.client_tags,
    )
    return StreamsBeat(
        request.member_id,
        request.member_epoch,
        context.client_id or "",
        f"/{context.connection.peer_host}",
        request.rack_id,
        None if timeout_ms < 0 else timeout_ms,
        None if request.topology is None else _topology(request.topology),
        _owned(request, limits),
        request.process_id,
        None if endpoint is None else (endpoint.host, endpoint.port),
        None if tags is None else tuple(sorted((tag.key, tag.value) for tag in tags)),
        request.shutdown_application,
        request.endpoint_information_epoch,
    )


def _owned(request: StreamsGroupHeartbeatRequest, limits: Limits) -> Tasks | None:
    roles = (request.active_tasks, request.standby_tasks, request.warmup_tasks)
    if any(role is None for role in roles):
        return None
    count = sum(len(item.partitions) for role in roles for item in role or ())
    if count > limits.max_partitions:
        raise _invalid(f"there are at most {limits.max_partitions} tasks to own")
    return Tasks(
        *(tasks_of((item.subtopology_id, item.partitions) for item in role or ()) for role in roles)
    )


def _topology(told: beats.Topology) -> Topology:
    if told.epoch < 0:
        raise _bad_topology("the epoch of a topology is not negative")
    parts = sorted(map(_subtopology, told.subtopologies), key=lambda part: part.id)
    if len({part.id for part in parts}) < len(parts):
        raise _bad_topology("two subtopologies have the same id")
    return Topology(told.epoch, tuple(parts))


def _subtopology(told: beats.Subtopology) -> Subtopology:
    repartition = told.repartition_source_topics
    if any(topic.partitions < 0 for topic in repartition):
        raise _bad_topology("a topic has no negative number of partitions")
    try:
        copartitioned = {
            tuple(
                sorted(
                    {told.source_topics[at] for at in map(_index, group.source_topics)}
                    | {repartition[at].name for at in map(_index, group.repartition_source_topics)}
                )
            )
            for group in told.copartition_groups
        }
    except IndexError:
        raise _bad_topology("a group of copartitioned topics names one that is not there") from None
    return Subtopology(
        told.subtopology_id,
        tuple(sorted(set(told.source_topics))),
        _topics(repartition),
        tuple(sorted(set(told.repartition_sink_topics))),
        _topics(told.state_changelog_topics),
        tuple(sorted(copartitioned)),
    )


def _index(at: int) -> int:
    if at < 0:
        raise IndexError
    return at


def _topics(told: list[beats.TopicInfo]) -> tuple[InternalTopic, ...]:
    """Internal topics by name, each once."""
    topics = {
        topic.name: InternalTopic(
            topic.name,
            topic.partitions,
            topic.replication_factor,
            # Clients send them in any order, and a topology is compared with the group's.
            tuple(sorted((config.key, config.value) for config in topic.topic_configs)),
        )
        for topic in told
    }
    return tuple(topics[name] for name in sorted(topics))


def _invalid(message: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, message)


def _bad_topology(message: str) -> ApiError:
    return ApiError(ErrorCode.STREAMS_INVALID_TOPOLOGY, message)


# ---- responses -------------------------------------------------------------------------------


def _response(answer: StreamsAnswer) -> StreamsGroupHeartbeatResponse:
    assigned, served = answer.assigned, answer.served
    return StreamsGroupHeartbeatResponse(
        member_id=answer.member_id,
        member_epoch=answer.epoch,
        heartbeat_interval_ms=answer.interval_ms,
        status=[
            beats.Status(status_code=problem.status, status_detail=problem.detail)
            for problem in answer.statuses
        ],
        active_tasks=None if assigned is None else _told(assigned.active),
        standby_tasks=None if assigned is None else _told(assigned.standby),
        warmup_tasks=None if assigned is None else _told(assigned.warmup),
        endpoint_information_epoch=answer.endpoint_epoch,
        partitions_by_user_endpoint=None if served is None else list(map(_endpoint, served)),
    )


def _told(tasks: Iterable[TaskId]) -> list[beats.ResponseTaskIds]:
    return [
        beats.ResponseTaskIds(subtopology_id=part, partitions=numbers)
        for part, numbers in by_subtopology(tasks).items()
    ]


def _endpoint(served: Served) -> beats.EndpointToPartitions:
    host, port = served.endpoint
    return beats.EndpointToPartitions(
        user_endpoint=beats.ResponseEndpoint(host=host, port=port),
        active_partitions=_partitions(served.active),
        standby_partitions=_partitions(served.standby),
    )


def _partitions(numbers: Mapping[str, list[int]]) -> list[beats.TopicPartition]:
    return [beats.TopicPartition(topic=name, partitions=some) for name, some in numbers.items()]


# ---- descriptions ----------------------------------------------------------------------------


async def streams_group_describe(
    broker: Broker, request: StreamsGroupDescribeRequest, context: RequestContext
) -> StreamsGroupDescribeResponse:
    """Streams groups with their topology, their members, and the tasks of those."""
    described = [_described(broker, group_id) for group_id in request.group_ids]
    await broker.coordination.commit()
    if request.include_authorized_operations:
        for group in described:
            if not group.error_code:
                group.authorized_operations = ON_GROUP
    return StreamsGroupDescribeResponse(groups=described)


def _described(broker: Broker, group_id: str) -> description.DescribedGroup:
    group = broker.coordination.groups.get(group_id)
    if not isinstance(group, StreamsGroup) or group.topology is None:
        return description.DescribedGroup(
            group_id=group_id,
            error_code=ErrorCode.GROUP_ID_NOT_FOUND,
            error_message=_not_found(group_id, group is not None),
        )
    return description.DescribedGroup(
        group_id=group_id,
        group_state=group.state,
        group_epoch=group.heading.epoch,
        assignment_epoch=group.heading.target_epoch,
        topology=_described_topology(group.topology, group.configured),
        members=[_member(member) for member in group.members.values()],
    )


def _described_topology(
    topology: Topology, configured: ConfiguredTopology | None
) -> description.Topology:
    """As it is run; as the application has sent it, where that cannot be said."""
    if configured is None or not configured.is_ready or configured.subtopologies is None:
        parts = [
            _part(part, part.repartition_sources, part.changelogs)
            for part in topology.subtopologies
        ]
    else:
        parts = [
            _part(item.part, item.repartition_sources, item.changelogs)
            for item in configured.subtopologies
        ]
    return description.Topology(epoch=topology.epoch, subtopologies=parts)


def _part(
    part: Subtopology, sources: Iterable[InternalTopic], changelogs: Iterable[InternalTopic]
) -> description.Subtopology:
    return description.Subtopology(
        subtopology_id=part.id,
        source_topics=list(part.sources),
        repartition_sink_topics=list(part.repartition_sinks),
        state_changelog_topics=list(map(_topic, changelogs)),
        repartition_source_topics=list(map(_topic, sources)),
    )


def _topic(topic: InternalTopic) -> description.TopicInfo:
    return description.TopicInfo(
        name=topic.name,
        partitions=topic.partitions,
        replication_factor=topic.replication_factor,
        topic_configs=[description.KeyValue(key=key, value=value) for key, value in topic.settings],
    )


def _member(member: StreamsMember) -> description.Member:
    profile, standing = member.profile, member.standing
    endpoint = profile.endpoint
    return description.Member(
        member_id=member.id,
        member_epoch=standing.epoch,
        rack_id=profile.rack_id,
        client_id=profile.client_id,
        client_host=profile.client_host,
        topology_epoch=profile.topology_epoch,
        process_id=profile.process_id,
        user_endpoint=(
            None if endpoint is None else description.Endpoint(host=endpoint[0], port=endpoint[1])
        ),
        client_tags=[description.KeyValue(key=key, value=text) for key, text in profile.tags],
        assignment=_tasks(standing.assigned),
        target_assignment=_tasks(standing.target),
    )


def _tasks(tasks: Tasks) -> description.Assignment:
    active, standby, warmup = (
        [
            description.TaskIds(subtopology_id=part, partitions=numbers)
            for part, numbers in by_subtopology(role).items()
        ]
        for role in (tasks.active, tasks.standby, tasks.warmup)
    )
    return description.Assignment(active_tasks=active, standby_tasks=standby, warmup_tasks=warmup)
