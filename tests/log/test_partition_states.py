"""What a clean stop writes down of partitions: believed where true, and not needed anywhere."""

from __future__ import annotations

import errno
import os
import random
import uuid
import weakref
from pathlib import Path

import pytest

from penstock.broker.upkeep.housekeeping import release_unused_files
from penstock.errors import DataDirectoryError, StorageError
from penstock.log.config import TopicConfig
from penstock.log.disk import OsDisk, OsFile, read_whole, storage_error, write_atomically
from penstock.log.partition import Partition, PartitionId
from penstock.log.partition_states import STATES_FILE, decode_states, encode_states
from penstock.log.store import CLEAN_MARKER, LogStore
from penstock.log.swap import Replacement, Swap
from penstock.log.sync import FAILED_SYNC_MARK
from penstock.log.verify import verify
from penstock.testing.clock import ManualClock
from penstock.testing.faults import SimulatedDisk
from tests.log.engine import FOLDER, ID, PARTITION_FOLDER, Engine, batch, numbered, texts

TOPIC_ID = uuid.UUID(int=5)
MANY = 100


def facts(partition: Partition) -> list[object]:
    """All that a start must know of a partition."""
    active = partition.active
    return [
        (partition.log_start, partition.log_end, partition.visible, partition.stable),
        partition.epochs.entries,
        {id_: known._replace(seen_ms=0) for id_, known in partition.producers.by_id.items()},
        partition.producers.open,
        [(s.base_offset, s.size, s.max_timestamp_ms) for s in partition.segments],
        [(list(s.index.offsets), list(s.index.positions)) for s in partition.segments],
        (active.digest, active.first_timestamp_ms, active.bytes_since_index),
        partition.aborted(partition.log_start, partition.log_end),
        texts(partition),
    ]


