"""Parts of views: keys with very many rows, sums of floats, and what is refused, with its place."""

from __future__ import annotations

import itertools
import math
import random
import re
from datetime import UTC, datetime, tzinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any
from unittest.mock import patch
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.spark.flows import shapes
from penstock.spark.state import Shard, State
from penstock.spark.views import best, exact, lists
from penstock.spark.views.aggregating import Aggregate, Aggregated, AggregateError
from penstock.spark.views.columns import PRESENT, SIGN
from penstock.spark.views.joining import Join, Side
from penstock.spark.views.lists import LONG_LIST
from penstock.spark.views.netting import Latest
from penstock.spark.views.plan import columns, explained, key_of
from penstock.spark.views.refusing import ViewError
from penstock.spark.views.shape import shape
from penstock.spark.views.sql import Schema, plan
from tests.harness.profiles import examples
from tests.spark.views.executing import Arrow, Maintained

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


@settings(max_examples=examples(50))
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
    # The key of the view is made from what is shown: there is one way to write it.
    assert {repr(row["g"]) for [row] in told} == {repr(abs(one))}


@pytest.mark.parametrize("join", ["", " LEFT JOIN customers c ON c.id = o.weight"])
def test_a_primary_key_is_shown_in_one_way(join: str) -> None:
    """Of 0.0 and -0.0, which are one: else a row would stay under the other key for ever."""
    tables = {"o": Schema(("weight", "n"), ("weight",)), "customers": Schema(("id",), ("id",))}
    view = Maintained(plan(f"SELECT weight, n FROM o{join}", tables), Arrow({}))
    for n, weight in enumerate([-0.0, 0.0]):
        order = {"weight": [weight], "n": [n]}
        batch = {"o": order, "customers": {"id": pa.array([], pa.float64())}}
        view.run({name: at_place(n, rows) for name, rows in batch.items()})
    assert [(repr(row["weight"]), row["n"]) for row in view.rows.values()] == [("0.0", 1)]


def at_place(place: int, columns: dict[str, Any]) -> pa.Table:
    """Rows that are there, at a place of their topic."""
    rows = pa.table(columns)
    for name in ("_topic", "_partition", "_offset"):
        rows = rows.append_column(name, pa.array([place] * len(rows), pa.int64()))
    return rows.append_column(PRESENT, pa.array([True] * len(rows)))


def test_two_primary_keys_may_be_one_key_of_a_join() -> None:
    """As doubles, which is how Spark compares them."""
    tables = {"a": Schema(("id",), ("id",)), "b": Schema(("k", "x"), ("k",))}
    view = Maintained(plan("SELECT id, x FROM a JOIN b ON a.id = b.x", tables), Arrow({}))
    ids = [2**53, 2**53 + 1]
    view.run({"a": at_place(0, {"id": ids}), "b": at_place(0, {"k": [1], "x": [2.0**53]})})
    assert sorted(row["id"] for row in view.rows.values()) == ids


def test_decimals_are_joined_without_a_loss() -> None:
    tables = {"a": Schema(("id", "d"), ("id",)), "b": Schema(("id", "d"), ("id",))}
    query = plan("SELECT a.id, b.id AS other FROM a JOIN b ON a.d = b.d", tables)

    def joined(one: pa.DataType, other: pa.DataType) -> list[tuple[int, int]]:
        view = Maintained(query, Arrow({}))
        texts = ["1.0", "1.0000000000010", "1.0000000000020"]
        sides = {
            name: at_place(0, {"id": [0, 1, 2], "d": pa.array(map(Decimal, texts), kind)})
            for name, kind in (("a", one), ("b", other))
        }
        view.run(sides)
        return sorted((row["id"], row["other"]) for row in view.rows.values())

    assert joined(pa.decimal128(20, 13), pa.decimal128(30, 16)) == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(ViewError, match=r"^1:45: the join on a.d = b.d compares decimal\(38,13\)"):
        joined(pa.decimal128(38, 13), pa.decimal128(38, 30))


