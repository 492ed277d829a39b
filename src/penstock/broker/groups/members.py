"""Members of groups that the broker assigns partitions to, and how the journal holds them.

A member is two things that change at different times. Its *profile* is what it says of itself:
who it is and what it wants to read. Its *standing* is how far it has come: its epoch, what it has
been told to read, what it has been told to give up, and what it is meant to have in the end.

Each is an entry of its own, so that a rebalance does not write long subscriptions again:

    (KIND, GROUP, MEMBER, "profile")    {"instance", "rack", "client", "host", "rebalance_ms",
                                         "names", "regex", "assignor"}
    (KIND, GROUP, MEMBER, "standing")   {"epoch", "previous", "assigned", "revoking", "target"}

The group's own entry, `("group", GROUP)`, is its *heading*: kind, epochs, the assignor, and a
digest of the topics that the target was computed from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import UUID

from penstock.broker.groups.assignors import NOTHING, Partitions, by_topic

# The epochs that a client sends instead of its own.
JOINING: Final = 0
LEAVING: Final = -1
# Of a static member, which will be back: its partitions wait for it.
AWAY: Final = -2

PROFILE: Final = "profile"
STANDING: Final = "standing"


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat, as a member sends it; None: as it was."""

    member_id: str
    epoch: int
    client_id: str = ""
    client_host: str = ""
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int | None = None
    names: frozenset[str] | None = None
    regex: str | None = None
    assignor: str | None = None
    owned: Partitions | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a heartbeat is answered."""

    member_id: str
    epoch: int
    interval_ms: int = 0
    # None: what it was told last still holds.
    assigned: Partitions | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """What a member says of itself."""

    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = 0
    names: frozenset[str] = frozenset()
    regex: str = ""
    assignor: str | None = None
    # How many characters there are to hold.
    size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        words = (self.instance_id, self.rack_id, self.client_id, self.regex, self.assignor)
        size = sum(map(len, self.names)) + sum(len(word) for word in words if word)
        object.__setattr__(self, "size", size)

    def updated(self, beat: Beat) -> Profile:
        """As it is after a heartbeat; itself, if that says nothing new."""
        new = Profile(
            beat.instance_id if beat.instance_id is not None else self.instance_id,
            beat.rack_id if beat.rack_id is not None else self.rack_id,
            beat.client_id,
            beat.client_host,
            (
                self.rebalance_timeout_ms
                if beat.rebalance_timeout_ms is None
                else beat.rebalance_timeout_ms
            ),
            self.names if beat.names is None else beat.names,
            self.regex if beat.regex is None else beat.regex,
            self.assignor if beat.assignor is None else beat.assignor,
        )
        return self if new == self else new

    def wants_the_same(self, other: Profile) -> bool:
        return self.names == other.names and self.regex == other.regex

    def to_json(self) -> dict[str, Any]:
        return {
            "instance": self.instance_id,
            "rack": self.rack_id,
            "client": self.client_id,
            "host": self.client_host,
            "rebalance_ms": self.rebalance_timeout_ms,
            "names": sorted(self.names),
            "regex": self.regex,
            "assignor": self.assignor,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Profile:
        return cls(
            value["instance"],
            value["rack"],
            value["client"],
            value["host"],
            value["rebalance_ms"],
            frozenset(value["names"]),
            value["regex"],
            value["assignor"],
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a member has come towards its target."""

    epoch: int = JOINING
    # The one before: a member that has not got its last answer still comes with it.
    previous_epoch: int = JOINING
    # What it has been told to read.
    assigned: Partitions = NOTHING
    # What it has been told to give up, and may still be reading.
    revoking: Partitions = NOTHING
    target: Partitions = NOTHING

    def to_json(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "previous": self.previous_epoch,
            "assigned": partitions_to_json(self.assigned),
            "revoking": partitions_to_json(self.revoking),
            "target": partitions_to_json(self.target),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Standing:
        return cls(
            value["epoch"],
            value["previous"],
            partitions_from_json(value["assigned"]),
            partitions_from_json(value["revoking"]),
            partitions_from_json(value["target"]),
        )


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a group."""

    id: str
    profile: Profile = field(default_factory=Profile)
    standing: Standing = field(default_factory=Standing)

    def updated(self, beat: Beat) -> Member:
        profile = self.profile.updated(beat)
        return self if profile is self.profile else replace(self, profile=profile)

    def reconciled_to(self, epoch: int) -> bool:
        """Whether it has been told to read all that it is meant to, and nothing else."""
        standing = self.standing
        return (
            standing.epoch == epoch
            and not standing.revoking
            and standing.assigned == standing.target
        )


@dataclass(frozen=True, slots=True)
class Heading:
    """What a group is apart from its members."""

    # Raised whenever another target may be needed.
    epoch: int = 0
    # The epoch that the members' targets were computed for.
    target_epoch: int = 0
    assignor: str = ""
    # A digest of the topics and partition counts that the target is about.
    topics: str = ""
    # Since when there are no members, in wall-clock time.
    idle_since_ms: int | None = None

    def to_json(self, kind: str) -> dict[str, Any]:
        return {
            "kind": kind,
            "epoch": self.epoch,
            "target_epoch": self.target_epoch,
            "assignor": self.assignor,
            "topics": self.topics,
            "idle_since_ms": self.idle_since_ms,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Heading:
        return cls(
            value["epoch"],
            value["target_epoch"],
            value["assignor"],
            value["topics"],
            value["idle_since_ms"],
        )


def partitions_to_json(partitions: Partitions) -> dict[str, list[int]]:
    return {str(topic): numbers for topic, numbers in by_topic(partitions).items()}


def partitions_from_json(value: Mapping[str, list[int]]) -> Partitions:
    return frozenset(
        (topic, number)
        for topic_id, numbers in value.items()
        for topic in (UUID(topic_id),)
        for number in numbers
    )
