"""What bounds the state of each operator, and the warning at its declaration where nothing does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.client import topics
from penstock.spark import UnboundedStateWarning, asking, enrich, pattern, standing, views, within
from penstock.spark import windows as w
from penstock.spark.flows.declare import flow, stream, topic
from penstock.spark.flows.errors import DeclarationError
from penstock.spark.flows.inputs import Place
from penstock.spark.flows.plans import Plan
from penstock.spark.flows.running import Running
from penstock.testing import Broker

pytestmark = pytest.mark.timeout(600)

EVENT = "k string, x int, at timestamp"
EVENTS = stream("events", json=EVENT, time="at", lateness="10 seconds")
OTHERS = stream("others", json=EVENT, time="at", lateness="5 seconds")
AWAKE = stream("events", json=EVENT, time="at", lateness="10 seconds", idle="30 seconds")
OTHERS_AWAKE = stream("others", json=EVENT, time="at", lateness="5 seconds", idle="30 seconds")
# Two partitions, of which one may rest while the other does not.
SPREAD = stream("spread", json=EVENT, time="at", lateness="10 seconds")
SPREAD_AWAKE = stream("spread", json=EVENT, time="at", lateness="10 seconds", idle="30 seconds")
SPREAD_ROWS = stream("spread", json=EVENT)
ROWS = stream("rows", json=EVENT)
CHANGES = stream("changes", changelog="k string, v int", time="_timestamp")
BEATING = stream("changes", changelog="k string, v int", time="_timestamp", idle="30 seconds")
TEXTS = stream("texts", text=True)
RAW = stream("raw")
HERE = "tests/spark/flows/test_bounds.py"

Body = Callable[..., DataFrame]


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with Broker() as broker:
        found = Place(broker.bootstrap, {}, lambda name: name)
        with found.cluster() as cluster:
            for each in (EVENTS, OTHERS, ROWS, CHANGES, TEXTS, RAW):
                topics.create(cluster, each.topic)
            topics.create(cluster, SPREAD.topic, partitions=2)
        yield found


@pytest.fixture
def planned(penstock_spark: SparkSession, place: Place, tmp_path: Path) -> Callable[..., Plan]:
    def plan(body: Body, *inputs: Any, mode: Any = "append") -> Plan:
        made = flow(inputs=inputs, output=topic("out"), mode=mode, name="planned")(body)
        return Running(penstock_spark, made, place, str(tmp_path / "checkpoint")).plan()

    return plan


def recognized(text: str) -> Body:
    return lambda rows: pattern.match_recognize(rows, text, events=False)


TWO = "PARTITION BY k ORDER BY _time PATTERN (A B) DEFINE A AS x = 1, B AS x = 2"


def deleted(rows: DataFrame) -> DataFrame:
    return rows.withColumn("_deleted", F.col("x") < 0)


def grouped(rows: DataFrame) -> DataFrame:
    return views.of(rows, "rows", key="k").group_by("x").agg(n="count(*)").changes()


def hours(rows: DataFrame) -> DataFrame:
    return w.tumbling(rows, "1 hour", by=["k"], values={"n": w.count()})


def days(rows: DataFrame) -> DataFrame:
    return rows.selectExpr("k", "x AS n", "at AS window_start", "at + INTERVAL 1 DAY AS window_end")


def pairs(rows: DataFrame, others: DataFrame) -> DataFrame:
    return within(rows, others, on=["k"], bound=("0 s", "1 hour"))


UNBOUNDED: dict[str, tuple[Body, tuple[Any, ...], str]] = {
    "pattern without within": (recognized(TWO), (EVENTS,), "no `within`.*Give the pattern"),
    "pattern with a gap": (
        lambda rows: pattern.begin("a", "x = 1").then("b", "x = 2").match(rows, by="k"),
        (EVENTS,),
        "no `within`",
    ),
    "pattern with PREV": (
        recognized(
            "PARTITION BY k ORDER BY _time PATTERN (A B) WITHIN INTERVAL '1' MINUTE "
            "DEFINE B AS x > PREV(x)"
        ),
        (EVENTS,),
        "PREV keeps the last rows of each key for ever",
    ),
    "as of a table that rests": (
        lambda rows, changes: enrich(rows, changes, on="k", version="as_of"),
        (EVENTS, CHANGES),
        "enrich-1 keeps .* of 'changes' or 'events' rests.*Give the streams heartbeats",
    ),
    "windows without an event time": (
        lambda rows: hours(rows.withColumn("_time", F.col("at"))),
        (ROWS,),
        r"windows-1 keeps all .* for ever, since no stream .* event time\. Give one.*time=\"at\"",
    ),
    "pattern without an event time": (
        recognized(
            TWO.replace("_time", "at").replace(") DEFINE", ") WITHIN INTERVAL '1' MINUTE DEFINE")
        ),
        (ROWS,),
        "pattern-1 keeps all that comes for ever",
    ),
    "view over events": (grouped, (ROWS,), "table 'rows'.*none is ever deleted"),
    "aggregate of Spark": (
        lambda rows: rows.groupBy("k").count(),
        (ROWS,),
        "Spark's Aggregate keeps.*withWatermark",
    ),
    "deduplication of Spark": (
        lambda rows: rows.dropDuplicates(["k"]),
        (ROWS,),
        "Spark's Deduplicate keeps",
    ),
    "join of Spark": (
        lambda rows, texts: rows.join(texts, F.col("k") == F.col("key")).select("k", "x"),
        (ROWS, TEXTS),
        "Spark's Join keeps",
    ),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_what_nothing_bounds_is_told_where_it_is_declared(
    planned: Callable[..., Plan], name: str
) -> None:
    body, inputs, message = UNBOUNDED[name]
    mode = "update" if name.startswith("aggregate") else "append"
    with pytest.warns(UnboundedStateWarning, match=message) as told:
        planned(body, *inputs, mode=mode)
    assert [each.filename for each in told] == [HERE]


WAITING: dict[str, Body] = {
    "windows-1": hours,
    "sliding-1": lambda rows: w.sliding(rows, "1 hour", by=["k"], values={"n": w.count()}),
    "deduplicate-1": lambda rows: w.deduplicated(rows, key=["k"], within="1 hour"),
    "pattern-1": recognized(TWO.replace(") DEFINE", ") WITHIN INTERVAL '1' MINUTE DEFINE")),
    "sessions and pairs": lambda rows: pairs(
        w.session(rows, "1 hour", by=["k"], values={"n": w.count()}, name="sessions").withColumn(
            "_time", F.col("window_end")
        ),
        rows,
    ).withColumnRenamed("n", "pairs"),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_for_a_partition_that_rests_is_told(
    planned: Callable[..., Plan], name: str
) -> None:
    named = "sessions and join-1 keep" if " " in name else f"{name} keeps"
    message = (
        f"flow 'planned': {named} all that comes while a partition of 'spread' rests and others go "
        r"on, since the watermark waits for it\. Give the stream heartbeats, as in "
        r'stream\(\.\.\., idle="30 seconds"\)\.$'
    )
    with pytest.warns(UnboundedStateWarning, match=message) as told:
        planned(WAITING[name], SPREAD)
    assert [each.filename for each in told] == [HERE]
    planned(WAITING[name], SPREAD_AWAKE)


def test_any_stream_with_a_time_may_hold_up_the_others(planned: Callable[..., Plan]) -> None:
    with pytest.warns(
        UnboundedStateWarning, match="a partition of 'events' or 'others' rests"
    ) as a:
        planned(pairs, EVENTS, OTHERS)
    with pytest.warns(UnboundedStateWarning, match="a partition of 'others' rests") as b:
        planned(pairs, AWAKE, OTHERS)
    # It need not be what the operator reads.
    with pytest.warns(UnboundedStateWarning, match="a partition of 'others' rests") as c:
        planned(lambda rows, _: hours(rows), AWAKE, OTHERS)
    assert [len(each) for each in (a, b, c)] == [1, 1, 1]


BOUNDED: dict[str, tuple[Body, tuple[Any, ...]]] = {
    "tumbling": (hours, (EVENTS,)),
    "hopping": (
        lambda rows: w.hopping(rows, "1 hour", "1 minute", values={"n": w.distinct("k")}),
        (EVENTS,),
    ),
    "session": (
        lambda rows: w.session(rows, "1 hour", by=["k"], values={"q": w.quantile("x", 0.5)}),
        (EVENTS,),
    ),
    "sliding": (
        lambda rows: w.sliding(rows, "1 hour", by=["k"], values={"n": w.count()}),
        (EVENTS,),
    ),
    "sketches": (
        lambda rows: w.tumbling(
            rows,
            "1 hour",
            values={"d": w.approx_distinct("k"), "b": w.bloom("k"), "c": w.count_min("k")},
        ).select("d"),
        (EVENTS,),
    ),
    "deduplicated": (lambda rows: w.deduplicated(rows, key=["k"], within="1 hour"), (EVENTS,)),
    "compare": (lambda rows: w.compare(hours(rows), values=["n"], offset="7 days"), (EVENTS,)),
    "rolling": (
        lambda rows: w.rolling(hours(rows), values=["n"], over=24, every="1 hour"),
        (EVENTS,),
    ),
    "compare, of windows from elsewhere": (
        lambda rows: w.compare(days(rows), by=["k"], values=["n"], offset="7 days"),
        (SPREAD,),
    ),
    "within": (pairs, (AWAKE, OTHERS_AWAKE)),
    "heartbeats for another reading of the same topic": (
        lambda rows, _: hours(rows),
        (SPREAD, SPREAD_AWAKE),
    ),
    "windows beside rows without a time": (lambda rows, _: hours(rows), (EVENTS, SPREAD_ROWS)),
    "time alone": (lambda rows: rows.where("x > 1"), (SPREAD,)),
    "enrich, latest": (lambda rows, changes: enrich(rows, changes, on="k"), (ROWS, CHANGES)),
    "enrich, as of": (
        lambda rows, changes: enrich(rows, changes, on="k", version="as_of"),
        (AWAKE, BEATING),
    ),
    "view": (
        lambda changes: views.of(changes, "c", key="k").agg(n="count(*)").changes(),
        (CHANGES,),
    ),
    "view of rows that say when they are gone": (lambda rows: grouped(deleted(rows)), (ROWS,)),
    "pattern within a time": (
        recognized(TWO.replace(") DEFINE", ") WITHIN INTERVAL '1' MINUTE DEFINE")),
        (EVENTS,),
    ),
    "pattern of one row": (
        recognized("PARTITION BY k ORDER BY _time PATTERN (A | B) DEFINE A AS x = 1, B AS x = 2"),
        (EVENTS,),
    ),
    "standing queries": (
        lambda rows, texts: standing.match(rows, texts, fields={"k": "keyword"}),
        (ROWS, TEXTS),
    ),
    "questions": (
        lambda records: asking.replies(asking.questions(records)).select("value"),
        (RAW,),
    ),
    "aggregate of Spark with a watermark": (
        lambda rows: (
            rows.withWatermark("at", "1 hour").groupBy(F.window("at", "1 hour"), "k").count()
        ),
        (ROWS,),
    ),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_what_is_bounded_says_nothing(planned: Callable[..., Plan], name: str) -> None:
    body, inputs = BOUNDED[name]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UnboundedStateWarning)
        planned(body, *inputs)
    assert [str(each.message) for each in told] == []


def test_batch_keeps_nothing(penstock_spark: SparkSession) -> None:
    rows = penstock_spark.createDataFrame([("a", 1)], "k string, o int")
    text = "PARTITION BY k ORDER BY o PATTERN (A B) DEFINE B AS o > PREV(o)"
    assert recognized(text)(rows).columns


def test_windows_are_not_final_before_they_are_over(planned: Callable[..., Plan]) -> None:
    def early(seconds: int) -> Body:
        return lambda rows, _: w.tumbling(
            rows, "1 minute", values={"n": w.count()}, allowed_lateness=f"{seconds} seconds"
        )

    planned(early(10), AWAKE, OTHERS_AWAKE)
    message = rf"{HERE}:\d+: allowed_lateness='11 seconds' .* 'events', 10 seconds"
    with pytest.raises(DeclarationError, match=message):
        planned(early(11), AWAKE, OTHERS_AWAKE)

    def of_both(rows: DataFrame, others: DataFrame) -> DataFrame:
        later = pairs(rows, others).withColumn("_time", F.greatest("_time", "right__time"))
        return w.tumbling(later, "1 day", values={"n": w.count()}, allowed_lateness="6 seconds")

    with pytest.raises(DeclarationError, match="lateness of stream 'others', 5 seconds"):
        planned(of_both, AWAKE, OTHERS_AWAKE)
