"""Following a source: what it tells, and the tables that follow from it.

The end of a stream is nowhere: a test writes a mark into a table of its own and reads up to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from time import monotonic
from typing import Any, Final

import orjson

from penstock.capture.source import (
    CREATE,
    DELETE,
    READ,
    TRUNCATE,
    UNAVAILABLE,
    UPDATE,
    Change,
    Chunk,
    Idle,
    Item,
    Part,
    Position,
    Row,
    Source,
    SourceSettings,
    Table,
)
from penstock.capture.sources import open_source
from tests.capture.kit.databases import Database

TIMEOUT_S: Final = 60.0
MARKS: Final = "marks"
_NUMBERS: Final = itertools.count(1)

Values = dict[str, Any]
Key = tuple[Any, ...]


def settings_of(database: Database, **others: Any) -> SourceSettings:
    # On PostgreSQL it is the name of a replication slot, and those are of the whole server.
    name = f"kit_{sha256(database.url.encode()).hexdigest()[:12]}"
    given = {"name": name, "url": database.url, "idle_ms": 10, "options": database.options}
    return SourceSettings(**{**given, **others})


@contextmanager
def opened(database: Database, **others: Any) -> Iterator[Source]:
    """A source that is set up; what it made in the database stays."""
    with open_source(settings_of(database, **others)) as source:
        source.setup()
        yield source


def make_marks(database: Database) -> None:
    database.run(f"CREATE TABLE {MARKS} (id $int PRIMARY KEY)")


def mark(database: Database) -> int:
    """Write a mark; its number."""
    number = next(_NUMBERS)
    database.run(f"INSERT INTO {MARKS} VALUES ({number})")
    return number


def values(table: Table, row: Row) -> Values:
    """A row by the names of its columns."""
    names = [column.name for column in table.columns]
    return {name: orjson.loads(part) for name, part in zip(names, row, strict=True)}


def told(change: Change) -> tuple[str, str, Values | None, Values | None]:
    """A change as something that can be compared."""
    table, op, before, after, *_ = change
    return (
        table.name,
        op,
        None if before is None else values(table, before),
        None if after is None else values(table, after),
    )


def changes(items: list[Item]) -> list[Change]:
    """The changes of a stream, without the marks and what a source reads again by itself."""
    return [
        change
        for item in items
        if isinstance(item, Part)
        for change in item.changes
        if change.table.name != MARKS
    ]


def follow(
    source: Source,
    position: Position,
    is_over: Callable[[Item], bool],
    *,
    see: Callable[[Item], None] = lambda item: None,
) -> list[Item]:
    """All that comes from a position on, until one item ends it. Positions go through JSON."""
    deadline = monotonic() + TIMEOUT_S
    items: list[Item] = []
    stream = source.stream(orjson.loads(orjson.dumps(dict(position))))
    try:
        for item in stream:
            see(item)
            if not isinstance(item, Idle):
                items.append(item)
            if is_over(item):
                return items
            assert monotonic() < deadline, f"the stream did not get there: {items[-5:]}"
    finally:
        stream.close()  # type: ignore[attr-defined]
    raise AssertionError("the stream has ended by itself")


def has_mark(number: int) -> Callable[[Item], bool]:
    """Whether an item ends a transaction at or behind a mark."""
    seen: list[bool] = []

    def check(item: Item) -> bool:
        if isinstance(item, Part):
            seen.extend(
                orjson.loads(change.after[0]) == number
                for change in item.changes
                if change.table.name == MARKS and change.after is not None
            )
            return item.is_last and any(seen)
        return False

    return check


class Replica:
    """The tables as they follow from what a source told. What does not fit is an error."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[Key, Values]] = {}
        self.position: Position = {}

    def read(self, source: Source) -> None:
        """Take a snapshot."""
        with source.snapshot() as snapshot:
            self.position = snapshot.position
            for table in snapshot.tables:
                assert orjson.loads(snapshot.source(table))
                self.tables[table.name] = {}
                for rows in snapshot.rows(table):
                    self.upsert(table, rows)

    def upsert(self, table: Table, rows: Sequence[Row]) -> None:
        known = self.tables.setdefault(table.name, {})
        for row in rows:
            found = values(table, row)
            known[_key(table, found)] = found

    def apply(self, item: Item) -> None:
        if isinstance(item, Chunk):
            assert not item.problem, item.problem
            self.upsert(item.table, item.rows)
        elif isinstance(item, Idle):
            self.position = item.position
        else:
            for change in item.changes:
                self._change(change)
            if item.is_last:
                self.position = item.position

    def _change(self, change: Change) -> None:
        table, op, before_row, after_row, source, ts_us = change
        assert orjson.loads(source)["table"] == table.name
        assert ts_us > 1_600_000_000_000_000
        rows = self.tables.setdefault(table.name, {})
        if op == TRUNCATE:
            assert before_row is None
            assert after_row is None
            rows.clear()
            return
        before = None if before_row is None else values(table, before_row)
        after = None if after_row is None else values(table, after_row)
        assert op in {CREATE, READ, UPDATE, DELETE}
        assert (after is None) == (op == DELETE)
        old = None
        if op in {UPDATE, DELETE}:
            # Where the database does not tell it, the key has not changed.
            old = rows.pop(_key(table, before or after or {}), None)
            # SQLite reads rows again that were written right after their table was altered.
            is_known = old is not None or (before is None and b'"sqlite"' in source)
            assert is_known, f"{op} of a row that is not there: {before} {after}"
        if after is not None:
            missing = orjson.loads(UNAVAILABLE)
            for name, value in after.items():
                if value == missing and old is not None:
                    after[name] = old[name]
            assert op == READ or _key(table, after) not in rows
            rows[_key(table, after)] = after

    def compare(self, database: Database, *tables: str) -> None:
        """The rebuilt tables are the tables, row by row."""
        for name in tables:
            found = self.tables.get(name, {})
            real = database.rows(name)
            rebuilt = sorted(found.values(), key=_order)
            assert rebuilt == sorted(real, key=_order), name


def _key(table: Table, row: Values) -> Key:
    assert table.key
    return tuple(row[name] for name in table.key)


def _order(row: Values) -> str:
    return str(list(row.values()))
