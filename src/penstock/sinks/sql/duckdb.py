"""A table in a DuckDB file, for analysis.

    duckdb:///shop.duckdb?table=orders

DuckDB lets one process at a time have the file open for writing, and then nobody read it. So it is
opened for each batch and closed after it; who comes in between waits, up to `timeout` seconds.
The table has no index for its key, which DuckDB would have to keep in memory. Times that DuckDB
does not know (before 290309 BC) are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any, ClassVar, Final

import duckdb
import pyarrow as pa

from penstock.errors import ConfigError, PenstockError
from penstock.sinks.contract import SCAN_ROWS, Key, Position
from penstock.sinks.errors import StoreError, StoreUnreachableError
from penstock.sinks.schema import Schema
from penstock.sinks.sql.base import SqlSink
from penstock.sinks.stores import Address
from penstock.sinks.times import Times, Unfit

WAIT_S: Final = 30
_POLL_S: Final = 0.02
# Whatever works with times outside of these ends in a fatal error of DuckDB.
_TIMES: Final = Times(
    (-2_147_483_646, 2_147_483_646),
    (-9_223_372_022_400_000_000, 9_223_372_036_854_775_806),
    "among the times of DuckDB",
)
_BY_NAME: Final = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "VARCHAR",
    pa.binary(): "BLOB",
    pa.date32(): "DATE",
    pa.time64("us"): "TIME",
    pa.timestamp("us"): "TIMESTAMP",
    pa.timestamp("us", "UTC"): "TIMESTAMPTZ",
}


def make(address: Address) -> DuckdbSink:
    """The sink for a URL."""
    address.only("table", "timeout")
    if address.host or not address.path:
        raise ConfigError(
            f"{address.shown} names no file",
            advice="A file is named with three slashes, as in duckdb:///shop.db; four if absolute.",
        )
    address.number("timeout", WAIT_S)
    return DuckdbSink(address)


class DuckdbSink(SqlSink):
    """A table in a DuckDB file."""

    faults: ClassVar[tuple[type[Exception], ...]] = (duckdb.Error,)
    text_type: ClassVar[str] = "VARCHAR"

    def _is_there(self) -> bool:
        return Path(self.address.path).exists()

    def _connect(self) -> duckdb.DuckDBPyConnection:
        path = Path(self.address.path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path.parent} cannot be made: {error.strerror}") from error
        deadline = monotonic() + self.address.number("timeout", WAIT_S)
        while True:
            try:
                connection = duckdb.connect(str(path))
                connection.execute("SET TimeZone = 'UTC'")
                return connection
            except duckdb.IOException as error:
                if "lock" not in str(error).lower() or monotonic() >= deadline:
                    raise
                Event().wait(_POLL_S)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        # The outermost of these gives the file back.
        is_outermost = self._connection is None
        try:
            with super()._explaining():
                yield
        finally:
            if is_outermost:
                self.close()

    def _run(self, sql: str, values: Any = ()) -> Any:
        return self._connected().execute(sql, list(values))

    def _one(self, sql: str, values: Any = ()) -> Any:
        # All of it: an answer that was not read to its end keeps the connection busy.
        found = self._run(sql, values).fetchall()
        return found[0] if found else None

    @contextmanager
    def _savepoint(self) -> Iterator[None]:
        # DuckDB has none, and refuses no row of the types that there are.
        yield

    def _has_table(self, name: str) -> bool:
        found = self._one(
            "SELECT count(*) FROM information_schema.tables WHERE table_name = ?", (name,)
        )
        return bool(found[0])

    def _seen(self) -> tuple[int, Position, Schema] | None:
        if self._connection is None and not self._is_there():
            return None
        with self._explaining():
            # To ask for the table first takes a new connection as long as being made.
            try:
                return self._row()
            except duckdb.CatalogException:
                return None

    def _type(self, field: pa.Field, *, is_key: bool) -> str:
        kind = field.type
        if pa.types.is_decimal(kind):
            return f"DECIMAL({kind.precision},{kind.scale})"
        return _BY_NAME[kind]

    def _unfit(self, rows: pa.Table) -> list[Unfit]:
        return _TIMES.unfit(rows)

    def _make_table(self, schema: Schema) -> None:
        columns = ", ".join(
            f"{self.quote(each.name)} {self._type(each, is_key=each.name in schema.key)}"
            for each in schema.fields
        )
        self._run(f"CREATE TABLE {self.quote(self.table)} ({columns})")

    def _retyped(self, field: pa.Field, schema: Schema) -> None:
        self._run(
            f"ALTER TABLE {self.quote(self.table)} ALTER COLUMN {self.quote(field.name)} "
            f"TYPE {self._type(field, is_key=False)}"
        )

    def _upsert(self, rows: pa.Table, schema: Schema) -> None:
        self._delete(rows.select(list(schema.key)), schema)
        names = ", ".join(map(self.quote, schema.names))
        connection = self._connected()
        connection.register("penstock_upserts", rows)
        self._run(
            f"INSERT INTO {self.quote(self.table)} ({names}) SELECT {names} FROM penstock_upserts"
        )
        connection.unregister("penstock_upserts")

    def _delete(self, keys: pa.Table, schema: Schema) -> None:
        connection = self._connected()
        connection.register("penstock_deletes", keys)
        same = " AND ".join(f"t.{name} = d.{name}" for name in map(self.quote, schema.key))
        self._run(f"DELETE FROM {self.quote(self.table)} t USING penstock_deletes d WHERE {same}")
        connection.unregister("penstock_deletes")

    def scan(
        self, low: Key | None = None, high: Key | None = None, *, batch_rows: int = SCAN_ROWS
    ) -> Iterator[pa.RecordBatch]:
        with self._explaining():
            self._connected()
            schema = self._row_schema()
            if schema is None:
                return
            names = ", ".join(map(self.quote, schema.key))
            columns = ", ".join(map(self.quote, schema.names))
            values: list[Any] = []
            limits = [
                self._compared(schema.key, limit, sign, values)
                for limit, sign in ((low, ">="), (high, "<"))
                if limit is not None
            ]
            where = f" WHERE {' AND '.join(limits)}" if limits else ""
            found = self._connected().sql(
                f"SELECT {columns} FROM {self.quote(self.table)}{where} ORDER BY {names}",
                params=values,
            )
            for batch in found.to_arrow_reader(batch_rows):
                table = pa.Table.from_batches([batch]).cast(schema.arrow)
                yield from table.combine_chunks().to_batches()

    def _compared(self, key: tuple[str, ...], limit: Key, sign: str, values: list[Any]) -> str:
        """A comparison of whole keys, column by column: DuckDB fails on two of tuples."""
        ways = []
        for at, name in enumerate(key):
            equal = [f"{self.quote(each)} = ?" for each in key[:at]]
            last = sign if at == len(key) - 1 else sign[0]
            ways.append(" AND ".join([*equal, f"{self.quote(name)} {last} ?"]))
            values += limit[: at + 1]
        return f"({' OR '.join(f'({way})' for way in ways)})"

    def _row_schema(self) -> Schema | None:
        found = self._seen()
        return None if found is None else found[2]

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(duckdb.Error):
                connection.close()

    def _explained(self, error: Exception) -> PenstockError:
        text = str(error).strip().partition("\n")[0]
        if isinstance(error, duckdb.TransactionException):
            return StoreUnreachableError(f"{self.target}: {text}", advice="Trying again helps.")
        if isinstance(error, duckdb.IOException) and "lock" in text.lower():
            return StoreUnreachableError(
                f"{self.address.shown} is open in another process: {text}",
                advice="DuckDB lets one process at a time write: close the other.",
            )
        return StoreError(f"{self.target}: {text}")
