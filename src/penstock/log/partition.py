"""The log of one partition: segments end to end, written at one end, read anywhere.

Offsets
    log_start ≤ visible ≤ log_end

`log_start` is the first offset that can still be read; `log_end` the next to be given out;
`visible` (Kafka's high watermark) where consumers stop. An offset is given out once: `log_end`
never goes back while the partition is open, not even when a failed write is taken back.

Writing has three steps, so that one network read full of requests costs one system call and
many appends share one fsync:

1. `stage` checks a batch, gives it its offsets and queues it;
2. `flush` writes everything staged at once. With durability `os` and `memory` the records are
   visible now;
3. `plan_sync` says what a sync must do, `SyncPlan.run` does it on any thread, `finish_sync`
   moves `visible` up to what the plan covered (durability `disk`).

A failed write is taken back: nothing staged counts, the producers' state is as before. After a
failed sync nothing can be said about the bytes since the last good one, so the partition turns
`failed` and refuses writes; reads up to `visible` go on. `repair` cuts back to what is known to
be safe and goes on in a new segment.

Everything runs on the thread that owns the partition, except `SyncPlan.run`.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from crc32c import crc32c

from penstock.errors import (
    CorruptBatchError,
    InvalidRecordError,
    InvalidTimestampError,
    OffsetOutOfRangeError,
    RecordTooLargeError,
    StorageError,
)
from penstock.log.clock import Clock
from penstock.log.config import TopicConfig
from penstock.log.disk import Disk, File
from penstock.log.epochs import LeaderEpochs
from penstock.log.memory import OffsetReserve
from penstock.log.producers import BatchMeta, Producer, ProducerStates, load_snapshot
from penstock.log.segment import Segment, create_segment
from penstock.log.sync import ClosedSegment, SyncPlan
from penstock.records import record
from penstock.records.batch import (
    CONTROL,
    CRC_START,
    HEADER,
    HEADER_SIZE,
    LENGTH_BASE,
    MAGIC,
    NO_PRODUCER_ID,
    TRANSACTIONAL,
    BatchHeader,
    next_sequence,
    patch,
    stamp_append_time,
)
from penstock.records.compression import NAMES as CODEC_NAMES

log = logging.getLogger(__name__)

_unpack_header = HEADER.unpack_from
_CODEC_MASK = 0x07


class Slice:
    """Whole batches in a file, to be read or sent from there; its length is theirs in bytes."""

    __slots__ = ("file", "length", "position")

    def __init__(self, file: File, position: int, length: int) -> None:
        self.file = file
        self.position = position
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"Slice({self.position}..{self.position + self.length})"

    def read(self) -> bytes:
        """The bytes themselves."""
        return self.file.pread(self.length, self.position)


class Staged(NamedTuple):
    """What `stage` answers: the offsets given to a batch, or those it already had."""

    base_offset: int
    next_offset: int
    duplicate: bool
    append_time_ms: int


class TimestampedOffset(NamedTuple):
    """An answer to a lookup by time."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class PartitionId:
    """Which partition: the topic's name and the partition's number."""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.number}"


class _StagedBatch(NamedTuple):
    view: memoryview
    size: int
    last_offset: int
    max_timestamp_ms: int


