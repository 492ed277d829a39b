"""Views from the command line over a captured database: made, run, followed, dropped."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.testing.reading import read_topic
from tests.cli.runner import Live, run, run_until, share_session
from tests.cli.test_verify import running
from tests.waiting import eventually

WAIT_S = 200.0
POLL_S = 0.1

TABLES = """
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, amount REAL);
CREATE TABLE customers (id INTEGER PRIMARY KEY, country TEXT);
INSERT INTO customers VALUES (1, 'de'), (2, 'fr');
INSERT INTO orders VALUES (1, 1, 1.5), (2, 2, 3.0), (3, 9, 4.5), (4, 1, 6.0);
"""
CHANGES = """
UPDATE orders SET amount = 100 WHERE id = 1;
DELETE FROM orders WHERE id = 2;
INSERT INTO customers VALUES (9, 'it');
"""
REVENUE = """revenue AS SELECT country, count(*) AS n, sum(amount) AS revenue
FROM orders o LEFT JOIN customers c ON o.customer_id = c.id GROUP BY country"""


def script(path: Path, text: str) -> None:
    with closing(sqlite3.connect(path, timeout=60)) as database:
        database.executescript(text)


def shown(at: str, topic: str) -> list[dict[str, Any]]:
    """What a compacted topic comes to, by key."""
    found = {each.key: each for each in read_topic(at, topic)}
    rows = [each.json() for each in found.values() if each.value is not None]
    return sorted(rows, key=lambda row: str(row["country"]))


@pytest.mark.timeout(300)
def test_views_follow_a_captured_database(
    tmp_path: Path, at: str, penstock_spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_session(penstock_spark, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)
    script(tmp_path / "shop.db", "PRAGMA journal_mode=WAL;" + TABLES)
    run("capture", "add", "shop", "sqlite:///shop.db").ok()

    def look(_: Live) -> None:
        eventually(lambda: shown(at, "rich") == [{"country": "de", "revenue": 7.5}], WAIT_S, POLL_S)
        assert shown(at, "revenue") == [
            {"country": None, "n": 1, "revenue": 4.5},
            {"country": "de", "n": 2, "revenue": 7.5},
            {"country": "fr", "n": 1, "revenue": 3.0},
        ]
        script(tmp_path / "shop.db", CHANGES)
        wanted = [
            {"country": "de", "n": 2, "revenue": 106.0},
            {"country": "it", "n": 1, "revenue": 4.5},
        ]
        eventually(lambda: shown(at, "revenue") == wanted, WAIT_S, POLL_S)
        eventually(
            lambda: shown(at, "rich") == [{"country": "de", "revenue": 106.0}], WAIT_S, POLL_S
        )

    with running("shop", at):
        # Types are checked when the views run.
        with monkeypatch.context() as without_java:
            without_java.setenv("JAVA_HOME", os.devnull)
            made = run("view", "create", REVENUE, "-t", "orders=shop.orders", "-t",
                       "customers=shop.customers").ok()  # fmt: skip
            # A view over a view, whose topic is not there before it runs.
            spec = "r=revenue(country string, n bigint, revenue double) key country changelog"
            rich = "rich AS SELECT country, revenue FROM r WHERE revenue > 5"
            run("view", "create", rich, "-t", spec).ok()
        assert "as its records show: orders = shop.orders(id bigint, customer_id bigint" in made.err
        data = str(tmp_path / "data")
        ran = run_until(look, "run", "--views", "--data", data, stop=signal.SIGTERM).ok()
        assert "Traceback" not in ran.err
    run("view", "drop", "rich", "--yes").ok()
    run("view", "drop", "revenue", "--yes").ok()
    assert "the project has no views" in run("run", "--views").err
