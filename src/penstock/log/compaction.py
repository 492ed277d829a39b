"""Compaction: of the records that share a key, only the latest stays. Kafka's rules.

The closed part of a log is *clean* up to an offset, where each key occurs once, and *dirty* from
there on. A pass reads the dirty part and notes each key's newest offset, then writes clean and
dirty part anew without the records that a newer one has replaced:

- Offsets, order and timestamps never change. A batch that loses records keeps its first and last
  offset, its producer and its sequence numbers; one that loses all of them goes, unless it is the
  last of a producer that the log still remembers: then its empty header stays, so that the
  producer's next batch is told from a repeated one.
- A tombstone (a key without a value) is kept for `delete.retention.ms` from when a pass first
  met it, so that readers have time to see it. That moment is stored in the batch as Kafka does:
  attribute bit 6 is set and the base timestamp is the horizon. A record without a key goes.
- The keys of one pass are bounded in number, as is what is kept of a long one. A pass that
  reaches the bound ends there and is clean up to there; the next goes on.
- Outputs are filled up to `segment.bytes`, so that what has shrunk is merged. An input that would
  come out as it went in stays as it is, unless it fits behind its neighbour.

`compact` is a function over files: it reads closed segments, which nobody changes, and writes
`.cleaned` files beside them, all synced. It opens what it reads itself, needs no partition and no
clock, and so runs in another process (`compaction_worker`). Then comes the swap (`swap`).

Of aborted transactions nothing stays, and their markers and those of committed ones go once they
mark nothing any longer (`cleaned_txns`). The inputs end at or below the first unstable offset. A
marker that is all the log remembers of a producer stays, for the producer's epoch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from penstock.errors import CorruptBatchError, StorageError
from penstock.log.cleaned_txns import CleanedTransactions
from penstock.log.disk import Disk, File
from penstock.log.segment import LOG_SUFFIX, TXN_INDEX_SUFFIX, Segment, segment_name
from penstock.log.swap import CLEANED, PLAN_FILE, Replacement, remove_cleaned
from penstock.log.txn_index import AbortedTransaction
from penstock.records.batch import (
    CODEC_MASK,
    HEADER_SIZE,
    MIN_BATCH_LENGTH,
    NO_TIMESTAMP,
    BatchHeader,
    Buffer,
    read_header,
    verify,
)
from penstock.records.control import read_marker
from penstock.records.record import assemble, payload, read_varint, write_varint

# Attribute bit 6: the base timestamp is the time from which tombstones and markers may go.
DELETE_HORIZON: Final = 0x40
DEFAULT_MAX_KEYS: Final = 1_000_000

_MAX_TIME: Final = 0x7FFFFFFFFFFFFFFF
_READ_BYTES: Final = 4 << 20
_WRITE_BYTES: Final = 1 << 20
# A key of 64 bytes or more is remembered by its digest; a shorter one never equals a digest.
_DIGEST_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Input:
    """A closed segment; the next one begins at `end_offset`."""

    base_offset: int
    end_offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Job:
    """All that a pass needs to know."""

    inputs: tuple[Input, ...]
    clean_until: int
    now_ms: int
    delete_retention_ms: int
    segment_bytes: int
    index_interval_bytes: int = 4096
    max_keys: int = DEFAULT_MAX_KEYS
    # Last offsets of the last batches of the producers that the log remembers.
    producer_ends: tuple[int, ...] = ()
    # Id and epoch of the producers of which the log remembers no batch, only a marker.
    producer_markers: tuple[tuple[int, int], ...] = ()
    # The aborted transactions that reach into the inputs.
    aborted: tuple[AbortedTransaction, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        inputs = tuple(Input(**item) for item in data["inputs"])
        lists = {
            "inputs": inputs,
            "producer_ends": tuple(data["producer_ends"]),
            "producer_markers": tuple((id_, epoch) for id_, epoch in data["producer_markers"]),
            "aborted": tuple(AbortedTransaction._make(row) for row in data["aborted"]),
        }
        return cls(**{**data, **lists})


@dataclass(slots=True)
class Result:
    """What a pass has written, and how far the log is clean once it is swapped in."""

    replacements: list[Replacement] = field(default_factory=list)
    clean_until: int = 0
    # False: the bound on keys was reached, and a further pass has work to do.
    complete: bool = True
    # When the first of the tombstones and markers that were kept may go; -1 if there are none.
    next_horizon_ms: int = NO_TIMESTAMP
    records_read: int = 0
    records_kept: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        pairs = [Replacement(tuple(new), tuple(old)) for new, old in data["replacements"]]
        return cls(**{**data, "replacements": pairs})


def compact(
    disk: Disk, folder: str, job: Job, breathe: Callable[[], None] = lambda: None
) -> Result:
    """One pass over the inputs. `breathe` is called between batches.

    A damaged batch raises CorruptBatchError: nothing is swapped in, the log stays as it is.
    """
    if disk.exists(os.path.join(folder, PLAN_FILE)):
        raise StorageError(f"the last compaction of {folder} has not been swapped in yet")
    remove_cleaned(disk, folder)
    run = _Pass(disk, folder, job, breathe)
    run.note_newest()
    for item in job.inputs:
        if item.base_offset >= run.end:
            break
        run.rewrite(item)
    run.close_group()
    disk.sync_dir(folder)
    return run.result


# ---- reading ---------------------------------------------------------------------------------


class Columns(NamedTuple):
    """The records of one batch by field. `starts` has one more: where the last one ends."""

    starts: list[int]
    # As they are remembered: long ones as a digest, so that what a key costs is bounded.
    keys: list[bytes | None]
    offset_deltas: list[int]
    time_deltas: list[int]
    # The places in the lists of records without a value, and of those without a key.
    tombstones: list[int]
    unkeyed: list[int]


def parse(data: bytes, count: int) -> Columns:
    """As `record.spans`, by column: several times as fast, and compaction is made of this.

    Numbers of one and two bytes are read in place, which is why it is one long function.
    """
    out = Columns([], [], [], [], [], [])
    add_start, add_key = out.starts.append, out.keys.append
    add_offset, add_time = out.offset_deltas.append, out.time_deltas.append
    at = 0
    try:
        for place in range(count):
            add_start(at)
            raw = data[at]
            at += 1
            if raw >= 0x80:
                raw = raw & 0x7F | data[at] << 7
                at += 1
                if raw >= 0x4000:
                    raw, at = _long_varint(data, at - 2)
            end = at + (raw >> 1)
            # One byte of attributes lies between.
            raw = data[at + 1]
            at += 2
            if raw >= 0x80:
                raw = raw & 0x7F | data[at] << 7
                at += 1
                if raw >= 0x4000:
                    raw, at = _long_varint(data, at - 2)
            add_time((raw >> 1) ^ -(raw & 1))
            raw = data[at]
            at += 1
            if raw >= 0x80:
                raw = raw & 0x7F | data[at] << 7
                at += 1
                if raw >= 0x4000:
                    raw, at = _long_varint(data, at - 2)
            add_offset(raw >> 1)
            raw = data[at]
            at += 1
            if raw >= 0x80:
                raw, at = _long_varint(data, at - 1)
                upto = at + (raw >> 1)
                add_key(blake2b(data[at:upto], digest_size=_DIGEST_BYTES).digest())
                at = upto
            elif raw & 1:
                add_key(None)
                out.unkeyed.append(place)
            else:
                upto = at + (raw >> 1)
                add_key(data[at:upto])
                at = upto
            # The lowest bit of a zigzag number is its sign: the value's length is negative.
            if data[at] & 1:
                out.tombstones.append(place)
            if at >= end:
                raise CorruptBatchError("a record is shorter than its key")
            at = end
    except IndexError:
        raise CorruptBatchError("a record reaches beyond its batch") from None
    if at != len(data):
        raise CorruptBatchError("the records of a batch do not fill it")
    add_start(at)
    return out


def _long_varint(data: bytes, at: int) -> tuple[int, int]:
    value, at = read_varint(data, at)
    return (value << 1) ^ (value >> 63), at


def _open_log(disk: Disk, folder: str, base_offset: int, suffix: str = "") -> File:
    path = os.path.join(folder, segment_name(base_offset) + LOG_SUFFIX + suffix)
    return disk.open(path, create=bool(suffix))


def _batches(file: File, size: int) -> Iterator[tuple[BatchHeader, memoryview]]:
    """The batches of a segment, checked; any that is not whole is an error here."""
    position = at = 0
    chunk = memoryview(b"")
    while position < size:
        left = size - position
        if at + HEADER_SIZE > len(chunk):
            chunk, at = memoryview(file.pread(min(_READ_BYTES, left), position)), 0
        if at + HEADER_SIZE > len(chunk):
            raise CorruptBatchError(f"a segment ends at {position} within a batch")
        header = read_header(chunk, at)
        if header.batch_length < MIN_BATCH_LENGTH or header.size > left:
            raise CorruptBatchError(f"the batch at position {position} does not fit its segment")
        if at + header.size > len(chunk):
            wanted = min(max(_READ_BYTES, header.size), left)
            chunk, at = memoryview(file.pread(wanted, position)), 0
        batch = chunk[at : at + header.size]
        verify(batch)
        yield header, batch
        at += header.size
        position += header.size


# ---- writing ---------------------------------------------------------------------------------


class _Output(Segment):
    """A segment under construction, beside the log."""

    __slots__ = ("pending", "pending_bytes")

    def __init__(self, disk: Disk, folder: str, base_offset: int) -> None:
        file = _open_log(disk, folder, base_offset, CLEANED)
        super().__init__(disk, folder, base_offset, file)
        self.pending: list[Buffer] = []
        self.pending_bytes = 0

    def path(self, suffix: str) -> str:
        return super().path(suffix) + CLEANED

    def add(self, batch: Buffer, last_offset: int, max_timestamp_ms: int) -> None:
        size = len(batch)
        self.account(batch, self.size, size, last_offset, max_timestamp_ms)
        self.pending.append(batch)
        self.pending_bytes += size
        if self.pending_bytes >= _WRITE_BYTES:
            self.write_pending()

    def write_pending(self) -> None:
        if self.pending:
            self.file.pwritev(self.pending, self.size - self.pending_bytes)
        self.pending, self.pending_bytes = [], 0

    def complete(self) -> None:
        """Everything to disk, with its indexes."""
        self.write_pending()
        self.file.sync()
        self.write_indexes()
        self.file.close()

    def had_aborted(self) -> bool:
        """Whether the index of a segment that it may replace must be replaced too."""
        return self.disk.exists(super().path(TXN_INDEX_SUFFIX))

    def discard(self) -> None:
        self.file.close()
        self.disk.remove(self.path(LOG_SUFFIX))


class _Pass:
    """The state of one run of `compact`."""

    def __init__(self, disk: Disk, folder: str, job: Job, breathe: Callable[[], None]) -> None:
        self._disk = disk
        self._folder = folder
        self._job = job
        self._breathe = breathe
        self._newest: dict[bytes | None, int] = {}
        self._producer_ends = frozenset(job.producer_ends)
        self._producer_markers = frozenset(job.producer_markers)
        self._transactions = CleanedTransactions(job.aborted)
        # What the index of the output must say of the marker at hand.
        self._entry: AbortedTransaction | None = None
        self._output: _Output | None = None
        # The inputs and outputs since the last place where one began with the other.
        self._inputs: list[int] = []
        self._outputs: list[int] = []
        self._changed = False
        # Records at or above this offset were not looked at and stay.
        self.end = job.clean_until
        self.result = Result(clean_until=job.clean_until)

    def _open(self, item: Input) -> File:
        file = _open_log(self._disk, self._folder, item.base_offset)
        if file.size() < item.size:
            raise StorageError(f"segment {item.base_offset} is shorter than {item.size} bytes")
        return file

    # ---- first: what is the newest record of each key?

    def note_newest(self) -> None:
        job = self._job
        transactions = CleanedTransactions(
            entry for entry in job.aborted if entry.last_offset >= job.clean_until
        )
        for item in job.inputs:
            if item.end_offset > job.clean_until:
                if not self._note_segment(item, transactions):
                    break
                self.end = item.end_offset
        self._newest.pop(None, None)
        self.result.clean_until = self.end

    def _note_segment(self, item: Input, transactions: CleanedTransactions) -> bool:
        """Whether the whole segment was noted."""
        newest, job = self._newest, self._job
        file = self._open(item)
        try:
            for header, batch in _batches(file, item.size):
                if header.last_offset < job.clean_until:
                    continue
                if header.is_control:
                    transactions.end(header, read_marker(batch))
                    self.end = header.next_offset
                    continue
                if len(newest) >= job.max_keys:
                    self.result.complete = False
                    return False
                if not transactions.is_aborted(header) and header.record_count:
                    columns = parse(bytes(payload(batch)), header.record_count)
                    newest.update(zip(columns.keys, _offsets(header, columns), strict=True))
                self.end = header.next_offset
                self._breathe()
        finally:
            file.close()
        return True

    # ---- then: write what stays

    def rewrite(self, item: Input) -> None:
        self._begin(item)
        result = self.result
        file = self._open(item)
        try:
            for header, batch in _batches(file, item.size):
                kept = self._filter(header, batch)
                result.records_read += header.record_count
                result.bytes_read += header.size
                if kept is not None:
                    changed = header if kept is batch else read_header(kept)
                    result.records_kept += changed.record_count
                    self._add(kept, changed)
                    if self._entry is not None:
                        self._add_entry(self._entry)
                self._changed = self._changed or kept is not batch
                self._breathe()
        finally:
            file.close()

    def _begin(self, item: Input) -> None:
        """Go on in the current output, or end it and begin a new one with the segment."""
        output = self._output
        if output is not None:
            fits = output.size + item.size <= self._job.segment_bytes
            rewritten = self._changed and item.end_offset > self._job.clean_until
            if output.fits(item.end_offset - 1) and (fits or rewritten):
                self._inputs.append(item.base_offset)
                self._changed = True
                return
            self.close_group()
        self._inputs.append(item.base_offset)
        self._open_output(item.base_offset)

    def _open_output(self, base_offset: int) -> _Output:
        self._output = output = _Output(self._disk, self._folder, base_offset)
        output.index_interval_bytes = self._job.index_interval_bytes
        self._outputs.append(base_offset)
        return output

    def _add(self, batch: Buffer, header: BatchHeader) -> None:
        output = self._output
        assert output is not None
        # A group of one input is not cut: it may yet come out unchanged.
        full = output.size + len(batch) > self._job.segment_bytes and len(self._inputs) > 1
        if full and output.size:
            self._close_output()
            output = self._open_output(header.base_offset)
        output.add(batch, header.last_offset, header.max_timestamp)

    def _add_entry(self, entry: AbortedTransaction) -> None:
        assert self._output is not None
        assert self._output.aborted is not None
        self._output.aborted.append(entry)
        self._entry = None

    def _close_output(self) -> None:
        assert self._output is not None
        self._output.complete()
        self.result.bytes_written += self._output.size
        self._output = None

    def close_group(self) -> None:
        """End the outputs of the inputs so far; if nothing has changed, forget them."""
        if self._output is None:
            return
        if self._changed:
            self._close_output()
            replacement = Replacement(tuple(self._outputs), tuple(self._inputs))
            self.result.replacements.append(replacement)
        else:
            self._output.discard()
            self._output = None
        self._inputs, self._outputs, self._changed = [], [], False

    def _filter(self, header: BatchHeader, batch: memoryview) -> Buffer | None:
        """What becomes of a batch: itself, a smaller one, an empty one, or nothing (None)."""
        if header.is_control:
            return self._filter_marker(header, batch)
        aborted = self._transactions.is_aborted(header)
        if header.base_offset >= self.end:
            return batch
        if not header.record_count:
            return batch if header.last_offset in self._producer_ends else None
        if aborted:
            return self._without_records(header)
        data = bytes(payload(batch))
        columns = parse(data, header.record_count)
        keep = self._places_to_keep(header, columns)
        if not keep:
            return self._without_records(header)
        horizon_ms = self._new_horizon(header, columns, keep)
        if horizon_ms is None and len(keep) == header.record_count:
            return batch
        return _rebuild(header, data, columns, keep, horizon_ms)

    def _filter_marker(self, header: BatchHeader, batch: memoryview) -> Buffer | None:
        """What becomes of a marker: it stays, it stays and gets a horizon, or it goes (None)."""
        idle, self._entry = self._transactions.end(header, read_marker(batch))
        needed = (header.producer_id, header.producer_epoch) in self._producer_markers
        if not idle or needed or header.base_offset >= self.end:
            return batch
        known = bool(header.attributes & DELETE_HORIZON)
        if known and self._job.now_ms >= header.base_timestamp:
            return None
        horizon_ms = self._horizon(header)
        if known:
            return batch
        data = bytes(payload(batch))
        return _rebuild(header, data, parse(data, header.record_count), [0], horizon_ms)

    def _places_to_keep(self, header: BatchHeader, columns: Columns) -> Sequence[int]:
        keep: Sequence[int] = range(header.record_count)
        latest = list(map(self._newest.get, columns.keys))
        if latest.count(None) < len(latest):
            found = zip(_offsets(header, columns), latest, strict=True)
            keep = [
                place
                for place, (offset, newest) in enumerate(found)
                if newest is None or offset >= newest
            ]
        gone = set(columns.unkeyed)
        if header.attributes & DELETE_HORIZON and self._job.now_ms >= header.base_timestamp:
            gone.update(columns.tombstones)
        return [place for place in keep if place not in gone] if gone else keep

    def _new_horizon(
        self, header: BatchHeader, columns: Columns, keep: Sequence[int]
    ) -> int | None:
        """The horizon that the batch must get; None if it has one or needs none."""
        if not columns.tombstones or set(columns.tombstones).isdisjoint(keep):
            return None
        known = header.attributes & DELETE_HORIZON
        horizon_ms = self._horizon(header)
        return None if known else horizon_ms

    def _horizon(self, header: BatchHeader) -> int:
        """When what waits in the batch may go: as it says, or from now on."""
        horizon_ms = header.base_timestamp
        if not header.attributes & DELETE_HORIZON:
            horizon_ms = min(self._job.now_ms + self._job.delete_retention_ms, _MAX_TIME)
        result = self.result
        if result.next_horizon_ms == NO_TIMESTAMP or horizon_ms < result.next_horizon_ms:
            result.next_horizon_ms = horizon_ms
        return horizon_ms

    def _without_records(self, header: BatchHeader) -> bytes | None:
        if header.last_offset not in self._producer_ends:
            return None
        # Nothing is in it that could be unpacked or wait for its horizon.
        attributes = header.attributes & ~(CODEC_MASK | DELETE_HORIZON)
        empty = header._replace(attributes=attributes, record_count=0, base_timestamp=NO_TIMESTAMP)
        return assemble(empty, b"")


def _offsets(header: BatchHeader, columns: Columns) -> list[int] | range:
    base = header.base_offset
    if header.last_offset_delta + 1 == header.record_count:
        return range(base, base + header.record_count)
    return [base + delta for delta in columns.offset_deltas]


def _rebuild(
    header: BatchHeader,
    data: bytes,
    columns: Columns,
    keep: Sequence[int],
    horizon_ms: int | None,
) -> bytes:
    """The batch with some of its records, and with a horizon if it is given one now."""
    starts, times = columns.starts, columns.time_deltas
    max_timestamp = header.max_timestamp
    if not header.has_append_time:
        max_timestamp = header.base_timestamp + max(times[place] for place in keep)
    head = header._replace(record_count=len(keep), max_timestamp=max_timestamp)
    if horizon_ms is None:
        body = b"".join([data[starts[place] : starts[place + 1]] for place in keep])
        return assemble(head, body)
    shift = header.base_timestamp - horizon_ms
    out = bytearray()
    for place in keep:
        _shift_time(out, data, starts[place], starts[place + 1], times[place] + shift)
    attributes = header.attributes | DELETE_HORIZON
    return assemble(head._replace(attributes=attributes, base_timestamp=horizon_ms), bytes(out))


def _shift_time(out: bytearray, data: bytes, start: int, end: int, time_delta: int) -> None:
    """Copy one record, telling its time from another base."""
    _, at = read_varint(data, start)
    attributes = data[at]
    _, rest = read_varint(data, at + 1)
    item = bytearray([attributes])
    write_varint(item, time_delta)
    item += data[rest:end]
    write_varint(out, len(item))
    out += item
