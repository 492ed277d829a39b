"""The shapes of windows: which windows a pane belongs to.

A pane is a span of time that lies in the same windows as a whole, or, for sessions, one so short
that all events in it are in the same session. Events are aggregated by pane, in Spark, and windows
are put together from panes: an event is counted once however many windows it is in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.spark.windows.grouping import Bools, Ints


@dataclass(frozen=True)
class Panes:
    """The panes at hand: a number for the key of each, its start, its first and last event."""

    keys: Ints
    starts: Ints
    firsts: Ints
    lasts: Ints


@dataclass(frozen=True)
class Placed:
    """For each pane and window that it is in: the row of the pane, and the window."""

    rows: Ints
    starts: Ints
    ends: Ints


class Shape(Protocol):
    """How time is cut into windows."""

    @property
    def pane_us(self) -> int: ...

    def placed(self, panes: Panes) -> Placed:
        """The windows of all panes."""
        ...

    def done(self, panes: Panes, watermark_us: int) -> Bools:
        """Which panes are in no window that ends after the watermark."""
        ...

    def reached(self, panes: Panes, before_us: int, upto_us: int) -> Bools:
        """Which panes are in windows that end after one time and not after another, or may be."""
        ...


@dataclass(frozen=True)
class Hops:
    """Windows of a size, one every so often; tumbling if both are the same."""

    size_us: int
    every_us: int

    @property
    def pane_us(self) -> int:
        return math.gcd(self.size_us, self.every_us)

    def _spread(self, starts: Ints) -> tuple[Ints, Ints]:
        """The first window of each pane, and the number of windows."""
        first = -((self.size_us - self.pane_us - starts) // self.every_us) * self.every_us
        count = np.maximum((starts // self.every_us) - (first // self.every_us) + 1, 0)
        return first, count

    def placed(self, panes: Panes) -> Placed:
        first, count = self._spread(panes.starts)
        rows = np.repeat(np.arange(len(count)), count)
        turn = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
        starts = first[rows] + turn * self.every_us
        return Placed(rows, starts, starts + self.size_us)

    def done(self, panes: Panes, watermark_us: int) -> Bools:
        last_end = panes.starts // self.every_us * self.every_us + self.size_us
        return np.asarray(last_end <= watermark_us)

    def reached(self, panes: Panes, before_us: int, upto_us: int) -> Bools:
        first, _ = self._spread(panes.starts)
        return np.asarray((first + self.size_us <= upto_us) & ~self.done(panes, before_us))

    def __str__(self) -> str:
        return f"windows of {self.size_us} us every {self.every_us} us"


@dataclass(frozen=True)
class Sessions:
    """Windows that end when nothing has happened for a while."""

    gap_us: int

    @property
    def pane_us(self) -> int:
        # Two events of a pane are less than the gap apart, so in the same session.
        return self.gap_us

    def placed(self, panes: Panes) -> Placed:
        order = np.lexsort((panes.firsts, panes.keys))
        keys, firsts, lasts = panes.keys[order], panes.firsts[order], panes.lasts[order]
        # Panes of a key do not overlap: the last event so far is that of the pane before.
        begins = np.ones(len(order), dtype=np.bool_)
        begins[1:] = (keys[1:] != keys[:-1]) | (firsts[1:] - lasts[:-1] >= self.gap_us)
        session = np.cumsum(begins) - 1
        starts = firsts[begins]
        stops = lasts[np.append(np.flatnonzero(begins)[1:], len(order)) - 1] + self.gap_us
        return Placed(order, starts[session], stops[session])

    def done(self, panes: Panes, watermark_us: int) -> Bools:
        placed = self.placed(panes)
        found = np.zeros(len(panes.keys), dtype=np.bool_)
        found[placed.rows] = placed.ends <= watermark_us
        return found

    def reached(self, panes: Panes, before_us: int, upto_us: int) -> Bools:
        del before_us, upto_us
        return np.ones(len(panes.keys), dtype=np.bool_)

    def __str__(self) -> str:
        return f"sessions with a gap of {self.gap_us} us"
