"""Opening a partition: what is believed, what is checked, what is cut off, what is refused."""

from __future__ import annotations

import pytest

from penstock.errors import StorageError
from penstock.log.producers import snapshot_path, write_snapshot
from penstock.records.batch import Buffer, patch
from penstock.testing.faults import SimulatedCrash, SimulatedDisk
from tests.log.engine import (
    FOLDER,
    ID,
    PARTITION_FOLDER,
    SMALL,
    Engine,
    batch,
    numbered,
    read,
    texts,
)

WORDS = numbered(range(30))


def put(disk: SimulatedDisk, path: str, data: Buffer, position: int) -> None:
    """Write into a file behind the engine's back, durably."""
    file = disk.open(path)
    file.pwritev([data], position)
    file.sync()
    file.close()


def cut(disk: SimulatedDisk, path: str, size: int) -> None:
    file = disk.open(path)
    file.truncate(size)
    file.sync()
    file.close()


# ---- after a clean stop ------------------------------------------------------------------------


def test_a_clean_stop_and_start() -> None:
    engine = Engine()
    engine.write(*WORDS)
    indexes = [segment.index.to_bytes() for segment in engine.partition.segments]
    partition = engine.reopen()
    assert engine.store.was_clean
    assert texts(partition) == WORDS
    assert [segment.index.to_bytes() for segment in partition.segments] == indexes
    engine.write("more")
    assert texts(engine.reopen()) == [*WORDS, "more"]


def test_a_clean_start_reads_no_records() -> None:
    engine = Engine()
    engine.write(*WORDS)
    engine.store.close()
    for name in engine.names(".log")[:-1]:
        engine.disk.fail("read", nth=2, times=-1, path_part=name)
    assert engine.open().log_end == 30


def test_the_marker_is_gone_while_the_store_is_open() -> None:
    engine = Engine()
    engine.write("a")
    engine.reopen()
    assert engine.store.was_clean
    assert texts(engine.lose_power()) == ["a"]
    assert not engine.store.was_clean


def test_producers_survive_a_clean_stop() -> None:
    engine = Engine()
    for sequence in range(7):
        engine.partition.append(batch(WORDS[sequence], producer=(1, 0, sequence)))
    engine.sync()
    assert len(engine.partition.segments) > 1
    before = engine.partition.producers.by_id[1].batches
    for _ in range(2):
        assert engine.reopen().producers.by_id[1].batches == before


@pytest.mark.parametrize("suffix", [".index", ".timeindex", ".digest", ".snapshot"])
def test_what_is_made_from_the_log_can_be_lost(suffix: str) -> None:
    engine = Engine()
    for number, word in enumerate(WORDS):
        engine.partition.append(
            batch(word, producer=(1, 0, number), timestamp_ms=engine.clock.advance(5))
        )
    engine.sync()
    times = [record.timestamp_ms for record in read(engine.partition)]
    engine.store.close()
    for name in engine.names(suffix):
        engine.disk.remove(engine.path(name))
    partition = engine.open()
    assert texts(partition) == WORDS
    assert len(partition.producers.by_id[1].batches) == 5
    for offset in range(0, 30, 4):
        found = partition.offset_for_time(times[offset])
        assert found is not None
        assert found.offset == offset


# ---- after a crash -----------------------------------------------------------------------------


def test_a_torn_tail_is_cut_at_every_byte() -> None:
    engine = Engine()
    engine.write("a", "b")
    engine.write("c", sync=False)
    partition = engine.partition
    whole = partition.active.size
    safe = [header for _, header in partition.active.scan(0)][:2]
    for size in range(sum(header.size for header in safe), whole + 1):
        torn = Engine()
        torn.write("a", "b")
        torn.write("c", sync=False)
        cut(torn.disk, torn.path("00000000000000000000.log"), size)
        found = torn.kill()
        assert texts(found) == (["a", "b", "c"] if size == whole else ["a", "b"])
        torn.write("d")
        assert texts(torn.lose_power())[-1] == "d"


