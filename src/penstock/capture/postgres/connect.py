"""Connections to PostgreSQL, and what their errors mean.

Every session of ours prints values in one form, whatever the database, the role or the server is
set to: ISO dates, UTC, all digits of floats, bytea in hex, money without a locale. The decoders of
`values` rely on it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from penstock.capture.source import CaptureError, DatabaseBusyError, DatabaseUnreachableError
from penstock.connecting import why

Connection = psycopg.Connection[tuple[Any, ...]]

CONNECT_TIMEOUT_S: Final = 15
_FORMS: Final = {
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    # Whoever holds a table longer than this for an ALTER makes us try again later.
    "lock_timeout": "600000",
    "default_transaction_read_only": "off",
    "synchronous_commit": "local",
    # Rows that a policy hides from us must be an error, not a gap.
    "row_security": "off",
}
_GUESS: Final = " This probably means the server terminated abnormally"


class PostgresUrl:
    """A libpq URL; everything that libpq knows may stand in it, sslmode too."""

    def __init__(self, url: str) -> None:
        scheme, found, rest = url.partition("://")
        try:
            self._given = conninfo_to_dict(url)
        except psycopg.Error as error:
            told = str(error).strip()
            if found and scheme not in {"postgresql", "postgres"}:
                told = f"it begins with {scheme}://"
            elif "@" in rest and rest.rpartition("@")[0] in told:
                # With the password in it.
                told = "it cannot be read"
            raise CaptureError(
                f"not a URL of PostgreSQL: {told}",
                advice="postgresql://USER:PASSWORD@HOST:PORT/DATABASE",
            ) from None
        self.shown = f"{self._host()}/{self._given.get('dbname', '')}"

    def connect(self, *, application: str, replication: bool = False) -> Connection:
        """A connection that commits each statement by itself."""
        options = " ".join(f"-c {name}={value}" for name, value in _FORMS.items())
        given = str(self._given.get("options") or "")
        settings: dict[str, Any] = {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "application_name": application[:63],
            "keepalives_idle": 30,
            "keepalives_interval": 10,
            "keepalives_count": 3,
            **self._given,
            "client_encoding": "UTF8",
            "options": f"{given} {options}".strip(),
        }
        if replication:
            settings["replication"] = "database"
        try:
            return psycopg.connect(make_conninfo(**settings), autocommit=True)
        except psycopg.Error as error:
            raise self._explain(error) from error

    def _host(self) -> str:
        """HOST:PORT for people; several hosts, and a folder of sockets, as they were given."""
        host = str(self._given.get("host") or "")
        if not host or "," in host or host.startswith("/"):
            return host or "local socket"
        return f"{host}:{self._given.get('port') or os.environ.get('PGPORT') or 5432}"

    def _explain(self, error: psycopg.Error) -> CaptureError:
        trouble = why(error)
        if trouble.kind == "refused":
            told = f"cannot open {self.shown}: {trouble.reason}"
            return CaptureError(told, advice=trouble.advice)
        if trouble.kind == "busy":
            return DatabaseBusyError(f"{self.shown} lets nobody in now: {trouble.reason}")
        told = f"cannot reach PostgreSQL at {self.shown}: {trouble.reason}"
        return DatabaseUnreachableError(told, advice=trouble.advice)


class TableLockedError(CaptureError):
    """Somebody holds a table for an ALTER or the like, longer than we wait."""

    retriable = True
    advice = "It is tried again; SELECT * FROM pg_locks WHERE NOT granted shows who waits for whom."


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Errors of the server as ours: lost connections are worth another try, the rest is not."""
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        raise CaptureError(
            f"{doing}: {one_line(error)}",
            advice="penstock capture check URL shows what to grant.",
        ) from error
    except psycopg.errors.LockNotAvailable as error:
        raise TableLockedError(f"{doing}: {one_line(error)}") from error
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        told = one_line(error).partition(_GUESS)[0]
        # With a code it is the server that has answered.
        kind = DatabaseBusyError if error.sqlstate else DatabaseUnreachableError
        raise kind(f"{doing}: {told}") from error
    except psycopg.Error as error:
        raise CaptureError(f"{doing}: {one_line(error)}") from error


@contextmanager
def cancelled_after(connection: Connection, seconds: float) -> Iterator[None]:
    """Cancel what the connection does when it takes longer: psycopg's QueryCanceled."""
    timer = threading.Timer(seconds, connection.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def as_bytes(connection: Connection) -> bool:
    """Whether text must be asked for as it is: a database without an encoding may hold anything."""
    return connection.info.parameter_status("server_encoding") == "SQL_ASCII"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
