"""What a flow counts of its micro-batches itself, until Spark's report of each one comes.

A micro-batch notes its counts on its own thread; reports are taken in on the manager's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.spark.flows.dead_letters import DeadLetterGuard
    from penstock.spark.flows.progress import Progress

# Micro-batches whose rows are remembered, while nobody asks.
_KEPT: Final = 200


class BatchCounts:
    """The counts of the newest micro-batches of a flow, by their numbers."""

    def __init__(self) -> None:
        # How often Spark reads each source in a micro-batch.
        self.readings: list[int] = []
        self._written: dict[int, int] = {}
        # How many records a batch had, where that is known without Spark.
        self._read: dict[int, int] = {}
        # The dead letters of a batch of which it is not known yet how many records it had.
        self._unjudged: dict[int, tuple[int, str]] = {}
        # How many of them had a value.
        self._valued: dict[int, int] = {}

    def note_written(self, batch_id: int, rows: int) -> None:
        self._written[batch_id] = rows
        while len(self._written) > _KEPT:
            del self._written[next(iter(self._written))]

    def note_read(self, batch_id: int, records: int) -> None:
        """However often a batch was read, it has so many records."""
        self._read[batch_id] = records

    def guess_read(self, batch_id: int, records: int) -> None:
        """It has so many records, if nobody knows better."""
        self._read.setdefault(batch_id, records)

    def note_valued(self, batch_id: int, records: int) -> None:
        """So many records of a batch had a value."""
        self._valued[batch_id] = records

    def note_unjudged(self, batch_id: int, dead: int, first: str) -> None:
        """A batch had so many dead letters; how many records it had, its report will tell."""
        self._unjudged[batch_id] = dead, first

    def take(self, report: Mapping[str, Any], progress: Progress, guard: DeadLetterGuard) -> bool:
        """Add a report to the progress of the flow; whether it completes a micro-batch."""
        batch_id = int(report.get("batchId", -1))
        valued = self._valued.get(batch_id)
        # A micro-batch may note its own at this moment.
        for known in (self._read, self._valued):
            for old in [each for each in list(known) if each < batch_id]:
                known.pop(old, None)
        read, before = self._read.get(batch_id), progress.rows_in
        if not progress.take(report, self._written, self.readings, read, valued):
            return False
        dead, first = self._unjudged.pop(batch_id, (0, ""))
        if dead:
            guard.note(progress.rows_in - before, dead, first)
        return True
