"""Records that wait to be written: by topic, in order, in runs that one write takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pyarrow import concat_arrays

Headers = Sequence[tuple[str, bytes | None]]


@dataclass(slots=True)
class Run:
    """Records of one topic in their order."""

    topic: str
    # Null keys do not go into a compacted topic.
    compacted: bool = True
    # Every record of it goes there; None: by key.
    partition: int | None = None
    keys: list[bytes | None] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    # Of the few that have any, by their place.
    headers: dict[int, Headers] = field(default_factory=dict)
    # Arrow columns of keys and values, instead of lists.
    columns: list[tuple[Any, Any]] = field(default_factory=list)

    def add(self, key: bytes | None, value: bytes | None, headers: Headers = ()) -> None:
        if headers:
            self.headers[len(self.keys)] = headers
        self.keys.append(key)
        self.values.append(value)

    def header_list(self) -> list[Headers] | None:
        """One item for each record, or None where no record has headers."""
        if not self.headers:
            return None
        return [self.headers.get(place, ()) for place in range(len(self.keys))]

    @property
    def count(self) -> int:
        return len(self.keys) + sum(len(keys) for keys, _ in self.columns)

    def whole(self) -> tuple[Any, Any]:
        """All keys and all values, in lists or in columns."""
        if not self.columns:
            return self.keys, self.values
        keys, values = zip(*self.columns, strict=True)
        return (*keys, *values) if len(keys) == 1 else (concat_arrays(keys), concat_arrays(values))

    @property
    def size_bytes(self) -> int:
        if self.columns:
            return sum(keys.nbytes + values.nbytes for keys, values in self.columns)
        return sum(map(len, filter(None, self.keys))) + sum(map(len, filter(None, self.values)))


class Batch:
    """Runs in the order in which they are to be written."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self._open: dict[str, Run] = {}

    def run(self, topic: str, *, compacted: bool = True) -> Run:
        """Where records of a topic go now."""
        found = self._open.get(topic)
        if found is None or found.columns:
            found = self._open[topic] = Run(topic, compacted)
            self.runs.append(found)
        return found

    def add_columns(self, topic: str, keys: Any, values: Any) -> None:
        """Records in Arrow columns, after what is there."""
        found = self._open.get(topic)
        if found is None or found.keys:
            found = self._open[topic] = Run(topic)
            self.runs.append(found)
        found.columns.append((keys, values))

    def everywhere(self, topic: str, partitions: int, key: bytes, value: bytes) -> None:
        """One record into each partition, after what is there and before what comes."""
        self._open.pop(topic, None)
        for number in range(partitions):
            run = Run(topic, partition=number)
            run.add(key, value)
            self.runs.append(run)

    @property
    def count(self) -> int:
        return sum(run.count for run in self.runs)

    @property
    def size_bytes(self) -> int:
        return sum(run.size_bytes for run in self.runs)

    def take(self) -> list[Run]:
        """The runs; the batch is empty afterwards."""
        taken, self.runs = self.runs, []
        self._open.clear()
        return taken
