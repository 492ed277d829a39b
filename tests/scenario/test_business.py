"""A business on PostgreSQL, and on MariaDB: everything that may happen to it, one after the other.

Real servers, a captured database, flows and sinks that say nothing of types, and people who alter
tables meanwhile. After each step everything that is derived has the values that the database has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from penstock.spark.flows import published
from penstock.testing import Broker
from penstock.testing.mariadb import MariaDB
from penstock.testing.postgres import PostgresServer
from penstock.testing.reading import read_topic
from tests.cli.migrating import clients, create, short_waits  # noqa: F401
from tests.cli.runner import run
from tests.harness.profiles import BUSINESS_ROWS, BUSINESS_TYPE_ROWS
from tests.scenario.business import Business, until
from tests.scenario.databases import Database, mariadb, postgresql
from tests.spark.types.random_tables import RandomTable
from tests.spark.types.test_random_tables import compare, from_sqlite

pytestmark = [
    pytest.mark.databases,
    pytest.mark.timeout(1800),
    # The rates rest, and their topic gets no heartbeats: each would be a micro-batch.
    pytest.mark.filterwarnings("ignore::penstock.spark.UnboundedStateWarning"),
]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(published, "WATCH_S", 0.2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)


@pytest.fixture
def random(seed: int) -> Random:
    return Random(seed)


@pytest.fixture
def log() -> Iterator[Broker]:
    with Broker() as broker:
        yield broker


@pytest.fixture
def business(
    penstock_spark: SparkSession, log: Broker, random: Random, caplog: pytest.LogCaptureFixture
) -> Callable[[Database], tuple[Business, RandomTable]]:
    def made(database: Database) -> tuple[Business, RandomTable]:
        shop, kinds = opened(penstock_spark, database, log, random)
        # Whatever format earlier tests have left.
        shop.told = lambda: "\n".join(each.getMessage() for each in caplog.records)
        return shop, kinds

    return made


Made = Callable[[Database], tuple[Business, RandomTable]]


def test_on_postgresql(business: Made, shared_postgres: PostgresServer, random: Random) -> None:
    shop, kinds = business(postgresql(shared_postgres))
    with shop.running():
        shop.agrees()
        every_type_is_stored(shop, kinds)
        payments_find_the_rate_of_their_time(shop)
        what_cannot_be_read_is_put_aside(shop)
        a_column_is_added(shop, random)
        a_large_transaction_and_a_kill(shop, random)
        everything_is_truncated(shop, random)
        money_gets_more_digits(shop, random)
        shop.agrees(thoroughly=True)


def test_on_mariadb(business: Made, shared_mariadb: MariaDB, random: Random) -> None:
    shop, kinds = business(mariadb(shared_mariadb))
    # Each flow that runs costs seconds.
    shop.has_payments = False
    with shop.running():
        every_type_is_stored(shop, kinds)
        a_column_is_added(shop, random)
        a_large_transaction_and_a_kill(shop, random)
        everything_is_truncated(shop, random)


@pytest.mark.proof
def test_all_of_it_on_postgresql(
    business: Made, shared_postgres: PostgresServer, random: Random
) -> None:
    all_of_it(*business(postgresql(shared_postgres)), random)


@pytest.mark.proof
def test_all_of_it_on_mariadb(business: Made, shared_mariadb: MariaDB, random: Random) -> None:
    all_of_it(*business(mariadb(shared_mariadb)), random)


def all_of_it(shop: Business, kinds: RandomTable, random: Random) -> None:
    with shop.running():
        shop.agrees()
        every_type_is_stored(shop, kinds)
        payments_find_the_rate_of_their_time(shop)
        what_cannot_be_read_is_put_aside(shop)
        a_column_is_added(shop, random)
        a_column_is_renamed(shop, random)
        a_large_transaction_and_a_kill(shop, random)
        everything_is_truncated(shop, random)
        money_gets_more_digits(shop, random)
        a_column_is_dropped(shop, random)
        the_broker_dies(shop, random)
        shop.agrees(thoroughly=True)
    with Broker() as other:
        everything_moves(shop, other, random)


# ---- the steps -------------------------------------------------------------------------------


def opened(
    spark: SparkSession, database: Database, log: Broker, random: Random
) -> tuple[Business, RandomTable]:
    """The tables, and what is in them on the first day."""
    database.run(database.tables)
    kinds = database.every_type(random, BUSINESS_TYPE_ROWS)
    for each in kinds.statements:
        database.run([each])
    customers = [
        f"INSERT INTO customers VALUES ({id_}, 'c{id_}', '{random.choice(['DE', 'FR', 'NL'])}')"
        for id_ in range(1, 21)
    ]
    database.run([*customers, "INSERT INTO rates VALUES ('XX', 1.000)"])
    shop = Business(spark, database, log)
    shop.order(random, 30)
    create(log.bootstrap, "payments", 1)
    return shop, kinds


def every_type_is_stored(shop: Business, kinds: RandomTable) -> None:
    """As the database prints it; what no store can hold is set aside, and named."""
    truth = kinds.meanings(shop.database.ask(kinds.query))
    wanted = {id_: row for id_, row in truth.items() if kinds.fits(row)}
    letters = f"{shop.topic_of('kinds')}.dead"

    def is_all_there() -> bool:
        aside = len(read_topic(shop.log.bootstrap, letters)) if len(wanted) < len(truth) else 0
        return bool(shop.sink("kinds").put + aside >= len(truth))

    until(is_all_there)
    found = kinds.meanings(from_sqlite(Path("kinds.db"), kinds)) if wanted else {}
    compare("sqlite", kinds, found, wanted)


def payments_find_the_rate_of_their_time(shop: Business) -> None:
    """An as-of join, with payments that come twice, and one that comes too late."""
    shop.rate("DE", "1.100")
    twice = shop.payment("DE", "12.34", "1.100")
    shop.pay(twice, twice)
    shop.rate("DE", "1.250")
    shop.pay(shop.payment("DE", "0.01", "1.250"), twice, shop.payment("DE", "5", ago_s=7200))
    shop.let_go("2.000")
    until(lambda: shop.paid.items() <= shop.prices().items())
    late = until(lambda: read_topic(shop.log.bootstrap, "payments.late"))
    assert len(late) == 1, late


def what_cannot_be_read_is_put_aside(shop: Business) -> None:
    """Poison: none of it stops a flow, or makes what is right late."""
    shop.pay(
        b"{",
        shop.payment("DE", "1.239"),
        shop.payment("DE", "1", ago_s=-86_400),
        b'{"payment":"ms","country":"DE","amount":1,"at":1767225600000}',
        shop.payment("DE", "7.77", "1.250"),
    )
    shop.let_go("3.000")
    until(lambda: shop.paid.items() <= shop.prices().items())
    reasons = until(lambda: shop.letters("payments.dead"))
    assert reasons[:2] == [
        "the value is not valid JSON",
        "field amount is not decimal(10,2): 1.239",
    ]
    assert "after its record was written" in reasons[2]
    assert "year 57971" in reasons[3]
    assert len(reasons) == 4
    assert shop.flow("priced").state == "running"


def a_column_is_added(shop: Business, random: Random) -> None:
    """With a default: the message names the command that reads the rows again which it changes."""
    shop.database.run([shop.database.add_column])
    shop.columns["channel"] = str
    shop.order(random, 5)
    # The flow follows, with its state; sinks do by themselves.
    until(lambda: "It is started again, to get what is new." in shop.told())
    assert "flow 'revenue': table" in shop.told()
    where = "channel IS NOT NULL"
    until(lambda: f'orders --where "{where}"' in shop.told())
    shop.snapshot("orders", where)
    shop.agrees()


def a_column_is_renamed(shop: Business, random: Random) -> None:
    """A flow that reads it stops and says why; started again it goes on with its state."""
    shop.database.run([shop.database.rename_column])
    shop.columns = {("remark" if name == "note" else name): each
                    for name, each in shop.columns.items()}  # fmt: skip
    shop.order(random, 5)
    failed = shop.failed(shop.flow, "revenue")
    assert "column note is gone" in failed.error
    assert shop.flows is not None
    shop.flows.answer({"do": "restart", "flow": "revenue"})
    shop.snapshot("orders", "remark IS NOT NULL")
    shop.agrees()


def a_large_transaction_and_a_kill(shop: Business, random: Random) -> None:
    """The capture is killed while it writes it."""
    shop.capture.kill()
    shop.capture.start(steps=3)
    shop.order(random, BUSINESS_ROWS)
    until(lambda: not shop.capture.is_alive)
    shop.capture.kill()
    shop.capture.start()
    shop.agrees()


def everything_is_truncated(shop: Business, random: Random) -> None:
    shop.database.run(["TRUNCATE TABLE orders"])
    until(lambda: not shop.stored("orders_sqlite"))
    shop.order(random, 20)
    shop.agrees()


def money_gets_more_digits(shop: Business, random: Random) -> None:
    """Sinks follow; a view whose state cannot is built anew, and its readers go along."""
    shop.database.run([shop.database.change_type])
    shop.order(random, 5)
    shop.database.run(["UPDATE orders SET amount = amount + 0.0001"])
    failed = shop.failed(shop.flow, "revenue")
    assert "column amount is" in failed.error
    assert shop.flows is not None
    shop.flows.reset("revenue")
    shop.agrees()


def a_column_is_dropped(shop: Business, random: Random) -> None:
    shop.database.run([shop.database.drop_column])
    del shop.columns["remark"]
    shop.order(random, 5)
    failed = shop.failed(shop.flow, "revenue")
    assert "column remark is gone" in failed.error
    assert shop.flows is not None
    shop.flows.answer({"do": "restart", "flow": "revenue"})
    shop.agrees()


def the_broker_dies(shop: Business, random: Random) -> None:
    shop.log.crash()
    shop.log.start()
    shop.order(random, 5)
    shop.agrees()


def everything_moves(shop: Business, other: Broker, random: Random) -> None:
    """`penstock migrate`: capture, flows and sinks go on in another cluster; those that keep
    offsets in a way that cannot be translated say so, and what helps."""
    run("migrate", "--from", shop.log.bootstrap, "--to", other.bootstrap).ok()
    shop.move(other)
    shop.order(random, 5)
    with shop.running():
        assert shop.flows is not None
        assert shop.sinks is not None
        parquet = shop.failed(shop.sink, "orders_parquet")
        assert "this is another cluster than the one it was fed from" in parquet.error
        assert "penstock sinks rebuild orders_parquet" in parquet.advice
        shop.sinks.answer({"do": "rebuild", "sink": "orders_parquet"})
        priced = shop.failed(shop.flow, "priced")
        assert "was moved to another cluster" in priced.error
        shop.flows.reset("priced")
        shop.agrees(thoroughly=True)
        until(lambda: shop.paid.items() <= shop.prices().items())
