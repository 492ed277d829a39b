"""Parts of views: keys with very many rows, sums of floats, and what is refused, with its place."""

from __future__ import annotations

import math
import random
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.spark.state import Shard, State
from penstock.spark.views import best, exact
from penstock.spark.views.aggregating import Aggregate, Aggregated, AggregateError
from penstock.spark.views.columns import SIGN
from penstock.spark.views.lists import LONG_LIST
from penstock.spark.views.refusing import ViewError
from penstock.spark.views.sql import Schema, plan

TABLES = {
    "orders": Schema(("id", "customer_id", "amount"), ("id",)),
    "customers": Schema(("id", "country"), ("id",)),
}


def test_the_ends_of_a_group_with_very_many_values() -> None:
    """What is taken away from either end is followed by the next, though lists are cut."""
    results = (Aggregated("low", "min", "v", pa.int64()), Aggregated("top", "max", "v", pa.int64()))
    group = Aggregate(("g",), (pa.string(),), results, net=True)
    shard = Shard(0, 1, 0, None, State())
    chance = random.Random(7)
    there: list[int] = []
    for step in range(12):
        come = [chance.randrange(10**6) for _ in range(LONG_LIST if step < 6 else 5)]
        gone = sorted(there)[:20] + sorted(there)[-20:] if step else []
        rows = pa.table(
            {
                "g": ["all"] * (len(come) + len(gone)),
                "v": pa.array(gone + come, pa.int64()),
                SIGN: [False] * len(gone) + [True] * len(come),
            }
        )
        found = group.process(shard, {"rows": rows}).to_pylist()
        for each in gone:
            there.remove(each)
        there += come
        want = {"g": "all", "low": min(there), "top": max(there), "_deleted": False}
        assert found == [want]


# Spark makes both, and to it they are one value.
NANS = (math.nan, math.copysign(math.nan, -1.0))
FLOATS = st.sampled_from([*NANS, float("-inf"), -1.5, -0.0, 0.0, 2.0, float("inf")])


def shown(value: float | None) -> str:
    """NaN, too, is what it is; and there is one zero."""
    return "0" if value == 0 else repr(value)


