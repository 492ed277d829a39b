"""Looking at a data directory from outside: what lies where, and what a log file holds.

For `verify` and `dump`. Everything here only reads, opens files for reading only and believes
nothing: a file may be cut anywhere and hold any bytes. Memory stays within a window of a segment,
however large a length a damaged header claims.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, NamedTuple, Self

from crc32c import crc32c

from penstock.errors import DataDirectoryError
from penstock.log.index import MAX_RELATIVE
from penstock.log.segment import LOG_SUFFIX
from penstock.log.store import DELETED_SUFFIX, LOCK_FILE, META_FILE, PARTITION_METADATA
from penstock.records.batch import (
    CRC_START,
    HEADER_SIZE,
    LENGTH_BASE,
    MAGIC,
    MIN_BATCH_LENGTH,
    BatchHeader,
    read_header,
)

_WINDOW_BYTES: Final = 1 << 20
_MAGIC_AT: Final = 16
STEM_DIGITS: Final = 20


# ---- places ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartitionFolder:
    """One partition's folder and the names in it."""

    path: str
    names: tuple[str, ...]
    # Only these segments are asked for; None for all.
    only_bases: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def stems(self, suffix: str) -> list[int]:
        """The offsets of the files with that suffix, rising."""
        cut = [name.removesuffix(suffix) for name in self.names if name.endswith(suffix)]
        return sorted(int(stem) for stem in cut if stem.isdecimal() and len(stem) == STEM_DIGITS)

    @property
    def bases(self) -> list[int]:
        """The base offsets of its segments, rising."""
        return self.stems(LOG_SUFFIX)


@dataclass(frozen=True, slots=True)
class Place:
    """What a path turned out to be: partitions, and the data directory if it is one."""

    data_dir: str | None
    partitions: list[PartitionFolder] = field(default_factory=list)
    # Whether the whole directory was asked for, rather than a part of it.
    whole: bool = False
    # Folders of deleted topics, which the next start removes.
    deleted: tuple[str, ...] = ()


def locate(path: str) -> Place:
    """What is at `path`: a data directory, a partition's folder or one `.log` file."""
    path = os.path.abspath(path)
    if not os.path.exists(path):
        raise DataDirectoryError(f"{path} does not exist", advice="Check the path.")
    if os.path.isfile(path):
        return _locate_file(path)
    names = _names(path)
    if META_FILE in names or LOCK_FILE in names:
        return _locate_data_dir(path, names)
    if PARTITION_METADATA in names or any(map(_is_segment, names)):
        return Place(_data_dir_of(path), [PartitionFolder(path, names)])
    raise DataDirectoryError(
        f"{path} holds no log",
        advice="Give a data directory, the folder of a partition or a .log file.",
    )


def _is_segment(name: str) -> bool:
    stem = name.removesuffix(LOG_SUFFIX)
    return stem != name and stem.isdecimal() and len(stem) == STEM_DIGITS


def _locate_file(path: str) -> Place:
    folder, name = os.path.split(path)
    if not _is_segment(name):
        raise DataDirectoryError(
            f"{path} is not a segment of a log",
            advice="Give a file such as 00000000000000000000.log, or the folder it is in.",
        )
    base = int(name.removesuffix(LOG_SUFFIX))
    partition = PartitionFolder(folder, _names(folder), only_bases=(base,))
    return Place(_data_dir_of(folder), [partition])


def _locate_data_dir(path: str, names: tuple[str, ...]) -> Place:
    folders = [name for name in names if os.path.isdir(os.path.join(path, name))]
    deleted = tuple(name for name in folders if name.endswith(DELETED_SUFFIX))
    partitions = [
        PartitionFolder(full, _names(full))
        for name in folders
        if name not in deleted and is_partition_name(name)
        for full in [os.path.join(path, name)]
    ]
    return Place(path, partitions, whole=True, deleted=deleted)


def is_partition_name(name: str) -> bool:
    """Whether a folder's name is `TOPIC-NUMBER`."""
    topic, dash, number = name.rpartition("-")
    return bool(topic and dash and number.isdecimal())


def _data_dir_of(folder: str) -> str | None:
    parent = os.path.dirname(folder)
    return parent if os.path.exists(os.path.join(parent, META_FILE)) else None


def _names(folder: str) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError as error:
        raise DataDirectoryError(f"{folder} cannot be read: {error.strerror}") from error


