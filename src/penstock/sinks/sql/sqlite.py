"""A table in a SQLite file: the default, for it needs nothing else.

    sqlite:///shop.db?table=orders

SQLite has few types. Times are text as its own functions read it (`2026-01-31 12:00:00.000000`,
with `+00:00` where the column has a zone), decimals of up to 15 digits numbers, longer ones text,
NaN is the text `NaN`, since SQLite would make it null. Times outside of the years 1 to 9999, which
its functions do not read, are refused. Readers are not blocked by the writer
(write-ahead log). After a power loss the file may be some batches back, with its position.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from decimal import Decimal
from math import isnan
from pathlib import Path
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ConfigError, PenstockError
from penstock.sinks.errors import SchemaChangedError, StoreError, StoreUnreachableError
from penstock.sinks.rows import sortable_decimal
from penstock.sinks.schema import Schema
from penstock.sinks.sql.base import RowFault, SqlSink
from penstock.sinks.sql.text import from_text, to_text
from penstock.sinks.stores import Address

BUSY_S: Final = 30
_NUMBER_DIGITS: Final = 15
_PIECE: Final = 10_000
# What another process's transaction is at fault for.
_BUSY: Final = ("locked", "busy")


def make(address: Address) -> SqliteSink:
    """The sink for a URL."""
    address.only("table", "timeout")
    if address.host or not address.path:
        raise ConfigError(
            f"{address.shown} names no file",
            advice="A file is named with three slashes, as in sqlite:///shop.db; four if absolute.",
        )
    address.number("timeout", BUSY_S)
    return SqliteSink(address)


class SqliteSink(SqlSink):
    """A table in a SQLite file."""

    faults: ClassVar[tuple[type[Exception], ...]] = (sqlite3.Error,)

    def _is_there(self) -> bool:
        return Path(self.address.path).exists()

    def _connect(self) -> sqlite3.Connection:
        path = Path(self.address.path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path.parent} cannot be made: {error.strerror}") from error
        seconds = self.address.number("timeout", BUSY_S)
        # Spark calls from its own threads, one after the other.
        connection = sqlite3.connect(
            path, timeout=seconds, isolation_level=None, check_same_thread=False
        )
        connection.create_function("penstock_decimal", 2, _sortable, deterministic=True)
        connection.create_function("penstock_digits", 1, _digits, deterministic=True)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA cache_size = -65536")
        return connection

    def _begin(self, *, write: bool) -> None:
        # Who begins by reading cannot write after another has.
        self._run("BEGIN IMMEDIATE" if write else "BEGIN")

    def _has_table(self, name: str) -> bool:
        return bool(
            self._one("SELECT 1 FROM sqlite_master WHERE type IN ('table','view') AND name = ?",
                      (name,))
        )  # fmt: skip

    def _type(self, field: pa.Field, *, is_key: bool) -> str:
        kind = field.type
        if pa.types.is_boolean(kind):
            return "BOOLEAN"
        if pa.types.is_integer(kind):
            return "INTEGER"
        if pa.types.is_floating(kind):
            return "REAL"
        if pa.types.is_decimal(kind) and not _is_long(kind):
            return "NUMERIC"
        return "BLOB" if pa.types.is_binary(kind) else "TEXT"

    def _retyped(self, field: pa.Field, schema: Schema) -> None:
        """A decimal that was a number and is text now: a column keeps the type that it was declared
        with, and would round the text. Others hold whatever is wider."""
        if not _is_long(field.type):
            return
        shown = f"PRAGMA table_info({self.quote(self.table)})"
        declared = {row[1]: row[2] for row in self._run(shown).fetchall()}
        if declared[field.name] == "TEXT":
            return
        if field.name in schema.key:
            raise SchemaChangedError(
                f"{self.target}: the key {field.name!r} is a number, and {field.type} would be text"
            )
        table, old, new = map(self.quote, (self.table, field.name, f"_penstock_{field.name}"))
        self._run(f"ALTER TABLE {table} ADD COLUMN {new} TEXT")
        self._run(f"UPDATE {table} SET {new} = penstock_digits({old})")
        self._run(f"ALTER TABLE {table} DROP COLUMN {old}")
        self._run(f"ALTER TABLE {table} RENAME COLUMN {new} TO {old}")

    def _upsert(self, rows: pa.Table, schema: Schema) -> None:
        names = ", ".join(map(self.quote, schema.names))
        marks = ", ".join("?" * len(schema.fields))
        keys = ", ".join(map(self.quote, schema.key))
        rest = [name for name in schema.names if name not in schema.key]
        sets = ", ".join(f"{self.quote(name)} = excluded.{self.quote(name)}" for name in rest)
        then = f"UPDATE SET {sets}" if rest else "NOTHING"
        sql = (
            f"INSERT INTO {self.quote(self.table)} ({names}) VALUES ({marks}) "
            f"ON CONFLICT ({keys}) DO {then}"
        )
        self._many(sql, rows)

    def _delete(self, keys: pa.Table, schema: Schema) -> None:
        where = " AND ".join(f"{self.quote(name)} = ?" for name in schema.key)
        self._many(f"DELETE FROM {self.quote(self.table)} WHERE {where}", keys)

    def _many(self, sql: str, rows: pa.Table) -> None:
        cursor = self._connected().cursor()
        try:
            for at in range(0, rows.num_rows, _PIECE):
                cursor.executemany(sql, _tuples(rows.slice(at, _PIECE)))
        except (sqlite3.IntegrityError, sqlite3.DataError, OverflowError) as error:
            raise RowFault(str(error)) from error

    def _decoded(self, values: list[Any], field: pa.Field) -> pa.Array:
        kind = field.type
        if pa.types.is_floating(kind):
            return pa.array([float("nan") if v == "NaN" else v for v in values], kind)
        if pa.types.is_decimal(kind) and not _is_long(kind):
            scale = Decimal(1).scaleb(-kind.scale)
            values = [None if v is None else Decimal(repr(v)).quantize(scale) for v in values]
            return pa.array(values, kind)
        if pa.types.is_integer(kind):
            return pa.array(values, kind)
        return from_text(values, kind)

    def _sorted_by(self, field: pa.Field) -> str:
        name = super()._sorted_by(field)
        return f"penstock_decimal({name}, {field.type.scale})" if _is_long(field.type) else name

    def _bound(self, value: Any, field: pa.Field) -> Any:
        if _is_long(field.type):
            return sortable_decimal(value, field.type.scale)
        column = pa.chunked_array([pa.array([value], field.type)])
        return _values(column)[0]

    def _explained(self, error: Exception) -> PenstockError:
        text = str(error)
        if any(word in text for word in _BUSY):
            return StoreUnreachableError(
                f"{self.address.shown} is locked by another process: {text}",
                advice="Whoever writes to the file should end its transaction.",
            )
        if "unable to open" in text:
            return StoreError(
                f"{self.address.shown} cannot be opened",
                advice="Look at the path: a relative one has three slashes, an absolute one four.",
            )
        if "not a database" in text or "malformed" in text:
            return StoreError(
                f"{self.address.shown} is not a SQLite database, or damaged: {text}",
                advice="Remove the file; what was in it is made again from the log.",
            )
        if "disk is full" in text or "disk I/O" in text:
            return StoreUnreachableError(
                f"{self.address.shown}: {text}", advice="Free disk space, or repair the disk."
            )
        return StoreError(f"{self.target}: {text}")


def _is_long(kind: pa.DataType) -> bool:
    """Whether it is a decimal that SQLite's numbers would round: it is kept as text."""
    return bool(pa.types.is_decimal(kind) and kind.precision > _NUMBER_DIGITS)


def _sortable(text: str, scale: int) -> str:
    """A decimal's text, whose order is another than that of the numbers, as one with that order."""
    return sortable_decimal(Decimal(text), scale)


def _digits(value: float | None) -> str | None:
    """The text of a decimal that is stored as a number."""
    return None if value is None else format(Decimal(repr(value)), "f")


def _tuples(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    return zip(*(_values(column) for column in rows.columns), strict=True)


def _values(column: pa.ChunkedArray) -> list[Any]:
    """A column as what SQLite takes."""
    kind = column.type
    if pa.types.is_floating(kind):
        found: list[Any] = column.to_pylist()
        if pc.any(pc.is_nan(column)).as_py():
            return ["NaN" if value is not None and isnan(value) else value for value in found]
        return found
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_binary(kind):
        return list(column.to_pylist())
    return list(to_text(column).to_pylist())
