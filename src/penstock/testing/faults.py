"""A disk that does what real disks do at the worst moment, the same way for the same seed.

`SimulatedDisk` stands in for `penstock.log.disk.OsDisk`. It is a file system in memory that
keeps two states apart: what a running process sees, and what would be there after a power loss.

- *Contents.* A write is safe after `File.sync`. Of what was written since, a power loss keeps
  any part: all, nothing, a prefix torn at any byte, some pages of each write but not others;
  the file may have its new size with zeros or garbage where data is missing. Truncations are
  metadata and happen in order: a later one never without an earlier one.
- *Names.* Creating, renaming and removing are safe after `sync_dir` of the folder. Of what was
  done since, a power loss keeps any part, in any combination; a rename is atomic, and a file
  never has two names.
- *A failed sync* loses what was pending: the next sync succeeds although the data is gone from
  the disk, as on Linux. What the process reads stays (ext4, XFS) unless `forgets_failed_pages`.
- *A killed process* loses nothing, but nothing becomes safer by it either: a power loss after it
  takes what was unsynced before it.

Faults are asked for in advance: `fail` the n-th write, sync, …, a `capacity_bytes`, `crash_at`
the n-th operation. A crash raises `SimulatedCrash`, which no ordinary handler catches; from then
on every operation raises it. `after_crash` gives the disk that the next process finds.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.errors import StorageError
from penstock.log.disk import Buffer, storage_error
from penstock.testing.power_loss import (
    Folder,
    Node,
    State,
    Truncate,
    Write,
    apply,
    content_after_failed_sync,
    set_size,
    surviving_state,
    write_into,
)

Operation = Literal[
    "read", "write", "truncate", "sync", "open", "rename", "remove", "make_dirs", "sync_dir"
]


class SimulatedCrash(BaseException):
    """The process or the machine stopped here. Not an Exception: nothing may handle it."""


@dataclass(slots=True)
class _Fault:
    operation: Operation
    wait: int
    times: int
    error: int
    path_part: str


class _Outcome:
    """What is in store for one operation, which holds the disk meanwhile."""

    __slots__ = ("_disk", "error", "last")

    def __init__(self, disk: SimulatedDisk, last: bool, error: StorageError | None) -> None:
        self._disk = disk
        self.last = last
        self.error = error

    def stop(self) -> None:
        if self.error is not None:
            raise self.error

    def __enter__(self) -> _Outcome:
        return self

    def __exit__(self, *_: object) -> None:
        self._disk._mutex.release()
        if self.last:
            self._disk.crashed = True
            raise SimulatedCrash


class SimulatedFile:
    """An open file of a `SimulatedDisk`."""

    __slots__ = ("_closed", "_disk", "_node", "path")

    def __init__(self, disk: SimulatedDisk, node: Node, path: str) -> None:
        self._disk = disk
        self._node = node
        self._closed = False
        self.path = path

    def fileno(self) -> int:
        return -1

    def pread(self, length: int, position: int) -> bytes:
        with self._disk._operation("read", self.path, self._closed) as outcome:
            outcome.stop()
            return bytes(self._node.content[position : position + length])

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        data = b"".join(buffers)
        with self._disk._operation("write", self.path, self._closed) as outcome:
            self._disk._write(self._node, self.path, data, position, outcome)

    def size(self) -> int:
        return len(self._node.content)

    def truncate(self, size: int) -> None:
        with self._disk._operation("truncate", self.path, self._closed) as outcome:
            outcome.stop()
            self._disk._resize(self._node, size)
            self._node.pending.append(Truncate(size))

    def sync(self) -> None:
        with self._disk._operation("sync", self.path, self._closed) as outcome:
            self._disk._sync(self._node, self.path, outcome)

    def close(self) -> None:
        self._closed = True


class SimulatedDisk:
    """A file system with a memory of what is safe; see the module. Usable from threads."""

    def __init__(
        self,
        seed: int = 0,
        *,
        capacity_bytes: int | None = None,
        forgets_failed_pages: bool = False,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.forgets_failed_pages = forgets_failed_pages
        # Operations that change something, so far; `crash_at` counts these.
        self.operations = 0
        # The files whose syncs failed, in order: what was lost there cannot be seen by reading.
        self.failed_syncs: list[str] = []
        self.crashed = False
        self._rng = random.Random(seed)
        self._state = State()
        self._faults: list[_Fault] = []
        self._crash_at: int | None = None
        self._after: State | None = None
        self._locks: set[str] = set()
        self._mutex = threading.RLock()

    @property
    def used_bytes(self) -> int:
        return self._state.used_bytes

    # ---- faults --------------------------------------------------------------------------

    def fail(
        self,
        operation: Operation,
        *,
        nth: int = 1,
        times: int = 1,
        error: int = errno.EIO,
        path_part: str = "",
    ) -> None:
        """Let the n-th such operation from now, on paths with `path_part`, fail with `error`.

        With `times`, so do those that follow; -1 is for ever, or until `heal`.
        """
        self._faults.append(_Fault(operation, nth - 1, times, error, path_part))

    def heal(self) -> None:
        """Forget the faults that were asked for."""
        self._faults.clear()

    def damage(self, path: str, position: int, mask: int = 0xFF) -> None:
        """Turn bits of one byte around where it is stored, as an ageing disk does."""
        folder, name = self._locate(path)
        node = folder.names[name]
        assert isinstance(node, Node), path
        for content in (node.content, node.durable):
            if position < len(content):
                content[position] ^= mask

    def crash_at(self, nth: int) -> None:
        """Crash at the n-th changing operation from now, which may be done in part."""
        self._crash_at = self.operations + nth

    def crash(self, rng: random.Random | None = None, *, power_loss: bool = True) -> None:
        """Stop here, and settle what a restarted process will find."""
        with self._mutex:
            self.crashed = True
            if power_loss:
                self._after = surviving_state(self._state, rng or self._rng)
            else:
                self._after = self._state

    def after_crash(self) -> SimulatedDisk:
        """The disk that the next process finds; without a `crash` before, that is a power loss."""
        if self._after is None:
            self.crash()
        assert self._after is not None
        disk = SimulatedDisk(
            self._rng.getrandbits(32),
            capacity_bytes=self.capacity_bytes,
            forgets_failed_pages=self.forgets_failed_pages,
        )
        disk._state = self._after
        return disk

    def _operation(self, kind: Operation, path: str, closed: bool = False) -> _Outcome:
        """Every operation goes through here: it may fail, or be the last one."""
        if self.crashed:
            raise SimulatedCrash
        if closed:
            raise _error(errno.EBADF, path)
        self._mutex.acquire()
        last = False
        if kind != "read":
            self.operations += 1
            last = self._crash_at is not None and self.operations >= self._crash_at
        # In half of the crashes the operation is still done, though nobody learns of it.
        if last and kind != "write" and self._rng.random() < 0.5:
            self.crashed = True
            self._mutex.release()
            raise SimulatedCrash
        error = self._due_fault(kind, path) if self._faults and not last else None
        return _Outcome(self, last, error)

    def _due_fault(self, kind: Operation, path: str) -> StorageError | None:
        for fault in self._faults:
            if fault.operation != kind or fault.path_part not in path:
                continue
            if fault.wait > 0:
                fault.wait -= 1
            elif fault.times != 0:
                fault.times -= 1
                error = OSError(fault.error, os.strerror(fault.error))
                return storage_error(error, f"{kind} {path}")
        return None

    # ---- files ---------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False) -> SimulatedFile:
        folder, name = self._locate(path)
        node = folder.names.get(name)
        if isinstance(node, Folder):
            raise _error(errno.EISDIR, path)
        if node is not None:
            with self._operation("open" if create else "read", path) as outcome:
                outcome.stop()
                return SimulatedFile(self, node, path)
        if not create:
            raise _error(errno.ENOENT, path)
        with self._operation("open", path) as outcome:
            outcome.stop()
            node = Node()
            node.linked = True
            folder.change({name: node})
            return SimulatedFile(self, node, path)

    def _write(self, node: Node, path: str, data: bytes, position: int, outcome: _Outcome) -> None:
        error = outcome.error
        if outcome.last or error is not None:
            data = data[: self._rng.randint(0, len(data))]
        if self.capacity_bytes is not None:
            room = max(0, self.capacity_bytes - self._state.used_bytes)
            fits = max(0, len(node.content) + room - position)
            if fits < len(data):
                data = data[:fits]
                error = error or _error(errno.ENOSPC, path)
        if data:
            grown = write_into(node.content, data, position)
            self._state.used_bytes += grown if node.linked else 0
            node.pending.append(Write(position, data))
        if error is not None and not outcome.last:
            raise error

    def _resize(self, node: Node, size: int) -> None:
        if node.linked:
            self._state.used_bytes += size - len(node.content)
        set_size(node.content, size)

    def _sync(self, node: Node, path: str, outcome: _Outcome) -> None:
        if outcome.error is None:
            for change in node.pending:
                apply(node.durable, change)
        else:
            self.failed_syncs.append(path)
            node.durable = content_after_failed_sync(node, self._rng)
            if self.forgets_failed_pages:
                size = len(node.content)
                node.content = bytearray(node.durable)
                set_size(node.content, size)
        node.pending = []
        outcome.stop()

    def _free(self, node: Node) -> None:
        """Its name is gone, and its space with it; open handles, unlike elsewhere, hold none."""
        node.linked = False
        self._state.used_bytes -= len(node.content)

    # ---- names ---------------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        if self.crashed:
            raise SimulatedCrash
        return self.holds(path)

    def holds(self, path: str) -> bool:
        """Whether a name is there; for whoever looks on from outside, also after a crash."""
        try:
            folder, name = self._locate(path)
        except StorageError:
            return False
        return not name or name in folder.names

    def names(self, folder: str) -> list[str]:
        with self._operation("read", folder):
            return sorted(self._folder(folder).names)

    def make_dirs(self, folder: str) -> None:
        with self._operation("make_dirs", folder) as outcome:
            outcome.stop()
            at = self._state.root
            for part in _parts(folder):
                if part not in at.names:
                    at.change({part: Folder()})
                following = at.names[part]
                if not isinstance(following, Folder):
                    raise _error(errno.ENOTDIR, folder)
                at = following

    def rename(self, source: str, target: str) -> None:
        folder, name = self._locate(source)
        other, new_name = self._locate(target)
        if folder is not other:
            raise _error(errno.EXDEV, source)
        if name not in folder.names:
            raise _error(errno.ENOENT, source)
        with self._operation("rename", source) as outcome:
            outcome.stop()
            replaced = folder.names.get(new_name)
            folder.change({name: None, new_name: folder.names[name]})
            if isinstance(replaced, Node):
                self._free(replaced)

    def remove(self, path: str) -> None:
        folder, name = self._locate(path)
        if name not in folder.names:
            return
        with self._operation("remove", path) as outcome:
            outcome.stop()
            self._unlink(folder, name)

    def _unlink(self, folder: Folder, name: str) -> None:
        node = folder.names[name]
        folder.change({name: None})
        if isinstance(node, Node):
            self._free(node)

    def remove_tree(self, folder: str) -> None:
        if not self.exists(folder):
            return
        tree = self._folder(folder)
        for name, node in list(tree.names.items()):
            path = os.path.join(folder, name)
            if isinstance(node, Folder):
                self.remove_tree(path)
            else:
                self.remove(path)
        self.remove(folder)

    def sync_dir(self, folder: str) -> None:
        tree = self._folder(folder)
        with self._operation("sync_dir", folder) as outcome:
            # Unlike data, names stay pending when this fails: they are in the journal.
            outcome.stop()
            tree.durable = dict(tree.names)
            tree.pending = []

    def lock(self, path: str) -> Callable[[], None] | None:
        """Held by this disk, thus by one simulated process, until released or crashed."""
        if path in self._locks:
            return None
        self.open(path, create=True).close()
        self._locks.add(path)
        return lambda: self._locks.discard(path)

    def stamp(self, path: str) -> str | None:
        if not self.exists(path):
            return None
        folder, name = self._locate(path)
        node = folder.names[name]
        if isinstance(node, Folder):
            return "/".join(sorted(node.names))
        return f"{len(node.content)}.{zlib.crc32(node.content):08x}"

    def bulk_sync(self, folder: str) -> None:
        """There is none: each file is synced by itself."""

    def _folder(self, path: str) -> Folder:
        at = self._state.root
        for part in _parts(path):
            following = at.names.get(part)
            if not isinstance(following, Folder):
                raise _error(errno.ENOENT, path)
            at = following
        return at

    def _locate(self, path: str) -> tuple[Folder, str]:
        return self._folder(os.path.dirname(path)), os.path.basename(path)


def _parts(path: str) -> list[str]:
    return [part for part in path.split(os.sep) if part]


def _error(number: int, path: str) -> StorageError:
    return storage_error(OSError(number, os.strerror(number)), path)
