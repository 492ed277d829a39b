"""One segment examined: its batches, its indexes and its digest, each against the others.

A batch's checksum covers all of it but the first 21 bytes; of those, length, format and the
checksum itself cannot change unnoticed. Base offset and leader epoch can, and the digest over
all heads is there for them. The digest file also holds checksums of the indexes. Between them
every byte of these files is covered: each is compared with what follows from the log.

A segment is *settled* if its files must be as they were stored: after a clean stop all are, after
a crash those that end below the recovery point. The tail of one that is not may be torn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from crc32c import crc32c

from penstock.errors import CorruptBatchError
from penstock.log import findings
from penstock.log.findings import Finding, Report, Severity, damage, note
from penstock.log.index import MAX_RELATIVE, OFFSET_ENTRY_SIZE, TIME_ENTRY, TIME_ENTRY_SIZE
from penstock.log.offline import Broken, Intact, LogFile, PartitionFolder, read_bytes
from penstock.log.segment import (
    DIGEST_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    StoredDigest,
    digest_of,
    segment_name,
)
from penstock.log.txn_index import ABORTED_ENTRY, ABORTED_ENTRY_SIZE
from penstock.records import record
from penstock.records.batch import CRC_START, HEADER, NO_TIMESTAMP, BatchHeader, read_header
from penstock.records.control import Marker, read_marker


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is known of a segment before it is read."""

    folder: PartitionFolder
    base: int
    settled: bool
    # Records below were safe on disk, so a tail torn below is damage; None if not known.
    recovery_point: int | None = None
    open_records: bool = False
    # Derived files that are not in the folder, by suffix: a clean stop wrote them elsewhere.
    stored: Mapping[str, bytes] = field(default_factory=dict)
    # That other place is damaged: what is missing in the folder need not be.
    stored_lost: bool = False


@dataclass(slots=True)
class SegmentFacts:
    """What the batches of a segment say, for the checks of the partition."""

    next_offset: int
    has_batches: bool = False
    broken: bool = False
    # Epoch, first and last offset of each run of batches with the same leader epoch.
    epoch_runs: list[tuple[int, int, int]] = field(default_factory=list)


