"""Rows whose plan is made once, to be written in many micro-batches.

What a task packs depends on how many partitions the topics have; the ids of the producer, which
brokers may change with each transaction, are put in by the driver. So the plan stays the same, down
to what Spark runs; only what it is told to read differs (`penstock.spark.source.told`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from penstock.spark.sink.columns import prepare
from penstock.spark.sink.tasks import PACKED, Job, Pack
from penstock.spark.source.told import ToldTooMuchError

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame, Row


class PreparedFailedError(Exception):
    """The job of a prepared plan has failed; nothing was sent."""


class PreparedTooMuchError(PreparedFailedError):
    """It reads more than one task should hold, or gives more than the driver sends by itself."""


class PreparedRows:
    """Records for topics, in one partition, from a plan that may be run again and again."""

    def __init__(self, rows: DataFrame, topics: Iterable[str]) -> None:
        self._rows = prepare(rows, None)
        self.topics = frozenset(topics)
        self._key: Any = None
        self._packed: RDD[Row] | None = None

    def packed(self, job: Job) -> list[Row]:
        """The rows as packed batches: one job, without planning."""
        key = sorted(job.counts.items()), job.limit_bytes
        if self._packed is None or key != self._key:
            self._packed, self._key = self._rows.mapInArrow(Pack(job), PACKED).rdd, key
        try:
            return self._packed.collect()
        except Exception as error:
            if ToldTooMuchError.__name__ in str(error):
                raise PreparedTooMuchError(str(error)) from error
            raise PreparedFailedError(str(error)) from error
