"""Verification: both sides are read again and compared with what was copied.

The target must hold exactly the records of the window, in their order, to the byte, and none behind
them up to its end: so a record that someone else has written is found. The source is held against
the same digest; if retention or compaction has removed records there since they were copied, that
is said, and what counts is that the target has what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from penstock.cli.migration.ends import End
from penstock.cli.migration.state import EMPTY_DIGEST, Progress, absorb
from penstock.client.migration_map import Place

Verdict = Literal["same", "source changed since", "different", "not compared"]

OK: Final = ("same", "source changed since", "not compared")
# Progress is told every so many records.
TELL_EVERY: Final = 500


@dataclass(frozen=True, slots=True)
class Seen:
    """What one side holds in the window."""

    count: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was copied to a partition, and what both sides hold of it now."""

    place: Place
    copied: Seen
    source: Seen | None
    target: Seen | None
    verdict: Verdict
    # Where the target has a record behind all that was copied, if that is why they differ.
    foreign: int | None = None


def compare(
    source: End,
    target: End,
    windows: Mapping[Place, Progress],
    may_shrink: Callable[[Place], bool],
    advance: Callable[[int], object],
) -> list[Comparison]:
    """Read the windows on both sides and judge them."""
    bounds = target.bounds(windows)
    there = _read(
        target,
        {
            p: (max(w.window_target, bounds[p].start), max(w.last_target + 1, bounds[p].end))
            for p, w in windows.items()
        },
        advance,
    )
    filled = {p: window for p, window in windows.items() if window.count or there[p].count}
    starts = {place: bounds.start for place, bounds in source.bounds(filled).items()}
    here = _read(
        source,
        {p: (max(w.window_start, starts[p]), w.position) for p, w in filled.items()},
        advance,
    )
    found = []
    for place, window in filled.items():
        copied = Seen(window.count, window.digest)
        lost_head = starts[place] > window.window_start
        verdict: Verdict = "different"
        if there[place] == copied and here[place] == copied:
            verdict = "same"
        elif there[place] == copied and (lost_head or may_shrink(place)):
            verdict = "source changed since"
        found.append(Comparison(place, copied, here[place], there[place], verdict))
    return found


def _read(
    end: End, ranges: Mapping[Place, tuple[int, int]], advance: Callable[[int], object]
) -> dict[Place, Seen]:
    counts = dict.fromkeys(ranges, 0)
    digests = dict.fromkeys(ranges, EMPTY_DIGEST)
    untold = 0
    for place, _, record in end.records(ranges):
        counts[place] += 1
        digests[place] = absorb(digests[place], record)
        untold += 1
        if untold == TELL_EVERY:
            advance(untold)
            untold = 0
    advance(untold)
    return {place: Seen(counts[place], digests[place]) for place in ranges}
