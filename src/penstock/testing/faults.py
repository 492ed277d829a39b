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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from penstock.errors import StorageError
from penstock.log.disk import Buffer, storage_error

Operation = Literal[
    "read", "write", "truncate", "sync", "open", "rename", "remove", "make_dirs", "sync_dir"
]

# Small, so that the little files of tests span several.
PAGE_BYTES: Final = 512


class SimulatedCrash(BaseException):
    """The process or the machine stopped here. Not an Exception: nothing may handle it."""


@dataclass(frozen=True, slots=True)
class _Write:
    position: int
    data: bytes


@dataclass(frozen=True, slots=True)
class _Truncate:
    size: int


class _Node:
    """A file's content, by whatever name: as seen now, as safe, and what lies between."""

    __slots__ = ("content", "durable", "linked", "opened", "pending")

    def __init__(self, content: bytes = b"") -> None:
        self.content = bytearray(content)
        self.durable = bytearray(content)
        self.pending: list[_Write | _Truncate] = []
        self.linked = False
        self.opened = 0


class _Folder:
    """Names in a folder. A pending change sets names to what they mean after it, None for gone."""

    __slots__ = ("durable", "names", "pending")

    def __init__(self) -> None:
        self.names: dict[str, _Node | _Folder] = {}
        self.durable: dict[str, _Node | _Folder] = {}
        self.pending: list[dict[str, _Node | _Folder | None]] = []

    def change(self, change: dict[str, _Node | _Folder | None]) -> None:
        _apply_names(self.names, change)
        self.pending.append(change)


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


@dataclass(slots=True)
class _State:
    """What outlives a process: the tree, and how much of the device is used."""

    root: _Folder = field(default_factory=_Folder)
    used_bytes: int = 0


class SimulatedFile:
    """An open file of a `SimulatedDisk`."""

    __slots__ = ("_closed", "_disk", "_node", "path")

    def __init__(self, disk: SimulatedDisk, node: _Node, path: str) -> None:
        self._disk = disk
        self._node = node
        self._closed = False
        self.path = path
        node.opened += 1

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
            self._node.pending.append(_Truncate(size))

    def sync(self) -> None:
        with self._disk._operation("sync", self.path, self._closed) as outcome:
            self._disk._sync(self._node, self.path, outcome)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._disk._let_go(self._node)

    def __del__(self) -> None:
        self.close()


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
        self._state = _State()
        self._faults: list[_Fault] = []
        self._crash_at: int | None = None
        self._after: _State | None = None
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
        assert isinstance(node, _Node), path
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
                self._after = _surviving_state(self._state, rng or self._rng)
            else:
                # The handles of the dead process are gone, and with them files without a name.
                self._after = self._state
                self._after.used_bytes = _close_all(self._after.root)

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
        if isinstance(node, _Folder):
            raise _error(errno.EISDIR, path)
        if node is not None:
            with self._operation("open" if create else "read", path) as outcome:
                outcome.stop()
                return SimulatedFile(self, node, path)
        if not create:
            raise _error(errno.ENOENT, path)
        with self._operation("open", path) as outcome:
            outcome.stop()
            node = _Node()
            node.linked = True
            folder.change({name: node})
            return SimulatedFile(self, node, path)

    def _write(self, node: _Node, path: str, data: bytes, position: int, outcome: _Outcome) -> None:
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
            self._state.used_bytes += _write_into(node.content, data, position)
            node.pending.append(_Write(position, data))
        if error is not None and not outcome.last:
            raise error

    def _resize(self, node: _Node, size: int) -> None:
        self._state.used_bytes += size - len(node.content)
        _set_size(node.content, size)

    def _sync(self, node: _Node, path: str, outcome: _Outcome) -> None:
        if outcome.error is None:
            for change in node.pending:
                _apply(node.durable, change)
        else:
            self.failed_syncs.append(path)
            node.durable = _content_after_failed_sync(node, self._rng)
            if self.forgets_failed_pages:
                size = len(node.content)
                node.content = bytearray(node.durable)
                _set_size(node.content, size)
        node.pending = []
        outcome.stop()

    def _let_go(self, node: _Node) -> None:
        """A handle is closed; the space of a file without name and handle comes back."""
        with self._mutex:
            if not self.crashed:
                node.opened -= 1
                self._reclaim(node)

    def _reclaim(self, node: _Node) -> None:
        if not node.opened and not node.linked:
            self._state.used_bytes -= len(node.content)
            node.content = bytearray()

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
                    at.change({part: _Folder()})
                following = at.names[part]
                if not isinstance(following, _Folder):
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
            if isinstance(replaced, _Node):
                replaced.linked = False
                self._reclaim(replaced)

    def remove(self, path: str) -> None:
        folder, name = self._locate(path)
        if name not in folder.names:
            return
        with self._operation("remove", path) as outcome:
            outcome.stop()
            self._unlink(folder, name)

    def _unlink(self, folder: _Folder, name: str) -> None:
        node = folder.names[name]
        folder.change({name: None})
        if isinstance(node, _Node):
            node.linked = False
            self._reclaim(node)

    def remove_tree(self, folder: str) -> None:
        if not self.exists(folder):
            return
        tree = self._folder(folder)
        for name, node in list(tree.names.items()):
            path = os.path.join(folder, name)
            if isinstance(node, _Folder):
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

    def _folder(self, path: str) -> _Folder:
        at = self._state.root
        for part in _parts(path):
            following = at.names.get(part)
            if not isinstance(following, _Folder):
                raise _error(errno.ENOENT, path)
            at = following
        return at

    def _locate(self, path: str) -> tuple[_Folder, str]:
        return self._folder(os.path.dirname(path)), os.path.basename(path)


