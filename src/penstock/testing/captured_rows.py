"""Rows as a capture would write them, with the schema that it would publish: for tests of flows."""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Mapping, Sequence
from decimal import Context, Decimal
from typing import Any, Final

from pyspark.sql import types as T  # noqa: N812

from penstock.capture.delivery.schemas import SchemaTopic
from penstock.client import topics
from penstock.client.connection import Cluster
from penstock.client.table_schemas import (
    JSON_SCHEMA,
    SCHEMAS_TOPIC,
    TableColumn,
    TableSchema,
    ValueType,
    subject_of,
)
from penstock.errors import ConfigError

_PLAIN: Final[Mapping[type[T.DataType], ValueType]] = {
    T.ByteType: ValueType("int8"),
    T.ShortType: ValueType("int16"),
    T.IntegerType: ValueType("int32"),
    T.LongType: ValueType("int64"),
    T.FloatType: ValueType("float"),
    T.DoubleType: ValueType("double"),
    T.BooleanType: ValueType("boolean"),
    T.StringType: ValueType("string"),
    T.BinaryType: ValueType("bytes"),
    T.DateType: ValueType("int32", "io.debezium.time.Date"),
    T.TimestampType: ValueType("string", "io.debezium.time.ZonedTimestamp"),
    T.TimestampNTZType: ValueType("int64", "io.debezium.time.MicroTimestamp"),
}
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_WIDE: Final = Context(prec=80)


def table_schema(name: str, row: T.StructType, key: Sequence[str]) -> TableSchema:
    """What a capture would publish of a table with these columns."""
    columns = [
        TableColumn(each.name, value_type(each), each.name not in key, each.dataType.simpleString())
        for each in row
    ]
    return TableSchema(name, "postgresql", tuple(columns), tuple(key))


def value_type(field: T.StructField) -> ValueType:
    """How a capture writes a column of a type of Spark."""
    kind = field.dataType
    if isinstance(kind, T.DecimalType):
        shape = {"scale": str(kind.scale), "connect.decimal.precision": str(kind.precision)}
        return ValueType("bytes", "org.apache.kafka.connect.data.Decimal", parameters=shape)
    if isinstance(kind, T.ArrayType):
        inner = value_type(T.StructField(field.name, kind.elementType))
        return ValueType("array", items=inner)
    if type(kind) not in _PLAIN:
        raise ConfigError(f"column {field.name!r}: a table has no {kind.simpleString()}")
    return _PLAIN[type(kind)]


def written(row: Mapping[str, Any], schema: TableSchema) -> dict[str, Any]:
    """A row as it stands in an event; ConfigError if a value is not what its column holds."""
    strange = row.keys() - {column.name for column in schema.columns}
    if strange:
        raise ConfigError(f"the schema of the rows has no column {min(strange)!r}")
    found = {}
    for column in schema.columns:
        try:
            found[column.name] = _written(row.get(column.name), column.type)
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ConfigError(
                f"column {column.name!r} is {column.native}, not {row[column.name]!r}"
            ) from error
    return found


def _written(value: Any, kind: ValueType) -> Any:
    if value is None:
        return None
    semantic = kind.semantic or ""
    if kind.items is not None:
        return [_written(each, kind.items) for each in value]
    if semantic.endswith("Decimal"):
        number = _WIDE.scaleb(Decimal(value), int(kind.parameters["scale"]))
        whole = int(number)
        if whole != number:
            raise ValueError(value)
        size = (whole if whole >= 0 else ~whole).bit_length() // 8 + 1
        return base64.b64encode(whole.to_bytes(size, "big", signed=True)).decode()
    if semantic.endswith(".Date"):
        day = dt.date.fromisoformat(value) if isinstance(value, str) else value
        return (day - _EPOCH.date()).days
    if semantic.endswith("ZonedTimestamp"):
        at = dt.datetime.fromisoformat(value) if isinstance(value, str) else value
        at = at.replace(tzinfo=dt.UTC) if at.tzinfo is None else at.astimezone(dt.UTC)
        return at.isoformat().replace("+00:00", "Z")
    if semantic.endswith("MicroTimestamp"):
        at = dt.datetime.fromisoformat(value) if isinstance(value, str) else value
        return (at.replace(tzinfo=dt.UTC) - _EPOCH) // dt.timedelta(microseconds=1)
    return base64.b64encode(value).decode() if kind.name == "bytes" else value


def publish(bootstrap: str, topic: str, schema: TableSchema) -> int:
    """Have the schema in the log, as a capture has; its id."""
    with Cluster(bootstrap) as cluster:

        def ensure() -> None:
            settings = {"cleanup.policy": "compact"}
            topics.create(cluster, SCHEMAS_TOPIC, partitions=1, config=settings, exists_ok=True)

        log = SchemaTopic(cluster, ensure)
        id_ = log.registry.id_of(subject_of(topic), schema.as_json_schema(), JSON_SCHEMA)
        log.publish()
    return id_
