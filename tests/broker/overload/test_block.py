"""overflow=block: producers wait while a group still needs what is there, and nobody else does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from penstock.broker.catalog import JOURNAL_TOPIC
from penstock.broker.config import Limits
from penstock.broker.server import Broker as Server
from penstock.testing.broker import Broker
from penstock.wire.errors import ErrorCode
from tests.broker.conftest import NEVER_MS
from tests.broker.disks import GatedDisk, HastyDisk
from tests.broker.overload.guarded import (
    BATCH,
    BOUND,
    COMMIT_VERSION,
    FULL_AT,
    GROUP,
    REFUSED,
    SEGMENT,
    VERSION,
    commit,
    commit_request,
    fill,
    guard_of,
    guarded_topic,
    one_batch,
    partition_of,
    span,
    wait_for_holds,
)
from tests.broker.raw import RawClient
from tests.broker.requests import (
    SET,
    alter,
    batch_of_size,
    create,
    delete,
    delete_records,
    new_name,
    one,
    produce,
)
from tests.broker.waits import wait_until

SOON_MS = 50
Connect = Callable[[Broker], RawClient]


@pytest.fixture(scope="module")
def patient() -> Iterator[Broker]:
    """A broker that holds requests for longer than any test lasts."""
    limits = Limits(max_hold_ms=NEVER_MS)
    with Broker(disk=HastyDisk(), housekeeping_interval_ms=NEVER_MS, limits=limits) as broker:
        yield broker


@pytest.fixture(scope="module")
def hasty() -> Iterator[Broker]:
    """A broker that soon gives up."""
    limits = Limits(max_hold_ms=SOON_MS)
    with Broker(disk=HastyDisk(), housekeeping_interval_ms=NEVER_MS, limits=limits) as broker:
        yield broker


def full_topic(client: RawClient, **settings: str) -> str:
    topic = guarded_topic(client, "block", settings)
    fill(client, topic)
    return topic


# ---- held, and let go ------------------------------------------------------------------------


def test_a_request_waits_until_the_group_has_moved_on(patient: Broker, connect: Connect) -> None:
    client, reader = connect(patient), connect(patient)
    topic = full_topic(client)
    client.send(one_batch(topic), VERSION)
    wait_for_holds(patient, topic, 1)
    assert client.is_silent()
    assert span(patient, topic) == (0, FULL_AT)
    # The first segment is read but for its last batch: it must stay.
    commit(reader, topic, SEGMENT // BATCH - 1)
    wait_until(patient, lambda s: not guard_of(s, topic).unsettled)
    assert client.is_silent()
    assert span(patient, topic) == (0, FULL_AT)
    commit(reader, topic, SEGMENT // BATCH)
    result = one(client.receive())
    assert (result.error_code, result.base_offset) == (ErrorCode.NONE, FULL_AT)
    assert span(patient, topic) == (SEGMENT // BATCH, FULL_AT + 1)


def test_the_slowest_group_counts(patient: Broker, connect: Connect) -> None:
    client, reader = connect(patient), connect(patient)
    topic = full_topic(client, overflow_groups="quick,slow")
    client.send(one_batch(topic), VERSION)
    commit(reader, topic, FULL_AT, group="quick")
    wait_for_holds(patient, topic, 1)
    wait_until(patient, lambda s: not guard_of(s, topic).unsettled)
    assert patient.call(lambda s: guard_of(s, topic).slowest) == "slow"
    assert client.is_silent()
    commit(reader, topic, FULL_AT, group="slow")
    assert one(client.receive()).base_offset == FULL_AT


def test_a_share_group_needs_what_its_queue_begins_with(patient: Broker, connect: Connect) -> None:
    client = connect(patient)
    topic = full_topic(client, overflow_groups="queue")

    def begin(server: Server) -> None:
        server.coordination.groups.get_or_make("queue", "share")
        server.coordination.shares.open("queue", server.catalog.topics[topic], 0, 0)

    def accept(server: Server, offset: int) -> None:
        shares = server.coordination.shares
        server.coordination.write(shares.move("queue", server.catalog.topics[topic], 0, offset))

    patient.call(begin)
    client.send(one_batch(topic), VERSION)
    wait_for_holds(patient, topic, 1)
    patient.call(lambda s: accept(s, SEGMENT // BATCH - 1))
    wait_until(patient, lambda s: guard_of(s, topic).needed == SEGMENT // BATCH - 1)
    wait_until(patient, lambda s: not guard_of(s, topic).unsettled)
    assert client.is_silent()
    patient.call(lambda s: accept(s, SEGMENT // BATCH))
    assert one(client.receive()).base_offset == FULL_AT


def test_many_wait_and_all_are_written_in_the_end(patient: Broker, connect: Connect) -> None:
    writers = [connect(patient) for _ in range(12)]
    reader = connect(patient)
    topic = full_topic(writers[0])
    for writer in writers:
        writer.send(one_batch(topic), VERSION)
    wait_for_holds(patient, topic, len(writers))
    done = threading.Event()

    def read_on() -> None:
        # One batch after the other, and never ahead of what there is.
        at = 0
        while not done.is_set():
            at = min(at + 1, span(patient, topic)[1])
            commit(reader, topic, at)

    thread = threading.Thread(target=read_on)
    thread.start()
    offsets = [one(writer.receive()).base_offset for writer in writers]
    done.set()
    thread.join()
    assert sorted(offsets) == list(range(FULL_AT, FULL_AT + len(writers)))


def test_requests_behind_a_held_one_keep_their_order(patient: Broker, connect: Connect) -> None:
    client, reader = connect(patient), connect(patient)
    topic, other = full_topic(client), new_name()
    client.call(create(other))
    client.send_all(
        (one_batch(topic), VERSION), (one_batch(other), VERSION), (one_batch(topic), VERSION)
    )
    wait_for_holds(patient, topic, 1)
    commit(reader, topic, FULL_AT)
    results = [one(client.receive()) for _ in range(3)]
    assert [r.error_code for r in results] == [0, 0, 0]
    assert [r.base_offset for r in results] == [FULL_AT, 0, FULL_AT + 1]


def test_a_raised_bound_lets_them_go(patient: Broker, connect: Connect) -> None:
    client, admin = connect(patient), connect(patient)
    topic = full_topic(client)
    client.send(one_batch(topic), VERSION)
    wait_for_holds(patient, topic, 1)
    admin.call(alter(topic, (SET, "retention.bytes", str(2 * BOUND))))
    assert one(client.receive()).base_offset == FULL_AT


def test_so_does_another_way_to_overflow(patient: Broker, connect: Connect) -> None:
    client, admin = connect(patient), connect(patient)
    topic = full_topic(client)
    client.send(one_batch(topic), VERSION)
    wait_for_holds(patient, topic, 1)
    admin.call(alter(topic, (SET, "overflow", "discard-oldest")))
    assert one(client.receive()).base_offset == FULL_AT
    assert patient.call(lambda s: s.partition(topic, 0) not in s.overload.guards)
    # And the short way of produce requests is open again.
    assert patient.call(lambda s: not partition_of(s, topic).asks)


def test_so_do_deleted_records(patient: Broker, connect: Connect) -> None:
    client, admin = connect(patient), connect(patient)
    topic = full_topic(client)
    client.send(one_batch(topic), VERSION)
    wait_for_holds(patient, topic, 1)
    admin.call(delete_records(topic, SEGMENT // BATCH))
    assert one(client.receive()).base_offset == FULL_AT


def test_when_the_topic_goes_its_producers_are_told(patient: Broker, connect: Connect) -> None:
    client, admin = connect(patient), connect(patient)
    topic = full_topic(client)
    client.send(one_batch(topic), VERSION)
    wait_for_holds(patient, topic, 1)
    assert not admin.call(delete(topic)).responses[0].error_code
    assert one(client.receive()).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_one_segment_for_everything_goes_once_it_is_read(patient: Broker, connect: Connect) -> None:
    client, reader = connect(patient), connect(patient)
    topic = full_topic(client, segment_bytes=str(100 * BOUND))
    client.send(one_batch(topic), VERSION)
    wait_for_holds(patient, topic, 1)
    commit(reader, topic, FULL_AT)
    assert one(client.receive()).base_offset == FULL_AT
    assert span(patient, topic) == (FULL_AT, FULL_AT + 1)


def test_the_bound_is_exceeded_by_one_request_at_most(patient: Broker, connect: Connect) -> None:
    writers = [connect(patient) for _ in range(4)]
    topic = guarded_topic(writers[0], "block")
    for writer in writers:
        # Each fills the topic twice over in one write.
        writer.send_all(*[(one_batch(topic), VERSION)] * (2 * FULL_AT))
    wait_for_holds(patient, topic, len(writers))
    assert patient.call(lambda s: guard_of(s, topic).size_bytes) == BOUND
    large = connect(patient)
    commit(large, topic, SEGMENT // BATCH)
    wait_for_holds(patient, topic, len(writers))
    assert patient.call(lambda s: guard_of(s, topic).size_bytes) <= BOUND + BATCH


# ---- the end of patience ---------------------------------------------------------------------


def test_nobody_waits_for_ever(hasty: Broker, connect: Connect) -> None:
    client = connect(hasty)
    topic = full_topic(client)
    response = client.call(one_batch(topic), VERSION)
    result = one(response)
    assert result.error_code == REFUSED
    assert repr(GROUP) in result.error_message
    assert response.throttle_time_ms == SOON_MS
    assert span(hasty, topic) == (0, FULL_AT)


def test_all_that_has_come_meanwhile_is_answered_with_it(hasty: Broker, connect: Connect) -> None:
    client, reader = connect(hasty), connect(hasty)
    topic = full_topic(client)
    held_before = hasty.call(lambda s: s.overload.requests_held)
    client.send_all(*[(one_batch(topic), VERSION)] * 5)
    assert [one(client.receive()).error_code for _ in range(5)] == [REFUSED] * 5
    assert hasty.call(lambda s: s.overload.requests_held) == held_before + 1
    # What comes later is held anew, and goes through once there is room.
    commit(reader, topic, FULL_AT)
    wait_until(hasty, lambda s: not guard_of(s, topic).unsettled)
    assert not one(client.call(one_batch(topic), VERSION)).error_code


def test_of_several_partitions_the_full_one_is_refused(hasty: Broker, connect: Connect) -> None:
    client = connect(hasty)
    topic = guarded_topic(client, "block", partitions=2)
    fill(client, topic)
    both = produce(topic, {number: batch_of_size(BATCH) for number in (1, 0)})
    parts = client.call(both, VERSION).responses[0].partition_responses
    assert {p.index: p.error_code for p in parts} == {0: REFUSED, 1: ErrorCode.NONE}
    assert (span(hasty, topic), span(hasty, topic, 1)) == ((0, FULL_AT), (0, 1))


def test_before_that_nothing_of_the_request_is_done(patient: Broker, connect: Connect) -> None:
    client, reader = connect(patient), connect(patient)
    topic = guarded_topic(client, "block", partitions=2)
    fill(client, topic)
    client.send(produce(topic, {number: batch_of_size(BATCH) for number in (1, 0)}), VERSION)
    wait_for_holds(patient, topic, 1)
    assert span(patient, topic, 1) == (0, 0)
    commit(reader, topic, FULL_AT)
    parts = client.receive().responses[0].partition_responses
    assert {p.index: p.base_offset for p in parts} == {0: FULL_AT, 1: 0}


def test_without_acks_a_request_waits_for_as_long_as_it_takes(
    hasty: Broker, connect: Connect
) -> None:
    client, reader = connect(hasty), connect(hasty)
    topic = full_topic(client)
    client.send_unanswered(one_batch(topic, acks=0), VERSION)
    wait_for_holds(hasty, topic, 1)

    def timer(server: Server) -> object:
        (hold,) = guard_of(server, topic).waiting
        return hold.timer

    for _ in range(3):
        before = hasty.call(timer)
        wait_until(hasty, lambda s, before=before: timer(s) is not before)  # type: ignore[misc]
    commit(reader, topic, FULL_AT)
    wait_until(hasty, lambda s: partition_of(s, topic).log_end == FULL_AT + 1)


@pytest.mark.parametrize("acks", [-1, 0])
def test_the_log_says_who_is_waited_for(
    hasty: Broker, connect: Connect, caplog: pytest.LogCaptureFixture, acks: int
) -> None:
    client, reader = connect(hasty), connect(hasty)
    topic = full_topic(client)
    request = one_batch(topic, acks=acks)
    (client.send if acks else client.send_unanswered)(request, VERSION)
    told = f"{topic}-0 is full: group {GROUP!r} needs it from offset 0 on"
    wait_until(hasty, lambda _: told in caplog.text)
    assert caplog.text.count("producers wait") == 1
    commit(reader, topic, FULL_AT)
    wait_until(hasty, lambda _: f"{topic}-0 has room again" in caplog.text)


# ---- nobody else notices ---------------------------------------------------------------------


def test_other_topics_and_connections_go_on(patient: Broker, connect: Connect) -> None:
    held, free = connect(patient), connect(patient)
    topic = guarded_topic(held, "block", partitions=2)
    fill(held, topic)
    other = new_name()
    free.call(create(other))
    held.send(one_batch(topic), VERSION)
    wait_for_holds(patient, topic, 1)
    for _ in range(2 * FULL_AT):
        assert not one(free.call(one_batch(other), VERSION)).error_code
    assert not one(free.call(one_batch(topic, number=1), VERSION)).error_code
    # Ordinary topics take the short way, as ever.
    assert patient.call(lambda s: not partition_of(s, other).asks)
    assert held.is_silent()


def test_a_held_client_that_leaves_is_noticed(hasty: Broker, connect: Connect) -> None:
    admin = connect(hasty)
    topic = full_topic(admin)
    client = connect(hasty)
    client.send_unanswered(one_batch(topic, acks=0), VERSION)
    wait_for_holds(hasty, topic, 1)
    before = hasty.call(lambda s: len(s.connections))
    client.close()
    wait_until(hasty, lambda s: len(s.connections) == before - 1)
    assert hasty.call(lambda s: not guard_of(s, topic).waiting)


def test_what_it_sent_last_is_not_written(patient: Broker, connect: Connect) -> None:
    reader = connect(patient)
    topic = full_topic(reader)
    client = connect(patient)
    client.send(one_batch(topic), VERSION)
    wait_for_holds(patient, topic, 1)
    client.close()
    commit(reader, topic, FULL_AT)
    wait_for_holds(patient, topic, 0)
    wait_until(patient, lambda s: not guard_of(s, topic).unsettled)
    assert span(patient, topic)[1] == FULL_AT


@pytest.mark.parametrize("acks", [0, -1])
def test_a_stop_does_not_wait(acks: int) -> None:
    limits = Limits(max_hold_ms=NEVER_MS)
    with Broker(disk=HastyDisk(), housekeeping_interval_ms=NEVER_MS, limits=limits) as broker:
        with RawClient(broker.bootstrap) as client:
            topic = full_topic(client)
            client.send(one_batch(topic, acks=acks), VERSION)
            wait_for_holds(broker, topic, 1)
            broker.stop()
            assert client.wait_closed() == b""
        broker.start()
        # The bound holds after a start as before.
        assert span(broker, topic) == (0, FULL_AT)
        with RawClient(broker.bootstrap) as client:
            client.send(one_batch(topic), VERSION)
            wait_for_holds(broker, topic, 1)
            with RawClient(broker.bootstrap) as reader:
                commit(reader, topic, FULL_AT)
            assert one(client.receive()).base_offset == FULL_AT


def test_nothing_goes_before_the_commit_that_frees_it_is_safe() -> None:
    limits = Limits(max_hold_ms=NEVER_MS)
    disk = GatedDisk()
    with (
        Broker(
            disk=disk, durability="disk", housekeeping_interval_ms=NEVER_MS, limits=limits
        ) as broker,
        RawClient(broker.bootstrap) as client,
        RawClient(broker.bootstrap) as reader,
    ):
        topic = full_topic(client)
        client.send(one_batch(topic), VERSION)
        wait_for_holds(broker, topic, 1)
        with disk.closed(JOURNAL_TOPIC):
            reader.send(commit_request(topic, FULL_AT), COMMIT_VERSION)
            disk.wait_for_sync()
            wait_until(broker, lambda s: guard_of(s, topic).needed == FULL_AT)
            assert broker.call(lambda s: partition_of(s, topic).keep_from) == 0
            assert span(broker, topic) == (0, FULL_AT)
            assert client.is_silent()
        assert one(client.receive()).base_offset == FULL_AT
        assert not reader.receive().topics[0].partitions[0].error_code


def test_a_group_that_was_there_before_a_restart_is_remembered() -> None:
    limits = Limits(max_hold_ms=NEVER_MS)
    with Broker(disk=HastyDisk(), housekeeping_interval_ms=NEVER_MS, limits=limits) as broker:
        with RawClient(broker.bootstrap) as client:
            topic = full_topic(client)
            commit(client, topic, FULL_AT - 1)
        broker.restart()
        with RawClient(broker.bootstrap) as client:
            # Four of five segments may go, and do when the room is needed.
            fill(client, topic, count=FULL_AT - SEGMENT // BATCH)
            client.send(one_batch(topic), VERSION)
            wait_for_holds(broker, topic, 1)
            wait_until(broker, lambda s: not guard_of(s, topic).unsettled)
            assert client.is_silent()
            assert span(broker, topic)[0] == FULL_AT - SEGMENT // BATCH