class SegmentCheck:
    """Reads one segment once; `findings` yields, `facts` is complete afterwards."""

    def __init__(
        self, expected: Expectation, report: Report, progress: Callable[[int], None]
    ) -> None:
        self.expected = expected
        self.facts = SegmentFacts(next_offset=expected.base)
        self._report = report
        self._progress = progress
        self._stem = os.path.join(expected.folder.path, segment_name(expected.base))
        self._size = 0
        self._digest = 0
        self._stretches: list[Broken] = []
        # Batches whose place in the log stands out: position, offset, what is odd of the first.
        self._odd: tuple[int, int, str] | None = None
        self._odd_count = 0
        self._misplaced = False
        self._irregular = False
        self._max_timestamp = NO_TIMESTAMP
        self._max_timestamp_offset = -1
        self._index = _IndexCheck(self._stored_file(INDEX_SUFFIX))
        self._times = _TimeIndexCheck(self._stored_file(TIME_INDEX_SUFFIX))
        self._aborted = _AbortedCheck(self._stored_file(TXN_INDEX_SUFFIX))
        self._stored = self._stored_file(DIGEST_SUFFIX)
        self._known = StoredDigest.from_bytes(self._stored or b"")
        self._prefix_size = self._known.size if self._known is not None else None
        self._prefix_digest: int | None = 0 if self._prefix_size == 0 else None

    def _stored_file(self, suffix: str) -> bytes | None:
        if self.expected.stored:
            return self.expected.stored.get(suffix)
        return read_bytes(self._stem + suffix)

    @property
    def intact_batches(self) -> bool:
        """Whether the log itself can be trusted as a source for the other files."""
        return not self._stretches and not self._misplaced

    @property
    def can_rebuild(self) -> bool:
        """Whether the log is sound enough to make indexes and digest from it.

        Either the digest vouches for the heads of the batches, or none of them looks wrong: a
        new digest must not bless a changed offset.
        """
        vouched = self._prefix_size == self._size and self._prefix_matches
        return self.intact_batches and (vouched or not self._irregular)

    @property
    def _prefix_matches(self) -> bool:
        return self._known is not None and self._prefix_digest == self._known.digest

    def findings(self) -> Iterator[Finding]:
        path = self._stem + LOG_SUFFIX
        with LogFile(path, self.expected.base) as log:
            self._size = log.size
            for piece in log.walk():
                if isinstance(piece, Broken):
                    yield self._broken(log, piece)
                    self._progress(piece.end - piece.position)
                else:
                    yield from self._batch(log, piece)
                    self._progress(piece.header.size)
        self._report.segments += 1
        self._report.bytes += self._size
        self.facts.broken = bool(self._stretches) or self._misplaced
        yield from self._derived()

    # ---- the log -------------------------------------------------------------------------

    def _broken(self, log: LogFile, piece: Broken) -> Finding:
        self._stretches.append(piece)
        first = self.facts.next_offset
        path = self._stem + LOG_SUFFIX
        length = piece.end - piece.position
        if piece.end < log.size:
            following = read_header(log.read(piece.end, HEADER.size))
            message = (
                f"{length} bytes are not readable as records: {piece.reason}; offsets {first} to "
                f"{following.base_offset - 1} are affected"
            )
            remedy = findings.RESTORE_RECORDS
            if not self.expected.settled:
                remedy += " " + findings.COPY_FIRST
            return damage("batch", path, message, remedy, piece.position, first)
        safe = self.expected.recovery_point
        stored_below = self._prefix_size is None or self._prefix_size <= piece.position
        if not self.expected.settled and stored_below and (safe is None or first >= safe):
            what = "zeros" if log.holds_only_zeros(piece.position) else "an unfinished write"
            message = f"the last {length} bytes are {what}, as a crash leaves behind"
            return note("torn tail", path, message, findings.RECOVERS, piece.position, first)
        message = f"the last {length} bytes are not readable as records: {piece.reason}"
        remedy = findings.RESTORE_RECORDS
        return damage("batch", path, message, remedy, piece.position, first)

    def _batch(self, log: LogFile, piece: Intact) -> Iterator[Finding]:
        position, header = piece
        self._report.batches += 1
        self._report.records += header.record_count
        yield from self._place(position, header)
        head = log.read(position, CRC_START)
        self._digest = crc32c(head, self._digest)
        if position + header.size == self._prefix_size:
            self._prefix_digest = self._digest
        relative = header.last_offset - self.expected.base
        raised = header.max_timestamp > self._max_timestamp
        if raised:
            self._max_timestamp = header.max_timestamp
            self._max_timestamp_offset = relative
        self._index.meet(position, relative)
        self._times.meet(relative, header.max_timestamp if raised else None)
        if header.is_transactional:
            control = header.is_control
            marker = read_marker(log.read(position, header.size)) if control else None
            self._aborted.meet(header, marker)
        if self.expected.open_records:
            yield from self._open(log, position, header)

    def _place(self, position: int, header: BatchHeader) -> Iterator[Finding]:
        """Offsets must rise. Gaps and falling epochs are kept in mind for the digest."""
        facts, expected = self.facts, self.expected
        path = self._stem + LOG_SUFFIX
        past = header.last_offset - expected.base > MAX_RELATIVE
        if header.base_offset < facts.next_offset or past:
            self._misplaced = True
            message = (
                f"a batch with offsets {header.base_offset} to {header.last_offset} stands where "
                f"{facts.next_offset} is next"
            )
            yield damage(
                "offset",
                path,
                message,
                findings.RESTORE_RECORDS,
                position,
                facts.next_offset,
            )
        elif header.base_offset > facts.next_offset:
            self._irregular = True
            text = f"offset {header.base_offset} follows where {facts.next_offset} was next"
            self._note_odd(position, header.base_offset, text)
        facts.has_batches = True
        if past:
            return
        facts.next_offset = header.next_offset
        runs = facts.epoch_runs
        if runs and runs[-1][0] == header.leader_epoch:
            runs[-1] = (header.leader_epoch, runs[-1][1], header.last_offset)
            return
        if runs:
            self._irregular = self._irregular or header.leader_epoch < runs[-1][0]
            text = f"the leader epoch changes from {runs[-1][0]} to {header.leader_epoch}"
            self._note_odd(position, header.base_offset, text)
        runs.append((header.leader_epoch, header.base_offset, header.last_offset))

    def _note_odd(self, position: int, offset: int, text: str) -> None:
        self._odd = self._odd or (position, offset, text)
        self._odd_count += 1

    def _open(self, log: LogFile, position: int, header: BatchHeader) -> Iterator[Finding]:
        try:
            last = header.base_offset - 1
            for item in record.decode(log.read(position, header.size)):
                if not last < item.offset <= header.last_offset:
                    raise CorruptBatchError(f"record offset {item.offset} is out of place")
                last = item.offset
        except CorruptBatchError as error:
            yield damage(
                "records",
                self._stem + LOG_SUFFIX,
                f"the batch is as its producer sent it, but cannot be opened: {error}",
                "Consumers fail on this batch: let them skip to the offset after it.",
                position,
                header.base_offset,
            )

    # ---- what is made from the log -------------------------------------------------------

    def _derived(self) -> Iterator[Finding]:
        severity: Severity = "damage" if self.expected.settled else "note"
        remedy = findings.REBUILD if self.expected.settled else findings.RECOVERS
        checks: tuple[tuple[str, _IndexCheck | _TimeIndexCheck], ...] = (
            (INDEX_SUFFIX, self._index),
            (TIME_INDEX_SUFFIX, self._times),
        )
        told = set()
        for suffix, check in checks:
            if check.data is None:
                if self.expected.settled and not self.expected.stored_lost:
                    yield self._missing(suffix)
                continue
            fault = check.fault(self._stretches)
            if fault is not None:
                told.add(suffix)
                position, message = fault
                yield Finding(severity, "index", self._stem + suffix, message, remedy, position)
        aborted_fault = self._aborted.fault(self._stretches, complete=self.expected.settled)
        if aborted_fault is not None:
            told.add(TXN_INDEX_SUFFIX)
            position, message = aborted_fault
            path = self._stem + TXN_INDEX_SUFFIX
            yield Finding(severity, "index", path, message, remedy, position)
        if self._stored is None:
            if self.expected.settled and not self.expected.stored_lost:
                yield self._missing(DIGEST_SUFFIX)
            return
        yield from self._check_digest(severity, remedy, told)

    def _missing(self, suffix: str) -> Finding:
        message = "the file is missing"
        return damage("missing", self._stem + suffix, message, findings.REBUILD)

    def _check_digest(self, severity: Severity, remedy: str, told: set[str]) -> Iterator[Finding]:
        stored = self._stored
        assert stored is not None
        path = self._stem + DIGEST_SUFFIX
        index, times = self._index.data or b"", self._times.data or b""
        aborted = self._aborted.data or b""
        if stored == digest_of(self._size, self._digest, index, times, aborted).to_bytes():
            return
        known = self._known
        if known is None:
            yield Finding(severity, "digest", path, "the digest is not readable", remedy)
            return
        size = known.size
        if size != self._size and (self.expected.settled or size > self._size):
            yield from self._check_size(size)
        elif self._prefix_digest != known.digest and not any(
            s.position < size for s in self._stretches
        ):
            yield self._changed_heads()
        pairs = (
            (INDEX_SUFFIX, self._index.data, known.offset_index),
            (TIME_INDEX_SUFFIX, self._times.data, known.time_index),
            (TXN_INDEX_SUFFIX, aborted, known.aborted or 0),
        )
        for suffix, data, checksum in pairs:
            if suffix not in told and data is not None and crc32c(data) != checksum:
                message = (
                    "the index is not the one whose checksum was kept in "
                    f"{os.path.basename(path)}; one of the two files has changed"
                )
                yield Finding(severity, "index", self._stem + suffix, message, remedy)

    def _check_size(self, size: int) -> Iterator[Finding]:
        change = "shorter" if size > self._size else "longer"
        message = (
            f"the log is {self._size} bytes, {abs(size - self._size)} {change} than when it was "
            "stored; or its digest has changed"
        )
        yield damage(
            "size",
            self._stem + LOG_SUFFIX,
            message,
            findings.RESTORE_RECORDS,
            min(size, self._size),
            self.facts.next_offset,
        )

    def _changed_heads(self) -> Finding:
        """Offset or epoch of a batch is not as it was, or the digest file is not."""
        if self._odd is None:
            message = (
                "the digest does not fit the log, in which no batch stands out: most likely it "
                "is the digest that has changed"
            )
            return damage("digest", self._stem + DIGEST_SUFFIX, message, findings.REBUILD)
        position, offset, text = self._odd
        others = f", or at one of {self._odd_count - 1} more" if self._odd_count > 1 else ""
        message = f"the head of a batch has changed, most likely here{others}: {text}"
        return damage(
            "head",
            self._stem + LOG_SUFFIX,
            message,
            findings.RESTORE_RECORDS,
            position,
            offset,
        )


