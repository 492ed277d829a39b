"""`format("penstock")` for writing: one word away from Spark's own Kafka sink."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.testing import Broker
from tests.spark import feeding
from tests.spark.sink.log import finished, make_topic, values


def numbers(spark: SparkSession) -> DataFrame:
    text = F.col("id").cast("string")
    return spark.range(0, 20, 1, 2).select(text.alias("key"), text.alias("value"))


@pytest.mark.timeout(300)
def test_tables_and_streams_are_written(
    spark: SparkSession, log_broker: Broker, tmp_path: Path
) -> None:
    address = log_broker.bootstrap
    first, second = make_topic(address), make_topic(address)
    options = {"kafka.bootstrap.servers": address, "topic": first}
    numbers(spark).write.format("penstock").options(**options).mode("append").save()
    expected = sorted(b"%d" % number for number in range(20))
    assert values(address, first) == expected
    finished(
        feeding.stream(spark, log_broker, first)
        .select("key", F.col("value").cast("string").alias("value"), F.lit(second).alias("topic"))
        .writeStream.format("penstock")
        .option("kafka.bootstrap.servers", address)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
    )
    assert values(address, second) == expected


def test_what_cannot_be_written_is_said(spark: SparkSession, log_broker: Broker) -> None:
    into = numbers(spark).write.format("penstock").option("topic", "t")
    for options, mode, words in (
        ({}, "append", "bootstrap"),
        ({"kafka.bootstrap.servers": log_broker.bootstrap}, "overwrite", "overwritten"),
        ({"kafka.bootstrap.servers": "x:1", "topci": "t"}, "append", "topci"),
    ):
        with pytest.raises(Exception, match=words):
            into.options(**options).mode(mode).save()
