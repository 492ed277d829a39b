"""Keeps the logs of many partitions from taking all the files that a process may have open.

Logs are opened when they are needed. Idle ones are closed by housekeeping in time; here those that
can be are closed at once when too many are open. Those that are about to be replaced, and whose
names soon mean other files, cannot (`Segment.pinned`); nor those that are not synced: a failure to
write them back would be told to nobody.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from penstock.log.partition import Partition, PartitionId
from penstock.log.segment import LOG_SUFFIX, Segment

_HALF: Final = 2
# Where the system sets no limit.
_MANY_FILES: Final = 65_536


class OpenLogs:
    """Counts the logs that are opened, and closes the idle ones if they become too many."""

    def __init__(self, partitions: Mapping[PartitionId, Partition], most: int = 0) -> None:
        """At most `most`, without it as many as half of the files that the process may have."""
        self._partitions = partitions
        self._most = most
        # Partitions belong to one thread; files are opened on others too.
        self._thread = threading.get_ident()
        self._opened = 0
        self._look_at = 0

    def opening(self, path: str) -> None:
        """A file is about to be opened."""
        if not path.endswith(LOG_SUFFIX) or threading.get_ident() != self._thread:
            return
        self._opened += 1
        if self._opened > self._look_at:
            most = self._most or _half_of_all()
            if self._opened > most:
                self._opened = self._close_idle() + 1
            # If few could be closed, not again for each that is opened.
            self._look_at = max(most, self._opened + most // 4)

    def _close_idle(self) -> int:
        """Close what can be closed; how many logs are still open."""
        still_open = 0
        for partition in self._partitions.values():
            opened = [segment for segment in partition.segments if segment.is_open]
            if not opened or partition.config.durability == "memory":
                continue
            for segment in _synced(partition):
                segment.park()
            still_open += sum(segment.is_open for segment in opened)
        return still_open


def _half_of_all() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (_MANY_FILES if limit == resource.RLIM_INFINITY else limit) // _HALF


def _synced(partition: Partition) -> Sequence[Segment]:
    """The segments of which nothing is left to be written to disk, or to be told of that."""
    if partition.gone or not partition.is_healthy:
        return ()
    return partition.segments if partition.is_synced else partition.closed
