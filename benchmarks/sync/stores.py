"""The derived stores that are measured: each is started, gives its URL, and is gone afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from penstock.testing.mariadb import MariaDB
from penstock.testing.opensearch import OpenSearch, opensearch_home
from penstock.testing.postgres import PostgresServer
from penstock.testing.redis import RedisServer

# A store's URL; None if what it needs is not on this machine.
Store = Callable[[Path], AbstractContextManager[str | None]]
TABLE: Final = "bench"


@contextmanager
def _file(url: str, folder: Path) -> Iterator[str]:
    yield url.format(folder=folder)


@contextmanager
def _postgres(folder: Path) -> Iterator[str]:
    # As a user has it: what was committed is on disk.
    server = PostgresServer(settings={"fsync": "on", "synchronous_commit": "on"})
    server.start()
    try:
        url = server.create_database()
        yield f"{url}{'&' if '?' in url else '?'}table={TABLE}"
    finally:
        server.remove()


@contextmanager
def _mariadb(folder: Path) -> Iterator[str]:
    server = MariaDB(innodb_flush_log_at_trx_commit="1", innodb_buffer_pool_size="256M")
    server.start()
    try:
        yield f"{server.url(server.create_database())}?table={TABLE}"
    finally:
        server.crash()


@contextmanager
def _redis(folder: Path) -> Iterator[str]:
    with RedisServer() as server:
        yield f"{server.url}?prefix={TABLE}"


@contextmanager
def _opensearch(folder: Path) -> Iterator[str | None]:
    if opensearch_home() is None:
        yield None
        return
    with OpenSearch() as server:
        yield f"opensearch+{server.url}/{TABLE}"


STORES: Final[dict[str, Store]] = {
    "SQLite": partial(_file, f"sqlite:///{{folder}}/store.db?table={TABLE}"),
    "DuckDB": partial(_file, f"duckdb:///{{folder}}/store.duckdb?table={TABLE}"),
    "PostgreSQL": _postgres,
    "MariaDB": _mariadb,
    "tantivy": partial(_file, "tantivy:///{folder}/index"),
    "OpenSearch": _opensearch,
    "Redis": _redis,
    "Delta": partial(_file, "delta:///{folder}/delta"),
    "Parquet": partial(_file, "parquet:///{folder}/parquet"),
}
