"""How far a query is behind the log, from the progress that Spark reports.

Spark's own connector puts these figures into the progress itself; a source in Python cannot, but
the progress has both ends: what is there, and how far the query came.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FORMAT = "penstock"


@dataclass(frozen=True, slots=True)
class Lag:
    """Offsets between the ends of the partitions and where the query stands."""

    min_offsets: int
    max_offsets: int
    avg_offsets: float
    total_offsets: int
    partitions: Mapping[tuple[str, int], int]


def lag(progress: Any) -> Lag | None:
    """The lag of a query as of `query.lastProgress`; None before there is any, or of other sources.

    As the source saw it when it planned the micro-batch: what has arrived since is not in it.
    """
    behind: dict[tuple[str, int], int] = {}
    for source in (progress or {})["sources"] if progress else ():
        ends, latest = _offsets(source["endOffset"]), _offsets(source["latestOffset"])
        for place, end in latest.items():
            behind[place] = max(0, end - ends.get(place, 0))
    if not behind:
        return None
    counts = list(behind.values())
    return Lag(min(counts), max(counts), sum(counts) / len(counts), sum(counts), behind)


def _offsets(told: Any) -> dict[tuple[str, int], int]:
    if isinstance(told, str):
        try:
            told = json.loads(told)
        except ValueError:
            return {}
    if not isinstance(told, Mapping):
        return {}
    found: dict[tuple[str, int], int] = {}
    for topic, numbers in told.items():
        if not isinstance(numbers, Mapping):
            return {}
        for number, offset in numbers.items():
            if str(number).isdecimal() and isinstance(offset, int):
                found[str(topic), int(number)] = offset
    return found
