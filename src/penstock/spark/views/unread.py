"""Nothing in a query may go unread: what the planner does not look at, it refuses.

The parser knows the SQL of many engines, and keeps what it finds as arguments of nodes. For each
node of which queries are made it stands here which arguments are read; any other one that is there
would change the result, and is refused by its name. What is inside of expressions is Spark's to
know, as long as all of it can be written again (`spark_sql`).
"""

from __future__ import annotations

import re
from typing import Final

from sqlglot import exp
from sqlglot.errors import ErrorLevel, UnsupportedError

from penstock.spark.views.expressions import Expression
from penstock.spark.views.refusing import DIALECT, Text, start_of

_NO_ORDER: Final = "a view is a set of rows by key, which has no order"
_NOT_KEPT: Final = "one deleted row would bring in another that was never kept"
_NO_WINDOWS: Final = "window functions cannot be maintained"
_OLD: Final = "a view is over tables as they are now"
_TOTALS: Final = "it is several groupings in one"
_EACH: Final = "Unite a SELECT for each of them, with UNION ALL."
# Arguments that are refused for a reason of their own: the words that they begin with, and why.
_CLAUSES: Final = {
    "order": ("ORDER BY", "a change could move all other rows; a view is a set of rows by key"),
    "sort": ("SORT BY", _NO_ORDER),
    "cluster": ("CLUSTER BY", _NO_ORDER),
    "distribute": ("DISTRIBUTE BY", _NO_ORDER),
    "limit": ("LIMIT", _NOT_KEPT),
    "offset": ("OFFSET", _NOT_KEPT),
    "qualify": ("QUALIFY", _NO_WINDOWS),
    "laterals": ("LATERAL", "lateral views are not taken"),
    "pivots": ("PIVOT", "pivots are not taken"),
    "sample": ("TABLESAMPLE", "samples are another one each time"),
    "windows": ("WINDOW", _NO_WINDOWS),
    "match": ("MATCH_RECOGNIZE", "patterns are not views"),
    "version": ("AS OF", _OLD),
    "joins": ("JOIN", "a join inside of another one is not taken"),
    "rollup": ("ROLLUP", _TOTALS),
    "cube": ("CUBE", _TOTALS),
    "grouping_sets": ("GROUPING SETS", _TOTALS),
}
_ADVICE: Final = {
    "version": "Leave it out.",
    "joins": "Write the joins one after another, each with its ON.",
    "rollup": _EACH,
    "cube": _EACH,
    "grouping_sets": _EACH,
}
# What is read of each node. Hints, and whether a WITH is computed once, change no result.
_READ: Final[dict[type[Expression], frozenset[str]]] = {
    exp.Select: frozenset(
        {"expressions", "from", "joins", "where", "group", "having", "distinct", "with", "hint"}
    ),
    exp.Union: frozenset({"this", "expression", "distinct", "by_name", "with"}),
    exp.Subquery: frozenset({"this", "alias", "with"}),
    exp.With: frozenset({"expressions", "recursive"}),
    exp.CTE: frozenset({"this", "alias", "materialized"}),
    exp.From: frozenset({"this"}),
    exp.Table: frozenset({"this", "db", "catalog", "alias"}),
    exp.TableAlias: frozenset({"this", "columns"}),
    exp.Join: frozenset({"this", "on", "using", "side", "kind", "method"}),
    exp.Where: frozenset({"this"}),
    exp.Group: frozenset({"expressions", "all"}),
    exp.Having: frozenset({"this"}),
    exp.Distinct: frozenset({"expressions", "on"}),
    exp.Star: frozenset({"except"}),
    exp.Filter: frozenset({"this", "expression"}),
    exp.Count: frozenset({"this", "expressions", "big_int"}),
    exp.CountIf: frozenset({"this"}),
    exp.Sum: frozenset({"this"}),
    exp.Avg: frozenset({"this"}),
    exp.Min: frozenset({"this", "expressions"}),
    exp.Max: frozenset({"this", "expressions"}),
}
_AS_EXPRESSIONS: Final = {exp.Rollup: "rollup", exp.Cube: "cube", exp.GroupingSets: "grouping_sets"}


def check(text: Text, tree: Expression) -> None:
    """ViewError, with the place, for the first thing in a query that would go unread."""
    for node in tree.walk():
        read = _READ.get(type(node))
        if read is not None:
            there = {name.rstrip("_"): value for name, value in node.args.items()
                     if name.rstrip("_") not in read and _is_there(value)}  # fmt: skip
            for name in (*_CLAUSES, *there):
                if name in there:
                    _refuse(text, node, name, there[name])
        for kind, name in _AS_EXPRESSIONS.items():
            if isinstance(node, kind):
                _refuse(text, node, name, node)


def _is_there(value: object) -> bool:
    return value is not None and value is not False and value != []


def _refuse(text: Text, node: Expression, name: str, value: object) -> None:
    first = value[0] if isinstance(value, list) else value
    near = first if isinstance(first, Expression) and start_of(first) else node
    advice = _ADVICE.get(name, "Leave it out; whoever reads the view can do it.")
    if name in _CLAUSES:
        words, reason = _CLAUSES[name]
        if isinstance(first, exp.Version):
            words = f"{first.name} {words}"
        text.refuse(text.keyword(words, near),
                    f"{words} cannot be maintained: {reason}", advice)  # fmt: skip
    # It is named for its words, or nearly.
    words = name.replace("_", " ").upper()
    at = near if near is not node else text.keyword(words, near)
    text.refuse(at, f"{words} is not taken in {node.key.upper()}", "Leave it out.")


def spark_sql(expression: Expression) -> str:
    """In Spark's SQL; UnsupportedError if something would be lost."""
    return str(expression.sql(dialect=DIALECT, unsupported_level=ErrorLevel.RAISE))


def check_written(text: Text, expression: Expression) -> None:
    """ViewError, with the place, for what cannot be written again as it was meant."""
    try:
        spark_sql(expression)
    except UnsupportedError as error:
        for part in expression.iter_expressions():
            check_written(text, part)
        told = re.sub(r" when targeting Spark\.?$", "", str(error).splitlines()[0]).rstrip(".")
        text.refuse(expression, f"this cannot be told to Spark: {told[:1].lower()}{told[1:]}",
                    "Use another function.")  # fmt: skip
