"""What a partition remembers of its producers: no retry is written twice, no transaction is mixed.

For each producer id: its epoch and its last five batches (sequence numbers and offsets), as many
as an idempotent producer may have in flight. A batch whose sequence is already there is a
duplicate and gets its first offset back; one that does not follow the last is out of order.

A transactional batch opens its producer's transaction in this partition, unless it is open
already; only a marker ends it. `open` says where each open one began, in the order of the offsets.
A marker may bring a new epoch: then the sequence numbers begin anew.

Entries are immutable and replaced whole, so a failed write restores the ones before it. State is
rebuilt from batch headers and markers; a snapshot at the start of each segment bounds how many. It
is in Kafka's `.snapshot` format with one entry for each remembered batch, the newest of a producer
last: Kafka, which remembers the last batch only, reads it all the same.

The number of producers is bounded: the longest silent ones are forgotten first. Silence is
counted by the log's clock, not by the timestamps in the records, which may be from long ago. One
whose transaction is open is never forgotten: how many those can be is the coordinator's to bound.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

from penstock.errors import CoordinatorFencedError, OutOfOrderSequenceError, ProducerFencedError
from penstock.log.disk import Disk, read_whole, write_atomically
from penstock.log.segment import SNAPSHOT_SUFFIX, Segment, segment_name
from penstock.log.txn_index import AbortedTransaction
from penstock.records.batch import NO_PRODUCER_ID, BatchHeader, next_sequence
from penstock.records.control import Marker, read_marker

KEPT_BATCHES: Final = 5
MAX_PRODUCERS: Final = 20_000
EXPIRY_MS: Final = 24 * 3_600_000
NO_OFFSET: Final = -1

_UNSEEN: Final = -1
_SNAPSHOT_VERSION: Final = 1
_HEAD: Final = struct.Struct(">hI")
_COUNT: Final = struct.Struct(">i")
_ENTRY: Final = struct.Struct(">qhiqiqiq")
_CRC_FROM: Final = 6


class BatchMeta(NamedTuple):
    """One remembered batch of a producer."""

    first_sequence: int
    last_sequence: int
    first_offset: int
    last_offset: int
    timestamp_ms: int


class TxnState(NamedTuple):
    """Where a producer's transaction began, if one is open; what its last marker said."""

    first_offset: int = NO_OFFSET
    coordinator_epoch: int = -1
    marker_ms: int = -1


_NO_TXN: Final = TxnState()


class Producer(NamedTuple):
    """All that is remembered of one producer; the newest batch is last.

    There may be none: a marker alone, or one with a new epoch.
    """

    epoch: int
    batches: tuple[BatchMeta, ...]
    # When it last wrote, by the log's clock; _UNSEEN if that was before the log was opened.
    seen_ms: int
    txn: TxnState = _NO_TXN

    @property
    def last_timestamp_ms(self) -> int:
        newest_ms = self.batches[-1].timestamp_ms if self.batches else -1
        return max(newest_ms, self.txn.marker_ms)

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else -1


class Ended(NamedTuple):
    """A transaction with records in this partition, and the marker that ended it."""

    producer_id: int
    first_offset: int
    marker_offset: int
    commit: bool


