"""Waiting for what a broker in this process will do, by looking and never by sleeping."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from penstock.broker.server import Broker as Server
from penstock.testing.broker import Broker

TIMEOUT_S = 60.0
_POLL_S = 0.002


def wait_until(broker: Broker, condition: Callable[[Server], Any]) -> None:
    """Until the condition holds on the broker's own thread."""
    deadline = monotonic() + TIMEOUT_S
    pause = threading.Event()
    while not broker.call(condition):
        assert monotonic() < deadline, "it did not happen in time"
        pause.wait(_POLL_S)


def waiting_fetches(server: Server) -> int:
    """How many fetches wait for records."""
    readers = server.read_waiters._waiting.values()
    return len({reader for partition in readers for reader in partition})


def wait_for_fetches(broker: Broker, count: int) -> None:
    wait_until(broker, lambda server: waiting_fetches(server) == count)
