"""How much of a log lies behind an offset, from the segments' positions; nothing is read twice.

A `Place` is where the first visible record at or after an offset lies. Finding it costs a look
into an index and a read of a few kilobytes; counting the bytes from there costs neither. Only
what consumers can see counts.

Of what is in the archive alone, only whole segments are known here: bytes are counted from the
start of the segment that holds the offset, and its time is that of the segment before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from penstock.log.archive import ArchivedSegment
from penstock.log.partition import Partition
from penstock.log.segment import Segment
from penstock.records.batch import BatchHeader


class Place(NamedTuple):
    """Where a record lies: its segment, the position of its batch, the time of that batch."""

    base_offset: int
    position: int
    # The batch's first timestamp, or when it was appended where the log says that; -1: none.
    timestamp_ms: int
    archived: bool = False


class Tail(NamedTuple):
    """The end of a log at some moment."""

    base_offset: int
    position: int


def locate(partition: Partition, offset: int) -> Place | None:
    """Where the first visible record at or after the offset lies; None if there is none."""
    offset = max(offset, partition.log_start)
    if offset >= partition.visible:
        return None
    segments = partition.segments
    if offset < segments[0].base_offset:
        place = _locate_archived(partition, offset)
        if place is not None:
            return place
    at = max(bisect_right(segments, offset, key=_base_offset) - 1, 0)
    for segment in segments[at:]:
        found = segment.find(offset)
        if found is not None:
            position, header = found
            if position >= partition.readable_size(segment, partition.visible):
                return None
            return Place(segment.base_offset, position, _time_of(header))
    return None


def _locate_archived(partition: Partition, offset: int) -> Place | None:
    archived = partition.archived.segments
    at = bisect_left(archived, offset, key=_last_offset)
    if at == len(archived) or archived[at].base_offset >= partition.segments[0].base_offset:
        return None
    before = archived[at - 1] if at else archived[at]
    return Place(archived[at].base_offset, 0, before.max_timestamp_ms, archived=True)


def bytes_from(partition: Partition, place: Place) -> int:
    """The bytes from a place up to the visible end."""
    segments, total = partition.segments, 0
    if place.archived:
        local_start = segments[0].base_offset
        total = sum(
            segment.size
            for segment in partition.archived.segments
            if place.base_offset <= segment.base_offset < local_start
        )
    for segment in reversed(segments):
        if segment.base_offset < place.base_offset:
            break
        total += partition.readable_size(segment, partition.visible)
        if segment.base_offset == place.base_offset:
            total -= place.position
    return max(0, total)


def tail_of(partition: Partition) -> Tail:
    return Tail(partition.active.base_offset, partition.active.size)


def bytes_since(partition: Partition, tail: Tail) -> int:
    """How many bytes were written since the log ended there."""
    total = 0
    for segment in reversed(partition.segments):
        if segment.base_offset < tail.base_offset:
            break
        total += segment.size
        if segment.base_offset == tail.base_offset:
            total -= tail.position
    return max(0, total)


def _time_of(header: BatchHeader) -> int:
    return header.max_timestamp if header.has_append_time else header.base_timestamp


def _base_offset(segment: Segment) -> int:
    return segment.base_offset


def _last_offset(segment: ArchivedSegment) -> int:
    return segment.last_offset
