"""A disk without space: a clear retriable error, reads go on, writes resume, nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.testing.broker import Broker
from penstock.testing.faults import SimulatedDisk
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsTopic,
)
from tests.broker import requests as rq
from tests.broker.raw import RawClient
from tests.broker.robustness.disks import PRODUCE, Writer, broker_on
from tests.small_disk import small_file_system

FULL = ErrorCode.KAFKA_STORAGE_ERROR


@contextmanager
def on_small_disk(
    durability: str = "disk", segment_bytes: str = "1048576"
) -> Iterator[tuple[SimulatedDisk, Broker, RawClient]]:
    """A broker on a disk that fills up quickly, with a topic of three partitions."""
    disk = SimulatedDisk()
    with broker_on(disk) as broker, RawClient(broker.bootstrap) as client:
        request = rq.create("t", 3, durability=durability, segment_bytes=segment_bytes)
        (made,) = client.call(request).topics
        assert not made.error_code
        disk.capacity_bytes = disk.used_bytes + 400_000
        yield disk, broker, client


@pytest.mark.parametrize("durability", ["disk", "os"])
@pytest.mark.parametrize("segment_bytes", ["1048576", "30000"], ids=["one-segment", "rolling"])
def test_writes_are_refused_while_full_and_resume_with_space(
    durability: str, segment_bytes: str
) -> None:
    with on_small_disk(durability, segment_bytes) as (disk, _, client):
        writer, other = Writer(client, "t", 0), Writer(client, "t", 1)
        assert other.write() == 0
        for _ in range(4):
            assert writer.write_until_refused(9_000) == FULL
            # What is smaller than the rest may still fit; then nothing does.
            while not writer.write(10):
                pass
            assert other.write(9_000) == FULL
            writer.verify()
            other.verify()
            assert disk.capacity_bytes is not None
            disk.capacity_bytes += 100_000
            assert writer.write(9_000) == 0
            assert other.write(1_000) == 0
        writer.verify()
        other.verify()


def test_requests_in_one_read_are_told_apart() -> None:
    with on_small_disk(segment_bytes="30000") as (disk, _, client):
        batches = [rq.batch(b"%d " % at + b"x" * 9_000) for at in range(100)]
        answers = []
        # What a busy broker finds in one read is written as one, or refused as one: the first of
        # them fit in any case.
        for some in (batches[:20], batches[20:]):
            client.send_all(*[(rq.produce("t", batch), PRODUCE) for batch in some])
            answers += [rq.one(client.receive()) for _ in some]
        taken = [at for at, answer in enumerate(answers) if not answer.error_code]
        assert 10 < len(taken) < 90
        assert {answer.error_code for answer in answers} == {0, FULL}
        disk.capacity_bytes = None
        found = []
        offset = 0
        while True:
            fetched = rq.one(client.call(rq.fetch("t", offset), 11))
            records = rq.records_of(fetched.records)
            if not records:
                break
            found += records
            offset = records[-1].offset + 1
        values = {record.offset: record.value for record in found}
        for at in taken:
            value = values[answers[at].base_offset]
            assert value is not None
            assert value.startswith(b"%d " % at)


def test_an_idempotent_producer_resends_without_a_duplicate() -> None:
    with on_small_disk(segment_bytes="30000") as (disk, _, client):
        id_ = client.call(rq.new_producer()).producer_id

        def send(number: int) -> int:
            batch = rq.batch(b"%d " % number + b"x" * 9_000, producer=(id_, 0, number))
            return int(rq.one(client.call(rq.produce("t", batch), PRODUCE)).error_code)

        number = 0
        while not send(number):
            number += 1
        assert send(number) == FULL
        disk.capacity_bytes = None
        for again in range(number, number + 5):
            assert send(again) == 0
            assert send(again) == 0
        expected, offset = list(range(number + 5)), 0
        found: list[int] = []
        while len(found) < len(expected):
            fetched = rq.one(client.call(rq.fetch("t", offset), 11))
            values = rq.values_of(fetched.records)
            assert values
            found += [int((value or b"").split()[0]) for value in values]
            offset += len(values)
        assert found == expected


def test_nothing_is_lost_when_power_fails_while_full() -> None:
    disk = SimulatedDisk(seed=1)
    broker = Broker(disk=disk, durability="disk")
    with broker, RawClient(broker.bootstrap) as client:
        client.call(rq.create("t"))
        disk.capacity_bytes = disk.used_bytes + 200_000
        writer = Writer(client, "t")
        assert writer.write_until_refused(9_000) == FULL
        broker.crash()
    after = disk.after_crash()
    after.capacity_bytes = None
    with Broker(broker.data, disk=after, durability="disk") as again:
        with RawClient(again.bootstrap) as client:
            writer.verify(client)
            writer.client = client
            assert writer.write() == 0
            writer.verify()


# ---- metadata --------------------------------------------------------------------------------


def grow(topic: str, partitions: int) -> CreatePartitionsRequest:
    wanted = CreatePartitionsTopic(name=topic, count=partitions, assignments=None)
    return CreatePartitionsRequest(topics=[wanted], timeout_ms=30_000)


def fill_up(client: RawClient) -> None:
    writer = Writer(client, "t")
    for size in (9_000, 500, 1):
        while not writer.write(size):
            pass


def test_a_topic_is_made_whole_or_not_at_all() -> None:
    with on_small_disk() as (disk, broker, client):
        fill_up(client)
        (made,) = client.call(rq.create("new", 5)).topics
        assert made.error_code == FULL
        assert "No space" in made.error_message
        (told,) = client.call(rq.metadata("new")).topics
        assert told.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert not [name for name in disk.names(broker.data) if name.startswith("new-")]
        (grown,) = client.call(grow("t", 8)).results
        assert grown.error_code == FULL
        (told,) = client.call(rq.metadata("t")).topics
        assert len(told.partitions) == 3
        disk.capacity_bytes = None
        (made,) = client.call(rq.create("new", 5)).topics
        assert not made.error_code
        for partition in range(5):
            assert Writer(client, "new", partition).write() == 0
        (grown,) = client.call(grow("t", 8)).results
        assert not grown.error_code
        assert Writer(client, "t", 7).write() == 0


def test_what_needs_the_metadata_log_says_that_it_cannot() -> None:
    with on_small_disk() as (disk, _, client):
        client.call(rq.create("kept"))
        fill_up(client)
        (told,) = client.call(rq.metadata("new", create_missing=True)).topics
        assert told.error_code == FULL
        (altered,) = client.call(rq.alter("t", (0, "retention.ms", "1000"))).responses
        assert altered.error_code == FULL
        assert client.call(rq.new_producer()).error_code == FULL
        assert rq.one(client.call(rq.delete_records("t", 1))).error_code == FULL
        (deleted,) = client.call(rq.delete("kept")).responses
        assert deleted.error_code == FULL
        (told,) = client.call(rq.metadata("kept")).topics
        assert not told.error_code
        disk.capacity_bytes = None
        assert client.call(rq.new_producer()).error_code == 0
        (deleted,) = client.call(rq.delete("kept")).responses
        assert not deleted.error_code
        (told,) = client.call(rq.metadata("new", create_missing=True)).topics
        assert not told.error_code


# ---- a real one ------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "small", mebibytes=4) as place:
        yield place


def test_a_real_full_disk(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1 << 20))
    with Broker(str(small_disk / "data"), durability="disk") as broker:
        with RawClient(broker.bootstrap) as client:
            client.call(rq.create("t", segment_bytes="100000"))
            writer = Writer(client, "t")
            assert writer.write_until_refused(20_000) == FULL
            assert writer.write(20_000) == FULL
            (made,) = client.call(rq.create("new", 50)).topics
            assert made.error_code == FULL
            (told,) = client.call(rq.metadata("new")).topics
            assert told.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            writer.verify()
            ballast.unlink()
            assert writer.write(20_000) == 0
            writer.verify()
        broker.crash()
        broker.start()
        with RawClient(broker.bootstrap) as client:
            writer.client = client
            writer.verify()
            assert writer.write() == 0