def live(engine: Engine, rng: random.Random) -> None:
    """A little of everything."""
    sequences = {id_: p.last_sequence + 1 for id_, p in engine.partition.producers.by_id.items()}
    for _ in range(rng.randint(0, 25)):
        producer = rng.choice((-1, 1, 2))
        text = "x" * rng.choice((1, 50, 200))
        if producer < 0:
            engine.partition.append(batch(text, timestamp_ms=engine.clock.now_ms()))
        else:
            at = sequences.get(producer, 0)
            engine.partition.append(batch(text, producer=(producer, 0, at)))
            sequences[producer] = at + 1
        engine.clock.advance(rng.choice((0, 10, 1000)))
    if rng.random() < 0.2:
        engine.partition.roll()
    engine.sync()
    if rng.random() < 0.2:
        engine.partition.delete_before(engine.partition.log_end // 2)


def test_a_partition_is_after_a_clean_stop_as_it_was_before(seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine()
    for _ in range(30):
        live(engine, rng)
        before = facts(engine.partition)
        engine.reopen()
        assert engine.partition.state_is_stored
        assert facts(engine.partition) == before
        if rng.random() < 0.3:
            # What was written down is not taken for what is there now.
            live(engine, rng)
            written = texts(engine.partition)
            engine.kill()
            # Where the log begins was not written down since.
            kept = texts(engine.partition)
            assert kept[len(kept) - len(written) :] == written
            assert not engine.partition.state_is_stored


def test_a_start_after_a_clean_stop_reads_no_file_of_the_partition() -> None:
    engine = Engine()
    engine.write(*numbered(range(30)))
    before = facts(engine.partition)
    for _ in range(2):
        engine.store.close()
        engine.disk.fail("read", times=-1, path_part=str(ID))
        engine.open()
        assert engine.partition.log_end == 30
        engine.disk.heal()
    assert facts(engine.partition) == before


def test_a_stop_without_changes_writes_nothing_in_the_partition() -> None:
    engine = Engine()
    engine.write(*numbered(range(30)))
    engine.reopen()
    names = engine.names()
    for operation in ("write", "open", "remove", "sync_dir"):
        engine.disk.fail(operation, times=-1, path_part=str(ID))
    engine.store.close()
    engine.disk.heal()
    assert engine.open().log_end == 30
    assert engine.store.was_clean
    assert engine.names() == names


@pytest.mark.parametrize("harm", ["gone", "damaged", "unreadable"])
def test_what_the_stop_before_wrote_down_can_go_while_the_broker_runs(harm: str) -> None:
    engine = Engine()
    engine.write(*numbered(range(30)))
    before = facts(engine.partition)
    engine.reopen()
    path = f"{FOLDER}/{STATES_FILE}"
    if harm == "gone":
        engine.disk.remove(path)
    elif harm == "damaged":
        # Whole, and yet not what was read at the start.
        states = decode_states(read_whole(engine.disk, path))
        assert states is not None
        lines = [f"{ID} {s.topic_id} {s.text}" for s in states.values()]
        lines = [line.replace('"end":30', '"end":31') for line in lines]
        write_atomically(engine.disk, path, encode_states(lines))
    else:
        engine.disk.fail("read", path_part=STATES_FILE)
    assert engine.store.close()
    engine.disk.heal()
    engine.open()
    assert engine.partition.state_is_stored
    assert facts(engine.partition) == before


def test_what_is_written_down_of_partitions_takes_no_memory(tmp_path: Path) -> None:
    config = TopicConfig(index_interval_bytes=1)
    for run in range(2):
        store = LogStore(str(tmp_path))
        store.open()
        partition = store.load(PartitionId("t", 0), config, topic_id=TOPIC_ID)
        store.forget_states()
        if run == 0:
            for _ in range(1_000):
                partition.append(batch("x"))
            store.close()
    assert partition.state_is_stored
    text = (tmp_path / STATES_FILE).read_text()
    assert len(text) > 10_000
    kept = [value for value in vars(partition).values() if isinstance(value, (str, bytes))]
    assert sum(map(len, kept)) < 1000
    assert not store._states
    store.close()
    assert (tmp_path / STATES_FILE).read_text() == text


@pytest.mark.parametrize("harm", ["gone", "damaged", "another", "marker of before"])
def test_without_what_was_written_down_a_start_looks_at_the_files(harm: str) -> None:
    engine = Engine()
    engine.write(*numbered(range(30)))
    before = facts(engine.partition)
    engine.store.close()
    path = f"{FOLDER}/{STATES_FILE}"
    if harm == "gone":
        engine.disk.remove(path)
    elif harm == "damaged":
        engine.disk.damage(path, 40)
    elif harm == "another":
        # Whole, and yet not what was written at this stop.
        other = read_whole(engine.disk, path).replace(b'"end":30', b'"end":31')
        states = decode_states(read_whole(engine.disk, path))
        assert states is not None
        assert b'"end":31' in other
        lines = [f"{ID} {s.topic_id} {s.text}" for s in states.values()]
        lines = [line.replace('"end":30', '"end":31') for line in lines]
        write_atomically(engine.disk, path, encode_states(lines))
    else:
        write_atomically(engine.disk, f"{FOLDER}/{CLEAN_MARKER}", b"1\n")
    engine.open()
    assert engine.store.was_clean
    assert not engine.partition.state_is_stored
    assert facts(engine.partition) == before


def test_who_has_changed_files_meanwhile_is_not_overlooked() -> None:
    engine = Engine()
    engine.write(*numbered(range(30)))
    before = facts(engine.partition)
    engine.store.close()
    engine.disk.open(f"{PARTITION_FOLDER}/note", create=True).close()
    assert not engine.open().state_is_stored
    assert facts(engine.partition) == before
    last = engine.names(".log")[-1]
    engine.store.close()
    file = engine.disk.open(engine.path(last))
    file.truncate(file.size() - 10)
    engine.open()
    # What was safe on disk is cut off: it is said, and not taken for a torn tail.
    assert engine.partition.damaged


@pytest.mark.parametrize("segment", [0, -1])
def test_a_log_that_goes_while_the_broker_runs_is_not_believed_to_be_there(segment: int) -> None:
    engine = Engine()
    engine.write(*numbered(range(30)))
    gone = engine.names(".log")[segment]
    engine.disk.remove(engine.path(gone))
    engine.reopen()
    assert not engine.partition.state_is_stored
    if segment == 0:
        # The log begins behind it, and goes on.
        assert engine.partition.log_start > 0
        engine.write("more")
        assert texts(engine.partition)[-1] == "more"
    else:
        # Records at the end were safe: it is said before anybody writes.
        assert engine.partition.damaged


def test_a_log_without_records_that_goes_while_the_broker_runs_is_made_again() -> None:
    engine = Engine()
    engine.disk.remove(engine.path(engine.names(".log")[0]))
    engine.reopen()
    engine.write("a")
    assert texts(engine.reopen()) == ["a"]


def test_a_folder_that_is_gone_begins_anew_behind_what_it_had() -> None:
    engine = Engine()
    engine.write("a", "b", "c")
    engine.store.close()
    engine.disk.remove_tree(PARTITION_FOLDER)
    engine.open()
    assert (engine.partition.log_start, engine.partition.log_end) == (3, 3)


def test_of_another_topic_with_the_same_name_nothing_is_believed() -> None:
    engine = Engine()
    engine.write("a")
    engine.store.close()
    store = LogStore(FOLDER, engine.disk, engine.clock)
    store.open()
    with pytest.raises(DataDirectoryError, match="belongs to another topic"):
        store.load(ID, engine.config, topic_id=TOPIC_ID)
    store.abandon()


def test_large_indexes_stay_in_the_folder(tmp_path: Path) -> None:
    config = TopicConfig(index_interval_bytes=1)
    id_ = PartitionId("t", 0)

    def opened() -> LogStore:
        store = LogStore(str(tmp_path))
        store.open()
        store.load(id_, config, topic_id=TOPIC_ID)
        return store

    store = opened()
    for _ in range(9_000):
        store.partitions[id_].append(batch("x"))
    index = store.partitions[id_].active.index.to_bytes()
    store.close()
    (stored,) = tmp_path.glob("t-0/*.index")
    assert stored.read_bytes() == index
    assert verify(str(tmp_path)).findings == []
    store = opened()
    assert store.partitions[id_].active.index.to_bytes() == index
    assert store.partitions[id_].state_is_stored
    store.close()


# ---- many partitions -------------------------------------------------------------------------


class CountedFile(OsFile):
    """Counts its syncs for the disk."""

    __slots__ = ("_disk",)

    def __init__(self, fd: int, path: str, disk: CountingDisk) -> None:
        super().__init__(fd, path)
        self._disk = disk

    def sync(self) -> None:
        self._disk.file_syncs += self.path.endswith(".log")
        if self._disk.broken_log and self._disk.broken_log in self.path:
            raise StorageError("the disk is broken")
        super().sync()


class Together:
    """The disk's way to sync everything at once."""

    def __init__(self, disk: CountingDisk) -> None:
        self._disk = disk

    def sync(self) -> None:
        self._disk.bulk_syncs += 1
        if self._disk.broken:
            raise StorageError("the disk is broken")

    def covers(self, path: str) -> bool:
        return os.path.basename(path) not in self._disk.elsewhere

    def close(self) -> None:
        """Nothing is held."""


class CountingDisk(OsDisk):
    """The real disk; how logs were synced, one by one and all at once."""

    def __init__(self) -> None:
        self.file_syncs = 0
        self.bulk_syncs = 0
        self.broken = False
        self.broken_log = ""
        # Folders on another device.
        self.elsewhere: set[str] = set()

    def open(self, path: str, *, create: bool = False) -> OsFile:
        plain = super().open(path, create=create)
        counted = CountedFile(os.dup(plain.fileno()), path, self)
        plain.close()
        return counted

    def bulk_sync(self, folder: str) -> Together:
        return Together(self)


def many(folder: Path, disk: CountingDisk, count: int) -> LogStore:
    store = LogStore(str(folder), disk, ManualClock())
    store.open()
    config = TopicConfig(durability="os")
    for number in range(count):
        store.load(PartitionId("t", number), config, topic_id=TOPIC_ID)
    return store


def test_many_unsynced_partitions_are_synced_at_once_and_few_one_by_one(tmp_path: Path) -> None:
    disk = CountingDisk()
    store = many(tmp_path, disk, MANY)
    for partition in store.partitions.values():
        partition.append(batch("x"))
    assert store.close()
    assert (disk.file_syncs, disk.bulk_syncs) == (0, 1)
    store = many(tmp_path, disk, MANY)
    assert store.was_clean
    # A start opens none of the logs.
    assert not any(partition.active.is_open for partition in store.partitions.values())
    for number in range(3):
        store.partitions[PartitionId("t", number)].append(batch("y"))
    assert store.close()
    assert (disk.file_syncs, disk.bulk_syncs) == (3, 1)
    store = many(tmp_path, disk, MANY)
    assert [len(texts(p)) for p in store.partitions.values()] == [2] * 3 + [1] * (MANY - 3)
    assert store.close()
    assert (disk.file_syncs, disk.bulk_syncs) == (3, 1)


def test_what_lies_on_another_device_is_not_synced_with_the_rest(tmp_path: Path) -> None:
    disk = CountingDisk()
    disk.elsewhere = {"t-3", "t-5"}
    store = many(tmp_path, disk, MANY)
    for partition in store.partitions.values():
        partition.append(batch("x"))
    assert store.close()
    assert (disk.file_syncs, disk.bulk_syncs) == (2, 1)


def test_a_folder_that_is_there_is_not_synced_later_with_new_ones(tmp_path: Path) -> None:
    disk = CountingDisk()
    store = many(tmp_path, disk, 0)
    (tmp_path / "t-1").mkdir()
    making = store.disk_for_new(MANY)
    assert making is not None
    for number in range(2):
        id_ = PartitionId("t", number)
        partition = store.load(id_, TopicConfig(), topic_id=TOPIC_ID, disk=making)
        assert (partition.disk is making) == (number == 0)
    making.sync_all()
    store.made_on(making, store.partitions)
    assert store.close()


def test_a_failure_of_the_file_system_is_not_taken_for_one_of_each_log(tmp_path: Path) -> None:
    """It may be about another program's file, long ago: each log is asked by itself."""
    disk = CountingDisk()
    store = many(tmp_path, disk, MANY)
    for partition in store.partitions.values():
        partition.append(batch("x"))
    disk.broken = True
    assert store.close()
    assert (disk.file_syncs, disk.bulk_syncs) == (MANY, 1)
    store = many(tmp_path, disk, MANY)
    assert store.was_clean
    assert [texts(p) for p in store.partitions.values()] == [["x"]] * MANY
    store.close()


def test_a_stop_that_cannot_sync_is_not_clean_and_says_where(tmp_path: Path) -> None:
    disk = CountingDisk()
    store = many(tmp_path, disk, MANY)
    for partition in store.partitions.values():
        partition.append(batch("x"))
    disk.broken, disk.broken_log = True, "/t-7/"
    assert not store.close()
    assert not (tmp_path / CLEAN_MARKER).exists()
    # The next start writes again what may be in the page cache only.
    assert [p.parent.name for p in tmp_path.glob(f"*/{FAILED_SYNC_MARK}")] == ["t-7"]


def test_once_a_sync_of_everything_has_failed_each_log_is_asked_by_itself(tmp_path: Path) -> None:
    """A failure is told once: a later success says nothing of what was written before."""
    disk = CountingDisk()
    store = many(tmp_path, disk, MANY)
    for partition in store.partitions.values():
        partition.append(batch("x"))
    disk.broken = True
    making = store.disk_for_new(MANY)
    assert making is not None
    with pytest.raises(StorageError):
        making.sync_all()
    disk.broken = False
    assert store.disk_for_new(MANY) is None
    assert store.close()
    assert (disk.file_syncs, disk.bulk_syncs) == (MANY, 1)


# ---- files that are not open -----------------------------------------------------------------


def open_logs(partition: Partition) -> int:
    return sum(segment.is_open for segment in partition.segments)


def test_idle_logs_are_closed_once_all_is_synced_and_opened_again_when_needed() -> None:
    engine = Engine()
    engine.write(*numbered(range(30)))
    partition = engine.partition
    held = partition.read(0, 500)
    for _ in range(2):
        release_unused_files(partition)
    assert open_logs(partition) == 0
    # Who reads goes on with what it has.
    assert held is not None
    assert texts(partition) == numbered(range(30))
    partition.append(batch("more"))
    for _ in range(2):
        release_unused_files(partition)
    assert open_logs(partition), "its records are not synced"
    engine.sync()
    for _ in range(2):
        release_unused_files(partition)
    assert open_logs(partition) == 0
    assert texts(engine.reopen()) == [*numbered(range(30)), "more"]


def test_a_log_that_is_not_open_is_never_taken_for_another_of_its_name() -> None:
    disk = SimulatedDisk()
    store = LogStore(FOLDER, disk, ManualClock())
    store.open()
    old = store.load(ID, TopicConfig(), topic_id=TOPIC_ID)
    old.append(batch("old"))
    plan = old.plan_sync()
    plan.run()
    old.finish_sync(plan)
    old.active.park()
    store.delete(ID)
    new = store.load(ID, TopicConfig(), topic_id=uuid.UUID(int=6))
    new.append(batch("new"))
    for _ in range(2):
        with pytest.raises(StorageError):
            old.read(0, 500)
        old.active.park()


def test_no_more_logs_are_open_than_may_be_but_those_that_are_not_synced(tmp_path: Path) -> None:
    store = LogStore(str(tmp_path), CountingDisk(), ManualClock(), most_open_logs=10)
    store.open()
    config = TopicConfig(durability="os")
    partitions = [
        store.load(PartitionId("t", number), config, topic_id=TOPIC_ID) for number in range(MANY)
    ]

    def open_now() -> int:
        return sum(map(open_logs, partitions))

    most = 0
    for partition in partitions:
        partition.append(batch("x"))
        plan = partition.plan_sync(active_too=True)
        plan.run()
        partition.finish_sync(plan)
        most = max(most, open_now())
    assert 5 < most <= 14
    for partition in partitions:
        assert texts(partition) == ["x"]
        assert open_now() <= 14
    for partition in partitions[:50]:
        partition.append(batch("y"))
    # None of these may be closed, whatever the limit.
    assert 50 <= open_now() <= 64
    # But their closed segments may.
    for partition in partitions[50:]:
        for _ in range(2):
            partition.append(batch("z"))
            partition.roll()
        plan = partition.plan_sync()
        plan.run()
        partition.finish_sync(plan)
        assert texts(partition) == ["x", "z", "z"]
        assert open_now() <= 70
    assert store.close()
    assert len(texts(many(tmp_path, CountingDisk(), MANY).partitions[PartitionId("t", 0)])) == 2


class FewFiles(OsDisk):
    """The real disk, on which a process may have only so many logs open."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.logs = weakref.WeakSet[CountedLog]()

    def open(self, path: str, *, create: bool = False) -> OsFile:
        plain = super().open(path, create=create)
        if not path.endswith(".log"):
            return plain
        if self.count() >= self.most:
            raise storage_error(OSError(errno.EMFILE, "Too many open files"), f"opening {path}")
        counted = CountedLog(os.dup(plain.fileno()), path)
        self.logs.add(counted)
        return counted

    def count(self) -> int:
        return sum(file.fileno() >= 0 for file in self.logs)


class CountedLog(OsFile):
    """One that is counted as long as it is there."""

    __slots__ = ("__weakref__",)


@pytest.mark.parametrize("snapshots", [True, False])
@pytest.mark.parametrize("clean", [True, False])
def test_a_start_needs_few_open_files(tmp_path: Path, clean: bool, snapshots: bool) -> None:
    disk = FewFiles(1000)
    id_, config = PartitionId("t", 0), TopicConfig(segment_bytes=1000)
    store = LogStore(str(tmp_path), disk, ManualClock())
    store.open()
    partition = store.load(id_, config, topic_id=TOPIC_ID)
    for text in numbered(range(100)):
        partition.append(batch(text))
    plan = partition.plan_sync()
    plan.run()
    partition.finish_sync(plan)
    assert len(partition.segments) > 10
    before = texts(partition)
    if clean:
        store.close()
        (tmp_path / STATES_FILE).unlink()
    else:
        store.checkpoint()
        store.abandon()
    del store, partition, plan
    if not snapshots:
        for path in tmp_path.glob("t-0/*.snapshot"):
            path.unlink()
    disk.most = 3
    store = LogStore(str(tmp_path), disk, ManualClock(), most_open_logs=2)
    store.open()
    partition = store.load(id_, config, topic_id=TOPIC_ID)
    assert not disk.count()
    assert texts(partition) == before
    store.close()


def test_without_a_file_to_open_a_write_is_refused_and_the_partition_goes_on(
    tmp_path: Path,
) -> None:
    disk = FewFiles(1000)
    store = LogStore(str(tmp_path), disk, ManualClock())
    store.open()
    id_, config = PartitionId("t", 0), TopicConfig()
    partition = store.load(id_, config, topic_id=TOPIC_ID)
    partition.append(batch("a", producer=(1, 0, 0)))
    plan = partition.plan_sync()
    plan.run()
    partition.finish_sync(plan)
    del plan
    partition.active.park()
    disk.most = 0
    for _ in range(2):
        with pytest.raises(StorageError, match="Too many open files"):
            partition.append(batch("b", producer=(1, 0, 1)))
        assert partition.is_healthy
        assert partition.is_synced
        assert partition.log_end == 1
    disk.most = 1
    # As if it had not been sent before.
    assert partition.append(batch("b", producer=(1, 0, 1))) == 1
    assert store.close()
    store = LogStore(str(tmp_path), disk, ManualClock())
    store.open()
    assert texts(store.load(id_, config, topic_id=TOPIC_ID)) == ["a", "b"]
    store.close()


def test_what_is_about_to_be_replaced_stays_open() -> None:
    engine = Engine()
    engine.write(*numbered(range(30)))
    first, second, *_ = engine.partition.closed
    old = (first.base_offset, second.base_offset)
    swap = Swap(engine.partition, [Replacement(old[:1], old)])
    assert swap.valid
    swap.prepare()
    for _ in range(2):
        release_unused_files(engine.partition)
    assert [s.is_open for s in engine.partition.segments[:3]] == [True, True, False]
