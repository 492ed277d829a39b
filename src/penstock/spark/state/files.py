"""Files of states: a folder on this machine, or one of a store that all workers reach (a URL).

A file is written beside its name, synced and moved there, so that it is whole or not there; a store
of objects does that by itself. What is written counts only then.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyarrow import fs

from penstock.errors import PenstockError

_URL: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
# Hadoop's names for stores that Arrow knows by another.
_SCHEMES: Final = {"s3a": "s3", "s3n": "s3"}
# Stores that show an object only when it is whole, and cannot move one.
_OBJECTS: Final = frozenset({"s3", "gcs", "abfs", "mock"})
_BESIDE: Final = ".beside-"
# What is left of them, and of Spark's.
_LEFT: Final = (f"{_BESIDE}*", ".[0-9]*.tmp", "..[0-9]*.tmp.crc")
_STALE_S: Final = 3600.0
# Of file systems without hard links.
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP})


class StateError(PenstockError):
    """The state of a flow cannot be read or written."""


def is_because_of(kind: type[StateError], error: BaseException | None) -> bool:
    """Whether such an error in a task let a job fail, as far as Spark tells it."""
    while error is not None:
        if kind.__name__ in str(error):
            return True
        error = error.__cause__
    return False


@dataclass(slots=True)
class Files:
    """A folder of files."""

    folder: str
    _store: fs.FileSystem | None = field(default=None, repr=False)
    _path: str = ""

    def __post_init__(self) -> None:
        if not _URL.match(self.folder):
            self._path = self.folder
            return
        scheme, rest = self.folder.split("://", 1)
        url = f"{_SCHEMES.get(scheme, scheme)}://{rest}"
        try:
            store, self._path = fs.FileSystem.from_uri(url)
        except (pa.ArrowInvalid, OSError) as error:
            raise StateError(
                f"the store {self.folder} cannot be used for state: {error}",
                advice="Give a folder, or a URL that pyarrow.fs knows, such as s3:// or hdfs://.",
            ) from error
        self._store = None if isinstance(store, fs.LocalFileSystem) else store

    @property
    def is_local(self) -> bool:
        return self._store is None

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def write(
        self,
        name: str,
        data: pa.Buffer | bytes,
        *,
        durable: bool = True,
        makes_folder: bool = True,
        replaces: bool = True,
    ) -> None:
        """Write a whole file. What need not outlive the machine is not waited for.

        FileNotFoundError if there is no such folder and it is not to be made; stores of objects
        have none. FileExistsError if it is there and is not to be replaced.
        """
        path = self._at(name)
        if self._store is None:
            self._write_here(Path(path), data, durable, makes_folder, replaces)
            return
        if not replaces and self.is_there(name):
            raise FileExistsError(path)
        direct = self._store.type_name in _OBJECTS
        beside = path if direct else f"{path}{_BESIDE}{uuid.uuid4().hex}"
        if not direct:
            self._store.create_dir(path.rsplit("/", 1)[0], recursive=True)
        with self._store.open_output_stream(beside) as out:
            out.write(data)
        if not direct:
            self._store.move(beside, path)

    def _write_here(
        self,
        file: Path,
        data: pa.Buffer | bytes,
        durable: bool,
        makes_folder: bool,
        replaces: bool,
    ) -> None:
        # Two tries of one task may write the same file at a time.
        beside = file.with_name(f"{_BESIDE}{os.getpid()}-{uuid.uuid4().hex[:8]}-{file.name}")
        try:
            self._write_beside(beside, data, durable)
        except FileNotFoundError:
            if not makes_folder:
                raise
            file.parent.mkdir(parents=True, exist_ok=True)
            self._write_beside(beside, data, durable)
        if replaces:
            beside.replace(file)
        else:
            _move_new(beside, file)
        if not durable:
            return
        handle = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _write_beside(self, beside: Path, data: pa.Buffer | bytes, durable: bool) -> None:
        try:
            with beside.open("wb") as out:
                out.write(memoryview(data))
                out.flush()
                if durable:
                    os.fsync(out.fileno())
        except FileNotFoundError:
            raise
        except BaseException:
            beside.unlink(missing_ok=True)
            raise

    def read(self, name: str) -> pa.Buffer:
        """A file's bytes, mapped into memory if it is here. FileNotFoundError if it is not."""
        if self._store is None:
            with pa.memory_map(self._at(name)) as mapped:
                return mapped.read_buffer()
        with self._store.open_input_file(self._at(name)) as opened:
            return opened.read_buffer()

    def names(self, folder: str = "") -> dict[str, int]:
        """What is in a folder, with the sizes of files; nothing if there is no such folder."""
        if self._store is None:
            try:
                with os.scandir(self._at(folder)) as found:
                    entries = list(found)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            sizes = {}
            for each in entries:
                try:
                    if not each.name.startswith(_BESIDE):
                        sizes[each.name] = each.stat().st_size
                except FileNotFoundError:
                    continue
            return sizes
        chosen = fs.FileSelector(self._at(folder), allow_not_found=True)
        return {
            each.base_name: each.size or 0
            for each in self._store.get_file_info(chosen)
            if _BESIDE not in each.base_name
        }

    def is_there(self, name: str) -> bool:
        if self._store is None:
            return os.path.exists(self._at(name))
        return bool(self._store.get_file_info(self._at(name)).type != fs.FileType.NotFound)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        if self._store is None:
            Path(self._at(name)).unlink(missing_ok=True)
            return
        try:
            self._store.delete_file(self._at(name))
        except FileNotFoundError:
            return

    def sweep(self, older_s: float = _STALE_S) -> None:
        """Remove what writers that were killed have left half done, long ago."""
        if self._store is not None:
            return
        limit = time.time() - older_s
        found = [each for pattern in _LEFT for each in Path(self._path).glob(pattern)]
        for each in found:
            with suppress(FileNotFoundError):
                if each.stat().st_mtime < limit:
                    each.unlink()

    def remove_folder(self, name: str) -> None:
        """Remove a folder with all that is in it, if it is there."""
        if self._store is None:
            shutil.rmtree(self._at(name), ignore_errors=True)
            return
        try:
            self._store.delete_dir(self._at(name))
        except FileNotFoundError:
            return


def _move_new(beside: Path, file: Path) -> None:
    """Move a file to a name that nobody has; of two who do so at a time one gets FileExistsError.

    Where there are no hard links they take turns, by a lock of the folder: it ends with whoever has
    it, and leaves nothing behind.
    """
    try:
        os.link(beside, file)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with _locked(file.parent):
            if file.exists():
                raise FileExistsError(f"{file}") from error
            beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Where there are no locks either, nobody else is kept out but one who came before.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
