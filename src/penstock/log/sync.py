"""What makes a partition's records durable, as work that any thread may run.

A plan is made and finished on the partition's own thread; only `run` leaves it. The order in
`run` is what recovery relies on: a segment that was closed gets its log, its indexes and the
producers' snapshot to disk before anything after it counts as synced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.errors import StorageError
from penstock.log.disk import Disk, write_atomically
from penstock.log.producers import snapshot_path
from penstock.log.segment import DERIVED_SUFFIXES, Segment


@dataclass(slots=True)
class ClosedSegment:
    """A segment that was rolled and is not known to be on disk yet."""

    segment: Segment
    next_offset: int
    # The producers as of `next_offset`, in the snapshot's format.
    snapshot: bytes


@dataclass(slots=True)
class SyncPlan:
    """Files to sync, and what is safe once that is done."""

    disk: Disk
    folder: str
    closed: list[ClosedSegment]
    active: Segment | None
    active_size: int
    # Every record below this offset is safe after the run.
    offset: int
    error: StorageError | None = field(default=None)

    def run(self) -> None:
        """Do it, on any thread; a failure is kept in `error` for `finish_sync`."""
        try:
            for closed in self.closed:
                self._finish_closed(closed)
            if self.closed:
                self.disk.sync_dir(self.folder)
            if self.active is not None:
                self.active.file.sync()
        except StorageError as error:
            self.error = error

    def _finish_closed(self, closed: ClosedSegment) -> None:
        segment = closed.segment
        segment.file.sync()
        segment.write_indexes()
        for suffix in DERIVED_SUFFIXES:
            file = self.disk.open(segment.path(suffix))
            try:
                file.sync()
            finally:
                file.close()
        path = snapshot_path(self.folder, closed.next_offset)
        write_atomically(self.disk, path, closed.snapshot)
