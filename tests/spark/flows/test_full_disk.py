"""A real full disk under the checkpoint: one clear error, and with space again nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.spark.flows.declare import flow, stream, topic
from penstock.testing import Broker
from penstock.testing.flows import FlowFailedError, FlowTester
from tests.small_disk import fill, small_file_system

pytestmark = pytest.mark.timeout(600)


@flow(inputs=stream("lines", text=True), output=topic("copies"))
def copy(lines: DataFrame) -> DataFrame:
    return lines.select("value")


def test_a_full_disk_under_the_checkpoint(penstock_spark: SparkSession, tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", mebibytes=8) as disk, Broker() as broker:
        tester = FlowTester(penstock_spark, broker, disk / "flows")
        tester.use(copy)
        tester.feed("lines", ["one", "two"])
        tester.run()
        filler = fill(disk)
        tester.feed("lines", ["three"])
        with pytest.raises(FlowFailedError, match="no space is left") as failed:
            tester.run()
        assert str(disk / "flows" / "copy") in str(failed.value)
        assert "Free disk space" in failed.value.advice
        filler.unlink()
        tester.run()
        copied = [each["value"] for each in tester.rows("copies")]
        assert copied == ["one", "two", "three"]
