"""Flows whose records cannot be read, or tell of impossible times: nothing is lost in silence."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pyspark.sql import DataFrame

from penstock.spark import windows as w
from penstock.spark.flows.declare import Flow, flow, stream, topic
from penstock.testing.flows import START, FlowFailedError, FlowTester

# The first job of a session starts Python workers and compiles kernels.
pytestmark = pytest.mark.timeout(600)


def sums(schema: str, **more: Any) -> Flow:
    @flow(inputs=stream("orders", json=schema), output=topic("big"), name="big", **more)
    def big(orders: DataFrame) -> DataFrame:
        return orders.where("id > 0")

    return big


def test_a_schema_that_does_not_fit_stops_the_flow_and_loses_nothing(tester: FlowTester) -> None:
    tester.stops_at_dead_letters = True
    tester.use(sums("id bigint, total bigint"))
    rows = [{"id": each, "total": 1.5} for each in range(1, 6)]
    tester.feed("orders", rows)
    with pytest.raises(FlowFailedError) as caught:
        tester.run()
    assert str(caught.value).startswith(
        "flow 'big': all of the last 5 records are dead letters. The first: orders-0 at offset 0: "
        "field total is not bigint: 1.5"
    )
    assert "Mend the schema" in caught.value.advice
    # Nothing of the micro-batch was written, so the mended flow reads it again.
    assert (tester.records("big"), tester.records("orders.dead")) == ([], [])
    tester.use(sums("id bigint, total double"))
    tester.run()
    assert tester.rows("big") == rows
    # One poison record goes aside, and the flow goes on.
    tester.feed("orders", [{"id": 6, "total": "a lot"}, {"id": 7, "total": 2.0}])
    tester.run()
    assert [row["id"] for row in tester.rows("big")] == [1, 2, 3, 4, 5, 7]
    [letter] = tester.records("orders.dead")
    assert letter.headers["penstock.error.reason"] == b'field total is not double: "a lot"'
    assert letter.headers["penstock.error.flow"] == b"big"


def timed(**more: Any) -> Flow:
    schema = "kind string, user string, at timestamp"
    orders = stream("events", json=schema, time="at", lateness="1 minute", **more)

    @flow(inputs=orders, output=topic("minutes"), name="minutes")
    def minutes(events: DataFrame) -> DataFrame:
        return w.tumbling(events, "1 minute", by=["user"], values={"n": w.count()})

    return minutes


def event(after_s: float, **more: Any) -> dict[str, Any]:
    return {"kind": "order", "user": "ann", "at": START + timedelta(seconds=after_s), **more}


@pytest.mark.parametrize("where", [None, "kind = 'order'"])
def test_a_time_that_cannot_be_makes_no_other_late(tester: FlowTester, where: str | None) -> None:
    """As told by the tasks that read, and by Spark where it says which records count."""
    tester.use(timed(max_future="1 hour", time_unit="s", where=where))
    poison = [
        event(7200),
        {"kind": "order", "user": "eve", "at": 1_767_225_600_000},
        {"kind": "order", "user": "eve"},
    ]
    others = [{"kind": "other", "user": "eve"}] if where else []
    tester.feed("events", [event(1), *poison, *others, event(2), event(63)])
    status = tester.run()["minutes"]
    assert status.progress.late_rows == 0
    assert status.progress.dead_letters == 3
    reasons = [
        (each.headers["penstock.error.reason"] or b"").decode()
        for each in tester.records("events.dead")
    ]
    assert [each.split(";")[0] for each in reasons] == [
        "the event time at is 7200 s after its record was written, and may be 3600 s (max_future)",
        "the event time at is out of range: year 57971",
        "the event time at is missing or null",
    ]
    # The window closes by what the good ones say.
    tester.feed("events", [event(180)])
    tester.run()
    assert [(row["user"], row["n"]) for row in tester.rows("minutes")][:1] == [("ann", 2)]
