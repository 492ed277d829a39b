"""One Spark session for all tests of a worker: starting one takes longer than most tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from penstock.testing import Broker


@pytest.fixture(scope="session")
def spark(penstock_spark: SparkSession) -> SparkSession:
    """The one of the plugin: there can be only one session in a process."""
    return penstock_spark


@pytest.fixture(scope="session")
def log_broker() -> Iterator[Broker]:
    """A broker that tests share; each has topics of its own (`topic`)."""
    with Broker() as broker:
        yield broker


@pytest.fixture
def topic() -> str:
    """A name that no other test uses."""
    return f"t-{uuid.uuid4().hex[:12]}"
