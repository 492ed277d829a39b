"""The source as a table: `spark.read`, and what its tasks share with those of streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from penstock.spark.source.errors import KEEP_LONGER, DataLossError, OptionError, SourceError, told
from penstock.spark.source.options import Options
from penstock.spark.source.planning import Range, tasks
from penstock.spark.source.positions import Log, connect
from penstock.spark.source.task import Task

if TYPE_CHECKING:
    from penstock.spark.reading.decoding import Typing


class TableReader(DataSourceReader):
    """Reads from one set of offsets to another, both found when the query is planned."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        with told():
            log = Log(self._options)
            try:
                ranges = self._ranges(log)
            finally:
                log.close()
        planned = tasks(
            ranges,
            min_partitions=self._options.min_partitions,
            max_records=self._options.max_records,
        )
        # Spark takes an empty list for one task without a description.
        return [Task(item) for item in planned] or [Task(())]

    def _ranges(self, log: Log) -> list[Range]:
        starts = log.resolve(self._options.start, starting=True)
        ends = log.resolve(self._options.end, starting=False)
        places = starts.keys() & ends.keys()
        firsts = log.earliest(places)
        ranges = []
        for place in sorted(places):
            topic, number = place
            start, end = starts[place], ends[place]
            if start > end and not (self._options.start.by_time or self._options.end.by_time):
                raise OptionError(
                    f"{topic}-{number} begins at {start} and ends before it, at {end}"
                )
            if start < firsts[place] and self._options.fail_on_data_loss:
                raise DataLossError(
                    f"{topic}-{number} was to be read from offset {start}, and its log starts at "
                    f"{firsts[place]} now",
                    advice=KEEP_LONGER,
                )
            ranges.append(Range(topic, number, max(start, firsts[place]), end))
        return ranges

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_task(self._options, partition, self._schema)


def read_task(options: Options, partition: InputPartition, schema: StructType) -> Iterator[Any]:
    """The records of a task as Arrow columns, typed if the options say so."""
    from pyspark.sql.pandas.types import to_arrow_schema

    from penstock.spark.source.reading import Manner, read, record_schema
    from penstock.spark.source.workers import settle

    settle()
    if not isinstance(partition, Task):
        raise SourceError(f"{partition!r} is not a task of this source")
    manner = Manner(
        access=options.access,
        headers=options.headers,
        fail_on_data_loss=options.fail_on_data_loss,
        poll_timeout_s=options.poll_timeout_s,
    )
    if options.typed is None:
        return read(manner, partition, to_arrow_schema(schema, timezone="UTC"))
    typing = typing_in_task(options.typed, options)
    records = read(manner, partition, record_schema(options.headers))
    if typing.watch is None:
        return map(typing.decode, records)
    from penstock.spark.state.watching import typed

    return typed(typing, partition.ranges, records)


def typing_in_task(told: str, options: Options) -> Typing:
    """How records are typed; a schema that is published while they are read is looked up."""
    from penstock.client.table_schemas import PublishedSchemas, TableSchema
    from penstock.spark.reading.decoding import Typing

    def find(id_: int) -> TableSchema:
        with connect(options.access) as cluster:
            return PublishedSchemas(cluster).by_id(id_)

    typing = Typing.of_option(told)
    typing.find_schemas(find)
    return typing
