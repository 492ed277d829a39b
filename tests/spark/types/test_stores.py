"""A column of every type, from the table to each store: what is stored is what the table has.

One capture of one row; each store is read by its own client where it has one.
"""

from __future__ import annotations

import datetime as dt
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import psycopg
import pyarrow as pa
import pytest
import redis
from deltalake import DeltaTable, QueryBuilder

from penstock.errors import ConfigError
from penstock.sinks.errors import SchemaChangedError
from penstock.sinks.schema import Schema
from penstock.sinks.stores import open_sink
from penstock.testing import Broker
from penstock.testing.mariadb import MariaDB
from penstock.testing.postgres import PostgresServer
from penstock.testing.redis import RedisServer
from tests.capture.delivery.running import records
from tests.spark.types.tables import (
    IN_MARIADB,
    IN_SQLITE,
    IN_STORES,
    JSON_COLUMNS,
    MARIADB,
    POSTGRES,
    SQLITE,
    captured,
    parsed,
    stored,
)
from tests.waiting import eventually

pytestmark = pytest.mark.databases

Told = tuple[str, str, Any, Any]


@pytest.fixture(scope="module")
def told(shared_postgres: PostgresServer) -> Iterator[Told]:
    """A captured table: the log, its topic, and what a sink makes of it."""
    url = shared_postgres.create_database()
    with psycopg.connect(url, autocommit=True) as sql:
        sql.execute(POSTGRES)
    with Broker() as broker, captured(broker.bootstrap, url, "public.kinds", 2) as topic:
        yield (broker.bootstrap, topic, *parsed(broker.bootstrap, topic))


def fill(told: Told, url: str) -> None:
    _, topic, parser, what = told
    with open_sink(url, {}, name="kinds") as sink:
        stored(sink, topic, parser, what)


def read_back(url: str) -> dict[str, Any]:
    with open_sink(url, {}, name="kinds") as sink:
        [row] = pa.Table.from_batches(list(sink.scan((3,)))).to_pylist()
    found: dict[str, Any] = row
    return found


def wanted(**others: Any) -> dict[str, Any]:
    return {name: others.get(name, value) for name, (_, value) in IN_STORES.items()}


