"""What a compaction pass knows of transactions while it goes through the log. Kafka's rules.

- The records of an aborted transaction are void: they are not noted as the newest of their keys,
  and they go.
- A marker stays as long as the pass meets batches of its transaction, and so does the entry in the
  index of aborted transactions: whoever reads these batches, or what the pass before left of them,
  must know how it ended. A pass that meets the marker alone finds it *idle*: then it waits for
  `delete.retention.ms` as a tombstone does, and goes.

The aborted transactions come with the job. A pass never goes beyond the first unstable offset, so
every other transaction that it meets was committed.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.log.txn_index import AbortedTransaction
from penstock.records.batch import BatchHeader
from penstock.records.control import Marker


class CleanedTransactions:
    """The transactions that are open at the batch that is being looked at, in one run."""

    def __init__(self, aborted: Iterable[AbortedTransaction]) -> None:
        # The next to begin is last.
        self._coming = sorted(aborted, key=lambda item: item.first_offset, reverse=True)
        self._aborted: dict[int, AbortedTransaction] = {}
        # Producers of which a batch was met since their last marker.
        self._met: set[int] = set()

    def is_aborted(self, header: BatchHeader) -> bool:
        """Take in a batch of records; whether its records are void."""
        if not header.is_transactional:
            return False
        self._begin_up_to(header.last_offset)
        self._met.add(header.producer_id)
        return header.producer_id in self._aborted

    def end(
        self, header: BatchHeader, marker: Marker | None
    ) -> tuple[bool, AbortedTransaction | None]:
        """Take in a control batch: whether it is idle, and the entry that it needs if it is not."""
        self._begin_up_to(header.last_offset)
        met = header.producer_id in self._met
        self._met.discard(header.producer_id)
        if marker is None:
            # Not of a transaction, or emptied by another cleaner.
            return False, None
        aborted = None if marker.commit else self._aborted.pop(header.producer_id, None)
        return not met, aborted if met else None

    def _begin_up_to(self, offset: int) -> None:
        coming = self._coming
        while coming and coming[-1].first_offset <= offset:
            begun = coming.pop()
            self._aborted[begun.producer_id] = begun
