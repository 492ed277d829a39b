"""What makes a partition's records durable, as work that any thread may run.

A plan is made and finished on the partition's own thread; only `run` leaves it. The order in
`run` is what recovery relies on: a segment that was closed gets its log, its indexes and the
producers' snapshot to disk before anything after it counts as synced.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import Final

from penstock.errors import StorageError
from penstock.log.disk import Disk, write_atomically
from penstock.log.producers import snapshot_path
from penstock.log.segment import Segment

FAILED_SYNC_MARK: Final = "sync-failed"


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
                finish_closed(self.disk, self.folder, closed)
            if self.active is not None:
                self.active.file.sync()
        except StorageError as error:
            self.error = error
        except Exception as error:
            # Whatever it was, nothing may count as synced.
            self.error = StorageError(f"syncing {self.folder}: {error!r}")
        if self.error is not None:
            mark_failed_sync(self.disk, self.folder)


def mark_failed_sync(disk: Disk, folder: str) -> None:
    """Warn the next process: what it reads of the doubtful segments may not be on disk.

    The warning itself need not be. It is about the page cache, and lost only together with it.
    """
    with contextlib.suppress(StorageError):
        disk.open(os.path.join(folder, FAILED_SYNC_MARK), create=True).close()


def clear_failed_sync(disk: Disk, folder: str) -> None:
    disk.remove(os.path.join(folder, FAILED_SYNC_MARK))


def finish_closed(disk: Disk, folder: str, closed: ClosedSegment) -> None:
    """Bring a closed segment to disk. The snapshot comes last, and says that all is safe.

    Writing it syncs the folder, and so the names of the indexes and of the next segment.
    """
    closed.segment.file.sync()
    closed.segment.write_indexes()
    write_atomically(disk, snapshot_path(folder, closed.next_offset), closed.snapshot)
