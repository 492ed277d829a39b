"""The schema of a table's events, as it is published; and what an ALTER TABLE has changed in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from penstock.capture.events.shape import Shape
from penstock.client.table_schemas import UNSIGNED, TableColumn, TableSchema, ValueType, subject_of

# Of the labels of an enum so much is told.
_LABELS_MAX: Final = 200
_UNSIGNED_BIGINT: Final = replace(ValueType("int64"), parameters={UNSIGNED: "true"})


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """Which schema the events of a table are written with."""

    table: str
    topic: str
    version: int
    id: int
    # What is different from the version before it, for people; "" for the first one.
    changes: str = ""


def table_schema(shape: Shape, kind: str) -> TableSchema:
    """The schema of events of this shape."""
    columns = tuple(_published(column) for column in shape.columns)
    known = {column.name: column for column in columns}
    # What a key is made of is there, whatever the database says of the column.
    key = tuple(replace(_published(column), optional=False) for column in shape.key_columns)
    return TableSchema(
        shape.table.full_name,
        kind,
        columns,
        tuple(column.name for column in key),
        tuple(column for column in key if known.get(column.name) != column),
    )


def table_subject(shape: Shape, prefix: str) -> str:
    """The subject that a table's schemas are published under."""
    name = f"{prefix}.{shape.table.full_name}" if shape.may_share else None
    return subject_of(shape.topic, name)


def differences(before: TableSchema, after: TableSchema) -> str:
    """What has changed from one schema to another, in words."""
    return "; ".join(_differences(before, after))


def _published(column: TableColumn) -> TableColumn:
    """A column as it is published: Connect has no word for 64 bits without a sign."""
    words = column.native.split()
    is_unsigned = words[:1] == ["bigint"] and "unsigned" in words
    if is_unsigned and column.type == ValueType("int64"):
        return replace(column, type=_UNSIGNED_BIGINT)
    return column


def _differences(before: TableSchema, after: TableSchema) -> Iterator[str]:
    old = {column.name: column for column in before.columns}
    new = {column.name: column for column in after.columns}
    gone = [name for name in old if name not in new]
    added = [name for name in new if name not in old]
    if added:
        yield "added " + ", ".join(f"{name} {_type_name(new[name])}" for name in added)
    if gone:
        yield "dropped " + ", ".join(gone)
    for name, now in new.items():
        was = old.get(name)
        if was is None:
            continue
        if _type_name(was) != _type_name(now):
            yield f"{name}: {_type_name(was)} is now {_type_name(now)}"
        elif was.type.parameters.get("allowed") != now.type.parameters.get("allowed"):
            yield f"{name} may be one of {now.type.parameters.get('allowed', '')[:_LABELS_MAX]} now"
        elif was.type != now.type:
            yield f"{name} ({_type_name(now)}) is written in another form now"
        elif was.optional != now.optional:
            yield f"{name} {'may be null now' if now.optional else 'is never null now'}"
    if before.key != after.key:
        yield f"key ({', '.join(before.key)}) is now ({', '.join(after.key)})"
    if not gone and not added and list(old) != list(new):
        yield "columns in another order"


def _type_name(column: TableColumn) -> str:
    kind = column.type
    name = column.native or (kind.semantic or kind.name).rpartition(".")[2]
    is_masked = kind.parameters.get("masked") == "true"
    return f"{name} (masked)" if is_masked else name