class _IndexCheck:
    """Each entry of the offset index must name a batch's last offset and where it starts."""

    def __init__(self, data: bytes | None) -> None:
        self.data = data
        self._wanted: dict[int, tuple[int, int]] = {}
        self._fault: tuple[int, str] | None = None
        whole = len(data or b"") // OFFSET_ENTRY_SIZE * OFFSET_ENTRY_SIZE
        previous = (-1, -1)
        for at in range(0, whole, OFFSET_ENTRY_SIZE):
            assert data is not None
            relative = int.from_bytes(data[at : at + 4], signed=True)
            position = int.from_bytes(data[at + 4 : at + 8], signed=True)
            if relative <= previous[0] or position <= previous[1]:
                self._blame(at, "the entries do not rise")
            previous = (relative, position)
            self._wanted[position] = (at, relative)
        if data is not None and len(data) != whole:
            self._blame(whole, f"{len(data) - whole} bytes are too few for an entry")

    def _blame(self, at: int, text: str) -> None:
        self._fault = self._fault or (at, text)

    def meet(self, position: int, relative: int) -> None:
        entry = self._wanted.pop(position, None)
        if entry is not None and entry[1] != relative:
            self._blame(entry[0], f"the batch at byte {position} does not end at this offset")

    def fault(self, stretches: list[Broken]) -> tuple[int, str] | None:
        for position, (at, _) in self._wanted.items():
            if not any(s.position <= position < s.end for s in stretches):
                self._blame(at, f"no batch starts at byte {position}")
        return self._fault


