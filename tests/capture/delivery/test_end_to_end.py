"""Real databases into a real log: tables, rebuilt from their topics, are what they were."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pytest

from penstock.capture.delivery.capture import Capture
from penstock.capture.delivery.config import CaptureConfig
from penstock.capture.delivery.control import send, snapshot_signal
from penstock.capture.sources import open_source
from penstock.client.connection import Cluster
from penstock.client.reading import Row, last_values
from penstock.client.writer import LogWriter
from penstock.testing.postgres import PostgresServer
from tests.capture.delivery.running import (
    QUICK,
    Crash,
    Fuse,
    FusedWriter,
    new_name,
    on_thread,
    records,
)
from tests.capture.events.samples import schema_texts
from tests.capture.events.test_avro import read
from tests.waiting import eventually

Tables = dict[int, tuple[Any, ...]]


def config(url: str, **settings: Any) -> CaptureConfig:
    return CaptureConfig.from_mapping(new_name(), {"url": url, **QUICK, "idle_ms": 10, **settings})


@contextmanager
def running(log: str, made: CaptureConfig) -> Iterator[Capture]:
    stop = threading.Event()
    it = Capture(made, log)
    thread, failures = on_thread(lambda: it.run(stop))
    try:
        yield it
    finally:
        stop.set()
        thread.join(60)
    assert failures == []


def run_until_crash(log: str, made: CaptureConfig, steps: int, is_done: Any) -> None:
    """Run with a writer that dies after some steps, as in a process that is killed."""
    fuse, stop = Fuse(steps), threading.Event()

    def make_writer(cluster: Cluster, settings: CaptureConfig) -> LogWriter:
        writer = FusedWriter(cluster, transactional_id=settings.transactional_id)
        writer.fuse = fuse
        return writer

    thread, failures = on_thread(lambda: Capture(made, log, make_writer=make_writer).run(stop))
    eventually(lambda: fuse.is_blown or is_done())
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert all(isinstance(error, Crash) for error in failures)


def rebuilt(rows: list[Row], *columns: str) -> Tables:
    """The table that a topic tells of, by id."""
    found: Tables = {}
    for row in rows:
        event = orjson.loads(row.value) if row.value else None
        if event is not None and event["op"] == "t":
            found.clear()
            continue
        key = orjson.loads(row.key or b"")["id"]
        if event is None or event["op"] == "d":
            found.pop(key, None)
        else:
            found[key] = tuple(event["after"][name] for name in columns)
    return found


# ---- SQLite ------------------------------------------------------------------------------


def change_something(sql: sqlite3.Connection, chance: random.Random) -> None:
    """A transaction of a few statements."""
    with sql:
        for _ in range(chance.randint(1, 4)):
            id_, text = chance.randint(1, 30), chance.choice(["a", "ü\n", None, 'x"y'])
            match chance.randint(0, 3):
                case 0:
                    sql.execute("INSERT OR IGNORE INTO t VALUES (?, ?, ?)", (id_, text, 0.5))
                case 1:
                    sql.execute("UPDATE t SET text = ?, n = n + 1 WHERE id = ?", (text, id_))
                case 2:
                    sql.execute("DELETE FROM t WHERE id = ?", (id_,))
                case _:
                    sql.execute(
                        "UPDATE OR IGNORE t SET id = ? WHERE id = ?", (id_, chance.randint(1, 30))
                    )


def test_sqlite_with_kills(log: str, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path, timeout=30)) as sql:
        sql.execute("PRAGMA journal_mode=WAL")
        sql.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, text TEXT, n REAL)")
        for _ in range(20):
            change_something(sql, chance)
        made = config(f"sqlite:///{path}", batch_changes=5)

        def wanted() -> Tables:
            return {row[0]: tuple(row[1:]) for row in sql.execute("SELECT id, text, n FROM t")}

        def is_there() -> bool:
            return rebuilt(records(log, f"{made.name}.t"), "text", "n") == wanted()

        for _ in range(6):
            for _ in range(10):
                change_something(sql, chance)
            run_until_crash(log, made, chance.randint(1, 40), is_there)
        for _ in range(10):
            change_something(sql, chance)
        with running(log, made):
            eventually(is_there)
        with open_source(made.source) as source:
            assert source.remove()


# ---- PostgreSQL --------------------------------------------------------------------------


@pytest.fixture
def postgres(shared_postgres: PostgresServer) -> PostgresServer:
    return shared_postgres


def test_postgres_with_what_only_it_has(log: str, postgres: PostgresServer) -> None:
    """Values that are not sent, truncates, messages, snapshots on demand: all in one capture."""
    url = postgres.create_database()
    made = config(url, unavailable="fill", skip=["none"], partitions=3, transaction_metadata=True)
    topic = f"{made.name}.public.t"
    with psycopg.connect(url, autocommit=True) as sql:
        sql.execute("CREATE TABLE t (id int PRIMARY KEY, n int, big text)")
        sql.execute("ALTER TABLE t ALTER big SET STORAGE EXTERNAL")
        sql.execute(
            "INSERT INTO t SELECT g, 0, repeat(g::text, 4000) FROM generate_series(1, 20) g"
        )

        def wanted() -> Tables:
            rows = sql.execute("SELECT id, n, big FROM t").fetchall()
            return {row[0]: tuple(row[1:]) for row in rows}

        def is_there() -> bool:
            return rebuilt(records(log, topic), "n", "big") == wanted()

        with running(log, made):
            eventually(is_there)
            sql.execute("UPDATE t SET n = n + 1")
            sql.execute("UPDATE t SET id = id + 100 WHERE id % 2 = 0")
            sql.execute("DELETE FROM t WHERE id = 3")
            sql.execute("SELECT pg_logical_emit_message(true, 'audit', 'hello')")
            eventually(is_there)
            events = [orjson.loads(row.value) for row in records(log, topic) if row.value]
            assert all(
                event["after"] is None or "__debezium" not in event["after"]["big"]
                for event in events
            )
            (message,) = eventually(lambda: records(log, f"{made.name}.message"))
            told = orjson.loads(message.value or b"")
            assert told["message"] == {"prefix": "audit", "content": "aGVsbG8="}
        # The values are in the log only: who begins anew reads them there.
        with running(log, made):
            sql.execute("UPDATE t SET n = n + 1")
            eventually(is_there)
            with Cluster(log) as cluster:
                send(cluster, made.name, snapshot_signal("public.t", where="id < 10"))
            eventually(lambda: "incremental" in _marks(log, topic))
            sql.execute("TRUNCATE t")
            sql.execute("INSERT INTO t VALUES (1, 5, 'small')")
            eventually(lambda: wanted() == _last_of_each_partition(log, topic))
        with open_source(made.source) as source:
            assert len(source.remove()) == 2


def _marks(log: str, topic: str) -> set[str]:
    rows = records(log, topic)
    return {orjson.loads(row.value)["source"]["snapshot"] for row in rows if row.value}


def _last_of_each_partition(log: str, topic: str) -> Tables:
    """A truncate is in each partition, so each is rebuilt by itself."""
    found: Tables = {}
    for number in range(3):
        rows = [row for row in records(log, topic) if row.partition == number]
        found |= rebuilt(rows, "n", "big")
    return found


def test_avro_from_end_to_end(log: str, tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as sql:
        sql.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, text TEXT, data BLOB)")
        sql.execute("INSERT INTO t VALUES (1, 'ü', x'00ff')")
        sql.commit()
        made = config(f"sqlite:///{path}", format="avro", snapshot="initial_only")
        Capture(made, log).run()
    with Cluster(log) as cluster:
        schemas = schema_texts(last_values(cluster, "__penstock_schemas").values())
    (row,) = records(log, f"{made.name}.t")
    assert read(schemas, row.key) == {"id": 1}
    told = read(schemas, row.value)
    assert told["after"] == {"id": 1, "text": "ü", "data": b"\x00\xff"}
    assert told["source"]["snapshot"] == "last"
    assert told["source"]["connector"] == "sqlite"
