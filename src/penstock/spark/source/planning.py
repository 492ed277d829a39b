"""How much to read in a micro-batch, and in how many tasks. Pure: no log, no Spark.

Theory: a micro-batch is a range of offsets per partition. A rate limit is shared in proportion to
what each partition has to offer, so that all are done at the same time; but each gets something,
so that a quiet partition is not starved by a busy one. A range is cut where the user asks for more
or smaller tasks; ranges with few records are put together, because a task costs as much time as
reading ten thousand records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from penstock.spark.source.options import Place, Positions

# Ranges are put together as long as the task has no more than so many offsets.
TOGETHER_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class Range:
    """Offsets of a partition, from `start` up to `end`, not included."""

    topic: str
    partition: int
    start: int
    end: int

    @property
    def place(self) -> Place:
        return self.topic, self.partition

    @property
    def size(self) -> int:
        return self.end - self.start


def limited(limit: int, begins: Mapping[Place, int], ends: Mapping[Place, int]) -> Positions:
    """Where to end so that at most `limit` offsets are read in all.

    Partitions that are not in `begins`, or have nothing to offer, keep their end.
    """
    backlog = {
        place: end - begins[place]
        for place, end in sorted(ends.items())
        if place in begins and end > begins[place]
    }
    total = sum(backlog.values())
    if total <= limit:
        return dict(ends)
    shares = _shares(limit, backlog, total, turn=sum(begins.values()))
    return {place: begins[place] + shares[place] if place in shares else end
            for place, end in ends.items()}  # fmt: skip


def _shares(limit: int, backlog: Mapping[Place, int], total: int, turn: int) -> dict[Place, int]:
    """One offset for everyone, or for as many as the limit allows; the rest by backlog."""
    places = list(backlog)
    if limit <= len(places):
        # As reading goes on the sum of offsets grows, and with it others have their turn.
        first = turn % len(places)
        chosen = {places[(first + step) % len(places)] for step in range(limit)}
        return {place: int(place in chosen) for place in places}
    rest, left = limit - len(places), total - len(places)
    shares = {place: 1 + (rest * (size - 1)) // left for place, size in backlog.items()}
    spare = limit - sum(shares.values())
    for place in sorted(places, key=lambda place: shares[place] - backlog[place]):
        if not spare:
            break
        more = min(spare, backlog[place] - shares[place], 1)
        shares[place] += more
        spare -= more
    return shares


def tasks(
    ranges: Iterable[Range], *, min_partitions: int | None = None, max_records: int | None = None
) -> list[tuple[Range, ...]]:
    """The ranges, cut and put together: what each task reads."""
    there = sorted((item for item in ranges if item.size > 0), key=lambda item: item.place)
    pieces = there
    if max_records is not None:
        pieces = [part for item in there for part in _cut(item, -(-item.size // max_records))]
    if min_partitions is not None and len(pieces) < min_partitions:
        pieces = _cut_into(pieces, min_partitions)
    most = TOGETHER_MAX if max_records is None else min(TOGETHER_MAX, max_records)
    return _together(pieces, most, min_partitions or 1)


def _cut_into(pieces: Sequence[Range], count: int) -> list[Range]:
    """About `count` ranges: the largest are cut, in proportion to their size."""
    total = sum(item.size for item in pieces)
    whole = {item for item in pieces if _parts(item.size, total, count) == 1}
    left = total - sum(item.size for item in whole)
    wanted = max(count - len(whole), 1)
    return [
        part
        for item in pieces
        for part in _cut(item, 1 if item in whole else _parts(item.size, left, wanted))
    ]


def _parts(size: int, total: int, count: int) -> int:
    return max(1, (2 * size * count + total) // (2 * total))


def _cut(item: Range, parts: int) -> list[Range]:
    """As equal as can be; fewer than asked for where there are fewer offsets."""
    parts = min(parts, item.size)
    edges = [item.start + item.size * number // parts for number in range(parts + 1)]
    return [Range(item.topic, item.partition, start, end) for start, end in pairwise(edges)]


def _together(pieces: Sequence[Range], most: int, at_least: int) -> list[tuple[Range, ...]]:
    """Neighbours in one task, as long as it stays small and there are tasks enough.

    Never two ranges of one partition: they were cut apart on purpose.
    """
    spare = len(pieces) - at_least
    grouped: list[list[Range]] = []
    size = 0
    for item in pieces:
        fits = (
            grouped
            and spare > 0
            and size + item.size <= most
            and grouped[-1][-1].place != item.place
        )
        if fits:
            grouped[-1].append(item)
            size += item.size
            spare -= 1
        else:
            grouped.append([item])
            size = item.size
    return [tuple(group) for group in grouped]
