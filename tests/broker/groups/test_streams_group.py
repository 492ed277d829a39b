"""Streams groups, step by step: topics, delays, giving up and getting tasks, offsets, limits."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from penstock.broker.apis.streams_groups import _check as check
from penstock.broker.apis.streams_groups import _topology as made
from penstock.broker.catalog import ApiError
from penstock.broker.config import Limits
from penstock.broker.groups.offsets import NewOffset
from penstock.broker.groups.streams.assignor import assign
from penstock.broker.groups.streams.internal_topics import Status
from penstock.broker.groups.streams.members import (
    StreamsBeat,
    StreamsMember,
    StreamsProfile,
    StreamsStanding,
)
from penstock.broker.groups.streams.ownership import Ownership
from penstock.broker.groups.streams.tasks import Tasks
from penstock.broker.groups.streams.topology import InternalTopic, Subtopology, Topology
from penstock.wire.errors import ErrorCode
from penstock.wire.messages import streams_group_heartbeat as beats
from tests.broker.groups.machine import GROUP
from tests.broker.groups.streams_members import StreamsClient, subtopology
from tests.broker.groups.streams_tasks import (
    INTERVAL_MS,
    REBALANCE_MS,
    SESSION_MS,
    Streams,
    Worker,
    settle,
    word_count,
)


@pytest.fixture
def world() -> Streams:
    world = Streams()
    world.make("lines", 2)
    return world


def joined(world: Streams, *ids: str, **more: Any) -> list[Worker]:
    workers = [Worker(world, id_, **more) for id_ in ids]
    settle(workers)
    return workers


def statuses(worker: Worker) -> list[Status]:
    assert worker.answer is not None
    return [problem.status for problem in worker.answer.statuses]


def refusal(worker: Worker, **changes: Any) -> ErrorCode:
    with pytest.raises(ApiError) as error:
        worker.send(worker.next_beat(**changes))
    return error.value.code


# ---- topics ----------------------------------------------------------------------------------


def test_internal_topics_are_asked_for_and_then_there_are_tasks(world: Streams) -> None:
    world.makes_topics = False
    one = Worker(world, "a")
    one.beat()
    assert one.answer is not None
    assert {(topic.name, topic.partitions) for topic in one.answer.missing} == {
        ("words", 2),
        ("counts", 2),
    }
    assert (one.runs, statuses(one)) == (Tasks(), [Status.MISSING_INTERNAL_TOPICS])
    assert world.streams.state == "NotReady"
    world.makes_topics = True
    settle([one])
    assert one.runs.active == world.all_tasks() == {(part, n) for part in "01" for n in (0, 1)}
    assert (statuses(one), world.streams.state) == ([], "Stable")


def test_tasks_follow_the_topics(world: Streams) -> None:
    stateless = Topology(0, (Subtopology("0", ("lines",)),))
    (one,) = joined(world, "a", topology=stateless)
    epoch = one.epoch
    world.grow("lines", 3)
    settle([one])
    assert (len(one.runs.active), one.epoch) == (3, epoch + 1)
    world.delete("lines")
    one.beat()
    one.beat()
    assert (one.runs, statuses(one)) == (Tasks(), [Status.MISSING_SOURCE_TOPICS])
    # Others come and go without anybody being asked anything.
    world.make("other", 7)
    before = one.epoch
    one.beat()
    assert one.epoch == before


def test_a_topology_of_too_many_tasks_is_refused() -> None:
    world = Streams(limits=Limits(max_partitions=10))
    world.make("lines", 6)
    many = Topology(0, tuple(Subtopology(str(n), ("lines",)) for n in range(2)))
    assert refusal(Worker(world, "a", topology=many)) == ErrorCode.STREAMS_INVALID_TOPOLOGY
    assert world.groups.get(GROUP) is None


def test_what_is_too_large_is_refused() -> None:
    limits = Limits(max_member_bytes=100, max_group_bytes=500, max_group_size=1)
    world = Streams(limits=limits)
    world.make("lines", 1)
    huge = InternalTopic("counts", settings=(("key", "x" * 600),))
    large = Topology(0, (Subtopology("0", ("lines",), changelogs=(huge,)),))
    assert refusal(Worker(world, "a", topology=large)) == ErrorCode.INVALID_REQUEST
    assert refusal(Worker(world, "a"), process_id="p" * 101) == ErrorCode.INVALID_REQUEST
    Worker(world, "a").beat()
    assert refusal(Worker(world, "b")) == ErrorCode.GROUP_MAX_SIZE_REACHED


@pytest.mark.parametrize("length", [249, 250])
@pytest.mark.parametrize("field", ["member", "subtopology"])
def test_ids_have_a_limit(field: str, length: int) -> None:
    """They are written again and again, with what members have."""
    id_ = "x" * length
    topology = beats.Topology(subtopologies=[subtopology(id_ if field != "member" else "0", ["t"])])
    client = StreamsClient(print, GROUP, id_ if field == "member" else "a", topology)
    with nullcontext() if length == 249 else pytest.raises(ApiError, match="249"):
        check(client.request(), Limits())


def test_settings_of_internal_topics_have_no_order() -> None:
    """A member that tells them in another order has the same topology."""
    told = [("retention.ms", "1"), ("cleanup.policy", "delete"), ("segment.bytes", "9")]

    def topology(order: list[tuple[str, str]]) -> Topology:
        configs = [beats.KeyValue(key=key, value=value) for key, value in order]
        topic = beats.TopicInfo(name="counts", topic_configs=configs)
        return made(beats.Topology(subtopologies=[subtopology("0", ["t"], changelogs=[topic])]))

    assert topology(told) == topology(told[::-1])


def test_what_members_have_is_written_by_subtopology() -> None:
    task = [("0", 0), ("0", 1), ("1", 0)]
    standing = StreamsStanding(since={one: at for at, one in enumerate(task, 7)})
    written = standing.to_json()
    assert written["since"] == {"0": [[0, 7], [1, 8]], "1": [[0, 9]]}
    assert StreamsStanding.from_json(written) == standing


# ---- time ------------------------------------------------------------------------------------


def test_the_first_target_waits_for_more_members(world: Streams) -> None:
    world.configure({"streams.initial.rebalance.delay.ms": "3000"})
    one, two = Worker(world, "a"), Worker(world, "b")
    one.beat()
    one.beat()
    world.pass_time(2_000)
    two.beat()
    assert (one.runs, two.runs) == (Tasks(), Tasks())
    assert Status.ASSIGNMENT_DELAYED in statuses(two)
    assert one.answer is not None
    assert one.answer.interval_ms == 100
    world.pass_time(1_000)
    settle([one, two])
    assert sorted((len(one.runs.active), len(two.runs.active))) == [2, 2]


def test_the_next_target_waits_for_the_interval(world: Streams) -> None:
    world.configure(
        {
            "streams.initial.rebalance.delay.ms": "0",
            "streams.assignment.interval.ms": "1000",
            "streams.heartbeat.interval.ms": "1000",
        }
    )
    one, two = Worker(world, "a"), Worker(world, "b")
    one.beat()
    world.pass_time(1_000)
    settle([one])
    two.beat()
    assert statuses(two) == [Status.ASSIGNMENT_DELAYED]
    assert world.streams.state == "Assigning"
    world.pass_time(1_000)
    settle([one, two])
    assert (len(one.runs.active), len(two.runs.active)) == (2, 2)


def test_what_takes_long_is_not_done_all_the_time(
    world: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short the interval is: members have new tags with each heartbeat."""
    done: list[int] = []

    def assign_slowly(*args: Any) -> Any:
        done.append(world.elapsed_ms)
        world.spent_s += 0.2
        return assign(*args)

    monkeypatch.setattr("penstock.broker.groups.streams.group.assign", assign_slowly)
    (one,) = joined(world, "a")
    done.clear()
    for at in range(100):
        world.pass_time(100)
        one.beat(tags=(("at", str(at)),))
    # A pause of ten times as long: 10 s of heartbeats, of which 1 s at most is spent.
    assert len(done) == 5
    assert {after - before for before, after in pairwise(done)} == {2_000}


