"""Members of streams groups, and how the journal holds them.

As in other groups a member is two things that change at different times, each an entry of its own.
Its *profile* is what it says of itself. Its *standing* is how far it has come: its epoch, the tasks
it has been told to run, those it has been told to give up, and those it is meant to have:

    ("streams-member", GROUP, MEMBER, "profile")     {"rack", "client", "host", "rebalance_ms",
                                                      "process", "endpoint", "tags", "topology"}
    ("streams-member", GROUP, MEMBER, "standing")    {"epoch", "previous", "assigned", "since",
                                                      "revoking", "target"}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.broker.groups.members import JOINING
from penstock.broker.groups.streams.internal_topics import Problem
from penstock.broker.groups.streams.tasks import (
    NOTHING,
    TaskId,
    Tasks,
    epochs_from_json,
    epochs_to_json,
)
from penstock.broker.groups.streams.topology import InternalTopic, Topology

# Where a process answers interactive queries: a host and a port.
Endpoint = tuple[str, int]
# Pairs of a name and a value, in order.
Tags = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class StreamsBeat:
    """One heartbeat, as a member sends it; None: as it was."""

    member_id: str
    epoch: int
    client_id: str = ""
    client_host: str = ""
    rack_id: str | None = None
    rebalance_timeout_ms: int | None = None
    topology: Topology | None = None
    owned: Tasks | None = None
    process_id: str | None = None
    endpoint: Endpoint | None = None
    tags: Tags | None = None
    # Whether all members are to shut down.
    shuts_down: bool = False
    # Which version of the endpoints of the group it knows.
    endpoint_epoch: int = -1


@dataclass(frozen=True, slots=True)
class Served:
    """Which partitions a process has the state of, by topic, for interactive queries."""

    endpoint: Endpoint
    active: Mapping[str, list[int]]
    standby: Mapping[str, list[int]]


@dataclass(frozen=True, slots=True)
class StreamsAnswer:
    """What a heartbeat is answered."""

    member_id: str
    epoch: int
    interval_ms: int = 0
    # None: what it was told last still holds.
    assigned: Tasks | None = None
    statuses: tuple[Problem, ...] = ()
    # None: nothing has changed.
    served: tuple[Served, ...] | None = None
    endpoint_epoch: int = 0
    # Internal topics that the broker is to make.
    missing: tuple[InternalTopic, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamsProfile:
    """What a member says of itself."""

    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = 0
    process_id: str = ""
    endpoint: Endpoint | None = None
    tags: Tags = ()
    topology_epoch: int = 0
    # How many characters there are to hold.
    size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        host = self.endpoint[0] if self.endpoint is not None else ""
        words = (self.rack_id or "", self.client_id, self.process_id, host)
        size = sum(map(len, words)) + sum(len(name) + len(value) for name, value in self.tags)
        object.__setattr__(self, "size", size)

    def updated(self, beat: StreamsBeat) -> StreamsProfile:
        """As it is after a heartbeat; itself, if that says nothing new."""
        new = StreamsProfile(
            self.rack_id if beat.rack_id is None else beat.rack_id,
            beat.client_id,
            beat.client_host,
            (
                self.rebalance_timeout_ms
                if beat.rebalance_timeout_ms is None
                else beat.rebalance_timeout_ms
            ),
            self.process_id if beat.process_id is None else beat.process_id,
            self.endpoint if beat.endpoint is None else beat.endpoint,
            self.tags if beat.tags is None else beat.tags,
            self.topology_epoch if beat.topology is None else beat.topology.epoch,
        )
        return self if new == self else new

    def to_json(self) -> dict[str, Any]:
        return {
            "rack": self.rack_id,
            "client": self.client_id,
            "host": self.client_host,
            "rebalance_ms": self.rebalance_timeout_ms,
            "process": self.process_id,
            "endpoint": None if self.endpoint is None else list(self.endpoint),
            "tags": [list(tag) for tag in self.tags],
            "topology": self.topology_epoch,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StreamsProfile:
        endpoint = value["endpoint"]
        return cls(
            value["rack"],
            value["client"],
            value["host"],
            value["rebalance_ms"],
            value["process"],
            None if endpoint is None else (str(endpoint[0]), int(endpoint[1])),
            tuple((str(name), str(text)) for name, text in value["tags"]),
            value["topology"],
        )


@dataclass(frozen=True, slots=True)
class StreamsStanding:
    """How far a member has come towards its target."""

    epoch: int = JOINING
    # The one before: a member that has not got its last answer still comes with it.
    previous_epoch: int = JOINING
    # What it has been told to run.
    assigned: Tasks = NOTHING
    # Of each active task that it may be running, the epoch in which it got it.
    since: Mapping[TaskId, int] = field(default_factory=dict)
    # What it has been told to give up, and may still be running.
    revoking: Tasks = NOTHING
    target: Tasks = NOTHING

    def at(self, epoch: int, assigned: Tasks, revoking: Tasks = NOTHING) -> StreamsStanding:
        """With other tasks, in this epoch."""
        return StreamsStanding(
            epoch,
            self.previous_epoch if epoch == self.epoch else self.epoch,
            assigned,
            {task: self.since.get(task, epoch) for task in assigned.active | revoking.active},
            revoking,
            self.target,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "previous": self.previous_epoch,
            "assigned": self.assigned.to_json(),
            "since": epochs_to_json(self.since),
            "revoking": self.revoking.to_json(),
            "target": self.target.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StreamsStanding:
        return cls(
            value["epoch"],
            value["previous"],
            Tasks.from_json(value["assigned"]),
            epochs_from_json(value["since"]),
            Tasks.from_json(value["revoking"]),
            Tasks.from_json(value["target"]),
        )


@dataclass(frozen=True, slots=True)
class StreamsMember:
    """One member of a group."""

    id: str
    profile: StreamsProfile = field(default_factory=StreamsProfile)
    standing: StreamsStanding = field(default_factory=StreamsStanding)

    def updated(self, beat: StreamsBeat) -> StreamsMember:
        profile = self.profile.updated(beat)
        return self if profile is self.profile else replace(self, profile=profile)

    def reconciled_to(self, epoch: int) -> bool:
        """Whether it has been told to run all that it is meant to, and nothing else."""
        standing = self.standing
        return (
            standing.epoch == epoch
            and not standing.revoking
            and standing.assigned == standing.target
        )
