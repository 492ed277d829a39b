"""Small data directories for the tests of the offline tools."""

from __future__ import annotations

import uuid
from pathlib import Path

from penstock.log.config import TopicConfig
from penstock.log.partition import Partition, PartitionId
from penstock.log.store import LogStore
from penstock.records.record import BatchOptions, Record, encode

SMALL = TopicConfig(segment_bytes=600, index_interval_bytes=150)
TOPIC_IDS = {name: uuid.uuid5(uuid.NAMESPACE_DNS, name) for name in ("orders", "users", "gauges")}


class FixedClock:
    """A clock that stands still."""

    def now_ms(self) -> int:
        return 1_700_000_000_000

    def elapsed_ms(self) -> int:
        return 0


def write(partition: Partition, batches: int, *, producer_id: int = -1) -> None:
    """Append batches of two records; with a producer id, in its sequence."""
    known = partition.producers.by_id.get(producer_id)
    sequence = known.last_sequence + 1 if known is not None else 0
    for number in range(batches):
        at = partition.log_end
        records = [
            Record(0, 1_699_999_000_000 + at, b"key", b"value %d" % at, (("h", b"1"),)),
            Record(1, 1_699_999_000_001 + at, None, None),
        ]
        options = BatchOptions()
        if producer_id >= 0:
            options = BatchOptions(
                producer_id=producer_id, producer_epoch=0, base_sequence=sequence + 2 * number
            )
        partition.append(encode(records, options))


def abort_a_transaction(partition: Partition) -> None:
    """One batch of one record, and the marker that voids it."""
    options = BatchOptions(producer_id=8, producer_epoch=0, base_sequence=0, transactional=True)
    partition.append(encode([Record(0, 1_699_999_000_000, b"", b"")], options), in_transaction=True)
    partition.stage_marker(8, 0, False, 0, 1_699_999_000_001)
    partition.flush()


def sync(partition: Partition) -> None:
    plan = partition.plan_sync()
    plan.run()
    partition.finish_sync(plan)
    assert partition.failure is None


def open_store(folder: Path, *, epoch: int = 0, config: TopicConfig = SMALL) -> LogStore:
    """Three topics: two on disk with two partitions and one, and one in memory."""
    store = LogStore(str(folder), clock=FixedClock())
    store.open()
    for topic, number in (("orders", 0), ("orders", 1), ("users", 0)):
        store.load(
            PartitionId(topic, number), config, topic_id=TOPIC_IDS[topic], leader_epoch=epoch
        )
    in_memory = TopicConfig(durability="memory")
    store.load(PartitionId("gauges", 0), in_memory, topic_id=TOPIC_IDS["gauges"])
    return store


def fill(store: LogStore, batches: int) -> None:
    write(store.partitions[PartitionId("orders", 0)], batches)
    write(store.partitions[PartitionId("orders", 1)], batches, producer_id=7)
    write(store.partitions[PartitionId("gauges", 0)], 1)
    users = store.partitions[PartitionId("users", 0)]
    if not users.log_end:
        abort_a_transaction(users)
        users.roll()
    for partition in store.partitions.values():
        if partition.config.durability != "memory":
            sync(partition)


def stopped(folder: Path, *, batches: int = 9) -> Path:
    """A directory after a clean stop, written in two runs with different leader epochs."""
    store = open_store(folder)
    fill(store, batches)
    store.close()
    store = open_store(folder, epoch=1)
    fill(store, batches)
    store.partitions[PartitionId("orders", 0)].delete_before(3)
    store.close()
    return folder


def crashed(folder: Path, *, batches: int = 9) -> Path:
    """A directory after a crash: synced records, a checkpoint, then more synced records."""
    store = open_store(folder)
    fill(store, batches)
    store.checkpoint()
    fill(store, 2)
    store.abandon()
    return folder
