"""Flows that keep state by operators: several streams, several outputs, restarts, refusals."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame

from penstock.spark.flows.declare import Flow, flow, stream, topic
from penstock.spark.flows.folder import Folder
from penstock.spark.state import Shard, apply, layout
from penstock.testing.flows import FlowFailedError, FlowTester

pytestmark = pytest.mark.timeout(600)
# Workers cannot import a module of the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

SPENT = pa.schema([("id", pa.int64()), ("name", pa.string()), ("spent", pa.int64())])
ORDERS = stream("orders", json="customer bigint not null, amount bigint")
CUSTOMERS = stream("shop.customers", debezium="id bigint, name string")


@dataclass(frozen=True, slots=True)
class Spending:
    """What each customer has spent, under the name of now; for those of a micro-batch."""

    kind: str = "spending"
    describes: str = "spent by id"

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        kept = shard.state.table("spent", SPENT, ["id"])
        changed: dict[int, dict[str, Any]] = {}

        def row(key: int) -> dict[str, Any]:
            if key not in changed:
                [found] = kept.get(pa.table({"id": pa.array([key], pa.int64())})).to_pylist()
                changed[key] = {"id": key, "name": found["name"], "spent": found["spent"] or 0}
            return changed[key]

        for change in inputs["customers"].to_pylist() if "customers" in inputs else ():
            row(change["key"])["name"] = change["name"]
        for order in inputs["orders"].to_pylist() if "orders" in inputs else ():
            row(order["key"])["spent"] += order["amount"]
        rows = pa.Table.from_pylist([changed[key] for key in sorted(changed)], SPENT)
        kept.put(rows)
        return rows


def spent(orders: DataFrame, customers: DataFrame) -> DataFrame:
    taken = {
        "orders": orders.selectExpr("customer as key", "amount"),
        "customers": customers.selectExpr(
            "coalesce(_after.id, _before.id) as key", "_after.name as name"
        ),
    }
    return apply(
        taken, Spending(), key=["key"], schema="id bigint, name string, spent bigint"
    )  # fmt: skip


def spending(where: str = "true", operator: str = "spent by id") -> Flow:
    @flow(
        inputs=[ORDERS, CUSTOMERS],
        outputs={"rich": topic("rich", key="id"), "all": topic("all", key="id")},
        shards=3,
        name="spending",
    )
    def body(orders: DataFrame, customers: DataFrame) -> dict[str, DataFrame]:
        taken = {
            "orders": orders.selectExpr("customer as key", "amount"),
            "customers": customers.selectExpr(
                "coalesce(_after.id, _before.id) as key", "_after.name as name"
            ),
        }
        rows = apply(
            taken,
            Spending(describes=operator),
            key=["key"],
            schema="id bigint, name string, spent bigint",
        ).where(where)
        return {"rich": rows.where("spent >= 100"), "all": rows}

    return body


def customer(op: str, before: Any, after: Any) -> dict[str, Any]:
    return {"op": op, "before": before, "after": after}


def test_state_goes_on_over_several_streams_and_outputs(tester: FlowTester) -> None:
    tester.use(spending())
    ann, bob = {"id": 1, "name": "Ann"}, {"id": 2, "name": "Bob"}
    changes = [customer("c", None, ann), {"payload": customer("r", None, bob)}, None, {"op": None}]
    tester.feed("shop.customers", changes, key=["1", "2", "2", "3"])
    tester.feed("orders", [{"customer": 1, "amount": 60}, "nonsense", {"customer": 2, "amount": 5}])
    status = tester.run()["spending"]
    assert tester.table("all") == {
        "1": {**ann, "spent": 60},
        "2": {**bob, "spent": 5},
    }
    assert tester.rows("rich") == []
    assert (status.progress.rows_out, status.progress.dead_letters) == (2, 2)
    assert status.progress.rows_in == 7
    assert len(tester.records("orders.dead")) == len(tester.records("shop.customers.dead")) == 1
    # What Spark sees to be empty is not computed for the output, but for the state it is.
    tester.use(spending(where="false"))
    tester.feed("orders", [{"customer": 1, "amount": 30}])
    tester.run()
    assert len(tester.rows("all")) == 2
    tester.use(spending())
    tester.feed("shop.customers", [customer("u", ann, {"id": 1, "name": "Anna"})], key=["1"])
    tester.feed("orders", [{"customer": 1, "amount": 10}])
    tester.run()
    assert tester.rows("rich") == [{"id": 1, "name": "Anna", "spent": 100}]
    found = layout.find(Folder(tester.data).checkpoint("spending", 1))
    assert found is not None
    assert found.shards == 3
    # Another state is refused.
    tester.use(spending(operator="spent by day"))
    with pytest.raises(
        FlowFailedError, match="the state it keeps was that of spending-1: spent by"
    ):
        tester.run()


def test_state_of_ours_and_of_spark_are_not_mixed(tester: FlowTester) -> None:
    @flow(inputs=[ORDERS, CUSTOMERS], output=topic("sums", key="name"))
    def mixed(orders: DataFrame, customers: DataFrame) -> DataFrame:
        return spent(orders, customers).groupBy("name").count()

    tester.use(mixed)
    with pytest.raises(FlowFailedError, match=r"operators \(spending-1\) and by Spark's own") as no:
        tester.run()
    assert "two flows" in no.value.advice


def test_a_changelog_without_envelopes(tester: FlowTester) -> None:
    names = stream("names", changelog="name string")

    @flow(inputs=names, output=topic("changes"))
    def changes(rows: DataFrame) -> DataFrame:
        return rows.selectExpr("cast(_key as string) as id", "_op as op", "_after.name as name")

    tester.use(changes)
    tester.feed("names", [{"name": "Ann"}, None, {"name": "?"}], key=["1", "1", None])  # type: ignore[list-item]
    # What only says that time has passed is not shown.
    tester.feed("names", [None], key=["penstock.heartbeat"])
    tester.run()
    assert tester.rows("changes") == [
        {"id": "1", "op": "u", "name": "Ann"},
        {"id": "1", "op": "d", "name": None},
    ]
    [letter] = tester.records("names.dead")
    assert letter.headers["penstock.error.reason"] == b"the record has no key"
