"""Avro values: plain, by the schema they were written with, or in Confluent's wire format.

Spark's own `from_avro` is not in its Python package, and it knows no schema ids. Here the tasks
decode with fastavro, from Arrow into Arrow. A value that is cut, too long, of an unknown schema id
or not of its schema becomes an error of its own record.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

from penstock.spark.reading.avro_types import (
    AvroSchema,
    as_spark_wants,
    for_decoder,
    parse,
    types_of,
)
from penstock.spark.reading.frame import (
    ERROR,
    HEADERS,
    HEADERS_TYPE,
    POSITION,
    VALUE,
    Check,
    ReadingError,
    Tombstones,
    check_input,
    check_names,
    finish,
)

_PARSED: Final = "_penstock_parsed"
# Confluent's format: a zero byte, the schema's id, then the value.
_MAGIC: Final = 0
_PREFIX_BYTES: Final = 5


def avro(
    df: DataFrame,
    schema: AvroSchema,
    *,
    writer: AvroSchema | None = None,
    writers_by_id: Mapping[int, AvroSchema] | None = None,
    into: str | None = None,
    tombstones: Tombstones = "drop",
    metrics: str = "reading",
    check: Check | None = None,
    keeps_raw: bool = False,
) -> DataFrame:
    """Read the values of a topic's frame as Avro records of this schema.

    `schema` says which columns come out; `writer` is the schema that the values were written with,
    if it is another. With `writers_by_id` the values are in Confluent's wire format, and the
    mapping says which schema each id stands for. Schemas are JSON text or its objects. All else is
    as for `json`; what may be null is what the schema says.
    """
    check_input(df, tombstones)
    if writer is not None and writers_by_id is not None:
        raise ReadingError(
            "writer and writers_by_id are both given",
            advice="Values carry schema ids (writers_by_id), or they do not (writer).",
        )
    reader = parse(schema)
    spark, arrow = types_of(reader)
    assert isinstance(spark, T.StructType)
    fields = [field.name for field in spark.fields]
    check_names(fields, into)
    by_id = None
    if writers_by_id is not None:
        by_id = {int(id_): parse(given) for id_, given in writers_by_id.items()}
    decode = _Decoder(reader, parse(writer) if writer is not None else reader, by_id, arrow)
    names = [*POSITION, VALUE]
    columns = [F.col(name) for name in names]
    if HEADERS in df.columns:
        columns.append(F.col(HEADERS).cast(HEADERS_TYPE).alias(HEADERS))
    given = df.select(*columns)
    out = T.StructType(
        [
            *(T.StructField(field.name, field.dataType) for field in given.schema.fields),
            T.StructField(_PARSED, spark),
            T.StructField(ERROR, T.StringType()),
        ]
    )
    rows = given.mapInArrow(decode, out)
    if tombstones == "error":
        reason = F.when(F.col(VALUE).isNull(), F.lit("the value is null")).otherwise(F.col(ERROR))
        rows = rows.withColumn(ERROR, reason)
    return finish(
        rows,
        parsed=F.col(_PARSED),
        fields=fields,
        into=into,
        tombstones=tombstones,
        metrics=metrics,
        check=check,
        keeps_raw=keeps_raw,
    )


class _Decoder:
    """What runs in the tasks: batches of records in, the same with parsed values out."""

    def __init__(
        self, reader: Any, writer: Any, by_id: dict[int, Any] | None, arrow: pa.DataType
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._by_id = by_id
        self._arrow = arrow

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        read = self._value_reader()
        for batch in batches:
            values = batch.column(batch.schema.get_field_index(VALUE))
            parsed, errors = self._decode(values.to_pylist(), read)
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, parsed, pa.array(errors, pa.string())],
                names=[*batch.schema.names, _PARSED, ERROR],
            )

    def _value_reader(self) -> Callable[[bytes], Any]:
        from fastavro import schemaless_reader

        reader = for_decoder(self._reader)

        def whole(stream: io.BytesIO, length: int, writer: Any) -> Any:
            found = schemaless_reader(stream, writer, None if writer is reader else reader)
            if stream.tell() != length:
                raise ValueError(f"{length - stream.tell()} bytes follow the record")
            return found

        if self._by_id is None:
            only = reader if self._writer == self._reader else for_decoder(self._writer)
            return lambda value: whole(io.BytesIO(value), len(value), only)
        writers = {
            id_: reader if schema == self._reader else for_decoder(schema)
            for id_, schema in self._by_id.items()
        }

        def by_id(value: bytes) -> Any:
            if len(value) < _PREFIX_BYTES or value[0] != _MAGIC:
                raise ValueError("it does not begin with a zero byte and a schema id")
            id_ = int.from_bytes(value[1:_PREFIX_BYTES], "big")
            if id_ not in writers:
                raise ValueError(f"its schema id {id_} is not known")
            stream = io.BytesIO(value)
            stream.seek(_PREFIX_BYTES)
            return whole(stream, len(value), writers[id_])

        return by_id

    def _decode(
        self, values: list[bytes | None], read: Callable[[bytes], Any]
    ) -> tuple[pa.Array, list[str | None]]:
        rows: list[Any] = []
        errors: list[str | None] = []
        for value in values:
            row, error = None, None
            if value is not None:
                # Whatever goes wrong inside the decoder is about this value's bytes.
                try:
                    row = read(value)
                except Exception as problem:
                    error = _reason(problem)
            rows.append(row)
            errors.append(error)
        try:
            return self._to_arrow(rows), errors
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            return self._one_by_one(rows, errors)

    def _to_arrow(self, rows: list[Any]) -> pa.Array:
        return pa.array(rows, self._arrow).cast(as_spark_wants(self._arrow))

    def _one_by_one(
        self, rows: list[Any], errors: list[str | None]
    ) -> tuple[pa.Array, list[str | None]]:
        """Some value does not fit into its column: find out which."""
        for number, row in enumerate(rows):
            if row is None:
                continue
            try:
                self._to_arrow([row])
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as problem:
                rows[number], errors[number] = None, _reason(problem)
        return self._to_arrow(rows), errors


def _reason(problem: Exception) -> str:
    if isinstance(problem, EOFError | IndexError):
        return "the Avro value is cut short"
    text = str(problem).strip() or type(problem).__name__
    return f"the value is not Avro of its schema: {text}"
