"""A flow whose function fails as if Java were gone does not take the others with it."""

from __future__ import annotations

import pytest
from pyspark.sql import DataFrame

from penstock.spark.flows.declare import flow, topic
from penstock.testing.flows import FlowTester
from tests.spark.flows.test_manager import NUMBERS, doubling, rows, running, wait_for

pytestmark = pytest.mark.timeout(600)


def test_a_refused_connection_of_the_user_s_own_stops_one_flow_only(tester: FlowTester) -> None:
    @flow(inputs=NUMBERS, output=topic("looked-up"))
    def looked_up(numbers: DataFrame) -> DataFrame:
        raise ConnectionRefusedError("the user's own database is down")

    tester.feed("numbers", rows(1, 2))
    with running(tester, looked_up, doubling("doubled-beside")) as manager:
        told = wait_for(manager, "looked_up", "failed")
        assert "the user's own database is down" in told.error
        wait_for(manager, "doubled", "running")
        assert manager.broken is None
