"""Group offsets: read from the source, translated by the map, committed in the target.

A group goes on in the target with exactly the record that it would have read next in the source.
If it has read all that was copied, that is the next record there is in the target, whoever wrote
it: no offset is ever moved over a record that was not copied.

The group must be empty there. An offset is only committed where the group has none, or has one that
a migration has committed. Any other one is its own: its consumers have moved over, or someone has
reset it, and it is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from penstock.cli.group_view import list_share_groups, list_streams_groups
from penstock.cli.kafka import REQUEST_TIMEOUT_S, BrokerError, result_of, translated
from penstock.cli.migration.ends import End
from penstock.client.migration_map import (
    GROUP_KEY,
    TOPIC_KEY,
    Place,
    Translator,
    decode,
    decode_group,
    encode_group,
)

OWN_PREFIX: Final = "penstock-migrate-"
GROUPS_AT_ONCE: Final = 50

Outcome = Literal["moved", "further already", "changed there", "failed"]
# By partition: the offset in the source, the one in the target, and the metadata.
Wanted = Mapping[Place, tuple[int, int, str | None]]


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
    streams = [
        group
        for group in list_streams_groups(source.connection)
        if any(fnmatchcase(group.id, pattern) for pattern in wanted or ("*",))
    ]
    busy |= {group.id for group in streams if group.state != "empty"}
    names = [group.group_id for group in chosen] + [group.id for group in streams]
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


@dataclass(frozen=True, slots=True)
class Translation:
    """Where offsets of the source are in the target, and what was committed for groups before."""

    answers: Mapping[tuple[Place, int], int]
    # All of them, each only once: a run may have ended before it could commit the last.
    committed: Mapping[tuple[str, Place], set[int]]


def translate(
    target: End, mapping_topic: str, groups: Sequence[Group], last_copied: Mapping[Place, int]
) -> Translation:
    """Read the map for the offsets of these groups."""
    questions = {
        (place, offset) for group in groups for place, (offset, _) in group.offsets.items()
    }
    translator = Translator(questions)
    before: dict[tuple[str, Place], set[int]] = {
        (group.name, place): set() for group in groups for place in group.offsets
    }
    map_place = Place(mapping_topic, 0)
    bounds = target.bounds([map_place])[map_place]
    for _, _, record in target.records({map_place: (bounds.start, bounds.end)}):
        if record.key == GROUP_KEY:
            name, offsets = decode_group(record.value or b"")
            for place, offset in offsets.items():
                if (name, place) in before:
                    before[name, place].add(offset)
        elif record.key != TOPIC_KEY:
            translator.saw(*decode(record.value or b""))
    tails = target.tails({place: last_copied[place] + 1 for place, _ in questions})
    answers = {
        (place, offset): translator.answers.get((place, offset), tails[place].next)
        for place, offset in questions
    }
    return Translation(answers, before)


def commit(
    target: End,
    groups: Sequence[Group],
    translation: Translation,
    note: Callable[[Iterable[bytes]], None],
) -> list[Moved]:
    """Commit the translated offsets, group by group; `note` keeps for the next run which."""
    there = committed(target, [group.name for group in groups])
    moved: list[Moved] = []
    wanted: dict[str, Wanted] = {}
    for group in groups:
        settled, open_ones = _decide(group, there.get(group.name, {}), translation)
        moved += settled
        if open_ones:
            wanted[group.name] = open_ones
    if wanted:
        # Before they are committed: if this run ends in between, they are known all the same.
        note(
            value
            for name, offsets in wanted.items()
            for value in encode_group(name, {place: at for place, (_, at, _) in offsets.items()})
        )
    for name, offsets in wanted.items():
        moved += _commit_one(target, name, offsets)
    return moved


def _decide(
    group: Group, has: Mapping[Place, tuple[int, str | None]], translation: Translation
) -> tuple[list[Moved], Wanted]:
    """Offsets that stay as they are in the target, and those that are to be committed."""
    settled: list[Moved] = []
    wanted: dict[Place, tuple[int, int, str | None]] = {}
    for place, (offset, metadata) in group.offsets.items():
        answer = translation.answers[place, offset]
        at = has[place][0] if place in has else None
        if at is None:
            wanted[place] = (offset, answer, metadata)
        elif at == answer:
            settled.append(Moved(group.name, place, offset, at, "moved"))
        elif at > answer:
            settled.append(Moved(group.name, place, offset, at, "further already"))
        elif at in translation.committed[group.name, place]:
            wanted[place] = (offset, answer, metadata)
        else:
            settled.append(Moved(group.name, place, offset, at, "changed there"))
    return settled, wanted


def _commit_one(target: End, name: str, wanted: Wanted) -> list[Moved]:
    from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

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
