"""Examine a data directory that no broker runs on, and name every byte that is not as stored.

What is checked against what:

- each `.log` batch by batch, and its indexes and digest against it (`verify_segment`);
- segments against each other: offsets go on, leader epochs do not fall;
- `leader-epoch-checkpoint` against the epochs in the batches;
- producers' `.snapshot` files by their own checksum;
- the small text files by their seal, and what they say against the logs: the recovery point is
  where the log ends after a clean stop, and not beyond that after a crash.

After a crash the tails of logs may be torn, and files that are made from a log may be behind it.
That is a note, not damage, as long as it lies above the recovery point. Nothing is ever written
here except by `rebuild_indexes`.
"""

from __future__ import annotations

import os
import uuid
from base64 import urlsafe_b64decode
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.errors import DataDirectoryError
from penstock.log import findings
from penstock.log.archive import LOCAL_COPY, Manifest
from penstock.log.checkpoint import parse_checkpoint, unseal
from penstock.log.cleaner import CHECKPOINT_FILE as CLEANER_FILE
from penstock.log.disk import Disk, OsDisk
from penstock.log.epochs import FILE_NAME as EPOCHS_FILE
from penstock.log.findings import Finding, Report, damage, note
from penstock.log.memory import RESERVE_FILE
from penstock.log.offline import PartitionFolder, Place, is_partition_name, locate, read_bytes
from penstock.log.partition_states import (
    OLD_MARKER,
    STATES_FILE,
    StoredState,
    decode_states,
    drop_states,
    marker_for,
)
from penstock.log.producers import ProducerStates
from penstock.log.segment import (
    DERIVED_SUFFIXES,
    LOG_SUFFIX,
    SEGMENT_SUFFIXES,
    SNAPSHOT_SUFFIX,
    Segment,
    segment_name,
)
from penstock.log.store import (
    CLEAN_MARKER,
    LOCK_FILE,
    LOG_STARTS,
    META_FILE,
    PARTITION_METADATA,
    RECOVERY_POINTS,
)
from penstock.log.swap import CLEANED, PLAN_FILE
from penstock.log.sync import FAILED_SYNC_MARK
from penstock.log.tiering import REMOVALS_FILE
from penstock.log.transactions import rebuild_aborted
from penstock.log.verify_segment import Expectation, SegmentCheck, SegmentFacts

_LEFTOVER_SUFFIXES = (CLEANED, ".tmp")
_PARTITION_FILES = (
    PARTITION_METADATA,
    EPOCHS_FILE,
    RESERVE_FILE,
    CLEANER_FILE,
    LOCAL_COPY,
    PLAN_FILE,
    FAILED_SYNC_MARK,
)
_DIRECTORY_FILES = (
    META_FILE,
    LOCK_FILE,
    CLEAN_MARKER,
    RECOVERY_POINTS,
    LOG_STARTS,
    STATES_FILE,
    REMOVALS_FILE,
)

Progress = Callable[[int], None]


@dataclass(slots=True)
class _Directory:
    """What the data directory says about its partitions; empty if there is none."""

    clean: bool | None = None
    recovery_points: dict[str, int] | None = None
    log_starts: dict[str, int] | None = None
    topic_ids: dict[str, tuple[str, str]] = field(default_factory=dict)
    # What a clean stop wrote down of each partition; None if that is damaged.
    states: dict[str, StoredState] | None = field(default_factory=dict)


@dataclass(slots=True)
class _PartitionFacts:
    """What the segments of one partition came to."""

    # Up to where its records were known to be on disk.
    safe: int | None = None
    # Segments that an interrupted compaction is about to replace or remove.
    swapped: frozenset[int] = frozenset()
    end: int = 0
    broken: bool = False
    segments: list[SegmentFacts] = field(default_factory=list)


def log_bytes(place: Place) -> int:
    """How many bytes of log an examination will read, for a progress bar."""
    total = 0
    for partition in place.partitions:
        for base in partition.only_bases or partition.bases:
            path = os.path.join(partition.path, segment_name(base) + LOG_SUFFIX)
            total += os.path.getsize(path)
    return total


