"""The streams of a flow as one query: united for Spark, and parted again in each micro-batch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.classic.dataframe import DataFrame as ClassicFrame

from penstock.client import topics
from penstock.spark import reading, sql
from penstock.spark.reading.decoding import ASIDE, PACKED, SPAN, TIME, VALUE

if TYPE_CHECKING:
    from penstock.spark.flows.declare import Stream
    from penstock.spark.flows.inputs import Place

# The number of a record's stream.
STREAM: Final = "_penstock_stream"
# What the source gives of a record that it has not typed.
_RECORD: Final = (
    "key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers",
)  # fmt: skip
_AT_ONCE_BYTES: Final = 1 << 30
_AT_ONCE_ROWS: Final = 1000
_LARGEST: Final = "max.message.bytes"


def united(records: list[DataFrame]) -> DataFrame:
    """The records of all streams in one frame."""
    if len(records) == 1:
        return records[0]
    numbered = [
        rows.withColumnRenamed(VALUE, _value(at)).withColumn(STREAM, F.lit(at))
        for at, rows in enumerate(records)
    ]
    return reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), numbered)


def rows_at_once(place: Place, streams: Iterable[Stream]) -> int:
    """How many rows go from Java to Python at once: by the largest records of the topics."""
    with place.cluster() as cluster:
        found = [
            topics.configs(cluster, place.resolve(each.topic)).get(_LARGEST) for each in streams
        ]
    largest = max((int(each) for each in found if each), default=1)
    return max(1, min(_AT_ONCE_ROWS, _AT_ONCE_BYTES // largest))


def apart_of(records: DataFrame, moved: list[bool]) -> list[DataFrame] | None:
    """The records of each stream, none of which is read for another; None if it cannot be told.

    A micro-batch is a union for Spark, in the order of the streams, without those of which nothing
    new has come; of one alone there is no union.
    """
    if len(moved) == 1:
        return [records]
    whole = records._jdf.logicalPlan().rdd()
    if whole.dependencies().size() == 1:
        # What only carries the settings of the query.
        whole = whole.dependencies().apply(0).rdd()
    session, schema = records.sparkSession, records._jdf.schema()
    make = session._jsparkSession.internalCreateDataFrame

    def frame(rdd: Any) -> DataFrame:
        return ClassicFrame(make(rdd, schema, False), session)

    parts = whole.dependencies()
    if str(whole.getClass().getSimpleName()) == "UnionRDD":
        there = [frame(parts.apply(at).rdd()) for at in range(parts.size())]
    else:
        there = [records]
    if len(there) != sum(moved):
        return None
    own = iter(there)
    nothing = session.sparkContext._jsc.emptyRDD().rdd()
    return [next(own) if each else frame(nothing) for each in moved]


def parted(records: DataFrame, at: int, *, timed: bool) -> DataFrame:
    """The records of one stream, of those of all."""
    own = records.where(f"{STREAM} = {at}")
    if _value(at) not in records.columns:
        return own.select(*_RECORD)
    told = (TIME, SPAN, ASIDE, PACKED) if timed else ()
    more = [each for each in told if each in records.columns]
    return sql.select(
        own, {VALUE: _value(at)}, *reading.POSITION, reading.ERROR, reading.RAW, *more
    )


def _value(at: int) -> str:
    return f"{VALUE}_{at}"
