"""The environment of the source, which all queries of a session share."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.spark.registering import SET_BY_SPARK
from penstock.testing.flows import FlowTester

pytestmark = pytest.mark.timeout(300)


def test_a_query_puts_nothing_new_into_it(penstock_flows: FlowTester) -> None:
    """Two that do so at once would break it."""

    def environment() -> Any:
        manager = penstock_flows.spark._jsparkSession.sessionState().dataSourceManager()
        return manager.lookupDataSource("penstock").dataSourceCls().envVars()

    before = set(environment().keySet())
    assert before >= set(SET_BY_SPARK)
    assert not set(SET_BY_SPARK) & set(penstock_flows.spark.sparkContext.environment)
    penstock_flows.feed("numbers", [{"n": 1}])
    rows = (
        penstock_flows.spark.readStream.format("penstock")
        .option("kafka.bootstrap.servers", penstock_flows.broker.bootstrap)
        .option("subscribe", "numbers")
        .option("startingOffsets", "earliest")
        .load()
    )
    query = rows.writeStream.format("noop").trigger(availableNow=True).start()
    query.awaitTermination()
    assert sum(each["numInputRows"] for each in query.recentProgress) == 1
    after = environment()
    assert set(after.keySet()) == before
    # It was used, and the values are Spark's.
    assert all(after[name] for name in SET_BY_SPARK)
