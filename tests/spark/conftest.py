"""One Spark session for all tests of a worker: starting one takes longer than most tests."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from penstock.spark.archive import MODE_VARIABLE
from penstock.testing import Broker

# An archive is used where there is one; to make one would take time from the tests.
os.environ.setdefault(MODE_VARIABLE, "use")


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
