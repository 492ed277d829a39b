"""What a partition remembers of its producers, so that retries are not written twice.

For each producer id: its epoch and its last five batches (sequence numbers and offsets), as many
as an idempotent producer may have in flight. A batch whose sequence is already there is a
duplicate and gets its first offset back; one that does not follow the last is out of order.

Entries are immutable and replaced whole, so a failed write restores the ones before it. State is
rebuilt from batch headers; a snapshot at the start of each segment bounds how many. It is in
Kafka's `.snapshot` format with one entry for each remembered batch, the newest of a producer
last: Kafka, which remembers the last batch only, reads it all the same.

The number of producers is bounded: the longest silent ones are forgotten first. Silence is
counted by the log's clock, not by the timestamps in the records, which may be from long ago.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

from penstock.errors import OutOfOrderSequenceError, ProducerFencedError
from penstock.log.disk import Disk, read_whole, write_atomically
from penstock.log.segment import SNAPSHOT_SUFFIX, Segment, segment_name
from penstock.records.batch import NO_PRODUCER_ID, BatchHeader, next_sequence

KEPT_BATCHES: Final = 5
MAX_PRODUCERS: Final = 20_000
EXPIRY_MS: Final = 24 * 3_600_000

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


class Producer(NamedTuple):
    """All that is remembered of one producer; the newest batch is last."""

    epoch: int
    batches: tuple[BatchMeta, ...]
    # When it last wrote, by the log's clock; _UNSEEN if that was before the log was opened.
    seen_ms: int

    @property
    def last_timestamp_ms(self) -> int:
        return self.batches[-1].timestamp_ms if self.batches else -1


class ProducerStates:
    """Producer id → Producer, for one partition."""

    __slots__ = ("by_id",)

    def __init__(self) -> None:
        self.by_id: dict[int, Producer] = {}

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
        expected = next_sequence(known.batches[-1].last_sequence, 1) if known.batches else 0
        if known.batches and first_sequence != expected:
            raise OutOfOrderSequenceError(
                f"producer {producer_id} sent sequence {first_sequence}, expected {expected}"
            )
        return None

    def update(self, producer_id: int, epoch: int, batch: BatchMeta, now_ms: int = _UNSEEN) -> None:
        known = self.by_id.get(producer_id)
        if known is None and len(self.by_id) >= MAX_PRODUCERS:
            self._forget_longest_silent()
        if known is None or known.epoch != epoch:
            self.by_id[producer_id] = Producer(epoch, (batch,), now_ms)
        else:
            kept = known.batches[-(KEPT_BATCHES - 1) :]
            self.by_id[producer_id] = Producer(epoch, (*kept, batch), now_ms)

    def observe(self, header: BatchHeader) -> None:
        """Take in a batch that is already in the log."""
        if header.producer_id == NO_PRODUCER_ID or header.is_control:
            return
        meta = BatchMeta(
            header.base_sequence,
            header.last_sequence,
            header.base_offset,
            header.last_offset,
            header.max_timestamp,
        )
        self.update(header.producer_id, header.producer_epoch, meta)

    def restore(self, producer_id: int, before: Producer | None) -> None:
        if before is None:
            self.by_id.pop(producer_id, None)
        else:
            self.by_id[producer_id] = before

    def expire(self, now_ms: int) -> None:
        """Forget producers that have been silent for a day."""
        for producer_id, known in list(self.by_id.items()):
            if known.seen_ms == _UNSEEN:
                self.by_id[producer_id] = known._replace(seen_ms=now_ms)
            elif now_ms - known.seen_ms > EXPIRY_MS:
                del self.by_id[producer_id]

    def _forget_longest_silent(self) -> None:
        """Make room for a tenth, so that the search is not repeated for each newcomer."""
        by_age = sorted(self.by_id, key=lambda pid: self.by_id[pid].seen_ms)
        for producer_id in by_age[: MAX_PRODUCERS // 10]:
            del self.by_id[producer_id]

    # ---- snapshots -----------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        entries = [
            _ENTRY.pack(
                producer_id,
                known.epoch,
                batch.last_sequence,
                batch.last_offset,
                batch.last_offset - batch.first_offset,
                batch.timestamp_ms,
                -1,
                -1,
            )
            for producer_id, known in self.by_id.items()
            for batch in known.batches
        ]
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
        for producer_id, epoch, sequence, offset, delta, timestamp, _, _ in _ENTRY.iter_unpack(
            data[at:]
        ):
            first = (sequence - delta) & 0x7FFFFFFF
            meta = BatchMeta(first, sequence, offset - delta, offset, timestamp)
            states.update(producer_id, epoch, meta)
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


def replay_producers(disk: Disk, folder: str, segments: Sequence[Segment]) -> ProducerStates:
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
