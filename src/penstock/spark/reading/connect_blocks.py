"""What Kafka Connect's schema, as it stands around an event or a row, says of a table's columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.client.table_schemas import SchemaError, TableColumn, TableSchema, ValueType


def columns_of(block: Any) -> TableSchema:
    """The table that the schema of an event is of, or of a row where events were flattened, without
    what only its database knows.

    SchemaError if it is the schema of neither.
    """
    try:
        rows = _row(block)
        columns = tuple(
            TableColumn(str(field["field"]), value_type(field), bool(field.get("optional", False)))
            for field in rows
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SchemaError(f"not the schema of a change event, or a row: {error!r}") from error
    return TableSchema(str(block.get("name", "")).removesuffix(".Envelope"), "", columns, ())


def _row(block: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    inner = {field["field"]: field for field in block["fields"]}
    if not inner:
        raise ValueError("it names no columns")
    if "after" not in inner or "op" not in inner:
        return list(inner.values())
    rows: Sequence[Mapping[str, Any]] = inner["after"]["fields"]
    return rows


def value_type(told: Mapping[str, Any]) -> ValueType:
    """What the schema of a value says."""
    items = told.get("items")
    return ValueType(
        str(told["type"]),
        told.get("name"),
        int(told.get("version", 1)),
        dict(told.get("parameters") or {}),
        None if items is None else value_type(items),
        tuple((str(each["field"]), value_type(each)) for each in told.get("fields") or ()),
    )
