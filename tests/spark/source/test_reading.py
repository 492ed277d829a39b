"""What the source reads is what another client reads, as a table and as a stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.spark import lag
from penstock.testing import Broker
from tests.spark.feeding import (
    Collected,
    consumed,
    create,
    feed,
    feed_transaction,
    in_order,
    stream,
    table,
)

pytestmark = pytest.mark.timeout(300)
HEADERS = (("trace", b"\x00\xff"), ("empty", b""), ("none", None), ("trace", b"again"))


def fill(broker: Broker, topic: str, partitions: int = 3) -> None:
    """Records of all kinds, by every codec."""
    create(broker, topic, partitions, retention_ms="-1")
    for number, codec in enumerate(("none", "gzip", "snappy", "lz4", "zstd")):
        records = [
            (
                b"k%d" % at if at % 3 else None,
                b"v%d-%d" % (number, at) * (at % 9) if at % 5 else None,
            )
            for at in range(120)
        ]
        feed(broker, topic, records, settings={"compression.type": codec})
    feed(broker, topic, [(b"h", b"with headers")], headers=HEADERS, timestamp_ms=1_700_000_000_123)


def test_a_table_holds_what_another_client_reads(
    spark: SparkSession, log_broker: Broker, topic: str
) -> None:
    fill(log_broker, topic)
    found = table(spark, log_broker, topic, includeHeaders=True)
    rows = found.collect()
    assert in_order(rows) == consumed(log_broker, topic)
    assert {row.topic for row in rows} == {topic}
    assert {row.timestampType for row in rows} == {0}
    assert found.columns[:3] == ["key", "value", "topic"]
    assert "headers" not in table(spark, log_broker, topic).columns


def test_a_stream_reads_the_same_in_bounded_steps(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path
) -> None:
    fill(log_broker, topic)
    frame = stream(spark, log_broker, topic, maxOffsetsPerTrigger=200, includeHeaders=True)
    run = Collected(frame, tmp_path / "checkpoint")
    assert run.finish() == consumed(log_broker, topic)
    assert all(len(rows) <= 200 for rows in run.batches.values())
    assert len(run.batches) == 4
    behind = lag(run.query.lastProgress)
    assert behind is not None
    assert (behind.total_offsets, len(behind.partitions)) == (0, 3)
    first = lag(run.query.recentProgress[0])
    assert first is not None
    assert first.total_offsets == 401
    # Nothing new, and then something: a restart goes on exactly where it was.
    again = Collected(frame, tmp_path / "checkpoint")
    assert again.finish() == []
    before = set(consumed(log_broker, topic))
    feed(log_broker, topic, [(b"new", b"%d" % at) for at in range(10)])
    more = Collected(frame, tmp_path / "checkpoint").finish()
    assert set(more) == set(consumed(log_broker, topic)) - before
    assert len(more) == 10


def test_ranges_of_offsets_and_times(spark: SparkSession, log_broker: Broker, topic: str) -> None:
    # The records are old: retention would take them away.
    create(log_broker, topic, 2, retention_ms="-1")
    for at in range(50):
        feed(log_broker, topic, [(b"", b"%d" % at)], partition=at % 2, timestamp_ms=1000 + at)
    whole = consumed(log_broker, topic)
    spans = {
        "startingOffsets": f'{{"{topic}":{{"0":5,"1":-2}}}}',
        "endingOffsets": f'{{"{topic}":{{"0":9,"1":-1}}}}',
    }
    for splits in ({}, {"minPartitions": 7}, {"maxRecordsPerPartition": 3}):
        frame = table(spark, log_broker, topic, **spans, **splits)
        expected = [it for it in whole if it.partition == 1 or 5 <= it.offset < 9]
        assert in_order(frame.collect()) == expected
        if splits:
            assert frame.rdd.getNumPartitions() >= 7
    frame = table(spark, log_broker, topic, startingTimestamp=1010, endingTimestamp=1040)
    assert in_order(frame.collect()) == [it for it in whole if 1010 <= it.timestamp_ms < 1040]
    with pytest.raises(Exception, match="has no record as new as startingTimestamp, 9999"):
        table(spark, log_broker, topic, startingTimestamp=9999).collect()
    late = {"startingTimestamp": 9999, "startingOffsetsByTimestampStrategy": "latest"}
    assert table(spark, log_broker, topic, **late).count() == 0


def test_aborted_transactions_are_not_seen(
    spark: SparkSession, log_broker: Broker, topic: str
) -> None:
    create(log_broker, topic)
    for number in range(6):
        values = [b"%d-%d" % (number, at) for at in range(5)]
        feed_transaction(
            log_broker, topic, values, commit=number % 2 == 0, name=f"{topic}-{number}"
        )
    committed = consumed(log_broker, topic)
    assert len(committed) == 15
    assert in_order(table(spark, log_broker, topic).collect()) == committed
    everything = table(spark, log_broker, topic, **{"kafka.isolation.level": "read_uncommitted"})
    assert in_order(everything.collect()) == consumed(log_broker, topic, "read_uncommitted")
    assert everything.count() == 30


def test_topics_by_pattern_and_by_partition(
    spark: SparkSession, log_broker: Broker, topic: str
) -> None:
    for name in (f"{topic}-a", f"{topic}-b"):
        create(log_broker, name, 2)
        for part in (0, 1):
            feed(log_broker, name, [(b"k", f"{name}-{part}".encode())], partition=part)
    reader = spark.read.format("penstock").option("kafka.bootstrap.servers", log_broker.bootstrap)
    found = reader.option("subscribePattern", f"{topic}-.").load()
    assert {(row.topic, row.partition) for row in found.collect()} == {
        (f"{topic}-{letter}", part) for letter in "ab" for part in (0, 1)
    }
    reader = spark.read.format("penstock").option("kafka.bootstrap.servers", log_broker.bootstrap)
    one = reader.option("assign", f'{{"{topic}-a":[1]}}').load()
    assert [bytes(row.value) for row in one.collect()] == [f"{topic}-a-1".encode()]


def test_a_limit_ends_a_large_read_early(
    spark: SparkSession, log_broker: Broker, topic: str
) -> None:
    create(log_broker, topic)
    feed(log_broker, topic, [(None, b"x" * 1000)] * 20_000)
    small = {"kafka.fetch.max.bytes": 100_000, "kafka.max.partition.fetch.bytes": 100_000}
    assert len(table(spark, log_broker, topic, **small).limit(5).collect()) == 5
    assert table(spark, log_broker, topic, **small).count() == 20_000


def test_mistakes_are_told_in_one_sentence(
    spark: SparkSession, log_broker: Broker, topic: str
) -> None:
    with pytest.raises(Exception, match=f"there is no topic '{topic}' at"):
        table(spark, log_broker, topic).collect()
    create(log_broker, topic, 2)
    with pytest.raises(Exception, match="Did you mean startingOffsets"):
        table(spark, log_broker, topic, startingOffset="earliest").collect()
    with pytest.raises(Exception, match=f"does not name {topic}-1"):
        table(spark, log_broker, topic, startingOffsets=f'{{"{topic}":{{"0":0}}}}').collect()
    far = f'{{"{topic}":{{"0":7,"1":0}}}}'
    with pytest.raises(Exception, match="is 7, and its log ends at 0"):
        table(spark, log_broker, topic, startingOffsets=far).collect()
