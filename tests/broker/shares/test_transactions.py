"""Queues and transactions: what was aborted is not delivered to those who read the committed."""

from __future__ import annotations

import pytest

from penstock.records.record import BatchOptions, Record, encode
from penstock.testing.broker import Broker
from tests.broker.requests import now_ms
from tests.broker.shares.members import ACCEPT, Taker, fill, new_queue, set_group


def in_transaction(value: bytes, producer: int, sequence: int = 0) -> bytes:
    return encode(
        [Record(0, now_ms(), b"k", value)],
        BatchOptions(
            producer_id=producer, producer_epoch=0, base_sequence=sequence, transactional=True
        ),
    )


def write(broker: Broker, topic: str, value: bytes, producer: int, sequence: int = 0) -> None:
    def stage(server: object) -> None:
        partition = broker.server.partition(topic, 0)
        assert partition is not None
        data = memoryview(bytearray(in_transaction(value, producer, sequence)))
        partition.stage(data, now_ms(), in_transaction=True)
        partition.flush()
        broker.server.read_waiters.wake(partition)

    broker.call(stage)


def end(broker: Broker, topic: str, producer: int, *, commit: bool) -> None:
    def mark(server: object) -> None:
        partition = broker.server.partition(topic, 0)
        assert partition is not None
        partition.stage_marker(producer, 0, commit, 0, now_ms())
        partition.flush()
        broker.server.read_waiters.wake(partition)

    broker.call(mark)


@pytest.fixture
def queue(shared: Broker) -> tuple[str, str]:
    return new_queue(shared, share_isolation_level="read_committed")


@pytest.mark.parametrize("ordered", ["false", "true"])
def test_only_what_is_committed_is_delivered(
    shared: Broker, queue: tuple[str, str], ordered: str
) -> None:
    topic, group = queue
    set_group(shared, group, share_ordered_by_key=ordered)
    write(shared, topic, b"a1", 1)
    write(shared, topic, b"b1", 2)
    fill(shared, topic, b"plain")
    write(shared, topic, b"a2", 1, 1)
    with Taker(shared, group, topic) as taker:
        assert taker.fetch().values == []
        end(shared, topic, 1, commit=False)
        assert taker.fetch().values == []
        taker.send(wait_ms=20_000)
        end(shared, topic, 2, commit=True)
        assert taker.receive().values == [b"b1", b"plain"]
        # The same producer, in another transaction.
        write(shared, topic, b"a3", 1, 2)
        end(shared, topic, 1, commit=True)
        assert taker.fetch([(1, 1, ACCEPT)]).values == [b"a3"]
        assert taker.acknowledge((2, 2, ACCEPT), (6, 6, ACCEPT)) == "NONE"
    start = shared.call(lambda server: server.coordination.shares.queues_of(group)[0].share.start)
    # Markers and what was aborted are nobody's to answer for.
    assert start >= 7


def test_who_reads_the_uncommitted_gets_all_but_markers(shared: Broker) -> None:
    topic, group = new_queue(shared)
    write(shared, topic, b"a1", 1)
    end(shared, topic, 1, commit=False)
    fill(shared, topic, b"plain")
    with Taker(shared, group, topic) as taker:
        got = taker.fetch()
        assert got.acquired == [(0, 0, 1), (2, 2, 1)]
        assert got.values == [b"a1", b"plain"]
