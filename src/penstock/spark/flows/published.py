"""The columns of inputs whose tables' schemas are published: taken from there, or checked.

A stream or table that is declared without a schema has the columns of the table that its topic
captures, as they are when the flow starts; where nothing is published its columns are those of raw
records. A schema that the user wrote is compared with the published one: a column that the table
never had, or whose values the type cannot hold, is an error with the place where it is declared.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_type

from penstock.client.connection import Cluster
from penstock.client.table_schemas import (
    AmbiguousSchemaError,
    PublishedSchema,
    PublishedSchemas,
    TableSchema,
)
from penstock.errors import PenstockError
from penstock.spark.flows.declare import Input, Reading, Stream
from penstock.spark.flows.errors import DeclarationError, FlowError, UserCodeError
from penstock.spark.places import told
from penstock.spark.reading import captured
from penstock.spark.reading.wire_values import flow_type

log = logging.getLogger(__name__)

# How often it is looked whether a table has new columns.
WATCH_S: Final = 30.0


class NotPublishedError(FlowError):
    """The flow's function wants columns of an input that has no published schema, yet."""

    advice = (
        "A capture publishes the schema with its first events; the flow waits for it. For other "
        'topics say the schema, as in json="user string, at timestamp".'
    )


def is_asking(declared: Input) -> bool:
    """Whether an input may have a published schema."""
    return declared.reading.format in ("published", "debezium")


def resolved(cluster: Cluster, topic: str, declared: Input) -> Input:
    """An input with what is published for its topic, which it calls by another name perhaps."""
    how = declared.reading
    if not is_asking(declared):
        return declared
    schemas = PublishedSchemas(cluster)
    history = schemas.history(topic)
    try:
        latest = schemas.latest(topic)
    except AmbiguousSchemaError as error:
        if how.format == "published":
            text = told(declared.where, f"{_named(declared)}: {error}")
            raise DeclarationError(text, advice=error.advice) from error
        latest = None
    if not history:
        return declared if how.format == "debezium" else _raw(declared)
    if how.format == "published":
        assert latest is not None
        row = captured.row_of(latest.schema)
        reading = Reading("debezium", row.toDDL(), _published(history, written=False))
        if isinstance(declared, Stream):
            return replace(declared, reading=reading, dead_letters=declared.letters_if_typed)
        return replace(declared, reading=reading)
    _check(declared, history, latest)
    return replace(declared, reading=replace(how, published=_published(history, written=True)))


def _published(history: Sequence[PublishedSchema], *, written: bool) -> Mapping[str, Any]:
    schemas = {each.id: each.schema for each in history}
    return {"written": written, "schemas": captured.as_json(schemas)}


def _raw(declared: Input) -> Input:
    if isinstance(declared, Stream) and declared.time is not None:
        raise DeclarationError(
            told(declared.where, f"{_named(declared)}: an event time needs columns, and no "
                 "schema is published for the topic"),
            advice='Give a schema, as in json="user string, at timestamp".',
        )  # fmt: skip
    return replace(declared, reading=Reading("raw"))


def _named(declared: Input) -> str:
    return f"{type(declared).__name__.lower()} {declared.topic!r}"


def _check(
    declared: Input, history: Sequence[PublishedSchema], latest: PublishedSchema | None
) -> None:
    """DeclarationError if a column that the user wrote is none of the table, or of another type."""
    row = T.StructType.fromDDL(declared.reading.schema)
    assert isinstance(row, T.StructType)
    known = {column.name for each in history for column in each.schema.columns}
    strange = [field.name for field in row if field.name not in known]
    if strange:
        now = (latest or history[-1]).schema
        raise DeclarationError(
            told(declared.where, f"{_named(declared)}: table {now.table} has no column "
                 f"{strange[0]!r}"),
            advice=f"Its columns are {', '.join(each.name for each in now.columns)}. "
            f"{UserCodeError.advice}",
        )  # fmt: skip
    wrong = captured.misfits(row, latest.schema) if latest is not None else []
    if wrong:
        assert latest is not None
        field, column = wrong[0]
        fitting = from_arrow_type(flow_type(column.type)).simpleString()
        native = f"{column.native}, which is read as {fitting}" if column.native else fitting
        raise DeclarationError(
            told(declared.where, f"{_named(declared)}: column {field.name!r} is written "
                 f"{field.dataType.simpleString()}, and the table {latest.schema.table} has "
                 f"{native}"),
            advice=f"Write {field.name} {fitting}, or leave the schema out to have the table's. "
            f"{UserCodeError.advice}",
        )  # fmt: skip


# ---- while it runs -----------------------------------------------------------------------


class SchemaWatch:
    """Tells once of columns that tables got while a flow reads them, without these columns."""

    def __init__(self, cluster: Cluster, flow: str, inputs: Sequence[tuple[str, Input]]) -> None:
        """`inputs` with the topics that they read."""
        self._cluster = cluster
        self._schemas = PublishedSchemas(cluster)
        self._flow = flow
        self._watched = [
            (topic, {column for schema in known["schemas"].values() for column in _names(schema)})
            for topic, declared in inputs
            if (known := declared.reading.published) is not None and not known["written"]
        ]
        self._next = time.monotonic() + WATCH_S

    def look(self) -> None:
        """Look, if it is time to; trouble on the way to the log is for others to report."""
        if not self._watched or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + WATCH_S
        for topic, known in self._watched:
            try:
                latest = self._schemas.latest(topic)
            except PenstockError as error:
                log.debug("the schema of %s cannot be looked up: %s", topic, error)
                continue
            new = [] if latest is None else _new(latest.schema, known)
            if new:
                known.update(new)
                log.warning(
                    "flow %s: the table of %s has new columns: %s. The flow reads them when it is "
                    "started again.", self._flow, topic, ", ".join(new),
                )  # fmt: skip

    def close(self) -> None:
        self._cluster.close()


def _names(schema: Mapping[str, Any]) -> list[str]:
    return [column.name for column in TableSchema.from_json_schema(schema).columns]


def _new(schema: TableSchema, known: set[str]) -> list[str]:
    return [each.name for each in schema.columns if each.name not in known]
