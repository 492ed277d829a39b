"""The log as a source of Spark: `format("penstock")`, for streams and tables, without a jar.

Options and columns are those of Spark's own Kafka connector (see `options` for two differences).
Record batches are fetched over the Kafka protocol and decoded straight into Arrow columns.

- `options`: what may be said, checked.
- `planning`: how much to read, and in how many tasks; pure.
- `positions`: where the log stands, asked from the driver.
- `stream`, `table`: the two readers that Spark calls.
- `reading`: what a task does.
- `lag`: how far a query is behind, from its progress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from penstock.spark.source.errors import OptionError
from penstock.spark.source.options import TYPED

if TYPE_CHECKING:
    from penstock.spark.reading.decoding import Typing
    from penstock.spark.sink.datasource import StreamWriter, TableWriter
    from penstock.spark.source.stream import StreamReader
    from penstock.spark.source.table import TableReader

_COLUMNS = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "timestampType int"
)
_HEADERS = "headers array<struct<key: string, value: binary>>"


class PenstockSource(DataSource):
    """What Spark registers under the name `penstock`."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> str | StructType:
        typing = self._typing()
        if typing is not None:
            return typing.frame
        with_headers = str(self.options.get("includeHeaders", "false")).strip().lower() == "true"
        return f"{_COLUMNS}, {_HEADERS}" if with_headers else _COLUMNS

    def reader(self, schema: StructType) -> TableReader:
        from penstock.spark.source.options import parse
        from penstock.spark.source.table import TableReader

        options = parse(self.options, streaming=False)
        self._check(schema)
        return TableReader(options, schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 (Spark's name)
        from penstock.spark.source.options import parse
        from penstock.spark.source.stream import StreamReader

        options = parse(self.options, streaming=True)
        self._check(schema)
        return StreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> TableWriter:
        from penstock.spark.sink.datasource import TableWriter, job_of

        _refuse_overwriting(overwrite)
        return TableWriter(job_of(self.options, schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802 (Spark's name)
        from penstock.spark.sink.datasource import StreamWriter, job_of

        _refuse_overwriting(overwrite)
        return StreamWriter(job_of(self.options, schema))

    def _typing(self) -> Typing | None:
        """What flows ask for: see `penstock.spark.reading.decoding`."""
        text = self.options.get(TYPED)
        if text is None:
            return None
        from penstock.spark.reading.decoding import Typing

        return Typing.of_option(text)

    def _check(self, schema: StructType) -> None:
        if TYPED in self.options:
            return
        names = [column.split()[0] for column in _COLUMNS.split(", ")]
        if schema.fieldNames() not in (names, [*names, "headers"]):
            raise OptionError(
                "the columns of this source are fixed", advice="Leave out .schema(...)."
            )


def _refuse_overwriting(overwrite: bool) -> None:
    if overwrite:
        raise OptionError("a topic cannot be overwritten", advice="Use mode('append').")
