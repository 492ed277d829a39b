"""A random load on a table: everything that applications and their makers do to one."""

from __future__ import annotations

import random

import psycopg

from tests.capture.postgres.rebuilding import Connection

SETUP = (
    "CREATE TABLE t (id int PRIMARY KEY, a text, n int, big text)",
    "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
    (
        "INSERT INTO t SELECT g, 'row ' || g, g, repeat(chr(65 + g % 26), g % 3 * 3000) "
        "FROM generate_series(1, 60) g"
    ),
)


class Load:
    """Statements on table `t`, some of them in transactions that come to nothing."""

    def __init__(
        self,
        connection: Connection,
        rng: random.Random,
        first_id: int = 1000,
        *,
        truncates: bool = True,
    ) -> None:
        self._sql = connection
        self._truncates = truncates
        self._rng = rng
        self._next_id = first_id
        # One load after another has other ids, and so must name its columns otherwise, too.
        self._columns = first_id

    def run(self, steps: int, *, ddl: bool = True) -> None:
        for _ in range(steps):
            self.step(ddl=ddl)

    def step(self, *, ddl: bool) -> None:
        what = self._rng.random()
        if ddl and what < 0.06:
            self._change_schema()
        elif what < 0.08:
            self._many()
        else:
            undone = self._rng.random() < 0.15
            with self._sql.transaction(force_rollback=undone):
                for _ in range(self._rng.randint(1, 5)):
                    self._with_savepoint()

    def _with_savepoint(self) -> None:
        if self._rng.random() < 0.3:
            with self._sql.transaction(force_rollback=self._rng.random() < 0.5):
                self._one()
                if self._rng.random() < 0.3:
                    self._with_savepoint()
        else:
            self._one()

    def _some(self) -> str:
        """A condition for a few rows."""
        return f"id % {self._rng.randint(2, 17)} = {self._rng.randint(0, 2)}"

    def _one(self) -> None:
        rng = self._rng
        what = rng.random()
        if what < 0.35:
            self._next_id += 1
            size = rng.choice([0, 10, 5000])
            self._sql.execute(
                "INSERT INTO t (id, a, n, big) VALUES (%s, %s, %s, %s)",
                (
                    self._next_id,
                    rng.choice([None, "x", 'q"\\']),
                    rng.randint(-9, 9),
                    chr(97 + self._next_id % 26) * size,
                ),
            )
        elif what < 0.6:
            self._sql.execute(f"UPDATE t SET n = n + 1 WHERE {self._some()}".encode())
        elif what < 0.7:
            self._sql.execute(f"UPDATE t SET big = big || 'y' WHERE {self._some()}".encode())
        elif what < 0.85:
            self._next_id += 1
            self._sql.execute(
                "UPDATE t SET id = %s WHERE id = (SELECT id FROM t ORDER BY md5(id::text) LIMIT 1)",
                (self._next_id,),
            )
        elif what < 0.98:
            self._sql.execute(
                f"DELETE FROM t WHERE id % 13 = {rng.randint(0, 12)} AND id % 3 = 1".encode()
            )
        elif self._truncates:
            self._sql.execute("TRUNCATE t")

    def _many(self) -> None:
        """Larger than what the server decodes in memory."""
        with self._sql.transaction(force_rollback=self._rng.random() < 0.3):
            first = self._next_id + 1
            self._next_id += 800
            self._sql.execute(
                "INSERT INTO t (id, a, n, big) SELECT g, repeat('m', 60), 0, '' "
                "FROM generate_series(%s::int, %s::int) g",
                (first, self._next_id),
            )
            with self._sql.transaction(force_rollback=self._rng.random() < 0.5):
                self._sql.execute("UPDATE t SET a = 'changed' WHERE id % 2 = 0")
            self._sql.execute("DELETE FROM t WHERE id > %s", (first + 20,))

    def _change_schema(self) -> None:
        """Another form of the table, and then each row in it."""
        self._columns += 1
        kind = self._rng.choice(["add", "drop", "rename", "type"])
        with self._sql.transaction(force_rollback=self._rng.random() < 0.2):
            if kind == "add":
                self._sql.execute(f"ALTER TABLE t ADD c{self._columns} int".encode())
            elif kind == "drop":
                self._sql.execute("ALTER TABLE t DROP n, ADD n int DEFAULT 5")
            elif kind == "rename":
                self._sql.execute(f"ALTER TABLE t RENAME a TO a{self._columns}".encode())
                self._sql.execute("ALTER TABLE t ADD a text")
            else:
                self._sql.execute("ALTER TABLE t ALTER n TYPE bigint")
            self._sql.execute("UPDATE t SET n = n")


def prepare(connection: Connection) -> None:
    for statement in SETUP:
        connection.execute(statement.encode())


def ignore_conflicts(load: Load, steps: int) -> None:
    """A load beside others: what fails because of them was not done."""
    for _ in range(steps):
        try:
            load.step(ddl=False)
        except (psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected):
            continue
