"""`penstock verify --query` on PostgreSQL and MariaDB: each type as the server means it."""

from __future__ import annotations

import datetime as dt
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pyarrow as pa
import pytest

from penstock.cli.project import load
from penstock.cli.sinks_file import named
from penstock.cli.verifying import Report, verify
from penstock.cli.verifying.origins import log_ends
from penstock.client.connection import Cluster
from penstock.sinks import Position, Schema
from penstock.testing.mariadb import MariaDB
from penstock.testing.postgres import PostgresServer
from penstock.testing.sinks import changes, never
from tests.cli.runner import run
from tests.cli.test_verify import Feeder, running

pytestmark = pytest.mark.timeout(300)
POSTGRES = (
    """
    CREATE TABLE orders (
        id bigint PRIMARY KEY, amount numeric(12,2), large numeric(30,10), day date, at timestamptz,
        local timestamp, clock time, data bytea, doc jsonb, tag uuid, flag boolean, small real,
        wide double precision, numbers int[], name text)
    """,
    """
    INSERT INTO orders VALUES
        (1, 111.00, 12345678901234567890.0123456789, '2026-11-17', '2026-11-17 10:00:00.123456+02',
         '2026-11-17 10:00', '10:20:30.5', '\\x00ff', '{"b": [1.50, null], "a": "ü"}',
         '00000000-0000-0000-0000-0000000000ff', true, 0.1, 1e-7, '{1,NULL,3}', 'näme 🦆'),
        (2, -0.50, 0, '1970-01-01', '1960-01-01 00:00Z', '0900-01-01', '00:00', '', '[]', NULL,
         false, 'NaN', '-0', '{}', '')
    """,
    "INSERT INTO orders (id) VALUES (3)",
)
MARIADB = (
    """
    CREATE TABLE orders (
        id bigint PRIMARY KEY, amount decimal(12,2), large decimal(30,10), day date,
        at timestamp(6) NULL, local datetime(6), clock time(6), data varbinary(20), doc json,
        flag tinyint(1), small float, wide double, big bigint unsigned, kind enum('a','b'),
        name varchar(20) CHARACTER SET utf8mb4)
    """,
    """
    INSERT INTO orders VALUES
        (1, 111.00, 12345678901234567890.0123456789, '2026-11-17', '2026-11-17 10:00:00.123456',
         '2026-11-17 10:00', '10:20:30.5', X'00ff', '{"b": [1.50, null], "a": "x"}', 1, 16777216,
         1e-7, 9223372036854775807, 'b', 'näme 🦆'),
        (2, -0.50, 0, '1970-01-01', '1990-01-01', '1000-01-01', '00:00', '', '[]', 0, 0.1, 0,
         0, 'a', '')
    """,
    "INSERT INTO orders (id) VALUES (3)",
)


@dataclass
class Server:
    """A captured table of types, and a sink of it."""

    name: str
    kind: str
    at: str
    execute: Callable[[str], object]

    def verify(self, query: str) -> Report:
        return verify(load(), self.name, "store", query=query, timeout_s=60, bootstrap=self.at)


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.databases) for name in ("postgres", "mariadb")]
)
def server(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> Iterator[Server]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)
    name = f"s{uuid4().hex[:8]}"
    if request.param == "mariadb":
        mariadb: MariaDB = request.getfixturevalue("shared_mariadb")
        database = mariadb.create_database()
        url, topic = mariadb.url(database), f"{name}.{database}.orders"
        for each in MARIADB:
            mariadb.query(each, database)
        _write(name, url, topic)
        with running(name, at):
            yield Server(name, "mariadb", at, lambda sql: mariadb.query(sql, database))
        return
    postgres: PostgresServer = request.getfixturevalue("shared_postgres")
    url = postgres.create_database()
    with psycopg.connect(url, autocommit=True) as connection:
        for each in POSTGRES:
            connection.execute(each.encode())
        _write(name, url, f"{name}.public.orders")
        with running(name, at):
            yield Server(name, "postgres", at, lambda sql: connection.execute(sql.encode()))


def _write(name: str, url: str, topic: str) -> None:
    Path("penstock.toml").write_text(
        f'[capture.{name}]\nurl = "{url}"\n'
        f'[sinks.store]\ntopic = "{topic}"\nurl = "sqlite:///store.db"\n'
    )


def test_every_type_is_compared_as_the_server_means_it(server: Server) -> None:
    Feeder("store", server.at).once()
    report = server.verify("SELECT * FROM orders;")
    assert (report.equal, report.rows, report.not_compared) == (True, 3, ()), report.differences
    # The answer has other types for the same values, and other rows than those captured.
    assert server.verify("SELECT id, amount + 0.000 AS amount FROM orders").equal
    found = server.verify("SELECT id, amount + 0.001 AS amount FROM orders WHERE id < 3")
    assert sorted((each.kind, each.key["id"]) for each in found.differences) == [
        ("extra", 3), ("other", 1), ("other", 2),
    ]  # fmt: skip
    server.execute("UPDATE orders SET amount = 111.01, day = NULL WHERE id = 1")
    with Feeder("store", server.at):
        assert server.verify("SELECT * FROM orders").equal


