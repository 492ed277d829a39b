"""overflow=reject and the bound by time; what counts as needed, and what is never refused."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from penstock.broker.server import Broker as Server
from penstock.testing.broker import Broker
from penstock.testing.clock import ManualClock
from penstock.wire.errors import ErrorCode
from tests.broker.conftest import NEVER_MS
from tests.broker.disks import HastyDisk
from tests.broker.overload.guarded import (
    BATCH,
    BOUND,
    FULL_AT,
    GROUP,
    REFUSED,
    SEGMENT,
    VERSION,
    commit,
    fill,
    guard_of,
    guarded_topic,
    one_batch,
    span,
)
from tests.broker.raw import ConnectionEndedError, RawClient
from tests.broker.requests import batch, batch_of_size, one, produce
from tests.broker.waits import wait_until

Connect = Callable[[Broker], RawClient]
HOUR_MS = 3_600_000


def settled(broker: Broker, topic: str) -> None:
    wait_until(broker, lambda server: not guard_of(server, topic).unsettled)


def refused(client: RawClient, topic: str) -> str:
    """Why a batch is not taken; empty if it is."""
    result = one(client.call(one_batch(topic), VERSION))
    assert result.error_code in (ErrorCode.NONE, REFUSED)
    return result.error_message or ""


def test_a_full_topic_takes_nothing(shared: Broker, connect: Connect) -> None:
    client = connect(shared)
    topic = guarded_topic(client, "reject")
    fill(client, topic)
    response = client.call(one_batch(topic), VERSION)
    result = one(response)
    assert (result.error_code, result.base_offset) == (REFUSED, -1)
    for part in (repr(GROUP), "offset 0 ", f"retention.bytes={BOUND}"):
        assert part in result.error_message
    assert response.throttle_time_ms == 0
    assert span(shared, topic) == (0, FULL_AT)
    commit(client, topic, SEGMENT // BATCH)
    settled(shared, topic)
    assert not refused(client, topic)
    assert span(shared, topic) == (SEGMENT // BATCH, FULL_AT + 1)


def test_the_log_says_once_that_a_topic_is_full_and_that_it_has_room_again(
    shared: Broker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(shared)
    topic = guarded_topic(client, "reject")
    fill(client, topic)

    def told() -> list[str]:
        # Whoever ran before in this process may have left the log at another level.
        warned = [r for r in caplog.records if r.levelno >= logging.WARNING]
        return [text for r in warned if topic in (text := r.getMessage())]

    assert told() == []
    assert refused(client, topic)
    assert refused(client, topic)
    (full,) = told()
    assert f"group {GROUP!r} needs it from offset 0 on" in full
    assert full.endswith("producers are refused")
    commit(client, topic, FULL_AT)
    wait_until(shared, lambda _: len(told()) == 2)
    assert told()[1].endswith("has room again")
    # Full once more within the minute: that is no news.
    fill(client, topic, count=SEGMENT // BATCH)
    assert len(told()) == 2


def test_a_reader_that_keeps_up_never_has_its_producer_refused(
    shared: Broker, connect: Connect
) -> None:
    client, reader = connect(shared), connect(shared)
    topic = guarded_topic(client, "reject")
    # Also not in the moment in which room is being made.
    for at in range(20 * FULL_AT):
        assert not refused(client, topic)
        commit(reader, topic, at + 1)
    assert shared.call(lambda s: guard_of(s, topic).size_bytes) <= BOUND + BATCH


def test_without_acks_a_refused_producer_is_cut_off(shared: Broker, connect: Connect) -> None:
    client, unheard = connect(shared), connect(shared)
    topic = guarded_topic(client, "reject")
    fill(client, topic)
    unheard.send_unanswered(one_batch(topic, acks=0), VERSION)
    with pytest.raises(ConnectionEndedError):
        unheard.receive_bytes(1)


def test_other_partitions_are_written(shared: Broker, connect: Connect) -> None:
    client = connect(shared)
    topic = guarded_topic(client, "reject", partitions=2)
    fill(client, topic)
    both = produce(topic, {number: batch_of_size(BATCH) for number in (0, 1)})
    parts = client.call(both, VERSION).responses[0].partition_responses
    assert {p.index: p.error_code for p in parts} == {0: REFUSED, 1: ErrorCode.NONE}


def test_by_topic_id_it_is_the_same(shared: Broker, connect: Connect) -> None:
    client = connect(shared)
    topic = guarded_topic(client, "reject")
    fill(client, topic)
    id_ = shared.call(lambda s: s.catalog.topics[topic].id)
    assert one(client.call(produce(id_, batch_of_size(BATCH)), 13)).error_code == REFUSED


def test_a_duplicate_is_not_stored_twice_after_a_refusal(shared: Broker, connect: Connect) -> None:
    client = connect(shared)
    topic = guarded_topic(client, "reject")
    fill(client, topic)
    again = produce(topic, batch(b"x", producer=(1, 0, 0)))
    assert one(client.call(again, VERSION)).error_code == REFUSED
    commit(client, topic, FULL_AT)
    settled(shared, topic)
    assert one(client.call(again, VERSION)).base_offset == FULL_AT
    assert one(client.call(again, VERSION)).base_offset == FULL_AT


# ---- by time ---------------------------------------------------------------------------------


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def timed(clock: ManualClock) -> object:
    with Broker(disk=HastyDisk(), clock=clock, housekeeping_interval_ms=NEVER_MS) as broker:
        yield broker


def at(topic: str, clock: ManualClock) -> object:
    return produce(topic, batch(b"x", at_ms=clock.now_ms()))


def test_the_oldest_needed_record_may_be_so_old_and_no_older(
    timed: Broker, clock: ManualClock, connect: Connect
) -> None:
    client = connect(timed)
    topic = guarded_topic(client, "reject", retention_ms=str(HOUR_MS))

    def code() -> int:
        return int(one(client.call(at(topic, clock), VERSION)).error_code)  # type: ignore[arg-type]

    assert code() == ErrorCode.NONE
    clock.advance(HOUR_MS // 2)
    assert code() == ErrorCode.NONE
    clock.advance(HOUR_MS // 2)
    assert code() == ErrorCode.NONE
    clock.advance(1)
    assert code() == REFUSED
    commit(client, topic, 1)
    settled(timed, topic)
    # The next one is half an hour younger.
    assert code() == ErrorCode.NONE
    clock.advance(HOUR_MS // 2)
    assert code() == REFUSED
    # Who has read everything needs nothing, however old it is.
    commit(client, topic, 4)
    settled(timed, topic)
    clock.advance(10 * HOUR_MS)
    assert code() == ErrorCode.NONE
    assert code() == ErrorCode.NONE


# ---- what counts as needed -------------------------------------------------------------------


def test_a_group_that_goes_back_needs_it_again(shared: Broker, connect: Connect) -> None:
    client = connect(shared)
    topic = guarded_topic(client, "reject")
    fill(client, topic)
    commit(client, topic, FULL_AT)
    settled(shared, topic)
    start = span(shared, topic)[0]
    commit(client, topic, start)
    settled(shared, topic)
    fill(client, topic, count=start)
    assert repr(GROUP) in refused(client, topic)
    assert span(shared, topic)[0] == start


def test_housekeeping_removes_nothing_that_is_needed(shared: Broker, connect: Connect) -> None:
    client = connect(shared)
    topic = guarded_topic(client, "reject", retention_ms="1")
    result = one(client.call(produce(topic, batch_of_size(SEGMENT)), VERSION))
    assert not result.error_code
    partition = shared.call(lambda s: s.partition(topic, 0))
    assert partition is not None

    def upkeep(server: Server) -> None:
        assert server.housekeeping is not None
        server.spawn(server.housekeeping.upkeep())

    rounds = shared.call(lambda s: s.housekeeping.counters.rounds)  # type: ignore[union-attr]
    shared.call(upkeep)
    wait_until(shared, lambda s: s.housekeeping.counters.rounds > rounds)  # type: ignore[union-attr]
    assert span(shared, topic) == (0, 1)
