"""Redis passes the tests of all stores, and does what a cache should."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal

import pyarrow as pa
import pytest
import redis

from penstock.errors import ConfigError
from penstock.sinks import (
    Changes,
    Position,
    Refused,
    Schema,
    SchemaChangedError,
    StoreError,
    StoreUnreachableError,
    open_sink,
)
from penstock.sinks.cache import RedisSink
from penstock.sinks.contract import ORIGIN
from penstock.testing.redis import RedisServer
from penstock.testing.sinks import PLACE, Row, Store, changes, never, read
from tests.sinks.kit import StoreKit, new_name
from tests.waiting import eventually


@pytest.fixture
def server(shared_redis: RedisServer) -> RedisServer:
    return shared_redis


class TestRedis(StoreKit):
    @pytest.fixture
    def store(self, server: RedisServer) -> Store:
        return Store(f"{server.url}?prefix={new_name()}")


class TestRedisHashes(StoreKit):
    @pytest.fixture
    def store(self, server: RedisServer) -> Store:
        return Store(f"{server.url}?prefix=t[{new_name()}]*&as=hash&chunk_rows=3")


ORDERS = Schema.of(
    [
        pa.field("country", pa.string()),
        pa.field("id", pa.int64()),
        pa.field("paid", pa.bool_()),
        pa.field("price", pa.decimal128(10, 2)),
        pa.field("day", pa.date32()),
    ],
    ["country", "id"],
)
ROW: Row = {
    "country": "D:E%",
    "id": 7,
    "paid": True,
    "price": Decimal("1.50"),
    "day": dt.date(2026, 1, 31),
}


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    connected = redis.Redis.from_url(server.url)
    yield connected
    connected.close()


def sink_at(server: RedisServer, **options: object) -> RedisSink:
    made = open_sink(server.url, {"prefix": new_name(), **options})
    assert isinstance(made, RedisSink)
    return made


@pytest.mark.parametrize("form", ["json", "hash"])
def test_rows_are_read_by_anyone(server: RedisServer, client: redis.Redis, form: str) -> None:
    prefix = new_name()
    with sink_at(server, prefix=prefix, **{"as": form}) as sink:
        sink.open(ORDERS)
        sink.apply(changes(ORDERS, [ROW], [], since=0, until=1), never)
        assert sink.get("D:E%", 7) == ROW
        assert sink.get("DE", 7) is None
        found = client.hget(prefix, "rows")
        assert isinstance(found, bytes)
        name = found + b"D%3AE%25:7"
        if form == "json":
            text = client.get(name)
            assert isinstance(text, bytes)
            assert json.loads(text) == {**ROW, "price": "1.50", "day": "2026-01-31"}
        else:
            assert client.hget(name, "paid") == b"true"
            assert client.hget(name, "country") == b"D:E%"


def written(rows: list[Row], *ago_s: float | None, since: int = 0) -> Changes:
    """Rows whose records were written so long ago; None: a record without a time."""
    now = dt.datetime.now(dt.UTC)
    made = changes(ORDERS, rows, [], since=since, until=since + len(rows))
    at = made.upserted_at.to_pylist()
    for origin, ago in zip(at, ago_s, strict=True):
        no_time = dt.datetime(1969, 12, 31, 23, 59, 59, 999000, dt.UTC)
        origin["timestamp"] = no_time if ago is None else now - dt.timedelta(seconds=ago)
    return replace(made, upserted_at=pa.Table.from_pylist(at, schema=ORIGIN))


@pytest.mark.parametrize("form", ["json", "hash"])
def test_rows_live_as_long_as_wanted(server: RedisServer, client: redis.Redis, form: str) -> None:
    prefix = new_name()
    with sink_at(server, prefix=prefix, ttl_s=1, **{"as": form}) as sink:
        sink.open(ORDERS)
        sink.apply(written([ROW], 0.0), never)
        eventually(lambda: sink.get("D:E%", 7) is None)
        assert read(sink) == []
        assert sink.position() == Position({PLACE: 1})
    assert client.ttl(prefix) == -1


def test_the_time_is_the_servers(server: RedisServer, client: redis.Redis) -> None:
    def now_s() -> float:
        seconds, us = client.time()
        return float(seconds + us / 1e6)

    with sink_at(server) as sink:
        before_s, time_s, after_s = now_s(), sink.now_s(), now_s()
    assert before_s <= time_s <= after_s


@pytest.mark.parametrize("form", ["json", "hash"])
def test_rows_lapse_by_the_time_of_their_records(server: RedisServer, form: str) -> None:
    rows = [{**ROW, "id": number} for number in range(4)]
    with sink_at(server, ttl_s=6_000, chunk_rows=2, **{"as": form}) as sink:
        assert sink.lifetime_s == 6_000
        sink.open(ORDERS)
        batch = written(rows, 6_100, 3_000, None, 360_000)
        assert sink.apply(batch, never).rows == 4
        assert [row["id"] for row in read(sink)] == [1, 2]
        # A table that is built anew has not more.
        with sink.beside(fresh=True) as anew:
            anew.open(ORDERS)
            anew.apply(batch, never)
            anew.switch()
        assert [row["id"] for row in read(sink)] == [1, 2]
        sink.open(ORDERS)
        # The last change counts, though it may say that it is older.
        sink.apply(written([rows[1], rows[2], rows[3]], 6_100, 6_100, 3_000, since=4), never)
        assert [row["id"] for row in read(sink)] == [3]
        sink.apply(written([rows[3]], None, since=7), never)
        client = redis.Redis.from_url(server.url)
        (name,) = client.scan_iter(match=f"{sink._meta}*:3", count=10_000)
        assert client.ttl(name) == -1
        client.close()


def test_another_form_is_built_anew(server: RedisServer) -> None:
    prefix = new_name()
    with sink_at(server, prefix=prefix) as sink:
        sink.open(ORDERS)
    with sink_at(server, prefix=prefix, **{"as": "hash"}) as sink:
        with pytest.raises(SchemaChangedError, match="json"):
            sink.open(ORDERS)
        with sink.beside() as anew:
            anew.open(ORDERS)
            anew.apply(changes(ORDERS, [ROW], [], since=0, until=1), never)
            anew.switch()
        sink.open(ORDERS)
        assert read(sink) == [ROW]


def test_nothing_is_left_of_what_was_replaced(server: RedisServer, client: redis.Redis) -> None:
    prefix = new_name()
    with sink_at(server, prefix=prefix) as sink:
        sink.open(ORDERS)
        sink.apply(changes(ORDERS, [ROW], [], since=0, until=1), never)
        with sink.beside() as anew:
            anew.open(ORDERS)
            anew.switch()
        assert client.keys(f"*{prefix}*") == [prefix.encode()]
        sink.remove()
    assert client.keys(f"*{prefix}*") == []


def test_a_key_can_be_too_long(server: RedisServer) -> None:
    aside: list[Refused] = []
    with sink_at(server) as sink:
        sink.open(ORDERS)
        rows = [{**ROW, "country": "x" * 70_000}, ROW]
        done = sink.apply(
            changes(ORDERS, rows, [("y" * 70_000, 1)], since=0, until=3), aside.extend
        )
        assert done.rows == 1
        assert [(each.offset, "long" in each.reason) for each in aside] == [(0, True)]
        assert read(sink) == [ROW]


@pytest.mark.databases
def test_a_server_that_is_gone_and_comes_back() -> None:
    with RedisServer(appendonly="yes", appendfsync="always") as own, sink_at(own) as sink:
        sink.open(ORDERS)
        sink.apply(changes(ORDERS, [ROW], [], since=0, until=1), never)
        own.kill()
        with pytest.raises(StoreUnreachableError):
            sink.apply(changes(ORDERS, [], [("D:E%", 7)], since=1, until=2), never)
        own.start()
        assert sink.position() == Position({PLACE: 1})
        sink.apply(changes(ORDERS, [], [("D:E%", 7)], since=1, until=2), never)
        assert read(sink) == []


@pytest.mark.databases
def test_a_wrong_password_is_told() -> None:
    with RedisServer(requirepass="right") as own:
        wrong = own.url.replace("redis://", "redis://:wrong@")
        with open_sink(wrong) as sink, pytest.raises(StoreError, match=r"wrong|invalid") as told:
            sink.position()
        assert "password" in told.value.advice
        assert "wrong@" not in sink.target


@pytest.mark.parametrize("kind", ["hash", "string"])
def test_a_key_of_somebody_else_is_told_and_kept(
    server: RedisServer, client: redis.Redis, kind: str
) -> None:
    name, theirs = new_name(), new_name()
    if kind == "hash":
        client.hset(name, mapping={"rows": f"{theirs}:", "position": "sitting"})
    else:
        client.set(name, "theirs")
    client.set(f"{theirs}:1", "kept")
    with sink_at(server, prefix=name) as sink:

        def rebuilt() -> None:
            with sink.beside() as anew:
                anew.open(ORDERS)
                anew.switch()

        for each in (sink.position, sink.stored_schema, lambda: sink.open(ORDERS), rebuilt,
                     lambda: read(sink), sink.remove):  # fmt: skip
            with pytest.raises(StoreError, match=f"{name} is there.*not made") as told:
                each()
            assert "another prefix" in told.value.advice
        sink.beside(fresh=True).close()
    assert client.type(name) == kind.encode()
    assert client.get(f"{theirs}:1") == b"kept"


def test_wrong_options_are_told() -> None:
    for options in ({"as": "xml"}, {"ttl_s": "soon"}, {"colour": "red"}):
        with pytest.raises(ConfigError):
            open_sink("redis://localhost", options)
    with pytest.raises(ConfigError, match="number"):
        open_sink("redis://localhost/shop")
