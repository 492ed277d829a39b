"""The table rebuilt from snapshot and stream is the table, row by row, whatever was done to it."""

from __future__ import annotations

import threading
from random import Random

import pytest

from penstock.capture.mysql.source import MysqlSource
from penstock.capture.source import Change, Chunk, ChunkRequest, Part, Position, Row
from penstock.testing.mariadb import MariaDB
from tests.capture.mysql.kit import (
    Rebuilt,
    apply,
    changes_of,
    end_of,
    key_of,
    place_of,
    read_to_end,
    row_of,
    snapshot_of,
    source_of,
)

TABLES = ("a", "b")


class Workload:
    """Random changes, by one seed: rows, keys, rollbacks, savepoints, DDL, large transactions."""

    def __init__(self, server: MariaDB, database: str, seed: int, steps: int) -> None:
        self.random = Random(seed)
        self.mariadb = server.kind == "mariadb"
        self.connection = server.connect(database)
        self.cursor = self.connection.cursor()
        self.steps = steps
        self.failure: BaseException | None = None
        self.extra: dict[str, list[str]] = {name: [] for name in TABLES}
        self.named = 0
        for name in TABLES:
            self.run(
                f"CREATE TABLE {name} (x INT NOT NULL, y VARCHAR(20) NOT NULL, v VARCHAR(200),"
                " n DECIMAL(20,4), at DATETIME(6), PRIMARY KEY (x, y))"
            )

    def run(self, sql: str) -> None:
        self.cursor.execute(sql)

    def go(self) -> None:
        try:
            for _ in range(self.steps):
                self.step()
        except BaseException as error:
            self.failure = error
        finally:
            self.connection.close()

    def step(self) -> None:
        kind = self.random.random()
        if kind < 0.06:
            self.define(self.random.choice(TABLES))
        elif kind < 0.07:
            self.run(f"TRUNCATE TABLE {self.random.choice(TABLES)}")
        elif kind < 0.09:
            self.large(self.random.choice(TABLES))
        elif kind < 0.10:
            self.run("FLUSH BINARY LOGS")
        else:
            self.transaction()

    def transaction(self) -> None:
        self.run("BEGIN")
        for _ in range(self.random.randint(1, 6)):
            if self.random.random() < 0.1:
                self.run("SAVEPOINT s")
                self.change(self.random.choice(TABLES))
                self.run("ROLLBACK TO s")
            self.change(self.random.choice(TABLES))
        self.run("COMMIT" if self.random.random() < 0.85 else "ROLLBACK")

    def change(self, table: str) -> None:
        random = self.random
        x, y = random.randint(0, 300), random.choice("pqr")
        value = random.choice(("NULL", f"'{random.randint(0, 999)} \u00fc\"'", "REPEAT('v', 150)"))
        number = f"{random.randint(-(10**9), 10**9)}.{random.randint(0, 9999)}"
        kind = random.random()
        if kind < 0.45:
            columns = "(x, y, v, n, at)"
            row = f"({x}, '{y}', {value}, {number}, NOW(6))"
            self.run(f"INSERT IGNORE INTO {table} {columns} VALUES {row}")
        elif kind < 0.7:
            self.run(f"UPDATE {table} SET v = {value}, n = {number} WHERE x = {x}")
        elif kind < 0.8:
            self.run(f"UPDATE IGNORE {table} SET x = {x}, y = 'z{y}' WHERE x = {x + 1}")
        elif kind < 0.9:
            row = f"({x}, '{y}', {value}, {number})"
            self.run(f"REPLACE INTO {table} (x, y, v, n) VALUES {row}")
        else:
            self.run(f"DELETE FROM {table} WHERE x BETWEEN {x} AND {x + 3}")

    def large(self, table: str) -> None:
        start = self.random.randint(1000, 5000)
        rows = ", ".join(f"({i}, 'big', '{'w' * (i % 100)}')" for i in range(start, start + 3000))
        self.run(f"INSERT IGNORE INTO {table} (x, y, v) VALUES {rows}")
        self.run(f"DELETE FROM {table} WHERE x > {start + 500}")

    def define(self, table: str) -> None:
        """ALTER TABLE; every row is touched afterwards, so that nothing rests on defaults."""
        columns = self.extra[table]
        kind = self.random.random()
        self.named += 1
        name = f"e{self.named}"
        where = self.random.choice(("FIRST", "AFTER x", ""))
        if kind < 0.4 or not columns:
            kinds = ["INT", "VARCHAR(10)", "BIGINT UNSIGNED", "BINARY(16)"]
            kinds += ["UUID"] if self.mariadb else []
            type_ = self.random.choice(kinds)
            self.run(f"ALTER TABLE {table} ADD COLUMN {name} {type_} {where}")
            columns.append(name)
        elif kind < 0.7:
            gone = columns.pop(self.random.randrange(len(columns)))
            self.run(f"ALTER TABLE {table} DROP COLUMN {gone}")
        elif kind < 0.85:
            place = self.random.randrange(len(columns))
            self.run(f"ALTER TABLE {table} RENAME COLUMN {columns[place]} TO {name}")
            columns[place] = name
        else:
            self.run(
                f"ALTER TABLE {table} MODIFY COLUMN v VARCHAR({self.random.randint(200, 900)})"
            )
        self.run(f"UPDATE {table} SET v = CONCAT(LEFT(v, 100), '!'), n = n + 1, at = NOW(6)")
        self.run(f"UPDATE {table} SET at = NOW(6), v = '{self.named}'")


