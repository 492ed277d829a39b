"""Changes of SQLite in the stream: whatever users write comes out as it went in."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import orjson
import pytest

from penstock.capture.source import Change, ChunkRequest, Part, PositionLostError
from tests.capture.sqlite.model import Replica, assert_agree, opened, user


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shop.db"


def ops(changes: list[Change]) -> str:
    return "".join(change.op for change in changes)


def values(change: Change) -> list[object]:
    assert change.after is not None
    return [orjson.loads(part) for part in change.after]


@pytest.mark.parametrize("wal", [True, False])
def test_inserts_updates_and_deletes(path: Path, wal: bool) -> None:
    with user(path, wal=wal) as db, opened(path) as source:
        db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT, price REAL)")
        db.execute("INSERT INTO orders VALUES (1, 'before', 1.5)")
        source.setup()
        replica = Replica()
        replica.snapshot(source)
        assert replica.tables == {
            "orders": {(b"1",): {"id": b"1", "item": b'"before"', "price": b"1.5"}}
        }
        db.execute("INSERT INTO orders VALUES (2, 'ä \"quoted\"\n', 2)")
        db.execute("UPDATE orders SET price = price * 2, item = NULL WHERE id = 1")
        db.execute("DELETE FROM orders WHERE id = 2")
        replica.follow(source)
        assert ops(replica.changes) == "cud"
        created, updated, deleted = replica.changes
        assert created.before is None
        assert created.after == (b"2", '"ä \\"quoted\\"\\n"'.encode(), b"2.0")
        assert (updated.before, updated.after) == (
            (b"1", b'"before"', b"1.5"),
            (b"1", b"null", b"3.0"),
        )
        assert (deleted.before, deleted.after) == (created.after, None)
        block = orjson.loads(created.source)
        assert (block["connector"], block["name"], block["db"], block["table"]) == (
            *("sqlite", "shop", "shop.db", "orders"),
        )
        assert block["snapshot"] == "false"
        assert created.ts_us == block["ts_us"] == block["ts_ms"] * 1000
        assert_agree(path, source, replica)


def test_values_of_every_kind_are_told_as_they_are(path: Path) -> None:
    given = [
        None, 0, -1, 2**63 - 1, -(2**63), 0.1, 1e300, 5e-324, 1.7976931348623157e308,
        math.inf, -math.inf, "", "text\0inside", "\u2028\x7f", b"", b"\x00\xff", 1 / 3, -0.0,
    ]  # fmt: skip
    with user(path) as db, opened(path) as source:
        db.execute(
            "CREATE TABLE t (id INTEGER PRIMARY KEY, i INT, r REAL, t TEXT, b BLOB, n, d DECIMAL)"
        )
        source.setup()
        replica = Replica()
        replica.snapshot(source)
        for value in given:
            db.execute("INSERT INTO t (i, r, t, b, n, d) VALUES (?1, ?1, ?1, ?1, ?1, ?1)", (value,))
        db.execute("INSERT INTO t (n) VALUES (CAST(x'61ff62' AS TEXT))")
        replica.follow(source)
        untyped = [values(change)[5] for change in replica.changes]
        assert untyped == [
            *given[:9], "Infinity", "-Infinity", *given[11:14], "", "AP8=", 1 / 3, -0.0, "a�b",
        ]  # fmt: skip
        assert_agree(path, source, replica)
        again = Replica()
        again.snapshot(source)
        assert again.tables == replica.tables


def test_writes_of_all_sorts(path: Path) -> None:
    with user(path) as db, opened(path) as source:
        db.executescript("""
            CREATE TABLE wide ("a ""b" TEXT, [c d] INT, PRIMARY KEY ("a ""b", [c d])) WITHOUT ROWID;
            CREATE TABLE parent (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE);
            CREATE TABLE child (id INTEGER PRIMARY KEY, parent REFERENCES parent ON DELETE CASCADE
                ON UPDATE CASCADE, twice INT GENERATED ALWAYS AS (parent * 2) STORED,
                virtual TEXT AS (parent || 'x'));
            CREATE TABLE loose (rowid TEXT, x);
            CREATE TABLE strict (id TEXT PRIMARY KEY, n INTEGER NOT NULL) STRICT;
            CREATE VIEW seen AS SELECT * FROM loose;
            CREATE VIRTUAL TABLE words USING fts5(body);
        """)
        source.setup()
        assert [t.name for t in source.tables()] == ["child", "loose", "parent", "strict", "wide"]
        replica = Replica()
        replica.snapshot(source)
        db.executescript("""
            PRAGMA foreign_keys = ON;
            INSERT INTO wide VALUES ('x', 1), ('y', 2), ('x', 3);
            UPDATE wide SET [c d] = [c d] + 10;
            INSERT INTO parent (name) VALUES ('a'), ('b'), ('c');
            INSERT INTO child (id, parent) VALUES (1, 1), (2, 1), (3, 2), (4, 3);
            DELETE FROM parent WHERE id = 1;
            UPDATE parent SET id = 20 WHERE id = 2;
            INSERT INTO parent (id, name) VALUES (20, 'b2') ON CONFLICT (id)
                DO UPDATE SET name = excluded.name;
            INSERT INTO parent (name) VALUES ('c') ON CONFLICT DO NOTHING;
            INSERT OR IGNORE INTO parent (name) VALUES ('c'), ('d');
            INSERT OR REPLACE INTO parent (id, name) VALUES (3, 'd');
            INSERT OR REPLACE INTO strict VALUES ('k', 1), ('k', 2);
            INSERT INTO loose VALUES ('1', 1), ('1', 1), (NULL, NULL);
            DELETE FROM loose WHERE _rowid_ = 2;
            UPDATE loose SET _rowid_ = 9 WHERE _rowid_ = 1;
            INSERT INTO words VALUES ('not captured');
            DELETE FROM child;
        """)
        replica.follow(source)
        assert_agree(path, source, replica)
        assert {change.table.name for change in replica.changes} == {
            *("child", "loose", "parent", "strict", "wide"),
        }
        loose = next(table for table in source.tables() if table.name == "loose")
        assert loose.key == ("_rowid_",)


@pytest.mark.parametrize("recursive", [True, False])
def test_rows_that_replace_removes_are_deleted(path: Path, recursive: bool) -> None:
    with user(path) as db, opened(path) as source:
        db.execute(f"PRAGMA recursive_triggers = {int(recursive)}")
        db.executescript("""
            CREATE TABLE u (id INTEGER PRIMARY KEY, a TEXT COLLATE NOCASE UNIQUE, b INT, c INT);
            CREATE UNIQUE INDEX bc ON u (b, c) WHERE c > 0;
        """)
        source.setup()
        replica = Replica()
        replica.snapshot(source)
        db.executescript("""
            INSERT INTO u VALUES (1, 'x', 1, 1), (2, 'y', 2, 2), (3, 'z', 3, 3), (4, 'w', 4, -4);
            INSERT OR REPLACE INTO u VALUES (5, 'X', 2, 2);
            INSERT OR REPLACE INTO u VALUES (6, 'new', 4, -4);
            UPDATE OR REPLACE u SET a = 'Z' WHERE id = 5;
            UPDATE OR REPLACE u SET id = 4 WHERE id = 6;
            INSERT OR IGNORE INTO u VALUES (7, 'z', 9, 9);
            INSERT INTO u VALUES (8, 'q', 8, 8);
        """)
        with pytest.raises(sqlite3.IntegrityError):
            db.execute("INSERT INTO u VALUES (9, 'q', 9, 9)")
        replica.follow(source)
        assert_agree(path, source, replica)
        # Rows 1 and 2 by the first REPLACE, 3 by the third.
        deletes = [change.before for change in replica.changes if change.op == "d"]
        assert {row[0] for row in deletes if row is not None} >= {b"1", b"2", b"3"}
        if not recursive:
            assert len(deletes) == 3


def test_what_is_rolled_back_is_never_told(path: Path) -> None:
    with user(path) as db, opened(path) as source:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v)")
        source.setup()
        replica = Replica()
        replica.snapshot(source)
        db.execute("BEGIN")
        db.execute("INSERT INTO t VALUES (1, 'open')")
        replica.follow(source)
        assert replica.changes == []
        db.execute("SAVEPOINT s")
        db.execute("INSERT INTO t VALUES (2, 'gone')")
        db.execute("ROLLBACK TO s")
        db.execute("COMMIT")
        replica.follow(source)
        assert [values(change) for change in replica.changes] == [[1, "open"]]


def test_a_position_is_where_it_goes_on(path: Path) -> None:
    with user(path) as db:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v)")
        with opened(path) as source:
            source.setup()
            replica = Replica()
            replica.snapshot(source)
        for number in range(5):
            db.execute("INSERT INTO t VALUES (?, 'x')", (number,))
            with opened(path) as source:
                source.setup()
                replica.follow(source)
                source.confirm(replica.position)
        assert [values(change)[0] for change in replica.changes] == list(range(5))


def test_confirmed_changes_are_deleted_and_an_old_position_is_lost(path: Path) -> None:
    with user(path) as db, opened(path) as source:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v)")
        source.setup()
        replica = Replica()
        replica.snapshot(source)
        begin = replica.position
        db.execute("BEGIN")
        db.executemany("INSERT INTO t VALUES (?, 'x')", [(n,) for n in range(12_000)])
        db.execute("COMMIT")
        replica.follow(source)
        source.confirm(replica.position)
        status = source.status()
        assert status.position == replica.position
        assert status.details["changes kept"] == "0"
        (left,) = db.execute('SELECT count(*) FROM "_penstock_shop__log_1"').fetchone()
        assert left == 0
        with pytest.raises(PositionLostError, match="deleted already"):
            next(iter(source.stream(begin)))
        # The sequence goes on where it was.
        db.execute("DELETE FROM t WHERE id < 3")
        replica.follow(source)
        assert_agree(path, source, replica)
        source.remove()
        with pytest.raises(PositionLostError, match="not there"):
            next(iter(source.stream(replica.position)))
        source.setup()
        with pytest.raises(PositionLostError, match="gone"):
            next(iter(source.stream(replica.position)))


def test_chunks_are_exact_at_their_place(path: Path) -> None:
    with user(path) as db, opened(path) as source:
        db.execute("CREATE TABLE t (a TEXT, b INT, v, PRIMARY KEY (a, b))")
        source.setup()
        replica = Replica()
        replica.snapshot(source)
        db.executemany("INSERT INTO t VALUES (?, ?, 0)", [(str(n % 7), n) for n in range(100)])
        after, found = None, []
        for number in range(20):
            source.ask(ChunkRequest(str(number), "t", after, 13, "b != 50"))
            db.execute("UPDATE t SET v = v + 1")
            replica.follow(source)
            chunk = replica.chunks[-1]
            assert chunk.problem == ""
            # At its place nothing is overtaken: its rows are what the changes so far say.
            for row in chunk.rows:
                assert replica.tables["t"][row[:2]]["v"] == row[2]
            found += chunk.rows
            after = chunk.last_key
            if chunk.is_last:
                break
        assert [row[:2] for row in found] == sorted(
            (key for key in replica.tables["t"] if key[1] != b"50"),
            key=lambda key: (key[0], int(key[1])),
        )
        source.ask(ChunkRequest("x", "nowhere", None, 10))
        source.ask(ChunkRequest("y", "t", None, 10, "no such column"))
        replica.follow(source)
        assert [chunk.is_last for chunk in replica.chunks[-2:]] == [True, True]
        assert "not captured" in replica.chunks[-2].problem
        assert "cannot be read" in replica.chunks[-1].problem


USERS_TRIGGERS = """
    CREATE TRIGGER touch AFTER UPDATE ON t BEGIN
        UPDATE t SET touched = coalesce(touched, 0) + 1 WHERE id = new.id;
    END;
    CREATE TRIGGER shout AFTER INSERT ON t WHEN new.a NOTNULL BEGIN
        UPDATE t SET a = upper(a) WHERE id = new.id;
    END;
    CREATE TRIGGER refuse AFTER INSERT ON t WHEN new.a = 'refuse' BEGIN
        DELETE FROM t WHERE id = new.id;
    END;
    CREATE TRIGGER move AFTER INSERT ON t WHEN new.a = 'move' BEGIN
        UPDATE t SET id = id + 1000 WHERE id = new.id;
    END;
    CREATE TRIGGER keep AFTER DELETE ON t WHEN old.a = 'KEEP' BEGIN
        INSERT INTO t (id, a) VALUES (old.id, NULL);
    END;
    CREATE TRIGGER stay AFTER UPDATE OF id ON t WHEN old.a = 'STAY' BEGIN
        INSERT INTO t (id, a) VALUES (old.id, NULL);
    END;
    CREATE TRIGGER vanish AFTER UPDATE ON t WHEN new.a = 'vanish' BEGIN
        DELETE FROM t WHERE id = new.id;
    END;
