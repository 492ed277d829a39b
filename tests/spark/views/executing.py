"""Runs plans of views without Spark: DuckDB for what needs no state, the stages as they are."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb
import pyarrow as pa
from sqlglot import exp

from penstock.spark.state import Operator, Shard, State
from penstock.spark.state.operator import SET_ASIDE
from penstock.spark.views import set_aside
from penstock.spark.views.aggregating import AggregateError
from penstock.spark.views.columns import DELETED, PRESENT
from penstock.spark.views.compiling import KEY, Compiler
from penstock.spark.views.expressions import Expression
from penstock.spark.views.plan import Node, Table, as_column, column, flat

Row = dict[str, Any]
PLACES = ("_topic", "_partition", "_offset")


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def alike(value: Any) -> Any:
    """Values of keys that SQL takes for the same: both zeros, and every NaN."""
    if isinstance(value, float):
        return "nan" if value != value else value + 0.0  # noqa: PLR0124
    return value


def in_duckdb(expression: Expression) -> str:
    """The same in DuckDB's SQL: a cast of Spark's fails, unless it says that it tries."""

    def strict(node: Expression) -> Expression:
        if isinstance(node, exp.TryCast) and not node.args.get("safe"):
            return exp.Cast(this=node.this, to=node.to)
        return node

    return str(expression.copy().transform(strict).sql("duckdb"))


@dataclass(slots=True)
class Arrow:
    """An engine over Arrow tables. States stay from micro-batch to micro-batch, by stage."""

    schemas: Mapping[str, pa.Schema]
    shards: int = 2
    states: dict[tuple[int, int], State] = field(default_factory=dict)
    # The micro-batch: by table the columns of rows, PRESENT and the places.
    batch: Mapping[str, pa.Table] = field(default_factory=dict)
    stage: int = 0
    # Whether rows that fail go on and say so; the reason is one for all.
    guarded: bool = False
    con: duckdb.DuckDBPyConnection = field(
        default_factory=lambda: duckdb.connect(config={"threads": 1})
    )

    def source(self, table: Table, wanted: Sequence[str]) -> pa.Table:
        rows = self.batch[table.name]
        names = dict.fromkeys([*(flat(table.alias, each) for each in table.key), *wanted])
        columns = [rows[name.removeprefix(f"{table.alias}.")] for name in names]
        return pa.table(
            [*columns, rows[PRESENT], *(rows[each] for each in PLACES)],
            names=[*names, PRESENT, *PLACES],
        )

    def schema(self, rows: pa.Table) -> pa.Schema:
        return rows.schema

    def select(
        self,
        rows: pa.Table,
        wanted: Sequence[tuple[str, Expression]],
        key: Mapping[str, str] | None = None,
    ) -> pa.Table:
        is_plain = all(as_column(each) is not None for _, each in wanted)
        if self.guarded and not (is_plain and set_aside.FAILED not in rows.column_names):
            return self._tried(rows, wanted, key)
        carried = [name for name in set_aside.COLUMNS if name in rows.column_names]
        wanted = [*wanted, *((name, column(name)) for name in carried)]
        chosen = ", ".join(f"{in_duckdb(each)} AS {quoted(name)}" for name, each in wanted)
        return self._run(rows, f"SELECT {chosen} FROM given")

    def where(
        self, rows: pa.Table, condition: Expression, key: Mapping[str, str] | None = None
    ) -> pa.Table:
        if self.guarded:
            names = [name for name in rows.column_names if name not in set_aside.COLUMNS]
            wanted = [(name, column(name)) for name in names]
            rows = self._tried(rows, [*wanted, ("_passes", condition)], key)
            good = f"{quoted(set_aside.FAILED)} IS NOT NULL OR coalesce(_passes, false)"
            return self._run(rows, f"SELECT * EXCLUDE (_passes) FROM given WHERE {good}")
        return self._run(rows, f"SELECT * FROM given WHERE {in_duckdb(condition)}")

    def _tried(
        self,
        rows: pa.Table,
        wanted: Sequence[tuple[str, Expression]],
        key: Mapping[str, str] | None,
    ) -> pa.Table:
        """As `trying` does it, with DuckDB's TRY, around a struct so that null is an error."""
        tries = {name: f"TRY(struct_pack(v := {in_duckdb(each)}))" for name, each in wanted}
        chosen = [f"({own}).v AS {quoted(name)}" for name, own in tries.items()]
        failed = " OR ".join(f"({own}) IS NULL" for own in tries.values())
        row = (
            " || '|' || ".join(
                f"coalesce({quoted(each)}::varchar, '~')" for each in (key or {}).values()
            )
            or "''"
        )
        carried = [each for each in set_aside.COLUMNS if each in rows.column_names]
        before = quoted(set_aside.FAILED) if set_aside.FAILED in carried else "NULL::varchar"
        was = quoted(set_aside.ROW) if set_aside.FAILED in carried else "NULL::varchar"
        chosen += [
            f"coalesce({before}, CASE WHEN {failed} THEN 'fails' END) AS {set_aside.FAILED}",
            f"coalesce({was}, CASE WHEN {failed} THEN {row} END) AS {set_aside.ROW}",
        ]
        if set_aside.AT in carried:
            chosen.append(set_aside.AT)
        return self._run(rows, f"SELECT {', '.join(chosen)} FROM given")

    def union(self, parts: Sequence[pa.Table]) -> pa.Table:
        return pa.concat_tables(parts, promote_options="permissive").combine_chunks()

    def text(self, rows: pa.Table, wanted: Sequence[str], into: str) -> pa.Table:
        chosen = ", ".join(f"coalesce({quoted(each)}::varchar, '~')" for each in wanted)
        return self._run(rows, f"SELECT *, concat_ws('|', {chosen}) AS {quoted(into)} FROM given")

    def _run(self, rows: pa.Table, sql: str) -> pa.Table:
        self.con.register("given", rows)
        try:
            found: pa.Table = self.con.sql(sql).to_arrow_table()
            return found.combine_chunks()
        finally:
            self.con.unregister("given")

    def apply(
        self,
        inputs: Mapping[str, pa.Table],
        operator: Operator,
        key: Sequence[str],
        out: pa.Schema,
    ) -> pa.Table:
        self.stage += 1
        assert operator.describes
        parts = []
        for number in range(self.shards):
            given = {}
            for name, rows in inputs.items():
                own = [at for at, value in enumerate(self._keys(rows, key)) if value == number]
                if own:
                    some = rows.take(pa.array(own, pa.int64()))
                    order = [(e, "ascending") for e in PLACES if e in rows.column_names]
                    given[name] = some.sort_by(order) if order else some
            state = self.states.setdefault((self.stage, number), State())
            shard = Shard(number, self.shards, 0, None, state)
            parts.append(operator.process(shard, given).cast(out))
        return pa.concat_tables(parts)

    def _keys(self, rows: pa.Table, key: Sequence[str]) -> list[int]:
        if not key:
            return [0] * len(rows)
        values = zip(*(map(alike, rows[each].to_pylist()) for each in key), strict=True)
        return [sum(map(ord, repr(each))) % self.shards for each in values]


