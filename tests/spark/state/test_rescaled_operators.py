"""All operators give in another number of shards what they would have given without."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark import joins, pattern, standing, views
from penstock.spark import windows as w
from penstock.spark.state import Batch, entered, inspecting, layout
from penstock.spark.state.layout import Layout
from penstock.spark.state.rescaling import rescale

pytestmark = pytest.mark.timeout(600)

EVENTS = "key string, number long, _time timestamp, _topic string, _partition int, _offset long"
CHANGES = (
    "_before struct<id: string, rate: int>, _after struct<id: string, rate: int>, _op string, "
    "_key string, _time timestamp, _topic string, _partition int, _offset long"
)


def moment(second: int) -> datetime:
    return datetime.fromtimestamp(second, UTC)


def events(spark: SparkSession, first: int, last: int) -> DataFrame:
    rng = random.Random(first)
    # Null is a key as well, and some rows are of after the watermark: they wait in the state.
    keys = [None, *(f"k{at}" for at in range(12))]
    rows = [(rng.choice(keys), rng.randrange(9), moment(at + rng.randrange(8)), "t", 0, at)
            for at in range(first, last)]  # fmt: skip
    return spark.createDataFrame(rows, EVENTS).repartition(2)


def changes(spark: SparkSession, first: int, last: int) -> DataFrame:
    rng = random.Random(-first)
    rows = []
    for at in range(first, last, 2):
        row = (f"k{rng.randrange(12)}", rng.randrange(100))
        gone = rng.random() < 0.2
        rows.append((row if gone else None, None if gone else row, "d" if gone else "u",
                     row[0], moment(at + rng.randrange(8)), "c", 0, at))  # fmt: skip
    return spark.createDataFrame(rows, CHANGES).repartition(2)


def everything(
    rows: DataFrame, rates: DataFrame, queries: DataFrame
) -> Iterator[tuple[str, DataFrame]]:
    hours = w.tumbling(rows, "5 s", by=["key"], values={
        "n": w.count(), "kinds": w.distinct("number")})  # fmt: skip
    yield "compare", w.compare(hours, by=["key"], values=["n"], offset="10 s")
    yield "sliding", w.sliding(rows, "9 s", by=["key"], values={"n": w.sum("number")})
    yield "dedup", w.deduplicated(rows, key=["key", "number"], within="20 s")
    right = rows.select("key", "number", "_time", "_offset").where("number > 4")
    left = rows.select("key", "_time", "_offset")
    yield "within", joins.within(left, right, on=["key"], bound=("-3 s", "9 s"), how="full")
    taxed = joins.enrich(rows, rates, on={"key": "id"}, version="as_of")
    yield "as of", taxed.select("key", "_offset", "rate")
    rising = pattern.begin("low", "number < 3").then("high", "number > low.number + 2")
    yield "pattern", rising.within("15 seconds").match(rows, by="key")
    found = rows.withColumn("text", F.concat_ws(" ", "key", F.col("number").cast("string")))
    yield "standing", standing.match(found, queries, fields={"text": "text", "number": "number"})
    yield (
        "standing as of",
        standing.match(
            found, queries, fields={"text": "text", "number": "number"}, version="as_of"
        ),
    )
    yield "view", views.sql(
        "SELECT key, count(*) AS n, count(DISTINCT number) AS kinds, max(number) AS most "
        "FROM rows GROUP BY key", keys={"rows": "_offset"}, rows=rows,
    ).changes()  # fmt: skip


def batch(spark: SparkSession, found: Layout, number: int) -> list[str]:
    """What all of them give for a micro-batch, each row as text."""
    first, last = number * 60, number * 60 + 60
    asked = [("a", "k1"), ("b", "number > 6")] if number == 0 else [("a", None), ("c", "k2")]
    # In the midst of the rows.
    rows_of = [(*each, moment(first + 20 * at)) for at, each in enumerate(asked, 1)]
    queries = spark.createDataFrame(rows_of, "key string, value string, _time timestamp")
    context = Batch(
        folder=found.folder, batch_id=number, shards=found.shards,
        watermark_us=(last - 8) * 1_000_000,
    )  # fmt: skip
    with entered(context), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows, rates = events(spark, first, last).cache(), changes(spark, first, last).cache()
        given = [
            each.select(F.concat_ws(" ", F.lit(name), F.to_json(F.struct("*"))).alias("row"))
            for name, each in everything(rows, rates, queries)
        ]
        told = sorted(each["row"] for each in reduce(DataFrame.union, given).collect())
    for name, key in context.keys.items():
        inspecting.note_key(found.folder, name, key)
    commits = Path(found.checkpoint) / "commits"
    commits.mkdir(exist_ok=True)
    (commits / str(number)).touch()
    return told


def test_the_answer_is_that_of_other_numbers_of_shards(
    penstock_spark: SparkSession, tmp_path: Path
) -> None:
    plain, checkpoint = str(tmp_path / "plain"), str(tmp_path / "rescaled")
    found = layout.begin(plain, 3)
    assert batch(penstock_spark, found, 0)
    shutil.copytree(plain, checkpoint)
    wanted = batch(penstock_spark, found, 1)
    assert {each.split(" {")[0] for each in wanted} == {
        "compare", "sliding", "dedup", "within", "as of", "pattern", "standing",
        "standing as of", "view"
    }  # fmt: skip
    assert any(json.loads(each.removeprefix("compare ")).get("n_before") is not None
               for each in wanted if each.startswith("compare"))  # fmt: skip
    assert rescale(penstock_spark, checkpoint, 2).rows > 100
    now = layout.find(checkpoint)
    assert now is not None
    assert now.shards == 2
    assert batch(penstock_spark, now, 1) == wanted
