"""The log of one partition: segments end to end, written at one end, read anywhere.

Offsets
    log_start ≤ stable ≤ visible ≤ log_end

`log_start` is the first offset that can still be read; `log_end` the next to be given out;
`visible` (Kafka's high watermark) where consumers stop, `stable` where those stop that read only
what is committed (see `transactions`). An offset is given out once: `log_end`
never goes back while the partition is open, not even when a failed write is taken back.

Writing has three steps, so that one network read full of requests costs one system call and
many appends share one fsync:

1. `stage` checks a batch, gives it its offsets and queues it;
2. `flush` writes everything staged at once. With durability `os` and `memory` the records are
   visible now;
3. `plan_sync` says what a sync must do, `SyncPlan.run` does it on any thread, `finish_sync`
   moves `visible` up to what the plan covered (durability `disk`).

A failed write is taken back: nothing staged counts, the producers' state is as before. One whose
log cannot even be opened is refused, and the next may succeed. Where
`stage` had to write for a roll and could not, the `flush` that follows says so to those who
staged before. After a failed sync nothing can be said about the bytes since the last good one,
so the partition turns `failed` and refuses writes; reads up to `visible` go on. Whoever waits for
a sync must be told then: `repair` cuts back to what is known to be safe and goes on in a new
segment, past the offsets that were lost.

Reading is in `readable`. Everything runs on the thread that owns the partition, except
`SyncPlan.run`.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from crc32c import crc32c

from penstock.errors import (
    CorruptBatchError,
    InvalidRecordError,
    InvalidTxnStateError,
    OffsetOutOfRangeError,
    StorageError,
)
from penstock.log import intake
from penstock.log.clock import Clock
from penstock.log.config import TopicConfig
from penstock.log.disk import Disk
from penstock.log.epochs import LeaderEpochs
from penstock.log.memory import OffsetReserve
from penstock.log.producers import BatchMeta, Producer, ProducerStates
from penstock.log.readable import Readable, base_offset
from penstock.log.repair import End, cut_back, go_on
from penstock.log.segment import Segment, create_segment
from penstock.log.sync import ClosedSegment, SyncPlan, mark_failed_sync
from penstock.log.transactions import Ending
from penstock.log.txn_index import MAX_ENTRIES, AbortedTransaction
from penstock.records.batch import (
    APPEND_TIME,
    CONTROL,
    CRC_START,
    HEADER,
    HEADER_SIZE,
    LENGTH_BASE,
    MAGIC,
    NO_PRODUCER_ID,
    TRANSACTIONAL,
    clear_append_time,
    next_sequence,
    stamp_append_time,
)
from penstock.records.compression import NAMES as CODEC_NAMES
from penstock.records.control import Marker, encode_marker

log = logging.getLogger(__name__)

_unpack_header = HEADER.unpack_from
_CODEC_MASK = 0x07
# Seven fields of at least a byte each.
_MIN_RECORD_BYTES = 7
# A count that no producer reaches: offsets must not be used up by a claim in a header.
_MAX_RECORDS = 1 << 20
# What a producer that is not in a transaction leaves at zero.
_UNUSUAL = CONTROL | TRANSACTIONAL | APPEND_TIME
_ANY_AGE_MS = 0x7FFFFFFFFFFFFFFF
# What the log writes into a batch: base offset and leader epoch, with the length between them.
_PLACE = struct.Struct(">qii")


class Staged(NamedTuple):
    """What `stage` answers: the offsets given to a batch, or those it already had."""

    base_offset: int
    next_offset: int
    duplicate: bool
    append_time_ms: int


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


class Partition(Readable):
    """One partition; `recovery.open_partition` makes them."""

    def __init__(
        self, id_: PartitionId, disk: Disk, folder: str, config: TopicConfig, clock: Clock
    ) -> None:
        super().__init__(id_)
        self.id = id_
        self.disk = disk
        self.folder = folder
        self.config = config
        self.clock = clock
        self.producers = ProducerStates()
        self.epochs = LeaderEpochs(disk, folder)
        self.leader_epoch = 0
        self.failure: StorageError | None = None
        # How often it was cut back to what is safe since it was opened.
        self.repairs = 0
        # Acknowledged records are damaged: `repair` must not cut them off.
        self.damaged = False
        self.reserve: OffsetReserve | None = None
        # Whether what the last clean stop wrote down of it (`partition_states`) is still so.
        self.state_is_stored = False
        # Its topic was deleted; whoever still holds this must let go.
        self.gone = False
        # Only the broker itself writes here, and knows what it writes.
        self.own_records = False
        # It is gone, or guarded: whoever writes by the short way asks first if it `admits` that.
        self.asks = False
        self.admits: Callable[[], bool] = bool
        # Of a guarded topic: what its groups still need begins here. Nothing is known at first.
        self.keep_from = 0
        self._synced: End | None = None
        self._staged: list[_StagedBatch] = []
        self._staged_bytes = 0
        self._staged_end = 0
        self._undo: dict[int, Producer | None] = {}
        # Aborted by markers that are staged; and all whose markers are not visible yet.
        self._staged_aborts: list[AbortedTransaction] = []
        self._ending = Ending()
        self._closed_unsynced: list[ClosedSegment] = []
        self._closing: list[ClosedSegment] = []
        self._sync_running = False
        # Why batches that were staged are not in the log, until their `flush` has said it.
        self._unflushed: StorageError | None = None
        # Whether a failed write was taken back from the active segment, which is not synced yet.
        self._untidy = False
        # What the recovery point was when damage below it was found.
        self._damaged_below = 0

    def __repr__(self) -> str:
        return f"Partition({self.id}, {self.log_start}..{self.visible}..{self.log_end})"

    @property
    def closed(self) -> list[Segment]:
        """The oldest segments, as far as they are complete and on disk with their indexes."""
        if self.damaged:
            return []
        if self.config.durability == "memory":
            return self.segments[:-1]
        unsynced = {id(c.segment) for c in (*self._closed_unsynced, *self._closing)}
        end = 0
        for segment, following in pairwise(self.segments):
            if following.base_offset > self.recovery_point or id(segment) in unsynced:
                break
            end += 1
        return self.segments[:end]

    @property
    def staged_bytes(self) -> int:
        """What waits for the next `flush`."""
        return self._staged_bytes

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
            # Most partitions of a large topic are not written at once.
            segments[-1].park()
        self.segments = segments
        self.active.index_interval_bytes = self.config.index_interval_bytes
        self.log_end = self._staged_end = log_end
        self.log_start = max(self.log_start, self.archived.earliest(segments[0].base_offset))
        self._synced = End(log_end, self.active, self.active.size)
        self._show(log_end, self.active, self.active.size)

    def reconfigure(self, config: TopicConfig) -> None:
        """Go on with other settings."""
        self.config = config
        if not self.syncs and self.failure is None and not self._staged:
            # What waited for a sync need not wait any longer.
            self._show(self.log_end, self.active, self.active.size)

    # ---- writing -------------------------------------------------------------------------

    def stage(self, view: memoryview, now_ms: int, in_transaction: bool = False) -> Staged:
        """Check one batch, give it its offsets and queue it for `flush`.

        `view` is exactly the batch, writable, and must stay as it is until the flush: base
        offset and leader epoch (and the time, if the log stamps it) are patched in place.
        A transactional batch is taken `in_transaction` only: the coordinator knows of it.
        """
        if self.failure is not None or self._unflushed is not None:
            self._refuse()
        size = len(view)
        if size < HEADER_SIZE:
            intake.explain_shape(view)
        (_, length, _, magic, crc, attributes, last_delta, base_ts, max_ts, producer_id,
         producer_epoch, sequence, count) = _unpack_header(view)  # fmt: skip
        if magic != MAGIC or length + LENGTH_BASE != size:
            intake.explain_shape(view)
        if crc32c(view[CRC_START:]) != crc:
            raise CorruptBatchError("the checksum of the record batch is wrong")
        if size > self.config.max_message_bytes:
            raise intake.too_large(size, self.config.max_message_bytes)
        if count < 1 or last_delta != count - 1 or attributes & _UNUSUAL:
            intake.explain_counts(count, last_delta, attributes, producer_id, in_transaction)
            if attributes & APPEND_TIME:
                # It claims to be stamped by a log: this one has not done it yet.
                clear_append_time(view, 0, size)
        if count * _MIN_RECORD_BYTES > size and (
            count > _MAX_RECORDS or not attributes & _CODEC_MASK
        ):
            raise InvalidRecordError(f"a batch of {size} bytes cannot hold {count} records")
        if attributes & _CODEC_MASK not in CODEC_NAMES:
            raise InvalidRecordError(f"unknown compression codec {attributes & _CODEC_MASK}")
        config = self.config
        append_time_ms = -1
        if producer_id != NO_PRODUCER_ID:
            if sequence < 0:
                raise InvalidRecordError(f"producer {producer_id} sent sequence {sequence}")
            last_sequence = next_sequence(sequence, last_delta)
            repeated = self.producers.check(producer_id, producer_epoch, sequence, last_sequence)
            if repeated is not None:
                return Staged(
                    repeated.first_offset,
                    repeated.last_offset + 1,
                    True,
                    repeated.timestamp_ms if config.append_time else -1,
                )
            if producer_id in self.producers.open and not attributes & TRANSACTIONAL:
                raise InvalidTxnStateError(
                    f"producer {producer_id} has a transaction open, and wrote outside of it"
                )
        if config.append_time:
            max_ts = append_time_ms = now_ms
        elif not (
            now_ms - config.message_timestamp_before_max_ms
            <= max_ts
            <= now_ms + config.message_timestamp_after_max_ms
        ):
            intake.explain_timestamp(max_ts, now_ms)
        elif config.message_timestamp_before_max_ms < _ANY_AGE_MS:
            intake.require_recent(
                view, count, base_ts, now_ms - config.message_timestamp_before_max_ms
            )
        if config.compacted and not self.own_records:
            intake.require_keys(view, count)
        base = self._staged_end
        last = base + last_delta
        active = self.active
        if (
            active.size + self._staged_bytes + size > config.segment_bytes
            or last - active.base_offset > 0x7FFFFFFF
            or max_ts - active.first_timestamp_ms > config.segment_ms
        ):
            self._roll_if_due(size, last, max_ts)
        _PLACE.pack_into(view, 0, base, length, self.leader_epoch)
        if append_time_ms >= 0:
            stamp_append_time(view, 0, size, now_ms)
        if producer_id != NO_PRODUCER_ID:
            self._undo.setdefault(producer_id, self.producers.by_id.get(producer_id))
            meta = BatchMeta(sequence, last_sequence, base, last, max_ts)
            self.producers.update(
                producer_id, producer_epoch, meta, now_ms, attributes & TRANSACTIONAL
            )
        self._staged.append(_StagedBatch(view, size, last, max_ts))
        self._staged_bytes += size
        self._staged_end = last + 1
        return Staged(base, last + 1, False, append_time_ms)

    def stage_marker(
        self,
        producer_id: int,
        producer_epoch: int,
        commit: bool,
        coordinator_epoch: int,
        now_ms: int,
    ) -> Staged:
        """Queue the marker that ends the producer's transaction here, if one is open."""
        if self.failure is not None or self._unflushed is not None:
            self._refuse()
        self.producers.check_marker(producer_id, producer_epoch, coordinator_epoch)
        marker = Marker(commit, coordinator_epoch)
        append_time = self.config.append_time
        batch = encode_marker(marker, producer_id, producer_epoch, now_ms, append_time=append_time)
        view = memoryview(batch)
        size, offset = len(view), self._staged_end
        assert self.active.aborted is not None
        crowded = len(self.active.aborted.entries) + len(self._staged_aborts) >= MAX_ENTRIES
        self._roll_if_due(size, offset, now_ms, crowded=crowded)
        _PLACE.pack_into(view, 0, offset, size - LENGTH_BASE, self.leader_epoch)
        self._undo.setdefault(producer_id, self.producers.by_id.get(producer_id))
        ended = self.producers.end(producer_id, producer_epoch, marker, offset, now_ms, now_ms)
        if ended is not None:
            self._ending.add(ended, self.visible)
            if not commit:
                self._staged_aborts.append(self.producers.aborted(ended))
        self._staged.append(_StagedBatch(view, size, offset, now_ms))
        self._staged_bytes += size
        self._staged_end = offset + 1
        return Staged(offset, offset + 1, False, now_ms if append_time else -1)

    def _refuse(self) -> None:
        error = self._unflushed or self.failure
        assert error is not None
        # The error is raised many times: it must not collect a traceback each time.
        raise error.with_traceback(None)

    def _roll_if_due(
        self, size: int, last_offset: int, max_ts: int, *, crowded: bool = False
    ) -> None:
        """Close the active segment if the batch must not go there."""
        active = self.active
        empty = not active.size and not self._staged
        full = active.size + self._staged_bytes + size > self.config.segment_bytes
        old = active.first_timestamp_ms >= 0 and (
            max_ts - active.first_timestamp_ms > self.config.segment_ms
        )
        if not empty and (full or old or crowded or not active.fits(last_offset)):
            try:
                self.flush()
            except StorageError as error:
                self._unflushed = error
                raise
            self.roll()

    def flush(self) -> None:
        """Write everything staged. On StorageError nothing of it counts.

        What a roll made `stage` write before is in the log: `log_end` tells.
        """
        staged = self._staged
        if not staged:
            if self._unflushed is not None:
                error, self._unflushed = self._unflushed, None
                raise error.with_traceback(None)
            return
        if self.failure is not None:
            # It failed since they were staged.
            self._take_back(self.failure)
            self._refuse()
        segment = self.active
        try:
            segment.open()
        except StorageError:
            # Too many files are open, say. Nothing is written, so there is nothing to cut off.
            self._drop_staged()
            raise
        self.state_is_stored = False
        try:
            if self.reserve is not None and self._staged_end > self.reserve.limit:
                self.reserve.extend(self._staged_end)
            if self.leader_epoch != self.epochs.latest:
                self.epochs.assign(self.leader_epoch, self.log_end)
            segment.write([batch.view for batch in staged])
        except StorageError as error:
            self._take_back(error)
            raise
        position = segment.size
        for batch in staged:
            segment.account(
                batch.view, position, batch.size, batch.last_offset, batch.max_timestamp_ms
            )
            position += batch.size
        if self._staged_aborts:
            assert segment.aborted is not None
            for aborted in self._staged_aborts:
                segment.aborted.append(aborted)
        self.log_end = self._staged_end
        self._forget_staged()
        if not self.syncs:
            self._show(self.log_end, segment, segment.size)

    def _drop_staged(self) -> None:
        for producer_id, before in self._undo.items():
            self.producers.restore(producer_id, before)
        self._ending.take_back(self.log_end)
        self._forget_staged()
        self._staged_end = self.log_end

    def _take_back(self, error: StorageError) -> None:
        self._drop_staged()
        self._untidy = True
        try:
            self.active.file.truncate(self.active.size)
        except StorageError:
            # What the write left behind cannot be removed now; `repair` will.
            self._fail(error)

    def refuse_staged(self, error: StorageError) -> None:
        """Drop what is staged and refuse writes until repaired: something unforeseen happened."""
        self._take_back(error)
        self._fail(error)

    def _forget_staged(self) -> None:
        self._staged = []
        self._staged_bytes = 0
        self._undo = {}
        self._staged_aborts = []

    def append(self, batch: bytes, *, in_transaction: bool = False) -> int:
        """Stage and flush one batch; returns its base offset."""
        view = memoryview(bytearray(batch))
        staged = self.stage(view, self.clock.now_ms(), in_transaction)
        self.flush()
        return staged.base_offset

    def roll(self) -> None:
        """Close the active segment and open the next at `log_end`."""
        if not self.active.size:
            return
        self.state_is_stored = False
        if self._untidy:
            self._tidy_up()
        following = create_segment(self.disk, self.folder, self.log_end)
        following.index_interval_bytes = self.config.index_interval_bytes
        closed = self.active
        if self.config.durability != "memory":
            self._closed_unsynced.append(
                ClosedSegment(closed, self.log_end, self.producers.to_bytes())
            )
        self.segments = [*self.segments, following]
        if self._visible_segment is closed and self._visible_position == closed.size:
            self._show(self.visible, following, 0)

    def _tidy_up(self) -> None:
        """Remains of a failed write must not come back, after a crash, in a closed segment."""
        try:
            self.active.file.sync()
        except StorageError as error:
            mark_failed_sync(self.disk, self.folder)
            self._fail(error)
            raise
        self._untidy = False

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
        return bool(self._closed_unsynced) or (self.syncs and self._synced.offset < self.log_end)

    @property
    def is_healthy(self) -> bool:
        """Whether it takes writes, as far as its disk is concerned."""
        return self.failure is None

    @property
    def is_synced(self) -> bool:
        """Whether all that it holds is on disk, also what no reader waits for."""
        assert self._synced is not None
        busy = self._sync_running or self._closed_unsynced or self._staged or self._untidy
        return not busy and self._synced.offset >= self.log_end

    @property
    def sync_running(self) -> bool:
        """Whether a plan was made and is not finished yet."""
        return self._sync_running

    def plan_sync(self, *, active_too: bool | None = None) -> SyncPlan:
        """What a sync must do now; `finish_sync` must follow its run."""
        self._sync_running = True
        self._closing = closed = self._closed_unsynced
        self._closed_unsynced = []
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
        self._closing = []
        if plan.error is not None:
            self._closed_unsynced = [*plan.closed, *self._closed_unsynced]
            self._fail(plan.error)
            return
        if self.failure is not None:
            return
        segment = plan.active or self.active
        position = plan.active_size if plan.active else 0
        if plan.active is None and segment.base_offset != plan.offset:
            segment = self.segment_for(plan.offset)
        self._synced = End(plan.offset, segment, position)
        if self.syncs and plan.offset > self.visible:
            self._show(plan.offset, segment, position)

    def _fail(self, error: StorageError) -> None:
        log.error("%s refuses writes: %s. %s", self.id, error, error.advice)
        self.failure = error

    def refuse_damaged(self, error: StorageError, recovery_point: int) -> None:
        """Refuse writes for good: records that were safe are damaged. Reads go on.

        The recovery point stays what it was, so that the next start finds the damage again
        and does not take it for a torn tail.
        """
        self.damaged = True
        self._damaged_below = recovery_point
        self._fail(error)

    @property
    def recovery_point(self) -> int:
        """Every record below is on disk, and so are the indexes of segments that end there."""
        assert self._synced is not None
        if self.damaged:
            return self._damaged_below
        unfinished = self._closing or self._closed_unsynced
        limit = unfinished[0].next_offset - 1 if unfinished else self.log_end
        return min(self._synced.offset, limit)

    def repair(self) -> None:
        """Cut back to what is known to be safe and go on in a new segment.

        Raises StorageError if the disk still fails; the partition then stays as it is. Offsets
        that were given out and are cut off are not given out again: a gap remains.
        """
        if self.failure is None or self._sync_running or self.damaged:
            return
        try:
            self._repair()
        except StorageError:
            mark_failed_sync(self.disk, self.folder)
            raise

    def _repair(self) -> None:
        end, doubtful = self._safe_end()
        disk, folder = self.disk, self.folder
        keep = cut_back(disk, folder, self.segments, end, doubtful)
        self.state_is_stored = False
        self.segments, self.producers = go_on(
            disk,
            folder,
            keep,
            max(self.log_end, end.offset),
            self._closed_unsynced,
            self.config.index_interval_bytes,
        )
        self._closed_unsynced = []
        self._ending.clear()
        self._untidy = False
        self._synced = End(self.log_end, self.active, self.active.size)
        self._show(*self._synced)
        self.failure = None
        self.repairs += 1
        lost = self.log_end - end.offset
        log.warning("%s is repaired; %d unacknowledged offsets are left empty", self.id, lost)

    def _safe_end(self) -> tuple[End, list[Segment]]:
        """Up to where the log is synced or visible; the segments that may be in memory only."""
        assert self._synced is not None
        assert self._visible_segment is not None
        synced = self._synced
        if self.visible <= synced.offset:
            return synced, []
        # Acknowledged from the page cache, which still holds it.
        doubtful = [s for s in self.segments if s.base_offset >= synced.segment.base_offset]
        return End(self.visible, self._visible_segment, self._visible_position), doubtful

    # ---- transactions --------------------------------------------------------------------

    @property
    def stable(self) -> int:
        """The last stable offset: below it every transaction is decided, visibly."""
        opened, visible = self.producers.open, self.visible
        if not opened and not self._ending:
            return visible
        first = min(next(iter(opened.values()), visible), self._ending.first_offset(visible))
        return max(min(first, visible), self.log_start)

    def open_transactions(self) -> dict[int, tuple[int, int]]:
        """Producer id → epoch and first offset of every transaction that is open here."""
        by_id = self.producers.by_id
        return {id_: (by_id[id_].epoch, first) for id_, first in self.producers.open.items()}

    # ---- shrinking -----------------------------------------------------------------------

    def delete_before(self, offset: int) -> None:
        """Raise the start of the log; whole segments below it are removed by retention."""
        if offset < 0 or offset > self.visible:
            raise OffsetOutOfRangeError(f"{offset} is above the end of {self.id}, {self.visible}")
        self.log_start = max(self.log_start, offset)

    def replace_segments(self, gone: list[Segment], new: Sequence[Segment] = ()) -> None:
        """Forget closed segments, and go on with the new ones in their place, if any.

        Their files are the caller's matter. Readers that hold one open go on undisturbed.
        """
        self.state_is_stored = False
        dropped = set(map(id, gone))
        kept = [s for s in self.segments if id(s) not in dropped]
        self.segments = sorted([*kept, *new], key=base_offset)
        self._closed_unsynced = [c for c in self._closed_unsynced if id(c.segment) not in dropped]

    def use_disk(self, disk: Disk) -> None:
        """Go on with another way to the same files."""
        self.disk = disk
        self.epochs.use_disk(disk)
        for segment in self.segments:
            segment.disk = disk
            segment.park()

    def forbid_files(self) -> None:
        """Its folder is about to go: what is not open must not be opened any more."""
        for segment in self.segments:
            segment.forbid()

    def close(self) -> None:
        for segment in self.segments:
            segment.close()
