"""Resident tasks, seen from the driver: long-running Spark tasks in which sinks live.

One task on one machine; on a cluster one for each executor there is. Each is a job of its own, so
that the end of one does not end the others: then its job is submitted again, and its sinks, which
are told of it, begin again wherever there is a task. A task that is silent is replaced. What it may
still do afterwards is refused by the store, which knows its newest writer.

Sinks whose stores are on this machine only (files, servers at `localhost`) run in a thread of the
driver if Spark's executors are elsewhere; and so do all if Spark has a single core, which a
resident task would take from the flows.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any, Final

import orjson

from penstock.sinks import stores
from penstock.sinks.spec import SinkSpec
from penstock.spark.flows.trouble import is_java_gone
from penstock.spark.runtime import resident_task
from penstock.spark.runtime.resident_task import Assignment, report_from, send, serve
from penstock.spark.runtime.sink_loop import LogAddress, Report, Start
from penstock.spark.sinking.errors import FeedingError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

POOL: Final = "resident"
# How long a start waits for Spark to run a task.
TASK_S: Final = 60.0
# A task that has not been heard for so long is replaced; it says something every two seconds.
SILENT_S: Final = 20.0
# A transaction that takes longer is reported. It is left alone: a slow store with much to take is
# no reason to begin again, and stores have timeouts of their own.
LONG_S: Final = 600.0
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 10.0
_GOOD_S: Final = 60.0
# How long a task may take to say who it is.
GREET_S: Final = 10
DRIVER: Final = -1


class NoTaskError(FeedingError):
    """Spark does not run the task that sinks live in."""

    retriable = True
    advice = (
        "Is there a free core, and an executor? A resident task takes one core of Spark for as "
        "long as sinks run."
    )


class Run:
    """A sink's run in a task; told by whoever reads the task's reports."""

    def __init__(
        self,
        number: int,
        sink: str,
        on_report: Callable[[Report], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.number = number
        self.sink = sink
        # Whether its present transaction takes unusually long, which was reported.
        self.is_long = False
        self.on_report = on_report
        self.on_lost = on_lost
        self.host: _Host | None = None

    def tell(self, do: str, **more: Any) -> None:
        """Send a command; nothing if the task is gone, of which `on_lost` has told."""
        host = self.host
        if host is not None:
            host.send({"do": do, "run": self.number, **more})


class _Host:
    """A task, or the thread of the driver that stands for one, as long as it is connected."""

    def __init__(self, number: int, connection: Connection[Any, Any], pid: int) -> None:
        self.number = number
        self.pid = pid
        self.runs: dict[int, Run] = {}
        self.heard_s = time.monotonic()
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        with self._sending, suppress(OSError):
            send(self._connection, message)

    def receive(self) -> dict[str, Any]:
        message: dict[str, Any] = orjson.loads(self._connection.recv_bytes())
        self.heard_s = time.monotonic()
        return message

    def hang_up(self) -> None:
        # Closing alone does not wake a thread that reads.
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)


class ResidentTasks:
    """The tasks of one session."""

    def __init__(
        self, spark: SparkSession, specs: Sequence[SinkSpec], log_address: LogAddress
    ) -> None:
        self._spark = spark
        self._specs = {spec.name: spec for spec in specs}
        self._log_address = log_address
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._hosts: dict[int, _Host] = {}
        self._jobs: dict[int, threading.Thread] = {}
        self._closing = False
        self._listener: socket.socket | None = None
        self._key = os.urandom(32)
        # Java is gone: nothing can go on.
        self.broken: BaseException | None = None

    # ---- runs ----------------------------------------------------------------------------

    def start(
        self,
        sink: str,
        start: Start,
        on_report: Callable[[Report], None],
        on_lost: Callable[[str], None],
    ) -> Run:
        """Begin to run a sink in the task that has the fewest; waits until there is a task."""
        in_driver = self._runs_in_driver(self._specs[sink])
        run = Run(next(self._numbers), sink, on_report, on_lost)
        with self._changed:
            if in_driver:
                self._ensure_thread()
            else:
                self._ensure_jobs()
            deadline = time.monotonic() + TASK_S
            while not (hosts := self._candidates(in_driver)):
                if self.broken is not None:
                    raise self.broken
                left = deadline - time.monotonic()
                if left <= 0 or self._closing:
                    raise NoTaskError(
                        f"sink {sink!r}: Spark has run no task for it in {TASK_S:.0f} s"
                    )
                self._changed.wait(min(left, 0.5))
            host = min(hosts, key=lambda each: len(each.runs))
            host.runs[run.number] = run
            run.host = host
        run.tell("start", sink=sink, start=resident_task.start_message(start))
        return run

    def forget(self, run: Run) -> None:
        """A run that has ended, or that nobody waits for any more."""
        run.tell("close")
        host, run.host = run.host, None
        if host is not None:
            with self._changed:
                host.runs.pop(run.number, None)

    def look(self) -> None:
        """Replace tasks that are silent. To be called now and then."""
        now = time.monotonic()
        with self._changed:
            silent = [each for each in self._hosts.values() if now - each.heard_s > SILENT_S]
        for host in silent:
            log.warning("the resident task %d is silent, and is replaced", host.number)
            self._spark.sparkContext.cancelJobGroup(_group(host.number))
            host.hang_up()

    @property
    def pids(self) -> list[int]:
        """The processes of the tasks, where that means something to this machine."""
        with self._changed:
            return [each.pid for each in self._hosts.values()]

    def close(self) -> None:
        """End all tasks."""
        with self._changed:
            self._closing = True
            hosts, jobs = list(self._hosts.values()), list(self._jobs.values())
            self._changed.notify_all()
        for host in hosts:
            host.hang_up()
        if self._listener is not None:
            # Whoever waits there for a task goes on.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for job in jobs:
            job.join(resident_task.LEAVE_S + 1)

    # ---- where ---------------------------------------------------------------------------

    def _runs_in_driver(self, spec: SinkSpec) -> bool:
        master = self._master
        if master in {"local", "local[1]"}:
            return True
        if master.startswith("local["):
            return False
        return stores.parse(spec.url, spec.options, spec.name).is_local

    def _candidates(self, in_driver: bool) -> list[_Host]:
        return [each for each in self._hosts.values() if (each.number == DRIVER) == in_driver]

    def _ensure_thread(self) -> None:
        if DRIVER in self._hosts:
            return
        ours, theirs = Pipe()
        host = self._hosts[DRIVER] = _Host(DRIVER, ours, os.getpid())
        serving = partial(serve, theirs, self._specs, self._log_address)
        threading.Thread(target=serving, name="resident", daemon=True).start()
        self._read_in_thread(host)

    # ---- tasks ---------------------------------------------------------------------------

    def _ensure_jobs(self) -> None:
        if self._listener is None:
            conf = self._spark.sparkContext.getConf()
            bound = str(conf.get("spark.driver.bindAddress") or self._driver_host)
            self._listener = socket.create_server((bound, 0))
            threading.Thread(target=self._accept, name="resident-accept", daemon=True).start()
        for number in range(self._count()):
            if number not in self._jobs:
                job = threading.Thread(
                    target=self._run_job, args=[number], name=f"resident-{number}", daemon=True
                )
                self._jobs[number] = job
                job.start()

    @property
    def _driver_host(self) -> str:
        """The driver as its executors know it."""
        if self._master.startswith("local["):
            return "127.0.0.1"
        return str(self._spark.sparkContext.getConf().get("spark.driver.host"))

    @property
    def _master(self) -> str:
        return str(self._spark.sparkContext.master)

    def _count(self) -> int:
        """One on one machine; elsewhere as many as there are executors, but for the flows' sake
        never so many that no core is left."""
        if self._master.startswith("local["):
            return 1
        context = self._spark.sparkContext
        tracker: Any = context._jsc.sc().statusTracker()
        executors = len(tracker.getExecutorInfos()) - 1
        return max(1, min(executors, int(context.defaultParallelism) - 1))

    def _run_job(self, number: int) -> None:
        """Submit the job of a task, again and again, until we close."""
        pause_s = _FIRST_PAUSE_S
        while not self._closing:
            began_s = time.monotonic()
            try:
                self._submit(number)
            except Exception as error:
                if is_java_gone(error):
                    with self._changed:
                        self.broken = error
                        self._changed.notify_all()
                    return
                if not self._closing:
                    log.info("the resident task %d has ended: %s", number, _headline(error))
            if time.monotonic() - began_s > _GOOD_S:
                pause_s = _FIRST_PAUSE_S
            with self._changed:
                self._changed.wait_for(lambda: self._closing, pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    def _submit(self, number: int) -> None:
        assert self._listener is not None
        context = self._spark.sparkContext
        context.setLocalProperty("spark.scheduler.pool", POOL)
        context.setJobGroup(_group(number), "sinks", interruptOnCancel=True)
        address = self._driver_host, int(self._listener.getsockname()[1])
        assignment = Assignment(number, address, self._key, self._log_address, self._specs)
        context.parallelize([number], 1).foreachPartition(partial(resident_task.main, assignment))

    # ---- connections ---------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=[connection], daemon=True).start()

    def _greet(self, accepted: socket.socket) -> None:
        """Find out whether it is a task of ours, and which."""
        _set_timeout(accepted, GREET_S)
        connection: Connection[Any, Any] = Connection(accepted.detach())
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            hello = orjson.loads(connection.recv_bytes())
            host = _Host(int(hello["hello"]), connection, int(hello["pid"]))
        except Exception as error:
            connection.close()
            if not self._closing:
                log.warning("a connection to the driver was refused: %s", error)
            return
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            _set_timeout(same, 0)
        with self._changed:
            self._hosts[host.number] = host
            self._changed.notify_all()
        self._read(host)

    def _read_in_thread(self, host: _Host) -> None:
        name = f"resident-{host.number}-reports"
        threading.Thread(target=self._read, args=[host], name=name, daemon=True).start()

    def _read(self, host: _Host) -> None:
        try:
            while True:
                self._take(host, host.receive())
        except (EOFError, OSError):
            pass
        with self._changed:
            if self._hosts.get(host.number) is host:
                del self._hosts[host.number]
            lost = list(host.runs.values())
            host.runs.clear()
        for run in lost:
            run.host = None
            run.on_lost("the Spark task that it lived in has ended")

    def _take(self, host: _Host, message: Mapping[str, Any]) -> None:
        if "run" in message:
            run = host.runs.get(int(message["run"]))
            if run is not None:
                run.on_report(report_from(message["report"]))
            return
        for number, silent_s in message.get("alive", {}).items():
            run = host.runs.get(int(number))
            if run is not None and silent_s > LONG_S and not run.is_long:
                log.warning("sink %s: one transaction takes more than %.0f s", run.sink, LONG_S)
            if run is not None:
                run.is_long = silent_s > LONG_S


def _set_timeout(connection: socket.socket, seconds: int) -> None:
    """For reads that block; 0 for none."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _group(number: int) -> str:
    return f"penstock resident {number}"


def _headline(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
