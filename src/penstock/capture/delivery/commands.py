"""What signals change: the state of a capture, and its wish to end a session."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from penstock.capture.delivery import signals
from penstock.capture.delivery.config import CaptureConfig
from penstock.capture.delivery.incremental import Incremental
from penstock.capture.delivery.signals import Signal
from penstock.capture.delivery.state import WANTED, State
from penstock.capture.source import CaptureError

_LOGGER = logging.getLogger(__name__)

# Why a session is to end; "" while it goes on.
PAUSE, STOP, SNAPSHOT = "pause", "stop", "snapshot"
# A problem is told for so long: then those who asked have seen it.
_PROBLEM_SHOWN_MS = 60_000


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that was asked for and could not be done."""

    ts_ms: int
    text: str


class Commands:
    """Carries out signals on a state, which whoever owns it commits."""

    def __init__(
        self, config: CaptureConfig, state: State, incremental: Incremental, names: Iterable[str]
    ) -> None:
        self._config = config
        self._state = state
        self._incremental = incremental
        self._names = set(names)
        self._problem: Problem | None = None

    def obey(self, signal: Signal, wish: str) -> str:
        """Do what a signal says; the wish that there is afterwards."""
        state = self._state
        match signal.type:
            case signals.PAUSE:
                state.paused = True
                return wish if wish == STOP else PAUSE
            case signals.RESUME:
                state.paused = False
                return "" if wish == PAUSE else wish
            case signals.STOP:
                return STOP
            case signals.EXECUTE if signal.is_blocking:
                state.snapshot = WANTED
                return wish or SNAPSHOT
            case signals.EXECUTE:
                self._execute(signal)
            case signals.STOP_SNAPSHOT:
                named = self._matching(signal.tables)
                if named or not signal.tables:
                    self._incremental.drop(named)
            case signals.PAUSE_SNAPSHOT:
                state.queue_paused = True
            case signals.RESUME_SNAPSHOT:
                state.queue_paused = False
            case signals.LOG:
                _LOGGER.info("capture %s: %s", self._config.name, signal.data.get("message"))
        return wish

    def where(self, table: str) -> str:
        """The condition that the settings have for snapshots of a table."""
        for pattern, where in self._config.snapshot.where.items():
            if fnmatchcase(table, pattern):
                return where
        return ""

    def complain(self, text: str) -> None:
        _LOGGER.warning("capture %s: %s", self._config.name, text)
        self._problem = Problem(time.time_ns() // 1_000_000, text)

    def latest_problem(self) -> Problem | None:
        """What could not be done a moment ago."""
        problem = self._problem
        if problem is None or time.time_ns() // 1_000_000 - problem.ts_ms > _PROBLEM_SHOWN_MS:
            return None
        return problem

    def _execute(self, signal: Signal) -> None:
        for pattern in signal.tables:
            names = self._matching([pattern])
            if not names:
                self.complain(f"a snapshot of {pattern} was asked for, but there is no such table")
            for name in names:
                where = signal.where(pattern) or signal.where(name) or self.where(name)
                try:
                    self._incremental.add(f"{signal.id}-{name}", name, where)
                except CaptureError as error:
                    self.complain(str(error))

    def _matching(self, patterns: list[str]) -> list[str]:
        names = sorted(self._names.union(self._state.tables))
        return [name for name in names if any(fnmatchcase(name, item) for item in patterns)]
