"""The tables of a flow: changelog topics, read as what they say now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

from penstock.client.metadata import LATEST, Metadata, offsets
from penstock.spark import reading
from penstock.spark.flows.declare import Table
from penstock.spark.flows.errors import FlowError
from penstock.spark.flows.inputs import FORMAT, Place, failing, typed
from penstock.spark.reading import decoding
from penstock.spark.source.options import parse
from penstock.spark.source.table import TableReader, read_task, typing_in_task

_VALUE: Final = decoding.VALUE
# More tasks than this do not read a table any faster.
_MAX_SHARES: Final = 8


class TableTooLargeError(FlowError):
    """A table has more rows than it may have."""


class ReadNow:
    """Reads a topic inside tasks, from its start to what is its end at that moment.

    Spark plans a table once per query and would go on with the offsets of then. Each task reads
    its share of the partitions.
    """

    def __init__(self, options: Mapping[str, str], schema: T.StructType, shares: int) -> None:
        self._options = dict(options)
        self._schema = schema
        self._shares = shares

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        options = parse(self._options, streaming=False)
        planned = TableReader(options, self._schema).partitions()
        for batch in batches:
            for share in batch.column(0).to_pylist():
                for part in planned[share :: self._shares]:
                    yield from read_task(options, part, self._schema)


def table_rows(spark: SparkSession, place: Place, declared: Table) -> DataFrame:
    """A changelog topic as what it says now: read anew whenever the DataFrame is computed."""
    options = place.source(
        declared.topic,
        {"startingOffsets": "earliest", "endingOffsets": "latest", **declared.options},
    )
    options["includeHeaders"] = "false"
    schema = spark.read.format(FORMAT).options(**options).load().schema
    shares = max(1, min(spark.sparkContext.defaultParallelism, _MAX_SHARES))
    tasks = spark.range(0, shares, 1, shares)
    records = tasks.mapInArrow(ReadNow(options, schema, shares), schema)
    # All records of a key are in one partition, where the offset is their order.
    last = records.groupBy("key").agg(
        F.max_by(F.struct("value", "topic", "partition", "timestamp", "offset"), "offset").alias(
            "l"
        )
    )
    last = last.where("key is not null and l.value is not null").select("key", "l.*")
    if declared.reading.published is not None:
        return _captured_columns(last, declared, options)
    return _table_columns(last, declared)


def _captured_columns(last: DataFrame, declared: Table, options: Mapping[str, str]) -> DataFrame:
    """The rows of a table whose schemas are published."""
    how = declared.reading
    typing = decoding.typing_of("debezium", how.schema, None, how.published)
    assert typing is not None
    decode = DecodeNow(typing.as_option(), options)
    rows = reading.good(failing(last.mapInArrow(decode, typing.frame), "table"))
    rows = rows.withColumn(_VALUE, F.col(f"{_VALUE}._after")).where(F.col(_VALUE).isNotNull())
    return _with_key(rows, [F.col(f"{_VALUE}.*")], declared)


class DecodeNow:
    """Types records inside tasks, as the source does it where they are a stream."""

    def __init__(self, typing: str, options: Mapping[str, str]) -> None:
        self._typing = typing
        self._options = dict(options)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        typing = typing_in_task(self._typing, parse(self._options, streaming=False))
        return map(typing.decode, batches)


def _table_columns(last: DataFrame, declared: Table) -> DataFrame:
    how = declared.reading
    metrics = f"table-{declared.topic}"
    if how.format == "debezium":
        # Of a change only the row afterwards counts; capture may put it under `payload`.
        schema = f"after struct<{_as_struct(how.schema)}>, op string"
        wrapped = f"{schema}, payload struct<{_as_struct(schema)}>"
        rows = reading.json(last, wrapped, into=_VALUE, metrics=metrics)
        rows = reading.good(failing(rows, "table"))
        after = F.coalesce(F.col(f"{_VALUE}.payload.after"), F.col(f"{_VALUE}.after"))
        rows = rows.withColumn(_VALUE, after).where(F.col(_VALUE).isNotNull())
    elif how.format in {"json", "avro"}:
        rows = reading.good(failing(typed(last, how, metrics=metrics), "table"))
    else:
        rows = last.select(F.col("value").alias("value"), "key")
        return _with_key(rows, [F.col("value")], declared)
    return _with_key(rows, [F.col(f"{_VALUE}.*")], declared)


def _with_key(rows: DataFrame, columns: list[Column], declared: Table) -> DataFrame:
    if declared.key is None:
        return rows.select(*columns)
    text = F.col("key").cast("string")
    key = (captured_key(text) if declared.reading.format == "debezium" else text).alias(
        declared.key
    )
    chosen = rows.select(*columns, F.col("key").alias("_penstock_key"))
    if declared.key in chosen.columns:
        # The value has it too, and with its type.
        return chosen.drop("_penstock_key")
    return rows.select(key, *columns)


def captured_key(key: Column) -> Column:
    """The key of a change event: of one field its value as text, otherwise the key as it is.

    Capture writes keys as JSON objects, which may be under `payload`, beside their schema.
    """
    fields = F.from_json(key, "map<string,string>")
    # What is no JSON object has no fields: Spark gives null, or a map of nothing.
    wrapped = (F.size(fields) == 2) & F.map_contains_key(fields, "schema")
    payload = F.get(F.map_values(F.map_filter(fields, lambda name, _: name == "payload")), F.lit(0))
    inner = F.when(wrapped & payload.startswith("{"), payload).otherwise(key)
    inner_fields = F.from_json(inner, "map<string,string>")
    return F.when(F.size(inner_fields) == 1, F.map_values(inner_fields)[0]).otherwise(inner)


def _as_struct(schema: str) -> str:
    return T.StructType.fromDDL(schema).simpleString().removeprefix("struct<").removesuffix(">")


class Snapshot:
    """A table kept in Spark's memory between micro-batches, and read anew when it has changed."""

    def __init__(self, spark: SparkSession, place: Place, declared: Table) -> None:
        self._spark = spark
        self._place = place
        self._declared = declared
        self._ends: dict[tuple[str, int], int] | None = None
        self._rows: DataFrame | None = None

    def rows(self) -> DataFrame:
        """The table as it stands in the log now."""
        ends = self._read_ends()
        if self._rows is not None and ends == self._ends:
            return self._rows
        fresh = table_rows(self._spark, self._place, self._declared).persist()
        try:
            count = fresh.count()
            if count > self._declared.max_rows:
                raise TableTooLargeError(
                    f"table {self._declared.topic!r} has {count:,} rows, and may have "
                    f"{self._declared.max_rows:,}",
                    advice="Raise max_rows of table(...), if Spark's memory has room for them.",
                )
        except BaseException:
            fresh.unpersist()
            raise
        self.close()
        self._rows, self._ends = fresh, ends
        return fresh

    def _read_ends(self) -> dict[tuple[str, int], int]:
        topic = self._place.resolve(self._declared.topic)
        with self._place.cluster() as cluster:
            parts = Metadata(cluster).partitions(topic)
            wanted = {(topic, number): LATEST for number in parts}
            return dict(offsets(cluster, wanted, isolation="read_committed"))

    def close(self) -> None:
        if self._rows is not None:
            self._rows.unpersist()
        self._rows = self._ends = None
