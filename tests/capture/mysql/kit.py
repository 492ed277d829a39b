"""What tests of this source share: reading a stream to its end, and tables rebuilt from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.capture.mysql.chunks import Place
from penstock.capture.mysql.connection import TableChangedError
from penstock.capture.mysql.source import MysqlSource
from penstock.capture.source import (
    Change,
    Chunk,
    Item,
    Part,
    Position,
    Row,
    SourceSettings,
    Table,
)
from penstock.testing.mariadb import MariaDB

Rebuilt = dict[str, dict[Row, dict[str, bytes]]]


def source_of(server: MariaDB, database: str, **settings: Any) -> MysqlSource:
    """A source that tells soon that nothing happens."""
    settings = {"name": f"capture-{database}", "url": server.url(database), **settings}
    return MysqlSource(SourceSettings(idle_ms=20, **settings))


def end_of(server: MariaDB) -> Place:
    file, at, *_ = server.query("SHOW MASTER STATUS")[0]
    return Place.of(str(file), int(at))


def place_of(position: Position) -> Place:
    return Place.of(str(position["file"]), int(position["pos"]))


def read_to_end(
    server: MariaDB, source: MysqlSource, position: Position, *, most: int | None = None
) -> tuple[list[Item], Position]:
    """All up to where the binlog is now, or so many items; and the position that was reached."""
    end = end_of(server)
    items: list[Item] = []
    stream = source.stream(position)
    for item in stream:
        if isinstance(item, Chunk):
            items.append(item)
            continue
        if isinstance(item, Part):
            items.append(item)
            if not item.is_last:
                continue
        position = item.position
        if place_of(position) >= end or (most is not None and len(items) >= most):
            break
    stream.close()  # type: ignore[attr-defined]
    return items, position


def changes_of(items: Iterable[Item]) -> list[Change]:
    return [change for item in items if isinstance(item, Part) for change in item.changes]


def row_of(table: Table, row: Row) -> dict[str, bytes]:
    assert len(row) == len(table.columns)
    return {column.name: value for column, value in zip(table.columns, row, strict=True)}


def key_of(table: Table, row: dict[str, bytes]) -> Row:
    return tuple(row[name] for name in (table.key or tuple(row)))


def apply(tables: Rebuilt, change: Change) -> None:
    """What a change does to the tables that are rebuilt; it must fit what is there."""
    table = change.table
    rows = tables.setdefault(table.name, {})
    if change.op == "t":
        rows.clear()
    if change.before is not None:
        before = row_of(table, change.before)
        known = rows.pop(key_of(table, before))
        # Columns that were added since the row was seen are not known of it.
        assert all(before[name] == value for name, value in known.items() if name in before)
    if change.after is not None:
        after = row_of(table, change.after)
        key = key_of(table, after)
        assert key not in rows
        rows[key] = after


def snapshot_of(source: MysqlSource) -> tuple[Rebuilt, Position]:
    """All tables, and where they were; again if one was altered meanwhile."""
    while True:
        try:
            return _snapshot_of(source)
        except TableChangedError:
            continue


def _snapshot_of(source: MysqlSource) -> tuple[Rebuilt, Position]:
    found: Rebuilt = {}
    with source.snapshot() as snapshot:
        for table in snapshot.tables:
            rows = found.setdefault(table.name, {})
            for some in snapshot.rows(table):
                for values in some:
                    row = row_of(table, values)
                    rows[key_of(table, row)] = row
        return found, snapshot.position
