"""A load like that of TPC-B on a database that is captured, with all that a schema goes through.

Writers move money between accounts, tellers and branches and write history, as pgbench does; in
between they delete, insert, change keys, roll back, write large values and large transactions. One
of them adds, renames and drops columns. When the server is killed under them, they connect again:
whether their last transaction was committed, only the database knows.
"""

from __future__ import annotations

import random
import sqlite3
import threading
from time import monotonic
from typing import Any, Final

import psycopg
import pymysql

from tests.capture.kit.databases import Database, Session

BRANCHES: Final = 4
TELLERS: Final = 20
ACCOUNTS: Final = 400
TABLES: Final = ("branches", "tellers", "accounts", "history", "docs")
# What a writer meets when the server is killed, or another writer is in its way.
TROUBLE: Final = (psycopg.Error, pymysql.MySQLError, sqlite3.OperationalError, OSError)
_RECONNECT_S: Final = 60.0


def create(database: Database) -> None:
    """The tables, with their first rows."""
    database.run(
        "CREATE TABLE branches (id $int PRIMARY KEY, balance $big NOT NULL)",
        "CREATE TABLE tellers (id $int PRIMARY KEY, branch $int, balance $big NOT NULL)",
        "CREATE TABLE accounts (id $int PRIMARY KEY, branch $int, balance $big NOT NULL,"
        " filler $text)",
        "CREATE TABLE history (id $key PRIMARY KEY, teller $int, account $int, delta $big,"
        " note $text)",
        "CREATE TABLE docs (id $int PRIMARY KEY, n $int NOT NULL, content $large)",
        "INSERT INTO branches VALUES " + ", ".join(f"({i}, 0)" for i in range(BRANCHES)),
        "INSERT INTO tellers VALUES "
        + ", ".join(f"({i}, {i % BRANCHES}, 0)" for i in range(TELLERS)),
        "INSERT INTO accounts VALUES "
        + ", ".join(f"({i}, {i % BRANCHES}, 0, 'filler {i}')" for i in range(ACCOUNTS)),
    )
    if database.kind == "postgresql":
        database.run("ALTER TABLE docs ALTER content SET STORAGE EXTERNAL")


