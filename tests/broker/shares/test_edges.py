"""Queues where two things meet: a consumer goes while it waits, the log's start moves, limits fall.

Each of these once left records in nobody's hands.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from crc32c import crc32c

from penstock.broker.shares.coordinator import ShareCoordinator
from penstock.broker.shares.partition import ACQUIRED, Acquisition
from penstock.records import compression
from penstock.records.batch import CRC_START, HEADER_SIZE
from penstock.testing.broker import Broker
from penstock.testing.faults import SimulatedDisk
from penstock.wire.errors import ErrorCode
from tests.broker.disks import HastyDisk
from tests.broker.requests import batch, delete_records, new_name
from tests.broker.shares.members import (
    ACCEPT,
    REJECT,
    RELEASE,
    Taker,
    fill,
    new_queue,
    numbered,
    send_batch,
    set_group,
)
from tests.broker.shares.test_dead_letters import letters, settled, told
from tests.broker.shares.test_ordering import keyed
from tests.broker.waits import wait_until

NEVER_MS = 3_600_000


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(disk=HastyDisk(), durability="disk", housekeeping_interval_ms=NEVER_MS) as own:
        yield own


@pytest.mark.parametrize("waiting", [1, 20])
def test_who_is_gone_gets_nothing_of_what_it_had(broker: Broker, waiting: int) -> None:
    topic, group = new_queue(broker)
    fill(broker, topic, *numbered(3))
    with Taker(broker, group, topic) as one:
        assert one.fetch().offsets == [0, 1, 2]
        for _ in range(waiting):
            one.send(wait_ms=60_000)
        wait_until(
            broker,
            lambda server: any(
                len(queue.waiting) == waiting
                for queue in server.coordination.shares.queues_of(group)
            ),
        )
    wait_until(broker, lambda server: not len(server.queues.sessions))
    queue = broker.server.coordination.shares.queues_of(group)[0]
    assert broker.call(lambda server: (queue.share.sizes[ACQUIRED], len(queue.waiting))) == (0, 0)
    with Taker(broker, group, topic) as other:
        assert other.fetch().acquired == [(0, 2, 2)]


def test_a_limit_that_is_lowered_gives_up_what_is_beyond_it(broker: Broker) -> None:
    dlq = new_name("dlq.")
    topic, group = new_queue(broker, errors_deadletterqueue_topic_name=dlq)
    fill(broker, topic, b"x")
    with Taker(broker, group, topic) as one:
        for _ in range(3):
            one.fetch()
            assert one.acknowledge((0, 0, RELEASE)) == "NONE"
        set_group(broker, group, share_delivery_count_limit="2")
        assert one.fetch().acquired == []
    assert [letter.value for letter in letters(broker, dlq, 1)] == [b"x"]
    settled(broker, group, 1)


def test_an_ordered_group_goes_on_where_the_log_begins_now(broker: Broker) -> None:
    topic, group = new_queue(broker, share_ordered_by_key="true")
    send_batch(broker, topic, keyed("a", "b", "c", "d"))
    with Taker(broker, group, topic) as one:
        assert one.fetch().offsets == [0, 1, 2, 3]
        assert one.acknowledge((3, 3, ACCEPT)) == "NONE"
    broker.stop()
    broker.start()
    with Taker(broker, group, topic) as one:
        one.client.call(delete_records(topic, 2))
        got = one.fetch()
        assert (got.error, got.offsets) == ("NONE", [2])


def test_a_queue_that_is_gone_has_no_deadline() -> None:
    shares = ShareCoordinator()
    key = ("group", "00000000-0000-0000-0000-000000000001", 0)
    shares.replay(("share", *key), {"topic": "t", "start": 0, "runs": []})
    queue = shares.queue(*key)
    assert queue is not None
    shares.replay(("share", *key), None)
    shares.locked(queue, 5)
    assert shares.next_due_ms is None
    assert not list(shares.tick(10, 10))


def unreadable(count: int) -> bytes:
    """A batch as a broker takes it, whose records nobody can unpack."""
    data = bytearray(keyed(*"abcdefgh"[:count], codec=compression.GZIP))
    data[HEADER_SIZE:] = b"?" * (len(data) - HEADER_SIZE)
    data[CRC_START - 4 : CRC_START] = crc32c(data[CRC_START:]).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize("ordered", ["false", "true"])
def test_a_batch_that_cannot_be_unpacked_holds_nobody_up(broker: Broker, ordered: str) -> None:
    dlq = new_name("dlq.")
    topic, group = new_queue(
        broker, share_ordered_by_key=ordered, errors_deadletterqueue_topic_name=dlq
    )
    send_batch(broker, topic, unreadable(2))
    send_batch(broker, topic, keyed("a", first=2))
    with Taker(broker, group, topic) as one:
        response = one.client.call(one.request(), 2)
        part = response.responses[0].partitions[0]
        assert not part.error_code, part.error_message
        assert [(a.first_offset, a.last_offset) for a in part.acquired_records] == [(0, 2)]
        one.epoch = 1
        assert one.acknowledge((0, 2, REJECT)) == "NONE"
    found = letters(broker, dlq, 3)
    assert [letter.value for letter in found] == [None, None, b"2"]
    assert [told(letter)["offset"] for letter in found] == ["0", "1", "2"]
    settled(broker, group, 3)


def test_an_answer_wakes_who_waited_for_room(broker: Broker) -> None:
    topic, group = new_queue(broker, share_partition_max_record_locks="100")
    for first in range(0, 150, 50):
        fill(broker, topic, *numbered(50, first))
    with Taker(broker, group, topic) as one, Taker(broker, group, topic) as other:
        assert one.fetch().acquired == [(0, 99, 1)]
        other.send(wait_ms=60_000)
        wait_until(
            broker,
            lambda server: any(
                queue.waiting for queue in server.coordination.shares.queues_of(group)
            ),
        )
        assert one.acknowledge((0, 49, ACCEPT)) == "NONE"
        assert other.receive().acquired == [(100, 149, 1)]


def test_an_answer_that_sets_nothing_free_wakes_nobody() -> None:
    shares, woken = ShareCoordinator(), list[str]()
    key = ("group", "00000000-0000-0000-0000-000000000001", 0)
    shares.replay(("share", *key), {"topic": "t", "start": 0, "runs": []})
    queue = shares.queue(*key)
    assert queue is not None
    queue.waiting[object()] = lambda: woken.append("x")
    queue.share.acquire(Acquisition("m", 100, 10), 0, 9, shares.rules("group"))
    assert shares.acknowledge(queue, "m", [(0, 4, [ACCEPT])], 1) == ErrorCode.NONE
    assert not woken
    assert shares.acknowledge(queue, "m", [(5, 5, [RELEASE])], 1) == ErrorCode.NONE
    assert woken == ["x"]


@pytest.mark.parametrize("left", [0, 1, 3])
def test_records_in_the_place_of_lost_ones_are_delivered(left: int) -> None:
    """The log loses its end with the power; what the group had done with that end stays."""
    disk, folder = SimulatedDisk(), "/simulated/data"
    with Broker(folder, disk=disk) as broker:
        topic, group = new_queue(broker)
        for at in range(4):
            fill(broker, topic, b"%d" % at)
        with Taker(broker, group, topic) as one:
            assert one.fetch().offsets == [0, 1, 2, 3]
            assert one.acknowledge((0, 0, ACCEPT), (2, 3, ACCEPT)) == "NONE"
        size = len(batch(b"0"))
        broker.crash()
        file = disk.open(f"{folder}/{topic}-0/{0:020}.log")
        file.truncate(size * left)
        file.close()
        broker.start()
        fill(broker, topic, *[b"new"] * 4)
        with Taker(broker, group, topic) as one:
            # What was finished and is still there does not come back.
            back = [b"1"] if left > 1 else []
            assert one.fetch().values == [*back, *[b"new"] * 4]
