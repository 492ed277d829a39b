"""The processes of the demo: started, watched, started again when they are killed, and stopped.

A process that ends while it is wanted is started again, for all of them go on where they were. One
that ends before it was ever ready has something to say that starting again does not mend: its last
error is raised as ours. Each is the leader of a session of its own, so that Ctrl-C reaches only us,
and they can be stopped in order; where the system can do it (Linux), they are told to stop if we
are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.errors import PenstockError

PARTS_FILE: Final = "parts.json"
MAX_RESTARTS: Final = 10
PAUSE_S: Final = 1.0
READY_S: Final = 120.0
STOP_S: Final = 90.0
SETTLED_S: Final = 10.0
_POLL_S: Final = 0.05
_TAIL_BYTES: Final = 20_000
_DEATH_SIGNAL: Final = 1


class PartError(PenstockError):
    """A process of the demo has ended for good."""


@dataclass(slots=True)
class Part:
    """One process, through all of its lives."""

    name: str
    command: Sequence[str]
    # Given each line of its output, which otherwise goes into the log.
    heard: Callable[[str], None] | None
    log: Path
    process: subprocess.Popen[bytes] | None = None
    is_ready: bool = False
    was_ready: bool = False
    restarts: int = 0
    # Starts since it was last ready, and when to try again.
    attempts: int = 0
    due: float | None = None
    began: float = 0.0
    readers: list[threading.Thread] = field(default_factory=list)

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def is_settled(self) -> bool:
        """Whether it has lived so long that it seems to be well."""
        return self.is_alive and time.monotonic() - self.began > SETTLED_S


class Crew:
    """All processes of the demo. Everything but what is heard happens on the main thread."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = dict(environment)
        self._parts: dict[str, Part] = {}
        self._before_start = _dies_with_us()
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    @property
    def parts(self) -> Mapping[str, Part]:
        return self._parts

    @property
    def restarts(self) -> int:
        return sum(each.restarts for each in self._parts.values())

    def start(
        self, name: str, command: Sequence[str], heard: Callable[[str], None] | None = None
    ) -> Part:
        """Start a process; `heard` is given each line of its output, else the log has it."""
        part = Part(name, command, heard, self._folder / "logs" / f"{name}.log")
        self._parts[name] = part
        self._launch(part)
        return part

    def again(self, name: str, command: Sequence[str]) -> None:
        """From the next start on, with another command."""
        self._parts[name].command = command

    def run_once(self, name: str, command: Sequence[str]) -> None:
        """Run something to its end; PartError if it fails."""
        part = self.start(name, command)
        assert part.process is not None
        try:
            status = part.process.wait(READY_S)
        except subprocess.TimeoutExpired:
            raise PartError(
                f"{name} takes longer than {READY_S:.0f} s", advice=_see(part)
            ) from None
        finally:
            self.end(name)
        if status:
            raise self._failure(part)

    def _launch(self, part: Part) -> None:
        part.is_ready, part.due, part.began = False, None, time.monotonic()
        part.attempts += 1
        if part.process is not None:
            # What it had started goes too, before another takes its place.
            _end_session(part.process)
        with part.log.open("ab") as log:
            part.process = subprocess.Popen(
                part.command, cwd=self._folder, env=self._environment, start_new_session=True,
                stdin=subprocess.PIPE, stderr=log,
                stdout=log if part.heard is None else subprocess.PIPE,
                preexec_fn=self._before_start,  # noqa: PLW1509
            )  # fmt: skip
        if part.heard is not None:
            reader = threading.Thread(
                target=_listen, args=(part.process, part.heard), name=f"demo-{part.name}",
                daemon=True,
            )  # fmt: skip
            reader.start()
            part.readers.append(reader)
        self._tell()

    def _tell(self) -> None:
        """Which processes there are, for whoever wants to look at them."""
        pids = {each.name: each.process.pid for each in self._parts.values()
                if each.process is not None and each.is_alive}  # fmt: skip
        beside = self._folder / f"{PARTS_FILE}.new"
        with contextlib.suppress(OSError):
            beside.write_bytes(orjson.dumps(pids))
            beside.replace(self._folder / PARTS_FILE)

    def ready(self, name: str) -> None:
        """It does what it is for."""
        part = self._parts[name]
        part.is_ready = part.was_ready = True
        part.attempts = 0

    def look(self) -> list[str]:
        """Start again what has ended; what was started. PartError if one cannot go on."""
        started = []
        now = time.monotonic()
        for part in list(self._parts.values()):
            if part.is_alive or part.process is None:
                continue
            if part.due is None:
                killed = part.process.returncode < 0
                if not (part.was_ready or killed) or part.attempts > MAX_RESTARTS:
                    raise self._failure(part)
                part.due = now + (PAUSE_S if part.attempts else 0)
            if now >= part.due:
                part.restarts += 1
                self._launch(part)
                started.append(part.name)
        return started

    def wait_ready(self, name: str, check: Callable[[], bool], stop: threading.Event) -> bool:
        """Wait until it is; False if the demo is to stop before."""
        deadline = time.monotonic() + READY_S
        while not stop.is_set():
            if check():
                self.ready(name)
                return True
            self.look()
            if time.monotonic() > deadline:
                part = self._parts[name]
                raise PartError(f"{name} is not ready after {READY_S:.0f} s", advice=_see(part))
            stop.wait(_POLL_S)
        return False

    def _failure(self, part: Part) -> PartError:
        for reader in part.readers:
            reader.join(1)
        said = last_error(part.log)
        return PartError(f"{part.name}: {said}", advice=_see(part))

    def stop(self, name: str, timeout_s: float = STOP_S) -> bool:
        """Ask it to stop, and wait; whoever does not is ended. Whether it ended by itself."""
        part = self._parts.get(name)
        if part is None or part.process is None:
            return True
        process, part.process = part.process, None
        clean = True
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                clean = False
        _end_session(process)
        for reader in part.readers:
            reader.join(1)
        self._tell()
        return clean

    def end(self, name: str) -> None:
        """At once, with all that it has started."""
        part = self._parts.pop(name, None)
        if part is not None and part.process is not None:
            _end_session(part.process)
        self._tell()

    def kill_all(self) -> None:
        """End every process now, in any state, and wait for none: for who leaves at once."""
        for part in list(self._parts.values()):
            if part.process is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(part.process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            (self._folder / PARTS_FILE).unlink(missing_ok=True)

    def end_all(self, order: Sequence[str], timeout_s: float) -> None:
        """Stop whatever is left, in this order."""
        for name in order:
            self.stop(name, timeout_s)
        for name in list(self._parts):
            self.end(name)
        with contextlib.suppress(OSError):
            (self._folder / PARTS_FILE).unlink(missing_ok=True)


def penstock(*arguments: str) -> list[str]:
    """A command of ours, by this Python."""
    return [sys.executable, "-m", "penstock.cli", *arguments]


def last_error(log: Path) -> str:
    """What a process said at last: its error and what to do, or its last line."""
    try:
        text = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        text = ""
    lines = [line for line in text.splitlines() if line.strip()]
    at = max((n for n, line in enumerate(lines) if line.startswith("error:")), default=None)
    if at is None:
        return lines[-1].strip() if lines else "it has ended without a word"
    found = [lines[at].removeprefix("error:").strip()]
    for line in lines[at + 1 :]:
        if not line.startswith("      "):
            break
        found.append(line.strip())
    return "\n       ".join(found)


def last_warning(log: Path) -> str:
    """The last warning that a process gave; empty if there was none."""
    try:
        text = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""
    told = [line for line in text.splitlines() if line.startswith("warning:")]
    return told[-1].removeprefix("warning:").strip() if told else ""


def _see(part: Part) -> str:
    return f"All that it said is in {part.log}"


def _listen(process: subprocess.Popen[bytes], heard: Callable[[str], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        heard(line.decode(errors="replace").rstrip("\n"))
    process.stdout.close()


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its session: a driver that was killed leaves its workers behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


def _dies_with_us() -> Callable[[], None] | None:
    """What makes a new process end when we do, whatever ended us; Linux alone knows how."""
    if not sys.platform.startswith("linux"):
        return None
    library: Any = ctypes.CDLL(None, use_errno=True)

    def bind() -> None:
        library.prctl(_DEATH_SIGNAL, signal.SIGTERM)

    return bind


def memory_bytes(pids: Sequence[int]) -> int:
    """What processes and those that they have started occupy, shared memory counted once; 0 where
    the system does not tell."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    total, open_, seen = 0, list(pids), set[int]()
    while open_:
        pid = open_.pop()
        if pid in seen:
            continue
        seen.add(pid)
        open_ += parents.get(pid, [])
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total
