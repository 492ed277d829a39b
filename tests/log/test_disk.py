"""One contract for the real disk and the simulated one."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import DiskFullError, StorageError
from penstock.log import disk as disk_module
from penstock.log.disk import (
    Disk,
    OsDisk,
    OsFile,
    file_system_type,
    make_dirs_durably,
    read_whole,
    storage_error,
    write_atomically,
)
from penstock.testing.faults import SimulatedDisk

_SYNCS_AS_A_WHOLE = disk_module._syncfs is not None


@pytest.mark.skipif(not _SYNCS_AS_A_WHOLE, reason="there is no syncfs that tells of errors")
def test_only_file_systems_that_are_known_are_synced_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "file_system_type", lambda _: 0xEF53)
    whole = OsDisk().bulk_sync(str(tmp_path))
    assert whole is not None
    (tmp_path / "inside").mkdir()
    (tmp_path / "elsewhere").symlink_to("/proc")
    assert whole.covers(str(tmp_path / "inside"))
    assert not whole.covers(str(tmp_path / "elsewhere"))
    assert not whole.covers(str(tmp_path / "gone"))
    whole.close()
    # FUSE, as statfs(2) has it; and a disk that does not say what it is.
    for unknown in (0x65735546, None):
        monkeypatch.setattr(disk_module, "file_system_type", lambda _, found=unknown: found)
        assert OsDisk().bulk_sync(str(tmp_path)) is None


@pytest.mark.skipif(sys.platform != "linux", reason="there is no such number")
def test_the_kind_of_a_file_system_is_what_the_system_calls_it(tmp_path: Path) -> None:
    # Of /proc the kernel's manual says this number.
    assert file_system_type("/proc") == 0x9FA0
    assert file_system_type(str(tmp_path / "gone")) is None


@pytest.fixture(params=["real", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Disk, str]]:
    """A disk and an empty folder on it."""
    if request.param == "real":
        yield OsDisk(), str(tmp_path)
    else:
        disk = SimulatedDisk()
        disk.make_dirs("/tmp/place")
        yield disk, "/tmp/place"


def test_files(place: tuple[Disk, str]) -> None:
    disk, folder = place
    path = f"{folder}/file"
    assert not disk.exists(path)
    with pytest.raises(StorageError):
        disk.open(path)
    file = disk.open(path, create=True)
    assert file.size() == 0
    file.pwritev([b"one", bytearray(b"two"), memoryview(b"three")], 0)
    assert file.pread(100, 0) == b"onetwothree"
    assert file.pread(3, 3) == b"two"
    assert file.pread(3, 50) == b""
    file.pwritev([b"gap"], 20)
    assert file.pread(100, 9) == b"ee" + bytes(9) + b"gap"
    file.truncate(6)
    assert (file.size(), file.pread(100, 0)) == (6, b"onetwo")
    file.truncate(8)
    assert file.pread(100, 0) == b"onetwo\x00\x00"
    file.sync()
    # A second handle sees the same; an existing file is not emptied.
    other = disk.open(path, create=True)
    assert other.pread(3, 0) == b"one"
    file.close()
    file.close()
    with pytest.raises(StorageError):
        file.pread(1, 0)
    with pytest.raises(StorageError):
        file.pwritev([b"x"], 0)
    with pytest.raises(StorageError):
        file.sync()
    other.close()


def test_many_buffers_in_one_write(place: tuple[Disk, str]) -> None:
    disk, folder = place
    file = disk.open(f"{folder}/file", create=True)
    buffers = [bytes([at % 251]) * (at % 7) for at in range(5000)]
    file.pwritev(buffers, 3)
    assert file.pread(1 << 20, 3) == b"".join(buffers)


def test_names(place: tuple[Disk, str]) -> None:
    disk, folder = place
    for name in ("b", "a", "c"):
        write_atomically(disk, f"{folder}/{name}", name.encode())
    assert disk.names(folder) == ["a", "b", "c"]
    disk.rename(f"{folder}/a", f"{folder}/b")
    assert disk.names(folder) == ["b", "c"]
    assert read_whole(disk, f"{folder}/b") == b"a"
    with pytest.raises(StorageError):
        disk.rename(f"{folder}/a", f"{folder}/d")
    held = disk.open(f"{folder}/c")
    disk.remove(f"{folder}/c")
    disk.remove(f"{folder}/c")
    assert disk.names(folder) == ["b"]
    assert held.pread(5, 0) == b"c"
    disk.sync_dir(folder)
    with pytest.raises(StorageError):
        disk.names(f"{folder}/nowhere")
    with pytest.raises(StorageError):
        disk.sync_dir(f"{folder}/nowhere")
    with pytest.raises(StorageError):
        disk.open(f"{folder}/nowhere/file", create=True)


def test_folders(place: tuple[Disk, str]) -> None:
    disk, folder = place
    make_dirs_durably(disk, f"{folder}/x/y/z")
    make_dirs_durably(disk, f"{folder}/x/y/z")
    write_atomically(disk, f"{folder}/x/y/file", b"1")
    disk.rename(f"{folder}/x", f"{folder}/w")
    assert read_whole(disk, f"{folder}/w/y/file") == b"1"
    assert disk.names(f"{folder}/w/y") == ["file", "z"]
    disk.remove_tree(f"{folder}/w")
    disk.remove_tree(f"{folder}/w")
    assert disk.names(folder) == []
    with pytest.raises(StorageError):
        disk.make_dirs(f"{folder}/f/g") if _blocked(disk, folder) else None


def _blocked(disk: Disk, folder: str) -> bool:
    write_atomically(disk, f"{folder}/f", b"not a folder")
    return True


def test_locks(place: tuple[Disk, str]) -> None:
    disk, folder = place
    release = disk.lock(f"{folder}/.lock")
    assert release is not None
    assert disk.lock(f"{folder}/.lock") is None
    release()
    again = disk.lock(f"{folder}/.lock")
    assert again is not None
    again()
    with pytest.raises(StorageError):
        disk.lock(f"{folder}/nowhere/.lock")


def test_a_replaced_file_is_small_again(place: tuple[Disk, str]) -> None:
    disk, folder = place
    for data in (b"a long text", b"", b"short"):
        write_atomically(disk, f"{folder}/file", data)
        assert read_whole(disk, f"{folder}/file") == data
    assert disk.names(folder) == ["file"]


def test_errors_say_whether_the_disk_is_full() -> None:
    full = storage_error(OSError(errno.ENOSPC, "No space left"), "writing x")
    assert isinstance(full, DiskFullError)
    assert full.retriable
    assert full.advice
    quota = storage_error(OSError(errno.EDQUOT, "Quota exceeded"), "writing x")
    assert isinstance(quota, DiskFullError)
    broken = storage_error(OSError(errno.EIO, "Input/output error"), "writing x")
    assert not isinstance(broken, DiskFullError)
    assert "writing x" in str(broken)


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = OsDisk().open(str(tmp_path / "file"), create=True)
    whole = os.pwritev

    def short(fd: int, buffers: list[bytes], position: int) -> int:
        return whole(fd, [b"".join(buffers)[:3]], position)

    monkeypatch.setattr(os, "pwritev", short)
    file.pwritev([b"one", b"two", b"three"], 5)
    assert file.pread(100, 5) == b"onetwothree"


def test_a_really_full_disk() -> None:
    """Linux has a device that is always full."""
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    file = OsFile(os.open("/dev/full", os.O_RDWR), "/dev/full")
    with pytest.raises(DiskFullError):
        file.pwritev([b"x"], 0)
    file.close()