def test_garbage_behind_the_last_batch_is_cut() -> None:
    engine = Engine()
    engine.write("a")
    end = engine.partition.active.size
    for garbage in (b"\x00" * 500, b"\xff" * 500, bytes(range(256)) * 2, batch("stale")):
        put(engine.disk, engine.path("00000000000000000000.log"), garbage, end)
        partition = engine.kill()
        assert texts(partition) == ["a"]
        assert partition.active.file.size() == end


@pytest.mark.parametrize("offset", [0, 2, 1 << 40])
def test_a_batch_in_the_wrong_place_is_not_believed(offset: int) -> None:
    """Its offset is not under its checksum: it may be torn while the rest is whole."""
    engine = Engine()
    engine.write("a")
    stray = bytearray(batch("b"))
    patch(stray, 0, offset, 0)
    put(engine.disk, engine.path("00000000000000000000.log"), stray, engine.partition.active.size)
    partition = engine.kill()
    assert texts(partition) == ["a"]
    assert partition.log_end == 1


def test_a_batch_of_the_wrong_epoch_is_not_believed() -> None:
    engine = Engine()
    engine.write("a")
    for epoch in (5, -1):
        stray = bytearray(batch("b"))
        patch(stray, 0, 1, epoch)
        end = engine.partition.active.size
        put(engine.disk, engine.path("00000000000000000000.log"), stray, end)
        assert texts(engine.kill()) == ["a"]


def test_a_segment_behind_a_lost_tail_goes_too() -> None:
    engine = Engine()
    engine.write("a")
    engine.write("b", sync=False)
    kept = engine.partition.active.size
    engine.write("c", sync=False)
    engine.partition.roll()
    engine.write("d", sync=False)
    # "c" was lost between two batches: both files are whole, but they do not fit together.
    cut(engine.disk, engine.path("00000000000000000000.log"), kept)
    assert texts(engine.kill()) == ["a", "b"]
    assert engine.names(".log") == ["00000000000000000000.log"]
    engine.write("C", "D")
    assert texts(engine.lose_power()) == ["a", "b", "C", "D"]


def test_what_a_killed_process_left_is_synced_before_it_counts() -> None:
    engine = Engine()
    engine.write(*WORDS, sync=False)
    assert engine.partition.visible == 0
    partition = engine.kill()
    assert partition.visible == 30
    assert texts(engine.lose_power()) == WORDS
    assert len(engine.partition.closed) == len(engine.partition.segments) - 1


def test_producers_of_deleted_records_are_remembered_after_a_crash() -> None:
    engine = Engine()
    engine.partition.append(batch("early", producer=(1, 0, 0)))
    engine.write(*WORDS, sync=False)
    # None of the segments has its snapshot when the process ends.
    partition = engine.kill()
    partition.delete_before(partition.segments[2].base_offset)
    engine.store.checkpoint()
    gone = partition.segments[:2]
    partition.replace_segments(gone)
    for segment in gone:
        segment.remove()
    for restart in (engine.kill, engine.reopen, engine.lose_power):
        partition = restart()
        assert partition.producers.check(1, 0, 0, 0) is not None
        assert partition.producers.check(1, 0, 1, 1) is None


def test_only_what_may_be_torn_is_read() -> None:
    engine = Engine()
    engine.write(*WORDS)
    active = engine.names(".log")[-1]
    engine.disk.crash(power_loss=False)
    engine.disk = engine.disk.after_crash()
    for name in engine.names(".log"):
        if name != active:
            engine.disk.fail("read", nth=2, times=-1, path_part=name)
    # No checkpoint was written: the snapshots say how far it was safe.
    assert engine.open().log_end == 30


def test_epochs_of_records_that_are_gone_are_gone() -> None:
    engine = Engine()
    engine.write("a")
    engine.kill()
    engine.write("b", sync=False)
    assert engine.partition.epochs.entries == [(0, 0), (1, 1)]
    cut(engine.disk, engine.path("00000000000000000000.log"), engine.partition.active.size - 1)
    assert engine.kill().epochs.entries == [(0, 0)]
    engine.write("c")
    assert engine.partition.epochs.entries == [(0, 0), (2, 1)]
    assert engine.reopen().epochs.entries == [(0, 0), (2, 1)]


