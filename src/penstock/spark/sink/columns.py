"""The columns that a sink takes: those of Spark's own Kafka sink, and a timestamp.

| column | type | if missing or null |
|---|---|---|
| value | string or binary | must be there; null is a tombstone |
| key | string or binary | no key: records are spread over the partitions |
| topic | string | the topic that the sink was given, which otherwise goes first |
| partition | int | by the key, as every Kafka client does |
| headers | array<struct<key: string, value: binary>> | none |
| timestamp | timestamp | the time of writing |

Other columns are an error: a misspelt one would be lost without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

from penstock.spark.sink.errors import SinkError

HEADERS_TYPE: Final = T.ArrayType(
    T.StructType([T.StructField("key", T.StringType()), T.StructField("value", T.BinaryType())])
)


def _is_bytes(kind: T.DataType) -> bool:
    return isinstance(kind, T.StringType | T.BinaryType)


def _is_whole(kind: T.DataType) -> bool:
    return isinstance(kind, T.ByteType | T.ShortType | T.IntegerType)


def _is_headers(kind: T.DataType) -> bool:
    if not isinstance(kind, T.ArrayType) or not isinstance(kind.elementType, T.StructType):
        return False
    fields = kind.elementType.fields
    return (
        [field.name for field in fields] == ["key", "value"]
        and isinstance(fields[0].dataType, T.StringType)
        and isinstance(fields[1].dataType, T.BinaryType)
    )


_KNOWN: Final[dict[str, tuple[Callable[[T.DataType], bool], str, T.DataType]]] = {
    "key": (_is_bytes, "string or binary", T.BinaryType()),
    "value": (_is_bytes, "string or binary", T.BinaryType()),
    "topic": (lambda kind: isinstance(kind, T.StringType), "string", T.StringType()),
    "partition": (_is_whole, "int", T.IntegerType()),
    "headers": (_is_headers, "array<struct<key: string, value: binary>>", HEADERS_TYPE),
    "timestamp": (lambda kind: isinstance(kind, T.TimestampType), "timestamp", T.TimestampType()),
}


def check(schema: T.StructType, topic: str | None) -> None:
    """SinkError unless rows of this schema can be written."""
    fields = {field.name: field.dataType for field in schema.fields}
    unknown = [name for name in fields if name not in _KNOWN]
    if unknown:
        raise SinkError(
            f"the sink has no column {', '.join(unknown)}",
            advice=f"It takes {', '.join(_KNOWN)}: put the rest into value, as with to_json.",
        )
    if "value" not in fields:
        raise SinkError("there is no column value", advice="Select what is to be written as value.")
    if topic is None and "topic" not in fields:
        raise SinkError(
            "there is no topic", advice="Give the sink a topic, or the rows a column topic."
        )
    for name, kind in fields.items():
        fits, wanted, _ = _KNOWN[name]
        if not fits(kind) and not isinstance(kind, T.NullType):
            raise SinkError(
                f"the column {name} is {kind.simpleString()}, not {wanted}",
                advice=f"Cast it, as in df.withColumn('{name}', ...).",
            )


def prepare(df: DataFrame, topic: str | None) -> DataFrame:
    """The frame as the tasks get it; SinkError if it is not one that can be written."""
    schema = df.schema
    check(schema, topic)
    if topic is not None and "topic" in schema.names:
        df = df.drop("topic")
    # Text is as good as bytes for the tasks; each change of the plan costs time in every batch.
    casts = {
        field.name: F.col(field.name).cast(_KNOWN[field.name][2])
        for field in schema.fields
        if isinstance(field.dataType, T.NullType | T.ByteType | T.ShortType)
        and field.name in df.columns
    }
    return df.withColumns(casts) if casts else df
