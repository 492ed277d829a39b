"""What the engine asks of a disk, and the real one.

The engine touches files only through `Disk` and `File`, so that tests put a disk under it that
loses unsynced writes, tears them and fails (`penstock.testing.faults`). The rules that make a
crash survivable, kept by every caller:

- written bytes are safe only after `File.sync`, a new, renamed or removed name only after
  `Disk.sync_dir` of its folder;
- after a failed `sync` nothing may be assumed of what was written since the last good one, and
  a later successful `sync` of the same file proves nothing about it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, Protocol, cast

from penstock.errors import DiskFullError, StorageError

Buffer = bytes | bytearray | memoryview

# The most buffers that one vectored write may carry on Linux and macOS.
_IOV_MAX = 1024
# Not on macOS before 11.
_pwritev: Callable[[int, Sequence[Buffer], int], int] | None = getattr(os, "pwritev", None)
_SYNCFS_TELLS_ERRORS: Final = [5, 8]
# Where syncfs(2) does for all files what fsync(2) does for one, by the number that statfs(2) gives
# to such file systems. Elsewhere it may do less: FUSE, 9p and network file systems need not pass it
# on, an overlay does not say of all errors.
_SYNCED_AS_A_WHOLE: Final = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
}
# More than `struct statfs` has anywhere.
_STATFS_BYTES: Final = 512
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


class File(Protocol):
    """An open file, read and written by position."""

    def fileno(self) -> int:
        """The descriptor for sendfile; -1 if there is none."""
        ...

    def pread(self, length: int, position: int) -> bytes: ...

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        """Write all of it or raise; after a raise any part may have been written."""
        ...

    def size(self) -> int: ...

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class BulkSync(Protocol):
    """A way to sync everything at once."""

    def sync(self) -> None:
        """What was written since this was made, where it `covers`, is safe; names included."""
        ...

    def covers(self, path: str) -> bool:
        """Whether what is there is synced with the rest: not if it lies on another device."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    """Folders and names."""

    def open(self, path: str, *, create: bool = False) -> File: ...

    def exists(self, path: str) -> bool: ...

    def names(self, folder: str) -> list[str]: ...

    def make_dirs(self, folder: str) -> None: ...

    def rename(self, source: str, target: str) -> None:
        """Atomically, replacing the target."""
        ...

    def remove(self, path: str) -> None:
        """Nothing happens if it is not there."""
        ...

    def remove_tree(self, folder: str) -> None: ...

    def sync_dir(self, folder: str) -> None: ...

    def lock(self, path: str) -> Callable[[], None] | None:
        """Hold the file against other processes; None if another has it, else the release."""
        ...

    def stamp(self, path: str) -> str | None:
        """What changes when a file is written, or a name in a folder comes or goes.

        None if there is nothing at the path, or no way to tell.
        """
        ...

    def bulk_sync(self, folder: str) -> BulkSync | None:
        """For what is written below the folder from now on; None where there is no such thing."""
        ...


def storage_error(error: OSError, doing: str) -> StorageError:
    """The engine's error for what the operating system said."""
    text = f"{doing}: {error.strerror or error}"
    return DiskFullError(text) if error.errno in _NO_SPACE else StorageError(text)


class OsFile:
    """A file of the operating system."""

    __slots__ = ("_fd", "path")

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self.path = path

    def fileno(self) -> int:
        return self._fd

    def pread(self, length: int, position: int) -> bytes:
        try:
            return os.pread(self._fd, length, position)
        except OSError as error:
            raise storage_error(error, f"reading {self.path}") from error

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        try:
            for at in range(0, len(buffers), _IOV_MAX):
                position += self._write_some(buffers[at : at + _IOV_MAX], position)
        except OSError as error:
            raise storage_error(error, f"writing {self.path}") from error

    def _write_some(self, buffers: Sequence[Buffer], position: int) -> int:
        total = sum(map(len, buffers))
        written = _pwritev(self._fd, buffers, position) if _pwritev is not None else 0
        if written < total:
            # A nearly full disk, a signal, or no vectored write here: the rest in one piece.
            rest = memoryview(b"".join(buffers))
            while written < total:
                written += os.pwrite(self._fd, rest[written:], position + written)
        return total

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise storage_error(error, f"truncating {self.path}") from error

    def sync(self) -> None:
        if self._fd < 0:
            raise StorageError(f"syncing {self.path}: the file is closed")
        try:
            _sync_descriptor(self._fd)
        except OSError as error:
            raise storage_error(error, f"syncing {self.path}") from error

    def close(self) -> None:
        # Forgotten first: a second close would hit whatever has the number by then.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # A reader may hold a file past the segment's end of life; the last one closes it.
        with contextlib.suppress(OSError):
            self.close()


