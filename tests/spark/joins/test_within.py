"""A join of two streams in any micro-batches is what DuckDB says of the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

import penstock.spark
from penstock.spark import enrich, joins
from penstock.spark.flows.errors import DeclarationError
from penstock.spark.joins.streams import AT, How, Within, within
from penstock.spark.state import Batch, Shard, State, entered
from tests.harness.profiles import examples
from tests.spark.windows.cutting import SECOND, Row, in_time, rows, run

LATENESS = 15 * SECOND
KEY = [("key", pa.string()), ("kind", pa.float64())]
LEFT = pa.schema([*KEY, ("x", pa.float64()), ("offset", pa.int64())])
RIGHT = pa.schema([*KEY, ("number", pa.int64()), ("offset", pa.int64())])


def join(how: How, low_us: int, high_us: int) -> Within:
    renamed = ("number", "right_offset")
    return Within(("key", "kind"), LEFT, RIGHT, renamed, low_us, high_us, how, whole=False)


def table(events: Sequence[Row], schema: pa.Schema) -> pa.Table:
    columns = {name: [getattr(each, name) for each in events] for name in schema.names}
    columns[AT] = [each.at_us for each in events]
    return pa.table(columns, schema=pa.schema([*schema, (AT, pa.int64())]))


def said(left: pa.Table, right: pa.Table, how: str, low: int, high: int, mark: int) -> Counter[
    tuple[object, ...]
]:  # fmt: skip
    """What DuckDB joins, of what stays alone only what the watermark has passed."""
    with duckdb.connect(config={"threads": 1}) as database:
        database.register("l", left).register("r", right)
        found = database.execute(
            f"""
            SELECT x, l."offset", number, r."offset"
            FROM l {how} JOIN r ON l.key = r.key AND l.kind = r.kind
              AND r.{AT} - l.{AT} BETWEEN {low} AND {high}
            WHERE (l."offset" IS NOT NULL AND r."offset" IS NOT NULL)
              OR (r."offset" IS NULL
                  AND (l.key IS NULL OR l.kind IS NULL OR l.{AT} + {high} < {mark}))
              OR (l."offset" IS NULL
                  AND (r.key IS NULL OR r.kind IS NULL OR r.{AT} - {low} < {mark}))"""
        ).fetchall()
    return Counter(found)


@settings(max_examples=examples(10))
@given(
    rows(100), rows(100), st.sampled_from(["inner", "left", "full"]),
    st.sampled_from([(-5, 10), (0, 0), (3, 20), (-20, -3)]), st.data(),
)  # fmt: skip
def test_pairs_and_the_unmatched_are_those_of_duckdb(
    left: list[Row], right: list[Row], how: How, bound: tuple[int, int], data: st.DataObject
) -> None:
    low, high = (each * SECOND for each in bound)
    sides = [in_time(left, LATENESS), in_time(right, LATENESS)]
    edges = [
        [0, *sorted(data.draw(st.lists(st.integers(0, len(each)), min_size=3, max_size=3))),
         len(each)]
        for each in sides
    ]  # fmt: skip
    batches, marks = [], []
    for at in range(4):
        parts = [each[e[at] : e[at + 1]] for each, e in zip(sides, edges, strict=True)]
        batches.append({"left": table(parts[0], LEFT), "right": table(parts[1], RIGHT)})
        latest = [
            max([-(10**15), *(r.at_us for r in each[: e[at + 1]])])
            for each, e in zip(sides, edges, strict=True)
        ]
        marks.append(min(latest) - LATENESS)
    out = pa.concat_tables(run(join(how, low, high), batches, marks))
    found = Counter(tuple(each.values())[2:] for each in out.to_pylist())
    whole = [table(sides[0], LEFT), table(sides[1], RIGHT)]
    assert found == said(whole[0], whole[1], how, low, high, marks[-1])


def test_many_values_in_several_columns() -> None:
    # So many keys are possible that one and a time do not fit into 64 bits, as each by itself does.
    rows, names = 100_000, ("a", "b", "c")
    luck = np.random.default_rng(1)
    columns = {each: pa.array(luck.permutation(rows)) for each in names}
    columns |= {"row": pa.array(np.arange(rows)), AT: pa.array(np.arange(rows))}
    side = pa.table(columns)
    schema = side.drop([AT]).schema
    operator = Within(names, schema, schema, ("right_row",), 0, 0, "inner", whole=False)
    (out,) = run(operator, [{"left": side, "right": side}], [0])
    assert len(out) == rows
    assert out["row"].equals(out["right_row"])


def test_state_stays_flat() -> None:
    operator = join("full", -5 * SECOND, 10 * SECOND)
    state = State()
    sizes = []
    for turn in range(40):
        events = [Row("a", (turn * 10 + at) * SECOND, 1, 1.0, at) for at in range(10)]
        inputs = {"left": table(events, LEFT), "right": table(events, RIGHT)}
        operator.process(Shard(0, 1, turn, turn * 10 * SECOND - LATENESS, state), inputs)
        sizes.append(sum(len(each) for each in state.values.values()))
    assert max(sizes[20:]) <= max(sizes[5:20])


def frame(spark: SparkSession, values: Sequence[tuple[str, int, str]], name: str) -> DataFrame:
    return spark.createDataFrame(
        list(values), f"user string, seconds bigint, {name} string"
    ).selectExpr("user", name, "timestamp_seconds(seconds) AS _time")


def test_through_spark(penstock_spark: SparkSession, tmp_path: Path) -> None:
    searches = frame(penstock_spark, [("a", 10, "shoes"), ("b", 11, "hats")], "query")
    clicks = frame(penstock_spark, [("a", 12, "/1"), ("a", 500, "/2")], "page")

    def joined(left: DataFrame, right: DataFrame) -> set[tuple[object, ...]]:
        rows = within(left, right, on=["user"], bound=("0 s", "1 minute"), how="left")
        assert rows.columns == ["user", "query", "_time", "page", "right__time"]
        return {(each.user, each.query, each.page) for each in rows.collect()}

    assert joined(searches, clicks) == {("a", "shoes", "/1"), ("b", "hats", None)}
    found = []
    for number, (left, right) in enumerate(
        [(searches, clicks.limit(0)), (searches.limit(0), clicks)]
    ):
        batch = Batch(folder=str(tmp_path), batch_id=number, watermark_us=number * 400 * SECOND)
        with entered(batch):
            found.append(joined(left, right))
    assert found == [set(), {("a", "shoes", "/1"), ("b", "hats", None)}]


def test_what_cannot_be_kept_is_refused(penstock_spark: SparkSession) -> None:
    rows = frame(penstock_spark, [("a", 1, "x")], "query")
    with pytest.raises(DeclarationError, match=r"test_within.py:\d+: .*event time"):
        within(rows.drop("_time"), rows, on=["user"], bound=("0 s", "1 s"))
    with pytest.raises(DeclarationError, match="for ever"):
        within(rows, rows, on=["user"], bound=("0 s", None))  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="not a length of time"):
        within(rows, rows, on=["user"], bound=("0 s", "soon"))
    with pytest.raises(DeclarationError, match="'nobody', which is no column"):
        within(rows, rows, on=["nobody"], bound=("0 s", "1 s"))


def test_both_joins_by_their_names() -> None:
    assert joins.within is within is penstock.spark.within
    assert joins.enrich is enrich
