"""Windows in any micro-batches are what DuckDB says of the accepted rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.spark import windows as w
from penstock.spark.windows import exact
from penstock.spark.windows.aggregates import Aggregate, First
from penstock.spark.windows.errors import WindowError
from penstock.spark.windows.merging import Windows
from penstock.spark.windows.shapes import Hops, Sessions, Shape
from tests.harness.profiles import examples
from tests.spark.windows.cutting import (
    SECOND,
    Row,
    cuts,
    in_time,
    partials,
    rows,
    run,
    watermarks,
)

LATENESS = 20 * SECOND
KEY = pa.schema([("key", pa.string())])
NUMBER, DOUBLE = pa.int64(), pa.float64()


def bound(each: Aggregate, kind: pa.DataType) -> Aggregate:
    found = each.bound(each.column, kind)
    return found.of_places(4) if isinstance(found, First) else found


VALUES: tuple[tuple[str, Aggregate], ...] = (
    ("n", w.count()),
    ("some", bound(w.count("number"), NUMBER)),
    ("total", bound(w.sum("number"), NUMBER)),
    ("mean", bound(w.avg("number"), NUMBER)),
    ("sum_x", bound(w.sum("x"), DOUBLE)),
    ("least", bound(w.min("number"), NUMBER)),
    ("most", bound(w.max("x"), DOUBLE)),
    ("first", bound(w.first("number"), NUMBER)),
    ("last", bound(w.last("number"), NUMBER)),
    ("kinds", bound(w.distinct("number"), NUMBER)),
    ("median", bound(w.quantile("x", 0.5), DOUBLE)),
    ("top", bound(w.top_k("number", 2), NUMBER)),
)
AGGREGATES = """
    count(*) n, count(number) "some", sum(number)::bigint total, avg(number) mean,
    list(x) xs, min(number) least, max(x) most,
    arg_min(number, at_us * 1000 + "offset") FILTER (number IS NOT NULL) "first",
    arg_max(number, at_us * 1000 + "offset") FILTER (number IS NOT NULL) "last",
    count(DISTINCT number) kinds, quantile_cont(x, 0.5) median
