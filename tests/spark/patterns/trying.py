"""Patterns tried without Spark: what Spark would compute for the rows, DuckDB computes.

The operator itself is the real one; rows come in one go or in micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
import sqlglot
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.pandas.types import to_arrow_schema

from penstock.spark.patterns import operator as O  # noqa: N812
from penstock.spark.patterns.plan import Definition, Plan, planned
from penstock.spark.patterns.reading import Text
from penstock.spark.patterns.text import recognized
from penstock.spark.state.operator import Shard
from penstock.spark.state.store import State

_TYPES: dict[str, T.DataType] = {
    "TINYINT": T.ByteType(),
    "INTEGER": T.IntegerType(),
    "BIGINT": T.LongType(),
    "DOUBLE": T.DoubleType(),
    "VARCHAR": T.StringType(),
    "BOOLEAN": T.BooleanType(),
    "INTERVAL": T.DayTimeIntervalType(),
    "TIMESTAMP": T.TimestampType(),
    "TIMESTAMP WITH TIME ZONE": T.TimestampType(),
    '"NULL"': T.NullType(),
}


# One for all: opening one takes longer than most queries.
BASE = duckdb.connect()
BASE.execute("SET threads = 1")
_known: dict[tuple[str, str], T.DataType] = {}


def duck(sql: str) -> str:
    return sqlglot.transpile(sql, read="spark", write="duckdb")[0]


def type_of(rows: pa.Table, sql: str) -> T.DataType:
    known = _known.get((str(rows.schema), sql))
    if known is None:
        known = _known[str(rows.schema), sql] = _type_of(rows, sql)
    return known


def _type_of(rows: pa.Table, sql: str) -> T.DataType:
    BASE.register("rows", rows)
    found = BASE.sql(f"DESCRIBE SELECT {duck(sql)} AS x FROM rows").fetchall()[0][1]
    if found.startswith("DECIMAL("):
        precision, scale = found[8:-1].split(",")
        return T.DecimalType(int(precision), int(scale))
    return _TYPES[found]


@dataclass
class Trial:
    """A pattern over rows that are at hand."""

    defined: Definition
    rows: pa.Table
    measures: dict[str, str]
    by: Sequence[str] = ()
    order: str | None = None
    all_rows: bool = False
    max_rows: int = 10_000
    overflow: Any = "fail"

    @classmethod
    def sql(cls, text: str, rows: pa.Table, **more: Any) -> Trial:
        clauses = recognized(text)
        measures = {name: piece.content for name, piece in clauses.measures.items()}
        order = None if clauses.order is None else clauses.order[0]
        by = [each for each, _ in clauses.by]
        return cls(clauses.definition, rows, measures, by, order, clauses.all_rows, **more)

    def plan(self) -> Plan:
        texts = {name: Text.of(text, name) for name, text in self.measures.items()}
        return planned(
            self.defined,
            self.rows.column_names,
            lambda sql: type_of(self.rows, sql),
            texts,
            max_rows=self.max_rows,
            overflow=self.overflow,
        )

    def prepared(self, plan: Plan) -> tuple[pa.Table, dict[str, str]]:
        columns = [f'"{each}" AS {O.key_column(n)}' for n, each in enumerate(self.by)]
        kind = None if self.order is None else self.rows.schema.field(self.order).type
        if kind is not None and pa.types.is_timestamp(kind):
            columns.append(f'epoch_us("{self.order}") AS {O.TIME}')
        else:
            columns.append(f"{0 if kind is None else self.order}::BIGINT AS {O.TIME}")
        columns.append(f"({duck(plan.bits_sql())})::BIGINT AS {O.BITS}")
        for n, each in enumerate(plan.columns):
            columns.append(f"{duck(each.sql)} AS {O.value_column(n)}")
        measured = {sql: O.measure_column(n) for n, sql in enumerate(plan.measured_sql())}
        columns += [f"{duck(sql)} AS {name}" for sql, name in measured.items()]
        shown = ", ".join(f'"{each}" := "{each}"' for each in self.rows.column_names)
        columns.append(f"struct_pack({shown}) AS {O.ROW}")
        columns += [each for each in O.PLACE if each in self.rows.column_names]
        BASE.register("rows", self.rows)
        made = BASE.sql(f"SELECT {', '.join(columns)} FROM rows").to_arrow_table()
        return made, measured

    def matcher(
        self, plan: Plan, prepared: pa.Schema, measured: dict[str, str], *, complete: bool
    ) -> O.Matcher:
        fields = [prepared.field(O.key_column(n)) for n in range(len(self.by))]
        if self.order is not None:
            fields += [pa.field("match_start", pa.int64()), pa.field("match_end", pa.int64())]
        given = to_arrow_schema(
            T.StructType([T.StructField(f"_n{n}", m.type) for n, m in enumerate(plan.measured)]),
            timezone="UTC",
        )
        fields += list(given)
        row = prepared.field(O.ROW).type
        if self.all_rows:
            fields.append(pa.field(O.ROW, row))
        else:
            event = pa.struct([pa.field("variable", pa.string()), *row])
            fields.append(pa.field("events", pa.list_(event)))
        return O.Matcher(
            plan=plan,
            keys=len(self.by),
            measure_columns=measured,
            has_time=self.order is not None,
            complete=complete,
            all_rows=self.all_rows,
            events=not self.all_rows,
            schema=pa.schema(fields),
            title="trial",
            describes="trial",
        )

    def finished(self, plan: Plan, out: pa.Table) -> list[dict[str, Any]]:
        """Rows with the measures computed, as Spark does after the tasks."""
        BASE.register("found", out)
        names = "".join(f", {duck(sql)} AS {n}" for n, sql in plan.measures.items())
        made = BASE.sql(f"SELECT *{names} FROM found").to_arrow_table()
        return list(made.to_pylist())

    def run(self) -> list[dict[str, Any]]:
        """All rows in one go, and nothing after them."""
        plan = self.plan()
        rows, measured = self.prepared(plan)
        matcher = self.matcher(plan, rows.schema, measured, complete=True)
        return self.finished(plan, matcher.process(Shard(0, 1, 0, None, State()), {"rows": rows}))

    def run_in_batches(
        self, splits: Sequence[int], watermarks: Sequence[int | None]
    ) -> list[dict[str, Any]]:
        """Micro-batches of so many rows, each with the watermark at its end; the rest last."""
        plan = self.plan()
        rows, measured = self.prepared(plan)
        matcher = self.matcher(plan, rows.schema, measured, complete=False)
        state = State()
        out, at = [], 0
        for number, (size, watermark) in enumerate(zip(splits, watermarks, strict=True)):
            part = rows.slice(at, size)
            at += size
            inputs = {"rows": part} if len(part) else {}
            out.append(matcher.process(Shard(0, 1, number, watermark, state), inputs))
        assert at >= len(rows)
        return self.finished(plan, pa.concat_tables(out))
