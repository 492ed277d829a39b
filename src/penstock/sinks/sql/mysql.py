"""A table in MariaDB or MySQL.

    mysql://user:password@host/shop?table=orders

Keys of text or bytes have up to 255 characters; longer ones are refused, as are NaN and infinity,
which MySQL does not know, and times outside of the years 1 to 9999. Times with a zone are kept as
UTC. Text compares by its characters' numbers, blanks at the end included.

A statement that changes a table ends the transaction here. So a table says in its comment which row
of `penstock_positions` is its own: renaming the table, which is one step, takes the position along.
Whoever changes tables has a lock of the server's that outlives transactions, and goes with the
connection. What a kill leaves in between is finished by the next who has the lock (`_sweep`):
- A table is made before its row: one with our comment and without a row or rows was just made.
- A table goes by getting the name `penstock_gone_` and that of its row, in one step.
- A writer takes over (and fences) before it changes columns, and tells of them after that: columns
  that are already there are no error.
"""

from __future__ import annotations

import hashlib
import json
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pymysql
from pymysql.constants import CR, ER
from pymysql.cursors import SSCursor

from penstock.connecting import mysql_away
from penstock.errors import ConfigError, PenstockError
from penstock.sinks.contract import Position
from penstock.sinks.errors import StoreAwayError, StoreError, StoreUnreachableError
from penstock.sinks.schema import Schema
from penstock.sinks.sql.base import BUILDING, POSITIONS, RowFault, SqlSink, first_epoch
from penstock.sinks.sql.text import from_text, to_text
from penstock.sinks.stores import Address
from penstock.sinks.times import Unfit

CONNECT_S: Final = 10
ANSWER_S: Final = 300
KEY_LENGTH: Final = 255
# How long to wait for another that changes the same table.
ALONE_S: Final = 30
_COMMENT: Final = "penstock "
_GONE: Final = "penstock_gone_"
_MODE: Final = "STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION"
_ROW_FAULTS: Final = frozenset(
    {ER.DATA_TOO_LONG, ER.WARN_DATA_OUT_OF_RANGE, ER.TRUNCATED_WRONG_VALUE_FOR_FIELD,
     ER.BAD_NULL_ERROR, 1292, 1366, 1406, 3140, 4025}
)  # fmt: skip
_AGAIN: Final = frozenset(
    {CR.CR_SERVER_GONE_ERROR, CR.CR_SERVER_LOST, CR.CR_CONN_HOST_ERROR, CR.CR_CONNECTION_ERROR,
     ER.LOCK_DEADLOCK, ER.LOCK_WAIT_TIMEOUT, ER.CON_COUNT_ERROR, ER.SERVER_SHUTDOWN, 0, 1927}
)  # fmt: skip
_BY_NAME: Final = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    # FLOAT is shown with six digits.
    pa.float32(): "DOUBLE",
    pa.float64(): "DOUBLE",
    pa.date32(): "DATE",
    pa.time64("us"): "TIME(6)",
    pa.timestamp("us"): "DATETIME(6)",
    pa.timestamp("us", "UTC"): "DATETIME(6)",
}


def make(address: Address) -> MysqlSink:
    """The sink for a URL."""
    address.only("table", "ssl")
    if not address.path:
        raise ConfigError(
            f"{address.shown} names no database", advice="As in mysql://user@host/shop?table=t."
        )
    address.flag("ssl", False)
    return MysqlSink(address)


