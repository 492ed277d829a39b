"""Random tables of random types and values, captured and stored: each store has what the database
itself says, and what no store can hold is set aside.

The judge is the database's own text of each value. Stores are read by their own clients.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import orjson
import psycopg
import pyarrow as pa
import pyarrow.dataset
import pytest
from deltalake import DeltaTable, QueryBuilder
from psycopg.types.json import set_json_loads

from penstock.sinks.stores import open_sink
from penstock.spark.sinking.parsing import Parsed, Parser
from penstock.testing import Broker
from penstock.testing.mariadb import MariaDB
from penstock.testing.postgres import PostgresServer
from tests.capture.delivery.running import records
from tests.harness.profiles import RANDOM_TABLE_ROWS, RANDOM_TABLES
from tests.spark.types import random_tables
from tests.spark.types.random_tables import RandomTable, random_table
from tests.spark.types.tables import captured, parsed, stored
from tests.waiting import eventually

pytestmark = [pytest.mark.databases, pytest.mark.timeout(1800)]
COLUMNS = 10
Rows = list[tuple[Any, ...]]
Read = Callable[[RandomTable], Rows]
Store = tuple[str, Callable[[RandomTable], str], Read]


def tables(random: Random, kinds: tuple[random_tables.Kind, ...]) -> list[RandomTable]:
    return [
        random_table(random, f"t{number}", kinds, columns=COLUMNS, rows=RANDOM_TABLE_ROWS)
        for number in range(RANDOM_TABLES)
    ]


# ---- stores ----------------------------------------------------------------------------------


def names(table: RandomTable) -> str:
    return ", ".join(("id", *(f"c{at}" for at in range(len(table.kinds)))))


def rows_of(found: pa.Table, table: RandomTable) -> Rows:
    """Rows of Arrow, in the order of the table's columns."""
    columns = [found.column(name).to_pylist() for name in names(table).split(", ")]
    return list(zip(*columns, strict=True))


def from_sqlite(path: Path, table: RandomTable) -> Rows:
    with closing(sqlite3.connect(path)) as sql:
        return sql.execute(f"SELECT {names(table)} FROM {table.name}").fetchall()


def from_duckdb(path: Path, table: RandomTable) -> Rows:
    with duckdb.connect(str(path)) as sql:
        return rows_of(sql.sql(f"SELECT * FROM {table.name}").to_arrow_table(), table)


def from_delta(path: Path, table: RandomTable) -> Rows:
    query = QueryBuilder().register("t", DeltaTable(str(path / table.name)))
    return rows_of(pa.table(query.execute("SELECT * FROM t")), table)


def from_parquet(path: Path, table: RandomTable) -> Rows:
    """Through the store's own reading: which files count is known to it alone."""
    with open_sink(f"parquet:///{path}/{table.name}", {}, name=table.name) as sink:
        batches = list(sink.scan())
    return rows_of(pa.Table.from_batches(batches), table) if batches else []


def from_postgres(url: str, table: RandomTable) -> Rows:
    with psycopg.connect(url) as sql:
        # The text, or a string in JSON could not be told from the text of JSON.
        set_json_loads(lambda text: text, sql)
        sql.execute("SET timezone TO 'UTC'")
        return sql.execute(f"SELECT {names(table)} FROM {table.name}".encode()).fetchall()


def from_mariadb(server: MariaDB, database: str, table: RandomTable) -> Rows:
    with server.connect(database) as sql, sql.cursor() as cursor:
        cursor.execute(f"SELECT {names(table)} FROM {table.name}")
        return list(cursor.fetchall())


@pytest.fixture
def stores(tmp_path: Path, shared_postgres: PostgresServer, shared_mariadb: MariaDB) -> list[Store]:
    """Name, address for a table, and how it is read."""
    postgres, database = shared_postgres.create_database(), shared_mariadb.create_database()
    sign = "&" if "?" in postgres else "?"
    mariadb = shared_mariadb.url(database)
    return [
        ("sqlite", lambda table: f"sqlite:///{tmp_path}/store.db?table={table.name}",
         partial(from_sqlite, tmp_path / "store.db")),
        ("duckdb", lambda table: f"duckdb:///{tmp_path}/store.duckdb?table={table.name}",
         partial(from_duckdb, tmp_path / "store.duckdb")),
        ("delta", lambda table: f"delta:///{tmp_path}/delta/{table.name}",
         partial(from_delta, tmp_path / "delta")),
        ("parquet", lambda table: f"parquet:///{tmp_path}/parquet/{table.name}",
         partial(from_parquet, tmp_path / "parquet")),
        ("postgres", lambda table: f"{postgres}{sign}table={table.name}",
         partial(from_postgres, postgres)),
        ("mariadb", lambda table: f"{mariadb}?table={table.name}",
         partial(from_mariadb, shared_mariadb, database)),
    ]  # fmt: skip