def documents(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose columns of JSON are read, for stores that write it in their own way."""
    return {
        name: json.loads(value, parse_float=Decimal) if name in JSON_COLUMNS else value
        for name, value in row.items()
    }


def test_types(told: Told) -> None:
    _, _, parser, what = told
    assert {field.name: field.type for field in parser.schema.fields} == {
        name: kind for name, (kind, _) in IN_STORES.items()
    }
    assert parser.key == ("id",)
    rows = {row["id"]: row for row in what.upserts.to_pylist()}
    assert rows[9007199254740993] == wanted()
    assert rows[2] == {**dict.fromkeys(IN_STORES), "id": 2}
    assert what.bad.num_rows == 0
    marked = [f.name for f in parser.schema.fields if f.metadata]
    assert marked == [name for name in IN_STORES if name in JSON_COLUMNS]


def test_sqlite(told: Told, tmp_path: Path) -> None:
    fill(told, f"sqlite:///{tmp_path}/shop.db?table=kinds")
    with sqlite3.connect(tmp_path / "shop.db") as sql:
        sql.row_factory = sqlite3.Row
        found = dict(sql.execute("SELECT * FROM kinds WHERE id > 2").fetchone())
    assert found == wanted(
        price=12345678.91, free="1E-18", long="1234567890123456789.0123456789",
        cash="1234.56", day="2026-11-17", at="2026-11-17 10:11:12.345678",
        at3="2026-11-17 10:11:12.345000", atz="2026-11-17 10:11:12.345678+00:00",
        clock="10:11:12.345678", clock3="10:11:12.345000", flag=1,
    )  # fmt: skip


def test_duckdb(told: Told, tmp_path: Path) -> None:
    fill(told, f"duckdb:///{tmp_path}/shop.duckdb?table=kinds")
    with duckdb.connect(str(tmp_path / "shop.duckdb")) as sql:
        [found] = sql.sql("SELECT * FROM kinds WHERE id > 2").to_arrow_table().to_pylist()
    assert documents(found) == documents(wanted())


def test_parquet(told: Told, tmp_path: Path) -> None:
    fill(told, f"parquet:///{tmp_path}/kinds")
    assert read_back(f"parquet:///{tmp_path}/kinds") == wanted()


def test_delta(told: Told, tmp_path: Path) -> None:
    fill(told, f"delta:///{tmp_path}/kinds")
    table = DeltaTable(str(tmp_path / "kinds"))
    rows = pa.table(QueryBuilder().register("t", table).execute("SELECT * FROM t WHERE id > 2"))
    found = rows.to_pylist()[0]
    assert documents({**found, "clock": None, "clock3": None}) == documents(
        wanted(clock=None, clock3=None)
    )


def test_postgresql(told: Told, shared_postgres: PostgresServer) -> None:
    url = shared_postgres.create_database()
    fill(told, f"{url}?table=kinds" if "?" not in url else f"{url}&table=kinds")
    with psycopg.connect(url) as sql:
        sql.execute("SET timezone TO 'UTC'")
        cursor = sql.execute("SELECT * FROM kinds WHERE id > 2")
        [row] = cursor.fetchall()
        assert cursor.description is not None
        found = dict(zip([column.name for column in cursor.description], row, strict=True))
        [types] = sql.execute(
            "SELECT string_agg(pg_typeof(x)::text, ' ') FROM (SELECT price FROM kinds) t(x)"
        ).fetchall()
    assert "numeric" in types[0]
    loaded = {name: json.loads(IN_STORES[name][1]) for name in JSON_COLUMNS}
    assert found == wanted(**loaded, r=0.1)


def test_mariadb(told: Told, shared_mariadb: MariaDB) -> None:
    name = shared_mariadb.create_database()
    fill(told, f"{shared_mariadb.url(name)}?table=kinds")
    with shared_mariadb.connect(name) as sql, sql.cursor() as cursor:
        cursor.execute("SELECT * FROM kinds WHERE id > 2")
        names = [column[0] for column in cursor.description]
        found = dict(zip(names, cursor.fetchone(), strict=True))
    midnight = dt.timedelta(hours=10, minutes=11, seconds=12)
    assert documents(found) == documents(
        wanted(
            atz=dt.datetime(2026, 11, 17, 10, 11, 12, 345678, dt.UTC).replace(tzinfo=None),
            clock=midnight + dt.timedelta(microseconds=345678),
            clock3=midnight + dt.timedelta(milliseconds=345), flag=1,
        )
    )  # fmt: skip


def test_redis(told: Told, shared_redis: RedisServer) -> None:
    fill(told, f"{shared_redis.url}?prefix=types")
    with redis.Redis.from_url(shared_redis.url) as client:
        [key] = list(client.scan_iter("types*9007199254740993*"))
        found = json.loads(client.get(key))
    assert {name: found[name] for name in IN_STORES} == AS_JSON


def test_search(told: Told, tmp_path: Path) -> None:
    url = f"tantivy:///{tmp_path}/index"
    fill(told, url)
    assert read_back(url) == wanted()


# ---- other databases ---------------------------------------------------------------------


def check(what: tuple[Any, Any], expected: dict[str, tuple[Any, Any]]) -> None:
    parser, found = what
    assert {field.name: field.type for field in parser.schema.fields} == {
        name: kind for name, (kind, _) in expected.items()
    }
    assert found.bad.to_pylist() == []
    assert found.upserts.to_pylist() == [{name: value for name, (_, value) in expected.items()}]


def test_a_table_of_mariadb(shared_mariadb: MariaDB) -> None:
    name = shared_mariadb.create_database()
    with shared_mariadb.connect(name) as sql, sql.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        for statement in MARIADB:
            cursor.execute(statement)
        sql.commit()
    with Broker() as broker:
        url = shared_mariadb.url(name)
        with captured(broker.bootstrap, url, f"{name}.kinds", 1) as topic:
            check(parsed(broker.bootstrap, topic), IN_MARIADB)
            with shared_mariadb.connect(name) as sql, sql.cursor() as cursor:
                # Where a clock shows more than a day.
                cursor.execute("INSERT INTO kinds (id, long_clock) VALUES (1, '838:59:59')")
                sql.commit()
            eventually(lambda: len(records(broker.bootstrap, topic)) == 2)
            _, found = parsed(broker.bootstrap, topic)
            assert found.bad["reason"].to_pylist() == [
                "field long_clock does not fit time64[us]: 838:59:59.000000"
            ]


def test_a_table_of_sqlite(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as sql:
        sql.executescript(SQLITE)
    url = f"sqlite:///{tmp_path}/shop.db"
    with Broker() as broker, captured(broker.bootstrap, url, "kinds", 1) as topic:
        check(parsed(broker.bootstrap, topic), IN_SQLITE)
        # Any column may hold a value of any kind.
        with closing(sqlite3.connect(tmp_path / "shop.db")) as sql:
            sql.execute("INSERT INTO kinds (id, n) VALUES (1, 'many')")
            sql.commit()
        eventually(lambda: len(records(broker.bootstrap, topic)) == 2)
        _, found = parsed(broker.bootstrap, topic)
        assert found.bad["reason"].to_pylist() == ["field n is not int64: many"]
        # The price in cents, as the user knows it, and what is no such.
        fields = "id bigint, price decimal(10,2), day date, flag bigint"
        _, typed = parsed(broker.bootstrap, topic, fields=fields, key=("id",))
        assert typed.upserts.to_pylist()[0]["price"] == Decimal("12.50")
        assert typed.upserts.to_pylist()[0]["day"] == dt.date(2026, 11, 17)


def test_a_store_that_was_filled_without_types_must_be_built_anew(told: Told) -> None:
    """As before schemas were published: decimals as Connect's base64, dates as numbers."""
    log, topic, _, _ = told
    old = Schema.of([pa.field("id", pa.int64()), pa.field("price", pa.string())], "id")
    with pytest.raises(SchemaChangedError) as caught:
        parsed(log, topic, old)
    assert str(caught.value) == (
        "sink 'kinds': column 'price' of table public.kinds is numeric(10,2); the store has it as "
        "string, which cannot become decimal128(10, 2)"
    )
    assert "penstock sinks rebuild" in caught.value.advice


def test_arrays_of_more_dimensions(told: Told) -> None:
    log, topic, _, _ = told
    grids = topic.replace("kinds", "grids")
    eventually(lambda: len(records(log, grids)) == 1)
    _, found = parsed(log, grids)
    assert found.upserts.to_pylist() == [
        {"id": 1, "cells": "[[1,2],[3,null]]", "amounts": "[[1.25],[2.50]]"}
    ]


def test_fields_are_compared_with_the_table(told: Told) -> None:
    log, topic, _, _ = told
    with pytest.raises(ConfigError, match=r"'price' is written double, .* has numeric\(10,2\)"):
        parsed(log, topic, fields="id bigint, price double", key=("id",))
    with pytest.raises(ConfigError, match=r"table public\.kinds has no column 'prise'"):
        parsed(log, topic, fields="id bigint, prise decimal(10,2)", key=("id",))
    fields = "id bigint, price decimal(8,1), free string, day string, clock string, amounts json"
    _, found = parsed(log, topic, fields=fields, key=("id",))
    assert found.bad["reason"].to_pylist() == [
        "field price does not fit decimal128(8, 1): 12345678.91"
    ]
    fields = "id bigint, price decimal(14,4), free string, day string, clock string, amounts json"
    _, found = parsed(log, topic, fields=fields, key=("id",))
    assert found.upserts.to_pylist()[0] == {
        "id": 9007199254740993, "price": Decimal("12345678.9100"),
        "free": "0.000000000000000001", "day": "2026-11-17", "clock": "10:11:12.345678",
        "amounts": "[1.10,-2.25]",
    }  # fmt: skip


# Rows as JSON, as the cache, the search indexes and webhooks have them.
AS_JSON = wanted(
    price="12345678.91", free="1E-18", long="1234567890123456789.0123456789", cash="1234.56",
    day="2026-11-17", at="2026-11-17T10:11:12.345678", at3="2026-11-17T10:11:12.345000",
    atz="2026-11-17T10:11:12.345678Z", clock="10:11:12.345678", clock3="10:11:12.345000",
    data="AP8Q", bits="AwI=", r=0.10000000149011612,
)  # fmt: skip
