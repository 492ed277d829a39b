"""Views in flows: change events in, a changelog out, and in batch the same."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from penstock.spark import flow, stream, topic
from penstock.spark.flows.folder import Folder
from penstock.spark.state import Batch, entered, inspecting, layout
from penstock.spark.state.row_errors import as_written, is_of_row
from penstock.spark.views import ViewError, of, sql
from penstock.spark.views.set_aside import AT, FAILED, ROW
from penstock.testing.flows import FlowFailedError, FlowTester
from tests.cli.runner import run
from tests.harness.profiles import some

pytestmark = pytest.mark.timeout(600)

ORDERS = "id bigint not null, customer_id int, amount decimal(10,2), state string"
CUSTOMERS = "id bigint not null, country string"
SQL = """
SELECT country, count(*) AS n, sum(amount) AS revenue, max(amount) AS top
FROM orders o LEFT JOIN customers c ON o.customer_id = c.id
WHERE state <> 'void' GROUP BY country HAVING count(*) > 0
"""


def order(id_: int, customer: int | None, amount: float, state: str = "paid") -> dict[str, Any]:
    return {"id": id_, "customer_id": customer, "amount": amount, "state": state}


def test_a_view_in_a_flow_follows_its_tables(tester: FlowTester) -> None:
    @flow(
        inputs=[
            stream("shop.orders", debezium=ORDERS),
            stream("shop.customers", debezium=CUSTOMERS),
        ],
        output=topic("revenue", key="_key", compacted=True),
        shards=2,
    )
    def revenue(orders: DataFrame, customers: DataFrame) -> DataFrame:
        keys = {"orders": "id", "customers": "id"}
        return sql(SQL, keys, orders=orders, customers=customers).changes()

    tester.use(revenue)
    tester.feed_table("shop.customers", [{"id": 1, "country": "de"}], key="id")
    rows = [order(1, 1, 10.5), order(2, 2, 5), order(3, 1, 7, "void"), order(4, None, 1)]
    tester.feed_table("shop.orders", rows, key="id")
    tester.run()
    found = {each["country"]: each for each in tester.table("revenue").values()}
    assert found["de"] == {"country": "de", "n": 1, "revenue": 10.5, "top": 10.5}
    assert (found[None]["n"], found[None]["revenue"]) == (2, 6.0)
    # A late customer takes its order along; an order is changed, one deleted without saying what
    # it was; and one comes twice.
    tester.feed_table("shop.customers", [{"id": 2, "country": "fr"}], key="id")
    tester.feed_table("shop.orders", [order(1, 1, 11)], key="id")
    tester.feed("shop.orders", [{"op": "d", "before": None, "after": None}], key=['{"id":4}'])
    tester.feed_table("shop.orders", [order(2, 2, 5)], key="id")
    before = len(tester.records("revenue"))
    tester.run()
    assert tester.table("revenue") == {
        '{"country":"de"}': {"country": "de", "n": 1, "revenue": 11.0, "top": 11.0},
        '{"country":"fr"}': {"country": "fr", "n": 1, "revenue": 5.0, "top": 5.0},
    }
    assert len(tester.records("revenue")) <= before + 3


def test_in_batch_over_dataframes(penstock_spark: SparkSession) -> None:
    spark = penstock_spark
    orders = spark.createDataFrame(
        [(1, 1, Decimal("1.50"), "paid"), (2, 1, Decimal("2.00"), "open"),
         (3, 9, Decimal("4.00"), "paid")],
        ORDERS,
    )  # fmt: skip
    customers = spark.createDataFrame([(1, "de")], CUSTOMERS)
    people = of(customers, "customers", key="id")
    joined = of(orders, "orders", key="id").join(
        people, on="orders.customer_id = customers.id", how="left"
    )
    assert joined.key == ("id", "customers_id")
    view = joined.where("state = 'paid'").group_by("country").agg(n="count(*)", s="sum(amount)")
    assert view.key == ("country",)
    found = {row["country"]: (row["n"], row["s"], row["_deleted"])
             for row in view.changes().collect()}  # fmt: skip
    assert found == {"de": (1, Decimal("1.50"), False), None: (1, Decimal("4.00"), False)}
    shown = joined.select("orders.id", where="coalesce(country, '?')")
    assert shown.key == ("id", "_customers_id")
    both = of(orders, "o", key="id").select("id").union(of(customers, "c", key="id").select("id"))
    assert sorted(row["id"] for row in both.changes().collect()) == [1, 1, 2, 3]
    total = of(orders, "o", key="id").agg(n="count(*)")
    assert [(row["n"], row["_all"]) for row in total.changes().collect()] == [(3, "all")]


KEYS = "id bigint, at timestamp, made timestamp_ntz, x double, d decimal(20,12)"
# `make test` asks the first six.
BY_KEY = [
    "SELECT at, count(*) AS n FROM k GROUP BY at",
    "SELECT made, x, count(*) AS n FROM k GROUP BY made, x",
    "SELECT n FROM (SELECT at, x, count(*) AS n FROM k GROUP BY 1, 2) t UNION ALL SELECT id FROM k",
    "SELECT a.id, b.id AS other FROM k a LEFT JOIN k b ON a.at = b.at AND a.x = b.x",
    "SELECT a.id, b.id AS other FROM k a JOIN k b ON a.d = cast(b.d AS decimal(22,14))",
    # What a condition leaves out is not computed.
    "SELECT a.id, 1 / b.x AS q FROM k a JOIN k b ON a.at = b.at AND b.x <> 0 AND 1 / b.x > a.id",
    "SELECT id, 1 / x AS q FROM k WHERE x <> 0 AND 1 / x > 0",
    "SELECT id, CASE WHEN x <> 0 THEN 1 / x END AS q FROM k WHERE id > 0",
    "SELECT DISTINCT d FROM k",
    "SELECT x, 10 / sum(x) AS q FROM k GROUP BY x HAVING x <> 0",
]


def key_row(id_: int, chance: random.Random) -> tuple[Any, ...]:
    """A row of values that have several texts, or nearly the same one."""
    times = [datetime(2026, 1, 1, 0, 0, 0, us, UTC) for us in (0, 1, 100, 200)]
    at, made = (chance.choice([None, *times]) for _ in range(2))
    number = chance.choice([None, 0.0, -0.0, math.nan, 1.5])
    digits = chance.choice([None, *map(Decimal, ("1", "1.000000000001", "1.000000000002"))])
    return id_, at, made and made.replace(tzinfo=None), number, digits


def told(rows: Iterable[tuple[Any, ...]]) -> list[str]:
    return sorted(str(tuple(0.0 if each == 0 else each for each in row)) for row in rows)


def test_rows_are_told_apart_as_by_spark(penstock_spark: SparkSession) -> None:
    """Times with microseconds, zeros, NaN, nulls and decimals: each has a key of its own."""
    chance = random.Random(6)
    rows = penstock_spark.createDataFrame([key_row(at, chance) for at in range(60)], KEYS)
    rows.createOrReplaceTempView("k")
    for query in some(BY_KEY, test=6):
        view = sql(query, {"k": "id"}, k=rows)
        found = [row.asDict() for row in view.changes().collect()]
        assert len({row["_key"] for row in found}) == len(found), query
        shown = [tuple(row[name] for name in view.columns) for row in found]
        assert told(shown) == told(map(tuple, penstock_spark.sql(query).collect())), query


def test_a_view_over_a_view_by_time_follows_deletions(tester: FlowTester) -> None:
    @flow(inputs=stream("a", changelog="id bigint, at timestamp, x double"),
          output=topic("v1", key="_key", compacted=True), shards=2)  # fmt: skip
    def first(a: DataFrame) -> DataFrame:
        return sql("SELECT at, x, count(*) AS n FROM a GROUP BY at, x", {"a": "id"}, a=a).changes()

    @flow(inputs=stream("v1", changelog="at timestamp, x double, n bigint"),
          output=topic("v2", key="_key", compacted=True), shards=2)  # fmt: skip
    def second(v: DataFrame) -> DataFrame:
        return sql("SELECT count(*) AS n FROM v", {"v": ["at", "x"]}, v=v).changes()

    tester.use(first, second)
    at = "2026-01-01T00:00:00.000100Z"
    tester.feed("a", [{"id": 1, "at": at, "x": -0.0}], key=["1"])
    tester.run()
    tester.feed("a", [{"id": 2, "at": at, "x": 0.0}], key=["2"])
    tester.run()
    assert tester.table("v1") == {f'{{"at":"{at}","x":0.0}}': {"at": at, "x": 0.0, "n": 2}}
    tester.feed("a", [None, None], key=["1", "2"])
    tester.run()
    assert tester.table("v1") == {}
    assert list(tester.table("v2").values()) == [{"n": 0}]


RATIO = """SELECT id, m / n AS q FROM x
WHERE n IS NOT NULL AND s RLIKE '^[0-9]' AND cast(s AS int) < 50"""
TOTAL = """SELECT upper(name) AS name, count(*) AS n, sum(cast(x.s AS int)) AS s
FROM x JOIN g ON x.g = g.g GROUP BY upper(name) HAVING 10 / (count(*) - 3) < 100"""


def set_aside(tester: FlowTester, name: str) -> list[tuple[str, str, str]]:
    """The rows of a flow that cannot be computed: key, reason, and where they stand."""
    found = layout.find(Folder(tester.data).checkpoint(name, 1))
    assert found is not None
    names = (ROW, FAILED, AT)
    return sorted(
        tuple(row[each] for each in names)
        for kept in inspecting.set_aside(found)
        for row in kept.rows.to_pylist()
    )


def test_a_bad_row_is_set_aside_until_it_is_mended(tester: FlowTester) -> None:
    columns = "id bigint, m int, n int, s string, g int"

    @flow(inputs=stream("x", changelog=columns),
          output=topic("ratio", key="_key", compacted=True), shards=2)  # fmt: skip
    def ratio(x: DataFrame) -> DataFrame:
        return sql(RATIO, {"x": "id"}, x=x).changes()

    @flow(inputs=[stream("x", changelog=columns), stream("g", changelog="g int, name string")],
          output=topic("total", key="_key", compacted=True), shards=2)  # fmt: skip
    def total(x: DataFrame, g: DataFrame) -> DataFrame:
        return sql(TOTAL, {"x": "id", "g": "g"}, x=x, g=g).changes()

    def feed(*rows: tuple[int, int | None, int | None, str]) -> None:
        named = [dict(zip(("id", "m", "n", "s"), row, strict=True), g=1) for row in rows]
        tester.feed("x", named, key=[str(row[0]) for row in rows])

    def shown(name: str) -> list[tuple[Any, ...]]:
        return sorted(tuple(row.values()) for row in tester.table(name).values())

    tester.use(ratio, total)
    tester.feed("g", [{"g": 1, "name": "a"}], key=["1"])
    # What a condition leaves out is not computed, by whatever follows it.
    feed((1, 4, 2, "7"), (2, 4, None, "x"), (3, 0, 0, "none"))
    found = tester.run()
    assert shown("ratio") == [(1, 2.0)]
    assert found["ratio"].progress.set_aside == 0
    # A total can do without rows 2 and 3, of which it cannot cast s.
    assert shown("total") == [("A", 1, 7)]
    assert found["total"].progress.set_aside == 2
    assert set_aside(tester, "total") == [
        ('{"id":2,"g":1}', "1:48: CAST(x.s AS INT): 'x' is no int (s = x)", "x-0 offset 1"),
        ('{"id":3,"g":1}', "1:48: CAST(x.s AS INT): 'none' is no int (s = none)", "x-0 offset 2"),
    ]
    # Row 1 becomes one that fails, 4 comes, of which Spark cannot tell whether it is to be shown;
    # 2 is mended; and three rows fail in HAVING.
    feed((1, 4, 0, "8"), (4, 1, 1, "3000000000"), (5, 1, 2, "9"), (2, 4, 1, "5"))
    found = tester.run()
    assert shown("ratio") == [(2, 4.0), (5, 0.5)]
    assert set_aside(tester, "ratio") == [
        ('{"id":1}', "1:12: m / n: division by zero (m = 4, n = 0)", "x-0 offset 3"),
        ('{"id":4}', "2:46: CAST(s AS INT): '3000000000' is no int (s = 3000000000)",
         "x-0 offset 4"),
    ]  # fmt: skip
    data = ("--data", str(tester.data))
    told = run("view", "aside", "ratio", *data).ok()
    assert "division by zero" in told.out
    assert "2 rows of ratio cannot be computed" in told.err
    (tester.data.parent / "penstock.toml").write_text("")
    (tester.data.parent / "views").mkdir()
    spec = f"-- table x = x({columns}) key id changelog"
    (tester.data.parent / "views" / "ratio.sql").write_text(f"{spec}\n{RATIO}")
    project = ("--project", str(tester.data.parent / "penstock.toml"))
    [listed] = run("view", "list", *data, *project, "--json").ok().json
    assert (listed["name"], listed["set_aside"]) == ("ratio", 2)
    assert shown("total") == []
    assert [each[0] for each in set_aside(tester, "total")] == [
        '{"UPPER(name)":"A"}', '{"id":3,"g":1}', '{"id":4,"g":1}'
    ]  # fmt: skip
    # All are mended, or go.
    feed((1, 4, 8, "8"))
    tester.feed("x", [None, None, None], key=["4", "3", "5"])
    found = tester.run()
    assert shown("ratio") == [(1, 0.5), (2, 4.0)]
    assert shown("total") == [("A", 2, 13)]
    assert [each.progress.set_aside for each in found.values()] == [0, 0]
    assert set_aside(tester, "ratio") == set_aside(tester, "total") == []
    # The view is changed, and what it would have to look at again is told as it is written.
    text = RATIO.replace("< 50", "< 60").replace("m / n", "n / m")

    @flow(inputs=stream("x", changelog=columns.replace("n int", "n bigint")),
          output=topic("ratio", key="_key", compacted=True), shards=2, name="ratio")  # fmt: skip
    def changed(x: DataFrame) -> DataFrame:
        return sql(text, {"x": "id"}, x=x).changes()

    tester.use(changed)
    with pytest.raises(FlowFailedError) as refused:
        tester.run()
    # Behind it stand the lines of Python that were changed.
    assert (
        str(refused.value)
        .partition("from where it was: ")[2]
        .startswith(
            "column n of table x was int and now is bigint; "
            "line 1: column q was m / n and now is n / m; "
            "line 2: the condition was CAST(s AS INT) < 50 and now is CAST(s AS INT) < 60; tests/"
        )
    )


ODD = ("id bigint, k int, m int, n int, s string, d decimal(38,0), a array<int>, t struct<u: int>, "
       "mp map<string,int>")  # fmt: skip
EXPRESSIONS = [
    "m / n", "m % n", "m + n", "m * n - 1", "-m", "cast(s AS int)", "cast(s AS date)", "date(s)",
    "to_date(s, 'yyyy-MM-dd')", "d * d", "cast(d AS decimal(3,1))", "a[n]", "element_at(a, n)",
    "mp['x']", "t.u / n", "transform(a, x -> x / n)", "s RLIKE concat('(', s)",
    "CASE WHEN n <> 0 THEN m / n WHEN m > 3 THEN cast(s AS int) ELSE m % n END",
    "coalesce(try_cast(s AS int), m / n)", "if(n > 0, m / n, cast(s AS int))",
    "n <> 0 AND m / n > 1", "n = 0 OR m / n > 1", "make_date(m, n, 1)", "substr(s, n)",
    "assert_true(n > 0)", "CASE n WHEN 0 THEN m / n ELSE cast(s AS int) END",
]  # fmt: skip
ROWS = [
    (4, 2, "7", Decimal(5), [1, 2, 3], (6,), {"x": 1}),
    (4, 0, "2026-01-31", Decimal(10) ** 37, [4], (1,), {}),
    (-(2**31), -1, "none", None, None, None, None),
    (2**31 - 1, 1, "", Decimal(-1), [], (None,), {"x": None}),
]


def test_what_fails_is_what_fails_in_a_query_over_that_row_alone(
    penstock_spark: SparkSession, tmp_path: Path
) -> None:
    """One expression for each row, as a view that sets aside and as a query."""
    spark = penstock_spark
    given = [
        (number * 100 + at, at, *row)
        for number, row in enumerate(ROWS)
        for at in range(len(EXPRESSIONS))
    ]
    branches = " ".join(f"WHEN {at} THEN cast({each} AS string)"
                        for at, each in enumerate(EXPRESSIONS))  # fmt: skip
    rows = spark.createDataFrame(given, ODD)
    folder = tmp_path / "penstock-state" / "s2"
    with entered(Batch(folder=str(folder), shards=2, guarded=True)), as_written(spark):
        query = f"SELECT id, CASE k {branches} END AS v FROM x"
        found = {row["id"]: row["v"] for row in sql(query, {"x": "id"}, x=rows).changes().collect()}
    noted = {
        json.loads(row[ROW])["id"]: row[FAILED]
        for kept in inspecting.set_aside(layout.Layout(str(tmp_path), 2, "s2"))
        for row in kept.rows.to_pylist()
    }
    assert {*found, *noted} == {each[0] for each in given}
    assert not found.keys() & noted.keys()
    for number, row in enumerate(ROWS):
        one = spark.createDataFrame([(0, 0, *row)], ODD)
        texts = {number * 100 + at: f"cast({each} AS string)"
                 for at, each in enumerate(EXPRESSIONS)}  # fmt: skip
        good = {at: text for at, text in texts.items() if at in found}
        with as_written(spark):
            [values] = one.selectExpr(*good.values()).collect()
        assert dict(zip(good, values, strict=True)) == {at: found[at] for at in good}
        # Others for each row.
        failing = [text for at, text in texts.items() if at in noted]
        for text in some([*failing[number:], *failing[:number]], test=1):
            with pytest.raises((PySparkException, Py4JJavaError)) as failed:
                one.selectExpr(text).collect()
            assert is_of_row(failed.value), text
    # The smallest part is told, and of a CASE only what was computed.
    assert "m / n: division by zero" in noted[100 + EXPRESSIONS.index("m / n")]
    assert "'none' is no int" in noted[200 + EXPRESSIONS.index("cast(s AS int)")]
    assert "CAST(s AS INT): '' is no int (s = )" in noted[300 + len(EXPRESSIONS) - 1]


def test_names_of_dataframes_are_not_mixed_up(penstock_spark: SparkSession) -> None:
    spark = penstock_spark
    one, two = (spark.createDataFrame([(each, 7)], "id int, x int") for each in (1, 2))
    a, b, c = of(one, "a", key="id"), of(two, "b", key="id"), of(two, "a", key="id")
    with pytest.raises(ViewError, match="two tables are called 'a'"):
        a.union(c)
    with pytest.raises(ViewError, match="two tables are called 'a'"):
        a.select("id").alias("p").join(c.select("id").alias("q"), on="p.id = q.id")
    # The same rows are the same table.
    assert [row["id"] for row in a.union(a.where("x > 1")).changes().collect()] == [1, 1]
    both = a.join(b, on="a.x = b.x")
    for wrong in (
        lambda: both.select("a.id", "b.id"),
        lambda: both.group_by("a.id", "b.id"),
        lambda: both.group_by("a.id").agg(id="count(*)"),
        lambda: a.select("x", X="id"),
    ):
        with pytest.raises(ViewError, match=r"^1:1: two columns are called (id|X)"):
            wrong()
    with pytest.raises(ViewError, match="have no names") as refused:
        a.select("id", "x").join(b.select("id", "x"), on="x = x")
    assert "alias" in str(refused.value.advice)
    with pytest.raises(ViewError, match="column x is in what was selected and b"):
        a.select("id", "x").join(b, on="x = b.x")
    counts = b.group_by("x").agg(n="count(*)").alias("q")
    named = a.select("id", y="x").alias("p").join(counts, on="p.y = q.x")
    assert named.columns == ("id", "y", "x", "n")
    [row] = named.changes().collect()
    assert (row["id"], row["y"], row["x"], row["n"]) == (1, 7, 7, 1)
    # What is shown of both has names of its own, whatever the tables' columns are called.
    odd = of(one.withColumnRenamed("x", "b_id"), "a", key="id").join(b, on="a.b_id = b.x")
    assert odd.columns == ("id", "b_id", "b_b_id", "x")
