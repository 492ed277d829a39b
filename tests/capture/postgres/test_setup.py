"""What a capture makes in the database, what it refuses to, and that it takes all of it away."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest

from penstock.capture.postgres.options import object_name
from penstock.capture.postgres.source import PostgresSource
from penstock.capture.source import (
    CaptureError,
    Check,
    ChunkRequest,
    DatabaseUnreachableError,
    PositionLostError,
)
from penstock.errors import ConfigError
from penstock.testing.postgres import PostgresServer, installation
from tests.capture.postgres.rebuilding import (
    Connection,
    assert_same,
    catch_up,
    follow,
    opened,
    settings,
    slot_of,
    start,
)


def made(sql: Connection) -> set[str]:
    """What of ours is in the database."""
    return {
        row[0]
        for row in sql.execute(
            """SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database()
               UNION ALL SELECT pubname::text FROM pg_publication"""
        )
    }


def failing(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.remedy for check in checks if check.required and not check.ok}


def test_set_up_and_taken_away(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with PostgresSource(settings(database, "My shop")) as source:
        assert made(sql) == set()
        source.check()
        assert made(sql) == set()
        source.setup()
        source.setup()
        assert made(sql) == {object_name("My shop")}
        assert len(source.remove()) == 2
        assert source.remove() == []
        assert made(sql) == set()


def test_removed_while_another_reads(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with PostgresSource(settings(database)) as reader, PostgresSource(settings(database)) as other:
        reader.setup()
        stream = reader.stream(start(reader).position)
        next(stream)
        assert len(other.remove()) == 2
        with pytest.raises(CaptureError):
            list(stream)
    assert made(sql) == set()


def test_names_are_ours_and_different() -> None:
    names = {object_name(name) for name in ("shop", "Shop", "sh-op", "sh op", "x" * 200, "x" * 201)}
    assert len(names) == 6
    assert all(len(name) <= 63 and name.startswith("penstock_") for name in names)


def test_chosen_tables(database: str, sql: Connection) -> None:
    for name in ("a", "b", "noise"):
        sql.execute(f"CREATE TABLE {name} (id int PRIMARY KEY)".encode())
    sql.execute("CREATE UNLOGGED TABLE unlogged (id int)")
    sql.execute('CREATE SCHEMA "My Schema"')
    sql.execute('CREATE TABLE "My Schema"."T.x" (id int PRIMARY KEY)')
    with opened(database, exclude=("public.noise",)) as source:
        assert [t.full_name for t in source.tables()] == ["My Schema.T.x", "public.a", "public.b"]
        rebuilt = start(source)
        sql.execute('INSERT INTO "My Schema"."T.x" VALUES (1)')
        sql.execute("INSERT INTO noise VALUES (1)")
        catch_up(source, rebuilt, sql)
        assert {name for name, rows in rebuilt.tables.items() if rows} == {"My Schema.T.x"}
    with opened(database, include=("a", "My*")) as source:
        assert [t.full_name for t in source.tables()] == ["My Schema.T.x", "public.a"]


def test_a_table_whose_updates_would_fail_is_refused(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE good (id int PRIMARY KEY)")
    sql.execute("CREATE TABLE bad (id int)")
    sql.execute("INSERT INTO bad VALUES (1)")
    with PostgresSource(settings(database)) as source:
        remedy = failing(source.check())["public.bad: replica identity"]
        with pytest.raises(CaptureError, match=r"public\.bad") as error:
            source.setup()
        assert error.value.advice == remedy
        assert made(sql) == set()
        sql.execute("UPDATE bad SET id = 2")
        sql.execute(remedy.encode())
        source.setup()
        sql.execute("UPDATE bad SET id = 3")
        source.remove()


def test_partitions_without_identity_are_refused(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int) PARTITION BY RANGE (id)")
    sql.execute("CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)")
    with PostgresSource(settings(database)) as source:
        remedy = failing(source.check())["public.t: replica identity"]
        sql.execute(remedy.encode())
        assert failing(source.check()) == {}
        source.setup()
        sql.execute("INSERT INTO t VALUES (1)")
        sql.execute("UPDATE t SET id = 2")
        source.remove()


def test_a_role_without_privileges_is_told_each_command(
    postgres: PostgresServer, database: str, sql: Connection
) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    sql.execute("INSERT INTO t VALUES (1)")
    role = sql.info.dbname + "_role"
    sql.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'".encode())
    url = database.replace("tester:", f"{role}:")
    with PostgresSource(settings(url)) as source:
        with pytest.raises(CaptureError, match="cannot be captured"):
            source.setup()
        for _ in range(5):
            found = failing(source.check())
            for remedy in found.values():
                for command in remedy.split("; "):
                    sql.execute(command.encode())
        assert failing(source.check()) == {}
        source.setup()
        rebuilt = start(source)
        sql.execute("INSERT INTO t VALUES (2)")
        catch_up(source, rebuilt, sql)
        assert_same(rebuilt, sql, "public.t")
        source.remove()
    assert made(sql) == set()


@pytest.mark.databases
def test_a_server_without_logical_decoding() -> None:
    with PostgresServer({"wal_level": "replica", "max_replication_slots": "1"}) as server:
        with PostgresSource(settings(server.url())) as source:
            found = failing(source.check())
            assert set(found) == {"wal_level", "max_replication_slots"}
            with pytest.raises(CaptureError, match="wal_level"):
                source.setup()


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        (lambda url: url.replace("secret", "wrong"), CaptureError, "password"),
        (lambda url: url.replace("tester:", "nobody:"), CaptureError, "nobody"),
        (lambda url: url.rpartition("/")[0] + "/nothere", CaptureError, "nothere"),
        (lambda url: "postgresql://127.0.0.1:1/x", DatabaseUnreachableError, "reach"),
        (lambda url: url + "?nonsense=1", CaptureError, "nonsense"),
        (lambda url: url.replace("postgresql:", "mysql:"), CaptureError, "begins with mysql"),
        (lambda url: url.replace("@", "@["), CaptureError, "not a URL"),
        (lambda url: url + "?sslmode=require", CaptureError, "SSL"),
    ],
)
def test_wrong_urls(
    database: str, wrong: Callable[[str], str], kind: type[CaptureError], words: str
) -> None:
    with pytest.raises(kind, match=words) as error:
        PostgresSource(settings(wrong(database)))
    assert error.value.advice
    assert error.value.retriable is (kind is DatabaseUnreachableError)
    assert "secret" not in str(error.value)


def test_options_are_checked() -> None:
    for options in (
        {"slto": "x"},
        {"slot": "Not Allowed"},
        {"streaming": "perhaps"},
        {"decimal.handling.mode": "exact"},
        {"spool.max.bytes": "-1"},
    ):
        with pytest.raises(ConfigError):
            PostgresSource(settings("postgresql://127.0.0.1:1/x", options=options))


def test_a_publication_of_the_users_own(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY, a int, secret text)")
    sql.execute("CREATE TABLE other (id int PRIMARY KEY)")
    sql.execute("CREATE PUBLICATION mine FOR TABLE t (id, a)")
    sql.execute("INSERT INTO t VALUES (1, 2, 'x')")
    options = {"publication": "mine", "slot": "my_slot"}
    with PostgresSource(settings(database, options=options)) as source:
        assert "public.other: published" in failing(source.check())
    with opened(database, options=options, include=("t",)) as source:
        rebuilt = start(source)
        sql.execute("INSERT INTO t VALUES (2, 3, 'y')")
        catch_up(source, rebuilt, sql)
        assert list(rebuilt.rows("public.t").values()) == [{"id": 1, "a": 2}, {"id": 2, "a": 3}]
        assert made(sql) == {"mine", "my_slot"}
    assert made(sql) == {"mine"}


def test_a_publication_without_truncates_is_warned_of(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    sql.execute(
        """CREATE PUBLICATION "My ""own" FOR TABLE t WITH (publish = 'insert, update, delete')"""
    )
    with PostgresSource(settings(database, options={"publication": 'My "own'})) as source:
        (found,) = [check for check in source.check() if check.name == "truncates"]
        assert (found.ok, found.required) == (False, False)
        sql.execute(found.remedy.encode())
        assert all(check.name != "truncates" for check in source.check())


def test_a_publication_for_all_tables(database: str, sql: Connection) -> None:
    with opened(database, options={"publication.all.tables": "true"}) as source:
        rebuilt = start(source)
        sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
        sql.execute("INSERT INTO t VALUES (1)")
        catch_up(source, rebuilt, sql)
        assert_same(rebuilt, sql, "public.t")


def test_a_dropped_publication_is_a_loss(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with opened(database) as source:
        rebuilt = start(source)
        sql.execute(f"DROP PUBLICATION {slot_of(database)}".encode())
        with pytest.raises(PositionLostError):
            next(source.stream(rebuilt.position))
        with pytest.raises(PositionLostError):
            source.setup()


def test_both_kinds_of_installation() -> None:
    assert {installation(name).name for name in ("system", "16", "18")} == {"system", "16", "18"}


def test_connections_are_closed(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with opened(database) as source:
        rebuilt = start(source)
        catch_up(source, rebuilt, sql)
        source.status()
        source.tables()
    with psycopg.connect(database) as other:
        row = other.execute(
            """SELECT count(*) FROM pg_stat_activity
               WHERE datname = current_database() AND application_name LIKE 'penstock%'
                 AND state <> 'idle'"""
        ).fetchone()
        assert row is not None


def test_tables_that_are_created_later(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with opened(database, heartbeat_ms=50) as source:
        rebuilt = start(source)
        sql.execute("CREATE TABLE later (id int PRIMARY KEY)")
        sql.execute("CREATE TABLE bad (id int)")
        sql.execute("INSERT INTO later VALUES (1)")
        sql.execute("INSERT INTO bad VALUES (1)")
        follow(source, rebuilt, lambda: "public.later" in [t.full_name for t in source.tables()])
        sql.execute("INSERT INTO later VALUES (2)")
        # Never at the price of the user's own statements.
        sql.execute("UPDATE bad SET id = 2")
        source.ask(ChunkRequest("1", "public.later", None, 10))
        follow(source, rebuilt, lambda: len(rebuilt.rows("public.later")) == 2)
        assert_same(rebuilt, sql, "public.later")
        assert "public.bad" in source.status().details["left_out"]
        assert "public.bad" not in [table.full_name for table in source.tables()]
        # Nor does it keep a capture that runs from starting again.
        source.setup()
        sql.execute("UPDATE bad SET id = 3")


@pytest.fixture
def lonely() -> Iterator[str]:
    """A database on a server of its own, where nobody else has transactions."""
    with PostgresServer() as server:
        yield server.create_database()


@pytest.mark.databases
def test_a_transaction_that_does_not_end_is_named(lonely: str) -> None:
    with psycopg.connect(lonely, autocommit=True) as sql:
        check_transactions_are_named(lonely, sql)


def check_transactions_are_named(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    options = {"slot.timeout.ms": "300"}
    with PostgresSource(settings(database, options=options)) as source:
        with psycopg.connect(database) as other:
            other.execute("INSERT INTO t VALUES (1)")
            with pytest.raises(CaptureError, match=f"process {other.info.backend_pid} ") as error:
                source.setup()
            assert error.value.retriable
            assert slot_of(database) in made(sql)
        source.setup()
        with psycopg.connect(database) as other:
            other.execute("INSERT INTO t VALUES (2)")
            with pytest.raises(CaptureError, match=f"process {other.info.backend_pid} "):
                source.snapshot()
        start(source)
        source.remove()
    assert made(sql) == set()
