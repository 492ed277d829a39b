"""Opening a partition: after a clean stop by believing its files, after a crash by checking.

A data directory says whether it was closed cleanly, and up to which offset each partition was
known to be synced (its *recovery point*). Then

- the point is at least the offset of the last producers' snapshot: that is written only when
  everything before it is on disk (see `sync`);
- segments that end at or below the recovery point are believed: they were synced, with their
  indexes, before the point moved past them;
- the others, in practice the active one, are read batch by batch with their checksums; the log
  ends before the first batch that is not whole, and whatever follows is cut off. So is a segment
  that does not begin where the one before it ends: part of that one is lost;
- but records *below* the recovery point that are damaged or missing are not a torn tail. They
  were acknowledged, and the disk has lost them: the partition opens with writes refused, and
  says so, rather than silently cutting off what is still readable;
- what was checked is synced, names included, before it counts: a process that was killed may
  have left it in the page cache only.

Leftovers of interrupted work come first: a compaction that was decided is carried out (see
`swap`), one that was not leaves `.cleaned` files that go, as do `.tmp` files and what is left of
removed segments.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Final

from penstock.errors import StorageError
from penstock.log.archive import load_archived
from penstock.log.clock import Clock
from penstock.log.config import TopicConfig
from penstock.log.disk import Disk
from penstock.log.partition import Partition, PartitionId
from penstock.log.producers import (
    load_snapshot,
    replay_producers,
    snapshot_offsets,
    snapshot_path,
)
from penstock.log.segment import (
    DERIVED_SUFFIXES,
    LOG_SUFFIX,
    SEGMENT_SUFFIXES,
    Segment,
    open_segment,
    segment_name,
)
from penstock.log.swap import CLEANED, finish_swap
from penstock.log.sync import (
    FAILED_SYNC_MARK,
    ClosedSegment,
    clear_failed_sync,
    finish_closed,
    mark_failed_sync,
)
from penstock.log.transactions import aborted_index, observe

log = logging.getLogger(__name__)

_ANY_EPOCH: Final = 0x7FFFFFFF
_LEFTOVERS: Final = (CLEANED, ".tmp")


@dataclass(frozen=True, slots=True)
class Known:
    """What the data directory says of a partition before it is opened."""

    clean: bool
    recovery_point: int = 0
    log_start: int = 0
    leader_epoch: int = 0


def open_partition(
    id_: PartitionId, disk: Disk, folder: str, config: TopicConfig, clock: Clock, known: Known
) -> Partition:
    """The partition in `folder`, which is made if it is not there."""
    absent = not disk.exists(folder)
    if absent:
        disk.make_dirs(folder)
        disk.sync_dir(os.path.dirname(folder))
    partition = Partition(id_, disk, folder, config, clock)
    partition.leader_epoch = known.leader_epoch
    partition.log_start = known.log_start
    finish_interrupted_work(disk, folder)
    partition.archived = load_archived(disk, folder)
    bases = segment_bases(disk, folder)
    if not bases:
        _open_empty(partition, known, absent=absent)
        return partition
    partition.epochs.load()
    # Epochs never fall, whatever the caller believes.
    partition.leader_epoch = max(known.leader_epoch, partition.epochs.latest)
    if known.clean:
        _open_clean(partition, bases, known.recovery_point)
    else:
        _open_after_crash(partition, bases, known.recovery_point)
    # All that counts is synced, and most partitions are not used at once.
    for segment in partition.segments:
        segment.park()
    return partition


def _open_empty(partition: Partition, known: Known, *, absent: bool) -> None:
    """No segment is there: a new partition, or one that has lost them all.

    Where not even the folder is there, somebody has taken it away: then the partition begins
    anew, behind the offsets that it had.
    """
    begin = max(known.log_start, partition.archived.end)
    if absent and begin < known.recovery_point:
        log.warning("%s is gone and begins anew at %d", partition.id, known.recovery_point)
        partition.log_start = known.recovery_point
    elif begin < known.recovery_point:
        _refuse(partition, begin, known.recovery_point)
    partition.adopt([], max(begin, known.recovery_point))


def segment_bases(disk: Disk, folder: str) -> list[int]:
    stems = [n.removesuffix(LOG_SUFFIX) for n in disk.names(folder) if n.endswith(LOG_SUFFIX)]
    return sorted(int(stem) for stem in stems if stem.isdigit())


def finish_interrupted_work(disk: Disk, folder: str) -> None:
    """Complete or undo what a crash interrupted."""
    finish_swap(disk, folder)
    names = disk.names(folder)
    logs = {name.removesuffix(LOG_SUFFIX) for name in names if name.endswith(LOG_SUFFIX)}
    for name in names:
        stem, suffix = os.path.splitext(name)
        stray = suffix in DERIVED_SUFFIXES and stem.isdigit() and stem not in logs
        if stray or name.endswith(_LEFTOVERS):
            disk.remove(os.path.join(folder, name))


def _open_clean(partition: Partition, bases: list[int], recovery_point: int) -> None:
    disk, folder = partition.disk, partition.folder
    segments = [open_segment(disk, folder, base) for base in bases]
    active = segments[-1]
    active.index_interval_bytes = partition.config.index_interval_bytes
    log_end = active.base_offset
    stored_digest = active.stored_digest()
    if stored_digest is None or stored_digest.size != active.size:
        active.rebuild_indexes()
    else:
        active.load_indexes()
        active.digest = stored_digest.digest
    # As long as it is written it is in memory.
    aborted_index(active)
    tail = active.index.floor_of_position(active.size)
    for at, header in active.scan(0):
        active.first_timestamp_ms = header.max_timestamp
        assert at == 0
        break
    end = tail
    for at, header in active.scan(tail):
        log_end, end = header.next_offset, at + header.size
    if end != active.size or max(log_end, partition.log_start) < recovery_point:
        # The stop was not as clean as the marker says.
        _open_after_crash(partition, bases, recovery_point)
        return
    active.bytes_since_index = active.size - tail
    stored = [offset for offset in snapshot_offsets(disk.names(folder)) if offset >= log_end]
    # The last segment may be empty while compaction removed the tail before it.
    log_end = max(log_end, stored[-1]) if stored else log_end
    stored_states = load_snapshot(disk, folder, log_end)
    partition.producers = stored_states or replay_producers(disk, folder, segments)
    for offset in snapshot_offsets(disk.names(folder)):
        if offset not in bases and offset != log_end:
            disk.remove(snapshot_path(folder, offset))
    partition.adopt(segments, log_end)


def _open_after_crash(partition: Partition, bases: list[int], recovery_point: int) -> None:
    disk, folder = partition.disk, partition.folder
    # A snapshot is written once everything before it is on disk.
    snapshots = snapshot_offsets(disk.names(folder))
    safe_to = max([recovery_point, *snapshots])
    # The recovery point may have been noted down while the segment that ends there was active.
    finished = max([recovery_point - 1, *snapshots])
    doubtful = max((at for at, base in enumerate(bases) if base <= finished), default=0)
    segments = [open_segment(disk, folder, base) for base in bases[:doubtful]]
    producers = load_snapshot(disk, folder, bases[doubtful])
    partition.producers = producers or replay_producers(disk, folder, segments)
    # If the epochs are lost, those in the records are all that is known.
    newest_epoch = partition.leader_epoch if partition.epochs.entries else _ANY_EPOCH
    closed: list[ClosedSegment] = []
    log_end = bases[doubtful]
    for at, base in enumerate(bases[doubtful:], doubtful):
        if not _continues(partition, base, log_end):
            # What came before is cut or lost, so nothing here was ever acknowledged.
            _discard(partition, bases[at:])
            break
        if at > doubtful:
            closed.append(ClosedSegment(segments[-1], base, partition.producers.to_bytes()))
        segment, log_end = _check_segment(partition, base, bases[at + 1 :], newest_epoch)
        segments.append(segment)
        if max(log_end, partition.log_start) < safe_to:
            _refuse(partition, log_end, safe_to)
            partition.adopt(segments, log_end)
            return
        _cut_torn_tail(partition, segment, log_end)
    _sync_segments(partition, segments[doubtful:])
    partition.epochs.truncate(log_end)
    # Not even the names are certain: the last process may have been killed before it synced them.
    if not partition.epochs.save():
        disk.sync_dir(folder)
    for item in closed:
        finish_closed(disk, folder, item)
    partition.adopt(segments, log_end)


def _continues(partition: Partition, offset: int, log_end: int) -> bool:
    """Whether the log may go on there; up to where it begins, records may be missing."""
    return offset == log_end or log_end < offset <= partition.log_start


def _check_segment(
    partition: Partition, base: int, following: list[int], newest_epoch: int
) -> tuple[Segment, int]:
    """The segment as far as it is whole, and where its records end; producers are taken in.

    A batch's offset and epoch are not under its checksum: torn, they must not pass. Only in a
    segment that was closed may records be missing, taken away by compaction.
    """
    path = os.path.join(partition.folder, segment_name(base) + LOG_SUFFIX)
    segment = Segment(partition.disk, partition.folder, base, partition.disk.open(path))
    segment.index_interval_bytes = partition.config.index_interval_bytes
    epochs = partition.epochs
    log_end, epoch = base, -1
    for at, header in segment.scan_verified():
        if following:
            in_place = header.next_offset <= following[0]
        else:
            in_place = _continues(partition, header.base_offset, log_end)
        if not in_place or not epoch <= header.leader_epoch <= newest_epoch:
            break
        if header.leader_epoch > epochs.latest:
            # It began here, and its note is lost.
            epochs.observe(header.leader_epoch, header.base_offset)
        elif not epochs.holds(header.leader_epoch, header.base_offset):
            break
        segment.observe(at, header)
        observe(segment, at, header, partition.producers)
        log_end, epoch = header.next_offset, header.leader_epoch
    return segment, log_end


def _cut_torn_tail(partition: Partition, segment: Segment, log_end: int) -> None:
    extra = segment.file.size() - segment.size
    if extra:
        log.warning("%s: %d bytes after offset %d are cut off", partition.id, extra, log_end)
        segment.file.truncate(segment.size)


def _sync_segments(partition: Partition, segments: list[Segment]) -> None:
    """Sync what was checked: it is read from the page cache, and may be nowhere else."""
    disk, folder = partition.disk, partition.folder
    suspect = disk.exists(os.path.join(folder, FAILED_SYNC_MARK))
    try:
        for segment in segments:
            if suspect:
                segment.write_again()
            else:
                segment.file.sync()
    except StorageError:
        mark_failed_sync(disk, folder)
        raise
    clear_failed_sync(disk, folder)


def _refuse(partition: Partition, log_end: int, safe_to: int) -> None:
    """Acknowledged records are damaged: keep every byte, and let a person decide."""
    error = StorageError(
        f"{partition.id} is damaged or cut off at offset {log_end}, below {safe_to}, up to which "
        "it was safe on disk before",
        advice="See what `penstock log verify` says. To go on without these records, move the "
        "partition's folder away while the broker is stopped: it begins anew behind them.",
    )
    partition.refuse_damaged(error, safe_to)


def _discard(partition: Partition, bases: list[int]) -> None:
    """Segments behind a torn one."""
    log.warning("%s: %d segments after a torn one are removed", partition.id, len(bases))
    for base in bases:
        for suffix in SEGMENT_SUFFIXES:
            path = os.path.join(partition.folder, segment_name(base) + suffix)
            partition.disk.remove(path)
