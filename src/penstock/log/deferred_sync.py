"""A disk whose syncs are done together, for files and folders that nobody relies on yet.

A topic of thousands of partitions is thousands of folders with a few small files in each. Syncing
each of them takes a minute; syncing the file system once takes a moment. Whoever makes them works
on a `DeferredSyncDisk`, has everything synced, and only then lets others know of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.log.disk import Buffer, BulkSync, Disk, File


class _DeferredFile:
    """A file that is synced with the others."""

    __slots__ = ("_file",)

    def __init__(self, file: File) -> None:
        self._file = file

    def fileno(self) -> int:
        return self._file.fileno()

    def pread(self, length: int, position: int) -> bytes:
        return self._file.pread(length, position)

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        self._file.pwritev(buffers, position)

    def size(self) -> int:
        return self._file.size()

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def sync(self) -> None:
        """Not now."""

    def close(self) -> None:
        self._file.close()


class DeferredSyncDisk:
    """Another disk without its syncs.

    `sync_all`, which may run on any thread, brings to disk what was made on it.
    """

    def __init__(self, disk: Disk, sync_all: Callable[[], None]) -> None:
        self._disk = disk
        self.sync_all = sync_all

    def open(self, path: str, *, create: bool = False) -> File:
        return _DeferredFile(self._disk.open(path, create=create))

    def exists(self, path: str) -> bool:
        return self._disk.exists(path)

    def names(self, folder: str) -> list[str]:
        return self._disk.names(folder)

    def make_dirs(self, folder: str) -> None:
        self._disk.make_dirs(folder)

    def rename(self, source: str, target: str) -> None:
        self._disk.rename(source, target)

    def remove(self, path: str) -> None:
        self._disk.remove(path)

    def remove_tree(self, folder: str) -> None:
        self._disk.remove_tree(folder)

    def sync_dir(self, folder: str) -> None:
        """Not now."""

    def lock(self, path: str) -> Callable[[], None] | None:
        return self._disk.lock(path)

    def stamp(self, path: str) -> str | None:
        return self._disk.stamp(path)

    def bulk_sync(self, folder: str) -> BulkSync | None:
        return self._disk.bulk_sync(folder)
