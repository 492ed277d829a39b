"""Opening a partition: after a clean stop by believing its files, after a crash by checking.

A data directory says whether it was closed cleanly, and up to which offset each partition was
known to be synced (its *recovery point*). Then

- segments that end at or below the recovery point are believed: they were synced, with their
  indexes, before the point moved past them;
- the others, in practice the active one, are read batch by batch with their checksums; the log
  ends before the first batch that is not whole, and whatever follows is cut off;
- but a batch *below* the recovery point that fails its checksum is not a torn tail. It was
  acknowledged, and the disk has lost it: the partition opens with writes refused, and says so,
  rather than silently cutting off what is still readable.

Leftovers of interrupted work are finished or removed first: `.cleaned` (compaction that did not
complete) goes, `.swap` (compaction that did) takes its place, `.deleted` and `.tmp` go.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Final

from penstock.errors import StorageError
from penstock.log.clock import Clock
from penstock.log.config import TopicConfig
from penstock.log.disk import Disk
from penstock.log.partition import Partition, PartitionId
from penstock.log.producers import (
    KEPT_BATCHES,
    BatchMeta,
    Producer,
    ProducerStates,
    load_snapshot,
    snapshot_offsets,
    snapshot_path,
)
from penstock.log.segment import (
    LOG_SUFFIX,
    SEGMENT_SUFFIXES,
    Segment,
    open_segment,
    segment_name,
)

log = logging.getLogger(__name__)

CLEANED: Final = ".cleaned"
SWAP: Final = ".swap"
_LEFTOVERS: Final = (CLEANED, ".deleted", ".tmp")
# After a clean stop this much of the tail is looked at for the producers' latest batches.
_PRODUCER_TAIL_BYTES: Final = 1 << 20


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
    fresh = not disk.exists(folder)
    if fresh:
        disk.make_dirs(folder)
        disk.sync_dir(os.path.dirname(folder))
    partition = Partition(id_, disk, folder, config, clock)
    partition.leader_epoch = known.leader_epoch
    partition.log_start = known.log_start
    finish_interrupted_work(disk, folder)
    bases = segment_bases(disk, folder)
    if fresh or not bases:
        partition.adopt([], known.log_start)
        return partition
    partition.epochs.load()
    if known.clean:
        _open_clean(partition, bases)
    else:
        _open_after_crash(partition, bases, known.recovery_point)
    return partition


def segment_bases(disk: Disk, folder: str) -> list[int]:
    stems = [n.removesuffix(LOG_SUFFIX) for n in disk.names(folder) if n.endswith(LOG_SUFFIX)]
    return sorted(int(stem) for stem in stems if stem.isdigit())


def finish_interrupted_work(disk: Disk, folder: str) -> None:
    """Complete or undo what a crash interrupted; see `compaction` for the order of renames."""
    names = disk.names(folder)
    for name in names:
        if name.endswith(_LEFTOVERS):
            disk.remove(os.path.join(folder, name))
    swaps = [name for name in names if name.endswith(LOG_SUFFIX + SWAP)]
    for name in swaps:
        _finish_swap(disk, folder, name.removesuffix(SWAP))
    if swaps:
        disk.sync_dir(folder)


def _finish_swap(disk: Disk, folder: str, name: str) -> None:
    """A compacted segment that was complete takes the place of those it was made from."""
    path = os.path.join(folder, name)
    base = int(name.removesuffix(LOG_SUFFIX))
    replacement = disk.open(path + SWAP)
    covered = Segment(disk, folder, base, replacement)
    covered.size = replacement.size()
    last = base
    for _, header in covered.scan(0):
        last = header.last_offset
    replacement.close()
    for other in segment_bases(disk, folder):
        if base <= other <= last:
            for suffix in SEGMENT_SUFFIXES:
                disk.remove(os.path.join(folder, segment_name(other) + suffix))
    disk.rename(path + SWAP, path)


def _open_clean(partition: Partition, bases: list[int]) -> None:
    disk, folder = partition.disk, partition.folder
    segments = [open_segment(disk, folder, base) for base in bases]
    active = segments[-1]
    log_end = active.base_offset
    stored_digest = active.stored_digest()
    if stored_digest is None or stored_digest[0] != active.size:
        active.rebuild_indexes()
    else:
        active.load_indexes()
        active.digest = stored_digest[1]
    tail = active.index.floor_of_position(active.size)
    for at, header in active.scan(0):
        active.first_timestamp_ms = header.max_timestamp
        assert at == 0
        break
    end = tail
    for at, header in active.scan(tail):
        log_end, end = header.next_offset, at + header.size
    if end != active.size:
        # The stop was not as clean as the marker says.
        _open_after_crash(partition, bases, partition.log_start)
        return
    active.bytes_since_index = active.size - tail
    stored = [offset for offset in snapshot_offsets(disk.names(folder)) if offset >= log_end]
    # The last segment may be empty while compaction removed the tail before it.
    log_end = max(log_end, stored[-1]) if stored else log_end
    states = load_snapshot(disk, folder, log_end) or _replay_producers(disk, folder, segments)
    partition.producers = states
    _recall_recent_batches(states, active)
    for offset in snapshot_offsets(disk.names(folder)):
        if offset not in bases and offset != log_end:
            disk.remove(snapshot_path(folder, offset))
    partition.adopt(segments, log_end)


def _recall_recent_batches(states: ProducerStates, active: Segment) -> None:
    """A snapshot holds a producer's last batch; find the few before it that it may send again."""
    if not states.by_id:
        return
    start = active.index.floor_of_position(max(0, active.size - _PRODUCER_TAIL_BYTES))
    recent: dict[int, list[BatchMeta]] = {}
    for _, header in active.scan(start):
        known = states.by_id.get(header.producer_id)
        if known is not None and known.epoch == header.producer_epoch and not header.is_control:
            recent.setdefault(header.producer_id, []).append(
                BatchMeta(
                    header.base_sequence,
                    header.last_sequence,
                    header.base_offset,
                    header.last_offset,
                    header.max_timestamp,
                )
            )
    for producer_id, batches in recent.items():
        states.by_id[producer_id] = Producer(
            states.by_id[producer_id].epoch, tuple(batches[-KEPT_BATCHES:])
        )


