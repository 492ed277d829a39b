"""What tables there are, and what their columns are in the stream.

A column's type in the stream follows SQLite's own rule of affinity: only parts of the declared
name count. Values of any other kind may still be in it; see `values`.
"""

from __future__ import annotations

import fnmatch
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from penstock.capture.source import SourceSettings, Table
from penstock.client.table_schemas import TableColumn, ValueType

# Of all captures, whatever their names.
OURS: Final = "_penstock_"
# A changelog has two columns for each, and SQLite allows 2,000 in a table.
COLUMNS_MAX: Final = 990
ROWID_NAMES: Final = ("rowid", "_rowid_", "oid")

INTEGER, REAL, TEXT, BLOB, NUMERIC = "INTEGER", "REAL", "TEXT", "BLOB", "NUMERIC"
_TYPES: Final = {INTEGER: "int64", REAL: "double", TEXT: "string", BLOB: "bytes"}
_HIDDEN: Final = 1


def quoted(name: str) -> str:
    """An identifier in SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A string in SQL."""
    return "'" + text.replace("'", "''") + "'"


def affinity(declared: str) -> str:
    """What SQLite prefers to store in a column of this declared type."""
    name = declared.upper()
    if "INT" in name:
        return INTEGER
    if any(part in name for part in ("CHAR", "CLOB", "TEXT")):
        return TEXT
    if not name or "BLOB" in name:
        return BLOB
    if any(part in name for part in ("REAL", "FLOA", "DOUB")):
        return REAL
    return NUMERIC


def column_type(declared: str) -> ValueType:
    """What a column is in the stream's schema."""
    name = declared.upper()
    if not name:
        return ValueType("string")
    kind = affinity(declared)
    if kind == NUMERIC:
        if "BOOL" in name:
            return ValueType("int64")
        return ValueType("string" if "DATE" in name or "TIME" in name else "double")
    return ValueType(_TYPES[kind])


@dataclass(frozen=True, slots=True)
class UniqueIndex:
    """A unique index: (column, collation) pairs; () if over expressions."""

    name: str
    columns: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Definition:
    """A table as it is defined now. Frozen: two are equal if nothing has changed."""

    name: str
    sql: str
    # Where its definition is in SQLite's own table, and the first page of its data.
    schema_rowid: int
    rootpage: int
    # Name, declared type and whether it is never null.
    columns: tuple[tuple[str, str, bool], ...]
    key: tuple[str, ...]
    # By which name the rowid goes where it serves as the key, else "".
    rowid_name: str
    without_rowid: bool
    unique: tuple[UniqueIndex, ...] = ()

    def to_json(self) -> str:
        """For the catalog: what is needed to read the changelog later."""
        return orjson.dumps(
            {
                "columns": self.columns,
                "key": self.key,
                "rowid_name": self.rowid_name,
                "without_rowid": self.without_rowid,
                "unique": [(index.name, index.columns) for index in self.unique],
            }
        ).decode()

    def has_new_unique(self, before: Definition) -> bool:
        """Whether a unique index has come by which a REPLACE removes rows; columns may have been
        renamed."""
        known = {index.name: index.columns for index in before.unique}
        return any(
            index.name not in known
            or (self.sql == before.sql and index.columns != known[index.name])
            for index in self.unique
            if index.columns
        )

    @property
    def table(self) -> Table:
        return Table(
            database="",
            schema="",
            name=self.name,
            columns=tuple(
                TableColumn(name, column_type(declared), not required, declared)
                for name, declared, required in self.columns
            ),
            key=self.key,
        )

    @property
    def row_name(self) -> str:
        """The name by which SQLite finds a row quickest: a name of the rowid that no column has."""
        if self.without_rowid or self.rowid_name:
            return self.rowid_name
        taken = {column.lower() for column, *_ in self.columns}
        return next((name for name in ROWID_NAMES if name not in taken), "")

    def expression(self, column: str, of: str = "") -> str:
        """A column in SQL, of `old`, `new` or a table; the rowid by a name that nobody shadows."""
        prefix = f"{of}." if of else ""
        return prefix + (column if column == self.rowid_name else quoted(column))

    def same_key(self, of: str, others: Sequence[str]) -> str:
        """A condition: the key is exactly this. SQLite calls more the same: 1 and 1.0, and what a
        collation does not tell apart; the first comparison is there for the index."""
        parts = []
        for name, other in zip(self.key, others, strict=True):
            own = self.expression(name, of)
            parts.append(
                f"{own} IS {other} AND {own} IS {other} COLLATE BINARY "
                f"AND typeof({own}) = typeof({other})"
            )
        return " AND ".join(parts)


