"""When what has come is committed: at once, or after a moment in which more comes.

What has come by the time a commit ends is in the next one, so a transaction has more in it the
faster changes come. Only where they come so fast that a moment brings more than a transaction
costs by itself it pays to wait for them; everywhere else it would delay what is there and save
next to nothing.
"""

from __future__ import annotations

from typing import Final

# A log transaction costs about as much as so many events.
WORTH_EVENTS: Final = 300


class Pace:
    """Knows how fast events come, by the last log transaction."""

    def __init__(self, linger_s: float, now: float) -> None:
        self._linger_s = linger_s
        self._committed_at = now
        self._events = 0
        self._is_fast = False

    def added(self, count: int) -> None:
        self._events += count

    def committed(self, now: float) -> None:
        passed_s = now - self._committed_at
        self._is_fast = self._events * self._linger_s > WORTH_EVENTS * passed_s
        self._committed_at = now
        self._events = 0

    def wait_s(self, since: float, now: float) -> float:
        """How long to wait for more, where the oldest event has waited since then; 0: commit."""
        return max(0.0, since + self._linger_s - now) if self._is_fast else 0.0
