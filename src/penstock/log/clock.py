"""Time as the engine sees it: passed in, so that tests can move it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What time it is."""

    def now_ms(self) -> int:
        """Milliseconds since 1970, as record timestamps count."""
        ...

    def elapsed_ms(self) -> int:
        """Milliseconds since some moment; never goes back, so that time-outs can trust it."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        return int(time.time() * 1000)

    def elapsed_ms(self) -> int:
        return int(time.monotonic() * 1000)
