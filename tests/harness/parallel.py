"""Runs the tests in several processes: `pytest --workers N`.

The controller collects the tests and then forks the workers, so that importing and collecting,
which take longer than a thousand tests, are done once and not by each worker. It gives every worker
a unit of work at a time (see `schedule`) and passes on what the workers report, as if the tests had
run here.

Over a socket pair, one pickled object per message:

    controller → worker   the tests of a unit, as indexes; an empty list when there is no more
    worker → controller   START (index), REPORT (a serialized report), WANT (before the last test of
                          a unit is begun: pytest must know then what comes next), or DONE

A worker that dies fails the test that it was running, with its exit status and what it had printed;
another one is forked in its place and runs the rest of its unit. So it is with a worker that is
stuck where no signal of pytest-timeout reaches it: it is aborted, and prints the stacks of its
threads.
"""

from __future__ import annotations

import faulthandler
import os
import selectors
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn, TextIO, cast
from unittest import mock

import pytest
from _pytest._io import TerminalWriter

from tests.harness import schedule, seeds

START, REPORT, WANT, DONE = "start", "report", "want", "done"
# What the variable is called by which tests and fixtures know their worker (as with xdist).
WORKER_VARIABLE: Final = "PYTEST_XDIST_WORKER"
RESTARTS_MAX: Final = 8
# How often the controller looks whether a worker has died without closing its socket.
WATCH_S: Final = 1.0
# For session fixtures, Spark's among them, to be torn down.
STOP_S: Final = 60.0
# How much longer than its timeout a test may run before its worker is aborted; also how long a
# worker may be silent between two tests.
GRACE_S = 60.0
# For an aborted worker to print its stacks, before it is killed.
ABORT_S: Final = 10.0
OUTPUTS: Final = ("stdout", "stderr")


@dataclass
class Worker:
    """A forked process, as the controller sees it."""

    name: str
    pid: int
    connection: Connection[Any, Any]
    # The tests that it has been given and has not ended, in order.
    pending: deque[int] = field(default_factory=deque)
    running: int | None = None
    # When it began what it is doing: a test, or the way to the next one.
    since: float = field(default_factory=time.monotonic)
    aborted_at: float | None = None
    has_ended: bool = False
    status: int | None = None

    def poll(self) -> bool:
        """Whether the process has ended."""
        if not self.has_ended:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.has_ended = True
            else:
                if pid:
                    self.has_ended, self.status = True, status
        return self.has_ended

    def wait(self, timeout_s: float) -> None:
        """Wait until the process has ended; kill it if it takes too long."""
        end = time.monotonic() + timeout_s
        pause = threading.Event()
        while not self.poll():
            if time.monotonic() > end:
                self.kill(signal.SIGKILL)
            pause.wait(0.01)

    def kill(self, number: signal.Signals) -> None:
        if not self.has_ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self) -> str:
        """How the process ended."""
        if self.status is None:
            return "ended"
        code = os.waitstatus_to_exitcode(self.status)
        text = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        if self.aborted_at is None:
            return text
        return f"was stuck for {self.aborted_at - self.since:.0f} s, was aborted and {text}"


class WorkerDiedError(Exception):
    """The process of a worker has ended before its work."""


