"""What a clean stop writes down of all partitions, in one file: `partition-states`.

A partition that is closed would need a file for each of its indexes, its digest and its producers,
and a start would have to look at all of them. With thousands of partitions that takes minutes. So a
clean stop puts what the next start must know into one file for the whole directory, a line for
each partition:

    orders-0 WkGZTn3UR1q6GKL5aBcDeA {"end": 1200, "segments": [...], ...}

Theory
- The file counts only together with the marker of a clean stop, which names its checksum. The
  marker is gone before anything is written again, so the file never tells of an older state.
- A line is believed only if folder and logs bear the *stamps* (`Disk.stamp`) that they had: who
  has moved, restored or changed a file in between gets what was always done, a look at the files.
- While the broker runs nothing of it is in memory. A stop takes the lines of partitions that have
  not changed from the file that the one before it wrote.
- Nothing in it is needed. Each line says what follows from the logs; without one, indexes and
  producers are made anew from the log, as after a crash.
- It holds the derived files of the active segment, which are not in the folder then (`files`). Of a
  segment with a large index, or a partition with many producers, they are in the folder as ever.
- A partition whose folder holds unfinished work, or an archive's list, has no line.
"""

from __future__ import annotations

import logging
import os
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable
from typing import Any, Final, NamedTuple

import orjson
from crc32c import crc32c

from penstock.log.archive import LOCAL_COPY
from penstock.log.checkpoint import seal, unseal
from penstock.log.disk import Disk, read_whole, write_atomically
from penstock.log.index import OffsetIndex, TimeIndex
from penstock.log.partition import Partition
from penstock.log.producers import (
    ProducerStates,
    load_snapshot,
    snapshot_offsets,
    snapshot_path,
    write_snapshot,
)
from penstock.log.segment import (
    DERIVED_SUFFIXES,
    DIGEST_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    Segment,
    StoredDigest,
    segment_name,
)
from penstock.log.swap import CLEANED, PLAN_FILE
from penstock.log.sync import FAILED_SYNC_MARK
from penstock.log.txn_index import TransactionIndex

log = logging.getLogger(__name__)

STATES_FILE: Final = "partition-states"
# What the marker said before there was such a file.
OLD_MARKER: Final = b"1\n"
_VERSION: Final = "0"
# Larger ones are files of their own.
_MAX_INLINE_BYTES: Final = 64 * 1024
_UNFINISHED: Final = frozenset({PLAN_FILE, FAILED_SYNC_MARK, LOCAL_COPY})
_LEFTOVERS: Final = (CLEANED, ".tmp")


class StoredState(NamedTuple):
    """One line: whose it is, and the rest, not looked into yet."""

    topic_id: str
    text: str

    def derived_files(self) -> tuple[int, dict[str, bytes]]:
        """The base of the active segment, and its derived files by suffix, if they are here."""
        row = orjson.loads(self.text)
        files = {suffix: b64decode(data) for suffix, data in (row["files"] or {}).items()}
        return row["segments"][-1][0], files

    def bases(self) -> list[int]:
        """The base offsets of the segments."""
        return [fields[0] for fields in orjson.loads(self.text)["segments"]]

    def log_end(self) -> int:
        return int(orjson.loads(self.text)["end"])


# ---- the file --------------------------------------------------------------------------------


def encode_states(lines: Iterable[str]) -> bytes:
    """The whole file."""
    rows = list(lines)
    return seal("\n".join([_VERSION, str(len(rows)), *rows, ""]))


def decode_states(data: bytes) -> dict[str, StoredState] | None:
    """The lines by the partition's name; None if the file is not whole."""
    text = unseal(data)
    lines = text.splitlines() if text is not None else []
    if len(lines) < 2 or lines[0] != _VERSION or lines[1] != str(len(lines) - 2):
        return None
    states = {}
    for line in lines[2:]:
        name, topic_id, rest = line.split(" ", 2)
        states[name] = StoredState(topic_id, rest)
    return states


