"""The assignors: everything has its readers, loads are even, and little moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.broker.groups.assignors import (
    Assignor,
    Partitions,
    Subscriber,
    TopicPartition,
    ranges,
    simple,
    uniform,
)
from tests.harness.profiles import examples

A, B, C, D = (UUID(int=n) for n in range(1, 5))
TOPICS = (A, B, C, D)


def group(
    wanted: Mapping[str, set[UUID]], held: Mapping[str, Partitions] | None = None
) -> dict[str, Subscriber]:
    return {
        member: Subscriber(frozenset(topics), (held or {}).get(member, frozenset()))
        for member, topics in wanted.items()
    }


def numbers(assigned: Partitions, topic: UUID) -> list[int]:
    return sorted(number for id_, number in assigned if id_ == topic)


def readers(result: Mapping[str, Partitions]) -> Counter[TopicPartition]:
    return Counter(partition for assigned in result.values() for partition in assigned)


def loads(result: Mapping[str, Partitions]) -> list[int]:
    return sorted(map(len, result.values()))


def moved(before: Mapping[str, Partitions], after: Mapping[str, Partitions]) -> int:
    """How many partitions a member has got that it had not."""
    return sum(len(after[member] - before.get(member, frozenset())) for member in after)


def needed(before: Mapping[str, Partitions], after: Mapping[str, Partitions], count: int) -> int:
    """How few could have moved: the rest of what members may keep at most."""
    quota, extra = divmod(count, len(after))
    kept = 0
    for member in sorted(after, key=lambda one: -len(before.get(one, ()))):
        may = quota + (1 if extra else 0)
        have = len(before.get(member, ()))
        if have > quota and extra:
            extra -= 1
        else:
            may = quota
        kept += min(have, may)
    return count - kept


# ---- by example ------------------------------------------------------------------------------


def test_uniform_deals_the_partitions_of_each_topic_to_all() -> None:
    result = uniform(group({"x": {A, B}, "y": {A, B}}), {A: 4, B: 2})
    assert loads(result) == [3, 3]
    for member in ("x", "y"):
        assert len(numbers(result[member], A)) == 2
        assert len(numbers(result[member], B)) == 1


def test_uniform_takes_a_little_of_each_topic_from_a_member_that_has_too_much() -> None:
    wanted = {"x": {A, B}, "y": {A, B}}
    everything = uniform(group({"x": {A, B}}), {A: 4, B: 4})
    result = uniform(group(wanted, everything), {A: 4, B: 4})
    assert [len(numbers(result["y"], topic)) for topic in (A, B)] == [2, 2]


def test_uniform_leaves_members_without_partitions_where_there_are_too_few() -> None:
    result = uniform(group({name: {A} for name in "vwxyz"}), {A: 2})
    assert loads(result) == [0, 0, 0, 1, 1]


def test_a_topic_that_nobody_wants_is_nobodys() -> None:
    for assign in (uniform, ranges, simple):
        assert assign(group({"x": set()}), {}) == {"x": frozenset()}
        assert assign({}, {}) == {}


def test_ranges_are_consecutive_and_alike_for_topics_that_are_alike() -> None:
    result = ranges(group({"x": {A, B, C}, "y": {A, B, C}}), {A: 5, B: 5, C: 3})
    assert numbers(result["x"], A) == numbers(result["x"], B) == [0, 1, 2]
    assert numbers(result["y"], A) == numbers(result["y"], B) == [3, 4]
    assert (numbers(result["x"], C), numbers(result["y"], C)) == ([0, 1], [2])


def test_ranges_are_for_static_members_first() -> None:
    members = {
        "a": Subscriber(frozenset({A})),
        "x": Subscriber(frozenset({A}), instance_id="2"),
        "y": Subscriber(frozenset({A}), instance_id="1"),
    }
    result = ranges(members, {A: 3})
    assert result == {"y": {(A, 0)}, "x": {(A, 1)}, "a": {(A, 2)}}


def test_share_members_are_never_idle_and_partitions_have_two_readers() -> None:
    few = simple(group({name: {A} for name in "xyz"}), {A: 1})
    assert loads(few) == [1, 1, 1]
    many = simple(group({name: {A} for name in "xyz"}), {A: 6})
    assert set(readers(many).values()) == {2}
    assert loads(many) == [4, 4, 4]
    assert simple(group({"x": {A}}), {A: 2}) == {"x": {(A, 0), (A, 1)}}


# ---- properties ------------------------------------------------------------------------------

counts_of = st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 12), min_size=1)
names = st.sets(st.text("abcdefgh", min_size=1, max_size=3), min_size=1, max_size=9)


@st.composite
def anyhow(draw: st.DrawFn) -> tuple[dict[str, Subscriber], dict[UUID, int]]:
    """Members that want different topics, and had anything before."""
    counts = draw(counts_of)
    free = [(topic, number) for topic, count in counts.items() for number in range(count + 2)]
    members: dict[str, Subscriber] = {}
    for name in sorted(draw(names)):
        held = draw(st.sets(st.sampled_from(free), max_size=8)) if free else set()
        free = [partition for partition in free if partition not in held]
        wanted = draw(st.sets(st.sampled_from(sorted(counts))))
        members[name] = Subscriber(frozenset(wanted), frozenset(held))
    return members, counts


def wanted_partitions(
    members: Mapping[str, Subscriber], counts: Mapping[UUID, int]
) -> set[TopicPartition]:
    topics = {topic for member in members.values() for topic in member.topics}
    return {(topic, number) for topic in topics for number in range(counts[topic])}


def only_wanted_counts(
    members: Mapping[str, Subscriber], counts: Mapping[UUID, int]
) -> dict[UUID, int]:
    topics = {topic for member in members.values() for topic in member.topics}
    return {topic: count for topic, count in counts.items() if topic in topics}


def check_whole(
    assign: Assignor, members: dict[str, Subscriber], counts: Mapping[UUID, int]
) -> dict[str, Partitions]:
    """Everything that is wanted is read, by those who want it; the order does not matter."""
    counts = only_wanted_counts(members, counts)
    result = assign(members, counts)
    assert result.keys() == members.keys()
    assert readers(result).keys() == wanted_partitions(members, counts)
    for member, assigned in result.items():
        assert {topic for topic, _ in assigned} <= members[member].topics
    assert assign(dict(reversed(members.items())), counts) == result
    return result


@given(anyhow())
@settings(max_examples=examples(66))
def test_members_that_want_different_things(
    drawn: tuple[dict[str, Subscriber], dict[UUID, int]],
) -> None:
    members, counts = drawn
    for assign in (uniform, ranges, simple):
        result = check_whole(assign, members, counts)
        if assign is not simple:
            assert set(readers(result).values()) <= {1}
        if assign is not ranges:
            check_even(members, result)
        check_stays(assign, members, counts, result)
    check_shared(members, simple(members, only_wanted_counts(members, counts)))


def check_even(members: Mapping[str, Subscriber], result: Mapping[str, Partitions]) -> None:
    """No partition could go to a member that has two fewer."""
    for giver, assigned in result.items():
        for topic, number in assigned:
            for taker, one in members.items():
                if topic in one.topics and (topic, number) not in result[taker]:
                    assert len(result[taker]) >= len(assigned) - 1, (giver, taker)


def check_stays(
    assign: Assignor,
    members: Mapping[str, Subscriber],
    counts: Mapping[UUID, int],
    result: Mapping[str, Partitions],
) -> None:
    """Without a change nothing moves."""
    again = {name: Subscriber(members[name].topics, held) for name, held in result.items()}
    assert assign(again, only_wanted_counts(members, counts)) == result


def check_shared(members: Mapping[str, Subscriber], result: Mapping[str, Partitions]) -> None:
    """Partitions have two readers if they can, and no member is idle."""
    for (topic, _), count in readers(result).items():
        interested = sum(topic in one.topics for one in members.values())
        assert count >= min(2, interested)
    for name, one in members.items():
        assert bool(result[name]) == bool(one.topics)


@given(names, counts_of, st.lists(st.tuples(st.booleans(), st.text("abc", min_size=1)), max_size=8))
@settings(max_examples=examples(60))
def test_members_that_want_the_same_get_the_same_and_little_moves(
    first: set[str], counts: dict[UUID, int], steps: list[tuple[bool, str]]
) -> None:
    """Members come and go one after the other."""
    total = sum(counts.values())
    wanted = set(counts)
    before: dict[str, Partitions] = {}
    present = set(first)
    for joins, name in [(True, ""), *steps]:
        if name:
            present = present | {name} if joins else (present - {name} or present)
        result = uniform(group(dict.fromkeys(present, wanted), before), counts)
        assert loads(result)[-1] - loads(result)[0] <= 1
        stayed = {one: held for one, held in before.items() if one in present}
        assert moved(stayed, result) == needed(stayed, result, total)
        before = result


@given(names, counts_of)
@settings(max_examples=examples(66))
def test_share_members_that_want_the_same_have_equally_much(
    members: set[str], counts: dict[UUID, int]
) -> None:
    result = simple(group({one: set(counts) for one in members}), counts)
    assert loads(result)[-1] - loads(result)[0] <= 1
    shared = readers(result).values()
    assert max(shared) - min(shared) <= 1
