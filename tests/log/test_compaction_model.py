"""Compaction beside a naive model, and with a crash at every step of a pass and its swap."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.errors import StorageError
from penstock.log.cleaner import Cleaner
from penstock.log.compaction import compact
from penstock.log.partition import Partition
from penstock.log.producers import ProducerStates
from penstock.log.segment import SEGMENT_SUFFIXES
from penstock.log.store import LogStore
from penstock.log.swap import PLAN_FILE, Swap, commit_swap
from penstock.records import compression, record
from penstock.records.batch import NO_PRODUCER_ID
from penstock.records.record import BatchOptions, Record
from penstock.testing.clock import ManualClock
from penstock.testing.faults import SimulatedCrash, SimulatedDisk
from tests.harness.profiles import COMPACTION_LOGS, examples
from tests.log.keeping import (
    COMPACTED,
    HOUR_MS,
    ID,
    append,
    close_segment,
    consume,
    end_transaction,
    open_store,
    run_pass,
    small_log,
    stored,
    stored_headers,
    write_in_transaction,
)

# ---- the model -------------------------------------------------------------------------------


class Model:
    """Batches with their records, compacted by reading the rules aloud."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[Record]]] = []
        self.horizons: dict[int, int] = {}

    def compact(self, start: int, end: int, now_ms: int) -> None:
        newest: dict[bytes | None, int] = {}
        for _, records in self.batches:
            for item in records:
                if start <= item.offset < end:
                    newest[item.key] = item.offset
        self.batches = [
            (base, records if base >= end else self._kept(base, records, newest, now_ms))
            for base, records in self.batches
        ]

    def _kept(
        self, base: int, records: list[Record], newest: dict[bytes | None, int], now_ms: int
    ) -> list[Record]:
        horizon = self.horizons.get(base)
        kept = [
            item
            for item in records
            if newest.get(item.key, -1) <= item.offset
            and (item.value is not None or horizon is None or now_ms < horizon)
        ]
        if horizon is None and any(item.value is None for item in kept):
            self.horizons[base] = now_ms + HOUR_MS
        return kept

    @property
    def records(self) -> list[Record]:
        return [item for _, records in self.batches for item in records]


