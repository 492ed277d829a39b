"""Retention by age, by size and by the start of the log, and with a crash at every step."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import OffsetOutOfRangeError, StorageError
from penstock.log import retention
from penstock.log.config import TopicConfig
from penstock.log.partition import Partition
from penstock.log.slice import Slice
from penstock.log.store import LogStore
from penstock.testing.clock import START_MS, ManualClock
from penstock.testing.faults import SimulatedCrash, SimulatedDisk
from tests.harness.profiles import RETENTION_LOGS, examples
from tests.log.keeping import ID, append, close_segment, consume, fill, open_store, sync

DAY_MS = 24 * 3_600_000


def config(retention_ms: int = -1, retention_bytes: int = -1, **more: object) -> TopicConfig:
    return TopicConfig(
        retention_ms=retention_ms,
        retention_bytes=retention_bytes,
        segment_bytes=1024,
        index_interval_bytes=100,
        **more,  # type: ignore[arg-type]
    )


def keep_within_bounds(store: LogStore, partition: Partition) -> int:
    """What housekeeping does, in one go; how many segments went."""
    now_ms = partition.clock.now_ms()
    retention.roll_if_expired(partition, now_ms)
    if partition.needs_sync:
        sync(partition)
    removal = retention.expired(partition, now_ms)
    if removal is None:
        return 0
    removal.begin()
    store.checkpoint()
    assert removal.valid
    count = len(removal.segments)
    removal.detach()
    removal.erase()
    return count


def test_old_segments_go_whole() -> None:
    clock = ManualClock()
    store = open_store(config(DAY_MS), clock)
    partition = store.partitions[ID]
    fill(partition, 12)
    clock.advance(DAY_MS)
    fill(partition, 18)
    bases = [segment.base_offset for segment in partition.segments]
    assert keep_within_bounds(store, partition) == 0
    clock.advance(1)
    # The first two segments are old; the next one holds an old record and newer ones.
    mixed = next(at for at, base in enumerate(bases) if base > 11) - 1
    assert keep_within_bounds(store, partition) == mixed
    assert partition.log_start == partition.segments[0].base_offset == bases[mixed]
    assert [r.offset for r in consume(partition)] == list(range(bases[mixed], 30))
    with pytest.raises(OffsetOutOfRangeError):
        partition.read(bases[mixed] - 1, 100)
    names = partition.disk.names(partition.folder)
    assert not [name for name in names if name.startswith("0" * 20)]


def test_a_log_that_is_all_too_old_ends_empty_where_it_was() -> None:
    clock = ManualClock()
    disk = SimulatedDisk()
    store = open_store(config(DAY_MS), clock, disk)
    partition = store.partitions[ID]
    fill(partition, 10)
    clock.advance(DAY_MS + 1)
    assert keep_within_bounds(store, partition) > 0
    assert (partition.log_start, partition.visible, partition.log_end) == (10, 10, 10)
    assert keep_within_bounds(store, partition) == 0
    assert len(partition.segments) == 1
    fill(partition, 1)
    store.close()
    partition = open_store(config(DAY_MS), clock, disk).partitions[ID]
    assert (partition.log_start, partition.log_end) == (10, 11)


def test_the_oldest_go_when_there_is_too_much() -> None:
    store = open_store(config(retention_bytes=5000))
    partition = store.partitions[ID]
    fill(partition, 100)
    total = partition.size_bytes
    keep_within_bounds(store, partition)
    assert 5000 <= partition.size_bytes <= 5000 + 1024
    assert partition.size_bytes < total
    assert consume(partition)[-1].offset == 99


def test_a_log_without_room_keeps_nothing() -> None:
    store = open_store(config(retention_bytes=0))
    partition = store.partitions[ID]
    fill(partition, 5)
    keep_within_bounds(store, partition)
    assert partition.size_bytes == 0
    assert partition.log_start == partition.log_end == 5


def test_segments_below_the_start_of_the_log_go_also_from_a_compacted_topic() -> None:
    store = open_store(config(DAY_MS, cleanup_policy=("compact",)))
    partition = store.partitions[ID]
    fill(partition, 30)
    first_kept = partition.segments[2]
    partition.delete_before(first_kept.base_offset + 1)
    assert keep_within_bounds(store, partition) == 2
    assert partition.segments[0] is first_kept
    assert partition.log_start == first_kept.base_offset + 1
    partition.delete_before(partition.log_end)
    keep_within_bounds(store, partition)
    assert partition.size_bytes == 0
    assert partition.log_end == 30


def test_age_does_not_matter_to_a_compacted_topic() -> None:
    clock = ManualClock()
    store = open_store(config(DAY_MS, 0, cleanup_policy=("compact",)), clock)
    partition = store.partitions[ID]
    fill(partition, 30)
    clock.advance(10 * DAY_MS)
    assert keep_within_bounds(store, partition) == 0


def test_records_without_a_time_are_as_old_as_we_know_them() -> None:
    clock = ManualClock()
    store = open_store(config(DAY_MS), clock)
    partition = store.partitions[ID]
    append(partition, [(None, b"x")], timestamp_ms=-1)
    close_segment(partition)
    append(partition, [(None, b"x")])
    assert keep_within_bounds(store, partition) == 0
    clock.advance(DAY_MS + 1)
    assert keep_within_bounds(store, partition) == 2


def test_what_is_not_synced_stays() -> None:
    clock = ManualClock()
    store = open_store(config(DAY_MS), clock)
    partition = store.partitions[ID]
    for _ in range(30):
        append(partition, [(None, b"x" * 100)])
    clock.advance(2 * DAY_MS)
    assert len(partition.segments) > 2
    assert retention.expired(partition, clock.now_ms()) is None
    assert not retention.roll_if_expired(partition, clock.now_ms())
    plan = partition.plan_sync()
    plan.run()
    assert partition.closed == []
    partition.finish_sync(plan)
    assert partition.closed == partition.segments[:-1]


def test_a_failed_sync_does_not_make_segments_count_as_safe() -> None:
    disk = SimulatedDisk()
    partition = open_store(config(durability="os"), disk=disk).partitions[ID]
    for _ in range(30):
        append(partition, [(None, b"x" * 100)])
    disk.fail("sync", nth=2)
    plan = partition.plan_sync()
    plan.run()
    partition.finish_sync(plan)
    assert partition.failure is not None
    assert partition.closed == []
    partition.repair()
    assert partition.closed == partition.segments[:-1]
    assert all(segment.stored_digest() is not None for segment in partition.closed)


def test_readers_of_removed_segments_go_on() -> None:
    clock = ManualClock()
    store = open_store(config(DAY_MS), clock)
    partition = store.partitions[ID]
    fill(partition, 30)
    held = partition.read(0, 500)
    assert isinstance(held, Slice)
    data = held.file.pread(held.length, held.position)
    clock.advance(2 * DAY_MS)
    keep_within_bounds(store, partition)
    assert held.file.pread(held.length, held.position) == data


def test_memory_is_kept_within_bounds_too() -> None:
    store = open_store(config(retention_bytes=3000, durability="memory"))
    partition = store.partitions[ID]
    for _ in range(100):
        append(partition, [(None, b"x" * 100)])
    removal = retention.expired(partition, START_MS)
    assert removal is not None
    removal.begin()
    removal.detach()
    removal.erase()
    assert partition.size_bytes <= 4024
    assert consume(partition)[-1].offset == 99
    logs = [name for name in partition.disk.names(partition.folder) if name.endswith(".log")]
    assert len(logs) == len(partition.segments)


@settings(max_examples=examples(50))
@given(st.data())
def test_exactly_the_expired_prefix_goes(data: st.DataObject) -> None:
    age_ms = data.draw(st.integers(-1, 50))
    limit = data.draw(st.integers(-1, 6000))
    clock = ManualClock()
    store = open_store(config(age_ms, limit), clock)
    partition = store.partitions[ID]
    for step in data.draw(st.lists(st.integers(0, 20), max_size=12)):
        append(partition, [(None, b"x" * 300)], timestamp_ms=clock.now_ms() - step)
        clock.advance(step)
        if data.draw(st.booleans()):
            close_segment(partition)
    sync(partition)
    now_ms = clock.now_ms()
    segments = [s for s in partition.segments if s.size]
    by_age = by_size = 0
    if age_ms >= 0:
        for segment in segments:
            if age_ms and now_ms - segment.max_timestamp_ms <= age_ms:
                break
            by_age += 1
    if limit >= 0:
        left = partition.size_bytes
        for segment in segments:
            if left - segment.size < limit:
                break
            left -= segment.size
            by_size += 1
    count = max(by_age, by_size)
    # The active segment goes only together with all others.
    kept = [s.base_offset for s in segments[count:]]
    end = partition.log_end
    keep_within_bounds(store, partition)
    assert [s.base_offset for s in partition.segments if s.size] == kept
    assert partition.log_end == end
    assert partition.log_start == (kept[0] if kept else end)


def prepared(disk: SimulatedDisk, seed: int) -> tuple[LogStore, Partition, ManualClock]:
    rng = random.Random(seed)
    clock = ManualClock()
    store = open_store(config(DAY_MS), clock, disk)
    partition = store.partitions[ID]
    fill(partition, rng.randint(1, 30))
    store.checkpoint()
    clock.advance(DAY_MS + 1)
    if rng.random() < 0.7:
        fill(partition, rng.randint(1, 12))
    if rng.random() < 0.3:
        partition.delete_before(rng.randint(0, partition.log_end))
        store.checkpoint()
    return store, partition, clock


@pytest.mark.parametrize("power_loss", [True, False])
def test_a_crash_at_any_step_neither_loses_nor_reuses_offsets(seed: int, power_loss: bool) -> None:
    for number in range(RETENTION_LOGS):
        whole = SimulatedDisk(seed + number)
        store, partition, _ = prepared(whole, seed + number)
        before = consume(partition)
        log_end, started = partition.log_end, whole.operations
        keep_within_bounds(store, partition)
        after = consume(partition)
        for step in range(1, whole.operations - started + 1):
            disk = SimulatedDisk(seed + number)
            store, partition, clock = prepared(disk, seed + number)
            disk.crash_at(step)
            with pytest.raises(SimulatedCrash):
                keep_within_bounds(store, partition)
            disk.crash(power_loss=power_loss)
            store = open_store(config(DAY_MS), clock, disk.after_crash())
            found = store.partitions[ID]
            where = f"seed {seed + number}, step {step}"
            assert found.log_end == log_end, where
            records = consume(found)
            # What goes may be gone in part; what stays is there.
            assert records[-len(after) :] == after or not after, where
            assert {r.offset for r in records} <= {r.offset for r in before}, where
            assert append(found, [(None, b"next")]) == log_end
            sync(found)
            keep_within_bounds(store, found)


def test_a_full_disk_does_not_stop_the_removal_for_good() -> None:
    clock = ManualClock()
    disk = SimulatedDisk()
    store = open_store(config(DAY_MS), clock, disk)
    partition = store.partitions[ID]
    fill(partition, 30)
    clock.advance(2 * DAY_MS)
    disk.fail("write", times=-1, path_part="checkpoint")
    removal = retention.expired(partition, clock.now_ms())
    assert removal is not None
    removal.begin()
    with pytest.raises(StorageError):
        store.checkpoint()
    # Without the checkpoint, in the order of housekeeping on a full disk.
    removal.detach()
    removal.erase()
    disk.crash()
    partition = open_store(config(DAY_MS), clock, disk.after_crash()).partitions[ID]
    assert partition.log_end == 30
    assert consume(partition)[-1].offset == 29
