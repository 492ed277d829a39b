"""Which source offset became which target offset, in runs, kept in a topic of the target.

A run is a stretch where both sides count without a gap: (source offset, target offset, length).
Each transaction writes its runs together with its records. Gaps come from compaction, from markers
and from aborted records, on either side; so there are about as many runs as transactions, and at
worst one per record. To translate offsets the topic is read once from its beginning; memory is
needed for the questions only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import orjson

from penstock.cli.migration.state import Place

# Runs in one record of the topic: a record stays well below what a broker takes.
RUNS_PER_RECORD: Final = 5_000


class Run(NamedTuple):
    """Offsets that follow each other without a gap on both sides."""

    source: int
    target: int
    length: int


def runs_of(pairs: Iterable[tuple[int, int]]) -> list[Run]:
    """(source, target) offsets in order, as runs."""
    runs: list[Run] = []
    for source, target in pairs:
        if runs:
            last = runs[-1]
            if source == last.source + last.length and target == last.target + last.length:
                runs[-1] = last._replace(length=last.length + 1)
                continue
        runs.append(Run(source, target, 1))
    return runs


def encode(place: Place, runs: list[Run]) -> Iterator[bytes]:
    """The values of the records that hold these runs."""
    for at in range(0, len(runs), RUNS_PER_RECORD):
        some = [tuple(run) for run in runs[at : at + RUNS_PER_RECORD]]
        yield orjson.dumps([place.topic, place.partition, some])


def decode(value: bytes) -> tuple[Place, list[Run]]:
    """A partition and its runs."""
    topic, partition, runs = orjson.loads(value)
    return Place(topic, partition), [Run(*run) for run in runs]


class Translator:
    """Answers where offsets of the source are in the target, as runs go by in order.

    The answer to an offset is the place of the first copied record at or behind it, so whoever
    goes on there reads exactly what it had not read. Without an answer every copied record lies
    before the offset: it is the end of the target's partition.
    """

    def __init__(self, questions: Iterable[tuple[Place, int]]) -> None:
        self._open: dict[Place, set[int]] = {}
        self.answers: dict[tuple[Place, int], int] = {}
        for place, offset in questions:
            self._open.setdefault(place, set()).add(offset)

    def saw(self, place: Place, runs: Iterable[Run]) -> None:
        """The next runs of a partition."""
        waiting = self._open.get(place)
        if not waiting:
            return
        for run in runs:
            found = {offset for offset in waiting if offset < run.source + run.length}
            for offset in found:
                self.answers[place, offset] = run.target + max(0, offset - run.source)
            waiting -= found
            if not waiting:
                return
