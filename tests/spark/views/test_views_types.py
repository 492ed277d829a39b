"""What only Spark knows of a view, its types and functions: told with the place, before it runs."""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

from penstock.spark.views import of, scope
from penstock.spark.views.definitions import Definition, TableSpec
from penstock.spark.views.refusing import Text, ViewError

pytestmark = pytest.mark.timeout(600)

ORDERS = "o=shop.o(id bigint, customer bigint, amount double, state string, at timestamp) key id"
TABLES = (TableSpec.parse(ORDERS), TableSpec.parse("c=shop.c(id string, country string) key id"))
TAGGED = TableSpec.parse("t=t(id bigint, tags array<string>, s struct<a: int>) key id")
FROM_BOTH = "FROM o JOIN c ON cast(customer AS string) = c.id"


def defined(sql: str, *tables: TableSpec) -> Definition:
    return Definition("v", Text(sql, "views/v.sql"), tables or TABLES, "v")


def test_what_fits_is_taken(penstock_spark: SparkSession) -> None:
    sql = f"""SELECT upper(country) AS c, sum(amount) AS s, max(at) + INTERVAL 1 DAY AS t
        {FROM_BOTH} WHERE state = 'x' AND amount > 1 GROUP BY 1 HAVING count(*) > 1"""
    defined(sql).check_types(penstock_spark)
    # An interval is no number.
    defined("SELECT id, state + INTERVAL 1 DAY AS t FROM o").check_types(penstock_spark)
    texts = "SELECT id, try_cast(state AS int) + 1 AS n FROM o WHERE id = '1' AND at > '2026-01-01'"
    defined(texts).check_types(penstock_spark)
    nested = "SELECT to_json(tags) AS t, count(tags) AS n FROM t GROUP BY to_json(tags)"
    defined(nested, TAGGED).check_types(penstock_spark)
    union = "SELECT id, amount AS x FROM o UNION ALL SELECT customer, id AS x FROM o"
    defined(union).check_types(penstock_spark)


