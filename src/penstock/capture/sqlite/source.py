"""The SQLite source: see the package for what users should know."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from threading import Event
from time import monotonic
from typing import Final

from penstock.capture.source import (
    CaptureError,
    Check,
    ChunkRequest,
    Item,
    Position,
    Source,
    SourceSettings,
    SourceStatus,
    Table,
)
from penstock.capture.sqlite.catalog import Catalog
from penstock.capture.sqlite.location import connect, errors_of, is_busy, path_of
from penstock.capture.sqlite.snapshot import SqliteSnapshot
from penstock.capture.sqlite.stream import Stream
from penstock.capture.sqlite.tables import COLUMNS_MAX, definitions, is_chosen
from penstock.capture.sqlite.watch import Watch

# What may wait to be read.
_ASKED_MAX: Final = 1_000
# Confirmed changes are deleted in short transactions of so many, when there are some or a while
# has passed; a lock that others hold for longer is not waited for.
_TRIM_PIECE: Final = 5_000
_TRIM_PIECES: Final = 20
_TRIM_AT_LEAST: Final = 1_000
_TRIM_EVERY_S: Final = 1.0
_TRIM_BUSY_MS: Final = 250


class SqliteSource(Source):
    """One database file. Connections are opened as they are needed."""

    kind = "sqlite"

    def __init__(self, settings: SourceSettings) -> None:
        if settings.options:
            raise CaptureError(
                f"captures of SQLite have no option {min(settings.options)}",
                advice="They have no options at all; leave it out.",
            )
        self.settings = settings
        self.path = path_of(settings)
        self._catalog = Catalog(settings)
        self._asked: deque[ChunkRequest] = deque()
        self._closed = Event()
        self._watch: Watch | None = None
        self._confirmed = 0
        self._trimmed = 0
        self._trimmed_at = 0.0

    # ---- looking ---------------------------------------------------------------------------

    def check(self) -> list[Check]:
        with closing(connect(self.path)) as connection, errors_of(self.path):
            return [
                Check("file", True, str(self.path)),
                self._check_journal(connection),
                self._check_writable(connection),
                *self._check_tables(connection),
                self._check_setup(connection),
            ]

    def _check_journal(self, connection: sqlite3.Connection) -> Check:
        (mode,) = connection.execute("PRAGMA main.journal_mode").fetchone()
        if mode == "wal":
            return Check("journal mode", True, mode)
        remedy = f"sqlite3 {self.path} 'PRAGMA journal_mode=WAL'"
        return Check("journal mode", False, f"{mode}: readers hold up writers", remedy, False)

    def _check_writable(self, connection: sqlite3.Connection) -> Check:
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        except sqlite3.OperationalError as error:
            remedy = (
                "Have the program that holds it end its transaction."
                if is_busy(error)
                else f"chmod u+w {self.path}, and its folder"
            )
            return Check("writable", False, str(error), remedy)
        return Check("writable", True, "yes")

    def _check_tables(self, connection: sqlite3.Connection) -> list[Check]:
        found = definitions(connection, self.settings)
        names = {definition.name for definition in found}
        listed = ", ".join(sorted(names)) or "none"
        remedy = "" if found else "Name tables that are there, or create them; * takes all."
        checks = [Check("tables", bool(found), listed, remedy, required=False)]
        for definition in found:
            if definition.rowid_name:
                checks.append(
                    Check(
                        f"key of {definition.name}",
                        False,
                        "none; the rowid serves, which VACUUM may change",
                        "Give the table an INTEGER PRIMARY KEY.",
                        required=False,
                    )
                )
            checks += [
                Check(
                    f"index {index.name} of {definition.name}",
                    False,
                    "unique over expressions: rows that REPLACE removes by it are not seen",
                    "Delete such rows before, or set PRAGMA recursive_triggers=ON.",
                    required=False,
                )
                for index in definition.unique
                if not index.columns
            ]
        for _, name, kind, columns, *_ in connection.execute("PRAGMA main.table_list"):
            if kind == "table" and is_chosen(name, self.settings) and name not in names:
                checks.append(
                    Check(
                        f"table {name}",
                        False,
                        f"{columns} columns, or none of rowid, _rowid_ and oid is free as its key",
                        f"Exclude it, or split it: at most {COLUMNS_MAX} columns and a key.",
                    )
                )
        return checks

    def _check_setup(self, connection: sqlite3.Connection) -> Check:
        if not self._catalog.is_installed(connection):
            return Check("triggers", True, "made when the capture runs")
        count = len(self._catalog.active(connection))
        return Check("triggers", True, f"on {count} tables")

    def tables(self) -> list[Table]:
        with closing(connect(self.path)) as connection, errors_of(self.path):
            return [definition.table for definition in definitions(connection, self.settings)]

    def status(self) -> SourceStatus:
        with closing(connect(self.path, read_only=True)) as connection, errors_of(self.path):
            if not self._catalog.is_installed(connection):
                return SourceStatus(None, details={"triggers": "not installed"})
            meta, top = self._catalog.meta(connection), self._catalog.top(connection)
            return SourceStatus(
                {"id": meta.id, "seq": meta.trimmed},
                retained_bytes=self._retained(connection),
                details={
                    "changes kept": str(top - meta.trimmed),
                    "last change": str(top),
                    "tables": str(len(self._catalog.active(connection))),
                },
            )

    def _retained(self, connection: sqlite3.Connection) -> int | None:
        """What the changelogs take of the file, where SQLite was built to tell."""
        prefix = self._catalog.names.prefix
        names = connection.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'table' AND substr(name, 1, ?) = ?",
            (len(prefix), prefix),
        ).fetchall()
        total = 0
        try:
            # One by one: so only their pages are looked at, and not the whole file.
            for name in names:
                (found,) = connection.execute(
                    "SELECT sum(pgsize) FROM dbstat WHERE aggregate = TRUE AND name = ?", name
                ).fetchone()
                total += int(found or 0)
        except sqlite3.OperationalError:
            return None
        return total

    # ---- making ----------------------------------------------------------------------------

    def setup(self) -> None:
        with closing(connect(self.path)) as connection, errors_of(self.path):
            self._catalog.install(connection)

    def remove(self) -> list[str]:
        with closing(connect(self.path)) as connection, errors_of(self.path):
            return self._catalog.remove(connection)

    def alter(self, statement: str) -> None:
        """Run an ALTER TABLE that SQLite refuses because triggers name the column, such as
        DROP COLUMN: in one transaction the triggers are taken away and made anew."""
        with closing(connect(self.path)) as connection, errors_of(self.path):
            if not self._catalog.is_installed(connection):
                raise CaptureError(f"{self.path}: capture {self.settings.name} is not set up")
            self._catalog.alter(connection, statement)

    # ---- reading ---------------------------------------------------------------------------

    def snapshot(self) -> SqliteSnapshot:
        return SqliteSnapshot(self.path, self._catalog)

    def stream(self, position: Position) -> Iterator[Item]:
        watch = self._watch = Watch(self.path)
        try:
            yield from Stream(
                self.path,
                self._catalog,
                position,
                watch=watch,
                asked=self._asked,
                closed=self._closed,
            ).items()
        finally:
            watch.close()

    def ask(self, request: ChunkRequest) -> None:
        if len(self._asked) >= _ASKED_MAX:
            raise CaptureError(f"{_ASKED_MAX} requests for rows of {self.path} wait already")
        self._asked.append(request)
        self._wake()

    def confirm(self, position: Position) -> None:
        self._confirmed = max(self._confirmed, int(position.get("seq", 0)))
        waiting = self._confirmed - self._trimmed
        late = monotonic() - self._trimmed_at >= _TRIM_EVERY_S
        if waiting and (waiting >= _TRIM_AT_LEAST or late):
            self._trim()

    def _trim(self) -> None:
        """Delete what is confirmed. If others are writing, there will be another time."""
        self._trimmed_at = monotonic()
        with closing(connect(self.path, busy_ms=_TRIM_BUSY_MS)) as connection:
            try:
                for _ in range(_TRIM_PIECES):
                    more = self._catalog.trim(connection, self._confirmed, _TRIM_PIECE)
                    self._trimmed = self._catalog.meta(connection).trimmed
                    if not more:
                        return
            except sqlite3.OperationalError as error:
                if not is_busy(error):
                    with errors_of(self.path):
                        raise

    def close(self) -> None:
        self._closed.set()
        self._wake()

    def _wake(self) -> None:
        watch = self._watch
        if watch is not None:
            watch.wake()
