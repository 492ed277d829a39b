"""What must be true of a partition after a crash, given what was promised before it.

Everything is compared with plain scans of the files: the batches with those that were written,
the producers with the headers of their batches, transactions with a plain reading of the log,
lookups with a search from the beginning.
"""

from __future__ import annotations

import random
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import pytest

from penstock.errors import OutOfOrderSequenceError, ProducerFencedError
from penstock.log.config import TopicConfig
from penstock.log.partition import Partition
from penstock.log.segment import Segment
from penstock.log.slice import Slice
from penstock.records.batch import headers, next_sequence, read_header, verify
from penstock.records.record import decode
from tests.log.txn_model import Event, History, events_of, history_of

PRODUCER_IDS = (7, 8, 9)
# These write in transactions only.
TXN_IDS = (21, 22, 23)


class Batch(NamedTuple):
    """A batch as the log holds it."""

    base: int
    next: int
    data: bytes


class Promise(NamedTuple):
    """How far a partition's log must reach after a crash."""

    after_kill: int
    after_power_loss: int


@dataclass
class Expected:
    """What is known of one partition from the outside."""

    config: TopicConfig
    topic_id: uuid.UUID
    # Flushed without an error, in order; then what was staged and not yet flushed.
    written: list[Batch] = field(default_factory=list)
    staged: list[Batch] = field(default_factory=list)
    # All contents ever tried at a base offset: after a failed write any of them may turn up.
    tried: dict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    write_failed: bool = False
    # Where a repair left offsets empty: from, to.
    gaps: set[tuple[int, int]] = field(default_factory=set)
    promise: Promise = field(default_factory=lambda: Promise(0, 0))
    log_start: int = 0
    checkpointed_start: int = 0
    # Sequence numbers: producer id → (epoch, next sequence).
    sequences: dict[int, tuple[int, int]] = field(default_factory=dict)
    # What happened in transactions below the first batch in `written`.
    past: list[Event] = field(default_factory=list)

    def events_before(self, offset: int) -> list[Event]:
        """What happened in transactions below the offset, whether it is stored still or not."""
        known = events_of(batch.data for batch in self.written)
        first = self.written[0].base if self.written else offset
        events = [event for event in self.past if event.offset < first] + known
        return [event for event in events if event.offset < offset]


def split(data: bytes) -> list[Batch]:
    found = []
    end = 0
    for at, header in headers(data):
        verify(data, at)
        end = at + header.size
        found.append(Batch(header.base_offset, header.next_offset, data[at:end]))
    assert end == len(data)
    return found


def read_all(partition: Partition, offset: int) -> list[Batch]:
    """Every visible batch from an offset on, as a consumer gets them."""
    found: list[Batch] = []
    while (piece := partition.read(offset, 700)) is not None:
        assert isinstance(piece, Slice)
        found += split(piece.read())
        assert found[-1].next > offset
        offset = found[-1].next
    return found


def stored_batches(partition: Partition) -> list[Batch]:
    """Every batch in the files from the segment on that holds the start of the log."""
    first = partition.segment_for(partition.log_start).base_offset
    return [
        Batch(header.base_offset, header.next_offset, data)
        for header, data in partition.batches(first)
    ]


def latest_batches(batches: list[Batch], producer_id: int) -> list[Batch]:
    """Those of the producer's latest epoch that may still be in flight, the newest last."""
    found: list[Batch] = []
    epoch = -1
    for batch in batches:
        header = read_header(batch.data)
        if header.producer_id != producer_id:
            continue
        if header.producer_epoch > epoch:
            # A marker may bring a new epoch too.
            epoch, found = header.producer_epoch, []
        if not header.is_control:
            found.append(batch)
    return found[-5:]


def latest_epoch(batches: list[Batch], producer_id: int) -> int | None:
    heads = [read_header(batch.data) for batch in batches]
    return max((h.producer_epoch for h in heads if h.producer_id == producer_id), default=None)


# ---- checks --------------------------------------------------------------------------------


def check_partition(
    partition: Partition, expected: Expected, promised_end: int, rng: random.Random
) -> None:
    """Everything that must hold of a partition that was just opened."""
    assert not partition.damaged
    assert expected.checkpointed_start <= partition.log_start <= expected.log_start
    assert partition.log_end >= promised_end
    found = read_all(partition, partition.log_start)
    assert partition.visible == partition.log_end or partition.failure is not None
    assert [b.data for b in found] == [data for _, data in partition.batches(partition.log_start)]
    wanted = [*expected.written, *expected.staged]
    wanted = [batch for batch in wanted if batch.next > partition.log_start]
    kept = sum(batch.next <= promised_end for batch in wanted)
    assert found[:kept] == wanted[:kept], "acknowledged records are lost or changed"
    if expected.write_failed:
        assert all(batch.data in expected.tried[batch.base] for batch in found[kept:])
        # A repair leaves gaps, but only those.
        joints = {(a.next, b.base) for a, b in pairwise(found)}
        missing = {(end, base) for end, base in joints if end != base}
        assert missing <= {(a.next, b.base) for a, b in pairwise(wanted)} | expected.gaps
    else:
        assert found == wanted[: len(found)], "records that were never there, or not in order"
    check_producers(partition)
    check_transactions(partition, history(partition, expected, promised_end), rng)
    check_lookups(partition, found, rng)