def test_hidden_columns_have_names_of_their_own() -> None:
    tables = {
        "order": Schema(("item_id", "k"), ("item_id",)),
        "order_item": Schema(("id", "k", "w"), ("id",)),
    }
    made = plan("SELECT w FROM order_item i JOIN `order` ON i.k = `order`.k", tables)
    assert key_of(made) == ("_i_id", "_order_item_id")
    made = plan("SELECT w FROM order_item JOIN `order` ON order_item.k = `order`.k", tables)
    assert key_of(made) == ("_order_item_id", "_order_item_id_1")


@pytest.mark.parametrize("kind", [pa.timestamp("us", "UTC"), pa.timestamp("us")], ids=str)
def test_keys_that_were_written_in_another_way_are_told(kind: pa.DataType) -> None:
    """A flow whose topic has the old ones must not go on as if nothing was."""
    results = (Aggregated("n", "count", None, None),)
    assert "in microseconds" in Aggregate(("g",), (kind,), results).describes
    assert "in microseconds" not in Aggregate(("g",), (pa.int64(),), results).describes
    assert "in microseconds" in Latest(("g",), pa.schema([("g", kind)])).describes
    side = Side(pa.schema([("g", kind)]), ("g",), raw=True)
    assert "in microseconds" in Join(("j",), (kind,), side, side, outer=False).describes


class _Zoned:
    """Stands for a table of Arrow, whose versions have classes of their own for zones."""

    def __init__(self, zone: tzinfo) -> None:
        self._zone = zone

    def __getitem__(self, name: str) -> Any:
        class Column:
            zone = self._zone

            def to_pylist(self) -> list[datetime]:
                return [datetime(2026, 1, 1, 12, 0, 0, 5, UTC).astimezone(self.zone)]

        return Column()


@pytest.mark.parametrize("zone", [UTC, ZoneInfo("UTC"), ZoneInfo("Europe/Berlin")], ids=str)
def test_hashes_do_not_depend_on_how_arrow_names_zones(zone: tzinfo) -> None:
    """Those that state is kept by: what they are must stay as it is."""
    at = datetime(2026, 1, 1, 12, 0, 0, 5, UTC)
    rows = pa.table({"at": pa.array([at], pa.timestamp("us", "UTC"))})
    with patch.object(lists, "one_way", lambda *_: _Zoned(zone)):
        assert lists._hashes(rows, ["at"]).tolist() == [1894469022]


