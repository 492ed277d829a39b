"""Databases as the kit sees them: real servers, one form of SQL, one form of values.

A test is written once. What differs between the databases is here: how a type is called (`$text` in
a statement), how a table's full name reads, what a capture leaves behind, what a database that
cannot be captured looks like. Values are compared as events tell them: whole numbers, floating
point, texts, days and microseconds since 1970, bytes in base64.
"""

from __future__ import annotations

import datetime
import sqlite3
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Mapping
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from string import Template
from typing import Any, ClassVar, Final, Self
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pymysql
import pytest

from penstock.testing.mariadb import MariaDB
from penstock.testing.postgres import PostgresServer

KINDS: Final = ("postgresql", "mysql", "sqlite")
# What a test needs that uses a database of this kind.
MARKS: Final[Mapping[str, tuple[pytest.MarkDecorator, ...]]] = {
    "postgresql": (pytest.mark.databases,),
    "mysql": (pytest.mark.databases,),
    "sqlite": (),
}
# Events tell local times as if they were of UTC.
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND: Final = datetime.timedelta(microseconds=1)


def canonical(value: Any) -> Any:
    """A value as a driver gives it, in the form in which events tell it."""
    match value:
        case bool():
            return int(value)
        case bytes() | bytearray() | memoryview():
            return b64encode(value).decode()
        case Decimal():
            return str(value)
        case datetime.datetime():
            return (value.replace(tzinfo=datetime.UTC) - _EPOCH) // _MICROSECOND
        case datetime.date():
            return (value - _EPOCH.date()).days
    return value


class Session(ABC):
    """One connection of a user; each statement commits by itself, unless BEGIN says otherwise."""

    @abstractmethod
    def run(self, sql: str) -> list[tuple[Any, ...]]: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Database(ABC):
    """An empty database of a test's own."""

    kind: ClassVar[str]
    types: ClassVar[Mapping[str, str]]
    # Options of the source, so that decimals are told as texts everywhere.
    options: ClassVar[Mapping[str, str]] = {}
    # What TRUNCATE is called, and how it is told.
    truncates: ClassVar[bool] = True
    url: str

    @abstractmethod
    def connect(self) -> Session: ...

    @abstractmethod
    def full_name(self, table: str) -> str: ...

    @abstractmethod
    def leftovers(self) -> list[str]:
        """What is in the database that its user has not made."""

    @abstractmethod
    def unreachable(self) -> str:
        """The URL of a database that is not there."""

    @abstractmethod
    def forbidden(self) -> str:
        """The URL of this database as it cannot be captured: something is missing."""

    def sql(self, statement: str) -> str:
        """A statement in the words of this database."""
        return Template(statement).substitute(self.types)

    def run(self, *statements: str) -> None:
        with self.connect() as session:
            for statement in statements:
                session.run(self.sql(statement))

    def rows(self, table: str, *, extra: str = "") -> list[dict[str, Any]]:
        """What is in a table, in the form of events; with a column that is not listed."""
        with self.connect() as session:
            names = [*filter(None, (extra,)), *self.columns(session, table)]
            listed = ", ".join(names)
            found = session.run(f"SELECT {listed} FROM {table}")
        return [dict(zip(names, map(canonical, row), strict=True)) for row in found]

    def columns(self, session: Session, table: str) -> list[str]:
        schema = "current_schema()" if self.kind == "postgresql" else "database()"
        return [
            name
            for (name,) in session.run(
                "SELECT column_name FROM information_schema.columns WHERE table_schema = "
                f"{schema} AND table_name = '{table}' ORDER BY ordinal_position"
            )
        ]

    def tables(self, session: Session) -> list[str]:
        """The tables of the user."""
        schema = "current_schema()" if self.kind == "postgresql" else "database()"
        found = session.run(
            f"SELECT table_name FROM information_schema.tables WHERE table_schema = {schema}"
        )
        return sorted(name for (name,) in found)

    def close(self) -> None:  # noqa: B027
        """Nothing is left of it."""


# ---- PostgreSQL --------------------------------------------------------------------------


class _PostgresSession(Session):
    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)

    def run(self, sql: str) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(sql.encode())
        return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        self._connection.close()


class Postgres(Database):
    kind = "postgresql"
    types: ClassVar = {
        "int": "integer", "big": "bigint", "double": "double precision", "text": "text",
        "key": "varchar(50)", "bytes": "bytea", "bool": "boolean", "decimal": "numeric(20,4)",
        "date": "date", "time": "timestamp(6)", "large": "text", "hex": "'\\x",
        "truncate": "TRUNCATE",
    }  # fmt: skip
    options: ClassVar = {"decimal.handling.mode": "string"}

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.url = server.create_database()
        self.name = urlsplit(self.url).path[1:]

    def connect(self) -> Session:
        return _PostgresSession(self.url)

    def full_name(self, table: str) -> str:
        return f"public.{table}"

    def leftovers(self) -> list[str]:
        with self.connect() as session:
            found = session.run(
                "SELECT 'slot ' || slot_name FROM pg_replication_slots"
                " WHERE database = current_database() AND NOT temporary"
                " UNION ALL SELECT 'publication ' || pubname FROM pg_publication"
                " UNION ALL SELECT 'schema ' || nspname FROM pg_namespace WHERE nspname !~ '^pg_'"
                " AND nspname NOT IN ('public', 'information_schema')"
                " UNION ALL SELECT 'table ' || relname FROM pg_class WHERE relname ~ 'penstock'"
                " UNION ALL SELECT 'function ' || proname FROM pg_proc WHERE proname ~ 'penstock'"
            )
        return [text for (text,) in found]

    def unreachable(self) -> str:
        return self.server.url("nosuchdatabase").replace(f":{self.server.port}/", ":1/")

    def forbidden(self) -> str:
        role = f"poor_{uuid4().hex[:12]}"
        self.run(
            f"CREATE ROLE {role} LOGIN PASSWORD 'secret'",
            f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}",
        )
        return self.url.replace("//tester:", f"//{role}:")

    def close(self) -> None:
        # A slot that a failed test has left would keep the server's log for ever.
        with self.server.connect() as connection:
            connection.execute(
                # Only when it has ended can the slot be dropped; ten seconds at most.
                "SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots"
                " WHERE database = %s AND active", (self.name,),
            )  # fmt: skip
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE database = %s AND NOT active", (self.name,),
            )  # fmt: skip