class Partition:
    """One partition; `recovery.open_partition` makes them."""

    def __init__(
        self, id_: PartitionId, disk: Disk, folder: str, config: TopicConfig, clock: Clock
    ) -> None:
        self.id = id_
        self.disk = disk
        self.folder = folder
        self.config = config
        self.clock = clock
        self.segments: list[Segment] = []
        self.producers = ProducerStates()
        self.epochs = LeaderEpochs(disk, folder)
        self.leader_epoch = 0
        self.log_start = 0
        self.log_end = 0
        self.visible = 0
        self.failure: StorageError | None = None
        # Acknowledged records are damaged: `repair` must not cut them off.
        self.damaged = False
        self.reserve: OffsetReserve | None = None
        # Its topic was deleted; whoever still holds this must let go.
        self.gone = False
        self._visible_segment: Segment | None = None
        self._visible_position = 0
        self._synced: tuple[int, Segment, int] | None = None
        self._staged: list[_StagedBatch] = []
        self._staged_bytes = 0
        self._staged_end = 0
        self._undo: dict[int, Producer | None] = {}
        self._closed_unsynced: list[ClosedSegment] = []
        self._sync_running = False

    def __repr__(self) -> str:
        return f"Partition({self.id}, {self.log_start}..{self.visible}..{self.log_end})"

    @property
    def active(self) -> Segment:
        return self.segments[-1]

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def syncs(self) -> bool:
        """Whether records become visible only once they are synced."""
        return self.config.durability == "disk"

    # ---- opening -------------------------------------------------------------------------

    def adopt(self, segments: list[Segment], log_end: int) -> None:
        """Begin with what recovery found; all of it is on disk."""
        log_end = max(log_end, self.log_start)
        if not segments:
            segments = [create_segment(self.disk, self.folder, log_end)]
            self.disk.sync_dir(self.folder)
        self.segments = segments
        self.active.index_interval_bytes = self.config.index_interval_bytes
        self.log_end = self._staged_end = log_end
        self.log_start = max(self.log_start, segments[0].base_offset)
        self._synced = (log_end, self.active, self.active.size)
        self._show(log_end, self.active, self.active.size)

    def _show(self, offset: int, segment: Segment, position: int) -> None:
        self.visible = offset
        self._visible_segment = segment
        self._visible_position = position

    # ---- writing -------------------------------------------------------------------------

    def stage(self, view: memoryview, now_ms: int) -> Staged:
        """Check one batch, give it its offsets and queue it for `flush`.

        `view` is exactly the batch, writable, and must stay as it is until the flush: base
        offset and leader epoch (and the time, if the log stamps it) are patched in place.
        """
        if self.failure is not None:
            raise self.failure
        size = len(view)
        if size < HEADER_SIZE:
            raise CorruptBatchError(f"{size} bytes are too few for a record batch")
        (_, length, _, magic, crc, attributes, last_delta, _, max_ts, producer_id,
         producer_epoch, sequence, count) = _unpack_header(view)  # fmt: skip
        if magic != MAGIC:
            raise InvalidRecordError(f"record format {magic} is not supported, only {MAGIC} is")
        if length + LENGTH_BASE != size:
            self._explain_length(length + LENGTH_BASE, size)
        if crc32c(view[CRC_START:]) != crc:
            raise CorruptBatchError("the checksum of the record batch is wrong")
        if size > self.config.max_message_bytes:
            raise RecordTooLargeError(
                f"a batch of {size} bytes exceeds max.message.bytes={self.config.max_message_bytes}"
            )
        if count < 1 or last_delta != count - 1 or attributes & (CONTROL | TRANSACTIONAL):
            self._explain_counts(count, last_delta, attributes)
        if attributes & _CODEC_MASK not in CODEC_NAMES:
            raise InvalidRecordError(f"unknown compression codec {attributes & _CODEC_MASK}")
        config = self.config
        append_time_ms = -1
        if producer_id != NO_PRODUCER_ID:
            last_sequence = next_sequence(sequence, last_delta)
            repeated = self.producers.check(producer_id, producer_epoch, sequence, last_sequence)
            if repeated is not None:
                return Staged(
                    repeated.first_offset,
                    repeated.last_offset + 1,
                    True,
                    repeated.timestamp_ms if config.append_time else -1,
                )
        if config.append_time:
            max_ts = append_time_ms = now_ms
        elif not (
            now_ms - config.message_timestamp_before_max_ms
            <= max_ts
            <= now_ms + config.message_timestamp_after_max_ms
        ):
            self._explain_timestamp(max_ts, now_ms)
        if config.compacted:
            _require_keys(view, count)
        base = self._staged_end
        last = base + last_delta
        active = self.active
        if (
            active.size + self._staged_bytes + size > config.segment_bytes
            or last - active.base_offset > 0x7FFFFFFF
            or max_ts - active.first_timestamp_ms > config.segment_ms
        ):
            self._roll_if_due(size, last, max_ts)
        patch(view, 0, base, self.leader_epoch)
        if append_time_ms >= 0:
            stamp_append_time(view, 0, size, now_ms)
        if producer_id != NO_PRODUCER_ID:
            self._undo.setdefault(producer_id, self.producers.by_id.get(producer_id))
            meta = BatchMeta(sequence, last_sequence, base, last, max_ts)
            self.producers.update(producer_id, producer_epoch, meta)
        self._staged.append(_StagedBatch(view, size, last, max_ts))
        self._staged_bytes += size
        self._staged_end = last + 1
        return Staged(base, last + 1, False, append_time_ms)

    def _explain_length(self, stated: int, size: int) -> None:
        if HEADER_SIZE <= stated < size:
            raise InvalidRecordError("a produce request carries one batch per partition")
        raise CorruptBatchError(f"a batch of {stated} bytes came in {size} bytes")

    def _explain_counts(self, count: int, last_delta: int, attributes: int) -> None:
        if attributes & CONTROL:
            raise InvalidRecordError("control batches are written by the broker only")
        if attributes & TRANSACTIONAL:
            raise InvalidRecordError("the batch belongs to a transaction that is not open")
        raise InvalidRecordError(f"{count} records with a last offset delta of {last_delta}")

    def _explain_timestamp(self, max_ts: int, now_ms: int) -> None:
        # -1: the producer has no time. Kafka takes such records, and so do we.
        if max_ts != -1:
            raise InvalidTimestampError(
                f"timestamp {max_ts} lies {max_ts - now_ms} ms from now, outside of "
                "message.timestamp.before.max.ms and message.timestamp.after.max.ms"
            )

    def _roll_if_due(self, size: int, last_offset: int, max_ts: int) -> None:
        """Close the active segment if the batch must not go there."""
        active = self.active
        empty = not active.size and not self._staged
        full = active.size + self._staged_bytes + size > self.config.segment_bytes
        old = active.first_timestamp_ms >= 0 and (
            max_ts - active.first_timestamp_ms > self.config.segment_ms
        )
        if not empty and (full or old or not active.fits(last_offset)):
            self.flush()
            self.roll()

    def flush(self) -> None:
        """Write everything staged. On StorageError nothing of it counts."""
        staged = self._staged
        if not staged:
            return
        segment = self.active
        try:
            if self.reserve is not None and self._staged_end > self.reserve.limit:
                self.reserve.extend(self._staged_end)
            segment.file.pwritev([batch.view for batch in staged], segment.size)
        except StorageError as error:
            self._take_back(error)
            raise
        if self.leader_epoch != self.epochs.latest:
            self.epochs.assign(self.leader_epoch, self.log_end)
        position = segment.size
        for batch in staged:
            segment.account(batch.view, position, batch.size, batch.last_offset, batch.max_timestamp_ms)
            position += batch.size
        self.log_end = self._staged_end
        self._forget_staged()
        if not self.syncs:
            self._show(self.log_end, segment, segment.size)

    def _take_back(self, error: StorageError) -> None:
        for producer_id, before in self._undo.items():
            self.producers.restore(producer_id, before)
        self._forget_staged()
        self._staged_end = self.log_end
        try:
            self.active.file.truncate(self.active.size)
        except StorageError:
            # What the write left behind cannot be removed now; `repair` will.
            self.failure = error

    def _forget_staged(self) -> None:
        self._staged = []
        self._staged_bytes = 0
        self._undo = {}

    def append(self, batch: bytes) -> int:
        """Stage and flush one batch; returns its base offset."""
        staged = self.stage(memoryview(bytearray(batch)), self.clock.now_ms())
        self.flush()
        return staged.base_offset

    def roll(self) -> None:
        """Close the active segment and open the next at `log_end`."""
        if not self.active.size:
            return
        following = create_segment(self.disk, self.folder, self.log_end)
        following.index_interval_bytes = self.config.index_interval_bytes
        closed = self.active
        self._closed_unsynced.append(
            ClosedSegment(closed, self.log_end, self.producers.to_bytes())
        )
        self.segments = [*self.segments, following]
        if self._visible_segment is closed and self._visible_position == closed.size:
            self._show(self.visible, following, 0)

    def roll_if_old(self, now_ms: int) -> None:
        """Roll by time also when nothing is written."""
        first = self.active.first_timestamp_ms
        if self.failure is None and first >= 0 and now_ms - first > self.config.segment_ms:
            self.roll()

    # ---- syncing -------------------------------------------------------------------------

    @property
    def needs_sync(self) -> bool:
        """Whether something should go to disk: new records, or segments closed since."""
        if self.failure is not None or self._sync_running or self.config.durability == "memory":
            return False
        assert self._synced is not None
        return bool(self._closed_unsynced) or (self.syncs and self._synced[0] < self.log_end)

    def plan_sync(self, *, active_too: bool | None = None) -> SyncPlan:
        """What a sync must do now; `finish_sync` must follow its run."""
        self._sync_running = True
        closed, self._closed_unsynced = self._closed_unsynced, []
        include_active = self.syncs if active_too is None else active_too
        active = self.active
        return SyncPlan(
            disk=self.disk,
            folder=self.folder,
            closed=closed,
            active=active if include_active else None,
            active_size=active.size,
            offset=self.log_end if include_active else active.base_offset,
        )

    def finish_sync(self, plan: SyncPlan) -> None:
        """Take in the result of a plan: records become visible, or the partition fails."""
        self._sync_running = False
        if plan.error is not None:
            self._fail(plan.error)
            return
        if self.failure is not None:
            return
        for closed in plan.closed:
            closed.segment.bytes_since_index = 0
        segment = plan.active or self.active
        position = plan.active_size if plan.active else 0
        if plan.active is None and segment.base_offset != plan.offset:
            segment = self.segment_for(plan.offset)
        self._synced = (plan.offset, segment, position)
        if self.syncs and plan.offset > self.visible:
            self._show(plan.offset, segment, position)

    def _fail(self, error: StorageError) -> None:
        log.error("%s refuses writes until repaired: %s", self.id, error)
        self.failure = error

    def refuse_damaged(self, error: StorageError) -> None:
        """Refuse writes for good: records that were safe are damaged. Reads go on."""
        self.damaged = True
        self._fail(error)

    @property
    def recovery_point(self) -> int:
        """Every record below is on disk."""
        assert self._synced is not None
        return self._synced[0]

    def repair(self) -> None:
        """Cut back to what is known to be safe and go on in a new segment.

        Raises StorageError if the disk still fails; the partition then stays as it is. Offsets
        that were given out and are cut off are not given out again: a gap remains.
        """
        if self.failure is None or self._sync_running or self.damaged:
            return
        assert self._synced is not None
        if self.syncs:
            offset, segment, position = self._synced
        else:
            # Visible records were acknowledged from the page cache, which still holds them.
            offset, segment, position = self.visible, self.active, self.active.size
        keep = [s for s in self.segments if s.base_offset <= segment.base_offset]
        for extra in self.segments[len(keep) :]:
            extra.remove()
        segment.truncate(position)
        following = create_segment(self.disk, self.folder, max(self.log_end, offset))
        if following.base_offset == segment.base_offset:
            following = segment
        segment.file.sync()
        following.file.sync()
        self.disk.sync_dir(self.folder)
        following.index_interval_bytes = self.config.index_interval_bytes
        self.segments = keep if following is segment else [*keep, following]
        self._closed_unsynced = []
        if following is not segment:
            self._closed_unsynced = [ClosedSegment(segment, following.base_offset, b"")]
        self.producers = self._producers_from_log()
        for closed in self._closed_unsynced:
            closed.snapshot = self.producers.to_bytes()
        lost = self.log_end - offset
        self._synced = (self.log_end, self.active, self.active.size)
        self._show(self.log_end, self.active, self.active.size)
        self.failure = None
        log.warning("%s is repaired; %d unacknowledged offsets are left empty", self.id, lost)

    def _producers_from_log(self) -> ProducerStates:
        states: ProducerStates | None = None
        first = len(self.segments)
        while states is None and first > 0:
            first -= 1
            states = load_snapshot(self.disk, self.folder, self.segments[first].base_offset)
        states = states or ProducerStates()
        for segment in self.segments[first:]:
            for _, header in segment.scan(0):
                states.observe(header)
        return states

    # ---- reading -------------------------------------------------------------------------

    def segment_for(self, offset: int) -> Segment:
        """The last segment whose base is at or below the offset."""
        segments = self.segments
        if offset >= segments[-1].base_offset:
            return segments[-1]
        at = bisect_right(segments, offset, key=_base_offset) - 1
        return segments[max(at, 0)]

    def read(
        self, offset: int, max_bytes: int, *, whole_first: bool = True, limit: int | None = None
    ) -> Slice | None:
        """Batches from the one that holds `offset`, cut at a batch boundary.

        None if there is nothing (yet) to read there. With `whole_first` the first batch comes
        even if it alone exceeds `max_bytes`. Readers stop at `limit`, by default `visible`.
        """
        end = self.visible if limit is None else limit
        if offset < self.log_start or offset > self.log_end:
            raise OffsetOutOfRangeError(
                f"offset {offset} is not in {self.id}, which holds {self.log_start} to {end}"
            )
        if offset >= end:
            return None
        segments = self.segments
        at = len(segments) - 1
        if offset < segments[-1].base_offset:
            at = max(bisect_right(segments, offset, key=_base_offset) - 1, 0)
        while at < len(segments):
            segment = segments[at]
            stop = self._readable_size(segment, end)
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

    def _readable_size(self, segment: Segment, end: int) -> int:
        visible = self._visible_segment
        assert visible is not None
        if end < self.visible:
            found = segment.find(end)
            return found[0] if found is not None else segment.size
        if segment is visible:
            return self._visible_position
        return segment.size if segment.base_offset < visible.base_offset else 0

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

    # ---- lookups by time -----------------------------------------------------------------

    def offset_for_time(self, timestamp_ms: int) -> TimestampedOffset | None:
        """The first visible record at or after the timestamp."""
        for segment in self.segments:
            found = segment.find_by_time(timestamp_ms)
            while found is not None:
                position, header = found
                for item in record.decode(segment.batch_at(position, header)):
                    if item.offset >= self.visible:
                        return None
                    if item.timestamp_ms >= timestamp_ms and item.offset >= self.log_start:
                        return TimestampedOffset(
                            item.offset, item.timestamp_ms, header.leader_epoch
                        )
                found = next(
                    (
                        (at, head)
                        for at, head in segment.scan(position + header.size)
                        if head.max_timestamp >= timestamp_ms
                    ),
                    None,
                )
        return None

    def max_timestamp(self) -> TimestampedOffset | None:
        """The first record with the largest timestamp of all that are visible."""
        best: Segment | None = None
        for segment in self.segments:
            if segment.size and (best is None or segment.max_timestamp_ms > best.max_timestamp_ms):
                best = segment
        if best is None or best.max_timestamp_ms < 0:
            return None
        if best.max_timestamp_offset < self.visible:
            return self.offset_for_time(best.max_timestamp_ms)
        return self._max_timestamp_of_visible()

    def _max_timestamp_of_visible(self) -> TimestampedOffset | None:
        """The slow way, while the largest timestamp is not synced yet."""
        newest = -1
        for segment in self.segments:
            for _, header in segment.scan(0, self._readable_size(segment, self.visible)):
                newest = max(newest, header.max_timestamp)
        return self.offset_for_time(newest) if newest >= 0 else None

    # ---- shrinking -----------------------------------------------------------------------

    def delete_before(self, offset: int) -> None:
        """Raise the start of the log; whole segments below it are removed by retention."""
        if offset < 0 or offset > self.visible:
            raise OffsetOutOfRangeError(f"{offset} is above the end of {self.id}, {self.visible}")
        self.log_start = max(self.log_start, offset)

    def drop_segments(self, gone: list[Segment]) -> None:
        """Remove closed segments for good."""
        dropped = set(map(id, gone))
        self.segments = [s for s in self.segments if id(s) not in dropped]
        self._closed_unsynced = [c for c in self._closed_unsynced if id(c.segment) not in dropped]
        for segment in gone:
            segment.remove()

    def close(self) -> None:
        for segment in self.segments:
            segment.close()


def _base_offset(segment: Segment) -> int:
    return segment.base_offset


def _require_keys(view: memoryview, count: int) -> None:
    """A compacted topic keeps the latest record per key: a record without one has no place."""
    for span in record.spans(record.payload(view), count):
        if span.key is None:
            raise InvalidRecordError("a compacted topic takes only records with a key")