def capture(server: MariaDB, database: str, workload: Workload, seed: int) -> Rebuilt:
    """Snapshot while the workload runs, then the stream, opened anew at random places."""
    random = Random(seed)
    thread = threading.Thread(target=workload.go)
    thread.start()
    try:
        tables, position = snapshot_of(source_of(server, database))
        while True:
            running = thread.is_alive()
            position = follow(server, database, tables, position, random.randint(1, 150))
            if not running and follow_done(server, database, tables, position):
                return tables
    finally:
        thread.join()
        assert workload.failure is None, workload.failure


def follow(
    server: MariaDB, database: str, tables: Rebuilt, position: Position, most: int
) -> Position:
    with source_of(server, database) as source:
        items, position = read_to_end(server, source, position, most=most)
    for change in changes_of(items):
        apply(tables, change)
    return position


def follow_done(server: MariaDB, database: str, tables: Rebuilt, position: Position) -> bool:
    follow(server, database, tables, position, 10**9)
    return True


def compare(tables: Rebuilt, expected: Rebuilt) -> None:
    for name, rows in expected.items():
        mine = tables.get(name, {})
        assert set(mine) == set(rows), name
        for key, row in rows.items():
            assert {column: mine[key][column] for column in row} == row, (name, key)


@pytest.mark.timeout(240)
def test_the_table_rebuilt_is_the_table(mariadb: MariaDB, database: str, seed: int) -> None:
    workload = Workload(mariadb, database, seed, steps=300)
    tables = capture(mariadb, database, workload, seed)
    compare(tables, snapshot_of(source_of(mariadb, database))[0])


class ByChunks:
    """Tables known only from the stream and from chunks in it."""

    def __init__(self, source: MysqlSource, database: str, *, watched: bool = False) -> None:
        self.source = source
        self.database = database
        self.tables: Rebuilt = {name: {} for name in TABLES}
        self.begins: dict[str, tuple[int, str]] = dict.fromkeys(TABLES, (-1, ""))
        self.done: set[str] = set()
        self.chunks = 0
        # Rows that change on the way to a chunk's place may be left out of it.
        self.watched = watched
        # A table is empty a moment before its TRUNCATE is in the binlog.
        self.emptied: frozenset[str] = frozenset()

    def ask(self, name: str, after: Row | None) -> None:
        self.source.ask(ChunkRequest(name, f"{self.database}.{name}", after, 100))

    def change(self, change: Change) -> None:
        name = change.table.name
        rows = self.tables[name]
        if name in self.emptied:
            assert change.op == "t", (name, change)
            self.emptied -= {name}
        if change.op == "t":
            rows.clear()
        if change.before is not None:
            rows.pop(key_of(change.table, row_of(change.table, change.before)), None)
        if change.after is not None:
            after = row_of(change.table, change.after)
            rows[key_of(change.table, after)] = after

    def chunk(self, chunk: Chunk) -> None:
        """What the stream has told of these rows must be in the chunk, just so."""
        assert chunk.problem == ""
        assert b'"snapshot":"incremental"' in chunk.source
        self.chunks += 1
        name = chunk.request.id
        known = self.tables[name]
        found = {}
        for values in chunk.rows:
            row = row_of(chunk.table, values)
            found[key_of(chunk.table, row)] = row
        end = order(chunk.last_key) if chunk.last_key and not chunk.is_last else (10**9, "")
        for key, row in known.items():
            if self.begins[name] < order(key) <= end:
                if key not in found and (self.watched or not found):
                    self.emptied = self.emptied if self.watched else self.emptied | {name}
                    continue
                assert key in found, (name, key)
                same = {c: v for c, v in row.items() if c in found[key]}
                assert same == {c: found[key][c] for c in same}, (name, key)
        known.update(found)
        self.begins[name] = end
        if chunk.is_last:
            self.done.add(name)
        else:
            self.ask(name, chunk.last_key)


def order(key: Row) -> tuple[int, str]:
    return int(key[0]), key[1].decode().strip('"')


@pytest.mark.timeout(240)
def test_chunks_are_exact_where_they_stand(mariadb: MariaDB, database: str, seed: int) -> None:
    """Without a snapshot, while everything changes: the rows of a chunk are exactly what the stream
    has made of them so far, and chunks and stream together give the table."""
    check_chunks(mariadb, database, seed)


