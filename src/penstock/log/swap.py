"""Compacted segments take the place of those they were made from, at once or not at all.

    1. the outputs lie complete and synced beside the log, their names ending in `.cleaned`;
    2. the plan, which says what comes and what goes, is written and synced: from here on the
       swap will happen;
    3. outputs are renamed to their final names, the other replaced segments are removed;
    4. the folder is synced, then the plan is removed, and the folder synced again.

A crash before 2 leaves the log as it was, and `.cleaned` files to throw away. A crash after it
leaves a plan, and `finish_swap` does what is left of 3 and 4: each step can be done twice. The
plan is gone for good before the next compaction starts, so it never meets the wrong `.cleaned`
files. Nothing is guessed from offsets: an output may be empty, or end far below what it replaced.

The producers' snapshots at the start of replaced segments go: they may tell of transactions as open
whose markers are compacted away. What remains in the log tells all that is needed of them, and the
snapshots behind them stay.

`Swap` is this for a partition that is in use. Readers go on with the files that they have open.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from penstock.errors import StorageError
from penstock.log.checkpoint import read_checkpoint, write_checkpoint
from penstock.log.disk import Disk
from penstock.log.partition import Partition
from penstock.log.producers import snapshot_path
from penstock.log.segment import (
    DERIVED_SUFFIXES,
    LOG_SUFFIX,
    SEGMENT_SUFFIXES,
    Segment,
    open_segment,
    segment_name,
)
from penstock.log.transactions import aborted_index

CLEANED: Final = ".cleaned"
PLAN_FILE: Final = "compaction-swap"


_PUT: Final = "put"
_REMOVE: Final = "remove"


class Replacement(NamedTuple):
    """Neighbouring segments, and what was made of them, all by base offset.

    There is at least one output, and the first begins where the first that is replaced did.
    """

    outputs: tuple[int, ...]
    replaced: tuple[int, ...]


def commit_swap(disk: Disk, folder: str, replacements: list[Replacement]) -> None:
    """Replace; durable on return. After a StorageError `finish_swap` must be tried again."""
    rows: list[tuple[int, str]] = []
    for item in replacements:
        rows += [(base, _PUT) for base in item.outputs]
        rows += [(base, _REMOVE) for base in item.replaced if base not in item.outputs]
    write_checkpoint(disk, os.path.join(folder, PLAN_FILE), rows)
    finish_swap(disk, folder)


def finish_swap(disk: Disk, folder: str) -> None:
    """Carry out the plan in the folder, if there is one."""
    plan = os.path.join(folder, PLAN_FILE)
    if not disk.exists(plan):
        return
    rows = read_checkpoint(disk, plan, columns=2)
    if rows is None:
        raise StorageError(
            f"{plan} is damaged: segments may be half replaced",
            advice="Restore the partition's folder from a copy.",
        )
    for base, role in rows:
        if role == _PUT:
            _put_in_place(disk, folder, int(base))
        else:
            _remove_replaced(disk, folder, int(base))
    disk.sync_dir(folder)
    disk.remove(plan)
    disk.sync_dir(folder)


def _put_in_place(disk: Disk, folder: str, base: int) -> None:
    for suffix in (*DERIVED_SUFFIXES, LOG_SUFFIX):
        final = os.path.join(folder, segment_name(base) + suffix)
        if disk.exists(final + CLEANED):
            disk.rename(final + CLEANED, final)
    disk.remove(snapshot_path(folder, base))


def _remove_replaced(disk: Disk, folder: str, base: int) -> None:
    for suffix in SEGMENT_SUFFIXES:
        disk.remove(os.path.join(folder, segment_name(base) + suffix))
    disk.remove(snapshot_path(folder, base))


def remove_cleaned(disk: Disk, folder: str) -> None:
    """Throw away what a compaction left that was not committed; only without a plan."""
    for name in disk.names(folder):
        if name.endswith(CLEANED):
            disk.remove(os.path.join(folder, name))


class Swap:
    """A swap in a partition that is being read and written.

    Making one, `load_indexes` and `finish` belong to the partition's thread. `prepare`, `run`
    and `let_go` touch only what does not change meanwhile, and may run on any, as long as nobody
    else removes, replaces or releases closed segments of the partition.
    """

    def __init__(self, partition: Partition, replacements: list[Replacement]) -> None:
        self._partition = partition
        self._replacements = replacements
        replaced = {base for item in replacements for base in item.replaced}
        self._old = [s for s in partition.closed if s.base_offset in replaced]
        self._new: list[Segment] = []
        # Whether all that was compacted is still part of the log.
        self.valid = len(self._old) == len(replaced) and not partition.gone
        for segment in self._old if self.valid else ():
            segment.pinned = True

    def prepare(self) -> None:
        """Open the old segments with their indexes: soon their names will mean other files."""
        for segment in self._old:
            _ = segment.file
            segment.preload_indexes()

    def load_indexes(self) -> None:
        """Make anew what `prepare` could not read."""
        for segment in self._old:
            _ = segment.index, segment.time_index, aborted_index(segment)

    def run(self) -> None:
        """Change the files, and open the new ones."""
        partition = self._partition
        commit_swap(partition.disk, partition.folder, self._replacements)
        self._new = [
            open_segment(partition.disk, partition.folder, base)
            for item in self._replacements
            for base in item.outputs
        ]

    def finish(self) -> None:
        """From here on reads go to the new segments."""
        self._partition.replace_segments(self._old, self._new)

    def let_go(self) -> None:
        """Close the old files, on any thread: only then is their space freed, slowly."""
        self._old.clear()
