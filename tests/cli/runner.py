"""Run the command in this process, as a shell would see it: status, output, errors.

Commands that need Spark run on the session that all tests share (`share_session`): a process of
their own would start another Java.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable
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


class Live:
    """What a command that still runs has said so far."""

    def __init__(self) -> None:
        self.out_bytes, self.err_bytes = io.BytesIO(), io.BytesIO()
        # Kept by name: a wrapper that is thrown away closes what was captured.
        self.out_text = io.TextIOWrapper(self.out_bytes, write_through=True)
        self.err_text = io.TextIOWrapper(self.err_bytes, write_through=True)

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


def run_until(look: Callable[[Live], None], *args: str, stop: signal.Signals) -> Ran:
    """`penstock ARGS`, which runs until it is told to stop: `look` looks on in another thread, and
    when it has seen enough, or failed, the command gets the signal `stop`.

    `look` must not run commands itself: there is one `sys.stdout`.
    """
    live, failures = Live(), list[BaseException]()
    has_ended = threading.Event()

    def harmless(number: int, frame: object) -> None:
        """Takes the signal if it comes when the command has just ended by itself."""

    def watch() -> None:
        try:
            look(live)
        except BaseException as failure:
            failures.append(failure)
        eventually(lambda: has_ended.is_set() or signal.getsignal(stop) not in ours, STOP_TIMEOUT_S)
        if not has_ended.is_set():
            os.kill(os.getpid(), stop)

    before = signal.signal(stop, harmless)
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


def run(*args: str, stdin: bytes = b"", live: Live | None = None) -> Ran:
    """`penstock ARGS`, with `stdin` piped in."""
    live = live or Live()
    status = 0
    with (
        patch.object(sys, "argv", ["penstock", *args]),
        patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))),
        patch.object(sys, "stdout", live.out_text),
        patch.object(sys, "stderr", live.err_text),
    ):
        try:
            main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return Ran(status, live.out_bytes.getvalue(), live.err)