def check_chunks(server: MariaDB, database: str, seed: int, *, watched: bool = False) -> None:
    workload = Workload(server, database, seed, steps=0)
    for name in TABLES:
        workload.large(name)
    source = source_of(server, database)
    with source.snapshot() as snapshot:
        position = snapshot.position
    for _ in range(60):
        workload.transaction()
    workload.steps = 120
    thread = threading.Thread(target=workload.go)
    thread.start()
    state = ByChunks(source, database, watched=watched)
    try:
        for name in TABLES:
            state.ask(name, None)
        for item in source.stream(position):
            if isinstance(item, Part):
                for change in item.changes:
                    state.change(change)
            elif isinstance(item, Chunk):
                state.chunk(item)
            elif (
                len(state.done) == len(TABLES)
                and not thread.is_alive()
                and place_of(item.position) >= end_of(server)
            ):
                break
    finally:
        thread.join()
    assert workload.failure is None
    assert state.chunks >= len(TABLES)
    compare(state.tables, snapshot_of(source_of(server, database))[0])


def test_a_chunk_that_cannot_be_read_says_why(mariadb: MariaDB, database: str) -> None:
    mariadb.query("CREATE TABLE nokey (v INT)", database)
    source = source_of(mariadb, database)
    with source.snapshot() as snapshot:
        position = snapshot.position
    for name in ("nokey", "missing"):
        source.ask(ChunkRequest(name, f"{database}.{name}", None, 10))
    stream = source.stream(position)
    problems = {}
    for item in stream:
        if isinstance(item, Chunk):
            assert item.is_last
            problems[item.request.id] = item.problem
        if len(problems) == 2:
            break
    assert "no primary key" in problems["nokey"]
    assert "no table" in problems["missing"]


KEYS = {
    "INT": ("-5", "0", "7", "8", "9"),
    "BIGINT UNSIGNED": ("1", "18446744073709551615", "5", "6", "7"),
    "DECIMAL(12,3)": ("-1.5", "0", "2.125", "100", "3"),
    "DOUBLE": ("0.1", "-1e10", "3", "4", "5.5"),
    "FLOAT": ("0.1", "0.2", "0.3", "-5", "7.7"),
    "VARCHAR(20)": ("'a'", "'B'", "'c''d'", "'\u00fc'", "''"),
    "VARCHAR(20) CHARACTER SET latin1": ("'a'", "'B'", "'c'", "'\u00fc'", "''"),
    "VARBINARY(20)": ("X'00FF'", "'b'", "''", "'c'", "X'FF'"),
    "DATE": ("'2020-01-01'", "'1969-01-01'", "'9999-12-31'", "'2021-01-01'", "'2022-02-02'"),
    "DATETIME(6)": (
        "'2020-01-01 00:00:00.000001'",
        "'1969-01-01'",
        "'2020-01-01'",
        "NOW()",
        "NOW(6)",
    ),
    "TIMESTAMP(3)": (
        "'2020-01-01 00:00:00.001'",
        "'1999-01-01'",
        "'2020-01-01'",
        "NOW()",
        "NOW(3)",
    ),
    "TIME(3)": ("'-00:00:01.500'", "'-838:59:59'", "'0:0:0'", "'1:2:3.004'", "'100:00:00'"),
    "ENUM('z','a','m','b','c')": ("'z'", "'a'", "'m'", "'b'", "'c'"),
    "SET('z','a','m')": ("'z'", "'a'", "'z,m'", "''", "'m'"),
    "BIT(9)": ("1", "0", "511", "256", "255"),
    "YEAR": ("1999", "2000", "2155", "1901", "2020"),
    "UUID": tuple(f"'{i}{i}{i}e4567-e89b-12d3-a456-426655440000'" for i in range(5)),
    "INET6": ("'::1'", "'ff::1'", "'::ffff:1.2.3.4'", "'fe80::1'", "'::'"),
    "BINARY(3)": ("'a'", "'b'", "'ab'", "X'00'", "X'FF'"),
}


def test_chunks_go_on_from_keys_of_every_type(mariadb: MariaDB, database: str) -> None:
    source = source_of(mariadb, database)
    expected = {}
    with mariadb.connect(database) as connection, connection.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        for number, (kind, values) in enumerate(KEYS.items()):
            cursor.execute(
                f"CREATE TABLE t{number} (k {kind} NOT NULL, i INT NOT NULL, PRIMARY KEY (k, i))"
            )
            rows = ", ".join(f"({value}, {i})" for value in values for i in range(3))
            cursor.execute(f"INSERT INTO t{number} VALUES {rows}")
            expected[f"t{number}"] = 3 * len(values)
    with source.snapshot() as snapshot:
        position = snapshot.position
        whole = {
            table.name: sorted(row for some in snapshot.rows(table) for row in some)
            for table in snapshot.tables
        }
    seen: dict[str, list[Row]] = {name: [] for name in expected}
    for name in expected:
        source.ask(ChunkRequest(name, f"{database}.{name}", None, 2))
    done = 0
    for item in source.stream(position):
        if isinstance(item, Chunk):
            assert item.problem == ""
            name = item.request.id
            seen[name] += item.rows
            done += item.is_last
            if not item.is_last:
                assert len(seen[name]) <= expected[name], "it does not come to an end"
                source.ask(ChunkRequest(name, f"{database}.{name}", item.last_key, 2))
        if done == len(expected):
            break
    assert {name: sorted(rows) for name, rows in seen.items()} == whole