class Verifier:
    """One examination of a path. `run` yields findings as they are made."""

    def __init__(
        self,
        place: Place,
        path: str,
        *,
        open_records: bool = False,
        progress: Progress | None = None,
        running: bool = False,
    ) -> None:
        self.report = Report(path)
        # Segments whose derived files can be made anew from a sound log.
        self.rebuildable: list[tuple[str, int]] = []
        self._place = place
        self._open_records = open_records
        self._progress: Progress = progress or (lambda _count: None)
        # With a broker on it every tail is in motion: as after a crash.
        self._running = running
        self._directory = _Directory()

    def run(self) -> Iterator[Finding]:
        """Every finding, also kept in `report`."""
        for finding in self._all():
            self.report.findings.append(finding)
            yield finding

    def _all(self) -> Iterator[Finding]:
        data_dir = self._place.data_dir
        if data_dir is not None:
            yield from self._read_directory(data_dir)
        self.report.clean_stop = self._directory.clean
        for partition in self._place.partitions:
            self.report.partitions += 1
            yield from self._partition(partition)
        if self._place.whole and data_dir is not None:
            yield from self._absent_partitions(data_dir)

    # ---- the directory -------------------------------------------------------------------

    def _read_directory(self, data_dir: str) -> Iterator[Finding]:
        whole = self._place.whole
        path = os.path.join(data_dir, CLEAN_MARKER)
        marker = read_bytes(path)
        self._directory.clean = marker is not None and not self._running
        if self._directory.clean and marker is not None and marker != OLD_MARKER:
            finding = self._read_states(data_dir, marker)
            if whole and finding is not None:
                yield finding
        if whole:
            yield from _check_identity(os.path.join(data_dir, META_FILE))
        for name, remedy in (
            (RECOVERY_POINTS, findings.DELETE_CHECKPOINT),
            (LOG_STARTS, findings.DELETE_LOG_STARTS),
        ):
            path = os.path.join(data_dir, name)
            data = read_bytes(path)
            rows = _offsets_by_partition(data) if data is not None else None
            if name == RECOVERY_POINTS:
                self._directory.recovery_points = rows
            else:
                self._directory.log_starts = rows
            if whole and data is not None and rows is None:
                yield damage("checkpoint", path, "the checkpoint is damaged", remedy)
            elif whole and data is None and self._directory.clean:
                yield damage("missing", path, "the checkpoint is missing", remedy)
        if whole:
            yield from self._leftovers(data_dir)

    def _read_states(self, data_dir: str, marker: bytes) -> Finding | None:
        """What the clean stop wrote down of the partitions."""
        path = os.path.join(data_dir, STATES_FILE)
        data = read_bytes(path)
        states = decode_states(data or b"")
        if data is not None and marker == marker_for(data):
            self._directory.states = states
            return None
        self._directory.states = None
        if data is None:
            return damage("missing", path, "the file is missing", findings.RECOVERS)
        if states is None:
            return damage("states", path, "the file is damaged", findings.DELETE_STATES)
        path = os.path.join(data_dir, CLEAN_MARKER)
        message = "the marker of a clean stop has changed"
        return damage("marker", path, message, findings.DELETE_MARKER)

    def _leftovers(self, data_dir: str) -> Iterator[Finding]:
        for name in self._place.deleted:
            yield note(
                "leftover",
                os.path.join(data_dir, name),
                "a deleted partition, not yet removed",
                findings.RECOVERS,
            )
        for name in sorted(os.listdir(data_dir)):
            path = os.path.join(data_dir, name)
            if name in _DIRECTORY_FILES or name in self._place.deleted:
                continue
            if os.path.isdir(path) and is_partition_name(name):
                continue
            yield _leftover(path, name)

    def _absent_partitions(self, data_dir: str) -> Iterator[Finding]:
        """Partitions that the checkpoint of a clean stop lists and that are not there."""
        if not self._directory.clean:
            return
        there = {partition.name for partition in self._place.partitions}
        for name in sorted(set(self._directory.recovery_points or {}) - there):
            yield damage(
                "missing",
                os.path.join(data_dir, name),
                "the folder of this partition is missing",
                "Restore the folder from a copy, or delete the topic.",
            )

    # ---- a partition ---------------------------------------------------------------------

    def _partition(self, partition: PartitionFolder) -> Iterator[Finding]:
        facts = _PartitionFacts(safe=self._safe_offset(partition))
        yield from self._partition_files(partition)
        facts.swapped = yield from _check_plan(partition)
        bases = partition.bases
        for at, base in enumerate(bases):
            if partition.only_bases is None or base in partition.only_bases:
                following = bases[at + 1] if at + 1 < len(bases) else None
                yield from self._segment(partition, base, following, facts)
        if partition.only_bases is not None:
            return
        yield from self._orphans(partition)
        yield from _check_snapshots(partition)
        yield from self._epochs(partition, facts)
        snapshots = partition.stems(SNAPSHOT_SUFFIX)
        # Records at the end may have been taken away; the last snapshot knows where it was.
        if self._directory.clean:
            state = (self._directory.states or {}).get(partition.name)
            stored_end = [] if state is None else [state.log_end()]
            facts.end = max([facts.end, *snapshots[-1:], *stored_end])
        if bases:
            yield from self._log_end(partition, facts)
        elif partition.name in (self._directory.recovery_points or {}):
            message = "the partition has no log file"
            yield damage("missing", partition.path, message, findings.RESTORE_FOLDER)

    def _safe_offset(self, partition: PartitionFolder) -> int | None:
        """As recovery sees it: the checkpoint, or a snapshot, written once all before it was."""
        listed = (self._directory.recovery_points or {}).get(partition.name)
        known = [*partition.stems(SNAPSHOT_SUFFIX), *([] if listed is None else [listed])]
        return max(known, default=None)

    def _partition_files(self, partition: PartitionFolder) -> Iterator[Finding]:
        if partition.only_bases is not None:
            return
        for name in partition.names:
            known = name in _PARTITION_FILES or name.endswith((*SEGMENT_SUFFIXES, SNAPSHOT_SUFFIX))
            if not known:
                yield _leftover(os.path.join(partition.path, name), name)
        yield from self._check_topic_id(partition)
        path = os.path.join(partition.path, RESERVE_FILE)
        data = read_bytes(path)
        if data is not None and not (unseal(data) or "").strip().isdecimal():
            message = "the bound of the offsets given out is damaged"
            yield damage("reserve", path, message, findings.RESTORE_RESERVE)
        path = os.path.join(partition.path, CLEANER_FILE)
        data = read_bytes(path)
        if data is not None and _offsets_by_partition(data) is None:
            message = "how far the log is compacted is damaged"
            yield damage("checkpoint", path, message, findings.DELETE_CLEANER)
        path = os.path.join(partition.path, LOCAL_COPY)
        data = read_bytes(path)
        if data is not None and Manifest.from_bytes(data) is None:
            message = "the list of archived segments is damaged"
            yield damage("archive", path, message, findings.RESTORE_MANIFEST)

    def _check_topic_id(self, partition: PartitionFolder) -> Iterator[Finding]:
        path = os.path.join(partition.path, PARTITION_METADATA)
        data = read_bytes(path)
        if data is None:
            if self._directory.clean:
                message = "the topic's id is missing"
                yield damage("missing", path, message, findings.DELETE_METADATA)
            return
        topic_id = _topic_id(unseal(data))
        if topic_id is None:
            message = "the topic's id is damaged"
            yield damage("identity", path, message, findings.DELETE_METADATA)
            return
        topic = partition.name.rpartition("-")[0]
        first_id, first_name = self._directory.topic_ids.setdefault(
            topic, (topic_id, partition.name)
        )
        if topic_id != first_id:
            message = f"the topic's id is not the one in {first_name}"
            yield damage("identity", path, message, findings.DELETE_METADATA)

    def _segment(
        self, partition: PartitionFolder, base: int, following: int | None, facts: _PartitionFacts
    ) -> Iterator[Finding]:
        directory, safe = self._directory, facts.safe
        if base in facts.swapped:
            settled = False
        elif directory.clean is None:
            settled = following is not None
        else:
            settled = directory.clean or (
                following is not None and safe is not None and following <= safe
            )
        expected = Expectation(
            partition,
            base,
            settled,
            safe,
            self._open_records,
            self._stored_files(partition, base),
            directory.states is None and following is None,
        )
        check = SegmentCheck(expected, self.report, self._progress)
        harmed = False
        for finding in check.findings():
            harmed = harmed or finding.severity == "damage"
            yield finding
        if harmed and check.can_rebuild:
            self.rebuildable.append((partition.path, base))
        if base < facts.end and base not in facts.swapped:
            yield damage(
                "offset",
                os.path.join(partition.path, segment_name(base) + LOG_SUFFIX),
                f"the segment begins at {base}, but the one before it ends at {facts.end}",
                findings.RESTORE_RECORDS,
                0,
                base,
            )
        facts.segments.append(check.facts)
        facts.end = max(facts.end, check.facts.next_offset)
        facts.broken = facts.broken or check.facts.broken

    def _stored_files(self, partition: PartitionFolder, base: int) -> dict[str, bytes]:
        state = (self._directory.states or {}).get(partition.name)
        active_base, files = (None, {}) if state is None else state.derived_files()
        return files if base == active_base else {}

    def _orphans(self, partition: PartitionFolder) -> Iterator[Finding]:
        """Logs that are gone, by what was made from them and by what a clean stop wrote down."""
        bases = set(partition.bases)
        lost = {base for suffix in DERIVED_SUFFIXES for base in partition.stems(suffix)} - bases
        if not self._directory.clean:
            # Retention that a crash interrupted leaves them below the first segment.
            lost = {base for base in lost if bases and base > min(bases)}
        state = (self._directory.states or {}).get(partition.name)
        lost |= set(state.bases() if state is not None else ()) - bases
        for base in sorted(lost):
            path = os.path.join(partition.path, segment_name(base) + LOG_SUFFIX)
            message = "the log file is missing, although what was made from it is there"
            yield damage("missing", path, message, findings.RESTORE_RECORDS, None, base)

    def _epochs(self, partition: PartitionFolder, facts: _PartitionFacts) -> Iterator[Finding]:
        path = os.path.join(partition.path, EPOCHS_FILE)
        data = read_bytes(path)
        runs = [run for segment in facts.segments for run in segment.epoch_runs]
        entries = _epoch_entries(data) if data is not None else []
        if entries is None:
            message = "the list of leader epochs is damaged"
            yield damage("epochs", path, message, findings.RESTORE_EPOCHS)
            return
        for epoch, first, last in runs:
            if not self._directory.clean and (facts.safe is None or last >= facts.safe):
                break
            begun = [entry for entry in entries if entry[1] <= first]
            later = [entry for entry in entries if first < entry[1] <= last]
            if not begun or begun[-1][0] != epoch or later:
                message = f"the leader epoch {epoch} of offsets {first} to {last} is not listed"
                yield damage("epochs", path, message, findings.RESTORE_EPOCHS, None, first)
                return

    def _log_end(self, partition: PartitionFolder, facts: _PartitionFacts) -> Iterator[Finding]:
        """What the directory says of the partition against its logs."""
        directory = self._directory
        path = os.path.join(partition.path, segment_name(partition.bases[-1]) + LOG_SUFFIX)
        start = (directory.log_starts or {}).get(partition.name, 0)
        if facts.broken or directory.recovery_points is None:
            return
        if directory.clean and start > facts.end:
            message = f"the log is said to begin at {start}, but it ends at {facts.end}"
            yield damage("checkpoint", path, message, findings.DELETE_LOG_STARTS)
        listed = directory.recovery_points.get(partition.name)
        if listed is None and directory.clean and self._place.whole:
            message = "the checkpoint of the last stop does not list this partition"
            remedy = "Look whether its topic still exists."
            yield note("checkpoint", partition.path, message, remedy)
        elif (directory.clean and listed is not None and listed != facts.end) or (
            facts.safe is not None and facts.safe > max(facts.end, start)
        ):
            known = listed if directory.clean else facts.safe
            message = f"the log ends at {facts.end}, but was safe on disk up to {known}"
            yield damage("size", path, message, findings.RESTORE_RECORDS, None, facts.end)


