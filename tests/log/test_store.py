"""A data directory: whose it is, its lock, its checkpoints, and partitions that come and go."""

from __future__ import annotations

import uuid
from itertools import product
from pathlib import Path

import pytest

from penstock.errors import DataDirectoryError, StorageError
from penstock.log.config import TopicConfig
from penstock.log.partition import Partition, PartitionId
from penstock.log.store import LogStore
from penstock.testing.clock import ManualClock
from penstock.testing.faults import SimulatedCrash, SimulatedDisk
from tests.log.engine import FOLDER, SMALL, Engine, batch, numbered, texts

A, B = PartitionId("a", 0), PartitionId("b", 0)


def topic_id(id_: PartitionId) -> uuid.UUID:
    return uuid.uuid5(uuid.NAMESPACE_DNS, id_.topic)


def open_store(disk: SimulatedDisk, *ids: PartitionId) -> LogStore:
    store = LogStore(FOLDER, disk, ManualClock())
    store.open()
    for id_ in ids:
        store.load(id_, SMALL, topic_id=topic_id(id_))
    return store


def write(partition: Partition, *words: str) -> None:
    for word in words:
        partition.append(batch(word))
    plan = partition.plan_sync()
    plan.run()
    partition.finish_sync(plan)


def crash(disk: SimulatedDisk) -> SimulatedDisk:
    disk.crash(power_loss=False)
    return disk.after_crash()


# ---- the directory -----------------------------------------------------------------------------


def test_a_new_directory_has_an_identity_that_stays() -> None:
    disk = SimulatedDisk()
    first = open_store(disk)
    name = first.cluster_id
    assert len(name) == 22
    first.close()
    assert open_store(disk).cluster_id == name


def test_one_process_at_a_time() -> None:
    disk = SimulatedDisk()
    store = open_store(disk)
    with pytest.raises(DataDirectoryError, match="in use"):
        open_store(disk)
    store.close()
    second = open_store(disk)
    # A process that was killed holds nothing.
    third = open_store(crash(disk))
    assert third.cluster_id == second.cluster_id


def test_one_process_at_a_time_on_a_real_disk(tmp_path: Path) -> None:
    first = LogStore(str(tmp_path / "deep" / "data"))
    first.open()
    with pytest.raises(DataDirectoryError):
        LogStore(str(tmp_path / "deep" / "data")).open()
    first.close()
    again = LogStore(str(tmp_path / "deep" / "data"))
    again.open()
    assert again.was_clean
    again.abandon()


def test_a_foreign_directory_is_left_alone() -> None:
    disk = SimulatedDisk()
    disk.make_dirs(FOLDER)
    disk.open(f"{FOLDER}/thesis.txt", create=True)
    with pytest.raises(DataDirectoryError, match="not a Penstock"):
        open_store(disk)
    # And not locked either.
    disk.remove(f"{FOLDER}/thesis.txt")
    open_store(disk)


def test_a_damaged_identity_is_not_replaced() -> None:
    disk = SimulatedDisk()
    open_store(disk).close()
    disk.damage(f"{FOLDER}/meta.properties", 12)
    with pytest.raises(DataDirectoryError, match="damaged"):
        open_store(disk)


def test_the_first_start_can_crash_anywhere() -> None:
    for nth, seed in product(range(1, 50), range(6)):
        disk = SimulatedDisk(seed)
        disk.crash_at(nth)
        acknowledged = False
        try:
            store = open_store(disk, A)
            write(store.partitions[A], "word")
            acknowledged = True
        except SimulatedCrash:
            disk.crash(power_loss=seed % 3 == 0)
        store = open_store(disk.after_crash(), A)
        if acknowledged:
            assert texts(store.partitions[A]) == ["word"]
        write(store.partitions[A], "more")
        assert texts(store.partitions[A])[-1] == "more"
        # Also what the crashed process made, and never synced, is safe now.
        assert isinstance(store.disk, SimulatedDisk)
        store = open_store(store.disk.after_crash(), A)
        assert texts(store.partitions[A])[-1] == "more"


# ---- checkpoints -------------------------------------------------------------------------------


def test_a_checkpoint_says_nothing_new_twice() -> None:
    disk = SimulatedDisk()
    store = open_store(disk, A)
    write(store.partitions[A], "a")
    store.checkpoint()
    before = disk.operations
    store.checkpoint()
    assert disk.operations == before


def test_a_checkpoint_keeps_what_it_knows_of_partitions_that_are_not_loaded() -> None:
    disk = SimulatedDisk()
    store = open_store(disk, A, B)
    write(store.partitions[A], "a")
    write(store.partitions[B], "b", "c")
    store.partitions[B].delete_before(1)
    store.checkpoint()
    disk = crash(disk)
    store = open_store(disk, A)
    write(store.partitions[A], "a")
    store.checkpoint(force=True)
    disk = crash(disk)
    store = open_store(disk, A, B)
    assert store.partitions[B].log_start == 1
    assert texts(store.partitions[B]) == ["c"]


def test_damaged_checkpoints_cost_only_work() -> None:
    disk = SimulatedDisk()
    store = open_store(disk, A)
    write(store.partitions[A], *numbered(range(20)))
    store.checkpoint()
    disk = crash(disk)
    disk.damage(f"{FOLDER}/recovery-point-offset-checkpoint", 3)
    disk.damage(f"{FOLDER}/log-start-offset-checkpoint", 3)
    assert texts(open_store(disk, A).partitions[A]) == numbered(range(20))


