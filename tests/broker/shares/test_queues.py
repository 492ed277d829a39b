"""Queues over the wire: delivery, answers, locks, sessions and their errors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any
from uuid import uuid4

import pytest

from penstock.testing.broker import Broker
from penstock.testing.clock import ManualClock
from tests.broker.disks import HastyDisk
from tests.broker.raw import RawClient
from tests.broker.requests import batch, delete, delete_records, one, produce
from tests.broker.shares.members import (
    ACCEPT,
    REJECT,
    RELEASE,
    RENEW,
    Taker,
    fill,
    new_queue,
    numbered,
    set_group,
)
from tests.broker.waits import wait_until

LOCK_MS = 30_000
NEVER_MS = 3_600_000


@pytest.fixture(scope="module")
def shared() -> Iterator[Broker]:
    """One broker whose time stands still."""
    clock = ManualClock()
    disk = HastyDisk()
    with Broker(disk=disk, clock=clock, housekeeping_interval_ms=NEVER_MS) as broker:
        yield broker


def pass_time(broker: Broker, step_ms: int) -> None:
    def move(server: object) -> None:
        clock = broker.server.clock
        assert isinstance(clock, ManualClock)
        clock.advance(step_ms)
        broker.server.coordination.tick()

    broker.call(move)


def start_of(broker: Broker, group: str, partition: int = 0) -> int:
    """How far a group is done with everything."""

    def look(server: object) -> int:
        queues = broker.server.coordination.shares.queues_of(group)
        return next(queue.share.start for queue in queues if queue.number == partition)

    return broker.call(look)


def now(broker: Broker) -> int:
    return broker.server.clock.now_ms()


def test_records_are_delivered_once_and_acknowledged(shared: Broker) -> None:
    topic, group = new_queue(shared)
    fill(shared, topic, *numbered(5), at_ms=now(shared))
    with Taker(shared, group, topic) as one, Taker(shared, group, topic) as other:
        got = one.fetch()
        assert (got.acquired, got.values) == ([(0, 4, 1)], numbered(5))
        assert other.fetch().acquired == []
        assert one.acknowledge((0, 4, ACCEPT)) == "NONE"
        assert start_of(shared, group) == 5
        assert one.fetch().acquired == []


def test_answers_come_with_the_next_fetch(shared: Broker) -> None:
    topic, group = new_queue(shared)
    for at in range(3):
        fill(shared, topic, b"%d" % at, at_ms=now(shared))
    with Taker(shared, group, topic) as one:
        assert one.fetch(max_records=2).offsets == [0, 1]
        got = one.fetch([(0, 1, ACCEPT)], max_records=2)
        assert (got.acknowledge_error, got.offsets) == ("NONE", [2])
        assert start_of(shared, group) == 2


def test_more_consumers_than_partitions_share_the_work(shared: Broker) -> None:
    topic, group = new_queue(shared)
    for at in range(4):
        fill(shared, topic, b"%d" % at, at_ms=now(shared))
    takers = [Taker(shared, group, topic) for _ in range(4)]
    assert sorted(taker.fetch(max_records=1).offsets[0] for taker in takers) == [0, 1, 2, 3]
    for taker in takers:
        taker.client.close()


def test_a_batch_goes_out_whole_unless_the_limit_is_strict(shared: Broker) -> None:
    topic, group = new_queue(shared)
    fill(shared, topic, *numbered(10), at_ms=now(shared))
    fill(shared, topic, *numbered(10), at_ms=now(shared))
    with Taker(shared, group, topic) as strict, Taker(shared, group, topic) as other:
        assert strict.fetch(max_records=4, strict=True).acquired == [(0, 3, 1)]
        # The whole rest of the first batch, and no more.
        got = other.fetch(max_records=4)
        assert got.acquired == [(4, 9, 1)]
        assert len(got.records) == 6


def test_a_waiting_fetch_is_woken_by_new_records(shared: Broker) -> None:
    topic, group = new_queue(shared)
    with Taker(shared, group, topic) as one:
        one.fetch()
        one.send(wait_ms=60_000)
        wait_until(
            shared,
            lambda server: any(
                queue.waiting for queue in server.coordination.shares.queues_of(group)
            ),
        )
        fill(shared, topic, b"x", at_ms=now(shared))
        assert one.receive().values == [b"x"]


@pytest.mark.parametrize("how", ["release", "lock", "goodbye", "lost"])
def test_a_waiting_fetch_is_woken_by_what_becomes_free(shared: Broker, how: str) -> None:
    topic, group = new_queue(shared)
    fill(shared, topic, *numbered(3), at_ms=now(shared))
    with Taker(shared, group, topic) as one, Taker(shared, group, topic) as other:
        one.fetch()
        other.fetch()
        other.send(wait_ms=60_000)
        wait_until(
            shared,
            lambda server: any(
                queue.waiting for queue in server.coordination.shares.queues_of(group)
            ),
        )
        if how == "release":
            one.acknowledge((0, 2, RELEASE))
        elif how == "lock":
            pass_time(shared, LOCK_MS)
        elif how == "goodbye":
            assert one.fetch(epoch=-1).error == "NONE"
        else:
            one.client.close()
        assert other.receive().acquired == [(0, 2, 2)]


def test_locks_end_after_their_time_and_can_be_renewed(shared: Broker) -> None:
    topic, group = new_queue(shared, share_record_lock_duration_ms="10000")
    fill(shared, topic, *numbered(4), at_ms=now(shared))
    with Taker(shared, group, topic) as one, Taker(shared, group, topic) as other:
        one.fetch()
        pass_time(shared, 6_000)
        assert one.acknowledge((1, 2, RENEW), renew=True) == "NONE"
        pass_time(shared, 6_000)
        assert other.fetch().offsets == [0, 3]
        assert one.acknowledge((0, 0, ACCEPT)) == "INVALID_RECORD_STATE"
        assert one.acknowledge((1, 2, ACCEPT)) == "NONE"


def test_locks_can_be_renewed_by_a_fetch(shared: Broker) -> None:
    topic, group = new_queue(shared, share_record_lock_duration_ms="10000")
    fill(shared, topic, *numbered(4), at_ms=now(shared))
    with Taker(shared, group, topic) as one, Taker(shared, group, topic) as other:
        one.fetch()
        pass_time(shared, 6_000)
        assert one.fetch([(0, 3, RENEW)], renew=True).acknowledge_error == "NONE"
        pass_time(shared, 6_000)
        assert other.fetch().offsets == []


def test_a_slow_record_does_not_hold_up_those_behind_it(shared: Broker) -> None:
    topic, group = new_queue(shared, share_partition_max_record_locks="10")
    for at in range(100):
        fill(shared, topic, b"%d" % at, at_ms=now(shared))
    with Taker(shared, group, topic) as slow, Taker(shared, group, topic) as quick:
        assert slow.fetch(max_records=1).offsets == [0]
        seen: list[int] = []
        got = quick.fetch(max_records=5)
        while got.offsets:
            seen += got.offsets
            got = quick.fetch([(got.offsets[0], got.offsets[-1], ACCEPT)], max_records=5)
        assert seen == list(range(1, 100))
        assert start_of(shared, group) == 0


def test_each_record_is_answered_for_by_itself(shared: Broker) -> None:
    topic, group = new_queue(shared)
    fill(shared, topic, *numbered(6), at_ms=now(shared))
    with Taker(shared, group, topic) as one:
        one.fetch()
        kinds = [ACCEPT, RELEASE, REJECT, ACCEPT, RELEASE, ACCEPT]
        assert one.acknowledge((0, 5, kinds)) == "NONE"
        got = one.fetch()
        assert got.acquired == [(1, 1, 2), (4, 4, 2)]
        assert got.values == [b"1", b"4"]


def test_a_record_is_given_up_at_the_limit(shared: Broker) -> None:
    topic, group = new_queue(shared, share_delivery_count_limit="3")
    fill(shared, topic, b"bad", at_ms=now(shared))
    with Taker(shared, group, topic) as one:
        for times in (1, 2, 3):
            assert one.fetch().acquired == [(0, 0, times)]
            one.acknowledge((0, 0, RELEASE))
        assert one.fetch().acquired == []
        assert start_of(shared, group) == 1


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([(5, 5, ACCEPT)], "INVALID_REQUEST"),
        ([(0, 5, ACCEPT)], "INVALID_REQUEST"),
        ([(3, 2, ACCEPT)], "INVALID_REQUEST"),
        ([(2, 3, ACCEPT), (3, 4, ACCEPT)], "INVALID_RECORD_STATE"),
        ([(2, 3, ACCEPT), (0, 1, ACCEPT)], "INVALID_REQUEST"),
        ([(0, 2, [ACCEPT, ACCEPT])], "INVALID_REQUEST"),
        ([(0, 0, [])], "INVALID_REQUEST"),
        ([(0, 0, 9)], "INVALID_REQUEST"),
        ([(0, 0, -1)], "INVALID_REQUEST"),
        ([(0, 0, RENEW)], "INVALID_REQUEST"),
    ],
)
def test_wrong_answers_get_kafkas_errors(
    shared: Broker, answers: list[tuple[int, int, int]], error: str
) -> None:
    topic, group = new_queue(shared)
    fill(shared, topic, *numbered(5), at_ms=now(shared))
    with Taker(shared, group, topic) as one:
        one.fetch()
        assert one.acknowledge(*answers) == error
        assert one.fetch(answers).acknowledge_error == error
        # Nothing of it has happened.
        assert one.acknowledge((1, 4, ACCEPT)) == "NONE"
        assert one.acknowledge((1, 4, ACCEPT)) == "INVALID_RECORD_STATE"


def test_nobody_answers_for_another(shared: Broker) -> None:
    topic, group = new_queue(shared)
    fill(shared, topic, *numbered(5), at_ms=now(shared))
    with Taker(shared, group, topic) as one, Taker(shared, group, topic) as other:
        one.fetch()
        other.fetch()
        assert other.acknowledge((0, 4, ACCEPT)) == "INVALID_RECORD_STATE"


def test_unknown_places_get_kafkas_errors(shared: Broker) -> None:
    topic, group = new_queue(shared)
    with Taker(shared, group, topic) as one:
        one.fetch()
        assert one.acknowledge((0, 0, ACCEPT), topic_id=uuid4()) == "UNKNOWN_TOPIC_ID"
        assert one.acknowledge((0, 0, ACCEPT), partition=7) == "UNKNOWN_TOPIC_OR_PARTITION"
        assert one.fetch_all(partitions=[7])[7].error == "UNKNOWN_TOPIC_OR_PARTITION"
        one.client.call(delete(topic))
        one.send(wait_ms=60_000, forget=[7])
        assert one.receive().error == "UNKNOWN_TOPIC_ID"


def test_a_topic_that_is_deleted_wakes_who_waits(shared: Broker) -> None:
    topic, group = new_queue(shared)
    with Taker(shared, group, topic) as one, RawClient(shared.bootstrap) as client:
        one.fetch()
        one.send(wait_ms=60_000)
        wait_until(
            shared,
            lambda server: any(
                queue.waiting for queue in server.coordination.shares.queues_of(group)
            ),
        )
        client.call(delete(topic))
        assert one.receive().error == "UNKNOWN_TOPIC_ID"


# ---- sessions ----------------------------------------------------------------------------------


def test_a_session_has_its_order(shared: Broker) -> None:
    topic, group = new_queue(shared)
    fill(shared, topic, *numbered(3), at_ms=now(shared))
    with Taker(shared, group, topic) as one:
        assert one.fetch(epoch=1).error == "SHARE_SESSION_NOT_FOUND"
        assert one.acknowledge((0, 0, ACCEPT), epoch=1) == "SHARE_SESSION_NOT_FOUND"
        assert one.fetch(epoch=-1).error == "SHARE_SESSION_NOT_FOUND"
        assert one.fetch().offsets == [0, 1, 2]
        assert one.fetch(epoch=5).error == "INVALID_SHARE_SESSION_EPOCH"
        assert one.acknowledge((0, 0, ACCEPT), epoch=0) == "INVALID_SHARE_SESSION_EPOCH"
        assert one.fetch([(0, 0, ACCEPT)], epoch=0).error == "INVALID_REQUEST"
        assert one.fetch().error == "NONE"
        assert one.acknowledge((0, 0, ACCEPT), epoch=-1) == "NONE"
        assert one.fetch().error == "SHARE_SESSION_NOT_FOUND"
    assert start_of(shared, group) == 1


def test_names_must_be_given(shared: Broker) -> None:
    topic, group = new_queue(shared)
    with Taker(shared, group, topic) as one:
        one.member = ""
        assert one.fetch().error == "INVALID_REQUEST"


def test_who_renews_fetches_nothing(shared: Broker) -> None:
    topic, group = new_queue(shared)
    with Taker(shared, group, topic) as one:
        one.fetch()
        request = one.request(renew=True)
        request.max_records = 5
        one.client.send(request, 2)
        assert one.receive().error == "INVALID_REQUEST"


def test_partitions_take_turns(shared: Broker) -> None:
    topic, group = new_queue(shared, partitions=3)
    for number in range(3):
        for at in range(3):
            fill(shared, topic, b"%d" % at, partition=number, at_ms=now(shared))
    with Taker(shared, group, topic) as one:
        seen = []
        for _ in range(9):
            options: dict[str, Any] = {} if one.epoch else {"partitions": [0, 1, 2]}
            for number, got in one.fetch_all(max_records=1, **options).items():
                if got.offsets:
                    seen.append(number)
        assert seen == [0, 1, 2] * 3
        one.fetch_all(forget=[0, 1])
        fill(shared, topic, b"x", partition=0, at_ms=now(shared))
        assert not any(got.offsets for got in one.fetch_all().values())


def test_sessions_are_bounded(shared: Broker) -> None:
    topic, group = new_queue(shared)
    broker_sessions = shared.server.queues.sessions
    limit = shared.call(lambda server: broker_sessions._limit)
    shared.call(lambda server: setattr(broker_sessions, "_limit", len(broker_sessions)))
    try:
        with Taker(shared, group, topic) as one:
            assert one.fetch().error == "SHARE_SESSION_LIMIT_REACHED"
    finally:
        shared.call(lambda server: setattr(broker_sessions, "_limit", limit))


# ---- where a group begins ----------------------------------------------------------------------


def test_a_group_begins_where_it_is_told_to(shared: Broker) -> None:
    topic, group = new_queue(shared)
    for hours in (5, 3, 1):
        fill(shared, topic, b"%d" % hours, at_ms=now(shared) - hours * 3_600_000)
    for reset, first in [
        ("earliest", 0),
        ("by_duration:PT4H", 1),
        ("by_duration:PT1M", None),
        ("latest", None),
    ]:
        name = f"{group}-{reset.replace(':', '-')}"
        set_group(shared, name, share_auto_offset_reset=reset)
        with Taker(shared, name, topic) as one:
            assert one.fetch().offsets[:1] == ([] if first is None else [first])


def test_what_the_log_has_dropped_is_not_waited_for(shared: Broker) -> None:
    topic, group = new_queue(shared)
    for at in range(10):
        fill(shared, topic, b"%d" % at, at_ms=now(shared))
    with Taker(shared, group, topic) as one:
        assert one.fetch(max_records=3).offsets == [0, 1, 2]
        one.client.call(delete_records(topic, 5))
        assert one.fetch(max_records=3).offsets == [5, 6, 7]
        assert one.acknowledge((0, 2, ACCEPT)) == "NONE"
        assert start_of(shared, group) == 5


def test_compressed_batches_come_as_they_are(shared: Broker) -> None:
    topic, group = new_queue(shared)
    data = batch(*numbered(50), codec=1, at_ms=now(shared))
    fill(shared, topic, *numbered(50), codec=1, at_ms=now(shared))
    with Taker(shared, group, topic) as one:
        assert len(one.fetch().data) == len(data)


# ---- several that wait -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ([201, 199], [201, 199]),
        ([201, 199, 200], [201, 199, 200]),
        ([600], [600, 0, 0]),
        ([1] * 10, [4, 3, 3]),
        ([100] * 5, [200, 300]),
        ([10, 1, 1, 1], [10, 3]),
    ],
)
def test_what_comes_at_once_is_shared(shared: Broker, sizes: list[int], shares: list[int]) -> None:
    topic, group = new_queue(shared)
    takers = [Taker(shared, group, topic) for _ in shares]
    for waiting, taker in enumerate(takers):
        taker.send(wait_ms=30_000)
        wait_until(shared, lambda server, n=waiting + 1: waiting_for(server, group) == n)  # type: ignore[misc]
    with RawClient(shared.bootstrap) as client:
        client.send_all(*((produce(topic, batch(*numbered(size), at_ms=0)), 12) for size in sizes))
        for _ in sizes:
            assert not one(client.receive()).error_code
    served = [taker for taker, share in zip(takers, shares, strict=True) if share]
    got = [taker.receive().offsets for taker in served]
    assert [len(offsets) for offsets in got] == [share for share in shares if share]
    assert sorted(chain.from_iterable(got)) == list(range(sum(sizes)))
    for taker in takers:
        taker.client.close()


def waiting_for(server: Any, group: str) -> int:
    return sum(len(queue.waiting) for queue in server.coordination.shares.queues_of(group))