def _check_plan(partition: PartitionFolder) -> Generator[Finding, None, frozenset[int]]:
    """A compaction that a crash interrupted: which segments it is replacing."""
    path = os.path.join(partition.path, PLAN_FILE)
    data = read_bytes(path)
    if data is None:
        return frozenset()
    rows = parse_checkpoint(data, columns=2)
    if rows is None or not all(text.isdecimal() for row in rows for text in row):
        message = "the plan of an interrupted compaction is damaged"
        yield damage("compaction", path, message, findings.RESTORE_FOLDER)
        return frozenset()
    yield note("compaction", path, "a compaction was interrupted", findings.RECOVERS)
    return frozenset(int(text) for row in rows for text in row)


def _leftover(path: str, name: str) -> Finding:
    if name.endswith(_LEFTOVER_SUFFIXES):
        return note("leftover", path, "left by interrupted work", findings.RECOVERS)
    return note("unknown", path, "not a file of the log; it is not examined")


def _check_identity(path: str) -> Iterator[Finding]:
    data = read_bytes(path)
    text = unseal(data) if data is not None else None
    if data is None:
        yield damage(
            "missing", path, "the directory's identity is missing", findings.RESTORE_IDENTITY
        )
    elif text is None or "version=1" not in text.splitlines():
        yield damage(
            "identity", path, "the directory's identity is damaged", findings.RESTORE_IDENTITY
        )


