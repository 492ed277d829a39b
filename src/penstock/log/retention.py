"""Retention: whole segments go, the oldest first, by age, by size, or below the log's start.

What may go is closed and synced, and so below `visible`; the records of an active segment that
is itself too old go after it has been closed. The order of steps makes a crash between any two
harmless:

    1. the active segment is closed, if need be, and the next one's name synced (a normal sync);
    2. `begin`: the log starts later; that is checkpointed and durable;
    3. `detach`: the partition forgets the segments;
    4. `erase`: their files are unlinked.

Offsets are never given out twice: after 2 the new start is known even if all files were gone. A
crash before 4 leaves segments below the start of the log, which the next round removes. Whoever
still reads one holds its file open.

A *guarded* topic (`overflow` = block, reject) loses nothing from `Partition.keep_from` on, which
its groups still need. There the bound is what the log may not exceed: the oldest segments go as
soon as it is reached, and not only once the rest alone reaches it.

With an archive (`tiering`) the local copies of archived segments go by `local.retention.*`; that
moves no start, and the `retention.*` settings count archived and local segments together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from penstock.log.partition import Partition
from penstock.log.segment import Segment


class _Piece(NamedTuple):
    """A closed segment as retention sees it, wherever it is."""

    end_offset: int
    size: int
    timestamp_ms: int


@dataclass(slots=True)
class Removal:
    """Local segments that go, and where the log starts without them."""

    partition: Partition
    log_start: int
    segments: list[Segment]

    def begin(self) -> None:
        """On the partition's thread. `LogStore.checkpoint` must follow before `detach`."""
        partition = self.partition
        partition.delete_before(max(partition.log_start, self.log_start))

    @property
    def valid(self) -> bool:
        """Whether the segments are still part of the log, and not replaced meanwhile."""
        present = set(map(id, self.partition.segments))
        return not self.partition.gone and all(id(s) in present for s in self.segments)

    def detach(self) -> None:
        """On the partition's thread."""
        self.partition.replace_segments(self.segments)

    def erase(self) -> None:
        """On any thread, which also closes the files: only then is their space freed, slowly."""
        partition = self.partition
        while self.segments:
            self.segments.pop(0).remove()
            if partition.archived.segments:
                # In order: a reader looks for local segments without a hole between them.
                partition.disk.sync_dir(partition.folder)


def roll_if_expired(partition: Partition, now_ms: int) -> bool:
    """Close the active segment if all of the log is due to go; whether that was done."""
    active = partition.active
    if partition.failure is not None or not active.size or partition.visible < partition.log_end:
        return False
    if not partition.config.deleted_by_age and partition.log_start < partition.log_end:
        return False
    following = [*(s.base_offset for s in partition.segments[1:]), partition.log_end]
    local = _pieces(partition.segments, following, now_ms)
    if _expired(partition, [*_archived_pieces(partition), *local], now_ms) < partition.log_end:
        return False
    partition.roll()
    return True


def roll_if_alone(partition: Partition) -> bool:
    """Close the active segment of a full, guarded log if it is all there is; whether it was done.

    Only then can it go once it is read; the producers that wait for that write nothing meanwhile.
    """
    config = partition.config
    if (
        not config.guarded
        or config.retention_bytes < 0
        or partition.failure is not None
        or not partition.active.size
        or total_bytes(partition) > partition.active.size
        or partition.active.size < config.retention_bytes
    ):
        return False
    partition.roll()
    return True


def expired(partition: Partition, now_ms: int) -> Removal | None:
    """What goes now by `retention.ms`, `retention.bytes` and the start of the log."""
    closed = partition.closed
    following = [s.base_offset for s in partition.segments[1 : len(closed) + 1]]
    pieces = [*_archived_pieces(partition), *_pieces(closed, following, now_ms)]
    start = _expired(partition, pieces, now_ms)
    gone = [s for s, end in zip(closed, following, strict=True) if end <= start]
    if not gone and start <= partition.log_start:
        return None
    return Removal(partition, start, gone)