class MysqlSink(SqlSink):
    """A table in MariaDB or MySQL."""

    mark: ClassVar[str] = "%s"
    quotes: ClassVar[str] = "`"
    faults: ClassVar[tuple[type[Exception], ...]] = (pymysql.MySQLError, OSError)
    lock_row: ClassVar[str] = " FOR UPDATE"
    text_type: ClassVar[str] = "LONGTEXT"

    def _connect(self) -> pymysql.Connection[Any]:
        address = self.address
        with_tls = address.flag("ssl", False)
        connection = pymysql.connect(
            host=address.host or "127.0.0.1",
            port=address.port or 3306,
            user=address.user or None,
            password=address.password,
            database=address.path,
            charset="utf8mb4",
            autocommit=True,
            connect_timeout=CONNECT_S,
            # The server speaks first: one that is silent now is none, or does not work.
            read_timeout=CONNECT_S,
            write_timeout=ANSWER_S,
            sql_mode=_MODE,
            ssl=ssl.create_default_context() if with_tls else None,
            ssl_disabled=not with_tls,
        )
        inside: Any = connection
        inside._read_timeout = ANSWER_S
        server = connection.get_server_info()  # type: ignore[no-untyped-call]
        is_maria = "mariadb" in str(server).lower()
        self._collation = "utf8mb4_nopad_bin" if is_maria else "utf8mb4_0900_bin"
        with connection.cursor() as cursor:
            cursor.execute("SET time_zone = '+00:00'")
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        return connection

    def _name_type(self) -> str:
        return "VARCHAR(191)"

    def _has_table(self, name: str) -> bool:
        return self._comment(name) is not None

    def _comment(self, name: str) -> str | None:
        found = self._one(
            "SELECT table_comment FROM information_schema.tables "
            "WHERE table_schema = DATABASE() AND table_name = %s",
            (name,),
        )
        return None if found is None else str(found[0])

    def _row_name(self) -> str:
        return self._row_of(self.table)

    def _row_of(self, table: str) -> str:
        """The name of a table's row, as the table tells it; empty if it is not ours."""
        comment = self._comment(table) or ""
        return comment.removeprefix(_COMMENT) if comment.startswith(_COMMENT) else ""

    def _folded(self, name: str) -> str:
        return name.lower()

    def _type(self, field: pa.Field, *, is_key: bool) -> str:
        kind = field.type
        if pa.types.is_decimal(kind):
            return f"DECIMAL({kind.precision},{kind.scale})"
        if pa.types.is_string(kind):
            name = f"VARCHAR({KEY_LENGTH})" if is_key else "LONGTEXT"
            return f"{name} CHARACTER SET utf8mb4 COLLATE {self._collation}"
        if pa.types.is_binary(kind):
            return f"VARBINARY({KEY_LENGTH})" if is_key else "LONGBLOB"
        return _BY_NAME[kind]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else changes the table, nor the one that is built beside it."""
        name = hashlib.sha1(f"{self.address.path}/{self.live}".encode()).hexdigest()
        with self._explaining():
            if self._one("SELECT GET_LOCK(%s, %s)", (_COMMENT + name, ALONE_S))[0] != 1:
                raise StoreUnreachableError(
                    f"{self.target} is being changed by another process",
                    advice="Trying again helps, as soon as the other is done.",
                )
            try:
                yield
            finally:
                if self._connection is not None:
                    with suppress(*self.faults):
                        self._run("SELECT RELEASE_LOCK(%s)", (_COMMENT + name,))

    def _sweep(self) -> None:
        """Finish what was begun before a kill."""
        gone = self._run(
            "SELECT table_name, table_comment FROM information_schema.tables "
            "WHERE table_schema = DATABASE() AND LEFT(table_name, %s) = %s",
            (len(_GONE), _GONE),
        ).fetchall()
        for table, comment in gone:
            row = table.removeprefix(_GONE)
            if comment == _COMMENT + row:
                self._run(f"DELETE FROM {POSITIONS} WHERE name = %s", (row,))
                self._run(f"DROP TABLE IF EXISTS {self.quote(table)}")
        for table in (self.live, self.live + BUILDING):
            row = self._row_of(table)
            if (
                row
                and not self._one(f"SELECT 1 FROM {POSITIONS} WHERE name = %s", (row,))
                and not self._one(f"SELECT 1 FROM {self.quote(table)} LIMIT 1")
            ):
                self._run(f"DROP TABLE {self.quote(table)}")

    def open(self, schema: Schema) -> Position:
        with self._alone():
            self._make_positions()
            self._sweep()
            if self._row() is None:
                self._must_not_be_foreign()
                self._make_table(self._merged(None, schema))
            with self._transaction():
                found = self._row(lock=True)
                if found is None:
                    raise self._gone()
                epoch, position, old = found[0] + 1, *found[1:]
                merged = self._merged(old, schema)
                self._set("epoch", epoch)
            self._change(old, merged)
            with self._transaction():
                self._fenced(epoch)
                self._set("columns_json", json.dumps(merged.as_json()))
        self._epoch, self._schema = epoch, merged
        return position

    def _set(self, column: str, value: Any) -> None:
        self._run(
            f"UPDATE {POSITIONS} SET {column} = %s WHERE name = %s", (value, self._row_name())
        )

    def _make_table(self, schema: Schema) -> None:
        name = uuid4().hex
        keys = ", ".join(map(self.quote, schema.key))
        columns = [self._defined(each, schema) for each in schema.fields]
        body = ", ".join([*columns, f"PRIMARY KEY ({keys})"])
        self._run(
            f"CREATE TABLE {self.quote(self.table)} ({body}) ENGINE=InnoDB "
            f"COMMENT='{_COMMENT}{name}'"
        )
        self._run(
            f"INSERT INTO {POSITIONS} (name, epoch, offsets, columns_json) VALUES (%s, %s, %s, %s)",
            (name, first_epoch(), Position().text(), json.dumps(schema.as_json())),
        )

    def _defined(self, field: pa.Field, schema: Schema) -> str:
        is_key = field.name in schema.key
        kind = self._type(field, is_key=is_key)
        return f"{self.quote(field.name)} {kind} {'NOT NULL' if is_key else 'NULL'}"

    def _change(self, old: Schema, merged: Schema) -> None:
        """Give the table its new columns, and those that are wider."""
        added, changed = merged.differences(old)
        if not added and not changed:
            return
        found = self._run(
            "SELECT column_name FROM information_schema.columns "
            "WHERE table_schema = DATABASE() AND table_name = %s",
            (self.table,),
        ).fetchall()
        there = {self._folded(name) for (name,) in found}
        steps = [
            f"{'MODIFY' if self._folded(each.name) in there else 'ADD'} COLUMN "
            f"{self._defined(each, merged)}"
            for each in (*added, *changed)
        ]
        self._run(f"ALTER TABLE {self.quote(self.table)} {', '.join(steps)}")

    def _unfit(self, rows: pa.Table) -> list[Unfit]:
        return super()._unfit(rows) + [
            (pc.invert(pc.is_finite(column)), f"column {name} is not a finite number")
            for name, column in zip(rows.column_names, rows.columns, strict=True)
            if pa.types.is_floating(column.type)
        ]

    def _upsert(self, rows: pa.Table, schema: Schema) -> None:
        names = ", ".join(map(self.quote, schema.names))
        marks = ", ".join(["%s"] * len(schema.fields))
        rest = [self.quote(name) for name in schema.names if name not in schema.key]
        first = self.quote(schema.key[0])
        sets = ", ".join(f"{name}=VALUES({name})" for name in rest) or f"{first}={first}"
        sql = (
            f"INSERT INTO {self.quote(self.table)} ({names}) VALUES ({marks}) "
            f"ON DUPLICATE KEY UPDATE {sets}"
        )
        with _blaming_rows(), self._connected().cursor() as cursor:
            cursor.executemany(sql, _tuples(rows))

    def _delete(self, keys: pa.Table, schema: Schema) -> None:
        names = ", ".join(map(self.quote, schema.key))
        piece = 1000
        rows = _tuples(keys)
        for at in range(0, len(rows), piece):
            some = rows[at : at + piece]
            marks = ", ".join(["(" + ", ".join(["%s"] * len(schema.key)) + ")"] * len(some))
            with _blaming_rows():
                self._run(
                    f"DELETE FROM {self.quote(self.table)} WHERE ({names}) IN ({marks})",
                    [value for row in some for value in row],
                )

    def _selected(self, field: pa.Field) -> str:
        name = self.quote(field.name)
        kind = field.type
        if pa.types.is_date(kind) or pa.types.is_time(kind) or pa.types.is_timestamp(kind):
            return f"CAST({name} AS CHAR)"
        return name

    def _decoded(self, values: list[Any], field: pa.Field) -> pa.Array:
        if pa.types.is_floating(field.type) or pa.types.is_integer(field.type):
            return pa.array(values, field.type)
        return from_text(values, field.type)

    def _bound(self, value: Any, field: pa.Field) -> Any:
        return _values(pa.chunked_array([pa.array([value], field.type)]))[0]

    def _batches(self, sql: str, values: Sequence[Any], rows: int) -> Iterator[list[Any]]:
        cursor = self._connected().cursor(SSCursor)
        try:
            cursor.execute(sql, tuple(values))
            while found := cursor.fetchmany(rows):
                yield list(found)
        finally:
            cursor.close()

    def switch(self) -> None:
        if self.table == self.live or self._epoch is None:
            raise StoreError(f"{self.target} was not built beside another")
        old = MysqlSink(self.address, self.live, self.live)
        with self._alone():
            old._connection = self._connection
            self._sweep()
            with self._transaction():
                self._fenced(self._epoch)
                if old._row(lock=True) is None:
                    old._must_not_be_foreign()
                # From here on neither of the two has a writer.
                before = old._row_name()
                self._run(
                    f"UPDATE {POSITIONS} SET epoch = epoch + 1 WHERE name IN (%s, %s)",
                    (self._row_name(), before),
                )
            moves = [(self.live, _GONE + before)] if before else []
            self._move(*moves, (self.table, self.live))
            self._sweep()
        old._connection = None
        self._epoch = None

    def _move(self, *moves: tuple[str, str]) -> None:
        """Rename tables, all in one step."""
        told = ", ".join(f"{self.quote(table)} TO {self.quote(name)}" for table, name in moves)
        self._run(f"RENAME TABLE {told}")

    def remove(self) -> None:
        with self._explaining():
            is_used = self._has_table(POSITIONS)
        if is_used:
            with self._alone():
                self._sweep()
                if self._row() is not None:
                    self._move((self.table, _GONE + self._row_name()))
                    self._sweep()
        if self.table == self.live:
            with self.beside() as other:
                other.remove()
        self._epoch = None

    def _explained(self, error: Exception) -> PenstockError:
        code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        text = str(error.args[-1]) if error.args else str(error)
        if code in {ER.ACCESS_DENIED_ERROR, ER.DBACCESS_DENIED_ERROR, 1698}:
            return StoreError(
                f"{self.address.shown} refuses the user: {text}",
                advice="Look at the user and the password in the URL, and at the user's rights.",
            )
        if code == ER.BAD_DB_ERROR:
            return StoreError(f"{self.address.shown}: {text}", advice="Create the database.")
        if code in _AGAIN or isinstance(error, OSError):
            away = mysql_away(text)
            if away is None:
                return StoreUnreachableError(f"{self.address.shown}: {text}")
            place = f"{self.address.host or '127.0.0.1'}:{self.address.port or 3306}"
            return StoreAwayError(f"cannot reach MySQL at {place}/{self.address.path}: {away}")
        return StoreError(f"{self.target}: {text}")


@contextmanager
def _blaming_rows() -> Iterator[None]:
    try:
        yield
    except pymysql.MySQLError as error:
        if error.args and error.args[0] in _ROW_FAULTS:
            raise RowFault(str(error.args[-1])) from error
        raise


def _tuples(rows: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(_values(column) for column in rows.columns), strict=True))


def _values(column: pa.ChunkedArray) -> list[Any]:
    """A column as what the driver takes."""
    kind = column.type
    if (
        pa.types.is_floating(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_binary(kind)
    ):
        return list(column.to_pylist())
    if pa.types.is_timestamp(kind):
        return list(column.cast(pa.timestamp("us")).cast(pa.string()).to_pylist())
    return list(to_text(column).to_pylist())