def test_epochs_are_found_again_in_the_records() -> None:
    engine = Engine()
    for word in ("a", "b", "c"):
        engine.write(word)
        engine.kill()
    engine.disk.remove(engine.path("leader-epoch-checkpoint"))
    partition = engine.kill()
    assert texts(partition) == ["a", "b", "c"]
    assert partition.epochs.entries == [(0, 0), (1, 1), (2, 2)]


def test_epochs_never_fall() -> None:
    engine = Engine()
    engine.epoch = 9
    engine.reopen()
    engine.write("a")
    engine.epoch = 3
    assert engine.reopen().leader_epoch == 9
    engine.write("b")
    engine.epoch = 3
    assert texts(engine.kill()) == ["a", "b"]


def test_leftovers_are_removed() -> None:
    engine = Engine()
    engine.write("a")
    for name in ("00000000000000000007.index", "00000000000000000007.snapshot.tmp", "x.tmp"):
        engine.disk.open(engine.path(name), create=True).close()
    engine.kill()
    assert [name for name in engine.names() if "7" in name or "tmp" in name] == []


def test_a_crash_while_recovering() -> None:
    for nth in range(1, 40):
        engine = Engine(disk=SimulatedDisk(nth))
        engine.write(*WORDS[:12])
        engine.write(*WORDS[12:], sync=False)
        engine.disk.crash(power_loss=nth % 2 == 0)
        engine.disk = engine.disk.after_crash()
        engine.disk.crash_at(nth)
        try:
            engine.open()
        except SimulatedCrash:
            engine.disk.crash(power_loss=nth % 3 == 0)
            engine.recover()
        found = texts(engine.partition)
        assert found[:12] == WORDS[:12]
        assert found == WORDS[: len(found)]


def test_a_sync_that_fails_while_recovering_is_not_forgotten() -> None:
    for seed in range(10):
        engine = Engine(disk=SimulatedDisk(seed))
        engine.write("a", "b", sync=False)
        engine.disk.crash(power_loss=False)
        engine.disk = engine.disk.after_crash()
        engine.disk.fail("sync", path_part=".log")
        with pytest.raises(StorageError):
            engine.open()
        assert texts(engine.kill()) == ["a", "b"]
        assert texts(engine.lose_power()) == ["a", "b"]


def test_records_below_the_start_of_the_log_may_be_missing() -> None:
    engine = Engine()
    engine.config = SMALL
    engine.write("a", "b", "c")
    engine.partition.delete_before(3)
    engine.store.checkpoint()
    cut(engine.disk, engine.path("00000000000000000000.log"), 0)
    partition = engine.kill()
    assert not partition.damaged
    assert (partition.log_start, partition.log_end) == (3, 3)
    engine.write("d")
    engine.partition.roll()
    engine.write("e")
    assert texts(engine.lose_power()) == ["d", "e"]


# ---- damage ------------------------------------------------------------------------------------


def damaged_engine(position: int, *, checkpoint: bool) -> tuple[Engine, dict[str, bytes]]:
    """Three synced batches in one segment, and a byte that changes after a crash."""
    engine = Engine()
    engine.write("a", "b", "c")
    if checkpoint:
        engine.store.checkpoint()
    engine.disk.damage(engine.path("00000000000000000000.log"), position)
    return engine, engine.log_bytes()


def test_damage_below_the_recovery_point_is_not_a_torn_tail() -> None:
    size = len(batch("a"))
    engine, before = damaged_engine(size + 40, checkpoint=True)
    for restart in (engine.kill, engine.lose_power, engine.reopen, engine.kill):
        partition = restart()
        assert partition.damaged
        assert texts(partition) == ["a"], "what is sound can be read"
        assert engine.log_bytes() == before, "every byte is kept"
        with pytest.raises(StorageError, match="damaged"):
            engine.write("d")
        partition.repair()
        assert partition.failure is not None, "a repair must not cut it off"
        assert partition.closed == []
        assert partition.recovery_point == 3
    # A person puts the byte right.
    engine.disk.damage(engine.path("00000000000000000000.log"), size + 40)
    assert texts(engine.kill()) == ["a", "b", "c"]
    engine.write("d")
    assert texts(engine.partition) == ["a", "b", "c", "d"]


