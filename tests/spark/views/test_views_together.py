"""Small micro-batches, in which operators share a task: the same state and the same answer."""

from __future__ import annotations

import random
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession

from penstock.spark import flow, stream, topic
from penstock.spark.flows import operated, prepared
from penstock.spark.runtime.micro_batches import MicroBatch
from penstock.spark.state import Batch, chaining, entered, inspecting
from penstock.spark.state.layout import Layout
from penstock.spark.state.row_errors import as_written, is_of_row
from penstock.spark.views import View, sql
from penstock.testing.flows import FlowTester
from tests.harness.profiles import VIEW_BATCHES, some

pytestmark = pytest.mark.timeout(600)

ORDERS = "id bigint, customer bigint, amount double, note string, _deleted boolean"
CUSTOMERS = "id bigint, country string, _deleted boolean"
VIEWS = {
    # Rows and groups that cannot be computed, in places of several operators.
    "failing": """SELECT country, count(*) AS n, sum(cast(note AS int)) AS s,
        10 / (sum(cast(note AS int)) - 7) AS q
        FROM orders LEFT JOIN customers ON orders.customer = customers.id
        WHERE amount > 0 GROUP BY country""",
    "chain": """SELECT country, count(*) AS n, sum(amount) AS total, max(note) AS last
        FROM orders JOIN customers ON orders.customer = customers.id GROUP BY country""",
    # What is computed on the way parts the chain.
    "parted": """SELECT upper(country) AS land, count(DISTINCT note) AS notes, avg(amount * 2) AS a
        FROM orders JOIN customers ON orders.customer = customers.id
        WHERE length(note) > length(country) GROUP BY upper(country)""",
    # A filter above a join, of columns whose names have dots, and then something to compute.
    "present": """SELECT orders.id AS id, upper(country) AS land
        FROM orders LEFT JOIN customers ON orders.customer = customers.id
        WHERE country IS NOT NULL""",
    # NaN is not null.
    "nan": """SELECT note, max(amount) + 0 AS most
        FROM orders GROUP BY note HAVING max(amount) IS NOT NULL""",
    "left": """SELECT orders.id AS id, note, country
        FROM orders LEFT JOIN customers ON orders.customer = customers.id""",
    "union": """SELECT id, note AS text FROM orders WHERE amount > 3
        UNION ALL SELECT id, country FROM customers""",
    "one": "SELECT count(*) AS n, min(amount) AS least FROM orders",
}
# What is to be seen of them, where not all rows can be computed.
SHOWN = {
    "failing": """SELECT country, n, s, 10 / (s - 7) AS q FROM
        (SELECT country, count(*) AS n, sum(try_cast(note AS int)) AS s
         FROM orders LEFT JOIN customers ON orders.customer = customers.id
         WHERE amount > 0 AND (note IS NULL OR try_cast(note AS int) IS NOT NULL)
         GROUP BY country) WHERE s IS NULL OR s <> 7""",
}
KEYS = {"orders": "id", "customers": "id"}
Rows = dict[int, tuple[Any, ...]]


