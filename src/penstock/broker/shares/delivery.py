"""From the log into a consumer's hands: finds what is free, reads it, locks it.

Whole batches are read and sent as they lie in the log; which of their records are meant is told
by ranges of offsets, so no batch is opened. Control batches, and in a group that reads only what
is committed the batches of aborted transactions, are skipped for good. Only a group that is
ordered by key has its batches opened, for their keys, each once.

Runs on the thread that owns the partition; the archive's batches are loaded elsewhere and come
in through `take`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.broker.shares.partition import (
    AVAILABLE,
    DONE,
    Acquired,
    Acquisition,
    SharePartition,
    ShareRules,
)
from penstock.errors import CorruptBatchError
from penstock.log.archive import ArchivedRead
from penstock.log.partition import Partition
from penstock.log.txn_index import AbortedTransaction
from penstock.records import record
from penstock.records.batch import BatchHeader, headers

# How much is read at once, as far as experience with the partition's records says nothing else.
_FIRST_READ_BYTES: Final = 64 << 10
_MAX_READ_BYTES: Final = 1 << 20
_MIN_READ_BYTES: Final = 8 << 10
# Stretches without anything to deliver that one fetch goes over.
_MAX_STEPS: Final = 16
# How much a compressed batch may unfold to where its keys are looked at.
_MAX_UNFOLDED_BYTES: Final = 32 << 20


@dataclass(slots=True)
class Wanted:
    """What a fetch asks of one partition."""

    member: str
    # Until when the member has what it gets, in elapsed milliseconds.
    deadline_ms: int
    max_records: int
    max_bytes: int
    # Never more records than asked for, though that sends batches of which some are not meant.
    strict: bool = False
    read_committed: bool = False
    # Of so many records all that wait get as much: a batch that goes beyond it is for the next,
    # unless it is the first.
    fair_share: int | None = None

    def leaves(self, taken: int, size: int) -> bool:
        """Whether a batch of this size is left to others, after so many records."""
        return taken > 0 and self.fair_share is not None and taken + size > self.fair_share


@dataclass(slots=True)
class Delivery:
    """What a fetch gets from one partition."""

    records: bytes | memoryview = b""
    acquired: list[Acquired] = field(default_factory=list)
    # What must be loaded first, and the offset from which it was asked for.
    archived: ArchivedRead | None = None
    offset: int = 0

    @property
    def count(self) -> int:
        return sum(last - first + 1 for first, last, _ in self.acquired)


def readable_to(partition: Partition, *, read_committed: bool) -> int:
    return partition.stable if read_committed else partition.visible


def deliver(
    share: SharePartition, partition: Partition, wanted: Wanted, rules: ShareRules
) -> Delivery | None:
    """Lock records for a member and read them; None if there are none for it now."""
    share.set_ordered(rules.ordered)
    share.cut(partition.log_start)
    limit = readable_to(partition, read_committed=wanted.read_committed)
    for _ in range(_MAX_STEPS):
        offset = share.next_offset(rules)
        if offset is None or offset >= limit:
            return None
        found = partition.read(offset, _read_bytes(share, wanted), limit=limit)
        if found is None:
            return None
        if isinstance(found, ArchivedRead):
            return Delivery(archived=found, offset=offset)
        data = found.read()
        aborted: Sequence[AbortedTransaction] = ()
        if wanted.read_committed:
            aborted = partition.aborted_transactions(offset, end_of(data, offset))
        delivery = take(share, data, offset, wanted, rules, aborted)
        if delivery.acquired:
            return delivery
    return None


def _read_bytes(share: SharePartition, wanted: Wanted) -> int:
    usual = share.record_bytes
    guess = _FIRST_READ_BYTES if usual is None else int(wanted.max_records * usual * 1.25)
    return min(max(guess, _MIN_READ_BYTES), _MAX_READ_BYTES, max(wanted.max_bytes, 1))


def take(
    share: SharePartition,
    data: bytes,
    offset: int,
    wanted: Wanted,
    rules: ShareRules,
    aborted: Sequence[AbortedTransaction] = (),
) -> Delivery:
    """Lock what is free in a stretch of log that was read from `offset`."""
    if share.order is not None and offset > share.order.known_to:
        # The order was begun anew while this was loaded: what is before it comes first.
        return Delivery(offset=offset)
    room = rules.max_locks - share.locked if wanted.strict else wanted.max_records
    budget = min(wanted.max_records, room)
    acquisition = Acquisition(wanted.member, wanted.deadline_ms, budget)
    send_from = send_to = 0
    expected = offset
    for at, header in headers(data):
        last = header.last_offset
        if last < offset:
            continue
        first = max(header.base_offset, offset)
        if acquisition.budget <= 0 or acquisition.closed or share.locked >= rules.max_locks:
            break
        if wanted.leaves(acquisition.records, last - first + 1):
            break
        share.skip(expected, first - 1)
        expected = last + 1
        if header.is_control or (aborted and _is_aborted(header, aborted)):
            share.skip(first, last)
            _pass_by(share, last)
            continue
        if not wanted.strict:
            # A batch goes out whole, even if that is more than was asked for.
            acquisition.budget = max(acquisition.budget, last - first + 1)
        before = acquisition.records
        if share.order is None:
            share.acquire(acquisition, first, last, rules)
        else:
            batch = memoryview(data)[at : at + header.size]
            _take_ordered(share, header, batch, acquisition, rules)
        if not wanted.strict:
            acquisition.budget = wanted.max_records - acquisition.records
        if acquisition.records > before:
            send_from = send_from if before else at
            send_to = at + header.size
            _learn_size(share, header)
    if not acquisition.taken:
        return Delivery(offset=offset)
    records = data if send_to - send_from == len(data) else memoryview(data)[send_from:send_to]
    return Delivery(records, acquisition.taken, offset=offset)


def _learn_size(share: SharePartition, header: BatchHeader) -> None:
    usual = header.size / max(header.record_count, 1)
    share.record_bytes = usual if share.record_bytes is None else (share.record_bytes + usual) / 2


# ---- transactions ------------------------------------------------------------------------------


def end_of(data: bytes, offset: int) -> int:
    """The offset after the last batch in a stretch of log."""
    return max((header.next_offset for _, header in headers(data)), default=offset)


def _is_aborted(header: BatchHeader, aborted: Sequence[AbortedTransaction]) -> bool:
    return header.is_transactional and any(
        item.producer_id == header.producer_id
        and item.first_offset <= header.base_offset <= item.last_offset
        for item in aborted
    )


# ---- by key ------------------------------------------------------------------------------------


def _pass_by(share: SharePartition, last: int) -> None:
    if share.order is not None and share.order.known_to <= last:
        share.order.learn((), last + 1)


def _take_ordered(
    share: SharePartition,
    header: BatchHeader,
    batch: memoryview,
    acquisition: Acquisition,
    rules: ShareRules,
) -> None:
    """Take the records of a batch that overtake nobody of their key."""
    order = share.order
    assert order is not None
    if order.known_to <= header.last_offset:
        try:
            records = list(_keys(share, header, batch, order.known_to))
        except CorruptBatchError:
            # Nobody can unpack it. It is for a consumer to say so, and holds nothing else up.
            records = list(_without_keys(share, header, order.known_to))
        share.learn(header.last_offset + 1)
        order.learn(records, header.last_offset + 1)
    ready = order.take(header.base_offset, header.last_offset, acquisition.budget)
    for first, last in _stretches(ready):
        share.acquire(acquisition, first, last, rules)
        if not acquisition.taken or acquisition.taken[-1][1] != last:
            # What is delivered apart, in another fetch, is as ready as it was.
            for offset in range(first, last + 1):
                if share.state_at(offset) == AVAILABLE:
                    order.put_back(offset, offset)


def _keys(
    share: SharePartition, header: BatchHeader, batch: memoryview, known_to: int
) -> Iterator[tuple[int, bytes | None, bool]]:
    """Offset, key and whether it is free, of each record that is not finished."""
    expected = max(header.base_offset, known_to)
    data = record.payload(batch, _MAX_UNFOLDED_BYTES)
    for span in record.spans(data, header.record_count):
        offset = header.base_offset + span.offset_delta
        if offset < expected:
            continue
        if offset > header.last_offset:
            raise CorruptBatchError(f"a record claims offset {offset} in a batch that ends before")
        # Where compaction has removed records.
        share.skip(expected, offset - 1)
        expected = offset + 1
        state = share.state_at(offset)
        if state != DONE:
            yield offset, span.key, state == AVAILABLE
    share.skip(expected, header.last_offset)


def _without_keys(
    share: SharePartition, header: BatchHeader, known_to: int
) -> Iterator[tuple[int, None, bool]]:
    """The same of a batch whose keys cannot be known."""
    for offset in range(max(header.base_offset, known_to), header.next_offset):
        state = share.state_at(offset)
        if state != DONE:
            yield offset, None, state == AVAILABLE


def _stretches(offsets: list[int]) -> Iterator[tuple[int, int]]:
    """Ascending offsets as stretches without gaps."""
    at = 0
    while at < len(offsets):
        stop = at
        while stop + 1 < len(offsets) and offsets[stop + 1] == offsets[stop] + 1:
            stop += 1
        yield offsets[at], offsets[stop]
        at = stop + 1