class ProducerStates:
    """Producer id → Producer, for one partition."""

    __slots__ = ("by_id", "open")

    def __init__(self) -> None:
        self.by_id: dict[int, Producer] = {}
        # Producer id → first offset of its open transaction, the earliest first.
        self.open: dict[int, int] = {}

    def check(
        self, producer_id: int, epoch: int, first_sequence: int, last_sequence: int
    ) -> BatchMeta | None:
        """The batch that this one repeats; None if it is new and in order; raises otherwise."""
        known = self.by_id.get(producer_id)
        if known is None:
            # As in Kafka, a producer that the log has forgotten may go on where it was.
            return None
        if epoch < known.epoch:
            raise ProducerFencedError(
                f"producer {producer_id} has epoch {epoch}, but {known.epoch} has been seen"
            )
        if epoch > known.epoch:
            if first_sequence != 0:
                raise OutOfOrderSequenceError(
                    f"producer {producer_id} starts epoch {epoch} at sequence {first_sequence}"
                )
            return None
        for batch in known.batches:
            if batch.first_sequence == first_sequence and batch.last_sequence == last_sequence:
                return batch
        # Where a marker was all that it wrote in this epoch, it begins at 0.
        expected = next_sequence(known.batches[-1].last_sequence, 1) if known.batches else 0
        if first_sequence != expected:
            raise OutOfOrderSequenceError(
                f"producer {producer_id} sent sequence {first_sequence}, expected {expected}"
            )
        return None

    def check_marker(self, producer_id: int, epoch: int, coordinator_epoch: int) -> None:
        """Raise if a producer's transaction may not be ended in these epochs."""
        known = self.by_id.get(producer_id)
        if known is None:
            return
        if epoch < known.epoch:
            raise ProducerFencedError(
                f"a marker for producer {producer_id} has epoch {epoch}, but {known.epoch} has "
                "been seen"
            )
        if coordinator_epoch < known.txn.coordinator_epoch:
            raise CoordinatorFencedError(
                f"a marker for producer {producer_id} is of coordinator epoch "
                f"{coordinator_epoch}, but {known.txn.coordinator_epoch} has been seen"
            )

    def update(
        self,
        producer_id: int,
        epoch: int,
        batch: BatchMeta,
        now_ms: int = _UNSEEN,
        transactional: int = 0,
    ) -> None:
        """Take in a batch; if it is transactional, its producer's transaction is open now."""
        known = self.by_id.get(producer_id)
        if known is None:
            self._make_room()
            self.by_id[producer_id] = Producer(epoch, (batch,), now_ms)
        elif known.epoch != epoch:
            self.by_id[producer_id] = Producer(epoch, (batch,), now_ms, known.txn)
        else:
            kept = known.batches[-(KEPT_BATCHES - 1) :]
            self.by_id[producer_id] = Producer(epoch, (*kept, batch), now_ms, known.txn)
        if transactional and producer_id not in self.open:
            self._begin(producer_id, batch.first_offset)

    def _begin(self, producer_id: int, first_offset: int) -> None:
        self.open[producer_id] = first_offset
        known = self.by_id[producer_id]
        txn = known.txn._replace(first_offset=first_offset)
        self.by_id[producer_id] = known._replace(txn=txn)

    def end(
        self,
        producer_id: int,
        epoch: int,
        marker: Marker,
        offset: int,
        timestamp_ms: int,
        now_ms: int = _UNSEEN,
    ) -> Ended | None:
        """Take in a marker; the transaction that it ended, if one was open here."""
        known = self.by_id.get(producer_id)
        if known is None:
            self._make_room()
        batches = known.batches if known is not None and epoch <= known.epoch else ()
        if known is not None:
            epoch = max(epoch, known.epoch)
        txn = TxnState(NO_OFFSET, marker.coordinator_epoch, timestamp_ms)
        self.by_id[producer_id] = Producer(epoch, batches, now_ms, txn)
        first = self.open.pop(producer_id, None)
        return None if first is None else Ended(producer_id, first, offset, marker.commit)

    def aborted(self, ended: Ended) -> AbortedTransaction:
        """What the index says of a transaction that was aborted just now."""
        following = next(iter(self.open.values()), ended.marker_offset + 1)
        return AbortedTransaction(
            ended.producer_id, ended.first_offset, ended.marker_offset, following
        )

    def observe(self, header: BatchHeader, marker: Marker | None = None) -> Ended | None:
        """Take in a batch that is already in the log; of a control batch also its marker."""
        if header.producer_id == NO_PRODUCER_ID:
            return None
        if header.is_control:
            if marker is None:
                return None
            return self.end(
                header.producer_id,
                header.producer_epoch,
                marker,
                header.last_offset,
                header.max_timestamp,
            )
        meta = BatchMeta(
            header.base_sequence,
            header.last_sequence,
            header.base_offset,
            header.last_offset,
            header.max_timestamp,
        )
        transactional = int(header.is_transactional)
        self.update(header.producer_id, header.producer_epoch, meta, transactional=transactional)
        return None

    def restore(self, producer_id: int, before: Producer | None) -> None:
        first_offset = NO_OFFSET
        if before is None:
            self.by_id.pop(producer_id, None)
        else:
            self.by_id[producer_id] = before
            first_offset = before.txn.first_offset
        if first_offset == NO_OFFSET:
            self.open.pop(producer_id, None)
        elif self.open.get(producer_id) != first_offset:
            self.open[producer_id] = first_offset
            self._sort_open()

    def _sort_open(self) -> None:
        self.open = dict(sorted(self.open.items(), key=lambda item: item[1]))

    def expire(self, now_ms: int) -> None:
        """Forget producers that have been silent for a day."""
        for producer_id, known in list(self.by_id.items()):
            if known.seen_ms == _UNSEEN:
                self.by_id[producer_id] = known._replace(seen_ms=now_ms)
            elif now_ms - known.seen_ms > EXPIRY_MS and producer_id not in self.open:
                del self.by_id[producer_id]

    def _make_room(self) -> None:
        """For a newcomer, and at once for a tenth, so that the search is not repeated for each."""
        if len(self.by_id) < MAX_PRODUCERS:
            return
        idle = [producer_id for producer_id in self.by_id if producer_id not in self.open]
        idle.sort(key=lambda producer_id: self.by_id[producer_id].seen_ms)
        for producer_id in idle[: MAX_PRODUCERS // 10]:
            del self.by_id[producer_id]

    # ---- snapshots -----------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        entries: list[bytes] = []
        for producer_id, known in self.by_id.items():
            first_offset, coordinator_epoch, marker_ms = known.txn
            if not known.batches:
                fields = (known.epoch, -1, NO_OFFSET, 0, marker_ms)
                entries.append(_ENTRY.pack(producer_id, *fields, coordinator_epoch, first_offset))
            for batch in known.batches:
                entry = _ENTRY.pack(
                    producer_id,
                    known.epoch,
                    batch.last_sequence,
                    batch.last_offset,
                    batch.last_offset - batch.first_offset,
                    batch.timestamp_ms,
                    coordinator_epoch,
                    first_offset,
                )
                entries.append(entry)
        body = _COUNT.pack(len(entries)) + b"".join(entries)
        return _HEAD.pack(_SNAPSHOT_VERSION, crc32c(body)) + body

    @classmethod
    def from_bytes(cls, data: bytes) -> ProducerStates | None:
        """The state in a snapshot; None if it is damaged."""
        if len(data) < _CRC_FROM + _COUNT.size:
            return None
        version, checksum = _HEAD.unpack_from(data)
        if version != _SNAPSHOT_VERSION or crc32c(data[_CRC_FROM:]) != checksum:
            return None
        (count,) = _COUNT.unpack_from(data, _CRC_FROM)
        at = _CRC_FROM + _COUNT.size
        if count * _ENTRY.size != len(data) - at:
            return None
        states = cls()
        for producer_id, epoch, sequence, offset, delta, timestamp, *txn in _ENTRY.iter_unpack(
            data[at:]
        ):
            coordinator_epoch, first_offset = txn
            state = TxnState(first_offset, coordinator_epoch)
            if offset == NO_OFFSET:
                state = state._replace(marker_ms=timestamp)
                states.by_id[producer_id] = Producer(epoch, (), _UNSEEN, state)
            else:
                first = (sequence - delta) & 0x7FFFFFFF
                meta = BatchMeta(first, sequence, offset - delta, offset, timestamp)
                states.update(producer_id, epoch, meta)
                states.by_id[producer_id] = states.by_id[producer_id]._replace(txn=state)
            if first_offset != NO_OFFSET:
                states.open[producer_id] = first_offset
        states._sort_open()
        return states


def snapshot_path(folder: str, offset: int) -> str:
    return os.path.join(folder, segment_name(offset) + SNAPSHOT_SUFFIX)


def snapshot_offsets(names: Iterable[str]) -> list[int]:
    """The offsets of the snapshots among a folder's names, rising."""
    found = [name.removesuffix(SNAPSHOT_SUFFIX) for name in names if name.endswith(SNAPSHOT_SUFFIX)]
    return sorted(int(stem) for stem in found if stem.isdigit())


def write_snapshot(disk: Disk, folder: str, offset: int, states: ProducerStates) -> None:
    """The state as of all records below `offset`, durable on return."""
    write_atomically(disk, snapshot_path(folder, offset), states.to_bytes())


def load_snapshot(disk: Disk, folder: str, offset: int) -> ProducerStates | None:
    path = snapshot_path(folder, offset)
    return ProducerStates.from_bytes(read_whole(disk, path)) if disk.exists(path) else None


def marker_at(segment: Segment, position: int, header: BatchHeader) -> Marker | None:
    """The marker in a batch of the segment; None if it is no control batch."""
    return read_marker(segment.batch_at(position, header)) if header.is_control else None


def replay_producers(disk: Disk, folder: str, segments: Sequence[Segment]) -> ProducerStates:
    """From the latest snapshot at the start of a segment, and the batches after it."""
    states: ProducerStates | None = None
    first = len(segments)
    while states is None and first > 0:
        first -= 1
        states = load_snapshot(disk, folder, segments[first].base_offset)
    states = states or ProducerStates()
    for segment in segments[first:]:
        was_open = segment.is_open
        for position, header in segment.scan(0):
            states.observe(header, marker_at(segment, position, header))
        if not was_open:
            segment.park()
    return states
