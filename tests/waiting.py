"""Waiting on conditions, patiently: a loaded machine is slow, not wrong."""

from __future__ import annotations

import os
import re
import select
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


def read_until(descriptor: int, pattern: str, text: str = "", timeout_s: float = 60.0) -> str:
    """What a process has printed, `text` before it, once the pattern is in it."""
    # select() knows no descriptor above 1023, and a worker of the tests has many open.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    deadline = monotonic() + timeout_s
    while not re.search(pattern, text, re.DOTALL):
        ready = poll.poll(max(0, deadline - monotonic()) * 1000)
        data = os.read(descriptor, 65536) if ready else b""
        assert data, f"no {pattern!r} in {text!r}"
        text += data.decode()
    return text
