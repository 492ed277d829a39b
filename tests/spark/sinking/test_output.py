"""A store as the output of a flow: rows replaced by key, deleted ones gone, batches once."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.errors import ConfigError
from penstock.spark.flows.inputs import Place
from penstock.spark.sinking.errors import FeedingError
from penstock.spark.sinking.output import RefusedRowsError, store
from penstock.testing import Broker
from tests.spark.sinking.changelog import records


@dataclass(frozen=True)
class Batch:
    flow: str
    batch_id: int
    checkpoint: str = "/data/totals/g1/checkpoint"
    place: Place | None = None
    is_rebuild: bool = False


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
    # A flow that is reset counts anew, beside what it has written before.
    anew = Batch("f", 0, "/data/totals/g2/checkpoint", is_rebuild=True)
    output.switch("f", 2)
    assert output.write(first, anew) == 2
    assert rows(file) == [(2, "c", "[2]")]
    # One that was given up leaves nothing behind.
    third = Batch("f", 0, "/data/totals/g3/checkpoint", is_rebuild=True)
    assert output.write(frame((7, "x", [], False)), third) == 1
    for _ in range(2):
        # Again, after a kill, does no harm.
        output.switch("f", 3)
        assert rows(file) == [(7, "x", "[]")]
    assert output.write(frame((7, "x", [], False)), third) == 0
    assert output.write(first, Batch("f", 1, "/data/totals/g3/checkpoint")) == 2
    assert [row[0] for row in rows(file)] == [1, 2, 7]
    # What another flow has written too is not one's own to replace.
    assert output.write(frame((8, "y", [], False)), Batch("other", 0)) == 1
    fourth = Batch("f", 0, "/data/totals/g4/checkpoint", is_rebuild=True)
    assert output.write(frame((9, "z", [], False)), fourth) == 1
    output.switch("f", 4)
    assert [row[0] for row in rows(file)] == [1, 2, 7, 8, 9]
    with pytest.raises(FeedingError, match="key"):
        store(f"sqlite:///{file}?table=u", key="nothing").write(first, Batch("f", 0))
    with pytest.raises(ConfigError, match="no kind of store"):
        store("nothing:///x", key="id")


def test_a_store_that_lacks_batches_is_told(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db?table=totals"
    frame = spark.createDataFrame([(1, "a")], "id int, name string")
    # The table is new, and the flow is not.
    with pytest.raises(FeedingError, match="lacks batches 0 to 2") as told:
        store(url, key="id").write(frame, Batch("f", 3))
    assert "reset f" in told.value.advice
    for number in range(2):
        store(url, key="id").write(frame, Batch("f", number))
    with pytest.raises(FeedingError, match="lacks batches 2 to 4"):
        store(url, key="id").write(frame, Batch("f", 5))


def test_refused_rows_go_aside(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path
) -> None:
    frame = spark.createDataFrame([("x" * 70_000, 1), ("good", 2)], "id string, n int")
    folder = tmp_path / "index"
    output = store(f"tantivy:///{folder}", key="id", dead_letters=topic)
    with pytest.raises(RefusedRowsError, match="refuses 1 rows"):
        output.write(frame, Batch("f", 0))
    place = Place(log_broker.bootstrap, {}, str)
    assert output.write(frame, Batch("f", 0, place=place)) == 1
    (letter,) = records(log_broker.bootstrap, topic)
    headers = dict(letter.headers())
    assert json.loads(letter.value()) == {"id": "x" * 70_000, "n": 1}
    assert headers["penstock.error.sink"] == b"f"
    assert headers["penstock.error.offset"] == b"0"
    assert b"long" in headers["penstock.error.reason"]
