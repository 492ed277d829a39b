"""Flows that keep state by operators: several streams, several outputs, restarts, refusals."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions
from pyspark import cloudpickle
from pyspark.sql import DataFrame

from penstock.client import topics
from penstock.spark import views, windows, within
from penstock.spark.flows.declare import Flow, flow, stream, topic
from penstock.spark.flows.folder import Folder
from penstock.spark.flows.heartbeats import Heartbeats, Idleness
from penstock.spark.flows.inputs import Place
from penstock.spark.flows.stream_parts import rows_at_once
from penstock.spark.reading.heartbeat_keys import HEARTBEAT
from penstock.spark.state import Shard, apply, layout
from penstock.testing.flows import FlowFailedError, FlowTester
from penstock.testing.reading import read_topic
from tests.waiting import eventually

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
    assert status.progress.state_rows == 2
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
    with pytest.raises(FlowFailedError, match="spending-1: was id, now day"):
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
    tester.feed("names", [None, None], key=["penstock.heartbeat", HEARTBEAT.decode()])
    tester.run()
    assert tester.rows("changes") == [
        {"id": "1", "op": "u", "name": "Ann"},
        {"id": "1", "op": "d", "name": None},
    ]
    [letter] = tester.records("names.dead")
    assert letter.headers["penstock.error.reason"] == b"the record has no key"


@dataclass(frozen=True, slots=True)
class Marks:
    """How many rows a shard has, and the watermark."""

    kind: str = "marks"
    describes: str = "marks"

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        assert shard.watermark_us is not None
        count = len(inputs["rows"]) if "rows" in inputs else 0
        return pa.table({"rows": [count], "mark": [shard.watermark_us], "shard": [shard.number]})


def test_late_records_go_aside_and_heartbeats_close(tester: FlowTester) -> None:
    times = stream("times", json="id bigint, at timestamp", time="at", lateness="10 seconds")

    @flow(inputs=times, output=topic("marks"), shards=2)
    def marks(rows: DataFrame) -> DataFrame:
        taken = {"rows": rows.select("id", "_time", "_offset")}
        return apply(taken, Marks(), key=["id"], schema="rows bigint, mark bigint, shard int")

    def row(number: int, seconds: int) -> dict[str, Any]:
        return {"id": number, "at": tester.now + timedelta(seconds=seconds)}

    def mark(seconds: int) -> int:
        return int((start + timedelta(seconds=seconds)).timestamp() * 1_000_000)

    tester.use(marks)
    start = tester.now
    tester.feed(
        "times", [row(1, 60), row(2, 50), row(3, 49), {"id": 4, "at": None}], key=list("1234")
    )
    status = tester.run()["marks"]
    found = tester.rows("marks")
    assert {each["shard"] for each in found} == {0, 1}
    assert sum(each["rows"] for each in found) == 2
    assert {each["mark"] for each in found} == {mark(50)}
    [late] = tester.records("times.late")
    assert late.json() == {"id": 3, "at": (start + timedelta(seconds=49)).isoformat()}
    assert late.key == b"3"
    assert late.headers["penstock.late.offset"] == b"2"
    assert int(late.headers["penstock.late.watermark"] or 0) * 1000 == mark(50)
    [dead] = tester.records("times.dead")
    assert dead.headers["penstock.error.reason"] == b"the event time at is missing or null"
    assert (status.progress.late_rows, status.progress.dead_letters) == (1, 1)
    assert status.progress.watermark == "2026-01-01T00:00:50.000Z"
    # A heartbeat: time passes without a row; what comes after it may be late for it.
    tester.advance(100)
    tester.feed("times", [None], key=[HEARTBEAT.decode()])
    status = tester.run()["marks"]
    assert [each["rows"] for each in tester.rows("marks")[2:]] == [0, 0]
    assert {each["mark"] for each in tester.rows("marks")[2:]} == {mark(90)}
    assert status.progress.rows_out == 2
    # Another one that is behind it says nothing, and is not late either.
    tester.advance(-50)
    tester.feed("times", [None], key=["penstock.heartbeat"])
    tester.feed("times", [{"id": 5, "at": start + timedelta(seconds=89)}])
    assert tester.run()["marks"].progress.late_rows == 1
    assert len(tester.records("times.late")) == 2


def test_what_comes_late_out_of_a_join_is_refused_with_advice(tester: FlowTester) -> None:
    schema = "k bigint, at timestamp"
    left, right = (
        stream(each, json=schema, time="at", idle="1 hour") for each in ("left", "right")
    )

    @flow(inputs=[left, right], output=topic("once"), shards=2)
    def once(left: DataFrame, right: DataFrame) -> DataFrame:
        pairs = within(left, right, on=["k"], bound=("0 s", "60 s"))
        return windows.deduplicated(pairs, key=["k"], within="30 seconds").select("k")

    def feed(name: str, *rows: tuple[int, int]) -> None:
        seconds = {each: (tester.now + timedelta(seconds=each)).isoformat() for _, each in rows}
        tester.feed(name, [{"k": key, "at": seconds[each]} for key, each in rows])

    tester.use(once)
    feed("left", (1, 1), (2, 20))
    feed("right", (3, 20))
    tester.run()
    # A pair, of the time of its left, which is before what was told to be complete.
    feed("right", (1, 50))
    with pytest.raises(FlowFailedError, match=r"an event of 2026-01-01 00:00:01.*before") as raised:
        tester.run()
    assert 'greatest("_time", "right__time")' in raised.value.advice


def test_a_replay_puts_the_same_aside_beside_what_was_there(tester: FlowTester) -> None:
    times = stream("times", json="id bigint, at timestamp", time="at", lateness="10 seconds")

    @flow(inputs=times, output=topic("counted"), shards=2)
    def counted(times: DataFrame) -> DataFrame:
        return windows.tumbling(times, "1 minute", values={"n": windows.count()})

    @flow(inputs=stream("times.late", json="id bigint"), output=topic("told"))
    def told(late: DataFrame) -> DataFrame:
        return late.select("id")

    start = tester.now
    at = [(start + timedelta(seconds=each)).isoformat() for each in (0, 60, 49, 200)]
    rows: list[Any] = [{"id": number, "at": each} for number, each in enumerate(at)]
    tester.feed("times", [*rows, "no JSON"])
    tester.use(counted, told)
    tester.run()

    def aside(generation: str) -> list[list[Any]]:
        names = [f"times.{kind}{generation}" for kind in ("late", "dead")]
        return [[each.value for each in read_topic(tester.broker.bootstrap, name)]
                for name in names]  # fmt: skip

    live = aside("")
    assert [len(each) for each in live] == [1, 1]
    tester.reset("counted")
    assert aside("") == aside(".v2") == live
    # By its name what counts is meant, for the tester and for those who read it.
    assert [each.value for each in tester.records("times.late")] == live[0]
    [read] = Folder(tester.data).record("counted").inputs
    assert read.endswith(", late ones to times.late.v2, unreadable ones to times.dead.v2")
    # Who has read the old version follows to the new one.
    tester.run("told")
    assert [row["id"] for row in tester.rows("told")] == [2]
    assert Folder(tester.data).record("told").generation == 2


def test_what_a_partition_that_joins_later_says_of_before_is_late(tester: FlowTester) -> None:
    times = stream(
        "joined",
        json="id bigint, at timestamp",
        time="at",
        lateness="10 seconds",
        idle="1 hour",
    )

    names = ("counted", "paired", "slid")

    @flow(inputs=times, outputs={name: topic(name) for name in names}, shards=2)
    def later(rows: DataFrame) -> dict[str, DataFrame]:
        pairs = within(rows, rows, on=["id"], bound=("0 s", "5 s"))
        slid = windows.sliding(rows, "5 s", by=["id"], values={"n": windows.count()})
        values: dict[str, windows.Aggregate] = {"n": windows.count()}
        return {
            "counted": windows.tumbling(rows, "10 s", values=values),
            "paired": pairs.select("id", "_offset", "right__offset"),
            "slid": slid.select("id", "_offset", "n"),
        }

    def row(number: int, seconds: int) -> dict[str, Any]:
        return {"id": number, "at": tester.now + timedelta(seconds=seconds)}

    tester.use(later)
    tester.make_topic("joined", partitions=1)
    tester.feed("joined", [row(1, 0), row(2, 60)])
    tester.run()
    admin = AdminClient({"bootstrap.servers": tester.broker.bootstrap})
    admin.create_partitions([NewPartitions("joined", 2)])["joined"].result(60)
    # The watermark is at 50: what comes is before it, exactly there, and before it once more.
    tester.feed("joined", [row(3, 40), row(4, 50), row(5, 45)], partition=1)
    assert tester.run()["later"].progress.late_rows == 2
    # It has not caught up yet, and its own watermark is at 40 only.
    tester.feed("joined", [row(6, 49), row(7, 80)], partition=1)
    tester.feed("joined", [row(8, 80)], partition=0)
    assert tester.run()["later"].progress.late_rows == 1
    late = sorted(tester.records("joined.late"), key=lambda each: each.json()["id"])
    assert [each.json()["id"] for each in late] == [3, 5, 6]
    reasons = [each.headers["penstock.late.reason"] for each in late]
    assert [text.split(b" s before")[0] for text in reasons if text] == [
        b"its time is 10.0", b"its time is 5.0", b"its time is 1.0"
    ]  # fmt: skip
    assert all(b"its partition had not come so far" in (text or b"") for text in reasons)
    # The others are there, once.
    counted = [(each["window_start"][17:19], each["n"]) for each in tester.rows("counted")]
    assert sorted(counted) == [("00", 1), ("00", 1), ("50", 1)]
    assert sorted(each["id"] for each in tester.rows("paired")) == [1, 2, 4, 7, 8]
    assert sorted(each["id"] for each in tester.rows("slid")) == [1, 2, 4]


def test_idle_partitions_get_heartbeats(tester: FlowTester) -> None:
    idle = Idleness({"a": 10.0})
    assert idle.look({("a", 0): 5, ("a", 1): 0}, 0.0) == []
    assert idle.look({("a", 0): 6, ("a", 1): 0}, 10.0) == [("a", 1)]
    assert idle.look({("a", 0): 6, ("a", 1): 1}, 19.0) == []
    assert idle.look({("a", 0): 6, ("a", 1): 1}, 29.0) == [("a", 0), ("a", 1)]
    tester.make_topic("quiet", partitions=2)
    place = Place(tester.broker.bootstrap, {}, str)
    beats = Heartbeats(place, {"quiet": 1_000_000}, clock_ms=lambda: 1_234_567)
    beats.start()
    eventually(lambda: len({each.partition for each in tester.records("quiet")}) == 2)
    beats.close()
    found = tester.records("quiet")
    assert {each.partition for each in found} == {0, 1}
    assert {(each.key, each.value) for each in found} == {(HEARTBEAT, None)}
    assert found[0].timestamp.timestamp() == 1_234.567


def test_rows_go_to_python_in_numbers_that_large_records_allow(tester: FlowTester) -> None:
    place = Place(tester.broker.bootstrap, {}, str)
    with place.cluster() as cluster:
        topics.create(cluster, "small")
        topics.create(cluster, "large", config={"max.message.bytes": str(8 << 20)})
        topics.create(cluster, "huge", config={"max.message.bytes": str((1 << 31) - 1)})
    small, large, huge = (stream(each, text=True) for each in ("small", "large", "huge"))
    assert rows_at_once(place, [small]) == 1000
    assert rows_at_once(place, [small, large]) == 128
    assert rows_at_once(place, [huge]) == 1


def test_records_that_are_read_again_are_counted_once(tester: FlowTester) -> None:
    """Of two streams one has a bad record, for whose sake it is read a second time."""
    names = ("orders", "customers")
    inputs = [
        stream("orders", changelog="id bigint, customer bigint, amount bigint", dead_letters="bad"),
        stream("customers", changelog="id bigint, country string", dead_letters="bad"),
    ]

    @flow(inputs=inputs, output=topic("totals", key="_key", compacted=True), shards=2)
    def totals(orders: DataFrame, customers: DataFrame) -> DataFrame:
        query = """SELECT country, sum(amount) AS total FROM orders
            JOIN customers ON orders.customer = customers.id GROUP BY country"""
        keys = dict.fromkeys(names, "id")
        return views.sql(query, keys, orders=orders, customers=customers).changes()

    tester.use(totals)
    tester.feed("customers", [{"id": 1, "country": "de"}] * 10, key=["1"] * 10)
    rows = [{"id": 1, "customer": 1, "amount": 5}] * 20
    tester.feed("orders", [*rows, "{"], key=["1"] * 21)
    told = tester.run()["totals"].progress
    assert (told.rows_in, told.dead_letters) == (31, 1)


def test_a_time_that_is_none_is_a_dead_letter(tester: FlowTester) -> None:
    @flow(
        inputs=stream("events", json="id bigint, at string", time="at", lateness="1 second"),
        output=topic("counts"),
        shards=2,
    )
    def counts(rows: DataFrame) -> DataFrame:
        return windows.tumbling(rows, "5 s", by=["id"], values={"n": windows.count()})

    tester.use(counts)
    tester.make_topic("events", partitions=1)
    times = [
        "2026-01-01T00:00:01Z",
        "yesterday",
        "2026-01-01T00:00:02Z",
        None,
        "2026-01-01T00:01:00Z",
    ]
    tester.feed("events", [{"id": 1, "at": each} for each in times])
    tester.run()
    assert [(row["id"], row["n"]) for row in tester.rows("counts")] == [(1, 2)]
    reasons = [each.headers["penstock.error.reason"] for each in tester.records("events.dead")]
    assert reasons == [b"the event time at is no time", b"the event time at is missing or null"]
