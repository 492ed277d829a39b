"""Transactions of every kind: whole, in order, committed only, wherever the stream is cut."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from penstock.capture.mysql import snapshot as snapshot_module
from penstock.capture.mysql.source import MysqlSource
from penstock.capture.source import CaptureError, Chunk, Part, Position, PositionLostError
from penstock.testing.mariadb import MariaDB
from tests.capture.mysql.kit import changes_of, end_of, place_of, read_to_end, source_of


def begin(
    server: MariaDB, database: str, *ddl: str, **settings: Any
) -> tuple[MysqlSource, Position]:
    for statement in ddl:
        server.query(statement, database)
    source = source_of(server, database, **settings)
    with source.snapshot() as snapshot:
        return source, snapshot.position


def told(server: MariaDB, source: MysqlSource, position: Position) -> list[tuple[str, Any, Any]]:
    items, _ = read_to_end(server, source, position)
    return [(c.op, c.before, c.after) for c in changes_of(items)]


T = "CREATE TABLE t (id INT PRIMARY KEY, v VARCHAR(100))"
M = "CREATE TABLE m (id INT PRIMARY KEY) ENGINE=MyISAM"
ARIA = "CREATE TABLE ar (id INT PRIMARY KEY) ENGINE=Aria TRANSACTIONAL=0"


def one(number: int, value: bytes = b"null") -> tuple[bytes, bytes]:
    return b"%d" % number, value


def test_what_was_rolled_back_never_appears(mariadb: MariaDB, database: str) -> None:
    source, position = begin(mariadb, database, T)
    with mariadb.connect(database, autocommit=False) as connection, connection.cursor() as cursor:
        cursor.execute("INSERT INTO t VALUES (1, NULL)")
        connection.rollback()
        cursor.execute("INSERT INTO t VALUES (2, NULL)")
        cursor.execute("SAVEPOINT a")
        cursor.execute("INSERT INTO t VALUES (3, NULL)")
        cursor.execute("ROLLBACK TO a")
        cursor.execute("INSERT INTO t VALUES (4, NULL)")
        connection.commit()
    items, _ = read_to_end(mariadb, source, position)
    (part,) = items
    assert isinstance(part, Part)
    assert [c.after for c in part.changes] == [one(2), one(4)]
    assert part.is_first
    assert part.is_last
    assert part.transaction.startswith("0-1-")


def test_tables_without_transactions(mariadb: MariaDB, database: str) -> None:
    """What a rolled back transaction did to them stays, and is told; the rest is not."""
    source, position = begin(mariadb, database, T, M, ARIA)
    with mariadb.connect(database, autocommit=False) as connection, connection.cursor() as cursor:
        cursor.execute("INSERT INTO t VALUES (1, NULL)")
        cursor.execute("INSERT INTO m VALUES (1)")
        cursor.execute("INSERT INTO ar VALUES (1)")
        connection.rollback()
        cursor.execute("INSERT INTO m VALUES (2), (3)")
        cursor.execute("CREATE TEMPORARY TABLE tt (id INT)")
        cursor.execute("INSERT INTO t VALUES (2, NULL)")
        cursor.execute("INSERT INTO tt VALUES (2)")
        cursor.execute("UPDATE m SET id = id + 10")
        cursor.execute("DROP TEMPORARY TABLE tt")
        connection.rollback()
    items, _ = read_to_end(mariadb, source, position)
    rows = [(c.table.name, c.op, c.after) for c in changes_of(items)]
    assert rows == [
        ("m", "c", (b"1",)),
        ("ar", "c", (b"1",)),
        ("m", "c", (b"2",)),
        ("m", "c", (b"3",)),
        ("m", "u", (b"11",)),
        ("m", "u", (b"12",)),
        ("m", "u", (b"13",)),
    ]


@pytest.mark.parametrize("cut", range(7))
def test_an_xa_transaction_counts_when_it_is_committed(
    mariadb: MariaDB, database: str, cut: int
) -> None:
    """The stream is opened anew after `cut` positions, also between prepare and commit."""
    source, position = begin(mariadb, database, T)
    with mariadb.connect(database) as connection, connection.cursor() as cursor:
        for name, end in (("x1", "COMMIT"), ("x2", "ROLLBACK"), ("x3", "COMMIT")):
            cursor.execute(f"XA START '{database}{name}'")
            cursor.execute(f"INSERT INTO t VALUES ({name[1]}, NULL), ({name[1]}0, NULL)")
            cursor.execute(f"XA END '{database}{name}'")
            cursor.execute(f"XA PREPARE '{database}{name}'")
            with mariadb.connect(database) as other, other.cursor() as also:
                also.execute(f"INSERT INTO t VALUES ({name[1]}00, NULL)")
                also.execute("FLUSH BINARY LOGS")
            cursor.execute(f"XA {end} '{database}{name}'")
        cursor.execute(f"XA START '{database}x4'")
        cursor.execute("INSERT INTO t VALUES (4, NULL)")
        cursor.execute(f"XA END '{database}x4'")
        cursor.execute(f"XA COMMIT '{database}x4' ONE PHASE")
    stop, seen = end_of(mariadb), []
    stops = 0
    while place_of(position) < stop:
        stream = source.stream(position)
        for item in stream:
            if isinstance(item, Part):
                seen += [c.after for c in item.changes]
            assert not isinstance(item, Chunk)
            position = item.position
            stops += 1
            if stops == cut or place_of(position) >= stop:
                break
        stream.close()  # type: ignore[attr-defined]
    expected = [100, 1, 10, 200, 300, 3, 30, 4]
    assert seen == [one(number) for number in expected]
    assert not position.get("xa")


def test_an_xa_transaction_from_before_is_not_forgotten(
    mariadb: MariaDB, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "XA_WAIT_S", 0.2)
    source, _ = begin(mariadb, database, T)
    name = f"{database}old"
    with mariadb.connect(database) as connection, connection.cursor() as cursor:
        cursor.execute(f"XA START '{name}'")
        cursor.execute("INSERT INTO t VALUES (1, NULL)")
        cursor.execute(f"XA END '{name}'")
        cursor.execute(f"XA PREPARE '{name}'")
        with pytest.raises(CaptureError, match="prepared"):
            source.snapshot()
        file, at, *_ = mariadb.query("SHOW MASTER STATUS")[0]
        cursor.execute(f"XA COMMIT '{name}'")
    with pytest.raises(PositionLostError, match="XA transaction"):
        told(mariadb, source, {"file": file, "pos": at})


def test_a_large_transaction_comes_in_parts(mariadb: MariaDB, database: str) -> None:
    source, position = begin(mariadb, database, T)
    mariadb.query("INSERT INTO t SELECT seq, REPEAT('v', 50) FROM seq_1_to_30000", database)
    mariadb.query("INSERT INTO t VALUES (0, NULL)", database)
    items, reached = read_to_end(mariadb, source, position)
    parts = [item for item in items if isinstance(item, Part)]
    assert len(parts) > 5
    assert [part.is_first for part in parts] == [True, *[False] * (len(parts) - 2), True]
    assert [part.is_last for part in parts] == [*[False] * (len(parts) - 2), True, True]
    assert len({part.transaction for part in parts}) == 2
    assert [c.after[0] for part in parts[:-1] for c in part.changes if c.after] == [
        b"%d" % i for i in range(1, 30001)
    ]
    assert place_of(reached) >= place_of(parts[-1].position)


def test_more_than_is_kept_in_memory_is_handed_on_early(mariadb: MariaDB, database: str) -> None:
    source, position = begin(mariadb, database, T, options={"held_max_bytes": "65536"})
    mariadb.query("INSERT INTO t SELECT seq, REPEAT('v', 50) FROM seq_1_to_20000", database)
    items, _ = read_to_end(mariadb, source, position)
    parts = [item for item in items if isinstance(item, Part)]
    assert [part.is_first for part in parts].count(True) == 1
    assert parts[0].is_first
    assert [part.is_last for part in parts].count(True) == 1
    assert parts[-1].is_last
    assert sum(len(part.changes) for part in parts) == 20000


def test_truncate_and_other_ways_to_empty_a_table(mariadb: MariaDB, database: str) -> None:
    source, position = begin(
        mariadb, database, T, "CREATE TABLE mem (id INT PRIMARY KEY) ENGINE=MEMORY"
    )
    mariadb.query("TRUNCATE TABLE t", database)
    mariadb.query("INSERT INTO t VALUES (1, 'x')", database)
    mariadb.query(f"TRUNCATE /* now */ `{database}` . `t`", database)
    mariadb.query("INSERT INTO t VALUES (1, 'x')", database)
    mariadb.query("DELETE FROM t", database)
    items, _ = read_to_end(mariadb, source, position)
    changes = changes_of(items)
    assert [c.op for c in changes] == ["t", "c", "t", "c", "d"]
    assert all(c.table.key == ("id",) and len(c.table.columns) == 2 for c in changes)
    assert changes[2].before is None
    assert changes[2].after is None


def test_a_change_logged_as_a_statement_stops_the_capture(mariadb: MariaDB, database: str) -> None:
    source, position = begin(mariadb, database, T)
    with mariadb.connect(database) as connection, connection.cursor() as cursor:
        cursor.execute("SET binlog_format = 'STATEMENT'")
        cursor.execute("INSERT INTO t VALUES (1, NULL)")
    with pytest.raises(CaptureError, match="logged as a statement") as caught:
        told(mariadb, source, position)
    assert "binlog_format=ROW" in caught.value.advice
    skipping = source_of(mariadb, database, options={"statements": "skip"})
    assert told(mariadb, skipping, position) == []
    elsewhere = source_of(mariadb, database, include=(f"{database}.other",))
    assert told(mariadb, elsewhere, position) == []


@pytest.mark.parametrize("image", ["MINIMAL", "NOBLOB"])
def test_rows_that_a_session_logs_in_part(mariadb: MariaDB, database: str, image: str) -> None:
    table = "CREATE TABLE t (id INT PRIMARY KEY, a INT, b TEXT)"
    source, position = begin(mariadb, database, table)
    with mariadb.connect(database) as connection, connection.cursor() as cursor:
        cursor.execute("INSERT INTO t VALUES (1, 2, 'long')")
        cursor.execute(f"SET binlog_row_image = '{image}'")
        cursor.execute("UPDATE t SET a = 3")
        cursor.execute("DELETE FROM t")
    _, update, delete = told(mariadb, source, position)
    gone = b'"__debezium_unavailable_value"'
    if image == "MINIMAL":
        assert update == ("u", (b"1", b"null", b"null"), (gone, b"3", gone))
        assert delete == ("d", (b"1", b"null", b"null"), None)
    else:
        assert update == ("u", (b"1", b"2", b"null"), (b"1", b"3", gone))
        assert delete == ("d", (b"1", b"3", b"null"), None)


def test_create_table_select_partitions_and_renames(mariadb: MariaDB, database: str) -> None:
    source, position = begin(mariadb, database, T, "INSERT INTO t VALUES (1, 'x'), (2, 'y')")
    statements = [
        "CREATE TABLE copied (PRIMARY KEY (id)) SELECT * FROM t",
        "RENAME TABLE t TO u",
        "UPDATE u SET v = 'z' WHERE id = 1",
        "CREATE TABLE p (id INT PRIMARY KEY) PARTITION BY HASH (id) PARTITIONS 4",
        "INSERT INTO p VALUES (1), (2), (3), (4), (5)",
        "UPDATE p SET id = id + 10 ORDER BY id",
        "CREATE OR REPLACE TABLE copied (w INT, id INT PRIMARY KEY) SELECT 5 AS w, id FROM u",
    ]
    for statement in statements:
        mariadb.query(statement, database)
    items, _ = read_to_end(mariadb, source, position)
    changes = changes_of(items)
    ops = [(c.table.name, c.op) for c in changes]
    assert ops[:3] == [("copied", "c"), ("copied", "c"), ("u", "u")]
    moved = [c.after[0] for c in changes if c.table.name == "p" and c.op == "u" and c.after]
    assert sorted(moved) == [b"11", b"12", b"13", b"14", b"15"]
    assert [c.after for c in changes[-2:]] == [(b"5", b"1"), (b"5", b"2")]


def test_the_statement_is_told_on_request(mariadb: MariaDB, database: str) -> None:
    source, position = begin(mariadb, database, T, options={"query": "true"})
    mariadb.query("INSERT INTO t VALUES (1, 'said \"so\"')", database)
    items, _ = read_to_end(mariadb, source, position)
    (change,) = changes_of(items)
    assert orjson.loads(change.source)["query"] == "INSERT INTO t VALUES (1, 'said \"so\"')"


def test_only_the_chosen_tables_are_told(mariadb: MariaDB, database: str) -> None:
    tables = ("orders", "order_items", "secrets")
    ddl = [f"CREATE TABLE {name} (id INT PRIMARY KEY)" for name in tables]
    source, position = begin(
        mariadb, database, *ddl, include=("order*",), exclude=(f"{database}.order_items",)
    )
    for name in tables:
        mariadb.query(f"INSERT INTO {name} VALUES (1)", database)
    items, reached = read_to_end(mariadb, source, position)
    assert [c.table.full_name for c in changes_of(items)] == [f"{database}.orders"]
    assert [table.name for table in source.tables()] == ["orders"]
    assert place_of(reached) >= end_of(mariadb)
