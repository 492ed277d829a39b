"""Which process has the state of which partitions, for interactive queries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.broker.catalog import Topic
from penstock.broker.groups.streams.internal_topics import ConfiguredTopology
from penstock.broker.groups.streams.members import Served, StreamsMember
from penstock.broker.groups.streams.tasks import TaskId, by_subtopology


def served_by(
    members: Mapping[str, StreamsMember],
    member: StreamsMember,
    configured: ConfiguredTopology,
    topics: Mapping[str, Topic],
) -> tuple[Served, ...]:
    """What is with the members that have an endpoint; one of them is as given, and comes last."""
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
