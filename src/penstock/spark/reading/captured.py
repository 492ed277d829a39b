"""Change events whose tables' schemas are published: decoded by the schema that each one names.

An event begins with `{"schema_id":N,`, so a batch is split by id without being parsed, and almost
always there is one. What an id stands for is fixed: how its columns stand in JSON, and by which
conversion each becomes the column that the reader has. So events from before and after an ALTER
stand side by side in one stream, and a value that the reader's column cannot hold exactly is a
dead letter that names the field.

Events with Connect's schema around them say the same in their own words, and are read by these.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_type

from penstock.client.connection import Cluster
from penstock.client.errors import RefusedError
from penstock.client.table_schemas import (
    SCHEMA_ID,
    SCHEMAS_TOPIC,
    PublishedSchema,
    PublishedSchemas,
    SchemaError,
    TableColumn,
    TableSchema,
    ValueType,
)
from penstock.errors import PenstockError
from penstock.spark.reading.json_columns import JsonColumns
from penstock.spark.reading.wire_arrays import as_deep_as, loose_arrays, unfit_array
from penstock.spark.reading.wire_values import Conversion, conversion, flow_type, shown, wire_type

log = logging.getLogger(__name__)

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]
Find = Callable[[int], TableSchema]
Parse = Callable[[pa.BinaryArray], tuple[pa.StructArray, pa.StringArray]]

_HEAD: Final = f'{{"{SCHEMA_ID}":'.encode()
_ID: Final = re.compile(re.escape(_HEAD) + rb"([0-9]{1,10}),")
# Between Connect's schema and the event: nowhere else stands a quote without a backslash so.
_BLOCK, PAYLOAD = b'{"schema":{', b',"payload":'
_ID_SIZE: Final = len(_HEAD) + 11
_BEFORE, _AFTER, _OP = "before", "after", "op"
UNSAID: Final = (
    "the event does not say its schema: it is not of a capture that publishes schemas, or older"
)


class SchemaChangedError(PenstockError):
    """A table was altered while it was read, so that a column is not what it was."""

    # Of the class: it comes back from a task as text.
    advice = (
        "Look whether what reads it still does what is meant, and start it again: it goes on with "
        'the columns that the table has now. on_schema_change="ignore" of the input never stops it '
        "for a column that is gone."
    )


@dataclass(frozen=True, slots=True)
class Target:
    """The columns that a reader has."""

    row: T.StructType
    # Whether somebody wrote them, so that they stay as they are while the table changes.
    written: bool
    topic: str = ""
    # Whether it goes on without columns that the table has no more.
    ignores: bool = False


class _Field(NamedTuple):
    name: str
    kind: pa.DataType
    column: TableColumn | None
    convert: Conversion | None
    # Whether its values come as the JSON of arrays of any dimensions.
    loose: bool = False


class CapturedEvents:
    """Decodes events to the columns of an envelope, `before` and `after` as the reader has them."""

    def __init__(
        self,
        target: Target,
        schemas: Mapping[int, TableSchema],
        find: Find | None = None,
        unsaid: Parse | None = None,
    ) -> None:
        """`schemas` are those that were known when the reader began; `find` gives others. `unsaid`
        reads events that do not say theirs; without it they are refused."""
        self._target = target
        self._unsaid = unsaid
        self._row = arrow_row(target.row)
        self._known = dict(schemas)
        self._find = find
        self._decoders: dict[Any, _Decoder] = {}

    def parse(self, values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        """The events, and why those that are null and have a value could not be read."""
        groups = _groups(values)
        parts = [
            self._part(key, values if rows is None else values.take(pa.array(rows)))
            for key, rows in groups
        ]
        if len(parts) == 1:
            return parts[0]
        order = np.argsort(np.concatenate([rows for _, rows in groups if rows is not None]))
        at = pa.array(order)
        events, reasons = (pa.concat_arrays([part[n] for part in parts]) for n in (0, 1))
        return events.take(at), reasons.take(at)

    def _part(
        self, key: int | bytes | None, values: pa.BinaryArray
    ) -> tuple[pa.StructArray, pa.StringArray]:
        if key is None:
            if self._unsaid is not None and values.null_count < len(values):
                return self._unsaid(values)
            return self._refused(values, UNSAID)
        decoder = self._decoders.get(key)
        if decoder is None:
            try:
                decoder = self._decoders[key] = self._decoder(key)
            except SchemaError as error:
                return self._refused(values, str(error))
        return decoder.parse(values)

    def _decoder(self, key: int | bytes) -> _Decoder:
        if isinstance(key, bytes):
            return _Decoder(self._target.row, self._row, schema_of_block(key), wrapped=True)
        schema = self._known.get(key)
        if schema is None:
            if self._find is None:
                raise SchemaError(f"the schema {key} of the event is not known")
            schema = self._find(key)
            self._check_new(schema)
        return _Decoder(self._target.row, self._row, schema)

    def _check_new(self, schema: TableSchema) -> None:
        """SchemaChangedError if a schema that came while this was running is another table's."""
        changed = changes(self._target, schema)
        if changed:
            raise SchemaChangedError(
                f"table {schema.table} was altered while it was read: {'; '.join(changed)}"
            )

    def _refused(self, values: pa.BinaryArray, why: str) -> tuple[pa.StructArray, pa.StringArray]:
        reasons = pc.if_else(values.is_valid(), why, pa.scalar(None, pa.string()))
        return pa.nulls(len(values), envelope_of(self._row)), reasons


