"""The records of a stream in one micro-batch as a DataFrame, without a query of Spark's.

Spark reads a source in Python by tasks that get a description each and give Arrow batches. The same
tasks run here behind a range of numbers, one for each: what they read is in the plan, or, where
the plan is prepared once, told when it runs (`penstock.spark.source.told`).

On their way tasks count what they read. A stream may be read several times in a micro-batch, and a
task may run twice: counts are by the range that was read, so that each counts once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.accumulators import AccumulatorParam

from penstock.spark.runtime.spark_internals import numbers
from penstock.spark.source.options import Options
from penstock.spark.source.planning import Range
from penstock.spark.source.table import read_task
from penstock.spark.source.task import Task
from penstock.spark.source.told import ToldTooMuchError, told

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

# Where the source has typed a record: its value, and the reason why it could not be read.
_VALUE: Final = "_penstock_value"
_ERROR: Final = "_error"
# What is told comes to one task, which may hold all of it: more of a stream is read by stages.
TOLD_BYTES: Final = 64 << 20
# Of so many records of a range it is kept when they were written, to tell how fresh results are.
SAMPLES: Final = 200

# The number of the stream, topic, partition and first offset.
Key = tuple[int, str, int, int]


@dataclass(frozen=True, slots=True)
class Count:
    """What a task has read of a range."""

    records: int
    bad: int
    # Those with a value, or an error; of what is not typed, all.
    valued: int
    # When some of them were written, microseconds.
    times: tuple[int, ...] = ()


class _ByRange(AccumulatorParam[dict[Key, Count]]):
    """Counts of all tasks; of a range that was read again the last counts."""

    def zero(self, value: dict[Key, Count]) -> dict[Key, Count]:
        return {}

    def addInPlace(  # noqa: N802 (Spark's name)
        self, value1: dict[Key, Count], value2: dict[Key, Count]
    ) -> dict[Key, Count]:
        value1.update(value2)
        return value1


class Counter:
    """What the tasks of one flow have read, as the driver hears of it."""

    def __init__(self, spark: SparkSession) -> None:
        self.accumulator: Accumulator[dict[Key, Count]] = spark.sparkContext.accumulator(
            {}, _ByRange()
        )
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Forget what was counted before."""
        with self._lock:
            self.accumulator.value = {}

    def counts(self) -> Mapping[Key, Count]:
        """What was read since then."""
        with self._lock:
            return dict(self.accumulator.value)


@dataclass(frozen=True)
class Reader:
    """What a task does, for `mapInArrow`: it gets the numbers of what it reads."""

    options: Options
    schema: StructType
    # The number of the stream in its flow.
    number: int
    # What each task reads; None if that is told when it runs.
    tasks: tuple[tuple[Range, ...], ...] | None
    counted: Accumulator[dict[Key, Count]] | None = None
    # The one of the flow, where that is told.
    checkpoint: str = ""

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for at in batch.column(0).to_pylist():
                yield from self._read(self._ranges(at))

    def _ranges(self, at: int) -> tuple[Range, ...]:
        if self.tasks is not None:
            return self.tasks[at]
        return tuple(told(self.checkpoint).ranges.get(self.number, ()))

    def _read(self, ranges: tuple[Range, ...]) -> Iterator[pa.RecordBatch]:
        if not ranges:
            return
        counts: dict[tuple[str, int], list[Any]] = {}
        size = 0
        for rows in read_task(self.options, Task(ranges), self.schema):
            size += rows.nbytes
            if self.tasks is None and size > TOLD_BYTES:
                raise ToldTooMuchError(f"more than {TOLD_BYTES:,} bytes of a stream at once")
            if self.counted is not None and len(rows):
                _count(rows, counts)
            yield rows
        if self.counted is not None:
            self.counted.add(dict(self._told(ranges, counts)))

    def _told(
        self, ranges: tuple[Range, ...], counts: Mapping[tuple[str, int], list[Any]]
    ) -> Iterator[tuple[Key, Count]]:
        for each in ranges:
            records, bad, valued, times = counts.get(each.place, (0, 0, 0, []))
            yield (self.number, *each.place, each.start), Count(records, bad, valued, _some(times))


class Scout(Reader):
    """Reads a stream for what it tells of event time; gives no rows."""

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in super().__call__(numbers):
            pass
        yield from ()


def _count(rows: pa.RecordBatch, counts: dict[tuple[str, int], list[Any]]) -> None:
    """A batch is of one partition."""
    place = rows.column("topic")[0].as_py(), rows.column("partition")[0].as_py()
    known = counts.setdefault(place, [0, 0, 0, []])
    known[0] += len(rows)
    if _ERROR in rows.schema.names:
        is_bad, is_there = rows.column(_ERROR).is_valid(), rows.column(_VALUE).is_valid()
        known[1] += is_bad.true_count
        known[2] += pc.or_(is_bad, is_there).true_count
    else:
        known[2] += len(rows)
    known[3].append(np.asarray(rows.column("timestamp").cast(pa.int64()).fill_null(0)))


def _some(times: Sequence[Any]) -> tuple[int, ...]:
    if not times:
        return ()
    whole = np.concatenate(times)
    step = -(-len(whole) // SAMPLES)
    return tuple(whole[::step].tolist())


def frame(spark: SparkSession, reader: Reader) -> DataFrame:
    """The rows that tasks read: one for each of what the plan has, or one that is told."""
    if reader.tasks is not None and not reader.tasks:
        return spark.createDataFrame([], reader.schema)
    if reader.tasks is None:
        return spark.range(0, 1, 1, 1).mapInArrow(reader, reader.schema)
    return numbers(spark, len(reader.tasks)).mapInArrow(reader, reader.schema)
