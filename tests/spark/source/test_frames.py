"""Frames of micro-batches, as Spark's optimizer sees them."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T  # noqa: N812

from penstock.spark.source.frames import Reader, frame
from penstock.spark.source.planning import Range

SCHEMA = T.StructType([T.StructField("user", T.LongType())])


def staged(spark: SparkSession, tasks: int) -> DataFrame:
    options: Any = None
    ranges = tuple((Range("clicks", number, 0, 1_000_000),) for number in range(tasks))
    return frame(spark, Reader(options, SCHEMA, 0, ranges))


def build_side(rows: DataFrame) -> str:
    plan = str(rows._jdf.queryExecution().sparkPlan().toString())
    return next(side for side in ("BuildLeft", "BuildRight") if side in plan)


@pytest.mark.parametrize("tasks", [1, 3])
def test_a_join_broadcasts_the_table_and_never_the_stream(spark: SparkSession, tasks: int) -> None:
    clicks = staged(spark, tasks)
    table = spark.range(1000).withColumnRenamed("id", "user")
    assert build_side(clicks.join(table, "user")) == "BuildRight"
    assert build_side(table.join(clicks, "user")) == "BuildLeft"
    assert clicks.rdd.getNumPartitions() == tasks
