"""The records of share groups: in whose hands they are, as a pure state machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from penstock.broker.catalog import Topic
from penstock.broker.journal import Entry, Key
from penstock.broker.timers import Timers


class ShareCoordinator:
    """The queues of one broker."""

    kinds: Final = frozenset({"share"})

    def __init__(self) -> None:
        self._timers: Timers[tuple[str, ...]] = Timers()

    def replay(self, key: Key, value: Any) -> None:
        """Apply one entry."""

    def reset(self) -> None:
        """Be as new: everything is about to be replayed."""
        self._timers.clear()

    def begin(self, now_ms: int, elapsed_ms: int, *, lost: bool) -> Iterable[Entry]:
        """Everything is replayed: what follows from it."""
        return ()

    def topic_deleted(self, topic: Topic) -> Iterable[Entry]:
        return ()

    def tick(self, now_ms: int, elapsed_ms: int) -> Iterable[Entry]:
        return ()

    @property
    def next_due_ms(self) -> int | None:
        return self._timers.next_ms
