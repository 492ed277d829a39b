"""Run the command in this process, as a shell would see it: status, output, errors.

Commands that need Spark run on the session that all tests share (`share_session`): a process of
their own would start another Java.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import orjson

from penstock.cli.main import main
from tests.waiting import eventually

STOP_TIMEOUT_S = 200.0

if TYPE_CHECKING:
    import pytest
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class Ran:
    """What came out of a command."""

    status: int
    out_bytes: bytes
    err: str

    @property
    def out(self) -> str:
        return self.out_bytes.decode()

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> Any:
        return orjson.loads(self.out_bytes)

    @property
    def json_lines(self) -> list[Any]:
        return [orjson.loads(line) for line in self.out_bytes.splitlines()]

    def ok(self) -> Ran:
        """Itself, having checked that the command succeeded."""
        assert self.status == 0, f"status {self.status}: {self.err}"
        return self


class _TerminalText(io.TextIOWrapper):
    """Text that goes to a terminal, as far as the command can tell."""

    def isatty(self) -> bool:
        return True


class Live:
    """What a running command has written so far; `terminal` makes its output a terminal's."""

    def __init__(self, *, terminal: bool = False) -> None:
        text = _TerminalText if terminal else io.TextIOWrapper
        self.out_bytes, self.err_bytes = io.BytesIO(), io.BytesIO()
        # Kept by name: a wrapper that is thrown away closes what was captured.
        self.out_text = text(self.out_bytes, write_through=True)
        self.err_text = text(self.err_bytes, write_through=True)

    @property
    def out(self) -> str:
        return self.out_bytes.getvalue().decode()

    @property
    def err(self) -> str:
        return self.err_bytes.getvalue().decode()


def share_session(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands run on the session of all tests, which outlives them."""
    monkeypatch.setattr("penstock.spark.session", lambda *_, **__: spark)
    monkeypatch.setattr(spark, "stop", lambda: None)
    monkeypatch.setattr(spark.sparkContext, "setLogLevel", lambda _: None)
    monkeypatch.setattr("penstock.cli.run._log_to_stderr", lambda _: None)
    # Commands add to it, for Spark's workers.
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.delenv("PYTHONPATH")


def run_until(
    look: Callable[[Live], None],
    *args: str,
    stop: signal.Signals,
    is_handled: bool = True,
    terminal: bool = False,
) -> Ran:
    """`penstock ARGS`, which runs until it is told to stop: `look` observes it from another thread,
    and once `look` returns or fails, the command gets the signal `stop`.

    `is_handled`: whether the command installs a handler for the signal. Otherwise SIGINT raises
    `KeyboardInterrupt`, as it does in a process of its own. `look` must not run commands itself:
    there is one `sys.stdout`.
    """
    live, failures = Live(terminal=terminal), list[BaseException]()
    has_ended = threading.Event()

    def harmless(number: int, frame: object) -> None:
        """Ignores a signal that arrives just after the command has ended by itself."""

    def interrupt(number: int, frame: object) -> None:
        if not has_ended.is_set():
            raise KeyboardInterrupt

    def watch() -> None:
        try:
            look(live)
        except BaseException as failure:
            failures.append(failure)
        eventually(lambda: has_ended.is_set() or signal.getsignal(stop) not in ours, STOP_TIMEOUT_S)
        if not has_ended.is_set():
            os.kill(os.getpid(), stop)

    before = signal.signal(stop, harmless if is_handled else interrupt)
    # While Spark starts the command ignores it.
    ours = (harmless, signal.SIG_IGN)
    watcher = threading.Thread(target=watch, name="looks-on", daemon=True)
    try:
        watcher.start()
        ran = run(*args, live=live)
    finally:
        has_ended.set()
        watcher.join()
        signal.signal(stop, before)
    if failures:
        failures[0].add_note(f"status {ran.status}\n{ran.out}{ran.err}")
        raise failures[0]
    return ran


@contextmanager
def _process_settings() -> Iterator[None]:
    """Put back what a command sets for its whole process: logging and the garbage collector."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    is_collecting, thresholds = gc.isenabled(), gc.get_threshold()
    try:
        with patch.object(gc, "freeze"):
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        gc.set_threshold(*thresholds)
        if is_collecting:
            gc.enable()


def run(
    *args: str, stdin: bytes = b"", live: Live | None = None, asks_terminal: bool = False
) -> Ran:
    """`penstock ARGS`, with `stdin` piped in, or typed if the command asks a terminal."""
    live = live or Live()
    stdin_text = _TerminalText if asks_terminal else io.TextIOWrapper
    status = 0
    with (
        _process_settings(),
        patch.object(sys, "argv", ["penstock", *args]),
        patch.object(sys, "stdin", stdin_text(io.BytesIO(stdin))),
        patch.object(sys, "stdout", live.out_text),
        patch.object(sys, "stderr", live.err_text),
    ):
        try:
            main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return Ran(status, live.out_bytes.getvalue(), live.err)
