"""Which internal topics an application needs, with how many partitions, and which are missing.

How many partitions an internal topic has follows from the topics of the application:

- A repartition topic has as many as the application says. If it says nothing, as many as the
  largest input of the subtopology that writes it; that may be a repartition topic, too.
- Topics that are joined must have equally many. Repartition topics for which the application says
  nothing are made to fit.
- A changelog has as many as its subtopology has tasks, which is the largest number of its inputs.
  A changelog that is a source as well is there already.

`configure` is a function of the topology and of the partition counts of the topics that there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from penstock.broker.catalog import ApiError
from penstock.broker.groups.streams.tasks import Tasks
from penstock.broker.groups.streams.topology import InternalTopic, Subtopology, Topology
from penstock.wire.errors import ErrorCode

# How many names of topics a member is told.
_TOLD: Final = 3

# How many partitions topics have, by name.
Counts = Mapping[str, int]

_NO_SINK: Final = (
    "Failed to compute number of partitions for all repartition topics, because a repartition "
    "source topic is never used as a sink topic."
)
_LOOP: Final = (
    "Failed to compute number of partitions for all repartition topics. There may be loops in the "
    "topology that cannot be resolved."
)


class Status(IntEnum):
    """What a member is told of its group besides its tasks, by Kafka's codes."""

    STALE_TOPOLOGY = 0
    MISSING_SOURCE_TOPICS = 1
    INCORRECTLY_PARTITIONED_TOPICS = 2
    MISSING_INTERNAL_TOPICS = 3
    SHUTDOWN_APPLICATION = 4
    ASSIGNMENT_DELAYED = 5


class InvalidTopologyError(ValueError):
    """Of no such topology can be said how many partitions its topics have."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why there are no tasks, as members are told."""

    status: Status
    detail: str


@dataclass(frozen=True)
class ConfiguredSubtopology:
    """A subtopology whose internal topics have their partition counts."""

    part: Subtopology
    repartition_sources: tuple[InternalTopic, ...]
    changelogs: tuple[InternalTopic, ...]
    tasks: int


@dataclass(frozen=True)
class ConfiguredTopology:
    """A topology with what follows from the topics that there are."""

    # None: it cannot be said yet.
    subtopologies: tuple[ConfiguredSubtopology, ...] | None = None
    problem: Problem | None = None
    # Internal topics to be made.
    missing: tuple[InternalTopic, ...] = field(default=())

    @property
    def is_ready(self) -> bool:
        return self.problem is None

    def check_tasks(self, owned: Tasks) -> None:
        """ApiError if a member says that it runs what does not exist."""
        if not self.is_ready or self.subtopologies is None:
            return
        counts = {item.part.id: item.tasks for item in self.subtopologies}
        for subtopology, number in sorted(owned.active | owned.standby | owned.warmup):
            count = counts.get(subtopology)
            if count is None:
                raise ApiError(
                    ErrorCode.INVALID_REQUEST,
                    f"Subtopology {subtopology} does not exist in the topology.",
                )
            if not 0 <= number < count:
                raise ApiError(
                    ErrorCode.INVALID_REQUEST,
                    f"Task {number} for subtopology {subtopology} is invalid. "
                    f"Number of tasks for this subtopology: {count}",
                )


class _ProblemError(Exception):
    def __init__(self, status: Status, detail: str) -> None:
        super().__init__(detail)
        self.problem = Problem(status, detail)


def configure(topology: Topology, counts: Counts) -> ConfiguredTopology:
    """What follows for a topology; InvalidTopologyError if it can never be run."""
    missing = sorted(
        {name for part in topology.subtopologies for name in part.sources if name not in counts}
    )
    if missing:
        detail = f"Source topics {_told(missing)} are missing."
        return ConfiguredTopology(problem=Problem(Status.MISSING_SOURCE_TOPICS, detail))
    try:
        decided = _Decision(topology, counts).decide()
        parts = tuple(
            ConfiguredSubtopology(
                part,
                tuple(_sized(topic, decided) for topic in part.repartition_sources),
                tuple(_sized(topic, decided) for topic in part.changelogs if topic.name in decided),
                max(decided.get(name) or counts[name] for name in part.inputs),
            )
            for part in topology.subtopologies
        )
        absent = _missing(parts, counts)
    except _ProblemError as error:
        return ConfiguredTopology(problem=error.problem)
    problem = None
    if absent:
        detail = f"Internal topics are missing: {_told([topic.name for topic in absent])}"
        problem = Problem(Status.MISSING_INTERNAL_TOPICS, detail)
    return ConfiguredTopology(parts, problem, absent)


