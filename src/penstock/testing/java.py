"""The Java process under the tools: where the jars are, how it is started and spoken to.

It reads one JSON object per line and answers each with one line (`conformance/kafka/src` holds
its other half). It serves any number of dumps, clients and brokers, one request at a time, for
starting Java costs more than what it is asked to do. It ends with `close()`, or when this process
ends: its stdin closes then. A request that gets no answer in time ends it too, because a late
answer would be taken for the next one's.

This may touch the jars and the process, nothing else.
"""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import IO, Any, Final

import orjson

from penstock.errors import PenstockError

HOME_VARIABLE: Final = "PENSTOCK_KAFKA_HOME"
# Of Kafka's own classes, in the folder of the jars; `scripts/kafka-archive.sh` makes it.
ARCHIVE_FILE: Final = "kafka.jsa"
QUICK_COMPILER: Final = "-XX:TieredStopAtLevel=1"
# Short-lived, light work: the quick compiler and the collector without threads start soonest.
JVM_OPTIONS: Final = (
    QUICK_COMPILER,
    "-XX:+UseSerialGC",
    "-Xmx512m",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
)
READ_BYTES: Final = 1 << 20
STDERR_TAIL_BYTES: Final = 4000
DEFAULT_TIMEOUT_S: Final = 60.0


class KafkaToolsError(PenstockError):
    """Apache Kafka's jars are not there, or its Java process did not do what it was asked."""


class JavaClientError(KafkaToolsError):
    """The Java client ended a call with an error: its class, Kafka's code for it, its words."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.error = str(answer["error"])
        self.code = int(answer["code"])
        self.says_retriable = bool(answer["retriable"])
        super().__init__(f"{self.error} (code {self.code}): {answer['message']}")


def kafka_home() -> Path:
    """The folder with `jars/` and `classes/`: from the environment, or `.kafka` of the checkout."""
    named = os.environ.get(HOME_VARIABLE)
    if named:
        places = [Path(named)]
    else:
        here = Path(__file__).resolve()
        places = [folder / ".kafka" for folder in (*here.parents, Path.cwd(), *Path.cwd().parents)]
    for place in places:
        if any((place / "jars").glob("kafka-clients-*.jar")):
            return place
    looked = places[0] if named else ".kafka in the checkout"
    raise KafkaToolsError(
        f"the jars of Apache Kafka are not there (looked for {looked}): run `make kafka-jars`",
        advice=f"Run `make kafka-jars`, or set {HOME_VARIABLE} to a folder that has them in jars/.",
    )


def java_command(home: Path, options: tuple[str, ...], main_class: str) -> list[str]:
    """The command line that runs a class of ours or from the jars."""
    return _command(options, [home / "classes", home / "jars" / "*"], main_class)


def kafka_command(home: Path, options: tuple[str, ...], main_class: str) -> list[str]:
    """The command line that runs a program of Kafka's; it starts from the class archive, if there
    is one and it is to start soon."""
    archive = home / ARCHIVE_FILE
    if QUICK_COMPILER in options and archive.exists():
        # An archive that does not fit is ignored, and nothing is said of it.
        options += (f"-XX:SharedArchiveFile={archive}", "-Xshare:auto")
        options += ("-Xlog:disable", "-Xlog:all=error:stderr")
    # An archive bears no folder of classes.
    return _command(options, [home / "jars" / "*"], main_class)


def _command(options: tuple[str, ...], classpath: list[Path], main_class: str) -> list[str]:
    java_home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{java_home}/bin") if java_home else None
    java = java or shutil.which("java")
    if java is None:
        raise KafkaToolsError(
            "there is no java on this machine", advice="Install a JDK, 17 or newer."
        )
    return [java, *options, "-cp", os.pathsep.join(map(str, classpath)), main_class]


class JavaProcess:
    """The Java half: takes requests one after the other, answers each with one line."""

    def __init__(self, home: Path) -> None:
        if not (home / "classes" / "JavaClient.class").exists():
            raise KafkaToolsError(
                f"the Java client is not compiled in {home}", advice="Run `make kafka-jars`."
            )
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            java_command(home, JVM_OPTIONS, "JavaClient"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
        )
        self._lock = threading.Lock()
        self._unread = bytearray()

    def call(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one request and wait for its answer; an error comes as `JavaClientError`."""
        with self._lock:
            try:
                self._write(orjson.dumps(request) + b"\n")
                line = self._read_line(timeout_s)
            except (KafkaToolsError, BrokenPipeError) as failure:
                # Whatever comes later would be taken for the answer to another request.
                self._process.kill()
                self._process.wait()
                raise KafkaToolsError(f"{failure}; Java said: {self._stderr_tail()}") from failure
        answer: dict[str, Any] = orjson.loads(line)
        if not answer["ok"]:
            raise JavaClientError(answer)
        return answer

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._process.stdin.fileno(), rest) :]

    def _read_line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = monotonic() + timeout_s
        scanned = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while (end := self._unread.find(b"\n", scanned)) < 0:
                scanned = len(self._unread)
                if not selector.select(max(0.0, deadline - monotonic())):
                    raise KafkaToolsError(f"no answer from Java within {timeout_s} s")
                chunk = os.read(self._process.stdout.fileno(), READ_BYTES)
                if not chunk:
                    raise KafkaToolsError("the Java process ended before it answered")
                self._unread += chunk
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return line

    def _stderr_tail(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - STDERR_TAIL_BYTES))
        return self._stderr.read().decode(errors="replace").strip() or "nothing"

    def close(self) -> None:
        """End the process: it stops by itself once its stdin is closed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()
