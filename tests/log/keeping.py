"""What the tests of retention, compaction and the archive share: small logs, filled and read."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Sequence
from pathlib import Path

from penstock.log.archive import ArchivedRead
from penstock.log.cleaner import Cleaner
from penstock.log.clock import Clock
from penstock.log.compaction import Job, Result, compact
from penstock.log.config import TopicConfig
from penstock.log.disk import Disk
from penstock.log.partition import Partition, PartitionId
from penstock.log.slice import Slice
from penstock.log.store import LogStore
from penstock.log.swap import Swap
from penstock.records.batch import BatchHeader, headers
from penstock.records.control import read_marker
from penstock.records.record import BatchOptions, Record, decode, encode
from penstock.testing.clock import ManualClock
from penstock.testing.faults import SimulatedDisk

ID = PartitionId("topic", 0)
TOPIC_ID = uuid.UUID(int=7)
FOLDER = "/data/penstock"

Pair = tuple[bytes | None, bytes | None]


def open_store(
    config: TopicConfig,
    clock: Clock | None = None,
    disk: Disk | None = None,
    folder: Path | str = FOLDER,
) -> LogStore:
    """A store with one partition."""
    store = LogStore(str(folder), disk or SimulatedDisk(), clock or ManualClock())
    store.open()
    store.load(ID, config, topic_id=TOPIC_ID)
    return store


def append(
    partition: Partition,
    pairs: Sequence[Pair],
    *,
    timestamp_ms: int | None = None,
    options: BatchOptions | None = None,
) -> int:
    """One batch of keys and values; its base offset."""
    now_ms = partition.clock.now_ms() if timestamp_ms is None else timestamp_ms
    records = [Record(at, now_ms, key, value) for at, (key, value) in enumerate(pairs)]
    in_transaction = options is not None and options.transactional
    return partition.append(encode(records, options), in_transaction=in_transaction)


def write_in_transaction(
    partition: Partition, producer_id: int, pairs: Sequence[Pair], *, epoch: int = 0
) -> int:
    """One batch of a transaction, numbered as the producer goes on; its base offset."""
    known = partition.producers.by_id.get(producer_id)
    sequence = known.last_sequence + 1 if known is not None and known.epoch == epoch else 0
    options = BatchOptions(0, producer_id, epoch, sequence, transactional=True)
    return append(partition, pairs, options=options)


def end_transaction(
    partition: Partition, producer_id: int, *, commit: bool, epoch: int = 0, decided_in: int = 0
) -> int:
    """Write the marker; its offset."""
    now_ms = partition.clock.now_ms()
    staged = partition.stage_marker(producer_id, epoch, commit, decided_in, now_ms)
    partition.flush()
    return staged.base_offset


def consume_committed(partition: Partition, max_bytes: int = 300) -> list[Record]:
    """What a consumer hands out that reads committed records only, as Kafka's clients do it."""
    position, limit = partition.log_start, partition.stable
    records: list[Record] = []
    while (found := partition.read(position, max_bytes, limit=limit)) is not None:
        assert isinstance(found, Slice)
        data = load(found)
        upto = partition.end_of(position, found, limit)
        coming = sorted(partition.aborted(position, upto), key=lambda item: item[1])
        aborted: set[int] = set()
        for at, header in headers(data):
            batch = data[at : at + header.size]
            while coming and coming[0][1] <= header.last_offset:
                aborted.add(coming.pop(0)[0])
            if header.is_control:
                marker = read_marker(batch)
                if marker is not None and not marker.commit:
                    aborted.discard(header.producer_id)
            elif not (header.is_transactional and header.producer_id in aborted):
                records += [item for item in decode(batch) if item.offset >= position]
            assert header.next_offset <= limit
        position = header.next_offset
    return records


def fill(partition: Partition, batches: int, *, value_bytes: int = 100) -> None:
    """Batches of one record each, synced; enough of them close segments."""
    for _ in range(batches):
        append(partition, [(b"key", random.Random(partition.log_end).randbytes(value_bytes))])
    sync(partition)


def sync(partition: Partition) -> None:
    plan = partition.plan_sync()
    plan.run()
    partition.finish_sync(plan)
    assert partition.failure is None, partition.failure


def close_segment(partition: Partition) -> None:
    """What is active is closed and on disk."""
    partition.roll()
    sync(partition)


def stored(partition: Partition) -> list[Record]:
    """Every record of the local log, below its start too."""
    return [item for _, batch in partition.batches(0) for item in decode(batch)]


def stored_headers(partition: Partition) -> list[BatchHeader]:
    return [header for header, _ in partition.batches(0)]


def load(found: Slice | ArchivedRead) -> bytes:
    """The bytes of a read, from wherever they are."""
    if isinstance(found, ArchivedRead):
        return found.load()
    return found.file.pread(found.length, found.position)


def consume(partition: Partition, offset: int | None = None, max_bytes: int = 500) -> list[Record]:
    """What a consumer gets who reads from the offset on, fetch by fetch."""
    position = partition.log_start if offset is None else offset
    records: list[Record] = []
    while (found := partition.read(position, max_bytes)) is not None:
        data = load(found)
        assert data, f"nothing at {position}"
        for at, header in headers(data):
            batch = data[at : at + header.size]
            records += [item for item in decode(batch) if item.offset >= position]
            position = max(position, header.next_offset)
    return records


# ---- compaction ------------------------------------------------------------------------------

HOUR_MS = 3_600_000
COMPACTED = TopicConfig(
    cleanup_policy=("compact",),
    min_cleanable_dirty_ratio=0.0,
    delete_retention_ms=HOUR_MS,
    segment_bytes=4000,
    index_interval_bytes=200,
)


def run_pass(
    partition: Partition, cleaner: Cleaner | None = None, *, max_keys: int = 1000
) -> Result | None:
    """What housekeeping does, in one go."""
    cleaner = cleaner or Cleaner(partition)
    due = cleaner.due(partition.clock.now_ms(), max_keys)
    if due is None:
        return None
    job = Job.from_json(json.loads(json.dumps(due.job.to_json())))
    result = compact(partition.disk, partition.folder, job)
    result = Result.from_json(json.loads(json.dumps(result.to_json())))
    swap = Swap(partition, result.replacements)
    assert swap.valid
    swap.prepare()
    swap.load_indexes()
    if result.replacements:
        swap.run()
    swap.finish()
    cleaner.finish(result)
    cleaner.save()
    return result


def small_log(
    pairs: list[Pair], config: TopicConfig = COMPACTED, disk: Disk | None = None
) -> tuple[LogStore, Partition, ManualClock]:
    """One record a batch, all of them in closed segments."""
    clock = ManualClock()
    store = open_store(config, clock, disk)
    partition = store.partitions[ID]
    for pair in pairs:
        append(partition, [pair])
    close_segment(partition)
    return store, partition, clock


def contents(partition: Partition) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(item.offset, item.key, item.value) for item in stored(partition)]
