"""Ctrl-C and SIGTERM as a wish: the first asks to stop, the second stops at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.cli import output


@contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Set the event at the first signal; leave the process at the second."""

    def ask(number: int, _: object) -> None:
        if stop.is_set():
            output.say("stopping at once; what was begun is done again at the next start")
            os._exit(128 + number)
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