class ClosedFile:
    """Stands for a file that must not be used any more."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def fileno(self) -> int:
        return -1

    def _refuse(self) -> StorageError:
        return StorageError(f"{self._path} is closed")

    def pread(self, length: int, position: int) -> bytes:
        raise self._refuse()

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        raise self._refuse()

    def size(self) -> int:
        raise self._refuse()

    def truncate(self, size: int) -> None:
        raise self._refuse()

    def sync(self) -> None:
        raise self._refuse()

    def close(self) -> None:
        """It is."""


class FileSystemSync:
    """Syncs the file system of a folder, on Linux.

    It tells of everything that failed to reach the disk since the descriptor was opened.
    """

    def __init__(self, folder: str, syncfs: Callable[[int], int]) -> None:
        self._folder = folder
        self._syncfs = syncfs
        self._fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        self._device = os.fstat(self._fd).st_dev

    def covers(self, path: str) -> bool:
        try:
            return os.stat(path).st_dev == self._device
        except OSError:
            return False

    def sync(self) -> None:
        if self._syncfs(self._fd) != 0:
            number = ctypes.get_errno()
            raise storage_error(OSError(number, os.strerror(number)), f"syncing {self._folder}")

    def close(self) -> None:
        os.close(self._fd)


class OsDisk:
    """The file system of the operating system."""

    # Told of each file that is about to be opened: a process may have only so many.
    opening: Callable[[str], None] | None = None

    def open(self, path: str, *, create: bool = False) -> OsFile:
        if self.opening is not None:
            self.opening(path)
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        try:
            return OsFile(os.open(path, flags, 0o644), path)
        except OSError as error:
            raise storage_error(error, f"opening {path}") from error

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except OSError as error:
            raise storage_error(error, f"listing {folder}") from error

    def make_dirs(self, folder: str) -> None:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise storage_error(error, f"creating {folder}") from error

    def rename(self, source: str, target: str) -> None:
        try:
            os.replace(source, target)
        except OSError as error:
            raise storage_error(error, f"renaming {source}") from error

    def remove(self, path: str) -> None:
        try:
            os.remove(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(error, f"removing {path}") from error

    def remove_tree(self, folder: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def sync_dir(self, folder: str) -> None:
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise storage_error(error, f"opening {folder}") from error
        try:
            os.fsync(fd)
        except OSError as error:
            raise storage_error(error, f"syncing {folder}") from error
        finally:
            os.close(fd)

    def lock(self, path: str) -> Callable[[], None] | None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise storage_error(error, f"opening {path}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        return lambda: os.close(fd)

    def stamp(self, path: str) -> str | None:
        try:
            found = os.stat(path)
        except OSError:
            return None
        return f"{found.st_ino}.{found.st_size}.{found.st_mtime_ns}"

    def bulk_sync(self, folder: str) -> BulkSync | None:
        if _syncfs is None or file_system_type(folder) not in _SYNCED_AS_A_WHOLE:
            return None
        return FileSystemSync(folder, _syncfs)


def _system_call_that_syncs() -> Callable[[int], int] | None:
    """syncfs(2), where it tells of errors: on Linux from 5.8."""
    if sys.platform != "linux":
        return None
    numbers = [int(part) for part in re.findall(r"\d+", os.uname().release)[:2]]
    if numbers < _SYNCFS_TELLS_ERRORS:
        return None
    try:
        found = ctypes.CDLL(None, use_errno=True).syncfs
    except (AttributeError, OSError):
        return None
    found.argtypes, found.restype = (ctypes.c_int,), ctypes.c_int
    return cast("Callable[[int], int]", found)


_syncfs: Final = _system_call_that_syncs()


def file_system_type(path: str) -> int | None:
    """The number that Linux has for this kind of file system; None if it cannot be told."""
    try:
        statfs = ctypes.CDLL(None).statfs
    except (AttributeError, OSError):
        return None
    statfs.argtypes, statfs.restype = (ctypes.c_char_p, ctypes.c_void_p), ctypes.c_int
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if statfs(os.fsencode(path), found) != 0:
        return None
    # Its first field is a long; elsewhere than on x86 and ARM it may be less, and stays unknown.
    return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF


if sys.platform == "darwin":

    def _sync_descriptor(fd: int) -> None:
        # fsync on macOS stops at the drive's cache.
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
else:

    def _sync_descriptor(fd: int) -> None:
        os.fdatasync(fd)


def read_whole(disk: Disk, path: str) -> bytes:
    """All of a small file."""
    file = disk.open(path)
    try:
        return file.pread(file.size(), 0)
    finally:
        file.close()


def make_dirs_durably(disk: Disk, folder: str) -> None:
    """Make a folder and those above it, with names that survive a power loss."""
    chain = [folder]
    while (above := os.path.dirname(chain[-1])) != chain[-1]:
        chain.append(above)
    there = set(filter(disk.exists, chain))
    disk.make_dirs(folder)
    # All of them: a process that made some may have been killed before it synced them.
    for path, above in pairwise(chain):
        try:
            disk.sync_dir(above)
        except StorageError:
            # A folder that was there before may lie under one that is not ours to open.
            if path not in there:
                raise


def write_atomically(disk: Disk, path: str, data: bytes) -> None:
    """Replace a small file so that a crash leaves the old or the new one, durable on return."""
    temporary = path + ".tmp"
    file = disk.open(temporary, create=True)
    try:
        file.truncate(0)
        file.pwritev([data], 0)
        file.sync()
    finally:
        file.close()
    disk.rename(temporary, path)
    disk.sync_dir(os.path.dirname(path))
