"""The fixture for users' tests of flows, used as a user does: on a file of flows."""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from penstock.errors import PenstockError
from penstock.spark import flow, stream, topic
from penstock.testing import FlowTester
from penstock.testing.flows import START

FLOWS = """
from pyspark.sql import functions as F

from penstock.spark import flow, stream, topic

clicks = stream("clicks", json="user string, page string")
bonus = F.lit(10)

@flow(inputs=clicks, output=topic("visits", key="user", compacted=True))
def visits(clicks):
    return clicks.select("user", "page", bonus.alias("points"), "_timestamp")
"""


@pytest.mark.timeout(600)
def test_feed_run_and_read(penstock_flows: FlowTester, tmp_path: Path) -> None:
    tester = penstock_flows
    file = tmp_path / "flows.py"
    file.write_text(FLOWS)
    [visits] = tester.load(file)
    assert visits.name == "visits"
    tester.feed("clicks", [{"user": "ann", "page": "/"}, {"user": "bob", "page": "/"}], key="user")
    tester.advance(timedelta(minutes=5))
    tester.feed("clicks", [{"user": "ann", "page": "/basket"}], key="user")
    assert tester.advance(60) == START + timedelta(minutes=6)
    assert [each.timestamp - START for each in tester.records("clicks")] == [
        timedelta(0), timedelta(0), timedelta(minutes=5)
    ]  # fmt: skip
    status = tester.run()["visits"]
    assert (status.state, status.progress.rows_in) == ("finished", 3)
    assert tester.rows("visits") == [
        {"user": "ann", "page": "/", "points": 10},
        {"user": "bob", "page": "/", "points": 10},
        {"user": "ann", "page": "/basket", "points": 10},
    ]
    assert tester.table("visits")["ann"]["page"] == "/basket"
    assert tester.rows("clicks.dead") == tester.rows("no.such.topic") == []
    # Nothing new, nothing written.
    tester.run()
    assert len(tester.rows("visits")) == 3


@pytest.mark.timeout(600)
def test_the_example_of_the_docs(
    penstock_flows: FlowTester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flows and their test as docs/flows.md shows them, with a table as capture writes it."""
    page = (Path(__file__).parents[2] / "docs" / "flows.md").read_text()
    blocks = re.findall(r"```python (\S+)\n(.*?)```", page, re.DOTALL)
    flows = next(text for word, text in blocks if word == "file=flows.py")
    test = next(text for word, text in blocks if "def test_enriched" in text)
    (tmp_path / "flows.py").write_text(flows)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(test, names)
    names["test_enriched"](penstock_flows)
    # A row of the table changes, and then is deleted.
    penstock_flows.feed_table("shop.customers", [{"id": "ann", "country": "FR"}], key="id")
    click = {"user": "ann", "page": "/", "at": "2026-01-01T00:00:00Z"}
    penstock_flows.feed("clicks", [click])
    penstock_flows.run("enriched")
    penstock_flows.feed_table("shop.customers", [{"id": "ann"}], key="id", deleted=True)
    penstock_flows.feed("clicks", [click])
    penstock_flows.run("enriched")
    countries = [row["country"] for row in penstock_flows.rows("clicks.enriched")]
    assert countries == ["DE", "FR", None]
    assert penstock_flows.records("shop.customers")[0].key == b'{"id":"ann"}'


@pytest.mark.timeout(600)
def test_a_table_with_types_is_fed_as_a_capture_does(penstock_flows: FlowTester) -> None:
    schema = "id bigint, price decimal(10,2), day date, at timestamp, tags array<string>"
    row = {"id": 1, "price": Decimal("1.10"), "day": "2026-11-17", "at": penstock_flows.now,
           "tags": ["a", None]}  # fmt: skip

    @flow(inputs=stream("shop.prices"), output=topic("prices.seen", key="id"))
    def prices(rows: DataFrame) -> DataFrame:
        return rows.select("_after.*").withColumn("kind", F.expr("typeof(price)"))

    penstock_flows.use(prices)
    penstock_flows.feed_table("shop.prices", [row], key="id", schema=schema)
    penstock_flows.run()
    [seen] = penstock_flows.rows("prices.seen")
    assert seen == {
        **row,
        "price": 1.1,
        "at": "2026-01-01T00:00:00.000000Z",
        "kind": "decimal(10,2)",
    }
    with pytest.raises(PenstockError, match=r"column 'price' is decimal\(10,2\), not '1.239'"):
        penstock_flows.feed_table("shop.prices", [{"id": 2, "price": "1.239"}], key="id",
                                  schema=schema)  # fmt: skip


def test_rows_without_their_key_are_refused(penstock_flows: FlowTester) -> None:
    with pytest.raises(PenstockError, match=r"feeding t: a row has no field 'id'.*'user'"):
        penstock_flows.feed("t", [{"user": "ann"}], key="id")
    with pytest.raises(PenstockError, match=r"feeding t: a row has no field 'id'"):
        penstock_flows.feed_table("t", [{"user": "ann"}], key=["user", "id"])
    with pytest.raises(PenstockError, match="2 rows have 1 keys"):
        penstock_flows.feed("t", [None, None], key=["ann"])
