"""What is one key for Spark's own groups and joins is one for every operator; no other is."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.errors import PenstockError
from penstock.spark import enrich, pattern, within
from penstock.spark import windows as w

pytestmark = pytest.mark.timeout(600)

SCHEMA = "k double, f float, at bigint, _topic string, _partition int, _offset bigint"
KEYS = [0.0, -0.0, math.nan, None, 1.5]


@pytest.fixture(scope="module")
def events(penstock_spark: SparkSession) -> DataFrame:
    """Zeros of both signs, no numbers and nulls as keys, out of order, in two partitions."""
    luck = random.Random(3)
    rows = [
        (luck.choice(KEYS), luck.choice(KEYS), luck.randrange(30), "t", at % 2, at)
        for at in range(80)
    ]
    frame = penstock_spark.createDataFrame(rows, SCHEMA)
    return frame.withColumn("_time", F.timestamp_seconds("at")).coalesce(2).cache()


Pair = tuple[DataFrame, DataFrame]


def windows(events: DataFrame) -> Pair:
    by = ["k", "f"]
    mine = w.tumbling(events, "10 seconds", by=by, values={"n": w.count()})
    theirs = events.groupBy(*by, F.window("_time", "10 seconds").start).count()
    return mine.select(*by, "window_start", "n"), theirs


def sliding_windows(events: DataFrame) -> Pair:
    values = {"n": w.count(), "kinds": w.distinct("f")}
    events.createOrReplaceTempView("keys_events")
    theirs = events.sparkSession.sql(
        "SELECT e._offset, count(*), count(DISTINCT o.f) FROM keys_events e JOIN keys_events o "
        "ON e.k <=> o.k AND o.at BETWEEN e.at - 5 AND e.at GROUP BY e._offset"
    )
    mine = w.sliding(events, "5 seconds", by=["k"], values=values)
    return mine.select("_offset", "n", "kinds"), theirs


def copies(events: DataFrame) -> Pair:
    mine = w.deduplicated(events, key=["k", "f"], within="1 hour")
    first = F.min(F.struct("_time", "_partition", "_offset")).alias("first")
    theirs = events.groupBy("k", "f").agg(first)
    return mine.select("_offset"), theirs.select("first._offset")


def streams_joined(events: DataFrame) -> Pair:
    right = events.select("k", "f", "_time", F.col("_offset").alias("other"))
    mine = within(events, right, on=["k", "f"], bound=("-2 s", "2 s"))
    near = F.abs(F.unix_micros("_time") - F.unix_micros("r_time")) <= 2_000_000
    theirs = events.join(right.withColumnRenamed("_time", "r_time"), ["k", "f"]).where(near)
    return mine.select("_offset", "other"), theirs.select("_offset", "other")


def tables(events: DataFrame, version: Any) -> Pair:
    row = F.struct("k", "f", F.col("_offset").alias("v"))
    stamp = F.timestamp_seconds(F.lit(0)).alias("_timestamp")
    changes = events.select(
        row.alias("_after"), F.expr("if(false, _after, null)").alias("_before"),
        stamp, "_topic", "_partition", "_offset",
    )  # fmt: skip
    mine = enrich(events, changes, on=["k", "f"], columns=["v"], version=version)
    last = F.max_by("_offset", F.struct("_partition", "_offset")).alias("v")
    theirs = events.join(events.groupBy("k", "f").agg(last), ["k", "f"], "left")
    return mine.select("_offset", "v"), theirs.select("_offset", "v")


def patterns(events: DataFrame) -> Pair:
    mine = pattern.match_recognize(
        events,
        "PARTITION BY k, f ORDER BY _time MEASURES A._offset AS place, MATCH_NUMBER() AS n "
        "PATTERN (A) DEFINE A AS true",
        events=False,
    )
    theirs = events.selectExpr(
        "_offset AS place",
        "row_number() OVER (PARTITION BY k, f ORDER BY _time, _partition, _offset) AS n",
    )
    return mine.select("place", "n"), theirs


def test_keys_are_those_of_spark(events: DataFrame) -> None:
    """All operators in one job, each beside what Spark itself says."""
    pairs = {
        "windows": windows(events),
        "sliding windows": sliding_windows(events),
        "copies": copies(events),
        "streams joined": streams_joined(events),
        "latest rows of tables": tables(events, "latest"),
        "rows of tables as of a time": tables(events, "as_of"),
        "patterns": patterns(events),
    }

    def labelled(name: str, side: int) -> DataFrame:
        rows = pairs[name][side]
        rows = rows.toDF(*(f"c{at}" for at in range(len(rows.columns))))
        text = F.to_json(F.struct("*"), {"ignoreNullFields": "false"})
        return rows.select(F.lit(name).alias("name"), F.lit(side).alias("side"), text.alias("row"))

    every = [labelled(name, side) for name in pairs for side in (0, 1)]
    found: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for row in reduce(DataFrame.union, every).collect():
        found[row.name, row.side][row.row] += 1
    for name in pairs:
        assert found[name, 1], name
        assert found[name, 0] == found[name, 1], name


def refusals(rows: DataFrame, key: str) -> dict[str, Callable[[], DataFrame]]:
    values, row = {"n": w.count()}, F.struct(key)
    changes = rows.select(row.alias("_before"), row.alias("_after"))
    of_windows = rows.selectExpr(key, "_time AS window_start", "_time AS window_end", "1 AS n")
    sql = f"PARTITION BY {key} ORDER BY _time PATTERN (A) DEFINE A AS true"
    return {
        "tumbling": lambda: w.tumbling(rows, "1 s", by=[key], values=values),
        "hopping": lambda: w.hopping(rows, "2 s", "1 s", by=[key], values=values),
        "session": lambda: w.session(rows, "1 s", by=[key], values=values),
        "sliding": lambda: w.sliding(rows, "1 s", by=[key], values=values),
        "compare": lambda: w.compare(of_windows, by=[key], values=["n"], offset="1 s"),
        "deduplicated": lambda: w.deduplicated(rows, key=[key], within="1 s"),
        "within": lambda: within(rows, rows, on=[key], bound=("0 s", "1 s")),
        "enrich": lambda: enrich(rows, changes, on=[key], columns=[]),
        "match": lambda: pattern.begin("a").match(rows, by=key),
        "match_recognize": lambda: pattern.match_recognize(rows, sql),
    }


def test_keys_with_parts_are_refused(events: DataFrame) -> None:
    """["a, b"] and ["a", "b"] were one key."""
    rows = events.selectExpr("array('a', 'b') AS tags", "struct(k) AS part", "_time")
    for key, kind in (("tags", "array<string>"), ("part", "struct<k:double>")):
        for name, made in refusals(rows, key).items():
            with pytest.raises(PenstockError) as raised:
                made()
            message = str(raised.value)
            assert f"'{key}'" in message, name
            assert f"{kind}, not a plain value" in message, name
            assert "to_json" in raised.value.advice, name