"""


@pytest.mark.parametrize("key", ["INTEGER", "INT", "TEXT"])
@pytest.mark.parametrize("end", ["", "WITHOUT ROWID"])
@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_users_triggers_change_the_same_rows(path: Path, key: str, end: str, first: str) -> None:
    with user(path) as db, opened(path) as source:
        db.execute(f"CREATE TABLE t (id {key} NOT NULL PRIMARY KEY, a, touched INT) {end}")
        if first == "theirs":
            db.executescript(USERS_TRIGGERS)
        source.setup()
        if first == "ours":
            db.executescript(USERS_TRIGGERS)
        replica = Replica()
        replica.snapshot(source)
        for statement in (
            "INSERT INTO t (id, a) VALUES (1, 'x'), (2, 'refuse'), (3, 'move'), (4, 'keep')",
            "INSERT INTO t (id, a) VALUES (5, 'stay'), (6, 'gone'), (7, 'other')",
            "UPDATE t SET a = 'y' WHERE id = 1",
            "DELETE FROM t WHERE id = 4",
            "UPDATE t SET id = 50 WHERE id = 5",
            "UPDATE t SET a = 'vanish' WHERE id = 6",
            "UPDATE t SET id = 70, a = 'vanish' WHERE id = 7",
            "REPLACE INTO t (id, a) VALUES (1, 'again')",
        ):
            db.execute(statement)
            replica.follow(source)
            assert_agree(path, source, replica)


def test_users_do_not_notice_the_triggers(path: Path) -> None:
    with user(path) as db, opened(path) as source:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a UNIQUE)")
        source.setup()
        # As careful programs open databases they do not trust.
        db.execute("PRAGMA trusted_schema = OFF")
        db.execute("PRAGMA cell_size_check = ON")
        db.execute("PRAGMA foreign_keys = ON")
        replica = Replica()
        replica.snapshot(source)
        cursor = db.execute("INSERT INTO t VALUES (41, 'x'), (42, 'y')")
        assert (cursor.rowcount, cursor.lastrowid) == (2, 42)
        assert db.execute("SELECT last_insert_rowid(), changes()").fetchone() == (42, 2)
        assert db.execute("REPLACE INTO t VALUES (43, 'x') RETURNING id").fetchall() == [(43,)]
        assert db.execute("UPDATE t SET a = id RETURNING a").fetchall() == [(42,), (43,)]
        assert db.execute("DELETE FROM t WHERE id = 42").rowcount == 1
        replica.follow(source)
        assert_agree(path, source, replica)
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_large_transaction_comes_in_parts(path: Path) -> None:
    with user(path) as db, opened(path) as source:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a)")
        db.execute("CREATE TABLE u (id INTEGER PRIMARY KEY)")
        source.setup()
        with source.snapshot() as snapshot:
            position = snapshot.position
        db.execute("BEGIN")
        for number in range(4000):
            db.execute(
                "INSERT INTO t VALUES (?, ?)", (number, "x" * 50_000 if number > 3990 else "")
            )
            db.execute("INSERT INTO u VALUES (?)", (number,))
        db.execute("COMMIT")
        parts = []
        for item in source.stream(position):
            assert isinstance(item, Part)
            parts.append(item)
            if item.is_last:
                break
        assert len(parts) > 1
        assert [part.is_first for part in parts] == [True, *[False] * (len(parts) - 1)]
        assert len({part.transaction for part in parts}) == 1
        told = [(change.table.name, values(change)[0]) for part in parts for change in part.changes]
        assert told == [(name, number) for number in range(4000) for name in ("t", "u")]
        assert parts[-1].position["seq"] == 8000


def test_a_writer_that_is_never_done_keeps_no_transaction_open(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.capture.sqlite.stream._CHANGES_FIRST", 10)
    monkeypatch.setattr("penstock.capture.sqlite.stream._CHANGES_MAX", 10)
    with user(path) as db, opened(path) as source:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
        source.setup()
        with source.snapshot() as snapshot:
            position = snapshot.position
        sizes: list[list[int]] = [[]]
        for _ in range(25):
            db.execute("INSERT INTO t DEFAULT VALUES")
        for item in source.stream(position):
            if not isinstance(item, Part):
                continue
            sizes[-1].append(len(item.changes))
            if item.is_last:
                sizes.append([])
            if len(sizes) == 3:
                break
            # More than is read at a time, each time.
            for _ in range(15):
                db.execute("INSERT INTO t DEFAULT VALUES")
        assert sizes[0] == [10, 10, 5]
        assert sizes[1] == [10, 10, 10, 10, 5]
