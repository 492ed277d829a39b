"""The engine of views: Spark evaluates expressions, on streams at planning and on micro-batches.

In a small micro-batch what an operator gives stays in its task, for the next operator, as long as
nothing is to be computed in between (`penstock.spark.state.chaining`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.spark import sql
from penstock.spark.reasons import reason
from penstock.spark.state import Batch, Operator, Planning, apply, chaining, current
from penstock.spark.state.chaining import Rows
from penstock.spark.views import blaming, set_aside, trying
from penstock.spark.views.columns import DELETED, PRESENT, loose
from penstock.spark.views.compiling import ORDER, Columns, Key, never_null
from penstock.spark.views.plan import Table, as_column, flat
from penstock.spark.views.refusing import ViewError
from penstock.spark.views.unread import spark_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock.spark.views.expressions import Expression

    Frame = DataFrame | Rows

AFTER: Final = "_after"
BEFORE: Final = "_before"
KEY: Final = "_key"


class SparkEngine:
    """DataFrames by the names of tables: streams of change events, or of rows."""

    def __init__(self, frames: Mapping[str, DataFrame]) -> None:
        self._frames = frames

    def source(self, table: Table, wanted: Sequence[str]) -> DataFrame:
        rows = self._frames[table.name]
        is_event = AFTER in rows.columns
        picked: dict[str, str] = {}
        for name in table.key:
            value = self._key(rows, table, name) if is_event else sql.quoted(name)
            picked[flat(table.alias, name)] = value
        for each in wanted:
            if each not in picked:
                own = sql.quoted(each.removeprefix(f"{table.alias}."))
                picked[each] = f"{AFTER}.{own}" if is_event else own
        if is_event:
            present = f"{AFTER} IS NOT NULL"
        elif DELETED in rows.columns:
            present = f"NOT coalesce({DELETED}, false)"
        else:
            present = "true"
        picked[PRESENT] = present
        picked.update({each: each for each in ORDER if each in rows.columns})
        return sql.select(rows, picked)

    def _key(self, rows: DataFrame, table: Table, name: str) -> str:
        """A column of the primary key: from the row, else from the record's key."""
        found = [f"{AFTER}.{sql.quoted(name)}"]
        if BEFORE in rows.columns:
            found.append(f"{BEFORE}.{sql.quoted(name)}")
        if KEY in rows.columns:
            fields = rows.schema[AFTER].dataType
            assert isinstance(fields, T.StructType)
            found.append(_from_key(table, name, fields[name].dataType))
        return f"coalesce({', '.join(found)})"

    def schema(self, rows: Frame) -> pa.Schema:
        return loose(chaining.schema_of(rows))

    @property
    def guarded(self) -> bool:
        context = current()
        if isinstance(context, Planning):
            context.can_guard = True
        return isinstance(context, Batch) and context.guarded

    def select(self, rows: Frame, wanted: Columns, key: Key | None = None) -> Frame:
        if isinstance(rows, Rows):
            picked = {name: as_column(each) for name, each in wanted}
            named = {name: own for name, own in picked.items() if own is not None}
            if len(named) == len(picked):
                carried = {each: each for each in set_aside.COLUMNS if each in rows.schema.names}
                return rows.select(named | carried)
        frame = frame_of(rows)
        if self.guarded:
            return trying.select(frame, wanted, key or {})
        try:
            made = sql.select(frame, {name: _text(each) for name, each in wanted})
            if not isinstance(current(), Batch):
                parts = [each for _, each in wanted]
                blaming.check_conditions(frame, parts)
                blaming.check_texts(frame, parts)
                blaming.check_repeatable(frame, made, parts)
            return made
        except AnalysisException as error:
            parts = [each for _, each in wanted]
            raise blaming.explained(frame, parts, error) from None

    def where(self, rows: Frame, condition: Expression, key: Key | None = None) -> Frame:
        if isinstance(rows, Rows) and (names := never_null(condition)) is not None:
            return rows.where_present(names)
        frame = frame_of(rows)
        if self.guarded:
            return trying.where(frame, condition, key or {})
        try:
            made = frame.where(spark_sql(condition))
            if not isinstance(current(), Batch):
                blaming.check_texts(frame, [condition])
                blaming.check_repeatable(frame, made, [condition])
            return made
        except AnalysisException as error:
            raise blaming.explained(frame, [condition], error, condition=True) from None

    def union(self, parts: Sequence[Frame]) -> DataFrame:
        first, *others = map(frame_of, parts)
        try:
            for each in others:
                first = first.unionByName(each, allowMissingColumns=self.guarded)
        except AnalysisException as error:
            raise ViewError(f"the parts of a UNION do not fit: {reason(error)}") from None
        return first

    def text(self, rows: Frame, wanted: Sequence[str], into: str) -> DataFrame:
        whole = frame_of(rows)
        return sql.select(whole, {into: sql.json(wanted)}, *map(sql.quoted, whole.columns))

    def apply(
        self,
        inputs: Mapping[str, Frame],
        operator: Operator,
        key: Sequence[str],
        out: pa.Schema,
    ) -> Frame:
        batch = current()
        if isinstance(batch, Batch) and batch.together and chaining.can_link(inputs, key):
            return chaining.link(inputs, operator, key=key, schema=out, batch=batch)
        frames = {name: frame_of(rows) for name, rows in inputs.items()}
        return apply(frames, operator, key=list(key), schema=from_arrow_schema(out))


def frame_of(rows: Frame) -> DataFrame:
    """What Spark takes."""
    return rows.frame() if isinstance(rows, Rows) else rows


def _text(expression: Expression) -> str:
    """In Spark's SQL. Most are columns, for which the generator of text is slow."""
    name = as_column(expression)
    return spark_sql(expression) if name is None else sql.quoted(name)


def _from_key(table: Table, name: str, kind: T.DataType) -> str:
    """From a key as capture writes it, a JSON object that may be under `payload`; else as it is."""
    text = f"CAST({KEY} AS string)"
    field, own = sql.quoted(name), kind.simpleString()
    schema = sql.literal(f"payload STRUCT<{field}: {own}>, {field} {own}")
    parsed = f"from_json({text}, {schema})"
    found = f"coalesce({parsed}.payload.{field}, {parsed}.{field})"
    if len(table.key) > 1:
        return found
    plain = f"CASE WHEN NOT startswith({text}, '{{') THEN try_cast({text} AS {own}) END"
    return f"coalesce({found}, {plain})"
