"""Queues over what is no longer as it was written: archived segments, compacted ones, gaps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.log.slice import Slice
from penstock.records.batch import read_header
from penstock.records.record import Record, encode
from penstock.testing.broker import Broker
from tests.broker.requests import now_ms
from tests.broker.shares.members import ACCEPT, REJECT, Taker, fill, lag_of, new_queue, send_batch
from tests.broker.shares.test_dead_letters import letters, settled
from tests.broker.waits import wait_until

ARCHIVED = {
    "remote.storage.enable": "true",
    "local.retention.ms": "0",
    "segment.bytes": "1024",
}
COMPACTED = {"cleanup.policy": "compact", "segment.bytes": "1024",
             "min.cleanable.dirty.ratio": "0.01"}  # fmt: skip


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(archive=str(tmp_path / "archive"), housekeeping_interval_ms=20) as running:
        yield running


@pytest.mark.parametrize("ordered", ["false", "true"])
def test_archived_records_are_delivered_and_die_like_others(broker: Broker, ordered: str) -> None:
    topic, group = new_queue(
        broker,
        configs=ARCHIVED,
        share_ordered_by_key=ordered,
        errors_deadletterqueue_topic_name="dlq.old",
    )
    values = [b"%d" % at + b"x" * 300 for at in range(20)]
    for value in values:
        fill(broker, topic, value)

    def is_archived(server: object) -> bool:
        partition = broker.server.partition(topic, 0)
        return partition is not None and partition.segments[0].base_offset > 10

    wait_until(broker, is_archived)
    seen: list[bytes | None] = []
    with Taker(broker, group, topic) as taker:
        answers: list[tuple[int, int, int]] = []
        while len(seen) < len(values):
            got = taker.fetch(answers, wait_ms=10_000)
            assert got.acknowledge_error == got.error == "NONE"
            seen += got.values
            answers = [(at, at, REJECT if at == 3 else ACCEPT) for at in got.offsets]
        assert taker.fetch(answers).acknowledge_error == "NONE"
    assert seen == values
    assert [letter.value for letter in letters(broker, "dlq.old", 1)] == [values[3]]
    settled(broker, group, 20)


def test_several_archived_partitions_in_one_fetch(broker: Broker) -> None:
    topic, group = new_queue(broker, partitions=3, configs=ARCHIVED)
    for number in range(3):
        for at in range(10):
            fill(broker, topic, b"%d" % at + b"x" * 300, partition=number)

    def are_archived(server: object) -> bool:
        partitions = [broker.server.partition(topic, number) for number in range(3)]
        return all(part is not None and part.segments[0].base_offset > 3 for part in partitions)

    wait_until(broker, are_archived)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    with Taker(broker, group, topic) as taker:
        while sum(map(len, seen.values())) < 30:
            for number, got in taker.fetch_all(partitions=[0, 1, 2], wait_ms=10_000).items():
                seen[number] += got.offsets
    assert seen == {number: list(range(10)) for number in range(3)}


@pytest.mark.parametrize("ordered", ["false", "true"])
@pytest.mark.processes
def test_what_compaction_has_removed_is_not_waited_for(broker: Broker, ordered: str) -> None:
    """In a group ordered by key the gaps are seen; otherwise consumers answer that they are."""
    topic, group = new_queue(broker, configs=COMPACTED, share_ordered_by_key=ordered)
    for at in range(12):
        records = [
            Record(0, now_ms(), b"hot", b"%d" % at + b"x" * 200),
            Record(1, now_ms(), b"k%d" % at, b"%d" % at + b"x" * 200),
        ]
        send_batch(broker, topic, encode(records))

    def is_compacted(server: object) -> bool:
        partition = broker.server.partition(topic, 0)
        found = None if partition is None else partition.read(0, 1 << 20)
        return isinstance(found, Slice) and read_header(found.read()).record_count == 1

    wait_until(broker, is_compacted)
    keys: set[bytes | None] = set()
    with Taker(broker, group, topic) as taker:
        answers: list[tuple[int, int, int]] = []
        while lag_of(broker, group) if answers else True:
            got = taker.fetch(answers)
            keys |= {record.key for record in got.records}
            answers = [(first, last, ACCEPT) for first, last, _ in got.acquired]
            if not answers:
                break
    assert keys == {b"hot", *(b"k%d" % at for at in range(12))}
    assert lag_of(broker, group) == 0