class CompactionMachine(RuleBasedStateMachine):
    """A log and its model, side by side, under appends, passes, restarts and time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.disk = SimulatedDisk()
        self.store = open_store(COMPACTED, self.clock, self.disk)
        self.cleaner = Cleaner(self.partition)
        self.model = Model()
        self.sequences: dict[int, int] = {}

    @property
    def partition(self) -> Partition:
        return self.store.partitions[ID]

    @rule(
        keys=st.lists(st.integers(0, 6), min_size=1, max_size=5),
        dead=st.integers(0, 31),
        codec=st.sampled_from(sorted(compression.NAMES)),
        producer=st.sampled_from([NO_PRODUCER_ID, 1, 2]),
        step_ms=st.integers(-1000, 5000),
    )
    def write(self, keys: list[int], dead: int, codec: int, producer: int, step_ms: int) -> None:
        now_ms = self.clock.now_ms()
        records = [
            Record(at, now_ms + step_ms * at, b"key-%d" % key * (1 + 9 * (key == 6)),
                   None if dead >> at & 1 else b"%d %d" % (now_ms, self.partition.log_end + at),
                   (("h", b"x"),) if key % 2 else ())
            for at, key in enumerate(keys)
        ]  # fmt: skip
        options = BatchOptions(codec)
        if producer != NO_PRODUCER_ID:
            first = self.sequences.get(producer, 0)
            self.sequences[producer] = first + len(records)
            options = BatchOptions(codec, producer, 0, first)
        base = self.partition.append(record.encode(records, options))
        self.model.batches.append(
            (base, [item._replace(offset=base + at) for at, item in enumerate(records)])
        )
        self.clock.advance(1)

    @rule()
    def close(self) -> None:
        close_segment(self.partition)

    @rule(step_ms=st.sampled_from([1, HOUR_MS // 2, HOUR_MS, 3 * HOUR_MS]))
    def wait(self, step_ms: int) -> None:
        self.clock.advance(step_ms)

    @rule(max_keys=st.sampled_from([1, 3, 1000]))
    def compact(self, max_keys: int) -> None:
        due = self.cleaner.due(self.clock.now_ms(), max_keys)
        result = run_pass(self.partition, self.cleaner, max_keys=max_keys)
        if due is not None and result is not None:
            assert result.clean_until >= due.job.clean_until
            self.model.compact(due.job.clean_until, result.clean_until, self.clock.now_ms())

    @precondition(lambda self: self.model.batches)
    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        if clean:
            self.store.close()
        else:
            self.store.abandon()
        self.store = open_store(COMPACTED, self.clock, self.disk)
        self.cleaner = Cleaner(self.partition)

    @invariant()
    def agree(self) -> None:
        assert stored(self.partition) == self.model.records
        expected_end = self.model.batches[-1][0] + 1 if self.model.batches else 0
        assert self.partition.log_end >= expected_end

    @invariant()
    def producers_are_remembered(self) -> None:
        found = ProducerStates()
        for header in stored_headers(self.partition):
            found.observe(header)
        for producer_id, following in self.sequences.items():
            last = found.by_id[producer_id].batches[-1]
            assert last.last_sequence == following - 1
            assert self.partition.producers.by_id[producer_id].batches[-1][:4] == last[:4]

    def teardown(self) -> None:
        sync_and_check_segments(self.partition)


def sync_and_check_segments(partition: Partition) -> None:
    """Indexes and digests of closed segments say what a scan says."""
    close_segment(partition)
    assert consume(partition) == [r for r in stored(partition) if r.offset >= partition.log_start]
    for segment in partition.closed:
        segment.release()
        known = segment.stored_digest()
        positions = dict(zip(segment.index.positions, segment.index.offsets, strict=True))
        newest = segment.max_timestamp_ms
        segment.rebuild_indexes()
        assert known is not None
        assert known[:2] == (segment.size, segment.digest)
        assert newest == segment.max_timestamp_ms
        for at, header in segment.scan(0):
            if at in positions:
                assert positions.pop(at) == header.last_offset - segment.base_offset
        assert positions == {}


TestModel = CompactionMachine.TestCase
TestModel.settings = settings(
    max_examples=examples(50), stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


# ---- crashes ---------------------------------------------------------------------------------


def messy_log(disk: SimulatedDisk, rng: random.Random) -> tuple[LogStore, Partition, ManualClock]:
    clock = ManualClock()
    store = open_store(COMPACTED, clock, disk)
    partition = store.partitions[ID]
    for _ in range(3):
        for _ in range(rng.randint(1, 8)):
            count = rng.randint(1, 3)
            append(
                partition,
                [
                    (b"%d" % rng.randrange(5), rng.choice([None, rng.randbytes(200)]))
                    for _ in range(count)
                ],
                options=BatchOptions(rng.choice([0, 4])),
            )
        key = b"%d" % rng.randrange(5)
        write_in_transaction(partition, 9, [(key, rng.randbytes(100))])
        if rng.random() < 0.5:
            close_segment(partition)
        end_transaction(partition, 9, commit=rng.random() < 0.4)
        close_segment(partition)
    store.checkpoint()
    run_pass(partition)
    clock.advance(rng.choice([0, 2 * HOUR_MS]))
    for at in range(6):
        append(partition, [(b"%d" % at, rng.choice([None, b"last"]))])
    close_segment(partition)
    return store, partition, clock


@pytest.mark.parametrize("power_loss", [True, False])
def test_a_crash_at_any_step_leaves_the_log_as_before_or_after(seed: int, power_loss: bool) -> None:
    for number in range(COMPACTION_LOGS):
        whole = SimulatedDisk(seed + number)
        _, partition, _ = messy_log(whole, random.Random(seed + number))
        before = stored(partition)
        started = whole.operations
        run_pass(partition)
        after = stored(partition)
        voids_after = voids(partition)
        outcomes = set()
        for step in range(1, whole.operations - started + 1):
            disk = SimulatedDisk(seed + number)
            _, partition, clock = messy_log(disk, random.Random(seed + number))
            disk.crash_at(step)
            with pytest.raises(SimulatedCrash):
                run_pass(partition)
            disk.crash(power_loss=power_loss)
            found = crash_again_while_opening(disk.after_crash(), clock, step)
            records = stored(found)
            assert records in (before, after), f"seed {seed + number}, step {step}"
            outcomes.add(records == after)
            names = found.disk.names(found.folder)
            assert not [n for n in names if n.endswith((".cleaned", ".tmp")) or n == PLAN_FILE]
            assert_no_strays(found)
            run_pass(found)
            assert stored(found) == after
            assert found.stable == found.log_end
            assert voids(found) == voids_after
        assert outcomes == {True, False} or before == after


def voids(partition: Partition) -> list[tuple[int, int]]:
    """The aborted transactions of which something is left."""
    return partition.aborted(0, partition.log_end)


def crash_again_while_opening(disk: SimulatedDisk, clock: ManualClock, step: int) -> Partition:
    """Open the partition; every third time only at the second try."""
    if step % 3 == 0:
        disk.crash_at(1 + step % 7)
        try:
            open_store(COMPACTED, clock, disk)
        except SimulatedCrash:
            disk = disk.after_crash()
        else:
            return open_store(COMPACTED, clock, disk.after_crash()).partitions[ID]
    return open_store(COMPACTED, clock, disk).partitions[ID]


def assert_no_strays(partition: Partition) -> None:
    """Every derived file belongs to a segment."""
    bases = {segment.path("") for segment in partition.segments}
    for name in partition.disk.names(partition.folder):
        stem = f"{partition.folder}/{name.partition('.')[0]}"
        if name.endswith(SEGMENT_SUFFIXES) and stem[-20:].isdigit():
            assert stem in bases, name


def test_a_swap_that_failed_half_way_is_finished_later() -> None:
    disk = SimulatedDisk()
    _, partition, clock = small_log([(b"%d" % (at % 3), b"x" * 500) for at in range(30)], disk=disk)
    due = Cleaner(partition).due(clock.now_ms())
    assert due is not None
    result = compact(disk, partition.folder, due.job)
    swap = Swap(partition, result.replacements)
    swap.prepare()
    disk.fail("rename", nth=3)
    with pytest.raises(StorageError):
        swap.run()
    assert len(consume(partition)) == 30
    with pytest.raises(StorageError, match="not been swapped"):
        compact(disk, partition.folder, due.job)
    swap.run()
    swap.finish()
    assert [item.offset for item in consume(partition)] == [27, 28, 29]


def test_a_damaged_plan_is_not_guessed_at() -> None:
    disk = SimulatedDisk()
    store, partition, clock = small_log([(b"a", b"1"), (b"a", b"2")], disk=disk)
    due = Cleaner(partition).due(clock.now_ms())
    assert due is not None
    result = compact(disk, partition.folder, due.job)
    disk.fail("rename", nth=2)
    with pytest.raises(StorageError):
        commit_swap(disk, partition.folder, result.replacements)
    disk.damage(f"{partition.folder}/{PLAN_FILE}", 5)
    store.abandon()
    with pytest.raises(StorageError, match="damaged"):
        open_store(COMPACTED, clock, disk)
