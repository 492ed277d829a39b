"""Real PostgreSQL servers: one of each release for a whole run, a fresh database for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest

from penstock.testing.postgres import PostgresServer
from tests.capture.postgres.rebuilding import Connection

RELEASES = ("system", "16", "18")


@pytest.fixture
def postgres(postgres_of: Callable[[str], PostgresServer]) -> PostgresServer:
    """The system's PostgreSQL."""
    return postgres_of("system")


@pytest.fixture(params=RELEASES)
def any_postgres(
    request: pytest.FixtureRequest, postgres_of: Callable[[str], PostgresServer]
) -> PostgresServer:
    """Each release in turn."""
    return postgres_of(request.param)


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    """The URL of an empty database."""
    return postgres.create_database()


@pytest.fixture
def sql(database: str) -> Iterator[Connection]:
    """A connection to it that commits each statement."""
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection
