"""Ctrl-C and SIGTERM as a wish: the first asks to stop, the second stops at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.cli import output


@contextmanager
def stopped_by_signals(
    stop: threading.Event, at_once: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Set the event at the first signal; leave the process at the second, after `at_once`."""

    def ask(number: int, _: object) -> None:
        if stop.is_set():
            output.say("stopping at once; what was begun is done again at the next start")
            try:
                at_once()
            finally:
                os._exit(128 + number)
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
