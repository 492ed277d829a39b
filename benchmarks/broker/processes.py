"""A server's processes: started, watched, ended, children included.

Every server gets a session of its own, so that Ctrl-C reaches the benchmark alone, which then
stops the server: `Managed.stop` leaves no process behind, whatever the server does.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Final, Self

import psutil

READY_POLL_S: Final = 0.002
SAMPLE_S: Final = 0.2
LOG_TAIL_BYTES: Final = 2000


class ServerError(Exception):
    """A server did not start, or died."""


def tree(pid: int) -> list[psutil.Process]:
    """The process and all below it; empty if it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def memory_mb(pid: int) -> float:
    """Memory of the whole tree, in MB: what is resident, and anonymous files it holds open."""
    total = 0
    files: dict[int, int] = {}
    for process in tree(pid):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
        files |= _memory_files(process.pid)
    return (total + sum(files.values())) / 1e6


def _memory_files(pid: int) -> dict[int, int]:
    """Bytes by inode of the files that exist in memory only: resident, but not counted so."""
    found: dict[int, int] = {}
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # not Linux, or the process is gone
        return found
    for link in links:
        try:
            if str(link.readlink()).startswith("/memfd:"):
                status = link.stat()
                found[status.st_ino] = status.st_blocks * 512
        except OSError:  # closed meanwhile
            continue
    return found


def cpu_s(pid: int) -> float:
    """Processor time the tree has used so far."""
    total = 0.0
    for process in tree(pid):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def end(pid: int, *, clean: bool, timeout_s: float = 60.0) -> None:
    """End a tree: asked (SIGTERM) or, if not `clean` or not in time, killed (SIGKILL)."""
    processes = tree(pid)
    if clean:
        for process in processes:
            _send(process.terminate)
        _, processes = psutil.wait_procs(processes, timeout=timeout_s)
    for process in processes:
        _send(process.kill)
    psutil.wait_procs(processes, timeout=timeout_s)


def _send(signal: Callable[[], None]) -> None:
    try:
        signal()
    except psutil.NoSuchProcess:
        return


class Managed:
    """One server process with its log file."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerError(f"{self.name} is not running")
        return self._process.pid

    def start(
        self,
        command: Sequence[str],
        ready: Callable[[], bool],
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
    ) -> float:
        """Start, wait until `ready`, and return how long that took."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        launched = monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.log.parent,
                env=environment,
                start_new_session=True,
            )
        try:
            while not ready():
                self._pause(launched + timeout_s)
        except BaseException:
            self.stop(clean=False)
            raise
        return monotonic() - launched

    def _pause(self, deadline: float) -> None:
        assert self._process is not None
        try:
            # A pause that ends at once if the process does.
            status = self._process.wait(READY_POLL_S)
        except subprocess.TimeoutExpired:
            if monotonic() < deadline:
                return
            raise ServerError(f"{self.name} did not answer in time: {self._tail()}") from None
        raise ServerError(f"{self.name} ended with status {status}: {self._tail()}")

    def _tail(self) -> str:
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def stop(self, *, clean: bool = True) -> None:
        if self._process is not None:
            end(self._process.pid, clean=clean)
            self._process.wait()
            self._process = None


class PeakMemory:
    """Samples a tree's memory in the background; `peak_mb` is the highest value seen."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_mb = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.peak_mb = max(self.peak_mb, memory_mb(self._pid))
