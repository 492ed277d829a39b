"""Asks a captured database a query of its user's: one statement, read only, at a known position.

The answer's rows come some at a time, each value with what its column means. The position is one
that the log has passed when it has all that the answer shows.
"""

from __future__ import annotations

import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from penstock.capture.source import Position, SourceSettings
from penstock.cli.verifying.report import VerifyError
from penstock.cli.verifying.values import Meaning

ROWS: Final = 5_000
_READ_ADVICE: Final = "A query is one SELECT statement, which is asked read only."
_TIME_ADVICE: Final = "Give it more time with --timeout."
# Steps of SQLite's machine between two looks at the clock.
_STEPS: Final = 100_000


@dataclass(frozen=True, slots=True)
class AnswerColumn:
    """A column of an answer; without a meaning, what its values and the store say counts."""

    name: str
    meaning: Meaning | None = None
    is_float: bool = False


class Answer(ABC):
    """A query that was asked; a context manager's value, and of use only inside of it."""

    columns: Sequence[AnswerColumn]

    @abstractmethod
    def rows(self) -> Iterator[Sequence[Sequence[Any]]]:
        """The rows, some at a time."""

    @abstractmethod
    def position(self) -> Position:
        """A position of the database that has all that the answer showed; asked after the rows."""


class Database(ABC):
    """One captured database."""

    # As `Source.kind`.
    kind: str

    def __init__(self, settings: SourceSettings) -> None:
        self.settings = settings

    @abstractmethod
    def asked(self, sql: str, timeout_s: float) -> Any:
        """A context manager that gives the Answer to a query; VerifyError with the database's own
        words if it does not take it."""


def open_database(kind: str, settings: SourceSettings) -> Database:
    """The database of a source of this kind."""
    made: dict[str, type[Database]] = {
        "postgresql": _Postgres, "mysql": _Mysql, "sqlite": _Sqlite,
    }  # fmt: skip
    return made[kind](settings)


def refused(database: str, words: str, advice: str = _READ_ADVICE) -> VerifyError:
    """What a database says against a query."""
    return VerifyError(f"{database} does not take the query: {words.strip()}", advice=advice)


# ---- PostgreSQL --------------------------------------------------------------------------------

_BY_OID: Final[dict[int, Meaning]] = {
    16: "boolean", 20: "number", 21: "number", 23: "number", 26: "number", 700: "real",
    701: "number", 1700: "number", 17: "bytes", 1082: "date", 1083: "time", 1266: "time",
    1114: "timestamp", 1184: "timestamp", 1186: "interval", 2950: "uuid", 114: "json",
    3802: "json",
}  # fmt: skip
# Psycopg's own values for these; all others are read as the text that the server gives.
_AS_VALUES: Final = frozenset({16, 17, 20, 21, 23, 26, 700, 701, 1700})
_PG_FLOATS: Final = frozenset({700, 701})


class _PostgresAnswer(Answer):
    def __init__(self, connection: Any, cursor: Any, system: str) -> None:
        self._connection, self._cursor, self._system = connection, cursor, system
        types = connection.adapters.types
        self._arrays = {each.array_oid for each in types if each.array_oid}
        self.columns = [
            AnswerColumn(
                each.name,
                "json" if each.type_code in self._arrays else _BY_OID.get(each.type_code, "text"),
                each.type_code in _PG_FLOATS,
            )
            for each in cursor.description
        ]

    def rows(self) -> Iterator[Sequence[Sequence[Any]]]:
        while found := self._cursor.fetchmany(ROWS):
            yield found

    def position(self) -> Position:
        from penstock.capture.postgres.pgoutput import parse_lsn

        row = self._connection.execute(
            "SELECT pg_catalog.pg_current_wal_insert_lsn()::text"
        ).fetchone()
        return {"lsn": parse_lsn(row[0]), "system": self._system}


class _Postgres(Database):
    kind = "postgresql"

    @contextmanager
    def asked(self, sql: str, timeout_s: float) -> Iterator[Answer]:
        import psycopg

        from penstock.capture.postgres.connect import PostgresUrl

        url = PostgresUrl(self.settings.url)
        with closing(url.connect(application="penstock-verify")) as connection:
            try:
                self._prepare(connection, timeout_s)
                row = connection.execute(
                    "SELECT system_identifier::text FROM pg_catalog.pg_control_system()"
                ).fetchone()
                assert row is not None
                with connection.transaction(), connection.cursor("penstock_verify") as cursor:
                    # Only a query can be one of a cursor.
                    cursor.execute(sql.encode())
                    yield _PostgresAnswer(connection, cursor, row[0])
            except psycopg.errors.QueryCanceled as error:
                raise refused(url.shown, str(error), _TIME_ADVICE) from error
            except psycopg.Error as error:
                told = (error.diag.message_primary, error.diag.message_hint)
                raise refused(url.shown, ". ".join(filter(None, told)) or str(error)) from error

    def _prepare(self, connection: Any, timeout_s: float) -> None:
        import psycopg
        from psycopg.types.string import TextLoader

        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        connection.execute(f"SET statement_timeout = {max(1, int(timeout_s * 1000))}")
        connection.execute("SET IntervalStyle = iso_8601")
        for each in connection.adapters.types:
            if each.oid not in _AS_VALUES:
                connection.adapters.register_loader(each.oid, TextLoader)


