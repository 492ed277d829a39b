"""What the files of a log hold, entry by entry, for people who must look.

Read only, and of damaged files as much as can be read: a stretch that is no batch is shown as
such, and the reading goes on behind it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from penstock.errors import CorruptBatchError, DataDirectoryError
from penstock.log.index import OFFSET_ENTRY_SIZE, TIME_ENTRY, TIME_ENTRY_SIZE
from penstock.log.offline import Broken, LogFile, Place, read_bytes
from penstock.log.producers import ProducerStates
from penstock.log.segment import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SNAPSHOT_SUFFIX,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    segment_name,
)
from penstock.log.txn_index import ABORTED_ENTRY, ABORTED_ENTRY_SIZE
from penstock.records import record
from penstock.records.batch import BatchHeader
from penstock.records.record import Record


class SegmentStart(NamedTuple):
    """A log file begins."""

    path: str
    base_offset: int
    size: int


class BatchEntry(NamedTuple):
    """An intact batch."""

    path: str
    position: int
    header: BatchHeader
    # Its records, if they were asked for; None also where they cannot be opened.
    records: list[Record] | None = None
    error: str = ""


class BrokenEntry(NamedTuple):
    """A stretch that is no batch."""

    path: str
    position: int
    length: int
    reason: str


class IndexEntry(NamedTuple):
    """An entry of an offset index: the batch that ends with `offset` starts at `position`."""

    path: str
    offset: int
    position: int


class TimeEntry(NamedTuple):
    """An entry of a time index: up to `offset` no record is later than `timestamp_ms`."""

    path: str
    timestamp_ms: int
    offset: int


class ProducerEntry(NamedTuple):
    """A producer as a snapshot remembers it."""

    path: str
    producer_id: int
    epoch: int
    last_sequence: int
    last_offset: int
    timestamp_ms: int
    # Where its open transaction began, and the epoch in its last marker; -1 if there is none.
    txn_first_offset: int = -1
    coordinator_epoch: int = -1


class AbortedEntry(NamedTuple):
    """An entry of an index of aborted transactions; `last_offset` is that of the marker."""

    path: str
    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


Entry = (
    SegmentStart | BatchEntry | BrokenEntry | IndexEntry | TimeEntry | ProducerEntry | AbortedEntry
)
DERIVED = (INDEX_SUFFIX, TIME_INDEX_SUFFIX, TXN_INDEX_SUFFIX, SNAPSHOT_SUFFIX)


def dump_logs(
    place: Place, *, open_records: bool = False, first_offset: int = 0
) -> Iterator[Entry]:
    """Every segment and batch of a place, from `first_offset` of each partition on."""
    for partition in place.partitions:
        bases = partition.bases
        for at, base in enumerate(bases):
            passed = at + 1 < len(bases) and bases[at + 1] <= first_offset
            chosen = partition.only_bases is None or base in partition.only_bases
            if chosen and not passed:
                path = os.path.join(partition.path, segment_name(base) + LOG_SUFFIX)
                yield from _dump_log(path, base, open_records, first_offset)


def _dump_log(path: str, base: int, open_records: bool, first_offset: int) -> Iterator[Entry]:
    with LogFile(path, base) as log:
        yield SegmentStart(path, base, log.size)
        for piece in log.walk():
            if isinstance(piece, Broken):
                length = piece.end - piece.position
                yield BrokenEntry(path, piece.position, length, piece.reason)
            elif piece.header.last_offset < first_offset:
                continue
            elif open_records:
                yield _open_batch(log, path, piece.position, piece.header)
            else:
                yield BatchEntry(path, piece.position, piece.header)


def _open_batch(log: LogFile, path: str, position: int, header: BatchHeader) -> BatchEntry:
    try:
        records = list(record.decode(log.read(position, header.size)))
    except CorruptBatchError as error:
        return BatchEntry(path, position, header, None, str(error))
    return BatchEntry(path, position, header, records)


def dump_derived(path: str) -> Iterator[Entry]:
    """The entries of an index, of whichever kind, or of a producers' snapshot."""
    data = read_bytes(path)
    if data is None:
        raise DataDirectoryError(f"{path} does not exist", advice="Check the path.")
    stem, suffix = os.path.splitext(os.path.basename(path))
    base = int(stem) if stem.isdecimal() else 0
    if suffix == INDEX_SUFFIX:
        for at in range(0, len(data) - OFFSET_ENTRY_SIZE + 1, OFFSET_ENTRY_SIZE):
            relative = int.from_bytes(data[at : at + 4], signed=True)
            position = int.from_bytes(data[at + 4 : at + 8], signed=True)
            yield IndexEntry(path, base + relative, position)
    elif suffix == TIME_INDEX_SUFFIX:
        for at in range(0, len(data) - TIME_ENTRY_SIZE + 1, TIME_ENTRY_SIZE):
            timestamp_ms, relative = TIME_ENTRY.unpack_from(data, at)
            yield TimeEntry(path, timestamp_ms, base + relative)
    elif suffix == TXN_INDEX_SUFFIX:
        for at in range(0, len(data) - ABORTED_ENTRY_SIZE + 1, ABORTED_ENTRY_SIZE):
            _, *fields = ABORTED_ENTRY.unpack_from(data, at)
            yield AbortedEntry(path, *fields)
    else:
        states = ProducerStates.from_bytes(data)
        if states is None:
            raise DataDirectoryError(f"{path} is damaged", advice="Run `penstock log verify`.")
        for producer_id, known in states.by_id.items():
            last_offset = known.batches[-1].last_offset if known.batches else -1
            yield ProducerEntry(
                path,
                producer_id,
                known.epoch,
                known.last_sequence,
                last_offset,
                known.last_timestamp_ms,
                known.txn.first_offset,
                known.txn.coordinator_epoch,
            )
