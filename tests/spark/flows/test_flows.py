"""Flows from end to end: rows in, rows out, with Spark and a broker in between."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.flows.declare import flow, stream, table, topic
from penstock.testing.flows import FlowFailedError, FlowTester

# The first job of a session starts Python workers and compiles kernels.
pytestmark = pytest.mark.timeout(600)

HERE = "tests/spark/flows/test_flows.py"
CLICKS = stream("clicks", json="user string not null, page string, ms long")


def click(user: str, page: str = "/", ms: int = 0) -> dict[str, Any]:
    return {"user": user, "page": page, "ms": ms}


def test_rows_go_through_and_bad_ones_aside(tester: FlowTester) -> None:
    @flow(inputs=CLICKS, output=topic("visits", key="user"))
    def visits(clicks: DataFrame) -> DataFrame:
        return clicks.where("page != '/hidden'").withColumn("seconds", F.col("ms") / 1000)

    tester.use(visits)
    tester.feed("clicks", [click("ann"), click("bob", "/hidden"), '{"user": 5', click("eve", "/x")])
    status = tester.run()["visits"]
    assert [each.key for each in tester.records("visits")] == [b"ann", b"eve"]
    assert tester.rows("visits")[1] == {"user": "eve", "page": "/x", "ms": 0, "seconds": 0.0}
    [letter] = tester.records("clicks.dead")
    assert letter.value == b'{"user": 5'
    assert letter.headers["penstock.error.offset"] == b"2"
    assert (status.progress.rows_in, status.progress.rows_out) == (4, 2)
    assert status.progress.dead_letters == 1
    # The next run goes on where this one ended. Nothing to write is no reason to wait.
    tester.feed("clicks", [click("joe"), "more nonsense"])

    @flow(inputs=CLICKS, output=topic("visits", key="user"), name="visits")
    def none_at_all(clicks: DataFrame) -> DataFrame:
        return clicks.where("false")

    tester.use(none_at_all)
    assert tester.run()["visits"].progress.rows_in <= 2
    assert len(tester.records("visits")) == 2
    assert len(tester.records("clicks.dead")) == 2


def test_many_outputs_from_one_reading(tester: FlowTester) -> None:
    calls = []

    @flow(
        inputs=stream("lines", text=True),
        outputs={"long": topic("long"), "short": topic("short", partitions=3)},
    )
    def split(lines: DataFrame) -> dict[str, DataFrame]:
        calls.append(lines.isStreaming)
        size = F.length("value")
        rows = lines.select("value", "_offset")
        return {"long": rows.where(size > 3), "short": rows.where(size <= 3)}

    tester.use(split)
    tester.feed("lines", ["one", "three", "two", "seven"])
    status = tester.run()["split"]
    assert [row["value"] for row in tester.rows("long")] == ["three", "seven"]
    assert sorted(row["value"] for row in tester.rows("short")) == ["one", "two"]
    # Columns with _ before their name are not written.
    assert tester.rows("long")[0] == {"value": "three"}
    assert status.progress.rows_in == 4
    assert calls == [True, False]


def test_a_table_is_what_it_is_when_the_batch_runs(tester: FlowTester) -> None:
    people = table("people", json="name string, city string", key="user")
    pages = table("shop.pages", debezium="page string, title string")

    @flow(inputs=[people, CLICKS, pages], output=topic("enriched", key="user"))
    def enriched(people: DataFrame, clicks: DataFrame, pages: DataFrame) -> DataFrame:
        joined = clicks.join(people, "user", "left").join(pages, "page", "left")
        return joined.select("user", "name", "city", "title")

    tester.use(enriched)
    tester.feed("people", [{"name": "Ann", "city": "Bonn"}, {"name": "Bob"}], key=["ann", "bob"])
    tester.feed("people", [{"name": "Ann", "city": "Ulm"}, None], key=["ann", "bob"])
    # As capture writes changes, with and without the schema around them.
    tester.feed(
        "shop.pages",
        [
            {"op": "c", "before": None, "after": {"page": "/", "title": "Home"}},
            {"schema": {}, "payload": {"op": "c", "after": {"page": "/x", "title": "X"}}},
            {"payload": {"op": "d", "before": {"page": "/x", "title": "X"}, "after": None}},
        ],
        key=["1", "2", "2"],
    )
    tester.feed("clicks", [click("ann"), click("bob", "/x")])
    tester.run()
    assert tester.table("enriched") == {
        "ann": {"user": "ann", "name": "Ann", "city": "Ulm", "title": "Home"},
        "bob": {"user": "bob", "name": None, "city": None, "title": None},
    }
    tester.feed("people", [{"name": "Bert", "city": "Rom"}], key=["bob"])
    tester.feed("clicks", [click("bob")])
    tester.run()
    bob = {"user": "bob", "name": "Bert", "city": "Rom", "title": "Home"}
    assert tester.table("enriched")["bob"] == bob


def test_windows_keep_their_state_from_run_to_run(tester: FlowTester) -> None:
    times = stream("times", json="user string, at timestamp")

    @flow(inputs=times, output=topic("counts", key="user"))
    def counts(times: DataFrame) -> DataFrame:
        windows = times.withWatermark("at", "5 seconds").groupBy(F.window("at", "1 minute"), "user")
        return windows.count().select("user", "count", F.col("window.start").alias("start"))

    tester.use(counts)
    tester.stops_at_dead_letters = True
    tester.feed("times", [{"user": "ann", "at": tester.now}, {"user": "ann", "at": tester.now}])
    tester.feed("times", ["nonsense"])
    tester.run()
    tester.feed("times", [{"user": "ann", "at": tester.now}])
    status = tester.run()["counts"]
    assert tester.rows("counts") == []
    assert status.progress.state_rows == 1
    tester.advance(120)
    tester.feed("times", [{"user": "bob", "at": tester.now}])
    status = tester.run()["counts"]
    assert tester.rows("counts") == [
        {"user": "ann", "count": 3, "start": "2026-01-01T00:00:00.000000Z"}
    ]
    assert status.progress.watermark == "2026-01-01T00:01:55.000Z"
    assert len(tester.records("times.dead")) == 1
    # Too late for its window.
    tester.advance(-120)
    tester.feed("times", [{"user": "ann", "at": tester.now}])
    assert tester.run()["counts"].progress.late_rows == 1
    assert len(tester.rows("counts")) == 1
    tester.feed("times", ["nonsense"] * 12)
    with pytest.raises(FlowFailedError, match=r"dead letters. The first: times-0 at offset \d+: "):
        tester.run()
    assert len(tester.records("times.dead")) == 1


def test_flows_that_read_what_others_write(tester: FlowTester) -> None:
    @flow(inputs=stream("b", json="n long"), output=topic("c"))
    def second(b: DataFrame) -> DataFrame:
        return b.selectExpr("n + 1 as n")

    @flow(inputs=stream("a", json="n long"), output=topic("b"))
    def first(a: DataFrame) -> DataFrame:
        return a.selectExpr("n * 10 as n")

    tester.use(second, first)
    tester.feed("a", [{"n": 1}, {"n": 2}])
    tester.run()
    assert tester.rows("c") == [{"n": 11}, {"n": 21}]


def test_without_a_dead_letter_topic_a_bad_record_stops_the_flow(tester: FlowTester) -> None:
    strict = stream("clicks", json="user string", dead_letters=None)

    @flow(inputs=strict, output=topic("out"))
    def out(clicks: DataFrame) -> DataFrame:
        return clicks

    tester.use(out)
    tester.feed("clicks", [click("ann"), "no json"])
    with pytest.raises(FlowFailedError, match="clicks-0 offset 1 cannot be read") as caught:
        tester.run()
    assert "dead_letters=" in caught.value.advice
    assert tester.rows("out") == []


def test_what_the_function_does_wrong_is_said_with_its_line(tester: FlowTester) -> None:
    @flow(inputs=CLICKS, output=topic("out"))
    def column(clicks: DataFrame) -> DataFrame:
        return clicks.select("colour")

    @flow(inputs=CLICKS, output=topic("out2"))
    def worker(clicks: DataFrame) -> DataFrame:
        half = F.udf(lambda ms: 1 / ms, "double")
        return clicks.select(half("ms").alias("half"))

    @flow(inputs=CLICKS, output=topic("out3", key="nothing"))
    def key(clicks: DataFrame) -> DataFrame:
        return clicks

    @flow(inputs=CLICKS, output=topic("out4"))
    def nothing(clicks: DataFrame) -> None:
        clicks.select("user")

    @flow(inputs=[CLICKS, table("people", json="a int")], output=topic("out5"))
    def still(clicks: DataFrame, people: DataFrame) -> DataFrame:
        return people

    @flow(inputs=stream("clicks", json="user strng"), output=topic("out6"))
    def schema(clicks: DataFrame) -> DataFrame:
        return clicks

    tester.feed("clicks", [click("ann")])
    expected = {
        schema: f"{HERE}:[0-9]+: stream 'clicks', json='user strng'",
        column: f"{HERE}:[0-9]+: .*`colour`",
        worker: f"{HERE}:[0-9]+: ZeroDivisionError: division by zero",
        key: "no column 'nothing', which is to be its key",
        nothing: "returns NoneType, not a DataFrame",
        still: "returns rows that come from no stream",
    }
    for each, pattern in expected.items():
        tester.use(each)
        with pytest.raises(FlowFailedError, match=pattern) as caught:
            tester.run()
        assert "JVM" not in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.advice or each is nothing


def test_records_pass_as_they_are_at_least_once(tester: FlowTester) -> None:
    @flow(
        inputs=stream("raw.in", options={"maxOffsetsPerTrigger": "2"}),
        output=topic("raw.out", raw=True, partitions=2),
        exactly_once=False,
    )
    def passed(records: DataFrame) -> DataFrame:
        return records.where("value is null or length(value) < 5")

    tester.use(passed)
    tester.feed("raw.in", [b"\xff\x00", None, "too long"], key=["a", "b", "c"])
    status = tester.run()["passed"]
    found = {each.key: each.value for each in tester.records("raw.out")}
    assert found == {b"a": b"\xff\x00", b"b": None}
    assert (status.progress.batches, status.progress.rows_in) == (2, 3)
    assert status.progress.rows_out == 2
