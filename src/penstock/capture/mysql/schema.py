"""Tables as the server describes them now: for snapshots, checks and chunks, never for the stream.

The one thing the binlog does not tell is that a BINARY(16) is really a UUID or INET6 (BINARY(4):
INET4) of MariaDB. These few columns are asked for when a capture begins; see `history`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from penstock.capture.mysql.connection import Connection, query, rows_by_name
from penstock.capture.mysql.textrows import quoted
from penstock.capture.mysql.types import DISGUISED, Described, Modes, Native, column, described
from penstock.capture.source import SourceSettings, Table

SYSTEM: Final = frozenset({"mysql", "information_schema", "performance_schema", "sys"})
_COLUMNS: Final = """
SELECT table_schema, table_name, column_name, data_type, column_type, is_nullable,
       numeric_precision, numeric_scale, datetime_precision, character_set_name
FROM information_schema.columns WHERE table_schema IN ({}){} ORDER BY 1, 2, ordinal_position
"""
_TABLES: Final = """
SELECT table_schema, table_name, engine, table_rows FROM information_schema.tables
WHERE table_type IN ('BASE TABLE', 'SYSTEM VERSIONED') AND table_schema IN ({}){} ORDER BY 1, 2
"""
_KEYS: Final = """
SELECT table_schema, table_name, column_name FROM information_schema.statistics
WHERE index_name = 'PRIMARY' AND table_schema IN ({}){} ORDER BY 1, 2, seq_in_index
"""
_DISGUISED: Final = """
SELECT table_schema, table_name, column_name, data_type FROM information_schema.columns
WHERE data_type IN ('uuid', 'inet6', 'inet4')
"""


class Chooser:
    """Which tables are captured."""

    def __init__(self, settings: SourceSettings, database: str) -> None:
        self._include = settings.include
        self._exclude = settings.exclude
        self.database = database
        self._known: dict[tuple[str, str], bool] = {}

    def __call__(self, database: str, name: str) -> bool:
        found = self._known.get((database, name))
        if found is None:
            if len(self._known) > 100_000:
                self._known.clear()
            found = self._known[database, name] = self._decide(database, name)
        return found

    def _decide(self, database: str, name: str) -> bool:
        if database.lower() in SYSTEM or (self.database and database != self.database):
            return False
        return self._matches(self._include, database, name) and not self._matches(
            self._exclude, database, name
        )

    def _matches(self, patterns: Iterable[str], database: str, name: str) -> bool:
        # Without a database in front, a pattern means the tables of the URL's.
        return any(
            fnmatchcase(f"{database}.{name}", pattern)
            or ("." not in pattern and bool(self.database) and fnmatchcase(name, pattern))
            for pattern in patterns
        )


@dataclass(frozen=True, slots=True, eq=False)
class KnownTable:
    """A table as it is now."""

    table: Table
    columns: tuple[Native, ...]
    engine: str
    rows: int | None

    @property
    def place(self) -> str:
        return f"{quoted(self.table.database)}.{quoted(self.table.name)}"


def _databases(connection: Connection, database: str) -> list[str]:
    if database:
        return [database]
    found = query(connection, "SELECT schema_name FROM information_schema.schemata")
    return [str(name) for (name,) in found if str(name).lower() not in SYSTEM]


def known_tables(
    connection: Connection, chooser: Chooser, modes: Modes, only: tuple[str, str] | None = None
) -> list[KnownTable]:
    """The chosen tables, or one of them, as they are now; a column that cannot be captured is an
    error."""
    databases = [only[0]] if only else _databases(connection, chooser.database)
    if not databases:
        return []
    marks = (", ".join(["%s"] * len(databases)), " AND table_name = %s" if only else "")
    wanted = [*databases, *(only[1:] if only else ())]
    columns: dict[tuple[str, str], list[Native]] = defaultdict(list)
    for row in query(connection, _COLUMNS.format(*marks), wanted):
        if chooser(str(row[0]), str(row[1])):
            columns[row[0], row[1]].append(_described(row))
    keys: dict[tuple[str, str], list[str]] = defaultdict(list)
    for database, name, part in query(connection, _KEYS.format(*marks), wanted):
        keys[database, name].append(part)
    out = []
    for database, name, engine, rows in query(connection, _TABLES.format(*marks), wanted):
        natives = columns.get((database, name))
        if not natives:
            continue
        key = keys.get((database, name)) or unique_key(connection, database, name)
        table = Table(database, "", name, tuple(column(n, modes) for n in natives), tuple(key))
        out.append(KnownTable(table, tuple(natives), str(engine), rows))
    return out


def _described(row: tuple[Any, ...]) -> Native:
    what = Described(
        name=row[2],
        data_type=_text(row[3]),
        column_type=_text(row[4]),
        nullable=row[5] == "YES",
        precision=int(row[6] or 0),
        scale=int(row[7] or 0),
        fraction=int(row[8] or 0),
        charset=row[9] or "",
    )
    return described(what, f"{row[0]}.{row[1]}")


def _text(value: Any) -> str:
    # MySQL 8 declares some of these columns as blobs.
    return value.decode() if isinstance(value, bytes) else str(value)


def unique_key(connection: Connection, database: str, name: str) -> list[str]:
    """What the server takes for the primary key where none is declared: the first unique key of
    whole columns that cannot be null."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows_by_name(connection, f"SHOW INDEX FROM {quoted(database)}.{quoted(name)}"):
        found[row["key_name"]].append(row)
    for parts in found.values():
        if all(
            not int(p["non_unique"])
            and p["sub_part"] is None
            and p["null"] != "YES"
            and p["column_name"]
            and p["index_type"] == "BTREE"
            for p in parts
        ):
            return [
                str(p["column_name"]) for p in sorted(parts, key=lambda p: int(p["seq_in_index"]))
            ]
    return []


def disguised_columns(connection: Connection, chooser: Chooser) -> dict[str, dict[str, str]]:
    """Columns that the binlog shows as BINARY(n) although they are more, by table."""
    out: dict[str, dict[str, str]] = {}
    for database, name, part, kind in query(connection, _DISGUISED):
        if _text(kind) in DISGUISED and chooser(database, name):
            out.setdefault(f"{database}.{name}", {})[part] = _text(kind)
    return out
