"""Disks that fail and disks that are full: nothing acknowledged is lost, nothing else counts."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from penstock.errors import DiskFullError, StorageError
from penstock.log.partition import Partition
from penstock.testing.clock import START_MS
from penstock.testing.faults import SimulatedCrash, SimulatedDisk
from tests.harness.profiles import FAILED_SYNC_DISKS, FAILED_WRITES, UNSYNCED_NAME_DISKS
from tests.log.engine import PARTITION_FOLDER, SMALL, Engine, batch, numbered, texts

AS_OS = replace(SMALL, durability="os")


def failure(partition: Partition) -> StorageError | None:
    return partition.failure


# ---- a sync that fails -------------------------------------------------------------------------


@pytest.mark.parametrize("forgets", [False, True], ids=["kept-in-cache", "evicted"])
@pytest.mark.parametrize("seed", range(FAILED_SYNC_DISKS))
def test_after_a_failed_sync_writes_are_refused_until_repaired(seed: int, forgets: bool) -> None:
    engine = Engine(disk=SimulatedDisk(seed, forgets_failed_pages=forgets))
    partition = engine.partition
    engine.write("a", "b")
    engine.write("lost", "lost too", sync=False)
    engine.disk.fail("sync", path_part=".log")
    engine.sync()
    assert failure(partition) is not None
    assert (partition.visible, partition.log_end) == (2, 4)
    assert texts(partition) == ["a", "b"], "reads go on"
    for _ in range(2):
        with pytest.raises(StorageError):
            engine.write("c")
    assert not partition.needs_sync
    partition.repair()
    assert failure(partition) is None
    # What was given out and lost is not given out again.
    engine.write("c")
    assert [partition.log_end, *texts(partition)] == [5, "a", "b", "c"]
    assert texts(engine.lose_power()) == ["a", "b", "c"]
    assert engine.partition.log_end == 5


def test_the_sync_that_succeeds_after_a_failed_one_proves_nothing() -> None:
    """The trap itself: without a repair the data would be believed and lost."""
    disk = SimulatedDisk(3)
    disk.make_dirs("/d")
    disk.sync_dir("/")
    file = disk.open("/d/f", create=True)
    disk.sync_dir("/d")
    file.pwritev([b"x" * 5000], 0)
    disk.fail("sync")
    with pytest.raises(StorageError):
        file.sync()
    file.sync()
    assert file.pread(5000, 0) == b"x" * 5000
    after = disk.after_crash().open("/d/f")
    assert after.pread(5000, 0) != b"x" * 5000


@pytest.mark.parametrize("seed", range(FAILED_SYNC_DISKS))
def test_a_process_that_stops_after_a_failed_sync_warns_the_next(seed: int) -> None:
    engine = Engine(disk=SimulatedDisk(seed))
    engine.write("a")
    engine.write("b", "c", sync=False)
    engine.disk.fail("sync", path_part=".log")
    engine.sync()
    # The next process reads all of it from the page cache, and must not believe that.
    assert texts(engine.kill()) == ["a", "b", "c"]
    assert texts(engine.lose_power()) == ["a", "b", "c"]


def test_a_failed_sync_while_segments_are_closed() -> None:
    for nth in range(1, 9):
        engine = Engine()
        words = numbered(range(5))
        engine.write(*words)
        engine.write(*numbered(range(5, 30)), sync=False)
        assert len(engine.partition.segments) > 2
        engine.disk.fail("sync", nth=nth)
        engine.sync()
        assert failure(engine.partition) is not None
        engine.partition.repair()
        assert texts(engine.partition) == words
        engine.write("after")
        assert engine.partition.log_end == 31
        assert texts(engine.lose_power()) == [*words, "after"]


def test_a_repair_on_a_disk_that_still_fails_can_be_tried_again() -> None:
    for operation in ("sync", "truncate", "open", "sync_dir", "rename", "write"):
        engine = Engine()
        engine.write(*numbered(range(12)))
        engine.write(*numbered(range(12, 24)), sync=False)
        engine.disk.fail("sync", path_part=".log")
        engine.sync()
        engine.disk.fail(operation, times=3)
        attempts = 0
        while failure(engine.partition) is not None:
            attempts += 1
            assert attempts < 9
            try:
                engine.partition.repair()
            except StorageError:
                assert texts(engine.partition) == numbered(range(12))
        assert attempts > 1, operation
        engine.write("after")
        assert texts(engine.lose_power()) == [*numbered(range(12)), "after"]


def test_with_durability_os_acknowledged_records_are_written_again() -> None:
    for nth in range(1, 6):
        engine = Engine(AS_OS)
        words = numbered(range(25))
        engine.write(*words, sync=False)
        engine.disk.fail("sync", nth=nth)
        engine.sync()
        assert failure(engine.partition) is not None
        assert texts(engine.partition) == words
        engine.partition.repair()
        # After a repair everything is as safe as if every sync had succeeded.
        assert texts(engine.lose_power()) == words
        engine.write("after")
        assert texts(engine.partition)[-1] == "after"


def test_producers_are_as_the_log_is_after_a_repair() -> None:
    engine = Engine()
    partition = engine.partition
    partition.append(batch("kept", producer=(1, 0, 0)))
    engine.sync()
    partition.append(batch("lost", producer=(1, 0, 1)))
    partition.append(batch("lost", producer=(2, 0, 0)))
    engine.disk.fail("sync", path_part=".log")
    engine.sync()
    partition.repair()
    assert partition.stage(memoryview(bytearray(batch("kept", producer=(1, 0, 0)))), START_MS)[
        :3
    ] == (0, 1, True)
    # The client sends again what was not acknowledged.
    assert partition.append(batch("again", producer=(1, 0, 1))) == 3
    assert partition.append(batch("again", producer=(2, 0, 0))) == 4


def test_a_failure_between_staging_and_flushing() -> None:
    engine = Engine()
    partition = engine.partition
    engine.write("a")
    engine.write("b", sync=False)
    plan = partition.plan_sync()
    engine.disk.fail("sync")
    plan.run()
    partition.stage(memoryview(bytearray(batch("c"))), START_MS)
    partition.finish_sync(plan)
    with pytest.raises(StorageError):
        partition.flush()
    assert partition.log_end == 2


# ---- a disk that is full -----------------------------------------------------------------------


def test_a_full_disk_refuses_and_recovers_by_itself() -> None:
    engine = Engine()
    partition = engine.partition
    engine.write("a", "b")
    engine.disk.capacity_bytes = engine.disk.used_bytes + 30
    for _ in range(3):
        with pytest.raises(DiskFullError) as full:
            engine.write("c")
        assert full.value.retriable
        assert (partition.visible, partition.log_end) == (2, 2)
        assert texts(partition) == ["a", "b"]
    assert failure(partition) is None
    engine.disk.capacity_bytes = None
    engine.write("d")
    assert texts(partition) == ["a", "b", "d"]
    assert texts(engine.lose_power()) == ["a", "b", "d"]


def test_a_full_disk_at_every_byte() -> None:
    for room in range(0, 400, 3):
        engine = Engine()
        engine.write("a", "b")
        engine.disk.capacity_bytes = engine.disk.used_bytes + room
        done = ["a", "b"]
        for word in ("c", "d", "e"):
            try:
                engine.write(word)
            except DiskFullError:
                break
            done.append(word)
        assert texts(engine.partition) == done
        engine.disk.capacity_bytes = None
        engine.write("z")
        assert texts(engine.lose_power()) == [*done, "z"]


def test_space_that_comes_back_by_removing_segments() -> None:
    engine = Engine()
    engine.write(*numbered(range(20)))
    engine.disk.capacity_bytes = engine.disk.used_bytes
    with pytest.raises(DiskFullError):
        engine.write("x")
    gone = engine.partition.closed[:2]
    engine.partition.delete_before(engine.partition.segments[2].base_offset)
    engine.partition.replace_segments(gone)
    for segment in gone:
        segment.remove()
        segment.close()
    engine.write("x")
    assert texts(engine.partition)[-1] == "x"


def test_nothing_staged_counts_after_a_failed_write() -> None:
    engine = Engine()
    partition = engine.partition
    partition.append(batch("kept", producer=(1, 0, 0)))
    for word, sequence in (("b", 1), ("c", 2)):
        partition.stage(memoryview(bytearray(batch(word, producer=(1, 0, sequence)))), START_MS)
    engine.disk.fail("write", error=errno.ENOSPC, path_part=".log")
    with pytest.raises(DiskFullError):
        partition.flush()
    assert partition.log_end == 1
    # The producer is where it was before.
    assert partition.append(batch("b", producer=(1, 0, 1))) == 1
    engine.sync()
    assert texts(partition) == ["kept", "b"]


def test_those_who_staged_before_a_roll_that_fails_learn_it() -> None:
    """`stage` writes what is staged when the segment is full: a failure there is theirs too."""
    engine = Engine()
    partition = engine.partition
    first = numbered(range(4))
    for word in first:
        partition.stage(memoryview(bytearray(batch(word))), START_MS)
    engine.disk.fail("write", error=errno.ENOSPC, path_part=".log")
    with pytest.raises(DiskFullError):
        partition.stage(memoryview(bytearray(batch("x" * 900))), START_MS)
    with pytest.raises(DiskFullError):
        partition.stage(memoryview(bytearray(batch("y"))), START_MS)
    with pytest.raises(DiskFullError):
        partition.flush()
    assert partition.log_end == 0
    # From here on all is well.
    partition.flush()
    engine.write("z")
    assert texts(partition) == ["z"]


def test_a_roll_that_fails_concerns_only_the_batch_that_needed_it() -> None:
    engine = Engine()
    partition = engine.partition
    words = numbered(range(4))
    for word in words:
        partition.stage(memoryview(bytearray(batch(word))), START_MS)
    engine.disk.fail("open", error=errno.ENOSPC, path_part="0004.log")
    with pytest.raises(DiskFullError):
        partition.stage(memoryview(bytearray(batch("x" * 900))), START_MS)
    partition.flush()
    engine.sync()
    assert texts(partition) == words


def test_an_epoch_that_cannot_be_noted_takes_the_batch_with_it() -> None:
    engine = Engine()
    engine.disk.fail("sync", path_part="leader-epoch")
    with pytest.raises(StorageError):
        engine.write("a")
    assert engine.partition.log_end == 0
    engine.write("b")
    assert texts(engine.lose_power()) == ["b"]


def test_names_that_could_not_be_synced_do_not_pass_for_safe() -> None:
    """The note of an epoch is there, but not on disk; a clean stop and start must not forget it."""
    for seed in range(UNSYNCED_NAME_DISKS):
        engine = Engine(disk=SimulatedDisk(seed))
        engine.write("a")
        engine.epoch = 1
        engine.reopen()
        engine.disk.fail("sync_dir", path_part=PARTITION_FOLDER)
        with pytest.raises(StorageError):
            engine.write("b")
        engine.reopen()
        engine.write("c")
        assert texts(engine.lose_power()) == ["a", "c"]


def test_a_write_that_can_neither_be_done_nor_undone() -> None:
    engine = Engine()
    engine.write("a")
    engine.disk.fail("write", path_part=".log")
    engine.disk.fail("truncate", path_part=".log")
    with pytest.raises(StorageError):
        engine.write("b")
    assert failure(engine.partition) is not None
    engine.partition.repair()
    engine.write("c")
    assert texts(engine.partition) == ["a", "c"]
    assert texts(engine.lose_power()) == ["a", "c"]


def test_remains_of_a_failed_write_do_not_come_back() -> None:
    """In a segment that was closed they would be believed."""
    for seed in range(FAILED_WRITES):
        engine = Engine(disk=SimulatedDisk(seed))
        engine.write("a")
        engine.reopen()
        engine.disk.fail("write", path_part=".log")
        with pytest.raises(StorageError):
            engine.write("lost" * 100)
        engine.partition.roll()
        engine.write("b", sync=False)
        assert texts(engine.lose_power()) in (["a"], ["a", "b"])


def test_a_crash_while_repairing() -> None:
    """What a sync had finished before it failed goes in an order that leaves no hole."""
    words = numbered(range(30))
    for seed in range(FAILED_WRITES):
        engine = Engine(disk=SimulatedDisk(seed))
        engine.write(*words[:5])
        engine.write(*words[5:], sync=False)
        # The first segments are complete, snapshots and all, when it fails.
        engine.disk.fail("sync", nth=13)
        engine.sync()
        assert len(engine.names(".snapshot")) > 1
        engine.disk.crash_at(1 + seed % 50)
        try:
            engine.partition.repair()
        except SimulatedCrash:
            engine.disk.crash(power_loss=seed % 4 > 0)
        partition = engine.recover()
        assert not partition.damaged
        found = texts(partition)
        assert len(found) >= 5
        assert found == words[: len(found)]


def test_an_error_that_is_raised_often_does_not_grow() -> None:
    engine = Engine()
    engine.write("a", sync=False)
    engine.disk.fail("sync", path_part=".log")
    engine.sync()
    depths = []
    for _ in range(5):
        with pytest.raises(StorageError) as refused:
            engine.write("b")
        depths.append(len(refused.traceback))
    assert len(set(depths)) == 1
