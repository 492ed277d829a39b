"""Group offsets: read from the source, translated by the map, committed in the target.

A group goes on in the target with exactly the record that it would have read next in the source.
It must be empty there, and an offset that is already further in the target is left alone: its
consumers have moved over and gone on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from penstock.cli.group_view import list_share_groups
from penstock.cli.kafka import REQUEST_TIMEOUT_S, BrokerError, result_of, translated
from penstock.cli.migration.ends import End
from penstock.cli.migration.mapping import Translator, decode
from penstock.cli.migration.state import Place

OWN_PREFIX: Final = "penstock-migrate-"
GROUPS_AT_ONCE: Final = 50

Outcome = Literal["moved", "further already", "failed"]


@dataclass(frozen=True, slots=True)
class Group:
    """A group of the source and what it has committed for the topics that are moved."""

    name: str
    busy: bool
    offsets: Mapping[Place, tuple[int, str | None]]


@dataclass(frozen=True, slots=True)
class Moved:
    """One offset of a group, on both sides."""

    group: str
    place: Place
    source: int
    target: int
    outcome: Outcome
    reason: str = ""


def find_groups(
    source: End, places: Iterable[Place], wanted: Sequence[str]
) -> tuple[list[Group], list[str]]:
    """The groups with offsets for these partitions, and the names of share groups, left alone."""
    from confluent_kafka import ConsumerGroupState

    doing = "listing the groups of the source"
    with translated(doing):
        future = source.admin.list_consumer_groups(request_timeout=REQUEST_TIMEOUT_S)
    listed = result_of(future, doing).valid
    chosen = [
        group
        for group in sorted(listed, key=lambda group: str(group.group_id))
        if not group.group_id.startswith(OWN_PREFIX)
        and any(fnmatchcase(group.group_id, pattern) for pattern in wanted or ("*",))
    ]
    names = [group.group_id for group in chosen]
    queues = [
        queue.id
        for queue in list_share_groups(source.connection)
        if any(fnmatchcase(queue.id, pattern) for pattern in wanted or ("*",))
    ]
    busy = {
        group.group_id
        for group in chosen
        if group.state not in (ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD)
    }
    all_places = set(places)
    found = []
    for name, offsets in committed(source, names).items():
        ours = {place: value for place, value in offsets.items() if place in all_places}
        if ours:
            found.append(Group(name, name in busy, ours))
    return found, queues


def committed(end: End, names: Sequence[str]) -> dict[str, dict[Place, tuple[int, str | None]]]:
    """What groups have committed: offsets with their metadata."""
    from confluent_kafka import ConsumerGroupTopicPartitions

    found: dict[str, dict[Place, tuple[int, str | None]]] = {}
    doing = f"asking the {end.what} for committed offsets"
    for at in range(0, len(names), GROUPS_AT_ONCE):
        some = names[at : at + GROUPS_AT_ONCE]
        with translated(doing):
            # The client library takes one group in a call.
            futures = {
                name: end.admin.list_consumer_group_offsets(
                    [ConsumerGroupTopicPartitions(name)],
                    require_stable=True,
                    request_timeout=REQUEST_TIMEOUT_S,
                )[name]
                for name in some
            }
        for name, future in futures.items():
            try:
                partitions = result_of(future, doing).topic_partitions or []
            except BrokerError as error:
                if error.kafka_name != "GROUP_ID_NOT_FOUND":
                    raise
                partitions = []
            found[name] = {
                Place(part.topic, part.partition): (part.offset, part.metadata)
                for part in partitions
                if part.offset >= 0
            }
    return found


def translate(
    target: End, mapping_topic: str, groups: Sequence[Group]
) -> dict[tuple[Place, int], int]:
    """Where the committed offsets are in the target."""
    questions = {
        (place, offset) for group in groups for place, (offset, _) in group.offsets.items()
    }
    translator = Translator(questions)
    map_place = Place(mapping_topic, 0)
    bounds = target.bounds([map_place])[map_place]
    for _, _, record in target.records({map_place: (bounds.start, bounds.end)}):
        place, runs = decode(record.value or b"")
        translator.saw(place, runs)
    ends = target.bounds({place for place, _ in questions})
    return {
        (place, offset): translator.answers.get((place, offset), ends[place].end)
        for place, offset in questions
    }


def commit(
    target: End, groups: Sequence[Group], answers: Mapping[tuple[Place, int], int]
) -> list[Moved]:
    """Commit the translated offsets, group by group."""
    there = committed(target, [group.name for group in groups])
    moved: list[Moved] = []
    for group in groups:
        has = there.get(group.name, {})
        wanted: dict[Place, tuple[int, int, str | None]] = {}
        for place, (offset, metadata) in group.offsets.items():
            answer = answers[place, offset]
            if place in has and has[place][0] > answer:
                moved.append(Moved(group.name, place, offset, has[place][0], "further already"))
            else:
                wanted[place] = (offset, answer, metadata)
        moved += _commit_one(target, group.name, wanted)
    return moved


def _commit_one(
    target: End, name: str, wanted: Mapping[Place, tuple[int, int, str | None]]
) -> list[Moved]:
    from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

    if not wanted:
        return []
    doing = f"committing the offsets of {name} in the target"
    offsets = [
        TopicPartition(*place, answer, metadata=metadata or "")
        for place, (_, answer, metadata) in wanted.items()
    ]
    failures: dict[Place, str] = {}
    reason = ""
    try:
        with translated(doing):
            future: Any = target.admin.alter_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(name, offsets)], request_timeout=REQUEST_TIMEOUT_S
            )[name]
        for part in result_of(future, doing).topic_partitions:
            if part.error is not None:
                failures[Place(part.topic, part.partition)] = part.error.str()
    except BrokerError as error:
        reason = str(error)
    return [
        Moved(
            name,
            place,
            offset,
            answer,
            "failed" if reason or place in failures else "moved",
            reason or failures.get(place, ""),
        )
        for place, (offset, answer, _) in wanted.items()
    ]
