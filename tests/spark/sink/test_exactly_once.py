"""A micro-batch is in the log once or not at all, on both brokers."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.client.errors import FencedError, OutcomeUnknownError
from penstock.client.transacting import Transaction
from penstock.client.transactions import Ids
from penstock.spark.sink import (
    ExactlyOnce,
    FencedSinkError,
    SinkError,
    StaleCheckpointError,
    write,
    write_stream,
)
from penstock.spark.sink.exactly_once import DRIVER_BYTES
from penstock.testing import Broker
from penstock.wire.errors import ErrorCode
from tests.spark.sink.log import committed, end_of_marks, finished, make_topic, partition_of, values

PARTITIONS = 3


def numbers(spark: SparkSession, first: int, last: int, tasks: int = 3) -> DataFrame:
    text = F.col("id").cast("string")
    return spark.range(first, last, 1, tasks).select(text.alias("key"), text.alias("value"))


def expected(first: int, last: int) -> list[bytes]:
    return sorted(b"%d" % number for number in range(first, last))


def sink_of(
    bootstrap: str, topic: str | None, name: str | None = None, driver_bytes: int = DRIVER_BYTES
) -> ExactlyOnce:
    made = ExactlyOnce(
        name or f"q-{uuid4()}",
        bootstrap,
        topic=topic,
        query_id="life",
        driver_bytes=driver_bytes,
    )
    # As after a small batch: the first one is always left to tasks.
    made._is_large = driver_bytes <= 0
    return made


# Sent by the driver, or by tasks.
both_ways = pytest.mark.parametrize("driver_bytes", [DRIVER_BYTES, 0])


@both_ways
def test_rows_arrive_as_they_are_where_clients_expect_them(
    spark: SparkSession, bootstrap: str, driver_bytes: int
) -> None:
    # The records are of long ago: retention would take them.
    first, second = (make_topic(bootstrap, each, retention_ms="-1") for each in (PARTITIONS, 1))
    when = datetime(2026, 5, 6, 7, 8, 9, 123_000, tzinfo=UTC)
    rows: list[tuple[Any, ...]] = [
        (b"k%d" % number, None if number % 7 == 0 else b"v%d" % number, topic, None, [("h", b"1")])
        for number in range(50)
        for topic in (first, second)
    ]
    rows += [(None, b"placed", first, 2, None)]
    schema = (
        "key BINARY, value BINARY, topic STRING, partition INT, "
        "headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
    )
    df = spark.createDataFrame(rows, schema).repartition(3).withColumn("timestamp", F.lit(when))
    sink = sink_of(bootstrap, None, driver_bytes=driver_bytes)
    sink.write_batch(df, 0)
    assert sink.last is not None
    assert sink.last.records == 101
    sink.close()
    for topic, count in ((first, PARTITIONS), (second, 1)):
        found = committed(bootstrap, topic)
        wanted = [row for row in rows if row[2] == topic]
        assert sorted((record.key, record.value) for record in found if record.key) == sorted(
            (row[0], row[1]) for row in wanted if row[0]
        )
        for record in found:
            assert record.timestamp_ms == int(when.timestamp() * 1000)
            if record.key is None:
                assert (record.partition, record.value, record.headers) == (2, b"placed", ())
            else:
                assert record.partition == partition_of(record.key, count)
                assert record.headers == (("h", b"1"),)


@both_ways
def test_a_replayed_batch_is_skipped_and_an_old_one_refused(
    spark: SparkSession, bootstrap: str, driver_bytes: int
) -> None:
    topic = make_topic(bootstrap)
    sink = sink_of(bootstrap, topic, driver_bytes=driver_bytes)
    sink.write_batch(numbers(spark, 0, 10), 0)
    sink.write_batch(numbers(spark, 10, 20), 1)
    # In the same driver, and in the next one, which has only the log to go by.
    again = pickle.loads(pickle.dumps(sink))
    for replay in (sink, again):
        replay.write_batch(numbers(spark, 10, 20), 1)
        assert replay.last is not None
        assert replay.last.skipped
    again.write_batch(numbers(spark, 20, 30, tasks=1), 2)
    assert values(bootstrap, topic) == expected(0, 30)
    with pytest.raises(StaleCheckpointError, match="batch 1"):
        sink_of(bootstrap, topic, sink.name).write_batch(numbers(spark, 0, 1), 1)
    # Another checkpoint counts from zero again.
    fresh = ExactlyOnce(sink.name, bootstrap, topic=topic, query_id="another life")
    fresh.write_batch(numbers(spark, 30, 40), 0)
    assert values(bootstrap, topic) == expected(0, 40)
    fresh.close()


@both_ways
def test_a_driver_that_was_replaced_is_fenced(
    spark: SparkSession, bootstrap: str, driver_bytes: int
) -> None:
    topic = make_topic(bootstrap)
    old = sink_of(bootstrap, topic, driver_bytes=driver_bytes)
    old.write_batch(numbers(spark, 0, 10), 0)
    new = sink_of(bootstrap, topic, old.name)
    new.write_batch(numbers(spark, 10, 20), 1)
    with pytest.raises(FencedSinkError, match="another driver"):
        old.write_batch(numbers(spark, 10, 20), 1)
    new.write_batch(numbers(spark, 20, 30), 2)
    assert values(bootstrap, topic) == expected(0, 30)
    new.close()


def test_a_failed_batch_leaves_nothing_and_is_written_anew(
    spark: SparkSession, bootstrap: str, tmp_path: Path
) -> None:
    topic = make_topic(bootstrap)
    flag = str(tmp_path / "failed")

    def once_bad(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        if not Path(flag).exists():
            Path(flag).touch()
            raise ValueError("injected")

    # So large that the first records are on their way when it fails.
    fill = F.repeat(F.lit("x"), 50_000)
    rows = numbers(spark, 0, 1000, tasks=1).select("value", fill.alias("key"))
    rows = rows.mapInArrow(once_bad, "value STRING, key STRING")
    sink = sink_of(bootstrap, topic, driver_bytes=0)
    sink.write_batch(numbers(spark, 2000, 2001), 0)
    with pytest.raises(Exception, match="injected"):
        sink.write_batch(rows, 1)
    assert values(bootstrap, topic) == expected(2000, 2001)
    sink.write_batch(rows, 1)
    assert values(bootstrap, topic) == sorted(expected(0, 1000) + expected(2000, 2001))
    sink.close()


def test_a_batch_that_is_larger_than_the_driver_takes(
    spark: SparkSession, log_broker: Broker
) -> None:
    bootstrap = log_broker.bootstrap
    topic = make_topic(bootstrap)
    sink = sink_of(bootstrap, topic, driver_bytes=150_000)
    noise = F.sha2(F.col("id").cast("string"), 512)
    many = spark.range(0, 20_000, 1, 2).select(noise.alias("value"))
    few = spark.range(20_000, 20_010, 1, 2).select(noise.alias("value"))
    # Unexpectedly large, expectedly so, unexpectedly small, small.
    for number, rows in enumerate((many, many, few, few)):
        sink.write_batch(rows, number)
    found = values(bootstrap, topic)
    assert len(found) == 2 * 20_010
    assert len(set(found)) == 20_010
    sink.close()


@pytest.mark.parametrize("happened", [True, False])
def test_a_commit_of_unknown_outcome_is_looked_up(
    spark: SparkSession, bootstrap: str, happened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic(bootstrap)
    sink = sink_of(bootstrap, topic)
    real_end = Transaction.end
    calls: list[bool] = []

    def end(self: Transaction, *, commit: bool) -> Ids:
        calls.append(commit)
        if len(calls) > 1:
            return real_end(self, commit=commit)
        if happened:
            real_end(self, commit=commit)
        raise OutcomeUnknownError("the answer was lost")

    monkeypatch.setattr(Transaction, "end", end)
    sink.write_batch(numbers(spark, 0, 100), 0)
    assert sink.last is not None
    assert sink.last.skipped == happened
    assert len(calls) == (1 if happened else 2)
    assert values(bootstrap, topic) == expected(0, 100)
    sink.close()


def test_a_zombie_whose_commit_was_lost_leaves_its_successor_alone(
    spark: SparkSession, log_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap, name = log_broker.bootstrap, f"q-{uuid4()}"
    topic = make_topic(bootstrap)
    zombie, successor = sink_of(bootstrap, topic, name), sink_of(bootstrap, topic, name)

    def end(self: Transaction, *, commit: bool) -> Ids:
        # The answer does not come; when it asks again, another has the id.
        successor._held()
        fenced = FencedError("committing", ErrorCode.PRODUCER_FENCED)
        raise OutcomeUnknownError("the answer was lost") from fenced

    with monkeypatch.context() as patched:
        patched.setattr(Transaction, "end", end)
        with pytest.raises(FencedSinkError, match=name):
            zombie.write_batch(numbers(spark, 0, 100), 0)
    successor.write_batch(numbers(spark, 0, 100), 0)
    assert values(bootstrap, topic) == expected(0, 100)
    successor.close()


def test_a_batch_without_rows_costs_nothing(spark: SparkSession, log_broker: Broker) -> None:
    bootstrap = log_broker.bootstrap
    topic = make_topic(bootstrap)
    sink = sink_of(bootstrap, topic)
    sink.write_batch(numbers(spark, 0, 1), 0)
    before = end_of_marks(bootstrap)
    sink.write_batch(numbers(spark, 0, 0), 1)
    assert end_of_marks(bootstrap) == before
    sink.write_batch(numbers(spark, 1, 2), 2)
    assert values(bootstrap, topic) == expected(0, 2)
    sink.close()


def test_tables_are_written_whole_and_once_if_they_are_numbered(
    spark: SparkSession, log_broker: Broker
) -> None:
    bootstrap = log_broker.bootstrap
    topic, name = make_topic(bootstrap), f"table-{uuid4()}"
    df = numbers(spark, 0, 10)
    for _ in range(2):
        write(df, bootstrap=bootstrap, topic=topic, name=name, batch_id=7)
    assert values(bootstrap, topic) == expected(0, 10)
    told = write(df, bootstrap=bootstrap, topic=topic, mode="at-least-once")
    assert told.records == 10
    assert values(bootstrap, topic) == sorted(expected(0, 10) * 2)
    with pytest.raises(SinkError, match="go together"):
        write(df, bootstrap=bootstrap, topic=topic, name=name)


@pytest.mark.timeout(300)
def test_a_stream_from_topic_to_topic_over_restarts(
    spark: SparkSession, bootstrap: str, tmp_path: Path
) -> None:
    source, target = make_topic(bootstrap, 2), make_topic(bootstrap)
    name = f"stream-{uuid4().hex[:8]}"
    for step in range(2):
        write(numbers(spark, step * 100, step * 100 + 100), bootstrap=bootstrap, topic=source)
        rows = (
            spark.readStream.format("penstock")
            .option("kafka.bootstrap.servers", bootstrap)
            .option("subscribe", source)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", 60)
            .load()
            .select("key", "value")
        )
        finished(
            write_stream(
                rows,
                topic=target,
                name=name,
                checkpoint=tmp_path / "checkpoint",
                bootstrap=bootstrap,
            )
        )
    assert values(bootstrap, target) == expected(0, 200)
