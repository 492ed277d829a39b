"""A sync that fails, and one that takes long.

After a failed sync nothing is acknowledged on top of it: whoever waited is told, the partition
refuses writes until it is repaired, what was visible before stays readable, others go on. A slow
sync holds back the acknowledgements that need it and nothing else.
"""

from __future__ import annotations

import errno
import random
from itertools import product
from pathlib import Path

import pytest

from penstock.broker.server import Broker as Server
from penstock.testing.broker import Broker
from penstock.testing.faults import Operation, SimulatedDisk
from penstock.testing.history import History, Place
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.metadata import MetadataRequest
from tests.broker import requests as rq
from tests.broker.raw import RawClient
from tests.broker.robustness.disks import (
    FETCH,
    PRODUCE,
    HeldDisk,
    Writer,
    broker_on,
    read_all,
    verify,
)
from tests.broker.robustness.watch import eventually

STORAGE_ERROR = ErrorCode.KAFKA_STORAGE_ERROR


def high_watermark(client: RawClient, topic: str) -> int:
    return int(rq.one(client.call(rq.list_offsets(topic, rq.LATEST))).offset)


def repair(broker: Broker, topic: str, number: int = 0) -> None:
    """What housekeeping does when it comes round."""

    def mend(server: Server) -> None:
        partition = server.partition(topic, number)
        assert partition is not None
        partition.repair()
        assert partition.failure is None

    broker.call(mend)


@pytest.mark.parametrize("forgets", [False, True], ids=["pages-stay", "pages-forgotten"])
def test_a_failed_sync_is_never_acknowledged_over(forgets: bool) -> None:
    disk = SimulatedDisk(forgets_failed_pages=forgets)
    with broker_on(disk) as broker, RawClient(broker.bootstrap) as client:
        client.call(rq.create("t", 2))
        writer, other = Writer(client, "t", 0), Writer(client, "t", 1)
        for _ in range(3):
            assert writer.write() == 0
            assert other.write() == 0
        disk.fail("sync", path_part="t-0/")
        assert writer.write() == STORAGE_ERROR
        # The disk works again, and would say so: that proves nothing about what it has lost.
        for acks in (-1, 1, -1):
            assert writer.write(acks=acks) == STORAGE_ERROR
            assert other.write(acks=acks) == 0
        assert high_watermark(client, "t") == 3
        writer.verify()
        repair(broker, "t")
        for _ in range(3):
            assert writer.write() == 0
        writer.verify()
        other.verify()
        assert high_watermark(client, "t") > 3
        broker.crash()
    with broker_on(disk.after_crash(), data=broker.data) as broker:
        with RawClient(broker.bootstrap) as client:
            writer.verify(client)
            other.verify(client)


def test_housekeeping_repairs_what_can_be_repaired() -> None:
    disk = SimulatedDisk()
    with broker_on(disk, housekeeping_interval_ms=20) as broker:
        with RawClient(broker.bootstrap) as client:
            client.call(rq.create("t"))
            writer = Writer(client, "t")
            assert writer.write() == 0
            disk.fail("sync", path_part="t-0/")
            assert writer.write() == STORAGE_ERROR
            eventually(lambda: writer.write() == 0, "it takes writes again")
            writer.verify()


def test_everyone_who_waited_for_a_failed_sync_is_told(seed: int) -> None:
    rng = random.Random(seed)
    disk = SimulatedDisk(seed)
    history, place = History(), Place("t", 0)
    with broker_on(disk) as broker, RawClient(broker.bootstrap) as client:
        client.call(rq.create("t", segment_bytes="5000"))
        for attempt in range(20):
            # However the rest is spread over syncs, something is acknowledged before the failure.
            for at in range(3):
                value = b"%d safe %d" % (attempt, at)
                history.sending("p", place, None, value)
                answer = rq.one(client.call(rq.produce("t", rq.batch(value)), PRODUCE))
                assert not answer.error_code
                history.acknowledged(place, answer.base_offset, None, value)
            disk.fail("sync", nth=rng.randint(1, 6), path_part="t-0/")
            values = [b"%d.%d " % (attempt, at) + b"x" * 300 for at in range(60)]
            for value in values:
                history.sending("p", place, None, value)
            # In several writes, so that syncs are under way while others arrive.
            for start in range(0, len(values), 12):
                part = values[start : start + 12]
                client.send_all(*[(rq.produce("t", rq.batch(v)), PRODUCE) for v in part])
            for value in values:
                answer = rq.one(client.receive())
                if not answer.error_code:
                    history.acknowledged(place, answer.base_offset, None, value)
                else:
                    assert answer.error_code == STORAGE_ERROR
            verify(client, history)
            disk.heal()
            repair(broker, "t")
            verify(client, history)
        assert history.acknowledged_count > 50


def test_nothing_acknowledged_is_lost_when_power_fails_after_a_failed_sync(seed: int) -> None:
    rng = random.Random(seed)
    disk = SimulatedDisk(seed)
    data, history, place = "/simulated/data", History(), Place("t", 0)
    for life in range(8):
        broker = Broker(data, disk=disk, durability="disk", housekeeping_interval_ms=3_600_000)
        with broker, RawClient(broker.bootstrap) as client:
            if life == 0:
                client.call(rq.create("t", segment_bytes="3000"))
            else:
                verify(client, history)
            for number in range(40):
                if rng.random() < 0.1:
                    disk.fail("sync", path_part="t-0/")
                value = b"%d.%d " % (life, number) + b"x" * rng.randint(0, 500)
                history.sending("p", place, None, value)
                answer = rq.one(client.call(rq.produce("t", rq.batch(value)), PRODUCE))
                if not answer.error_code:
                    history.acknowledged(place, answer.base_offset, None, value)
                elif rng.random() < 0.5:
                    disk.heal()
                    repair(broker, "t")
            read_all(client, place)
            broker.crash()
        disk = disk.after_crash()
    assert history.acknowledged_count > 50


