"""A pattern over a DataFrame: what Spark computes before and after the tasks that match."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

from penstock.spark import sql
from penstock.spark.patterns import operator as O  # noqa: N812
from penstock.spark.patterns import tree
from penstock.spark.patterns.errors import PatternError
from penstock.spark.patterns.plan import (
    DEFAULT_MAX_ROWS,
    Definition,
    Overflow,
    Plan,
    planned,
)
from penstock.spark.patterns.reading import Text
from penstock.spark.patterns.results import END, EVENTS, START, VARIABLE
from penstock.spark.reasons import reason, remedy
from penstock.spark.state import Batch, apply, current
from penstock.spark.state.bounds import warn_unbounded
from penstock.spark.state.schemas import PLAIN_KEY, arrow_schema, is_nested

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MOST_ROWS: Final = 1_000_000
_EVENT_TIME: Final = "_time"
_WATERMARK: Final = "_watermark_end"


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a pattern is to be matched, and what is to come out."""

    by: tuple[str, ...] = ()
    order: str | None = _EVENT_TIME
    measures: Mapping[str, Text] = field(default_factory=dict)
    all_rows: bool = False
    events: bool | tuple[str, ...] = True
    max_rows: int = DEFAULT_MAX_ROWS
    overflow: Overflow = "fail"
    name: str | None = None


def matched(defined: Definition, rows: DataFrame, wanted: Wanted) -> DataFrame:
    """The matches of a pattern over rows."""
    wanted = _checked(defined, rows, wanted)
    types = _Types(rows, rows.schema.json())
    plan = planned(
        defined, rows.columns, types.of, wanted.measures,
        max_rows=wanted.max_rows, overflow=wanted.overflow,
    )  # fmt: skip
    _warn(defined, plan)
    shown = _shown(rows, wanted)
    prepared, measure_columns = _prepared(rows, plan, wanted, shown)
    schema = _schema(prepared, plan, wanted)
    matcher = O.Matcher(
        plan=plan,
        keys=len(wanted.by),
        measure_columns=measure_columns,
        has_time=wanted.order is not None,
        complete=current() is None and _WATERMARK not in rows.columns,
        all_rows=wanted.all_rows,
        events=bool(shown) and not wanted.all_rows,
        schema=arrow_schema(schema),
        title=f"pattern of {', '.join(plan.names)}",
        describes=_describes(plan, prepared, wanted),
    )
    keys = [O.key_column(number) for number in range(len(wanted.by))]
    out = apply(
        {O.INPUT: prepared},
        matcher,
        key=keys,
        schema=schema,
        name=wanted.name,
        waits=matcher.has_time,
    )
    order_type = None if wanted.order is None else rows.schema[wanted.order].dataType
    return _finished(out, plan, wanted, shown, order_type)


# By the schema of rows and the expression: a flow asks for the same in each micro-batch.
_types: dict[tuple[str, str], T.DataType] = {}
_MOST_TYPES: Final = 10_000


@dataclass(frozen=True, slots=True)
class _Types:
    """The types of expressions over the columns of rows, each asked for once."""

    rows: DataFrame
    schema: str

    def of(self, text: str) -> T.DataType:
        found = _types.get((self.schema, text))
        if found is None:
            found = self.rows.select(F.expr(text)).schema[0].dataType
            if len(_types) >= _MOST_TYPES:
                _types.clear()
            _types[self.schema, text] = found
        return found


