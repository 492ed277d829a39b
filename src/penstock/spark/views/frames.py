"""Views from DataFrames: `of` a changelog, then where, join, group_by, and `changes`.

    orders = views.of(orders, "orders", key="id").where("state = 'paid'")
    customers = views.of(customers, "customers", key="id")
    view = (
        orders.join(customers, on="orders.customer_id = customers.id", how="left")
        .group_by("country")
        .agg(n="count(*)", revenue="sum(amount)")
    )
    return view.changes()

or the same in SQL: `views.sql("SELECT ...", orders=orders, customers=customers)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sqlglot import exp

from penstock.spark.state import Planning, current
from penstock.spark.state.bounds import warn_unbounded
from penstock.spark.views.columns import DELETED
from penstock.spark.views.compiling import Compiler
from penstock.spark.views.expressions import Expression
from penstock.spark.views.plan import (
    Filter,
    Group,
    How,
    Join,
    Node,
    Project,
    Result,
    Table,
    Union,
    as_column,
    column,
    columns,
    flat,
    key_of,
)
from penstock.spark.views.refusing import Text, ViewError
from penstock.spark.views.scope import Scope, aggregate, conjuncts
from penstock.spark.views.shape import shape
from penstock.spark.views.sql import Schema, plan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class View:
    """A relation that is kept up to date. Each method gives another one."""

    node: Node
    frames: Mapping[str, DataFrame]
    # Which columns can be named, by table.
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that are the key of what `changes` gives."""
        return key_of(self._whole())

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the view."""
        return columns(self._whole())

    def where(self, condition: str) -> View:
        """The rows for which a condition of SQL holds."""
        text, scope = self._scope(condition)
        found = scope.resolved(text.parsed())
        node = self.node
        for each in conjuncts(found):
            node = Filter(node, each)
        return replace(self, node=node)

    def select(self, *names: str, **expressions: str) -> View:
        """Columns by name, and by expressions of SQL under new names."""
        outputs = self._named("select", names, expressions)
        return View(Project(self.node, outputs), self.frames, {"": tuple(dict(outputs))})

    def alias(self, name: str) -> View:
        """The same under a name, as a table has one: what was selected can so be joined."""
        node = self._whole()
        shown = columns(node)
        outputs = tuple((flat(name, each), column(each)) for each in shown)
        return View(Project(node, outputs, name), self.frames, {name: shown})

    def join(self, other: View, on: str, how: How = "inner") -> View:
        """Both, where equalities hold, such as "orders.customer_id = customers.id".

        With how="left" rows without another side stay, with nulls.
        """
        if how not in {"inner", "left"}:
            raise ViewError(f"how={how!r} is not known", advice='Use "inner" or "left".')
        twice = set(self.names) & set(other.names)
        if "" in twice:
            raise ViewError("both sides of the join were selected or grouped, and have no names",
                            advice='Give one a name: .alias("NAME").')  # fmt: skip
        if twice:
            raise ViewError(f"both sides of the join have a table {', '.join(sorted(twice))}",
                            advice='Give one another name, with .alias("NAME").')  # fmt: skip
        text = Text(on)
        scope = Scope(text, {**self.names, **other.names})
        parts = conjuncts(scope.resolved(text.parsed()))
        keys = tuple(self._equality(each, scope, other, text) for each in parts)
        node = Join(self.node, other.node, keys, how)
        return View(node, self._frames_with(other), {**self.names, **other.names})

    def _equality(
        self, each: Expression, scope: Scope, other: View, text: Text
    ) -> tuple[Expression, Expression]:
        if isinstance(each, exp.EQ):
            one, two = scope.where_of(each.this), scope.where_of(each.expression)
            if one and two and one <= set(self.names) and two <= set(other.names):
                return each.this, each.expression
            if one and two and two <= set(self.names) and one <= set(other.names):
                return each.expression, each.this
        raise text.error(
            each,
            "a join takes equalities of one side with the other",
            "Put other conditions into where(...).",
        )

    def group_by(self, *expressions: str, **named: str) -> Grouped:
        """Groups by columns, and by expressions of SQL under new names."""
        return Grouped(self, self._named("group_by", expressions, named))

    def agg(self, **results: str) -> View:
        """One row of aggregates over everything."""
        return Grouped(self, ()).agg(**results)

    def distinct(self) -> View:
        """Each combination of the columns once."""
        node = self._whole()
        by = tuple((name, column(name)) for name in columns(node))
        return View(Group(node, by, ()), self.frames, {"": columns(node)})

    def union(self, other: View) -> View:
        """All rows of both, which must have the same columns in the same order."""
        one, two = self._project(), other._project()
        if len(columns(one)) != len(columns(two)):
            raise ViewError(f"a union of {len(columns(one))} and {len(columns(two))} columns")
        inputs = (*(one.inputs if isinstance(one, Union) else (one,)),
                  *(two.inputs if isinstance(two, Union) else (two,)))  # fmt: skip
        return View(Union(inputs), self._frames_with(other), {"": columns(one)})

    def changes(self) -> DataFrame:
        """What a micro-batch changes: columns, hidden ones of the key, `_key` and `_deleted`."""
        from penstock.spark.views.on_spark import SparkEngine, frame_of

        for name, rows in self.frames.items():
            if not {"_after", DELETED} & set(rows.columns):
                warn_unbounded(
                    f"table {name!r} of the view is a stream of rows of which none is ever deleted:"
                    " each key that comes is kept for ever",
                    f"Read it as a changelog (changelog= or debezium=), give it a column {DELETED},"
                    " or take windows for what are events.",
                )
        node, context = self._whole(), current()
        if isinstance(context, Planning):
            types = {name: types_of(rows) for name, rows in self.frames.items()}
            context.parts += shape(node, types)
        return frame_of(Compiler(SparkEngine(self.frames)).changes(node))

    def _scope(self, sql: str) -> tuple[Text, Scope]:
        text = Text(sql)
        return text, Scope(text, dict(self.names))

    def _named(
        self, method: str, names: Sequence[str], more: Mapping[str, str]
    ) -> tuple[tuple[str, Expression], ...]:
        """Expressions by their names: the last part of a column's, or as given."""
        found: dict[str, tuple[str, Expression]] = {}
        for name, sql in [*((each.split(".")[-1], each) for each in names), *more.items()]:
            text, scope = self._scope(sql)
            resolved = scope.resolved(text.parsed())
            if name.lower() in found:
                text.refuse(0, f"two columns are called {name}",
                            f'Give one another name: {method}(other="{sql}").')  # fmt: skip
            found[name.lower()] = name, resolved
        return tuple(found.values())

    def _frames_with(self, other: View) -> Mapping[str, DataFrame]:
        """The tables of both, by their names."""
        for name, rows in other.frames.items():
            if self.frames.get(name, rows) is not rows:
                raise ViewError(
                    f"two tables are called {name!r}",
                    advice="Give one another name, with of(rows, NAME, ...).",
                )
        return {**self.frames, **other.frames}

    def _project(self) -> Project | Union:
        node = self._whole()
        if isinstance(node, Project | Union):
            return node
        return Project(node, tuple((name, column(name)) for name in columns(node)))

    def _whole(self) -> Node:
        """As a relation with plain names: tables and joins show all their columns."""
        if set(self.names) == {""}:
            return self.node
        taken: dict[str, Expression] = {}
        for alias, own in self.names.items():
            for name in own:
                shown = name
                while shown.lower() in map(str.lower, taken):
                    shown = f"{alias or 'selected'}_{shown}"
                taken[shown] = column(flat(alias, name))
        return Project(self.node, tuple(taken.items()))


