"""The captures that are compared, each in a process of its own that counts what it has delivered.

Both speak the same few words: a line `report` or `clear` on stdin is answered with one line of
JSON (changes, when the first and the last were delivered, processor time, lags), and so is `stamp`,
before lags are wanted. They end when their stdin does.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.broker.clients import ROOT
from benchmarks.capture.databases import Database

DEBEZIUM: Final = ROOT / ".kafka" / "debezium"
TIMEOUT_S: Final = 300.0
PREFIX: Final = "bench"


class PeerError(Exception):
    """A capture ended, or did not deliver in time."""


class Peer:
    """A running capture; a context manager."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._log = folder / "peer.log"
        folder.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=ROOT
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, word: str = "report") -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerError(f"it has ended: {self._tail()}") from error
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"it has ended: {self._tail()}")
        told: dict[str, Any] = json.loads(line)
        return told

    def wait_for(self, count: int) -> dict[str, Any]:
        """What it tells once it has delivered so many changes."""
        deadline, pause = monotonic() + TIMEOUT_S, threading.Event()
        while (told := self.ask())["count"] < count:
            if monotonic() > deadline:
                raise PeerError(f"{told['count']} of {count} changes in time: {self._tail()}")
            pause.wait(0.1)
        return told

    def _tail(self) -> str:
        return self._log.read_bytes()[-2000:].decode(errors="replace")


def penstock(database: Database, bootstrap: str, folder: Path, *, only_read: bool = False) -> Peer:
    """Ours: into the log at this address, or only as far as the events."""
    command = [sys.executable, "-m", "benchmarks.capture.ours"]
    words = [database.url, database.table, bootstrap, folder.name]
    return Peer([*command, *words, *(["read"] if only_read else [])], folder)


def debezium(database: Database, folder: Path) -> Peer:
    """Debezium's engine, with a file for its position; its defaults but for what is named."""
    if not (DEBEZIUM / "DebeziumBench.class").exists():
        raise SystemExit("Debezium is not there: run `make debezium-jars`")
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "name": PREFIX,
        "topic.prefix": PREFIX,
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": str(folder / "offsets"),
        "offset.flush.interval.ms": "1000",
        "schema.history.internal.file.filename": str(folder / "schemas"),
        # As ours is by default: no schema beside every value.
        "converter.schemas.enable": "false",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
        # Its poll interval is 500 ms, which would be its lag; the lowest that its docs advise.
        "poll.interval.ms": "1",
        **database.debezium(),
    }
    file = folder / "debezium.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    java = shutil.which("java") or "java"
    options = ["-Xmx1g", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
    return Peer(
        [java, *options, "-cp", f"{DEBEZIUM}:{DEBEZIUM}/*", "DebeziumBench", str(file)], folder
    )


def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="penstock-bench-"))
