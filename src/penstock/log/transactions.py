"""Transactions as the log of one partition sees them: what is open, what is stable, what is void.

A transaction is open in a partition from its first batch there to its marker. Readers of committed
records stop at the *last stable offset*: before the first record of any transaction that is open,
or whose marker they cannot see yet. Below it every transaction is decided, and readers are told
which of them were aborted, to pass over their records.

- Open transactions are part of the producers' state (`producers`), and so of its snapshots.
- `Ending` holds those whose markers are in the log but not visible.
- Aborted ones stand in the index of the segment that holds the marker (`txn_index`). An index that
  is missing or doubtful is made anew from the log and the producers' state at the segment's start.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import StorageError
from penstock.log.producers import (
    Ended,
    ProducerStates,
    load_snapshot,
    marker_at,
    replay_producers,
)
from penstock.log.segment import LOG_SUFFIX, Segment, open_segment
from penstock.log.txn_index import AbortedTransaction, TransactionIndex
from penstock.records.batch import BatchHeader


class Ending:
    """Transactions that have ended, by markers which readers cannot see yet."""

    __slots__ = ("_ended",)

    def __init__(self) -> None:
        # In the order of their markers.
        self._ended: list[Ended] = []

    def __bool__(self) -> bool:
        return bool(self._ended)

    def add(self, ended: Ended, visible: int) -> None:
        self._forget_visible(visible)
        self._ended.append(ended)

    def take_back(self, log_end: int) -> None:
        """Markers from there on were not written."""
        while self._ended and self._ended[-1].marker_offset >= log_end:
            self._ended.pop()

    def clear(self) -> None:
        self._ended = []

    def first_offset(self, visible: int) -> int:
        """The first offset of those whose markers are still not visible; `visible` if none."""
        self._forget_visible(visible)
        return min((item.first_offset for item in self._ended), default=visible)

    def _forget_visible(self, visible: int) -> None:
        ended, seen = self._ended, 0
        while seen < len(ended) and ended[seen].marker_offset < visible:
            seen += 1
        if seen:
            del ended[:seen]


def observe(segment: Segment, position: int, header: BatchHeader, states: ProducerStates) -> None:
    """Take a batch that is in the segment into the producers' state and the segment's index."""
    ended = states.observe(header, marker_at(segment, position, header))
    if ended is not None and not ended.commit:
        assert segment.aborted is not None
        segment.aborted.append(states.aborted(ended))


def aborted_index(segment: Segment) -> TransactionIndex:
    """The segment's index of aborted transactions, from memory, from disk or made anew."""
    segment.used = True
    if segment.aborted is None:
        segment.aborted = segment.stored_aborted()
    if segment.aborted is None:
        rebuild_aborted(segment)
    assert segment.aborted is not None
    return segment.aborted


def rebuild_aborted(segment: Segment) -> None:
    """The index of aborted transactions from the log; it stays in memory."""
    states = load_snapshot(segment.disk, segment.folder, segment.base_offset)
    if states is None:
        states = _replay_before(segment)
    segment.aborted = TransactionIndex()
    try:
        for position, header in segment.scan(0):
            observe(segment, position, header, states)
    except StorageError:
        # Half an index would let void records pass.
        segment.aborted = None
        raise


def _replay_before(segment: Segment) -> ProducerStates:
    """The producers at the segment's start, from the segments before it."""
    disk, folder = segment.disk, segment.folder
    stems = [n.removesuffix(LOG_SUFFIX) for n in disk.names(folder) if n.endswith(LOG_SUFFIX)]
    bases = sorted(int(stem) for stem in stems if stem.isdigit())
    before: list[Segment] = []
    try:
        before += [open_segment(disk, folder, b) for b in bases if b < segment.base_offset]
        return replay_producers(disk, folder, before)
    finally:
        for one in before:
            one.close()


def aborted_between(segments: Sequence[Segment], start: int, end: int) -> list[AbortedTransaction]:
    """The aborted transactions that reach into [start, end), of segments from that start on."""
    found: list[AbortedTransaction] = []
    for segment in segments:
        index = segment.aborted
        # Most segments have none, and know it.
        if index is not None and not index.entries:
            continue
        if aborted_index(segment).collect(start, end, found):
            break
    return found
