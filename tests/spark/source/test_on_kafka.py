"""The source on Apache Kafka: the same records as another client reads there."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.testing.apache_kafka import ApacheKafka
from tests.spark.feeding import (
    Collected,
    add_partitions,
    consumed,
    create,
    feed,
    feed_transaction,
    in_order,
    stream,
    table,
)

pytestmark = pytest.mark.timeout(300)


def test_records_and_transactions_of_kafka(
    spark: SparkSession, apache_kafka: ApacheKafka, topic: str, tmp_path: Path
) -> None:
    create(apache_kafka, topic, 2)
    for codec in ("none", "zstd"):
        records = [(b"k%d" % at if at % 3 else None, b"%d" % at * 9) for at in range(200)]
        feed(
            apache_kafka,
            topic,
            records,
            headers=[("h", None), ("i", b"1")],
            settings={"compression.type": codec},
        )
    for number in range(4):
        values = [b"%d-%d" % (number, at) for at in range(5)]
        commit = number % 2 == 0
        feed_transaction(apache_kafka, topic, values, commit=commit, name=f"{topic}-{number}")
    whole = consumed(apache_kafka, topic)
    assert len(whole) == 410
    assert in_order(table(spark, apache_kafka, topic, includeHeaders=True).collect()) == whole
    limits = {"includeHeaders": True, "maxOffsetsPerTrigger": 150}
    frame = stream(spark, apache_kafka, topic, **limits)
    assert Collected(frame, tmp_path / "c").finish() == whole
    # A partition that is new is found, and read from its beginning.
    add_partitions(apache_kafka, topic, 3)
    feed(apache_kafka, topic, [(b"new", b"%d" % at) for at in range(7)], partition=2)
    more = Collected(frame, tmp_path / "c").finish()
    assert [(record.partition, record.offset) for record in more] == [(2, at) for at in range(7)]