def is_locked(data_dir: str) -> bool:
    """Whether a broker runs on the directory. The lock is not kept: a broker may start."""
    try:
        fd = os.open(os.path.join(data_dir, LOCK_FILE), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def read_bytes(path: str) -> bytes | None:
    """All of a small file; None if it is not there."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataDirectoryError(f"{path} cannot be read: {error.strerror}") from error


# ---- one log file ------------------------------------------------------------------------


class Intact(NamedTuple):
    """A whole batch with a right checksum. Its first 21 bytes are not under that checksum."""

    position: int
    header: BatchHeader


class Broken(NamedTuple):
    """A stretch of bytes that is no batch."""

    position: int
    end: int
    reason: str


class LogFile:
    """A `.log` file opened for reading; `walk` tells good stretches from bad ones."""

    def __init__(self, path: str, base_offset: int) -> None:
        self.path = path
        self.base_offset = base_offset
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataDirectoryError(f"{path} cannot be read: {error.strerror}") from error
        # A running broker may append: what comes later is not looked at.
        self.size = os.fstat(self._fd).st_size
        self._window = b""
        self._window_at = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def read(self, position: int, length: int) -> memoryview:
        """Exactly these bytes, or fewer where the file ends."""
        at = position - self._window_at
        if at < 0 or at + length > len(self._window):
            wanted = max(length, min(_WINDOW_BYTES, self.size - position))
            try:
                self._window = os.pread(self._fd, wanted, position)
            except OSError as error:
                raise DataDirectoryError(
                    f"{self.path} cannot be read at byte {position}: {error.strerror}",
                    advice="The disk may be failing: copy what can be copied and restore the rest.",
                ) from error
            self._window_at, at = position, 0
        return memoryview(self._window)[at : at + length]

    def walk(self) -> Iterator[Intact | Broken]:
        """The whole file as intact batches and broken stretches, in order."""
        position = 0
        while position < self.size:
            reason = self._fault(position)
            if reason is None:
                header = read_header(self.read(position, HEADER_SIZE))
                yield Intact(position, header)
                position += header.size
                continue
            end = self._next_intact(position)
            yield Broken(position, end, reason)
            position = end

    def _fault(self, position: int) -> str | None:
        """Why no intact batch begins here; None if one does."""
        left = self.size - position
        if left < HEADER_SIZE:
            return f"{left} bytes are too few for a batch header"
        header = read_header(self.read(position, HEADER_SIZE))
        if not MIN_BATCH_LENGTH <= header.batch_length <= left - LENGTH_BASE:
            return f"a batch length of {header.batch_length} does not fit the {left} bytes left"
        if self._checksum(position + CRC_START, header.size - CRC_START) != header.crc:
            return "the checksum of the batch is wrong"
        if header.magic != MAGIC:
            return f"the batch has format {header.magic}, expected {MAGIC}"
        if header.record_count < 0 or header.last_offset_delta < 0 or header.base_offset < 0:
            return "the batch has a negative count or offset"
        return None

    def _checksum(self, position: int, length: int) -> int:
        checksum, end = 0, position + length
        while position < end:
            data = self.read(position, min(_WINDOW_BYTES, end - position))
            if not data:
                break
            checksum = crc32c(data, checksum)
            position += len(data)
        return checksum

    def _next_intact(self, position: int) -> int:
        """Where the next intact batch begins after a broken one; the file's end if none does."""
        found = self._search(position + 1)
        if self.size - position < HEADER_SIZE:
            return found
        header = read_header(self.read(position, HEADER_SIZE))
        end = position + header.size
        # Most often the length is right and the harm elsewhere. But a wrong length may lead to
        # an intact batch as well, past others.
        if header.batch_length < MIN_BATCH_LENGTH or end > found:
            return found
        return end if end == self.size or self._fault(end) is None else found

    def _search(self, position: int) -> int:
        """Look for the format byte of a header, and believe it only with its checksum."""
        while self.size - position >= HEADER_SIZE:
            chunk = bytes(self.read(position, min(_WINDOW_BYTES, self.size - position)))
            hit = chunk.find(MAGIC, _MAGIC_AT)
            while hit >= 0:
                start = hit - _MAGIC_AT
                # Offsets lie close to the segment's base: most of what is no header ends here.
                relative = int.from_bytes(chunk[start : start + 8]) - self.base_offset
                if 0 <= relative <= MAX_RELATIVE and self._fault(position + start) is None:
                    return position + start
                hit = chunk.find(MAGIC, hit + 1)
            if len(chunk) <= _MAGIC_AT:
                break
            # A header may begin in the last bytes of this chunk.
            position += len(chunk) - _MAGIC_AT
        return self.size

    def holds_only_zeros(self, position: int) -> bool:
        """Whether the rest of the file was reserved but never written."""
        while position < self.size:
            data = bytes(self.read(position, min(_WINDOW_BYTES, self.size - position)))
            if not data or data.strip(b"\0"):
                return False
            position += len(data)
        return True