def _parts(path: str) -> list[str]:
    return [part for part in path.split(os.sep) if part]


def _error(number: int, path: str) -> StorageError:
    return storage_error(OSError(number, os.strerror(number)), path)


# ---- contents ----------------------------------------------------------------------------


def _set_size(content: bytearray, size: int, fill: bytes = b"\x00") -> None:
    if size < len(content):
        del content[size:]
    elif size > len(content):
        missing = size - len(content)
        content += (fill * (missing // len(fill) + 1))[:missing]


def _write_into(content: bytearray, data: bytes, position: int, fill: bytes = b"\x00") -> int:
    """Returns by how much the file grew."""
    before = len(content)
    if position > before:
        _set_size(content, position, fill)
    content[position : position + len(data)] = data
    return len(content) - before


def _apply(content: bytearray, change: _Write | _Truncate, fill: bytes = b"\x00") -> None:
    if isinstance(change, _Write):
        _write_into(content, change.data, change.position, fill)
    else:
        _set_size(content, change.size)


def _surviving_content(node: _Node, rng: random.Random) -> bytearray:
    """What a power loss leaves of a file."""
    content = bytearray(node.durable)
    if not node.pending:
        return content
    fill = b"\x00" if rng.random() < 0.5 else rng.randbytes(251)
    style = rng.choice(("nothing", "everything", "prefix", "pages", "pages", "size-first"))
    if style == "everything":
        for change in node.pending:
            _apply(content, change)
    elif style == "prefix":
        *whole, torn = node.pending[: rng.randint(1, len(node.pending))]
        for change in whole:
            _apply(content, change)
        if isinstance(torn, _Write):
            _write_into(content, torn.data[: rng.randint(0, len(torn.data))], torn.position)
    elif style != "nothing":
        truncations = [at for at, c in enumerate(node.pending) if isinstance(c, _Truncate)]
        # Metadata goes to disk in order: choose where it stopped.
        stops = [*truncations, len(node.pending)]
        reached = node.pending[: rng.choice(stops)]
        share = rng.choice((0.2, 0.5, 0.9))
        for change in reached:
            if isinstance(change, _Truncate):
                _set_size(content, change.size)
            else:
                for piece in _torn_pages(change, share, rng):
                    _write_into(content, piece.data, piece.position, fill)
        if style == "size-first":
            ends = [c.position + len(c.data) for c in reached if isinstance(c, _Write)]
            _set_size(content, max([len(content), *ends[-1:]]), fill)
    return content


def _content_after_failed_sync(node: _Node, rng: random.Random) -> bytearray:
    """Data may be lost, but not metadata: that is in the journal."""
    content = bytearray(node.durable)
    share = rng.choice((0.0, 0.5, 0.9))
    for change in node.pending:
        if isinstance(change, _Truncate):
            _set_size(content, change.size)
        else:
            for piece in _torn_pages(change, share, rng):
                _write_into(content, piece.data, piece.position)
    if rng.random() < 0.5:
        _set_size(content, len(node.content))
    return content


def _torn_pages(write: _Write, share: float, rng: random.Random) -> Iterator[_Write]:
    """The pages of a write that reach the disk, and now and then a piece of one."""
    at, end = write.position, write.position + len(write.data)
    while at < end:
        stop = min(end, at - at % PAGE_BYTES + PAGE_BYTES)
        start = at
        at = stop
        if rng.random() >= share:
            continue
        if rng.random() < 0.2:
            start, stop = sorted((rng.randint(start, stop), rng.randint(start, stop)))
        yield _Write(start, write.data[start - write.position : stop - write.position])


# ---- names -------------------------------------------------------------------------------


def _apply_names(
    names: dict[str, _Node | _Folder], change: dict[str, _Node | _Folder | None]
) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
            continue
        # A file has one name: where it came from is gone even if that step was lost.
        for old in [n for n, other in names.items() if other is node]:
            del names[old]
        names[name] = node


def _surviving_names(folder: _Folder, rng: random.Random) -> dict[str, _Node | _Folder]:
    """What a power loss leaves of a folder's names."""
    kept = folder.pending
    if kept:
        if rng.random() < 0.5:
            kept = kept[: rng.randint(0, len(kept))]
        else:
            share = rng.choice((0.2, 0.5, 0.9))
            kept = [change for change in kept if rng.random() < share]
    names = dict(folder.durable)
    for change in kept:
        _apply_names(names, change)
    return names


def _close_all(folder: _Folder) -> int:
    """Forget all handles; returns the bytes that the files under a name take."""
    total = 0
    for node in folder.names.values():
        if isinstance(node, _Folder):
            total += _close_all(node)
        else:
            node.opened = 0
            total += len(node.content)
    return total


def _surviving_state(state: _State, rng: random.Random) -> _State:
    after = _State()
    after.root = _surviving_folder(state.root, rng, after)
    return after


def _surviving_folder(folder: _Folder, rng: random.Random, state: _State) -> _Folder:
    survivor = _Folder()
    for name, node in sorted(_surviving_names(folder, rng).items()):
        if isinstance(node, _Folder):
            survivor.names[name] = _surviving_folder(node, rng, state)
        else:
            copy = _Node(bytes(_surviving_content(node, rng)))
            copy.linked = True
            state.used_bytes += len(copy.content)
            survivor.names[name] = copy
    survivor.durable = dict(survivor.names)
    return survivor
