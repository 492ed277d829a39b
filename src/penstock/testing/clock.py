"""A clock that moves only when it is told to."""

from __future__ import annotations

from typing import Final

# A round number in November 2023: late enough to look like a time, the same on every run.
START_MS: Final = 1_700_000_000_000


class ManualClock:
    """Time for tests; give it wherever a `penstock.log.clock.Clock` is wanted."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self._now_ms = now_ms
        self._elapsed_ms = 0

    def now_ms(self) -> int:
        """Milliseconds since 1970, as record timestamps count."""
        return self._now_ms

    def elapsed_ms(self) -> int:
        """Milliseconds that have passed since the clock was made; never goes back."""
        return self._elapsed_ms

    def advance(self, step_ms: int) -> int:
        """Let time pass, or with a negative step go back as clocks of real machines do."""
        self._now_ms += step_ms
        self._elapsed_ms += max(step_ms, 0)
        return self._now_ms

    def set(self, now_ms: int) -> None:
        self._now_ms = now_ms
