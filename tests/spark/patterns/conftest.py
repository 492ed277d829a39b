"""Flows with a broker of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.testing import Broker
from penstock.testing.flows import FlowTester


@pytest.fixture
def tester(penstock_spark: SparkSession, tmp_path: Path) -> Iterator[FlowTester]:
    with Broker() as broker:
        yield FlowTester(penstock_spark, broker, tmp_path / "flows")