class Tables:
    """Two tables that change, a micro-batch at a time."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.orders: Rows = {}
        self.customers: Rows = {}

    def step(self) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        dice = self._dice
        changes: tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]] = [], []
        for _ in range(dice.randrange(0, 25)):
            id_ = dice.randrange(12)
            row: tuple[Any, ...] = (
                id_,
                dice.choice([None, dice.randrange(6)]),
                dice.choice([None, float("nan"), dice.randrange(8) / 2]),
                dice.choice(["a", "bcd", "efghij", "7", "12", None]),
            )
            self._change(self.orders, row, changes[0])
        for _ in range(dice.randrange(0, 8)):
            row = (dice.randrange(6), dice.choice(["de", "fr", None]))
            self._change(self.customers, row, changes[1])
        return changes

    def _change(self, rows: Rows, row: tuple[Any, ...], into: list[tuple[Any, ...]]) -> None:
        gone = self._dice.random() < 0.25
        if gone:
            rows.pop(row[0], None)
        else:
            rows[row[0]] = row
        # One change for each key: these rows have no place in a log that would order them.
        into[:] = [each for each in into if each[0] != row[0]] + [(*row, gone)]


def query(spark: SparkSession, name: str, tables: Tables) -> list[str]:
    """What Spark says of the tables as they are."""
    for title, rows, schema in (
        ("orders", tables.orders, ORDERS),
        ("customers", tables.customers, CUSTOMERS),
    ):
        full = [(*each, False) for each in rows.values()]
        spark.createDataFrame(full, schema).createOrReplaceTempView(title)
    return sorted(str(tuple(row)) for row in spark.sql(SHOWN.get(name, VIEWS[name])).collect())


class Followed:
    """A view in a folder of its own: which micro-batches are small is chosen one by one."""

    def __init__(self, spark: SparkSession, name: str, folder: Path) -> None:
        self._spark, self._name, self._folder = spark, name, folder
        self.shown: dict[str, tuple[Any, ...]] = {}

    def step(self, batch_id: int, changes: Any, *, together: bool) -> None:
        frames = [
            self._spark.createDataFrame(rows, schema)
            for rows, schema in zip(changes, (ORDERS, CUSTOMERS), strict=True)
        ]
        layout = Layout(str(self._folder), 3, "s3")
        guarded = inspecting.count_set_aside(layout, batch_id) > 0
        try:
            view, rows = self._changes(frames, layout, batch_id, together, guarded=guarded)
        except PySparkException as error:
            if guarded or not is_of_row(error):
                raise
            view, rows = self._changes(frames, layout, batch_id, together, guarded=True)
        for row in rows:
            if row["_deleted"]:
                del self.shown[row["_key"]]
            else:
                self.shown[row["_key"]] = tuple(row[name] for name in view.columns)

    def _changes(
        self,
        frames: list[DataFrame],
        layout: Layout,
        batch_id: int,
        together: bool,
        *,
        guarded: bool,
    ) -> tuple[View, list[Row]]:
        batch = Batch(
            folder=layout.folder, batch_id=batch_id, shards=3, together=together, guarded=guarded
        )
        with ExitStack() as stack:
            stack.enter_context(entered(batch))
            if guarded:
                stack.enter_context(as_written(self._spark))
            wanted = dict(zip(KEYS, frames, strict=True))
            used = {name: rows for name, rows in wanted.items() if name in VIEWS[self._name]}
            view = sql(VIEWS[self._name], {name: KEYS[name] for name in used}, **used)
            return view, view.changes().collect()

    @property
    def told(self) -> list[str]:
        return sorted(map(str, self.shown.values()))


@pytest.mark.parametrize("name", some(list(VIEWS), test=3))
def test_a_view_is_the_same_whichever_way_its_micro_batches_go(
    spark: SparkSession, tmp_path: Path, name: str, seed: int
) -> None:
    dice = random.Random(seed)
    tables = Tables(dice)
    view = Followed(spark, name, tmp_path)
    for batch_id in range(VIEW_BATCHES):
        changes = tables.step()
        # In turns: each way finds the state of the other.
        view.step(batch_id, changes, together=batch_id % 2 == dice.randrange(2))
        assert view.told == query(spark, name, tables)


def test_a_micro_batch_that_is_run_again_the_other_way_gives_the_same(
    spark: SparkSession, tmp_path: Path
) -> None:
    tables = Tables(random.Random(5))
    view = Followed(spark, "chain", tmp_path)
    for batch_id in range(3):
        changes = tables.step()
        before = dict(view.shown)
        view.step(batch_id, changes, together=True)
        after, view.shown = view.shown, before
        view.step(batch_id, changes, together=False)
        # As text: a NaN is not equal to itself.
        assert view.told == sorted(map(str, after.values()))
    assert view.told == query(spark, "chain", tables)


@pytest.mark.parametrize(
    ("most", "most_rows", "expected"),
    some(
        [
            # The second is begun again: five orders, and a row of the join for each, are too many.
            (operated.TOGETHER_RECORDS, 8, [True, True, False, True]),
            (3, chaining.MOST_ROWS, [True, False, True]),
            (operated.TOGETHER_RECORDS, chaining.MOST_ROWS, [True, True, True]),
        ],
        test=1,
    ),
)
def test_a_flow_chooses_by_the_number_of_records(
    tester: FlowTester,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    most_rows: int,
    expected: list[bool],
) -> None:
    monkeypatch.setattr(operated, "TOGETHER_RECORDS", most)
    monkeypatch.setattr(chaining, "MOST_ROWS", most_rows)
    monkeypatch.setattr(prepared, "PREPARED_RECORDS", 0)
    # The time zone of a session is that of its user.
    zone = "UTC" if most_rows == chaining.MOST_ROWS else "Europe/Berlin"
    tester.spark.conf.set("spark.sql.session.timeZone", zone)
    chosen: list[bool] = []
    real = operated.Operated._is_small

    def noted(self: operated.Operated, batch: MicroBatch) -> bool:
        chosen.append(real(self, batch))
        return chosen[-1]

    monkeypatch.setattr(operated.Operated, "_is_small", noted)

    @flow(
        inputs=[
            stream("orders", changelog="id bigint, customer bigint, amount bigint, at timestamp"),
            stream("customers", changelog="id bigint, country string"),
        ],
        output=topic("totals", key="_key", compacted=True),
    )
    def totals(orders: DataFrame, customers: DataFrame) -> DataFrame:
        text = """SELECT country, sum(amount) AS total, max(at) AS last FROM orders
            JOIN customers ON orders.customer = customers.id GROUP BY country"""
        return sql(text, KEYS, orders=orders, customers=customers).changes()

    tester.use(totals)
    tester.feed("customers", [{"id": 1, "country": "de"}, {"id": 2, "country": "fr"}],
                key=["1", "2"])  # fmt: skip

    def order(id_: int, customer: int) -> dict[str, Any]:
        at = tester.now + timedelta(seconds=id_)
        return {"id": id_, "customer": customer, "amount": id_, "at": at}

    tester.feed("orders", [order(1, 1)], key=["1"])
    try:
        tester.run()
        tester.feed("orders", [order(at, 2) for at in range(2, 7)],
                    key=[str(at) for at in range(2, 7)])  # fmt: skip
        tester.run()
        tester.feed("orders", [None], key=["6"])
        tester.run()
    finally:
        tester.spark.conf.set("spark.sql.session.timeZone", "UTC")
    found = {
        each["country"]: (each["total"], datetime.fromisoformat(each["last"]))
        for each in tester.table("totals").values()
    }
    seconds = [tester.now + timedelta(seconds=each) for each in (1, 5)]
    assert found == {"de": (1, seconds[0]), "fr": (14, seconds[1])}
    assert chosen == expected
