"""What all SQL databases have in common: the contract, in statements that each of them knows.

Invariants:
- The row of `penstock_positions` is locked for as long as a transaction of a writer lasts, so that
  the check of the writer's number and the write are one.
- A row that the database refuses is found by halving the batch inside of savepoints; everything
  else is written by then, and the transaction goes on.
- A table without a row in `penstock_positions` is not ours, and is never touched.
- Numbers of writers begin anywhere: whoever wrote to a table that was removed, or switched away,
  has another number than all who write to the one that has come in its place.
"""

from __future__ import annotations

import json
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, ClassVar, Final, Self

import pyarrow as pa

from penstock.errors import ConfigError, PenstockError
from penstock.sinks.contract import (
    SCAN_ROWS,
    Applied,
    Aside,
    Changes,
    Key,
    Position,
    Refused,
    Sink,
    follows,
    refusing,
)
from penstock.sinks.errors import FencedError, StoreError
from penstock.sinks.rows import fitting, refused_row
from penstock.sinks.schema import Schema
from penstock.sinks.stores import Address
from penstock.sinks.times import WRITTEN, Unfit

POSITIONS: Final = "penstock_positions"
BUILDING: Final = "__building"
MAX_TABLE_NAME: Final = 52
_REASON_CHARACTERS: Final = 500


def first_epoch() -> int:
    """The number before that of a new table's first writer."""
    return secrets.randbits(62)


class RowFault(Exception):  # noqa: N818 (not an error of ours: the base turns it into one)
    """The database refuses a statement for what is in a row."""