def local_excess(partition: Partition, now_ms: int) -> Removal | None:
    """The local copies that go because the archive has them, by `local.retention.*`."""
    config = partition.config
    # By size too: a segment that was compacted after it was archived is another one.
    archived = {(segment.base_offset, segment.size) for segment in partition.archived.segments}
    local = list(
        takewhile(lambda s: not s.size or (s.base_offset, s.size) in archived, partition.closed)
    )
    age_ms = config.retention_ms if config.local_retention_ms == -2 else config.local_retention_ms
    limit = (
        config.retention_bytes
        if config.local_retention_bytes == -2
        else config.local_retention_bytes
    )
    following = [s.base_offset for s in partition.segments[1 : len(local) + 1]]
    pieces = _pieces(local, following, now_ms)
    count = max(
        _count_older(pieces, age_ms, now_ms),
        _count_excess(pieces, limit, partition.size_bytes),
    )
    return Removal(partition, partition.log_start, local[:count]) if count else None


def _expired(partition: Partition, pieces: Sequence[_Piece], now_ms: int) -> int:
    """Where the log starts once everything that is due among its oldest pieces is gone."""
    config = partition.config
    count = _count(piece.end_offset <= partition.log_start for piece in pieces)
    if config.deleted_by_age:
        total = total_bytes(partition)
        older = _count_older(pieces, config.retention_ms, now_ms)
        if config.guarded:
            excess = _count_over(pieces, config.retention_bytes, total)
            unneeded = _count(piece.end_offset <= partition.keep_from for piece in pieces)
            count = max(count, min(max(older, excess), unneeded))
        else:
            excess = _count_excess(pieces, config.retention_bytes, total)
            count = max(count, older, excess)
    return pieces[count - 1].end_offset if count else partition.log_start


def total_bytes(partition: Partition) -> int:
    """What `retention.bytes` counts: what is local, and what is in the archive only."""
    return sum(piece.size for piece in _archived_pieces(partition)) + partition.size_bytes


def _pieces(segments: Sequence[Segment], ends: Sequence[int], now_ms: int) -> list[_Piece]:
    return [
        _Piece(end, segment.size, _newest_ms(segment, now_ms))
        for segment, end in zip(segments, ends, strict=True)
    ]


def _archived_pieces(partition: Partition) -> list[_Piece]:
    """Those that are in the archive only."""
    local_start = partition.segments[0].base_offset
    return [
        _Piece(
            item.end_offset,
            item.size,
            item.max_timestamp_ms if item.max_timestamp_ms >= 0 else item.archived_ms,
        )
        for item in partition.archived.segments
        if item.base_offset < local_start
    ]


def _newest_ms(segment: Segment, now_ms: int) -> int:
    """The segment's age counts from here. Records without a time are as old as we know them."""
    if segment.max_timestamp_ms >= 0 or not segment.size:
        return segment.max_timestamp_ms
    segment.last_modified_ms = segment.last_modified_ms or now_ms
    return segment.last_modified_ms


def _count_older(pieces: Sequence[_Piece], age_ms: int, now_ms: int) -> int:
    if age_ms < 0:
        return 0
    return _count(
        not piece.size or age_ms == 0 or now_ms - piece.timestamp_ms > age_ms for piece in pieces
    )


def _count_excess(pieces: Sequence[_Piece], limit_bytes: int, total_bytes: int) -> int:
    if limit_bytes < 0:
        return 0
    count = 0
    for piece in pieces:
        if total_bytes - piece.size < limit_bytes:
            break
        total_bytes -= piece.size
        count += 1
    return count


def _count_over(pieces: Sequence[_Piece], limit_bytes: int, total_bytes: int) -> int:
    """How many must go for the log to be smaller than its bound, which producers wait for."""
    if limit_bytes < 0:
        return 0
    count = 0
    for piece in pieces:
        if total_bytes < limit_bytes:
            break
        total_bytes -= piece.size
        count += 1
    return count


def _count(due: Iterable[bool]) -> int:
    """How many of the oldest are due, up to the first that is not."""
    return sum(1 for _ in takewhile(bool, due))
