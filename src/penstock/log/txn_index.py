"""The aborted transactions of a segment, in Kafka's `.txnindex` format.

A transaction is listed in the segment that holds its abort marker, in the order of the markers.
34 bytes an entry: version, producer id, the offsets of its first record and of its marker, and
the *last stable offset* once it had ended: every transaction that is listed later begins there or
after, so a search for those that began before an offset knows where to stop.

Commits are not listed, and a segment without aborts has no file, or an empty one. The index is
derived: it follows from the log and from what was open at the segment's start (`transactions`).
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from itertools import pairwise
from typing import Final, NamedTuple

# A segment with so many is closed: of an active one all are in memory.
MAX_ENTRIES: Final = 100_000
ABORTED_ENTRY: Final = struct.Struct(">hqqqq")
ABORTED_ENTRY_SIZE: Final = ABORTED_ENTRY.size
_VERSION: Final = 0


class AbortedTransaction(NamedTuple):
    """From its first record to its marker; offsets."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class TransactionIndex:
    """The aborted transactions whose markers lie in one segment."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: list[AbortedTransaction] = []

    def append(self, entry: AbortedTransaction) -> None:
        self.entries.append(entry)

    def truncate(self, end: int) -> None:
        """Without the markers at or above the offset."""
        del self.entries[bisect_left(self.entries, end, key=_last_offset) :]

    def collect(self, start: int, end: int, found: list[AbortedTransaction]) -> bool:
        """Add those that reach into [start, end); whether later segments can hold no more."""
        entries = self.entries
        for at in range(bisect_left(entries, start, key=_last_offset), len(entries)):
            entry = entries[at]
            if entry.first_offset < end:
                found.append(entry)
            if entry.last_stable_offset >= end:
                return True
        return False

    def to_bytes(self) -> bytes:
        return b"".join([ABORTED_ENTRY.pack(_VERSION, *entry) for entry in self.entries])

    @classmethod
    def from_bytes(cls, data: bytes) -> TransactionIndex | None:
        """The index in `data`; None if it cannot be one."""
        if len(data) % ABORTED_ENTRY_SIZE:
            return None
        index = cls()
        for version, *fields in ABORTED_ENTRY.iter_unpack(data):
            entry = AbortedTransaction._make(fields)
            if version != _VERSION or not 0 <= entry.first_offset <= entry.last_offset:
                return None
            index.entries.append(entry)
        rising = all(a.last_offset < b.last_offset for a, b in pairwise(index.entries))
        return index if rising else None


def _last_offset(entry: AbortedTransaction) -> int:
    return entry.last_offset
