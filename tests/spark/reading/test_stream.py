"""Typed reading in a stream: both outputs in one pass, and the bad ones counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.spark import reading
from penstock.spark.sink import write_stream
from penstock.testing import Broker
from tests.spark import feeding
from tests.spark.sink.log import finished


@pytest.mark.timeout(300)
def test_good_and_bad_go_their_ways_and_are_counted(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path
) -> None:
    out, dead = f"{topic}-out", f"{topic}-dead"
    for name in (topic, out, dead):
        feeding.create(log_broker, name)
    values = [b'{"id":%d}' % number if number % 5 else b'{"id":' for number in range(50)]
    feeding.feed(log_broker, topic, [(b"k", value) for value in values] + [(b"k", None)])
    rows = reading.json(
        feeding.stream(spark, log_broker, topic, includeHeaders="true"),
        "id BIGINT NOT NULL",
        metrics="orders",
    )
    routed = reading.routed(
        rows, topic=out, value=rows["id"].cast("string"), dead_letter_topic=dead
    )
    query = finished(
        write_stream(
            routed,
            name=topic,
            checkpoint=tmp_path / "checkpoint",
            bootstrap=log_broker.bootstrap,
        )
    )
    good = [record.value for record in feeding.consumed(log_broker, out)]
    assert good == [b"%d" % number for number in range(50) if number % 5]
    letters = feeding.consumed(log_broker, dead)
    assert [record.value for record in letters] == [b'{"id":'] * 10
    offsets = [int(dict(letter.headers)["penstock.error.offset"] or b"") for letter in letters]
    assert offsets == list(range(0, 50, 5))
    told = [progress.observedMetrics["orders"] for progress in query.recentProgress]
    assert sum(row["records"] for row in told) == 51
    assert sum(row["dead_letters"] for row in told) == 10
    assert sum(row["tombstones"] for row in told) == 1