def _check_snapshots(partition: PartitionFolder) -> Iterator[Finding]:
    for offset in partition.stems(SNAPSHOT_SUFFIX):
        path = os.path.join(partition.path, segment_name(offset) + SNAPSHOT_SUFFIX)
        if ProducerStates.from_bytes(read_bytes(path) or b"") is None:
            message = "the snapshot of the producers is damaged"
            yield damage("snapshot", path, message, findings.DELETE_SNAPSHOT, None, offset)


def _offsets_by_partition(data: bytes) -> dict[str, int] | None:
    rows = parse_checkpoint(data, columns=3)
    if rows is None or not all(n.isdecimal() and at.isdecimal() for _, n, at in rows):
        return None
    return {f"{topic}-{number}": int(offset) for topic, number, offset in rows}


def _epoch_entries(data: bytes) -> list[tuple[int, int]] | None:
    rows = parse_checkpoint(data, columns=2)
    if rows is None or not all(e.isdecimal() and at.isdecimal() for e, at in rows):
        return None
    entries = [(int(epoch), int(start)) for epoch, start in rows]
    rising = all(a < b and s < t for (a, s), (b, t) in pairwise(entries))
    return entries if rising else None


def _topic_id(text: str | None) -> str | None:
    lines = dict(line.split(": ", 1) for line in (text or "").splitlines() if ": " in line)
    value = lines.get("topic_id", "")
    try:
        uuid.UUID(bytes=urlsafe_b64decode(value + "=="))
    except ValueError:
        return None
    return value


