"""One Spark session for all tests of a worker: starting one takes longer than most tests."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from penstock.spark import session
from penstock.spark.archive import MODE_VARIABLE
from penstock.testing import Broker


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    # An archive is used where there is one; to make one would take time from the tests.
    os.environ.setdefault(MODE_VARIABLE, "use")
    made = session(
        name="tests",
        master="local[2]",
        **{
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.sql.shuffle.partitions": 2,
            "spark.ui.enabled": False,
        },
    )
    yield made
    made.stop()


@pytest.fixture(scope="session")
def log_broker() -> Iterator[Broker]:
    """A broker that tests share; each has topics of its own (`topic`)."""
    with Broker() as broker:
        yield broker


@pytest.fixture
def topic() -> str:
    """A name that no other test uses."""
    return f"t-{uuid.uuid4().hex[:12]}"
