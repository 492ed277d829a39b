"""The databases that are captured, each with one table and ways to change it quickly.

Every database has the same table and gets the same changes: inserts, then updates of some of the
rows, then deletes of some, in transactions of a hundred rows. `written_us` says when a row was
handed to the database, by the clock of this machine.
"""

from __future__ import annotations

import sqlite3
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, Final

from penstock.testing.mariadb import MariaDB
from penstock.testing.postgres import PostgresServer

TABLE: Final = "bench"
COLUMNS: Final = "id, customer, country, amount, quantity, note, created, written_us"
ROWS_PER_TRANSACTION: Final = 100
NOTE: Final = "a note of some length, as people write them; it is about sixty bytes"


def now_us() -> int:
    return time.time_ns() // 1000


def row(number: int) -> str:
    return (
        f"({number}, 'customer-{number % 5000}', 'DE', '{number % 10_000}.{number % 100:02d}', "
        f"{number % 7}, '{NOTE}', '2026-11-01 12:34:56', {now_us()})"
    )


def insertion(numbers: range) -> str:
    """Rows in one statement, as text: to bind their values one by one took the drivers longer than
    the databases took to write them, so that the load was the limit of what was measured."""
    return f"INSERT INTO {TABLE} ({COLUMNS}) VALUES {', '.join(map(row, numbers))}"


class Database(ABC):
    """One database server with the table in it."""

    name: str
    # The table's name as the captures call it.
    table: str = TABLE

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    @property
    @abstractmethod
    def url(self) -> str:
        """What our capture is given."""

    @abstractmethod
    def connect(self) -> Any:
        """A connection of Python's database interface; it does not commit by itself."""

    @abstractmethod
    def debezium(self) -> dict[str, str]:
        """What Debezium's engine must be told to read this database; {} if it cannot."""

    def execute(self, sql: str) -> None:
        connection = self.connect()
        connection.cursor().execute(sql)
        connection.commit()
        connection.close()

    def make_table(self, rows: int = 0) -> None:
        self.execute(f"DROP TABLE IF EXISTS {TABLE}")
        self.execute(
            f"CREATE TABLE {TABLE} (id bigint PRIMARY KEY, customer varchar(40) NOT NULL, "
            "country char(2), amount decimal(12,2), quantity int, note text, "
            "created timestamp NULL, written_us bigint)"
        )
        self.insert(range(rows), per_transaction=10_000)

    def insert(self, numbers: range, per_transaction: int = ROWS_PER_TRANSACTION) -> None:
        connection = self.connect()
        cursor = connection.cursor()
        for first in range(numbers.start, numbers.stop, per_transaction):
            chosen = range(first, min(first + per_transaction, numbers.stop))
            for some in range(chosen.start, chosen.stop, ROWS_PER_TRANSACTION):
                part = range(some, min(some + ROWS_PER_TRANSACTION, chosen.stop))
                cursor.execute(insertion(part))
            connection.commit()
        connection.close()

    def change(self, count: int, first: int = 0) -> int:
        """About so many changes: half inserts, 4 in 10 updates, 1 in 10 deletes; how many."""
        inserts = count // 2
        self.insert(range(first, first + inserts))
        connection = self.connect()
        cursor = connection.cursor()
        done = inserts
        step = ROWS_PER_TRANSACTION
        for low in range(first, first + int(count * 0.4), step):
            cursor.execute(
                f"UPDATE {TABLE} SET amount = amount + 1, written_us = {now_us()} "
                f"WHERE id >= {low} AND id < {low + step}"
            )
            done += cursor.rowcount
            connection.commit()
        for low in range(first, first + int(count * 0.1), step):
            cursor.execute(f"DELETE FROM {TABLE} WHERE id >= {low} AND id < {low + step}")
            done += cursor.rowcount
            connection.commit()
        connection.close()
        return done

    def steadily(self, per_second: int, seconds: float, first: int) -> int:
        """Insert at a steady rate, ten rows per transaction; how many rows."""
        connection = self.connect()
        cursor = connection.cursor()
        pause = threading.Event()
        begun, done = monotonic(), 0
        while (passed := monotonic() - begun) < seconds:
            if done > passed * per_second:
                pause.wait(0.001)
                continue
            cursor.execute(insertion(range(first + done, first + done + 10)))
            connection.commit()
            done += 10
        connection.close()
        return done


class Postgres(Database):
    """PostgreSQL as Debian has it, with its own fsync."""

    name = "postgresql"
    table = f"public.{TABLE}"

    def __init__(self) -> None:
        self._server = PostgresServer(settings={"fsync": "on", "synchronous_commit": "on"})
        self._url = ""

    def start(self) -> None:
        self._server.start()
        self._url = self._server.create_database()

    def stop(self) -> None:
        self._server.remove()

    @property
    def url(self) -> str:
        return self._url

    def connect(self) -> Any:
        import psycopg

        return psycopg.connect(self._url, cursor_factory=psycopg.ClientCursor)

    def debezium(self) -> dict[str, str]:
        import psycopg.conninfo

        told = psycopg.conninfo.conninfo_to_dict(self._url)
        return {
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "plugin.name": "pgoutput",
            "database.hostname": str(told["host"]),
            "database.port": str(told["port"]),
            "database.user": str(told["user"]),
            "database.password": str(told.get("password") or "none"),
            "database.dbname": str(told["dbname"]),
            "table.include.list": self.table,
            "publication.autocreate.mode": "filtered",
        }


class Maria(Database):
    """MariaDB as Debian has it."""

    name = "mariadb"

    def __init__(self) -> None:
        self._server = MariaDB(innodb_flush_log_at_trx_commit="1", innodb_buffer_pool_size="256M")
        self._database = ""

    @property
    def table(self) -> str:  # type: ignore[override]
        return f"{self._database}.{TABLE}"

    def start(self) -> None:
        self._server.start()
        self._database = self._server.create_database()

    def stop(self) -> None:
        self._server.crash()

    @property
    def url(self) -> str:
        return self._server.url(self._database)

    def connect(self) -> Any:
        return self._server.connect(self._database, autocommit=False)

    def debezium(self) -> dict[str, str]:
        from urllib.parse import urlsplit

        told = urlsplit(self.url)
        return {
            "connector.class": "io.debezium.connector.mariadb.MariaDbConnector",
            "database.hostname": str(told.hostname),
            "database.port": str(told.port),
            "database.user": str(told.username),
            "database.password": str(told.password),
            "database.server.id": "4711",
            "database.include.list": self._database,
            "table.include.list": self.table,
            "schema.history.internal": "io.debezium.storage.file.history.FileSchemaHistory",
        }


class Sqlite(Database):
    """A SQLite file in WAL mode."""

    name = "sqlite"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-bench-")
        self._path = Path(self._folder.name) / "bench.db"

    def start(self) -> None:
        connection = sqlite3.connect(self._path)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.close()

    def stop(self) -> None:
        self._folder.cleanup()

    @property
    def url(self) -> str:
        return f"sqlite:///{self._path}"

    def connect(self) -> Any:
        return sqlite3.connect(self._path, timeout=60)

    def debezium(self) -> dict[str, str]:
        return {}


DATABASES: Final[dict[str, Callable[[], Database]]] = {
    "postgresql": Postgres,
    "mariadb": Maria,
    "sqlite": Sqlite,
}
