"""Names in expressions: which column of which table is meant; and what no view can contain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlglot import exp

from penstock.spark.views import unread
from penstock.spark.views.expressions import Expression
from penstock.spark.views.plan import Result, column, flat
from penstock.spark.views.refusing import DIALECT, Text, start_of

# Their answer is another one each time: what was added could not be taken away again. Spark says so
# of most (`blaming`), and not of the time, nor of who asks.
_MOODY: Final = frozenset(
    {
        *("now", "current_timestamp", "current_date", "current_time", "current_datetime"),
        *("localtimestamp", "localtime", "curdate", "getdate"),
        *("rand", "random", "randn", "uuid", "uniform", "randstr", "shuffle"),
        *("monotonically_increasing_id", "spark_partition_id", "input_file_name"),
        *("current_user", "session_user", "user"),
    }
)
# As a date or a time they are those of the moment.
_MOODY_TEXTS: Final = frozenset({"now", "today", "yesterday", "tomorrow"})
# Of one row they make several, and all of them would have its key.
_GENERATORS: Final = frozenset(
    {
        *("explode", "explode_outer", "posexplode", "posexplode_outer", "inline", "inline_outer"),
        *("stack", "json_tuple", "variant_explode", "variant_explode_outer"),
    }
)
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
        placed(made, node).meta.update(flat=True, shown=".".join(parts))
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
            both = " and ".join(alias or "what was selected" for alias, _ in matches)
            named = all(alias for alias, _ in matches)
            self.text.refuse(node, f"column {parts[0]} is in {both}",
                             f"Say which one: {matches[0][0]}.{parts[0]}." if named
                             else 'Give what was selected a name: .alias("NAME").')  # fmt: skip
        if matches:
            return (*matches[0], parts[1:])
        if parts[0].lower() in _MOODY:
            self.text.refuse(node, *moody(parts[0].lower()))
        there = [flat(alias, own) for alias, columns in self.tables.items() for own in columns]
        what = f"table {parts[0]}" if len(parts) > 1 else f"column {parts[0]}"
        raise self.text.error(node, f"there is no {what}", f"There are {', '.join(there)}.")

    def check(self, expression: Expression) -> None:
        """ViewError for what cannot be kept up to date by changes."""
        unread.check_written(self.text, expression)
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
            if isinstance(node, exp.Star) and not isinstance(node.parent, exp.Count):
                self.text.refuse(node, "* stands for columns here", "Name the columns.")
            if isinstance(node, exp.Cast) and isinstance(node.this, exp.Literal):
                word = node.this.name.strip().lower()
                if word in _MOODY_TEXTS and node.to.is_type(*exp.DataType.TEMPORAL_TYPES):
                    self.text.refuse(node, *moody(word))
            if isinstance(node, exp.Func):
                self._check_function(node)

    def _check_function(self, node: exp.Func) -> None:
        name = called(node)
        if name in _GENERATORS:
            self.text.refuse(node, *generates(name))
        if name in _MOODY:
            # Some have no place of their own: CURRENT_DATE, and what unix_timestamp() stands for.
            known = node.parent is None or any("start" in each.meta for each in node.walk())
            at = node if known else self.text.keyword(name, node.parent or node)
            self.text.refuse(at, *moody(name))

    def where_of(self, node: Expression) -> set[str]:
        """The tables that a resolved expression speaks of."""
        found = set()
        for each in node.find_all(exp.Column):
            for alias, columns in self.tables.items():
                if any(flat(alias, own) == each.name for own in columns):
                    found.add(alias)
        return found


def called(node: Expression) -> str:
    """The name of a function: as in the text, or as the parser has it."""
    if isinstance(node, exp.Anonymous):
        return node.name.lower()
    return str(node.sql_name()).lower() if isinstance(node, exp.Func) else "this"


def moody(name: str) -> tuple[str, str]:
    """Why there is no view with what gives another answer each time, and what to do."""
    reason = f"{name} gives another answer each time, so what was added could not be taken away"
    return f"{reason} again", "Let the rows carry it as a column."


def generates(name: str) -> tuple[str, str]:
    """Why there is no view with what makes several rows of one, and what to do."""
    return (
        f"{name} makes several rows of one, which would all have the same key",
        "Let a flow before the view do it, which gives each row a key of its own.",
    )


def placed(made: Expression, node: Expression) -> Expression:
    """What was made, with the place of what it stands for, and how that was written."""
    text = next((each.meta["text"] for each in node.walk() if "text" in each.meta), None)
    made.meta.update(start=start_of(node), text=text, shown=node.sql(dialect=DIALECT))
    return made


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
        shown = call.sql(dialect=DIALECT).split("(")[0].lower()
        what = f"{shown}(DISTINCT ...)" if isinstance(call.this, exp.Distinct) else shown
        text.refuse(node, f"{what} cannot be maintained here",
                    "There are count, sum, avg, min, max and count(DISTINCT ...).")  # fmt: skip
    argument = _when(condition, call.this)
    shown = node.sql(dialect=DIALECT)
    return Result(name, function, argument, shown, node)  # type: ignore[arg-type]


def _count(
    node: Expression,
    call: exp.Count,
    name: str,
    condition: Expression | None,
    text: Text,
) -> Result:
    shown = node.sql(dialect=DIALECT)
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
