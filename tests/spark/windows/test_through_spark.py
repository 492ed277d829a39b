"""Windows through Spark: micro-batches and batch give the same, and what Spark itself says."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark import windows as w
from penstock.spark.flows.errors import DeclarationError
from penstock.spark.state import Batch, entered
from penstock.spark.windows import exact
from penstock.spark.windows.spans import microseconds

# Workers cannot import a module of the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

SECOND = 1_000_000
SCHEMA = (
    "shop string, seconds bigint, amount double, price decimal(10,2), user string, "
    "_topic string, _partition int, _offset bigint"
)
ROWS = 1_500
END = 10**6
BLOOM = w.bloom("user", items=200)
VALUES = {
    "n": w.count(),
    "total": w.sum("amount"),
    "mean": w.avg("amount"),
    "paid": w.sum("price"),
    "each": w.avg("price"),
    "cheap": w.min("price"),
    "dear": w.max("amount"),
    "first": w.first("user"),
    "last": w.last("user"),
    "users": w.distinct("user"),
    "often": w.top_k("user", 3),
    "median": w.quantile("amount", 0.5),
    "about": w.approx_quantile("amount", 0.5, accuracy=0.02),
    "some": w.approx_distinct("user"),
    "seen": w.count_min("user", of=["u1", "u2"], relative_error=0.01),
    "known": BLOOM,
}


@pytest.fixture(scope="module")
def orders(penstock_spark: SparkSession) -> DataFrame:
    luck = random.Random(5)
    rows = [
        (
            luck.choice(["north", "north", "south", None]),
            at // 10 + luck.randrange(20),
            luck.uniform(-1e6, 1e6),
            Decimal(luck.randrange(10_000)) / 100,
            f"u{luck.randrange(60)}",
            "orders",
            0,
            at,
        )
        for at in range(ROWS)
    ]
    frame = penstock_spark.createDataFrame(rows, SCHEMA)
    return frame.withColumn("_time", F.timestamp_seconds("seconds")).coalesce(2).cache()


def in_batches(
    orders: DataFrame, folder: Path, edges: list[int], made: Callable[[DataFrame], DataFrame]
) -> list[Row]:
    """What comes out if the rows come in micro-batches, and then time goes on."""
    found: list[Row] = []
    for number, edge in enumerate([*edges, END]):
        low = 0 if number == 0 else edges[number - 1]
        part = orders.where((F.col("_offset") >= low) & (F.col("_offset") < edge))
        # No event is more than 20 seconds behind one before it.
        mark = (edge // 10 - 30) * SECOND
        with entered(Batch(folder=str(folder), batch_id=number, watermark_us=mark)):
            found += made(part).collect()
    return found


def plain(row: Row) -> tuple[Any, ...]:
    return tuple(bytes(each) if isinstance(each, bytearray) else each for each in row)


def key(row: Row) -> tuple[str, Any]:
    return (row.shop or "", row.window_start)


@pytest.mark.timeout(300)
def test_the_same_in_micro_batches_and_in_batch(
    orders: DataFrame, penstock_spark: SparkSession, tmp_path: Path
) -> None:
    def made(rows: DataFrame) -> DataFrame:
        # Of an expression, too.
        sizes = w.count_min(F.length("user"), relative_error=0.01)
        found = w.tumbling(rows, "1 minute", by=["shop"], values={**VALUES, "sketch": sizes})
        return found.withColumns({
            "yes": BLOOM.may_contain(F.col("known"), F.lit("u1")),
            "there": F.exists("often", lambda each: each.value == "u1"),
            "no": BLOOM.may_contain(F.col("known"), F.lit("nobody")),
        })  # fmt: skip

    whole = sorted(made(orders).collect(), key=key)
    parts = sorted(in_batches(orders, tmp_path, [700], made), key=key)
    assert list(map(plain, parts)) == list(map(plain, whole))
    said = (
        orders.groupBy("shop", F.window("_time", "1 minute").start.alias("window_start"))
        .agg(
            F.count("*").alias("n"),
            F.sum("price").alias("paid"),
            F.avg("price").alias("each"),
            F.min("price").alias("cheap"),
            F.max("amount").alias("dear"),
            F.min_by("user", F.struct("_time", "_offset")).alias("first"),
            F.max_by("user", F.struct("_time", "_offset")).alias("last"),
            F.countDistinct("user").alias("users"),
            F.percentile("amount", 0.5).alias("median"),
            F.sum("amount").alias("total"),
            F.collect_list("user").alias("all"),
            F.collect_list("amount").alias("amounts"),
        )
        .collect()
    )
    assert len(said) == len(whole)
    jvm: Any = penstock_spark._jvm
    for mine, theirs in zip(whole, sorted(said, key=key), strict=True):
        for name in ("shop", "window_start", "n", "paid", "each", "cheap", "dear", "first",
                     "last", "users"):  # fmt: skip
            assert mine[name] == theirs[name], name
        assert mine.total == pytest.approx(theirs.total)
        assert mine.median == pytest.approx(theirs.median)
        # As far off as it says of the value at the rank, and no further.
        at_rank = sorted(theirs.amounts)[math.ceil(0.5 * theirs.n) - 1]
        assert mine.about == pytest.approx(at_rank, rel=0.02 + 1e-9)
        assert mine.some == pytest.approx(theirs.users, abs=3)
        counts = {each: theirs["all"].count(each) for each in set(theirs["all"])}
        best = sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:3]
        assert [(each.value, each["count"]) for each in mine.often] == best
        assert mine.seen["u1"] >= counts.get("u1", 0)
        # Spark reads what we have merged, and estimates the same.
        sketch = jvm.org.apache.spark.util.sketch.CountMinSketch.readFrom(bytes(mine.sketch))
        for size in (2, 3):
            assert sketch.estimateCount(size) == w.frequency(bytes(mine.sketch), size)
    assert all(each.yes for each in whole if each.there)
    assert sum(each.no for each in whole) <= len(whole) // 4


def test_sessions_hopping_and_sliding_through_spark(orders: DataFrame, tmp_path: Path) -> None:
    sparse = orders.where("_offset % 97 = 0")
    n = {"n": w.count()}

    def windows(rows: DataFrame) -> DataFrame:
        sessions = w.session(rows, "12 seconds", by=["shop"], values=n)
        hops = w.hopping(rows, "12 seconds", "4 seconds", by=["shop"], values=n)
        return sessions.withColumn("kind", F.lit("session")).union(
            hops.withColumn("kind", F.lit("hop"))
        )

    whole = {tuple(each) for each in windows(sparse).collect()}
    assert {tuple(each) for each in in_batches(sparse, tmp_path / "s", [900], windows)} == whole
    spans = {
        "session": F.session_window("_time", "12 seconds"),
        "hop": F.window("_time", "12 seconds", "4 seconds"),
    }
    said = [
        sparse.groupBy("shop", span.alias("s")).count().withColumn("kind", F.lit(kind))
        for kind, span in spans.items()
    ]
    assert whole == {
        (r.shop, r.s.start, r.s.end, r["count"], True, r.kind)
        for r in said[0].union(said[1]).collect()
    }

    def recent(rows: DataFrame) -> DataFrame:
        values = {"n": w.count(), "users": w.distinct("user"), "paid": w.sum("price")}
        return w.sliding(rows, "1 minute", by=["shop"], values=values)

    slid = {(r._offset, r.n, r.users, r.paid) for r in recent(sparse).collect()}
    assert len(slid) == sparse.count()


def test_comparison_and_rolling_average(orders: DataFrame, tmp_path: Path) -> None:
    """In two micro-batches; on Arrow, in `test_earlier`, they are cut at random."""

    def made(rows: DataFrame) -> DataFrame:
        counts = w.tumbling(rows, "10 seconds", by=["shop"], values={"n": w.count()})
        # What windows are by need not be said again.
        before = w.compare(counts, values=["n"], offset="20 seconds")
        return w.rate(
            w.rolling(before, by=["shop"], values=["n"], over=3, every="10 seconds"), ["n"]
        )

    whole = in_batches(orders, tmp_path, [1_000], made)
    known = {(r.shop, r.window_start.timestamp()): r.n for r in whole}
    assert len(known) == len(whole) > 30
    for row in whole:
        start = row.window_start.timestamp()
        before = known.get((row.shop, start - 20))
        assert row.n_before == before
        assert row.n_change == (None if before is None else row.n - before)
        last = [known.get((row.shop, start - at)) for at in (0, 10, 20)]
        some = [each for each in last if each is not None]
        assert row.n_rolling == pytest.approx(sum(some) / len(some))
        assert row.n_per_second == row.n / 10


def test_sums_of_doubles_far_from_one(orders: DataFrame) -> None:
    def sums(*values: str) -> dict[str, float]:
        wanted = {each: w.sum(F.lit(float(each))) for each in values}
        return w.tumbling(orders.limit(1), "1 day", values=wanted).collect()[0].asDict()

    for text, found in sums("1e-30", "1e29", "-3e38", "inf").items():
        if not text.startswith(("window", "is_")):
            assert found == float(text)
    with pytest.raises(PySparkException, match=r"WindowError: a value to be summed is finite, and"):
        sums("4e38")
    with pytest.raises(PySparkException, match="so small that digits below"):
        sums("1e-60")


def test_spark_cuts_doubles_as_we_do(penstock_spark: SparkSession, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = np.ldexp(rng.uniform(-2, 2, 2_000), rng.integers(-240, 127, 2_000))
    rows = [(at, value) for at, value in enumerate(values.tolist())]
    cut = exact.partials(F.col("x"))
    found = (
        penstock_spark.createDataFrame(rows, "id bigint, x double")
        .groupBy("id")
        .agg(*(column.alias(name) for name, column in cut.items()))
        .orderBy("id")
        .toArrow()
    )
    limbs, _, lost = exact.limbs_of(values)
    for name, wanted in zip((*exact.LIMBS, exact.LOST), (*limbs, lost), strict=True):
        assert found[name].to_pylist() == wanted.tolist(), name


def test_windows_that_are_not_told_apart_are_refused(orders: DataFrame) -> None:
    counts = w.tumbling(orders, "10 seconds", by=["shop", "user"], values={"n": w.count()})
    with pytest.raises(PySparkException, match="by= does not tell apart: it names 'shop'"):
        w.compare(counts, by=["shop"], values=["n"], offset="20 seconds").collect()


def test_what_cannot_work_is_said_where_it_is_declared(orders: DataFrame) -> None:
    n = {"n": w.count()}
    with pytest.raises(DeclarationError, match=r"test_through_spark.py:\d+: .*grow without end"):
        w.tumbling(orders.drop("_time"), "1 minute", values=n)
    with pytest.raises(DeclarationError, match="every='2 s' is longer than size='1 s'"):
        w.hopping(orders, "1 s", "2 s", values=n)
    with pytest.raises(DeclarationError, match="not a length of time, from 'soon'"):
        w.tumbling(orders, "1 minute soon", values=n)
    with pytest.raises(DeclarationError, match="'n' cannot be had of 'user'"):
        w.tumbling(orders, "1 minute", values={"n": w.sum("user")})
    with pytest.raises(DeclarationError, match="for each event"):
        w.sliding(orders, "1 minute", values={"top": w.top_k("user")})
    with pytest.raises(DeclarationError, match="'shop'"):
        w.deduplicated(orders, key="shop", within="1 minute")
    assert microseconds("1 hour 30 min", "x") == 90 * 60 * SECOND
    assert w.approx_distinct("user").error.startswith("standard error 1.6")
