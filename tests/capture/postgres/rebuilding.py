"""A table rebuilt from what a source tells, to be compared with the table itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import orjson
import psycopg
from psycopg import sql

from penstock.capture.postgres.options import object_name
from penstock.capture.postgres.pgoutput import parse_lsn
from penstock.capture.postgres.source import PostgresSource
from penstock.capture.source import (
    DELETE,
    TRUNCATE,
    UNAVAILABLE,
    Chunk,
    Idle,
    Item,
    Part,
    Position,
    Row,
    Snapshot,
    SourceSettings,
    Table,
)

Connection = psycopg.Connection[Any]
Values = dict[str, Any]
MISSING = orjson.loads(UNAVAILABLE)


def values(table: Table, row: Row) -> Values:
    return {
        column.name: orjson.loads(fragment)
        for column, fragment in zip(table.columns, row, strict=True)
    }


class Rebuilt:
    """Tables by their full name, rows by their key."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[tuple[Any, ...], Values]] = {}
        self.position: Position = {}
        self.transactions: list[str] = []

    def copy(self) -> Rebuilt:
        return copy.deepcopy(self)

    def rows(self, name: str) -> dict[tuple[Any, ...], Values]:
        return self.tables.setdefault(name, {})

    def read(self, snapshot: Snapshot) -> None:
        self.position = snapshot.position
        for table in snapshot.tables:
            for rows in snapshot.rows(table):
                self.upsert(table, rows)

    def upsert(self, table: Table, rows: Sequence[Row]) -> None:
        known = self.rows(table.full_name)
        for row in rows:
            found = values(table, row)
            known[tuple(found[name] for name in table.key)] = found

    def apply(self, item: Item) -> None:
        if isinstance(item, Part):
            self._part(item)
        elif isinstance(item, Chunk):
            assert not item.problem, item.problem
            self.upsert(item.table, item.rows)
        else:
            self.position = item.position

    def _part(self, part: Part) -> None:
        for change in part.changes:
            table = change.table
            rows = self.rows(table.full_name)
            if change.op == TRUNCATE:
                rows.clear()
                continue
            before = values(table, change.before) if change.before is not None else None
            after = values(table, change.after) if change.after is not None else None
            old = before or after
            assert old is not None
            key = tuple(old[name] for name in table.key)
            known = rows.pop(key, None)
            if change.op == DELETE or after is None:
                continue
            for name, value in after.items():
                if value == MISSING and known is not None:
                    after[name] = known[name]
            rows[tuple(after[name] for name in table.key)] = after
        if part.is_last:
            self.position = part.position
            self.transactions.append(part.transaction)


def name_of(url: str) -> str:
    """The name of a database, also of one whose URL is wrong."""
    return url.rpartition("/")[2].partition("?")[0] or "test"


def slot_of(url: str) -> str:
    """The replication slot of a capture that has the name of its database, and its publication."""
    return object_name(name_of(url))


def settings(url: str, name: str = "", **others: Any) -> SourceSettings:
    """Named after the database: slots have the name of their capture and are the whole server's,
    which several processes use."""
    return SourceSettings(
        name or name_of(url), url, **{"idle_ms": 20, "heartbeat_ms": 200, **others}
    )


@contextmanager
def opened(url: str, **others: Any) -> Iterator[PostgresSource]:
    """A source that is set up, and takes everything away at the end."""
    with PostgresSource(settings(url, **others)) as source:
        source.setup()
        try:
            yield source
        finally:
            source.remove()


def start(source: PostgresSource) -> Rebuilt:
    """The tables as they are now."""
    rebuilt = Rebuilt()
    with source.snapshot() as snapshot:
        rebuilt.read(snapshot)
    return rebuilt


def end_of_log(connection: Connection) -> int:
    row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])


def follow(
    source: PostgresSource,
    rebuilt: Rebuilt,
    until: Callable[[], bool],
    *,
    confirm: bool = False,
    timeout_s: float = 60,
) -> list[Item]:
    """Stream into the tables until something holds; what came."""
    deadline = monotonic() + timeout_s
    items: list[Item] = []
    stream = source.stream(rebuilt.position)
    try:
        for item in stream:
            rebuilt.apply(item)
            if not isinstance(item, Idle):
                items.append(item)
            if confirm and rebuilt.position:
                source.confirm(rebuilt.position)
            if until():
                break
            assert monotonic() < deadline, "the stream did not get there in time"
    finally:
        stream.close()  # type: ignore[attr-defined]
    return items


def catch_up(
    source: PostgresSource, rebuilt: Rebuilt, connection: Connection, **others: Any
) -> list[Item]:
    """Stream all that is committed by now."""
    end = end_of_log(connection)
    return follow(source, rebuilt, lambda: int(rebuilt.position["lsn"]) >= end, **others)


def changes(items: Sequence[Item]) -> list[Any]:
    return [change for item in items if isinstance(item, Part) for change in item.changes]


def assert_same(rebuilt: Rebuilt, connection: Connection, name: str, key: str = "id") -> None:
    """The rebuilt table has exactly the rows of the real one, value by value."""
    schema, _, table = name.partition(".")
    with connection.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        cursor.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier(schema, table)))
        real = {str(row[key]): {k: _plain(v) for k, v in row.items()} for row in cursor}
    columns = next(iter(real.values()), {}).keys()
    told = {
        str(row[key]): {k: _plain(row.get(k)) for k in columns}
        for row in rebuilt.rows(name).values()
    }
    assert told.keys() == real.keys()
    for number, row in real.items():
        assert told[number] == row, number


def _plain(value: Any) -> Any:
    return None if value is None else str(value)