@dataclass(frozen=True, slots=True)
class Grouped:
    """Groups of a view's rows, of which `agg` says something."""

    view: View
    by: tuple[tuple[str, Expression], ...]

    def agg(self, **results: str) -> View:
        """Aggregates under names: n="count(*)", revenue="sum(amount)"."""
        made: list[Result] = []
        by = {name.lower() for name, _ in self.by}
        for name, sql in results.items():
            text, scope = self.view._scope(sql)
            if name.lower() in by:
                text.refuse(0, f"two columns are called {name}", "Give one another name.")
            found = aggregate(scope.resolved(text.parsed()), name, text)
            if found is None:
                text.refuse(0, "this is no aggregate", 'Such as n="count(*)" or s="sum(amount)".')
            made.append(found)
        node = Group(self.view.node, self.by, tuple(made))
        return View(node, self.view.frames, {"": columns(node)})


def of(rows: DataFrame, name: str, *, key: str | Sequence[str]) -> View:
    """A changing table: a stream of its changes, under a name, with its primary key.

    `rows` is a stream of change events, `stream(..., debezium=...)` or `stream(...,
    changelog=...)`, or of rows of which each takes the place of the one before with the same key
    (a column `_deleted` says that it is gone). What a row was before is remembered here, so events
    may come twice, and without telling it.
    """
    keys = (key,) if isinstance(key, str) else tuple(key)
    own = columns_of(rows)
    for each in keys:
        if each not in own:
            raise ViewError(f"table {name!r} has no column {each!r}, which is to be its key",
                            advice=f"It has {', '.join(own)}.")  # fmt: skip
    return View(Table(name, name, keys, own), {name: rows}, {name: own})


def columns_of(rows: DataFrame) -> tuple[str, ...]:
    """The columns of the table that a stream has the changes of."""
    if "_after" in rows.columns:
        kind: Any = rows.schema["_after"].dataType
        return tuple(kind.names)
    return tuple(each for each in rows.columns if not each.startswith("_"))


def types_of(rows: DataFrame) -> dict[str, str]:
    """The columns of the table that a stream has the changes of, with their types."""
    if "_after" in rows.columns:
        kind: Any = rows.schema["_after"].dataType
        return {each.name: each.dataType.simpleString() for each in kind.fields}
    return dict(rows.dtypes)


def sql(text: str, keys: Mapping[str, str | Sequence[str]], **frames: DataFrame) -> View:
    """A view from a SELECT over streams of changes; `keys` are their primary keys by table."""
    tables = {}
    for name, rows in frames.items():
        if name not in keys:
            raise ViewError(
                f"the key of table {name!r} is not given",
                advice=f'Say which columns it is: keys={{"{name}": "id"}}.',
            )
        key = keys[name]
        tables[name] = Schema(columns_of(rows), (key,) if isinstance(key, str) else tuple(key))
    node = _planned(text, tuple(tables.items()))
    return View(node, frames, {"": columns(node)})


@lru_cache(maxsize=64)
def _planned(text: str, tables: tuple[tuple[str, Schema], ...]) -> Node:
    """Micro-batches ask for the same view again and again."""
    return plan(text, dict(tables))


__all__ = ["Grouped", "View", "as_column", "of", "sql"]
