"""A real OpenSearch of a test's own: one node, a free loopback port, gone without a trace.

    with OpenSearch() as server:
        urllib.request.urlopen(server.url)

It runs from the jars that `make opensearch-jars` fetches to `.kafka/opensearch`, inside a small
program of ours, because the distribution's own start refuses to run as root. Killed and started
again it keeps its port and its data. It ends with this process: its stdin closes then.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from penstock.errors import PenstockError
from penstock.testing.java import KafkaToolsError, java_command

HOME_VARIABLE: Final = "PENSTOCK_OPENSEARCH_HOME"
# For tests: it is there soonest, and small.
QUICK: Final = (
    "-Xms256m",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Djava.awt.headless=true",
)
# What the distribution's own start gives to Java 17, where nobody has changed its heap of 1 GB.
AS_SHIPPED: Final = (
    "-Xms1g",
    "-Xmx1g",
    "-XX:+UseG1GC",
    "-XX:G1ReservePercent=25",
    "-XX:InitiatingHeapOccupancyPercent=30",
    "-XX:MaxDirectMemorySize=512m",
    "-XX:+AlwaysPreTouch",
    "-XX:-OmitStackTraceInFastThrow",
    "-Xss1m",
    "-Djava.awt.headless=true",
    "-Djava.locale.providers=SPI,COMPAT",
    "-Dio.netty.noUnsafe=true",
    "-Dio.netty.noKeySetOptimization=true",
    "-Dio.netty.recycler.maxCapacityPerThread=0",
    "-Dio.netty.allocator.numDirectArenas=0",
)
_START_TIMEOUT_S: Final = 110.0
_STOP_TIMEOUT_S: Final = 30.0
_PORT: Final = re.compile(rb"^(\d+)\n", re.MULTILINE)
_INSTALL: Final = f"Run `make opensearch-jars`, or set {HOME_VARIABLE} to where its jars are."


class OpenSearchServerError(PenstockError):
    """The OpenSearch server for tests is missing or did not start."""


def opensearch_home() -> Path | None:
    """The folder with the jars and the node's class, if it is there."""
    named = os.environ.get(HOME_VARIABLE)
    here = Path(__file__).resolve()
    places = [Path(named)] if named else [f / ".kafka" / "opensearch" for f in here.parents]
    return next((place for place in places if (place / "SearchNode.class").exists()), None)


class OpenSearch:
    """One node. Settings are those of opensearch.yml."""

    def __init__(self, java_options: tuple[str, ...] = QUICK, **settings: str) -> None:
        self._java_options = java_options
        self._settings = settings
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """What a sink is given."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start; ready for clients on return."""
        home = opensearch_home()
        if home is None:
            raise OpenSearchServerError("the jars of OpenSearch are not there", advice=_INSTALL)
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="penstock-search-"))
            (self._folder / "config").mkdir()
        try:
            command = java_command(home, self._java_options, "SearchNode")
        except KafkaToolsError as failure:
            raise OpenSearchServerError(str(failure), advice=failure.advice) from failure
        command[command.index("-cp") + 1] = os.pathsep.join((str(home), str(home / "*")))
        command += [str(self._folder), str(self.port)]
        command += [f"{name}={value}" for name, value in self._settings.items()]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0
            )
        line = self._port_line()
        if not line.isdigit():
            self.kill()
            said = (self._folder / "server.log").read_text(errors="replace")[-4000:]
            raise OpenSearchServerError(f"OpenSearch did not start:\n{line}\n{said}")
        self.port = int(line)
        return self

    def kill(self) -> None:
        """End it at once, with SIGKILL: it has no chance to do anything."""
        if self._process is not None:
            self._process.kill()
        self._collect()

    def stop(self) -> None:
        """Shut down cleanly."""
        self._collect()

    def _port_line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        found = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            # A log line may come before the port, which is the last that it prints.
            while not _PORT.search(found) and selector.select(_START_TIMEOUT_S):
                chunk = os.read(self._process.stdout.fileno(), 4096)
                if not chunk:
                    break
                found += chunk
        port = _PORT.search(found)
        return (port[1] if port else found).decode(errors="replace")

    def _collect(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
