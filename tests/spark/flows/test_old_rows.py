"""Flows that use `_before` of tables whose updates come without it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import orjson
import pytest
from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.flows.declare import flow, stream, topic
from penstock.spark.flows.inputs import Place
from penstock.spark.flows.old_rows import OldRows, OldRowsWatch
from penstock.spark.flows.planning import uses_old_rows
from penstock.testing import Broker
from penstock.testing.change_events import ChangeEvents
from penstock.testing.flows import FlowTester
from tests.spark.feeding import client, create
from tests.waiting import eventually

ORDER = {"id": 1, "total": 5}


def values(*, full_identity: bool, name: str = "shop.orders") -> list[bytes]:
    table = ChangeEvents(name, ["id"], full_identity=full_identity)
    return [orjson.dumps(table.upsert(ORDER, at)) for at in range(3)]


def test_the_last_update_of_each_table_decides() -> None:
    without, full = values(full_identity=False), values(full_identity=True)
    assert OldRows.of(without[:1]).tables == {}
    assert OldRows.of(without).missing == ["public.orders"]
    assert OldRows.of([*without, *full]).missing == []
    other = values(full_identity=True, name="shop.customers")
    assert OldRows.of([*without, *other]).tables == {
        "public.orders": False, "public.customers": True
    }  # fmt: skip
    wrapped = [orjson.dumps({"schema": {}, "payload": orjson.loads(each)}) for each in without]
    assert OldRows.of(wrapped).missing == ["public.orders"]
    assert OldRows.of([None, b"x", b"[1]", b"{}"]).tables == {}


def feed(broker: Broker, name: str, events: list[bytes]) -> None:
    producer = Producer(client(broker))
    for each in events:
        producer.produce(name, each)
    producer.flush(60)


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker() as found:
        yield found


def test_it_is_looked_until_there_is_an_update(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(broker.bootstrap, {}, lambda name: name)
    inserted, *updated = values(full_identity=False)
    create(broker, "shop.orders")
    feed(broker, "shop.orders", [inserted])
    # The database is asked while the log says nothing.
    asked: list[tuple[str, ...]] = []

    def ask(topics: tuple[str, ...]) -> dict[str, list[str]]:
        asked.append(topics)
        return {}

    watch = OldRowsWatch(place, "totals", ["shop.orders"], ask, look_s=0.01)  # type: ignore[arg-type]
    watch.start()
    assert asked == [("shop.orders",)]
    assert not caplog.records
    feed(broker, "shop.orders", updated)
    found = eventually(lambda: watch.found)
    watch.close()
    assert found
    told, advice = found
    assert told == (
        "flow 'totals' uses _before of shop.orders, and updates of public.orders come without the "
        "old row: _before is null in them"
    )
    assert "ALTER TABLE public.orders REPLICA IDENTITY FULL" in advice
    assert [each.getMessage() for each in caplog.records] == [f"{told}. {advice}"]


def test_what_is_a_use_of_old_rows(spark: SparkSession) -> None:
    rate = spark.readStream.format("rate").load()
    row = F.struct(F.col("value").alias("id"), F.col("value").alias("total"))
    rows = rate.select(row.alias("_before"), row.alias("_after"), F.lit("u").alias("_op"))
    for used in (
        rows.select(F.col("_after.total") - F.col("_before.total")),
        rows.where("_before.total > 1").select("_after.*"),
        rows.select("_before.*"),
        rows.where("_before is null").select("_after.id"),
        rows.select(F.col("_before").alias("old")),
        rows.select(F.expr("coalesce(_before.total, _after.total)")),
        rows.select(F.expr("coalesce(_after.total - _before.total, 0)")),
    ):
        assert uses_old_rows([used])
    for unused in (
        rows.select("_after.*"),
        rows.where("_op = 'u'"),
        rows.select("*").union(rows),
        rows.select(F.expr("coalesce(_after.id, _before.id)").alias("id")),
        # As a view has the key of a captured table.
        rows.select(F.expr("coalesce(_after.id, _before.id, CAST(upper(_op) AS bigint))")),
    ):
        assert not uses_old_rows([unused])


@pytest.mark.timeout(600)
def test_a_flow_says_so_when_it_starts(
    tester: FlowTester, caplog: pytest.LogCaptureFixture
) -> None:
    @flow(inputs=stream("shop.orders", debezium="id bigint, total bigint"), output=topic("grown"))
    def grown(orders: DataFrame) -> DataFrame:
        return orders.where("_op = 'u'").selectExpr("_after.total - _before.total as by")

    tester.use(grown)
    tester.feed_table("shop.orders", [ORDER], key="id")
    tester.feed_table("shop.orders", [{"id": 1, "total": 7}], key="id")
    with caplog.at_level(logging.WARNING):
        assert tester.run()["grown"].error == ""
    assert tester.rows("grown") == [{"by": 2}]
    tester.feed_table("shop.orders", [{"id": 1, "total": 8}], key="id", full_identity=False)
    status = tester.run()["grown"]
    assert "updates of public.orders come without the old row" in status.error
    assert "ALTER TABLE public.orders REPLICA IDENTITY FULL" in status.advice
