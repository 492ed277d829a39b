"""Truncates of real databases: a table, rebuilt from its topic, is what it was, whatever is killed.

What a truncate becomes record by record is in `test_truncates`, and the scenarios have the rest.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.capture.delivery.capture import Capture
from penstock.capture.delivery.config import CaptureConfig
from penstock.capture.delivery.control import send, snapshot_signal
from penstock.client.connection import Cluster
from penstock.testing.mysql import MySQL
from penstock.testing.postgres import PostgresServer
from tests.capture.delivery.running import QUICK, new_name, on_thread
from tests.capture.kit.capturing import CaptureProcess, Told, records
from tests.capture.kit.databases import Database, Postgres, Session, Sqlite
from tests.capture.kit.following import MARKS, make_marks, mark
from tests.harness.needs import where_mysql_is
from tests.harness.profiles import TRUNCATE_KILLS, TRUNCATED_SNAPSHOTS
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)


class Followed:
    """A database, and what its topics tell of it."""

    def __init__(self, database: Database, name: str, log: str) -> None:
        self.database = database
        self.name = name
        self._cluster = Cluster(log)
        make_marks(database)

    def told(self, table: str) -> Told:
        topic = f"{self.name}.{self.database.full_name(table)}"
        return Told(records(self._cluster, topic))

    def catch_up(self) -> None:
        """Until a mark has come by the stream, and so all that was committed before."""
        number = mark(self.database)
        eventually(lambda: self.has(number))

    def has(self, number: int) -> bool:
        """Whether a mark has come."""
        return any(row["id"] == number for row in self.told(MARKS).table())

    def check(self, *tables: str) -> None:
        for table in tables:
            wanted = sorted(self.database.rows(table), key=str)
            assert sorted(self.told(table).table(), key=str) == wanted, table

    def close(self) -> None:
        self._cluster.close()


@contextmanager
def running(log: str, database: Database, **settings: Any) -> Iterator[Followed]:
    """A capture of a database, beside the test."""
    own = {"url": database.url, "options": dict(database.options), **QUICK, "idle_ms": 10}
    made = CaptureConfig.from_mapping(new_name(), own | settings)
    followed, stop = Followed(database, made.name, log), threading.Event()
    thread, failures = on_thread(lambda: Capture(made, log).run(stop))
    try:
        followed.catch_up()
        yield followed
    finally:
        stop.set()
        thread.join(60)
        followed.close()
    assert failures == []


def change(session: Session, database: Database, chance: random.Random) -> None:
    """A transaction of a few statements, which may empty a table in its middle."""
    session.run("BEGIN")
    for _ in range(chance.randint(1, 6)):
        table = chance.choice("ab")
        first = chance.randint(1, 60)
        match chance.randint(0, 5):
            case 0 | 1:
                rows = ", ".join(f"({id_}, 'x{id_}')" for id_ in range(first, first + 15))
                session.run(f"DELETE FROM {table} WHERE id BETWEEN {first} AND {first + 14}")
                session.run(f"INSERT INTO {table} VALUES {rows}")
            case 2:
                session.run(f"UPDATE {table} SET text = 'u' WHERE id > {first}")
            case 3:
                session.run(f"DELETE FROM {table} WHERE id < {first // 3}")
            case _:
                session.run(database.sql(f"$truncate {table}"))
    session.run(chance.choice(["COMMIT", "COMMIT", "COMMIT", "ROLLBACK"]))


@pytest.mark.processes
def test_with_kills(each: Database, log: str, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    each.run(*(f"CREATE TABLE {table} (id $int PRIMARY KEY, text $text)" for table in "ab"))
    name = new_name()
    settings = {"url": each.url, "options": dict(each.options), "batch_changes": 20}
    followed = Followed(each, name, log)
    told = CaptureProcess(name, {**settings, "partitions": 2}, log, tmp_path / "capture.log")
    with told as process, each.connect() as session:
        process.start()
        followed.catch_up()
        process.kill()
        for _ in range(TRUNCATE_KILLS):
            for _ in range(5):
                change(session, each, chance)
            process.start(chance.randint(0, 25))
            number = mark(each)
            eventually(partial(lambda number: not process.is_alive or followed.has(number), number))
            process.kill()
        process.start()
        followed.catch_up()
        followed.check("a", "b")
    followed.close()


@pytest.fixture
def postgres(shared_postgres: PostgresServer) -> Iterator[Database]:
    database = Postgres(shared_postgres)
    yield database
    database.close()


def test_several_tables_at_once(log: str, postgres: Database) -> None:
    postgres.run(
        "CREATE TABLE a (id int PRIMARY KEY, text text)",
        "CREATE TABLE b (id int PRIMARY KEY REFERENCES a)",
        "CREATE TABLE c (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n int)",
        "CREATE TABLE kept (id int PRIMARY KEY)",
        "INSERT INTO a SELECT g, 'x' FROM generate_series(1, 300) g",
        "INSERT INTO b SELECT id FROM a WHERE id < 100",
        "INSERT INTO c (n) SELECT id FROM a",
        "INSERT INTO kept SELECT id FROM a",
    )
    with running(log, postgres, partitions=3) as followed:
        postgres.run("TRUNCATE a CASCADE")
        followed.catch_up()
        followed.check("a", "b", "c", "kept")
        assert followed.told("a").table() == followed.told("b").table() == []
        postgres.run(
            "INSERT INTO a VALUES (5, 'y'); INSERT INTO b VALUES (5)",
            "TRUNCATE a, b, c RESTART IDENTITY",
            "INSERT INTO a VALUES (5, 'z')",
            "INSERT INTO c (n) VALUES (77)",
        )
        followed.catch_up()
        followed.check("a", "b", "c", "kept")
        assert followed.told("c").table() == [{"id": 1, "n": 77}]


def test_a_partitioned_table(log: str, postgres: Database) -> None:
    postgres.run(
        "CREATE TABLE p (id int, kind int, PRIMARY KEY (id, kind)) PARTITION BY LIST (kind)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1)",
        "CREATE TABLE p2 PARTITION OF p FOR VALUES IN (2)",
        "INSERT INTO p SELECT g, 1 + g % 2 FROM generate_series(1, 100) g",
    )
    with running(log, postgres) as followed:
        postgres.run("INSERT INTO p VALUES (500, 1)", "TRUNCATE p", "INSERT INTO p VALUES (1, 2)")
        followed.catch_up()
        assert followed.told("p").table() == [{"id": 1, "kind": 2}]


def test_while_a_table_is_read_in_pieces(each: Database, log: str) -> None:
    """What was read and what is read afterwards: neither brings back what was there before."""
    each.run("CREATE TABLE t (id $int PRIMARY KEY, text $text)")
    with running(log, each, chunk_rows=64, chunk_rows_max=64) as followed:
        for number in range(TRUNCATED_SNAPSHOTS):
            fill(each, number)
            followed.catch_up()
            # Counted before it is asked for: nobody may be quicker than the count.
            before = len(followed.told("t").events)
            with Cluster(log) as cluster:
                send(cluster, followed.name, snapshot_signal(each.full_name("t")))
            eventually(partial(lambda before: len(followed.told("t").events) > before, before))
            each.run("$truncate t", f"INSERT INTO t VALUES ({number}, 'y'), (3000, 'z')")
            followed.catch_up()
            followed.check("t")


def fill(database: Database, number: int) -> None:
    """Rows enough for many pieces, in one transaction."""
    with database.connect() as session:
        session.run("BEGIN")
        session.run("DELETE FROM t")
        for first in range(0, 2000, 100):
            rows = ", ".join(f"({id_}, 'x{number}')" for id_ in range(first, first + 100))
            session.run(f"INSERT INTO t VALUES {rows}")
        session.run("COMMIT")


def test_a_table_of_sqlite_that_is_made_anew(log: str, tmp_path: Path) -> None:
    database = Sqlite(tmp_path)
    database.run("CREATE TABLE t (id INTEGER PRIMARY KEY, text TEXT)",
                 "INSERT INTO t VALUES (1, 'a'), (2, 'b'), (3, 'c')")  # fmt: skip
    with running(log, database) as followed:
        database.run(
            "DROP TABLE t",
            "CREATE TABLE t (id INTEGER PRIMARY KEY, text TEXT)",
            "INSERT INTO t VALUES (2, 'new')",
        )
        eventually(lambda: followed.told("t").table() == [{"id": 2, "text": "new"}])
        database.run("INSERT INTO t VALUES (9, 'z')", "DELETE FROM t")
        followed.catch_up()
        followed.check("t")
    database.close()


@where_mysql_is
def test_mysql_8(log: str, shared_mysql: MySQL) -> None:
    server = shared_mysql
    name = server.create_database()
    server.query("CREATE TABLE t (id INT PRIMARY KEY, text VARCHAR(20))", name)
    server.query("INSERT INTO t VALUES (1, 'a'), (2, 'b')", name)
    made = CaptureConfig.from_mapping(new_name(), {"url": server.url(name), **QUICK, "idle_ms": 10})
    stop = threading.Event()
    thread, failures = on_thread(lambda: Capture(made, log).run(stop))
    with Cluster(log) as cluster:

        def table() -> list[dict[str, Any]]:
            return Told(records(cluster, f"{made.name}.{name}.t")).table()

        eventually(lambda: len(table()) == 2)
        server.query("INSERT INTO t VALUES (3, 'c')", name)
        server.query("TRUNCATE TABLE t", name)
        server.query("INSERT INTO t VALUES (1, 'new')", name)
        eventually(lambda: table() == [{"id": 1, "text": "new"}])
    stop.set()
    thread.join(60)
    assert failures == []
