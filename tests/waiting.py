"""Waiting on conditions, patiently: a loaded machine is slow, not wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

T = TypeVar("T")


def eventually(check: Callable[[], T], timeout_s: float = 60.0, poll_s: float = 0.02) -> T:
    """What `check` returns once it is true; AssertionError if it never gets there."""
    deadline = monotonic() + timeout_s
    pause = threading.Event()
    while True:
        value = check()
        if value:
            return value
        assert monotonic() < deadline, f"not true within {timeout_s:.0f} s: {value!r}"
        pause.wait(poll_s)
