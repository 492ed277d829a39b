"""Runs compaction where it does not hold the broker's interpreter: in a child process.

One child a pass, at the lowest priority. It ends with the broker: at a stop it is killed, and if
the broker itself is killed the child sees its input close. On a disk that is not the operating
system's, such as tests have, there are no files that a child could open; there a thread does it,
which gives way between batches.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import penstock
from penstock.errors import StorageError
from penstock.log.compaction import Job, Result, compact
from penstock.log.disk import Disk, OsDisk

_WORKER: Final = "penstock.log.compaction_worker"
# Long enough for the event loop to take the interpreter, short against a batch.
_PAUSE_S: Final = 0.0005


class Compactor(Protocol):
    """Whoever can run a pass."""

    async def run(self, disk: Disk, folder: str, job: Job) -> Result: ...


class ChildCompactor:
    """One child process a pass."""

    def __init__(self) -> None:
        # Its own thread: a pass may take long, and others need the event loop's.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compaction")

    async def run(self, disk: Disk, folder: str, job: Job) -> Result:
        loop = asyncio.get_running_loop()
        if not isinstance(disk, OsDisk):
            work = partial(compact, disk, folder, job, partial(time.sleep, _PAUSE_S))
            return await loop.run_in_executor(self._thread, work)
        child = _Child(folder, job)
        try:
            line = await loop.run_in_executor(self._thread, child.run)
        except BaseException:
            child.kill()
            raise
        return _result(line)


class _Child:
    """A child and the thread that waits for it: works in any event loop, on any thread."""

    def __init__(self, folder: str, job: Job) -> None:
        self._request = json.dumps({"folder": folder, "job": job.to_json()}).encode() + b"\n"
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._unwanted = False

    def run(self) -> bytes:
        """The line that the child answers with; blocks."""
        with self._lock:
            if self._unwanted:
                return b""
            command = [sys.executable, "-m", _WORKER]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=_environment())
        with self._process as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                # Its input stays open until it has answered: when it closes, the child ends.
                process.stdin.write(self._request)
                process.stdin.flush()
                return process.stdout.readline()
            except BrokenPipeError:
                return b""
            finally:
                process.kill()

    def kill(self) -> None:
        with self._lock:
            self._unwanted = True
            if self._process is not None:
                self._process.kill()


def _environment() -> dict[str, str]:
    """The child imports the same package, wherever this process has it from."""
    place = str(Path(penstock.__file__).parent.parent)
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{known}" if known else place}


def _result(line: bytes) -> Result:
    if not line.endswith(b"\n"):
        raise StorageError("the compaction process ended without an answer")
    answer = json.loads(line)
    if "error" in answer:
        raise StorageError(f"compaction failed: {answer['error']}")
    return Result.from_json(answer["result"])
