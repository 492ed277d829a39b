"""What must be true of the engine at any crash, as a model beside the real thing.

`Machine` runs a `LogStore` on a `SimulatedDisk` and does random things to it, remembering what
was promised. A crash may come at any operation of the disk; then the next process opens what is
left, possibly crashes while doing so, and every promise is checked:

- what was acknowledged is there, once, in order, byte for byte; what was written but not
  acknowledged may be there, but only the beginning of it;
- the log never ends below what was visible, so no offset means two things to a consumer;
- the producers' latest batches are known as duplicates, a gap is refused, an old epoch is fenced;
- which transactions are open, up to where the log is stable and which were aborted is known;
- every index entry is true and every lookup, by offset and by time, agrees with a plain scan.

Then life goes on with what was found.
"""

from __future__ import annotations

import errno
import random
import uuid
from collections.abc import Callable

import pytest

from penstock.errors import (
    InvalidTxnStateError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    StorageError,
)
from penstock.log.config import TopicConfig
from penstock.log.partition import Partition, PartitionId
from penstock.log.slice import Slice
from penstock.log.store import LogStore
from penstock.log.sync import SyncPlan
from penstock.records.batch import (
    NO_PRODUCER_ID,
    next_sequence,
    patch,
    read_header,
)
from penstock.records.control import Marker, encode_marker
from penstock.records.record import BatchOptions, Record, encode
from penstock.testing.clock import ManualClock
from penstock.testing.faults import Operation, SimulatedCrash, SimulatedDisk
from tests.log.crash_checks import (
    PRODUCER_IDS,
    TXN_IDS,
    Batch,
    Expected,
    Promise,
    all_events,
    check_partition,
    check_transactions,
    history,
    latest_batches,
    read_all,
    split,
    stored_batches,
)

FOLDER = "/data/penstock"


