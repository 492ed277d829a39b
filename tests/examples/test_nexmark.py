"""NEXMark's queries as flows, in several micro-batches, against DuckDB over the same records.

Times are disordered by up to three seconds and two are allowed, so some records are late. What
DuckDB is given are the records as they stand in the log; which of them are late, and which windows
are closed, it works out by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import datetime
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from penstock.testing import Broker
from penstock.testing.flows import FlowTester

pytestmark = pytest.mark.timeout(900)

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "nexmark"
EVENTS = 6_000
STEPS = (0, 2_500, EVENTS)
# So that there are some windows: sixty seconds in all.
GAP_US = 10_000
FLOWS = ("q1", "q3", "winning", "q4", "q5", "q8", "q11", "q20")
# Those whose state must go on from the first part to the second; the others read both at once.
EARLY = ("winning", "q5", "q11")


@pytest.fixture(scope="module")
def tester(
    penstock_spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FlowTester]:
    """All flows, run to the end of what there is, twice."""
    sys.path.insert(0, str(FOLDER))
    try:
        generator: Any = import_module("generator")
        house = generator.Auctions(gap_us=GAP_US, disorder_us=3_000_000)
        with Broker() as broker:
            tester = FlowTester(penstock_spark, broker, tmp_path_factory.mktemp("flows"))
            tester.load(FOLDER / "flows.py")
            for first, last in pairwise(STEPS):
                generator.write(broker.bootstrap, house, first, last)
                tester.run(*(FLOWS if last == EVENTS else EARLY))
            yield tester
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def oracle(tester: FlowTester) -> Iterator[duckdb.DuckDBPyConnection]:
    """The three topics in DuckDB; of the timed ones without what is late, and the watermark."""
    database = duckdb.connect()
    database.execute("SET TimeZone = 'UTC'")
    for kind in ("person", "auction", "bid"):
        rows = [
            {**each.json(), "_partition": each.partition, "_offset": each.offset}
            for each in tester.records(f"nexmark.{kind}")
        ]
        table = pa.Table.from_pylist(rows)
        database.register(f"{kind}_read", table)
        casts = "date_time::TIMESTAMPTZ AS date_time" + (
            ", expires::TIMESTAMPTZ AS expires" if kind == "auction" else ""
        )
        database.execute(f"CREATE TABLE {kind} AS SELECT * REPLACE ({casts}) FROM {kind}_read")
        database.execute(
            f"CREATE TABLE timed_{kind} AS SELECT * EXCLUDE (latest) FROM ("
            f"SELECT *, max(date_time) OVER (PARTITION BY _partition ORDER BY _offset ROWS BETWEEN "
            f"UNBOUNDED PRECEDING AND 1 PRECEDING) AS latest FROM {kind}) "
            f"WHERE latest IS NULL OR date_time >= latest - INTERVAL 2 SECOND"
        )
    database.execute(
        "CREATE TABLE watermark AS SELECT min(latest) - INTERVAL 2 SECOND AS closed "
        "FROM (SELECT max(date_time) AS latest FROM bid GROUP BY _partition)"
    )
    yield database
    database.close()


def told(oracle: duckdb.DuckDBPyConnection, sql: str) -> list[tuple[Any, ...]]:
    return sorted(oracle.execute(sql).fetchall())


def rows(tester: FlowTester, topic: str, *names: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(each[name] for name in names) for each in tester.rows(topic))


def current(tester: FlowTester, topic: str, *names: str) -> list[tuple[Any, ...]]:
    """The rows of a view that are there now."""
    return sorted(tuple(each[name] for name in names) for each in tester.table(topic).values())


def test_some_records_are_late(tester: FlowTester, oracle: duckdb.DuckDBPyConnection) -> None:
    late = {
        each: told(oracle, f"SELECT count(*) FROM {each}")[0][0]
        - told(oracle, f"SELECT count(*) FROM timed_{each}")[0][0]
        for each in ("person", "auction", "bid")
    }
    assert late["bid"] > 10
    # One late topic for several flows that read the same stream: each tells of all of them.
    positions = {
        (each.headers["penstock.late.partition"], each.headers["penstock.late.offset"])
        for each in tester.records("nexmark.bid.late")
    }
    assert len(positions) == late["bid"]


def test_q1(tester: FlowTester, oracle: duckdb.DuckDBPyConnection) -> None:
    expected = told(oracle, "SELECT auction, bidder, round(price * 0.908::DOUBLE, 3) FROM bid")
    found = rows(tester, "q1", "auction", "bidder", "price")
    assert sorted((*each[:2], round(each[2], 3)) for each in found) == expected


def test_q3(tester: FlowTester, oracle: duckdb.DuckDBPyConnection) -> None:
    expected = told(
        oracle,
        "SELECT name, city, state, auction.id FROM auction JOIN person ON seller = person.id "
        "WHERE category = 10 AND state IN ('OR', 'ID', 'CA')",
    )
    assert current(tester, "q3", "name", "city", "state", "id") == expected
    assert expected


def test_q4(tester: FlowTester, oracle: duckdb.DuckDBPyConnection) -> None:
    expected = told(
        oracle,
        "SELECT category, count(*), avg(final) FROM (SELECT max(price) AS final, category FROM "
        "auction JOIN bid ON auction.id = bid.auction WHERE bid.date_time BETWEEN "
        "auction.date_time AND expires GROUP BY auction.id, category) GROUP BY category",
    )
    found = current(tester, "q4", "category", "auctions", "price")
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert [each[2] for each in found] == pytest.approx([each[2] for each in expected])
    assert expected


def test_q5(tester: FlowTester, oracle: duckdb.DuckDBPyConnection) -> None:
    counted = (
        "SELECT time_bucket(INTERVAL 2 SECOND, date_time) - INTERVAL 2 SECOND * hop AS start, "
        "auction, count(*) AS n FROM timed_bid, range(5) AS hops(hop) GROUP BY ALL"
    )
    expected = told(
        oracle,
        f"WITH counted AS ({counted}) SELECT epoch_us(start), max(n) FROM counted, watermark "
        "WHERE start + INTERVAL 10 SECOND <= watermark.closed GROUP BY start",
    )
    found = sorted(
        (_micros(each["window_start"]), each["hot"][0]["count"]) for each in tester.rows("q5")
    )
    assert found == expected
    assert len(expected) > 10


def test_q8(tester: FlowTester, oracle: duckdb.DuckDBPyConnection) -> None:
    """All pairs, whether or not the windows are closed: a pair comes out when both are there."""
    expected = told(
        oracle,
        "SELECT p.id, p.name, epoch_us(time_bucket(INTERVAL 10 SECOND, p.date_time)) "
        "FROM timed_person p JOIN timed_auction a ON p.id = a.seller "
        "AND time_bucket(INTERVAL 10 SECOND, p.date_time) = "
        "time_bucket(INTERVAL 10 SECOND, a.date_time)",
    )
    found = sorted(
        (each["id"], each["name"], _micros(each["starttime"])) for each in tester.rows("q8")
    )
    assert found == expected
    assert expected


def test_q11(tester: FlowTester, oracle: duckdb.DuckDBPyConnection) -> None:
    expected = told(
        oracle,
        "WITH steps AS (SELECT bidder, date_time, CASE WHEN date_time - lag(date_time) OVER w < "
        "INTERVAL 10 SECOND THEN 0 ELSE 1 END AS fresh FROM timed_bid WINDOW w AS "
        "(PARTITION BY bidder ORDER BY date_time)), numbered AS (SELECT *, sum(fresh) OVER "
        "(PARTITION BY bidder ORDER BY date_time ROWS UNBOUNDED PRECEDING) AS number FROM steps) "
        "SELECT bidder, epoch_us(min(date_time)), count(*) FROM numbered GROUP BY bidder, number "
        "HAVING max(date_time) + INTERVAL 10 SECOND <= (SELECT closed FROM watermark)",
    )
    found = sorted(
        (each["bidder"], _micros(each["window_start"]), each["bids"]) for each in tester.rows("q11")
    )
    assert found == expected
    assert expected


def test_q20(tester: FlowTester, oracle: duckdb.DuckDBPyConnection) -> None:
    expected = told(
        oracle,
        "SELECT auction, bidder, price, seller FROM bid JOIN auction ON auction = auction.id "
        "WHERE category = 10",
    )
    assert rows(tester, "q20", "auction", "bidder", "price", "seller") == expected
    assert expected


def _micros(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1_000_000)
