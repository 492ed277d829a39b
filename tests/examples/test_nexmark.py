"""NEXMark's queries as flows, in several micro-batches, against DuckDB over the same records.

Times are disordered by up to three seconds and two are allowed, so some records are late. What
DuckDB is given are the records as they stand in the log; which of them are late, and which windows
are closed, it works out by itself.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from time import time
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from penstock.testing import Broker
from penstock.testing.flows import FlowTester
from tests.harness.profiles import NEXMARK_EVENTS, some

pytestmark = [
    pytest.mark.timeout(900),
    # By NEXMark's definition joins of auctions and bids go on for ever.
    pytest.mark.filterwarnings("ignore::penstock.spark.UnboundedStateWarning"),
]

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "nexmark"
EVENTS = NEXMARK_EVENTS
STEPS = (0, EVENTS * 5 // 12, EVENTS)
# So that there are some windows: sixty seconds in all.
GAP_US = 60_000_000 // EVENTS
FLOWS = ["q0", "q1", "q2", "q3", "winning", "q4", "q5", "q6", "q7", "q8", "q11", "q12", "q13",
         "q20"]  # fmt: skip
# Those whose state must go on from the first part to the second; the others read both at once.
EARLY = some(["q5", "q11", "q6", "winning"], test=2)


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
                if last == EVENTS:
                    _let_time_pass(broker.bootstrap, house)
                tester.run(*(FLOWS if last == EVENTS else EARLY))
            yield tester
    finally:
        sys.path.remove(str(FOLDER))


def _let_time_pass(bootstrap: str, house: Any) -> None:
    """A bid in each partition a minute from now, so that windows by the log's own time close."""
    bid = next(row for topic, _, row in house.events(EVENTS, EVENTS + 50) if topic == "nexmark.bid")
    producer = Producer({"bootstrap.servers": bootstrap})
    for partition in (0, 1):
        stamp = round(time() * 1000) + 60_000
        producer.produce(
            "nexmark.bid", json.dumps(bid), partition=partition, timestamp=stamp
        )  # fmt: skip
    assert producer.flush(60) == 0


@pytest.fixture(scope="module")
def oracle(tester: FlowTester) -> Iterator[duckdb.DuckDBPyConnection]:
    """The three topics in DuckDB; of the timed ones without what is late, and the watermark."""
    database = duckdb.connect()
    database.execute("SET TimeZone = 'UTC'")
    for kind in ("person", "auction", "bid"):
        rows = [
            {
                **each.json(),
                "_partition": each.partition,
                "_offset": each.offset,
                "_timestamp": each.timestamp,
            }
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


def test_q0(tester: FlowTester, oracle: duckdb.DuckDBPyConnection) -> None:
    expected = told(oracle, "SELECT auction, bidder, price FROM bid")
    assert rows(tester, "q0", "auction", "bidder", "price") == expected


def test_q1(tester: FlowTester, oracle: duckdb.DuckDBPyConnection) -> None:
    expected = told(oracle, "SELECT auction, bidder, round(price * 0.908::DOUBLE, 3) FROM bid")
    found = rows(tester, "q1", "auction", "bidder", "price")
    assert sorted((*each[:2], round(each[2], 3)) for each in found) == expected


def test_q2(tester: FlowTester, oracle: duckdb.DuckDBPyConnection) -> None:
    expected = told(oracle, "SELECT auction, price FROM bid WHERE auction % 123 = 0")
    assert rows(tester, "q2", "auction", "price") == expected
    assert expected


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


def test_q6(tester: FlowTester, oracle: duckdb.DuckDBPyConnection) -> None:
    """Over what has closed by the time that both streams have reached."""
    expected = told(
        oracle,
        "WITH reached AS (SELECT max(date_time) AS latest FROM bid GROUP BY _partition UNION ALL "
        "SELECT max(date_time) FROM auction GROUP BY _partition), sold AS (SELECT a.id, a.seller, "
        "a.expires, max(price) AS final FROM timed_auction a JOIN timed_bid b ON a.id = b.auction "
        "AND b.date_time BETWEEN a.date_time AND a.expires "
        "WHERE a.expires < (SELECT min(latest) - INTERVAL 2 SECOND FROM reached) GROUP BY ALL) "
        "SELECT seller, id, avg(final) OVER (PARTITION BY seller ORDER BY expires, id "
        "ROWS BETWEEN 9 PRECEDING AND CURRENT ROW) FROM sold",
    )
    found = rows(tester, "q6", "seller", "id", "price")
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert [each[2] for each in found] == pytest.approx([each[2] for each in expected])
    sales = Counter(seller for seller, _, _ in expected)
    assert max(sales.values()) > 20, "no seller has more sales than are averaged over"


def test_q7(tester: FlowTester, oracle: duckdb.DuckDBPyConnection) -> None:
    expected = told(
        oracle,
        "SELECT epoch_us(start), max(price), count(*) FROM (SELECT *, "
        "time_bucket(INTERVAL 10 SECOND, date_time) AS start FROM timed_bid) GROUP BY start "
        "HAVING start + INTERVAL 10 SECOND <= (SELECT closed FROM watermark)",
    )
    found = sorted(
        (_micros(each["window_start"]), each["price"], each["bids"]) for each in tester.rows("q7")
    )
    assert found == expected
    assert len(expected) > 2


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


def test_q12(tester: FlowTester, oracle: duckdb.DuckDBPyConnection) -> None:
    """By the log's own time."""
    expected = told(
        oracle,
        "SELECT bidder, epoch_us(start), count(*) FROM (SELECT *, "
        "time_bucket(INTERVAL 10 SECOND, _timestamp) AS start FROM bid) GROUP BY bidder, start "
        "HAVING start + INTERVAL 10 SECOND <= (SELECT min(latest) FROM "
        "(SELECT max(_timestamp) AS latest FROM bid GROUP BY _partition))",
    )
    found = sorted(
        (each["bidder"], _micros(each["window_start"]), each["bids"]) for each in tester.rows("q12")
    )
    assert found == expected
    assert sum(each[2] for each in expected) > EVENTS // 2


def test_q13(tester: FlowTester, oracle: duckdb.DuckDBPyConnection) -> None:
    expected = told(
        oracle,
        "SELECT bid.auction, bidder, price, category FROM bid JOIN auction ON auction = auction.id",
    )
    assert rows(tester, "q13", "auction", "bidder", "price", "known") == expected


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
