"""One clear error, with the topic and the remedy, and whether trying again helps."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.client.connection import UnreachableError
from penstock.client.errors import FencedError, RefusedError
from penstock.spark.sink import AtLeastOnce, ExactlyOnce, SinkError, SinkUnavailableError, sink
from penstock.spark.sink.errors import FencedSinkError, TaskError, as_sink_error, from_spark
from penstock.spark.sink.target import Target
from penstock.testing import Broker
from tests.spark.sink.log import committed, make_topic, values


def both(broker: Broker, topic: str | None) -> list[Any]:
    return [
        ExactlyOnce(f"q-{uuid4()}", broker.bootstrap, topic=topic, query_id="life"),
        AtLeastOnce(broker.bootstrap, topic=topic),
    ]


def test_a_topic_that_is_not_there(spark: SparkSession, log_broker: Broker) -> None:
    df = spark.range(2).select(F.col("id").cast("string").alias("value"))
    for into in both(log_broker, "nowhere"):
        with pytest.raises(SinkError, match=r"nowhere.*`penstock topics create nowhere`") as caught:
            into.write_batch(df, 0)
        assert not caught.value.retriable
    by_column = AtLeastOnce(log_broker.bootstrap)
    with pytest.raises(SinkError, match=r"nowhere-too.*`penstock topics create nowhere-too`"):
        by_column.write_batch(df.withColumn("topic", F.lit("nowhere-too")), 0)


def test_a_record_that_is_too_large_leaves_nothing(spark: SparkSession, log_broker: Broker) -> None:
    topic = make_topic(log_broker.bootstrap, 2, max_message_bytes="20000")
    df = spark.range(0, 4, 1, 2).select(
        F.when(F.col("id") == 3, F.lit(b"x").cast("binary")).alias("key"),
        F.when(F.col("id") == 3, F.repeat(F.lit("x"), 50_000)).otherwise("small").alias("value"),
    )
    into = ExactlyOnce(
        f"q-{uuid4()}",
        log_broker.bootstrap,
        topic=topic,
        options={"kafka.compression.type": "none"},
        query_id="life",
    )
    with pytest.raises(SinkError, match=f"{topic}.*max.message.bytes") as caught:
        into.write_batch(df, 0)
    assert not caught.value.retriable
    assert committed(log_broker.bootstrap, topic) == []
    into.write_batch(df.where("value = 'small'"), 0)
    assert values(log_broker.bootstrap, topic) == [b"small"] * 3
    into.close()


@pytest.mark.parametrize(
    ("select", "words"),
    [
        (["id AS value"], "value is bigint, not string or binary"),
        (["'x' AS key"], "no column value"),
        (["'x' AS value", "'y' AS hedaers"], "no column hedaers"),
        (["'x' AS value", "'y' AS partition"], "partition is string, not int"),
        (["'x' AS value", "5 AS topic"], "topic is int, not string"),
        (["'x' AS value", "map('a', 'b') AS headers"], "headers is map"),
        (["'x' AS value", "5 AS timestamp"], "timestamp is int, not timestamp"),
    ],
)
def test_columns_that_do_not_fit(
    spark: SparkSession, log_broker: Broker, select: list[str], words: str
) -> None:
    for into in both(log_broker, "t"):
        with pytest.raises(SinkError, match=words):
            into.write_batch(spark.range(1).selectExpr(*select), 0)


def test_nothing_says_where_to(spark: SparkSession, log_broker: Broker) -> None:
    for into in both(log_broker, None):
        with pytest.raises(SinkError, match="there is no topic"):
            into.write_batch(spark.range(1).selectExpr("'x' AS value"), 0)


def test_options_are_checked() -> None:
    target = Target.from_options(
        "127.0.0.1:1", {"kafka.compression.type": "zstd", "kafka.batch.size": "5000", "acks": "all"}
    )
    assert (target.codec, target.batch_bytes) == ("zstd", 5000)
    for options, words in (
        ({"kafka.compression.type": "rar"}, "rar"),
        ({"kafka.acks": "1"}, "acks"),
        ({"kafka.batch.size": "many"}, "many"),
        ({"kafka.compresion.type": "lz4"}, "compresion"),
    ):
        with pytest.raises(SinkError, match=words):
            Target.from_options("127.0.0.1:1", options)
    with pytest.raises(SinkError, match="no mode"):
        sink("perhaps", name="x", bootstrap="127.0.0.1:1")  # type: ignore[arg-type]
    with pytest.raises(SinkError, match="no name"):
        ExactlyOnce(" ", "127.0.0.1:1")


def test_errors_keep_their_meaning_on_the_way_from_a_task() -> None:
    passing = from_spark(RuntimeError(f"Traceback... {TaskError(UnreachableError('gone'))} x"))
    assert isinstance(passing, SinkUnavailableError)
    assert passing.retriable
    assert "gone" in str(passing)
    fenced = from_spark(RuntimeError(str(TaskError(FencedError("writing", 47)))))
    assert isinstance(fenced, FencedSinkError)
    refused = as_sink_error(RefusedError("writing to t-0", 29))
    assert "Allow this user" in str(refused)
    assert not refused.retriable
    for doing in ("looking for the topic 'a.b-1'", "writing to a.b-1-0"):
        assert "`penstock topics create a.b-1`" in str(as_sink_error(RefusedError(doing, 3)))
    assert from_spark(RuntimeError("something else")) is None


def test_nothing_is_written_after_the_end() -> None:
    """Whoever outlives its stop must not take the id from its successor."""
    ended = ExactlyOnce("q", "localhost:1", query_id="life")
    ended.end()
    with pytest.raises(SinkError, match="nothing is written any more after its end"):
        ended._held()
