"""Users alter, make, drop and rebuild tables while they are captured."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import orjson
import pytest

from penstock.capture.source import CaptureError, Change
from tests.capture.sqlite.model import Replica, assert_agree, opened, user


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shop.db"


def after(change: Change) -> dict[str, object]:
    assert change.after is not None
    return {
        column.name: orjson.loads(part)
        for column, part in zip(change.table.columns, change.after, strict=True)
    }


def ops(replica: Replica) -> str:
    return "".join(change.op for change in replica.changes)


def test_a_new_column_arrives_with_all_its_values(path: Path) -> None:
    with user(path) as db, opened(path) as source:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a)")
        source.setup()
        replica = Replica()
        replica.snapshot(source)
        db.execute("INSERT INTO t VALUES (1, 'old'), (2, 'old'), (3, 'old')")
        db.execute("UPDATE t SET a = 'older' WHERE id = 1")
        # Nobody has read any of that; now the table changes, and is written to at once.
        db.execute("ALTER TABLE t ADD COLUMN b TEXT DEFAULT 'none'")
        db.execute("UPDATE t SET b = 'new', a = 'changed' WHERE id = 2")
        db.execute("INSERT INTO t VALUES (4, 'x', 'y'), (5, 'x', 'y')")
        db.execute("UPDATE t SET id = 50 WHERE id = 5")
        db.execute("DELETE FROM t WHERE id IN (3, 4)")
        replica.follow(source)
        told = [(change.op, after(change)) for change in replica.changes if change.after]
        # Under the old definition: what happened then, to the row, with the names of then.
        assert told[:4] == [
            ("c", {"id": 1, "a": "old"}),
            ("c", {"id": 2, "a": "old"}),
            ("c", {"id": 3, "a": "old"}),
            ("u", {"id": 1, "a": "older"}),
        ]
        # Then the rows that were written since, as they are now.
        assert sorted(str(row) for _, row in told[4:]) == [
            "{'id': 2, 'a': 'changed', 'b': 'new'}",
            "{'id': 50, 'a': 'x', 'b': 'y'}",
        ]
        db.execute("UPDATE t SET b = 'set' WHERE id = 1")
        replica.follow(source)
        assert_agree(path, source, replica)
        assert replica.changes[-1].op == "u"
        assert after(replica.changes[-1]) == {"id": 1, "a": "older", "b": "set"}


def test_a_column_that_is_renamed(path: Path) -> None:
    with user(path) as db, opened(path) as source:
        db.execute("CREATE TABLE t (id TEXT PRIMARY KEY, a)")
        source.setup()
        replica = Replica()
        replica.snapshot(source)
        db.execute("INSERT INTO t VALUES ('1', 'then'), ('2', 'then')")
        db.execute("ALTER TABLE t RENAME COLUMN a TO b")
        db.execute("ALTER TABLE t RENAME COLUMN id TO key")
        db.execute("UPDATE t SET b = 'now' WHERE key = '1'")
        db.execute("DELETE FROM t WHERE key = '2'")
        replica.follow(source)
        assert [after(change) for change in replica.changes if change.after] == [
            {"id": "1", "a": "then"},
            {"id": "2", "a": "then"},
            {"key": "1", "b": "now"},
        ]
        assert_agree(path, source, replica)


def test_a_column_is_dropped_by_our_own_command(path: Path) -> None:
    with user(path) as db, opened(path) as source:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a, b)")
        source.setup()
        replica = Replica()
        replica.snapshot(source)
        db.execute("INSERT INTO t VALUES (1, 2, 3)")
        with pytest.raises(sqlite3.OperationalError, match="_penstock_shop__1"):
            db.execute("ALTER TABLE t DROP COLUMN b")
        source.alter("ALTER TABLE t DROP COLUMN b")
        db.execute("UPDATE t SET a = 20")
        replica.follow(source)
        assert [after(change) for change in replica.changes] == [
            {"id": 1, "a": 2, "b": 3},
            {"id": 1, "a": 20},
        ]
        assert_agree(path, source, replica)
        with pytest.raises(CaptureError, match="only ALTER TABLE"):
            source.alter("DELETE FROM t")
        with pytest.raises(CaptureError, match="no such column"):
            source.alter("ALTER TABLE t DROP COLUMN nowhere")
        db.execute("UPDATE t SET a = 21")
        replica.follow(source)
        assert_agree(path, source, replica)


def test_triggers_that_the_user_drops_come_back(path: Path) -> None:
    with user(path) as db, opened(path) as source:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a, b)")
        source.setup()
        replica = Replica()
        replica.snapshot(source)
        db.execute("INSERT INTO t VALUES (1, 2, 3), (2, 3, 4)")
        db.executescript("""
            BEGIN;
            DROP TRIGGER _penstock_shop__1_insert;
            DROP TRIGGER _penstock_shop__1_update;
            DROP TRIGGER _penstock_shop__1_delete;
            ALTER TABLE t DROP COLUMN b;
            COMMIT;
            DELETE FROM t WHERE id = 1;
            INSERT INTO t VALUES (3, 30);
        """)
        replica.follow(source)
        assert ops(replica) == "cctrr"
        db.execute("UPDATE t SET a = 20")
        replica.follow(source)
        assert_agree(path, source, replica)


def test_a_table_that_is_rebuilt_is_told_again(path: Path) -> None:
    with user(path) as db, opened(path) as source:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a)")
        source.setup()
        replica = Replica()
        replica.snapshot(source)
        db.execute("BEGIN")
        db.executemany("INSERT INTO t VALUES (?, 'x')", [(n,) for n in range(5000)])
        db.execute("COMMIT")
        db.executescript("""
            BEGIN;
            CREATE TABLE new_t (id INTEGER PRIMARY KEY, a TEXT NOT NULL, more DEFAULT 7);
            INSERT INTO new_t (id, a) SELECT id, a || '!' FROM t WHERE id > 10;
            DROP TABLE t;
            ALTER TABLE new_t RENAME TO t;
            COMMIT;
            UPDATE t SET more = 8 WHERE id = 20;
        """)
        replica.follow(source)
        assert_agree(path, source, replica)
        assert ops(replica) == "c" * 5000 + "t" + "r" * 4989
        assert orjson.loads(replica.changes[-1].source)["snapshot"] == "incremental"


def test_reading_again_goes_on_after_a_restart_and_beside_changes(path: Path) -> None:
    with user(path) as db:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a)")
        replica = Replica()
        with opened(path) as source:
            source.setup()
            replica.snapshot(source)
        db.execute("CREATE TABLE u (id INTEGER PRIMARY KEY, a)")
        db.execute("BEGIN")
        db.executemany("INSERT INTO u VALUES (?, 'x')", [(n,) for n in range(20_000)])
        db.execute("COMMIT")
        for looks in range(1, 7):
            with opened(path) as source:
                replica.follow(source, looks=looks)
                db.execute("UPDATE u SET a = a || ? WHERE id % 100 = ?", (str(looks), looks))
                db.execute("DELETE FROM u WHERE id % 1000 = ?", (looks,))
                if looks == 3:
                    assert replica.position["reading"]
                    db.execute("ALTER TABLE u ADD COLUMN b DEFAULT 'b'")
                    db.execute("UPDATE u SET b = 'c' WHERE id % 50 = 0")
        with opened(path) as source:
            replica.follow(source)
            assert "reading" not in replica.position
            # Rows that were read before the column came do not know its default.
            for row in replica.tables["u"].values():
                row.setdefault("b", b'"b"')
            assert_agree(path, source, replica)


def test_tables_that_come_and_go(path: Path) -> None:
    with user(path) as db, opened(path, exclude=("hidden*",)) as source:
        source.setup()
        replica = Replica()
        replica.snapshot(source)
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
        db.execute("CREATE TABLE hidden_t (id INTEGER PRIMARY KEY)")
        db.execute("INSERT INTO t VALUES (1), (2)")
        replica.follow(source)
        assert ops(replica) == "rr"
        db.execute("INSERT INTO t VALUES (3)")
        db.execute("DROP TABLE t")
        replica.follow(source)
        source.confirm(replica.position)
        assert ops(replica) == "rrc"
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, other)")
        db.execute("INSERT INTO t VALUES (7, 8)")
        replica.follow(source)
        assert ops(replica) == "rrctr"
        db.execute("ALTER TABLE t RENAME TO renamed")
        db.execute("INSERT INTO renamed VALUES (8, 9)")
        replica.follow(source)
        assert_agree(path, source, replica)
        assert {t.name for t in source.tables()} == {"renamed"}


def test_other_tables_are_chosen(path: Path) -> None:
    with user(path) as db:
        db.execute("CREATE TABLE a (id INTEGER PRIMARY KEY)")
        db.execute("CREATE TABLE b (id INTEGER PRIMARY KEY)")
        replica = Replica()
        with opened(path, include=("a",)) as source:
            source.setup()
            replica.snapshot(source)
            db.execute("INSERT INTO a VALUES (1)")
            db.execute("INSERT INTO b VALUES (1)")
            replica.follow(source)
            assert set(replica.tables) == {"a"}
        with opened(path, include=("b",)) as source:
            source.setup()
            db.execute("INSERT INTO a VALUES (2)")
            db.execute("INSERT INTO b VALUES (2)")
            replica.follow(source)
            assert_agree(path, source, replica)
        names = {
            name
            for (name,) in db.execute("SELECT tbl_name FROM sqlite_schema WHERE type = 'trigger'")
        }
        assert names == {"b"}


def test_a_unique_index_that_comes_later(path: Path) -> None:
    with user(path) as db, opened(path) as source:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a)")
        source.setup()
        replica = Replica()
        replica.snapshot(source)
        db.execute("INSERT INTO t VALUES (1, 'x'), (2, 'y')")
        replica.follow(source)
        db.execute("CREATE UNIQUE INDEX i ON t (a)")
        replica.follow(source)
        db.execute("REPLACE INTO t VALUES (3, 'x')")
        replica.follow(source)
        assert ops(replica) == "ccdc"
        assert_agree(path, source, replica)


def test_a_unique_index_by_which_a_row_is_replaced_before_anyone_looks(path: Path) -> None:
    with user(path) as db, opened(path) as source:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a)")
        source.setup()
        replica = Replica()
        replica.snapshot(source)
        db.execute("INSERT INTO t VALUES (1, 'x'), (2, 'y')")
        replica.follow(source)
        db.execute("CREATE UNIQUE INDEX i ON t (a)")
        # The triggers do not know of the index yet.
        db.execute("REPLACE INTO t VALUES (3, 'x')")
        replica.follow(source)
        assert_agree(path, source, replica)
        # Once they do, nothing is read again.
        count = len(ops(replica))
        db.execute("REPLACE INTO t VALUES (4, 'y')")
        db.execute("CREATE INDEX other ON t (a)")
        db.execute("REPLACE INTO t VALUES (5, 'x')")
        replica.follow(source)
        assert ops(replica)[count:] == "dcdc"
        assert_agree(path, source, replica)


def test_vacuum_numbers_rows_without_a_key_anew(path: Path) -> None:
    with user(path) as db, opened(path) as source:
        db.execute("CREATE TABLE t (a)")
        db.execute("CREATE TABLE keyed (id INTEGER PRIMARY KEY)")
        source.setup()
        replica = Replica()
        replica.snapshot(source)
        db.execute("INSERT INTO t VALUES (1), (2), (3), (4)")
        db.execute("INSERT INTO keyed VALUES (1), (7)")
        db.execute("DELETE FROM t WHERE a < 3")
        replica.follow(source)
        db.execute("VACUUM")
        db.execute("INSERT INTO t VALUES (5)")
        replica.follow(source)
        assert_agree(path, source, replica)
        assert {change.table.name for change in replica.changes if change.op == "t"} == {"t"}


def test_nothing_is_left_behind(path: Path) -> None:
    with user(path) as db:
        db.executescript("""
            CREATE TABLE t (id INTEGER PRIMARY KEY, a UNIQUE);
            CREATE TRIGGER mine AFTER INSERT ON t BEGIN SELECT 1; END;
        """)
        before = db.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema").fetchall()
        with opened(path) as source, opened(path, name="shop 2") as other:
            source.setup()
            other.setup()
            source.setup()
            db.execute("INSERT INTO t VALUES (1, 2)")
            for each in (source, other):
                replica = Replica()
                replica.snapshot(each)
                assert_agree(path, each, replica)
            gone = source.remove()
            assert "table _penstock_shop__changes" in gone
            assert source.remove() == []
            assert source.status().position is None
            db.execute("INSERT INTO t VALUES (2, 3)")
            replica.follow(other)
            assert_agree(path, other, replica)
            other.remove()
        left = db.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema").fetchall()
        assert left == before


def test_a_column_that_is_dropped_behind_sqlites_back(path: Path) -> None:
    """With legacy_alter_table SQLite drops a column that triggers name, and then refuses writes;
    the stream mends that as soon as it sees it."""
    with user(path) as db, opened(path) as source:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a, b)")
        source.setup()
        replica = Replica()
        replica.snapshot(source)
        db.execute("INSERT INTO t VALUES (1, 2, 3)")
        db.execute("PRAGMA legacy_alter_table = ON")
        db.execute("ALTER TABLE t DROP COLUMN b")
        with pytest.raises(sqlite3.OperationalError, match="no such column"):
            db.execute("UPDATE t SET a = 3")
        replica.follow(source)
        # A connection that saw the error sees the new triggers once it has read the table.
        db.execute("SELECT * FROM t").fetchall()
        db.execute("UPDATE t SET a = 4")
        replica.follow(source)
        assert after(replica.changes[-1]) == {"id": 1, "a": 4}