class _TimeIndexCheck:
    """Each entry must name a batch that brought a new largest timestamp, and which."""

    def __init__(self, data: bytes | None) -> None:
        self.data = data
        self._wanted: dict[int, tuple[int, int]] = {}
        self._fault: tuple[int, str] | None = None
        whole = len(data or b"") // TIME_ENTRY_SIZE * TIME_ENTRY_SIZE
        previous = -1
        for at in range(0, whole, TIME_ENTRY_SIZE):
            assert data is not None
            timestamp, relative = TIME_ENTRY.unpack_from(data, at)
            if timestamp <= previous or relative in self._wanted:
                self._blame(at, "the entries do not rise")
            previous = timestamp
            self._wanted[relative] = (at, timestamp)
        if data is not None and len(data) != whole:
            self._blame(whole, f"{len(data) - whole} bytes are too few for an entry")

    def _blame(self, at: int, text: str) -> None:
        self._fault = self._fault or (at, text)

    def meet(self, relative: int, new_maximum: int | None) -> None:
        entry = self._wanted.get(relative)
        if entry is not None and entry[1] == new_maximum:
            del self._wanted[relative]

    def fault(self, stretches: list[Broken]) -> tuple[int, str] | None:
        # Where batches are unreadable, the largest timestamp before an entry is not known.
        if not stretches:
            for at, timestamp in self._wanted.values():
                self._blame(at, f"timestamp {timestamp} is not the largest up to this offset")
        return self._fault


class _AbortedCheck:
    """Each entry must name an abort marker, and be there for what the marker voids.

    Compaction takes records away, so an entry may begin before the first that is left; and it may
    list a transaction of which nothing is left.
    """

    def __init__(self, data: bytes | None) -> None:
        self.data = data
        # The offset of a marker → where its entry is, the producer, the first offset.
        self._wanted: dict[int, tuple[int, int, int]] = {}
        self._fault: tuple[int, str] | None = None
        self._unlisted: str | None = None
        # Producer id → where its transaction begins in this segment.
        self._begun: dict[int, int] = {}
        whole = len(data or b"") // ABORTED_ENTRY_SIZE * ABORTED_ENTRY_SIZE
        previous = -1
        for at in range(0, whole, ABORTED_ENTRY_SIZE):
            assert data is not None
            version, producer_id, first, last, _ = ABORTED_ENTRY.unpack_from(data, at)
            if version != 0:
                self._blame(at, f"an entry of version {version}")
            if last <= previous or first > last:
                self._blame(at, "the entries do not rise")
            previous = last
            self._wanted[last] = (at, producer_id, first)
        if data is not None and len(data) != whole:
            self._blame(whole, f"{len(data) - whole} bytes are too few for an entry")

    def _blame(self, at: int, text: str) -> None:
        self._fault = self._fault or (at, text)

    def meet(self, header: BatchHeader, marker: Marker | None) -> None:
        producer_id = header.producer_id
        if not header.is_control:
            self._begun.setdefault(producer_id, header.base_offset)
            return
        first = self._begun.pop(producer_id, None)
        if marker is None or marker.commit:
            return
        entry = self._wanted.pop(header.last_offset, None)
        if entry is None:
            if first is not None and self._unlisted is None:
                self._unlisted = (
                    f"the transaction of producer {producer_id} that was aborted at offset "
                    f"{header.last_offset} is not listed"
                )
        elif entry[1] != producer_id or (first is not None and entry[2] > first):
            self._blame(entry[0], f"the marker at offset {header.last_offset} says otherwise")

    def fault(self, stretches: list[Broken], *, complete: bool) -> tuple[int, str] | None:
        if not stretches:
            for last, (at, _, _) in self._wanted.items():
                self._blame(at, f"no transaction was aborted at offset {last}")
            if complete and self._unlisted is not None:
                self._blame(len(self.data or b""), self._unlisted)
        return self._fault
