"""Views in flows: change events in, a changelog out, and in batch the same."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.spark import flow, stream, topic
from penstock.spark.views import of, sql
from penstock.testing.flows import FlowTester

pytestmark = pytest.mark.timeout(600)

ORDERS = "id bigint not null, customer_id int, amount decimal(10,2), state string"
CUSTOMERS = "id bigint not null, country string"
SQL = """
SELECT country, count(*) AS n, sum(amount) AS revenue, max(amount) AS top
FROM orders o LEFT JOIN customers c ON o.customer_id = c.id
WHERE state <> 'void' GROUP BY country HAVING count(*) > 0
"""


def order(id_: int, customer: int | None, amount: float, state: str = "paid") -> dict[str, Any]:
    return {"id": id_, "customer_id": customer, "amount": amount, "state": state}


def test_a_view_in_a_flow_follows_its_tables(tester: FlowTester) -> None:
    @flow(
        inputs=[
            stream("shop.orders", debezium=ORDERS),
            stream("shop.customers", debezium=CUSTOMERS),
        ],
        output=topic("revenue", key="_key", compacted=True),
    )
    def revenue(orders: DataFrame, customers: DataFrame) -> DataFrame:
        keys = {"orders": "id", "customers": "id"}
        return sql(SQL, keys, orders=orders, customers=customers).changes()

    tester.use(revenue)
    tester.feed_table("shop.customers", [{"id": 1, "country": "de"}], key="id")
    rows = [order(1, 1, 10.5), order(2, 2, 5), order(3, 1, 7, "void"), order(4, None, 1)]
    tester.feed_table("shop.orders", rows, key="id")
    tester.run()
    found = {each["country"]: each for each in tester.table("revenue").values()}
    assert found["de"] == {"country": "de", "n": 1, "revenue": 10.5, "top": 10.5}
    assert (found[None]["n"], found[None]["revenue"]) == (2, 6.0)
    # A late customer takes its order along; an order is changed, one deleted without saying what
    # it was; and one comes twice.
    tester.feed_table("shop.customers", [{"id": 2, "country": "fr"}], key="id")
    tester.feed_table("shop.orders", [order(1, 1, 11)], key="id")
    tester.feed("shop.orders", [{"op": "d", "before": None, "after": None}], key=['{"id":4}'])
    tester.feed_table("shop.orders", [order(2, 2, 5)], key="id")
    before = len(tester.records("revenue"))
    tester.run()
    assert tester.table("revenue") == {
        '{"country":"de"}': {"country": "de", "n": 1, "revenue": 11.0, "top": 11.0},
        '{"country":"fr"}': {"country": "fr", "n": 1, "revenue": 5.0, "top": 5.0},
    }
    assert len(tester.records("revenue")) <= before + 3


def test_in_batch_over_dataframes(penstock_spark: SparkSession) -> None:
    spark = penstock_spark
    orders = spark.createDataFrame(
        [(1, 1, Decimal("1.50"), "paid"), (2, 1, Decimal("2.00"), "open"),
         (3, 9, Decimal("4.00"), "paid")],
        ORDERS,
    )  # fmt: skip
    customers = spark.createDataFrame([(1, "de")], CUSTOMERS)
    people = of(customers, "customers", key="id")
    joined = of(orders, "orders", key="id").join(
        people, on="orders.customer_id = customers.id", how="left"
    )
    assert joined.key == ("id", "customers_id")
    view = joined.where("state = 'paid'").group_by("country").agg(n="count(*)", s="sum(amount)")
    assert view.key == ("country",)
    found = {row["country"]: (row["n"], row["s"], row["_deleted"])
             for row in view.changes().collect()}  # fmt: skip
    assert found == {"de": (1, Decimal("1.50"), False), None: (1, Decimal("4.00"), False)}
    shown = joined.select("orders.id", where="coalesce(country, '?')")
    assert shown.key == ("id", "_customers_id")
    both = of(orders, "o", key="id").select("id").union(of(customers, "c", key="id").select("id"))
    assert sorted(row["id"] for row in both.changes().collect()) == [1, 1, 2, 3]
    total = of(orders, "o", key="id").agg(n="count(*)")
    assert [(row["n"], row["_all"]) for row in total.changes().collect()] == [(3, "all")]
