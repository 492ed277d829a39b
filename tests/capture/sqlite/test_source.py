"""The source as a whole: URLs, checks, snapshots, waking up, and what happens to the file."""

from __future__ import annotations

import os
import select
import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.capture.source import (
    CaptureError,
    DatabaseUnreachableError,
    Idle,
    Part,
    PositionLostError,
    SourceSettings,
)
from penstock.capture.sources import open_source, shown
from penstock.capture.sqlite import watch as watching
from penstock.capture.sqlite.catalog import names_of
from penstock.capture.sqlite.source import SqliteSource
from penstock.capture.sqlite.tables import affinity, column_type
from penstock.capture.sqlite.watch import Watch
from tests.capture.sqlite.model import Replica, assert_agree, opened, user
from tests.waiting import eventually

TIMEOUT_S = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a shop?.db"


def url(path: Path) -> str:
    return f"sqlite:///{path}".replace("?", "%3F")


# ---- URLs ----------------------------------------------------------------------------------------


def test_sources_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative = open_source(SourceSettings("c", "sqlite:///some/shop%20x.db"))
    assert isinstance(relative, SqliteSource)
    assert relative.path == tmp_path.resolve() / "some" / "shop x.db"
    absolute = open_source(SourceSettings("c", f"SQLITE:///{tmp_path}/shop.db"))
    assert isinstance(absolute, SqliteSource)
    assert absolute.path == tmp_path.resolve() / "shop.db"
    for bad in ("", "shop.db", "oracle://x", "sqlite:shop.db"):
        with pytest.raises(CaptureError, match="no database that can be captured") as caught:
            open_source(SourceSettings("c", bad))
        assert "sqlite:///relative.db" in caught.value.advice
    for bad in ("sqlite://", "sqlite:///", "sqlite:///x?mode=ro", "sqlite:///:memory:"):
        with pytest.raises(CaptureError):
            open_source(SourceSettings("c", bad))


@pytest.mark.parametrize(
    ("scheme", "driver", "extra"),
    [("postgresql", "psycopg", "postgres"), ("mariadb", "pymysql", "mysql")],
)
def test_a_missing_driver_is_named(
    scheme: str, driver: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {driver!r}", name=driver)

    monkeypatch.setattr("penstock.capture.sources.import_module", missing)
    with pytest.raises(CaptureError, match=driver) as caught:
        open_source(SourceSettings("c", f"{scheme}://host/db"))
    assert caught.value.advice == f"Install it: pip install 'penstock[{extra}]'"


def test_passwords_are_not_shown() -> None:
    assert shown("oracle://me:secret@host:1/db") == "oracle://me:***@host:1/db"
    assert shown("oracle://me@host/db") == "oracle://me@host/db"
    assert shown("oracle://host/a@b") == "oracle://host/a@b"
    with pytest.raises(CaptureError) as caught:
        open_source(SourceSettings("c", "oracle://me:secret@host/db"))
    assert "secret" not in str(caught.value)


def test_names_of_captures_do_not_meet() -> None:
    names = ["a", "A", "a_b", "a__b", "a b", "a-b", "ä", "_", "1"]
    prefixes = [names_of(name).prefix for name in names]
    for one in prefixes:
        assert [other for other in prefixes if other.startswith(one)] == [one]


def test_types_follow_affinity() -> None:
    expected = {
        "INTEGER": "int64",
        "BIGINT": "int64",
        "VARCHAR(10)": "string",
        "CLOB": "string",
        "BLOB": "bytes",
        "": "string",
        "DOUBLE PRECISION": "double",
        "DECIMAL(10,5)": "double",
        "BOOLEAN": "int64",
        "DATE": "string",
        "DATETIME": "string",
        "FLOATING POINT": "int64",
    }
    assert {name: column_type(name).name for name in expected} == expected
    # SQLite's own example of its rule.
    assert affinity("FLOATING POINT") == "INTEGER"


# ---- checks and status ---------------------------------------------------------------------------


def test_checks(path: Path) -> None:
    with SqliteSource(SourceSettings("c", url(path))) as source:
        with pytest.raises(DatabaseUnreachableError, match=r"there is no .* yet"):
            source.check()
        with user(path, wal=False) as db:
            db.execute("CREATE TABLE loose (a)")
            db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a)")
            db.execute("CREATE UNIQUE INDEX lower ON t (lower(a))")
            many = ", ".join(f"c{n}" for n in range(1000))
            db.execute(f"CREATE TABLE wide (id INTEGER PRIMARY KEY, {many})")
            found = {check.name: check for check in source.check()}
            assert not found["journal mode"].ok
            assert "journal_mode=WAL" in found["journal mode"].remedy
            assert found["tables"].found == "loose, t"
            assert not found["key of loose"].ok
            assert not found["index lower of t"].ok
            assert not found["table wide"].ok
            assert found["table wide"].required
            assert found["triggers"].found == "made when the capture runs"
            # Nothing was changed by looking.
            assert db.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (4,)
            assert source.status().position is None
            db.execute("PRAGMA journal_mode = WAL")
            source.setup()
            found = {check.name: check for check in source.check()}
            assert found["journal mode"].ok
            assert found["triggers"].found == "on 2 tables"
            db.execute("INSERT INTO t VALUES (1, 2)")
            status = source.status()
            assert status.position is not None
            assert status.details["changes kept"] == "1"
            if status.retained_bytes is not None:
                assert 0 < status.retained_bytes <= path.stat().st_size + 10 * 65536


