"""Checkpoint files and leader epochs: small texts that are whole or not there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import StorageError
from penstock.log.checkpoint import parse_checkpoint, read_checkpoint, seal, write_checkpoint
from penstock.log.epochs import LeaderEpochs
from penstock.testing.faults import SimulatedCrash, SimulatedDisk
from tests.harness.profiles import CHECKPOINT_DISKS, examples


def disk_with_folder() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_dirs("/p")
    disk.sync_dir("/")
    return disk


rows = st.lists(st.tuples(st.sampled_from(("a", "orders")), st.integers(0, 9), st.integers(0)))


@settings(max_examples=examples(50))
@given(rows)
def test_rows_there_and_back(written: list[tuple[str, int, int]]) -> None:
    disk = disk_with_folder()
    write_checkpoint(disk, "/p/file", written)
    assert read_checkpoint(disk, "/p/file", 3) == [[str(x) for x in row] for row in written]
    assert not written or read_checkpoint(disk, "/p/file", 2) is None


def test_no_changed_byte_passes() -> None:
    disk = disk_with_folder()
    write_checkpoint(disk, "/p/file", [("orders", 0, 123), ("orders", 1, 7)])
    file = disk.open("/p/file")
    data = file.pread(file.size(), 0)
    assert parse_checkpoint(data, 3) is not None
    for at in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= mask
            assert parse_checkpoint(bytes(damaged), 3) is None
        assert parse_checkpoint(data[:at], 3) is None


@pytest.mark.parametrize("text", ["", "0\n", "1\n0\n", "0\n2\na 0 1\n", "0\n-1\n", "0\nx\n"])
def test_what_is_not_a_checkpoint(text: str) -> None:
    assert parse_checkpoint(seal(text), 3) is None


def test_an_absent_file() -> None:
    assert read_checkpoint(disk_with_folder(), "/p/file", 3) is None


def test_a_power_loss_leaves_the_old_or_the_new_one() -> None:
    seen = set()
    for seed in range(CHECKPOINT_DISKS):
        disk = SimulatedDisk(seed)
        disk.make_dirs("/p")
        disk.sync_dir("/")
        write_checkpoint(disk, "/p/file", [("old", 0, 1)])
        disk.crash_at(1 + seed % 7)
        try:
            write_checkpoint(disk, "/p/file", [("new", 0, 2)])
        except SimulatedCrash:
            found = read_checkpoint(disk.after_crash(), "/p/file", 3)
        else:
            found = read_checkpoint(disk.after_crash(), "/p/file", 3)
            assert found == [["new", "0", "2"]]
        assert found in ([["old", "0", "1"]], [["new", "0", "2"]])
        seen.add(found[0][0])
    assert seen == {"old", "new"}


# ---- leader epochs -----------------------------------------------------------------------------


def epochs_with(*entries: tuple[int, int]) -> LeaderEpochs:
    epochs = LeaderEpochs(disk_with_folder(), "/p")
    for epoch, offset in entries:
        epochs.assign(epoch, offset)
    return epochs


def test_where_an_epoch_ended() -> None:
    epochs = epochs_with((2, 0), (3, 10), (5, 20))
    # As Kafka's LeaderEpochFileCache answers.
    assert epochs.end_of(5, 33) == (5, 33)
    assert epochs.end_of(4, 33) == (3, 20)
    assert epochs.end_of(3, 33) == (3, 20)
    assert epochs.end_of(2, 33) == (2, 10)
    assert epochs.end_of(1, 33) == (1, 0)
    assert epochs.end_of(6, 33) == (-1, -1)
    assert epochs.end_of(-1, 33) == (-1, -1)
    assert epochs_with().end_of(0, 33) == (-1, -1)


def test_epochs_only_rise() -> None:
    epochs = epochs_with((2, 0), (2, 5), (1, 9), (3, 10))
    assert epochs.entries == [(2, 0), (3, 10)]
    epochs.observe(3, 12)
    epochs.observe(7, 15)
    assert epochs.entries == [(2, 0), (3, 10), (7, 15)]
    assert epochs.latest == 7


def test_which_epoch_holds_an_offset() -> None:
    epochs = epochs_with((2, 5), (3, 10))
    assert epochs.holds(2, 9)
    assert epochs.holds(3, 10)
    assert not epochs.holds(3, 9)
    assert not epochs.holds(2, 10)
    # Before what is known, anything may be.
    assert epochs.holds(1, 4)
    assert epochs_with().holds(9, 9)


def test_epochs_are_durable() -> None:
    epochs = epochs_with((2, 0), (3, 10))
    after = epochs._disk
    assert isinstance(after, SimulatedDisk)
    found = LeaderEpochs(after.after_crash(), "/p")
    found.load()
    assert found.entries == [(2, 0), (3, 10)]
    found.truncate(10)
    found.save()
    again = LeaderEpochs(found._disk, "/p")
    again.load()
    assert again.entries == [(2, 0)]


def test_an_epoch_that_cannot_be_written_has_not_begun() -> None:
    epochs = epochs_with((2, 0))
    disk = epochs._disk
    assert isinstance(disk, SimulatedDisk)
    disk.fail("sync")
    with pytest.raises(StorageError):
        epochs.assign(3, 10)
    assert epochs.latest == 2
    epochs.assign(3, 10)
    assert epochs.entries == [(2, 0), (3, 10)]


def test_a_damaged_file_of_epochs_reads_as_none() -> None:
    epochs = epochs_with((2, 0))
    disk = epochs._disk
    assert isinstance(disk, SimulatedDisk)
    disk.damage("/p/leader-epoch-checkpoint", 0)
    epochs.load()
    assert epochs.entries == []
