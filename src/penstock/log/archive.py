"""The part of a partition's log that is in the archive: what is there, and reading it.

The *manifest* of a partition lists its archived segments in order. It is an object in the archive,
written after everything it lists, and the partition's folder holds a copy, written right after;
so the copy never promises more than the archive has. A segment may be in both places: then it is
read from the local disk. `ArchivedLog` is a manifest together with the way to the archive; it is
immutable and replaced whole, so that a read which has begun goes on with what it saw.

Reading the archive takes milliseconds to seconds, so a partition only says *what* to read
(`ArchivedRead`); the bytes come from `load`, on a thread that may wait. Indexes of archived
segments are kept in memory up to a bound, the longest unused go first. Which transactions were
aborted is told by the segments' own indexes of them; the manifest says which segments have one.

Where the objects lie is `archive_stores`; how they get there is `tiering`.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from crc32c import crc32c

from penstock.errors import CorruptBatchError, StorageError
from penstock.log.archive_stores import (
    Archive,
    DirectoryArchive,
    ObjectStoreArchive,
    open_archive,
    read_object,
)
from penstock.log.disk import Disk, read_whole
from penstock.log.index import OffsetIndex, TimeIndex
from penstock.log.segment import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    segment_name,
)
from penstock.log.txn_index import AbortedTransaction, TransactionIndex
from penstock.records.batch import (
    HEADER_SIZE,
    MIN_BATCH_LENGTH,
    BatchHeader,
    read_header,
    verify,
)

__all__ = [
    "NOTHING_ARCHIVED",
    "Archive",
    "ArchiveReader",
    "ArchivedLog",
    "ArchivedRead",
    "ArchivedSegment",
    "DirectoryArchive",
    "Manifest",
    "ObjectStoreArchive",
    "load_archived",
    "object_name",
    "open_archive",
    "read_object",
]

MANIFEST_OBJECT: Final = "manifest.json"
LOCAL_COPY: Final = "archive-manifest.json"

_VERSION: Final = 1
# What a scan fetches at a time, and a read beyond what it was asked for: the index leads only
# to the neighbourhood of a batch.
_CHUNK_BYTES: Final = 1 << 20
_SLACK_BYTES: Final = 64 * 1024
_CACHE_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class ArchivedSegment:
    """One segment in the archive."""

    base_offset: int
    # Of its last batch; `end_offset` is where the next segment begins, maybe after a gap.
    last_offset: int
    end_offset: int
    size: int
    max_timestamp_ms: int
    # When it was archived: from here counts the age of records without a time.
    archived_ms: int
    # CRC-32C of the whole log file.
    checksum: int
    # How many aborted transactions its index of them lists, and the index's CRC-32C.
    aborted: int = 0
    aborted_checksum: int = 0

    def to_row(self) -> dict[str, int]:
        """As the manifest has it: what most segments do not have is left out."""
        row = asdict(self)
        return (
            row if self.aborted else {k: v for k, v in row.items() if not k.startswith("aborted")}
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """The archived segments of a partition, in order, and the folder where they lie."""

    folder: str = ""
    # Rises with each change: of two manifests the higher is the newer.
    generation: int = 0
    segments: tuple[ArchivedSegment, ...] = ()

    def to_bytes(self) -> bytes:
        rows = [segment.to_row() for segment in self.segments]
        document = {
            "version": _VERSION,
            "folder": self.folder,
            "generation": self.generation,
            "segments": rows,
        }
        # A changed digit would pass for another offset.
        document["crc32c"] = f"{crc32c(json.dumps(document).encode()):08x}"
        return json.dumps(document, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest | None:
        """None if it is not a whole manifest of this version."""
        try:
            document = json.loads(data)
            if document["version"] != _VERSION:
                return None
            segments = tuple(ArchivedSegment(**row) for row in document["segments"])
            manifest = cls(str(document["folder"]), int(document["generation"]), segments)
            return manifest if manifest.to_bytes() == data else None
        except (ValueError, KeyError, TypeError):
            return None

    def with_segment(self, segment: ArchivedSegment) -> Manifest:
        segments = (*self.segments, segment)
        return replace(self, generation=self.generation + 1, segments=segments)

    def from_offset(self, offset: int) -> Manifest:
        """Without the segments that end at or below the offset."""
        segments = tuple(s for s in self.segments if s.end_offset > offset)
        return replace(self, generation=self.generation + 1, segments=segments)


_Index = OffsetIndex | TimeIndex | TransactionIndex


class ArchiveReader:
    """An archive, and the indexes that were fetched from it lately. Safe from any thread."""

    def __init__(self, archive: Archive, cache_bytes: int = _CACHE_BYTES) -> None:
        self.archive = archive
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._cache: OrderedDict[str, tuple[_Index, int]] = OrderedDict()
        self._lock = threading.Lock()

    def offset_index(self, folder: str, segment: ArchivedSegment) -> OffsetIndex:
        name = object_name(folder, segment.base_offset, INDEX_SUFFIX)
        found = self._cached(name)
        if not isinstance(found, OffsetIndex):
            data = self._fetch(name)
            # Without a sound index the search begins at the start of the segment.
            found = OffsetIndex.from_bytes(data, segment.size) or OffsetIndex()
            self._keep(name, found, len(data))
        return found

    def time_index(self, folder: str, segment: ArchivedSegment) -> TimeIndex:
        name = object_name(folder, segment.base_offset, TIME_INDEX_SUFFIX)
        found = self._cached(name)
        if not isinstance(found, TimeIndex):
            data = self._fetch(name)
            found = TimeIndex.from_bytes(data) or TimeIndex()
            self._keep(name, found, len(data))
        return found

    def aborted_index(self, folder: str, segment: ArchivedSegment) -> TransactionIndex:
        """Of a segment that has one. Without it nobody can tell which records are void."""
        name = object_name(folder, segment.base_offset, TXN_INDEX_SUFFIX)
        found = self._cached(name)
        if not isinstance(found, TransactionIndex):
            data = self._fetch(name)
            read = TransactionIndex.from_bytes(data)
            if read is None or crc32c(data) != segment.aborted_checksum:
                raise StorageError(f"{name} in the archive is damaged or missing")
            found = read
            self._keep(name, found, len(data))
        return found

    def _fetch(self, name: str) -> bytes:
        return read_object(self.archive, name) or b""

    def _cached(self, name: str) -> _Index | None:
        with self._lock:
            entry = self._cache.get(name)
            if entry is None:
                return None
            self._cache.move_to_end(name)
            return entry[0]

    def _keep(self, name: str, index: _Index, size: int) -> None:
        with self._lock:
            previous = self._cache.pop(name, None)
            self._cached_bytes += size - (previous[1] if previous else 0)
            self._cache[name] = index, size
            while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
                _, (_, freed) = self._cache.popitem(last=False)
                self._cached_bytes -= freed

    @property
    def cached_bytes(self) -> int:
        return self._cached_bytes

    def fetch(self, folder: str, segment: ArchivedSegment, position: int, length: int) -> bytes:
        """A piece of the segment's log; all of it or StorageError."""
        wanted = min(length, segment.size - position)
        name = object_name(folder, segment.base_offset, LOG_SUFFIX)
        data = self.archive.get(name, position, wanted) if wanted > 0 else b""
        if len(data) != max(wanted, 0):
            raise StorageError(f"{name} in the archive is shorter than {segment.size} bytes")
        return data

    def scan(
        self,
        folder: str,
        segment: ArchivedSegment,
        position: int,
        wanted: Callable[[BatchHeader], bool] = lambda _header: True,
        step: int = _CHUNK_BYTES,
    ) -> Iterator[tuple[BatchHeader, bytes]]:
        """Header and bytes of each batch from `position` to the first not wanted, checked."""
        chunk, at = b"", 0
        while position < segment.size:
            if at + HEADER_SIZE > len(chunk):
                chunk, at = self.fetch(folder, segment, position, step), 0
            header = _sound_header(chunk, at, segment.size - position)
            if not wanted(header):
                return
            if at + header.size > len(chunk):
                chunk, at = self.fetch(folder, segment, position, max(step, header.size)), 0
            try:
                verify(chunk, at)
            except CorruptBatchError as error:
                raise StorageError(f"the archive's copy is damaged: {error}") from error
            yield header, chunk[at : at + header.size]
            at += header.size
            position += header.size


