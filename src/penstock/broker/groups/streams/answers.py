"""What members are told besides their tasks: how the group is, and who serves which partitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.broker.catalog import Catalog, Topic
from penstock.broker.groups.streams.internal_topics import (
    ConfiguredTopology,
    Problem,
    Status,
)
from penstock.broker.groups.streams.members import Endpoint, Served, StreamsMember
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


class Directory:
    """Which partitions are with the members that have an endpoint, for interactive queries.

    A member that names another version of it than the last, however often, is told all of it: so
    what is known of each member is kept for as long as nothing has changed.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[StreamsMember, Served]] = {}
        # What it was made from besides members.
        self._basis: tuple[int, ConfiguredTopology] | None = None

    def served_by(
        self,
        members: Mapping[str, StreamsMember],
        member: StreamsMember,
        configured: ConfiguredTopology,
        catalog: Catalog,
    ) -> tuple[Served, ...]:
        """What there is to be told; one of the members is as given, and comes last."""
        basis, known = self._basis, self._known
        if basis is None or basis[0] != catalog.version or basis[1] is not configured:
            self._basis, known = (catalog.version, configured), {}
        self._known = {}
        inputs = {item.part.id: item.part.inputs for item in configured.subtopologies or ()}
        for one in (*(one for one in members.values() if one.id != member.id), member):
            if one.profile.endpoint is None:
                continue
            before = known.get(one.id)
            if before is None or before[0] is not one:
                before = one, _served(one, one.profile.endpoint, inputs, catalog.topics)
            self._known[one.id] = before
        return tuple(served for _, served in self._known.values())


def _served(
    member: StreamsMember,
    endpoint: Endpoint,
    inputs: Mapping[str, tuple[str, ...]],
    topics: Mapping[str, Topic],
) -> Served:
    def partitions(tasks: Iterable[TaskId]) -> dict[str, list[int]]:
        return {
            name: [number for number in numbers if number < topics[name].partitions]
            for part, numbers in by_subtopology(tasks).items()
            for name in inputs.get(part, ())
            if name in topics
        }

    assigned = member.standing.assigned
    return Served(endpoint, partitions(assigned.active), partitions(assigned.standby))
