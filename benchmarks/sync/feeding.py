"""A sink fed as `penstock run` feeds it, each of its commits noted with the time.

A commit is noted when the store's `apply` has returned: by the contract of sinks whoever reads the
store then sees it. The sink lives in a Spark task, so notes go through a file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from penstock.sinks.contract import Applied, Aside, Changes, Position, Sink
from penstock.sinks.spec import SinkSpec
from penstock.spark.flows.overseeing import Settings
from penstock.spark.sinking.folder import SinkFolder
from penstock.spark.sinking.manager import SinkManager

TIMEOUT_S: Final = 300.0
_STEP_S: Final = 0.05


class Commits:
    """When a store had reached which position, as a file says that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._at_us: list[int] = []
        self._positions: list[Position] = []

    def note(self, position: Position) -> None:
        line = orjson.dumps([time.time_ns() // 1000, position.text()]) + b"\n"
        with self._path.open("ab", buffering=0) as file:
            file.write(line)

    @property
    def at_us(self) -> list[int]:
        self._take_in()
        return self._at_us

    @property
    def positions(self) -> list[Position]:
        self._take_in()
        return self._positions

    def _take_in(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for line in whole.splitlines():
            at_us, text = orjson.loads(line)
            self._at_us.append(at_us)
            self._positions.append(Position.from_json(text))

    def records(self, number: int) -> int:
        """How many records lie before a commit."""
        return sum(self.positions[number].offsets.values())

    def visible_us(self, place: tuple[str, int], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """When each of these records of a partition was in the store."""
        ends = np.array([each.offsets.get(place, 0) for each in self.positions], np.int64)
        found = np.searchsorted(ends, offsets, side="right")
        return np.array(self.at_us, np.int64)[found]


@dataclass(frozen=True)
class Noted(SinkSpec):
    """A sink whose commits are noted."""

    notes: Path = Path()

    @cached_property
    def commits(self) -> Commits:
        return Commits(self.notes)

    def sink(self) -> Sink:
        made: Any = SinkSpec.sink(self)
        apply: Callable[[Changes, Aside], Applied] = made.apply
        notes = Commits(self.notes)

        def noted(changes: Changes, aside: Aside) -> Applied:
            done = apply(changes, aside)
            notes.note(changes.position)
            return done

        made.apply = noted
        sink: Sink = made
        return sink


@contextmanager
def fed(spark: Any, bootstrap: str, spec: Noted, folder: Path) -> Iterator[Callable[..., None]]:
    """Feed it; what is given looks after it until something is so."""
    manager = SinkManager(spark, [spec], SinkFolder(folder), Settings(bootstrap))
    manager.start()
    pause = threading.Event()

    def until(check: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not check():
            manager.step()
            if manager.failed:
                raise RuntimeError(f"{spec.name}: {manager.status()[0].error}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{spec.name}: not within {timeout_s:.0f} s")
            pause.wait(_STEP_S)

    try:
        yield until
    finally:
        manager.stop()
        deadline = time.monotonic() + TIMEOUT_S
        while not manager.step() and time.monotonic() < deadline:
            pause.wait(_STEP_S)
        manager.close()