def test_buckets_of_zeros_are_the_same() -> None:
    rows = pa.table({"x": [0.0, -0.0]})
    one, other = (lists._hashes(rows.slice(at, 1), ["x"]).tolist() for at in (0, 1))
    assert one == other


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
    fine = Decimal("1234567890123456.5")
    assert summed([fine], pa.decimal128(38, 18), "avg") == fine
    with pytest.raises(AggregateError, match=r"does not fit decimal\(38,22\) any more"):
        summed([Decimal("99999999999999999.5")], pa.decimal128(38, 18), "avg")
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
        ("SELEC id FROM orders", "1:1", "SELEC is not known"),
        ("-- all\n(SELETC id FROM orders)", "2:2", "SELETC is not known"),
        ("SELECT id FRM orders", "1:11", "FRM is not expected"),
        ("SELECT id FROM orders\nWHER id > 1", "2:1", "WHER is not expected"),
        ("SELECT id, date_add(id) AS d FROM orders", "1:23", "argument is missing"),
        # What the parser knows, and nobody reads.
        ("SELECT id FROM orders VERSION AS OF 3", "1:23", "VERSION AS OF"),
        ("SELECT id FROM orders TIMESTAMP AS OF '2026-01-01' o", "1:23", "TIMESTAMP AS OF"),
        ("SELECT id FROM orders FOR UPDATE", "1:8", "LOCKS is not taken"),
        ("SELECT id INTO t FROM orders", "1:16", "INTO is not taken"),
        ("SELECT * REPLACE (1 AS id) FROM orders", "1:19", "REPLACE is not taken"),
        ("SELECT id FROM orders WITH (NOLOCK)", "1:16", "HINTS is not taken"),
        (
            "SELECT o.id FROM orders o JOIN customers c JOIN orders p ON c.id = p.id ON o.id = 1",
            "1:44",
            "inside of another",
        ),
        ("SELECT o.id FROM orders o ASOF JOIN customers c ON o.id = c.id", "1:37", "ASOF joins"),
        ("SELECT id FROM orders GROUP BY ROLLUP(id)", "1:32", "ROLLUP"),
        ("SELECT id FROM orders GROUP BY id WITH CUBE", "1:40", "CUBE"),
        ("SELECT id FROM orders GROUP BY GROUPING SETS ((id), ())", "1:32", "GROUPING SETS"),
        ("SELECT stack(2, 1, 2) AS (x, y) FROM orders", "1:8", "one name"),
        ("SELECT * EXCEPT (idd) FROM orders", "1:18", "* has no column idd"),
        ("SELECT orders.amount.* FROM orders", "1:8", "fields of a struct"),
        ("SELECT struct(*) AS s FROM orders", "1:15", "* stands for columns"),
        ("SELECT count(DISTINCT *) AS n FROM orders", "1:23", "* stands for columns"),
        ("SELECT n FROM (SELECT id, amount FROM orders) AS t(n)", "1:52", "t has 2 columns"),
        ("SELECT n FROM (SELECT id, amount FROM orders) AS t(n, N)", "1:52", "the same name"),
        (
            "SELECT id FROM orders UNION BY NAME SELECT country FROM customers",
            "1:44",
            "has no column id",
        ),
        # Several rows of one, and other answers each time.
        ("SELECT id, explode(amount) AS x FROM orders", "1:12", "several rows of one"),
        ("SELECT id, inline_outer(amount) AS x FROM orders", "1:12", "several rows of one"),
        ("SELECT id, stack(2, 1, 2) AS x FROM orders", "1:12", "several rows of one"),
        ("SELECT id, uniform(1, 9) AS x FROM orders", "1:12", "uniform gives another answer"),
        ("SELECT id, shuffle(amount) AS x FROM orders", "1:12", "shuffle gives another answer"),
        ("SELECT id, localtimestamp() AS x FROM orders", "1:12", "localtimestamp gives another"),
        ("SELECT id, localtimestamp AS x FROM orders", "1:12", "localtimestamp gives another"),
        ("SELECT id, current_date AS x FROM orders", "1:12", "current_date gives another answer"),
        ("SELECT id, unix_timestamp() AS x FROM orders", "1:12", "gives another answer"),
        ("SELECT id, DATE 'today' AS x FROM orders", "1:17", "today gives another answer"),
        ("SELECT id, concat('a', to_char(id, '99')) AS x FROM orders", "1:24", "cannot be told"),
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


def test_what_is_left_out_of_all_columns() -> None:
    assert columns(plan("SELECT * EXCEPT (amount) FROM orders", TABLES)) == ("id", "customer_id")
    both = "SELECT o.*, c.* EXCEPT (ID) FROM orders o JOIN customers c ON o.customer_id = c.id"
    assert columns(plan(both, TABLES)) == ("id", "customer_id", "amount", "country")


def test_mean_is_avg_and_names_of_queries_have_no_case() -> None:
    made = plan("SELECT id, mean(amount) AS m FROM orders GROUP BY id", TABLES)
    assert any("AVG" in each for each in explained(made))
    hidden = plan(
        "WITH Orders AS (SELECT country AS x FROM customers) SELECT x FROM orders", TABLES
    )
    assert columns(hidden) == ("x",)


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


@settings(max_examples=examples(40))
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