def of_kind(kind: pa.DataType, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A type, and batches of what comes and goes."""
    change = st.tuples(st.sampled_from("ab"), values | st.none(), st.booleans())
    batches = st.lists(st.lists(change, min_size=1), min_size=1, max_size=8)
    return st.tuples(st.just(kind), batches)


@settings(max_examples=200, deadline=None)
@given(
    of_kind(pa.float64(), FLOATS) | of_kind(pa.int64(), st.integers(-9, 9)),
    st.integers(1, 3),
)
def test_the_ends_of_groups_are_those_of_what_is_there(
    given_: tuple[pa.DataType, list[list[tuple[str, float | None, bool]]]], short: int
) -> None:
    """Whatever comes and goes, against all values, with lists that are soon too long or empty."""
    kind, batches = given_
    results = (Aggregated("low", "min", "v", kind), Aggregated("top", "max", "v", kind))
    group = Aggregate(("g",), (pa.string(),), results, net=True)
    shard = Shard(0, 1, 0, None, State())
    there: dict[str, list[float | None]] = {"a": [], "b": []}
    told: dict[str, tuple[str, str]] = {}
    with patch.object(best, "SHORT", short):
        for changes in batches:
            rows: list[tuple[str, float | None, bool]] = []
            for name, value, comes in changes:
                if comes:
                    there[name].append(value)
                    rows.append((name, value, True))
                elif there[name]:
                    rows.append((name, there[name].pop(0), False))
            if not rows:
                continue
            names, values, signs = (list(each) for each in zip(*rows, strict=True))
            given_rows = {"g": names, "v": pa.array(values, kind), SIGN: signs}
            for row in group.process(shard, {"rows": pa.table(given_rows)}).to_pylist():
                told[row["g"]] = shown(row["low"]), shown(row["top"])
                if row["_deleted"]:
                    del told[row["g"]]
            assert told == {
                name: (shown(_end(known, least=True)), shown(_end(known, least=False)))
                for name, known in there.items()
                if known
            }


def _end(values: list[float | None], *, least: bool) -> float | None:
    known = sorted((each for each in values if each is not None), key=lambda v: (math.isnan(v), v))
    return None if not known else known[0 if least else -1]


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
@pytest.mark.parametrize("equal", [NANS, (0.0, -0.0)], ids=["NaN", "zero"])
def test_what_is_equal_is_one_key_and_one_value(
    kind: pa.DataType, equal: tuple[float, float]
) -> None:
    """Whatever its bits are: within a micro-batch, and against what was there before."""
    results = (
        Aggregated("n", "count", None, None),
        Aggregated("different", "count distinct", "v", kind),
        Aggregated("top", "max", "v", kind),
    )
    group = Aggregate(("g",), (kind,), results, net=True)
    shard = Shard(0, 1, 0, None, State())
    one, other = equal
    told = []
    for values, signs in (
        ([one, other, other], [True, True, True]),
        ([other, one], [False, False]),
        ([one], [False]),
    ):
        floats = pa.array(values, kind)
        rows = pa.table({"g": floats, "v": floats, SIGN: signs})
        told.append(group.process(shard, {"rows": rows}).to_pylist())
    assert [len(rows) for rows in told] == [1, 1, 1]
    assert [(row["n"], row["different"], row["_deleted"]) for [row] in told[:2]] == [
        (3, 1, False),
        (1, 1, False),
    ]
    assert told[2][0]["_deleted"]
    names = {shown(row[name]) for [row] in told for name in ("g", "top")}
    assert names - {"None"} == {shown(one)}


def test_sums_of_floats_leave_nothing_behind() -> None:
    chance = random.Random(3)
    floats = [chance.uniform(-1, 1) * 10 ** chance.randint(-300, 300) for _ in range(200)]
    zeros = np.zeros(len(floats), np.int64)
    ones = np.ones(len(floats), np.int64)
    nothing = pa.array([None], exact.TYPE)
    total = exact.added(nothing, zeros, pa.array(floats), ones)
    assert exact.rounded(total) == [float(sum(map(Fraction, floats)))]
    less = exact.added(total, zeros[1:], pa.array(floats[:0:-1]), -ones[1:])
    assert exact.rounded(less) == floats[:1]
    odd = exact.added(less, zeros[:2], pa.array([float("inf"), float("nan")]), ones[:2])
    assert np.isnan(exact.rounded(odd)[0])
    back = exact.added(odd, zeros[:2], pa.array([float("inf"), float("nan")]), -ones[:2])
    assert exact.rounded(back) == floats[:1]


def summed(values: list[Any], kind: pa.DataType, function: Any = "sum") -> Any:
    """One value in each micro-batch; those in tuples are taken away again."""
    group = Aggregate((), (), (Aggregated("s", function, "v", kind, "sum(o.v)"),), net=True)
    shard = Shard(0, 1, 0, None, State())
    for each in values:
        gone = isinstance(each, tuple)
        value = each[0] if isinstance(each, tuple) else each
        rows = pa.table({"v": pa.array([value], kind), SIGN: [not gone]})
        found = group.process(shard, {"rows": rows}).to_pylist()
    return found[0]["s"]


def test_sums_that_grow_past_their_type_are_told() -> None:
    most, least = 2**63 - 1, -(2**63)
    assert summed([most], pa.int64()) == most
    assert summed([most, least], pa.int64()) == -1
    assert summed([least, (least,), 5], pa.int64()) == 5
    assert summed([0, most, most], pa.int64(), "avg") == pytest.approx(2 * most / 3)
    for two in ([most, 1], [least, -1]):
        with pytest.raises(AggregateError, match=r"sum\(o.v\) does not fit bigint"):
            summed(two, pa.int64())
    large = Decimal(10) ** 37 * 9
    with pytest.raises(AggregateError, match="does not fit decimal"):
        summed([large, large], pa.decimal128(38, 0))
    assert summed([large, (large,), Decimal(1)], pa.decimal128(38, 0)) == 1
    with pytest.raises(AggregateError, match=r"sum\(o.v\) is not possible.* string"):
        _ = Aggregated("s", "sum", "v", pa.string(), "sum(o.v)").type


@pytest.mark.parametrize(
    ("sql", "place", "reason"),
    [
        ("SELECT id FROM orders\nORDER BY id", "2:1", "ORDER BY"),
        ("SELECT id FROM orders LIMIT 3", "1:23", "LIMIT"),
        ("SELECT id, row_number() OVER (ORDER BY id) AS n FROM orders", "1:12", "window functions"),
        ("SELECT o.id FROM orders o\nFULL JOIN customers c ON o.id = c.id", "2:1", "full outer"),
        ("SELECT o.id FROM orders o JOIN customers c ON o.id < c.id", "1:47", "equality"),
        ("SELECT o.id FROM orders o, customers c", "1:28", "equality"),
        ("SELECT id FROM orders WHERE id IN (SELECT id FROM customers)", "1:43", "subqueries"),
        ("SELECT id, now() AS t FROM orders", "1:12", "another answer"),
        ("SELECT id, rand() AS t FROM orders", "1:12", "another answer"),
        ("SELECT idd FROM orders", "1:8", "no column idd"),
        ("SELECT x.id FROM orders", "1:8", "no table x"),
        ("SELECT id FROM nowhere", "1:16", "no table nowhere"),
        ("SELECT id, count(*) AS n FROM orders", "1:8", "neither grouped by"),
        ("SELECT count(*) FROM orders", "1:8", "no name"),
        ("SELECT stddev(id) AS s FROM orders", "1:8", "stddev"),
        ("SELECT id id2 x FROM orders", "1:15", "Unexpected"),
        ("SELECT 'a FROM orders", "1:8", "not closed"),
    ],
)
def test_what_cannot_be_maintained(sql: str, place: str, reason: str) -> None:
    with pytest.raises(ViewError) as refused:
        plan(sql, TABLES)
    told = str(refused.value)
    assert told.startswith(f"{place}: ")
    assert reason in told
    line, mark = told.splitlines()[-2:]
    assert line.strip() in sql
    assert mark.index("^") == int(place.split(":")[1]) + 1


WORDS = re.findall(
    r"\S+",
    "SELECT FROM WHERE orders o id amount country JOIN LEFT ON = < ( ) , . * count( sum( GROUP BY "
    "HAVING DISTINCT UNION ALL AS WITH t 1 'a' 'b ` ; -- /* CASE WHEN END NOT IN OVER cast( now() "
    "[ ] INTERVAL VALUES LATERAL USING FILTER CREATE TABLE DELETE ROLLUP 1e999 é",
)
GOOD = (
    "SELECT country, count(*) AS n FROM orders o LEFT JOIN customers c ON o.customer_id = c.id "
    "WHERE amount > 3 GROUP BY country HAVING count(*) > 1"
)


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.lists(st.sampled_from(WORDS), max_size=10).map(" ".join),
        st.tuples(st.sampled_from(range(25)), st.sampled_from(WORDS)).map(
            lambda put: " ".join([*GOOD.split()[: put[0]], put[1], *GOOD.split()[put[0] + 1 :]])
        ),
        st.text(max_size=20),
    )
)
def test_whatever_is_written_is_a_view_or_an_error_with_its_place(sql: str) -> None:
    try:
        plan(sql, TABLES)
    except ViewError as error:
        assert re.match(r"\d+:\d+: ", str(error))  # noqa: PT017


@pytest.mark.parametrize(
    "sql",
    [
        f"SELECT {'(' * 3000}id{')' * 3000} AS x FROM orders",
        f"SELECT {'+'.join(['id'] * 3000)} AS x FROM orders",
        f"SELECT id FROM {'(SELECT id FROM ' * 500}orders{') t' * 500}",
    ],
)
def test_what_is_too_deep_is_told(sql: str) -> None:
    with pytest.raises(ViewError, match="1:1: this is too long, or nested too deeply"):
        plan(sql, TABLES)