def history_of(cluster: Cluster, topic: str) -> tuple[PublishedSchema, ...]:
    """What is published for a topic, the oldest first; nothing for who may not read it."""
    try:
        return PublishedSchemas(cluster).history(topic)
    except RefusedError as error:
        if error.name != "TOPIC_AUTHORIZATION_FAILED":
            raise
        log.warning(
            "Schemas of %s cannot be looked up: %s. If it is a captured table, ask for the right "
            "to read the topic %s.", topic, error, SCHEMAS_TOPIC,
        )  # fmt: skip
        return ()


def arrow_row(row: T.StructType) -> pa.StructType:
    """The Arrow type of a reader's columns."""
    kinds = [pa.field(field.name, to_arrow_type(field.dataType, timezone="UTC")) for field in row]
    return pa.struct(kinds)


def envelope_of(row: pa.DataType) -> pa.StructType:
    source = pa.struct([("ts_ms", pa.int64())])
    return pa.struct([(_BEFORE, row), (_AFTER, row), (_OP, pa.string()), ("ts_ms", pa.int64()),
                      ("source", source)])  # fmt: skip


def row_of(schema: TableSchema) -> T.StructType:
    """The columns of a table as a flow has them."""
    return T.StructType(
        [T.StructField(each.name, from_arrow_type(flow_type(each.type))) for each in schema.columns]
    )


def misfits(row: T.StructType, schema: TableSchema) -> list[tuple[T.StructField, TableColumn]]:
    """The columns that somebody wrote with a type that cannot hold the table's values."""
    known = {column.name: column for column in schema.columns}
    kinds = {field.name: field.type for field in arrow_row(row)}
    return [
        (field, known[field.name])
        for field in row
        if field.name in known and not _fits(known[field.name].type, kinds[field.name])
    ]


def changes(target: Target, schema: TableSchema) -> list[str]:
    """What a table has no more of a reader's columns, or not as it was."""
    known = {column.name: column for column in schema.columns}
    kinds = {field.name: field.type for field in arrow_row(target.row)}
    found = [
        f"column {each.name} is gone"
        for each in target.row
        if each.name not in known and not target.ignores
    ]
    for field in target.row:
        column = known.get(field.name)
        if column is None:
            continue
        kind = kinds[field.name]
        fits = _fits(column.type, kind)
        keeps = target.written or target.ignores
        if not fits or (not keeps and flow_type(column.type) != kind):
            found.append(
                f"column {field.name} is {column.native or column.type.name} now, read as "
                f"{field.dataType.simpleString()}"
            )
    return found


def _fits(kind: ValueType, into: pa.DataType) -> bool:
    """Whether some values of a column can be had as this type."""
    return conversion(as_deep_as(kind, into), into) is not None


