"""Numbers that the broker counts as it works, for its metrics.

Counting must not be felt. On the hot path there is one addition for each network read and one for
each frame; requests of the ordinary kind add one to a table, and errors, which are rare, another.
What can be told by looking (connections, sizes, offsets) is not counted at all.

Everything here is changed on the event loop, except a histogram that says so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, Self

# From a tenth of a millisecond to ten seconds.
SECONDS: Final = (
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip


class Traffic:
    """What came and went over all connections."""

    __slots__ = (
        "bytes_in", "bytes_out", "connections", "errors", "frames", "ordinary", "refused",
        "requests",
    )  # fmt: skip

    def __init__(self) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        # All requests, and those that went the ordinary way. The others are produce requests
        # that were recognised by their bytes.
        self.frames = 0
        self.ordinary = 0
        # Of the ordinary ones, by API key.
        self.requests: defaultdict[int, int] = defaultdict(int)
        # By API key and error code.
        self.errors: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.connections = 0
        self.refused = 0

    def count(self, api_key: int) -> None:
        """A request that went the ordinary way."""
        self.ordinary += 1
        self.requests[api_key] += 1

    @property
    def recognised(self) -> int:
        return max(0, self.frames - self.ordinary)


class Histogram:
    """How many observations fell below each bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        # One more for what is above the last bound.
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    @classmethod
    def of_seconds(cls) -> Self:
        return cls(SECONDS)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
