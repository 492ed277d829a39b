"""The assignors beside Apache Kafka's own, on the same groups as they change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any
from uuid import UUID

import pytest

from penstock.broker.groups.assignors import (
    Assignor,
    Partitions,
    Subscriber,
    by_topic,
    ranges,
    simple,
    uniform,
)
from penstock.testing.java_client import JavaClient
from penstock.testing.kafka_tools import KafkaTools
from tests.harness.profiles import ASSIGNED_GROUPS

TOPICS = tuple(UUID(int=n << 64 | n) for n in range(1, 5))
Members = dict[str, Subscriber]


@pytest.fixture(scope="module")
def java(kafka_tools: KafkaTools) -> Iterator[JavaClient]:
    """No broker is asked anything."""
    with kafka_tools.java_client("127.0.0.1:1") as client:
        yield client


def kafkas(
    java: JavaClient, name: str, members: Members, counts: Mapping[UUID, int]
) -> dict[str, Partitions]:
    """What Kafka's assignor says."""
    answer = java.call(
        "assign",
        assignor=name,
        topics={str(topic): count for topic, count in counts.items()},
        members={
            id_: {
                "instance": one.instance_id,
                "topics": [str(topic) for topic in one.topics],
                "held": {str(topic): n for topic, n in by_topic(one.held).items()},
            }
            for id_, one in members.items()
        },
    )
    found: dict[str, Any] = answer["assignments"]
    return {
        id_: frozenset(
            (UUID(topic), number)
            for topic, numbers in found.get(id_, {}).items()
            for number in numbers
        )
        for id_ in members
    }


def groups(seed: int, *, same: bool) -> Iterator[tuple[Members, dict[UUID, int]]]:
    """Groups of all sizes; members want the same, or whatever each likes."""
    random = Random(seed)
    for _ in range(ASSIGNED_GROUPS):
        counts = {topic: random.randint(1, 9) for topic in random.sample(TOPICS, 3)}
        members: Members = {}
        for at in range(random.randint(1, 7)):
            wanted = frozenset(counts)
            if not same:
                wanted = frozenset(random.sample(sorted(counts), random.randint(1, 3)))
            instance_id = f"i{random.randint(0, 99)}-{at}" if random.random() < 0.3 else None
            members[f"m{random.randint(0, 99)}-{at}"] = Subscriber(wanted, instance_id=instance_id)
        topics = {topic for one in members.values() for topic in one.topics}
        yield members, {topic: n for topic, n in counts.items() if topic in topics}


def without_one(members: Members, result: Mapping[str, Partitions], random: Random) -> Members:
    """The same group later: one member has gone, or one has come."""
    later = {
        id_: Subscriber(one.topics, result[id_], one.instance_id) for id_, one in members.items()
    }
    if len(later) > 1 and random.random() < 0.5:
        del later[random.choice(sorted(later))]
    else:
        later[f"n{random.randint(0, 99)}"] = Subscriber(next(iter(later.values())).topics)
    return later


def moved(members: Members, result: Mapping[str, Partitions]) -> int:
    return sum(len(result[id_] - one.held) for id_, one in members.items())


@pytest.mark.parametrize("same", [True, False])
def test_ranges_are_kafkas(java: JavaClient, seed: int, same: bool) -> None:
    for members, counts in groups(seed, same=same):
        assert ranges(members, counts) == kafkas(java, "range", members, counts)


@pytest.mark.parametrize(("name", "assign"), [("uniform", uniform), ("simple", simple)])
def test_as_even_as_kafkas_and_no_more_is_moved(
    java: JavaClient, seed: int, name: str, assign: Assignor
) -> None:
    random = Random(seed)
    for members, counts in groups(seed, same=True):
        ours = assign(members, counts)
        later = without_one(members, ours, random)
        ours = assign(later, counts)
        theirs = kafkas(java, name, later, counts)
        spread = max(map(len, theirs.values())) - min(map(len, theirs.values()))
        assert max(map(len, ours.values())) - min(map(len, ours.values())) <= max(spread, 1)
        if name == "uniform":
            assert sorted(map(len, ours.values())) == sorted(map(len, theirs.values()))
            assert moved(later, ours) <= moved(later, theirs)


def test_as_even_as_kafkas_where_members_want_different_topics(java: JavaClient, seed: int) -> None:
    for members, counts in groups(seed, same=False):
        ours, theirs = uniform(members, counts), kafkas(java, "uniform", members, counts)
        squares = [sum(len(held) ** 2 for held in result.values()) for result in (ours, theirs)]
        assert squares[0] <= squares[1], (members, counts)
