"""A stretch of one partition: a `.log` file of record batches with its indexes.

Invariants
- Batches lie end to end; offsets rise. The file is named by the segment's base offset.
- Only the last segment of a partition is written; a closed one changes only by being replaced
  whole (compaction) or removed.
- `size` counts complete, acknowledged-or-pending batches. Bytes past `size` in the file are the
  remains of a failed write and are overwritten or cut.
- `digest` is a running checksum over the first 21 bytes of every batch, the ones that a batch's
  own checksum does not cover. With it, `penstock log verify` finds any changed byte.
- The indexes are in memory while the segment is active; of a closed segment they are loaded
  when first needed and let go when not used (`release`).
- The log file is opened when it is first needed, and an idle one may be closed (`park`): a broker
  may have more partitions than a process may have files.
- The third index, of aborted transactions, follows from the log only together with what was open
  at its start. So it is not rebuilt here: `transactions.aborted_index` loads or makes it.

Not safe from two threads, except that a `File` may be read and synced from any.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

from penstock.errors import CorruptBatchError, StorageError
from penstock.log.disk import Buffer, ClosedFile, Disk, File, read_whole
from penstock.log.index import (
    MAX_RELATIVE,
    TIME_ENTRY,
    TIME_ENTRY_SIZE,
    OffsetIndex,
    TimeIndex,
)
from penstock.log.txn_index import TransactionIndex
from penstock.records.batch import (
    CRC_START,
    HEADER,
    HEADER_SIZE,
    MIN_BATCH_LENGTH,
    NO_TIMESTAMP,
    BatchHeader,
    read_header,
    verify,
)

LOG_SUFFIX: Final = ".log"
INDEX_SUFFIX: Final = ".index"
TIME_INDEX_SUFFIX: Final = ".timeindex"
TXN_INDEX_SUFFIX: Final = ".txnindex"
DIGEST_SUFFIX: Final = ".digest"
SNAPSHOT_SUFFIX: Final = ".snapshot"
# What is stored beside the log of a closed segment, all of it made from the log. The index of
# aborted transactions is there only where it has, or had, entries.
DERIVED_SUFFIXES: Final = (INDEX_SUFFIX, TIME_INDEX_SUFFIX, TXN_INDEX_SUFFIX, DIGEST_SUFFIX)
SEGMENT_SUFFIXES: Final = (LOG_SUFFIX, *DERIVED_SUFFIXES)

# Scans read ahead this much: a few index intervals, small enough to be cheap when unneeded.
_PROBE_BYTES: Final = 8 * 1024
_SCAN_BYTES: Final = 1 << 20


def segment_name(base_offset: int) -> str:
    return f"{base_offset:020d}"


class StoredDigest(NamedTuple):
    """What a `.digest` file says: the log's size and digest, and the checksums of its indexes."""

    size: int
    digest: int
    offset_index: int
    time_index: int
    # None: there are no aborted transactions.
    aborted: int | None = None

    def to_bytes(self) -> bytes:
        line = f"{self.size} {self.digest:08x} {self.offset_index:08x} {self.time_index:08x}"
        return (line if self.aborted is None else f"{line} {self.aborted:08x}").encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> StoredDigest | None:
        """None if it is not written the way they are written."""
        try:
            size, *sums = data.decode("ascii").removesuffix("\n").split(" ")
            found = cls(int(size), *(int(text, 16) for text in sums))
        except (ValueError, TypeError):
            return None
        return found if found.to_bytes() == data else None


def digest_of(
    size: int, digest: int, index: bytes, time_index: bytes, aborted: bytes = b""
) -> StoredDigest:
    return StoredDigest(
        size, digest, crc32c(index), crc32c(time_index), crc32c(aborted) if aborted else None
    )