def from_json(name: str, sql: str, schema_rowid: int, rootpage: int, text: str) -> Definition:
    """What `to_json` wrote, with what is kept in columns of its own."""
    found: dict[str, Any] = orjson.loads(text)
    columns = tuple((str(c[0]), str(c[1]), bool(c[2])) for c in found["columns"])
    return Definition(
        name,
        sql,
        schema_rowid,
        rootpage,
        columns,
        tuple(found["key"]),
        found["rowid_name"],
        found["without_rowid"],
        tuple(
            UniqueIndex(str(name), tuple((str(c[0]), str(c[1])) for c in listed))
            for name, listed in found.get("unique", ())
        ),
    )


def is_chosen(name: str, settings: SourceSettings) -> bool:
    """Whether a capture's settings include a table."""
    if name.startswith((OURS, "sqlite_")):
        return False
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in settings.include) and not any(
        fnmatch.fnmatchcase(name, pattern) for pattern in settings.exclude
    )


def definitions(connection: sqlite3.Connection, settings: SourceSettings) -> list[Definition]:
    """The chosen tables as they are now; not views, virtual tables and what belongs to them, nor
    tables with too many columns."""
    found = []
    for _, name, kind, columns, without_rowid, *_ in connection.execute("PRAGMA main.table_list"):
        if kind == "table" and is_chosen(name, settings) and columns <= COLUMNS_MAX:
            definition = definition_of(connection, name, bool(without_rowid))
            if definition is not None:
                found.append(definition)
    return sorted(found, key=lambda definition: definition.name)


def definition_of(
    connection: sqlite3.Connection, name: str, without_rowid: bool
) -> Definition | None:
    """One table; None if it is not there."""
    row = connection.execute(
        "SELECT rowid, rootpage, sql FROM sqlite_schema WHERE type = 'table' AND name = ?", (name,)
    ).fetchone()
    if row is None:
        return None
    schema_rowid, rootpage, sql = row
    columns, keys = [], []
    for _, column, declared, not_null, _, place, hidden in connection.execute(
        f"PRAGMA main.table_xinfo({quoted(name)})"
    ):
        if hidden == _HIDDEN:
            continue
        if place:
            keys.append((place, column))
        columns.append((column, declared, bool(not_null), bool(place)))
    key = tuple(column for _, column in sorted(keys))
    # An INTEGER PRIMARY KEY is the rowid, and never null; nor is a key where it is all there is.
    is_rowid = len(key) == 1 and any(c[0] == key[0] and c[1].upper() == "INTEGER" for c in columns)
    never_null = without_rowid or is_rowid
    described = [(c[0], c[1], c[2] or (never_null and c[3])) for c in columns]
    rowid_name = ""
    if not key:
        taken = {column.lower() for column, *_ in described}
        free = [alias for alias in ROWID_NAMES if alias not in taken]
        if not free:
            return None
        rowid_name = free[0]
        key = (rowid_name,)
        described.insert(0, (rowid_name, "INTEGER", True))
    return Definition(
        name,
        sql,
        schema_rowid,
        rootpage,
        tuple(described),
        key,
        rowid_name,
        without_rowid,
        _unique_indexes(connection, name, key, {c[0]: c[1] for c in columns}),
    )


def _unique_indexes(
    connection: sqlite3.Connection, name: str, key: tuple[str, ...], declared: dict[str, str]
) -> tuple[UniqueIndex, ...]:
    """Those by which REPLACE may remove rows with another key than the new one's: all but the
    key's own, and that too where it takes different values for the same."""
    found = []
    listed = connection.execute(f"PRAGMA main.index_list({quoted(name)})").fetchall()
    for _, index, unique, _, _ in listed:
        if not unique:
            continue
        parts = [
            (column, collation)
            for _, cid, column, _, collation, is_key in connection.execute(
                f"PRAGMA main.index_xinfo({quoted(index)})"
            )
            if is_key and cid >= 0
        ]
        # Only columns count: rows that agree in them are candidates, whatever else is in the index.
        exact = all(
            collation.upper() == "BINARY" and affinity(declared[column]) != BLOB
            for column, collation in parts
        )
        if {column for column, _ in parts} != set(key) or not exact:
            found.append(UniqueIndex(index, tuple(parts)))
    return tuple(sorted(found, key=lambda index: index.name))
