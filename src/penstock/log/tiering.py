"""Moving closed segments to the archive, and finding records there by time.

Of a segment the log, its indexes, its digest and the producers' snapshot at its end are copied,
once all of it lies below the last stable offset: readers of the archive need not know what is open.
The order of steps, after a crash between any two of which every record is still readable and
every object in the archive is listed, overwritten or removed later:

    archive a segment                          let expired ones go
    1. objects are put, read back, compared    1. the log starts later, checkpointed (retention)
    2. the manifest with it is put             2. the manifest without them is put
    3. the local copy of the manifest          3. the local copy of the manifest
    4. the local segment may go (retention)    4. objects are removed

So the local copy of the manifest, from which a restart knows what is archived, lists a segment
before its local files go, and what it lists in vain lies below the log's start. `reconcile`, once
a start, takes over a manifest that is ahead of the copy and removes objects that nobody lists.

Archived topics are not compacted, so a segment's bytes never change and putting it twice is the
same as once. Everything here blocks, except `time_lookup` and `max_lookup`, and runs on any thread,
one step of a partition at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from penstock.errors import StorageError
from penstock.log.archive import (
    LOCAL_COPY,
    MANIFEST_OBJECT,
    Archive,
    ArchivedLog,
    ArchivedSegment,
    Manifest,
    object_name,
    read_object,
)
from penstock.log.checkpoint import unseal
from penstock.log.disk import Disk, File, read_whole, write_atomically
from penstock.log.partition import Partition
from penstock.log.producers import snapshot_path
from penstock.log.segment import (
    DIGEST_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SEGMENT_SUFFIXES,
    SNAPSHOT_SUFFIX,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    Segment,
    open_segment,
)
from penstock.log.timesearch import TimestampedOffset
from penstock.log.transactions import aborted_index
from penstock.records import record

PARTITION_METADATA: Final = "partition.metadata"
# In the data directory: folders of the archive that belong to deleted partitions.
REMOVALS_FILE: Final = "archive-removals"
_COPY_BYTES: Final = 4 << 20


# ---- archiving -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Upload:
    """A closed segment of a partition that is to be archived."""

    disk: Disk
    folder: str
    base_offset: int
    end_offset: int
    now_ms: int

    def run(
        self, archive: Archive, target: str, stopped: Callable[[], bool] = lambda: False
    ) -> ArchivedSegment:
        """Copy it to the folder `target` of the archive; what the manifest shall say of it.

        Gives up with StorageError soon after `stopped` says so.
        """
        segment = open_segment(self.disk, self.folder, self.base_offset)
        try:
            last_offset = _check(segment)
            for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX, DIGEST_SUFFIX):
                self._put_file(archive, segment.path(suffix), target, suffix, stopped)
            index = aborted_index(segment)
            aborted = index.to_bytes()
            if aborted:
                _put_bytes(
                    archive, object_name(target, self.base_offset, TXN_INDEX_SUFFIX), aborted
                )
            # The producers as of the segment's end, under the segment's name.
            path = snapshot_path(self.folder, self.end_offset)
            if self.disk.exists(path):
                self._put_file(archive, path, target, SNAPSHOT_SUFFIX, stopped)
            name = object_name(target, self.base_offset, LOG_SUFFIX)
            checksum = _put_verified(archive, name, segment.file, segment.size, stopped)
            return ArchivedSegment(
                self.base_offset,
                last_offset,
                self.end_offset,
                segment.size,
                segment.max_timestamp_ms,
                self.now_ms,
                checksum,
                len(index.entries),
                crc32c(aborted),
            )
        finally:
            segment.close()

    def _put_file(
        self, archive: Archive, path: str, target: str, suffix: str, stopped: Callable[[], bool]
    ) -> None:
        file = self.disk.open(path)
        try:
            name = object_name(target, self.base_offset, suffix)
            _put_verified(archive, name, file, file.size(), stopped)
        finally:
            file.close()


def _check(segment: Segment) -> int:
    """The segment's last offset; StorageError if it is damaged: that is not to be archived."""
    end, last_offset = 0, segment.base_offset - 1
    for at, header in segment.scan_verified():
        end, last_offset = at + header.size, header.last_offset
    if end != segment.size:
        raise StorageError(f"{segment} is damaged at position {end} and was not archived")
    return last_offset


def _put_verified(
    archive: Archive, name: str, file: File, size: int, stopped: Callable[[], bool]
) -> int:
    """Put an object, read it back, and return its checksum."""
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for at in range(0, size, _COPY_BYTES):
            if stopped():
                raise StorageError(f"{name} was not archived: the broker stops")
            chunk = file.pread(min(_COPY_BYTES, size - at), at)
            sent = crc32c(chunk, sent)
            yield chunk

    archive.put(name, chunks(), size)
    stored = archive.size(name)
    if stored != size:
        raise StorageError(f"{name} has {stored} bytes in the archive instead of {size}")
    found = 0
    for at in range(0, size, _COPY_BYTES):
        found = crc32c(archive.get(name, at, min(_COPY_BYTES, size - at)), found)
    if found != sent:
        raise StorageError(f"{name} came out of the archive differently from how it went in")
    return sent


def _put_bytes(archive: Archive, name: str, data: bytes) -> None:
    """Put a small object and read it back."""
    archive.put(name, [data], len(data))
    if read_object(archive, name) != data:
        raise StorageError(f"{name} came out of the archive differently from how it went in")


