"""Consumer groups, step by step: epochs, giving up and getting partitions, leaving, coming back."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.broker.catalog import ApiError
from penstock.broker.config import Limits
from penstock.broker.groups.members import AWAY, LEAVING, Beat
from penstock.wire.errors import ErrorCode
from tests.broker.groups.readers import (
    INTERVAL_MS,
    REBALANCE_MS,
    SESSION_MS,
    Reader,
    World,
    settle,
)


@pytest.fixture
def world() -> World:
    world = World()
    world.make("t", 4)
    return world


def reader(world: World, id_: str, *names: str, **more: Any) -> Reader:
    return Reader(world, id_, frozenset(names or ("t",)), **more)


def joined(world: World, *ids: str) -> list[Reader]:
    readers = [reader(world, id_) for id_ in ids]
    settle(readers)
    return readers


def refusal(one: Reader, **changes: object) -> ErrorCode:
    with pytest.raises(ApiError) as error:
        one._send(one._next_beat(**changes))
    return error.value.code


# ---- joining ---------------------------------------------------------------------------------


def test_the_first_member_gets_everything_at_once(world: World) -> None:
    (one,) = joined(world, "a")
    assert one.reads == world.all_of("t")
    assert one.epoch == 1
    assert world.consumers.state == "Stable"


def test_a_partition_is_given_up_before_another_member_gets_it(world: World) -> None:
    (one,) = joined(world, "a")
    two = reader(world, "b")
    two.beat()
    # It is a member of the new epoch, but everything is still with the first.
    assert (two.epoch, two.reads) == (2, frozenset())
    assert world.consumers.state == "Reconciling"
    one.slow = True
    one.beat()
    assert (one.epoch, len(one.told), len(one.reads)) == (1, 2, 4)
    two.beat()
    assert not two.reads
    one.settle()
    one.beat()
    assert one.epoch == 2
    two.beat()
    assert one.reads | two.reads == world.all_of("t")
    assert len(two.reads) == 2
    assert world.consumers.state == "Stable"


def test_a_member_that_does_not_say_what_it_reads_may_read_everything(world: World) -> None:
    (one,) = joined(world, "a")
    two = reader(world, "b")
    two.beat()
    one.slow = True
    for _ in range(3):
        one.beat()
    two.beat()
    assert not two.reads
    assert one.epoch == 1


def test_members_beyond_the_partitions_wait(world: World) -> None:
    readers = joined(world, *"abcdef")
    assert sorted(len(one.reads) for one in readers) == [0, 0, 1, 1, 1, 1]
    next(one for one in readers if one.reads).leave()
    settle(one for one in readers if one.epoch)
    assert sum(len(one.reads) for one in readers) == 4


def test_a_member_may_join_again_with_its_id(world: World) -> None:
    (one,) = joined(world, "a")
    epoch = one.epoch
    one.abandon()
    answer = one.beat()
    assert answer is not None
    assert (answer.epoch, answer.assigned) == (epoch, world.all_of("t"))


def test_the_assignment_is_told_when_it_changes_or_everything_is_said_anew(world: World) -> None:
    (one,) = joined(world, "a")
    quiet = one.beat()
    assert quiet is not None
    assert quiet.assigned is None
    one.said = None
    full = one.beat()
    assert full is not None
    assert full.assigned == world.all_of("t")


def test_a_group_in_haste_is_heard_of_often_and_then_as_usual(world: World) -> None:
    (one,) = joined(world, "a")
    assert one.interval_ms == 100
    world.pass_time(10_000)
    one.beat()
    assert one.interval_ms == INTERVAL_MS


def test_a_group_has_a_bounded_size() -> None:
    world = World(limits=Limits(max_group_size=2, max_member_bytes=100, max_group_bytes=150))
    world.make("t", 1)
    joined(world, "a", "b")
    assert refusal(reader(world, "c")) == ErrorCode.GROUP_MAX_SIZE_REACHED
    one = reader(world, "a")
    assert refusal(one, names=frozenset({"x" * 101})) == ErrorCode.INVALID_REQUEST
    one.beat(names=frozenset({"x" * 90}))
    two = reader(world, "b")
    assert refusal(two, names=frozenset({"x" * 90})) == ErrorCode.GROUP_MAX_SIZE_REACHED


# ---- epochs ----------------------------------------------------------------------------------


def test_epochs_that_are_not_the_members_are_fenced(world: World) -> None:
    one, two = joined(world, "a", "b")
    one.epoch = two.epoch = 99
    assert refusal(one) == ErrorCode.FENCED_MEMBER_EPOCH
    two.epoch = 1
    two.reads = world.all_of("t")
    assert refusal(two) == ErrorCode.FENCED_MEMBER_EPOCH
    stranger = reader(world, "c")
    stranger.epoch = 1
    assert refusal(stranger) == ErrorCode.UNKNOWN_MEMBER_ID


def test_the_last_epoch_is_taken_from_a_member_whose_answer_was_lost(world: World) -> None:
    (one,) = joined(world, "a")
    two = reader(world, "b")
    two.beat()
    one.beat()
    one.beat(lose_answer=True)
    assert world.consumers.members["a"].standing.epoch == 2
    assert one.epoch == 1
    answer = one.beat()
    assert answer is not None
    assert (answer.epoch, answer.assigned) == (2, one.reads)


def test_the_last_epoch_is_not_taken_from_one_that_reads_more_than_it_may(world: World) -> None:
    one, two = joined(world, "a", "b")
    before = one.epoch
    joined(world, "c")
    settle([one, two])
    assert one.epoch > before
    one.epoch = world.consumers.members["a"].standing.previous_epoch
    one.reads = world.all_of("t")
    assert one.beat() is None
    assert one.epoch == 0


def test_a_member_need_not_give_up_what_it_has_never_heard_of(world: World) -> None:
    one = reader(world, "a", "later")
    settle([one])
    world.make("later", 1)
    one.beat(lose_answer=True)
    one.names = frozenset()
    one.said = None
    assert one.beat() is not None
    assert world.consumers.state == "Stable"


# ---- going -----------------------------------------------------------------------------------


def test_what_a_leaving_member_had_goes_to_the_others(world: World) -> None:
    one, two = joined(world, "a", "b")
    assert two.leave().epoch == LEAVING
    settle([one])
    assert one.reads == world.all_of("t")
    one.leave()
    assert world.consumers.state == "Empty"
    assert world.consumers.idle_since_ms == world.now_ms


def test_a_silent_member_is_removed_after_its_session(world: World) -> None:
    one, two = joined(world, "a", "b")
    for _ in range(9):
        world.pass_time(SESSION_MS // 9)
        one.beat()
    assert "b" not in world.consumers.members
    settle([one])
    assert one.reads == world.all_of("t")
    assert two.beat() is None


def test_a_member_that_does_not_give_up_is_removed_after_its_rebalance_time(world: World) -> None:
    (one,) = joined(world, "a")
    one.slow = True
    two = reader(world, "b")
    for _ in range(REBALANCE_MS // INTERVAL_MS + 1):
        two.beat()
        one.beat()
        world.pass_time(INTERVAL_MS)
    two.beat()
    assert two.reads == world.all_of("t")
    assert "a" not in world.consumers.members


def test_giving_up_in_time_ends_the_rebalance_time(world: World) -> None:
    (one,) = joined(world, "a")
    two = reader(world, "b")
    settle([one, two])
    for _ in range(2 * REBALANCE_MS // INTERVAL_MS):
        world.pass_time(INTERVAL_MS)
        one.beat()
        two.beat()
    assert world.consumers.members.keys() == {"a", "b"}


# ---- static members --------------------------------------------------------------------------


def test_the_partitions_of_a_static_member_wait_for_it(world: World) -> None:
    one = reader(world, "a", instance_id="i")
    two = reader(world, "b")
    settle([one, two])
    had = one.reads
    epoch = world.consumers.heading.epoch
    assert one.go_away().epoch == AWAY
    settle([two])
    assert two.reads == world.all_of("t") - had
    again = reader(world, "c", instance_id="i")
    again.beat()
    assert again.reads == had
    assert world.consumers.heading.epoch == epoch
    assert world.consumers.members.keys() == {"b", "c"}
    settle([two, again])


def test_a_static_member_that_does_not_come_back_is_removed(world: World) -> None:
    one = reader(world, "a", instance_id="i")
    two = reader(world, "b")
    settle([one, two])
    one.go_away()
    for _ in range(10):
        world.pass_time(INTERVAL_MS)
        two.beat()
    settle([two])
    assert two.reads == world.all_of("t")


def test_an_instance_id_belongs_to_one_member(world: World) -> None:
    one = reader(world, "a", instance_id="i")
    one.beat()
    other = reader(world, "b", instance_id="i")
    assert refusal(other) == ErrorCode.UNRELEASED_INSTANCE_ID
    other.epoch = 1
    assert refusal(other) == ErrorCode.FENCED_INSTANCE_ID
    assert refusal(reader_at(world, 1, instance_id="j")) == ErrorCode.UNKNOWN_MEMBER_ID
    # The same client may join again.
    one.abandon()
    one.beat()
    assert one.reads == world.all_of("t")


def reader_at(world: World, epoch: int, **more: Any) -> Reader:
    one = reader(world, "x", **more)
    one.epoch = epoch
    return one


# ---- topics ----------------------------------------------------------------------------------


def test_topics_that_come_grow_and_go_make_new_epochs(world: World) -> None:
    one = reader(world, "a", "t", "later")
    settle([one])
    assert one.reads == world.all_of("t")
    world.make("later", 2)
    settle([one])
    assert one.reads == world.all_of("t", "later")
    world.grow("t", 6)
    settle([one])
    assert len(one.reads) == 8
    world.delete("t")
    settle([one])
    assert one.reads == world.all_of("later")
    world.make("t", 1)
    settle([one])
    assert one.reads == world.all_of("t", "later")


def test_other_topics_change_nothing(world: World) -> None:
    (one,) = joined(world, "a")
    world.make("other")
    settle([one])
    assert one.epoch == 1


def test_a_pattern_means_the_topics_that_match_whole(world: World) -> None:
    world.make("t-1", 1)
    world.make("not-t", 1)
    one = reader(world, "a", regex="t(-[0-9]+)?")
    one.names = frozenset()
    settle([one])
    assert one.reads == world.all_of("t", "t-1")
    assert world.consumers.subscribed_to("t-1")
    assert not world.consumers.subscribed_to("not-t")
    world.make("t-22", 3)
    world.delete("t-1")
    settle([one])
    assert one.reads == world.all_of("t", "t-22")
    one.subscribe("not-t", regex="t")
    settle([one])
    assert one.reads == world.all_of("t", "not-t")


def test_what_is_no_pattern_is_refused(world: World) -> None:
    one = reader(world, "a", regex="(")
    assert refusal(one) == ErrorCode.INVALID_REGULAR_EXPRESSION
    assert world.groups.get("g") is None


def test_members_vote_for_the_assignor(world: World) -> None:
    one = reader(world, "a", assignor="range")
    two = reader(world, "b")
    settle([one, two])
    assert world.consumers.heading.assignor == "range"
    three, four = (reader(world, id_, assignor="uniform") for id_ in "cd")
    settle([one, two, three, four])
    assert world.consumers.heading.assignor == "uniform"


def test_a_changed_subscription_is_given_up_and_got(world: World) -> None:
    world.make("u", 2)
    one = reader(world, "a", "t", "u")
    two = reader(world, "b", "t")
    settle([one, two])
    one.subscribe("u")
    settle([one, two])
    assert one.reads == world.all_of("u")
    assert two.reads == world.all_of("t")


# ---- restarts --------------------------------------------------------------------------------


def test_after_a_restart_members_go_on_with_what_they_have(world: World) -> None:
    one, two = joined(world, "a", "b")
    had = [(each.epoch, each.reads) for each in (one, two)]
    world.restart()
    for each in (one, two):
        assert each.beat() is not None
    settle([one, two])
    assert had == [(each.epoch, each.reads) for each in (one, two)]


def test_a_restart_in_the_middle_of_a_rebalance_gives_nothing_away(world: World) -> None:
    (one,) = joined(world, "a")
    one.slow = True
    two = reader(world, "b")
    two.beat()
    one.beat()
    world.restart()
    two.beat()
    assert not two.reads
    settle([one, two])
    assert len(two.reads) == 2


def test_after_a_restart_members_get_their_time_anew(world: World) -> None:
    (one,) = joined(world, "a")
    one.slow = True
    two = reader(world, "b")
    two.beat()
    one.beat()
    world.restart()
    for _ in range(REBALANCE_MS // INTERVAL_MS + 1):
        two.beat()
        one.beat()
        world.pass_time(INTERVAL_MS)
    assert world.consumers.members.keys() == {"b"}
    world.restart()
    world.pass_time(SESSION_MS)
    assert world.consumers.state == "Empty"


# ---- offsets ---------------------------------------------------------------------------------


def test_offsets_are_committed_by_members_that_are_up_to_date(world: World) -> None:
    (one,) = joined(world, "a")
    group = world.consumers

    def check(member_id: str, epoch: int, *, version: int = 9, txn: bool = False) -> ErrorCode:
        return group.check_commit(member_id, epoch, None, in_transaction=txn, version=version)

    assert check("a", 1) == ErrorCode.NONE
    assert check("a", 2) == ErrorCode.STALE_MEMBER_EPOCH
    assert check("b", 1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert check("", -1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert check("", -1, txn=True) == ErrorCode.NONE
    assert check("a", 1, version=8) == ErrorCode.UNSUPPORTED_VERSION
    assert group.check_fetch("a", 1) == ErrorCode.NONE
    assert group.check_fetch("a", 7) == ErrorCode.STALE_MEMBER_EPOCH
    assert group.check_fetch("b", 1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert group.check_fetch(None, -1) == ErrorCode.NONE
    one.leave()
    assert check("", -1) == ErrorCode.NONE


def test_leaving_is_for_members(world: World) -> None:
    (one,) = joined(world, "a")
    with pytest.raises(ApiError) as error:
        world.consumers.leave(Beat("b", LEAVING), world.now_ms, world.elapsed_ms)
    assert error.value.code == ErrorCode.UNKNOWN_MEMBER_ID
    description = world.consumers.describe()
    assert [member.member_id for member in description.members] == ["a"]
    assert (description.kind, description.protocol_type) == ("consumer", "consumer")
    assert one.reads


def test_who_is_silent_is_removed_even_if_that_cannot_be_written_at_first(world: World) -> None:
    joined(world, "a")
    group, now_ms = world.consumers, world.now_ms
    elapsed_ms = world.elapsed_ms + SESSION_MS
    assert group.tick(now_ms, elapsed_ms)
    # The disk was full. It is tried again, though not at once.
    assert not group.tick(now_ms, elapsed_ms)
    due_ms = group.timers.next_ms
    assert due_ms is not None
    world.write(group.tick(now_ms, due_ms))
    assert not group.members
    assert group.timers.next_ms is None
