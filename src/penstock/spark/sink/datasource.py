"""`df.write.format("penstock")` and `df.writeStream.format("penstock")`: at least once.

A writer of Spark's data sources learns neither the number of its micro-batch before it writes, nor
can it say which rows come to which task. So it sends as it goes, as Spark's own Kafka sink does;
exactly once is what `write_stream` and `ExactlyOnce` are for. Options are `topic`, and those of
Kafka's producer with `kafka.` before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.spark.sink.columns import check
from penstock.spark.sink.errors import SinkError
from penstock.spark.sink.target import Target
from penstock.spark.sink.tasks import Job, Send

_TOPIC = "topic"


@dataclass
class Sent(WriterCommitMessage):
    """What a task has written."""

    records: int
    bytes: int


def job_of(options: Mapping[str, str], schema: StructType) -> Job:
    """What the tasks need, from the options; SinkError says what is wrong with them."""
    given = {name.lower(): value for name, value in options.items()}
    # Spark puts these there by itself.
    for name in ("checkpointlocation", "path", "queryname"):
        given.pop(name, None)
    topic = given.pop(_TOPIC, None)
    wrong = [name for name in given if not name.startswith("kafka.")]
    if wrong:
        raise SinkError(
            f"there is no option {wrong[0]!r}",
            advice="Options are topic, and those of Kafka's producer with kafka. before them.",
        )
    check(schema, topic)
    return Job(Target.from_options("", given), topic, {})


class _Sending:
    """The part that is the same for streams and tables."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        topic = self._job.topic
        rows = (batch if topic is None else _without_topic(batch) for batch in iterator)
        records = size = 0
        for told in Send(self._job)(rows):
            records += sum(told.column(2).to_pylist())
            size += sum(told.column(3).to_pylist())
        return Sent(records, size)


class TableWriter(_Sending, DataSourceArrowWriter):
    """Writes a table; what was written before a failure stays."""


class StreamWriter(_Sending, DataSourceStreamArrowWriter):
    """Writes a stream; what a repeated batch had written before is there twice."""

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Nothing is left to do: what was written is there."""

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Nothing can be undone."""


def _without_topic(batch: pa.RecordBatch) -> pa.RecordBatch:
    at = batch.schema.get_field_index(_TOPIC)
    return batch if at < 0 else batch.drop_columns([_TOPIC])
