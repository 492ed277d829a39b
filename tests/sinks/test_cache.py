"""Redis passes the tests of all stores, and does what a cache should."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from decimal import Decimal
from itertools import count

import pyarrow as pa
import pytest
import redis

from penstock.errors import ConfigError
from penstock.sinks import (
    Position,
    Refused,
    Schema,
    SchemaChangedError,
    StoreError,
    StoreUnreachableError,
    open_sink,
)
from penstock.sinks.cache import RedisSink
from penstock.testing.redis import RedisServer
from penstock.testing.sinks import PLACE, Row, SinkKit, Store, changes, never, read
from tests.waiting import eventually

_NAMES = count()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


class TestRedis(SinkKit):
    @pytest.fixture
    def store(self, server: RedisServer) -> Store:
        return Store(f"{server.url}?prefix=t{next(_NAMES)}")


class TestRedisHashes(SinkKit):
    @pytest.fixture
    def store(self, server: RedisServer) -> Store:
        return Store(f"{server.url}?prefix=t[{next(_NAMES)}]*&as=hash&chunk_rows=3")


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
    made = open_sink(server.url, {"prefix": f"t{next(_NAMES)}", **options})
    assert isinstance(made, RedisSink)
    return made


@pytest.mark.parametrize("form", ["json", "hash"])
def test_rows_are_read_by_anyone(server: RedisServer, client: redis.Redis, form: str) -> None:
    with sink_at(server, prefix=f"orders-{form}", **{"as": form}) as sink:
        sink.open(ORDERS)
        sink.apply(changes(ORDERS, [ROW], [], since=0, until=1), never)
        assert sink.get("D:E%", 7) == ROW
        assert sink.get("DE", 7) is None
        found = client.hget(f"orders-{form}", "rows")
        assert isinstance(found, bytes)
        name = found + b"D%3AE%25:7"
        if form == "json":
            text = client.get(name)
            assert isinstance(text, bytes)
            assert json.loads(text) == {**ROW, "price": "1.50", "day": "2026-01-31"}
        else:
            assert client.hget(name, "paid") == b"true"
            assert client.hget(name, "country") == b"D:E%"


def test_rows_live_as_long_as_wanted(server: RedisServer, client: redis.Redis) -> None:
    with sink_at(server, prefix="short", ttl_s=1) as sink:
        sink.open(ORDERS)
        sink.apply(changes(ORDERS, [ROW], [], since=0, until=1), never)
        eventually(lambda: sink.get("D:E%", 7) is None)
        assert read(sink) == []
        assert sink.position() == Position({PLACE: 1})
    assert client.ttl("short") == -1


def test_another_form_is_built_anew(server: RedisServer) -> None:
    with sink_at(server, prefix="formed") as sink:
        sink.open(ORDERS)
    with sink_at(server, prefix="formed", **{"as": "hash"}) as sink:
        with pytest.raises(SchemaChangedError, match="json"):
            sink.open(ORDERS)
        with sink.beside() as anew:
            anew.open(ORDERS)
            anew.apply(changes(ORDERS, [ROW], [], since=0, until=1), never)
            anew.switch()
        sink.open(ORDERS)
        assert read(sink) == [ROW]


def test_nothing_is_left_of_what_was_replaced(server: RedisServer, client: redis.Redis) -> None:
    before = set(client.keys())
    with sink_at(server) as sink:
        sink.open(ORDERS)
        sink.apply(changes(ORDERS, [ROW], [], since=0, until=1), never)
        with sink.beside() as anew:
            anew.open(ORDERS)
            anew.switch()
        assert len(set(client.keys()) - before) == 1
        sink.remove()
    assert set(client.keys()) == before


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


def test_a_wrong_password_is_told() -> None:
    with RedisServer(requirepass="right") as own:
        wrong = own.url.replace("redis://", "redis://:wrong@")
        with open_sink(wrong) as sink, pytest.raises(StoreError, match=r"wrong|invalid") as told:
            sink.position()
        assert "password" in told.value.advice
        assert "wrong@" not in sink.target


def test_wrong_options_are_told() -> None:
    for options in ({"as": "xml"}, {"ttl_s": "soon"}, {"colour": "red"}):
        with pytest.raises(ConfigError):
            open_sink("redis://localhost", options)
    with pytest.raises(ConfigError, match="number"):
        open_sink("redis://localhost/shop")
