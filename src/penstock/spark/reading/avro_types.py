"""Avro schemas as Spark's and Arrow's types, and as what the decoder is to be told.

Logical types that fastavro would turn into Python objects one by one (dates, timestamps, times,
UUIDs) are hidden from it: their integers and strings go into Arrow as they are, which is quicker
and knows no year 9999. Decimals are left to it.
"""

from __future__ import annotations

from typing import Any, Final

import fastavro
import pyarrow as pa
from fastavro.schema import SchemaParseException, expand_schema
from pyspark.sql import types as T  # noqa: N812

from penstock.spark.reading.frame import ReadingError

# Kinds of numbers that may stand beside each other in a union.
_WIDER: Final = {
    frozenset({"int", "long"}): "long",
    frozenset({"float", "double"}): "double",
}
_PLAIN: Final[dict[str, tuple[T.DataType, pa.DataType]]] = {
    "boolean": (T.BooleanType(), pa.bool_()),
    "int": (T.IntegerType(), pa.int32()),
    "long": (T.LongType(), pa.int64()),
    "float": (T.FloatType(), pa.float32()),
    "double": (T.DoubleType(), pa.float64()),
    "string": (T.StringType(), pa.string()),
    "bytes": (T.BinaryType(), pa.binary()),
    "fixed": (T.BinaryType(), pa.binary()),
    "enum": (T.StringType(), pa.string()),
    "null": (T.NullType(), pa.null()),
}
_LOGICAL: Final[dict[tuple[str, str], tuple[T.DataType, pa.DataType]]] = {
    ("int", "date"): (T.DateType(), pa.date32()),
    ("long", "timestamp-millis"): (T.TimestampType(), pa.timestamp("ms", "UTC")),
    ("long", "timestamp-micros"): (T.TimestampType(), pa.timestamp("us", "UTC")),
    ("long", "local-timestamp-millis"): (T.TimestampNTZType(), pa.timestamp("ms")),
    ("long", "local-timestamp-micros"): (T.TimestampNTZType(), pa.timestamp("us")),
}
_HIDDEN: Final = {logical for _, logical in _LOGICAL} | {"uuid", "time-millis", "time-micros"}

AvroSchema = str | dict[str, Any] | list[Any]


def parse(schema: AvroSchema) -> Any:
    """A schema, given as JSON text or as its objects, with every name spelled out."""
    import orjson

    try:
        given = orjson.loads(schema) if isinstance(schema, str) else schema
        expanded = expand_schema(given)
    except (SchemaParseException, orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ReadingError(f"not an Avro schema: {error}") from error
    if not isinstance(expanded, dict) or expanded.get("type") != "record":
        raise ReadingError(
            "the Avro schema is not a record", advice="Typed reading gives columns: use a record."
        )
    return expanded


def for_decoder(schema: Any) -> Any:
    """The schema as the decoder gets it, parsed, without the logical types it would act upon."""
    return fastavro.parse_schema(_hide(schema, set()), expand=False)


def _hide(schema: Any, seen: set[str]) -> Any:
    if isinstance(schema, list):
        return [_hide(branch, seen) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    if "name" in schema and schema.get("type") in {"record", "enum", "fixed"}:
        # Spelled out everywhere for us, but the decoder wants a name defined once.
        if schema["name"] in seen:
            return schema["name"]
        seen.add(schema["name"])
    hidden = {
        key: value
        for key, value in schema.items()
        if not key.startswith("__") and not (key == "logicalType" and value in _HIDDEN)
    }
    for key in ("items", "values"):
        if key in hidden:
            hidden[key] = _hide(hidden[key], seen)
    if isinstance(hidden.get("type"), dict | list):
        hidden["type"] = _hide(hidden["type"], seen)
    if "fields" in hidden:
        hidden["fields"] = [
            {**field, "type": _hide(field["type"], seen)} for field in hidden["fields"]
        ]
    return hidden


def types_of(schema: Any, path: str = "") -> tuple[T.DataType, pa.DataType]:
    """What a schema is in Spark, and the Arrow type that decoded values go into."""
    if isinstance(schema, list):
        return _of_union(schema, path)
    if isinstance(schema, str):
        if schema not in _PLAIN:
            raise ReadingError(f"the Avro type {schema} at {path or 'the top'} contains itself")
        return _PLAIN[schema]
    kind, logical = schema["type"], schema.get("logicalType")
    if isinstance(kind, dict | list):
        return types_of(kind, path)
    if logical == "decimal" and kind in {"bytes", "fixed"}:
        precision, scale = int(schema["precision"]), int(schema.get("scale", 0))
        if precision > 38:
            raise ReadingError(f"decimals of {precision} digits at {path}: Spark has 38")
        return T.DecimalType(precision, scale), pa.decimal128(precision, scale)
    if (kind, logical) in _LOGICAL:
        return _LOGICAL[kind, str(logical)]
    if kind in {"record", "error"}:
        fields = [
            (field["name"], *types_of(field["type"], f"{path}.{field['name']}".lstrip(".")))
            for field in schema["fields"]
        ]
        return (
            T.StructType([T.StructField(name, spark) for name, spark, _ in fields]),
            pa.struct([(name, arrow) for name, _, arrow in fields]),
        )
    if kind == "array":
        spark, arrow = types_of(schema["items"], f"{path}[]")
        return T.ArrayType(spark), pa.list_(arrow)
    if kind == "map":
        spark, arrow = types_of(schema["values"], f"{path}{{}}")
        return T.MapType(T.StringType(), spark), pa.map_(pa.string(), arrow)
    return types_of(kind, path)


def _of_union(branches: list[Any], path: str) -> tuple[T.DataType, pa.DataType]:
    rest = [branch for branch in branches if branch != "null"]
    if not rest:
        return _PLAIN["null"]
    if len(rest) == 1:
        return types_of(rest[0], path)
    names = frozenset(branch for branch in rest if isinstance(branch, str))
    if len(names) == len(rest) and names in _WIDER:
        return _PLAIN[_WIDER[names]]
    raise ReadingError(
        f"the Avro union at {path or 'the top'} has several types",
        advice="Read with a schema whose unions are null and one type.",
    )


def as_spark_wants(kind: pa.DataType) -> pa.DataType:
    """The same type with timestamps in microseconds, the only ones that Spark takes."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, as_spark_wants(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, as_spark_wants(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(as_spark_wants(kind.value_type))
    return kind
