"""Where a group goes on reading: the plan of `penstock groups reset`, as pure functions.

A plan says for each partition which offset the group has and which one it gets. An offset that is
not in the log is moved to the nearest that is, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import typer

from penstock.cli.kafka import BrokerError

GoalKind = Literal["earliest", "latest", "offset", "time", "shift"]


class Goal(NamedTuple):
    """Where to: `value` is an offset, a time in ms since 1970 or a number of records."""

    kind: GoalKind
    value: int = 0


class Wanted(NamedTuple):
    """A topic that was named, and which of its partitions; None for all."""

    topic: str
    partitions: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """What is known of a partition before the reset."""

    topic: str
    partition: int
    committed: int | None
    earliest: int
    latest: int
    # The first record at or after the goal's time; None if all are earlier.
    at_time: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What happens to one partition."""

    topic: str
    partition: int
    old: int | None
    new: int
    note: str = ""

    @property
    def change(self) -> int | None:
        return None if self.old is None else self.new - self.old


def parse_topics(texts: Iterable[str]) -> list[Wanted]:
    """`TOPIC` or `TOPIC:0,2`; named twice, a topic's partitions are put together."""
    found: dict[str, set[int] | None] = {}
    for text in texts:
        topic, colon, numbers = text.strip().partition(":")
        parts = [part.strip() for part in numbers.split(",")] if colon else []
        if not topic or not all(part.isdecimal() for part in parts) or (colon and not parts):
            raise typer.BadParameter(f"{text!r} is not TOPIC or TOPIC:0,1,2")
        known = found.get(topic, set())
        if not colon or known is None:
            found[topic] = None
        else:
            found[topic] = known | {int(part) for part in parts}
    return [
        Wanted(topic, None if numbers_ is None else tuple(sorted(numbers_)))
        for topic, numbers_ in found.items()
    ]


def plan(goal: Goal, places: Sequence[Place]) -> list[Step]:
    """What a reset to the goal does; BrokerError if it cannot be done for one of them."""
    return [_step(goal, place) for place in places]


def _step(goal: Goal, place: Place) -> Step:
    wanted, note = _wanted(goal, place)
    new = min(max(wanted, place.earliest), place.latest)
    if new > wanted:
        note = f"{wanted} is before the first record; the log begins at {new}"
    elif new < wanted:
        note = f"{wanted} is beyond the end; the log ends at {new}"
    return Step(place.topic, place.partition, place.committed, new, note)


def _wanted(goal: Goal, place: Place) -> tuple[int, str]:
    if goal.kind == "earliest":
        return place.earliest, ""
    if goal.kind == "latest":
        return place.latest, ""
    if goal.kind == "time":
        if place.at_time is None:
            return place.latest, "no record is that late; the end instead"
        return place.at_time, ""
    if goal.kind == "shift":
        if place.committed is None:
            raise BrokerError(
                f"the group has no offset in {place.topic}, partition {place.partition}, "
                "that could be shifted",
                advice="Give --to-earliest, --to-latest, --to-offset or --to-time instead.",
            )
        return place.committed + goal.value, ""
    return goal.value, ""
