"""The terminal of the run, for the few lines that are shown while tests still run."""

from __future__ import annotations

import os

_kept: list[int] = []


def keep() -> None:
    """Remember where stderr goes, before pytest captures what tests write to it."""
    if not _kept:
        _kept.append(os.dup(2))


def show(line: str) -> None:
    """Show a line at once, from a worker too."""
    for number in _kept:
        os.write(number, f"{line}\n".encode())
