"""What readers of committed records are told: where they stop, what is void, what producers do.

The transactions are written into the log directly: who may write them is another matter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker.server import Broker as Server
from penstock.log.partition import Partition
from penstock.records.record import BatchOptions, Record, encode
from penstock.testing.broker import Broker
from penstock.wire.messages.describe_producers import DescribeProducersRequest, TopicRequest
from tests.broker.disks import HastyDisk
from tests.broker.raw import RawClient
from tests.broker.requests import batch, create, fetch, list_offsets, one, produce, values_of
from tests.broker.waits import wait_for_fetches, wait_until, waiting_fetches

Connect = Callable[[Broker], RawClient]
LONG_MS = 60_000
COMMITTED, UNCOMMITTED = 1, 0
P, Q = 901, 902
TIME_MS = 1_700_000_000_000


class Writer:
    """Writes transactions into a partition of a broker, as its coordinator and its clients do."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self._broker = broker
        self._topic = topic

    def do(self, work: Callable[[Partition], int]) -> int:
        def on_loop(server: Server) -> int:
            partition = server.partition(self._topic, 0)
            assert partition is not None
            result = work(partition)
            partition.flush()
            server.read_waiters.wake(partition)
            server.committer.request(partition)
            return result

        return self._broker.call(on_loop)

    def write(self, producer_id: int, *values: bytes, time_ms: int = TIME_MS) -> int:
        def work(partition: Partition) -> int:
            known = partition.producers.by_id.get(producer_id)
            sequence = known.last_sequence + 1 if known is not None else 0
            options = BatchOptions(0, producer_id, 0, sequence, transactional=True)
            records = [Record(at, time_ms, None, value) for at, value in enumerate(values)]
            view = memoryview(bytearray(encode(records, options)))
            return partition.stage(view, TIME_MS, True).base_offset

        return self.do(work)

    def end(self, producer_id: int, *, commit: bool, time_ms: int = TIME_MS) -> int:
        return self.do(
            lambda partition: partition.stage_marker(producer_id, 0, commit, 3, time_ms).base_offset
        )


@pytest.fixture
def writer(shared: Broker, topic: str) -> Writer:
    return Writer(shared, topic)


def aborted_in(part: object) -> list[tuple[int, int]]:
    found = part.aborted_transactions  # type: ignore[attr-defined]
    return [(item.producer_id, item.first_offset) for item in found]


# ---- fetch -----------------------------------------------------------------------------------


def test_committed_readers_stop_at_the_last_stable_offset(
    client: RawClient, topic: str, writer: Writer
) -> None:
    client.call(produce(topic, batch(b"plain")), 12)
    writer.write(P, b"p")
    client.call(produce(topic, batch(b"behind")), 12)
    part = one(client.call(fetch(topic, isolation_level=COMMITTED), 12))
    assert values_of(part.records) == [b"plain"]
    assert (part.high_watermark, part.last_stable_offset) == (3, 1)
    assert part.aborted_transactions == []
    part = one(client.call(fetch(topic, isolation_level=UNCOMMITTED), 12))
    assert values_of(part.records) == [b"plain", b"p", b"behind"]
    assert (part.high_watermark, part.last_stable_offset) == (3, 1)
    assert part.aborted_transactions is None
    # Between the two there is nothing yet, and that is no error.
    part = one(client.call(fetch(topic, 2, isolation_level=COMMITTED), 12))
    assert (part.error_code, part.records) == (0, b"")
    writer.end(P, commit=False)
    part = one(client.call(fetch(topic, isolation_level=COMMITTED), 12))
    assert (part.high_watermark, part.last_stable_offset) == (4, 4)
    assert aborted_in(part) == [(P, 1)]


def test_only_the_aborted_transactions_among_what_is_returned_are_told(
    client: RawClient, topic: str, writer: Writer
) -> None:
    size = 0
    for number in range(40):
        writer.write(P, b"x" * 2000)
        writer.end(P, commit=number % 2 == 0)
    part = one(client.call(fetch(topic, isolation_level=COMMITTED), 12))
    assert aborted_in(part) == [(P, 2 * number) for number in range(1, 40, 2)]
    size = len(part.records) // 4
    part = one(
        client.call(fetch(topic, 20, partition_max_bytes=size, isolation_level=COMMITTED), 12)
    )
    told = aborted_in(part)
    assert told[0] == (P, 22)
    # About a quarter of the log was returned, and the index knows the end within a few batches.
    assert 4 <= len(told) <= 8


def test_a_waiting_reader_is_woken_by_the_marker(
    shared: Broker, topic: str, writer: Writer, connect: Connect
) -> None:
    reader = connect(shared)
    reader.send(fetch(topic, max_wait_ms=LONG_MS, isolation_level=COMMITTED), 12)
    wait_for_fetches(shared, 1)
    writer.write(P, b"p")
    assert shared.call(waiting_fetches) == 1
    writer.end(P, commit=True)
    part = one(reader.receive())
    assert values_of(part.records)[:1] == [b"p"]
    assert part.last_stable_offset == 2


def test_a_session_tells_of_what_became_stable(
    client: RawClient, topic: str, writer: Writer
) -> None:
    writer.write(P, b"p")
    first = client.call(fetch(topic, session=(0, 0), isolation_level=COMMITTED), 12)
    assert not one(first).records
    again = fetch(None, session=(first.session_id, 1), isolation_level=COMMITTED)
    assert client.call(again, 12).responses == []
    writer.end(P, commit=True)
    again = fetch(None, session=(first.session_id, 2), isolation_level=COMMITTED)
    part = one(client.call(again, 12))
    assert values_of(part.records)[:1] == [b"p"]


