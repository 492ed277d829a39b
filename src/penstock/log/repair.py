"""After a failed sync: the files of a partition cut back to what is known to be safe.

Nothing can be said about what was written since the last good sync, so it goes; what readers have
seen already must not, and is written once more from the page cache, which still holds it. The log
then goes on in a new segment, behind all offsets that were given out.

The order matters for a crash in between: first the snapshots of what goes, which say that all
before them is safe, then the segments; and the new segment's name before the snapshot at its
start. After a StorageError the files are somewhere on the way, and `cut_back` can begin again.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.log.disk import Disk
from penstock.log.producers import ProducerStates, replay_producers
from penstock.log.segment import SNAPSHOT_SUFFIX, Segment, create_segment
from penstock.log.sync import ClosedSegment, clear_failed_sync, finish_closed
from penstock.log.transactions import aborted_index


class End(NamedTuple):
    """A place in the log: an offset, and where in which segment that is."""

    offset: int
    segment: Segment
    position: int


def cut_back(
    disk: Disk, folder: str, segments: list[Segment], end: End, doubtful: list[Segment]
) -> list[Segment]:
    """Remove everything behind `end`; the segments that stay. `doubtful` are written again."""
    keep = [s for s in segments if s.base_offset <= end.segment.base_offset]
    extra = segments[len(keep) :]
    for one in extra:
        disk.remove(one.path(SNAPSHOT_SUFFIX))
    disk.sync_dir(folder)
    for one in extra:
        one.remove()
    disk.sync_dir(folder)
    aborted_index(end.segment)
    end.segment.truncate(end.position)
    end.segment.file.sync()
    for kept in keep:
        if kept in doubtful:
            kept.write_again()
    return keep


def go_on(
    disk: Disk,
    folder: str,
    keep: list[Segment],
    next_offset: int,
    unfinished: list[ClosedSegment],
    index_interval_bytes: int,
) -> tuple[list[Segment], ProducerStates]:
    """Open the segment that the log goes on in: all segments now, and the producers' state.

    `unfinished` are closed segments that have not been brought to disk as such.
    """
    last = keep[-1]
    following = create_segment(disk, folder, next_offset)
    if following.base_offset == last.base_offset:
        following = last
    following.index_interval_bytes = index_interval_bytes
    # Before its snapshot is there, which says that the log reaches this far.
    disk.sync_dir(folder)
    segments = keep if following is last else [*keep, following]
    producers = replay_producers(disk, folder, segments)
    for closed in unfinished:
        if closed.segment in keep and closed.segment is not last:
            finish_closed(disk, folder, closed)
    if following is not last:
        ended = ClosedSegment(last, following.base_offset, producers.to_bytes())
        finish_closed(disk, folder, ended)
    clear_failed_sync(disk, folder)
    return segments, producers
