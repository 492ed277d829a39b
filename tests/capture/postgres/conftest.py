"""Real PostgreSQL servers: one of each release for a whole run, a fresh database for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psycopg
import pytest

from penstock.testing.postgres import PostgresServer, installation
from tests.capture.postgres.rebuilding import Connection

# Small, so that transactions of some hundred rows are streamed before their commit.
SETTINGS = {"logical_decoding_work_mem": "64kB", "max_prepared_transactions": "5"}
RELEASES = ("system", "16", "18")


@pytest.fixture(scope="session")
def postgres_of() -> Iterator[Callable[[str], PostgresServer]]:
    """The server of a release, started when it is first asked for."""
    running: dict[str, PostgresServer] = {}
    with ExitStack() as stack:

        def of(release: str) -> PostgresServer:
            if release not in running:
                server = PostgresServer(SETTINGS, of=installation(release))
                running[release] = stack.enter_context(server)
            return running[release]

        yield of


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