def marker_for(states: bytes) -> bytes:
    """The content of a clean stop's marker that goes with these states."""
    return b"1 %08x\n" % crc32c(states)


def drop_states(disk: Disk, folder: str, active: Collection[tuple[str, int]], marker: str) -> None:
    """Forget partitions of a directory that no broker runs on, so that the next start looks itself.

    Each is named with the base of its active segment, whose derived files are in its folder now.
    """
    path = os.path.join(folder, STATES_FILE)
    data = read_whole(disk, path) if disk.exists(path) else b""
    states = decode_states(data)
    if states is None or not disk.exists(marker) or read_whole(disk, marker) != marker_for(data):
        return
    kept = {
        name: state
        for name, state in states.items()
        if (name, state.derived_files()[0]) not in active
    }
    if len(kept) < len(states):
        lines = (f"{name} {state.topic_id} {state.text}" for name, state in kept.items())
        write_atomically(disk, path, encode_states(lines))
        write_atomically(disk, marker, marker_for(read_whole(disk, path)))


# ---- a stop ----------------------------------------------------------------------------------


def store_state(partition: Partition, stored: StoredState | None = None) -> str | None:
    """What the next start must know of a partition that is synced; None if it must look itself.

    What does not fit into a line is durable in the partition's folder on return. `stored` is what
    the stop before this one wrote down.
    """
    disk, folder = partition.disk, partition.folder
    text = stored.text if partition.state_is_stored and stored is not None else None
    if text is not None and _is_current(disk, folder, orjson.loads(text)):
        return text
    names = disk.names(folder)
    unfinished = _UNFINISHED.intersection(names) or any(n.endswith(_LEFTOVERS) for n in names)
    line = None if unfinished else _store_line(partition, names)
    if line is None:
        if not partition.active.indexes_are_stored():
            partition.active.write_indexes()
        write_snapshot(disk, folder, partition.log_end, partition.producers)
    return line


def _store_line(partition: Partition, names: list[str]) -> str | None:
    """What the next start must know; None if there is a log that the disk cannot vouch for."""
    disk, folder = partition.disk, partition.folder
    partition.epochs.save()
    files, wrote = _store_indexes(partition.active, names)
    producers = partition.producers.to_bytes()
    inline = len(producers) <= _MAX_INLINE_BYTES
    wrote |= _remove_snapshots(partition, names, keep_last=not inline)
    if not inline:
        write_snapshot(disk, folder, partition.log_end, partition.producers)
    elif wrote:
        disk.sync_dir(folder)
    return _encode(partition, files, producers if inline else None)


def _is_current(disk: Disk, folder: str, row: dict[str, Any]) -> bool:
    """Whether folder and logs are there, and as they were when the line was written."""
    stamps = [(row["folder"], folder)]
    stamps += [(stamp, _log_path(folder, base)) for base, *_, stamp in row["segments"]]
    return all(stamp is not None and stamp == disk.stamp(path) for stamp, path in stamps)


def _log_path(folder: str, base: int) -> str:
    return os.path.join(folder, segment_name(base) + LOG_SUFFIX)


def _store_indexes(active: Segment, names: list[str]) -> tuple[dict[str, bytes] | None, bool]:
    """The derived files, if they are small, and whether the folder has changed."""
    known, index, time_index, aborted = active.contents()
    if len(index) + len(time_index) + len(aborted) > _MAX_INLINE_BYTES:
        active.write_indexes()
        return None, True
    files = {INDEX_SUFFIX: index, TIME_INDEX_SUFFIX: time_index, DIGEST_SUFFIX: known.to_bytes()}
    if aborted:
        files[TXN_INDEX_SUFFIX] = aborted
    stem = segment_name(active.base_offset)
    stale = [suffix for suffix in DERIVED_SUFFIXES if stem + suffix in names]
    for suffix in stale:
        active.disk.remove(active.path(suffix))
    return files, bool(stale)


def _remove_snapshots(partition: Partition, names: list[str], *, keep_last: bool) -> bool:
    """Those that stand at no segment's start; whether there were any."""
    kept = {segment.base_offset for segment in partition.segments}
    if keep_last:
        kept.add(partition.log_end)
    stale = [offset for offset in snapshot_offsets(names) if offset not in kept]
    for offset in stale:
        partition.disk.remove(snapshot_path(partition.folder, offset))
    return bool(stale)


def _encode(
    partition: Partition, files: dict[str, bytes] | None, producers: bytes | None
) -> str | None:
    """The line; None without a stamp of the folder and of each log: one may be gone."""
    disk, folder, active = partition.disk, partition.folder, partition.active
    folder_stamp = disk.stamp(folder)
    stamps = [disk.stamp(_log_path(folder, s.base_offset)) for s in partition.segments]
    if folder_stamp is None or None in stamps:
        log.warning("%s: files are gone from %s; the next start looks again", partition.id, folder)
        return None
    row = {
        "end": partition.log_end,
        "folder": folder_stamp,
        "epochs": partition.epochs.entries,
        "first_ms": active.first_timestamp_ms,
        "gap": active.bytes_since_index,
        "segments": [
            (
                segment.base_offset,
                segment.size,
                segment.max_timestamp_ms,
                segment.max_timestamp_offset,
                segment.aborted is not None and not segment.aborted.entries,
                stamp,
            )
            for segment, stamp in zip(partition.segments, stamps, strict=True)
        ],
        "files": None if files is None else {k: b64encode(v).decode() for k, v in files.items()},
        "producers": None if producers is None else b64encode(producers).decode(),
    }
    return orjson.dumps(row).decode()


# ---- a start ---------------------------------------------------------------------------------


def restore(partition: Partition, state: StoredState, recovery_point: int) -> bool:
    """Have a new partition begin with what a clean stop wrote down; False if that cannot be."""
    disk, folder = partition.disk, partition.folder
    row = orjson.loads(state.text)
    log_end = row["end"]
    current = _is_current(disk, folder, row)
    if not current or max(log_end, partition.log_start) < recovery_point:
        return False
    producers = (
        load_snapshot(disk, folder, log_end)
        if row["producers"] is None
        else ProducerStates.from_bytes(b64decode(row["producers"]))
    )
    segments = [_segment(partition, *fields) for fields in row["segments"]]
    if producers is None or not _restore_indexes(segments[-1], row):
        return False
    partition.epochs.restore(row["epochs"])
    partition.leader_epoch = max(partition.leader_epoch, partition.epochs.latest)
    partition.producers = producers
    partition.adopt(segments, log_end)
    partition.state_is_stored = True
    return True


def _segment(
    partition: Partition,
    base: int,
    size: int,
    max_timestamp_ms: int,
    max_timestamp_offset: int,
    plain: bool,
    _stamp: str,
) -> Segment:
    segment = Segment(partition.disk, partition.folder, base)
    segment.size = size
    segment.max_timestamp_ms = max_timestamp_ms
    segment.max_timestamp_offset = max_timestamp_offset
    segment.release()
    if not plain:
        segment.aborted = None
    return segment


def _restore_indexes(active: Segment, row: dict[str, Any]) -> bool:
    active.first_timestamp_ms = row["first_ms"]
    active.bytes_since_index = row["gap"]
    if row["files"] is None:
        known = active.stored_digest()
        if known is None or known.size != active.size:
            return False
        active.load_indexes()
        active.digest = known.digest
        return active.aborted is not None
    files = {suffix: b64decode(data) for suffix, data in row["files"].items()}
    known = StoredDigest.from_bytes(files[DIGEST_SUFFIX])
    index = OffsetIndex.from_bytes(files[INDEX_SUFFIX], active.size)
    time_index = TimeIndex.from_bytes(files[TIME_INDEX_SUFFIX])
    aborted = TransactionIndex.from_bytes(files.get(TXN_INDEX_SUFFIX, b""))
    if known is None or known.size != active.size or index is None or time_index is None:
        return False
    active.digest, active.aborted = known.digest, aborted
    active.set_indexes(index, time_index)
    return aborted is not None
