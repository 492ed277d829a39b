"""A tester of flows for each test, on the session that all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.testing.broker import Broker
from penstock.testing.flows import FlowTester


@pytest.fixture
def tester(spark: SparkSession, tmp_path: Path) -> Iterator[FlowTester]:
    with Broker() as broker:
        yield FlowTester(spark, broker, tmp_path / "data")
