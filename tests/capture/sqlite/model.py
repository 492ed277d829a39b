"""What a reader of the stream believes a table to be, and the table itself: they must agree."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from penstock.capture.source import (
    CREATE,
    DELETE,
    READ,
    TRUNCATE,
    UPDATE,
    Change,
    Chunk,
    Idle,
    Item,
    Part,
    Position,
    Row,
    SourceSettings,
    Table,
)
from penstock.capture.sqlite.source import SqliteSource
from penstock.capture.sqlite.tables import quoted
from penstock.capture.sqlite.values import fragment

TIMEOUT_S = 60.0


def settings(path: Path, **options: Any) -> SourceSettings:
    given = {"name": "shop", "url": f"sqlite:///{path}", "idle_ms": 5, **options}
    return SourceSettings(**given)


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[SqliteSource]:
    with SqliteSource(settings(path, **options)) as source:
        yield source


@contextmanager
def user(path: Path, *, wal: bool = True) -> Iterator[sqlite3.Connection]:
    """A user's connection: every statement commits by itself."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=60)) as connection:
        connection.execute(f"PRAGMA journal_mode = {'WAL' if wal else 'DELETE'}")
        connection.execute("PRAGMA synchronous = OFF")
        yield connection


class Replica:
    """Tables as they follow from the stream: by name, by key, a row as column -> fragment."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[Row, dict[str, bytes]]] = {}
        self.changes: list[Change] = []
        self.chunks: list[Chunk] = []
        self.position: Position = {}
        self._pending: list[Change] = []

    def snapshot(self, source: SqliteSource) -> None:
        with source.snapshot() as snapshot:
            self.position = snapshot.position
            self.tables = {}
            for table in snapshot.tables:
                rows = self.tables.setdefault(table.name, {})
                for piece in snapshot.rows(table):
                    rows.update((key_of(table, row), shown(table, row)) for row in piece)

    def follow(self, source: SqliteSource, looks: int | None = None) -> None:
        """Read until there is nothing more, or only some items and then break off."""
        stream = source.stream(self.position)
        deadline = time.monotonic() + TIMEOUT_S
        with closing(stream):  # type: ignore[type-var]
            for seen, item in enumerate(stream):
                if isinstance(item, Idle) or (looks is not None and seen >= looks):
                    self._pending = []
                    if isinstance(item, Idle):
                        self.position = item.position
                    return
                self.apply(item)
                assert time.monotonic() < deadline

    def apply(self, item: Item) -> None:
        if isinstance(item, Part):
            if item.is_first:
                assert not self._pending
            self._pending += item.changes
            if item.is_last:
                for change in self._pending:
                    self._change(change)
                self.changes += self._pending
                self._pending = []
                self.position = item.position
        elif isinstance(item, Chunk):
            self.chunks.append(item)

    def _change(self, change: Change) -> None:
        table, op, before, after, source, ts_us = change
        assert ts_us > 1_600_000_000_000_000
        assert table.name.encode() in source
        rows = self.tables.setdefault(table.name, {})
        assert op in {CREATE, UPDATE, DELETE, READ, TRUNCATE}
        if op == TRUNCATE:
            assert (before, after) == (None, None)
            rows.clear()
        if op == DELETE:
            assert before is not None
            assert after is None
        if op in {CREATE, READ}:
            assert before is None
        if before is not None:
            rows.pop(key_of(table, before), None)
        if after is not None:
            rows[key_of(table, after)] = shown(table, after)


def key_of(table: Table, row: Row) -> Row:
    names = [column.name for column in table.columns]
    return tuple(row[names.index(name)] for name in table.key)


def shown(table: Table, row: Row) -> dict[str, bytes]:
    return {column.name: part for column, part in zip(table.columns, row, strict=True)}


def truth(connection: sqlite3.Connection, table: Table) -> dict[Row, dict[str, bytes]]:
    """What the database itself says is in a table."""
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    names = [column.name for column in table.columns]
    real = {row[1] for row in connection.execute(f"PRAGMA table_xinfo({quoted(table.name)})")}
    listed = ", ".join(quoted(name) if name in real else name for name in names)
    rows = [
        tuple(fragment(value) for value in row)
        for row in connection.execute(f"SELECT {listed} FROM {quoted(table.name)}")
    ]
    connection.text_factory = str
    return {key_of(table, row): shown(table, row) for row in rows}


def assert_agree(path: Path, source: SqliteSource, replica: Replica) -> None:
    with closing(sqlite3.connect(path, timeout=60)) as connection:
        for table in source.tables():
            assert replica.tables.get(table.name, {}) == truth(connection, table), table.name
