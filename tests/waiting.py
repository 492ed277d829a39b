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


# Who looks must not take the processor from what is waited for: so much longer than a look takes
# is the pause after it, within limits.
PAUSE_PER_LOOK = 4
LONGEST_PAUSE_S = 0.5


def eventually(check: Callable[[], T], timeout_s: float = 60.0, poll_s: float = 0.02) -> T:
    """What `check` returns once it is true; AssertionError if it never gets there.

    It is asked every `poll_s`, less often if asking takes long, and without pause for zero.
    """
    deadline = monotonic() + timeout_s
    pause = threading.Event()
    while True:
        begun = monotonic()
        value = check()
        if value:
            return value
        now = monotonic()
        assert now < deadline, f"not true within {timeout_s:.0f} s: {value!r}"
        longer = min(PAUSE_PER_LOOK * (now - begun), LONGEST_PAUSE_S) if poll_s else 0.0
        pause.wait(max(poll_s, longer))


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