class Segment:
    """One segment; `open_segment` and `create_segment` make them."""

    __slots__ = (
        "_file", "_index", "_time_index", "aborted", "base_offset", "bytes_since_index", "digest",
        "disk", "file_used", "first_timestamp_ms", "folder", "index_interval_bytes",
        "last_modified_ms", "max_timestamp_ms", "max_timestamp_offset", "pinned", "size", "used",
    )  # fmt: skip

    def __init__(self, disk: Disk, folder: str, base_offset: int, file: File | None = None) -> None:
        self.disk = disk
        self.folder = folder
        self.base_offset = base_offset
        self._file = file
        # Whether the file was asked for since someone last looked.
        self.file_used = True
        # Whether its name means another file, or is about to: then it is never opened again.
        self.pinned = False
        self.size = 0
        self.index_interval_bytes = 4096
        self.bytes_since_index = 0
        self.digest = 0
        self.first_timestamp_ms = NO_TIMESTAMP
        self.max_timestamp_ms = NO_TIMESTAMP
        self.max_timestamp_offset = -1
        self.last_modified_ms = 0
        # Whether the indexes were asked for since someone last looked.
        self.used = False
        self._index: OffsetIndex | None = OffsetIndex()
        self._time_index: TimeIndex | None = TimeIndex()
        # None: not in memory, see `transactions.aborted_index`.
        self.aborted: TransactionIndex | None = TransactionIndex()

    def __repr__(self) -> str:
        return f"Segment({self.path(LOG_SUFFIX)}, {self.size} bytes)"

    def path(self, suffix: str) -> str:
        return os.path.join(self.folder, segment_name(self.base_offset) + suffix)

    # ---- the file ------------------------------------------------------------------------

    @property
    def file(self) -> File:
        """The log file; whoever holds it can go on with it whatever becomes of the segment."""
        file = self._file
        if file is None:
            file = self._file = self.disk.open(self.path(LOG_SUFFIX))
        self.file_used = True
        return file

    def open(self) -> None:
        """Open the log file now, to learn whether that can be done."""
        _ = self.file

    @property
    def is_open(self) -> bool:
        """Whether it has its file open."""
        return self._file is not None

    def holds(self, file: File) -> bool:
        """Whether this is its log file, and open."""
        return self._file is file

    def park(self) -> None:
        """Let go of the file until it is needed again; only if all in it is synced.

        What a failed sync is told of is lost with the descriptor.
        """
        if not self.pinned:
            self._file = None

    def forbid(self) -> None:
        """Another file will have this one's name: never open it again."""
        self.pinned = True
        if self._file is None:
            self._file = ClosedFile(self.path(LOG_SUFFIX))

    # ---- writing -------------------------------------------------------------------------

    def fits(self, last_offset: int) -> bool:
        """Whether the offset can still be told relative to the base."""
        return last_offset - self.base_offset <= MAX_RELATIVE

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Put whole batches behind the last; `account` for each of them follows."""
        self.file.pwritev(buffers, self.size)

    def account(
        self, head: Buffer, position: int, size: int, last_offset: int, max_timestamp_ms: int
    ) -> None:
        """Take one written batch, of which `head` is the start, into indexes and totals."""
        self.digest = crc32c(head[:CRC_START], self.digest)
        if self.first_timestamp_ms == NO_TIMESTAMP:
            self.first_timestamp_ms = max_timestamp_ms
        if max_timestamp_ms > self.max_timestamp_ms:
            self.max_timestamp_ms = max_timestamp_ms
            self.max_timestamp_offset = last_offset
        if self.bytes_since_index > self.index_interval_bytes:
            self.index.append(last_offset - self.base_offset, position)
            self._index_time()
            self.bytes_since_index = 0
        self.bytes_since_index += size
        self.size = position + size

    def _index_time(self) -> None:
        if self.max_timestamp_ms >= 0:
            relative = self.max_timestamp_offset - self.base_offset
            self.time_index.append(self.max_timestamp_ms, relative)

    def indexes_are_stored(self) -> bool:
        """Whether the disk has them as they are now, from an earlier clean stop."""
        return self.stored_digest() == self.contents()[0]

    def contents(self) -> tuple[StoredDigest, bytes, bytes, bytes]:
        """The indexes as they are stored, and the digest that goes with them."""
        self._index_time()
        index, time_index = self.index.to_bytes(), self.time_index.to_bytes()
        path = self.path(TXN_INDEX_SUFFIX)
        if self.aborted is not None:
            aborted = self.aborted.to_bytes()
        else:
            # As it was stored.
            aborted = read_whole(self.disk, path) if self.disk.exists(path) else b""
        known = digest_of(self.size, self.digest, index, time_index, aborted)
        return known, index, time_index, aborted

    def write_indexes(self) -> None:
        """Store indexes and digest, synced; their names are the caller's to sync.

        The last entry of the time index is the segment's largest timestamp.
        """
        known, index, time_index, aborted = self.contents()
        files = [(INDEX_SUFFIX, index), (TIME_INDEX_SUFFIX, time_index)]
        if aborted or self.had_aborted():
            files.append((TXN_INDEX_SUFFIX, aborted))
        for suffix, data in (*files, (DIGEST_SUFFIX, known.to_bytes())):
            file = self.disk.open(self.path(suffix), create=True)
            try:
                file.truncate(0)
                if data:
                    file.pwritev([data], 0)
                file.sync()
            finally:
                file.close()

    def had_aborted(self) -> bool:
        """Whether an index of aborted transactions is there, and must be emptied if it is wrong."""
        return self.disk.exists(self.path(TXN_INDEX_SUFFIX))

    def write_again(self) -> None:
        """Write all that is there once more and sync it.

        After a failed sync this alone brings to disk what may be in the page cache only.
        """
        for at in range(0, self.size, _SCAN_BYTES):
            self.file.pwritev([self._read(at, _SCAN_BYTES, self.size)], at)
        self.file.sync()

    def truncate(self, position: int) -> None:
        """Cut the file at a batch boundary; indexes and totals are made anew from the rest."""
        if self.aborted is None:
            self.aborted = self.stored_aborted()
        self.file.truncate(position)
        self.size = position
        end = self.base_offset
        for _, header in self.scan(0):
            end = header.next_offset
        if self.aborted is not None:
            self.aborted.truncate(end)
        self.rebuild_indexes()

    # ---- reading -------------------------------------------------------------------------

    @property
    def index(self) -> OffsetIndex:
        self.used = True
        if self._index is None:
            self.load_indexes()
            assert self._index is not None
        return self._index

    @property
    def time_index(self) -> TimeIndex:
        if self._time_index is None:
            self.load_indexes()
            assert self._time_index is not None
        return self._time_index

    def set_indexes(self, index: OffsetIndex, time_index: TimeIndex) -> None:
        """Begin with what was stored of them elsewhere."""
        self._index, self._time_index = index, time_index

    def load_indexes(self) -> None:
        """From disk where they are sound, otherwise anew from the log."""
        self.preload_indexes()
        if self._index is None or self._time_index is None:
            self.rebuild_indexes()

    def preload_indexes(self) -> None:
        """From disk if they are sound there and not in memory; a closed segment's on any thread."""
        if self.aborted is None:
            self.aborted = self.stored_aborted()
        paths = self.path(INDEX_SUFFIX), self.path(TIME_INDEX_SUFFIX)
        in_memory = self._index is not None and self._time_index is not None
        if in_memory or not all(map(self.disk.exists, paths)):
            return
        stored = [read_whole(self.disk, path) for path in paths]
        known = self.stored_digest()
        # A changed entry would send readers to the wrong place without anyone noticing.
        sums = (self.size, crc32c(stored[0]), crc32c(stored[1]))
        if known is not None and (known.size, known.offset_index, known.time_index) != sums:
            return
        index = OffsetIndex.from_bytes(stored[0], self.size)
        time_index = TimeIndex.from_bytes(stored[1])
        if index is not None and time_index is not None:
            self._index, self._time_index = index, time_index

    def load_max_timestamp(self) -> None:
        """The segment's largest timestamp: the last entry of its stored time index."""
        path = self.path(TIME_INDEX_SUFFIX)
        data = read_whole(self.disk, path) if self.disk.exists(path) else b""
        known = self.stored_digest()
        # Retention goes by this: a changed digit must not remove records before their time.
        if known is None:
            doubtful = bool(self.size and not data)
        else:
            # An empty index is right where no record has a time.
            doubtful = (known.size, known.time_index) != (self.size, crc32c(data))
            if not doubtful and known.aborted is None:
                self.aborted = TransactionIndex()
        if doubtful or len(data) % TIME_ENTRY_SIZE:
            self.rebuild_indexes()
        elif data:
            last = len(data) - TIME_ENTRY_SIZE
            self.max_timestamp_ms, relative = TIME_ENTRY.unpack_from(data, last)
            self.max_timestamp_offset = self.base_offset + relative

    def rebuild_indexes(self) -> None:
        """Both indexes from the batch headers; they stay in memory."""
        end, self.size, self.bytes_since_index = self.size, 0, 0
        self._index, self._time_index = OffsetIndex(), TimeIndex()
        self.max_timestamp_ms = self.first_timestamp_ms = NO_TIMESTAMP
        self.max_timestamp_offset, self.digest = -1, 0
        try:
            for at, header in self.scan(0, end):
                self.observe(at, header)
        except StorageError:
            # Half an index would hide the rest of the segment.
            self._index = self._time_index = None
            raise
        finally:
            self.size = end

    def observe(self, position: int, header: BatchHeader) -> None:
        """`account` for a batch that is in the log already."""
        head = HEADER.pack(*header)
        self.account(head, position, header.size, header.last_offset, header.max_timestamp)

    def stored_digest(self) -> StoredDigest | None:
        """What was stored of the segment with its indexes; None if nothing that can be read."""
        path = self.path(DIGEST_SUFFIX)
        if not self.disk.exists(path):
            return None
        return StoredDigest.from_bytes(read_whole(self.disk, path))

    def stored_aborted(self) -> TransactionIndex | None:
        """The index of aborted transactions on disk; None if it is not sound."""
        known = self.stored_digest()
        if known is None or known.size != self.size:
            # Nothing vouches for it: not for an entry, nor for there being none.
            return None
        if known.aborted is None:
            return TransactionIndex()
        path = self.path(TXN_INDEX_SUFFIX)
        data = read_whole(self.disk, path) if self.disk.exists(path) else b""
        return TransactionIndex.from_bytes(data) if crc32c(data) == known.aborted else None

    def release(self) -> None:
        """Let the indexes go from memory; only for closed segments whose indexes are stored."""
        self._index = self._time_index = None
        if self.aborted is not None and self.aborted.entries:
            self.aborted = None

    def scan(self, position: int, end: int | None = None) -> Iterator[tuple[int, BatchHeader]]:
        """Positions and headers of the batches from `position` on, unverified."""
        stop = self.size if end is None else end
        step = _PROBE_BYTES
        while position + HEADER_SIZE <= stop:
            chunk = self.file.pread(min(step, stop - position), position)
            at = 0
            while at + HEADER_SIZE <= len(chunk):
                header = read_header(chunk, at)
                if header.batch_length < MIN_BATCH_LENGTH or position + at + header.size > stop:
                    return
                yield position + at, header
                at += header.size
            # The chunk ended within a batch, or a batch reaches beyond the chunk: go on there.
            if at == 0:
                return
            # Read further ahead only where batches are small enough for it to save reads.
            step = min(step * 4, _SCAN_BYTES) if at <= len(chunk) else _PROBE_BYTES
            position += at

    def scan_verified(self, position: int = 0) -> Iterator[tuple[int, BatchHeader]]:
        """The batches from `position` up to the file's end or the first that is not whole.

        For recovery: looks at the file as it is, past `size`, and believes nothing unchecked.
        Ends without an error; the caller compares where it ended with the file's size.
        """
        stop = self.file.size()
        last_offset = self.base_offset - 1
        chunk, chunk_at = b"", position
        while position + HEADER_SIZE <= stop:
            at = position - chunk_at
            if at + HEADER_SIZE > len(chunk):
                chunk, chunk_at, at = self._read(position, _SCAN_BYTES, stop), position, 0
            header = read_header(chunk, at)
            if header.batch_length < MIN_BATCH_LENGTH or position + header.size > stop:
                return
            if at + header.size > len(chunk):
                length = max(_SCAN_BYTES, header.size)
                chunk, chunk_at, at = self._read(position, length, stop), position, 0
            try:
                verify(chunk, at)
            except CorruptBatchError:
                return
            if header.base_offset <= last_offset:
                return
            last_offset = header.last_offset
            yield position, header
            position += header.size

    def _read(self, position: int, length: int, stop: int) -> bytes:
        """Up to `length` bytes even where the system hands out fewer at a time."""
        wanted = min(length, stop - position)
        data = self.file.pread(wanted, position)
        while len(data) < wanted:
            more = self.file.pread(wanted - len(data), position + len(data))
            if not more:
                break
            data += more
        return data

    def find(self, offset: int) -> tuple[int, BatchHeader] | None:
        """Position and header of the first batch whose last offset is not below `offset`."""
        start = self.index.floor_position(offset - self.base_offset)
        for at, header in self.scan(start):
            if header.last_offset >= offset:
                return at, header
        return None

    def find_by_time(self, timestamp_ms: int) -> tuple[int, BatchHeader] | None:
        """The first batch that holds a record at or after the timestamp."""
        if self.max_timestamp_ms < timestamp_ms:
            return None
        relative = self.time_index.floor_offset(timestamp_ms)
        for at, header in self.scan(self.index.floor_position(relative)):
            if header.max_timestamp >= timestamp_ms:
                return at, header
        return None

    def end_of_slice(self, position: int, max_bytes: int, limit: int) -> int:
        """The last batch boundary within `max_bytes` of `position`, not past `limit`.

        `position` itself if not even one batch fits.
        """
        wanted = position + max_bytes
        if wanted >= limit:
            return limit
        end = self.index.floor_of_position(wanted)
        if end > position:
            return end
        end = position
        for at, header in self.scan(position, limit):
            if at + header.size > wanted:
                break
            end = at + header.size
        return end

    def batch_at(self, position: int, header: BatchHeader) -> bytes:
        """The whole batch."""
        return self._read(position, header.size, self.size)

    # ---- end of life ---------------------------------------------------------------------

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self.forbid()

    def remove(self) -> None:
        """Unlink the files. Whoever still reads holds the file open and goes on undisturbed."""
        for suffix in (*SEGMENT_SUFFIXES, SNAPSHOT_SUFFIX):
            self.disk.remove(self.path(suffix))


def create_segment(disk: Disk, folder: str, base_offset: int) -> Segment:
    """A new, empty segment; an abandoned file of the same name is emptied."""
    path = os.path.join(folder, segment_name(base_offset) + LOG_SUFFIX)
    file = disk.open(path, create=True)
    if file.size():
        file.truncate(0)
    return Segment(disk, folder, base_offset, file)


def open_segment(disk: Disk, folder: str, base_offset: int) -> Segment:
    """A segment that is already there, believed as far as its size; indexes stay on disk."""
    segment = Segment(disk, folder, base_offset)
    segment.size = segment.file.size()
    segment.release()
    segment.aborted = None
    segment.load_max_timestamp()
    # Whoever opens one opens thousands.
    segment.park()
    return segment
