"""A Kafka Streams application in a process of its own, to be killed: it counts words.

`conformance/kafka/src/WordCount.java` is the application. It reads lines of words from one topic
and writes each word's count to another, whenever it changes; between the two are a repartition
topic, state in memory, and the state's changelog.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from penstock.testing.java import QUICK_COMPILER, KafkaToolsError, java_command, kafka_home

# What it needs to stop in order; by force after it.
CLOSING_S: Final = 30.0
STDERR_TAIL: Final = 4_000
OPTIONS: Final = (
    QUICK_COMPILER,
    "-XX:+UseSerialGC",
    "-Xmx256m",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
)


class WordCountApp:
    """One instance. A context manager; `kill` ends it as a crash does, `close` in order."""

    def __init__(
        self,
        bootstrap: str,
        application: str,
        lines: str,
        counts: str,
        folder: Path,
        settings: Mapping[str, str],
    ) -> None:
        """`folder` is for its state and its log; each instance has one of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "stderr.log"
        fixed = {
            "bootstrap.servers": bootstrap,
            "application.id": application,
            "state.dir": str(folder / "state"),
        }
        arguments = [f"{name}={value}" for name, value in {**fixed, **settings}.items()]
        command = java_command(kafka_home(), OPTIONS, "WordCount")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, lines, counts, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        # As it has told them, oldest first.
        self.states: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.states.append(line.strip())

    @property
    def is_running(self) -> bool:
        """Whether it has its tasks and works on them; KafkaToolsError if it has ended."""
        status = self._process.poll()
        if status is not None:
            tail = self._log.read_text(errors="replace")[-STDERR_TAIL:]
            raise KafkaToolsError(f"the application ended with status {status}: {tail}")
        return self.states[-1:] == ["RUNNING"]

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._finish()

    def close(self) -> None:
        """Let it leave its group and end."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(CLOSING_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._finish()

    def _finish(self) -> None:
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
