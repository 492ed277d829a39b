"""The side of a partition that readers see: its segments, where they begin and where to stop.

    log_start ≤ stable ≤ visible ≤ log_end

A read finds the segment by its base offset, the batch by the index, and hands out a `Slice` of the
file: bytes are neither copied nor opened here. Readers stop at `visible`, or earlier if they say
so (`limit`); within a segment that means a position, which for `visible` is always known. What is
only in the archive comes as an `ArchivedRead`, to be loaded elsewhere.

`Partition` adds what moves these offsets. Everything runs on the thread that owns the partition.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from penstock.errors import OffsetOutOfRangeError
from penstock.log import timesearch
from penstock.log.archive import NOTHING_ARCHIVED, ArchivedLog, ArchivedRead
from penstock.log.segment import Segment
from penstock.log.slice import Slice
from penstock.log.timesearch import TimestampedOffset
from penstock.log.transactions import aborted_between
from penstock.log.txn_index import AbortedTransaction
from penstock.records.batch import BatchHeader


class Readable:
    """A log that can be read; `Partition` is one that can be written too."""

    def __init__(self, name: object) -> None:
        self._name = name
        self.segments: list[Segment] = []
        # The older part of the log that is also, or only, in the archive.
        self.archived: ArchivedLog = NOTHING_ARCHIVED
        self.log_start = 0
        self.log_end = 0
        self.visible = 0
        self._visible_segment: Segment | None = None
        self._visible_position = 0

    @property
    def active(self) -> Segment:
        return self.segments[-1]

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    def _show(self, offset: int, segment: Segment, position: int) -> None:
        self.visible = offset
        self._visible_segment = segment
        self._visible_position = position

    # ---- by offset -----------------------------------------------------------------------

    def segment_for(self, offset: int) -> Segment:
        """The last segment whose base is at or below the offset."""
        return self.segments[self._place_for(offset)]

    def _place_for(self, offset: int) -> int:
        segments = self.segments
        if offset >= segments[-1].base_offset:
            return len(segments) - 1
        return max(bisect_right(segments, offset, key=base_offset) - 1, 0)

    def read(
        self, offset: int, max_bytes: int, *, whole_first: bool = True, limit: int | None = None
    ) -> Slice | ArchivedRead | None:
        """Batches from the one that holds `offset`, cut at a batch boundary.

        None if there is nothing (yet) to read there. With `whole_first` the first batch comes
        even if it alone exceeds `max_bytes`. Readers stop at `limit`, by default `visible`.
        """
        end = self.visible if limit is None else limit
        if offset < self.log_start or offset > self.log_end:
            raise OffsetOutOfRangeError(
                f"offset {offset} is not in {self._name}, which holds {self.log_start} to {end}"
            )
        if offset >= end:
            return None
        segments = self.segments
        if offset < segments[0].base_offset:
            archived = self.archived.read(offset, max_bytes, whole_first=whole_first, limit=end)
            if archived is not None:
                return archived
        at = self._place_for(offset)
        while at < len(segments):
            segment = segments[at]
            stop = self.readable_size(segment, end)
            found = segment.find(offset)
            if found is not None and found[0] < stop:
                position, header = found
                last = segment.end_of_slice(position, max_bytes, stop)
                if last == position:
                    if not whole_first:
                        return None
                    last = position + header.size
                return Slice(segment.file, position, last - position)
            if segment is self._visible_segment:
                return None
            # The rest of this segment was compacted away or cut off: go on in the next.
            at += 1
        return None

    def is_last(self, found: Slice, limit: int | None = None) -> bool:
        """Whether nothing that may be read, up to `limit` or all that is visible, follows it."""
        segment, position = self._visible_segment, self._visible_position
        assert segment is not None
        if limit is not None and limit < self.visible:
            segment = self.segment_for(limit)
            position = self.readable_size(segment, limit)
        return segment.holds(found.file) and found.position + found.length >= position

    def readable_size(self, segment: Segment, end: int) -> int:
        """How many bytes of the segment lie before the offset `end`."""
        visible = self._visible_segment
        assert visible is not None
        if end < self.visible:
            found = segment.find(end)
            return found[0] if found is not None else segment.size
        if segment is visible:
            return self._visible_position
        return segment.size if segment.base_offset < visible.base_offset else 0

    def end_of(self, offset: int, found: Slice, limit: int) -> int:
        """An offset at or after the end of what was read from `offset`, at most `limit`.

        Told by the index, so it may lie some batches further on.
        """
        stop = found.position + found.length
        for at in range(self._place_for(offset), len(self.segments)):
            segment = self.segments[at]
            if segment.holds(found.file):
                relative = segment.index.ceiling_of_position(stop)
                if relative is not None:
                    return min(segment.base_offset + relative, limit)
                return limit if segment is self.active else min(self._next_base(segment), limit)
        return limit

    def batches(self, start: int | None = None) -> Iterator[tuple[BatchHeader, bytes]]:
        """Every batch from `start` up to `log_end`, for replay at start-up."""
        first = self.log_start if start is None else start
        for segment in self.segments:
            if segment is not self.active and self._next_base(segment) <= first:
                continue
            for position, header in segment.scan(0):
                if header.last_offset >= first:
                    yield header, segment.batch_at(position, header)

    def _next_base(self, segment: Segment) -> int:
        at = self.segments.index(segment)
        return self.segments[at + 1].base_offset

    # ---- by time, and by transaction -----------------------------------------------------

    def offset_for_time(self, timestamp_ms: int) -> TimestampedOffset | None:
        """The first visible record at or after the timestamp."""
        return timesearch.offset_for_time(self, timestamp_ms)

    def max_timestamp(self) -> TimestampedOffset | None:
        """The first record with the largest timestamp of all that are visible."""
        return timesearch.max_timestamp(self)

    def aborted_transactions(self, start: int, end: int) -> list[AbortedTransaction]:
        """Those that reach into [start, end), as far as their markers are on the local disk."""
        return aborted_between(self.segments[self._place_for(start) :], start, end)

    def aborted(self, start: int, end: int) -> list[tuple[int, int]]:
        """Producer id and first offset of the aborted transactions that reach into [start, end).

        Below `stable` these are all that a reader of committed records must pass over.
        """
        found = self.aborted_transactions(start, end)
        return [(item.producer_id, item.first_offset) for item in found]


def base_offset(segment: Segment) -> int:
    return segment.base_offset