def archive_folder(cluster_id: str, partition: Partition) -> str:
    """Where a partition's objects lie: told apart also from an earlier topic of the same name."""
    path = os.path.join(partition.folder, PARTITION_METADATA)
    text = unseal(read_whole(partition.disk, path)) or ""
    ids = [line.partition(":")[2].strip() for line in text.splitlines() if "topic_id:" in line]
    if not ids:
        raise StorageError(f"{path} does not say the topic's id")
    return f"{cluster_id}/{partition.id}-{ids[0]}"


def next_upload(partition: Partition) -> Upload | None:
    """The oldest closed segment that is not archived and is stable; on the partition's thread."""
    done, stable = partition.archived.end, partition.stable
    segments = partition.segments
    for at, segment in enumerate(partition.closed):
        end = segments[at + 1].base_offset
        if end > stable:
            break
        if segment.base_offset >= done and end > partition.log_start and segment.size:
            now_ms = partition.clock.now_ms()
            return Upload(partition.disk, partition.folder, segment.base_offset, end, now_ms)
    return None


def publish(archive: Archive, disk: Disk, folder: str, manifest: Manifest) -> None:
    """Write the manifest to the archive, then its copy in the partition's folder."""
    data = manifest.to_bytes()
    archive.put(f"{manifest.folder}/{MANIFEST_OBJECT}", [data], len(data))
    write_atomically(disk, os.path.join(folder, LOCAL_COPY), data)


def reconcile(archive: Archive, disk: Disk, folder: str, local: Manifest) -> Manifest:
    """The newest manifest there is; the local copy and the archive's objects agree with it."""
    data = read_object(archive, f"{local.folder}/{MANIFEST_OBJECT}")
    manifest = local
    if data is not None:
        stored = Manifest.from_bytes(data)
        if stored is None or stored.folder != local.folder:
            raise StorageError(
                f"the manifest of {local.folder} in the archive is damaged",
                advice=f"Replace it with {LOCAL_COPY} from the partition's folder.",
            )
        if stored.generation > local.generation:
            manifest = stored
            write_atomically(disk, os.path.join(folder, LOCAL_COPY), data)
    if manifest.segments and data is None:
        publish(archive, disk, folder, manifest)
    remove_unlisted(archive, manifest)
    return manifest


def remove_segments(archive: Archive, folder: str, segments: Iterable[ArchivedSegment]) -> None:
    """The objects of segments that the manifest no longer lists."""
    for segment in segments:
        for suffix in (*SEGMENT_SUFFIXES, SNAPSHOT_SUFFIX):
            archive.remove(object_name(folder, segment.base_offset, suffix))


def remove_unlisted(archive: Archive, manifest: Manifest) -> None:
    """Objects of uploads that did not complete, and of segments that expired."""
    suffixes = (*SEGMENT_SUFFIXES, SNAPSHOT_SUFFIX)
    listed = {
        object_name(manifest.folder, segment.base_offset, suffix)
        for segment in manifest.segments
        for suffix in suffixes
    }
    listed.add(f"{manifest.folder}/{MANIFEST_OBJECT}")
    for name in archive.names(manifest.folder):
        if name not in listed:
            archive.remove(name)


def remove_archived(archive: Archive, folder: str) -> None:
    """Everything of a partition that was deleted; the manifest goes last."""
    manifest = f"{folder}/{MANIFEST_OBJECT}"
    for name in archive.names(folder):
        if name != manifest:
            archive.remove(name)
    archive.remove(manifest)


# ---- lookups by time -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArchivedLookup:
    """A lookup by time that has to ask the archive."""

    log: ArchivedLog
    timestamp_ms: int
    log_start: int
    # Segments from here on are on the local disk, and are looked at there.
    local_start: int

    def load(self) -> TimestampedOffset | None:
        """The first archived record at or after the time; None: go on in the local log. Blocks."""
        for segment in self.log.segments:
            if segment.base_offset >= self.local_start:
                break
            if segment.max_timestamp_ms >= self.timestamp_ms:
                found = self._search(segment)
                if found is not None:
                    return found
        return None

    def _search(self, segment: ArchivedSegment) -> TimestampedOffset | None:
        reader = self.log.open_reader()
        folder = self.log.manifest.folder
        relative = reader.time_index(folder, segment).floor_offset(self.timestamp_ms)
        position = reader.offset_index(folder, segment).floor_position(relative)
        for header, batch in reader.scan(folder, segment, position):
            if header.max_timestamp < self.timestamp_ms or header.last_offset < self.log_start:
                continue
            for item in record.decode(batch):
                if item.timestamp_ms >= self.timestamp_ms and item.offset >= self.log_start:
                    return TimestampedOffset(item.offset, item.timestamp_ms, header.leader_epoch)
        return None


def time_lookup(partition: Partition, timestamp_ms: int) -> ArchivedLookup | None:
    """What to `load` before `Partition.offset_for_time`; None if the archive cannot know more."""
    local_start = partition.segments[0].base_offset
    if not any(
        item.base_offset < local_start and item.max_timestamp_ms >= timestamp_ms
        for item in partition.archived.segments
    ):
        return None
    return ArchivedLookup(partition.archived, timestamp_ms, partition.log_start, local_start)


def max_lookup(partition: Partition) -> ArchivedLookup | None:
    """What to `load` instead of `Partition.max_timestamp`; None if the answer is local."""
    local_start = partition.segments[0].base_offset
    archived = [
        item.max_timestamp_ms
        for item in partition.archived.segments
        if item.base_offset < local_start and item.last_offset >= partition.log_start
    ]
    newest = max(archived, default=-1)
    local = max(segment.max_timestamp_ms for segment in partition.segments)
    # The first record with the largest timestamp is wanted, and the archive is older.
    return time_lookup(partition, newest) if newest >= 0 and newest >= local else None