def _sound_header(chunk: bytes, at: int, left: int) -> BatchHeader:
    if len(chunk) - at < HEADER_SIZE:
        raise StorageError("the archive's copy ends in the middle of a batch")
    header = read_header(chunk, at)
    if header.batch_length < MIN_BATCH_LENGTH or header.size > left:
        raise StorageError("the archive's copy is damaged: a batch does not fit")
    return header


@dataclass(frozen=True, slots=True)
class ArchivedLog:
    """What of a partition is archived. `reader` is None while no archive is configured."""

    manifest: Manifest = field(default_factory=Manifest)
    reader: ArchiveReader | None = None

    @property
    def segments(self) -> tuple[ArchivedSegment, ...]:
        return self.manifest.segments

    @property
    def end(self) -> int:
        """The next segment to be archived begins at or after this."""
        return self.segments[-1].end_offset if self.segments else 0

    def earliest(self, local_start: int) -> int:
        """Where a log begins whose local part begins at `local_start`."""
        return min(self.segments[0].base_offset, local_start) if self.segments else local_start

    def read(
        self, offset: int, max_bytes: int, *, whole_first: bool, limit: int
    ) -> ArchivedRead | None:
        """What to load for the offset; None if the archive holds nothing from there on."""
        at = bisect_left(self.segments, offset, key=_last_offset)
        if at == len(self.segments):
            return None
        return ArchivedRead(self, self.segments[at], offset, max_bytes, whole_first, limit)

    def aborted_transactions(self, start: int, end: int) -> list[AbortedTransaction]:
        """Those that reach into [start, end), as far as their markers are archived. Blocks."""
        found: list[AbortedTransaction] = []
        for segment in self.segments[bisect_left(self.segments, start, key=_last_offset) :]:
            if segment.aborted:
                index = self.open_reader().aborted_index(self.manifest.folder, segment)
                if index.collect(start, end, found):
                    break
        return found

    def open_reader(self) -> ArchiveReader:
        if self.reader is None:
            raise StorageError(
                f"{self.manifest.folder} was archived, and no archive is configured",
                advice="Start the broker with the archive that it had before.",
            )
        return self.reader


