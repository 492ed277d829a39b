"""MySQL 8 where it differs from MariaDB: GTIDs, XA, binary JSON, snapshots by a lock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from penstock.capture.mysql.jsonb import text
from penstock.capture.source import Part, PositionLostError
from penstock.testing.mysql import MySQL
from tests.capture.mysql.kit import (
    changes_of,
    end_of,
    place_of,
    read_to_end,
    snapshot_of,
    source_of,
)
from tests.capture.mysql.test_rebuild import Workload, capture, check_chunks, compare
from tests.capture.mysql.test_types import CASES, same
from tests.harness.needs import where_mysql_is

pytestmark = where_mysql_is


@pytest.fixture
def mysql(shared_mysql: MySQL) -> MySQL:
    return shared_mysql


@pytest.fixture
def database(mysql: MySQL) -> Iterator[str]:
    name = mysql.create_database()
    yield name
    mysql.query(f"DROP DATABASE IF EXISTS {name}")


@pytest.mark.timeout(240)
def test_the_table_rebuilt_is_the_table(mysql: MySQL, database: str, seed: int) -> None:
    workload = Workload(mysql, database, seed, steps=150)
    tables = capture(mysql, database, workload, seed)
    compare(tables, snapshot_of(source_of(mysql, database))[0])


ONLY_MARIADB = (
    "UUID",
    "INET",
    "COMPRESSED",
    "JSON",
    "GEOMETRY",
    "POINT",
    "cp1250",
    "swe7",
    "FLOAT(",
)


def test_types_are_as_the_database_renders_them(mysql: MySQL, database: str) -> None:
    cases = [case for case in CASES if not any(word in case.type for word in ONLY_MARIADB)]
    # Before 8.0.14 the binlog does not tell the character set of enums.
    cases = [case for case in cases if "ENUM" not in case.type or "latin1" not in case.type]
    source = source_of(mysql, database)
    position = snapshot_of(source)[1]
    groups = [cases[i : i + 10] for i in range(0, len(cases), 10)]
    oracles: dict[str, dict[int, Any]] = {}
    with mysql.connect(database) as connection, connection.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00', sql_mode = 'NO_ENGINE_SUBSTITUTION'")
        for number, group in enumerate(groups):
            columns = ", ".join(
                f"c{i} {case.type.replace(' NULL', '')} NULL" for i, case in enumerate(group)
            )
            cursor.execute(f"CREATE TABLE t{number} (id INT PRIMARY KEY, {columns})")
            for at in range(max(len(case.values) for case in group)):
                given = ", ".join(case.values[at % len(case.values)] for case in group)
                cursor.execute(f"INSERT INTO t{number} VALUES ({at}, {given})")
            oracle = [c.oracle.replace("CAST({c} AS DOUBLE)", "({c} + 0e0)") for c in group]
            what = ", ".join(said.format(c=f"c{i}") for i, said in enumerate(oracle))
            cursor.execute(f"SELECT id, {what} FROM t{number}")
            oracles[f"t{number}"] = {row[0]: row[1:] for row in cursor.fetchall()}
    named = {
        f"t{n}": {f"c{i}": case for i, case in enumerate(group)} for n, group in enumerate(groups)
    }
    items, _ = read_to_end(mysql, source, position)
    changes = changes_of(items)
    assert len(changes) == sum(map(len, oracles.values()))
    streamed: dict[str, dict[bytes, Any]] = {name: {} for name in named}
    for change in changes:
        assert change.after is not None
        row = dict(zip((c.name for c in change.table.columns), change.after, strict=True))
        name = change.table.name
        same(row, change.table, named[name], oracles[name][int(row["id"])])
        streamed[name][row["id"]] = row
    tables, _ = snapshot_of(source)
    for name, rows in tables.items():
        assert {row["id"]: row for row in rows.values()} == streamed[name]


def document(made: random.Random, depth: int = 0) -> Any:
    kind = made.randrange(9 if depth < 4 else 7)
    if kind == 0:
        return made.choice([None, True, False])
    if kind == 1:
        return made.choice([0, 1, -1, 32767, -32769, 65536, 2**31, -(2**40), 2**63, 2**64 - 1])
    if kind == 2:
        return made.choice([0.5, -1.25, 1e20, 1.5e-7, 3.0, 123456.789])
    if kind < 7:
        return made.choice(["", "a", "\u00fc\U0001f600", 'q"\\', "line\n\t\b", "x" * 300, "/"])
    if kind == 7:
        return [document(made, depth + 1) for _ in range(made.randrange(5))]
    return {
        f"k{made.randrange(50)}\u00e9": document(made, depth + 1) for _ in range(made.randrange(5))
    }


def test_json_is_as_the_server_writes_it(mysql: MySQL, database: str, seed: int) -> None:
    made = random.Random(seed)
    mysql.query("CREATE TABLE t (id INT PRIMARY KEY, j JSON)", database)
    source = source_of(mysql, database)
    position = snapshot_of(source)[1]
    with mysql.connect(database) as connection, connection.cursor() as cursor:
        for i in range(150):
            value = orjson.dumps(document(made)).decode()
            cursor.execute("INSERT INTO t VALUES (%s, %s)", (i, value))
        large = orjson.dumps({f"key{i}": [i, "v" * 50] for i in range(3000)}).decode()
        cursor.execute("INSERT INTO t VALUES (500, %s)", (large,))
        for i, special in enumerate(
            (
                "CAST(CAST('12.50' AS DECIMAL(10,2)) AS JSON)",
                "CAST(CAST('2020-02-03' AS DATE) AS JSON)",
                "CAST(CAST('2020-02-03 04:05:06.7' AS DATETIME(6)) AS JSON)",
                "CAST(CAST('-12:13:14.5' AS TIME(6)) AS JSON)",
                "CAST(X'00FF' AS JSON)",
                "JSON_ARRAY(1e300, CAST(5 AS UNSIGNED))",
                f"JSON_ARRAY({', '.join(f'1.25e{e}' for e in range(-30, 30))})",
                f"JSON_ARRAY({', '.join(f'-1e{e}' for e in range(-30, 30))})",
                "JSON_ARRAY(0e0, 1234567890123456.0e0, 123456789012345.5e0, 1e0/3)",
            )
        ):
            cursor.execute(f"INSERT INTO t VALUES ({600 + i}, {special})")
    items, _ = read_to_end(mysql, source, position)
    streamed = {c.after[0]: c.after[1] for c in changes_of(items) if c.after}
    tables, _ = snapshot_of(source)
    assert streamed == {row["id"]: row["j"] for row in tables["t"].values()}
    assert text(b"") == "null"


def test_streams_go_on_by_gtid(mysql: MySQL, database: str) -> None:
    mysql.query("CREATE TABLE t (id INT PRIMARY KEY)", database)
    source = source_of(mysql, database, options={"gtid": "always"})
    position = snapshot_of(source)[1]
    for i in range(3):
        mysql.query(f"INSERT INTO t VALUES ({i})", database)
    mysql.query("FLUSH BINARY LOGS")
    # Another server's files: only the GTID counts.
    moved = {**position, "file": "other.000099", "pos": 4, "server": "another"}
    items, reached = read_to_end(mysql, source, moved)
    assert [c.after for c in changes_of(items)] == [(b"0",), (b"1",), (b"2",)]
    mysql.query("INSERT INTO t VALUES (9)", database)
    items, _ = read_to_end(mysql, source, reached)
    (part,) = items
    assert isinstance(part, Part)
    assert part.transaction.count(":") == 1
    assert [c.after for c in part.changes] == [(b"9",)]
    foreign = {**moved, "gtid": ""}
    with pytest.raises(PositionLostError, match="no GTID"):
        next(source.stream(foreign))


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_an_xa_transaction_counts_when_it_is_committed(
    mysql: MySQL, database: str, cut: int
) -> None:
    mysql.query("CREATE TABLE t (id INT PRIMARY KEY)", database)
    source = source_of(mysql, database)
    position = snapshot_of(source)[1]
    with mysql.connect(database) as connection, connection.cursor() as cursor:
        for name, end in (("x1", "COMMIT"), ("x2", "ROLLBACK")):
            cursor.execute(f"XA START '{database}{name}'")
            cursor.execute(f"INSERT INTO t VALUES ({name[1]}), ({name[1]}0)")
            cursor.execute(f"XA END '{database}{name}'")
            cursor.execute(f"XA PREPARE '{database}{name}'")
            mysql.query(f"INSERT INTO t VALUES ({name[1]}00)", database)
            cursor.execute(f"XA {end} '{database}{name}'")
        cursor.execute(f"XA START '{database}x4'")
        cursor.execute("INSERT INTO t VALUES (4)")
        cursor.execute(f"XA END '{database}x4'")
        cursor.execute(f"XA COMMIT '{database}x4' ONE PHASE")
    stop, seen = end_of(mysql), []
    while place_of(position) < stop:
        items, position = read_to_end(mysql, source, position, most=cut or None)
        seen += [int(c.after[0]) for c in changes_of(items) if c.after]
    assert seen == [100, 1, 10, 200, 4]


@pytest.mark.timeout(240)
def test_chunks_are_exact(mysql: MySQL, database: str, seed: int) -> None:
    check_chunks(mysql, database, seed, watched=True)


def test_tls_and_the_passwords_of_mysql_8(mysql: MySQL, database: str) -> None:
    mysql.query("CREATE TABLE t (id INT PRIMARY KEY, v VARCHAR(200))", database)
    user = f"u{database}"
    mysql.query(f"CREATE USER {user}@'%' IDENTIFIED WITH caching_sha2_password BY 'p'")
    mysql.query(f"GRANT ALL ON *.* TO {user}@'%'")
    url = mysql.url(database, user=user, password="p")
    authority = mysql.folder / "data" / "ca.pem"
    modes = ["ssl_mode=disabled", "ssl_mode=required", f"ssl_mode=verify_ca&ssl_ca={authority}"]
    expected = [[b"%d" % i for i in range(number, number + 500)] for number in (0, 1000, 2000)]
    for number, mode in enumerate(modes):
        source = source_of(mysql, database, url=f"{url}?{mode}")
        position = snapshot_of(source)[1]
        first = number * 1000
        rows = ", ".join(f"({i}, REPEAT('x', 200))" for i in range(first, first + 500))
        mysql.query(f"INSERT INTO t VALUES {rows}", database)
        items, _ = read_to_end(mysql, source, position)
        assert [c.after[0] for c in changes_of(items) if c.after] == expected[number]
    mysql.query(f"DROP USER {user}@'%'")
