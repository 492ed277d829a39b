"""The process that Spark's Python workers are forked from: Spark's own, with acknowledgements sent.

Java sends a worker what to do, and then the rows to do it with. The second of two small packets
waits until the first is acknowledged (Nagle), and the worker's side puts that off for 40 ms, in the
hope of something to send along: so each task with few bytes of input, as all are that read the log,
stood still that long, which was half of its time. Here a worker is told to acknowledge at once, and
to send at once, whenever it begins to wait for a task.

Not in `penstock.spark`: that imports pyarrow, and nothing may start threads before the fork.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final

from pyspark import daemon

# Linux only; elsewhere the wait cannot be helped.
_AT_ONCE: Final = ("TCP_NODELAY", "TCP_QUICKACK")
_work: Final = daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """One task: the kernel takes back what was said about acknowledging once there is an answer."""
    hasten(sock)
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


daemon.worker = worker

if __name__ == "__main__":
    daemon.manager()
