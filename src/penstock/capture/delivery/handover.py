"""The place between reading and writing: items wait here, up to a bound.

One thread puts, one takes. When it is full, putting waits: that is how a slow log holds the reader
back (and never the database). Either side can end it; then the other is told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class HandoverClosedError(Exception):
    """The side that takes is gone."""


class Handover(Generic[T]):
    """A queue by weight. An item that is heavier than the bound goes through alone."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._items: list[T] = []
        self._weight = 0
        self._takes_wait = False
        self._puts_wait = 0
        self._lock = threading.Lock()
        self._filled = threading.Condition(self._lock)
        self._emptied = threading.Condition(self._lock)
        self._ended = False
        self._closed = False

    def put(self, item: T, weight: int = 1) -> None:
        """Add an item; waits while there is no room. HandoverClosedError if nobody takes."""
        with self._lock:
            while self._weight and self._weight + weight > self._limit and not self._closed:
                self._puts_wait += 1
                self._emptied.wait()
                self._puts_wait -= 1
            if self._closed:
                raise HandoverClosedError
            self._items.append(item)
            self._weight += weight
            if self._takes_wait:
                self._filled.notify()

    def take(self, timeout_s: float) -> list[T]:
        """All that is there; waits up to a time while there is nothing."""
        with self._lock:
            if not self._items and not self._ended and timeout_s > 0:
                until = self._clock() + timeout_s
                self._takes_wait = True
                while not self._items and not self._ended:
                    left_s = until - self._clock()
                    if left_s <= 0 or not self._filled.wait(left_s):
                        break
                self._takes_wait = False
            taken, self._items = self._items, []
            self._weight = 0
            if self._puts_wait:
                self._emptied.notify_all()
            return taken

    def end(self) -> None:
        """Nothing more will be put."""
        with self._lock:
            self._ended = True
            self._filled.notify_all()

    def close(self) -> None:
        """Nothing more will be taken."""
        with self._lock:
            self._closed = True
            self._items.clear()
            self._emptied.notify_all()

    @property
    def is_over(self) -> bool:
        """Nothing is there, and nothing will come."""
        with self._lock:
            return self._ended and not self._items
