"""Frames of micro-batches, as Spark's optimizer sees them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T  # noqa: N812

from penstock.spark.source import frames
from penstock.spark.source.frames import Reader, frame
from penstock.spark.source.planning import Range
from penstock.spark.source.told import PROPERTY, Told, ToldTooMuchError

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


def test_what_is_told_gives_up_where_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    read = pa.RecordBatch.from_pydict({"user": pa.array(range(100), pa.int64())})
    monkeypatch.setattr(frames, "read_task", lambda *_: iter([read] * 3))
    monkeypatch.setattr(frames, "TOLD_BYTES", 2 * read.nbytes)
    ranges = [Range("clicks", 0, 0, 300)]
    monkeypatch.setattr(frames, "told", lambda _: Told(0, {0: ranges}))
    options: Any = None
    task = pa.RecordBatch.from_pydict({"id": [0]})
    with pytest.raises(ToldTooMuchError):
        list(Reader(options, SCHEMA, 0, None)([task]))
    # By stages each task has a share of it, in its own time.
    assert len(list(Reader(options, SCHEMA, 0, (tuple(ranges),))([task]))) == 3


def test_what_another_flow_says_is_not_done(spark: SparkSession) -> None:
    said = Told(1, {0: [Range("clicks", 0, 0, 1)]}, checkpoint="one")
    options: Any = None
    rows = frame(spark, Reader(options, SCHEMA, 0, None, checkpoint="other"))
    said.tell(spark.sparkContext)
    try:
        with pytest.raises(Exception, match=r"NotToldError.*checkpoint other was told"):
            rows.collect()
    finally:
        spark.sparkContext.setLocalProperty(PROPERTY, None)  # type: ignore[arg-type]