def _told(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - _TOLD
    return ", ".join(names[:_TOLD]) + (f" and {more} additional topics" if more > 0 else "")


def _sized(topic: InternalTopic, decided: Counts) -> InternalTopic:
    return InternalTopic(topic.name, decided[topic.name], topic.replication_factor, topic.settings)


def _missing(parts: tuple[ConfiguredSubtopology, ...], counts: Counts) -> tuple[InternalTopic, ...]:
    """Internal topics that are not there; those that are must have the right size."""
    wanted = {
        topic.name: topic
        for part in parts
        for topic in (*part.repartition_sources, *part.changelogs)
    }
    for name, topic in sorted(wanted.items()):
        if counts.get(name, topic.partitions) != topic.partitions:
            raise _ProblemError(
                Status.INCORRECTLY_PARTITIONED_TOPICS,
                f"Existing topic {name} has different number of partitions: "
                f"expected {topic.partitions}, found {counts[name]}",
            )
    return tuple(topic for name, topic in sorted(wanted.items()) if name not in counts)


class _Decision:
    """How many partitions the internal topics of one topology are to have."""

    def __init__(self, topology: Topology, counts: Counts) -> None:
        self._parts = topology.subtopologies
        self._counts = counts
        repartition = {
            topic.name: topic for part in self._parts for topic in part.repartition_sources
        }
        self._fixed = {name: one.partitions for name, one in repartition.items() if one.partitions}
        self._flexible = repartition.keys() - self._fixed.keys()
        self._decided: dict[str, int] = dict(self._fixed)

    def decide(self) -> dict[str, int]:
        self._size_repartition_topics()
        for part in self._parts:
            for names in part.copartitioned:
                self._fit(names)
        changelogs: dict[str, int] = {}
        for part in self._parts:
            if not part.inputs:
                raise InvalidTopologyError(f"No source topics found for subtopology {part.id}")
            tasks = max(map(self._count, part.inputs))
            changelogs |= {
                topic.name: tasks for topic in part.changelogs if topic.name not in part.inputs
            }
        return self._decided | changelogs

    def _count(self, name: str) -> int:
        # A topic that is there is as large as it is; whether that fits is looked at later.
        count = self._counts.get(name)
        return self._decided[name] if count is None else count

    def _size_repartition_topics(self) -> None:
        """From one subtopology to those that read what it writes, until nothing more follows."""
        readers: dict[str, list[Subtopology]] = {}
        for part in self._parts:
            for topic in part.repartition_sources:
                readers.setdefault(topic.name, []).append(part)
        ready = deque(part for part in self._parts if self._largest_input(part) is not None)
        seen = {part.id for part in ready}
        while ready:
            part = ready.popleft()
            size = self._largest_input(part)
            for name in part.repartition_sinks:
                if size is None or name in self._decided:
                    continue
                self._decided[name] = size
                ready += [one for one in readers.get(name, ()) if one.id not in seen]
                seen |= {one.id for one in readers.get(name, ())}
        if any(
            name not in self._decided for part in self._parts for name in part.repartition_sinks
        ):
            raise InvalidTopologyError(_LOOP)
        if not self._flexible <= self._decided.keys():
            raise InvalidTopologyError(_NO_SINK)

    def _largest_input(self, part: Subtopology) -> int | None:
        sizes = [
            self._decided[topic.name]
            for topic in part.repartition_sources
            if topic.name in self._decided
        ]
        sizes += [self._counts[name] for name in part.sources]
        return max(sizes, default=None)

    def _fit(self, names: tuple[str, ...]) -> None:
        """Repartition topics among these get as many partitions as the others have."""
        repartition = [name for name in names if name in self._fixed or name in self._flexible]
        sizes = {name: self._count(name) for name in names}
        given = {name: size for name, size in sizes.items() if name not in repartition}
        if not given:
            # As Apache Kafka 4.3 does it: all for which the application says it, joined or not. An
            # application that moves here finds its internal topics to be as large as they must be.
            given = self._fixed
        if len(set(given.values())) > 1:
            told = ", ".join(f"{name}={size}" for name, size in sorted(given.items()))
            raise _ProblemError(
                Status.INCORRECTLY_PARTITIONED_TOPICS,
                f"Following topics do not have the same number of partitions: [{{{told}}}]",
            )
        size = next(iter(given.values())) if given else max(sizes.values(), default=0)
        for name in repartition:
            if self._fixed.get(name, size) != size:
                raise _ProblemError(
                    Status.INCORRECTLY_PARTITIONED_TOPICS,
                    f"Number of partitions [{self._fixed[name]}] of repartition topic [{name}] "
                    f"doesn't match number of partitions [{size}] of the source topic.",
                )
            self._decided[name] = size