NOTHING_ARCHIVED: Final = ArchivedLog()


def _last_offset(segment: ArchivedSegment) -> int:
    return segment.last_offset


@dataclass(frozen=True, slots=True)
class ArchivedRead:
    """Batches that are only in the archive, yet to be fetched."""

    log: ArchivedLog
    segment: ArchivedSegment
    offset: int
    max_bytes: int
    whole_first: bool
    limit: int

    def load(self) -> bytes:
        """Fetch them; blocks. Whole batches from the one that holds the offset.

        At most `max_bytes`, except that with `whole_first` the first batch comes in any case.
        """
        reader = self.log.open_reader()
        folder = self.log.manifest.folder
        index = reader.offset_index(folder, self.segment)
        position = index.floor_position(self.offset - self.segment.base_offset)
        step = max(self.max_bytes, 0) + _SLACK_BYTES
        parts: list[bytes] = []
        left = self.max_bytes

        def wanted(header: BatchHeader) -> bool:
            if header.last_offset < self.offset:
                return True
            fits = header.size <= left or (self.whole_first and not parts)
            return fits and header.base_offset < self.limit

        for header, batch in reader.scan(folder, self.segment, position, wanted, step):
            if header.last_offset >= self.offset:
                parts.append(batch)
                left -= header.size
        return b"".join(parts)


def object_name(folder: str, base_offset: int, suffix: str) -> str:
    return f"{folder}/{segment_name(base_offset)}{suffix}"


def load_archived(disk: Disk, folder: str) -> ArchivedLog:
    """What the copy of the manifest in a partition's folder says."""
    path = os.path.join(folder, LOCAL_COPY)
    if not disk.exists(path):
        return NOTHING_ARCHIVED
    manifest = Manifest.from_bytes(read_whole(disk, path))
    if manifest is None:
        raise StorageError(
            f"{path} is damaged",
            advice=f"Replace it with {MANIFEST_OBJECT} from the partition's folder in the archive.",
        )
    return ArchivedLog(manifest)
