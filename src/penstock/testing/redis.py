"""A Redis server of a test's own: a free loopback port, gone without a trace.

    with RedisServer() as server:
        cache = redis.Redis.from_url(server.url)

It is `redis-server` where that is installed. Debian's package `redis-tools` is enough, too: its
check program is the server by another name, and unlike the server's own package it starts no
service. Killed and started again it keeps its port, and with `appendonly="yes"` its data.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Final, Self

from penstock.errors import PenstockError
from penstock.testing.ending import end

_START_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 30.0
_ATTEMPTS: Final = 5
_INSTALL: Final = "Install it: sudo apt-get install --no-install-recommends redis-tools"


class RedisServerError(PenstockError):
    """The Redis server for tests is missing or did not start."""


class RedisServer:
    """One server. Options are those of redis.conf, with `_` for `-`."""

    def __init__(self, **options: str) -> None:
        self._options = {k.replace("_", "-"): v for k, v in options.items()}
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """What a sink is given."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> Self:
        """Start; ready for clients on return."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="penstock-redis-"))
        for _ in range(_ATTEMPTS):
            if self.port == 0:
                self.port = _free_port()
            if self._launch():
                return self
            if "Address already in use" not in self._log_text():
                break
            self.port = 0
        said = self._log_text()[-4000:]
        self.kill()
        raise RedisServerError(f"the Redis server did not start:\n{said}")

    def kill(self) -> None:
        """End it at once, with SIGKILL: it has no chance to do anything."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Shut down cleanly."""
        self._end(signal.SIGTERM)

    def _launch(self) -> bool:
        assert self._folder is not None
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self._folder),
            "save": "",
            "daemonize": "no",
            **self._options,
        }
        command = ["redis-server"]
        for name, value in options.items():
            command += [f"--{name}", value]
        with (self._folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                executable=_binary(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        pause = threading.Event()
        deadline = monotonic() + _START_TIMEOUT_S
        while monotonic() < deadline and self._process.poll() is None:
            if self._answers():
                return True
            pause.wait(0.02)
        return False

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(b"PING\r\n")
                # While it loads what it had saved, it says so instead.
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def _log_text(self) -> str:
        assert self._folder is not None
        return (self._folder / "server.log").read_text(errors="replace")

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        end(process, number, _STOP_TIMEOUT_S)

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


def _binary() -> str:
    found = shutil.which("redis-server") or shutil.which("redis-check-rdb")
    if found is None:
        raise RedisServerError("there is no Redis server on this machine", advice=_INSTALL)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
