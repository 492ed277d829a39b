"""Tasks of a Kafka Streams application: a subtopology and a number of a partition.

A task reads the partitions with its number of all source topics of its subtopology. It is *active*
in one process, which does the work and writes the output; *standby* in others, which keep a copy of
its state; a *warm-up* in one that is to take it over and restores its state before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# A subtopology's id and the number of a partition.
TaskId = tuple[str, int]
TaskIds = frozenset[TaskId]

NO_TASKS: Final[TaskIds] = frozenset()


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks by role."""

    active: TaskIds = NO_TASKS
    standby: TaskIds = NO_TASKS
    warmup: TaskIds = NO_TASKS

    def __bool__(self) -> bool:
        return bool(self.active or self.standby or self.warmup)

    def __and__(self, other: Tasks) -> Tasks:
        return Tasks(
            self.active & other.active, self.standby & other.standby, self.warmup & other.warmup
        )

    def __or__(self, other: Tasks) -> Tasks:
        return Tasks(
            self.active | other.active, self.standby | other.standby, self.warmup | other.warmup
        )

    def __sub__(self, other: Tasks) -> Tasks:
        return Tasks(
            self.active - other.active, self.standby - other.standby, self.warmup - other.warmup
        )

    def __le__(self, other: Tasks) -> bool:
        """Whether all of these are among the others, in the same roles."""
        return (
            self.active <= other.active
            and self.standby <= other.standby
            and self.warmup <= other.warmup
        )

    @property
    def count(self) -> int:
        return len(self.active) + len(self.standby) + len(self.warmup)

    def to_json(self) -> list[dict[str, list[int]]]:
        return [by_subtopology(role) for role in (self.active, self.standby, self.warmup)]

    @classmethod
    def from_json(cls, value: list[Mapping[str, list[int]]]) -> Tasks:
        return cls(*(tasks_of(role.items()) for role in value))


NOTHING: Final = Tasks()


def by_subtopology(tasks: Iterable[TaskId]) -> dict[str, list[int]]:
    """Numbers of partitions by subtopology, both in order."""
    found: dict[str, list[int]] = {}
    for subtopology, number in sorted(tasks):
        found.setdefault(subtopology, []).append(number)
    return found


def tasks_of(numbers: Iterable[tuple[str, Iterable[int]]]) -> TaskIds:
    """Tasks of what names the numbers of each subtopology."""
    return frozenset((subtopology, number) for subtopology, some in numbers for number in some)


def epochs_to_json(epochs: Mapping[TaskId, int]) -> dict[str, list[list[int]]]:
    """Pairs of a partition's number and an epoch by subtopology, all in order."""
    found: dict[str, list[list[int]]] = {}
    for (subtopology, number), epoch in sorted(epochs.items()):
        found.setdefault(subtopology, []).append([number, epoch])
    return found


def epochs_from_json(value: Mapping[str, Iterable[Sequence[int]]]) -> dict[TaskId, int]:
    return {
        (subtopology, number): epoch
        for subtopology, pairs in value.items()
        for number, epoch in pairs
    }
