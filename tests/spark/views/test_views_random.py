"""Views of all kinds over random changes in random micro-batches: always what DuckDB says."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal
from typing import Any
from unittest.mock import patch

import duckdb
import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.spark.views import best, lists, set_aside
from penstock.spark.views.columns import PRESENT
from penstock.spark.views.sql import Schema, plan
from tests.harness.profiles import examples
from tests.spark.views.executing import Arrow, Maintained
from tests.spark.views.executing import alike as alike_in_sql

TIME = pa.timestamp("us")
ORDERS = pa.schema(
    [
        ("id", pa.int64()),
        ("customer", pa.int64()),
        ("amount", pa.decimal128(10, 2)),
        ("weight", pa.float64()),
        ("state", pa.string()),
        ("made", TIME),
        ("rate", pa.decimal128(20, 12)),
    ]
)
CUSTOMERS = pa.schema(
    [
        ("id", pa.int64()),
        ("country", pa.string()),
        ("level", pa.int32()),
        ("since", TIME),
        ("ratio", pa.decimal128(22, 14)),
    ]
)
ITEMS = pa.schema([("order_id", pa.int64()), ("line", pa.int64()), ("sku", pa.string())])
# Keys of which several texts and roundings are possible.
TICKS = pa.schema([("made", TIME), ("weight", pa.float64()), ("level", pa.int32())])
TABLES = {"orders": ORDERS, "customers": CUSTOMERS, "items": ITEMS, "ticks": TICKS}
KEYS = {
    "orders": ("id",),
    "customers": ("id",),
    "items": ("order_id", "line"),
    "ticks": ("made", "weight"),
}
SCHEMAS = {name: Schema(tuple(schema.names), KEYS[name]) for name, schema in TABLES.items()}

VIEWS = [
    "SELECT id, amount FROM orders WHERE state = 'paid'",
    "SELECT amount + 1 AS more, state FROM orders",
    "SELECT o.id, c.country FROM orders o JOIN customers c ON o.customer = c.id",
    "SELECT o.amount, c.country FROM orders o LEFT JOIN customers c ON o.customer = c.id",
    "SELECT c.country, o.id FROM customers c LEFT JOIN orders o ON o.customer = c.id",
    """SELECT o.id, c.country FROM orders o
       LEFT JOIN customers c ON o.customer = c.id AND c.level > 1 AND o.state = 'paid'""",
    """SELECT o.id, c.level, i.sku FROM orders o LEFT JOIN customers c ON o.customer = c.id
       JOIN items i ON i.order_id = o.id WHERE c.level IS NULL OR c.level > 0""",
    """SELECT i.sku, c.country FROM items i LEFT JOIN orders o ON o.id = i.order_id
       LEFT JOIN customers c ON c.id = o.customer""",
    "SELECT a.id AS a, b.id AS b FROM orders a JOIN orders b ON a.customer = b.customer",
    """SELECT c.country, count(*) AS n, sum(o.amount) AS revenue, avg(o.weight) AS w,
       sum(o.weight) AS sw, min(o.amount) AS low, max(o.weight) AS high,
       count(DISTINCT o.state) AS states, count(o.state) AS known
       FROM orders o LEFT JOIN customers c ON o.customer = c.id GROUP BY c.country""",
    "SELECT count(*) AS n, sum(amount) AS s, min(state) AS first, avg(customer) AS a FROM orders",
    "SELECT count(*) AS n FROM orders o JOIN customers c ON o.customer = c.id",
    "SELECT state, sum(customer) AS s FROM orders GROUP BY state HAVING count(*) > 1",
    "SELECT state AS st, sum(amount) / count(*) AS mean FROM orders GROUP BY 1",
    "SELECT count(*) FILTER (WHERE state = 'paid') AS paid, customer FROM orders GROUP BY customer",
    "SELECT DISTINCT state FROM orders",
    "SELECT weight, count(*) AS n, min(weight) AS low FROM orders GROUP BY weight",
    "SELECT a.id AS a, b.id AS b FROM orders a LEFT JOIN orders b ON a.weight = b.weight",
    "SELECT DISTINCT c.country, o.state FROM orders o LEFT JOIN customers c ON c.id = o.customer",
    "SELECT id FROM orders UNION ALL SELECT id FROM customers",
    "SELECT id, state FROM orders UNION SELECT id, country FROM customers",
    """WITH totals AS (SELECT customer, sum(amount) AS total FROM orders GROUP BY customer)
       SELECT c.country, t.total FROM customers c LEFT JOIN totals t ON t.customer = c.id""",
    """SELECT level, count(*) AS n FROM (SELECT customer, max(state) AS last FROM orders
       GROUP BY customer) t JOIN customers c ON c.id = t.customer AND t.last <> 'open'
       GROUP BY level""",
    """SELECT o.state, i.sku, count(*) AS n FROM orders o, items i WHERE o.id = i.order_id
       GROUP BY o.state, i.sku""",
    "SELECT made, count(*) AS n, max(made) AS m, count(DISTINCT rate) AS r FROM orders GROUP BY 1",
    "SELECT rate, made, weight, count(*) AS n FROM orders GROUP BY rate, made, weight",
    "SELECT made, weight, level FROM ticks",
    "SELECT level FROM ticks UNION ALL SELECT level FROM ticks AS t WHERE level > 0",
    "SELECT DISTINCT made, weight FROM ticks UNION ALL SELECT made, weight FROM orders",
    "SELECT o.id, c.id AS c FROM orders o JOIN customers c ON o.rate = c.ratio",
    "SELECT o.id, c.id AS c FROM orders o LEFT JOIN customers c ON o.made = c.since",
    """SELECT o.id, t.level FROM orders o
       LEFT JOIN ticks t ON o.made = t.made AND o.weight = t.weight""",
    """SELECT t.weight, count(*) AS n, max(o.rate) AS r FROM ticks t
       LEFT JOIN orders o ON o.weight = t.weight GROUP BY t.weight""",
    # A condition guards what is computed of the rows for which it holds, and the next condition.
    "SELECT id, cast(weight AS int) AS w FROM orders WHERE weight > -5 AND weight < 10",
    "SELECT id FROM orders WHERE state = '' AND cast(concat(state, '1') AS int) = 1",
    # Names that are given to columns by position, and columns by name.
    "WITH c(country, id) AS (SELECT id, country FROM customers) SELECT id FROM c",
    "SELECT d.b, count(*) AS n FROM (SELECT state, customer FROM orders) AS d(a, b) GROUP BY d.b",
    "SELECT b FROM items AS i(a, b, c) WHERE a > 1",
    "SELECT id, level FROM customers UNION ALL BY NAME SELECT level, 7 AS id FROM ticks",
    # A WITH reads those before it, and a table of the name of one after it.
    """WITH a AS (SELECT sku AS x FROM items), items AS (SELECT state AS sku FROM orders)
       SELECT x FROM a UNION ALL SELECT sku FROM items""",
]

_OK = "(state IS NULL OR try_cast(state AS int) IS NOT NULL)"
_BOTH_FAIL = "((o.state || c.level) IS NOT NULL AND try_cast(o.state || c.level AS int) IS NULL)"
_LARGE = "CASE WHEN customer > 2 THEN 9223372036854775807 ELSE -9223372036854775807 END"
_FITS = "(s IS NULL OR s BETWEEN -9223372036854775808 AND 9223372036854775807)"
_BY_STATE = f"(SELECT state, sum(({_LARGE})::hugeint) AS s FROM orders GROUP BY state)"
# Views of which expressions fail for some rows; what is to be seen of them; and how many rows are
# to be set aside.
FAILING = [
    ("SELECT id, cast(state AS int) AS n FROM orders",
     f"SELECT id, cast(state AS int) FROM orders WHERE {_OK}",
     f"SELECT count(*) FROM orders WHERE NOT {_OK}"),
    ("SELECT id, weight FROM orders WHERE cast(state AS int) > 8",
     "SELECT id, weight FROM orders WHERE try_cast(state AS int) > 8",
     f"SELECT count(*) FROM orders WHERE NOT {_OK}"),
    ("SELECT customer, count(*) AS n, sum(cast(state AS int)) AS s FROM orders GROUP BY customer",
     f"SELECT customer, count(*), sum(try_cast(state AS int)) FROM orders WHERE {_OK} GROUP BY 1",
     f"SELECT count(*) FROM orders WHERE NOT {_OK}"),
    ("SELECT cast(state AS int) AS k, count(*) AS n FROM orders GROUP BY 1",
     f"SELECT try_cast(state AS int), count(*) FROM orders WHERE {_OK} GROUP BY 1",
     f"SELECT count(*) FROM orders WHERE NOT {_OK}"),
    ("SELECT o.id, c.id AS c FROM orders o LEFT JOIN customers c ON cast(o.state AS int) = c.level",
     f"""SELECT o.id, c.id FROM (SELECT * FROM orders WHERE {_OK}) o
         LEFT JOIN customers c ON try_cast(o.state AS int) = c.level""",
     f"SELECT count(*) FROM orders WHERE NOT {_OK}"),
    ("SELECT c.id, o.id AS o FROM customers c LEFT JOIN orders o ON cast(o.state AS int) = c.level",
     "SELECT c.id, o.id FROM customers c LEFT JOIN orders o ON try_cast(o.state AS int) = c.level",
     f"SELECT count(*) FROM orders WHERE NOT {_OK}"),
    # The primary key is that of the join: no stage before it.
    ("""SELECT i.sku, o.id FROM items i LEFT JOIN orders o ON o.id = i.order_id
        AND cast(o.state AS int) < 9""",
     """SELECT i.sku, o.id FROM items i LEFT JOIN orders o ON o.id = i.order_id
        AND try_cast(o.state AS int) < 9""",
     f"SELECT count(*) FROM orders WHERE NOT {_OK}"),
    ("""SELECT o.id, c.id AS c, cast(concat(o.state, cast(c.level AS string)) AS int) AS n
        FROM orders o LEFT JOIN customers c ON o.customer = c.id""",
     f"""SELECT o.id, c.id, try_cast(o.state || c.level AS int) AS n FROM orders o
        LEFT JOIN customers c ON o.customer = c.id WHERE NOT {_BOTH_FAIL}""",
     f"""SELECT count(*) FROM orders o LEFT JOIN customers c ON o.customer = c.id
        WHERE {_BOTH_FAIL}"""),
    ("SELECT state, count(*) AS n FROM orders GROUP BY state HAVING cast(state AS int) > 8",
     "SELECT state, count(*) FROM orders GROUP BY state HAVING try_cast(state AS int) > 8",
     f"SELECT count(DISTINCT state) FROM orders WHERE NOT {_OK}"),
    ("SELECT customer, cast(max(state) AS int) AS m FROM orders GROUP BY customer",
     f"""SELECT customer, try_cast(state AS int) FROM
         (SELECT customer, max(state) AS state FROM orders GROUP BY customer) WHERE {_OK}""",
     f"""SELECT count(*) FROM (SELECT max(state) AS state FROM orders GROUP BY customer)
         WHERE NOT {_OK}"""),
    ("SELECT id, cast(state AS int) AS n FROM orders UNION ALL SELECT id, level FROM customers",
     f"""SELECT id, try_cast(state AS int) FROM orders WHERE {_OK}
         UNION ALL SELECT id, level FROM customers""",
     f"SELECT count(*) FROM orders WHERE NOT {_OK}"),
    ("SELECT DISTINCT cast(state AS int) AS n FROM orders",
     f"SELECT DISTINCT try_cast(state AS int) FROM orders WHERE {_OK}",
     f"SELECT count(*) FROM orders WHERE NOT {_OK}"),
    (f"SELECT state, sum({_LARGE}) AS s FROM orders GROUP BY state",
     f"SELECT state, s FROM {_BY_STATE} WHERE {_FITS}",
     f"SELECT count(*) FROM {_BY_STATE} WHERE NOT {_FITS}"),
    (f"SELECT count(*) AS n, sum({_LARGE}) AS s FROM orders",
     f"""SELECT n, s FROM (SELECT count(*) AS n, sum(({_LARGE})::hugeint) AS s FROM orders)
         WHERE {_FITS}""",
     f"SELECT count(*) FROM (SELECT sum(({_LARGE})::hugeint) AS s FROM orders) WHERE NOT {_FITS}"),
    (f"""SELECT s, count(*) AS n FROM (SELECT state, sum({_LARGE}) AS s FROM orders
         GROUP BY state) GROUP BY s""".replace("state) GROUP", "state) t GROUP"),
     f"SELECT s, count(*) FROM {_BY_STATE} WHERE {_FITS} GROUP BY s",
     f"SELECT count(*) FROM {_BY_STATE} WHERE NOT {_FITS}"),
]  # fmt: skip

small = st.integers(0, 4)
VALUES: dict[str, Any] = {
    "customer": st.none() | small,
    "amount": st.none() | st.integers(-300, 300).map(lambda n: Decimal(n).scaleb(-2)),
    "weight": st.none() | st.sampled_from([0.1, 0.3, -0.0, 0.0, 1e15, -1e15, 7.25, math.nan]),
    "state": st.none() | st.sampled_from(["paid", "open", "", "7", "12"]),
    "country": st.none() | st.sampled_from(["de", "fr"]),
    "level": st.none() | st.integers(0, 2),
    "sku": st.sampled_from(["a", "b"]),
    "id": st.integers(0, 5),
    "order_id": st.integers(0, 5),
    "line": st.integers(0, 1),
    # Microseconds.
    "made": st.sampled_from([0, 1, 100, 200]),
    "since": st.none() | st.sampled_from([0, 1]),
    "rate": st.none() | st.sampled_from(["1", "1.000000000001", "1.000000000002"]).map(Decimal),
    "ratio": st.none() | st.sampled_from(["1", "1.000000000001", "1.00000000000201"]).map(Decimal),
}
# A column of a primary key has a value, in each of its ways.
FLOATS = st.sampled_from([0.1, -0.0, 0.0, math.nan, math.copysign(math.nan, -1.0)])


@st.composite
def change(draw: st.DrawFn) -> tuple[str, dict[str, Any], bool]:
    """A row that is now so in its table, or is deleted."""
    name = draw(st.sampled_from(list(TABLES)))
    row = {each: draw(FLOATS if name == "ticks" and each == "weight" else VALUES[each])
           for each in TABLES[name].names}  # fmt: skip
    return name, row, draw(st.integers(0, 3)) > 0


batches = st.lists(st.lists(change(), max_size=12), min_size=1, max_size=5)


def as_batch(changes: list[tuple[str, dict[str, Any], bool]], start: int) -> dict[str, pa.Table]:
    found = {}
    for name, schema in TABLES.items():
        rows = [(row, there, at) for at, (own, row, there) in enumerate(changes) if own == name]
        # Of what is deleted only the key is known.
        shown = [row if there else {k: row[k] for k in KEYS[name]} for row, there, _ in rows]
        table = pa.Table.from_pylist(shown, schema=schema)
        table = table.append_column(PRESENT, pa.array([there for _, there, _ in rows], pa.bool_()))
        for each in ("_topic", "_partition"):
            table = table.append_column(each, pa.array([0] * len(rows), pa.int64()))
        offsets = pa.array([start + at for _, _, at in rows], pa.int64())
        found[name] = table.append_column("_offset", offsets)
    return found


def by_duckdb(
    con: duckdb.DuckDBPyConnection, now: dict[str, dict[Any, dict[str, Any]]], sql: str
) -> list[tuple[Any, ...]]:
    for name, schema in TABLES.items():
        con.register(name, pa.Table.from_pylist(list(now[name].values()), schema=schema))
    return sorted(con.execute(sql).fetchall(), key=repr)


def close(value: Any) -> Any:
    """Floats as nearly as engines agree on them, decimals as numbers, NaN as what equals itself."""
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, float):
        return round(value, 4) + 0.0
    if isinstance(value, Decimal):
        return float(value)
    return value


def alike(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted((tuple(map(close, row)) for row in rows), key=repr)


@settings(max_examples=examples(8), suppress_health_check=list(HealthCheck))
@given(
    sql=st.sampled_from(VIEWS),
    batches=batches,
    shards=st.integers(1, 3),
    again=st.booleans(),
    # So that lists are parted into buckets, and cut, already where there are few rows.
    long=st.sampled_from([1, 256]),
    short=st.sampled_from([1, 64]),
)
def test_a_view_is_what_the_query_says(
    sql: str,
    batches: list[list[tuple[str, dict[str, Any], bool]]],
    shards: int,
    again: bool,
    long: int,
    short: int,
) -> None:
    with patch.object(lists, "LONG_LIST", long), patch.object(best, "SHORT", short):
        follow(sql, batches, shards, again=again)


def follow(
    sql: str,
    batches: list[list[tuple[str, dict[str, Any], bool]]],
    shards: int,
    *,
    again: bool,
    shown: str = "",
    aside: str = "SELECT 0",
) -> None:
    """Run a view over micro-batches, and compare it after each."""
    con = duckdb.connect(config={"threads": 1})
    view = Maintained(plan(sql, SCHEMAS), Arrow(TABLES, shards))
    now: dict[str, dict[Any, dict[str, Any]]] = {name: {} for name in TABLES}
    place = 0
    for changes in batches:
        view.run(as_batch(changes, place))
        place += len(changes)
        for name, row, there in changes:
            key = tuple(alike_in_sql(row[each]) for each in KEYS[name])
            if there:
                now[name][key] = row
            else:
                now[name].pop(key, None)
        assert alike(view.shown()) == alike(by_duckdb(con, now, shown or sql))
        told = view.set_aside()
        assert [(len(told),)] == by_duckdb(con, now, aside)
        assert all(row[set_aside.FAILED] and row[set_aside.AT] for row in told)
        if again:
            # The end of what was read comes once more, as at-least-once may have it.
            last = {(name, *(alike_in_sql(row[k]) for k in KEYS[name])): (name, row, there)
                    for name, row, there in changes}  # fmt: skip
            assert view.run(as_batch(list(last.values()), place)) == []
            place += len(last)


@settings(max_examples=examples(8), suppress_health_check=list(HealthCheck))
@given(
    view=st.sampled_from(FAILING),
    changes=st.lists(change(), max_size=40),
    cuts=st.lists(st.integers(1, 12), min_size=1),
    shards=st.integers(1, 3),
)
def test_a_row_that_cannot_be_computed_is_set_aside(
    view: tuple[str, str, str],
    changes: list[tuple[str, dict[str, Any], bool]],
    cuts: list[int],
    shards: int,
) -> None:
    """The view is what the query says of the others, however the log is cut; none stops it."""
    sql, shown, aside = view
    batches, left = [], changes
    for size in itertools.cycle(cuts):
        if not left:
            break
        batches.append(left[:size])
        left = left[size:]
    follow(sql, batches, shards, again=True, shown=shown, aside=aside)
