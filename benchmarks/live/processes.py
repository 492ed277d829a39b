"""Commands that a benchmark starts, and what all of their processes cost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.processing import usage

STOP_S: Final = 120.0


@contextmanager
def command(
    *arguments: str, folder: Path, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`penstock ARGUMENTS` while the block runs; what it says goes to a file."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", *arguments],
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Usage:
    """Processor time of all commands below this process, without its own threads."""

    def __init__(self) -> None:
        self._begin = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.monotonic(), usage.cpu_s() - time.process_time()

    def share(self) -> float:
        """Of one core, in percent, since the beginning."""
        at, spent = self._now()
        return 100 * (spent - self._begin[1]) / (at - self._begin[0])

    def spent_s(self) -> float:
        return self._now()[1] - self._begin[1]


def wait_for(
    condition: threading.Event, process: subprocess.Popen[bytes], timeout_s: float
) -> None:
    """Until something has happened; RuntimeError if the command ends before, or it takes long."""
    deadline = time.monotonic() + timeout_s
    while not condition.wait(0.2):
        if process.poll() is not None:
            raise RuntimeError(f"the command ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing came in {timeout_s:.0f} s")
