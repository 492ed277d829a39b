"""Runs the tests in several processes: `pytest --workers N`.

The controller collects the tests and then forks the workers, so that importing and collecting,
which take longer than a thousand tests, are done once and not by each worker. It gives every worker
a unit of work at a time (see `schedule`) and passes on what the workers report, as if the tests had
run here.

Over a socket pair, one pickled object per message:

    controller → worker   the tests of a unit, as indexes; an empty list when there is no more
    worker → controller   START (index), REPORT (a serialized report), WANT (before the last test of
                          a unit is begun: pytest must know then what comes next), or DONE

A worker that dies fails the test that it was running; another one is forked in its place and
runs the rest of its unit.
"""

from __future__ import annotations

import io
import os
import selectors
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import pytest
from _pytest._io import TerminalWriter

from tests.harness import schedule

START, REPORT, WANT, DONE = "start", "report", "want", "done"
# What the variable is called by which tests and fixtures know their worker (as with xdist).
WORKER_VARIABLE: Final = "PYTEST_XDIST_WORKER"
RESTARTS_MAX: Final = 8
# How often the controller looks whether a worker has died without closing its socket.
WATCH_S: Final = 1.0
# For session fixtures, Spark's among them, to be torn down.
STOP_S: Final = 60.0


@dataclass
class Worker:
    """A forked process, as the controller sees it."""

    name: str
    pid: int
    connection: Connection[Any, Any]
    # The tests that it has been given and has not ended, in order.
    pending: deque[int] = field(default_factory=deque)
    running: int | None = None


class WorkerDiedError(Exception):
    """The process of a worker has ended before its work."""


class Controller:
    """Forks the workers, hands out units and reports their results."""

    def __init__(
        self, session: pytest.Session, count: int, started: Callable[[pytest.Config], None]
    ) -> None:
        self._session = session
        self._started = started
        self._items = session.items
        self._queue = schedule.Queue(session.items, count)
        self._count = count
        self._workers: dict[str, Worker] = {}
        self._selector = selectors.DefaultSelector()
        self._restarts = 0
        self._forked = 0
        # Tests that came to an end, be it a bad one.
        self._ended = 0
        self._faults: list[str] = []

    def run(self) -> None:
        try:
            for _ in range(min(self._count, len(self._queue))):
                self._fork()
            while self._workers:
                for key, _ in self._selector.select(WATCH_S):
                    self._receive(key.data)
                self._look_for_dead()
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)
        finally:
            self._stop()
        if self._ended != len(self._items):
            self._faults.append(f"{len(self._items) - self._ended} tests did not run")
        if self._faults:
            raise WorkerDiedError("; ".join(self._faults))

    def _fork(self) -> None:
        """Start a worker with its first unit."""
        name = f"gw{self._forked}"
        self._forked += 1
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for other in self._workers.values():
                other.connection.close()
            work(self._session, name, theirs, self._started)
        theirs.close()
        worker = self._workers[name] = Worker(name, pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        self._give(worker)

    def _give(self, worker: Worker) -> None:
        unit = self._queue.next_for(worker.name)
        worker.pending.extend(unit)
        with suppress(OSError):
            worker.connection.send(unit)

    def _receive(self, worker: Worker) -> None:
        try:
            while worker.connection.poll():
                self._handle(worker, *worker.connection.recv())
                if worker.name not in self._workers:
                    return
        except (EOFError, ConnectionError):
            self._bury(worker)

    def _handle(self, worker: Worker, kind: str, content: Any) -> None:
        hook = self._session.config.hook
        if kind == WANT:
            self._give(worker)
        elif kind == START:
            worker.running = content
            item = self._items[content]
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        elif kind == REPORT:
            report = hook.pytest_report_from_serializable(config=self._session.config, data=content)
            self._report(worker, report)
            if report.when == "teardown" and worker.running is not None:
                worker.pending.remove(worker.running)
                worker.running = None
                self._ended += 1
        elif kind == DONE:
            self._forget(worker)
            with suppress(ChildProcessError):
                os.waitpid(worker.pid, 0)

    def _report(self, worker: Worker, report: Any) -> None:
        # The terminal shows a letter per test, and not the file of each, as it does for xdist.
        report.node = SimpleNamespace(
            gateway=SimpleNamespace(id=worker.name),
            workerinfo={
                "id": worker.name,
                "version_info": sys.version_info,
                "sysplatform": sys.platform,
                "executable": sys.executable,
            },
        )
        self._session.config.hook.pytest_runtest_logreport(report=report)

    def _look_for_dead(self) -> None:
        for worker in list(self._workers.values()):
            with suppress(ChildProcessError):
                pid, _ = os.waitpid(worker.pid, os.WNOHANG)
                if not pid:
                    continue
            # What it has sent before is still read.
            self._receive(worker)
            if worker.name in self._workers:
                self._bury(worker)

    def _bury(self, worker: Worker) -> None:
        """The worker is dead: its test has failed, and another one takes the rest."""
        self._forget(worker)
        with suppress(ChildProcessError):
            os.waitpid(worker.pid, 0)
        rest = list(worker.pending)
        if worker.running is None:
            # No test can be blamed, and so nothing else would tell.
            self._faults.append(f"worker {worker.name} died between tests")
        else:
            self._ended += 1
            item = self._items[worker.running]
            rest.remove(worker.running)
            text = f"worker {worker.name} died while it ran {item.nodeid}"
            for when in ("call", "teardown"):
                outcome = "failed" if when == "call" else "passed"
                self._report(worker, pytest.TestReport(
                    item.nodeid, item.location, {}, outcome,  # type: ignore[arg-type]
                    text if when == "call" else None, when,
                ))  # fmt: skip
        self._queue.worker_is_gone(worker.name, rest)
        if len(self._queue):
            self._restarts += 1
            if self._restarts > RESTARTS_MAX:
                raise WorkerDiedError(f"workers died {self._restarts} times")
            self._fork()

    def _forget(self, worker: Worker) -> None:
        del self._workers[worker.name]
        self._selector.unregister(worker.connection)
        worker.connection.close()

    def _stop(self) -> None:
        """Interrupt what still runs; it tears down what it has set up, or is killed."""
        for worker in self._workers.values():
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGINT)
        end = time.monotonic() + STOP_S
        for worker in self._workers.values():
            with suppress(EOFError, OSError):
                while worker.connection.poll(max(0.0, end - time.monotonic())):
                    worker.connection.recv()
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
        self._workers.clear()


