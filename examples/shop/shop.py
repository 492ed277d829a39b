"""A shop that is busy: customers, products and orders in a database, clicks and payments as events.

    python shop.py --database sqlite:///shop.db --bootstrap 127.0.0.1:9092

Makes the tables and the topics where they are not there yet, and then writes for as long as it is
left to: inserts, updates and deletes in the database, and events straight into the log. About
`--rate` changes of rows a second. Each second a line of JSON on stdout says what was done.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import random
import signal
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

SCHEMA = "penstock_shop"
TABLES = {
    "customers": "id BIGINT NOT NULL PRIMARY KEY, name TEXT, email TEXT, country TEXT",
    "products": (
        "id BIGINT NOT NULL PRIMARY KEY, title TEXT, description TEXT, category TEXT, "
        "price_cents BIGINT, stock BIGINT"
    ),
    "orders": (
        "id BIGINT NOT NULL PRIMARY KEY, customer_id BIGINT, product_id BIGINT, quantity BIGINT, "
        "amount_cents BIGINT, status TEXT, placed_ms BIGINT"
    ),
}
COMPACTED = ("shop.revenue.country", "shop.revenue.minute", "shop.searches")
EVENTS = (
    "shop.clicks", "shop.payments", "shop.clicks.enriched", "shop.top", "shop.carts.abandoned",
    "shop.payments.suspicious", "shop.searches.found", "shop.searches.bad",
)  # fmt: skip
SEARCHES = {
    "cheap-lamps": "title:lamp AND price_cents:<4000",
    "red-things": "title:red",
    "last-chairs": "title:chair AND stock:[1 TO 10]",
    "toys": "category:toys AND price_cents:[1000 TO 9000]",
}
COUNTRIES = ("AT", "BE", "CH", "DE", "DK", "ES", "FR", "IT", "NL", "PL")
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gina", "Hal", "Ines", "Jon", "Kim", "Lea")
COLOURS = ("red", "blue", "green", "white", "black", "yellow")
THINGS = ("lamp", "chair", "table", "kettle", "train", "puzzle", "rug", "mirror", "clock", "doll")
CATEGORIES = ("kitchen", "living", "toys", "garden")
CUSTOMERS, PRODUCTS, ORDERS = 200, 300, 100
STEP_S = 0.05
FLUSH_S = 30.0
WAIT_S = 60.0


class Database:
    """The same few statements for SQLite and PostgreSQL."""

    def __init__(self, url: str) -> None:
        self._is_sqlite = url.startswith("sqlite:///")
        self._connection: Any
        if self._is_sqlite:
            self._connection = sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30)
            self._connection.isolation_level = None
            self._connection.execute("PRAGMA journal_mode=WAL")
        else:
            import psycopg

            self._connection = psycopg.connect(url, autocommit=True)
            self._connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
            self._connection.execute(f"SET search_path TO {SCHEMA}")

    def run(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """A statement with `?` for values; the rows that it gives."""
        cursor = self._connection.execute(
            sql if self._is_sqlite else sql.replace("?", "%s"), values
        )
        return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    @contextmanager
    def transaction(self) -> Iterator[None]:
        # At once the writer, where there can be but one: it could not become it halfway.
        self.run("BEGIN IMMEDIATE" if self._is_sqlite else "BEGIN")
        try:
            yield
        except BaseException:
            self.run("ROLLBACK")
            raise
        self.run("COMMIT")

    def insert(self, table: str, *values: object) -> None:
        marks = ", ".join("?" for _ in values)
        self.run(f"INSERT INTO {table} VALUES ({marks})", *values)

    def next_id(self, table: str) -> int:
        [(last,)] = self.run(f"SELECT coalesce(max(id), 0) FROM {table}")
        return int(last) + 1

    def close(self) -> None:
        self._connection.close()


def make_tables(database: Database, chance: random.Random) -> None:
    """The tables, and who and what is in them at first; nothing if they are there."""
    for name, columns in TABLES.items():
        database.run(f"CREATE TABLE IF NOT EXISTS {name} ({columns})")
    with database.transaction():
        if database.next_id("customers") == 1:
            for number in range(1, CUSTOMERS + 1):
                database.insert("customers", *customer(number, chance))
        if database.next_id("products") == 1:
            for number in range(1, PRODUCTS + 1):
                database.insert("products", *product(number, chance))
        if database.next_id("orders") == 1:
            for number in range(1, ORDERS + 1):
                database.insert("orders", *order(number, chance))


def customer(number: int, chance: random.Random) -> tuple[object, ...]:
    name = chance.choice(NAMES)
    return number, name, f"{name.lower()}.{number}@example.org", chance.choice(COUNTRIES)


def product(number: int, chance: random.Random) -> tuple[object, ...]:
    title = f"{chance.choice(COLOURS)} {chance.choice(THINGS)}"
    about = f"A {title}, number {number}, made to last."
    return (number, title, about, chance.choice(CATEGORIES), chance.randint(500, 30_000),
            chance.randint(0, 100))  # fmt: skip


def order(number: int, chance: random.Random) -> tuple[object, ...]:
    """One of the last hour."""
    placed = _now_ms() - chance.randint(0, 3_600_000)
    return (number, chance.randint(1, CUSTOMERS), chance.randint(1, PRODUCTS), 1,
            chance.randint(500, 30_000), "shipped", placed)  # fmt: skip


def make_topics(bootstrap: str) -> None:
    """The topics of events and of what flows make of them; those that are there stay."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    wanted = [NewTopic(name, num_partitions=1, config={"cleanup.policy": "compact"})
              for name in COMPACTED]  # fmt: skip
    wanted += [NewTopic(name, num_partitions=1) for name in EVENTS]
    # Patiently: the log may be about to be started.
    for future in admin.create_topics(wanted, request_timeout=WAIT_S).values():
        try:
            future.result(WAIT_S)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise


