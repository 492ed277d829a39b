"""The stream of a real PostgreSQL: what comes, in which order, and where it goes on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import orjson
import psycopg
import pytest

from penstock.capture.source import (
    CREATE,
    DELETE,
    NULL,
    TRUNCATE,
    UNAVAILABLE,
    UPDATE,
    CaptureError,
    Idle,
    Part,
    Table,
)
from penstock.testing.postgres import PostgresServer
from tests.capture.postgres.rebuilding import (
    Connection,
    assert_same,
    catch_up,
    changes,
    end_of_log,
    follow,
    name_of,
    opened,
    start,
    values,
)
from tests.waiting import eventually


def test_a_table_and_its_changes_on_every_release(any_postgres: PostgresServer) -> None:
    url = any_postgres.create_database()
    with psycopg.connect(url, autocommit=True) as sql:
        sql.execute("CREATE TABLE t (id int PRIMARY KEY, a text, n numeric(10, 2))")
        sql.execute("INSERT INTO t SELECT g, 'row ' || g, g / 3.0 FROM generate_series(1, 100) g")
        with opened(url, options={"decimal.handling.mode": "string"}) as source:
            rebuilt = start(source)
            assert_same(rebuilt, sql, "public.t")
            sql.execute("UPDATE t SET a = NULL WHERE id % 7 = 0")
            sql.execute("DELETE FROM t WHERE id % 5 = 0")
            sql.execute("UPDATE t SET id = id + 1000 WHERE id % 3 = 0")
            # Larger than logical_decoding_work_mem: comes in blocks before its commit.
            sql.execute(
                "INSERT INTO t SELECT g, repeat('x', 90) FROM generate_series(2000, 4000) g"
            )
            items = catch_up(source, rebuilt, sql)
            assert_same(rebuilt, sql, "public.t")
        assert [len(part.changes) for part in items if isinstance(part, Part)] == [
            14,
            20,
            27,
            2001,
        ]


def test_the_kinds_of_changes(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
    with opened(database) as source:
        rebuilt = start(source)
        sql.execute("INSERT INTO t VALUES (1, 'a\"b\\c')")
        sql.execute("UPDATE t SET a = 'b'")
        sql.execute("UPDATE t SET id = 2")
        sql.execute("DELETE FROM t")
        sql.execute("TRUNCATE t")
        found = changes(catch_up(source, rebuilt, sql))
    assert [(c.op, c.before, c.after) for c in found] == [
        (CREATE, None, (b"1", b'"a\\"b\\\\c"')),
        (UPDATE, None, (b"1", b'"b"')),
        (UPDATE, (b"1", NULL), (b"2", b'"b"')),
        (DELETE, (b"2", NULL), None),
        (TRUNCATE, None, None),
    ]
    block = orjson.loads(found[0].source)
    assert block["connector"] == "postgresql"
    assert block["name"] == name_of(database)
    assert block["snapshot"] == "false"
    assert (block["schema"], block["table"]) == ("public", "t")
    assert block["ts_ms"] == found[0].ts_us // 1000
    assert orjson.loads(block["sequence"])[1] == str(block["lsn"])
    lsns = [orjson.loads(change.source)["lsn"] for change in found]
    assert lsns == sorted(set(lsns))
    numbers = [orjson.loads(change.source)["txId"] for change in found]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("identity", ["FULL", "USING INDEX t_b", "NOTHING"])
def test_replica_identities(database: str, sql: Connection, identity: str) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY, b int NOT NULL, c text)")
    sql.execute("CREATE UNIQUE INDEX t_b ON t (b)")
    with opened(database) as source:
        sql.execute(f"ALTER TABLE t REPLICA IDENTITY {identity}".encode())
        rebuilt = start(source)
        sql.execute("INSERT INTO t VALUES (1, 10, 'x')")
        if identity != "NOTHING":
            sql.execute("UPDATE t SET b = 11")
            sql.execute("DELETE FROM t")
        found = changes(catch_up(source, rebuilt, sql))
    row = (b"1", b"10", b'"x"')
    assert (found[0].op, found[0].before, found[0].after) == (CREATE, None, row)
    if identity == "FULL":
        assert found[0].table.key == ("id",)
        assert [(c.before, c.after) for c in found[1:]] == [
            (row, (b"1", b"11", b'"x"')),
            ((b"1", b"11", b'"x"'), None),
        ]
    elif identity != "NOTHING":
        assert found[0].table.key == ("b",)
        assert [(c.before, c.after) for c in found[1:]] == [
            ((NULL, b"10", NULL), (b"1", b"11", b'"x"')),
            ((NULL, b"11", NULL), None),
        ]
    else:
        assert found[0].table.key == ("id",)


def test_large_values_that_an_update_left_alone(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY, a int, big text)")
    sql.execute("ALTER TABLE t ALTER big SET STORAGE EXTERNAL")
    sql.execute("INSERT INTO t VALUES (1, 0, repeat('x', 9000))")
    with opened(database) as source:
        rebuilt = start(source)
        sql.execute("UPDATE t SET a = 1")
        sql.execute("UPDATE t SET id = 2")
        sql.execute("ALTER TABLE t REPLICA IDENTITY FULL")
        sql.execute("UPDATE t SET a = 2")
        found = changes(catch_up(source, rebuilt, sql))
        assert_same(rebuilt, sql, "public.t")
    assert [change.after[2] is UNAVAILABLE for change in found] == [True, True, False]
    assert len(values(found[2].table, found[2].after)["big"]) == 9000


def test_truncate_of_several_tables(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE a (id int PRIMARY KEY)")
    sql.execute("CREATE TABLE b (id int PRIMARY KEY REFERENCES a)")
    sql.execute("INSERT INTO a VALUES (1); INSERT INTO b VALUES (1)")
    with opened(database) as source:
        rebuilt = start(source)
        sql.execute("TRUNCATE a CASCADE")
        (part,) = catch_up(source, rebuilt, sql)
        assert isinstance(part, Part)
        assert sorted((c.op, c.table.name) for c in part.changes) == [("t", "a"), ("t", "b")]


def test_rolled_back_is_never_told(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
    with opened(database) as source:
        rebuilt = start(source)
        for rows in (3, 3000):
            with sql.transaction(force_rollback=True):
                sql.execute(
                    "INSERT INTO t SELECT g, repeat('x', 50) FROM generate_series(1, %s) g", (rows,)
                )
            with sql.transaction():
                sql.execute(
                    "INSERT INTO t SELECT g, repeat('y', 50) FROM generate_series(1, %s) g", (rows,)
                )
                with sql.transaction(force_rollback=True):
                    sql.execute("UPDATE t SET a = 'no'")
                    with sql.transaction():
                        sql.execute("DELETE FROM t")
                with sql.transaction():
                    sql.execute("UPDATE t SET a = 'yes' WHERE id = 2")
            sql.execute("DELETE FROM t")
        catch_up(source, rebuilt, sql)
        assert_same(rebuilt, sql, "public.t")
        assert len(rebuilt.transactions) == 4


def test_a_streamed_transaction_goes_to_disk_and_comes_back(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
    options = {"spool.memory.bytes": "20000"}
    with opened(database, options=options) as source:
        rebuilt = start(source)
        with psycopg.connect(database) as other:
            other.execute("INSERT INTO t SELECT g, repeat('x', 99) FROM generate_series(1, 3000) g")
            sql.execute("INSERT INTO t VALUES (-1, 'in between')")
            with other.transaction(force_rollback=True):
                other.execute("DELETE FROM t")
            other.execute("UPDATE t SET a = 'z' WHERE id < 500")
        catch_up(source, rebuilt, sql)
        assert_same(rebuilt, sql, "public.t")


def test_a_transaction_that_was_prepared(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with opened(database) as source:
        rebuilt = start(source)
        with psycopg.connect(database) as other:
            other.execute("INSERT INTO t VALUES (1)")
            other.execute("PREPARE TRANSACTION 'one'")
        assert changes(catch_up(source, rebuilt, sql)) == []
        sql.execute("COMMIT PREPARED 'one'")
        assert len(changes(catch_up(source, rebuilt, sql))) == 1


def test_schema_changes_in_the_middle(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY, a int, b text)")
    with opened(database) as source:
        rebuilt = start(source)
        sql.execute("INSERT INTO t VALUES (1, 1, 'one')")
        sql.execute("ALTER TABLE t ADD c timestamptz NOT NULL DEFAULT '2020-01-01 00:00:00+00'")
        sql.execute("INSERT INTO t VALUES (2, 2, 'two')")
        sql.execute("ALTER TABLE t DROP a")
        sql.execute("INSERT INTO t VALUES (3, 'three')")
        sql.execute("ALTER TABLE t RENAME b TO a")
        sql.execute("ALTER TABLE t ALTER a TYPE bytea USING a::bytea")
        sql.execute("INSERT INTO t VALUES (4, 'four')")
        sql.execute("ALTER TABLE t RENAME id TO number")
        sql.execute("INSERT INTO t VALUES (5, 'five')")
        # All of it is decoded when the catalog knows only the last form.
        found = changes(catch_up(source, rebuilt, sql))
    when = "2020-01-01T00:00:00Z"
    assert [values(change.table, change.after) for change in found] == [
        {"id": 1, "a": 1, "b": "one"},
        {"id": 2, "a": 2, "b": "two", "c": when},
        {"id": 3, "b": "three", "c": when},
        {"id": 4, "a": "Zm91cg==", "c": when},
        {"number": 5, "a": "Zml2ZQ==", "c": when},
    ]
    assert [change.table.key for change in found] == [("id",)] * 4 + [("number",)]
    assert [column.type.name for column in found[3].table.columns] == ["int32", "bytes", "string"]


def test_what_the_catalog_says_is_not_believed_against_the_stream(
    database: str, sql: Connection
) -> None:
    sql.execute("CREATE TYPE mood AS ENUM ('sad', 'ok')")
    sql.execute("CREATE DOMAIN small AS int CHECK (value < 100)")
    sql.execute("CREATE TABLE t (id int PRIMARY KEY, a int, m mood, s small)")
    sql.execute("CREATE TABLE gone (id int PRIMARY KEY, m mood, s small)")
    with opened(database) as source:
        rebuilt = start(source)
        sql.execute("INSERT INTO t VALUES (1, NULL, 'sad', 7)")
        sql.execute("INSERT INTO gone VALUES (1, 'ok', 8)")
        sql.execute("DROP TABLE gone")
        sql.execute("UPDATE t SET a = 1")
        sql.execute("ALTER TABLE t ALTER a SET NOT NULL")
        sql.execute("ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'")
        sql.execute("ALTER TYPE mood ADD VALUE 'happy'")
        sql.execute("UPDATE t SET m = 'happy'")
        found = changes(catch_up(source, rebuilt, sql))
    assert found[0].after == (b"1", NULL, b'"sad"', b"7")
    assert found[0].table.columns[1].optional
    assert "sad" in found[0].table.columns[2].type.parameters["allowed"].split(",")
    assert found[1].after == (b"1", b'"ok"', b"8")
    assert found[-1].after == (b"1", b"1", b'"happy"', b"7")
    assert found[-1].table.columns[2].type.semantic == "io.debezium.data.Enum"


def test_partitions_are_told_as_their_table(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int, a text, PRIMARY KEY (id)) PARTITION BY RANGE (id)")
    sql.execute("CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)")
    sql.execute("CREATE TABLE t2 (a text, id int PRIMARY KEY)")
    sql.execute("ALTER TABLE t ATTACH PARTITION t2 FOR VALUES FROM (10) TO (20)")
    sql.execute("INSERT INTO t VALUES (1, 'a'), (11, 'b')")
    with opened(database) as source:
        rebuilt = start(source)
        assert_same(rebuilt, sql, "public.t")
        sql.execute("INSERT INTO t VALUES (2, 'c'), (12, 'd')")
        sql.execute("UPDATE t SET id = 15 WHERE id = 1")
        catch_up(source, rebuilt, sql)
        assert_same(rebuilt, sql, "public.t")
        assert list(rebuilt.tables) == ["public.t"]


def test_generated_columns_are_told_where_the_server_can(any_postgres: PostgresServer) -> None:
    url = any_postgres.create_database()
    with psycopg.connect(url, autocommit=True) as sql:
        sql.execute(
            "CREATE TABLE t (id int PRIMARY KEY, d int GENERATED ALWAYS AS (id * 2) STORED)"
        )
        sql.execute("INSERT INTO t VALUES (1)")
        with opened(url) as source:
            rebuilt = start(source)
            sql.execute("INSERT INTO t VALUES (2)")
            catch_up(source, rebuilt, sql)
            rows = list(rebuilt.rows("public.t").values())
    if any_postgres.version == "18":
        assert rows == [{"id": 1, "d": 2}, {"id": 2, "d": 4}]
    else:
        assert rows == [{"id": 1}, {"id": 2}]


def test_logical_messages(any_postgres: PostgresServer) -> None:
    url = any_postgres.create_database()
    with psycopg.connect(url, autocommit=True) as sql:
        sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
        with opened(url) as source:
            rebuilt = start(source)
            with sql.transaction():
                sql.execute("INSERT INTO t VALUES (1)")
                sql.execute("SELECT pg_logical_emit_message(true, 'app', 'inside')")
            sql.execute("SELECT pg_logical_emit_message(false, 'app', 'outside')")
            first, second = catch_up(source, rebuilt, sql)
            assert isinstance(first, Part)
            assert isinstance(second, Part)
            assert (first.messages, len(first.changes)) == ([("app", b"inside")], 1)
            assert (second.messages, second.transaction) == ([("app", b"outside")], "")
            assert catch_up(source, rebuilt, sql) == []
            # Right behind a message stands a change that must not be taken for told.
            rebuilt.position = second.position
            sql.execute("INSERT INTO t VALUES (2)")
            assert len(changes(catch_up(source, rebuilt, sql))) == 1


def test_the_stream_goes_on_after_any_position(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with opened(database) as source:
        first = start(source)
        for number in range(1, 11):
            sql.execute("INSERT INTO t VALUES (%s)", (number,))
        rebuilt = first.copy()
        parts = [item for item in catch_up(source, rebuilt, sql) if isinstance(item, Part)]
        for count, part in enumerate(parts, start=1):
            again = first.copy()
            again.position = part.position
            told = changes(catch_up(source, again, sql))
            assert [int(change.after[0]) for change in told] == list(range(count + 1, 11))


def test_a_quiet_table_holds_no_log(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    sql.execute("CREATE TABLE noise (id int PRIMARY KEY)")
    with opened(database, exclude=("public.noise",)) as source:
        rebuilt = start(source)
        sql.execute("INSERT INTO noise SELECT generate_series(1, 5000)")
        end = end_of_log(sql)

        def confirmed() -> bool:
            position = source.status().position
            return position is not None and position["lsn"] >= end

        assert follow(source, rebuilt, confirmed, confirm=True) == []
        # Nothing at all happens, and yet the position goes on: the heartbeat is in the log.
        before = rebuilt.position["lsn"]
        follow(source, rebuilt, lambda: rebuilt.position["lsn"] > before)


def test_idle_comes_again_and_again(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with opened(database) as source:
        stream = source.stream(start(source).position)
        assert all(isinstance(next(stream), Idle) for _ in range(3))
        source.close()
        assert list(stream) == []


def test_estimates_and_ranges_of_pages(
    database: str, sql: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.capture.postgres.snapshot.RANGE_PAGES", 3)
    sql.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
    sql.execute("INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 3000) g")
    sql.execute("DELETE FROM t WHERE id % 10 = 0")
    sql.execute("VACUUM ANALYZE t")
    with opened(database) as source, source.snapshot() as snapshot:
        (table,) = snapshot.tables
        assert snapshot.estimate(table) == pytest.approx(2700, rel=0.3)
        batches = list(snapshot.rows(table))
        assert len(batches) > 10
        found = sorted(int(row[0]) for rows in batches for row in rows)
        assert found == [number for number in range(1, 3001) if number % 10]
        some = [row for rows in snapshot.rows(table, where="id < 5") for row in rows]
        assert len(some) == 4


def test_a_snapshot_that_is_broken_off(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    sql.execute("INSERT INTO t SELECT generate_series(1, 9000)")
    with opened(database) as source, source.snapshot() as snapshot:
        rows = snapshot.rows(snapshot.tables[0])
        next(rows)
        rows.close()  # type: ignore[attr-defined]
        with pytest.raises(CaptureError):
            next(snapshot.rows(snapshot.tables[0]))


def test_writes_and_a_waiting_truncate_do_not_stop_a_snapshot(
    database: str, sql: Connection
) -> None:
    sql.execute("CREATE TABLE a (id int PRIMARY KEY)")
    sql.execute("CREATE TABLE b (id int PRIMARY KEY)")
    sql.execute("INSERT INTO a VALUES (1); INSERT INTO b VALUES (1)")
    with opened(database) as source:
        with source.snapshot() as snapshot, psycopg.connect(database, autocommit=True) as other:
            sql.execute("UPDATE a SET id = 2")
            thread = threading.Thread(target=other.execute, args=("TRUNCATE b",))
            thread.start()
            eventually(lambda: sql.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone())
            told = {
                table.name: [row for rows in snapshot.rows(table) for row in rows]
                for table in snapshot.tables
            }
            snapshot.close()
            thread.join()
        assert told == {"a": [(b"1",)], "b": [(b"1",)]}


def test_several_tables_are_read_at_once(database: str, sql: Connection) -> None:
    for number in range(6):
        sql.execute(f"CREATE TABLE t{number} (id int PRIMARY KEY)".encode())
        sql.execute(f"INSERT INTO t{number} SELECT generate_series(1, {number * 100})".encode())
    with opened(database, snapshot_workers=3) as source, source.snapshot() as snapshot:
        sql.execute("INSERT INTO t1 SELECT generate_series(1000, 2000)")

        def count(table: Table) -> int:
            return sum(len(rows) for rows in snapshot.rows(table))

        with ThreadPoolExecutor(6) as pool:
            counts = list(pool.map(count, snapshot.tables))
        assert counts == [0, 100, 200, 300, 400, 500]