def _replay_producers(disk: Disk, folder: str, segments: list[Segment]) -> ProducerStates:
    """From the latest snapshot at the start of a segment, and the headers after it."""
    states: ProducerStates | None = None
    first = len(segments)
    while states is None and first > 0:
        first -= 1
        states = load_snapshot(disk, folder, segments[first].base_offset)
    states = states or ProducerStates()
    for segment in segments[first:]:
        for _, header in segment.scan(0):
            states.observe(header)
    return states


def _open_after_crash(partition: Partition, bases: list[int], recovery_point: int) -> None:
    disk, folder = partition.disk, partition.folder
    # The segment that holds the recovery point is the first that may be torn.
    doubtful = max((at for at, base in enumerate(bases) if base <= recovery_point), default=0)
    segments = [open_segment(disk, folder, base) for base in bases[:doubtful]]
    log_end = bases[0]
    torn = False
    for base in bases[doubtful:]:
        if torn:
            _discard(partition, base)
            continue
        segment = _reopen_for_check(disk, folder, base, partition.config.index_interval_bytes)
        log_end = max(log_end, base)
        for at, header in segment.scan_verified():
            segment.observe(at, header)
            partition.epochs.observe(header.leader_epoch, header.base_offset)
            log_end = header.next_offset
        found = segment.file.size()
        if segment.size < found:
            torn = True
            log.warning(
                "%s: %d bytes after offset %d are torn and are cut off",
                partition.id, found - segment.size, log_end,
            )  # fmt: skip
            if log_end < recovery_point:
                _refuse(partition, log_end, recovery_point)
            else:
                segment.file.truncate(segment.size)
        segments.append(segment)
    for segment in segments[doubtful:]:
        segment.file.sync()
        if segment is not segments[-1]:
            segment.write_indexes()
    _remove_late_snapshots(partition, log_end)
    partition.epochs.truncate(log_end)
    partition.epochs.save()
    partition.producers = _replay_producers(disk, folder, segments)
    partition.adopt(segments, log_end)


def _refuse(partition: Partition, log_end: int, recovery_point: int) -> None:
    """Acknowledged records are damaged: keep every byte, and let a person decide."""
    partition.refuse_damaged(
        StorageError(
            f"{partition.id} is damaged at offset {log_end}, below {recovery_point}, which was "
            "safe on disk before the crash",
            advice="Run `penstock log verify` on the data directory and restore it from a copy.",
        )
    )


def _discard(partition: Partition, base: int) -> None:
    """A segment behind a torn one: its records were never acknowledged."""
    if partition.failure is not None:
        return
    for suffix in SEGMENT_SUFFIXES:
        path = os.path.join(partition.folder, segment_name(base) + suffix)
        partition.disk.remove(path)


def _reopen_for_check(disk: Disk, folder: str, base: int, index_interval_bytes: int) -> Segment:
    path = os.path.join(folder, segment_name(base) + LOG_SUFFIX)
    segment = Segment(disk, folder, base, disk.open(path))
    segment.index_interval_bytes = index_interval_bytes
    return segment


def _remove_late_snapshots(partition: Partition, log_end: int) -> None:
    """Snapshots of producers that include batches which were cut off."""
    for offset in snapshot_offsets(partition.disk.names(partition.folder)):
        if offset > log_end:
            partition.disk.remove(snapshot_path(partition.folder, offset))