def test_what_is_no_database(path: Path) -> None:
    path.write_bytes(b"not a database, by no means, but long enough to look at" * 100)
    with SqliteSource(SourceSettings("c", url(path))) as source:
        with pytest.raises(CaptureError, match="not a database"):
            source.setup()


def test_not_set_up(path: Path) -> None:
    with user(path), SqliteSource(SourceSettings("c", url(path))) as source:
        with pytest.raises(CaptureError, match="not set up"):
            source.snapshot()
        with pytest.raises(CaptureError, match="not set up"):
            source.alter("ALTER TABLE t ADD COLUMN a")
        with pytest.raises(PositionLostError, match="not there"):
            next(iter(source.stream({"id": "x", "seq": 1})))


# ---- snapshots -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wal", [True, False])
def test_a_snapshot_is_of_one_moment(tmp_path: Path, wal: bool) -> None:
    path = tmp_path / "shop.db"
    with user(path, wal=wal) as db, opened(path, snapshot_workers=3) as source:
        db.execute("BEGIN")
        for name in ("a", "b", "c"):
            db.execute(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, v)")
            db.executemany(f"INSERT INTO {name} VALUES (?, 0)", [(n,) for n in range(3000)])
        db.execute("COMMIT")
        source.setup()
        with source.snapshot() as snapshot:
            # Writers are not held up, and what they write is not in it.
            for name in ("a", "b", "c"):
                db.execute(f"UPDATE {name} SET v = 1")
            assert [table.name for table in snapshot.tables] == ["a", "b", "c"]
            assert [snapshot.estimate(table) for table in snapshot.tables] == [3000] * 3
            assert b'"snapshot":"true"' in snapshot.source(snapshot.tables[0])
            with ThreadPoolExecutor(3) as pool:
                read = list(
                    pool.map(
                        lambda table: [row for piece in snapshot.rows(table) for row in piece],
                        snapshot.tables,
                    )
                )
            for rows in read:
                assert sorted(rows, key=lambda row: int(row[0])) == [
                    (b"%d" % n, b"0") for n in range(3000)
                ]
            some = [
                row for piece in snapshot.rows(snapshot.tables[1], where="id < 5") for row in piece
            ]
            assert len(some) == 5
            with pytest.raises(CaptureError, match="no such column"):
                list(snapshot.rows(snapshot.tables[1], where="nowhere = 1"))
            position = snapshot.position
        replica = Replica()
        replica.position = position
        replica.follow(source)
        assert len(replica.changes) == 9000
        assert_agree(path, source, replica)


def test_text_that_is_not_utf8_in_a_snapshot(path: Path) -> None:
    with user(path) as db, SqliteSource(SourceSettings("c", url(path))) as source:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
        db.executemany("INSERT INTO t VALUES (?, 'good')", [(n,) for n in range(2000)])
        db.execute("UPDATE t SET v = CAST(x'ff' AS TEXT) WHERE id IN (700, 1500)")
        source.setup()
        with source.snapshot() as snapshot:
            rows = {row[0]: row[1] for piece in snapshot.rows(snapshot.tables[0]) for row in piece}
        assert len(rows) == 2000
        assert {key for key, value in rows.items() if value == '"�"'.encode()} == {b"700", b"1500"}


