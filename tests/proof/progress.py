"""How a long test tells that it is alive. Shown because `make proof` runs pytest with -s."""

from __future__ import annotations

import time


def say(text: str, begun: float) -> None:
    """A line with the time since the test began."""
    seconds = int(time.monotonic() - begun)
    print(f"[{seconds // 60:3d}:{seconds % 60:02d}] {text}", flush=True)