def check_producers(partition: Partition) -> None:
    """Of each producer the latest batches in the log are known, and nothing else."""
    stored = stored_batches(partition)
    for producer_id in (*PRODUCER_IDS, *TXN_IDS):
        recent = latest_batches(stored, producer_id)
        known = partition.producers.by_id.get(producer_id)
        epoch = latest_epoch(stored, producer_id)
        if epoch is None:
            assert known is None or partition.log_start > 0
            continue
        if not recent:
            assert known is not None
            assert known.epoch == epoch
            continue
        assert known is not None, f"producer {producer_id} is forgotten"
        for batch in recent:
            header = verify(batch.data)
            meta = partition.producers.check(
                producer_id, header.producer_epoch, header.base_sequence, header.last_sequence
            )
            assert meta is not None, "a retry would be written twice"
            assert (meta.first_offset, meta.last_offset + 1) == (batch.base, batch.next)
        following = next_sequence(header.last_sequence, 1)
        check = partition.producers.check
        assert check(producer_id, header.producer_epoch, following, following) is None
        gap = next_sequence(following, 1)
        with pytest.raises(OutOfOrderSequenceError):
            check(producer_id, header.producer_epoch, gap, gap)
        with pytest.raises(ProducerFencedError):
            check(producer_id, header.producer_epoch - 1, following, following)


def history(partition: Partition, expected: Expected, certain: int) -> History:
    """The transactions of a partition, as a plain reading of the log tells them."""
    return history_of(all_events(partition, expected, certain))


def all_events(partition: Partition, expected: Expected, certain: int) -> list[Event]:
    """What is in the files; and below `certain` all that ever was, removed since or not."""
    first = partition.segments[0].base_offset
    known = {event.offset: event for event in expected.events_before(certain)}
    known |= {e.offset: e for e in events_of(data for _, data in partition.batches(first))}
    return sorted(known.values())


def check_transactions(partition: Partition, known: History, rng: random.Random) -> None:
    """What is open, what is stable and what was aborted agree with a plain reading of the log."""
    opened = {id_: first for id_, (_, first) in partition.open_transactions().items()}
    if partition.failure is None:
        # A repair that failed half-way has cut off markers already.
        assert opened == known.open
    stable = known.stable(partition.visible, partition.log_start)
    assert partition.stable == stable
    for _ in range(3):
        start = rng.randint(partition.log_start, stable)
        end = rng.randint(start, stable)
        if start == end:
            # Nothing is read there. Where the log begins within a transaction whose marker a failed
            # repair has cut off, this is the one range that it still seems to reach into.
            continue
        assert partition.aborted(start, end) == known.aborted(start, end), (start, end)


def check_lookups(partition: Partition, found: list[Batch], rng: random.Random) -> None:
    """Lookups by offset and time against plain scans."""
    for segment in partition.segments:
        check_indexes(segment)
    for _ in range(3):
        if not found:
            break
        offset = rng.randint(partition.log_start, found[-1].next - 1)
        piece = partition.read(offset, 1)
        first = next(batch for batch in found if batch.next > offset)
        assert isinstance(piece, Slice)
        assert piece.read() == first.data
    records = [
        record
        for batch in found
        for record in decode(batch.data)
        if record.offset >= partition.log_start
    ]
    for _ in range(3):
        timestamp_ms = partition.clock.now_ms() - rng.randint(-10, 40_000)
        if records and rng.random() < 0.7:
            timestamp_ms = rng.choice(records).timestamp_ms + rng.randint(-1, 1)
        answer = partition.offset_for_time(timestamp_ms)
        naive = next((r for r in records if r.timestamp_ms >= timestamp_ms), None)
        assert (answer and answer[:2]) == (naive and naive[:2])
    newest = partition.max_timestamp()
    largest = max((record.timestamp_ms for record in records), default=-1)
    if newest is not None:
        assert newest.timestamp_ms == largest
        assert newest.offset == next(r.offset for r in records if r.timestamp_ms == largest)
    else:
        assert not records, "the largest timestamp is not found"


def check_indexes(segment: Segment) -> None:
    """Every entry is true: the batch is there, and no earlier one has a later timestamp."""
    data = segment.file.pread(segment.size, 0)
    by_position = dict(headers(data))
    index = segment.index
    for relative, position in zip(index.offsets, index.positions, strict=True):
        assert by_position[position].last_offset == segment.base_offset + relative
    times = segment.time_index
    by_last_offset = {header.last_offset: header for header in by_position.values()}
    for timestamp_ms, relative in zip(times.timestamps, times.offsets, strict=True):
        last_offset = segment.base_offset + relative
        assert by_last_offset[last_offset].max_timestamp == timestamp_ms
        earlier = [h.max_timestamp for h in by_position.values() if h.last_offset <= last_offset]
        assert max(earlier) == timestamp_ms
    largest = max((h.max_timestamp for h in by_position.values()), default=-1)
    assert segment.max_timestamp_ms == largest, segment