def _checked(defined: Definition, rows: DataFrame, wanted: Wanted) -> Wanted:
    columns = {each.lower(): each for each in rows.columns}
    order = wanted.order
    for each in (*wanted.by, *(() if order is None else (order,))):
        if each.lower() in columns:
            continue
        advice = f"The columns are: {', '.join(rows.columns)}."
        if each == _EVENT_TIME:
            advice = (
                "Give the stream a time, name the column with order=, or say order=None for the "
                "order of the log."
            )
        raise _at(defined, each, f"there is no column {each!r}", advice)
    for each in wanted.by:
        kind = rows.schema[columns[each.lower()]].dataType
        if is_nested(kind):
            raise _at(
                defined, each, f"{each!r} is {kind.simpleString()}, not a plain value", PLAIN_KEY
            )
    if order is None:
        if defined.within_us is not None:
            raise _at(defined, "within", "within needs an order by time", "Say by which column.")
    else:
        kind = rows.schema[columns[order.lower()]].dataType
        timed = isinstance(kind, T.TimestampType | T.TimestampNTZType | T.DateType)
        needed = defined.within_us is not None or isinstance(current(), Batch)
        if not timed and (needed or not isinstance(kind, T.IntegralType)):
            raise _at(defined, order, f"{order!r} is {kind.simpleString()}, not a time", "")
    if not 1 <= wanted.max_rows <= _MOST_ROWS:
        raise PatternError(f"max_rows={wanted.max_rows}: from 1 to {_MOST_ROWS}")
    if wanted.overflow not in {"fail", "skip"}:
        raise PatternError(f"overflow={wanted.overflow!r} is not known", advice="fail or skip.")
    taken = {each.lower() for each in (*wanted.by, START, END, EVENTS)}
    for name, text in wanted.measures.items():
        if name.lower() in taken and not wanted.all_rows:
            raise text.error(f"the name {name!r} is taken by another column that comes out")
    by = tuple(columns[each.lower()] for each in wanted.by)
    return Wanted(
        by, None if order is None else columns[order.lower()], wanted.measures, wanted.all_rows,
        wanted.events, wanted.max_rows, wanted.overflow, wanted.name,
    )  # fmt: skip


def _at(defined: Definition, word: str, problem: str, advice: str) -> PatternError:
    """An error at the place of a word in the text, if there is a text."""
    if defined.text is None:
        return PatternError(problem, advice=advice)
    at = defined.text.whole.lower().find(word.lower())
    return defined.text.error(problem, at, advice=advice)


def _warn(defined: Definition, plan: Plan) -> None:
    """Say what the definition does not bound."""
    reasons, remedies = [], []
    if defined.within_us is None and tree.needs_more_rows(defined.node):
        reasons.append(
            "an attempt may stay open for ever, since there is no `within` (at most "
            f"{plan.max_rows:,} rows of each key are kept)"
        )
        remedies.append("give the pattern a `within`")
    if plan.lookback:
        reasons.append(f"PREV keeps the last rows of each key for ever ({plan.lookback} of each)")
        remedies.append("compare with a stage of the pattern instead of PREV")
    if plan.counts:
        reasons.append("MATCH_NUMBER keeps a number for each key for ever")
        remedies.append("leave MATCH_NUMBER out")
    if reasons:
        wanted = ", ".join(remedies)
        warn_unbounded(
            f"pattern of {', '.join(plan.names)}: {'; '.join(reasons)}",
            f"{wanted[0].upper()}{wanted[1:]}; or have no more keys than there is room for.",
        )


def _shown(rows: DataFrame, wanted: Wanted) -> tuple[str, ...]:
    """The columns of events."""
    if isinstance(wanted.events, tuple):
        unknown = [each for each in wanted.events if each not in rows.columns]
        if unknown:
            raise PatternError(f"events: there is no column {unknown[0]!r}")
        return wanted.events
    if not wanted.events and not wanted.all_rows:
        return ()
    return tuple(each for each in rows.columns if not each.startswith("_"))