def test_the_silent_and_the_stubborn_are_removed(world: Streams) -> None:
    one, two = joined(world, "a", "b")
    for _ in range(SESSION_MS // INTERVAL_MS + 1):
        one.beat()
        world.pass_time(INTERVAL_MS)
    settle([one])
    assert one.runs.active == world.all_tasks()
    two.abandon()
    two.beat()
    one.slow = True
    for _ in range(REBALANCE_MS // INTERVAL_MS):
        assert one.beat() is not None
        two.beat()
        world.pass_time(INTERVAL_MS)
    assert list(world.streams.members) == ["b"]
    settle([two])
    assert two.runs.active == world.all_tasks()


def test_a_restart_goes_unnoticed(world: Streams) -> None:
    workers = joined(world, "a", "b")
    before = [(worker.epoch, worker.runs) for worker in workers]
    world.restart()
    settle(workers)
    assert [(worker.epoch, worker.runs) for worker in workers] == before


# ---- who has what ----------------------------------------------------------------------------


def test_a_lost_answer_is_told_again(world: Streams) -> None:
    one, two = joined(world, "a", "b")
    two.leave()
    # The tasks come to the other, but it never hears of them, twice.
    one.beat(lose_answer=True)
    one.beat(lose_answer=True)
    settle([one])
    assert one.runs.active == world.all_tasks()


def test_a_member_may_join_again_with_its_id(world: Streams) -> None:
    stateless = Topology(0, (Subtopology("0", ("lines",)),))
    (one,) = joined(world, "a", topology=stateless)
    epoch = one.epoch
    one.abandon()
    settle([one])
    assert one.runs.active == world.all_tasks()
    # Nothing that it has left behind is taken.
    offset = NewOffset("lines", 0, 5)
    codes = [world.commit(offset, member_id="a", generation=at)[0] for at in (epoch, one.epoch)]
    assert codes == [ErrorCode.STALE_MEMBER_EPOCH, ErrorCode.NONE]


@pytest.mark.parametrize("role", ["active", "standby", "warmup"])
def test_a_process_has_a_task_once(role: str) -> None:
    """Two threads of a process: one must give up its copy before the other gets the task."""
    task, owned = frozenset({("0", 0)}), Tasks(standby=frozenset({("0", 0)}))
    ownership = Ownership()
    profile = StreamsProfile(process_id="P")
    copy = StreamsMember("a", profile)
    copy = replace(copy, standing=copy.standing.at(2, owned))
    ownership.add(copy)
    other = StreamsMember("b", profile)
    other = replace(other, standing=replace(other.standing, target=Tasks(**{role: task})))
    beat = StreamsBeat("b", 0, owned=Tasks())
    assert ownership.lead(other, beat, 3).assigned == Tasks()
    ownership.remove(copy)
    assert ownership.lead(other, beat, 3).assigned == Tasks(**{role: task})
    # Another process has nothing to do with it.
    ownership.add(copy)
    elsewhere = replace(other, profile=StreamsProfile(process_id="Q"))
    assert ownership.lead(elsewhere, beat, 3).assigned == Tasks(**{role: task})


def test_a_standby_takes_over_in_its_own_member() -> None:
    """Its copy becomes the active task in one step, when the member does not run it any more."""
    task = frozenset({("0", 0)})
    one = StreamsMember("a", StreamsProfile(process_id="P"))
    standing = replace(one.standing.at(2, Tasks(standby=task)), target=Tasks(active=task))
    one = replace(one, standing=standing)
    ownership = Ownership()
    ownership.add(one)
    asked = ownership.lead(one, StreamsBeat("a", 2), 3)
    assert (asked.epoch, asked.assigned, asked.revoking) == (2, Tasks(), Tasks(standby=task))
    ownership.remove(one)
    one = replace(one, standing=asked)
    ownership.add(one)
    done = ownership.lead(one, StreamsBeat("a", 2, owned=Tasks()), 3)
    assert (done.epoch, done.assigned, done.since) == (3, Tasks(active=task), {("0", 0): 3})


# ---- the topology ----------------------------------------------------------------------------


def test_members_with_other_topologies(world: Streams) -> None:
    joined(world, "a", topology=word_count(epoch=2))
    older = Worker(world, "b", topology=word_count(epoch=1))
    older.beat()
    assert Status.STALE_TOPOLOGY in statuses(older)
    for other in (word_count(epoch=3), word_count("other", epoch=2)):
        assert refusal(Worker(world, "c", topology=other)) == ErrorCode.INVALID_REQUEST


def test_a_shutdown_is_told_until_the_group_is_empty(world: Streams) -> None:
    one, two = joined(world, "a", "b")
    one.beat(shuts_down=True)
    two.beat()
    assert statuses(one) == statuses(two) == [Status.SHUTDOWN_APPLICATION]
    for worker in (one, two):
        worker.leave()
    settle([one])
    assert statuses(one) == []


def test_endpoints_are_told_when_they_have_changed(world: Streams) -> None:
    (one,) = joined(world, "a")
    answer = one.beat(endpoint=("host", 1))
    assert answer is not None
    told = one.beat(endpoint_epoch=-1)
    assert told is not None
    assert told.served is not None
    (served,) = told.served
    assert served.endpoint == ("host", 1)
    assert served.active == {"lines": [0, 1], "words": [0, 1]}
    quiet = one.beat(endpoint_epoch=told.endpoint_epoch)
    assert quiet is not None
    assert quiet.served is None
    # Who says again and again that it knows nothing costs no more than the answer.
    again = one.beat(endpoint_epoch=-1)
    assert again is not None
    assert again.served is not None
    assert again.served[0] is served
    world.grow("lines", 3)
    world.grow("words", 3)
    world.grow("counts", 3)
    settle([one])
    more = one.beat(endpoint_epoch=-1)
    assert more is not None
    assert more.served is not None
    assert more.served[0].active == {"lines": [0, 1, 2], "words": [0, 1, 2]}


# ---- offsets and the end ---------------------------------------------------------------------


def test_offsets_by_epoch(world: Streams) -> None:
    stateless = Topology(0, (Subtopology("0", ("lines",)),))
    (one,) = joined(world, "a", topology=stateless)
    epoch = one.epoch
    two = Worker(world, "b", topology=stateless)
    settle([one, two])
    ((_, kept),) = one.runs.active
    ((_, moved),) = two.runs.active

    def commit(member: str, generation: int, number: int, **more: Any) -> ErrorCode:
        offset = NewOffset("lines", number, 5)
        return world.commit(offset, member_id=member, generation=generation, **more)[0]

    assert commit("a", one.epoch, kept) == ErrorCode.NONE
    assert commit("a", epoch, kept) == ErrorCode.NONE
    assert commit("a", epoch, moved) == ErrorCode.STALE_MEMBER_EPOCH
    assert commit("a", one.epoch + 1, kept) == ErrorCode.STALE_MEMBER_EPOCH
    assert commit("c", one.epoch, kept) == ErrorCode.UNKNOWN_MEMBER_ID
    assert commit("", -1, kept) == ErrorCode.UNKNOWN_MEMBER_ID
    # A member must say which epoch it is in.
    assert commit("a", -1, kept) == ErrorCode.STALE_MEMBER_EPOCH
    assert commit("a", one.epoch, kept, version=8) == ErrorCode.UNSUPPORTED_VERSION
    codes = world.commit_in_transaction(
        7, NewOffset("lines", kept, 6), NewOffset("lines", moved, 6),
        member_id="a", generation=epoch,
    )  # fmt: skip
    assert codes == [ErrorCode.NONE, ErrorCode.ILLEGAL_GENERATION]
    # Nobody in particular: a transaction need not say who it is.
    assert world.commit_in_transaction(8, NewOffset("lines", 0, 6)) == [ErrorCode.NONE]


def test_a_group_with_members_is_not_taken_over(world: Streams) -> None:
    joined(world, "a")
    with pytest.raises(ApiError, match="streams group"):
        world.groups.get_or_make(GROUP, "classic")


def test_a_group_is_deleted_when_all_have_left(world: Streams) -> None:
    one, two = joined(world, "a", "b")
    assert world.groups.delete(GROUP) == (ErrorCode.NON_EMPTY_GROUP, [])
    one.leave()
    two.leave()
    code, entries = world.groups.delete(GROUP)
    world.write(entries)
    assert code == ErrorCode.NONE
    assert world.groups.get(GROUP) is None
    assert all(key[0] == "group-config" for key in world.journal)


# ---- sizes -----------------------------------------------------------------------------------


def chain(length: int) -> Topology:
    """Subtopologies that each read what the next one writes; the last reads the source."""
    parts = [
        Subtopology(
            f"{n:04}",
            ("lines",) if n == length - 1 else (),
            repartition_sources=() if n == length - 1 else (InternalTopic(f"r{n}"),),
            repartition_sinks=(f"r{n - 1}",) if n else (),
        )
        for n in range(length)
    ]
    return Topology(0, tuple(parts))


def test_sizes_follow_through_a_long_chain(world: Streams) -> None:
    (one,) = joined(world, "a", topology=chain(200))
    assert len(one.runs.active) == 400
    assert world.catalog.topics["r0"].partitions == 2


def test_a_loop_has_no_size(world: Streams) -> None:
    loop = Subtopology("0", (), (InternalTopic("r"),), ("r",))
    one = Worker(world, "a", topology=Topology(0, (loop,)))
    assert refusal(one) == ErrorCode.STREAMS_INVALID_TOPOLOGY
