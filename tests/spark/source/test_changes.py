"""Topics that change while they are read: new partitions, lost records, damage, deletion."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from penstock.log.partition import PartitionId
from penstock.testing import Broker
from tests.harness.profiles import SOURCE_BATCH_RECORDS
from tests.spark.feeding import (
    PATIENCE_S,
    Collected,
    add_partitions,
    consumed,
    create,
    delete,
    delete_records,
    feed,
    in_order,
    stream,
    table,
)
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)


def numbered(first: int, count: int) -> list[tuple[bytes, bytes]]:
    return [(b"k%d" % at, b"v%d" % at) for at in range(first, first + count)]


def test_new_partitions_are_read_from_their_beginning(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path
) -> None:
    create(log_broker, topic)
    feed(log_broker, topic, numbered(0, 20))
    run = Collected(stream(spark, log_broker, topic), tmp_path / "c", processingTime="0 seconds")
    try:
        eventually(lambda: len(run.records()) == 20, PATIENCE_S)
        add_partitions(log_broker, topic, 3)
        for part in (1, 2):
            feed(log_broker, topic, numbered(part * 100, 10), partition=part)
        eventually(lambda: len(run.records()) == 40, PATIENCE_S)
        assert run.records() == consumed(log_broker, topic)
    finally:
        run.stop()


def test_starting_at_the_end_loses_nothing_from_then_on(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path
) -> None:
    create(log_broker, topic)
    feed(log_broker, topic, numbered(0, 20))
    frame = stream(spark, log_broker, topic, startingOffsets="latest")
    assert Collected(frame, tmp_path / "c").finish() == []
    # The first micro-batch kept the position: what arrived meanwhile is read.
    feed(log_broker, topic, numbered(20, 5))
    found = Collected(frame, tmp_path / "c").finish()
    assert [record.offset for record in found] == [20, 21, 22, 23, 24]


def test_the_first_micro_batch_may_run_again(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path
) -> None:
    """As after a kill between the plan of the first micro-batch and its commit."""
    create(log_broker, topic)
    feed(log_broker, topic, numbered(0, 20))
    frame = stream(spark, log_broker, topic, startingOffsets="latest")
    assert Collected(frame, tmp_path / "c").finish() == []
    for file in (tmp_path / "c" / "commits").iterdir():
        file.unlink()
    feed(log_broker, topic, numbered(20, 5))
    found = Collected(frame, tmp_path / "c").finish()
    assert [record.offset for record in found] == [20, 21, 22, 23, 24]


def test_lost_records_are_an_error_or_counted(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path
) -> None:
    create(log_broker, topic)
    feed(log_broker, topic, numbered(0, 20))
    frame = stream(spark, log_broker, topic)
    Collected(frame, tmp_path / "c").finish()
    feed(log_broker, topic, numbered(20, 20))
    delete_records(log_broker, topic, 0, before=30)
    run = Collected(frame, tmp_path / "c")
    with pytest.raises(StreamingQueryException) as caught:
        run.finish()
    said = str(caught.value)
    assert f"10 offsets of {topic}-0 are lost, from 20 on: its log starts at 30 now" in said
    assert "set failOnDataLoss to false" in said
    loose = stream(spark, log_broker, topic, failOnDataLoss=False)
    found = Collected(loose, tmp_path / "c").finish()
    assert [record.offset for record in found] == list(range(30, 40))


@pytest.mark.parametrize("records", [3, 60], ids=["shorter", "longer"])
def test_a_topic_made_anew_is_noticed(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path, records: int
) -> None:
    create(log_broker, topic)
    feed(log_broker, topic, numbered(0, 20))
    frame = stream(spark, log_broker, topic, **{"partition.metadata.cache.ttl.ms": -1})
    run = Collected(frame, tmp_path / "c", processingTime="0 seconds")
    try:
        eventually(lambda: len(run.records()) == 20, PATIENCE_S)
        delete(log_broker, topic)
        create(log_broker, topic)
        feed(log_broker, topic, numbered(500, records))
        with pytest.raises(StreamingQueryException) as caught:
            run.query.awaitTermination(int(PATIENCE_S))
    finally:
        run.stop()
    said = str(caught.value)
    assert f"{topic}-0" in said
    assert "offset 20" in said
    assert "new checkpoint folder" in said


def test_a_topic_made_anew_is_read_from_its_start_if_loss_is_allowed(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path
) -> None:
    create(log_broker, topic)
    feed(log_broker, topic, numbered(0, 20))
    frame = stream(spark, log_broker, topic, failOnDataLoss=False)
    Collected(frame, tmp_path / "c").finish()
    delete(log_broker, topic)
    create(log_broker, topic)
    feed(log_broker, topic, numbered(500, 3))
    run = Collected(frame, tmp_path / "c", processingTime="0 seconds")
    try:
        eventually(lambda: len(run.records()) == 3, PATIENCE_S)
        assert run.records() == consumed(log_broker, topic)
    finally:
        run.stop()


def test_a_deleted_topic_is_named(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path
) -> None:
    create(log_broker, topic)
    feed(log_broker, topic, numbered(0, 20))
    run = Collected(stream(spark, log_broker, topic), tmp_path / "c", processingTime="0 seconds")
    try:
        eventually(lambda: len(run.records()) == 20, PATIENCE_S)
        delete(log_broker, topic)
        with pytest.raises(StreamingQueryException) as caught:
            run.query.awaitTermination(int(PATIENCE_S))
    finally:
        run.stop()
    said = str(caught.value)
    assert f"{topic}-0 of the checkpoint is not there any more" in said
    assert "offset 20" in said
    assert "failOnDataLoss" in said


def test_a_damaged_batch_is_named(spark: SparkSession, tmp_path: Path) -> None:
    with Broker(str(tmp_path / "data")) as broker:
        create(broker, "events")
        feed(broker, "events", numbered(0, 10))
        feed(broker, "events", numbered(10, 10))
        broker.stop()
        (segment,) = (tmp_path / "data").rglob("events-0/*.log")
        damaged = bytearray(segment.read_bytes())
        at = damaged.index(b"v12")
        damaged[at] ^= 0xFF
        # The log would cut damage off at its end; it is in the middle of what was synced.
        segment.write_bytes(bytes(damaged))
        broker.start()
        with pytest.raises(Exception, match="events-0: the batch at offset 10 is damaged"):
            table(spark, broker, "events").collect()
        spans = {"endingOffsets": '{"events":{"0":10}}'}
        assert table(spark, broker, "events", **spans).count() == 10


def test_gaps_of_compaction_are_passed_over(spark: SparkSession, tmp_path: Path) -> None:
    with Broker(housekeeping_interval_ms=20) as broker:
        create(
            broker,
            "table",
            cleanup_policy="compact",
            segment_bytes="20000",
            min_cleanable_dirty_ratio="0.01",
        )
        for at in range(0, 2000, 100):
            feed(
                broker,
                "table",
                [
                    (b"k%d" % (number % 10), b"v" * 500 + b"%d" % number)
                    for number in range(at, at + 100)
                ],
                settings={"batch.num.messages": 10},
            )
        place = PartitionId("table", 0)
        eventually(
            lambda: broker.call(lambda server: server.store.partitions[place].size_bytes) < 200_000
        )
        whole = consumed(broker, "table")
        assert len(whole) < 1000
        small = {"maxOffsetsPerTrigger": SOURCE_BATCH_RECORDS, "minPartitions": 5}
        found = Collected(stream(spark, broker, "table", **small), tmp_path / "c").finish()
        # Compaction may have gone on in between, and it only takes away.
        after = consumed(broker, "table")
        assert set(after) <= set(found) <= set(whole)
        assert found[-1] == whole[-1]


def test_records_written_while_it_runs_all_arrive_once(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path
) -> None:
    create(log_broker, topic, 3)
    run = Collected(
        stream(spark, log_broker, topic, maxOffsetsPerTrigger=min(300, SOURCE_BATCH_RECORDS)),
        tmp_path / "c",
        processingTime="0 seconds",
    )

    def write() -> None:
        for at in range(0, 1000, 50):
            feed(log_broker, topic, numbered(at, 50))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        eventually(lambda: len(run.records()) >= 1000, PATIENCE_S)
    finally:
        writer.join()
        run.stop()
    rows = [row for rows in run.batches.values() for row in rows]
    assert in_order(rows) == consumed(log_broker, topic)


def test_a_query_outlives_restarts_of_the_broker(spark: SparkSession, tmp_path: Path) -> None:
    with Broker(str(tmp_path / "data")) as broker:
        create(broker, "events", 2)
        run = Collected(stream(spark, broker, "events"), tmp_path / "c", processingTime="0 seconds")
        try:
            feed(broker, "events", numbered(0, 20))
            eventually(lambda: len(run.records()) == 20, PATIENCE_S)
            broker.restart()
            feed(broker, "events", numbered(20, 20))
            eventually(lambda: len(run.records()) == 40, PATIENCE_S)
            broker.restart()
            feed(broker, "events", numbered(40, 20))
            eventually(lambda: len(run.records()) == 60, PATIENCE_S)
            assert run.records() == consumed(broker, "events")
        finally:
            run.stop()