class Shop:
    """What happens in the shop, moment by moment."""

    def __init__(self, database: Database, send: Callable[[str, str, Any], None], rate: float):
        self._database = database
        self._send = send
        self._rate = rate
        self._chance = random.Random()
        self._ids = {name: itertools.count(database.next_id(name)) for name in TABLES}
        # What is to happen later: when, a number to tell them apart, and what.
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.done: Counter[str] = Counter()

    def step(self, seconds: float) -> None:
        """All that happens in so long."""
        now = time.monotonic()
        with self._database.transaction():
            while self._later and self._later[0][0] <= now:
                heapq.heappop(self._later)[2]()
            # A visit makes about one and a half changes of rows.
            visits = self._rate * seconds / 1.5
            for _ in range(int(visits) + (self._chance.random() < visits % 1)):
                self._visit()
            if self._chance.random() < 0.2 * seconds * self._rate / 10:
                self._restock()
            if self._chance.random() < 0.05 * seconds * self._rate / 10:
                self._move()
            if self._chance.random() < 0.5 * seconds:
                self._try_card()

    def _visit(self) -> None:
        """Somebody looks at things, may fill a cart, and may order."""
        who = self._chance.randint(1, CUSTOMERS)
        # Some things are liked better than others.
        likes = [1 + int(PRODUCTS * self._chance.random() ** 3) for _ in range(3)]
        for what in likes:
            self._click(who, what, "view")
        if self._chance.random() < 0.7:
            self._click(who, likes[-1], "cart")
            if self._chance.random() < 0.9:
                self._after(self._chance.uniform(0.2, 4), lambda: self._order(who, likes[-1]))

    def _order(self, who: int, what: int) -> None:
        number, many = next(self._ids["orders"]), self._chance.randint(1, 3)
        found = self._database.run("SELECT price_cents FROM products WHERE id = ?", what)
        if not found:
            return
        cents = int(found[0][0]) * many
        self._database.insert("orders", number, who, what, many, cents, "placed", _now_ms())
        self._database.run("UPDATE products SET stock = stock - ? WHERE id = ?", many, what)
        self._count("insert", "update")
        self._click(who, what, "order")
        self._pay(f"card-{who}", who, cents)
        after = self._chance.random()
        if after < 0.6:
            self._after(self._chance.uniform(1, 5), lambda: self._change(number, "shipped"))
        elif after < 0.7:
            self._after(self._chance.uniform(1, 5), lambda: self._change(number, "cancelled"))
        elif after < 0.8:
            self._after(self._chance.uniform(1, 5), lambda: self._delete(number))

    def _change(self, number: int, status: str) -> None:
        self._database.run("UPDATE orders SET status = ? WHERE id = ?", status, number)
        self._count("update")

    def _delete(self, number: int) -> None:
        self._database.run("DELETE FROM orders WHERE id = ?", number)
        self._count("delete")

    def _restock(self) -> None:
        """A thing comes in again, sometimes at another price; now and then a new one."""
        what = self._chance.randint(1, PRODUCTS)
        self._database.run(
            "UPDATE products SET stock = stock + 20, price_cents = ? WHERE id = ?",
            self._chance.randint(500, 30_000), what,
        )  # fmt: skip
        self._count("update")
        if self._chance.random() < 0.2:
            self._database.insert("products", *product(next(self._ids["products"]), self._chance))
            self._count("insert")

    def _move(self) -> None:
        """A customer moves: all that was paid there is then of another country."""
        self._database.run(
            "UPDATE customers SET country = ? WHERE id = ?",
            self._chance.choice(COUNTRIES), self._chance.randint(1, CUSTOMERS),
        )  # fmt: skip
        self._count("update")

    def _try_card(self) -> None:
        """Somebody tries whether a card that is not theirs still works."""
        who = self._chance.randint(1, CUSTOMERS)
        card = f"stolen-{who}"
        for cents in (100, 150, self._chance.randint(60_000, 200_000)):
            self._pay(card, who, cents)

    def _click(self, who: int, what: int, kind: str) -> None:
        event = {"customer_id": who, "product_id": what, "kind": kind, "at": _now()}
        self._send("shop.clicks", str(who), event)
        self._count("click")

    def _pay(self, card: str, who: int, cents: int) -> None:
        event = {"card": card, "customer_id": who, "cents": cents, "at": _now()}
        self._send("shop.payments", card, event)
        self._count("payment")

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), do))

    def _count(self, *kinds: str) -> None:
        self.done.update(kinds)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _now() -> str:
    return datetime.now(UTC).isoformat()


