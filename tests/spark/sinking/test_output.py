"""A store as the output of a flow: rows replaced by key, deleted ones gone, batches once."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.errors import ConfigError
from penstock.spark.sinking.errors import FeedingError
from penstock.spark.sinking.output import RefusedRowsError, store


@dataclass(frozen=True)
class Batch:
    flow: str
    batch_id: int
    checkpoint: str = "/data/totals/g1/checkpoint"


def rows(path: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.execute("SELECT * FROM totals ORDER BY id"))


def test_batches_are_written_once(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    output = store(f"sqlite:///{file}?table=totals", key="id")
    assert str(file) in output.target

    def frame(*given: tuple[int, str | None, list[int], bool]) -> Any:
        schema = "id int, name string, tags array<int>, _deleted boolean"
        return spark.createDataFrame(list(given), schema)

    first = frame((1, "a", [1], False), (2, "b", [], False))
    assert output.write(first, Batch("f", 0)) == 2
    assert output.write(frame((9, "again", [], False)), Batch("f", 0)) == 0
    assert output.write(frame((1, None, [], True), (2, "c", [2], False)), Batch("f", 1)) == 2
    assert rows(file) == [(2, "c", "[2]")]
    # A checkpoint that was lost begins anew, and would be skipped in silence.
    with pytest.raises(FeedingError, match="older than the store"):
        output.write(first, Batch("f", 0))
    # A flow that is reset counts anew.
    assert output.write(first, Batch("f", 0, "/data/totals/g2/checkpoint")) == 2
    with pytest.raises(FeedingError, match="key"):
        store(f"sqlite:///{file}?table=u", key="nothing").write(first, Batch("f", 0))
    with pytest.raises(ConfigError, match="no kind of store"):
        store("nothing:///x", key="id")
    assert issubclass(RefusedRowsError, FeedingError)