# ---- in the worker ---------------------------------------------------------------------------


def work(
    session: pytest.Session,
    name: str,
    connection: Connection[Any, Any],
    started: Callable[[pytest.Config], None],
) -> NoReturn:
    """Run tests until there are no more; never returns to the code of the controller."""
    code = 1
    try:
        os.environ[WORKER_VARIABLE] = name
        _own_output(session.config)
        _own_folder(session.config, name)
        reporter = _Reporter(session.config, connection)
        session.config.pluginmanager.register(reporter, "penstock-worker")
        started(session.config)
        _run(session, connection)
        connection.send((DONE, None))
        code = 0
    except (KeyboardInterrupt, EOFError, ConnectionError):
        # The controller stops, or is gone. Ctrl-C reaches a worker twice: from the terminal, too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        session._setupstate.teardown_exact(None)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        # Nothing of what the controller registered for its own end is done here.
        os._exit(code)


def _run(session: pytest.Session, connection: Connection[Any, Any]) -> None:
    hook = session.config.hook
    for index, following in _tests(connection):
        connection.send((START, index))
        item = session.items[index]
        nextitem = None if following is None else session.items[following]
        hook.pytest_runtest_protocol(item=item, nextitem=nextitem)


def _tests(connection: Connection[Any, Any]) -> Iterator[tuple[int, int | None]]:
    """Each test with the one that comes after it."""
    unit: deque[int] = deque(connection.recv())
    while unit:
        index = unit.popleft()
        if not unit:
            connection.send((WANT, None))
            unit.extend(connection.recv())
        yield index, unit[0] if unit else None


def _own_output(config: pytest.Config) -> None:
    """Capture into files of its own, and show nothing: that is up to the controller."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None and capture._global_capturing is not None:
        capture._global_capturing.stop_capturing()
        capture._global_capturing = None
        capture.start_global_capturing()
    terminal = config.pluginmanager.getplugin("terminalreporter")
    config.pluginmanager.unregister(terminal)
    quiet = SimpleNamespace(_tw=TerminalWriter(io.StringIO()))
    config.pluginmanager.register(quiet, "terminalreporter")


def _own_folder(config: pytest.Config, name: str) -> None:
    """Folders of tests are below one of the worker."""
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._given_basetemp = Path(factory._basetemp) / name
    factory._basetemp = None


class _Reporter:
    """Sends the reports of the worker's tests to the controller."""

    def __init__(self, config: pytest.Config, connection: Connection[Any, Any]) -> None:
        self._config = config
        self._connection = connection

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send((REPORT, data))


def options(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=1, help="run the tests in so many processes")


def run_loop(session: pytest.Session, started: Callable[[pytest.Config], None]) -> bool | None:
    """Run the tests of a session in workers; None if pytest itself should run them.

    `started` is called in each worker before its first test.
    """
    config = session.config
    count = config.getoption("workers")
    if count <= 1 or config.option.collectonly or not session.items:
        return None
    if session.testsfailed and not config.option.continue_on_collection_errors:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    # The folder of the run is made here, before there are workers who would all make one.
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    capture = config.pluginmanager.getplugin("capturemanager")
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None:
        terminal.showfspath = False
    with suppress(AttributeError):
        capture.read_global_capture()
    Controller(session, count, started).run()
    return True
