"""A MariaDB server of a test's own: Debian's binary, a free loopback port, gone without a trace.

    with MariaDB() as server:
        url = server.url(server.create_database())

It writes a row binlog that tells everything a capture needs. Data, socket and temporary files lie
in one folder of its own: a mariadbd that starts empties what looks like its leftovers in its
tmpdir, so servers must never share one. As root it runs as `nobody`. Stopped or crashed and
started again, it keeps its port and its data.

Only the package `mariadb-server-core` is needed, which starts no service of the system.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

import pymysql

from penstock.errors import PenstockError
from penstock.testing.ending import end

USER: Final = "penstock"
PASSWORD: Final = "penstock"

_START_TIMEOUT_S: Final = 90.0
_STOP_TIMEOUT_S: Final = 60.0
_BINARIES: Final = ("mariadbd", "/usr/sbin/mariadbd", "/usr/libexec/mariadbd")
_SCRIPTS: Final = (Path("/usr/share/mysql"), Path("/usr/share/mariadb"))
_SYSTEM_TABLES: Final = (
    "mysql_system_tables.sql",
    "mysql_performance_tables.sql",
    "mysql_system_tables_data.sql",
)
# Small and quick: a test's server may lose what an operating system's crash would lose.
SMALL: Final = {
    "innodb-buffer-pool-size": "64M",
    "innodb-log-file-size": "32M",
    "innodb-flush-log-at-trx-commit": "2",
    "sync-binlog": "0",
    "max-connections": "60",
    "performance-schema": "OFF",
}
CAPTURED: Final = {
    "server-id": "1",
    "log-bin": "binlog",
    "binlog-format": "ROW",
    "binlog-row-image": "FULL",
    "binlog-row-metadata": "FULL",
    "character-set-server": "utf8mb4",
}


class DatabaseServerError(PenstockError):
    """The database server for tests is missing or did not start."""


class MariaDB:
    """One server. Options are those of mariadbd without the dashes, over those of a capture."""

    kind = "mariadb"
    options_base: Mapping[str, str] = {**SMALL, **CAPTURED}

    def __init__(self, **options: str) -> None:
        self._folder: Path | None = None
        self._options = {
            **self.options_base,
            **{k.replace("_", "-"): v for k, v in options.items()},
        }
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def folder(self) -> Path:
        assert self._folder is not None, "not started"
        return self._folder

    @property
    def log_file(self) -> Path:
        return self.folder / "server.log"

    def url(self, database: str = "", *, user: str = USER, password: str = PASSWORD) -> str:
        """What a capture is given."""
        return f"mysql://{user}:{password}@127.0.0.1:{self.port}/{database}"

    def connect(self, database: str | None = None, **options: Any) -> pymysql.Connection[Any]:
        """A connection that commits by itself, unless told otherwise."""
        settings: dict[str, Any] = {
            "autocommit": True,
            "charset": "utf8mb4",
            # The loopback needs no TLS, and making ready for it takes long.
            "ssl_disabled": True,
            **options,
        }
        return pymysql.connect(
            host="127.0.0.1",
            port=self.port,
            user=settings.pop("user", USER),
            password=settings.pop("password", PASSWORD),
            database=database,
            **settings,
        )

    def query(self, sql: str, database: str | None = None) -> list[tuple[Any, ...]]:
        """Run one statement on a connection of its own."""
        with self.connect(database) as connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())

    def create_database(self) -> str:
        """A new empty database; its name."""
        name = f"t{uuid4().hex[:12]}"
        self.query(f"CREATE DATABASE {name}")
        return name

    def start(self) -> Self:
        """Start; ready for clients on return."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="penstock-db-"))
            # Another user runs the server; it must reach its own folders.
            self._folder.chmod(0o755)
            for name in ("data", "tmp"):
                (self.folder / name).mkdir()
                self._give_away(self.folder / name)
            self._initialise()
        for _ in range(5):
            if self.port == 0:
                self.port = _free_port()
            if self._launch():
                return self
            if "Address already in use" not in self._tail():
                break
            self.port = 0
        tail = self._tail()
        self.crash()
        raise DatabaseServerError(f"the {self.kind} server did not start:\n{tail}")

    def stop(self) -> None:
        """Shut down cleanly."""
        self._end(signal.SIGTERM)

    def crash(self) -> None:
        """End it at once, with SIGKILL: it has no chance to do anything."""
        self._end(signal.SIGKILL)

    def restart(self) -> Self:
        """Stop cleanly if it runs, and start again on the same data and port."""
        self.stop()
        return self.start()

    def _initialise(self) -> None:
        """Make the system tables, as mariadb-install-db does, and the user of the tests."""
        scripts = next((s for s in _SCRIPTS if (s / _SYSTEM_TABLES[0]).exists()), None)
        if scripts is None:
            raise DatabaseServerError("MariaDB's system tables are not installed", advice=_INSTALL)
        sql = ["create database mysql;", "use mysql;"]
        sql += ["set @current_hostname='localhost';", "set @skip_auth_anonymous=1;"]
        sql += [(scripts / name).read_text(encoding="utf-8") for name in _SYSTEM_TABLES]
        sql += [
            "FLUSH PRIVILEGES;",
            f"CREATE USER '{USER}'@'%' IDENTIFIED BY '{PASSWORD}';",
            f"GRANT ALL ON *.* TO '{USER}'@'%' WITH GRANT OPTION;",
            "",
        ]
        command = [self._binary(), "--no-defaults", "--bootstrap", *self._place()]
        command += [f"--{name}={value}" for name, value in SMALL.items()]
        done = subprocess.run(
            command, input="\n".join(sql).encode(), capture_output=True, timeout=120, check=False
        )
        if done.returncode != 0 or b"ERROR:" in done.stderr:
            text = done.stderr.decode(errors="replace")[-4000:]
            raise DatabaseServerError(f"no system tables for MariaDB could be made:\n{text}")

    def _place(self) -> list[str]:
        folder = self.folder
        place = [f"--datadir={folder / 'data'}", f"--tmpdir={folder / 'tmp'}"]
        return [*place, "--user=nobody"] if os.geteuid() == 0 else place

    def _command(self) -> list[str]:
        return [
            self._binary(),
            "--no-defaults",
            *self._place(),
            f"--socket={self.folder / 'tmp' / 's'}",
            f"--pid-file={self.folder / 'tmp' / 'pid'}",
            "--bind-address=127.0.0.1",
            f"--port={self.port}",
            "--skip-name-resolve",
            *(
                f"--{name}={value}" if value else f"--{name}"
                for name, value in self._options.items()
            ),
        ]

    def _binary(self) -> str:
        found = next(filter(None, map(shutil.which, _BINARIES)), None)
        if found is None:
            raise DatabaseServerError("mariadbd is not installed", advice=_INSTALL)
        return found

    def _launch(self) -> bool:
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder / "data",
                start_new_session=True,
            )
        pause = threading.Event()
        deadline = monotonic() + _START_TIMEOUT_S
        while monotonic() < deadline and self._process.poll() is None:
            try:
                self.connect().close()
                return True
            except pymysql.MySQLError:
                pause.wait(0.05)
        return False

    def _tail(self) -> str:
        return self.log_file.read_text(errors="replace")[-4000:]

    def _give_away(self, folder: Path) -> None:
        if os.geteuid() == 0:
            shutil.chown(folder, "nobody")

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
        self.crash()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


_INSTALL: Final = "Install it: sudo apt-get install --no-install-recommends mariadb-server-core"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