class Machine:
    """A store, its disk and what was promised; everything random comes from one seed."""

    def __init__(self, seed: int, configs: dict[PartitionId, TopicConfig]) -> None:
        self.rng = random.Random(seed)
        self.disk = SimulatedDisk(self.rng.getrandbits(32))
        self.clock = ManualClock()
        self.expected = {
            id_: Expected(config, uuid.UUID(int=self.rng.getrandbits(128)))
            for id_, config in configs.items()
        }
        self.plans: dict[PartitionId, SyncPlan] = {}
        self.deleted: set[PartitionId] = set()
        self.epoch = 0
        self.counter = 0
        self.crashes = 0
        # Called now and then, when faults are part of the game.
        self.mischief: Callable[[], None] | None = None

    # ---- one process ---------------------------------------------------------------------

    def start(self) -> None:
        """Open the directory and all partitions in it."""
        self.plans = {}
        self.store = LogStore(FOLDER, self.disk, self.clock)
        self.store.open()
        for id_ in sorted(self.deleted, key=str):
            self.store.delete(id_)
        self.deleted.clear()
        for id_, expected in self.expected.items():
            self.store.load(
                id_, expected.config, topic_id=expected.topic_id, leader_epoch=self.epoch
            )

    def partition(self, id_: PartitionId) -> Partition:
        return self.store.partitions[id_]

    def run(self, steps: int) -> None:
        """Do random things; SimulatedCrash may come out at any point."""
        actions: list[tuple[int, Callable[[PartitionId], object]]] = [
            (50, self.produce), (14, self.plan), (18, self.finish), (3, self.roll),
            (10, self.read), (2, self.delete_before), (2, self.drop_old),
            (3, self.checkpoint), (3, self.pass_time), (1, self.stop_and_start),
            (1, self.recreate),
        ]  # fmt: skip
        weights = [weight for weight, _ in actions]
        ids = list(self.expected)
        for _ in range(steps):
            id_ = self.rng.choice(ids)
            if self.mischief is not None:
                self.mischief()
            (_, action) = self.rng.choices(actions, weights)[0]
            action(id_)
            self.note(id_)
            if self.partition(id_).failure is not None and self.rng.random() < 0.5:
                self.repair(id_)

    def note(self, id_: PartitionId) -> None:
        """Take in what the partition promises now."""
        partition, expected = self.partition(id_), self.expected[id_]
        while expected.staged and expected.staged[0].next <= partition.log_end:
            expected.written.append(expected.staged.pop(0))
        assert partition.log_start <= partition.visible <= partition.log_end
        before = expected.promise
        assert partition.visible >= before.after_power_loss or not partition.syncs
        if partition.syncs:
            safe = max(partition.visible, before.after_power_loss)
            expected.promise = Promise(max(before.after_kill, partition.visible), safe)
        else:
            assert partition.visible == partition.log_end
            expected.promise = Promise(partition.log_end, partition.recovery_point)

    def break_things(self) -> None:
        """Mischief: now and then the disk fails, is full, or is well again."""
        rng, disk = self.rng, self.disk
        choice = rng.random()
        if choice < 0.03:
            disk.fail("sync", nth=rng.randint(1, 3))
        elif choice < 0.05:
            kind: Operation = rng.choice(("write", "truncate", "open", "rename", "sync_dir"))
            error = rng.choice((errno.EIO, errno.ENOSPC))
            # Not on `sync-failed`: that warning is all there is against a sync that failed.
            part = "." if kind in {"open", "write", "truncate"} else ""
            disk.fail(kind, nth=rng.randint(1, 3), error=error, path_part=part)
        elif choice < 0.06:
            # Both the write and taking it back.
            disk.fail("write", error=errno.ENOSPC, path_part=".log")
            disk.fail("truncate", path_part=".log")
        elif choice < 0.08:
            disk.capacity_bytes = disk.used_bytes + rng.randint(0, 600)
        elif choice < 0.2:
            disk.capacity_bytes = None
        elif choice < 0.3:
            disk.heal()

    def make_well(self) -> None:
        self.disk.heal()
        self.disk.capacity_bytes = None

    # ---- what happens to a partition -----------------------------------------------------

    def produce(self, id_: PartitionId) -> None:
        """Stage a few batches, flush them together."""
        partition, expected = self.partition(id_), self.expected[id_]
        if partition.failure is not None:
            with pytest.raises(StorageError):
                partition.stage(memoryview(bytearray(self.batch(BatchOptions()))), 0)
            return
        failed = False
        for _ in range(self.rng.randint(1, 4)):
            try:
                self.stage(partition, expected)
            except StorageError:
                failed = True
            self.note(id_)
        try:
            partition.flush()
        except StorageError:
            failed = True
            # All that was staged and is not in the log failed together.
            self.note(id_)
            expected.staged.clear()
        self.note(id_)
        assert not expected.staged, "flush succeeded, but not all that was staged is in the log"
        if failed:
            assert self.mischief is not None
            expected.write_failed = True
            expected.sequences = self.sequences_in(partition, expected)

    def sequences_in(self, partition: Partition, expected: Expected) -> dict[int, tuple[int, int]]:
        """Where the producers go on, given what is in the log."""
        # Of a producer whose records were deleted only the engine knows where it was.
        found = {
            producer_id: (known.epoch, next_sequence(known.last_sequence, 1))
            for producer_id, known in partition.producers.by_id.items()
        }
        for batch in expected.written:
            header = read_header(batch.data)
            if header.is_control:
                if header.producer_epoch > found.get(header.producer_id, (-1, 0))[0]:
                    found[header.producer_id] = (header.producer_epoch, 0)
            elif header.producer_id != NO_PRODUCER_ID:
                following = next_sequence(header.base_sequence, header.last_offset_delta + 1)
                found[header.producer_id] = (header.producer_epoch, following)
        return found

    def stage(self, partition: Partition, expected: Expected) -> None:
        kind = self.rng.random()
        if kind < 0.35:
            self.stage_new(partition, expected, BatchOptions())
        elif kind < 0.7:
            self.stage_of(self.rng.choice(PRODUCER_IDS), partition, expected)
        elif kind < 0.9:
            self.stage_of(self.rng.choice(TXN_IDS), partition, expected)
        else:
            self.stage_marker(partition, expected)

    def stage_marker(self, partition: Partition, expected: Expected) -> None:
        """End a transaction, or none; now and then the producer is fenced by it."""
        rng, now_ms = self.rng, self.clock.now_ms()
        producer_id = rng.choice(TXN_IDS)
        epoch, sequence = expected.sequences.get(producer_id, (0, 0))
        if producer_id in expected.sequences and rng.random() < 0.1:
            with pytest.raises(ProducerFencedError):
                partition.stage_marker(producer_id, epoch - 1, False, 0, now_ms)
            return
        if rng.random() < 0.3:
            epoch, sequence = epoch + 1, 0
        marker = Marker(rng.random() < 0.5, self.epoch)
        following = expected.staged[-1].next if expected.staged else partition.log_end
        staged = partition.stage_marker(producer_id, epoch, *marker, now_ms)
        assert (staged.base_offset, staged.next_offset) == (following, following + 1)
        append_time = expected.config.append_time
        data = encode_marker(marker, producer_id, epoch, now_ms, append_time=append_time)
        patch(data, 0, following, partition.leader_epoch)
        expected.staged.append(Batch(following, following + 1, bytes(data)))
        expected.tried[following].add(bytes(data))
        expected.sequences[producer_id] = (epoch, sequence)

    def stage_of(self, producer_id: int, partition: Partition, expected: Expected) -> None:
        in_transaction = producer_id in TXN_IDS
        epoch, sequence = expected.sequences.get(producer_id, (0, 0))
        choice = self.rng.random()
        if choice < 0.15 and self.repeat(partition, expected, producer_id):
            return
        if choice < 0.25 and producer_id in expected.sequences:
            gap = next_sequence(sequence, self.rng.randint(1, 9))
            with pytest.raises(OutOfOrderSequenceError):
                self.try_stage(partition, BatchOptions(0, producer_id, epoch, gap, in_transaction))
            return
        if choice < 0.3 and producer_id in expected.sequences:
            with pytest.raises(ProducerFencedError):
                self.try_stage(
                    partition, BatchOptions(0, producer_id, epoch - 1, sequence, in_transaction)
                )
            return
        if choice < 0.33 and producer_id in partition.open_transactions():
            with pytest.raises(InvalidTxnStateError):
                self.try_stage(partition, BatchOptions(0, producer_id, epoch, sequence))
            return
        if choice < 0.35:
            epoch, sequence = epoch + 1, 0
        options = BatchOptions(0, producer_id, epoch, sequence, in_transaction)
        count = self.stage_new(partition, expected, options)
        expected.sequences[producer_id] = (epoch, next_sequence(sequence, count))

    def stage_new(self, partition: Partition, expected: Expected, options: BatchOptions) -> int:
        view = memoryview(bytearray(self.batch(options)))
        following = expected.staged[-1].next if expected.staged else partition.log_end
        staged = partition.stage(view, self.clock.now_ms(), options.transactional)
        assert not staged.duplicate
        assert staged.base_offset == following
        batch = Batch(staged.base_offset, staged.next_offset, bytes(view))
        expected.staged.append(batch)
        expected.tried[batch.base].add(batch.data)
        return batch.next - batch.base

    def try_stage(self, partition: Partition, options: BatchOptions) -> None:
        view = memoryview(bytearray(self.batch(options)))
        partition.stage(view, self.clock.now_ms(), options.transactional)

    def repeat(self, partition: Partition, expected: Expected, producer_id: int) -> bool:
        """Send one of the producer's latest batches again."""
        recent = latest_batches([*expected.written, *expected.staged], producer_id)
        if not recent:
            return False
        batch = self.rng.choice(recent)
        view = memoryview(bytearray(batch.data))
        in_transaction = producer_id in TXN_IDS
        staged = partition.stage(view, self.clock.now_ms(), in_transaction)
        assert (staged.duplicate, staged.base_offset, staged.next_offset) == (
            True, batch.base, batch.next,
        )  # fmt: skip
        return True

    def batch(self, options: BatchOptions) -> bytes:
        rng = self.rng
        records = []
        for at in range(rng.choice((1, 1, 1, 2, 3))):
            self.counter += 1
            value = b"%d:" % self.counter + b"x" * rng.choice((0, 5, 40, 300))
            timestamp_ms = self.clock.now_ms() - rng.choice((0, 0, 0, 1, 50, 5000))
            records.append(Record(at, timestamp_ms, rng.choice((None, b"k")), value))
        return encode(records, options)

    def plan(self, id_: PartitionId) -> None:
        """Begin a sync; other things may happen before it is run."""
        partition = self.partition(id_)
        if partition.needs_sync and id_ not in self.plans:
            self.plans[id_] = partition.plan_sync()
            if self.rng.random() < 0.6:
                self.finish(id_)

    def finish(self, id_: PartitionId) -> None:
        plan = self.plans.pop(id_, None)
        if plan is None:
            return
        partition = self.partition(id_)
        before = partition.visible
        plan.run()
        partition.finish_sync(plan)
        if plan.error is not None:
            assert partition.failure is not None
            assert partition.visible == before

    def roll(self, id_: PartitionId) -> None:
        partition = self.partition(id_)
        if partition.failure is None:
            self.tolerate(partition.roll)

    def tolerate(self, action: Callable[[], object]) -> bool:
        """Whether it was done: StorageError is an answer where faults are part of the game."""
        try:
            action()
        except StorageError:
            if self.mischief is None:
                raise
            return False
        return True

    def repair(self, id_: PartitionId) -> None:
        if id_ in self.plans:
            self.finish(id_)
        partition, expected = self.partition(id_), self.expected[id_]
        end = partition.log_end
        self.tolerate(partition.repair)
        if partition.failure is not None:
            return
        self.disk.failed_syncs.clear()
        # What was cut off is gone for good, and its offsets with it.
        assert partition.log_end == end
        keep = len(read_all(partition, partition.log_start))
        first = sum(batch.next <= partition.log_start for batch in expected.written)
        acknowledged = sum(b.next <= expected.promise.after_kill for b in expected.written)
        assert first + keep >= acknowledged
        expected.written = expected.written[: first + keep]
        expected.sequences = self.sequences_in(partition, expected)
        if expected.written:
            expected.gaps.add((expected.written[-1].next, partition.log_end))
        self.note(id_)
        self.check(id_, expected.promise.after_kill)

    def read(self, id_: PartitionId) -> None:
        partition, expected = self.partition(id_), self.expected[id_]
        offset = self.rng.randint(partition.log_start, partition.visible)
        max_bytes = self.rng.choice((1, 100, 1000, 100_000))
        found = partition.read(offset, max_bytes)
        wanted = [b for b in expected.written if offset < b.next <= partition.visible]
        if found is None:
            assert not wanted
            return
        assert isinstance(found, Slice)
        batches = split(found.read())
        assert batches == wanted[: len(batches)]
        assert len(batches) == 1 or found.length <= max_bytes
        self.read_committed(id_)

    def read_committed(self, id_: PartitionId) -> None:
        """A reader of committed records sees nothing that is not decided."""
        partition, expected = self.partition(id_), self.expected[id_]
        known = history(partition, expected, partition.log_end)
        check_transactions(partition, known, self.rng)
        stable = partition.stable
        offset = self.rng.randint(partition.log_start, stable)
        found = partition.read(offset, 300, limit=stable)
        wanted = [b for b in expected.written if offset < b.next <= stable]
        if not isinstance(found, Slice):
            assert not wanted
            return
        batches = split(found.read())
        assert batches == wanted[: len(batches)]
        assert batches[-1].next <= partition.end_of(offset, found, stable) <= stable

    def delete_before(self, id_: PartitionId) -> None:
        partition, expected = self.partition(id_), self.expected[id_]
        partition.delete_before(self.rng.randint(partition.log_start, partition.visible))
        expected.log_start = partition.log_start

    def drop_old(self, id_: PartitionId) -> None:
        """As retention does it: whole segments below the start of the log, once that is safe."""
        if not self.checkpoint(id_):
            return
        partition = self.partition(id_)
        following = [segment.base_offset for segment in partition.segments[1:]]
        gone = [
            segment
            for segment, end in zip(partition.closed, following, strict=False)
            if end <= partition.log_start
        ]
        partition.replace_segments(gone)
        for segment in gone:
            self.tolerate(segment.remove)

    def checkpoint(self, id_: PartitionId) -> bool:
        done = self.tolerate(self.store.checkpoint)
        if done:
            for other, partition in self.store.partitions.items():
                self.expected[other].checkpointed_start = partition.log_start
        return done

    def pass_time(self, id_: PartitionId) -> None:
        self.clock.advance(self.rng.choice((1, 10, 1000, 30_000)))
        self.tolerate(lambda: self.partition(id_).roll_if_old(self.clock.now_ms()))

    def stop_and_start(self, id_: PartitionId) -> None:
        for other in list(self.plans):
            self.finish(other)
            self.note(other)
        self.store.close()
        self.make_well()
        self.start()
        assert self.store.was_clean or self.mischief
        for other, expected in self.expected.items():
            if self.store.was_clean:
                expected.checkpointed_start = expected.log_start
            certain = expected.promise.after_kill
            self.check(other, certain)
            self.adopt(other, certain)

    def recreate(self, id_: PartitionId) -> None:
        """Delete the topic and make another of the same name."""
        self.make_well()
        if id_ in self.plans:
            self.finish(id_)
        old = self.expected[id_]
        fresh = Expected(old.config, uuid.UUID(int=self.rng.getrandbits(128)))
        # The broker knows of the deletion first, and completes it after a crash.
        self.expected[id_] = fresh
        self.deleted.add(id_)
        self.store.delete(id_)
        self.deleted.clear()
        self.store.load(id_, fresh.config, topic_id=fresh.topic_id, leader_epoch=self.epoch)

    # ---- crashes -------------------------------------------------------------------------

    def crash_and_recover(self) -> None:
        """Stop in some way, start again, perhaps in several attempts, and check everything."""
        lost_power = False
        while True:
            power_loss = self.rng.random() < 0.6 or self.nobody_was_warned()
            lost_power |= power_loss
            self.crashes += 1
            self.disk.crash(self.rng, power_loss=power_loss)
            self.disk = self.disk.after_crash()
            self.disk.capacity_bytes = None
            if self.rng.random() < 0.3:
                self.disk.crash_at(self.rng.randint(1, 25))
            if self.mischief is not None and self.rng.random() < 0.3:
                self.disk.fail("sync", nth=self.rng.randint(1, 5))
            try:
                self.epoch += 1
                self.start()
                break
            except SimulatedCrash:
                continue
            except StorageError:
                # The operator tries once more.
                assert self.mischief is not None
        self.disk.heal()
        self.disk.crash_at(1 << 60)
        for id_, expected in self.expected.items():
            promise = expected.promise
            end = promise.after_power_loss if lost_power else promise.after_kill
            self.check(id_, end)
            self.adopt(id_, end)

    def nobody_was_warned(self) -> bool:
        """Whether a sync failed and the process ended before it could say so.

        Then the next process reads from the page cache what is on no disk, and cannot know it:
        nothing can be promised, and nothing is. A power loss takes the page cache along.
        """
        unwarned = [
            path
            for path in self.disk.failed_syncs
            if path.endswith(".log")
            and not self.disk.holds(f"{path.rsplit('/', 1)[0]}/sync-failed")
        ]
        return bool(unwarned)

    def check(self, id_: PartitionId, promised_end: int) -> None:
        check_partition(self.partition(id_), self.expected[id_], promised_end, self.rng)

    def adopt(self, id_: PartitionId, certain: int) -> None:
        """Go on with what recovery found; what was below `certain` has not been lost."""
        partition, expected = self.partition(id_), self.expected[id_]
        stored = stored_batches(partition)
        first = stored[0].base if stored else partition.log_end
        events = all_events(partition, expected, certain)
        expected.past = [event for event in events if event.offset < first]
        expected.written = stored
        expected.staged = []
        expected.write_failed = False
        expected.log_start = partition.log_start
        expected.checkpointed_start = min(expected.checkpointed_start, partition.log_start)
        expected.sequences = self.sequences_in(partition, expected)
        expected.promise = Promise(partition.log_end, partition.recovery_point)
        self.note(id_)
