"""`penstock verify` on a store whose rows lapse: what has lapsed is not missing, the rest is."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pytest
import redis
from confluent_kafka import Producer

from penstock.cli.project import load
from penstock.cli.sinks_file import named
from penstock.cli.verifying import verify
from penstock.cli.verifying.checksums import keys_of
from penstock.cli.verifying.lapsing import MARGIN_S, Lapsing
from penstock.client.connection import Cluster
from penstock.client.topics import create
from penstock.sinks import Sink
from penstock.sinks.cache import RedisSink
from penstock.spark.sinking.learning import parser_of
from penstock.testing.redis import RedisServer
from tests.cli.test_verify import Feeder, found, running
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)
HOUR_S = 3600


@pytest.fixture
def server(shared_redis: RedisServer) -> RedisServer:
    return shared_redis


def write(at: str, topic: str, rows: dict[int, float | None]) -> None:
    """A row for each key, written so long ago; None: a deletion."""
    now_ms = int(time.time() * 1000)
    producer = Producer({"bootstrap.servers": at})
    for key, ago_s in rows.items():
        value = None if ago_s is None else json.dumps({"id": key, "name": f"name {key}"})
        moment = now_ms - int((ago_s or 0) * 1000)
        producer.produce(topic, value, json.dumps({"id": key}), timestamp=moment)
    assert producer.flush(60) == 0


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, server: RedisServer) -> str:
    """A topic, and a sink `cache` of it whose rows live for an hour."""
    monkeypatch.chdir(tmp_path)
    name = f"t-{uuid4().hex[:8]}"
    with Cluster(at) as cluster:
        create(cluster, name, partitions=2)
    Path("penstock.toml").write_text(
        f'[sinks.cache]\ntopic = "{name}"\nkey = "id"\nfields = "id bigint, name string"\n'
        f'format = "json"\nurl = "{server.url}?prefix={name}&ttl_s={HOUR_S}"\n'
    )
    return name


def test_what_has_lapsed_is_not_missing(made: str, at: str, server: RedisServer) -> None:
    write(at, made, {1: 2 * HOUR_S, 2: 60, 3: 0, 4: 0, 5: 2 * HOUR_S, 6: 2 * HOUR_S})
    write(at, made, {4: None, 5: 0})
    Feeder("cache", at).once()
    report = verify(load(), f"topic:{made}", "cache", timeout_s=60, bootstrap=at)
    assert (report.equal, report.rounds) == (True, 1), report.differences
    # What is missing before its time, and what is there after it, is told.
    with named(load(), "cache").sink() as sink, closing(redis.Redis.from_url(server.url)) as client:
        assert isinstance(sink, RedisSink)
        prefix = cast(bytes, client.hget(made, "rows"))
        client.delete(prefix + b"2")
        client.set(prefix + b"6", json.dumps({"id": 6, "name": "name 6"}))
    wrong = verify(load(), f"topic:{made}", "cache", timeout_s=60, bootstrap=at)
    assert found(wrong) == [("missing", 2, []), ("extra", 6, [])]


def test_a_captured_table_is_compared_by_the_times_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, server: RedisServer
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"s{uuid4().hex[:8]}"
    with closing(sqlite3.connect("shop.db")) as database, database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, name TEXT)")
        database.execute("INSERT INTO orders VALUES (1, 'a')")
    Path("penstock.toml").write_text(
        f'[capture.{name}]\nurl = "sqlite:///shop.db"\n'
        f'[sinks.s]\ntopic = "{name}.orders"\nurl = "{server.url}?prefix={name}&ttl_s=1"\n'
    )
    with running(name, at), Feeder("s", at):
        with named(load(), "s").sink() as sink:
            eventually(lambda: sink.position() is not None and not list(sink.scan()))
        report = verify(load(), f"{name}.orders", "s", timeout_s=60, bootstrap=at)
        assert (report.equal, report.rows) == (True, 1)


class Clock:
    """A store with a clock of its own."""

    lifetime_s = HOUR_S

    def __init__(self, *moments: float) -> None:
        self._moments = iter(moments)

    def now_s(self) -> float:
        return next(self._moments)


def test_what_lapses_while_the_store_is_read_may_be_there_or_not(made: str, at: str) -> None:
    write(at, made, {1: 2 * HOUR_S, 2: HOUR_S, 3: 60})
    now_s = time.time()
    all_of_them: Callable[[Any], Any] = lambda keys: np.full(len(keys), True)  # noqa: E731
    with Cluster(at) as cluster:
        parser = parser_of(named(load(), "cache"), cluster, made, None)
        rows = pa.table({"id": [1, 2, 3], "name": ["", "", ""]}, schema=parser.schema.arrow)
        one, two, _ = keys_of(rows, parser.schema)

        def lapsed(began_s: float, ended_s: float, *there: Any) -> set[Any]:
            looking = Lapsing(cluster, made, cast(Sink, Clock(began_s, ended_s)))
            looking.begin()
            keys = partial(keys_of, schema=parser.schema)
            return set(looking.lapsed(parser, keys, all_of_them, np.array(there, np.uint64)))

        long = 10 + MARGIN_S
        assert lapsed(now_s - long, now_s + long) == {one, two}
        assert lapsed(now_s - long, now_s + long, two) == {one}
        # By then it must be gone, or must not be yet.
        assert lapsed(now_s + long, now_s + long, two) == {one, two}
        assert lapsed(now_s - long, now_s - long) == {one}