# ---- whose schema ------------------------------------------------------------------------


def _groups(values: pa.BinaryArray) -> list[tuple[int | bytes | None, Rows | None]]:
    """The values by what tells their schema: an id, a schema block, or nothing; None for all."""
    there = values.drop_null() if values.null_count else values
    if not len(there):
        return [(None, None)]
    head = _head(there[0].as_py())
    if head is not None:
        prefix, key = head
        if pc.all(pc.starts_with(there, pattern=prefix)).as_py():
            return [(key, None)]
    found: dict[int | bytes | None, list[int]] = {}
    last: tuple[bytes, int | bytes] | None = None
    for at, value in enumerate(values.to_pylist()):
        if value is None:
            found.setdefault(None, []).append(at)
            continue
        if last is None or not value.startswith(last[0]):
            last = _head(value)
        found.setdefault(None if last is None else last[1], []).append(at)
    return [(key, np.array(rows, np.int64)) for key, rows in found.items()]


def _head(value: bytes) -> tuple[bytes, int | bytes] | None:
    """How a value begins that tells its schema, and what tells it."""
    match = _ID.match(value)
    if match is not None:
        return match[0], int(match[1])
    if not value.startswith(_BLOCK):
        return None
    end = value.find(PAYLOAD)
    if end < 0:
        return None
    prefix = value[: end + len(PAYLOAD)]
    return prefix, prefix


def schema_of_block(head: bytes) -> TableSchema:
    """The table that Connect's schema of an event tells; SchemaError if it is none."""
    from penstock.spark.reading.connect_blocks import columns_of

    try:
        block = orjson.loads(head[len(b'{"schema":') : -len(PAYLOAD)])
    except orjson.JSONDecodeError as error:
        raise SchemaError(f"the schema of the event is no JSON: {error}") from error
    return columns_of(block)


# ---- one schema --------------------------------------------------------------------------


