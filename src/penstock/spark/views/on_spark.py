"""The engine of views: Spark evaluates expressions, on streams at planning and on micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.spark import sql
from penstock.spark.state import Operator, apply
from penstock.spark.state.schemas import arrow_schema
from penstock.spark.views.columns import DELETED, PRESENT, loose
from penstock.spark.views.compiling import ORDER, Columns
from penstock.spark.views.plan import Table, as_column, flat
from penstock.spark.views.refusing import DIALECT, ViewError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

from penstock.spark.views.expressions import Expression

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

    def schema(self, rows: DataFrame) -> pa.Schema:
        return loose(arrow_schema(rows.schema))

    def select(self, rows: DataFrame, wanted: Columns) -> DataFrame:
        try:
            return sql.select(rows, {name: _text(each) for name, each in wanted})
        except AnalysisException as error:
            raise _explained(error) from error

    def where(self, rows: DataFrame, condition: Expression) -> DataFrame:
        try:
            return rows.where(condition.sql(dialect=DIALECT))
        except AnalysisException as error:
            raise _explained(error) from error

    def union(self, parts: Sequence[DataFrame]) -> DataFrame:
        first, *others = parts
        try:
            for each in others:
                first = first.unionByName(each)
        except AnalysisException as error:
            raise _explained(error) from error
        return first

    def text(self, rows: DataFrame, wanted: Sequence[str], into: str) -> DataFrame:
        text = f"to_json({sql.struct(wanted)}, map('ignoreNullFields', 'false'))"
        return sql.select(rows, {into: text}, *map(sql.quoted, rows.columns))

    def apply(
        self,
        inputs: Mapping[str, DataFrame],
        operator: Operator,
        key: Sequence[str],
        out: pa.Schema,
    ) -> DataFrame:
        return apply(inputs, operator, key=list(key), schema=from_arrow_schema(out))


def _text(expression: Expression) -> str:
    """In Spark's SQL. Most are columns, for which the generator of text is slow."""
    name = as_column(expression)
    return expression.sql(dialect=DIALECT) if name is None else sql.quoted(name)


def _from_key(table: Table, name: str, kind: T.DataType) -> str:
    """From a key as capture writes it, a JSON object that may be under `payload`; else as it is."""
    text = f"CAST({KEY} AS string)"
    field, own = sql.quoted(name), kind.simpleString()
    schema = f"payload STRUCT<{field}: {own}>, {field} {own}".replace("\\", "\\\\").replace(
        "'", "\\'"
    )
    parsed = f"from_json({text}, '{schema}')"
    found = f"coalesce({parsed}.payload.{field}, {parsed}.{field})"
    if len(table.key) > 1:
        return found
    plain = f"CASE WHEN NOT startswith({text}, '{{') THEN try_cast({text} AS {own}) END"
    return f"coalesce({found}, {plain})"


def _explained(error: AnalysisException) -> ViewError:
    told = " ".join(str(error).split("\n\n==")[0].split(";")[0].split())
    return ViewError(f"Spark does not take an expression of the view: {told}")