def sender(producer: Producer) -> Callable[[str, str, Any], None]:
    """Sends events as JSON; waits while more are on the way than the client keeps."""

    def send(topic: str, key: str, value: Any) -> None:
        data = value if isinstance(value, str) else json.dumps(value)
        while True:
            try:
                producer.produce(topic, key=key, value=data)
            except BufferError:
                producer.poll(0.1)
            else:
                producer.poll(0)
                return

    return send


def trade(database: Database, producer: Producer, rate: float, stop: threading.Event) -> None:
    """Go on until told to stop; what was done is told each second."""
    shop = Shop(database, sender(producer), rate)
    last = told = time.monotonic()
    while not stop.wait(STEP_S):
        now = time.monotonic()
        shop.step(min(now - last, 1.0))
        last = now
        if now - told >= 1:
            print(json.dumps(shop.done), flush=True)
            told = now
    producer.flush(FLUSH_S)
    print(json.dumps(shop.done), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--database", default="sqlite:///shop.db", metavar="URL")
    at = os.environ.get("PENSTOCK_BOOTSTRAP", "127.0.0.1:9092")
    options.add_argument("--bootstrap", default=at, metavar="HOST:PORT")
    options.add_argument("--rate", type=float, default=50.0, metavar="CHANGES_PER_SECOND")
    options.add_argument("--only-tables", action="store_true", help="make the tables, and end")
    options.add_argument("--only-topics", action="store_true", help="make the topics, and end")
    given = options.parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    # First the tables: whoever captures them need not wait for the log.
    database = Database(given.database)
    make_tables(database, random.Random(1))
    if not given.only_tables:
        try:
            make_topics(given.bootstrap)
        except (KafkaException, TimeoutError) as error:
            told = str(error) or f"no answer in {WAIT_S:.0f} s"
            print(f"the topics cannot be made at {given.bootstrap}: {told}", file=sys.stderr)
            return 1
        producer = Producer({
            "bootstrap.servers": given.bootstrap, "enable.idempotence": True, "linger.ms": 20,
            "log_level": 0,
        })  # fmt: skip
        # Again at each start: the last value of each name counts.
        for name, query in SEARCHES.items():
            sender(producer)("shop.searches", name, query)
        if producer.flush(FLUSH_S):
            print(f"nothing takes records at {given.bootstrap}", file=sys.stderr)
            return 1
        if not given.only_topics:
            trade(database, producer, given.rate, stop)
    database.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
