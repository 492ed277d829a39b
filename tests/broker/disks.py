"""Disks for tests: one whose syncs wait at a gate, one that does not sync at all, and memory."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from penstock.log.disk import OsDisk, OsFile

TIMEOUT_S: Final = 60.0
_MEMORY: Final = "/dev/shm"
# A container may have next to nothing there.
_MEMORY_FREE_BYTES: Final = 1 << 30


@contextmanager
def temporary_files_in_memory() -> Iterator[None]:
    """Meanwhile `tempfile` of this process uses memory, where the system has a folder for that.

    A broker starts and stops there in a third of the time.
    """
    before = tempfile.tempdir
    if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _MEMORY_FREE_BYTES:
        tempfile.tempdir = _MEMORY
    try:
        yield
    finally:
        tempfile.tempdir = before


class GatedFile(OsFile):
    """A file that asks the gate before it syncs."""

    __slots__ = ("_gate",)

    def __init__(self, fd: int, path: str, gate: GatedDisk) -> None:
        super().__init__(fd, path)
        self._gate = gate

    def sync(self) -> None:
        self._gate.pass_through(self.path)
        super().sync()


class GatedDisk(OsDisk):
    """The real disk, but syncs of the logs of a topic wait while its gate is closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._arrived = threading.Condition()
        self._waiting = 0
        self._prefix = "\0"
        # How often the logs of that topic were synced.
        self.syncs = 0

    @contextmanager
    def closed(self, topic: str) -> Iterator[None]:
        """While this lasts, nothing that is written to the topic becomes safe."""
        self._prefix = f"{topic}-"
        self._open.clear()
        try:
            yield
        finally:
            self.let_pass()

    def let_pass(self) -> None:
        """Open the gate."""
        self._open.set()

    def wait_for_sync(self) -> None:
        """Until a sync stands at the closed gate."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: self._waiting, TIMEOUT_S)

    def open(self, path: str, *, create: bool = False) -> OsFile:
        plain = super().open(path, create=create)
        gated = GatedFile(os.dup(plain.fileno()), path, self)
        plain.close()
        return gated

    def pass_through(self, path: str) -> None:
        folder = os.path.basename(os.path.dirname(path))
        if not path.endswith(".log") or not folder.startswith(self._prefix):
            return
        with self._arrived:
            self._waiting += 1
            self.syncs += 1
            self._arrived.notify_all()
        assert self._open.wait(TIMEOUT_S)
        with self._arrived:
            self._waiting -= 1


class HastyFile(OsFile):
    """A file that leaves its bytes to the operating system."""

    __slots__ = ()

    def sync(self) -> None:
        """Nothing: no machine loses its power here."""


class HastyDisk(OsDisk):
    """The real disk without its waits, where durability is not what is tested."""

    def open(self, path: str, *, create: bool = False) -> OsFile:
        plain = super().open(path, create=create)
        hasty = HastyFile(os.dup(plain.fileno()), path)
        plain.close()
        return hasty

    def sync_dir(self, folder: str) -> None:
        """Nothing, likewise."""
