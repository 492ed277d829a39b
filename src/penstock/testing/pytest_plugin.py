"""Fixtures for pytest, there as soon as Penstock is installed.

`penstock_broker` is a broker of the test's own; `penstock_shared_broker` is one for the whole
run, for tests that use topics of their own. `penstock_flows` tests flows: see `testing.flows`; all
tests of a run share the one Spark session `penstock_spark`, whose settings are those that the
fixture `penstock_spark_settings` returns: override it to have others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from penstock.testing.broker import Broker
    from penstock.testing.flows import FlowTester


@pytest.fixture
def penstock_broker() -> Iterator[Broker]:
    """A broker of this test's own, empty, gone afterwards."""
    # Imported here: the plugin is loaded in every pytest run of everyone who has Penstock.
    from penstock.testing.broker import Broker

    with Broker() as broker:
        yield broker


@pytest.fixture(scope="session")
def penstock_shared_broker() -> Iterator[Broker]:
    """One broker for the whole run; give your topics names of their own."""
    from penstock.testing.broker import Broker

    with Broker() as broker:
        yield broker


@pytest.fixture(scope="session")
def penstock_spark_settings() -> dict[str, str]:
    """Settings of the session, for many small queries: each is compiled, and run once.

    So Java does not compile a second time for speed, has room for what it has compiled (or it
    throws that away and begins again), and expressions are interpreted instead of made to code.
    """
    return {
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": (
            "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=256m"
        ),
        "spark.ui.enabled": "false",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }


@pytest.fixture(scope="session")
def penstock_spark(penstock_spark_settings: dict[str, str]) -> Iterator[SparkSession]:
    """One Spark session for the whole run, small; starting it takes seconds."""
    from penstock.spark import session

    spark = session("penstock tests", "local[2]", **penstock_spark_settings)
    yield spark
    spark.stop()


@pytest.fixture
def penstock_flows(
    penstock_spark: SparkSession, penstock_broker: Broker, tmp_path: Path
) -> FlowTester:
    """Flows to test, with a broker of the test's own: feed rows, run, read rows."""
    from penstock.testing.flows import FlowTester

    return FlowTester(penstock_spark, penstock_broker, tmp_path / "penstock-flows")