"""


def windows(shape: Shape, *, early: bool = False, allowed_us: int = 0) -> Windows:
    return Windows(KEY, VALUES, shape, early, allowed_us, whole=False)


def table_of(events: Sequence[Row]) -> pa.Table:
    return pa.table(
        {
            "key": pa.array([r.key for r in events], pa.string()),
            "at_us": pa.array([r.at_us for r in events], pa.int64()),
            "number": pa.array([r.number for r in events], pa.int64()),
            "x": pa.array([r.x for r in events], pa.float64()),
            "offset": pa.array([r.offset for r in events], pa.int64()),
        }
    )


def asked(query: str, source: pa.Table) -> list[dict[str, object]]:
    with duckdb.connect(config={"threads": 1}) as database:
        database.register("source", source)
        relation = database.sql(query)
        assert relation is not None
        return list(relation.to_arrow_table().to_pylist())


def hops_said(events: Sequence[Row], shape: Hops, upto_us: int) -> list[dict[str, object]]:
    """What DuckDB says of windows up to a time."""
    return asked(
        f"""
        WITH placed AS (
            SELECT source.*, unnest(range(
                (floor(at_us / {shape.every_us}) * {shape.every_us})::bigint,
                at_us - {shape.size_us}, -{shape.every_us})) AS s
            FROM source)
        SELECT key, s AS start_us, s + {shape.size_us} AS end_us, {AGGREGATES}
        FROM placed WHERE s + {shape.size_us} <= {upto_us} GROUP BY ALL""",
        table_of(events),
    )


def sessions_said(events: Sequence[Row], gap_us: int, upto_us: int) -> list[dict[str, object]]:
    return asked(
        f"""
        WITH gaps AS (SELECT *, coalesce(at_us - lag(at_us) OVER w >= {gap_us}, true)::int AS new
            FROM source WINDOW w AS (PARTITION BY key ORDER BY at_us)),
        numbered AS (SELECT *, sum(new) OVER (PARTITION BY key ORDER BY at_us) AS session FROM gaps)
        SELECT key, min(at_us) AS start_us, max(at_us) + {gap_us} AS end_us, {AGGREGATES}
        FROM numbered GROUP BY key, session HAVING max(at_us) + {gap_us} <= {upto_us}""",
        table_of(events),
    )


def micros(row: dict[str, object], name: str) -> int:
    return int(pa.scalar(row[name], pa.timestamp("us", "UTC")).value)


def compare(found: list[dict[str, object]], said: list[dict[str, object]]) -> None:
    by_window = {(r["key"], micros(r, "window_start"), micros(r, "window_end")): r for r in found}
    assert len(by_window) == len(found)
    assert set(by_window) == {(r["key"], r["start_us"], r["end_us"]) for r in said}
    for row in said:
        mine = by_window[row["key"], row["start_us"], row["end_us"]]  # type: ignore[index]
        for name in ("n", "some", "total", "mean", "least", "most", "first", "last", "kinds"):
            assert mine[name] == row[name], name
        xs = row["xs"]
        assert isinstance(xs, list)
        assert mine["sum_x"] == float(sum(map(Fraction, xs)))
        assert mine["median"] == pytest.approx(row["median"])
        top = mine["top"]
        assert isinstance(top, list)
        assert sum(each["count"] for each in top) <= mine["some"]


@pytest.mark.parametrize(
    "shape", [Hops(10 * SECOND, 10 * SECOND), Hops(15 * SECOND, 6 * SECOND), Hops(4 * SECOND,
              10 * SECOND), Sessions(7 * SECOND)], ids=str,
)  # fmt: skip
@settings(max_examples=examples(6))
@given(rows(), st.data())
def test_final_windows_are_those_of_duckdb(
    shape: Shape, events: list[Row], data: st.DataObject
) -> None:
    accepted = in_time(events, LATENESS)
    batches = cuts(data, accepted)
    marks = watermarks(batches, LATENESS)
    operator = windows(shape, early=data.draw(st.booleans()))
    out = run(operator, [partials(operator, each) for each in batches], marks)
    found = [row for each in out for row in each.to_pylist() if row["is_final"]]
    if isinstance(shape, Hops):
        compare(found, hops_said(accepted, shape, marks[-1]))
    else:
        assert isinstance(shape, Sessions)
        compare(found, sessions_said(accepted, shape.gap_us, marks[-1]))


@settings(max_examples=examples(6))
@given(rows(), st.data())
def test_corrections_end_where_the_whole_does(events: list[Row], data: st.DataObject) -> None:
    shape = Hops(10 * SECOND, 5 * SECOND)
    accepted = in_time(events, LATENESS)
    batches = cuts(data, accepted)
    marks = watermarks(batches, LATENESS)
    operator = windows(shape, allowed_us=LATENESS)
    last: dict[object, dict[str, object]] = {}
    for out in run(operator, [partials(operator, each) for each in batches], marks):
        for row in out.to_pylist():
            window = (row["key"], row["window_start"])
            assert row["revision"] == (last[window]["revision"] + 1 if window in last else 0)  # type: ignore[operator]
            last[window] = row
    # All windows that time itself has passed are there, with all rows that came.
    compare(list(last.values()), hops_said(accepted, shape, marks[-1] + LATENESS))


@settings(max_examples=examples(5))
@given(rows(), st.data())
def test_early_results_are_what_is_there_so_far(events: list[Row], data: st.DataObject) -> None:
    shape = Hops(10 * SECOND, 10 * SECOND)
    accepted = in_time(events, LATENESS)
    batches = cuts(data, accepted)
    operator = windows(shape, early=True)
    so_far: list[Row] = []
    marks = watermarks(batches, LATENESS)
    out = run(operator, [partials(operator, each) for each in batches], marks)
    for batch, found, mark in zip(batches, out, marks, strict=True):
        so_far += batch
        said = {(r["key"], r["start_us"]): r["n"] for r in hops_said(so_far, shape, 10**15)}
        changed = {(r.key, r.at_us - r.at_us % shape.size_us) for r in batch}
        early = {
            (r["key"], micros(r, "window_start")): r["n"]
            for r in found.to_pylist()
            if not r["is_final"]
        }
        still = {each for each in changed if each[1] + shape.size_us > mark}
        assert early == {each: said[each] for each in still}


def test_state_stays_flat() -> None:
    """However long it runs, only what is open is kept."""
    operator = windows(Hops(10 * SECOND, 5 * SECOND), allowed_us=5 * SECOND)
    from penstock.spark.state import Shard, State

    state = State()
    sizes = []
    for turn in range(30):
        base = turn * 10 * SECOND
        events = [Row("a", base + at * SECOND, at, 0.5, at) for at in range(10)]
        shard = Shard(0, 1, turn, base - LATENESS, state)
        operator.process(shard, partials(operator, events))
        sizes.append(sum(len(table) for table in state.tables.values()))
    assert max(sizes[10:]) <= max(sizes[5:10])


def test_what_comes_before_the_watermark_is_not_dropped_in_silence() -> None:
    operator = windows(Hops(10 * SECOND, 10 * SECOND))
    batches = [[Row("a", 100 * SECOND, 1, 0.0)], [Row("a", 5 * SECOND, 1, 0.0)]]
    out = run(operator, [partials(operator, each) for each in batches], [90 * SECOND, 90 * SECOND])
    with pytest.raises(WindowError, match="watermark"):
        list(out)


def summed(values: list[float], divisor: int | None = None) -> float:
    limbs, wild, lost = exact.limbs_of(np.array(values))
    sums = exact.carried([np.array([each.sum()]) for each in limbs])
    with np.errstate(invalid="ignore"):
        total = np.array([wild.sum()])
    by = None if divisor is None else np.array([divisor])
    (found,) = exact.finished(sums, total, np.array([lost.sum()]), by)
    return float(found)


def test_limbs_are_their_doubles_to_the_last_bit(seed: int) -> None:
    """Of all sizes: generators of examples prefer such as end in zeros."""
    random = np.random.default_rng(seed)
    mantissas = random.integers(1 << 52, 1 << 53, 20_000) * random.choice([-1, 1], 20_000)
    values = np.ldexp(mantissas.astype(np.float64), random.integers(-260, 75, 20_000))
    limbs, wild, lost = exact.limbs_of(values)
    assert not wild.any()
    for at, value in enumerate(values.tolist()):
        total = sum(
            Fraction(2) ** exponent * int(limb[at])
            for exponent, limb in zip(exact.EXPONENTS, limbs, strict=True)
        )
        assert all(abs(int(limb[at])) <= 1 << 32 for limb in limbs)
        if (Fraction(value) * 2**192).denominator == 1:
            assert total == Fraction(value)
            assert not lost[at]
        else:
            assert abs(total - Fraction(value)) <= Fraction(1, 2**193)
            assert lost[at]


@settings(max_examples=examples(50))
@example([0.00022155136326160264])
@given(st.lists(st.floats(-1e38, 1e38).filter(lambda x: x == 0 or abs(x) > 1e-41),
                min_size=1, max_size=50))  # fmt: skip
def test_sums_of_doubles_are_those_of_exact_arithmetic(values: list[float]) -> None:
    total = sum(map(Fraction, values))
    assert summed(values) == float(total)
    assert summed(values, len(values)) == float(total / len(values))


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([1.0, math.inf], math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
        ([1e-300, -math.inf], -math.inf),
    ],
)
def test_what_is_not_finite_stays_so(values: list[float], wanted: float) -> None:
    assert summed(values) == wanted or (math.isnan(summed(values)) and math.isnan(wanted))


def test_a_sum_that_is_not_known_exactly_is_refused() -> None:
    # What is lost of these does not show.
    assert summed([0.5, 1e-300, 5e-324]) == 0.5
    assert summed([1e-40, 1e-80]) == 1e-40
    assert summed([1e-30, 1e29]) == 1e29
    assert summed([1e-30]) == 1e-30
    for values in ([1e-60], [1e-300, 0.0], [1.0, 1e-80, -1.0]):
        with pytest.raises(WindowError, match="so small that digits below"):
            summed(values)
    with pytest.raises(WindowError, match="or more"):
        summed([1.0, 2.0**128])
