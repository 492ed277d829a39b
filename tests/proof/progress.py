"""How a long test says that it is alive: on the terminal at once, and in its captured output."""

from __future__ import annotations

import time

from tests.harness import terminal


def say(text: str, begun: float) -> None:
    """A line with the time since the test began."""
    seconds = int(time.monotonic() - begun)
    line = f"[{seconds // 60:3d}:{seconds % 60:02d}] {text}"
    print(line, flush=True)
    terminal.show(line)