def test_a_marker_that_is_not_synced_does_not_count(connect: Connect) -> None:
    disk = HastyDisk()
    with Broker(disk=disk, durability="disk", housekeeping_interval_ms=3_600_000) as broker:
        client = connect(broker)
        client.call(create("t"))
        writer = Writer(broker, "t")
        writer.write(P, b"p")
        wait_until(broker, lambda server: visible(server) == 1)
        part = one(client.call(fetch("t", isolation_level=COMMITTED), 12))
        assert (part.high_watermark, part.last_stable_offset) == (1, 0)
        writer.end(P, commit=True)
        wait_until(broker, lambda server: visible(server) == 2)
        part = one(client.call(fetch("t", isolation_level=COMMITTED), 12))
        assert (part.high_watermark, part.last_stable_offset) == (2, 2)


def visible(server: Server) -> int:
    partition = server.partition("t", 0)
    assert partition is not None
    return partition.visible


# ---- from the archive ------------------------------------------------------------------------


def test_aborted_transactions_are_told_from_the_archive(tmp_path: Path, connect: Connect) -> None:
    with Broker(archive=str(tmp_path / "archive"), housekeeping_interval_ms=10) as broker:
        client = connect(broker)
        settings = {"remote.storage.enable": "true", "local.retention.bytes": "0",
                    "retention.ms": "-1", "segment.bytes": "4000",
                    # The records are old: the segment must not be closed because of that.
                    "segment.ms": "9223372036854775807"}  # fmt: skip
        client.call(create("t", configs=settings))
        writer = Writer(broker, "t")
        writer.write(P, b"void" * 200)
        writer.write(Q, b"good" * 200)
        for _ in range(8):
            client.call(produce("t", batch(b"x" * 1000)), 12)
        # The first segment is closed, and not archived while the transactions are open.
        wait_until(broker, lambda server: len(partition_of(server).closed) >= 2)
        assert not broker.call(lambda server: partition_of(server).archived.segments)
        writer.end(P, commit=False)
        writer.end(Q, commit=True)
        for _ in range(8):
            client.call(produce("t", batch(b"x" * 1000)), 12)
        wait_until(broker, lambda server: partition_of(server).segments[0].base_offset > 2)
        part = one(client.call(fetch("t", partition_max_bytes=2500, isolation_level=COMMITTED), 12))
        assert values_of(part.records)[:2] == [b"void" * 200, b"good" * 200]
        assert aborted_in(part) == [(P, 0)]
        part = one(client.call(fetch("t", isolation_level=UNCOMMITTED), 12))
        assert part.aborted_transactions is None
        # Until its marker is in the archive too, and nowhere else.
        last = broker.call(lambda server: partition_of(server).log_end)
        for _ in range(8):
            client.call(produce("t", batch(b"x" * 1000)), 12)
        wait_until(broker, lambda server: partition_of(server).segments[0].base_offset >= last)
        part = one(client.call(fetch("t", partition_max_bytes=2500, isolation_level=COMMITTED), 12))
        assert aborted_in(part) == [(P, 0)]


def partition_of(server: Server) -> Partition:
    partition = server.partition("t", 0)
    assert partition is not None
    return partition


# ---- offsets and producers -------------------------------------------------------------------


def offset_of(client: RawClient, topic: str, timestamp: int, isolation_level: int) -> int:
    request = list_offsets(topic, timestamp)
    request.isolation_level = isolation_level
    part = one(client.call(request, 7))
    assert not part.error_code
    offset: int = part.offset
    return offset


def test_offsets_for_readers_of_committed_records(
    client: RawClient, topic: str, writer: Writer
) -> None:
    client.call(produce(topic, batch(b"plain", at_ms=TIME_MS - 9)), 12)
    writer.write(P, b"p", time_ms=TIME_MS)
    for latest, maximum, level in ((2, 1, UNCOMMITTED), (1, -1, COMMITTED)):
        assert offset_of(client, topic, -1, level) == latest
        assert offset_of(client, topic, -2, level) == 0
        assert offset_of(client, topic, -3, level) == maximum
        assert offset_of(client, topic, TIME_MS - 9, level) == 0
        assert offset_of(client, topic, TIME_MS - 1, level) == maximum
    writer.end(P, commit=True)
    assert offset_of(client, topic, -1, COMMITTED) == 3
    assert offset_of(client, topic, TIME_MS - 1, COMMITTED) == 1


def test_describe_producers(client: RawClient, topic: str, writer: Writer) -> None:
    def described() -> list[tuple[int, ...]]:
        request = DescribeProducersRequest(topics=[TopicRequest(name=topic, partition_indexes=[0])])
        return [
            (p.producer_id, p.producer_epoch, p.last_sequence, p.coordinator_epoch,
             p.current_txn_start_offset)
            for p in one(client.call(request, 0)).active_producers
        ]  # fmt: skip

    writer.write(P, b"a", b"b")
    assert described() == [(P, 0, 1, -1, 0)]
    writer.end(Q, commit=False)
    writer.end(P, commit=True)
    assert described() == [(P, 0, 1, 3, -1), (Q, 0, -1, 3, -1)]
    writer.write(P, b"c")
    assert described()[0] == (P, 0, 2, 3, 4)