def test_damage_above_the_recovery_point_cannot_be_told_from_a_torn_tail() -> None:
    engine, _ = damaged_engine(len(batch("a")) + 40, checkpoint=False)
    partition = engine.kill()
    assert not partition.damaged
    assert texts(partition) == ["a"]


def test_damage_in_a_segment_that_was_finished_is_known_without_a_checkpoint() -> None:
    engine = Engine()
    engine.write(*WORDS)
    last = engine.partition.active
    # The last segment's first record: a snapshot stands before it, and a clean stop after it.
    engine.reopen()
    engine.disk.damage(engine.path(f"{last.base_offset:020d}.log"), 80)
    partition = engine.kill()
    assert partition.damaged
    assert partition.log_end == last.base_offset
    assert texts(partition) == WORDS[: last.base_offset]


@pytest.mark.parametrize("clean", [False, True])
def test_records_that_are_missing_are_damage_too(clean: bool) -> None:
    engine = Engine()
    engine.write("a", "b", "c")
    engine.store.checkpoint()
    size = engine.partition.active.size
    if clean:
        engine.store.close()
    cut(engine.disk, engine.path("00000000000000000000.log"), size - len(batch("c")))
    partition = engine.open() if clean else engine.kill()
    assert partition.damaged
    assert texts(partition) == ["a", "b"]


@pytest.mark.parametrize("clean", [False, True])
def test_a_partition_that_lost_all_its_files(clean: bool) -> None:
    engine = Engine()
    engine.write("a", "b", "c")
    engine.store.checkpoint()
    if clean:
        engine.store.close()
    for name in engine.disk.names(PARTITION_FOLDER):
        engine.disk.remove(engine.path(name))
    partition = engine.open() if clean else engine.kill()
    assert partition.damaged
    # Even then no offset is given out twice.
    assert partition.log_end == 3


@pytest.mark.parametrize("clean", [False, True])
def test_a_partition_whose_folder_was_taken_away_begins_anew(clean: bool) -> None:
    engine = Engine()
    engine.write("a", "b", "c")
    engine.store.checkpoint()
    if clean:
        engine.store.close()
    engine.disk.remove_tree(PARTITION_FOLDER)
    partition = engine.open() if clean else engine.kill()
    assert partition.failure is None
    assert (partition.log_start, partition.log_end) == (3, 3)
    assert partition.append(batch("d")) == 3


def test_the_last_segment_is_missing() -> None:
    engine = Engine()
    engine.write(*WORDS)
    engine.store.checkpoint()
    engine.disk.remove(engine.path(engine.names(".log")[-1]))
    partition = engine.kill()
    assert partition.damaged
    assert texts(partition) == WORDS[: partition.log_end]


def test_one_damaged_partition_does_not_concern_the_store() -> None:
    engine, _ = damaged_engine(30, checkpoint=True)
    engine.kill()
    assert engine.store.partitions[ID].damaged
    engine.store.close()
    assert "clean-shutdown" not in engine.disk.names(FOLDER)


def test_a_stale_snapshot_is_not_taken_for_a_newer_one() -> None:
    engine = Engine()
    engine.partition.append(batch("a", producer=(1, 0, 0)))
    engine.sync()
    engine.reopen()
    stored = snapshot_path(PARTITION_FOLDER, 1)
    # As an earlier version left it.
    write_snapshot(engine.disk, PARTITION_FOLDER, 1, engine.partition.producers)
    engine.partition.append(batch("b", producer=(1, 0, 1)))
    engine.sync()
    partition = engine.kill()
    assert partition.producers.by_id[1].batches[-1].last_sequence == 1
    engine.reopen()
    assert not engine.disk.exists(stored), "a clean stop tidies up"
