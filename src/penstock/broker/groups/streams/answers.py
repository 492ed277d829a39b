"""What members are told besides their tasks: how the group is, and who serves which partitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.broker.catalog import Topic
from penstock.broker.groups.streams.internal_topics import (
    ConfiguredTopology,
    Problem,
    Status,
)
from penstock.broker.groups.streams.members import Served, StreamsMember
from penstock.broker.groups.streams.tasks import TaskId, by_subtopology
from penstock.broker.groups.streams.topology import Topology


def statuses_for(
    member: StreamsMember,
    topology: Topology,
    configured: ConfiguredTopology,
    delay: Problem | None,
    shutdown_by: str | None,
) -> tuple[Problem, ...]:
    """How the group is, in the words of Apache Kafka; `shutdown_by` is who has asked for it."""
    found: list[Problem] = []
    epoch = member.profile.topology_epoch
    if epoch < topology.epoch:
        detail = (
            f"The member's topology epoch {epoch} is behind the group's topology epoch "
            f"{topology.epoch}."
        )
        found.append(Problem(Status.STALE_TOPOLOGY, detail))
    found += [problem for problem in (delay, configured.problem) if problem is not None]
    if shutdown_by is not None:
        detail = (
            f"Streams group member {shutdown_by} encountered a fatal error and requested a "
            "shutdown for the entire application."
        )
        found.append(Problem(Status.SHUTDOWN_APPLICATION, detail))
    return tuple(found)


def served_by(
    members: Mapping[str, StreamsMember],
    member: StreamsMember,
    configured: ConfiguredTopology,
    topics: Mapping[str, Topic],
) -> tuple[Served, ...]:
    """Which partitions are with the members that have an endpoint, for interactive queries.

    One of the members is as given; it comes last.
    """
    inputs = {item.part.id: item.part.inputs for item in configured.subtopologies or ()}

    def partitions(tasks: Iterable[TaskId]) -> dict[str, list[int]]:
        return {
            name: [number for number in numbers if number < topics[name].partitions]
            for part, numbers in by_subtopology(tasks).items()
            for name in inputs.get(part, ())
            if name in topics
        }

    others = [one for one in members.values() if one.id != member.id]
    return tuple(
        Served(
            one.profile.endpoint,
            partitions(one.standing.assigned.active),
            partitions(one.standing.assigned.standby),
        )
        for one in (*others, member)
        if one.profile.endpoint is not None
    )