# ---- faults in the midst of metadata operations ----------------------------------------------

OPERATIONS: tuple[Operation, ...] = (
    "write", "truncate", "sync", "open", "rename", "remove", "make_dirs", "sync_dir",
)  # fmt: skip


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_whichever_step_of_making_a_topic_fails_nothing_is_half_made(error: int) -> None:
    disk = SimulatedDisk()
    with broker_on(disk) as broker, RawClient(broker.bootstrap) as client:
        client.call(rq.create("other"))
        bystander = Writer(client, "other")
        for number, (operation, nth) in enumerate(product(OPERATIONS, range(1, 12))):
            topic = f"topic-{number}"
            disk.fail(operation, nth=nth, error=error)
            (made,) = client.call(rq.create(topic, 2)).topics
            disk.heal()
            if made.error_code:
                assert made.error_code == STORAGE_ERROR, (operation, nth, made)
                (told,) = client.call(rq.metadata(topic)).topics
                assert told.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, (operation, nth)
                (made,) = client.call(rq.create(topic, 2)).topics
            assert not made.error_code, (operation, nth, made)
            for partition in range(2):
                writer = Writer(client, topic, partition)
                assert writer.write() == 0, (operation, nth)
                writer.verify()
            assert bystander.write() == 0
        bystander.verify()
        names = {topic.name for topic in client.call(MetadataRequest(topics=None)).topics}
        assert len(names) == 1 + number + 1
        # After a stop nothing more and nothing less is there.
        broker.restart()
        with RawClient(broker.bootstrap) as again:
            topics = again.call(MetadataRequest(topics=None)).topics
            assert {topic.name for topic in topics} == names


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_whichever_step_of_deleting_a_topic_fails_its_records_do_not_come_back(error: int) -> None:
    disk = SimulatedDisk()
    with broker_on(disk) as broker, RawClient(broker.bootstrap) as client:
        for operation, nth in product(OPERATIONS, range(1, 8)):
            where = (operation, nth)
            (made,) = client.call(rq.create("t", 2)).topics
            assert not made.error_code, (where, made)
            writer = Writer(client, "t", 1)
            assert writer.write() == 0
            broker.call(lambda s: s.store.checkpoint())
            disk.fail(operation, nth=nth, error=error)
            (deleted,) = client.call(rq.delete("t")).responses
            disk.heal()
            if deleted.error_code:
                assert deleted.error_code == STORAGE_ERROR, where
                (told,) = client.call(rq.metadata("t")).topics
                assert not told.error_code, where
                # Not deleted: then it is as it was.
                assert writer.write() == 0, where
                writer.verify()
                (deleted,) = client.call(rq.delete("t")).responses
            assert not deleted.error_code, where
            (made,) = client.call(rq.create("t", 2)).topics
            assert not made.error_code, (where, made)
            assert high_watermark(client, "t") == 0
            assert read_all(client, Place("t", 1)) == ([], 0), where
            (deleted,) = client.call(rq.delete("t")).responses
            assert not deleted.error_code, where


# ---- slow ------------------------------------------------------------------------------------


def test_a_slow_sync_holds_up_nobody_else(tmp_path: Path) -> None:
    disk = HeldDisk("slow-0")
    with Broker(str(tmp_path / "data"), disk=disk, durability="disk") as broker:
        with RawClient(broker.bootstrap) as client, RawClient(broker.bootstrap) as waiting:
            client.call(rq.create("slow", 1))
            client.call(rq.create("other", 1))
            slow, other = Writer(client, "slow"), Writer(client, "other")
            assert slow.write() == 0
            reader = RawClient(broker.bootstrap)
            reader.send(rq.fetch("slow", 1, max_wait_ms=60_000), FETCH)
            disk.go.clear()
            waiting.send_all(
                *[(rq.produce("slow", rq.batch(b"held %d" % at)), PRODUCE) for at in range(10)]
            )
            assert disk.waiting.acquire(timeout=60)
            for _ in range(20):
                assert other.write() == 0
            other.verify()
            # What is safe can be read, what is not yet cannot, and no one is told of it.
            slow.verify()
            assert high_watermark(client, "slow") == 1
            assert waiting.is_silent()
            assert reader.is_silent()
            # Without acks=all nobody waits for the disk.
            assert slow.write(acks=1) == 0
            disk.go.set()
            for at in range(10):
                answer = rq.one(waiting.receive())
                assert (answer.error_code, answer.base_offset) == (0, 1 + at)
            assert rq.values_of(rq.one(reader.receive()).records)[0] == b"held 0"
            reader.close()


def test_a_slow_sync_does_not_hold_up_metadata_of_others(tmp_path: Path) -> None:
    disk = HeldDisk("slow-0")
    with Broker(str(tmp_path / "data"), disk=disk, durability="disk") as broker:
        with RawClient(broker.bootstrap) as client, RawClient(broker.bootstrap) as waiting:
            client.call(rq.create("slow", 1))
            disk.go.clear()
            waiting.send(rq.produce("slow", rq.batch(b"held")), PRODUCE)
            assert disk.waiting.acquire(timeout=60)
            (made,) = client.call(rq.create("other", 2)).topics
            assert not made.error_code
            (deleted,) = client.call(rq.delete("other")).responses
            assert not deleted.error_code
            # Even the slow one itself can be deleted; its writer is told.
            (deleted,) = client.call(rq.delete("slow")).responses
            assert not deleted.error_code
            assert rq.one(waiting.receive()).error_code == STORAGE_ERROR
            disk.go.set()
