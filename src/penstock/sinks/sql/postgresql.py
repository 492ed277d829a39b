"""A table in PostgreSQL.

    postgresql://user:password@host/shop?table=orders

Rows are copied to a temporary table and put in from there, in one statement. Text keys sort by
their bytes (collation C), as everywhere here. PostgreSQL has no NUL in text: such rows are refused,
as are times outside of the years 1 to 9999, which cannot be read back from their text.
Options other than `table` go to the driver (`sslmode`, `application_name`, ...).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg.conninfo import make_conninfo
from pyarrow import csv

from penstock.connecting import why
from penstock.errors import ConfigError, PenstockError
from penstock.sinks.errors import StoreAwayError, StoreError, StoreUnreachableError
from penstock.sinks.schema import Schema, is_json
from penstock.sinks.sql.base import RowFault, SqlSink
from penstock.sinks.sql.text import from_text, to_text
from penstock.sinks.stores import Address
from penstock.sinks.times import Unfit

CONNECT_S: Final = 10
# Two that open at once make the table of positions one after the other.
_LOCK: Final = 7_031_126_004
# Data exceptions, and integrity constraints.
_ROW_STATES: Final = ("22", "23")
_ADMIN_STATES: Final = ("28", "3D", "42")
_BY_NAME: Final = {
    pa.bool_(): "boolean",
    pa.int8(): "smallint",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.binary(): "bytea",
    pa.date32(): "date",
    pa.time64("us"): "time",
    pa.timestamp("us"): "timestamp",
    pa.timestamp("us", "UTC"): "timestamptz",
}


def make(address: Address) -> PostgresSink:
    """The sink for a URL."""
    for name, value in address.options.items():
        if name != "table":
            _check(address, name, value)
    return PostgresSink(address)


def _check(address: Address, name: str, value: str) -> None:
    """ConfigError if the driver does not know an option."""
    try:
        make_conninfo(**{name: value})
    except psycopg.Error:
        raise ConfigError(
            f"{address.shown}: there is no option {name!r}",
            advice="There are table, and those of PostgreSQL's own clients, such as sslmode.",
        ) from None


class PostgresSink(SqlSink):
    """A table in PostgreSQL."""

    mark: ClassVar[str] = "%s"
    faults: ClassVar[tuple[type[Exception], ...]] = (psycopg.Error,)
    lock_row: ClassVar[str] = " FOR UPDATE"

    def _connect(self) -> psycopg.Connection[Any]:
        address = self.address
        given: dict[str, Any] = {
            "host": address.host or None,
            "port": address.port,
            "user": address.user or None,
            "password": address.password or None,
            "dbname": address.path or None,
            "connect_timeout": CONNECT_S,
            "application_name": "penstock",
            **{name: value for name, value in address.options.items() if name != "table"},
        }
        return psycopg.connect(
            **{name: value for name, value in given.items() if value is not None},
            autocommit=True,
            options="-c timezone=UTC -c datestyle=ISO -c client_min_messages=error",
            client_encoding="UTF8",
        )

    def _has_table(self, name: str) -> bool:
        found = self._one("SELECT to_regclass(%s) IS NOT NULL", (self.quote(name),))
        return bool(found[0])

    def _make_positions(self) -> None:
        self._run("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        super()._make_positions()

    def _type(self, field: pa.Field, *, is_key: bool) -> str:
        kind = field.type
        if pa.types.is_decimal(kind):
            return f"numeric({kind.precision},{kind.scale})"
        if is_json(field):
            return "json"
        if pa.types.is_string(kind):
            return 'text COLLATE "C"' if is_key else "text"
        return _BY_NAME[kind]

    def _retyped(self, field: pa.Field, schema: Schema) -> None:
        kind = self._type(field, is_key=field.name in schema.key)
        self._run(
            f"ALTER TABLE {self.quote(self.table)} ALTER COLUMN {self.quote(field.name)} "
            f"TYPE {kind}"
        )

    def _folded(self, name: str) -> str:
        return name

    def _unfit(self, rows: pa.Table) -> list[Unfit]:
        return super()._unfit(rows) + [
            (pc.match_substring(column, "\0"), f"column {name} has a NUL, which text cannot hold")
            for name, column in zip(rows.column_names, rows.columns, strict=True)
            if pa.types.is_string(column.type)
        ]

    def _staged(self, rows: pa.Table, stage: str, schema: Schema) -> None:
        """Copy rows to a temporary table, which is emptied at the end of the transaction."""
        columns = ", ".join(
            f"{self.quote(name)} {self._type(schema.field(name), is_key=name in schema.key)}"
            for name in rows.column_names
        )
        self._run(f"DROP TABLE IF EXISTS pg_temp.{stage}")
        self._run(f"CREATE TEMP TABLE {stage} ({columns}) ON COMMIT DROP")
        data = io.BytesIO()
        texts = pa.table([_as_csv(column) for column in rows.columns], names=rows.column_names)
        csv.write_csv(
            # Before the second of two chunks of text, the first of which is empty, Arrow writes
            # bytes of its own.
            texts.combine_chunks(),
            data,
            csv.WriteOptions(include_header=False, quoting_style="all_valid"),
        )
        with (
            self._connected().cursor() as cursor,
            cursor.copy(f"COPY {stage} FROM STDIN (FORMAT csv, NULL '')") as copy,
        ):
            copy.write(data.getbuffer())

    def _upsert(self, rows: pa.Table, schema: Schema) -> None:
        names = ", ".join(map(self.quote, schema.names))
        keys = ", ".join(map(self.quote, schema.key))
        rest = [self.quote(name) for name in schema.names if name not in schema.key]
        sets = ", ".join(f"{name} = EXCLUDED.{name}" for name in rest)
        then = f"UPDATE SET {sets}" if rest else "NOTHING"
        with _blaming_rows():
            self._staged(rows, "penstock_upserts", schema)
            self._run(
                f"INSERT INTO {self.quote(self.table)} ({names}) SELECT {names} "
                f"FROM penstock_upserts ON CONFLICT ({keys}) DO {then}"
            )

    def _delete(self, keys: pa.Table, schema: Schema) -> None:
        same = " AND ".join(f"t.{name} = d.{name}" for name in map(self.quote, schema.key))
        with _blaming_rows():
            self._staged(keys, "penstock_deletes", schema)
            self._run(
                f"DELETE FROM {self.quote(self.table)} t USING penstock_deletes d WHERE {same}"
            )

    def _selected(self, field: pa.Field) -> str:
        name = self.quote(field.name)
        return name if pa.types.is_binary(field.type) else f"{name}::text"

    def _decoded(self, values: list[Any], field: pa.Field) -> pa.Array:
        return from_text(values, field.type)

    def _batches(self, sql: str, values: Sequence[Any], rows: int) -> Iterator[list[Any]]:
        with self._connected().cursor("penstock_scan") as cursor:
            cursor.itersize = rows
            cursor.execute(sql, tuple(values))
            while found := cursor.fetchmany(rows):
                yield list(found)

    def _begin(self, *, write: bool) -> None:
        self._run("BEGIN" if write else "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def _place(self) -> str:
        host, port = self.address.host or "local socket", self.address.port or 5432
        return f"PostgreSQL at {host}:{port}/{self.address.path}"

    def _unconnected(self, error: psycopg.Error) -> PenstockError:
        trouble = why(error)
        if trouble.kind == "refused":
            told = f"{self.address.shown} refuses the user: {trouble.reason}"
            return StoreError(told, advice=trouble.advice)
        if trouble.kind == "busy":
            return StoreUnreachableError(f"{self.address.shown}: {trouble.reason}")
        return StoreAwayError(f"cannot reach {self._place()}: {trouble.reason}")

    def _explained(self, error: Exception) -> PenstockError:
        assert isinstance(error, psycopg.Error)
        text, state = _first_line(error), error.sqlstate or ""
        if "password authentication failed" in text or state.startswith("28"):
            return StoreError(
                f"{self.address.shown} refuses the user: {text}",
                advice="Look at the user and the password in the URL.",
            )
        if state == "42501":
            return StoreError(f"{self.target}: {text}", advice="Grant the user CREATE and writing.")
        if isinstance(error, psycopg.OperationalError) and not state.startswith(_ADMIN_STATES):
            if "does not exist" in text:
                return StoreError(f"{self.address.shown}: {text}", advice="Create the database.")
            if not state:
                return self._unconnected(error)
            return StoreUnreachableError(f"{self.address.shown}: {text}")
        if state in {"40001", "40P01"}:
            return StoreUnreachableError(f"{self.target}: {text}", advice="Trying again helps.")
        return StoreError(f"{self.target}: {text}")


@contextmanager
def _blaming_rows() -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        state = error.sqlstate or ""
        if state.startswith(_ROW_STATES) or state == "54000":
            raise RowFault(_first_line(error)) from error
        raise


def _as_csv(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_binary(column.type):
        found = [None if value is None else f"\\x{value.hex()}" for value in column.to_pylist()]
        return pa.chunked_array([pa.array(found, pa.string())])
    return to_text(column)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
