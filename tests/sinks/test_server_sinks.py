"""PostgreSQL, MariaDB and DuckDB pass the tests of all stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.testing.mariadb import MariaDB
from penstock.testing.postgres import PostgresServer
from penstock.testing.sinks import SinkKit, Store


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaDB]:
    with MariaDB() as server:
        yield server


class TestPostgres(SinkKit):
    @pytest.fixture
    def store(self, postgres: PostgresServer) -> Store:
        return Store(postgres.create_database(), {"table": "orders"}, cannot=frozenset({"nul"}))


class TestMariadb(SinkKit):
    @pytest.fixture
    def store(self, mariadb: MariaDB) -> Store:
        url = mariadb.url(mariadb.create_database())
        return Store(url, {"table": "orders"}, cannot=frozenset({"nan", "infinity"}))


class TestDuckdb(SinkKit):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return Store(f"duckdb:///{tmp_path}/shop.duckdb?table=orders")
