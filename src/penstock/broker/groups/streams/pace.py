"""When a streams group may get its next target.

A group waits a while for more members after its first, and a while after each target before the
next, both as its settings say. And however those are set, it spends no more than a part of the
event loop's time on targets: one that took long is followed by a pause of a multiple of that.
"""

from __future__ import annotations

from typing import Final

from penstock.broker.groups.streams.internal_topics import Problem, Status

# A pause is so many times as long as what came before it has taken.
_REST: Final = 10
# What takes less is not worth a pause.
_NEGLIGIBLE_S: Final = 0.01

_INITIAL_DELAY: Final = Problem(
    Status.ASSIGNMENT_DELAYED, "Assignment delayed due to the configured initial rebalance delay."
)
_INTERVAL_DELAY: Final = Problem(
    Status.ASSIGNMENT_DELAYED, "Assignment delayed due to the configured assignment interval."
)


class Pace:
    """The pauses of one group."""

    def __init__(self) -> None:
        self.first_ms = 0
        self._next_ms = 0

    def begin(self, elapsed_ms: int, delay_ms: int) -> None:
        """The first member is there."""
        self.first_ms = elapsed_ms + delay_ms

    def delay(self, elapsed_ms: int) -> Problem | None:
        """Why there is no target yet."""
        if elapsed_ms < self.first_ms:
            return _INITIAL_DELAY
        return _INTERVAL_DELAY if elapsed_ms < self._next_ms else None

    def rest(self, elapsed_ms: int, interval_ms: int, took_s: float) -> None:
        """There is a target, and this is what it took of the processor's time."""
        pause_ms = round(took_s * 1000 * _REST) if took_s >= _NEGLIGIBLE_S else 0
        self._next_ms = elapsed_ms + max(interval_ms, pause_ms)