# ---- waking up -----------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [True, False])
def test_a_commit_wakes_the_stream(
    tmp_path: Path, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not told:
        monkeypatch.setattr(watching, "_inotify", lambda folder: None)
    path = tmp_path / "shop.db"
    # It would say that it is idle after an hour: whatever comes, comes by waking up.
    with user(path) as db, opened(path, idle_ms=3_600_000) as source:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
        source.setup()
        with source.snapshot() as snapshot:
            stream = source.stream(snapshot.position)
        got: list[Part] = []
        arrived = threading.Semaphore(0)

        def read() -> None:
            for item in stream:
                assert isinstance(item, Part)
                got.append(item)
                arrived.release()

        reader = threading.Thread(target=read)
        reader.start()
        for number in range(5):
            db.execute("INSERT INTO t VALUES (?)", (number,))
            assert arrived.acquire(timeout=TIMEOUT_S)
        source.close()
        reader.join(TIMEOUT_S)
        assert not reader.is_alive()
        assert [change.after for part in got for change in part.changes] == [
            (b"%d" % number,) for number in range(5)
        ]


class CountedPolls:
    """Counts how often somebody began to wait."""

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self.count = 0

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        self.count += 1
        return self._poll.poll(timeout_ms)


def test_only_the_databases_own_files_wake(tmp_path: Path) -> None:
    with closing(Watch(tmp_path / "x.db")) as watch:
        if not watch.is_told:
            pytest.skip("this system does not tell")
        waited = threading.Event()
        polls = CountedPolls(watch._poll)
        watch._poll = polls  # type: ignore[assignment]

        def wait() -> None:
            watch.wait(3_600_000)
            waited.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        # Each is one event; after it the watch waits for the next.
        other = tmp_path / "other"
        eventually(lambda: polls.count >= 1)
        other.touch()
        eventually(lambda: polls.count >= 2)
        other.write_text("x")
        eventually(lambda: polls.count >= 3)
        assert not waited.is_set()
        (tmp_path / "x.db-wal").write_text("x")
        assert waited.wait(TIMEOUT_S)
        waiter.join()


def test_idle_tells_the_position(path: Path) -> None:
    with user(path) as db, SqliteSource(SourceSettings("c", url(path), idle_ms=1)) as source:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
        source.setup()
        with source.snapshot() as snapshot:
            position = snapshot.position
        stream = source.stream(position)
        assert [next(stream) for _ in range(3)] == [Idle(position)] * 3
        source.close()
        assert list(stream) == []


# ---- the file ------------------------------------------------------------------------------------


def test_a_file_that_is_replaced_or_gone(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with user(path, wal=False) as db:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
        with opened(path) as source:
            source.setup()
            shutil.copy(path, tmp_path / "older")
            with source.snapshot() as snapshot:
                position = snapshot.position
            db.execute("INSERT INTO t VALUES (1)")
            replica = Replica()
            replica.position = position
            replica.follow(source)
    with opened(path) as source:
        stream = source.stream(replica.position)
        assert isinstance(next(stream), Idle)
        os.replace(tmp_path / "older", path)
        with pytest.raises(DatabaseUnreachableError, match="replaced"):
            for _ in stream:
                pass
    with opened(path) as source:
        with pytest.raises(PositionLostError, match="older copy"):
            next(source.stream(replica.position))
        stream = source.stream(position)
        assert isinstance(next(stream), Idle)
        path.unlink()
        with pytest.raises(DatabaseUnreachableError, match="gone"):
            for _ in stream:
                pass
    with opened(path) as source, pytest.raises(DatabaseUnreachableError):
        next(source.stream(position))
    assert not path.exists()


def test_writers_are_not_held_up_by_a_reader_that_is_slow(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with user(path, wal=False) as db, opened(path) as source:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
        source.setup()
        with source.snapshot() as snapshot:
            position = snapshot.position
        db.execute("BEGIN")
        db.executemany("INSERT INTO t VALUES (?)", [(n,) for n in range(3000)])
        db.execute("COMMIT")
        stream = source.stream(position)
        assert isinstance(next(stream), Part)
        # The stream stands still in the middle; whoever writes has no wait at all.
        with closing(sqlite3.connect(path, timeout=0)) as other:
            other.execute("DELETE FROM t")
            other.commit()
        source.confirm(position)


def test_a_writer_that_holds_the_lock_delays_confirming_only(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with user(path) as db, opened(path) as source:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
        source.setup()
        replica = Replica()
        replica.snapshot(source)
        db.execute("BEGIN")
        db.executemany("INSERT INTO t VALUES (?)", [(n,) for n in range(2000)])
        db.execute("COMMIT")
        replica.follow(source)
        db.execute("BEGIN IMMEDIATE")
        source.confirm(replica.position)
        assert source.status().details["changes kept"] == "2000"
        replica.follow(source)
        db.execute("COMMIT")
        source.confirm(replica.position)
        assert source.status().details["changes kept"] == "0"


def test_options_that_there_are_not(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="captures of SQLite have no option foo"):
        SqliteSource(SourceSettings("c", url(tmp_path / "a.db"), options={"foo": "x"}))
