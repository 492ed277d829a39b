"""The members of share groups: who reads what, with nobody waiting for anybody."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.broker.catalog import ApiError
from penstock.broker.groups.share import ShareGroup
from penstock.wire.errors import ErrorCode
from tests.broker.groups.readers import INTERVAL_MS, SESSION_MS, Reader, World, settle
from tests.harness.profiles import examples


def sharer(world: World, id_: str, *names: str) -> Reader:
    return Reader(world, id_, frozenset(names or ("t",)), kind=ShareGroup)


@pytest.fixture
def world() -> World:
    world = World()
    world.make("t", 2)
    return world


def test_more_members_than_partitions_share_them(world: World) -> None:
    readers = [sharer(world, id_) for id_ in "abcde"]
    settle(readers)
    assert all(len(one.reads) >= 1 for one in readers)
    assert world.sharers.state == "Stable"
    for one in readers:
        assert world.sharers.is_member(one.id)
        assert world.sharers.partitions_of(one.id) == one.reads
    assert not world.sharers.is_member("z")
    assert world.sharers.partitions_of("z") == frozenset()


def test_a_member_gets_its_part_with_its_next_heartbeat(world: World) -> None:
    one = sharer(world, "a")
    one.beat()
    assert one.reads == world.all_of("t")
    two = sharer(world, "b")
    two.beat()
    assert two.reads == world.all_of("t")
    world.make("u", 1)
    one.subscribe("u")
    assert one.reads == world.all_of("u")


def test_a_member_that_leaves_or_falls_silent_is_replaced(world: World) -> None:
    readers = [sharer(world, id_) for id_ in "abc"]
    settle(readers)
    readers[0].leave()
    for _ in range(SESSION_MS // INTERVAL_MS + 1):
        readers[1].beat()
        world.pass_time(INTERVAL_MS)
    assert world.sharers.members.keys() == {"b"}
    assert readers[1].reads == world.all_of("t")
    readers[1].leave()
    assert world.sharers.state == "Empty"


def test_epochs_are_fenced(world: World) -> None:
    one = sharer(world, "a")
    one.beat()
    assert one.beat() is not None
    one.epoch = 7
    assert one.beat() is None
    stranger = sharer(world, "b")
    stranger.epoch = 1
    with pytest.raises(ApiError) as error:
        stranger._send(stranger._next_beat())
    assert error.value.code == ErrorCode.UNKNOWN_MEMBER_ID


def test_an_answer_that_was_lost_is_told_again(world: World) -> None:
    one, two = sharer(world, "a"), sharer(world, "b")
    one.beat()
    two.beat()
    one.beat(lose_answer=True)
    assert one.beat() is not None
    assert one.epoch == world.sharers.heading.epoch


def test_members_outlive_a_restart(world: World) -> None:
    readers = [sharer(world, id_) for id_ in "abc"]
    settle(readers)
    had = [(one.epoch, one.reads) for one in readers]
    world.restart()
    settle(readers)
    assert had == [(one.epoch, one.reads) for one in readers]


def test_a_share_group_has_no_offsets(world: World) -> None:
    sharer(world, "a").beat()
    group = world.sharers
    code = group.check_commit("a", 1, None, in_transaction=False, version=9)
    assert code == group.check_fetch("a", 1) == ErrorCode.GROUP_ID_NOT_FOUND


def test_an_empty_group_may_become_one_of_another_kind(world: World) -> None:
    one = sharer(world, "a")
    one.beat()
    consumer = Reader(world, "b", frozenset({"t"}))
    with pytest.raises(ApiError) as error:
        consumer.beat()
    assert error.value.code == ErrorCode.GROUP_ID_NOT_FOUND
    one.leave()
    consumer.beat()
    assert world.consumers.members.keys() == {"b"}
    world.restart()
    assert world.consumers.members.keys() == {"b"}


class ShareGroups(RuleBasedStateMachine):
    """Whatever happens: when all have been heard of, every partition is read, by the right ones."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.make("a", 2)
        self.readers: list[Reader] = []
        self.ids = count(1)

    def one(self, at: int) -> Reader:
        return self.readers[at % len(self.readers)]

    @precondition(lambda self: len(self.readers) < 7)
    @rule(names=st.frozensets(st.sampled_from("abc"), min_size=1))
    def join(self, names: frozenset[str]) -> None:
        self.readers.append(sharer(self.world, f"m{next(self.ids)}", *names))
        self.readers[-1].beat()

    @precondition(lambda self: self.readers)
    @rule(at=st.integers(0, 100), lose_answer=st.booleans())
    def beat(self, at: int, lose_answer: bool) -> None:
        self.one(at).beat(lose_answer=lose_answer)

    @precondition(lambda self: self.readers)
    @rule(at=st.integers(0, 100), politely=st.booleans())
    def go(self, at: int, politely: bool) -> None:
        one = self.one(at)
        self.readers.remove(one)
        if politely and one.id in self.world.sharers.members:
            one.leave()

    @rule(name=st.sampled_from("abc"), partitions=st.integers(1, 5))
    def change_topic(self, name: str, partitions: int) -> None:
        topic = self.world.catalog.topics.get(name)
        if topic is None:
            self.world.make(name, partitions)
        elif partitions > topic.partitions:
            self.world.grow(name, partitions)
        else:
            self.world.delete(name)

    @rule(ms=st.sampled_from((100, 20_000)))
    def pass_time(self, ms: int) -> None:
        self.world.pass_time(ms)

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @invariant()
    def members_are_told_what_they_want(self) -> None:
        group = self.world.groups.groups.get("g")
        for member in group.members.values() if isinstance(group, ShareGroup) else ():
            assert member.standing.revoking == frozenset()

    @rule()
    def settle_all(self) -> None:
        if not self.readers:
            return
        for _ in range(SESSION_MS // INTERVAL_MS + 1):
            for one in self.readers:
                one.beat()
            self.world.pass_time(INTERVAL_MS)
        settle(self.readers)
        wanted = {name for one in self.readers for name in one.names}
        assert {part for one in self.readers for part in one.reads} == self.world.all_of(*wanted)
        for one in self.readers:
            assert bool(one.reads) == bool(self.world.all_of(*one.names))

    def teardown(self) -> None:
        self.settle_all()


TestShareGroups = ShareGroups.TestCase
TestShareGroups.settings = settings(max_examples=examples(50), stateful_step_count=30)
