"""What a resident Spark task does: runs sinks as the driver says, until the driver hangs up.

The task connects to the driver and then gets commands and gives reports, a JSON object each:

    driver → task   {"do": "start", "run": 7, "sink": "orders", "start": {...}}, and "stop",
                    "switch" and "close" with the number of a run
    task → driver   {"hello": HOST, "pid": 4711}, {"run": 7, "report": {...}}, and every two seconds
                    {"alive": {"7": 0.1}}, how long ago each loop came by

What stores the sinks have, and their passwords, the task knows from its Spark closure: none of it
goes over this connection.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Client, Connection
from typing import Any, Final

import orjson

from penstock.sinks.contract import Position
from penstock.sinks.spec import SinkSpec
from penstock.spark.flows.progress import Progress
from penstock.spark.flows.supervisor import Failure
from penstock.spark.runtime.sink_loop import LogAddress, Report, SinkLoop, Start

log = logging.getLogger(__name__)

ALIVE_S: Final = 2.0
# How long a transaction may take to end once the driver is gone, or wants the task to end.
LEAVE_S: Final = 5.0


@dataclass(frozen=True)
class Assignment:
    """What a task is told by its closure."""

    host: int
    address: tuple[str, int]
    # Whoever knows it belongs to the driver's session.
    key: bytes = field(repr=False)
    log_address: LogAddress = field(repr=False)
    specs: Mapping[str, SinkSpec] = field(repr=False)


def main(assignment: Assignment, _: Iterable[Any] = ()) -> None:
    """A resident task, to the end of its session."""
    with Client(assignment.address, authkey=assignment.key) as connection:
        send(connection, {"hello": assignment.host, "pid": os.getpid()})
        if not serve(connection, assignment.specs, assignment.log_address):
            # A store holds a loop back. The worker must not be used again while it does.
            os._exit(1)


def serve(
    connection: Connection[Any, Any], specs: Mapping[str, SinkSpec], log_address: LogAddress
) -> bool:
    """Do what the driver says until it hangs up; whether all loops have ended by then."""
    task = _Task(connection, specs, log_address)
    try:
        task.obey()
    finally:
        ended = task.leave()
    return ended


def send(connection: Connection[Any, Any], message: Mapping[str, Any]) -> None:
    """A message to the other side."""
    connection.send_bytes(orjson.dumps(message))


class _Task:
    """The loops of one task."""

    def __init__(
        self,
        connection: Connection[Any, Any],
        specs: Mapping[str, SinkSpec],
        log_address: LogAddress,
    ) -> None:
        self._connection = connection
        self._specs = specs
        self._log_address = log_address
        self._sending = threading.Lock()
        self._loops: dict[int, SinkLoop] = {}
        self._threads: dict[int, threading.Thread] = {}

    def obey(self) -> None:
        """The commands, one after the other."""
        told_s = 0.0
        while True:
            try:
                if self._connection.poll(ALIVE_S):
                    self._do(orjson.loads(self._connection.recv_bytes()))
                if time.monotonic() - told_s >= ALIVE_S:
                    told_s = time.monotonic()
                    seen = {str(run): told_s - loop.seen_s for run, loop in self._loops.items()}
                    self._send({"alive": seen})
            except (EOFError, OSError):
                return

    def leave(self) -> bool:
        """End all loops; whether that was done in time."""
        for loop in self._loops.values():
            loop.stop()
        deadline = time.monotonic() + LEAVE_S
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads.values()):
            return False
        for loop in self._loops.values():
            loop.close()
        return True

    def _do(self, message: Mapping[str, Any]) -> None:
        what, run = message["do"], int(message["run"])
        if what == "start":
            self._begin(run, str(message["sink"]), start_from(message["start"]))
            return
        loop = self._loops.get(run)
        if loop is None:
            return
        if what == "stop":
            loop.stop()
        elif what == "switch":
            self._in_thread(run, loop.switch)
        elif what == "close":
            loop.stop()
            self._in_thread(run, loop.close)
            del self._loops[run]

    def _begin(self, run: int, sink: str, start: Start) -> None:
        def tell(report: Report) -> None:
            self._send({"run": run, "report": as_message(report)})

        loop = SinkLoop(self._specs[sink], self._log_address, start, tell)
        self._loops[run] = loop
        self._in_thread(run, loop.run)

    def _in_thread(self, run: int, work: Any) -> None:
        before = self._threads.get(run)

        def after() -> None:
            if before is not None:
                before.join()
            work()

        self._threads[run] = threading.Thread(target=after, name=f"sink-run-{run}", daemon=True)
        self._threads[run].start()

    def _send(self, message: Mapping[str, Any]) -> None:
        # The driver that hung up is noticed where commands are read.
        with self._sending, suppress(OSError):
            send(self._connection, message)


# ---- messages ------------------------------------------------------------------------------


def start_message(start: Start) -> dict[str, Any]:
    """`Start` as JSON."""
    return asdict(start) | {"fed": [[position.text(), at_s] for position, at_s in start.fed]}


def start_from(message: Mapping[str, Any]) -> Start:
    """Back from `start_message`."""
    fed = tuple((Position.from_json(text), float(at_s)) for text, at_s in message["fed"])
    return Start(**{**message, "fed": fed})


def as_message(report: Report) -> dict[str, Any]:
    """A report as JSON."""
    return {
        "state": report.state,
        "progress": asdict(report.progress),
        "position": None if report.position is None else report.position.text(),
        "topic": report.topic,
        "topic_id": report.topic_id,
        "cluster_id": report.cluster_id,
        "newest_s": report.newest_s,
        "put": report.put,
        "deleted": report.deleted,
        "is_idle": report.is_idle,
        "freshness": report.freshness,
        "failure": None if report.failure is None else asdict(report.failure),
    }


def report_from(message: Mapping[str, Any]) -> Report:
    """Back from `as_message`."""
    position, failure = message["position"], message["failure"]
    freshness = message["freshness"]
    return Report(**{
        **message,
        "progress": Progress(**message["progress"]),
        "position": None if position is None else Position.from_json(position),
        "failure": None if failure is None else Failure(**failure),
        "freshness": None if freshness is None else tuple(freshness),
    })  # fmt: skip
