"""A captured table in flows that say nothing of its columns: they have the table's types."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.spark.flows.declare import Batch, flow, stream, table
from penstock.testing.broker import Broker
from penstock.testing.flows import FlowFailedError, FlowTester
from penstock.testing.postgres import PostgresServer
from tests.capture.delivery.running import records
from tests.spark.types.tables import IN_STORES, OF_FLOWS, POSTGRES, captured
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(600)


class Collected:
    """An output that keeps its rows."""

    target = "a list"

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.types: dict[str, str] = {}

    def write(self, rows: DataFrame, batch: Batch) -> int:
        found = rows.collect()
        self.rows += found
        self.types = {field.name: field.dataType.simpleString() for field in rows.schema}
        return len(found)


@pytest.fixture
def tester(penstock_spark: SparkSession, tmp_path: Path) -> Iterator[FlowTester]:
    with Broker() as broker:
        yield FlowTester(penstock_spark, broker, tmp_path / "data")


def test_a_captured_table_has_its_types(
    tester: FlowTester, shared_postgres: PostgresServer
) -> None:
    url = shared_postgres.create_database()
    log = tester.broker.bootstrap
    with psycopg.connect(url, autocommit=True) as sql:
        sql.execute(POSTGRES)
        sql.execute("INSERT INTO kinds (id, day) VALUES (3, 'infinity')")
        sql.execute("CREATE TABLE rates (id bigint PRIMARY KEY, rate numeric(8,3))")
        sql.execute("INSERT INTO rates VALUES (2, 1.239)")
        with captured(log, url, "public.kinds", 3) as topic:
            rates = topic.replace("kinds", "rates")
            eventually(lambda: len(records(log, rates)) == 1)
            seen, joined = Collected(), Collected()

            @flow(inputs=stream(topic), output=seen)
            def kinds(rows: DataFrame) -> DataFrame:
                return rows.select("_op", "_after.*")

            @flow(inputs=(stream(topic), table(rates)), output=joined)
            def rated(rows: DataFrame, rates: DataFrame) -> DataFrame:
                return rows.select("_after.id", "_after.price").join(rates, "id")

            tester.use(kinds, rated)
            tester.run()
            check_types(seen)
            assert joined.types == {
                "id": "bigint",
                "price": "decimal(10,2)",
                "rate": "decimal(8,3)",
            }
            assert [(row.id, str(row.rate)) for row in joined.rows] == [(2, "1.239")]
            # Dead letters of both.
            reasons = {
                letter.headers["penstock.error.reason"]
                for letter in tester.records(f"{topic}.dead")
            }
            assert reasons == {b"field day does not fit date: infinity"}

            sql.execute("ALTER TABLE kinds ADD extra numeric(6,1)")
            sql.execute("INSERT INTO kinds (id, extra) VALUES (4, 7.5)")
            eventually(lambda: len(records(log, topic)) == 4)
            tester.run("kinds")
            assert seen.types["extra"] == "decimal(6,1)"
            assert [(row.id, str(row.extra)) for row in seen.rows[2:]] == [(4, "7.5")]

            check_written(tester, topic)
            check_unpublished(tester)


def check_unpublished(tester: FlowTester) -> None:
    """Who wants columns of a topic that nobody has published any for is told so."""

    @flow(inputs=stream("later"), output=Collected())
    def early(rows: DataFrame) -> DataFrame:
        return rows.select("_after.*")

    tester.use(early)
    with pytest.raises(FlowFailedError, match="no schema is published for later"):
        tester.run()


def check_types(seen: Collected) -> None:
    wanted = {name: kind for name, (kind, _) in IN_STORES.items()}
    for name, kind in seen.types.items():
        if name in OF_FLOWS:
            assert kind == OF_FLOWS[name][0]
        elif name != "_op":
            assert kind in SPARK[str(wanted[name])], name
    rows = {row.id: row for row in seen.rows}
    assert set(rows) == {2, 9007199254740993}
    found = rows[9007199254740993].asDict()
    for name, (_, value) in IN_STORES.items():
        expected = OF_FLOWS[name][1] if name in OF_FLOWS else value
        if name == "atz":
            assert found[name].timestamp() == value.timestamp()
        else:
            assert found[name] == expected, name


# Spark's names of Arrow's types.
SPARK = {
    "int16": "smallint", "int32": "int", "int64": "bigint", "float": "float", "double": "double",
    "bool": "boolean", "string": "string", "binary": "binary", "date32[day]": "date",
    "timestamp[us]": "timestamp_ntz", "timestamp[us, tz=UTC]": "timestamp",
    "decimal128(10, 2)": "decimal(10,2)", "decimal128(38, 18)": "decimal(38,18)",
    "decimal128(38, 10)": "decimal(38,10)", "decimal128(38, 2)": "decimal(38,2)",
}  # fmt: skip


def check_written(tester: FlowTester, topic: str) -> None:
    """Schemas that the user writes are compared with the table's."""
    wrong = {
        "id bigint, price double": "column 'price' is written double, and the table public.kinds "
        r"has numeric\(10,2\), which is read as decimal\(10,2\)",
        "id bigint, prise decimal(10,2)": "table public.kinds has no column 'prise'",
    }
    for number, (schema, words) in enumerate(wrong.items()):

        @flow(name=f"wrong{number}", inputs=stream(topic, debezium=schema), output=Collected())
        def written(rows: DataFrame) -> DataFrame:
            return rows.select("_after.*")

        tester.use(written)
        with pytest.raises(FlowFailedError, match=words):
            tester.run(f"wrong{number}")
