"""Frames that look as if they came from topics."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from pyspark.sql import DataFrame, SparkSession

SCHEMA = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, "
    "timestampType INT, headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)
TIME = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
HEADERS = [("trace", b"abc"), ("none", None)]


def frame(spark: SparkSession, values: Sequence[bytes | None]) -> DataFrame:
    """The values as records of the topic `input`, at offsets from zero, with headers."""
    rows = [
        (b"key-%d" % number, value, "input", 3, number, TIME, 0, HEADERS)
        for number, value in enumerate(values)
    ]
    return spark.createDataFrame(rows, SCHEMA)
