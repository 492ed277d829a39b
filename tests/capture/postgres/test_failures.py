"""Servers that crash, slots that are lost, positions of elsewhere: found, never skipped over."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psycopg
import pytest

from penstock.capture.postgres.source import PostgresSource
from penstock.capture.source import (
    Chunk,
    ChunkRequest,
    DatabaseUnreachableError,
    Idle,
    Item,
    Part,
    PositionLostError,
)
from penstock.testing.postgres import FOR_TESTS, PostgresServer
from tests.capture.postgres.rebuilding import (
    Connection,
    Rebuilt,
    assert_same,
    catch_up,
    follow,
    opened,
    settings,
    slot_of,
    start,
)
from tests.capture.postgres.workload import Load, prepare
from tests.harness.profiles import SERVER_CRASHES
from tests.waiting import eventually

# What some of the tests set on the server of this file, as it is without that.
DEFAULTS = {
    "logical_decoding_work_mem": "64kB",
    "max_slot_wal_keep_size": "-1",
    "max_wal_size": FOR_TESTS["max_wal_size"],
    "min_wal_size": FOR_TESTS["min_wal_size"],
    "wal_sender_timeout": "60000",
}


@pytest.fixture(scope="module")
def stoppable() -> Iterator[PostgresServer]:
    """A server that may be stopped, crashed and set up otherwise."""
    with PostgresServer(DEFAULTS) as server:
        yield server


@pytest.fixture
def own_server(
    stoppable: PostgresServer,
) -> Iterator[Callable[..., PostgresServer]]:
    """The server of this file, with settings; without them again after the test."""
    changed: list[PostgresServer] = []

    def with_settings(**settings: str) -> PostgresServer:
        changed.append(stoppable.restart(settings))
        return stoppable

    yield with_settings
    for server in changed:
        server.restart(DEFAULTS)


def apply_all(rebuilt: Rebuilt, stream: Iterator[Item]) -> None:
    for item in stream:
        rebuilt.apply(item)


@pytest.mark.databases
def test_a_server_that_crashes_again_and_again(stoppable: PostgresServer, seed: int) -> None:
    rng = random.Random(seed)
    server = stoppable
    url = server.create_database()
    with psycopg.connect(url, autocommit=True) as sql:
        prepare(sql)
    with PostgresSource(settings(url)) as source:
        source.setup()
        rebuilt = start(source)
    for _ in range(SERVER_CRASHES):
        with psycopg.connect(url, autocommit=True) as sql:
            load = Load(sql, rng, rng.randint(2000, 10**8))
            load.run(10)
            with PostgresSource(settings(url)) as source:
                stream = source.stream(rebuilt.position)
                for _ in range(rng.randint(1, 5)):
                    rebuilt.apply(next(stream))
                    source.confirm(rebuilt.position)
                server.crash()
                with pytest.raises(DatabaseUnreachableError):
                    apply_all(rebuilt, stream)
        with pytest.raises(DatabaseUnreachableError):
            PostgresSource(settings(url))
        server.start()
        # The server may have thrown away commits it had not written; none of them was told.
        with psycopg.connect(url, autocommit=True) as sql:
            with PostgresSource(settings(url)) as source:
                catch_up(source, rebuilt, sql)
            assert_same(rebuilt, sql, "public.t")


def test_a_killed_stream_is_told_so_and_goes_on(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with opened(database) as source:
        rebuilt = start(source)
        sql.execute("INSERT INTO t VALUES (1)")
        stream = source.stream(rebuilt.position)
        rebuilt.apply(next(stream))
        sql.execute(
            "SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots "
            "WHERE database = current_database()"
        )
        with pytest.raises(DatabaseUnreachableError):
            apply_all(rebuilt, stream)
        sql.execute("INSERT INTO t VALUES (2)")
        catch_up(source, rebuilt, sql)
        assert_same(rebuilt, sql, "public.t")


@pytest.mark.databases
def test_a_slot_that_the_server_gave_up_is_a_loss(
    own_server: Callable[..., PostgresServer],
) -> None:
    server = own_server(max_slot_wal_keep_size="1MB", min_wal_size="32MB", max_wal_size="48MB")
    url = server.create_database()
    with psycopg.connect(url, autocommit=True) as sql:
        sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
        with PostgresSource(settings(url)) as source:
            source.setup()
            rebuilt = start(source)
            before = source.status()
            assert before.retained_limit_bytes == 1 << 20
            assert before.details["wal_status"] == "reserved"
            sql.execute("INSERT INTO t VALUES (1)")

            def lost() -> bool:
                sql.execute("CREATE TABLE IF NOT EXISTS noise (id serial PRIMARY KEY, x text)")
                sql.execute("INSERT INTO noise (x) VALUES (repeat('x', 1000))")
                sql.execute("SELECT pg_switch_wal()")
                sql.execute("CHECKPOINT")
                return source.status().details["wal_status"] == "lost"

            eventually(lost)
            with pytest.raises(PositionLostError, match="thrown away"):
                next(source.stream(rebuilt.position))
            assert any(not check.ok and "slot" in check.name for check in source.check())
            source.remove()
            # A new beginning is all there is.
            source.setup()
            rebuilt = start(source)
            assert_same(rebuilt, sql, "public.t")


def test_a_missing_slot_is_a_loss(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with opened(database) as source:
        rebuilt = start(source)
        sql.execute("SELECT pg_drop_replication_slot(%s)", (slot_of(database),))
        with pytest.raises(PositionLostError, match="gone"):
            next(source.stream(rebuilt.position))


def test_a_slot_that_moved_past_the_position_is_a_loss(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with opened(database) as source:
        rebuilt = start(source)
        sql.execute("INSERT INTO t VALUES (1)")
        sql.execute(
            "SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", (slot_of(database),)
        )
        with pytest.raises(PositionLostError, match="moved on"):
            next(source.stream(rebuilt.position))


def test_positions_of_elsewhere_are_a_loss(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with opened(database) as source:
        position = start(source).position
        with pytest.raises(PositionLostError, match="another database cluster"):
            next(source.stream({**position, "system": "1"}))
        with pytest.raises(PositionLostError, match="future"):
            next(source.stream({**position, "lsn": position["lsn"] + (1 << 40)}))


def test_only_what_is_confirmed_is_forgotten(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with opened(database) as source:
        first = start(source)
        for number in range(5):
            sql.execute("INSERT INTO t VALUES (%s)", (number,))
        rebuilt = first.copy()
        catch_up(source, rebuilt, sql)
        # Read, even acknowledged as read, but not confirmed: it is all still there.
        again = first.copy()
        catch_up(source, again, sql)
        assert_same(again, sql, "public.t")
        follow(
            source,
            again,
            lambda: (source.status().position or {"lsn": 0})["lsn"] >= again.position["lsn"],
            confirm=True,
        )
        with pytest.raises(PositionLostError):
            next(source.stream(first.position))


@pytest.mark.databases
def test_a_busy_reader_stays_connected(own_server: Callable[..., PostgresServer]) -> None:
    """The server hears from us although nobody asks for the next item."""
    url = own_server(wal_sender_timeout="3000").create_database()
    with psycopg.connect(url, autocommit=True) as sql:
        sql.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
        with opened(url) as source:
            stream = source.stream(start(source).position)
            assert isinstance(next(stream), Idle)
            sql.execute("INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series(1, 9000) g")
            row = sql.execute(
                "SELECT active_pid, clock_timestamp() FROM pg_replication_slots WHERE active"
            ).fetchone()
            assert row is not None
            pid, since = row

            def a_while() -> bool:
                found = sql.execute(
                    "SELECT clock_timestamp() > %s + interval '5 s', "
                    "reply_time > %s + interval '4 s' FROM pg_stat_replication WHERE pid = %s",
                    (since, since, pid),
                ).fetchone()
                assert found is not None, "the server ended the connection"
                return bool(found[0] and found[1])

            eventually(a_while)
            assert sum(len(p.changes) for p in _parts(stream, 9000)) == 9000


def _parts(stream: Iterator[object], rows: int) -> Iterator[Part]:
    found = 0
    for item in stream:
        if isinstance(item, Part):
            found += len(item.changes)
            yield item
            if found >= rows:
                return


def test_a_reader_that_is_not_there_is_reported(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
    with opened(database) as source:
        before = source.status()
        sql.execute("INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series(1, 5000) g")
        after = source.status()
        assert before.lag_bytes is not None
        assert after.lag_bytes is not None
        assert after.lag_bytes > before.lag_bytes + 1_000_000
        assert after.retained_bytes is not None
        assert after.retained_bytes >= after.lag_bytes
        assert after.details["active"] == "no"
        assert int(after.details["wal_bytes_per_s"]) > 0


@pytest.mark.databases
def test_a_commit_that_nobody_sees_yet(stoppable: PostgresServer) -> None:
    """In the log and in the stream, but invisible: it waits for a standby that is not there.

    A chunk that was read now would bring back what the commit has changed.
    """
    url = stoppable.create_database()
    local = "-c synchronous_commit=local"
    with ExitStack() as stack:
        sql = stack.enter_context(psycopg.connect(url, autocommit=True, options=local))
        sql.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
        sql.execute("INSERT INTO t VALUES (1, 'old')")
        source = stack.enter_context(opened(url))
        rebuilt = start(source)
        sql.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        sql.execute("SELECT pg_reload_conf()")
        eventually(lambda: _setting(url) == "nobody")
        writer = stack.enter_context(psycopg.connect(url, autocommit=True))
        thread = threading.Thread(target=writer.execute, args=("UPDATE t SET a = 'new'",))
        thread.start()
        stack.callback(thread.join)
        stack.callback(_without_standby, sql)
        # By a stream that has told the commit itself, and by one that goes on behind it.
        for _ in range(2):
            stream = source.stream(rebuilt.position)
            while rebuilt.rows("public.t")[1,]["a"] != "new":
                rebuilt.apply(next(stream))
            assert sql.execute("SELECT a FROM t").fetchone() == ("old",)
            source.ask(ChunkRequest("1", "public.t", None, 10))
            found = [next(stream) for _ in range(30)]
            assert not any(isinstance(item, Chunk) for item in found)
            stream.close()  # type: ignore[attr-defined]
            catch_up(source, rebuilt, sql)
        _without_standby(sql)
        thread.join()
        stream = source.stream(rebuilt.position)
        chunk = next(item for item in stream if isinstance(item, Chunk))
        assert chunk.rows == [(b"1", b'"new"')]


def _without_standby(sql: Connection) -> None:
    sql.execute("ALTER SYSTEM RESET synchronous_standby_names")
    sql.execute("SELECT pg_reload_conf()")


def _setting(url: str) -> str:
    with psycopg.connect(url) as connection:
        row = connection.execute("SHOW synchronous_standby_names").fetchone()
        assert row is not None
        return str(row[0])


def test_a_transaction_in_progress_survives_what_is_confirmed(
    database: str, sql: Connection
) -> None:
    """It began before the position and is committed behind it: it comes as a whole."""
    sql.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
    with opened(database) as source:
        rebuilt = start(source)
        with psycopg.connect(database) as other:
            other.execute("INSERT INTO t SELECT g, repeat('x', 99) FROM generate_series(1, 2000) g")
            sql.execute("INSERT INTO t VALUES (-1, 'meanwhile')")
            catch_up(source, rebuilt, sql, confirm=True)
            before = rebuilt.position["lsn"]
            follow(
                source,
                rebuilt,
                lambda: (source.status().position or {"lsn": 0})["lsn"] >= before,
                confirm=True,
            )
            assert list(rebuilt.rows("public.t")) == [(-1,)]
            other.execute("INSERT INTO t VALUES (-2, 'last')")
        catch_up(source, rebuilt, sql)
        assert_same(rebuilt, sql, "public.t")
        assert len(rebuilt.rows("public.t")) == 2002