ORDERS = "orders o JOIN customers c ON o.customer_id = c.id"
TYPES = {"orders": {"id": "bigint", "amount": "double"}, "customers": {"country": "string"}}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("SELECT id, amount / 2 AS half FROM orders",
         "SELECT id,\n  amount / 3 AS half FROM orders",
         ["line 2: column half was amount / 2 and now is amount / 3"]),
        ("SELECT id FROM orders WHERE amount > 1", "SELECT id FROM orders\nWHERE amount > 2",
         ["line 2: the condition was amount > 1 and now is amount > 2"]),
        ("SELECT id FROM orders WHERE amount > 1", "SELECT id, amount FROM orders",
         ["line 1: column amount (amount) is new", "the condition amount > 1 is gone"]),
        (f"SELECT c.country, sum(amount) AS s FROM {ORDERS} GROUP BY c.country",
         f"SELECT o.id, sum(amount) AS s\nFROM {ORDERS}\nGROUP BY o.id HAVING count(*) > 1",
         ["column country (c.country) is gone", "line 1: column id (o.id) is new",
          "line 3: the condition COUNT(*) > 1 is new",
          "line 3: what it groups by was country and now is id"]),
        (f"SELECT o.id, c.country FROM {ORDERS}",
         f"SELECT o.id, c.country FROM {ORDERS.replace('JOIN', 'LEFT JOIN')}",
         ["line 1: the join was inner join on {on} and now is left join on {on}".format(
             on="o.customer_id = c.id")]),
        ("SELECT id, amount FROM orders", "SELECT amount, id FROM orders",
         ["its columns are in another order"]),
        ("SELECT id FROM orders UNION ALL SELECT id FROM customers", "SELECT id FROM orders",
         ["table customers is gone", "column id (id) is gone", "its UNION of 2 parts is gone"]),
        # What is written in another way is the same.
        (f"select o.id, amount from {ORDERS} where amount>1 and o.id = 2",
         f"SELECT o.id, o.amount -- the amount\nFROM {ORDERS}\nWHERE amount > 1 AND o.id = 2",
         []),
    ],
)  # fmt: skip
def test_what_has_changed_is_told_in_the_words_of_the_view(
    old: str, new: str, told: list[str]
) -> None:
    one, other = (shape(plan(each, TABLES), TYPES) for each in (old, new))
    assert shapes.differences(one, other) == told
    assert shapes.differences(one, one) == []


def test_a_column_of_another_type_is_told() -> None:
    node = plan("SELECT id, amount FROM orders", TABLES)
    now = {"orders": {"id": "bigint", "amount": "decimal(10,2)", "customer_id": "string"}}
    assert shapes.differences(shape(node, TYPES), shape(node, now)) == [
        "column amount of table orders was double and now is decimal(10,2)"
    ]


@settings(max_examples=examples(50))
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(-9, 9)), min_size=1, max_size=30),
    st.lists(st.integers(1, 7), min_size=1),
    st.data(),
)
def test_sums_of_large_decimals_do_not_depend_on_where_micro_batches_end(
    changes: list[tuple[str, int]], cuts: list[int], data: st.DataObject
) -> None:
    """What does not fit for a while is set aside, and right again when something is taken away."""
    kind = pa.decimal128(38, 2)
    results = (Aggregated("s", "sum", "v", kind), Aggregated("m", "avg", "v", kind))
    group = Aggregate(("g",), (pa.string(),), results, net=True, guarded=True)
    shard = Shard(0, 1, 0, None, State())
    there: list[tuple[str, Decimal]] = []
    rows: list[tuple[str, Decimal, bool]] = []
    for name, tens in changes:
        value = Decimal(tens * 10**35)
        if (name, value) in there and data.draw(st.booleans()):
            there.remove((name, value))
            rows.append((name, value, False))
        else:
            there.append((name, value))
            rows.append((name, value, True))
    shown: dict[str, tuple[Decimal, Decimal]] = {}
    for size in itertools.cycle(cuts):
        batch, rows = rows[:size], rows[size:]
        if not batch:
            break
        names, values, signs = map(list, zip(*batch, strict=True))
        given_rows = pa.table({"g": names, "v": pa.array(values, kind), SIGN: signs})
        for row in group.process(shard, {"rows": given_rows}).to_pylist():
            shown.pop(row["g"], None)
            if not row["_deleted"]:
                shown[row["g"]] = row["s"], row["m"]
    wanted, unfit = {}, set()
    for name in {each for each, _ in there}:
        values = [value for own, value in there if own == name]
        total, mean = sum(values), Fraction(int(sum(values)), len(values))
        # sum is decimal(38,2), avg decimal(38,6), as in Spark.
        if abs(total) >= 10**36 or abs(round(mean, 6)) >= 10**32:
            unfit.add(name)
        else:
            wanted[name] = total
    assert {name: total for name, (total, _) in shown.items()} == wanted
    aside = shard.state.tables.get("set aside groups")
    noted = aside.scan().to_pylist() if aside is not None else []
    assert {row["_k0"] for row in noted} == unfit