def test_a_stop_is_not_clean_with_a_failed_partition() -> None:
    disk = SimulatedDisk()
    store = open_store(disk, A, B)
    write(store.partitions[A], "a")
    disk.fail("sync", path_part="b-0/00000000000000000000.log")
    write(store.partitions[B], "b")
    store.close()
    store = open_store(disk, A, B)
    assert not store.was_clean
    assert texts(store.partitions[A]) == ["a"]


def test_a_stop_is_not_clean_while_a_partition_was_never_checked() -> None:
    disk = SimulatedDisk()
    store = open_store(disk, A, B)
    write(store.partitions[B], "b")
    store.partitions[B].append(batch("torn"))
    disk = crash(disk)
    path = f"{FOLDER}/b-0/00000000000000000000.log"
    file = disk.open(path)
    file.truncate(file.size() - 3)
    file.close()
    # Somebody starts without B, and stops.
    open_store(disk, A).close()
    store = open_store(disk, A, B)
    assert not store.was_clean
    assert texts(store.partitions[B]) == ["b"]
    store.close()
    assert open_store(disk, A, B).was_clean


# ---- partitions --------------------------------------------------------------------------------


def test_a_topic_that_is_made_again_has_nothing_of_the_old_one() -> None:
    disk = SimulatedDisk()
    store = open_store(disk, A)
    write(store.partitions[A], *numbered(range(20)))
    store.partitions[A].delete_before(15)
    store.checkpoint()
    old = store.partitions[A]
    store.delete(A)
    assert old.gone
    store.load(A, SMALL, topic_id=topic_id(A))
    write(store.partitions[A], "new")
    # What was noted down of the old one must not be taken for the new one's.
    disk = crash(disk)
    store = open_store(disk, A)
    assert not store.partitions[A].damaged
    assert texts(store.partitions[A]) == ["new"]


def test_deleting_right_after_a_start_forgets_the_checkpoint_too() -> None:
    disk = SimulatedDisk()
    store = open_store(disk, A)
    write(store.partitions[A], "a", "b")
    store.partitions[A].delete_before(2)
    store.close()
    store = open_store(disk)
    store.delete(A)
    disk = crash(disk)
    store = open_store(disk, A)
    assert store.partitions[A].log_end == 0


def test_a_deletion_can_crash_anywhere() -> None:
    for nth in range(1, 30):
        disk = SimulatedDisk(nth)
        store = open_store(disk, A, B)
        write(store.partitions[A], "a")
        write(store.partitions[B], "b")
        store.checkpoint()
        disk.crash_at(nth)
        try:
            store.delete(A)
        except SimulatedCrash:
            disk.crash(power_loss=nth % 2 == 0)
        disk = disk.after_crash()
        store = open_store(disk, A, B)
        assert texts(store.partitions[A]) in ([], ["a"])
        assert not store.partitions[A].damaged
        assert texts(store.partitions[B]) == ["b"]


def test_readers_hold_what_is_deleted() -> None:
    disk = SimulatedDisk()
    store = open_store(disk, A)
    write(store.partitions[A], "a")
    piece = store.partitions[A].read(0, 1000)
    assert piece is not None
    store.delete(A)
    assert b"a" in piece.read()  # type: ignore[union-attr]


def test_files_of_another_topic_are_not_adopted() -> None:
    disk = SimulatedDisk()
    store = open_store(disk, A)
    write(store.partitions[A], "a")
    store.close()
    store = open_store(disk)
    with pytest.raises(DataDirectoryError, match="another topic"):
        store.load(A, SMALL, topic_id=uuid.UUID(int=5))
    store.load(A, SMALL, topic_id=topic_id(A))
    assert texts(store.partitions[A]) == ["a"]


def test_a_disk_that_fails_at_the_start_says_so() -> None:
    disk = SimulatedDisk()
    disk.fail("sync", path_part="meta.properties")
    with pytest.raises(StorageError):
        open_store(disk)
    # The lock is free for the next attempt.
    assert open_store(disk).cluster_id


def test_a_real_directory(tmp_path: Path) -> None:
    """The same on the file system of the machine, all the way through."""
    config = TopicConfig(segment_bytes=1000)
    words = numbered(range(25))
    for run in range(3):
        store = LogStore(str(tmp_path / "data"), clock=ManualClock())
        store.open()
        partition = store.load(A, config, topic_id=topic_id(A), leader_epoch=run)
        assert texts(partition) == words * run
        write(partition, *words)
        if run == 1:
            store.abandon()
        else:
            store.close()
    engine = Engine()
    assert engine.partition.log_end == 0


def test_stopping_costs_nothing_where_nothing_changed() -> None:
    disk = SimulatedDisk()
    store = open_store(disk, A, B)
    write(store.partitions[A], *numbered(range(20)))
    write(store.partitions[B], "b")
    store.close()
    store = open_store(disk, A, B)
    write(store.partitions[B], "c")
    disk.fail("write", times=-1, path_part="a-0")
    store.close()
    disk.heal()
    store = open_store(disk, A, B)
    assert store.was_clean
    assert store.partitions[A].state_is_stored
    assert texts(store.partitions[A]) == numbered(range(20))
    assert texts(store.partitions[B]) == ["b", "c"]
