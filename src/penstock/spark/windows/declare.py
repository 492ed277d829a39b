"""Windows over frames: what is declared, checked, and sent to Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_type

from penstock.errors import ConfigError
from penstock.spark.flows.errors import DeclarationError
from penstock.spark.places import caller, told
from penstock.spark.state import Batch, Planning, apply, current
from penstock.spark.state.bounds import reads_of
from penstock.spark.state.schemas import PLAIN_KEY, is_nested
from penstock.spark.windows.aggregates import Aggregate, First
from penstock.spark.windows.clock import WATERMARK
from penstock.spark.windows.merging import (
    END,
    FINAL,
    FIRST,
    KEY,
    LAST,
    PANE,
    REVISION,
    ROWS,
    SET,
    START,
    Windows,
    prefix,
)
from penstock.spark.windows.multisets import Multiset
from penstock.spark.windows.shapes import Hops, Sessions, Shape
from penstock.spark.windows.sketches import Sketch
from penstock.spark.windows.spans import Span, microseconds, shown

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Emit = Literal["final", "early"]

TIME: Final = "_time"
PLACE: Final = ("_topic", "_partition", "_offset")
_MOST_WINDOWS: Final = 100_000
_TIMES: Final = (T.TimestampType, T.TimestampNTZType)


def refused(what: str, advice: str) -> DeclarationError:
    return DeclarationError(told(caller(), what), advice=advice)


def length(span: Span, what: str, *, least: int | None = 1) -> int:
    """A length of time; if it is none, the error says where it was given."""
    try:
        return microseconds(span, what, least=least)
    except ConfigError as error:
        raise refused(str(error), error.advice) from None


def checked_columns(rows: DataFrame, names: Sequence[str], what: str) -> None:
    """That a frame has some columns."""
    if isinstance(names, str):
        raise refused(f"{what}={names!r} is a text, not a list", f"Write {what}=[{names!r}].")
    for each in names:
        if each not in rows.columns:
            raise refused(
                f"{what} names {each!r}, which is no column",
                f"There are: {', '.join(rows.columns)}.",
            )


def checked_keys(rows: DataFrame, names: Sequence[str], what: str) -> None:
    """That a frame has some columns, and that rows can belong together by them."""
    checked_columns(rows, names, what)
    for each in names:
        kind = rows.schema[each].dataType
        if is_nested(kind):
            raise refused(
                f"{what} names {each!r}, which is {kind.simpleString()}, not a plain value",
                PLAIN_KEY,
            )


def checked_time(rows: DataFrame, time: str) -> None:
    """That a frame has event time: without it nothing would ever be complete."""
    if time not in rows.columns:
        raise refused(
            f"the rows have no event time, {time!r}: windows would never close, and what is kept "
            f"would grow without end",
            "Declare it with stream(..., time=..., lateness=...), and let the column pass.",
        )
    if not isinstance(rows.schema[time].dataType, _TIMES):
        raise refused(f"{time!r} is no timestamp", "Cast it, with to_timestamp.")
    if isinstance(current(), Planning) and time != TIME:
        raise refused(
            f"time={time!r} is not the event time of the stream, which says how late rows may be",
            "Declare it in stream(..., time=...); it is then the column `_time`.",
        )


def is_whole() -> bool:
    """Whether what is at hand is everything: in plain batch."""
    return current() is None


def micros(rows: DataFrame, time: str) -> Column:
    """Event time as a number."""
    column = F.col(f"`{time}`")
    if isinstance(rows.schema[time].dataType, T.TimestampNTZType):
        column = F.to_utc_timestamp(column.cast("timestamp"), "UTC")
    return F.unix_micros(column)


def key_text(rows: DataFrame, names: Sequence[str]) -> Column:
    """One text for the values of some columns, different for different values; never null."""
    parts: list[Column] = [F.lit("")]
    for each in names:
        column, kind = F.col(f"`{each}`"), rows.schema[each].dataType
        if isinstance(kind, T.TimestampType):
            column = F.unix_micros(column)
        elif isinstance(kind, T.FractionalType) and not isinstance(kind, T.DecimalType):
            # There is one zero, as in Spark's own groups and joins; NaN has one text already.
            column = F.when(column == 0, F.lit(0.0)).otherwise(column)
        elif isinstance(kind, T.BinaryType):
            column = F.hex(column)
        text = column.cast("string")
        parts.append(F.coalesce(F.concat(F.length(text).cast("string"), F.lit(":"), text),
                                F.lit("-")))  # fmt: skip
    return F.concat(*parts)


def by_schema(rows: DataFrame, names: Sequence[str]) -> pa.Schema:
    return pa.schema([(each, to_arrow_type(rows.schema[each].dataType, timezone="UTC"))
                      for each in names])  # fmt: skip


def spark_schema(schema: pa.Schema) -> T.StructType:
    return from_arrow_schema(schema)


def tumbling(
    rows: DataFrame,
    size: Span,
    *,
    by: Sequence[str] = (),
    values: Mapping[str, Aggregate],
    time: str = TIME,
    emit: Emit = "final",
    allowed_lateness: Span | None = None,
    name: str | None = None,
) -> DataFrame:
    """Windows of a size, one after the other, beginning with the full multiples since 1970.

    See the module for what `emit` and `allowed_lateness` do, and which columns come out.
    """
    length_us = length(size, "size")
    return _windows(
        rows, Hops(length_us, length_us), by, values, time, emit, allowed_lateness, name
    )


def hopping(
    rows: DataFrame,
    size: Span,
    every: Span,
    *,
    by: Sequence[str] = (),
    values: Mapping[str, Aggregate],
    time: str = TIME,
    emit: Emit = "final",
    allowed_lateness: Span | None = None,
    name: str | None = None,
) -> DataFrame:
    """Windows of a size, of which one begins every so often: an event is in several."""
    shape = Hops(length(size, "size"), length(every, "every"))
    if shape.every_us > shape.size_us:
        raise refused(
            f"every={every!r} is longer than size={size!r}: events between two windows would be "
            "in none",
            "Let every be at most size; first comes the size, then how often a window begins.",
        )
    if shape.size_us // shape.every_us > _MOST_WINDOWS:
        raise refused(
            f"every event would be in {shape.size_us // shape.every_us:,} windows",
            f"Let size={size!r} be at most {_MOST_WINDOWS:,} times every={every!r}.",
        )
    return _windows(rows, shape, by, values, time, emit, allowed_lateness, name)


def session(
    rows: DataFrame,
    gap: Span,
    *,
    by: Sequence[str] = (),
    values: Mapping[str, Aggregate],
    time: str = TIME,
    emit: Emit = "final",
    name: str | None = None,
) -> DataFrame:
    """Windows that begin with an event and end `gap` after the last one before a pause that long.

    There are no corrections: a straggler can make one session of two, and what was said of the
    second could not be taken back. Early results are provisional in the same way.
    """
    return _windows(rows, Sessions(length(gap, "gap")), by, values, time, emit, None, name)


def _windows(
    rows: DataFrame, shape: Shape, by: Sequence[str], values: Mapping[str, Aggregate],
    time: str, emit: Emit, allowed: Span | None, name: str | None,
) -> DataFrame:  # fmt: skip
    checked_keys(rows, by, "by")
    checked_time(rows, time)
    if emit not in ("final", "early"):
        raise refused(f"emit={emit!r} is not known", 'It is "final" or "early".')
    allowed_us = 0 if allowed is None else length(allowed, "allowed_lateness", least=0)
    _check_allowed(rows, allowed_us, allowed)
    place = [each for each in PLACE if each in rows.columns]
    place = place if len(place) == len(PLACE) else []
    bound = checked_values(rows, values, by, places=1 + len(place))
    operator = Windows(
        by_schema(rows, by),
        tuple(bound.items()),
        shape,
        emit == "early",
        allowed_us,
        is_whole(),
    )
    context = current()
    if not isinstance(context, Planning):
        ready = _partials(rows, operator, values, by, time, place)
    else:
        # Whoever plans must see that the rows are read twice.
        ready = rows.unionByName(rows) if _goes_two_ways(operator) else rows
    if isinstance(context, Batch):
        assert not rows.isStreaming
    return apply(
        {ROWS: ready},
        operator,
        key=list(by),
        schema=spark_schema(operator.schema),
        name=name,
        waits=True,
    )


def _check_allowed(rows: DataFrame, allowed_us: int, allowed: Span | None) -> None:
    """Windows are final so much before the watermark: with more than lateness before their end."""
    for topic, read in reads_of(rows).items():
        if read.lateness_us is not None and allowed_us > read.lateness_us:
            raise refused(
                f"allowed_lateness={allowed!r} is more than the lateness of stream {topic!r}, "
                f"{shown(read.lateness_us)}: windows would be final before they are over",
                f"Let it be at most that, or give the stream more, lateness={allowed!r}.",
            )


def checked_values(
    rows: DataFrame, values: Mapping[str, Aggregate], by: Sequence[str], *, places: int
) -> dict[str, Aggregate]:
    """Aggregates with the types of their columns, each of which can be had."""
    taken = {*by, START, END, FINAL, REVISION}
    found: dict[str, Aggregate] = {}
    if not values:
        raise refused("values= is empty", 'Say what is wanted, such as values={"n": count()}.')
    for name, each in values.items():
        if not isinstance(each, Aggregate):
            raise refused(
                f"values={{{name!r}: ...}} is no aggregate but {type(each).__name__}",
                'Write one of penstock.spark.windows, such as sum("amount").',
            )
        if name in taken:
            raise refused(f"two columns of the result are named {name!r}", "Take another name.")
        bound = each
        if isinstance(each.column, str) and each.column not in rows.columns:
            raise refused(
                f"{name!r} is of column {each.column!r}, which there is not",
                f"There are: {', '.join(rows.columns)}.",
            )
        if each.column is not None:
            if isinstance(each.column, str):
                kind = rows.schema[each.column].dataType
            else:
                kind = rows.select(each.column).schema[0].dataType
            label = each.column if isinstance(each.column, str) else name
            bound = each.bound(label, to_arrow_type(kind, timezone="UTC"))
            if bound.refusal:
                raise refused(
                    f"{name!r} cannot be had of {label!r} ({kind.simpleString()}): {bound.refusal}",
                    "Cast the column, or take another aggregate.",
                )
        if isinstance(bound, First):
            bound = bound.of_places(places)
        found[name] = bound
    return found


def value_of(each: Aggregate) -> Column:
    if each.column is None:
        return F.lit(1)
    return each.column if isinstance(each.column, Column) else F.col(f"`{each.column}`")


def _partials(
    rows: DataFrame, operator: Windows, values: Mapping[str, Aggregate], by: Sequence[str],
    time: str, place: Sequence[str],
) -> DataFrame:  # fmt: skip
    """What Spark computes of a micro-batch: one row for each key and pane, and counts of values."""
    sets = list(operator.sets.values())
    made = _columns(rows, operator, values, by, time, place)
    flat = rows.select(*made.flat).where(f"{PANE} IS NOT NULL")
    if not sets:
        return flat.groupBy(*made.base).agg(*made.wanted).withColumns(made.more)
    text = {KEY: made.more[KEY]}
    counted = [F.col(SET), *(F.col(f"_set_{at}") for at in range(1, len(sets) + 1))]
    count = F.count(F.lit(1)).alias("_count")
    turned = _turned(flat, len(values), len(sets))
    if not _goes_two_ways(operator):
        return turned.groupBy(*made.base, *counted).agg(*made.wanted, count).withColumns(text)
    main = flat.groupBy(*made.base).agg(*made.wanted).withColumn(SET, F.lit(0))
    of_sets = turned.where(F.col(SET) > 0).groupBy(*made.base, *counted).agg(count)
    return main.unionByName(of_sets, allowMissingColumns=True).withColumns(text)


def _goes_two_ways(operator: Windows) -> bool:
    """A sketch for each value that is counted would be far too much: two ways over the rows."""
    return bool(operator.sets) and any(isinstance(each, Sketch) for _, each in operator.values)


@dataclass(frozen=True, slots=True)
class _Columns:
    """What Spark is told to compute; names only, so that it holds for any rows of a schema."""

    flat: list[Column]
    base: list[Column]
    wanted: list[Column]
    more: dict[str, Column]


# To make them takes some hundred calls to Java, and a flow needs the same in each micro-batch.
_kept: Final[WeakKeyDictionary[SparkContext, dict[Any, _Columns]]] = WeakKeyDictionary()
_MOST_KEPT: Final = 100


def _columns(
    rows: DataFrame, operator: Windows, values: Mapping[str, Aggregate], by: Sequence[str],
    time: str, place: Sequence[str],
) -> _Columns:  # fmt: skip
    given = tuple(values.items())
    if any(isinstance(each.column, Column) for each in values.values()):
        return _made(rows, operator, values, by, time, place)
    known = _kept.setdefault(rows.sparkSession.sparkContext, {})
    key = (rows.schema.json(), given, operator.values, operator.shape, tuple(by), time)
    found = known.get(key)
    if found is None:
        if len(known) >= _MOST_KEPT:
            known.clear()
        found = known[key] = _made(rows, operator, values, by, time, place)
    return found


def _made(
    rows: DataFrame, operator: Windows, values: Mapping[str, Aggregate], by: Sequence[str],
    time: str, place: Sequence[str],
) -> _Columns:  # fmt: skip
    at = micros(rows, time)
    pane = at - F.pmod(at, F.lit(operator.shape.pane_us))
    sets = list(operator.sets.values())
    given = {name: value_of(each) for name, each in values.items()}
    by_shared = {each.shared: given[name] for name, each in operator.values
                 if isinstance(each, Multiset)}  # fmt: skip
    watermark = [F.col(WATERMARK)] if WATERMARK in rows.columns else []
    flat = [
        *(F.col(f"`{each}`") for each in by),
        pane.alias(PANE),
        at.alias("_at"),
        *(F.col(each).alias(f"_place_{number}") for number, each in enumerate(place)),
        *(each.alias(f"_{number}") for number, each in enumerate(given.values())),
        *(each.value(by_shared[each.shared]).alias(f"_set_{number}")
          for number, each in enumerate(sets, start=1)),
        *watermark,
    ]  # fmt: skip
    order = [F.col("_at"), *(F.col(f"_place_{number}") for number in range(len(place)))]
    wanted = [F.min("_at").alias(FIRST), F.max("_at").alias(LAST)]
    wanted += [F.max(WATERMARK).alias(WATERMARK)] if watermark else []
    for number, (_, each) in enumerate(operator.values):
        partials = each.partials(F.col(f"_{number}"), order)
        wanted += [column.alias(prefix(number) + end) for end, column in partials.items()]
    base = [F.col(f"`{each}`") for each in (*by, PANE)]
    return _Columns(flat, base, wanted, {KEY: key_text(rows, by), SET: F.lit(0)})


def _turned(flat: DataFrame, values: int, sets: int) -> DataFrame:
    """Each row once for the aggregates, and once more for each column whose values are counted."""
    turns = flat.select(
        "*", F.explode(F.array(*(F.lit(turn) for turn in range(sets + 1)))).alias(SET)
    )
    turn = F.col(SET)
    only = {f"_{at}": F.when(turn == 0, F.col(f"_{at}")) for at in range(values)}
    only |= {f"_set_{at}": F.when(turn == at, F.col(f"_set_{at}")) for at in range(1, sets + 1)}
    counted = F.lit(False)
    for at in range(1, sets + 1):
        counted = counted | ((turn == at) & F.col(f"_set_{at}").isNotNull())
    return turns.where((turn == 0) | counted).withColumns(only)