def _prepared(
    rows: DataFrame, plan: Plan, wanted: Wanted, shown: Sequence[str]
) -> tuple[DataFrame, dict[str, str]]:
    """The rows with all that Spark computes for the tasks, and nothing else."""
    columns = {O.key_column(number): sql.quoted(each) for number, each in enumerate(wanted.by)}
    columns[O.TIME] = _order_of(rows, wanted.order)
    columns[O.BITS] = _whole(plan.bits_sql())
    for number, each in enumerate(plan.columns):
        columns[O.value_column(number)] = _whole(each.sql)
    measures: dict[str, str] = {}
    for text in plan.measured_sql():
        measures[text] = O.measure_column(len(measures))
        columns[measures[text]] = _whole(text)
    if shown:
        columns[O.ROW] = sql.struct(shown)
    there = set(rows.columns)
    columns |= {each: each for each in O.PLACE if each in there}
    if _WATERMARK in there:
        columns[O.WATERMARK] = f"unix_micros({_WATERMARK})"
    if wanted.order not in {None, _EVENT_TIME} and _EVENT_TIME in there:
        columns[O.EVENT_TIME] = f"unix_micros({_EVENT_TIME})"
    prepared = sql.select(rows, columns)
    return (prepared.where(f"{O.BITS} != 0") if plan.drops_unused else prepared), measures


def _whole(text: str) -> str:
    """An expression that others can stand around, even if it ends with a comment."""
    return f"({text}\n)"


def _order_of(rows: DataFrame, order: str | None) -> str:
    if order is None:
        return "CAST(0 AS bigint)"
    kind = rows.schema[order].dataType
    column = sql.quoted(order)
    if isinstance(kind, T.IntegralType):
        return f"CAST({column} AS bigint)"
    return f"unix_micros(CAST({column} AS timestamp))"


def _schema(prepared: DataFrame, plan: Plan, wanted: Wanted) -> T.StructType:
    """What the tasks give."""
    given = prepared.schema
    fields = [
        T.StructField(O.key_column(number), given[O.key_column(number)].dataType)
        for number in range(len(wanted.by))
    ]
    if wanted.order is not None:
        fields += [T.StructField(START, T.LongType()), T.StructField(END, T.LongType())]
    fields += [T.StructField(f"_n{number}", each.type) for number, each in enumerate(plan.measured)]
    if O.ROW in prepared.columns:
        row = given[O.ROW].dataType
        assert isinstance(row, T.StructType)
        if wanted.all_rows:
            fields.append(T.StructField(O.ROW, row))
        else:
            event = T.StructType([T.StructField(VARIABLE, T.StringType()), *row.fields])
            fields.append(T.StructField(EVENTS, T.ArrayType(event)))
    return T.StructType(fields)


def _finished(
    out: DataFrame, plan: Plan, wanted: Wanted, shown: Sequence[str], order_type: T.DataType | None
) -> DataFrame:
    """The columns by their names, and the measures computed from what was measured."""
    columns: list[tuple[str, str]] = []
    if wanted.all_rows:
        named = {each.lower() for each in wanted.measures}
        columns += [
            (f"{O.ROW}.{sql.quoted(each)}", each) for each in shown if each.lower() not in named
        ]
    else:
        columns += [(O.key_column(number), each) for number, each in enumerate(wanted.by)]
    if wanted.order is not None and not wanted.all_rows:
        moment = isinstance(order_type, T.IntegralType)
        columns += [
            (each if moment else f"timestamp_micros({each})", each) for each in (START, END)
        ]
    types = _Types(out, out.schema.json())
    for name, text in plan.measures.items():
        try:
            types.of(text)
        except PySparkException as error:
            raise wanted.measures[name].error(reason(error), advice=remedy(error)) from None
        columns.append((_whole(text), name))
    if EVENTS in out.columns:
        columns.append((EVENTS, EVENTS))
    return out.selectExpr(*(f"{text} AS {sql.quoted(name)}" for text, name in columns))


def _describes(plan: Plan, prepared: DataFrame, wanted: Wanted) -> str:
    """Words that change with whatever the kept rows depend on."""
    told_all = repr((plan.names, plan.bits, plan.columns, plan.code.tolist(), plan.within_us))
    told_all += prepared.schema.simpleString()
    digest = hashlib.sha256(told_all.encode()).hexdigest()[:16]
    by = ", ".join(wanted.by) or "nothing"
    return f"pattern of {', '.join(plan.names)} by {by}, order {wanted.order or 'log'} ({digest})"
