"""An operator over DataFrames: by key, version by version, and the same in batch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession

from penstock.spark.state import Batch, Shard, apply, entered
from penstock.spark.state.files import StateError

# Workers cannot import a module of the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

NAMES = pa.schema([("name", pa.string()), ("total", pa.int64())])
OUT = "name string, total bigint"


@dataclass(frozen=True, slots=True)
class Totals:
    """The sum of all numbers under a name so far, for the names of a micro-batch."""

    kind: str = "totals"
    describes: str = "totals by name"

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        if "rows" not in inputs:
            return NAMES.empty_table()
        fresh = inputs["rows"].group_by("name").aggregate([("number", "sum")])
        kept = shard.state.table("totals", NAMES, ["name"])
        before = kept.get(fresh)["total"].fill_null(0)
        total = pa.compute.add(before, fresh["number_sum"])
        rows = pa.table([fresh["name"], total], schema=NAMES)
        kept.put(rows)
        return rows


def frame(spark: SparkSession, **numbers: int) -> DataFrame:
    return spark.createDataFrame(list(numbers.items()), "name string, number bigint")


def totals(rows: DataFrame) -> dict[str, int]:
    out = apply({"rows": rows}, Totals(), key=["name"], schema=OUT)
    return {each.name: each.total for each in out.collect()}


def run(rows: DataFrame, folder: Path, batch_id: int) -> dict[str, int]:
    with entered(Batch(folder=str(folder), batch_id=batch_id)):
        return totals(rows)


def test_micro_batches_go_on_from_each_other(penstock_spark: SparkSession, tmp_path: Path) -> None:
    first, second = frame(penstock_spark, a=1, b=2), frame(penstock_spark, b=10, c=20)
    assert run(first, tmp_path, 0) == {"a": 1, "b": 2}
    assert run(second, tmp_path, 1) == {"b": 12, "c": 20}
    # The same number again starts from the same place, however often.
    assert run(second, tmp_path, 1) == {"b": 12, "c": 20}
    assert run(first, tmp_path, 2) == {"a": 2, "b": 14}


def test_in_batch_nothing_is_kept(penstock_spark: SparkSession) -> None:
    rows = frame(penstock_spark, a=1, b=2).union(frame(penstock_spark, b=10))
    assert totals(rows) == totals(rows) == {"a": 1, "b": 12}


def test_keys_of_other_types_are_refused(penstock_spark: SparkSession) -> None:
    rows = frame(penstock_spark, a=1)
    inputs = {"rows": rows, "others": rows.withColumn("name", rows["number"])}
    with pytest.raises(StateError, match="'rows' is string, that of 'others' is bigint"):
        apply(inputs, Totals(), key=["name"], schema=OUT)
    with pytest.raises(StateError, match="no name for an operator"):
        apply({"rows": rows}, Totals(), key=["name"], schema=OUT, name="../up")
