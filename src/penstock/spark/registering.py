"""Makes the formats of Penstock known to a Spark session."""

from __future__ import annotations

from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Let `format("penstock")` be known to this session, for reading as a table or a stream."""
    from penstock.spark.source import PenstockSource

    spark.dataSource.register(PenstockSource)
