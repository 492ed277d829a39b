"""The order of records by key: which may be delivered without overtaking an older one.

In a group that is ordered by key a record is *ready* when it is the oldest of its key that is
not finished; one without a key is always ready. The records are learnt in the order of the log,
each once: `known_to` is how far. So whatever is ready is so for all that came before it, and what
comes later waits behind it in the queue of its key.

Keys are held as they are, or as a digest where they are long. How many unfinished records are
known is bounded by `WINDOW`: behind a key that is that far behind, others wait as well.

Pure bookkeeping: states and locks are `partition`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Final

# How many unfinished records are looked at, at most, for some that are ready.
WINDOW: Final = 20_000
_LONG_KEY_BYTES: Final = 32


class KeyOrder:
    """The queues of the keys of one group's records of one partition."""

    def __init__(self, start: int) -> None:
        self.known_to = start
        self._queues: dict[bytes, deque[int]] = {}
        self._key_of: dict[int, bytes] = {}
        # Offsets that are ready, the lowest first; some may no longer be.
        self._ready: list[int] = []
        self._is_ready: set[int] = set()

    def next_offset(self, unfinished: int) -> int | None:
        """Where to go on reading: the oldest record that is ready, or what is not known yet."""
        while self._ready and self._ready[0] not in self._is_ready:
            heappop(self._ready)
        if self._ready:
            return self._ready[0]
        return self.known_to if unfinished < WINDOW else None

    def learn(self, records: Iterable[tuple[int, bytes | None, bool]], next_offset: int) -> None:
        """Know of the records up to `next_offset`: offset, key, whether it may be delivered."""
        for offset, key, free in records:
            if key is None:
                if free:
                    self._set_ready(offset)
                continue
            short = key if len(key) <= _LONG_KEY_BYTES else blake2b(key, digest_size=33).digest()
            self._key_of[offset] = short
            queue = self._queues.get(short)
            if queue is None:
                self._queues[short] = deque((offset,))
                if free:
                    self._set_ready(offset)
            else:
                queue.append(offset)
        self.known_to = max(self.known_to, next_offset)

    def take(self, first: int, last: int, limit: int) -> list[int]:
        """The oldest that are ready between two offsets; they are not any more."""
        taken: list[int] = []
        aside: list[int] = []
        while self._ready and self._ready[0] <= last and len(taken) < limit:
            offset = heappop(self._ready)
            if offset not in self._is_ready:
                continue
            if offset < first:
                aside.append(offset)
                continue
            self._is_ready.discard(offset)
            taken.append(offset)
        for offset in aside:
            heappush(self._ready, offset)
        return taken

    def put_back(self, first: int, last: int) -> None:
        """These were delivered and are free again."""
        for offset in range(first, min(last + 1, self.known_to)):
            key = self._key_of.get(offset)
            if key is None or self._queues[key][0] == offset:
                self._set_ready(offset)

    def finish(self, first: int, last: int) -> None:
        """These are finished: the next of their keys are ready."""
        for offset in range(first, min(last + 1, self.known_to)):
            self._is_ready.discard(offset)
            key = self._key_of.pop(offset, None)
            if key is None:
                continue
            queue = self._queues[key]
            if queue[0] != offset:
                # Skipped, or acknowledged from before the group was ordered.
                queue.remove(offset)
                continue
            queue.popleft()
            if queue:
                self._set_ready(queue[0])
            else:
                del self._queues[key]

    def _set_ready(self, offset: int) -> None:
        if offset not in self._is_ready:
            self._is_ready.add(offset)
            heappush(self._ready, offset)
