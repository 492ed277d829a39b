"""Durability `memory`: nothing but the offsets survives, and those are never given out twice."""

from __future__ import annotations

import os

import pytest

from penstock.errors import StorageError
from penstock.log.config import TopicConfig
from penstock.log.memory import MemoryDisk, OffsetReserve
from penstock.testing.faults import SimulatedCrash, SimulatedDisk
from tests.harness.profiles import RESERVE_DISKS
from tests.log.engine import Engine, numbered, texts

IN_MEMORY = TopicConfig(durability="memory", segment_bytes=1000, index_interval_bytes=100)


def test_records_are_there_at_once_and_gone_with_the_process() -> None:
    engine = Engine(IN_MEMORY)
    words = numbered(range(30))
    engine.write(*words, sync=False)
    partition = engine.partition
    assert texts(partition) == words
    assert len(partition.segments) > 1
    assert not partition.needs_sync
    assert engine.names(".log") == []
    partition = engine.reopen()
    assert texts(partition) == []
    # After a clean stop it goes on right where it was.
    assert (partition.log_start, partition.log_end) == (30, 30)


def test_offsets_are_never_given_out_twice() -> None:
    engine = Engine(IN_MEMORY)
    ends = []
    for crash in (engine.kill, engine.lose_power, engine.reopen, engine.kill, engine.lose_power):
        engine.write("a", "b", sync=False)
        ends.append(engine.partition.log_end)
        partition = crash()
        assert partition.log_start == partition.log_end >= ends[-1]
    engine.write("c", sync=False)
    assert texts(engine.partition) == ["c"]


def test_what_cannot_be_reserved_is_not_written() -> None:
    engine = Engine(IN_MEMORY)
    engine.disk.fail("sync")
    with pytest.raises(StorageError):
        engine.write("a", sync=False)
    assert engine.partition.log_end == 0
    engine.write("b", sync=False)
    assert texts(engine.partition) == ["b"]


def test_crashes_at_any_moment_leave_the_reserve_above() -> None:
    for seed in range(RESERVE_DISKS):
        engine = Engine(IN_MEMORY, SimulatedDisk(seed))
        engine.disk.crash_at(1 + seed % 9)
        given_out = 0
        try:
            engine.write("a", sync=False)
            given_out = 1
            engine.store.close()
        except SimulatedCrash:
            engine.disk.crash()
        assert engine.recover().log_start >= given_out


def test_many_records_need_more_than_one_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.log.memory._RESERVE_STEP", 5)
    engine = Engine(IN_MEMORY)
    for number in range(23):
        engine.write(str(number), sync=False)
        reserve = engine.partition.reserve
        assert reserve is not None
        assert engine.partition.log_end <= reserve.limit <= engine.partition.log_end + 5
    assert engine.lose_power().log_end >= 23


def test_a_damaged_reserve_is_not_guessed() -> None:
    disk = SimulatedDisk()
    disk.make_dirs("/p")
    OffsetReserve(disk, "/p").extend(17)
    assert OffsetReserve(disk, "/p").limit > 17
    disk.damage("/p/offset-reserve", 0)
    with pytest.raises(StorageError):
        OffsetReserve(disk, "/p")


def test_files_in_memory() -> None:
    disk = MemoryDisk()
    disk.make_dirs("/m")
    assert disk.exists("/m")
    with pytest.raises(StorageError):
        disk.open("/m/a")
    file = disk.open("/m/a", create=True)
    file.pwritev([b"one", b"two"], 0)
    assert disk.open("/m/a").pread(10, 0) == b"onetwo"
    disk.rename("/m/a", "/m/b")
    assert disk.names("/m") == ["b"]
    # Whoever holds it open goes on after it is removed.
    disk.remove("/m/b")
    disk.remove("/m/b")
    assert disk.names("/m") == []
    assert file.pread(3, 3) == b"two"
    assert os.fstat(file.fileno()).st_size == 6
    disk.open("/m/c", create=True)
    disk.remove_tree("/m")
    assert not disk.exists("/m/c")
    assert not disk.exists("/m")
