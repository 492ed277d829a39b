"""The process that Spark's Python workers are forked from: Spark's own, with two differences.

It acknowledges at once. Java sends a worker what to do, and then the rows to do it with. The second
of two small packets waits until the first is acknowledged (Nagle), and the worker's side puts that
off for 40 ms, in the hope of something to send along: so each task with few bytes of input, as all
are that read the log, stood still that long, which was half of its time. Here a worker is told to
acknowledge at once, and to send at once, whenever it begins to wait for a task.

It imports before it forks, on Linux, what tasks of flows and sinks use. Each worker for itself
would spend a second of processor time on that before its first task, and share no memory.

Not in `penstock.spark`: that imports pyarrow, and on other systems nothing may start threads before
the fork.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from contextlib import suppress
from importlib import import_module
from typing import Final

from pyspark import daemon

# Linux only; elsewhere the wait cannot be helped.
_AT_ONCE: Final = ("TCP_NODELAY", "TCP_QUICKACK")
# The last ones import all that they need in turn.
_PRELOADED: Final = (
    "pyspark.worker",
    "pyarrow",
    "pandas",
    "numba",
    "penstock.spark.source.stream",
    "penstock.spark.source.table",
    "penstock.spark.state.applying",
    "penstock.spark.sink.tasks",
    "penstock.spark.runtime.sink_loop",
)
_work: Final = daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """One task: the kernel takes back what was said about acknowledging once there is an answer."""
    hasten(sock)
    if "numpy" in sys.modules:
        # What was drawn from it would be the same in all that were forked from here.
        import_module("numpy.random").seed()
    return _work(sock, authenticated)


def hasten(sock: socket.socket) -> None:
    """Let nothing wait on a connection, as far as this side can tell."""
    if sock.family == getattr(socket, "AF_UNIX", None):
        return
    for name in _AT_ONCE:
        option = getattr(socket, name, None)
        if option is not None:
            # Where it is refused the worker only waits, as it would without this.
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, 1)


def preload() -> None:
    """Import what tasks need, for forked workers to share; leave out what is not installed."""
    # Its threads would not outlive the fork. A worker has one core's worth of work to do.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for name in _PRELOADED:
        with suppress(ImportError):
            import_module(name)
    # Garbage collection would write to every object, and memory that is written is not shared.
    gc.collect()
    gc.freeze()


daemon.worker = worker

if __name__ == "__main__":
    if sys.platform == "linux":
        preload()
    daemon.manager()
