"""Spark's private parts: plans that can be run again and again, and those that cannot."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.runtime.checkpoint import Checkpoint, Planned
from penstock.spark.runtime.spark_internals import (
    HadoopFiles,
    cancel_group,
    cloned,
    local_path,
    unrepeatable,
)
from penstock.spark.source.planning import Range
from penstock.spark.source.told import Told, told


@pytest.fixture(scope="module")
def session(penstock_spark: SparkSession) -> SparkSession:
    found = cloned(penstock_spark)
    found.conf.set("spark.sql.adaptive.enabled", "false")
    return found


def test_a_clone_has_settings_of_its_own(penstock_spark: SparkSession) -> None:
    penstock_spark.conf.set("spark.penstock.test", "old")
    penstock_spark.range(3).createOrReplaceTempView("of_the_first")
    clone = cloned(penstock_spark)
    clone.conf.set("spark.penstock.test", "new")
    assert penstock_spark.conf.get("spark.penstock.test") == "old"
    assert clone.table("of_the_first").count() == 3
    penstock_spark.catalog.dropTempView("of_the_first")
    penstock_spark.conf.unset("spark.penstock.test")


def test_jobs_of_a_cancelled_group_are_refused(penstock_spark: SparkSession) -> None:
    context = penstock_spark.sparkContext

    def count(group: str) -> int:
        context.setJobGroup(group, "test")
        return penstock_spark.range(3).count()

    try:
        cancel_group(penstock_spark, "penstock cancelled")
        with pytest.raises(Exception, match="cancelled"):
            count("penstock cancelled")
        assert count("penstock not cancelled") == 3
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]


def _what_is_told(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        batch = told()
        numbers = [batch.batch_id, *(each.start for each in batch.ranges[0])]
        yield pa.RecordBatch.from_pydict({"n": pa.array(numbers, pa.int64())})


def test_a_plan_reads_what_it_is_told(session: SparkSession) -> None:
    rows = session.range(0, 1, 1, 1).mapInArrow(_what_is_told, "n bigint")
    rows = rows.where("n > 0").select((F.col("n") * 10).alias("n")).coalesce(1)
    assert unrepeatable(rows) is None
    prepared = rows.rdd
    for number in range(1, 4):
        Told(number, {0: [Range("a", 0, number + 1, 9)]}).tell(session.sparkContext)
        assert [row.n for row in prepared.collect()] == [10 * number, 10 * number + 10]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rows: rows.withColumn("at", F.current_timestamp()), "the current time"),
        (lambda rows: rows.withColumn("day", F.current_date()), "the current time"),
        (lambda rows: rows.withColumn("day", F.lit("today").cast("date")), "date of today"),
        (lambda rows: rows.where("to_timestamp(' NOW') > timestamp_seconds(id)"), "date of today"),
        (lambda rows: rows.where("cast(concat('to', 'day') as date) > '2020-01-01'"), "of today"),
        (lambda rows: rows.withColumn("chance", F.rand()), "random"),
        (lambda rows: rows.withColumn("chance", F.expr("uuid()")), "random"),
        (lambda rows: rows.repartition(3), "Exchange"),
        (lambda rows: rows.join(rows.sparkSession.range(2), "id"), "Exchange|Join"),
        (lambda rows: rows.where("id in (select max(id) from range(3))"), "Exchange|query|Join"),
        (lambda rows: rows.limit(3), "Limit"),
    ],
)
def test_what_spark_computes_once_is_not_run_again(
    session: SparkSession, change: Callable[[DataFrame], DataFrame], reason: str
) -> None:
    rows = session.range(0, 10, 1, 1)
    assert unrepeatable(rows.where("id > 1 and id % 2 = 0").union(rows).coalesce(1)) is None
    assert unrepeatable(rows.where("timestamp_seconds(id) >= '1970-01-01'")) is None
    found = unrepeatable(change(rows))
    assert found is not None
    assert re.search(reason, found)


def test_what_was_kept_is_not_run_again(session: SparkSession) -> None:
    rows = session.range(0, 10, 1, 1).persist()
    try:
        assert "InMemory" in str(unrepeatable(rows.where("id > 1")))
    finally:
        rows.unpersist()


def test_files_in_a_store_of_hadoop(penstock_spark: SparkSession, tmp_path: Path) -> None:
    files = HadoopFiles(penstock_spark, f"file://{tmp_path}/folder")
    assert list(files.names()) == []
    with pytest.raises(FileNotFoundError):
        files.read("1")
    files.write("1", b"one")
    files.write("1", b"other", durable=False)
    files.write("2", bytes(range(256)))
    with pytest.raises(FileExistsError):
        files.write("1", b"third", replaces=False)
    assert (files.read("1"), files.read("2")) == (b"other", bytes(range(256)))
    files.remove("1")
    files.remove("1")
    old, new = tmp_path / "folder" / ".7.one.tmp", tmp_path / "folder" / ".8.two.tmp"
    for each in (old, new):
        each.touch()
    os.utime(old, (0, 0))
    files.sweep()
    assert (old.exists(), new.exists()) == (False, True)
    assert [each for each in files.names() if not each.startswith(".")] == ["2"]


def test_an_object_that_another_writes_meanwhile_is_not_replaced(
    penstock_spark: SparkSession, tmp_path: Path
) -> None:
    files = HadoopFiles(penstock_spark, f"file://{tmp_path}")
    files._is_direct = True
    (tmp_path / "1").write_bytes(b"of another")
    system = files._system

    class Late:
        """The other one is there only when this one writes."""

        def exists(self, _: Any) -> bool:
            return False

        def create(self, *given: Any) -> Any:
            return system.create(*given)

    files._system = Late()
    with pytest.raises(FileExistsError):
        files.write("1", b"mine", replaces=False)
    assert (tmp_path / "1").read_bytes() == b"of another"


def test_a_checkpoint_in_such_a_store(penstock_spark: SparkSession, tmp_path: Path) -> None:
    checkpoint = Checkpoint(f"file://{tmp_path}/c", partial(HadoopFiles, penstock_spark))
    planned = Planned(0, [None], [{"a": {"0": 3}}])
    checkpoint.begin(planned)
    checkpoint.done(0)
    assert Checkpoint(f"{tmp_path}/c").last(1) == (planned, True)
    assert checkpoint.query_id() == Checkpoint(f"{tmp_path}/c").query_id()


def test_where_a_folder_is_says_hadoop(penstock_spark: SparkSession, tmp_path: Path) -> None:
    for folder in (f"{tmp_path}/a b", f"file:{tmp_path}/a b", f"file://{tmp_path}/a b"):
        assert local_path(penstock_spark, folder) == f"{tmp_path}/a b"
    context: Any = penstock_spark.sparkContext
    conf = context._jsc.hadoopConfiguration()
    for name, value in {
        "fs.elsewhere.impl": "org.apache.hadoop.fs.http.HttpFileSystem",
        "fs.defaultFS": "elsewhere://there",
    }.items():
        conf.set(name, value)
    try:
        assert local_path(penstock_spark, f"{tmp_path}/a") is None
        assert local_path(penstock_spark, "elsewhere:/a") is None
        assert local_path(penstock_spark, f"file:{tmp_path}/a") == f"{tmp_path}/a"
    finally:
        conf.unset("fs.defaultFS")
        conf.unset("fs.elsewhere.impl")
