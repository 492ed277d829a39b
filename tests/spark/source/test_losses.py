"""What tasks and plans do about records that are gone, without a Spark session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from penstock.client import fetching
from penstock.client.errors import OffsetGoneError
from penstock.records.columns.decode import HEADER_TYPE
from penstock.spark.source import reading
from penstock.spark.source.errors import DataLossError
from penstock.spark.source.options import parse
from penstock.spark.source.planning import Range
from penstock.spark.source.reading import Manner, read
from penstock.spark.source.stream import StreamReader
from penstock.spark.source.task import Task
from penstock.testing import Broker
from tests.spark.feeding import create, delete, delete_records, feed

# What Spark makes of the columns of the source.
SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestampType", pa.int32()),
        ("headers", HEADER_TYPE),
    ]
)


def manner(broker: Broker, *, strict: bool) -> Manner:
    given = {"kafka.bootstrap.servers": broker.bootstrap, "subscribe": "any"}
    access = parse(given, streaming=False).access
    return Manner(access, headers=True, fail_on_data_loss=strict, poll_timeout_s=60)


@pytest.fixture(autouse=True)
def closed(log_broker: Broker) -> Iterator[None]:
    """Connections stay open for the next task of a worker; this is none."""
    yield
    for strict in (True, False):
        reading._forget(manner(log_broker, strict=strict).access)


def values(how: Manner, *ranges: Range) -> list[bytes]:
    batches = read(how, Task(ranges), SCHEMA)
    return [value for batch in batches for value in batch.column("value").to_pylist()]


def numbered(count: int) -> list[tuple[bytes | None, bytes | None]]:
    return [(None, b"%d" % number) for number in range(count)]


def test_of_several_topics_the_deleted_one_is_named(
    log_broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is waited for in case it is only new.
    monkeypatch.setattr(fetching, "UNKNOWN_TOPIC_S", 0.2)
    gone = f"z-{topic}"
    for name in (topic, gone):
        create(log_broker, name)
        feed(log_broker, name, numbered(3))
    delete(log_broker, gone)
    ranges = (Range(topic, 0, 0, 3), Range(gone, 0, 1, 3))
    with pytest.raises(DataLossError, match=f"^{gone}-0 was to be read from offset 1") as caught:
        values(manner(log_broker, strict=True), *ranges)
    assert "failOnDataLoss" in str(caught.value)
    assert values(manner(log_broker, strict=False), *ranges) == [b"0", b"1", b"2"]


def test_a_log_that_is_shorter_than_planned(log_broker: Broker, topic: str) -> None:
    create(log_broker, topic)
    feed(log_broker, topic, numbered(5))
    planned = Range(topic, 0, 20, 30)
    with pytest.raises(DataLossError, match=f"{topic}-0 was to be read from offset 20.* at 5"):
        values(manner(log_broker, strict=True), planned)
    assert values(manner(log_broker, strict=False), planned) == []


def test_an_offset_that_is_there_again_is_neither_lost_nor_are_those_before_it_read(
    log_broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(log_broker, topic)
    feed(log_broker, topic, numbered(10))
    for strict in (True, False):
        how = manner(log_broker, strict=strict)
        fetcher = reading._fetcher(how.access)
        fetch, refusals = fetcher.fetch, [OffsetGoneError(topic, 0, 6, 0, 10)]

        def refused_once(*given: Any, refusals: Any = refusals, fetch: Any = fetch) -> Any:
            if refusals:
                raise refusals.pop()
            return fetch(*given)

        with monkeypatch.context() as patched:
            patched.setattr(fetcher, "fetch", refused_once)
            assert values(how, Range(topic, 0, 6, 10)) == [b"6", b"7", b"8", b"9"]


def test_many_tiny_records_come_in_several_batches(
    log_broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_BATCH_ROWS", 3)
    create(log_broker, topic)
    feed(log_broker, topic, numbered(10), headers=[("a", b"x"), ("b", None)])
    batches = list(read(manner(log_broker, strict=True), Task((Range(topic, 0, 0, 10),)), SCHEMA))
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert [row["value"] for row in rows] == [value for _, value in numbered(10)]
    assert {len(row["headers"]) for row in rows} == {2}
    assert max(batch.num_rows for batch in batches) == 3


def test_a_new_partition_that_has_lost_records_already(log_broker: Broker, topic: str) -> None:
    create(log_broker, topic)
    feed(log_broker, topic, numbered(5))
    delete_records(log_broker, topic, 0, before=2)
    given = {"kafka.bootstrap.servers": log_broker.bootstrap, "subscribe": topic}
    for strict in ("true", "false"):
        options = parse({**given, "failOnDataLoss": strict}, streaming=True)
        reader = StreamReader(options, StructType())
        try:
            if strict == "true":
                with pytest.raises(DataLossError, match=f"2 offsets of {topic}-0, which is new"):
                    reader.partitions({}, {topic: {"0": 5}})
                continue
            (task,) = reader.partitions({}, {topic: {"0": 5}})
            assert isinstance(task, Task)
            assert task.ranges == (Range(topic, 0, 2, 5),)
        finally:
            reader.stop()
