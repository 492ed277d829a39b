"""One MariaDB server for all tests of a worker; each test has a database of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.testing.mariadb import MariaDB


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    with MariaDB() as server:
        yield server


@pytest.fixture
def database(mariadb: MariaDB) -> Iterator[str]:
    name = mariadb.create_database()
    yield name
    mariadb.query(f"DROP DATABASE IF EXISTS {name}")
