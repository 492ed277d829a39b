"""The gate before each micro-batch: closed, it lets the one inside end and no other begin."""

from __future__ import annotations

import threading


class GateClosedError(Exception):
    """Ends a query between two micro-batches."""


class Gate:
    """Lets one micro-batch at a time through, and none once it is closed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = False
        self._closed = False
        self.last_done = -1

    def enter(self) -> None:
        with self._changed:
            if self._closed:
                raise GateClosedError
            self._inside = True

    def leave(self, batch_id: int, *, done: bool) -> None:
        with self._changed:
            self._inside = False
            if done:
                self.last_done = batch_id
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Let none in any more, and wait for the one inside; False if it takes too long."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: not self._inside, timeout_s)

    @property
    def is_closed(self) -> bool:
        return self._closed
