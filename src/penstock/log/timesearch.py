"""Lookups by time: which record is the first at or after a moment, which is the newest.

The indexes lead to a batch; the batch is opened to find the record. Only visible records count.
What is in the archive alone is not looked at here; see `tiering`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import CorruptBatchError
from penstock.log.intake import MAX_UNFOLDED_BYTES
from penstock.log.segment import Segment
from penstock.records import record
from penstock.records.batch import BatchHeader

if TYPE_CHECKING:
    from penstock.log.readable import Readable


class TimestampedOffset(NamedTuple):
    """An answer to a lookup by time."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


def offset_for_time(partition: Readable, timestamp_ms: int) -> TimestampedOffset | None:
    """The first visible record at or after the timestamp."""
    for segment in partition.segments:
        found = segment.find_by_time(timestamp_ms)
        while found is not None:
            position, header = found
            for item in _timed_records(segment.batch_at(position, header), header):
                if item.offset >= partition.visible:
                    return None
                if item.timestamp_ms >= timestamp_ms and item.offset >= partition.log_start:
                    return TimestampedOffset(item.offset, item.timestamp_ms, header.leader_epoch)
            found = next(
                (
                    (at, head)
                    for at, head in segment.scan(position + header.size)
                    if head.max_timestamp >= timestamp_ms
                ),
                None,
            )
    return None


def max_timestamp(partition: Readable) -> TimestampedOffset | None:
    """The first record with the largest timestamp of all that are visible."""
    best: Segment | None = None
    for segment in partition.segments:
        if segment.size and (best is None or segment.max_timestamp_ms > best.max_timestamp_ms):
            best = segment
    if best is None or best.max_timestamp_ms < 0:
        return None
    found = None
    if partition.log_start <= best.max_timestamp_offset < partition.visible:
        found = offset_for_time(partition, best.max_timestamp_ms)
    return found or _max_timestamp_by_scan(partition)


def _max_timestamp_by_scan(partition: Readable) -> TimestampedOffset | None:
    """The slow way, while the largest timestamp is not synced yet or below the log's start."""
    start, newest = partition.log_start, -1
    for segment in partition.segments:
        stop = partition.readable_size(segment, partition.visible)
        for at, header in segment.scan(0, stop):
            if header.base_offset >= start:
                newest = max(newest, header.max_timestamp)
            elif header.last_offset >= start:
                items = _timed_records(segment.batch_at(at, header), header)
                times = [item.timestamp_ms for item in items if item.offset >= start]
                newest = max([newest, *times])
    return offset_for_time(partition, newest) if newest >= 0 else None


def _timed_records(batch: bytes, header: BatchHeader) -> Iterator[record.Record]:
    """The records of a batch, for their times.

    Producers may have put anything under a right checksum: where it cannot be read, the batch
    as a whole counts as a record, so that it hides nothing that comes after it.
    """
    try:
        for item in record.decode(batch, MAX_UNFOLDED_BYTES):
            if not header.base_offset <= item.offset <= header.last_offset:
                raise CorruptBatchError("a record claims an offset outside of its batch")
            yield item._replace(timestamp_ms=min(item.timestamp_ms, header.max_timestamp))
    except CorruptBatchError:
        yield record.Record(header.base_offset, header.max_timestamp, None, None)