class _Decoder:
    """Decodes the events of one schema.

    The type of an array does not say its dimensions, and each value of PostgreSQL has its own: what
    does not fit because of them is decoded once more, `loose`, value by value.
    """

    def __init__(
        self,
        row: T.StructType,
        kind: pa.StructType,
        schema: TableSchema,
        *,
        wrapped: bool = False,
        loose: bool = False,
    ) -> None:
        self._again = partial(_Decoder, row, kind, schema, wrapped=wrapped, loose=True)
        self._loose: _Decoder | None = None
        known = {column.name: column for column in schema.columns}
        self._row = kind
        self._wrapped = wrapped
        self._fields: list[_Field] = []
        self._refused: list[str] = []
        wire: list[T.StructField] = []
        for field, target in zip(row, kind, strict=True):
            column = known.get(field.name)
            own = None if column is None else as_deep_as(column.type, target.type)
            convert = None if own is None else conversion(own, target.type)
            is_loose = loose and own is not None and own.name == "array" and convert is not None
            if own is not None and is_loose:
                convert = partial(loose_arrays, own, target.type)
            self._fields.append(_Field(field.name, target.type, column, convert, is_loose))
            if column is None:
                if not field.nullable:
                    self._refused.append(f"field {field.name} is missing or null")
                continue
            if convert is None:
                told = column.native or column.type.semantic or column.type.name
                self._refused.append(
                    f"field {field.name} is {told} in this event, and cannot be read as "
                    f"{field.dataType.simpleString()}"
                )
                continue
            assert own is not None
            of_wire = T.StringType() if is_loose else from_arrow_type(wire_type(own))
            wire.append(T.StructField(field.name, of_wire, field.nullable))
        # An event of a table of which nothing is read still says what it did.
        inner = T.StructType(wire or [T.StructField("", T.StringType())])
        envelope = T.StructType(
            [
                T.StructField(_BEFORE, _nullable(inner)),
                T.StructField(_AFTER, inner),
                T.StructField(_OP, T.StringType()),
                T.StructField("ts_ms", T.LongType()),
                T.StructField("source", T.StructType([T.StructField("ts_ms", T.LongType())])),
            ]
        )
        if wrapped:
            envelope = T.StructType([T.StructField("payload", envelope)])
        self._columns = JsonColumns(envelope, captured=True)
        arrays = [each.column is not None and each.column.type.name == "array"
                  for each in self._fields]  # fmt: skip
        self._has_arrays = any(arrays) and not loose

    def parse(self, values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        """The events, and why those that are null and have a value could not be read."""
        events, reasons = self._parse(values)
        if not self._has_arrays or reasons.null_count == len(reasons):
            return events, reasons
        if self._loose is None:
            self._loose = self._again()
        bad = np.asarray(reasons.is_valid())
        once_more = self._loose._parse(values.filter(pa.array(bad)))
        at = np.arange(len(values))
        at[bad] = len(values) + np.arange(bad.sum())
        order = pa.array(at)
        return (pa.concat_arrays([events, once_more[0]]).take(order),
                pa.concat_arrays([reasons, once_more[1]]).take(order))  # fmt: skip

    def _parse(self, values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        events, reasons = self._columns.parse(values)
        if self._wrapped:
            events = _child(events, "payload")
        before, unfit_before = self._converted(_child(events, _BEFORE))
        after, unfit_after = self._converted(_child(events, _AFTER))
        op = _child(events, _OP)
        if self._refused:
            why = pc.if_else(op.is_valid(), self._refused[0], pa.scalar(None, pa.string()))
            reasons = pc.coalesce(reasons, why)
        reasons = pc.coalesce(reasons, unfit_after)
        if unfit_before.null_count < len(unfit_before):
            # A row that its reader never had has no before; but a deletion must tell which it was.
            told = pc.if_else(pc.equal(op, "u"), pa.scalar(None, pa.string()), unfit_before)
            reasons = pc.coalesce(reasons, told)
        whole = pa.StructArray.from_arrays(
            [before, after, op, _child(events, "ts_ms"), _child(events, "source")],
            fields=list(envelope_of(self._row)),
            mask=events.is_null(),
        )
        return whole, reasons

    def _converted(self, rows: pa.StructArray) -> tuple[pa.StructArray, pa.StringArray]:
        """Rows as the reader has them, and why some are null."""
        arrays: list[pa.Array] = []
        reasons: pa.StringArray = pa.nulls(len(rows), pa.string())
        for field in self._fields:
            if field.column is None or field.convert is None:
                arrays.append(pa.nulls(len(rows), field.kind))
                continue
            given = _child(rows, field.name)
            made, unfit = field.convert(given)
            arrays.append(made)
            if unfit is not None:
                reasons = pc.coalesce(reasons, _reasons(field, given, unfit))
        missing = rows.is_null()
        if reasons.null_count < len(reasons):
            missing = pc.or_(missing, reasons.is_valid())
        mask = missing if missing.true_count else None
        return pa.StructArray.from_arrays(arrays, fields=list(self._row), mask=mask), reasons


def _nullable(row: T.StructType) -> T.StructType:
    """What was before may be told in part."""
    return T.StructType([T.StructField(field.name, field.dataType) for field in row])


def _reasons(field: _Field, given: pa.Array, unfit: Mask) -> pa.StringArray:
    assert field.column is not None
    rows = np.flatnonzero(unfit)
    kind = from_arrow_type(field.kind).simpleString()
    column, values = field.column, given.take(pa.array(rows)).to_pylist()
    told = [
        unfit_array(field.name, column.type, kind, value)
        if field.loose
        else f"field {field.name} does not fit {kind}: {shown(column.type, value)}"
        for value in values
    ]
    made = np.full(len(given), None, object)
    made[rows] = told
    return pa.array(made, pa.string(), from_pandas=True)


def _child(struct: pa.StructArray, name: str) -> pa.Array:
    return pc.struct_field(struct, [struct.type.get_field_index(name)])


def as_json(schemas: Mapping[int, TableSchema]) -> dict[str, Any]:
    """Schemas by id, for tasks to be told."""
    return {str(id_): schema.as_json_schema() for id_, schema in schemas.items()}


def of_json(told: Mapping[str, Any]) -> dict[int, TableSchema]:
    return {int(id_): TableSchema.from_json_schema(schema) for id_, schema in told.items()}
