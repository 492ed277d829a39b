"""Expressions that Spark tries: what they give for a row, or what is wrong with it.

Spark has an expression, the one below its `try_` functions, that is null where another raises an
error. It is put around a struct of the expression's value, so that null is an error and nothing
else. What is to blame is the smallest part that fails, asked for in the order in which Spark
computes the parts, and only where it does compute them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.classic.column import Column as ClassicColumn
from sqlglot import exp

from penstock.spark import sql
from penstock.spark.views.expressions import Expression
from penstock.spark.views.plan import as_column, as_written, columns_in
from penstock.spark.views.refusing import DIALECT, place_of
from penstock.spark.views.set_aside import COLUMNS, FAILED, ROW
from penstock.spark.views.unread import spark_sql

if TYPE_CHECKING:
    from penstock.spark.views.compiling import Columns, Key

_VALUE: Final = "v"
_TRY: Final = "_penstock_try"
# A value in a reason is not longer.
_SHOWN_CHARACTERS: Final = 100
_SHOWN_COLUMNS: Final = 5
_DIVIDING: Final = (exp.Div, exp.IntDiv, exp.Mod)
_COMPUTING: Final = (exp.Add, exp.Sub, exp.Mul, exp.Neg, exp.Abs, exp.Sum)
_NOT_FITTING: Final = "the result does not fit its type"


def select(rows: DataFrame, wanted: Columns, key: Key) -> DataFrame:
    """Columns; what cannot be computed is null, and FAILED and ROW tell of it."""
    carried = [name for name in COLUMNS if name in rows.columns]
    asked = {name: each for name, each in wanted if not _is_safe(each)}
    made: dict[str, Column] = {}
    if asked:
        rows, tries = _with_tries(rows, list(asked.values()))
        made = {name: own[_VALUE] for name, own in zip(asked, tries, strict=True)}
        told = _told(rows, list(asked.values()), tries, key)
        carried = [name for name in carried if name not in told]
        made |= told
    picked = {name: F.expr(spark_sql(each)) for name, each in wanted if name not in made}
    order = [*dict(wanted), *carried, *(name for name in made if name not in dict(wanted))]
    known = {**picked, **made}
    return rows.select(*(known.get(name, F.col(sql.quoted(name))).alias(name) for name in order))


def where(rows: DataFrame, condition: Expression, key: Key) -> DataFrame:
    """The rows for which a condition holds, and those that failed, in this or before."""
    names = [name for name in rows.columns if name not in {FAILED, ROW}]
    rows, (own,) = _with_tries(rows, [condition])
    told = _told(rows, [condition], [own], key)
    keeps = told[FAILED].isNotNull() | F.coalesce(own[_VALUE], F.lit(False))
    columns = [F.col(sql.quoted(name)) for name in names]
    columns += [each.alias(name) for name, each in told.items()]
    return rows.where(keeps).select(*columns)


def _is_safe(expression: Expression) -> bool:
    return as_column(expression) is not None or isinstance(expression, exp.Literal)


def _with_tries(
    rows: DataFrame, expressions: Sequence[Expression]
) -> tuple[DataFrame, list[Column]]:
    names = [f"{_TRY}{at}" for at in range(len(expressions))]
    tries = [_tried(rows.sparkSession, each).alias(name)
             for name, each in zip(names, expressions, strict=True)]  # fmt: skip
    return rows.select("*", *tries), [F.col(name) for name in names]


def _tried(spark: SparkSession, expression: Expression) -> Column:
    """A struct of the value; null if there is an error."""
    jvm: Any = spark._jvm
    column: Any = F.expr(f"named_struct('{_VALUE}', {spark_sql(expression)})")
    utils = jvm.org.apache.spark.sql.classic.ExpressionUtils
    tries = jvm.org.apache.spark.sql.catalyst.expressions.TryEval
    return cast("Column", ClassicColumn(utils.column(tries(utils.expression(column._jc)))))


# ---- what is wrong ------------------------------------------------------------------------


def _told(
    rows: DataFrame, expressions: Sequence[Expression], tries: Sequence[Column], key: Key
) -> Mapping[str, Column]:
    """FAILED and ROW, as they are after some tries."""
    spark = rows.sparkSession
    reason = F.lit(None).cast("string")
    for each, own in reversed(list(zip(expressions, tries, strict=True))):
        reason = F.when(own.isNull(), _reason(spark, each)).otherwise(reason)
    own_row = F.to_json(
        F.struct(*(F.col(sql.quoted(name)).alias(shown) for shown, name in key.items())),
        sql.JSON,
    ) if key else F.lit("{}")  # fmt: skip
    row = F.when(reason.isNotNull(), own_row)
    if FAILED in rows.columns:
        # What failed first is told.
        before = F.col(FAILED)
        row = F.when(before.isNotNull(), F.col(ROW)).otherwise(row)
        reason = F.coalesce(before, reason)
    return {FAILED: reason, ROW: row}


def _short(names: Sequence[str]) -> dict[str, str]:
    """Columns without their tables, where that is enough to tell them apart."""
    short = [name.rpartition(".")[2] for name in names]
    return {name: own if short.count(own) == 1 else name
            for name, own in zip(names, short, strict=True)}  # fmt: skip


def _reason(spark: SparkSession, expression: Expression) -> Column:
    """Why an expression that has failed did."""
    reason = _text_of(expression)
    for conditions, part in reversed(list(_parts(expression, ()))):
        if part is expression:
            continue
        is_it = _tried(spark, part).isNull()
        for each in conditions:
            is_it = F.expr(spark_sql(each)) & is_it
        reason = F.when(is_it, _text_of(part)).otherwise(reason)
    return reason


def _text_of(part: Expression) -> Column:
    """A part and what is wrong with it, of a row for which it fails."""
    place, text = place_of(part), as_written(part)
    what: Column = F.lit("Spark raises an error")
    if isinstance(part, _DIVIDING):
        divisor = f"coalesce(({spark_sql(part.expression)}) = 0, false)"
        what = F.when(F.expr(divisor), F.lit("division by zero")).otherwise(F.lit(_NOT_FITTING))
    elif isinstance(part, _COMPUTING):
        what = F.lit(_NOT_FITTING)
    elif isinstance(part, exp.Cast) and not part.args.get("safe"):
        value = _cut(f"({spark_sql(part.this)})")
        kind = part.to.sql(dialect=DIALECT).lower()
        what = F.concat(F.lit("'"), value, F.lit(f"' is no {kind}"))
    values: list[Column] = []
    for name, own in list(_short(sorted(columns_in(part))).items())[:_SHOWN_COLUMNS]:
        values += [F.lit(f"{', ' if values else ' ('}{own} = "), _cut(sql.quoted(name))]
    end = [F.lit(")")] if values else []
    return F.concat(F.lit(f"{place}: {text}: " if place else f"{text}: "), what, *values, *end)


def _cut(text: str) -> Column:
    """A value as text that is not too long."""
    shown = F.coalesce(F.expr(f"CAST({text} AS string)"), F.lit("null"))
    cut = F.concat(F.substring(shown, 1, _SHOWN_CHARACTERS), F.lit("..."))
    return F.when(F.length(shown) > _SHOWN_CHARACTERS, cut).otherwise(shown)


def _parts(
    expression: Expression, conditions: tuple[Expression, ...]
) -> Iterator[tuple[tuple[Expression, ...], Expression]]:
    """The parts that may fail, each with the conditions under which it is computed."""
    if isinstance(expression, exp.Case | exp.If):
        yield from _branches(expression, conditions)
    elif isinstance(expression, exp.And | exp.Or):
        yield from _parts(expression.this, conditions)
        first: Expression = exp.func("coalesce", expression.this.copy(), exp.true())
        if isinstance(expression, exp.Or):
            first = exp.not_(exp.func("coalesce", expression.this.copy(), exp.false()))
        yield from _parts(expression.expression, (*conditions, first))
    elif isinstance(expression, exp.Coalesce):
        # What comes later is computed only where what stands before it is null.
        yield from _parts(expression.this, conditions)
    elif isinstance(expression, exp.Lambda):
        return
    else:
        for each in expression.iter_expressions():
            yield from _parts(each, conditions)
    is_part = isinstance(expression, exp.Func | exp.Binary | exp.Unary | exp.Bracket)
    if is_part and not isinstance(expression, exp.Paren) and not expression.meta.get("guard"):
        yield conditions, expression


def _branches(
    expression: exp.Case | exp.If, conditions: tuple[Expression, ...]
) -> Iterator[tuple[tuple[Expression, ...], Expression]]:
    branches = [expression] if isinstance(expression, exp.If) else expression.args.get("ifs") or []
    subject = expression.this if isinstance(expression, exp.Case) else None
    otherwise = expression.args.get("false" if isinstance(expression, exp.If) else "default")
    if subject is not None:
        yield from _parts(subject, conditions)
    for each in branches:
        asked = each.this if subject is None else exp.EQ(this=subject.copy(), expression=each.this)
        yield from _parts(asked, conditions)
        holds = exp.func("coalesce", exp.paren(asked.copy()), exp.false())
        yield from _parts(each.args["true"], (*conditions, holds))
        conditions = (*conditions, exp.not_(holds.copy()))
    if otherwise is not None:
        yield from _parts(otherwise, conditions)
