"""Random SQL on random tables: what follows from the stream is what the tables hold.

Some of the time the source is opened anew, in the middle of its stream, without warning; and the
user alters tables as they please. Another program writes at the same time, and is killed.
"""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.capture.sqlite.source import SqliteSource
from penstock.capture.sqlite.tables import quoted
from tests.capture.sqlite.model import Replica, assert_agree, opened, truth, user
from tests.harness.profiles import examples
from tests.waiting import eventually

values = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-3, 3),
    st.floats(allow_nan=True),
    st.text(max_size=5),
    st.binary(max_size=5),
)
keys = {
    "nocase": st.sampled_from(["a", "A", "b", "B", "c"]),
    "untyped": st.sampled_from([1, 1.0, 2, 2.0, "1", "a", b"a"]),
}
numbers = st.integers(0, 8)
names = st.sampled_from(["a", "b c", 'd"e', "select", "ü"])
types = st.sampled_from(["", "INTEGER", "TEXT", "REAL", "BLOB", "DECIMAL(5,2)", "BOOLEAN", "DATE"])

# What a table is made with: how its key is declared, and what follows the columns.
SHAPES = {
    "rowid": ("id INTEGER PRIMARY KEY, k", ""),
    "autoincrement": ("id INTEGER PRIMARY KEY AUTOINCREMENT, k", ""),
    "text": ("id TEXT NOT NULL PRIMARY KEY, k", ""),
    "two": ("id INT NOT NULL, k INT NOT NULL DEFAULT 0, PRIMARY KEY (id, k)", ""),
    "without rowid": ("id PRIMARY KEY NOT NULL, k", "WITHOUT ROWID"),
    "nocase": ("id TEXT NOT NULL COLLATE NOCASE PRIMARY KEY, k", ""),
    "untyped": ("id NOT NULL PRIMARY KEY, k", ""),
    "loose": ("id, k", ""),
    "unique": ("id INTEGER PRIMARY KEY, k UNIQUE", ""),
    "generated": ("id INTEGER PRIMARY KEY, k, g TEXT AS (k || '!'), s AS (id + 1) STORED", ""),
}
WRITES = [
    "INSERT INTO {t} (id, k{c}) VALUES (:i, :j{v})",
    "INSERT OR REPLACE INTO {t} (id, k{c}) VALUES (:i, :j{v})",
    "INSERT OR IGNORE INTO {t} (id, k{c}) VALUES (:i, :j{v})",
    "REPLACE INTO {t} (id, k) VALUES (:i, :j), (:j, :i)",
    "INSERT INTO {t} (id, k) VALUES (:i, :j) ON CONFLICT DO NOTHING",
    "UPDATE {t} SET k = :x WHERE id = :i",
    "UPDATE OR REPLACE {t} SET k = :j WHERE id = :i",
    "UPDATE OR REPLACE {t} SET id = :j WHERE id = :i",
    "UPDATE OR IGNORE {t} SET id = id + 1",
    "UPDATE {t} SET k = k",
    "DELETE FROM {t} WHERE id = :i",
    "DELETE FROM {t} WHERE id > 6",
    "DELETE FROM {t}",
]
SCHEMA = [
    "ALTER TABLE {t} ADD COLUMN {n} {d}",
    "CREATE UNIQUE INDEX IF NOT EXISTS {t}_u ON {t} (k)",
    "DROP INDEX IF EXISTS {t}_u",
    "DROP TABLE IF EXISTS {t}; CREATE TABLE {t} (id INTEGER PRIMARY KEY, k, {n} {d})",
    "VACUUM",
    "CREATE TABLE IF NOT EXISTS other (id INTEGER PRIMARY KEY, k); INSERT INTO other VALUES (1, 1)",
]


