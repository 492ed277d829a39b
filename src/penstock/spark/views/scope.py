"""Names in expressions: which column of which table is meant; and what no view can contain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlglot import exp

from penstock.spark.views.expressions import Expression
from penstock.spark.views.plan import Result, column, flat
from penstock.spark.views.refusing import Text

# Their answer is another one each time: what was added could not be taken away again.
_MOODY: Final = frozenset(
    {
        *("now", "current_timestamp", "current_date", "current_time", "localtimestamp", "curdate"),
        *("rand", "random", "randn", "uuid", "uniform", "randstr", "shuffle"),
        *("monotonically_increasing_id", "spark_partition_id", "input_file_name"),
        *("current_user", "session_user", "user"),
    }
)
_MOODY_TYPES: Final = (
    exp.CurrentTimestamp, exp.CurrentDate, exp.CurrentTime, exp.CurrentDatetime, exp.CurrentUser,
    exp.Rand, exp.Randn, exp.Uuid,
)  # fmt: skip
_AGGREGATES: Final = {exp.Sum: "sum", exp.Avg: "avg", exp.Min: "min", exp.Max: "max"}


@dataclass(slots=True)
class Scope:
    """The tables that can be named, each with its columns."""

    text: Text
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # Columns that a join has by USING: of these any table's will do.
    merged: set[str] = field(default_factory=set)

    def add(self, alias: str, columns: Sequence[str]) -> None:
        self.tables[alias] = tuple(columns)

    def resolved(self, expression: Expression) -> Expression:
        """The expression with flat names; ViewError for names that are not known."""
        self.check(expression)
        found = expression.copy().transform(self._resolve)
        assert isinstance(found, Expression)
        return found

    def _resolve(self, node: Expression) -> Expression:
        if not isinstance(node, exp.Column) or isinstance(node.this, exp.Star):
            return node
        if node.meta.get("flat"):
            return node
        parts = [each.name for each in node.parts]
        alias, own, rest = self._find(parts, node)
        made: Expression = column(flat(alias, own))
        made.meta.update(start=_start(node), flat=True, shown=".".join(parts))
        for each in rest:
            made = exp.Dot(this=made, expression=exp.to_identifier(each, quoted=True))
        return made

    def _find(self, parts: list[str], node: Expression) -> tuple[str, str, list[str]]:
        if len(parts) > 1 and (alias := _same(parts[0], self.tables)) is not None:
            own = _same(parts[1], self.tables[alias])
            if own is not None:
                return alias, own, parts[2:]
            self.text.refuse(node, f"{alias} has no column {parts[1]}",
                             f"It has {', '.join(self.tables[alias])}.")  # fmt: skip
        matches = [(alias, own) for alias, columns in self.tables.items()
                   if (own := _same(parts[0], columns)) is not None]  # fmt: skip
        if len(matches) > 1 and parts[0].lower() not in self.merged:
            both = " and ".join(alias for alias, _ in matches)
            self.text.refuse(node, f"column {parts[0]} is in {both}",
                             f"Say which one: {matches[0][0]}.{parts[0]}.")  # fmt: skip
        if matches:
            return (*matches[0], parts[1:])
        there = [flat(alias, own) for alias, columns in self.tables.items() for own in columns]
        what = f"table {parts[0]}" if len(parts) > 1 else f"column {parts[0]}"
        raise self.text.error(node, f"there is no {what}", f"There are {', '.join(there)}.")

    def check(self, expression: Expression) -> None:
        """ViewError for what cannot be kept up to date by changes."""
        for node in expression.walk():
            if isinstance(node, exp.Window):
                self.text.refuse(
                    node,
                    "window functions cannot be maintained: one change could change the result "
                    "for all other rows",
                    "Use GROUP BY where an aggregate of a group will do.",
                )
            if isinstance(node, exp.Subquery | exp.Select | exp.Exists):
                self.text.refuse(
                    node,
                    "subqueries in expressions cannot be maintained",
                    "Join with the table, or with a derived table, instead.",
                )
            name = node.name.lower() if isinstance(node, exp.Anonymous) else ""
            if (
                isinstance(node, _MOODY_TYPES)
                or name in _MOODY
                or (isinstance(node, exp.TimeToUnix | exp.UnixToTime) and node.this is None)
            ):
                told = name or node.sql_name().lower() if isinstance(node, exp.Func) else name
                self.text.refuse(
                    node,
                    f"{told} gives another answer each time, so what was added by it could not be "
                    "taken away again",
                    "Let the rows carry it as a column.",
                )

    def where_of(self, node: Expression) -> set[str]:
        """The tables that a resolved expression speaks of."""
        found = set()
        for each in node.find_all(exp.Column):
            for alias, columns in self.tables.items():
                if any(flat(alias, own) == each.name for own in columns):
                    found.add(alias)
        return found


def _start(node: Expression) -> int:
    return min((each.meta["start"] for each in node.walk() if "start" in each.meta), default=0)


def _same(name: str, names: Sequence[str] | Mapping[str, object]) -> str | None:
    """A name among others: as it is written, else whatever its case."""
    if name in names:
        return name
    return next((each for each in names if each.lower() == name.lower()), None)


def conjuncts(condition: Expression) -> list[Expression]:
    """The parts of a condition that must all hold."""
    if isinstance(condition, exp.And):
        return [*conjuncts(condition.this), *conjuncts(condition.expression)]
    if isinstance(condition, exp.Paren):
        inner = conjuncts(condition.this)
        return inner if len(inner) > 1 else [condition]
    return [condition]


def aggregate(node: Expression, name: str, text: Text) -> Result | None:
    """An aggregate function as a result under a name; None if it is none; ViewError if unknown."""
    condition = None
    call = node
    if isinstance(node, exp.Filter):
        condition, call = node.expression.this, node.this
    if isinstance(call, exp.CountIf):
        call, condition = exp.Count(this=exp.Star()), call.this
    if not isinstance(call, exp.AggFunc):
        return None
    if isinstance(call, exp.Count):
        return _count(node, call, name, condition, text)
    function = _AGGREGATES.get(type(call))
    if function is None or isinstance(call.this, exp.Distinct) or call.expressions:
        shown = call.sql(dialect="spark").split("(")[0].lower()
        what = f"{shown}(DISTINCT ...)" if isinstance(call.this, exp.Distinct) else shown
        text.refuse(node, f"{what} cannot be maintained here",
                    "There are count, sum, avg, min, max and count(DISTINCT ...).")  # fmt: skip
    argument = _when(condition, call.this)
    return Result(name, function, argument, node.sql(dialect="spark"))  # type: ignore[arg-type]


def _count(
    node: Expression,
    call: exp.Count,
    name: str,
    condition: Expression | None,
    text: Text,
) -> Result:
    shown = node.sql(dialect="spark")
    inner = call.this
    if isinstance(inner, exp.Distinct):
        if len(inner.expressions) != 1:
            text.refuse(node, "count(DISTINCT ...) takes one expression here",
                        "Put the columns into one, as in concat_ws('|', a, b).")  # fmt: skip
        return Result(name, "count distinct", _when(condition, inner.expressions[0]), shown)
    if call.expressions:
        text.refuse(node, "count takes one expression here", "Count one column, or count(*).")
    if isinstance(inner, exp.Star) or inner is None:
        if condition is None:
            return Result(name, "count", None, shown)
        return Result(name, "count", _when(condition, exp.Literal.number(1)), shown)
    return Result(name, "count", _when(condition, inner), shown)


def _when(condition: Expression | None, value: Expression) -> Expression:
    if condition is None:
        return value.copy()
    return exp.case().when(condition.copy(), value.copy())
