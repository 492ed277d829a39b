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
from penstock.spark.flows.inputs import row_of
from penstock.spark.flows.schema_changes import TableChange, compare
from penstock.spark.places import told
from penstock.spark.reading import captured
from penstock.spark.reading.wire_values import flow_type

log = logging.getLogger(__name__)

# How often it is looked whether a table was altered.
WATCH_S: Final = 10.0


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
    history = captured.history_of(cluster, topic)
    if not history:
        return declared if how.format == "debezium" else _raw(declared)
    try:
        latest = PublishedSchemas(cluster).latest(topic)
    except AmbiguousSchemaError as error:
        if how.format == "published":
            text = told(declared.callsite, f"{_named(declared)}: {error}")
            raise DeclarationError(text, advice=error.advice) from error
        latest = None
    if how.format == "published":
        assert latest is not None
        row = captured.row_of(latest.schema)
        reading = Reading("debezium", row.toDDL(), _published(declared, history, written=False))
        if isinstance(declared, Stream):
            return replace(declared, reading=reading, dead_letters=declared.letters_if_typed)
        return replace(declared, reading=reading)
    _check(declared, history, latest)
    return replace(
        declared, reading=replace(how, published=_published(declared, history, written=True))
    )


def _published(
    declared: Input, history: Sequence[PublishedSchema], *, written: bool
) -> Mapping[str, Any]:
    schemas = {each.id: each.schema for each in history}
    ignores = declared.on_schema_change == "ignore"
    return {"written": written, "ignores": ignores, "schemas": captured.as_json(schemas)}


def _raw(declared: Input) -> Input:
    if isinstance(declared, Stream) and declared.time is not None:
        raise DeclarationError(
            told(declared.callsite, f"{_named(declared)}: an event time needs columns, and no "
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
            told(declared.callsite, f"{_named(declared)}: table {now.table} has no column "
                 f"{strange[0]!r}"),
            advice=f"Its columns are {', '.join(each.name for each in now.columns)}. "
            f"{UserCodeError.advice}",
        )  # fmt: skip
    gone = [field.name for field in row if latest is not None
            and field.name not in {each.name for each in latest.schema.columns}]  # fmt: skip
    if gone:
        assert latest is not None
        log.warning(
            "%s: table %s has no column %s any more: it is null in rows that were written since. "
            "If another has taken its place, write that one; its columns are %s.",
            told(declared.callsite, _named(declared)), latest.schema.table, ", ".join(gone),
            ", ".join(each.name for each in latest.schema.columns),
        )  # fmt: skip
    wrong = captured.misfits(row, latest.schema) if latest is not None else []
    if wrong:
        assert latest is not None
        field, column = wrong[0]
        fitting = from_arrow_type(flow_type(column.type)).simpleString()
        native = f"{column.native}, which is read as {fitting}" if column.native else fitting
        raise DeclarationError(
            told(declared.callsite, f"{_named(declared)}: column {field.name!r} is written "
                 f"{field.dataType.simpleString()}, and the table {latest.schema.table} has "
                 f"{native}"),
            advice=f"Write {field.name} {fitting}, or leave the schema out to have the table's. "
            f"{UserCodeError.advice}",
        )  # fmt: skip


# ---- while it runs -----------------------------------------------------------------------


class SchemaWatch:
    """Says once what has changed in captured tables while a flow reads them, and what follows.

    Where a flow must not go on, it is stopped by who decodes the first event of the altered table.
    """

    def __init__(self, cluster: Cluster, flow: str, inputs: Sequence[tuple[str, Input]]) -> None:
        """`inputs` with the topics that they read."""
        self._cluster = cluster
        self._schemas = PublishedSchemas(cluster)
        self._flow = flow
        self._watched: dict[str, tuple[Input, TableSchema]] = {}
        for topic, declared in inputs:
            known = (declared.reading.published or {}).get("schemas")
            if known:
                # The newest that the flow was planned with.
                newest = list(known.values())[-1]
                self._watched[topic] = declared, TableSchema.from_json_schema(newest)
        self._next = time.monotonic() + WATCH_S
        # Whether the flow is to be started again.
        self.wants_restart = False
        # What was found last: message and advice.
        self.found: tuple[str, str] | None = None

    def look(self) -> None:
        """Look, if it is time to; trouble on the way to the log is for others to report."""
        if not self._watched or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + WATCH_S
        for topic, (declared, known) in list(self._watched.items()):
            latest = self._latest(topic)
            change = None if latest is None else compare(known, latest)
            if latest is not None and change is not None:
                self._watched[topic] = declared, latest
                self._changed(declared, change)

    def _latest(self, topic: str) -> TableSchema | None:
        try:
            found = self._schemas.latest(topic)
        except PenstockError as error:
            log.debug("the schema of %s cannot be looked up: %s", topic, error)
            return None
        return None if found is None else found.schema

    def _changed(self, declared: Input, change: TableChange) -> None:
        read = {field.name for field in row_of(declared.reading)}
        policy = declared.on_schema_change
        advice = []
        if change.lost & read and policy != "ignore":
            advice.append("The flow reads that, and stops where the first such event stands.")
        elif change.added and (declared.reading.published or {}).get("written") is False:
            self.wants_restart = policy == "follow"
            advice.append(
                "It is started again, to get what is new."
                if self.wants_restart
                else "It gets what is new when it is started again."
            )
        if change.snapshot_advice:
            advice.append(change.snapshot_advice)
        self.found = f"flow {self._flow!r}: {change}", " ".join(advice)
        log.warning("%s. %s", *self.found)

    def close(self) -> None:
        self._cluster.close()