@dataclass(slots=True)
class Maintained:
    """A view, and what its changes come to so far."""

    plan: Node
    engine: Arrow
    rows: dict[str, Row] = field(default_factory=dict)

    def run(self, batch: Mapping[str, pa.Table]) -> list[Row]:
        """Take in a micro-batch: its changes. None of them may change nothing."""
        before = copy.deepcopy(self.engine.states)
        self.engine.guarded = bool(self.set_aside())
        try:
            found = self._changes(batch)
        except (duckdb.Error, AggregateError):
            if self.engine.guarded:
                raise
            self.engine.states, self.engine.guarded = before, True
            found = self._changes(batch)
        seen = set()
        for row in found:
            # As a topic has it: two texts are two keys.
            own = row[KEY]
            assert own not in seen, f"{own} twice in {found}"
            seen.add(own)
            if row[DELETED]:
                assert self.rows.pop(own, None) is not None, f"{own} was not there"
                continue
            shown = {k: v for k, v in row.items() if k not in {DELETED, KEY}}
            assert self.rows.get(own) != shown, f"{own} has not changed"
            self.rows[own] = shown
        return found

    def _changes(self, batch: Mapping[str, pa.Table]) -> list[Row]:
        self.engine.batch, self.engine.stage = batch, 0
        found: list[Row] = Compiler(self.engine).changes(self.plan).to_pylist()
        return found

    def set_aside(self) -> list[Row]:
        """The rows that could not be computed."""
        return [
            row
            for state in self.engine.states.values()
            for name, table in state.tables.items()
            if name.startswith(SET_ASIDE)
            for row in table.scan().to_pylist()
        ]

    def shown(self) -> list[tuple[Any, ...]]:
        """The visible columns of all rows."""
        return sorted(
            (
                tuple(v for k, v in row.items() if not k.startswith("_"))
                for row in self.rows.values()
            ),
            key=repr,
        )
