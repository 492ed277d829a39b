"""Which source offset became which target offset, in runs, kept in a topic of the target.

A run is a stretch where both sides count without a gap: (source offset, target offset, length).
Each transaction writes its runs together with its records; the first of a partition says that what
the topic held of it before is void: the target's topic was deleted and made anew.

Gaps come from compaction, from markers and from aborted records, on either side; so there are about
as many runs as transactions, and at worst one per record. To translate offsets the topic is read
once from its beginning; memory is needed for the questions only.

The topic also holds which offsets were about to be committed for which group, so that the next run
knows its own from those that the group has committed in the target itself. And, from the end of
each run, which topics it has moved: their ids in the source, and how far each partition has come.
So whoever keeps offsets of the source itself, a flow or a sink, can translate them when it is
started in the target: `find` and `Move.translated`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import orjson

from penstock.client.connection import Cluster
from penstock.client.metadata import Metadata

# Runs in one record of the topic: a record stays well below what a broker takes.
RUNS_PER_RECORD: Final = 5_000
# The key of the records that hold the offsets of a group; those with runs have none.
GROUP_KEY: Final = b"group"
# The same for which topics were moved.
TOPIC_KEY: Final = b"topic"
# What the topics of maps are called, before the id of the source's cluster.
PREFIX: Final = "__penstock-migrate-"


class Place(NamedTuple):
    """A partition, on either side."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


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


def encode(place: Place, runs: list[Run], *, anew: bool = False) -> Iterator[bytes]:
    """The values of the records that hold these runs; `anew` if they are a partition's first."""
    for at in range(0, len(runs), RUNS_PER_RECORD):
        some = [tuple(run) for run in runs[at : at + RUNS_PER_RECORD]]
        yield orjson.dumps([place.topic, place.partition, some, anew and at == 0])


def decode(value: bytes) -> tuple[Place, list[Run], bool]:
    """A partition, its runs, and whether they are its first."""
    topic, partition, runs, anew = orjson.loads(value)
    return Place(topic, partition), [Run(*run) for run in runs], anew


def encode_group(name: str, offsets: Mapping[Place, int]) -> Iterator[bytes]:
    """The values of the records that hold target offsets of a group."""
    rows = [(place.topic, place.partition, offset) for place, offset in offsets.items()]
    for at in range(0, len(rows), RUNS_PER_RECORD):
        yield orjson.dumps([name, rows[at : at + RUNS_PER_RECORD]])


def decode_group(value: bytes) -> tuple[str, dict[Place, int]]:
    """A group and its offsets in the target."""
    name, rows = orjson.loads(value)
    return name, {Place(topic, partition): offset for topic, partition, offset in rows}


class Translator:
    """Answers where offsets of the source are in the target, as runs go by in order.

    The answer to an offset is the place of the first copied record at or behind it, so whoever
    goes on there reads exactly what it had not read. Without an answer every copied record lies
    before the offset: it is what follows the last of them.
    """

    def __init__(self, questions: Iterable[tuple[Place, int]]) -> None:
        self._asked: dict[Place, set[int]] = {}
        self.answers: dict[tuple[Place, int], int] = {}
        for place, offset in questions:
            self._asked.setdefault(place, set()).add(offset)
        self._open = {place: set(offsets) for place, offsets in self._asked.items()}

    def saw(self, place: Place, runs: Iterable[Run], anew: bool = False) -> None:
        """The next runs of a partition, or the first ones."""
        if anew and place in self._asked:
            self._open[place] = set(self._asked[place])
            for offset in self._asked[place]:
                self.answers.pop((place, offset), None)
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


# ---- for who keeps offsets himself -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Move:
    """A topic that was moved here from another cluster."""

    topic: str
    # Its id in the source, and the source's own.
    source_id: str
    cluster: str
    # By partition: the next source offset that was not copied, and the last record's in the target.
    positions: Mapping[int, int]
    last: Mapping[int, int]

    def encode(self) -> bytes:
        """The value of the record that holds this."""
        parts = [[part, at, self.last.get(part, -1)] for part, at in sorted(self.positions.items())]
        return orjson.dumps([self.topic, self.source_id, self.cluster, parts])

    @classmethod
    def decode(cls, value: bytes) -> Move:
        topic, source_id, cluster, parts = orjson.loads(value)
        return cls(
            topic,
            source_id,
            cluster,
            {part: position for part, position, _ in parts},
            {part: last for part, _, last in parts},
        )

    def missing(self, offsets: Mapping[int, int]) -> dict[int, int]:
        """Partitions that were read further in the source than they were copied."""
        return {part: at for part, at in offsets.items() if at > self.positions.get(part, 0)}

    def translated(self, cluster: Cluster, offsets: Mapping[int, int]) -> dict[int, int]:
        """Source offsets as those of the target: whoever goes on there misses nothing and reads
        nothing twice."""
        places = {Place(self.topic, part): at for part, at in offsets.items()}
        translator = Translator(places.items())
        for key, value in _records(cluster, f"{PREFIX}{self.cluster}"):
            if key not in (GROUP_KEY, TOPIC_KEY):
                translator.saw(*decode(value))
        return {
            place.partition: translator.answers.get(
                (place, at), self.last.get(place.partition, -1) + 1
            )
            for place, at in places.items()
        }


def find(cluster: Cluster, ids: Mapping[str, str]) -> dict[str, Move]:
    """Which topics were moved here, by their ids in the cluster that they come from."""
    found: dict[str, Move] = {}
    for name in Metadata(cluster).topics(pattern=f"{PREFIX}.*"):
        for key, value in _records(cluster, name):
            if key == TOPIC_KEY:
                move = Move.decode(value)
                if ids.get(move.topic) == move.source_id:
                    found[move.topic] = move
    return found


def _records(cluster: Cluster, topic: str) -> Iterator[tuple[bytes | None, bytes]]:
    # It needs pyarrow, which the base install has not.
    from penstock.client.reading import read_batches

    for _, batch in read_batches(cluster, topic):
        keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
        for key, value in zip(keys, values, strict=True):
            if value is not None:
                yield key, value
