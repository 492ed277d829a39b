"""What survives what: durability `disk`, `os` and `memory`, and leader epochs after a crash."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from penstock.testing.broker import Broker
from penstock.wire import Message
from penstock.wire.errors import ErrorCode
from tests.broker.conftest import NEVER_MS
from tests.broker.disks import GatedDisk
from tests.broker.raw import RawClient
from tests.broker.requests import (
    EARLIEST,
    LATEST,
    MAX_TIMESTAMP,
    SET,
    alter,
    batch,
    create,
    delete_records,
    end_of_epoch,
    fetch,
    list_offsets,
    metadata,
    one,
    produce,
    values_of,
)
from tests.broker.waits import wait_for_fetches


@pytest.fixture
def disk() -> GatedDisk:
    return GatedDisk()


@pytest.fixture
def gated(disk: GatedDisk) -> Iterator[Broker]:
    with Broker(durability="disk", disk=disk, housekeeping_interval_ms=NEVER_MS) as broker:
        yield broker


def ask(broker: Broker, request: Message, version: int | None = None) -> Any:
    """One question on a connection of its own: brokers come and go here."""
    with RawClient(broker.bootstrap) as client:
        return client.call(request, version)


def values(broker: Broker, topic: str, offset: int = 0) -> list[bytes | None]:
    return values_of(one(ask(broker, fetch(topic, offset), 12)).records)


# ---- disk ------------------------------------------------------------------------------------


def test_disk_answers_all_after_the_sync_and_one_before(gated: Broker, disk: GatedDisk) -> None:
    with RawClient(gated.bootstrap) as careful, RawClient(gated.bootstrap) as quick:
        careful.call(create("t"))
        with disk.closed("t"):
            careful.send(produce("t", batch(b"careful")), 12)
            disk.wait_for_sync()
            assert one(quick.call(produce("t", batch(b"quick"), acks=1), 12)).base_offset == 1
            assert careful.is_silent()
            # Not even the one that is acknowledged is seen before it is safe.
            assert values(gated, "t") == []
        assert one(careful.receive()).base_offset == 0
        answer = careful.call(fetch("t", 1, max_wait_ms=10_000), 12)
        assert values_of(one(answer).records) == [b"quick"]


def test_a_reader_is_woken_by_the_sync(gated: Broker, disk: GatedDisk) -> None:
    with RawClient(gated.bootstrap) as writer, RawClient(gated.bootstrap) as reader:
        writer.call(create("t"))
        reader.send(fetch("t", max_wait_ms=60_000), 12)
        wait_for_fetches(gated, 1)
        with disk.closed("t"):
            writer.send(produce("t", batch(b"x")), 12)
            disk.wait_for_sync()
            assert reader.is_silent()
        assert values_of(one(reader.receive()).records) == [b"x"]


def test_what_is_not_safe_is_not_found_by_time(gated: Broker, disk: GatedDisk) -> None:
    with RawClient(gated.bootstrap) as client:
        client.call(create("t"))
        client.call(produce("t", batch(b"safe", at_ms=1000)), 12)
        with disk.closed("t"):
            client.send(produce("t", batch(b"not yet", at_ms=2000)), 12)
            disk.wait_for_sync()
            for at, expected in ((MAX_TIMESTAMP, (0, 1000)), (500, (0, 1000)), (1500, (-1, -1))):
                part = one(ask(gated, list_offsets("t", at)))
                assert (part.offset, part.timestamp) == expected
        client.receive()
        part = one(ask(gated, list_offsets("t", MAX_TIMESTAMP)))
        assert (part.offset, part.timestamp) == (1, 2000)


def test_many_writes_share_a_sync(gated: Broker, disk: GatedDisk) -> None:
    with RawClient(gated.bootstrap) as client, RawClient(gated.bootstrap) as other:
        client.call(create("t"))
        with disk.closed("t"):
            client.send(produce("t", batch(b"first")), 12)
            disk.wait_for_sync()
            for _ in range(50):
                client.send(produce("t", batch(b"x")), 12)
                # Taken, one by one, while the first sync stands at the gate.
                other.call(metadata())
        offsets = [one(client.receive()).base_offset for _ in range(51)]
        assert offsets == list(range(51))
        assert disk.syncs <= 4


def test_disk_survives_a_crash(gated: Broker) -> None:
    ask(gated, create("t"))
    ask(gated, produce("t", batch(b"safe")), 12)
    gated.crash()
    gated.start()
    assert values(gated, "t") == [b"safe"]
    assert one(ask(gated, produce("t", batch(b"next")), 12)).base_offset == 1


# ---- os --------------------------------------------------------------------------------------


def test_os_answers_at_once_and_survives_a_killed_process(disk: GatedDisk) -> None:
    with Broker(durability="os", disk=disk, housekeeping_interval_ms=NEVER_MS) as broker:
        ask(broker, create("t"))
        with disk.closed("t"):
            for n in range(3):
                assert one(ask(broker, produce("t", batch(b"%d" % n)), 12)).base_offset == n
            assert values(broker, "t") == [b"0", b"1", b"2"]
        assert disk.syncs == 0
        broker.crash()
        broker.start()
        assert values(broker, "t") == [b"0", b"1", b"2"]
        assert one(ask(broker, produce("t", batch(b"3")), 12)).base_offset == 3


# ---- memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False])
def test_memory_forgets_but_gives_no_offset_twice(broker: Broker, clean: bool) -> None:
    ask(broker, create("t", durability="memory"))
    for n in range(3):
        assert one(ask(broker, produce("t", batch(b"%d" % n)), 12)).base_offset == n
    assert values(broker, "t") == [b"0", b"1", b"2"]
    assert not list(Path(broker.data, "t-0").glob("*.log"))
    (broker.stop if clean else broker.crash)()
    broker.start()
    end = one(ask(broker, list_offsets("t", LATEST))).offset
    assert one(ask(broker, list_offsets("t", EARLIEST))).offset == end
    assert end == 3 if clean else end >= 3
    part = one(ask(broker, fetch("t", 1), 12))
    assert part.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert one(ask(broker, produce("t", batch(b"new")), 12)).base_offset == end
    assert values(broker, "t", end) == [b"new"]


def test_memory_serves_large_answers(broker: Broker) -> None:
    ask(broker, create("t", durability="memory", segment_bytes="1000000"))
    for n in range(6):
        ask(broker, produce("t", batch(b"%d" % n * 300_000)), 12)
    got: list[bytes | None] = []
    while len(got) < 6:
        got += values(broker, "t", len(got))
    assert got == [b"%d" % n * 300_000 for n in range(6)]


def test_durability_cannot_change_to_or_from_memory(broker: Broker) -> None:
    ask(broker, create("kept"))
    ask(broker, create("fleeting", durability="memory"))
    for topic, value in (("kept", "memory"), ("fleeting", "disk")):
        answer = ask(broker, alter(topic, (SET, "durability", value)))
        assert answer.responses[0].error_code == ErrorCode.INVALID_CONFIG
    assert not ask(broker, alter("kept", (SET, "durability", "disk"))).responses[0].error_code


# ---- changed while in use --------------------------------------------------------------------


def test_whoever_waits_for_a_sync_need_not_after_a_change_to_os(
    gated: Broker, disk: GatedDisk
) -> None:
    with RawClient(gated.bootstrap) as client:
        client.call(create("t"))
        with disk.closed("t"):
            client.send(produce("t", batch(b"x")), 12)
            disk.wait_for_sync()
            ask(gated, alter("t", (SET, "durability", "os")))
            assert one(client.receive()).base_offset == 0
            assert values(gated, "t") == [b"x"]


def test_after_a_change_to_disk_syncs_are_waited_for(disk: GatedDisk) -> None:
    with (
        Broker(durability="os", disk=disk, housekeeping_interval_ms=NEVER_MS) as broker,
        RawClient(broker.bootstrap) as client,
    ):
        client.call(create("t"))
        assert one(client.call(produce("t", batch(b"a")), 12)).base_offset == 0
        assert values(broker, "t") == [b"a"]
        ask(broker, alter("t", (SET, "durability", "disk")))
        with disk.closed("t"):
            client.send(produce("t", batch(b"b")), 12)
            disk.wait_for_sync()
            # What was visible stays so.
            assert values(broker, "t") == [b"a"]
            assert client.is_silent()
        assert one(client.receive()).base_offset == 1


# ---- restarts --------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False])
def test_a_restart_keeps_everything(broker: Broker, clean: bool) -> None:
    ask(broker, create("a", 3, retention_ms="12345", segment_bytes="2000"))
    ask(broker, create("b", cleanup_policy="compact"))
    ask(broker, alter("b", (SET, "max.message.bytes", "777")))
    for n in range(20):
        ask(broker, produce("a", {n % 3: batch(b"%d" % n * 200, at_ms=1000 + n)}), 12)
    ask(broker, produce("b", batch(b"v", key=b"k")), 12)
    ask(broker, delete_records("a", 2))

    def state() -> Any:
        told = ask(broker, metadata("a", "b"))
        return (
            told.cluster_id,
            [(t.name, t.topic_id, len(t.partitions)) for t in told.topics],
            broker.call(lambda s: {n: dict(t.settings) for n, t in s.catalog.topics.items()}),
            [
                (one(answer).offset, one(answer).timestamp)
                for number in range(3)
                for at in (EARLIEST, LATEST, MAX_TIMESTAMP, 1010)
                for answer in [ask(broker, list_offsets("a", at, partition=number))]
            ],
            [values(broker, "a", 2), values(broker, "b")],
        )

    before = state()
    (broker.stop if clean else broker.crash)()
    broker.start()
    assert state() == before


def test_a_stop_answers_what_is_under_way(gated: Broker, disk: GatedDisk) -> None:
    """A clean stop syncs first, and those who wait for it hear of it."""
    with RawClient(gated.bootstrap) as client:
        client.call(create("t"))
        client.send_all(*[(produce("t", batch(b"%d" % n)), 12) for n in range(20)])
        assert one(client.receive()).base_offset == 0
        gated.stop()
        answered = 1
        rest = client.wait_closed()
        while rest:
            size = int.from_bytes(rest[:4], "big")
            rest = rest[4 + size :]
            answered += 1
    gated.start()
    assert len(values(gated, "t")) >= answered


# ---- leader epochs ---------------------------------------------------------------------------


def epoch_of(broker: Broker) -> int:
    return int(ask(broker, metadata("t")).topics[0].partitions[0].leader_epoch)


def end_of(broker: Broker, epoch: int) -> tuple[int, int]:
    part = one(ask(broker, end_of_epoch("t", epoch)))
    assert not part.error_code
    return part.leader_epoch, part.end_offset


def test_the_epoch_rises_with_a_crash_only(broker: Broker) -> None:
    ask(broker, create("t"))
    first = epoch_of(broker)
    broker.restart()
    assert epoch_of(broker) == first
    broker.crash()
    broker.start()
    assert epoch_of(broker) == first + 1


def test_ends_of_epochs_after_crashes(broker: Broker) -> None:
    ask(broker, create("t"))
    first = epoch_of(broker)
    ask(broker, produce("t", batch(b"a", b"b")), 12)
    broker.crash()
    broker.start()
    # The new epoch has no records yet, and is known all the same.
    assert end_of(broker, first) == (first, 2)
    assert end_of(broker, first + 1) == (first + 1, 2)
    assert end_of(broker, first + 2) == (-1, -1)
    broker.crash()
    broker.start()
    # Nothing was written in the second: it ended where the first did.
    assert end_of(broker, first + 1) == (first, 2)
    ask(broker, produce("t", batch(b"c")), 12)
    broker.restart()
    assert end_of(broker, first) == (first, 2)
    assert end_of(broker, first + 1) == (first, 2)
    assert end_of(broker, first + 2) == (first + 2, 3)


def test_readers_with_an_old_epoch_are_told(broker: Broker) -> None:
    ask(broker, create("t"))
    ask(broker, produce("t", batch(b"a")), 12)
    old = epoch_of(broker)
    broker.crash()
    broker.start()
    fenced, unknown = ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.UNKNOWN_LEADER_EPOCH
    for epoch, code in ((old, fenced), (old + 1, ErrorCode.NONE), (old + 2, unknown), (-1, 0)):
        assert one(ask(broker, fetch("t", leader_epoch=epoch), 12)).error_code == code
        answer = ask(broker, list_offsets("t", LATEST, leader_epoch=epoch))
        assert one(answer).error_code == code
        assert one(ask(broker, end_of_epoch("t", old, current=epoch))).error_code == code


# ---- real clients over a restart -------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False])
def test_real_clients_go_on_after_a_restart(broker: Broker, clean: bool) -> None:
    """An idempotent producer and a consumer notice nothing but a delay."""
    ask(broker, create("t"))
    fast = {"bootstrap.servers": broker.bootstrap, "reconnect.backoff.ms": 10,
            "reconnect.backoff.max.ms": 50, "retry.backoff.ms": 10}  # fmt: skip
    producer = Producer({**fast, "enable.idempotence": True, "linger.ms": 0})
    consumer = Consumer(
        {**fast, "group.id": "unused", "auto.offset.reset": "error", "enable.auto.commit": False,
         "fetch.wait.max.ms": 20}
    )  # fmt: skip
    consumer.assign([TopicPartition("t", 0, 0)])
    try:
        for n in range(50):
            producer.produce("t", b"%d" % n, partition=0)
        assert producer.flush(60) == 0
        got = [m.value() for m in consumer.consume(50, timeout=60)]
        for n in range(50, 100):
            producer.produce("t", b"%d" % n, partition=0)
        (broker.stop if clean else broker.crash)()
        for n in range(100, 150):
            producer.produce("t", b"%d" % n, partition=0)
        broker.start()
        assert producer.flush(60) == 0
        while len(got) < 150:
            messages = consumer.consume(150 - len(got), timeout=60)
            assert messages
            got += [m.value() for m in messages if m.error() is None]
        assert got == [b"%d" % n for n in range(150)]
    finally:
        consumer.close()
