"""Runs plans of views without Spark: DuckDB for what needs no state, the stages as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb
import pyarrow as pa

from penstock.spark.state import Operator, Shard, State
from penstock.spark.views.columns import DELETED, PRESENT
from penstock.spark.views.compiling import KEY, Compiler
from penstock.spark.views.expressions import Expression
from penstock.spark.views.plan import Node, Table, flat

Row = dict[str, Any]
PLACES = ("_topic", "_partition", "_offset")


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def alike(value: Any) -> Any:
    """Values of keys that SQL takes for the same: both zeros, and every NaN."""
    if isinstance(value, float):
        return "nan" if value != value else value + 0.0  # noqa: PLR0124
    return value


@dataclass(slots=True)
class Arrow:
    """An engine over Arrow tables. States stay from micro-batch to micro-batch, by stage."""

    schemas: Mapping[str, pa.Schema]
    shards: int = 2
    states: dict[tuple[int, int], State] = field(default_factory=dict)
    # The micro-batch: by table the columns of rows, PRESENT and the places.
    batch: Mapping[str, pa.Table] = field(default_factory=dict)
    stage: int = 0
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

    def select(self, rows: pa.Table, wanted: Sequence[tuple[str, Expression]]) -> pa.Table:
        chosen = ", ".join(f"{each.sql('duckdb')} AS {quoted(name)}" for name, each in wanted)
        return self._run(rows, f"SELECT {chosen} FROM given")

    def where(self, rows: pa.Table, condition: Expression) -> pa.Table:
        return self._run(rows, f"SELECT * FROM given WHERE {condition.sql('duckdb')}")

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
        self.engine.batch, self.engine.stage = batch, 0
        found: list[Row] = Compiler(self.engine).changes(self.plan).to_pylist()
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

    def shown(self) -> list[tuple[Any, ...]]:
        """The visible columns of all rows."""
        return sorted(
            (
                tuple(v for k, v in row.items() if not k.startswith("_"))
                for row in self.rows.values()
            ),
            key=repr,
        )
