"""A decimal that becomes wider on both sides of its point keeps what is stored."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pytest

from penstock.sinks import Schema
from penstock.sinks.errors import SchemaChangedError
from penstock.sinks.stores import open_sink
from penstock.testing.mariadb import MariaDB
from penstock.testing.postgres import PostgresServer
from penstock.testing.redis import RedisServer
from penstock.testing.sinks import changes, never, read

OLD, NEW = pa.decimal128(10, 2), pa.decimal128(22, 4)


def schema(kind: pa.DataType, key: pa.DataType | None = None) -> Schema:
    return Schema.of([pa.field("id", key or pa.int64()), pa.field("price", kind)], "id")


@pytest.mark.parametrize("kind", ["sqlite", "duckdb", "delta", "parquet", "tantivy"])
def test_decimals_become_wider(kind: str, tmp_path: Path) -> None:
    at = f"{kind}:///{tmp_path}/store"
    widened(f"{at}?table=t" if kind in ("sqlite", "duckdb") else at)


def test_decimals_become_wider_on_servers(
    shared_postgres: PostgresServer, shared_mariadb: MariaDB, shared_redis: RedisServer
) -> None:
    widened(shared_postgres.create_database())
    widened(shared_mariadb.url(shared_mariadb.create_database()))
    widened(f"{shared_redis.url}?prefix={uuid4().hex}")


def widened(url: str) -> None:
    first, second = Decimal("12345678.91"), Decimal("123456789012345678.1239")
    with open_sink(url, {}, name="t") as sink:
        sink.open(schema(OLD))
        sink.apply(changes(schema(OLD), [{"id": 1, "price": first}], [], since=0, until=1), never)
    with open_sink(url, {}, name="t") as sink:
        sink.open(schema(NEW))
        sink.apply(changes(schema(NEW), [{"id": 2, "price": second}], [], since=1, until=2), never)
        assert read(sink) == [{"id": 1, "price": first}, {"id": 2, "price": second}]
        found = sink.stored_schema()
        assert found is not None
        assert found.field("price").type == NEW


def test_what_would_need_more_than_38_digits_is_refused() -> None:
    old, wide = schema(pa.decimal128(38, 10)), schema(pa.decimal128(38, 18))
    with pytest.raises(SchemaChangedError, match="cannot become"):
        old.evolved(wide, "the store")
    # Nor does a key get more digits: it would be another.
    with pytest.raises(SchemaChangedError, match="cannot become"):
        schema(OLD, pa.decimal128(10, 2)).evolved(schema(OLD, pa.decimal128(12, 4)), "the store")
