"""When a partition is compacted: how dirty it is, and what a pass takes on.

A pass is due when

- the dirty bytes are more than `min.cleanable.dirty.ratio` of the closed log, or
- a dirty record is older than `max.compaction.lag.ms`, or
- the pass before ended at its bound on keys, or
- tombstones that a pass of this process has kept may go now.

Records younger than `min.compaction.lag.ms`, judged by whole segments, are left alone, and the
active segment always is. So is everything from the first unstable offset on: nobody knows yet
which of it counts. How far a partition is clean stands in its folder, in Kafka's
`cleaner-offset-checkpoint` format; it is written after the swap, so it may lag behind the truth,
which costs work, but never runs ahead of it, which would bring deleted keys back.

On the partition's thread, except `save`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from penstock.log.checkpoint import read_checkpoint, write_checkpoint
from penstock.log.compaction import DEFAULT_MAX_KEYS, Input, Job, Result
from penstock.log.partition import Partition
from penstock.log.segment import Segment
from penstock.log.txn_index import AbortedTransaction
from penstock.records.batch import NO_TIMESTAMP

CHECKPOINT_FILE: Final = "cleaner-offset-checkpoint"
_NO_LAG_LIMIT: Final = 0x7FFFFFFFFFFFFFFF


class Due(NamedTuple):
    """A pass that should run; the higher the ratio of dirty bytes the sooner."""

    ratio: float
    job: Job


class Cleaner:
    """What compaction knows of one partition from pass to pass."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._path = os.path.join(partition.folder, CHECKPOINT_FILE)
        self._unfinished = False
        self._next_horizon_ms = NO_TIMESTAMP
        self.clean_until = self._load()

    def _load(self) -> int:
        rows = read_checkpoint(self._partition.disk, self._path, columns=3)
        if not rows or not rows[0][2].isdigit():
            return 0
        return int(rows[0][2])

    def due(self, now_ms: int, max_keys: int = DEFAULT_MAX_KEYS) -> Due | None:
        """The pass that should run now, if any."""
        partition = self._partition
        inputs = self._inputs()
        start = self._first_dirty(inputs)
        clean = [item for item in inputs if item.end_offset <= start]
        dirty = self._cleanable(inputs[len(clean) :], now_ms)
        clean_bytes = sum(item.size for item in clean)
        dirty_bytes = sum(item.size for item in dirty)
        ratio = dirty_bytes / (clean_bytes + dirty_bytes) if dirty_bytes else 0.0
        wanted = (
            ratio > partition.config.min_cleanable_dirty_ratio
            or (bool(dirty) and (self._unfinished or self._too_old(dirty, now_ms)))
            or (bool(clean) and 0 <= self._next_horizon_ms <= now_ms)
        )
        if not wanted:
            return None
        config = partition.config
        job = Job(
            inputs=(*clean, *dirty),
            clean_until=start,
            now_ms=now_ms,
            delete_retention_ms=config.delete_retention_ms,
            segment_bytes=config.segment_bytes,
            index_interval_bytes=config.index_interval_bytes,
            max_keys=max_keys,
            producer_ends=self._producer_ends(),
            producer_markers=self._producer_markers(),
            aborted=self._aborted((*clean, *dirty)),
        )
        return Due(ratio, job)

    def _inputs(self) -> list[Input]:
        segments, stable = self._partition.segments, self._partition.stable
        inputs = [
            Input(segment.base_offset, segments[at + 1].base_offset, segment.size)
            for at, segment in enumerate(self._partition.closed)
        ]
        return [item for item in inputs if item.end_offset <= stable]

    def _first_dirty(self, inputs: list[Input]) -> int:
        if not inputs or self.clean_until > inputs[-1].end_offset:
            # A checkpoint that cannot be of this log says nothing.
            return inputs[0].base_offset if inputs else 0
        return max(self.clean_until, inputs[0].base_offset)

    def _cleanable(self, dirty: list[Input], now_ms: int) -> list[Input]:
        lag_ms = self._partition.config.min_compaction_lag_ms
        if lag_ms <= 0:
            return dirty
        for at, item in enumerate(dirty):
            if self._segment(item).max_timestamp_ms > now_ms - lag_ms:
                return dirty[:at]
        return dirty

    def _too_old(self, dirty: list[Input], now_ms: int) -> bool:
        limit_ms = self._partition.config.max_compaction_lag_ms
        if limit_ms == _NO_LAG_LIMIT:
            return False
        firsts = [first_timestamp(self._segment(item)) for item in dirty]
        known = [first for first in firsts if first >= 0]
        return bool(known) and now_ms - min(known) > limit_ms

    def _segment(self, item: Input) -> Segment:
        return self._partition.segment_for(item.base_offset)

    def _producer_ends(self) -> tuple[int, ...]:
        known = self._partition.producers.by_id.values()
        return tuple(item.batches[-1].last_offset for item in known if item.batches)

    def _producer_markers(self) -> tuple[tuple[int, int], ...]:
        known = self._partition.producers.by_id.items()
        return tuple((id_, item.epoch) for id_, item in known if not item.batches)

    def _aborted(self, inputs: Sequence[Input]) -> tuple[AbortedTransaction, ...]:
        start, end = inputs[0].base_offset, inputs[-1].end_offset
        return tuple(self._partition.aborted_transactions(start, end))

    def finish(self, result: Result) -> None:
        """Take in a pass whose outputs are in place; `save` follows."""
        self.clean_until = result.clean_until
        self._unfinished = not result.complete
        self._next_horizon_ms = result.next_horizon_ms

    def save(self) -> None:
        """Write down how far the partition is clean; durable on return, on any thread."""
        id_ = self._partition.id
        rows = [(id_.topic, id_.number, self.clean_until)]
        write_checkpoint(self._partition.disk, self._path, rows)


def first_timestamp(segment: Segment) -> int:
    """The time of a segment's first batch; -1 if it has none."""
    if segment.first_timestamp_ms == NO_TIMESTAMP:
        for _, header in segment.scan(0):
            segment.first_timestamp_ms = header.max_timestamp
            break
    return segment.first_timestamp_ms


def roll_for_compaction(partition: Partition, now_ms: int) -> bool:
    """Close the active segment when its records must be compacted; whether that was done."""
    config = partition.config
    if not config.compacted or partition.failure is not None or not partition.active.size:
        return False
    first = first_timestamp(partition.active)
    if first < 0 or now_ms - first <= config.max_compaction_lag_ms:
        return False
    partition.roll()
    return True