def test_each_wrong_value_of_the_store_is_found(server: Server) -> None:
    Feeder("store", server.at).once()
    with closing(sqlite3.connect("store.db")) as store:
        names = [each[1] for each in store.execute("PRAGMA table_info(store)") if each[1] != "id"]
        with store:
            for name in names:
                # The store's own values of other rows are of the right form.
                store.execute(
                    f'UPDATE store SET "{name}" = (SELECT "{name}" FROM store WHERE id = 1)'
                    " WHERE id = 3"
                )
    report = server.verify("SELECT * FROM orders")
    (found,) = report.differences
    assert set(found.columns) == set(names)


def test_what_the_server_says_is_shown(server: Server) -> None:
    Feeder("store", server.at).once()
    for query, told in (
        ("SELECT id, nothing FROM orders", "nothing"),
        ("SELEC 1", "yntax"),
        ("DELETE FROM orders", "DELETE" if server.kind == "postgres" else "READ ONLY transaction"),
        ("SELECT 1; SELECT 2", "multiple" if server.kind == "postgres" else "syntax"),
    ):
        ran = run("verify", server.name, "store", "-q", query)
        assert ran.status == 2, ran.err
        assert told in ran.err
        assert "does not take the query" in ran.err
        assert "Traceback" not in ran.err
    assert server.verify("SELECT id FROM orders").rows == 3


def test_a_store_from_before_types_were_known(server: Server) -> None:
    """Its texts are read as the numbers that the table has."""
    spec = named(load(), "store")
    schema = Schema.of(
        [pa.field("id", pa.int64()), pa.field("amount", pa.string()), pa.field("day", pa.int64())],
        "id",
    )
    rows: list[dict[str, Any]] = [
        {"id": 1, "amount": "bw==", "day": 20774},
        {"id": 2, "amount": "-0.5", "day": 0},
        {"id": 3, "amount": None, "day": None},
    ]
    with Cluster(server.at) as cluster, spec.sink() as store:
        store.open(schema)
        made = changes(schema, rows, [], since=0, until=1)
        made = replace(made, position=log_ends(cluster, spec.topic), since=Position())
        store.apply(made, never)
    table = spec.topic.partition(".")[2]
    report = verify(load(), f"{server.name}.{table}", "store", timeout_s=60, bootstrap=server.at)
    found = {each.key["id"]: dict(each.columns) for each in report.differences}
    day = dt.date(2026, 11, 17), 20774
    assert found[1]["amount"] == (Decimal("111.00"), "bw==")
    assert found[1]["day"] == day
    # The number is right, and a whole number is no date.
    assert "amount" not in found[2]
    assert found[2]["day"] == (dt.date(1970, 1, 1), 0)
    assert 3 not in found or not {"amount", "day"} & found[3].keys()
    # The same against a query.
    report = server.verify("SELECT id, amount, day FROM orders")
    assert {each.key["id"]: sorted(each.columns) for each in report.differences} == {
        1: ["amount", "day"], 2: ["day"],
    }  # fmt: skip
    assert server.verify("SELECT id, amount FROM orders").count == 1


def test_a_table_that_is_altered_while_it_is_compared(server: Server) -> None:
    table = named(load(), "store").topic.partition(".")[2]
    with Feeder("store", server.at):
        for each in (
            "ALTER TABLE orders ADD COLUMN extra decimal(10,3)",
            "UPDATE orders SET extra = 1.125 WHERE id = 1",
            "ALTER TABLE orders ALTER COLUMN amount TYPE numeric(20,4)"
            if server.kind == "postgres" else "ALTER TABLE orders MODIFY amount decimal(20,4)",
            "INSERT INTO orders (id, amount, extra) VALUES (4, 1234567890.1234, -0.001)",
        ):  # fmt: skip
            server.execute(each)
            report = verify(load(), f"{server.name}.{table}", "store", timeout_s=60,
                            bootstrap=server.at)  # fmt: skip
            assert report.equal, report.differences
        report = server.verify("SELECT id, amount, extra FROM orders")
        assert (report.equal, report.rows) == (True, 4), report.differences
        topic = f"topic:{named(load(), 'store').topic}"
        report = verify(load(), server.name, topic, query="SELECT id, amount, extra FROM orders",
                        timeout_s=60, bootstrap=server.at)  # fmt: skip
        assert (report.equal, report.rows) == (True, 4), report.differences
