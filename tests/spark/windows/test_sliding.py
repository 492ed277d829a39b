"""Each event with what was before it, and rows without copies: as DuckDB and a plain loop say."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.spark import windows as w
from penstock.spark.state import Shard, State
from penstock.spark.windows.aggregates import Aggregate
from penstock.spark.windows.dedup import Deduplicated, Order
from penstock.spark.windows.errors import WindowError
from penstock.spark.windows.sliding import AT, KEY, Sliding
from tests.harness.profiles import examples
from tests.spark.windows.cutting import SECOND, Row, cuts, in_time, rows, run, watermarks

LATENESS = 20 * SECOND
SIZE = 12 * SECOND
COLUMNS = pa.schema([("key", pa.string()), ("_offset", pa.int64())])
VALUES: tuple[tuple[str, Aggregate], ...] = (
    ("n", w.count()),
    ("some", w.count("number").bound("number", pa.int64())),
    ("total", w.sum("number").bound("number", pa.int64())),
    ("mean", w.avg("number").bound("number", pa.int64())),
    ("sum_x", w.sum("x").bound("x", pa.float64())),
    ("least", w.min("number").bound("number", pa.int64())),
    ("most", w.max("x").bound("x", pa.float64())),
    ("first", w.first("number").bound("number", pa.int64())),
    ("last", w.last("number").bound("number", pa.int64())),
    ("kinds", w.distinct("number").bound("number", pa.int64())),
    ("floats", w.distinct("kind").bound("kind", pa.float64())),
)


def name_of(key: str | None) -> str:
    return "-" if key is None else f"1:{key}"


def table(events: Sequence[Row]) -> pa.Table:
    base = {
        "key": pa.array([each.key for each in events], pa.string()),
        "_offset": pa.array([each.offset for each in events], pa.int64()),
        KEY: pa.array([name_of(each.key) for each in events], pa.string()),
        AT: pa.array([each.at_us for each in events], pa.int64()),
    }
    values = {
        f"_penstock_{at}": pa.array(
            [1 if each.column is None else getattr(row, each.column) for row in events],
            each.type or pa.int32(),
        )
        for at, (_, each) in enumerate(VALUES)
    }
    return pa.table({**base, **values})


@settings(max_examples=examples(8))
@given(rows(), st.data())
def test_each_event_has_what_duckdb_says(events: list[Row], data: st.DataObject) -> None:
    accepted = in_time(events, LATENESS)
    batches = cuts(data, accepted)
    marks = watermarks(batches, LATENESS)
    operator = Sliding(COLUMNS, VALUES, SIZE, whole=False)
    out = pa.concat_tables(run(operator, [{"rows": table(each)} for each in batches], marks))
    found = {row["_offset"]: row for row in out.to_pylist()}
    assert len(found) == len(out)
    source = pa.table(
        {
            "key": pa.array([r.key for r in accepted], pa.string()),
            "at_us": pa.array([r.at_us for r in accepted], pa.int64()),
            "number": pa.array([r.number for r in accepted], pa.int64()),
            "x": pa.array([r.x for r in accepted], pa.float64()),
            "kind": pa.array([r.kind for r in accepted], pa.float64()),
            "place": pa.array([r.offset for r in accepted], pa.int64()),
        }
    )
    with duckdb.connect(config={"threads": 1}) as database:
        database.register("source", source)
        relation = database.sql(
            f"""
            SELECT * FROM (SELECT e.at_us, e.place, count(*) AS n, count(o.number) AS "some",
                sum(o.number)::bigint AS total, avg(o.number) AS mean, list(o.x) AS xs,
                min(o.number) AS least, max(o.x) AS most,
                arg_min(o.number, o.at_us * 1000 + o.place)
                    FILTER (o.number IS NOT NULL) AS "first",
                arg_max(o.number, o.at_us * 1000 + o.place)
                    FILTER (o.number IS NOT NULL) AS "last",
                count(DISTINCT o.number) AS kinds, count(DISTINCT o.kind) AS floats
            FROM source e JOIN source o ON e.key IS NOT DISTINCT FROM o.key
                AND o.at_us BETWEEN e.at_us - {SIZE} AND e.at_us
            GROUP BY e.at_us, e.place) WHERE at_us < {marks[-1]}"""
        )
        assert relation is not None
        said = relation.to_arrow_table()
    assert {row["place"] for row in said.to_pylist()} == set(found)
    for row in said.to_pylist():
        mine = found[row["place"]]
        for name, _ in VALUES:
            if name == "sum_x":
                assert mine[name] == float(sum(map(Fraction, row["xs"])))
            else:
                assert mine[name] == row[name], name


def once(events: Sequence[Row], within_us: int) -> list[int]:
    """The rule as it is written."""
    kept: list[Row] = []
    for each in events:
        near = [r for r in kept if r.key == each.key and abs(r.at_us - each.at_us) < within_us]
        if not near:
            kept.append(each)
    return sorted(each.offset for each in kept)


@settings(max_examples=examples(8))
@given(rows(60), st.sampled_from(["time", "log"]), st.data())
def test_copies_are_left_out(events: list[Row], order: Order, data: st.DataObject) -> None:
    accepted = in_time(events, LATENESS)
    batches = cuts(data, accepted)
    marks = watermarks(batches, LATENESS)
    operator = Deduplicated(COLUMNS, ("key",), SIZE, order, whole=False)
    out = pa.concat_tables(run(operator, [{"rows": table(each)} for each in batches], marks))
    found = sorted(out["_offset"].to_pylist())
    if order == "log":
        assert found == once(accepted, SIZE)
    else:
        ready = [each for each in accepted if each.at_us < marks[-1]]
        assert found == once(sorted(ready, key=lambda r: (r.at_us, r.offset)), SIZE)


@pytest.mark.timeout(120)
def test_a_key_with_very_many_times() -> None:
    # Each compared with all before it, this would take a quarter of an hour.
    for order in ("time", "log"):
        operator = Deduplicated(COLUMNS, ("key",), 10, order, whole=False)
        state, kept = State(), 0
        for turn in range(2):
            at = pa.array(np.arange(1_000_000) * 5 + turn * 5_000_000)
            one = pa.repeat(pa.scalar("a"), len(at))
            rows = pa.table({"key": one, "_offset": at, KEY: one, AT: at})
            out = operator.process(Shard(0, 1, turn, (turn + 1) * 5_000_000, state), {"rows": rows})
            assert out["_offset"].to_pylist() == at.to_pylist()[::2]
            kept += len(out)
        assert kept == 1_000_000


@pytest.mark.parametrize(
    "operator",
    [
        Deduplicated(COLUMNS, ("key",), SIZE, "time", whole=False),
        Deduplicated(COLUMNS, ("key",), SIZE, "log", whole=False),
        Sliding(COLUMNS, VALUES, SIZE, whole=False),
    ],
)
def test_what_comes_before_the_watermark_is_refused(operator: Deduplicated | Sliding) -> None:
    batches = [[Row("a", 100 * SECOND, 1, 0.0)], [Row("a", 89 * SECOND, 1, 0.0)]]
    out = run(operator, [{"rows": table(each)} for each in batches], [90 * SECOND, 95 * SECOND])
    with pytest.raises(WindowError, match=r"1970-01-01 00:01:29.*before 1970-01-01 00:01:30"):
        list(out)


def test_what_is_kept_stays_flat() -> None:
    for operator in (
        Deduplicated(COLUMNS, ("key",), SIZE, "time", whole=False),
        Deduplicated(COLUMNS, ("key",), SIZE, "log", whole=False),
        Sliding(COLUMNS, VALUES, SIZE, whole=False),
    ):
        state = State()
        sizes = []
        for turn in range(30):
            events = [Row("a", (turn * 10 + at) * SECOND, 1, 1.0, at) for at in range(10)]
            shard = Shard(0, 1, turn, turn * 10 * SECOND - LATENESS, state)
            operator.process(shard, {"rows": table(events)})
            sizes.append(sum(len(each) for each in state.values.values()))
        assert max(sizes[10:]) <= max(sizes[5:10]), operator.kind
