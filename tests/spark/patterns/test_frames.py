"""Patterns over DataFrames: what Spark computes around them, micro-batch by micro-batch."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from penstock.spark import UnboundedStateWarning, pattern
from penstock.spark.patterns import PatternTextError
from penstock.spark.state import Batch, Planning, entered

# The first job of a session starts Python workers and compiles kernels.
pytestmark = pytest.mark.timeout(600)

START = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = (
    "card string, amount double, place string, _time timestamp, _topic string, _partition int, "
    "_offset bigint"
)
Payment = tuple[str, float, str, int]


def payments(spark: SparkSession, rows: list[Payment], offset: int = 0) -> DataFrame:
    made = [
        (card, amount, place, START + timedelta(seconds=s), "payments", 0, offset + n)
        for n, (card, amount, place, s) in enumerate(rows)
    ]
    return spark.createDataFrame(made, SCHEMA)


ROWS: list[Payment] = [
    ("ann", 0.5, "shop", 0),
    ("bob", 0.9, "web", 5),
    ("ann", 20.0, "shop", 10),
    ("ann", 700.0, "WEB", 30),
    ("bob", 30.0, "web", 40),
    ("ann", 0.2, "web", 60),
    ("bob", 800.0, "Web", 700),
    ("ann", 900.0, "shop", 300),
    ("eve", 0.1, "web", 701),
]

TESTING = (
    pattern.begin("small", "amount < 1")
    .then("large", "amount > 500 and amount > 100 * small.amount")
    .within("10 minutes")
)


def alarms(rows: DataFrame) -> DataFrame:
    return TESTING.match(
        rows,
        by="card",
        measures={
            "first": "small.amount",
            "ratio": "round(sum(large.amount) / small.amount, 1)",
            "places": "concat_ws('-', lower(small.place), upper(last(large).place))",
        },
    )


def short(found: list[Row]) -> list[tuple[Any, ...]]:
    return sorted(
        (
            each.card,
            each.first,
            each.ratio,
            each.places,
            [(event.variable, event.amount) for event in each.events],
            (each.match_end - each.match_start).total_seconds(),
        )
        for each in found
    )


EXPECTED = [
    ("ann", 0.2, 4500.0, "web-SHOP", [("small", 0.2), ("large", 900.0)], 240.0),
    ("ann", 0.5, 1400.0, "shop-WEB", [("small", 0.5), ("large", 700.0)], 30.0),
]


def test_by_micro_batches(penstock_spark: SparkSession, tmp_path: Path) -> None:
    """In two of them; on Arrow, in `test_matching`, rows are cut at random, and all at once."""
    # The row of the 300th second comes after that of the 700th, and waits with it.
    found = []
    for batch_id, (first, last, watermark_s) in enumerate([(0, 7, 290), (7, 9, 2000)]):
        part = payments(penstock_spark, ROWS[first:last], first)
        watermark_us = int((START + timedelta(seconds=watermark_s)).timestamp()) * 1_000_000
        batch = Batch(folder=str(tmp_path), batch_id=batch_id, watermark_us=watermark_us)
        with entered(batch):
            matches = alarms(part)
            assert matches.columns == [
                "card", "match_start", "match_end", "first", "ratio", "places", "events",
            ]  # fmt: skip
            found.append(short(matches.collect()))
    assert [len(each) for each in found] == [1, 1]
    assert sorted(each for part in found for each in part) == EXPECTED


def test_match_recognize_over_frames(penstock_spark: SparkSession) -> None:
    ticks = penstock_spark.createDataFrame(
        [("ACME", n, price) for n, price in enumerate([12, 17, 19, 21, 25, 12, 15, 20, 24, 25])],
        "symbol string, day int, price int",
    )
    text = """
        PARTITION BY symbol ORDER BY day
        MEASURES STRT.day AS start_day, LAST(DOWN.day) AS bottom, LAST(UP.day) AS end_day,
                 avg(UP.price) AS mean
        ONE ROW PER MATCH AFTER MATCH SKIP TO LAST UP
        PATTERN (STRT DOWN+ UP+)
        DEFINE DOWN AS DOWN.price < PREV(DOWN.price), UP AS UP.price > PREV(UP.price)"""
    with pytest.warns(UnboundedStateWarning, match="for ever, since there is no `within`.*PREV"):
        with entered(Planning()):
            pattern.match_recognize(ticks, text)
    found = pattern.match_recognize(ticks, text, events=False).collect()
    assert [each.asDict() for each in found] == [
        {
            "symbol": "ACME", "match_start": 4, "match_end": 9,
            "start_day": 4, "bottom": 5, "end_day": 9, "mean": 21.0,
        }
    ]  # fmt: skip
    every = text.replace("ONE ROW", "ALL ROWS").replace("avg(UP", "running avg(UP")
    rows = pattern.match_recognize(ticks, every).orderBy("day").collect()
    assert [(each.day, each.price, each.mean) for each in rows] == [
        (4, 25, None), (5, 12, None), (6, 15, 15.0), (7, 20, 17.5), (8, 24, 59 / 3), (9, 25, 21.0),
    ]  # fmt: skip


def test_what_spark_finds_wrong_is_said_at_its_place(penstock_spark: SparkSession) -> None:
    rows = payments(penstock_spark, ROWS)
    with pytest.raises(PatternTextError, match=r"condition of 'a', 1:1: .*nonsense") as caught:
        pattern.begin("a", "nonsense(amount) > 1").match(rows, by="card")
    assert "\n    nonsense(amount) > 1\n    ^" in str(caught.value)
    with pytest.raises(PatternTextError, match=r"condition of 'b', 1:10: there is no column"):
        pattern.begin("a").then("b", "amount > amuont").match(rows, by="card")
    with pytest.raises(PatternTextError, match=r"measure 'm', 1:1: "):
        pattern.begin("a").match(rows, by="card", measures={"m": "date_add(a.amount, a.card)"})
    with pytest.raises(PatternTextError, match="SUM of string is not possible"):
        pattern.begin("a").match(rows, by="card", measures={"m": "sum(a.place)"})
