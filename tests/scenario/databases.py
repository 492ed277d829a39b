"""The databases of a business: what is said to each kind, and how it prints its values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import psycopg

from penstock.testing.mariadb import MariaDB
from penstock.testing.postgres import PostgresServer
from tests.spark.types import random_tables
from tests.spark.types.random_tables import Kind, RandomTable

Rows = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Database:
    """A database, the shop's tables in it, and the words in which they are altered."""

    kind: str
    url: str
    # Where a table's name begins in topics: `public.` or `shop.`
    schema: str
    # Another database of the same server, for a store.
    store_url: str
    run: Callable[[Sequence[str]], None]
    ask: Callable[[str], Rows]
    # Its own text of a column {c}, and of a moment.
    text: str
    moment: str
    kinds: tuple[Kind, ...]
    tables: tuple[str, ...]
    add_column: str
    rename_column: str
    change_type: str
    drop_column: str

    def every_type(self, random: Random, rows: int) -> RandomTable:
        """A table that has a column of each type, and random values."""
        declared = ", ".join(f"c{at} {each.sql}" for at, each in enumerate(self.kinds))
        statements = [f"CREATE TABLE kinds (id BIGINT PRIMARY KEY, {declared})"]
        for number in range(rows):
            values = ", ".join(each.literal(random) for each in self.kinds)
            statements.append(f"INSERT INTO kinds VALUES ({number}, {values})")
        return RandomTable("kinds", self.kinds, tuple(statements))


def postgresql(server: PostgresServer) -> Database:
    url, store = server.create_database(), server.create_database()
    lock = threading.Lock()

    def run(statements: Sequence[str]) -> None:
        """In one transaction."""
        with lock, psycopg.connect(url) as sql:
            for each in statements:
                sql.execute(each.encode())

    def ask(query: str) -> Rows:
        with lock, psycopg.connect(url) as sql:
            return sql.execute(query.encode()).fetchall()

    run(random_tables.POSTGRES_TYPES)
    return Database(
        "postgresql", url, "public.", store, run, ask, "{c}::text",
        "({c} AT TIME ZONE 'UTC')::text", random_tables.POSTGRES,
        (
            "CREATE TABLE customers (id bigint PRIMARY KEY, name text, country text)",
            """CREATE TABLE orders (id bigint PRIMARY KEY, customer_id bigint,
            amount numeric(12,2), placed timestamptz, note text)""",
            "CREATE TABLE rates (country text PRIMARY KEY, rate numeric(8,3))",
        ),
        "ALTER TABLE orders ADD channel text NOT NULL DEFAULT 'web'",
        "ALTER TABLE orders RENAME note TO remark",
        "ALTER TABLE orders ALTER amount TYPE numeric(16,4)",
        "ALTER TABLE orders DROP remark",
    )  # fmt: skip


def mariadb(server: MariaDB) -> Database:
    name, store = server.create_database(), server.create_database()

    def run(statements: Sequence[str]) -> None:
        with server.connect(name) as sql, sql.cursor() as cursor:
            cursor.execute("SET time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES'")
            for each in statements:
                cursor.execute(each)
            sql.commit()

    def ask(query: str) -> Rows:
        with server.connect(name) as sql, sql.cursor() as cursor:
            cursor.execute("SET time_zone = '+00:00'")
            cursor.execute(query)
            return list(cursor.fetchall())

    return Database(
        "mariadb", server.url(name), f"{name}.", server.url(store), run, ask,
        "CAST({c} AS CHAR)", "CAST({c} AS CHAR)", random_tables.MARIADB,
        (
            "CREATE TABLE customers (id bigint PRIMARY KEY, name varchar(20), country varchar(2))",
            """CREATE TABLE orders (id bigint PRIMARY KEY, customer_id bigint,
            amount decimal(12,2), placed timestamp(6) NULL, note varchar(40))""",
            "CREATE TABLE rates (country varchar(2) PRIMARY KEY, rate decimal(8,3))",
        ),
        "ALTER TABLE orders ADD channel varchar(10) NOT NULL DEFAULT 'web'",
        "ALTER TABLE orders RENAME COLUMN note TO remark",
        "ALTER TABLE orders MODIFY amount decimal(16,4)",
        "ALTER TABLE orders DROP COLUMN remark",
    )  # fmt: skip