class Writer:
    """One user of the database, on a thread of its own."""

    def __init__(self, database: Database, number: int, seed: int, *, defines: bool) -> None:
        self._database = database
        self._number = number
        self._random = random.Random(seed)
        self._defines = defines
        self._session: Session | None = None
        self._made = 0
        self.committed = 0
        self.failure: BaseException | None = None
        # Columns that were added and are there, and what each was called next.
        self.extra: list[str] = []
        self.renamed: dict[str, str] = {}
        self.definitions = 0

    def go(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                self._step(stop)
                stop.wait(0.002)
        except BaseException as error:
            self.failure = error
        finally:
            self._hang_up()

    def _step(self, stop: threading.Event) -> None:
        deadline = monotonic() + _RECONNECT_S
        while True:
            try:
                if self._session is None:
                    self._session = self._database.connect()
                if self._defines:
                    self._look(self._session)
                session = self._session
                break
            except TROUBLE:
                self._hang_up()
                assert monotonic() < deadline, "the database does not come back"
                stop.wait(0.05)
        try:
            if self._defines and self._random.random() < 0.01:
                self._define(session)
            else:
                session.run("BEGIN")
                self._transaction(session)
                if self._random.random() < 0.05:
                    session.run("ROLLBACK")
                else:
                    session.run("COMMIT")
                    self.committed += 1
        except TROUBLE:
            # Killed, or a deadlock: what was under way is rolled back with the connection.
            self._hang_up()

    def _hang_up(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            try:
                session.close()
            except TROUBLE:
                return

    def _transaction(self, session: Session) -> None:
        chance = self._random.random()
        if chance < 0.02:
            self._large(session)
        elif chance < 0.15:
            self._document(session)
        elif chance < 0.25:
            self._move(session)
        else:
            self._pay(session)
            if chance < 0.35:
                session.run("SAVEPOINT s")
                self._pay(session)
                session.run("ROLLBACK TO SAVEPOINT s")

    def _pay(self, session: Session) -> None:
        chance = self._random
        delta = chance.randint(-5000, 5000)
        account, teller = chance.randrange(ACCOUNTS), chance.randrange(TELLERS)
        self._made += 1
        history = f"{self._number}-{self._made}-{chance.getrandbits(40):x}"
        session.run(f"UPDATE accounts SET balance = balance + {delta} WHERE id = {account}")
        session.run(f"UPDATE tellers SET balance = balance + {delta} WHERE id = {teller}")
        session.run(
            f"UPDATE branches SET balance = balance + {delta} WHERE id = {teller % BRANCHES}"
        )
        session.run(
            "INSERT INTO history (id, teller, account, delta, note) VALUES "
            f"('{history}', {teller}, {account}, {delta}, 'ü {history}')"
        )
        if self.extra:
            name = chance.choice(self.extra)
            session.run(f"UPDATE accounts SET {name} = '{name} {delta}' WHERE id = {account}")

    def _document(self, session: Session) -> None:
        """Large values: written, left alone by an update, deleted."""
        chance = self._random
        id_ = chance.randrange(60)
        match chance.randrange(5):
            case 0:
                session.run(f"DELETE FROM docs WHERE id = {id_}")
            case 1 | 2:
                session.run(f"UPDATE docs SET n = n + 1 WHERE id % 60 = {id_}")
            case 3:
                session.run(f"DELETE FROM docs WHERE id = {id_ + 60}")
                session.run(f"UPDATE docs SET id = {id_ + 60} WHERE id = {id_}")
            case _:
                text = f"{chance.random()} " * chance.choice((1, 300, 1500))
                session.run(f"DELETE FROM docs WHERE id = {id_}")
                session.run(f"INSERT INTO docs VALUES ({id_}, 0, '{text}')")

    def _move(self, session: Session) -> None:
        """Keys that change, rows that go and come."""
        chance = self._random
        old, new = chance.randrange(2 * ACCOUNTS), chance.randrange(2 * ACCOUNTS)
        match chance.randrange(3):
            case 0:
                session.run(f"DELETE FROM accounts WHERE id = {old}")
            case 1:
                session.run(f"DELETE FROM accounts WHERE id = {new}")
                session.run(f"UPDATE accounts SET id = {new} WHERE id = {old}")
            case _:
                session.run(f"DELETE FROM accounts WHERE id = {old}")
                session.run(
                    "INSERT INTO accounts (id, branch, balance, filler) VALUES "
                    f"({old}, 0, 0, 'again')"
                )

    def _large(self, session: Session) -> None:
        session.run(f"UPDATE accounts SET filler = 'large {self._random.random()}'")
        session.run("UPDATE accounts SET balance = balance + 1")
        session.run("UPDATE tellers SET balance = balance + 1")

    def _define(self, session: Session) -> None:
        """A column comes, has another name, or goes. Names are never used again."""
        chance = self._random
        self.definitions += 1
        new = f"extra{self.definitions}"
        kind = chance.randrange(3) if len(self.extra) > 1 else 0
        old = chance.choice(self.extra) if self.extra else ""
        if kind == 1:
            # Known before it is done: if the server is killed in between, nobody tells.
            self.renamed[old] = new
            what = f"RENAME COLUMN {old} TO {new}"
        elif kind == 2 and self._database.kind != "sqlite":
            # SQLite refuses it while triggers name the column.
            what = f"DROP COLUMN {old}"
        else:
            what = f"ADD COLUMN {new} {self._database.types['text']}"
        if len(self.extra) < 6 or not what.startswith("ADD"):
            session.run(f"ALTER TABLE accounts {what}")

    def _look(self, session: Session) -> None:
        """Which columns there are: one may have come although the server was killed."""
        names = self._database.columns(session, "accounts")
        self.extra = [name for name in names if name.startswith("extra")]


def as_it_is_now(row: dict[str, Any], names: list[str], renamed: dict[str, str]) -> dict[str, Any]:
    """A row as it was told, with the columns that its table has now."""
    found: dict[str, Any] = dict.fromkeys(names)
    for name, value in row.items():
        now = name
        while now not in found and now in renamed:
            now = renamed[now]
        if now in found:
            found[now] = value
    return found
