"""All tables as they were at one place of the sequence.

In WAL mode readers hold up nobody: several connections begin to read, until all of them see the
same last number, and with it the same tables. In rollback mode a reader keeps writers from
committing, so the file is copied first, and read at leisure; writers wait only while it is copied.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from time import time_ns
from typing import Any, Final

from penstock.capture.source import CaptureError, DatabaseBusyError, Row, Snapshot, Table
from penstock.capture.sqlite.catalog import Catalog, Version, schema_version
from penstock.capture.sqlite.location import connect, errors_of, transaction
from penstock.capture.sqlite.reading import Pages
from penstock.capture.sqlite.stream import blocks_of
from penstock.capture.sqlite.tables import quoted
from penstock.capture.sqlite.values import lenient

_TRIES: Final = 100
_ROWS_FIRST: Final = 500
_ROWS_MAX: Final = 5_000
_PIECE_BYTES: Final = 16 << 20


class SqliteSnapshot(Snapshot):
    """Holds its connections open, each in a read transaction, until it is closed."""

    def __init__(self, path: Path, catalog: Catalog) -> None:
        self._path = path
        self._catalog = catalog
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._open: list[sqlite3.Connection] = []
        self._free: SimpleQueue[sqlite3.Connection] = SimpleQueue()
        self._ts_us = time_ns() // 1000
        try:
            with errors_of(path):
                self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        catalog = self._catalog
        unchanged = True
        for _ in range(_TRIES):
            with closing(connect(self._path)) as writer:
                if not catalog.is_installed(writer):
                    raise CaptureError(
                        f"{self._path}: capture {catalog.settings.name} is not set up",
                        advice=f"Run it: penstock capture run {catalog.settings.name}",
                    )
                followed = catalog.follow(writer)
                (mode,) = writer.execute("PRAGMA main.journal_mode").fetchone()
                source = self._path
                if mode != "wal":
                    with transaction(writer):
                        # A copy counts its schema's versions for itself: compare before.
                        unchanged = schema_version(writer) == followed
                        source = self._copy(writer)
            first = self._reader(source)
            version = schema_version(first)
            if unchanged if mode != "wal" else version == followed:
                break
            self._drop()
        else:
            raise DatabaseBusyError(f"{self._path}: its tables are changed all the time")
        meta, top = catalog.meta(first), catalog.top(first)
        self.position = {"id": meta.id, "seq": top}
        self._versions: dict[Table, Version] = {v.table: v for v in catalog.active(first)}
        self.tables = list(self._versions)
        for _ in range(catalog.settings.snapshot_workers - 1):
            other = self._reader(source)
            # One that came later sees more; what it lacks in speed we do without.
            if (schema_version(other), catalog.top(other)) != (version, top):
                self._open.remove(other)
                other.close()
        for connection in self._open:
            self._free.put(connection)

    def _copy(self, writer: sqlite3.Connection) -> Path:
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="penstock-snapshot-")
        target = Path(self._folder.name) / "copy.db"
        target.unlink(missing_ok=True)
        with closing(sqlite3.connect(target)) as copy:
            writer.backup(copy)
        return target

    def _reader(self, path: Path) -> sqlite3.Connection:
        made = connect(path, read_only=True)
        self._open.append(made)
        made.execute("BEGIN")
        # The transaction begins with the first look.
        self._catalog.top(made)
        return made

    def rows(self, table: Table, *, where: str = "") -> Iterator[list[Row]]:
        version = self._versions.get(table)
        if version is None:
            raise CaptureError(f"table {table.full_name} is not part of this snapshot")
        pages = Pages(version.definition)
        connection = self._free.get()
        try:
            with errors_of(self._path):
                yield from self._pieces(connection, pages, where)
        finally:
            self._free.put(connection)

    def _pieces(
        self, connection: sqlite3.Connection, pages: Pages, where: str
    ) -> Iterator[list[Row]]:
        """By cursor, each piece as large as its rows allow."""
        query, done, size = pages.everything(where), 0, _ROWS_FIRST
        connection.text_factory = str
        cursor = connection.execute(query)
        while True:
            try:
                found: list[Any] = cursor.fetchmany(size)
            except sqlite3.OperationalError as error:
                if "decode" not in str(error) or connection.text_factory is lenient:
                    raise
                # Text that is not UTF-8: again from here, with patience.
                connection.text_factory = lenient
                cursor = connection.execute(f"{query} LIMIT -1 OFFSET ?", (done,))
                continue
            if not found:
                return
            done += len(found)
            rows = pages.decode(found)
            sample = rows[:: max(1, len(rows) // 20)]
            average = sum(len(part) for row in sample for part in row) / len(sample)
            size = max(10, min(int(_PIECE_BYTES / max(1.0, average)), size * 4, _ROWS_MAX))
            yield rows

    def source(self, table: Table) -> bytes:
        return blocks_of(table, self._path, self._catalog).at(self._ts_us, "true")

    def estimate(self, table: Table) -> int | None:
        version = self._versions.get(table)
        if version is None or version.definition.without_rowid:
            return None
        connection = self._free.get()
        try:
            with errors_of(self._path):
                low, high = connection.execute(
                    f"SELECT (SELECT min(rowid) FROM {quoted(table.name)}), "
                    f"(SELECT max(rowid) FROM {quoted(table.name)})"
                ).fetchone()
        except CaptureError:
            return None
        finally:
            self._free.put(connection)
        return 0 if high is None else int(high) - int(low) + 1

    def _drop(self) -> None:
        while self._open:
            self._open.pop().close()

    def close(self) -> None:
        self._drop()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
