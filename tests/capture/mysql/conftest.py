"""The MariaDB server of the run; each test has a database of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.testing.mariadb import MariaDB


@pytest.fixture(scope="session")
def mariadb(shared_mariadb: MariaDB) -> MariaDB:
    return shared_mariadb


@pytest.fixture
def database(mariadb: MariaDB) -> Iterator[str]:
    name = mariadb.create_database()
    yield name
    mariadb.query(f"DROP DATABASE IF EXISTS {name}")
