"""The fixture for users' tests of flows, used as a user does: on a file of flows."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

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
