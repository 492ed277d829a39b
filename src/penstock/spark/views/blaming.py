"""Which part of an expression Spark does not take, and why, in a line.

Spark names the whole expression, as it was made from the view. Each part is tried by itself: the
smallest one that is refused is to blame, and its place in the view's text is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from pyspark.errors import AnalysisException
from pyspark.sql.classic.dataframe import DataFrame as ClassicFrame
from sqlglot import exp

from penstock.spark.reasons import reason, remedy
from penstock.spark.views.refusing import located
from penstock.spark.views.scope import called, generates, moody
from penstock.spark.views.unread import spark_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock.spark.views.expressions import Expression
    from penstock.spark.views.refusing import ViewError

# From a function's name to what is wrong with it, and what to do.
_Told = Callable[[str], tuple[str, str]]
# What has a value by itself; of other nodes the parts are looked at.
_VALUES: Final = (
    exp.Func, exp.Binary, exp.Unary, exp.Paren, exp.Column, exp.Between, exp.In, exp.Case,
    exp.Bracket,
)  # fmt: skip
_WITH_NUMBERS: Final = (
    exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod, exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE,
)  # fmt: skip
_NUMBERS: Final = frozenset(
    {"tinyint", "smallint", "int", "bigint", "float", "double", "decimal"}
)  # fmt: skip
# Branches of a CASE, and what only functions of functions know.
_NO_VALUES: Final = (exp.If, exp.Kwarg, exp.PropertyEQ, exp.Star)


def explained(
    rows: DataFrame,
    expressions: Sequence[Expression],
    error: AnalysisException,
    *,
    condition: bool = False,
) -> ViewError:
    """What is wrong in expressions over these rows; `condition` says that they are to be true."""
    for each in map(_bare, expressions):
        found = _smallest(rows, each)
        if found is not None:
            return _located(rows, *found)
        if (odd := _smallest_odd(rows, each)) is not None:
            part, told = odd
            return located(part, *told(called(part)))
        if condition and (kind := _kind(rows, each)) != "boolean":
            return _no_condition(each, kind)
    return located(expressions[0], reason(error))


def check_conditions(rows: DataFrame, expressions: Iterable[Expression]) -> None:
    """ViewError for what is taken as a condition and is none, though Spark would make it one."""
    for expression in expressions:
        for each in expression.walk():
            if each.meta.get("condition") and (kind := _kind(rows, each.this)) != "boolean":
                raise _no_condition(each.this, kind)


def check_texts(rows: DataFrame, expressions: Iterable[Expression]) -> None:
    """ViewError where a text stands for a number: Spark would cast it, and fail at a row."""
    for expression in expressions:
        for each in expression.find_all(*_WITH_NUMBERS):
            if each.find_ancestor(exp.Lambda) is None:
                _check_sides(rows, each.this, each.expression)
                _check_sides(rows, each.expression, each.this)


def check_repeatable(rows: DataFrame, made: DataFrame, expressions: Iterable[Expression]) -> None:
    """ViewError for what Spark knows to answer differently each time, or with several rows.

    `made` is what Spark made of the expressions over these rows.
    """
    if _odd(made) is None:
        return
    for each in expressions:
        if (found := _smallest_odd(rows, each)) is not None:
            part, told = found
            raise located(part, *told(called(part)))


def _bare(expression: Expression) -> Expression:
    """Without the condition under which the compiler lets it be computed."""
    if expression.meta.get("guard") and expression.args.get("default") is None:
        bare: Expression = expression.args["ifs"][0].args["true"]
        return bare
    return expression


def _odd(made: DataFrame) -> _Told | None:
    """What is wrong with the last step of a plan, of which its expressions are a part."""
    if not isinstance(made, ClassicFrame):
        return None
    plan = made._jdf.queryExecution().analyzed()
    children = plan.children()
    if children.size() and children.apply(0).nodeName() == "Generate":
        return generates
    if plan.deterministic():
        return None
    parts = plan.expressions()
    sure = all(parts.apply(at).deterministic() for at in range(parts.size()))
    return None if sure else moody


def _smallest_odd(rows: DataFrame, expression: Expression) -> tuple[Expression, _Told] | None:
    told = _odd(rows.selectExpr(spark_sql(expression)))
    if told is None:
        return None
    for part in _parts(expression):
        if (found := _smallest_odd(rows, part)) is not None:
            return found
    return expression, told


def _check_sides(rows: DataFrame, text: Expression, other: Expression) -> None:
    if _is_written_number(text) or _kind(rows, text) != "string":
        return
    number = _kind(rows, other)
    if number.partition("(")[0] in _NUMBERS:
        if isinstance(text.unnest(), exp.Literal):
            raise located(text, f"this is no number, and stands beside one ({number})",
                          "Write a number, or compare with a column of text.")  # fmt: skip
        raise located(
            text,
            f"this is a text, and stands beside a number ({number})",
            f"Say how: try_cast(... AS {number}) is null where it holds none.",
        )


def _is_written_number(expression: Expression) -> bool:
    """Whether it is a number, though perhaps in quotes."""
    literal = expression.unnest()
    if not isinstance(literal, exp.Literal):
        return False
    try:
        float(literal.name)
    except ValueError:
        return False
    return True


def _smallest(
    rows: DataFrame, expression: Expression
) -> tuple[Expression, AnalysisException] | None:
    """The smallest part that is refused, and how; None if all of it is taken."""
    error = _refused(rows, expression)
    if error is None:
        return None
    for part in _parts(expression):
        if (found := _smallest(rows, part)) is not None:
            return found
    return expression, error


def _parts(expression: Expression) -> Iterator[Expression]:
    for each in expression.iter_expressions():
        if isinstance(each, exp.Lambda):
            continue
        if isinstance(each, _VALUES) and not isinstance(each, _NO_VALUES):
            yield each
        else:
            yield from _parts(each)


def _refused(rows: DataFrame, expression: Expression) -> AnalysisException | None:
    try:
        rows.selectExpr(spark_sql(expression))
    except AnalysisException as error:
        return error
    return None


def _kind(rows: DataFrame, expression: Expression) -> str:
    return rows.selectExpr(spark_sql(expression)).schema[0].dataType.simpleString()


def _located(rows: DataFrame, part: Expression, error: AnalysisException) -> ViewError:
    if part.meta.get("condition"):
        return _no_condition(part.this, _kind(rows, part.this))
    told = _with_names(reason(error), part)
    otherwise = "" if "parameters but" in told else "Cast it, or change the expression."
    return located(part, told, remedy(error, otherwise))


def _no_condition(part: Expression, kind: str) -> ViewError:
    return located(part, f"a condition is true or false, and this is {kind}",
                   "Compare it with something, as in amount > 0.")  # fmt: skip


def _with_names(text: str, part: Expression) -> str:
    """Columns as the view names them, and not as they are called on their way."""
    names = {each.name: str(each.meta["shown"]) for each in part.find_all(exp.Column)
             if each.meta.get("shown")}  # fmt: skip
    if names:
        longest = sorted(map(re.escape, names), key=len, reverse=True)
        known = re.compile(rf"(?<!\w)({'|'.join(longest)})(?!\w)")
        text = known.sub(lambda found: names[found[1]], text)
    return text.replace("`", "")