# ---- MariaDB and MySQL -------------------------------------------------------------------------

_BY_CODE: Final[dict[int, Meaning]] = {
    0: "number", 1: "number", 2: "number", 3: "number", 4: "float6", 5: "number", 7: "timestamp",
    8: "number", 9: "number", 10: "date", 11: "time", 12: "timestamp", 13: "number", 14: "date",
    16: "bytes", 245: "json", 246: "number",
}  # fmt: skip
_MYSQL_FLOATS: Final = frozenset({4, 5})


class _MysqlAnswer(Answer):
    def __init__(self, url: str, cursor: Any) -> None:
        self._url, self._cursor = url, cursor
        # Of texts the values tell whether they are bytes.
        self.columns = [
            AnswerColumn(str(each[0]), _BY_CODE.get(each[1]), each[1] in _MYSQL_FLOATS)
            for each in cursor.description
        ]

    def rows(self) -> Iterator[Sequence[Sequence[Any]]]:
        while found := self._cursor.fetchmany(ROWS):
            yield found

    def position(self) -> Position:
        from penstock.capture.mysql.connection import Address, binlog_end, connect, server_of

        # One of its own: this one is inside of a transaction.
        with closing(connect(Address.of(self._url))) as connection:
            server = server_of(connection)
            file, at, _ = binlog_end(connection, server)
            return {"file": file, "pos": at, "server": server.uid}


class _Mysql(Database):
    kind = "mysql"

    @contextmanager
    def asked(self, sql: str, timeout_s: float) -> Iterator[Answer]:
        import pymysql
        from pymysql.cursors import SSCursor

        from penstock.capture.mysql.connection import Address, connect
        from penstock.capture.mysql.replication import force_close

        address = Address.of(self.settings.url)
        connection = connect(address, read_timeout_s=max(1, int(timeout_s)))
        try:
            if address.database:
                connection.select_db(address.database)
            cursor = SSCursor(connection)
            cursor.execute("SET SESSION TRANSACTION READ ONLY")
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
            cursor.execute(sql)
            if cursor.description is None:
                raise refused(str(address), "it has no rows")
            yield _MysqlAnswer(self.settings.url, cursor)
        except pymysql.MySQLError as error:
            words = str(error.args[1]) if len(error.args) > 1 else str(error)
            raise refused(str(address), words) from error
        finally:
            # What is left of an answer is not waited for.
            force_close(connection)


# ---- SQLite ------------------------------------------------------------------------------------


class _SqliteAnswer(Answer):
    def __init__(self, connection: sqlite3.Connection, cursor: Any, catalog: Any) -> None:
        self._connection, self._cursor, self._catalog = connection, cursor, catalog
        # What a value is, is known of each value only.
        self.columns = [AnswerColumn(str(each[0])) for each in cursor.description]

    def rows(self) -> Iterator[Sequence[Sequence[Any]]]:
        while found := self._cursor.fetchmany(ROWS):
            yield found

    def position(self) -> Position:
        return {
            "id": self._catalog.meta(self._connection).id,
            "seq": self._catalog.top(self._connection),
        }


class _Sqlite(Database):
    kind = "sqlite"

    @contextmanager
    def asked(self, sql: str, timeout_s: float) -> Iterator[Answer]:
        from penstock.capture.sqlite.catalog import Catalog
        from penstock.capture.sqlite.location import connect, path_of
        from penstock.capture.sqlite.values import lenient

        path = path_of(self.settings)
        catalog = Catalog(self.settings)
        with closing(connect(path, read_only=True)) as connection:
            connection.text_factory = lenient
            deadline = time.monotonic() + timeout_s
            connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
            connection.execute("BEGIN")
            if not catalog.is_installed(connection):
                raise VerifyError(
                    f"{path}: capture {self.settings.name} is not set up",
                    advice=f"Run it: penstock capture run {self.settings.name}",
                )
            try:
                cursor = connection.execute(sql)
                if cursor.description is None:
                    raise refused(str(path), "it has no rows")
                yield _SqliteAnswer(connection, cursor, catalog)
            except (sqlite3.Error, sqlite3.Warning) as error:
                advice = _TIME_ADVICE if time.monotonic() > deadline else _READ_ADVICE
                raise refused(str(path), str(error), advice) from error