class SqlSink(Sink):
    """A table in a SQL database. Subclasses know one database each."""

    mark: ClassVar[str] = "?"
    quotes: ClassVar[str] = '"'
    # What the driver raises.
    faults: ClassVar[tuple[type[Exception], ...]] = ()
    lock_row: ClassVar[str] = ""
    text_type: ClassVar[str] = "TEXT"

    def __init__(self, address: Address, table: str | None = None, live: str | None = None) -> None:
        self.address = address
        self.live = live or address.option("table") or address.name
        if not self.live:
            raise ConfigError(
                f"{address.shown} names no table", advice="Name it, as in ...?table=orders."
            )
        self.table = table or self.live
        if len(self.live.encode()) > MAX_TABLE_NAME or "\0" in self.live or "%" in self.live:
            raise ConfigError(
                f"{self.live!r} is no name for a table",
                advice=f"Use up to {MAX_TABLE_NAME} bytes, without % and NUL.",
            )
        self.target = f"table {self.table} in {address.shown}"
        self._epoch: int | None = None
        self._schema: Schema | None = None
        self._connection: Any = None

    # ---- what each database knows ------------------------------------------------------------

    @abstractmethod
    def _connect(self) -> Any:
        """A connection that begins no transaction by itself."""

    @abstractmethod
    def _type(self, field: pa.Field, *, is_key: bool) -> str:
        """The type of a column."""

    @abstractmethod
    def _upsert(self, rows: pa.Table, schema: Schema) -> None:
        """Put rows in. RowFault if one of them is at fault."""

    @abstractmethod
    def _delete(self, keys: pa.Table, schema: Schema) -> None:
        """Take rows out. RowFault if one of the keys is at fault."""

    @abstractmethod
    def _explained(self, error: Exception) -> PenstockError:
        """What a fault of the driver means."""

    @abstractmethod
    def _has_table(self, name: str) -> bool:
        """Whether there is such a table, ours or not."""

    def _is_there(self) -> bool:
        """Whether there is a database: a look at what is none must not make one."""
        return True

    def _batches(self, sql: str, values: Sequence[Any], rows: int) -> Iterator[list[Any]]:
        """The rows of a query, in pieces."""
        cursor = self._run(sql, values)
        while found := cursor.fetchmany(rows):
            yield list(found)

    def _decoded(self, values: list[Any], field: pa.Field) -> pa.Array:
        """A column of a scan."""
        return pa.array(values, field.type)

    def _selected(self, field: pa.Field) -> str:
        """What to select for a column in a scan."""
        return self.quote(field.name)

    def _bound(self, value: Any, field: pa.Field) -> Any:
        """A limit of a range, as the driver takes it."""
        return value

    def _begin(self, *, write: bool) -> None:
        self._run("BEGIN")

    def _unfit(self, rows: pa.Table) -> list[Unfit]:
        """Which rows the database has no place for."""
        return WRITTEN.unfit(rows)

    def _folded(self, name: str) -> str:
        """A column's name as the database compares it: here without regard to ASCII's cases."""
        return name.encode().lower().decode()

    def _sorted_by(self, field: pa.Field) -> str:
        """What a scan orders and compares a column of the key by."""
        # Of the table: what is selected may be the text of it.
        return f"t.{self.quote(field.name)}"

    def _retyped(self, field: pa.Field, schema: Schema) -> None:
        """Make a column wider."""

    def _make_table(self, schema: Schema) -> None:
        columns = [
            f"{self.quote(each.name)} {self._type(each, is_key=each.name in schema.key)}"
            + (" NOT NULL" if each.name in schema.key else "")
            for each in schema.fields
        ]
        keys = ", ".join(map(self.quote, schema.key))
        body = ", ".join([*columns, f"PRIMARY KEY ({keys})"])
        self._run(f"CREATE TABLE {self.quote(self.table)} ({body})")

    # ---- statements --------------------------------------------------------------------------

    def quote(self, name: str) -> str:
        """A name as SQL has it."""
        mark = self.quotes
        text = name.replace(mark, mark * 2)
        return f"{mark}{text.replace('%', '%%') if self.mark == '%s' else text}{mark}"

    def _run(self, sql: str, values: Sequence[Any] = ()) -> Any:
        cursor = self._connected().cursor()
        cursor.execute(sql, tuple(values))
        return cursor

    def _one(self, sql: str, values: Sequence[Any] = ()) -> Any:
        cursor = self._run(sql, values)
        found = cursor.fetchone()
        cursor.close()
        return found

    def _connected(self) -> Any:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except self.faults as error:
            told = self._explained(error)
            if told.retriable:
                self.close()
            elif self._is_gone():
                raise self._gone() from error
            raise told from error

    def _is_gone(self) -> bool:
        """Whether there is a position, and no table any more."""
        if self._connection is None:
            return False
        with suppress(*self.faults):
            known = self._has_table(POSITIONS) and self._row() is not None
            return known and not self._has_table(self.table)
        return False

    def _gone(self) -> StoreError:
        name = self.address.name or "NAME"
        return StoreError(
            f"{self.target} is gone: somebody has dropped or renamed it",
            advice=f"Build it anew from the log: penstock sinks rebuild {name}",
        )

    @contextmanager
    def _transaction(self, *, write: bool = True) -> Iterator[None]:
        with self._explaining():
            self._begin(write=write)
            try:
                yield
                self._run("COMMIT")
            except BaseException:
                with suppress(Exception):
                    self._run("ROLLBACK")
                raise

    @contextmanager
    def _savepoint(self) -> Iterator[None]:
        self._run("SAVEPOINT penstock")
        try:
            yield
        except RowFault:
            self._run("ROLLBACK TO SAVEPOINT penstock")
            raise
        finally:
            with suppress(*self.faults):
                self._run("RELEASE SAVEPOINT penstock")

    # ---- the row of the position --------------------------------------------------------------

    def _make_positions(self) -> None:
        kind = self.text_type
        self._run(
            f"CREATE TABLE IF NOT EXISTS {POSITIONS} (name {self._name_type()} NOT NULL PRIMARY "
            f"KEY, epoch BIGINT NOT NULL, offsets {kind} NOT NULL, columns_json {kind} NOT NULL)"
        )

    def _name_type(self) -> str:
        return self.text_type

    def _row_name(self) -> str:
        """The name of this table's row."""
        return self.table

    def _row(self, *, lock: bool = False) -> tuple[int, Position, Schema] | None:
        found = self._one(
            f"SELECT epoch, offsets, columns_json FROM {POSITIONS} WHERE name = {self.mark}"
            f"{self.lock_row if lock else ''}",
            (self._row_name(),),
        )
        if found is None:
            return None
        schema = Schema.from_json(json.loads(found[2]))
        return int(found[0]), Position.from_json(str(found[1])), schema

    def _write_row(self, epoch: int, position: Position, schema: Schema) -> None:
        mark = self.mark
        self._run(f"DELETE FROM {POSITIONS} WHERE name = {mark}", (self._row_name(),))
        self._run(
            f"INSERT INTO {POSITIONS} (name, epoch, offsets, columns_json) "
            f"VALUES ({mark}, {mark}, {mark}, {mark})",
            (self._row_name(), epoch, position.text(), json.dumps(schema.as_json())),
        )

    # ---- the contract -------------------------------------------------------------------------

    def open(self, schema: Schema) -> Position:
        with self._transaction():
            self._make_positions()
            found = self._row(lock=True)
            if found is None:
                epoch, position = first_epoch(), Position()
                self._must_not_be_foreign()
                merged = self._merged(None, schema)
                self._make_table(merged)
            else:
                epoch, position, old = found
                if not self._has_table(self.table):
                    raise self._gone()
                merged = self._merged(old, schema)
                added, changed = merged.differences(old)
                for each in added:
                    self._run(
                        f"ALTER TABLE {self.quote(self.table)} ADD COLUMN "
                        f"{self.quote(each.name)} {self._type(each, is_key=False)}"
                    )
                for each in changed:
                    self._retyped(each, merged)
            self._write_row(epoch + 1, position, merged)
        self._epoch, self._schema = epoch + 1, merged
        return position

    def _merged(self, old: Schema | None, wanted: Schema) -> Schema:
        """What the table becomes; an error if it cannot."""
        merged = wanted if old is None else old.evolved(wanted, self.target)
        return merged.told_apart(wanted, self._folded, self.target)

    def _must_not_be_foreign(self) -> None:
        if self._has_table(self.table):
            raise StoreError(
                f"{self.address.shown} has a table {self.table} that Penstock has not made",
                advice="Choose another name with ?table=NAME, or remove the table.",
            )

    def position(self) -> Position | None:
        found = self._seen()
        return None if found is None else found[1]

    def stored_schema(self) -> Schema | None:
        found = self._seen()
        return None if found is None else found[2]

    def _seen(self) -> tuple[int, Position, Schema] | None:
        if self._connection is None and not self._is_there():
            return None
        with self._explaining():
            return self._row() if self._has_table(POSITIONS) else None

    def apply(self, changes: Changes, aside: Aside) -> Applied:
        if self._epoch is None or self._schema is None:
            raise StoreError(f"{self.target} was not opened for writing", advice="Call open().")
        with self._transaction():
            stored = self._fenced(self._epoch)
            if not follows(changes, stored, self.target):
                return Applied(0)
            fit, refused = fitting(
                self._completed(changes), self._schema, self._unfit, self.max_refused
            )
            refusing(refused, self.target, self.max_refused)
            written = self._put(fit.upserts, fit.upserted_at, refused)
            # What the database does not take as a key is in no row of it.
            self._halving(fit.deletes, self._delete, lambda at, reason: None)
            if refused:
                refusing(refused, self.target, self.max_refused)
                aside(refused)
            self._run(
                f"UPDATE {POSITIONS} SET offsets = {self.mark} WHERE name = {self.mark}",
                (stored.merged(changes.position).text(), self._row_name()),
            )
        return Applied(written + changes.deletes.num_rows, tuple(refused))

    def _fenced(self, epoch: int) -> Position:
        """The position, the row locked; FencedError if there is another writer by now."""
        found = self._row(lock=True)
        if found is None and not self._has_table(self.table):
            raise self._gone()
        if found is None or found[0] != epoch:
            raise FencedError(f"another writer has taken over {self.target}")
        return found[1]

    def _completed(self, changes: Changes) -> Changes:
        """The upserts as all columns of the table."""
        assert self._schema is not None
        given = changes.upserts
        names = set(given.column_names)
        columns = [
            given.column(each.name).cast(each.type)
            if each.name in names
            else pa.chunked_array([pa.nulls(given.num_rows, each.type)])
            for each in self._schema.fields
        ]
        return replace(changes, upserts=pa.table(columns, schema=self._schema.arrow))

    def _put(self, rows: pa.Table, origin: pa.Table, refused: list[Refused]) -> int:
        """Write rows. How many were written."""

        def refuse(at: int, reason: str) -> None:
            assert self._schema is not None
            reason = reason[:_REASON_CHARACTERS]
            refused.append(refused_row(rows, origin, self._schema, at, reason))
            refusing(refused, self.target, self.max_refused)

        return self._halving(rows, self._upsert, refuse)

    def _halving(
        self,
        rows: pa.Table,
        write: Callable[[pa.Table, Schema], None],
        at_fault: Callable[[int, str], None],
        first: int = 0,
    ) -> int:
        """Write rows; those at fault are found by halving. How many were written."""
        assert self._schema is not None
        if not rows.num_rows:
            return 0
        try:
            with self._savepoint():
                write(rows, self._schema)
            return int(rows.num_rows)
        except RowFault as fault:
            if rows.num_rows == 1:
                at_fault(first, str(fault))
                return 0
        half = rows.num_rows // 2
        return self._halving(rows.slice(0, half), write, at_fault, first) + self._halving(
            rows.slice(half), write, at_fault, first + half
        )

    def scan(
        self, low: Key | None = None, high: Key | None = None, *, batch_rows: int = SCAN_ROWS
    ) -> Iterator[pa.RecordBatch]:
        schema = self.stored_schema()
        if schema is None:
            return
        values: list[Any] = []
        limits = []
        keys = [schema.field(name) for name in schema.key]
        names = ", ".join(map(self._sorted_by, keys))
        for limit, sign in ((low, ">="), (high, "<")):
            if limit is not None:
                marks = ", ".join([self.mark] * len(keys))
                limits.append(f"({names}) {sign} ({marks})")
                values += [
                    self._bound(value, each) for value, each in zip(limit, keys, strict=True)
                ]
        columns = ", ".join(map(self._selected, schema.fields))
        where = f" WHERE {' AND '.join(limits)}" if limits else ""
        sql = f"SELECT {columns} FROM {self.quote(self.table)} t{where} ORDER BY {names}"
        with self._transaction(write=False):
            for rows in self._batches(sql, values, batch_rows):
                arrays = [
                    self._decoded(list(column), each)
                    for column, each in zip(zip(*rows, strict=True), schema.fields, strict=True)
                ]
                yield pa.record_batch(arrays, schema=schema.arrow)

    def beside(self, *, fresh: bool = False) -> Self:
        other = type(self)(self.address, f"{self.live}{BUILDING}", self.live)
        if fresh:
            other.remove()
        return other

    def switch(self) -> None:
        if self.table == self.live or self._epoch is None:
            raise StoreError(f"{self.target} was not built beside another")
        old = type(self)(self.address, self.live, self.live)
        with self._transaction():
            self._fenced(self._epoch)
            old._connection = self._connection
            before = old._row(lock=True)
            if before is None:
                old._must_not_be_foreign()
            epoch = max(self._epoch, before[0] if before else 0) + 1
            self._run(f"DROP TABLE IF EXISTS {self.quote(self.live)}")
            self._run(f"ALTER TABLE {self.quote(self.table)} RENAME TO {self.quote(self.live)}")
            mark = self.mark
            self._run(f"DELETE FROM {POSITIONS} WHERE name = {mark}", (self.live,))
            self._run(
                f"UPDATE {POSITIONS} SET name = {mark}, epoch = {mark} WHERE name = {mark}",
                (self.live, epoch, self.table),
            )
        self._epoch = None

    def relocate(self, position: Position) -> bool:
        if self._epoch is None:
            raise StoreError(f"{self.target} was not opened for writing", advice="Call open().")
        with self._transaction():
            self._fenced(self._epoch)
            self._run(
                f"UPDATE {POSITIONS} SET offsets = {self.mark} WHERE name = {self.mark}",
                (position.text(), self._row_name()),
            )
        return True

    def remove(self) -> None:
        if self._seen() is not None:
            with self._transaction():
                self._run(f"DROP TABLE IF EXISTS {self.quote(self.table)}")
                self._run(f"DELETE FROM {POSITIONS} WHERE name = {self.mark}", (self.table,))
        if self.table == self.live:
            with self.beside() as other:
                other.remove()
        self._epoch = None

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*self.faults):
                connection.close()
