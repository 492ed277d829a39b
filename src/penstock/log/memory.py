"""Durability `memory`: segments that never touch a disk, yet offsets that are never reused.

`MemoryDisk` keeps anonymous memory files (on Linux; elsewhere unlinked temporary files), so the
engine above reads, writes and sends them as it does any other. What it holds is gone with the
process; retention bounds how much that is.

`OffsetReserve` is the one thing that survives: a number on the real disk, ahead of every offset
given out. A restarted partition begins there, so that a consumer's position from before can
never point at a different record.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Final

from penstock.errors import StorageError
from penstock.log.checkpoint import seal, unseal
from penstock.log.disk import Disk, OsFile, read_whole, write_atomically

RESERVE_FILE: Final = "offset-reserve"
# Offsets reserved at a time: one small synced write per this many records.
_RESERVE_STEP: Final = 4_000_000


class MemoryDisk:
    """Names and files of one process, in memory."""

    def __init__(self) -> None:
        self._files: dict[str, OsFile] = {}
        self._folders: set[str] = set()

    def open(self, path: str, *, create: bool = False) -> OsFile:
        file = self._files.get(path)
        if file is None:
            if not create:
                raise StorageError(f"{path} is not in memory")
            file = self._files[path] = _anonymous_file(path)
        return OsFile(os.dup(file.fileno()), path)

    def exists(self, path: str) -> bool:
        return path in self._files or path in self._folders

    def names(self, folder: str) -> list[str]:
        paths = list(self._files)
        return sorted(os.path.basename(p) for p in paths if os.path.dirname(p) == folder)

    def make_dirs(self, folder: str) -> None:
        self._folders.add(folder)

    def rename(self, source: str, target: str) -> None:
        self._files[target] = self._files.pop(source)

    def remove(self, path: str) -> None:
        self._files.pop(path, None)

    def remove_tree(self, folder: str) -> None:
        self._folders.discard(folder)
        for path in [p for p in list(self._files) if p.startswith(folder + os.sep)]:
            self._files.pop(path, None)

    def sync_dir(self, folder: str) -> None:
        """Nothing here outlives the process."""

    def lock(self, path: str) -> Callable[[], None] | None:
        return lambda: None

    def stamp(self, path: str) -> None:
        """Nothing here is there at the next start."""

    def bulk_sync(self, folder: str) -> None:
        """Nothing here is synced."""


def _anonymous_file(path: str) -> OsFile:
    if hasattr(os, "memfd_create"):
        return OsFile(os.memfd_create(os.path.basename(path), os.MFD_CLOEXEC), path)
    with tempfile.TemporaryFile() as scratch:
        return OsFile(os.dup(scratch.fileno()), path)


class OffsetReserve:
    """A durable bound above all offsets that a partition in memory has given out."""

    __slots__ = ("_disk", "_path", "limit")

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._path = os.path.join(folder, RESERVE_FILE)
        self.limit = 0
        if disk.exists(self._path):
            text = (unseal(read_whole(disk, self._path)) or "").strip()
            if not text.isdigit():
                raise StorageError(
                    f"{self._path} is damaged: it held the bound of the offsets given out so far",
                    advice="Remove it if no consumer remembers a position in this topic; "
                    "otherwise restore it from a copy.",
                )
            self.limit = int(text)

    def extend(self, offset: int) -> None:
        """Reserve beyond `offset`; durable on return."""
        limit = offset + _RESERVE_STEP
        write_atomically(self._disk, self._path, seal(f"{limit}\n"))
        self.limit = limit

    def release(self, offset: int) -> None:
        """At a clean stop: the next run may begin right at `offset`."""
        write_atomically(self._disk, self._path, seal(f"{offset}\n"))
        self.limit = offset