def verify(path: str, *, open_records: bool = False, running: bool = False) -> Report:
    """Examine `path` at once; for tests and programs."""
    verifier = Verifier(locate(path), path, open_records=open_records, running=running)
    for _ in verifier.run():
        pass
    return verifier.report


def rebuild_indexes(data_dir: str | None, segments: list[tuple[str, int]]) -> None:
    """Write indexes and digests anew from sound logs, holding the directory's lock."""
    disk: Disk = OsDisk()
    release = disk.lock(os.path.join(data_dir, LOCK_FILE)) if data_dir is not None else None
    if data_dir is not None and release is None:
        raise DataDirectoryError(f"{data_dir} is in use by a broker", advice="Stop it first.")
    try:
        for folder, base in segments:
            path = os.path.join(folder, segment_name(base) + LOG_SUFFIX)
            segment = Segment(disk, folder, base, disk.open(path))
            try:
                segment.size = segment.file.size()
                segment.rebuild_indexes()
                rebuild_aborted(segment)
                segment.write_indexes()
            finally:
                segment.close()
            disk.sync_dir(folder)
        if data_dir is not None:
            # What was written down of them is not how they are any more.
            rebuilt = {(os.path.basename(folder), base) for folder, base in segments}
            drop_states(disk, data_dir, rebuilt, os.path.join(data_dir, CLEAN_MARKER))
    finally:
        if release is not None:
            release()
