"""Ports for servers of tests that the system gives to nobody else, and that no two of them share.

A port that the system chose may be given to somebody else while its server is gone for a moment.
And a client that a test has left behind tries the port of its dead server again and again, so it
would meet whatever server of another test gets the same one. These ports are outside of what
systems hand out by themselves, and each is used once: they are counted up, by each worker of
pytest in a range of its own.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from typing import Final

_FIRST: Final = 15_000
_RANGES: Final = 5
_RANGE_PORTS: Final = 3_000
_WORKER_VARIABLE: Final = "PYTEST_XDIST_WORKER"

_LOCK: Final = threading.Lock()


def _numbers() -> Iterator[int]:
    chance = random.SystemRandom()
    worker = os.environ.get(_WORKER_VARIABLE, "").removeprefix("gw")
    number = int(worker) % _RANGES if worker.isdigit() else chance.randrange(_RANGES)
    first = _FIRST + number * _RANGE_PORTS
    # Another run may be under way on this machine: not both from the beginning.
    at = chance.randrange(_RANGE_PORTS)
    while True:
        yield first + at
        at = (at + 1) % _RANGE_PORTS


_PORTS: Final = _numbers()


def lasting_port(host: str = "127.0.0.1") -> int:
    """A port that is free, and stays so for its server; 0, for the system's choice, if none is."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(_RANGE_PORTS):
        with _LOCK:
            port = next(_PORTS)
        try:
            socket.create_server((host, port), family=family).close()
        except OSError:
            continue
        return port
    return 0
