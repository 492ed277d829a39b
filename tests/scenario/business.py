"""A business: its database, its log, and all that is derived from it, which must agree.

What is derived is compared in two ways that have nothing in common: with the text that the
database itself prints, read here with each store's own client, and by `penstock verify`.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from decimal import Decimal
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import orjson
import psycopg
from pyspark.sql import DataFrame, SparkSession

from penstock.capture.delivery.control import send, snapshot_signal
from penstock.cli.project import load
from penstock.cli.sinks_file import declared
from penstock.cli.verifying import Report, verify
from penstock.client.connection import Cluster
from penstock.sinks.stores import open_sink
from penstock.spark import enrich, flow, stream, topic, views
from penstock.spark import windows as w
from penstock.spark.flows.declare import Collected, Flow
from penstock.spark.flows.folder import Folder
from penstock.spark.flows.manager import Manager
from penstock.spark.flows.overseeing import Settings
from penstock.spark.flows.supervisor import Policy
from penstock.spark.sinking.folder import SinkFolder
from penstock.spark.sinking.manager import SinkManager
from penstock.testing import Broker
from penstock.testing.reading import read_topic
from tests.capture.delivery.running import new_name
from tests.capture.kit.capturing import CaptureProcess
from tests.cli.migrating import producer
from tests.scenario.databases import Database
from tests.spark.types.random_tables import moment, number, text, whole
from tests.waiting import eventually

REVENUE: Final = (
    "SELECT country, count(*) AS n, sum(amount) AS total FROM orders "
    "JOIN customers ON orders.customer_id = customers.id GROUP BY country"
)
ORDERS_STORES: Final = ("orders_sqlite", "orders_same", "orders_parquet")
WAIT_S: Final = 240.0
T = TypeVar("T")
LATENESS_S: Final = 300
POLICY: Final = Policy(first_pause_s=0.1, longest_pause_s=1.0, max_tries=50)
_TOML: Final = """
[capture.{name}]
url = "{url}"
[sinks.orders_sqlite]
topic = "{orders}"
url = "sqlite:///stores.db?table=orders"
[sinks.orders_same]
topic = "{orders}"
url = "{store}"
[sinks.orders_parquet]
topic = "{orders}"
url = "parquet:///orders"
[sinks.kinds]
topic = "{kinds}"
url = "sqlite:///kinds.db?table=kinds"
max_dead_share = 1
[sinks.revenue]
topic = "revenue"
url = "sqlite:///revenue.db?table=revenue"
key = "country"
fields = "country string, n bigint, total decimal(38,4)"
"""


def until(check: Callable[[], T]) -> T:
    """As `eventually`, and looking less often: much is looked at, and many steps take seconds."""
    return eventually(check, WAIT_S, poll_s=0.3)


def reached(found: Callable[[], Mapping[Any, Any]], wanted: Mapping[Any, Any]) -> None:
    """Wait until something derived is what the database has; AssertionError with the difference."""
    try:
        until(lambda: found() == wanted)
    except AssertionError:
        last = found()
        keys = [key for key in wanted if last.get(key) != wanted[key]]
        shown = {key: (last.get(key), wanted[key]) for key in keys[:2]}
        more = last.keys() - wanted.keys()
        raise AssertionError(f"{len(keys)} differ: {shown}; too many: {len(more)}") from None


class Business:
    """Runs in the current folder, which is its project."""

    def __init__(self, spark: SparkSession, database: Database, log: Broker) -> None:
        self.spark, self.database, self.log = spark, database, log
        self.name = new_name()
        self.folder = Path.cwd()
        store = database.store_url
        self._same_url = f"{store}{'&' if '?' in store else '?'}table=orders"
        self._project()
        self.capture = self._capture()
        self.flows: Manager | None = None
        self.sinks: SinkManager | None = None
        self.has_payments = True
        # What was logged so far.
        self.told: Callable[[], str] = str
        # The columns of the table of orders as it is now, and what their texts mean.
        self.columns: dict[str, Callable[[Any], Any]] = {
            "id": whole, "customer_id": whole, "amount": number, "placed": moment, "note": text,
        }  # fmt: skip
        self.next_id = 1
        # What was paid: the rate that was valid at the time, by payment.
        self.paid: dict[str, Decimal] = {}

    def topic_of(self, table: str) -> str:
        return f"{self.name}.{self.database.schema}{table}"

    def _project(self) -> None:
        names = {each: self.topic_of(each) for each in ("orders", "kinds")}
        Path("penstock.toml").write_text(
            _TOML.format(name=self.name, url=self.database.url, store=self._same_url, **names)
        )

    def _capture(self) -> CaptureProcess:
        settings = {"url": self.database.url, "idle_ms": 100}
        return CaptureProcess(self.name, settings, self.log.bootstrap, self.folder / "capture.log")

    # ---- flows ---------------------------------------------------------------------------

    def _flows(self) -> tuple[Flow, ...]:
        orders = stream(self.topic_of("orders"), on_schema_change="follow")
        customers = stream(self.topic_of("customers"))
        rates = stream(self.topic_of("rates"), time="_timestamp")
        payments = stream(
            "payments",
            json="payment string, country string, amount decimal(10,2), at timestamp",
            time="at",
            lateness="5 minutes",
        )

        @flow(inputs=[orders, customers], output=topic("revenue", key="_key", compacted=True))
        def revenue(orders: DataFrame, customers: DataFrame) -> DataFrame:
            keys: dict[str, Any] = {"orders": "id", "customers": "id"}
            return views.sql(REVENUE, keys=keys, orders=orders, customers=customers).changes()

        @flow(inputs=[payments, rates], output=topic("priced", key="payment"))
        def priced(payments: DataFrame, rates: DataFrame) -> DataFrame:
            once = w.deduplicated(payments, key=["payment"], within="1 hour", order="log")
            found = enrich(once, rates, on=["country"], columns=["rate"], version="as_of")
            return found.select("payment", "amount", "rate", "at")

        return (revenue, priced) if self.has_payments else (revenue,)

    # ---- what runs -----------------------------------------------------------------------

    def start(self) -> None:
        self.capture.start()
        for table in ("orders", "customers", "rates"):
            until(partial(read_topic, self.log.bootstrap, self.topic_of(table)))
        settings = Settings(self.log.bootstrap, policy=POLICY)
        self.flows = Manager(
            self.spark, Collected.of(self._flows()), Folder(self.folder / "flows"), settings
        )
        self.sinks = SinkManager(
            self.spark, declared(load()), SinkFolder(self.folder / "sinks"), settings,
            self.flows.resolve, self.flows.make,
        )  # fmt: skip
        parts: tuple[Manager | SinkManager, ...] = (self.flows, self.sinks)
        self._running = [threading.Thread(target=part.run, daemon=True) for part in parts]
        for part, thread in zip(parts, self._running, strict=True):
            part.start()
            thread.start()

    def stop(self) -> None:
        self.capture.kill()
        for each in (self.flows, self.sinks):
            if each is not None:
                each.stop()
        for thread in self._running:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        for each in (self.flows, self.sinks):
            if each is not None:
                each.close()

    @contextmanager
    def running(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()

    def move(self, log: Broker) -> None:
        """Go on with another log."""
        self.log = log
        self.capture = self._capture()

    def flow(self, name: str) -> Any:
        assert self.flows is not None
        return next(each for each in self.flows.status() if each.name == name)

    def sink(self, name: str) -> Any:
        assert self.sinks is not None
        return next(each for each in self.sinks.status() if each.name == name)

    def failed(self, of: Callable[[str], Any], name: str) -> Any:
        """The status of a flow, or a sink, once it has stopped."""
        return until(lambda: found if (found := of(name)).state == "failed" else None)

    def snapshot(self, table: str, where: str) -> None:
        with Cluster(self.log.bootstrap) as cluster:
            send(cluster, self.name, snapshot_signal(self.database.schema + table, where=where))

    # ---- what happens --------------------------------------------------------------------

    def order(self, random: Random, count: int) -> None:
        """New orders, in one transaction."""
        statements = []
        values = []
        for _ in range(count):
            cents, month = random.randint(-(10**9), 10**9), random.randint(1, 12)
            row = {
                "id": str(self.next_id), "customer_id": str(random.randint(1, 20)),
                "amount": f"{Decimal(cents).scaleb(-2)}",
                "placed": f"'2026-{month:02d}-17 10:11:12.{cents % 10**6:06d}'",
                "note": f"'{'é' * random.randint(0, 3)} {cents}'", "remark": "'later'",
                "channel": "'shop'",
            }  # fmt: skip
            values.append(f"({', '.join(row[each] for each in self.columns)})")
            self.next_id += 1
        for start in range(0, count, 500):
            rows = ", ".join(values[start : start + 500])
            statements.append(f"INSERT INTO orders ({', '.join(self.columns)}) VALUES {rows}")
        self.database.run(statements)

    def pay(self, *values: bytes) -> None:
        made = producer(self.log.bootstrap)
        for each in values:
            made.produce("payments", each)
        made.flush(30)

    def rate(self, country: str, rate: str) -> None:
        """Set a rate; it counts from the moment when the log has it."""
        rates = self.topic_of("rates")
        before = len(read_topic(self.log.bootstrap, rates))
        self.database.run([
            f"DELETE FROM rates WHERE country = '{country}'",
            f"INSERT INTO rates VALUES ('{country}', {rate})",
        ])  # fmt: skip
        until(lambda: len(read_topic(self.log.bootstrap, rates)) > before)

    def payment(self, country: str, amount: str, rate: str = "", *, ago_s: float = 0) -> bytes:
        """A payment of now, with the rate that it should find; its time is Python's own."""
        name = f"p{self.next_id}"
        self.next_id += 1
        if rate:
            self.paid[name] = Decimal(rate)
        at = time.time() - ago_s
        return (
            f'{{"payment":"{name}","country":"{country}","amount":{amount},"at":{at!r}}}'
        ).encode()

    def let_go(self, rate: str) -> None:
        """Let event time pass what was paid: by a payment, and a rate, that nothing is asked of."""
        self.rate("XX", rate)
        self.pay(self.payment("XX", "1", ago_s=-LATENESS_S - 1))
        passed = time.time() + 1
        # What is paid next is not late.
        until(lambda: time.time() > passed)

    # ---- what must be so -----------------------------------------------------------------

    def agrees(self, *, thoroughly: bool = False) -> None:
        """All that is derived has what the database has."""
        wanted, totals = self.orders(), self.revenue()
        for name in ORDERS_STORES:
            reached(partial(self.stored, name), wanted)
        reached(partial(self.in_topic, "revenue"), totals)
        reached(self.stored_revenue, totals)
        for name in ORDERS_STORES[: len(ORDERS_STORES) if thoroughly else 1]:
            self.verified(f"{self.name}.{self.database.schema}orders", name, rows=len(wanted))
        self.verified(self.name, "topic:revenue", rows=len(totals), query=REVENUE)
        if thoroughly:
            self.verified(self.name, "revenue", rows=len(totals), query=REVENUE)

    def verified(self, source: str, sink: str, *, rows: int, query: str = "") -> Report:
        report = verify(load(), source, sink, query=query, timeout_s=WAIT_S,
                        bootstrap=self.log.bootstrap, data=self.folder / "flows")  # fmt: skip
        assert report.equal, report.differences
        assert report.rows == rows
        return report

    def orders(self) -> dict[int, tuple[Any, ...]]:
        """As the database prints them."""
        forms = {"placed": self.database.moment}
        columns = [forms.get(name, self.database.text).format(c=name) for name in self.columns]
        return self._meant(self.database.ask(f"SELECT {', '.join(columns)} FROM orders"))

    def stored(self, name: str) -> dict[int, tuple[Any, ...]]:
        """As a store has them; nothing where it has not all columns yet."""
        names = ", ".join(self.columns)
        try:
            if name == "orders_sqlite":
                with closing(sqlite3.connect("stores.db")) as sql:
                    return self._meant(sql.execute(f"SELECT {names} FROM orders").fetchall())
            if name == "orders_same" and self.database.kind == "postgresql":
                with psycopg.connect(self.database.store_url) as sql_:
                    sql_.execute("SET timezone TO 'UTC'")
                    return self._meant(
                        sql_.execute(f"SELECT {names} FROM orders".encode()).fetchall()
                    )
            url = self._same_url if name == "orders_same" else "parquet:///orders"
            with open_sink(url, {}, name=name) as sink:
                if sink.position() is None:
                    return {}
                rows = [row for batch in sink.scan() for row in batch.to_pylist()]
            return self._meant([tuple(row[each] for each in self.columns) for row in rows])
        except (sqlite3.OperationalError, psycopg.Error, KeyError):
            return {}

    def _meant(self, rows: list[tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
        meanings = tuple(self.columns.values())
        return {
            int(row[0]): tuple(
                None if value is None else means(value)
                for means, value in zip(meanings, row, strict=True)
            )
            for row in rows
        }

    def revenue(self) -> dict[str, tuple[int, Any]]:
        """As the database computes it."""
        sums = self.database.text.format(c="sum(amount)")
        found = self.database.ask(REVENUE.replace("sum(amount)", sums))
        return {str(country): (int(n), number(total)) for country, n, total in found}

    def in_topic(self, name: str) -> dict[str, tuple[int, Any]]:
        """What the topic of the view says: the last record of each key."""
        assert self.flows is not None
        last = {
            each.key: each.value
            for each in read_topic(self.log.bootstrap, self.flows.resolve(name))
        }
        rows = [orjson.loads(value) for value in last.values() if value is not None]
        exact = [self._exact(value) for value in last.values() if value is not None]
        return {row["country"]: (row["n"], own) for row, own in zip(rows, exact, strict=True)}

    def _exact(self, value: bytes) -> Any:
        """The total, with the digits that stand there."""
        return number(value.split(b'"total":')[1].split(b"}")[0].split(b",")[0].decode())

    def stored_revenue(self) -> dict[str, tuple[int, Any]]:
        try:
            with closing(sqlite3.connect("revenue.db")) as sql:
                rows = sql.execute("SELECT country, n, total FROM revenue").fetchall()
        except sqlite3.OperationalError:
            return {}
        return {country: (n, number(total)) for country, n, total in rows}

    def letters(self, name: str) -> list[str]:
        """The reasons in a topic of dead letters."""
        return [
            (each.headers["penstock.error.reason"] or b"").decode()
            for each in read_topic(self.log.bootstrap, name)
        ]

    def prices(self) -> dict[str, Decimal]:
        """The rates that payments have found."""
        assert self.flows is not None
        records = read_topic(self.log.bootstrap, self.flows.resolve("priced"))
        rows = [each.json() for each in records]
        assert len({row["payment"] for row in rows}) == len(rows), "a payment came twice"
        return {row["payment"]: Decimal(str(row["rate"])) for row in rows}
