"""A table of PostgreSQL is truncated while Spark feeds a store from it: both are equal again."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from pyspark.sql import SparkSession

from penstock.capture.delivery.capture import Capture
from penstock.capture.delivery.config import CaptureConfig
from penstock.sinks.spec import SinkSpec
from penstock.testing import Broker
from penstock.testing.postgres import PostgresServer
from tests.spark.sinking.managed import managed, rows_in, until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def database(shared_postgres: PostgresServer) -> str:
    return shared_postgres.create_database()


@contextmanager
def captured(url: str, broker: Broker) -> Iterator[str]:
    """A capture beside the test; its name."""
    name, stop = f"s{uuid4().hex[:8]}", threading.Event()
    settings = {"url": url, "partitions": 3, "skip": ["none"], "idle_ms": 10}
    made = Capture(CaptureConfig.from_mapping(name, settings), broker.bootstrap)
    thread = threading.Thread(target=made.run, args=(stop,), daemon=True)
    thread.start()
    try:
        yield name
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


def test_a_store_that_spark_feeds(
    spark: SparkSession, log_broker: Broker, tmp_path: Path, database: str
) -> None:
    store = tmp_path / "shop.db"
    with psycopg.connect(database, autocommit=True) as sql, captured(database, log_broker) as name:
        sql.execute("CREATE TABLE orders (id int PRIMARY KEY, name text)")
        sql.execute("INSERT INTO orders SELECT g, 'x' || g FROM generate_series(1, 1000) g")

        def is_there() -> bool:
            if not store.exists():
                return False
            with closing(sqlite3.connect(store)) as made:
                named = "SELECT 1 FROM sqlite_master WHERE name = 'orders'"
                return made.execute(named).fetchone() is not None

        def is_equal() -> bool:
            wanted = sql.execute("SELECT id, name FROM orders").fetchall()
            found = rows_in(store, "orders")
            return found == {id_: {"id": id_, "name": text} for id_, text in wanted}

        spec = SinkSpec("orders", f"{name}.public.orders", f"sqlite:///{store}", max_records=300)
        with managed(spark, log_broker, tmp_path / "data", [spec]) as manager:
            until(manager, lambda: is_there() and is_equal())
            with sql.transaction():
                sql.execute("INSERT INTO orders VALUES (2000, 'gone with the others')")
                sql.execute("TRUNCATE orders")
                sql.execute("INSERT INTO orders VALUES (7, 'new'), (3000, 'newer')")
            until(manager, is_equal)
            sql.execute("TRUNCATE orders")
            until(manager, is_equal)
            assert rows_in(store, "orders") == {}
            assert manager.failed == []
