"""State looked at from outside, and in another number of shards."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

from penstock.cli.flows import app
from penstock.spark.flows.folder import Folder, Record
from penstock.spark.state import Batch, Shard, apply, entered, inspecting, layout
from penstock.spark.state.files import StateError
from penstock.spark.state.layout import Layout
from penstock.spark.state.rescaling import rescale
from penstock.spark.state.time import Times, TimesFolder

pytestmark = pytest.mark.timeout(300)
# Workers cannot import a module of the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

SEEN = pa.schema([("who", pa.string()), ("day", pa.int32()), ("total", pa.int64())])
OUT = "who string, day int, total bigint, shard int"


@dataclass(frozen=True, slots=True)
class Sums:
    """Numbers added up by name and day; its table calls the name otherwise, if it is to."""

    kind: str = "sums"
    describes: str = "sums"
    whole: bool = False
    # Keep the rows instead, as a value.
    rows: bool = False

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        shard.state.keep("clock", pa.table({"at": [shard.version]}))
        if self.whole:
            shard.state.keep("mine", pa.table({"shard": [shard.number]}))
        if "rows" not in inputs:
            return SEEN.append(pa.field("shard", pa.int32())).empty_table()
        if self.rows:
            shard.state.keep("waiting", inputs["rows"])
            return SEEN.append(pa.field("shard", pa.int32())).empty_table()
        fresh = inputs["rows"].group_by(["name", "day"]).aggregate([("number", "sum")])
        kept = shard.state.table("sums", SEEN, ["who", "day"])
        asked = fresh.rename_columns({"name": "who"})
        before = kept.get(asked)["total"].fill_null(0)
        rows = pa.table(
            [asked["who"], asked["day"], pa.compute.add(before, fresh["number_sum"])], schema=SEEN
        )
        kept.put(rows)
        number = pa.array([shard.number] * len(rows), pa.int32())
        return rows.append_column("shard", number)


def batch(rows: DataFrame, found: Layout, number: int, operator: Sums) -> dict[str, int]:
    context = Batch(folder=found.folder, batch_id=number, shards=found.shards)
    with entered(context):
        out = apply({"rows": rows}, operator, key=["name"], schema=OUT)
        totals = {f"{each.who}/{each.day}": each.total for each in out.collect()}
    for name, key in context.keys.items():
        inspecting.note_key(found.folder, name, key)
    commits = Path(found.checkpoint) / "commits"
    commits.mkdir(exist_ok=True)
    (commits / str(number)).touch()
    return totals


def some(spark: SparkSession, count: int) -> DataFrame:
    rows = [(f"n{at % 40}" if at % 40 else None, at % 3, at) for at in range(count)]
    return spark.createDataFrame(rows, "name string, day int, number bigint").repartition(2)


def test_another_number_of_shards(penstock_spark: SparkSession, tmp_path: Path) -> None:
    checkpoint = Folder(tmp_path).checkpoint("sums", 1)
    found = layout.begin(checkpoint, 3)
    assert layout.begin(checkpoint, 7) == found
    rows = some(penstock_spark, 120)
    first = batch(rows, found, 0, Sums())
    TimesFolder(f"{found.folder}/{layout.TIME}").write(0, Times({}, 77))
    # What was not noted down as done does not count.
    batch(rows, found, 1, Sums())
    (Path(checkpoint) / "commits" / "1").unlink()
    done = rescale(penstock_spark, checkpoint, 5)
    assert (done.version, done.operators, done.rows) == (0, 1, 120)
    now = layout.find(checkpoint)
    assert now is not None
    assert now.shards == 5
    assert not Path(found.folder).exists()
    times = TimesFolder(f"{now.folder}/{layout.TIME}").before(1)
    assert times is not None
    assert times.watermark_us == 77
    assert len({each.shard for each in inspecting.summary(now) if each.rows > 1}) == 5
    second = batch(rows, now, 1, Sums())
    assert second == {key: 2 * total for key, total in first.items()}

    Folder(tmp_path).write(Record("sums"))
    run = CliRunner().invoke(app, ["state", "sums", "--data", str(tmp_path), "--json"])
    told = json.loads(run.output)
    assert told["shards"] == 5
    assert sum(each["rows"] for each in told["state"]) == 120 + 5
    asked = ["state", "sums", "--data", str(tmp_path), "--operator", "sums-1"]
    run = CliRunner().invoke(app, [*asked, "--key", "who=n7", "--key", "day=1", "--json"])
    [row] = json.loads(run.output)
    assert (row["who"], row["day"], row["total"]) == ("n7", 1, second["n7/1"])
    run = CliRunner().invoke(app, [*asked, "--limit", "2"])
    assert "the first 2 rows" in run.output + run.stderr
    with pytest.raises(StateError, match="no operator 'x'"):
        list(inspecting.tables(now, "x"))


def test_what_cannot_be_divided_stays(penstock_spark: SparkSession, tmp_path: Path) -> None:
    found = layout.begin(str(tmp_path), 2)
    batch(some(penstock_spark, 40), found, 0, Sums(whole=True))
    with pytest.raises(StateError, match="keeps 'mine' as a whole") as caught:
        rescale(penstock_spark, str(tmp_path), 3)
    assert "flows reset" in caught.value.advice
    assert layout.find(str(tmp_path)) == found
    assert [each.name for each in (tmp_path / "penstock-state").iterdir() if each.is_dir()] == [
        found.name
    ]


def test_a_value_with_the_key_is_divided_by_it(
    penstock_spark: SparkSession, tmp_path: Path
) -> None:
    """From one shard too, in which any value is the same in all of them."""
    checkpoint = str(tmp_path)
    batch(some(penstock_spark, 120), layout.begin(checkpoint, 1), 0, Sums(rows=True))
    assert rescale(penstock_spark, checkpoint, 3).rows == 120
    now = layout.find(checkpoint)
    assert now is not None
    kept = list(inspecting.tables(now, "sums-1"))
    assert [each.rows["at"].to_pylist() for each in kept if each.name == "clock"] == [[0]] * 3
    waiting = [each.rows for each in kept if each.name == "waiting"]
    assert sorted(n for each in waiting for n in each["number"].to_pylist()) == list(range(120))
    names = [set(each["name"].to_pylist()) for each in waiting]
    assert sum(map(len, names)) == len(set().union(*names)) == 40
