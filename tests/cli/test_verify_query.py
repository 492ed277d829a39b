"""`penstock verify --query`: what a flow has made of the log, against the database's own answer."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from penstock.cli.project import load
from penstock.cli.verifying import Report, VerifyError, verify
from penstock.cli.verifying.flow_graph import FlowGraph
from penstock.cli.verifying.origins import log_ends
from penstock.client.connection import Cluster
from penstock.client.reading import last_values
from penstock.client.topics import create
from penstock.client.writer import LogWriter
from penstock.spark.flows.folder import Folder, Record
from tests.cli.runner import run
from tests.cli.test_verify import Feeder, running

pytestmark = pytest.mark.timeout(300)
QUERY = """
SELECT country, count(*) AS orders, sum(price) AS price FROM orders WHERE paid GROUP BY country
"""
COUNTRIES = ("DE", "FR", "Ünited")


@dataclass
class Revenue:
    """Does what the view of `QUERY` does, in micro-batches, with a checkpoint as Spark has it."""

    at: str
    source: str
    target: str
    folder: Path
    # Added to the number of orders of a country.
    wrong: dict[str, int] = field(default_factory=dict)
    batch: int = -1
    _told: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        record = Record(
            "revenue", inputs=(f"stream {self.source} (debezium id bigint)",),
            outputs=(f"topic {self.target}",),
        )  # fmt: skip
        data = Folder(self.folder)
        data.write(record)
        self._checkpoint = Path(data.checkpoint("revenue", 1))
        for name in ("offsets", "commits"):
            (self._checkpoint / name).mkdir(parents=True)

    def step(self, cluster: Cluster, writer: LogWriter) -> None:
        """One micro-batch."""
        end = log_ends(cluster, self.source)
        rows = [json.loads(each)["after"] for each in last_values(cluster, self.source).values()]
        made: dict[str, Any] = {}
        for row in rows:
            if row is not None and row["paid"]:
                counts = made.setdefault(row["country"], [0, Decimal(0)])
                counts[0] += 1
                counts[1] += Decimal(row["price"])
        told = {
            country: json.dumps(
                {"country": country, "orders": count + self.wrong.get(country, 0),
                 "price": str(price)}
            ).encode()
            for country, (count, price) in made.items()
        }  # fmt: skip
        changed = {each: told.get(each) for each in {*told, *self._told}
                   if told.get(each) != self._told.get(each)}  # fmt: skip
        if changed:
            keys = [json.dumps({"country": each}).encode() for each in changed]
            writer.write(self.target, keys, list(changed.values()))
            writer.flush()
        self._told = told
        self.batch += 1
        offsets = json.dumps(end.as_json()[self.source])
        text = f'v1\n{{"batchWatermarkMs":0}}\n{{"{self.source}": {offsets}}}\n'
        (self._checkpoint / "offsets" / str(self.batch)).write_text(text)
        (self._checkpoint / "commits" / str(self.batch)).write_text(
            'v1\n{"nextBatchWatermarkMs":0}'
        )

    def __enter__(self) -> Revenue:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with Cluster(self.at) as cluster, LogWriter(cluster) as writer:
            while not self._stop.wait(0.1):
                self.step(cluster, writer)

    def once(self) -> None:
        """Read what is there."""
        with Cluster(self.at) as cluster, LogWriter(cluster) as writer:
            self.step(cluster, writer)


@dataclass
class Shop:
    """A captured database, its view and two sinks."""

    name: str
    flow: Revenue
    at: str

    def execute(self, sql: str, *values: Any) -> None:
        with closing(sqlite3.connect("shop.db", timeout=60)) as database, database:
            database.execute(sql, values)

    def verify(
        self, sink: str = "revenue", query: str = QUERY, *, timeout_s: float = 60,
        tolerance: float = 1e-12,
    ) -> Report:  # fmt: skip
        # SQLite adds up as floats.
        return verify(load(), self.name, sink, query=query, timeout_s=timeout_s, bootstrap=self.at,
                      float_tolerance=tolerance)  # fmt: skip


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> Iterator[Shop]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)
    name = f"s{uuid4().hex[:8]}"
    with closing(sqlite3.connect("shop.db")) as database, database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute(
            "CREATE TABLE orders (id INTEGER PRIMARY KEY, country TEXT, price TEXT, paid BOOLEAN)"
        )
        database.executemany(
            "INSERT INTO orders VALUES (?, ?, ?, ?)",
            [(n, COUNTRIES[n % 3], f"{n}.10", n % 5 > 0) for n in range(60)],
        )
    Path("penstock.toml").write_text(
        f'[capture.{name}]\nurl = "sqlite:///shop.db"\n'
        f'[sinks.revenue]\ntopic = "{name}.revenue"\nurl = "sqlite:///revenue.db"\n'
        'key = "country"\nfields = "country string, orders bigint, price decimal(20,2)"\n'
        'format = "json"\n'
        f'[sinks.orders]\ntopic = "{name}.orders"\nurl = "sqlite:///orders.db"\n'
    )
    with Cluster(at) as cluster:
        create(cluster, f"{name}.revenue", partitions=2, config={"cleanup.policy": "compact"})
    flow = Revenue(at, f"{name}.orders", f"{name}.revenue", Path(".penstock") / "flows")
    with running(name, at):
        yield Shop(name, flow, at)


def differences(report: Report) -> set[tuple[str, str, tuple[str, ...]]]:
    return {(e.kind, e.key["country"], tuple(sorted(e.columns))) for e in report.differences}


def test_a_view_follows_while_it_is_compared(shop: Shop) -> None:
    stop, written = threading.Event(), threading.Semaphore(0)

    def write() -> None:
        number = 100
        while not stop.wait(0.02):
            number += 1
            shop.execute("INSERT INTO orders VALUES (?, ?, ?, 1)", number, "DE", f"{number}.05")
            shop.execute("DELETE FROM orders WHERE id = ?", number - 3)
            written.release()

    thread = threading.Thread(target=write, daemon=True)
    with shop.flow, Feeder("revenue", shop.at):
        thread.start()
        try:
            for _ in range(5):
                written.acquire()
            with suppress(VerifyError):
                # The key that is written all the time may not come to rest; others must.
                report = shop.verify(timeout_s=5)
                assert report.equal, report.differences
            # A busy key that is wrong is never taken for right, however near its counts are.
            shop.flow.wrong["DE"] = 1
            with suppress(VerifyError):
                report = shop.verify(timeout_s=3)
                assert {each.key["country"] for each in report.differences} == {"DE"}
            shop.flow.wrong.clear()
        finally:
            stop.set()
            thread.join()
        report = shop.verify()
        assert (report.equal, report.rows, report.not_compared) == (True, 3, ())
        # The same against the topic itself.
        assert shop.verify(f"topic:{shop.name}.revenue").equal


def test_what_a_flow_does_wrong_is_found(shop: Shop) -> None:
    shop.flow.wrong["FR"] = 1
    with shop.flow, Feeder("revenue", shop.at):
        report = shop.verify()
        assert differences(report) == {("other", "FR", ("orders",))}
        shop.execute("UPDATE orders SET country = 'IT' WHERE country = 'DE'")
        report = shop.verify()
        assert differences(report) == {("other", "FR", ("orders",))}
        assert report.rows == 3
    with closing(sqlite3.connect("revenue.db", timeout=60)) as store, store:
        store.execute("DELETE FROM revenue WHERE country = 'IT'")
        store.execute("INSERT INTO revenue (country, orders) VALUES ('XX', 1)")
        store.execute("UPDATE revenue SET orders = orders - 1 WHERE country = 'FR'")
    report = shop.verify()
    assert differences(report) == {("missing", "IT", ()), ("extra", "XX", ())}
    # Of the topic, nothing has been changed by that.
    assert differences(shop.verify(f"topic:{shop.name}.revenue")) == {("other", "FR", ("orders",))}


def test_the_command(shop: Shop) -> None:
    with shop.flow, Feeder("revenue", shop.at):
        ran = run("verify", shop.name, "revenue", "-q", f"{QUERY};", "--json",
                  "--float-tolerance", "1e-12").ok()  # fmt: skip
        assert (ran.json["equal"], ran.json["rows"], ran.json["stored_rows"]) == (True, 3, 3)
        # As the file of a view.
        Path("q.sql").write_text(
            "-- topic revenue\n-- table orders = shop.orders(id bigint) key id\n"
            "SELECT country, count(*) AS Orders FROM orders GROUP BY 1;\n"
        )
        ran = run("verify", shop.name, "revenue", "--query-file", "q.sql")
        assert ran.status == 1
        assert "other orders" in ran.out
        assert "does not have it: price" in ran.err
        assert "DIFFERENT: 3 keys; 3 rows compared" in ran.err
    # Nothing was written to the database, and nothing can be.
    assert "readonly database" in refused(shop.name, "revenue", "-q", "DELETE FROM orders")


def refused(*args: str) -> str:
    ran = run("verify", *args)
    assert ran.status == 2, (ran.status, ran.out, ran.err)
    assert "Traceback" not in ran.err
    return " ".join(ran.err.split())


def test_what_cannot_be_compared(shop: Shop) -> None:
    shop.flow.once()
    Feeder("revenue", shop.at).once()
    name = shop.name
    for query, told in (
        ("SELECT count(*) AS orders FROM orders", "the query has no column country, by which"),
        ("SELECT country, count(*) FROM orders GROUP BY 1",
         "revenue has no column count(*), as the query does"),
        ("SELECT country, colour FROM orders", "no such column: colour"),
        ("SELECT country FROM orders", "several rows of country = "),
        ("SELECT country, 1 AS orders, 2 AS orders FROM orders", "has column orders twice"),
        ("SELECT 1; SELECT 2", "one statement at a time"),
        (" ; ", "the query is empty"),
    ):  # fmt: skip
        assert told in refused(name, "revenue", "-q", query)
    assert "SELECT ... AS country" in refused(name, "revenue", "-q", "SELECT 1 AS orders")
    assert "of its columns the query lacks orders, price" in refused(
        name, "revenue", "-q", "SELECT country, count(*) FROM orders GROUP BY 1"
    )
    assert "is no capture" in refused(f"{name}.orders", "revenue", "-q", QUERY)
    assert "has no capture 'nosuch'" in refused("nosuch", "revenue", "-q", QUERY)
    assert "topic nosuch does not exist" in refused(name, "topic:nosuch", "-q", QUERY)
    assert "is compared with a query" in refused(f"{name}.orders", f"topic:{name}.revenue")
    assert "is for --query" in refused(f"{name}.orders", "orders", "--float-tolerance", "1e-9")
    assert "is not known in elsewhere" in refused(name, "revenue", "-q", QUERY, "-d", "elsewhere")
    # The flow does not run, and has not read what is new.
    shop.execute("INSERT INTO orders VALUES (1000, 'DE', '1.00', 1)")
    assert "flow revenue has not read" in refused(name, "revenue", "-q", QUERY, "-t", "5s")


def test_a_key_without_a_value_is_set_aside(shop: Shop) -> None:
    shop.execute("INSERT INTO orders VALUES (1000, NULL, '1.00', 1)")
    with shop.flow, Feeder("revenue", shop.at):
        report = shop.verify()
        assert [(e.kind, e.key["key"]) for e in report.differences] == [("aside", "NULL")]
        assert (report.rows, report.set_aside, report.equal) == (3, 1, False)


def test_a_table_under_other_names_and_types(shop: Shop) -> None:
    Feeder("orders", shop.at).once()
    query = "SELECT id, country, price || '0' AS price, paid FROM orders"
    # A text is what it is; a number is the same with another zero.
    report = shop.verify("orders", query)
    assert (report.count, report.rows) == (60, 60)
    assert shop.verify("orders", "SELECT id, price, paid FROM orders").equal
    assert shop.verify("orders", "SELECT id, paid + 0.0 AS paid FROM orders").equal
    # Two empty answers say so.
    shop.execute("DELETE FROM orders")
    with Feeder("orders", shop.at):
        assert shop.verify("orders", query).empty


def test_floats_within_a_tolerance(shop: Shop) -> None:
    shop.flow.once()
    Feeder("revenue", shop.at).once()
    query = QUERY.replace("sum(price)", "sum(price) * 1.0000001")
    assert shop.verify(query=query).count == 3
    assert shop.verify(query=query, tolerance=1e-6).equal
    assert shop.verify(query=query, tolerance=1e-8).count == 3
    # Whole numbers are never near enough.
    query = QUERY.replace("count(*)", "count(*) + 1")
    assert shop.verify(query=query, tolerance=1.0).count == 3


def test_versions_of_what_a_flow_writes(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write(Record("first", inputs=("stream shop.orders (raw)", "table shop.names (raw)"),
                        outputs=("topic totals.v3", "sqlite:///x.db"), generation=3))  # fmt: skip
    folder.write(Record("second", inputs=("stream totals (json n int), late ones to x",),
                        outputs=("topic tops",)))  # fmt: skip
    folder.write(Record("loop", inputs=("stream b (raw)",), outputs=("topic a", "topic b")))
    flows = FlowGraph(tmp_path)
    assert [each.name for each in flows.upstream("tops")] == ["first", "second"]
    assert [each.name for each in flows.upstream("totals")] == ["first"]
    assert [each.name for each in flows.upstream("a")] == ["loop"]
    assert (flows.resolve("totals"), flows.resolve("totals.v3")) == ("totals.v3", "totals.v3")
    assert (flows.resolve("tops"), flows.resolve("other")) == ("tops", "other")
    assert flows.writer("shop.orders") is None
