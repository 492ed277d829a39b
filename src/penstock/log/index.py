"""The two sparse indexes of a segment, in Kafka's format.

The *offset index* (`.index`, 8 bytes an entry) maps the last offset of a batch, relative to the
segment's base, to the position where that batch starts. The *time index* (`.timeindex`, 12
bytes) maps the largest timestamp seen so far to the last offset of the batch that holds it.
About one entry per `index.interval.bytes`; a lookup finds the floor and the caller scans on.

An index lives in memory while its segment is active and goes to disk when the segment is rolled
or closed. It is a cache: whatever is missing or doubtful is rebuilt from the log.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import Final

OFFSET_ENTRY_SIZE: Final = 8
TIME_ENTRY_SIZE: Final = 12
# Relative offsets and positions are signed 32-bit numbers on disk.
MAX_RELATIVE: Final = 0x7FFFFFFF

TIME_ENTRY: Final = struct.Struct(">qi")


class OffsetIndex:
    """Relative last offset of a batch → its position in the segment."""

    __slots__ = ("offsets", "positions")

    def __init__(self) -> None:
        self.offsets: array[int] = array("i")
        self.positions: array[int] = array("i")

    def append(self, relative_offset: int, position: int) -> None:
        self.offsets.append(relative_offset)
        self.positions.append(position)

    def floor_position(self, relative_offset: int) -> int:
        """Where to start scanning for the batch that holds the offset."""
        at = bisect_right(self.offsets, relative_offset) - 1
        return self.positions[at] if at >= 0 else 0

    def floor_of_position(self, position: int) -> int:
        """The start of the last indexed batch at or before `position`; 0 if there is none."""
        at = bisect_right(self.positions, position) - 1
        return self.positions[at] if at >= 0 else 0

    def ceiling_of_position(self, position: int) -> int | None:
        """The relative last offset of the first indexed batch at or after `position`."""
        at = bisect_left(self.positions, position)
        return self.offsets[at] if at < len(self.offsets) else None

    def to_bytes(self) -> bytes:
        flat = array("i", bytes(OFFSET_ENTRY_SIZE * len(self.offsets)))
        flat[0::2] = self.offsets
        flat[1::2] = self.positions
        if sys.byteorder == "little":
            flat.byteswap()
        return flat.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, segment_size: int) -> OffsetIndex | None:
        """The index in `data`; None if it cannot belong to a segment of that size."""
        if len(data) % OFFSET_ENTRY_SIZE:
            return None
        flat = array("i")
        flat.frombytes(data)
        if sys.byteorder == "little":
            flat.byteswap()
        index = cls()
        index.offsets, index.positions = flat[0::2], flat[1::2]
        if not index.offsets:
            return index
        rising = _rises(index.offsets) and _rises(index.positions)
        if not rising or index.positions[0] < 0 or index.positions[-1] >= segment_size:
            return None
        return index


class TimeIndex:
    """Largest timestamp so far → relative last offset of the batch that holds it."""

    __slots__ = ("offsets", "timestamps")

    def __init__(self) -> None:
        self.timestamps: array[int] = array("q")
        self.offsets: array[int] = array("i")

    def append(self, timestamp_ms: int, relative_offset: int) -> None:
        """Only what is later than every entry before is news."""
        if self.timestamps and timestamp_ms <= self.timestamps[-1]:
            return
        self.timestamps.append(timestamp_ms)
        self.offsets.append(relative_offset)

    def floor_offset(self, timestamp_ms: int) -> int:
        """All records at or before this relative offset are earlier than the timestamp."""
        at = bisect_left(self.timestamps, timestamp_ms) - 1
        return self.offsets[at] if at >= 0 else 0

    def to_bytes(self) -> bytes:
        pairs = zip(self.timestamps, self.offsets, strict=True)
        return b"".join(TIME_ENTRY.pack(timestamp, offset) for timestamp, offset in pairs)

    @classmethod
    def from_bytes(cls, data: bytes) -> TimeIndex | None:
        if len(data) % TIME_ENTRY_SIZE:
            return None
        index = cls()
        for timestamp, offset in TIME_ENTRY.iter_unpack(data):
            index.timestamps.append(timestamp)
            index.offsets.append(offset)
        return index if _rises(index.timestamps) else None


def _rises(values: array[int]) -> bool:
    return all(a < b for a, b in pairwise(values))
