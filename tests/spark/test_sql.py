"""Columns as SQL text: whatever they are called, and what Spark says of mistakes."""

from __future__ import annotations

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from penstock.spark import sql

NAMES = ["plain", "with `ticks`", "a, b", "line\nbreak", "ä\u00a0\\", "\x1f", "\x1e", ""]


@pytest.mark.parametrize("names", [NAMES, [*NAMES, "\x1f\x1e"]])
def test_columns_by_any_name(spark: SparkSession, names: list[str]) -> None:
    rows = spark.range(3)
    wanted = {name: f"id + {at}" for at, name in enumerate(names)}
    found = sql.select(rows, wanted, "id", "'a\x1eb' AS text")
    assert found.columns == ["id", "text", *names]
    assert [tuple(row) for row in found.collect()] == [
        (n, "a\x1eb", *(n + at for at in range(len(names)))) for n in range(3)
    ]


def test_a_mistake_is_told_as_sparks_own(spark: SparkSession) -> None:
    with pytest.raises(AnalysisException, match="nothing_like_it"):
        sql.select(spark.range(1), {"a": "nothing_like_it"})
