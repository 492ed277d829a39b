"""The derived stores that are measured: each is started, gives its URL, and is gone afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa

from benchmarks.capture.databases import NOTE
from penstock.sinks import Schema, open_sink
from penstock.testing.mariadb import MariaDB
from penstock.testing.opensearch import AS_SHIPPED, OpenSearch, opensearch_home
from penstock.testing.postgres import PostgresServer
from penstock.testing.redis import RedisServer
from penstock.testing.sinks import changes, never

# A store's URL; None if what it needs is not on this machine.
Store = Callable[[Path], AbstractContextManager[str | None]]
TABLE: Final = "bench"
WARM_BATCHES: Final = 10
WARM_ROWS: Final = 100_000


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
    # As a user has it: Java's options and files in memory as the distribution sets them.
    with OpenSearch(AS_SHIPPED, **{"node.store.allow_mmap": "true"}) as server:
        _warm_up(f"opensearch+{server.url}/warm")
        yield f"opensearch+{server.url}/{TABLE}"


def _warm_up(url: str) -> None:
    """Changes to a table of its own, for a server in Java: one that has run for a while has
    compiled what it does most, and before that each change costs it twice as much."""
    fields = [pa.field("id", pa.int64()), pa.field("customer", pa.string()),
              pa.field("amount", pa.float64()), pa.field("note", pa.string())]  # fmt: skip
    schema = Schema.of(fields, "id")
    with open_sink(url) as sink:
        sink.open(schema)
        for turn in range(WARM_BATCHES):
            # Three of ten rows are there already, and some others go.
            first = turn * WARM_ROWS * 7 // 10
            rows = [
                {"id": at, "customer": f"customer-{at % 5000}", "amount": at / 100, "note": NOTE}
                for at in range(first, first + WARM_ROWS)
            ]
            gone = [(at,) for at in range(max(0, first - WARM_ROWS // 10), first)]
            sink.apply(changes(schema, rows, gone, since=turn, until=turn + 1), never)
        sink.remove()


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
