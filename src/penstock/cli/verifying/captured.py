"""When the log has all that a captured database showed."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from threading import Event
from typing import Any, Final

from penstock.capture.delivery.config import CaptureConfig
from penstock.capture.delivery.control import state_of, status_of
from penstock.capture.delivery.state import DONE, State
from penstock.capture.source import Position as DatabasePosition
from penstock.cli.capture_view import is_running
from penstock.cli.verifying.report import VerifyError
from penstock.client.connection import Cluster

_POLL_S: Final = 0.1
# A capture that has just been started has this long to say so.
GRACE_S: Final = 5.0


class CaptureProgress:
    """How far the capture of a database is."""

    def __init__(self, cluster: Cluster, config: CaptureConfig, kind: str) -> None:
        self._cluster = cluster
        self._config = config
        self._kind = kind

    def check(self) -> None:
        """VerifyError if it has never run."""
        if self._status() is None:
            raise VerifyError(
                f"capture {self._config.name} has never run",
                advice=f"Run it: penstock capture run {self._config.name}",
            )

    def wait(self, position: DatabasePosition, tables: Collection[str], deadline: float) -> None:
        """Return when all that was committed before the position, of these tables, is written."""
        began = time.monotonic()
        pause = Event()
        while True:
            state = state_of(self._cluster, self._config.name)
            if state is not None and self._has(state, position, tables):
                return
            status = self._status()
            now = time.monotonic()
            if (status is None or not is_running(status)) and now - began > GRACE_S:
                raise VerifyError(
                    f"capture {self._config.name} does not run, and the log lacks changes that "
                    "the database has",
                    advice=f"Run it: penstock capture run {self._config.name}",
                )
            if now >= deadline:
                raise VerifyError(
                    f"capture {self._config.name} has not written in time what the database has; "
                    f"it is at {None if state is None else state.position}, wanted is {position}",
                    advice="Give it more time with --timeout; is the capture behind, or paused?",
                )
            pause.wait(_POLL_S)

    def _has(self, state: State, position: DatabasePosition, tables: Collection[str]) -> bool:
        if state.snapshot != DONE or state.position is None:
            return False
        if any(name not in state.tables for name in tables):
            return False
        if any(each.table in tables for each in state.queue):
            # Its rows are being read only now.
            return False
        return reached(self._kind, state.position, position)

    def _status(self) -> Any:
        return status_of(self._cluster, self._config.name)


def reached(kind: str, at: DatabasePosition, wanted: DatabasePosition) -> bool:
    """Whether a position of a database is that of another, or behind it."""
    identity = {"sqlite": "id", "postgresql": "system", "mysql": "server"}[kind]
    if at.get(identity) != wanted.get(identity):
        raise VerifyError(
            f"the capture is at {dict(at)}, the database at {dict(wanted)}: it is another database",
            advice="Was it recreated? `penstock capture snapshot --all` reads it again.",
        )
    return _order(kind, at) >= _order(kind, wanted)


def _order(kind: str, position: Mapping[str, Any]) -> tuple[int, int]:
    if kind == "sqlite":
        return int(position["seq"]), 0
    if kind == "postgresql":
        return int(position["lsn"]), 0
    # Files of a binlog are numbered: mysql-bin.000042
    return int(str(position["file"]).rpartition(".")[2]), int(position["pos"])
