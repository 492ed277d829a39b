"""Watches a broker in this process while it is mistreated: escaped exceptions, memory, leftovers.

And the witness: a well-behaved client that writes and reads all the while, and must never notice.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import psutil

from penstock.broker.server import Broker as Server
from penstock.testing.broker import Broker
from penstock.testing.history import History, Place, Read
from tests.broker import requests as rq
from tests.broker.disks import temporary_files_in_memory
from tests.broker.raw import RawClient

_PATIENCE_S: Final = 60.0


@contextmanager
def quick_broker(**settings: Any) -> Iterator[Broker]:
    """A broker that waits for no disk: what is tested with it is not durability."""
    with temporary_files_in_memory(), Broker(**settings) as broker:
        yield broker


def eventually(condition: Callable[[], bool], what: str, patience_s: float = _PATIENCE_S) -> None:
    """Wait until the condition holds."""
    tick = threading.Event()
    for _ in range(int(patience_s * 200)):
        if condition():
            return
        tick.wait(0.005)
    raise AssertionError(f"still not so after {patience_s:.0f} s: {what}")


class _Errors(logging.Handler):
    """Everything that was logged as an error or worse."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        trace = (
            f"\n{logging.Formatter().formatException(record.exc_info)}" if record.exc_info else ""
        )
        self.lines.append(f"{record.name}: {record.getMessage()}{trace}")


@contextmanager
def no_errors(broker: Broker) -> Iterator[list[str]]:
    """Fails if the broker logs an error, or an exception escapes to its event loop."""
    errors = _Errors()

    def escaped(_: Any, context: dict[str, Any]) -> None:
        errors.lines.append(f"escaped to the loop: {context}")

    root = logging.getLogger()
    root.addHandler(errors)
    broker.call(lambda server: server.loop.set_exception_handler(escaped))
    try:
        yield errors.lines
    finally:
        root.removeHandler(errors)
    # A task that failed and was let go tells of it when it is collected.
    gc.collect()
    assert not errors.lines, "\n".join(errors.lines[:20])


def leftovers(server: Server) -> dict[str, int]:
    """What clients that are gone have left behind in the broker; call it on the broker's loop."""
    found = {
        "connections": len(server.connections),
        "waiting reads": len(server.read_waiters._waiting),
        "waiting writes": len(server.sync_waiters._waiting),
        "tasks": len(server._tasks),
        "buffer bytes": server.config.limits.max_buffered_bytes - server.buffer_pool.left_bytes,
        "unwritten requests": len(server.round.writes) + len(server.round.unwritten),
    }
    return {name: count for name, count in found.items() if count}


def wait_for_quiet(broker: Broker) -> None:
    """Wait until nothing is left of any client."""
    eventually(lambda: not broker.call(leftovers), f"quiet; there is {broker.call(leftovers)}")


def memory_bytes() -> int:
    """What this process holds."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


class Witness:
    """Writes to a topic of its own and reads it back, on a thread, until it is told to stop."""

    def __init__(self, broker: Broker, topic: str = "witness") -> None:
        self._bootstrap = broker.bootstrap
        self._place = Place(topic, 0)
        self._history = History()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="witness")
        self._failure: BaseException | None = None
        self.rounds = 0
        with RawClient(self._bootstrap) as client:
            (made,) = client.call(rq.create(topic, segment_bytes="65536")).topics
            assert not made.error_code, made

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            with RawClient(self._bootstrap, client_id="witness") as client:
                next_offset = 0
                # In no hurry: the others shall have the machine.
                while not self._stop.wait(0.02) or not self.rounds:
                    next_offset = self._round(client, next_offset)
                    self.rounds += 1
        except BaseException as error:
            self._failure = error

    def _round(self, client: RawClient, next_offset: int) -> int:
        topic, history = self._place.topic, self._history
        values = [b"witness %d.%d" % (self.rounds, at) for at in range(5)]
        for value in values:
            history.sending("witness", self._place, None, value)
        answer = rq.one(client.call(rq.produce(topic, rq.batch(*values)), 9))
        assert not answer.error_code, answer
        for at, value in enumerate(values):
            history.acknowledged(self._place, answer.base_offset + at, None, value)
        end = history.end(self._place)
        assert end == next_offset + len(values)
        fetched = rq.one(
            client.call(rq.fetch(topic, 0 if self.rounds % 50 == 0 else next_offset), 11)
        )
        records = rq.records_of(fetched.records)
        if self.rounds % 50 == 0:
            while records[-1].offset < end - 1:
                more = rq.one(client.call(rq.fetch(topic, records[-1].offset + 1), 11))
                records += rq.records_of(more.records)
            history.verify(self._place, [Read(r.offset, r.key, r.value) for r in records], end=end)
        else:
            assert [record.value for record in records] == values
        return end