@pytest.mark.parametrize(
    ("sql", "place", "reason"),
    [
        ("SELECT id,\n  upperr(state) AS s FROM o", "2:3", "there is no function upperr"),
        ("SELECT id, concat('a', upperr(state)) AS s FROM o", "1:24", "no function upperr"),
        ("SELECT id FROM o WHERE amount", "1:24", "true or false, and this is double"),
        ("SELECT id FROM o WHERE amount > 1 AND state", "1:39", "and this is string"),
        (f"SELECT o.id {FROM_BOTH} WHERE amount + o.id", "1:68", "this is double"),
        ("SELECT id FROM o GROUP BY id HAVING max(at)", "1:37", "true or false, and this is time"),
        ("SELECT sum(state) AS s FROM o", "1:8", "its argument is string"),
        ("SELECT id, avg(at) AS s FROM o GROUP BY id", "1:12", "its argument is timestamp"),
        ("SELECT id, sqrt(max(at)) AS n FROM o GROUP BY id", "1:12", 'however "MAX(o.at)" has'),
        ("SELECT id, CASE WHEN id > 1 THEN at ELSE array(1) END AS s FROM o", "1:12", "same type"),
        ("SELECT id, CASE WHEN amount THEN 1 END AS s FROM o", "1:12", "BOOLEAN"),
        ("SELECT o.id FROM o JOIN c ON customer = c.id", "1:30", "compares bigint with string"),
        ("SELECT id, at AS x FROM o UNION ALL SELECT id, array(1) AS x FROM c", "1:48",
         "x is timestamp in the first part of the UNION, and array<int> here"),
        ("SELECT id, amount + state AS s FROM o", "1:21", "this is a text, and stands"),
        ("SELECT id FROM o WHERE state > 3", "1:24", "beside a number (int)"),
        ("SELECT id, amount + 'five' AS s FROM o", "1:21", "no number, and stands beside one"),
        ("SELECT id FROM o WHERE amount > ('five')", "1:34", "no number, and stands beside one"),
        ("SELECT id FROM o GROUP BY id HAVING 2 * max(state) > 1", "1:41", "beside a number (int)"),
        ("SELECT id, substring(state) AS s FROM o", "1:12", "requires"),
        ("SELECT id, state.x AS s FROM o", "1:12", "extract a value"),
        ("SELECT id, transform(array(at), x -> x + id) AS s FROM o", "1:12", "incompatible types"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_with_its_place(
    penstock_spark: SparkSession, sql: str, place: str, reason: str
) -> None:
    with pytest.raises(ViewError) as refused:
        defined(sql).check_types(penstock_spark)
    told = str(refused.value)
    assert reason in told
    assert told.startswith(f"views/v.sql:{place}: ")
    assert "_result" not in told
    assert "_group" not in told
    assert told.splitlines()[-1].index("^") == int(place.split(":")[1]) + 1


@pytest.mark.parametrize(
    ("sql", "place", "reason"),
    [
        ("SELECT tags, count(*) AS n FROM t GROUP BY tags", "1:44", "this is array<string>"),
        ("SELECT DISTINCT id, s FROM t", "1:21", "this is struct<a:int>"),
        ("SELECT DISTINCT * FROM t", "1:17", "this is array<string>"),
        ("SELECT id, s FROM t UNION SELECT id, s FROM t AS u", "1:12", "this is struct<a:int>"),
        ("SELECT max(tags) AS m FROM t", "1:8", "its argument is array<string>"),
        ("SELECT id, count(DISTINCT s) AS m FROM t GROUP BY id", "1:27", "is struct<a:int>"),
        ("SELECT t.id FROM t JOIN t AS u ON t.tags = u.tags", "1:35", "cannot be joined by it"),
        # By no name that is known here, but by Spark's own word.
        ("SELECT id, abs(dice(tags)) AS x FROM t", "1:16", "dice gives another answer"),
        ("SELECT t.id FROM t JOIN t AS u ON t.id = u.id WHERE dice(u.tags) = t.s.a", "1:53",
         "dice gives another answer each time"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_told_with_its_place(
    penstock_spark: SparkSession, sql: str, place: str, reason: str
) -> None:
    penstock_spark.udf.register("dice", udf(len, "int").asNondeterministic())
    with pytest.raises(ViewError, match=rf"^views/v.sql:{place}: .*{re.escape(reason)}"):
        defined(sql, TAGGED).check_types(penstock_spark)


def test_a_primary_key_is_no_list(penstock_spark: SparkSession) -> None:
    table = TableSpec.parse("t=t(id array<int>, x int) key id")
    with pytest.raises(ViewError, match=r"array<int>: _t_id cannot be a primary key"):
        defined("SELECT x FROM t", table).check_types(penstock_spark)


def test_what_makes_several_rows_is_found_by_any_name(penstock_spark: SparkSession) -> None:
    rows = penstock_spark.createDataFrame([], "id bigint, tags array<string>")
    with (
        patch.object(scope, "_GENERATORS", frozenset()),
        pytest.raises(ViewError, match=r"^1:1: explode makes several rows of one"),
    ):
        of(rows, "t", key="id").select("id", tag="explode(tags)").changes()


@pytest.mark.parametrize(
    ("ddl", "at", "reason"),
    [
        ("id bigintt, a double", 4, "bigintt is no type"),
        ("id bigint, a uuid", 14, "UUID"),
        ("id, a double", 1, "column id has no type"),
        ("id decimal(1, a double", 11, "a bracket is not closed"),
    ],
)
def test_columns_that_are_none(
    penstock_spark: SparkSession, ddl: str, at: int, reason: str
) -> None:
    with pytest.raises(ViewError, match=rf"^table t:1:{at}: .*{reason}") as refused:
        defined("SELECT id FROM t", TableSpec.parse(f"t=t({ddl}) key id")).check_types(
            penstock_spark
        )
    assert "CREATE" not in str(refused.value)


def test_expressions_of_python_say_where_they_are_wrong(penstock_spark: SparkSession) -> None:
    rows = of(penstock_spark.createDataFrame([], "id bigint, name string"), "t", key="id")
    with pytest.raises(ViewError, match=r"^1:10: there is no function upperr"):
        rows.where("true AND upperr(name) = 'x'").changes()
    with pytest.raises(ViewError, match=r"^1:1: SUM\(t.name\) is not possible"):
        rows.group_by("id").agg(s="sum(name)").changes()
