"""After a TRUNCATE in the database a store is equal to it: `penstock verify` says so."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from penstock.capture.delivery.capture import Capture
from penstock.capture.delivery.config import CaptureConfig
from penstock.cli.capture_project import configured
from penstock.cli.project import load
from penstock.cli.verifying import verify
from penstock.client.connection import Cluster
from penstock.client.writer import LogWriter
from penstock.spark.sinking.errors import TruncatedError
from penstock.testing.mariadb import MariaDB
from penstock.testing.postgres import PostgresServer
from tests.capture.delivery.running import Crash, Fuse, FusedWriter, on_thread
from tests.cli.test_verify import Feeder, running
from tests.harness.profiles import FOLLOWED_KILLS
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)
Execute = Callable[[str], None]
ROWS = 2000


class Source:
    """A database with one table, as a project captures it and feeds a store from it."""

    def __init__(self, url: str, table: str, execute: Execute, settings: str = "") -> None:
        self.execute = execute
        self.name = f"s{uuid4().hex[:8]}"
        self.table = f"{self.name}.{table}"
        rows = ", ".join(f"({n}, 'name {n}')" for n in range(ROWS))
        execute("CREATE TABLE orders (id INT PRIMARY KEY, name VARCHAR(50))")
        execute(f"INSERT INTO orders VALUES {rows}")
        Path("penstock.toml").write_text(
            f'[capture.{self.name}]\nurl = "{url}"\npartitions = 3\nbatch_changes = 500\n{settings}'
            f'\n[sinks.store]\ntopic = "{self.table}"\nurl = "sqlite:///store.db"\n'
        )

    def check(self, at: str, count: int) -> None:
        """The store has reached the source, and is equal to it."""
        report = verify(load(), self.table, "store", timeout_s=90, bootstrap=at)
        assert report.equal, report.differences
        assert report.rows == count
        with closing(sqlite3.connect("store.db", timeout=60)) as store:
            assert store.execute("SELECT count(*) FROM store").fetchone() == (count,)


def executing(connection: psycopg.Connection) -> Execute:
    def execute(sql: str) -> None:
        connection.execute(sql.encode())

    return execute


@pytest.fixture
def postgres(shared_postgres: PostgresServer) -> PostgresServer:
    return shared_postgres


@pytest.fixture
def mariadb(shared_mariadb: MariaDB) -> MariaDB:
    return shared_mariadb


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.databases) for name in ("postgres", "mariadb")]
)
def made(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Source]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)
    server = request.getfixturevalue(request.param)
    if request.param == "mariadb":
        name = server.create_database()
        yield Source(server.url(name), f"{name}.orders", lambda sql: server.query(sql, name))
        return
    url = server.create_database()
    with psycopg.connect(url, autocommit=True) as connection:
        yield Source(url, "public.orders", executing(connection))


def test_a_store_follows_a_truncate(made: Source, at: str) -> None:
    with running(made.name, at), ExitStack() as stack:
        # It makes the store, which is locked meanwhile.
        Feeder("store", at).once()
        stack.enter_context(Feeder("store", at))
        made.check(at, ROWS)
        made.execute("UPDATE orders SET name = 'other' WHERE id < 100")
        made.execute("TRUNCATE TABLE orders")
        made.check(at, 0)
        made.execute("INSERT INTO orders VALUES (1, 'new'), (5000, 'newer')")
        made.check(at, 2)


def test_a_store_follows_a_truncate_in_whose_middle_the_capture_is_killed(
    made: Source, at: str, seed: int
) -> None:
    chance = random.Random(seed)
    with running(made.name, at):
        Feeder("store", at).once()
        made.check(at, ROWS)
    for number in range(FOLLOWED_KILLS):
        made.execute("TRUNCATE TABLE orders")
        rows = ", ".join(f"({n}, 'again {number}')" for n in range(number, ROWS, 3))
        made.execute(f"INSERT INTO orders VALUES {rows}")
        run_until_crash(made.name, at, Fuse(chance.randint(1, 12)))
        # What was written in the middle is not there for readers, or all of it is.
        Feeder("store", at).once()
    with running(made.name, at), Feeder("store", at):
        made.check(at, len(range(FOLLOWED_KILLS - 1, ROWS, 3)))


def run_until_crash(name: str, at: str, fuse: Fuse) -> None:
    stop, commits = threading.Event(), 0

    class Counting(FusedWriter):
        def commit(self) -> None:
            nonlocal commits
            super().commit()
            commits += 1

    def make_writer(cluster: Cluster, settings: CaptureConfig) -> LogWriter:
        writer = Counting(cluster, transactional_id=settings.transactional_id)
        writer.fuse = fuse
        return writer

    it = Capture(configured(load(), name), at, make_writer=make_writer)
    thread, failures = on_thread(lambda: it.run(stop))
    eventually(lambda: fuse.is_blown or commits > 10)
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert all(isinstance(error, Crash) for error in failures)


@pytest.mark.parametrize("stops", [False, True])
def test_a_truncate_that_was_not_told_row_by_row_stops_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, postgres: PostgresServer, stops: bool
) -> None:
    """As real Debezium writes it; whereas ours, with its deletes before it, is passed over."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)
    settings = 'skip = ["none"]\n' + ('truncates = "skip"' if stops else "")
    url = postgres.create_database()
    with psycopg.connect(url, autocommit=True) as connection:
        made = Source(url, "public.orders", executing(connection), settings)
        with running(made.name, at):
            Feeder("store", at).once()
            made.execute("TRUNCATE TABLE orders")
            made.execute("INSERT INTO orders VALUES (1, 'new')")
            if stops:
                with pytest.raises(TruncatedError, match="does not say which rows"):
                    eventually(lambda: Feeder("store", at).once())
                return
            with Feeder("store", at):
                made.check(at, 1)
