"""Who may start now: queries that all start at once on few cores would all give results late.

A query that starts is planned, starts Python workers and runs its first micro-batch: seconds of
processor time. So a few start at a time, in the order in which they were declared, and the next one
when another has done its first micro-batch. One that has nothing to do, or cannot begin, holds
nobody up for long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

# How long a query is waited for: it may have much to read, or a server may not answer it.
MOST_S: Final = 8.0
_STEP_S: Final = 0.1


def turns_on(spark: SparkSession) -> int:
    """How many may start at once on a session: as many as it has cores for."""
    return max(2, int(spark.sparkContext.defaultParallelism))


def is_idle(query: StreamingQuery) -> bool:
    """Whether a query has nothing to do now. So it counts if it cannot be asked any more."""
    try:
        return str(query.status["message"]).startswith("Waiting")
    except Exception:
        return True


class NotWantedError(PenstockError):
    """A query was stopped before it was its turn."""


class Turns:
    """The order of queries that want to start, of which so many may do it at once."""

    def __init__(self, at_once: int, most_s: float = MOST_S) -> None:
        assert at_once > 0
        self._changed = threading.Condition()
        self._at_once = at_once
        self.most_s = most_s
        self._waiting: list[Turn] = []
        # Each with when it has begun.
        self._starting: dict[Turn, float] = {}
        self._closed = False

    def asked(self) -> Turn:
        """A turn after all that were asked for before."""
        turn = Turn(self)
        with self._changed:
            self._waiting.append(turn)
        return turn

    def _wait(self, turn: Turn, is_wanted: Callable[[], bool]) -> None:
        with self._changed:
            while self._waiting[0] is not turn or not self._has_place():
                if self._closed or not is_wanted():
                    self._waiting.remove(turn)
                    self._changed.notify_all()
                    raise NotWantedError("it was stopped before it had begun")
                self._changed.wait(_STEP_S)
            self._waiting.remove(turn)
            self._starting[turn] = time.monotonic()
            self._changed.notify_all()

    def _has_place(self) -> bool:
        for turn in [each for each in self._starting if self._is_old(each)]:
            del self._starting[turn]
        return len(self._starting) < self._at_once

    def _is_old(self, turn: Turn) -> bool:
        since = self._starting.get(turn, float("-inf"))
        return time.monotonic() - since >= self.most_s

    def _end(self, turn: Turn) -> None:
        with self._changed:
            self._starting.pop(turn, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody starts any more: whoever waits gets NotWantedError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Turn:
    """The turn of one query."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def wait(self, is_wanted: Callable[[], bool]) -> None:
        """Until it has come; NotWantedError if it is not wanted any more before that."""
        self._turns._wait(self, is_wanted)

    def is_over(self, has_begun: Callable[[], bool]) -> bool:
        """Let the next one start, if this one has begun, or was waited for long enough."""
        over = self._turns._is_old(self) or has_begun()
        if over:
            self.end()
        return over

    def end(self) -> None:
        """Let the next one start, whatever has become of this one."""
        self._turns._end(self)