class Controller:
    """Forks the workers, hands out units and reports their results."""

    def __init__(
        self,
        session: pytest.Session,
        count: int,
        folder: Path,
        started: Callable[[pytest.Config], None],
    ) -> None:
        self._session = session
        self._folder = folder
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
                self._abort_stuck()
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
            work(self._session, name, theirs, self._folder, self._started)
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
        while worker.name in self._workers:
            try:
                if not worker.connection.poll():
                    return
                message = worker.connection.recv()
            except (EOFError, OSError):
                # An OSError also says that the worker ended in the middle of a message.
                self._bury(worker)
                return
            self._handle(worker, *message)

    def _handle(self, worker: Worker, kind: str, content: Any) -> None:
        hook = self._session.config.hook
        if kind == WANT:
            self._give(worker)
        elif kind == START:
            worker.running, worker.since = content, time.monotonic()
            item = self._items[content]
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        elif kind == REPORT:
            report = hook.pytest_report_from_serializable(config=self._session.config, data=content)
            self._report(worker, report)
            if report.when == "teardown" and worker.running is not None:
                worker.pending.remove(worker.running)
                worker.running, worker.since = None, time.monotonic()
                self._ended += 1
        elif kind == DONE:
            self._forget(worker)
            worker.wait(STOP_S)

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
            if not worker.poll():
                continue
            # What it has sent before is still read.
            self._receive(worker)
            if worker.name in self._workers:
                self._bury(worker)

    def _abort_stuck(self) -> None:
        """End workers that pytest-timeout could not interrupt."""
        now = time.monotonic()
        for worker in self._workers.values():
            if worker.aborted_at is not None:
                if now - worker.aborted_at > ABORT_S:
                    worker.kill(signal.SIGKILL)
                continue
            limit_s: float | None = 0.0
            if worker.running is not None:
                limit_s = timeout_s(self._items[worker.running])
            if limit_s is not None and now - worker.since > limit_s + GRACE_S:
                worker.aborted_at = now
                worker.kill(signal.SIGABRT)

    def _bury(self, worker: Worker) -> None:
        """The worker is dead: its test has failed, and another one takes the rest."""
        self._forget(worker)
        worker.wait(ABORT_S)
        rest = list(worker.pending)
        if worker.running is None:
            # No test can be blamed, and so nothing else would tell.
            self._faults.append(f"worker {worker.name} died between tests: it {worker.end()}")
        else:
            self._ended += 1
            item = self._items[worker.running]
            rest.remove(worker.running)
            text = (
                f"worker {worker.name} {worker.end()} while it ran {item.nodeid}\n"
                f"{seeds.how_to_repeat(seeds.seed_of(item.nodeid))}"
            )
            for when in ("call", "teardown"):
                outcome = "failed" if when == "call" else "passed"
                self._report(worker, pytest.TestReport(
                    item.nodeid, item.location, {}, outcome,  # type: ignore[arg-type]
                    text if when == "call" else None, when,
                    sections=self._last_output(worker) if when == "call" else (),
                ))  # fmt: skip
        self._queue.worker_is_gone(worker.name, rest)
        if len(self._queue):
            self._restarts += 1
            if self._restarts > RESTARTS_MAX:
                raise WorkerDiedError(f"workers died {self._restarts} times")
            self._fork()

    def _last_output(self, worker: Worker) -> list[tuple[str, str]]:
        """What a dead worker has printed since its last report."""
        sections = []
        for name in OUTPUTS:
            file = _output_file(self._folder, worker.name, name)
            text = file.read_text(errors="replace") if file.exists() else ""
            if text:
                sections.append((f"Captured {name} call", text))
        return sections

    def _forget(self, worker: Worker) -> None:
        del self._workers[worker.name]
        self._selector.unregister(worker.connection)
        worker.connection.close()

    def _stop(self) -> None:
        """Interrupt what still runs; it tears down what it has set up, or is killed."""
        for worker in self._workers.values():
            worker.kill(signal.SIGINT)
        end = time.monotonic() + STOP_S
        for worker in self._workers.values():
            with suppress(EOFError, OSError):
                while worker.connection.poll(max(0.0, end - time.monotonic())):
                    worker.connection.recv()
            worker.kill(signal.SIGKILL)
            worker.wait(ABORT_S)
        self._workers.clear()


# ---- in the worker ---------------------------------------------------------------------------


def work(
    session: pytest.Session,
    name: str,
    connection: Connection[Any, Any],
    folder: Path,
    started: Callable[[pytest.Config], None],
) -> NoReturn:
    """Run tests until there are no more; never returns to the code of the controller."""
    code = 1
    try:
        os.environ[WORKER_VARIABLE] = name
        _own_output(session.config, folder, name)
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


def timeout_s(item: pytest.Item) -> float | None:
    """How long a test may run, as pytest-timeout sees it."""
    mark = item.get_closest_marker("timeout")
    if mark is None:
        value = getattr(item.config, "_env_timeout", None)
    else:
        value = mark.args[0] if mark.args else mark.kwargs.get("timeout")
    return float(value) if value else None


def _output_file(folder: Path, worker: str, name: str) -> Path:
    return folder / f"{worker}.{name}"


def _own_output(config: pytest.Config, folder: Path, name: str) -> None:
    """Capture into files of its own, and show nothing: that is up to the controller.

    The files have names, so that the controller can read them when the worker has died.
    """
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None and capture._global_capturing is not None:
        capture._global_capturing.stop_capturing()
        capture._global_capturing = None
        files = [_output_file(folder, name, output).open("w+b", buffering=0) for output in OUTPUTS]
        with mock.patch("_pytest.capture.TemporaryFile", side_effect=files):
            capture.start_global_capturing()
    terminal = config.pluginmanager.getplugin("terminalreporter")
    config.pluginmanager.unregister(terminal)
    # pytest-timeout writes the stacks of all threads there.
    quiet = SimpleNamespace(_tw=TerminalWriter(cast("TextIO", _Stderr())))
    config.pluginmanager.register(quiet, "terminalreporter")
    # What a crash says is captured, too.
    faulthandler.enable(2)


class _Stderr:
    """Whatever is stderr at the time: that of a test is part of its report."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def isatty(self) -> bool:
        return False


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


def run_loop(
    session: pytest.Session,
    folder: Path,
    started: Callable[[pytest.Config], None],
    *,
    always: bool = False,
) -> bool | None:
    """Run the tests of a session in workers; None if pytest itself should run them.

    `started` is called in each worker before its first test. With `always`, a single worker is a
    process of its own, too: the controller outlives it.
    """
    config = session.config
    count = config.getoption("workers")
    if (count <= 1 and not always) or config.option.collectonly or not session.items:
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
    Controller(session, count, folder, started).run()
    return True
