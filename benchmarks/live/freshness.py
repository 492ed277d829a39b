"""How old records are when the micro-batch that holds them is committed.

Measured from the outside, the same way whatever runs the micro-batches: the checkpoint of a flow
says up to where each of them reads (`offsets/BATCH`) and when it was done (`commits/BATCH`), and
the log says when each record was appended to its topic.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import orjson
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

Place = tuple[str, int]
Ends = dict[Place, int]
_STEP_S: Final = 0.5
_AT_ONCE: Final = 1_000
_FILES_LOOKED_AT: Final = 200


class Appended:
    """When the records of some topics were appended, by their offsets; read by a thread."""

    def __init__(self, bootstrap: str, topics: Iterable[str]) -> None:
        self._topics = sorted(topics)
        self._times: dict[Place, list[tuple[int, float]]] = defaultdict(list)
        self._stop = threading.Event()
        settings = {"bootstrap.servers": bootstrap, "group.id": "bench-live",
                    "enable.auto.commit": False}  # fmt: skip
        self._consumer = Consumer(settings)
        self._thread = threading.Thread(target=self._read, daemon=True)

    def start(self) -> None:
        known = self._consumer.list_topics(timeout=30).topics
        self._consumer.assign([
            TopicPartition(name, number, OFFSET_BEGINNING)
            for name in self._topics for number in known[name].partitions
        ])  # fmt: skip
        self._thread.start()

    def _read(self) -> None:
        while not self._stop.is_set():
            message: Any
            for message in self._consumer.consume(_AT_ONCE, timeout=0.2):
                if message.error() is None:
                    place = (message.topic(), message.partition())
                    self._times[place].append((message.offset(), message.timestamp()[1] / 1000))

    def between(self, place: Place, start: int, end: int) -> list[float]:
        """The times of the records from one offset to another."""
        times = self._times[place]
        first, last = bisect_left(times, (start, 0.0)), bisect_left(times, (end, 0.0))
        return [at for _, at in times[first:last]]

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._consumer.close()


class Commits:
    """The micro-batches of all flows below a folder, noted down while they run by a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ends: dict[Path, dict[int, Ends]] = defaultdict(dict)
        self._done: dict[Path, dict[int, float]] = defaultdict(dict)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_STEP_S):
            self.look()

    def look(self) -> None:
        """Take in what is new; old files are removed after a hundred micro-batches."""
        for commits in self._folder.glob("**/commits"):
            offsets = commits.parent / "offsets"
            for kind, known in ((offsets, self._ends), (commits, self._done)):
                names = (each.name for each in kind.iterdir() if each.name.isdecimal())
                numbers = sorted(map(int, names))[-_FILES_LOOKED_AT:]
                for number in numbers:
                    if number not in known[commits.parent]:
                        self._take(kind / str(number), number, known)

    def _take(self, file: Path, number: int, known: Any) -> None:
        try:
            if known is self._done:
                known[file.parent.parent][number] = file.stat().st_mtime
            else:
                known[file.parent.parent][number] = _ends(file.read_bytes())
        except (OSError, orjson.JSONDecodeError):
            # It was just removed, or is not whole yet: the next look finds what there is.
            return

    def ages(self, appended: Appended, begin: float, end: float) -> dict[str, list[float]]:
        """By flow, the ages in seconds of the records that were committed in a span of time."""
        found: dict[str, list[float]] = {}
        for folder, done in list(self._done.items()):
            ends = self._ends[folder]
            name = folder.relative_to(self._folder).parts[0]
            ages = found.setdefault(name, [])
            for number, at in done.items():
                if begin <= at <= end and number in ends and number - 1 in ends:
                    ages += _ages(ends[number - 1], ends[number], at, appended)
        return found

    def batches(self, begin: float, end: float) -> int:
        """How many micro-batches were committed in a span of time."""
        return sum(begin <= at <= end for done in self._done.values() for at in done.values())


def _ages(before: Mapping[Place, int], ends: Ends, at: float, appended: Appended) -> list[float]:
    return [
        max(0.0, at - time)
        for place, last in ends.items()
        for time in appended.between(place, before.get(place, 0), last)
    ]


def _ends(text: bytes) -> Ends:
    """The offsets of all sources of a micro-batch; the lines after the format and Spark's words."""
    found: Ends = {}
    for line in text.splitlines()[2:]:
        told = orjson.loads(line)
        for topic, parts in told.items() if isinstance(told, dict) else ():
            for number, offset in parts.items():
                place = (topic, int(number))
                found[place] = max(found.get(place, 0), int(offset))
    return found


def percentile(values: list[float], share: float) -> float:
    """The value that so large a share of all is not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
