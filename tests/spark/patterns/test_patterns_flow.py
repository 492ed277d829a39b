"""Patterns in a flow: out of order, late, silent until a heartbeat; cut into batches or not."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame

from penstock.spark import flow, pattern, stream, topic
from penstock.testing.flows import FlowTester

pytestmark = pytest.mark.timeout(600)

ORDERS = stream("orders", json="card string, what string, at timestamp", time="at",
                lateness="30 seconds")  # fmt: skip
# Ordered, and not paid within ten minutes.
FORGOTTEN = """
PARTITION BY card ORDER BY _time
MEASURES o.at AS at
PATTERN (o NOT p) WITHIN INTERVAL '10' MINUTE
DEFINE o AS what = 'order', p AS what = 'pay'
"""


def event(card: str, what: str, minute: int, second: int = 0) -> dict[str, Any]:
    return {"card": card, "what": what, "at": f"2026-01-01T00:{minute:02}:{second:02}Z"}


FIRST = [
    event("bob", "order", 1),
    event("ann", "order", 0, 45),  # out of order, but not late
    event("eve", "order", 2),
    event("bob", "pay", 1, 10),  # late: as if it were not there
    event("ann", "pay", 9),
]
THEN = [event("eve", "look", 11, 30)]


def test_silence_is_known_by_a_heartbeat_and_late_rows_are_aside(tester: FlowTester) -> None:
    @flow(inputs=ORDERS, output=topic("forgotten", key="card"), shards=2)
    def forgotten(orders: DataFrame) -> DataFrame:
        return pattern.match_recognize(orders, FORGOTTEN, events=["what"])

    @flow(inputs=ORDERS, output=topic("again", key="card"), shards=1)
    def again(orders: DataFrame) -> DataFrame:
        return pattern.match_recognize(orders, FORGOTTEN, events=["what"])

    tester.use(forgotten)
    tester.feed("orders", FIRST)
    tester.run()
    assert tester.records("forgotten") == []
    assert [each.json()["what"] for each in tester.records("orders.late")] == ["pay"]
    tester.feed("orders", THEN)
    tester.advance(3600)
    tester.feed("orders", [None], key=["penstock.heartbeat"])
    tester.run()
    found = {each["card"]: each for each in tester.rows("forgotten")}
    assert sorted(found) == ["bob", "eve"]
    assert [each["what"] for each in found["bob"]["events"]] == ["order"]
    # All in one micro-batch and one shard the same.
    tester.use(again)
    tester.run()
    assert sorted(map(repr, tester.rows("again"))) == sorted(map(repr, tester.rows("forgotten")))