# ---- the check -------------------------------------------------------------------------------


def check(
    log: str,
    topics: Sequence[str],
    made: Sequence[RandomTable],
    ask: Callable[[str], Rows],
    stores: Sequence[Store],
) -> None:
    for table, topic in zip(made, topics, strict=True):
        eventually(partial(_has_all, log, topic), timeout_s=60)
        truth = table.meanings(ask(table.query))
        wanted = {id_: row for id_, row in truth.items() if table.fits(row)}
        parser, what = parsed(log, topic)
        aside = {orjson.loads(key)["id"] for key in what.bad.column("key").to_pylist()}
        assert aside == truth.keys() - wanted.keys(), what.bad.column("reason").to_pylist()
        for name, url, read in stores:
            _fill(url(table), table.name, topic, parser, what)
            compare(name, table, table.meanings(read(table)), wanted)


def _has_all(log: str, topic: str) -> bool:
    return len(records(log, topic)) >= RANDOM_TABLE_ROWS


def _fill(url: str, name: str, topic: str, parser: Parser, what: Parsed) -> None:
    with open_sink(url, {}, name=name) as sink:
        stored(sink, topic, parser, what)


def compare(store: str, table: RandomTable, found: dict[int, Any], wanted: dict[int, Any]) -> None:
    assert found.keys() == wanted.keys(), store
    for id_, row in wanted.items():
        for at, kind in enumerate(table.kinds):
            assert found[id_][at] == row[at], (
                f"{store}: {table.name}.c{at} {kind.sql} of row {id_} is {found[id_][at]!r}, and "
                f"{row[at]!r} in the database; {table.statements[id_ + 1]}"
            )


# ---- the databases ---------------------------------------------------------------------------


@pytest.fixture
def random(seed: int) -> Random:
    return Random(seed)


@pytest.fixture
def log() -> Iterator[str]:
    with Broker() as broker:
        yield broker.bootstrap


def test_postgresql(
    random: Random, log: str, stores: list[Store], shared_postgres: PostgresServer
) -> None:
    made = tables(random, random_tables.POSTGRES)
    url = shared_postgres.create_database()
    with psycopg.connect(url, autocommit=True) as sql:
        for statement in random_tables.POSTGRES_TYPES:
            sql.execute(statement.encode())
        for table in made:
            for statement in table.statements:
                sql.execute(statement.encode())
        with captured(log, url, "public.t0", RANDOM_TABLE_ROWS) as topic:
            topics = [topic.removesuffix("t0") + table.name for table in made]
            check(log, topics, made, lambda q: sql.execute(q.encode()).fetchall(), stores)


def test_mariadb(random: Random, log: str, stores: list[Store], shared_mariadb: MariaDB) -> None:
    made = tables(random, random_tables.MARIADB)
    database = shared_mariadb.create_database()
    with shared_mariadb.connect(database) as sql, sql.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES'")
        for table in made:
            for statement in table.statements:
                cursor.execute(statement)
        sql.commit()

        def ask(query: str) -> Rows:
            cursor.execute(query)
            return list(cursor.fetchall())

        url = shared_mariadb.url(database)
        with captured(log, url, f"{database}.t0", RANDOM_TABLE_ROWS) as topic:
            topics = [topic.removesuffix("t0") + table.name for table in made]
            check(log, topics, made, ask, stores)


def test_sqlite(random: Random, log: str, stores: list[Store], tmp_path: Path) -> None:
    made = tables(random, random_tables.SQLITE)
    with closing(sqlite3.connect(tmp_path / "shop.db")) as sql:
        for table in made:
            for statement in table.statements:
                sql.execute(statement)
        sql.commit()
        url = f"sqlite:///{tmp_path}/shop.db"
        with captured(log, url, "t0", RANDOM_TABLE_ROWS) as topic:
            topics = [topic.removesuffix("t0") + table.name for table in made]
            check(log, topics, made, lambda query: sql.execute(query).fetchall(), stores)