# ---- MariaDB -----------------------------------------------------------------------------


class _MysqlSession(Session):
    def __init__(self, connection: pymysql.Connection[Any]) -> None:
        self._connection = connection

    def run(self, sql: str) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())

    def close(self) -> None:
        self._connection.close()


class Mysql(Database):
    kind = "mysql"
    types: ClassVar = {
        "int": "INT", "big": "BIGINT", "double": "DOUBLE", "text": "VARCHAR(200)",
        "key": "VARCHAR(50)", "bytes": "VARBINARY(200)", "bool": "SMALLINT",
        "decimal": "DECIMAL(20,4)", "date": "DATE", "time": "DATETIME(6)", "large": "LONGTEXT",
        "hex": "X'", "truncate": "TRUNCATE TABLE",
    }  # fmt: skip
    options: ClassVar = {"decimal": "string"}

    def __init__(self, server: MariaDB) -> None:
        self.server = server
        self.name = server.create_database()
        self.url = server.url(self.name)

    def connect(self) -> Session:
        return _MysqlSession(self.server.connect(self.name))

    def full_name(self, table: str) -> str:
        return f"{self.name}.{table}"

    def leftovers(self) -> list[str]:
        with self.connect() as session:
            found = session.run(
                "SELECT concat('table ', table_schema, '.', table_name) FROM"
                " information_schema.tables WHERE table_name LIKE '%penstock%' AND"
                # Other databases are of other tests.
                " (table_schema = database() OR table_schema LIKE '%penstock%')"
                " UNION ALL SELECT concat('trigger ', trigger_name) FROM"
                " information_schema.triggers WHERE trigger_schema = database()"
            )
        return [text for (text,) in found]

    def unreachable(self) -> str:
        return self.url.replace(f":{self.server.port}/", ":1/")

    def forbidden(self) -> str:
        user = f"poor_{uuid4().hex[:12]}"
        self.run(
            f"CREATE USER '{user}'@'%' IDENTIFIED BY 'secret'",
            f"GRANT SELECT ON {self.name}.* TO '{user}'@'%'",
        )
        return self.server.url(self.name, user=user, password="secret")

    def close(self) -> None:
        self.server.query(f"DROP DATABASE IF EXISTS {self.name}")


# ---- SQLite ------------------------------------------------------------------------------


class _SqliteSession(Session):
    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=60)
        self._connection.execute("PRAGMA synchronous = OFF")

    def run(self, sql: str) -> list[tuple[Any, ...]]:
        # One writer at a time: who begins wants to write, and waits for its turn here.
        return self._connection.execute("BEGIN IMMEDIATE" if sql == "BEGIN" else sql).fetchall()

    def close(self) -> None:
        self._connection.close()


class Sqlite(Database):
    kind = "sqlite"
    types: ClassVar = {
        "int": "INTEGER", "big": "INTEGER", "double": "REAL", "text": "TEXT", "key": "TEXT",
        "bytes": "BLOB", "bool": "INTEGER", "decimal": "TEXT", "date": "TEXT", "time": "TEXT",
        "large": "TEXT", "hex": "X'", "truncate": "DELETE FROM",
    }  # fmt: skip
    truncates: ClassVar = False

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{uuid4().hex}.db"
        self.url = f"sqlite:///{self.path}"
        with closing(sqlite3.connect(self.path)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")

    def connect(self) -> Session:
        return _SqliteSession(self.path)

    def columns(self, session: Session, table: str) -> list[str]:
        return [name for (name,) in session.run(f"SELECT name FROM pragma_table_info('{table}')")]

    def tables(self, session: Session) -> list[str]:
        found = session.run("SELECT name FROM sqlite_schema WHERE type = 'table'")
        return sorted(name for (name,) in found if "penstock" not in name and "sqlite_" not in name)

    def full_name(self, table: str) -> str:
        return table

    def leftovers(self) -> list[str]:
        with self.connect() as session:
            found = session.run(
                "SELECT type || ' ' || name FROM sqlite_schema WHERE name LIKE '%penstock%'"
            )
        return [text for (text,) in found]

    def unreachable(self) -> str:
        return f"sqlite:///{self.path.parent / 'nosuchfolder' / 'shop.db'}"

    def forbidden(self) -> str:
        many = ", ".join(f"c{number}" for number in range(1000))
        self.run(f"CREATE TABLE wide (id INTEGER PRIMARY KEY, {many})")
        return self.url


def new_database(request: pytest.FixtureRequest, kind: str, folder: Path) -> Database:
    """An empty database of this kind, on a server of the run, or in a folder of the test's own."""
    if kind == "postgresql":
        return Postgres(request.getfixturevalue("shared_postgres"))
    if kind == "mysql":
        return Mysql(request.getfixturevalue("shared_mariadb"))
    return Sqlite(folder)
