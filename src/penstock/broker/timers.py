"""Deadlines, as data: what is due at a given time, and when something will be.

A coordinator notes its deadlines here under keys of its own choice, and asks what is due when it
is told that time has passed. Nothing here looks at a clock, so tests move time as they like.
Times are milliseconds of `Clock.elapsed_ms`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

# Entries of the heap that are no longer meant are swept out beyond this many of them.
_SWEEP_FROM = 1_000


class Timers(Generic[K]):
    """At most one deadline for each key."""

    def __init__(self, on_earlier: Callable[[], None] = lambda: None) -> None:
        """`on_earlier` is called when the first of all deadlines has come nearer."""
        self._due_ms: dict[K, int] = {}
        self._heap: list[tuple[int, int, K]] = []
        # Keys need not be comparable.
        self._count = 0
        self._on_earlier = on_earlier

    def __len__(self) -> int:
        return len(self._due_ms)

    def __contains__(self, key: K) -> bool:
        return key in self._due_ms

    def set(self, key: K, due_ms: int) -> None:
        """Note a deadline, in place of the one that the key may have."""
        if self._due_ms.get(key) == due_ms:
            # A second entry for it would never be swept out.
            return
        first_ms = self.next_ms
        self._due_ms[key] = due_ms
        self._count += 1
        heapq.heappush(self._heap, (due_ms, self._count, key))
        if len(self._heap) > _SWEEP_FROM + 2 * len(self._due_ms):
            self._sweep()
        if first_ms is None or due_ms < first_ms:
            self._on_earlier()

    def cancel(self, key: K) -> None:
        self._due_ms.pop(key, None)

    def clear(self) -> None:
        self._due_ms.clear()
        self._heap.clear()

    @property
    def next_ms(self) -> int | None:
        """When the first deadline is; None if there is none."""
        while self._heap:
            due_ms, _, key = self._heap[0]
            if self._due_ms.get(key) == due_ms:
                return due_ms
            heapq.heappop(self._heap)
        return None

    def due(self, elapsed_ms: int) -> list[K]:
        """The keys whose deadlines have come, earliest first; they are forgotten."""
        keys: list[K] = []
        while (first_ms := self.next_ms) is not None and first_ms <= elapsed_ms:
            _, _, key = heapq.heappop(self._heap)
            del self._due_ms[key]
            keys.append(key)
        return keys

    def _sweep(self) -> None:
        self._heap = [item for item in self._heap if self._due_ms.get(item[2]) == item[0]]
        heapq.heapify(self._heap)
