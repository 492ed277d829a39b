"""What a Kafka Streams application says of itself: its subtopologies and the topics they need.

A *subtopology* is a part of the application that runs by itself: it reads its source topics, keeps
state, and may write to *repartition* topics, which another subtopology reads. Its state is kept in
*changelog* topics. Repartition and changelog topics are *internal*: the broker makes them.

A topology has an epoch, which the application raises when it is changed. All members of a group
must have the one that the group has; it is an entry of its own in the journal:

    ("streams-topology", GROUP)    {"epoch", "subtopologies"}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class InternalTopic:
    """A repartition or changelog topic, as the application wants it."""

    name: str
    # 0: as many as follow from the topics that it is made from.
    partitions: int = 0
    # 0: the broker's default.
    replication_factor: int = 0
    settings: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> list[Any]:
        return [self.name, self.partitions, self.replication_factor, list(self.settings)]

    @classmethod
    def from_json(cls, value: list[Any]) -> InternalTopic:
        name, partitions, replication_factor, settings = value
        return cls(name, partitions, replication_factor, tuple((k, v) for k, v in settings))


@dataclass(frozen=True)
class Subtopology:
    """A part of an application that runs by itself. Topics are in the order of their names."""

    id: str
    sources: tuple[str, ...] = ()
    repartition_sources: tuple[InternalTopic, ...] = ()
    repartition_sinks: tuple[str, ...] = ()
    changelogs: tuple[InternalTopic, ...] = ()
    # Topics that must have equally many partitions, for records of one are joined with another's.
    copartitioned: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """All topics that it reads."""
        return (*self.sources, *(topic.name for topic in self.repartition_sources))

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "sources": list(self.sources),
            "repartition_sources": [topic.to_json() for topic in self.repartition_sources],
            "repartition_sinks": list(self.repartition_sinks),
            "changelogs": [topic.to_json() for topic in self.changelogs],
            "copartitioned": [list(names) for names in self.copartitioned],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Subtopology:
        return cls(
            value["id"],
            tuple(value["sources"]),
            tuple(map(InternalTopic.from_json, value["repartition_sources"])),
            tuple(value["repartition_sinks"]),
            tuple(map(InternalTopic.from_json, value["changelogs"])),
            tuple(tuple(names) for names in value["copartitioned"]),
        )


@dataclass(frozen=True)
class Topology:
    """All subtopologies of an application, in the order of their ids."""

    epoch: int
    subtopologies: tuple[Subtopology, ...]

    @cached_property
    def topics(self) -> frozenset[str]:
        """All topics that the application reads or keeps state in."""
        return self.sources | {
            topic.name for part in self.subtopologies for topic in part.changelogs
        }

    @cached_property
    def sources(self) -> frozenset[str]:
        """All topics that the application reads."""
        return frozenset(self.readers)

    @cached_property
    def readers(self) -> Mapping[str, tuple[str, ...]]:
        """The ids of the subtopologies that read a topic, by its name."""
        found: dict[str, tuple[str, ...]] = {}
        for part in self.subtopologies:
            for name in dict.fromkeys(part.inputs):
                found[name] = (*found.get(name, ()), part.id)
        return found

    @cached_property
    def size(self) -> int:
        """How many characters there are to hold."""
        return sum(
            len(part.id)
            + _length(part.inputs)
            + _length(part.repartition_sinks)
            + sum(map(_length, part.copartitioned))
            + _length(topic.name for topic in part.changelogs)
            + sum(
                len(key) + len(value)
                for topic in (*part.changelogs, *part.repartition_sources)
                for key, value in topic.settings
            )
            for part in self.subtopologies
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "subtopologies": [part.to_json() for part in self.subtopologies],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Topology:
        return cls(value["epoch"], tuple(map(Subtopology.from_json, value["subtopologies"])))


def _length(names: Iterable[str]) -> int:
    return sum(map(len, names))