class Session:
    """A user, and a capture that is opened anew now and then."""

    def __init__(self, folder: str, shape: str, wal: bool) -> None:
        self.path = Path(folder) / "random.db"
        self.stack = ExitStack()
        self.db = self.stack.enter_context(user(self.path, wal=wal))
        self.shape = shape
        columns, end = SHAPES[shape]
        self.db.execute(f"CREATE TABLE t ({columns}) {end}")
        self.replica = Replica()
        self.source = self._open()
        self.source.setup()
        self.replica.snapshot(self.source)

    def _open(self) -> SqliteSource:
        return self.stack.enter_context(opened(self.path))

    def columns(self) -> list[str]:
        found = self.db.execute("PRAGMA table_info(t)").fetchall()
        return [row[1] for row in found if row[1] not in {"id", "k"}]

    def write(self, data: st.DataObject) -> None:
        columns = self.columns()[:2]
        statement = data.draw(st.sampled_from(WRITES)).format(
            t="t",
            c="".join(f", {quoted(name)}" for name in columns),
            v="".join(f", :v{at}" for at in range(len(columns))),
        )
        given: dict[str, Any] = {f"v{at}": data.draw(values) for at in range(len(columns))}
        own = keys.get(self.shape, numbers)
        given |= {"i": data.draw(own), "j": data.draw(own), "x": data.draw(values)}
        used = {name: value for name, value in given.items() if f":{name}" in statement}
        self._run(lambda: self.db.execute(statement, used))

    def alter(self, data: st.DataObject) -> None:
        statement = data.draw(st.sampled_from(SCHEMA)).format(
            t="t", n=quoted(data.draw(names)), d=data.draw(types)
        )
        for part in statement.split(";"):
            self._run(lambda part=part: self.db.execute(part))  # type: ignore[misc]

    def _run(self, statement: Callable[[], Any]) -> None:
        try:
            statement()
        except sqlite3.IntegrityError:
            pass
        except sqlite3.OperationalError as error:
            # The user's own mistakes; nothing may fail because of us.
            expected = ("duplicate column", "cannot VACUUM", "indexed columns are not unique")
            if not any(words in str(error) for words in expected):
                raise

    def reopen(self) -> None:
        self.source.close()
        self.source = self._open()

    def finish(self) -> None:
        self.replica.follow(self.source)
        for table in self.source.tables():
            rows = self.replica.tables.get(table.name, {})
            expected = truth(self.db, table)
            # Rows that were told before a column was added do not have it: it is null.
            for row in rows.values():
                for column in table.columns:
                    row.setdefault(column.name, b"null")
            assert rows == expected


@pytest.mark.parametrize("shape", SHAPES)
@given(data=st.data(), wal=st.booleans())
@settings(max_examples=examples(8))
def test_any_sql(shape: str, data: st.DataObject, wal: bool) -> None:
    with TemporaryDirectory() as folder:
        session = Session(folder, shape, wal)
        with session.stack:
            for _ in range(data.draw(st.integers(1, 6))):
                step = data.draw(
                    st.sampled_from(["write"] * 4 + ["alter", "read", "break", "confirm"])
                )
                if step == "write":
                    within = data.draw(st.booleans())
                    if within:
                        session.db.execute("BEGIN")
                    for _ in range(data.draw(st.integers(1, 5))):
                        session.write(data)
                    if within:
                        session.db.execute(data.draw(st.sampled_from(["COMMIT", "ROLLBACK"])))
                elif step == "alter":
                    session.alter(data)
                elif step == "confirm":
                    session.source.confirm(session.replica.position)
                else:
                    looks = None if step == "read" else data.draw(st.integers(0, 3))
                    session.replica.follow(session.source, looks=looks)
                    session.reopen()
            session.finish()


# ---- another program ---------------------------------------------------------------------------

WRITER = """
import random, sqlite3, sys, threading
pause = threading.Event()
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
db.execute("PRAGMA synchronous = OFF")
rng = random.Random(int(sys.argv[2]))
done = 0
while True:
    db.execute("BEGIN IMMEDIATE")
    for _ in range(rng.randint(1, 30)):
        key = rng.randrange(200)
        kind = rng.random()
        if kind < 0.5:
            db.execute("INSERT OR REPLACE INTO t VALUES (?, ?, ?)", (key, rng.random(), "x" * key))
        elif kind < 0.8:
            db.execute("UPDATE t SET v = v + 1 WHERE id = ?", (key,))
        else:
            db.execute("DELETE FROM t WHERE id = ?", (key,))
    # The sum of a transaction's changes of this row is one, whatever else it does.
    db.execute("UPDATE total SET n = n + 1")
    db.execute("COMMIT")
    done += 1
    pause.wait(0.002)
    if done == 20:
        print("running", flush=True)
"""


@pytest.mark.parametrize("wal", [True, False])
@pytest.mark.processes
def test_a_program_that_writes_meanwhile_and_is_killed(
    tmp_path: Path, seed: int, wal: bool
) -> None:
    path = tmp_path / "busy.db"
    rng = random.Random(seed)
    with user(path, wal=wal) as db:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v REAL, s TEXT)")
        db.execute("CREATE TABLE total (id INTEGER PRIMARY KEY, n INT)")
        db.execute("INSERT INTO total VALUES (1, 0)")
        with opened(path) as source:
            source.setup()
        replica = Replica()
        with opened(path) as source:
            replica.snapshot(source)
        for _ in range(2):
            writer = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(WRITER), str(path), str(rng.random())[2:]],
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                assert writer.stdout is not None
                for looks in (1, 3, 7, 20, 40):
                    with opened(path) as source:
                        replica.follow(source, looks=looks)
                        source.confirm(replica.position)
                assert writer.stdout.readline() == "running\n"
            finally:
                writer.send_signal(signal.SIGKILL)
                writer.wait()
                if writer.stdout is not None:
                    writer.stdout.close()
        with opened(path) as source:

            def caught_up() -> bool:
                replica.follow(source)
                (n,) = db.execute("SELECT n FROM total").fetchone()
                return replica.tables["total"][b"1",]["n"] == b"%d" % n

            eventually(caught_up)
            assert_agree(path, source, replica)
            again = Replica()
            again.snapshot(source)
            assert again.tables == replica.tables
