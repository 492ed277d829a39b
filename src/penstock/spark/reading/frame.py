"""What all typed reading shares: where a record stood, what was wrong with it, where it goes then.

A typed frame holds the parsed columns of the good records and, beside them, for every record its
position (`POSITION`) and `_error`: null if it could be read, the reason if not. A record that
could not be read keeps its bytes and headers in `_raw`, so that nothing is lost on the way to the
dead-letter topic. Both kinds stand in one frame because a stream is read once: whoever writes the
outputs splits it by `_error`, in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, get_args

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

from penstock.errors import PenstockError

POSITION: Final = ("key", "topic", "partition", "offset", "timestamp")
ERROR: Final = "_error"
RAW: Final = "_raw"
TOMBSTONE: Final = "_tombstone"
VALUE: Final = "value"
HEADERS: Final = "headers"
# What the headers of a dead letter are called: this and topic, partition, offset, ...
HEADER_PREFIX: Final = "penstock.error."
# A reason goes into a header; a field's name inside it may be as long as somebody likes.
MAX_REASON_CHARACTERS: Final = 1000

HEADERS_TYPE: Final = T.ArrayType(
    T.StructType(
        [T.StructField("key", T.StringType()), T.StructField("value", T.BinaryType())],
    )
)
RAW_TYPE: Final = T.StructType(
    [T.StructField(VALUE, T.BinaryType()), T.StructField(HEADERS, HEADERS_TYPE)]
)

Tombstones = Literal["drop", "keep", "error"]
# From the parsed value to a further reason why the record cannot be taken, null if it can.
Check = Callable[[Column], Column]


class ReadingError(PenstockError):
    """A frame cannot be read as asked: columns are missing or stand in each other's way."""


def check_input(df: DataFrame, tombstones: str) -> None:
    """ReadingError unless the frame looks like records of topics."""
    missing = [name for name in (*POSITION, VALUE) if name not in df.columns]
    if missing:
        raise ReadingError(
            f"the frame has no column {', '.join(missing)}",
            advice="Give the frame as it comes from format('penstock') or format('kafka').",
        )
    kind = df.schema[VALUE].dataType
    if not isinstance(kind, T.BinaryType):
        raise ReadingError(
            f"the column value is {kind.simpleString()}, not binary",
            advice="Give the frame as it was read, without casts.",
        )
    if tombstones not in get_args(Tombstones):
        raise ReadingError(
            f"tombstones={tombstones!r} is not known", advice="Use 'drop', 'keep' or 'error'."
        )


def check_names(names: Sequence[str], into: str | None) -> None:
    """ReadingError if parsed columns would hide those that say where a record stood."""
    taken = {*POSITION, ERROR, RAW, TOMBSTONE}
    clash = sorted(taken & {into} if into else taken & set(names))
    if clash:
        raise ReadingError(
            f"the schema and the record's position both have {', '.join(clash)}",
            advice="Read into one column: into='data', then select data.*.",
        )


def finish(
    df: DataFrame,
    *,
    parsed: Column,
    fields: Sequence[str],
    into: str | None,
    tombstones: Tombstones,
    metrics: str,
    check: Check | None = None,
    keeps_raw: bool = False,
) -> DataFrame:
    """The typed frame of one that has the original columns, `_error` and a parsed struct.

    With `keeps_raw` good records, too, come with what they were: they may still turn out bad.
    """
    if check is not None:
        df = df.withColumn(ERROR, F.coalesce(F.col(ERROR), check(parsed).cast("string")))
    headers = F.col(HEADERS) if HEADERS in df.columns else F.lit(None)
    bad = F.col(ERROR).isNotNull()
    raw = F.when(
        bad | F.lit(keeps_raw),
        F.struct(F.col(VALUE).alias(VALUE), headers.cast(HEADERS_TYPE).alias(HEADERS)),
    )
    good = F.when(~bad, parsed)
    columns = [good.alias(into)] if into else [good[name].alias(name) for name in fields]
    rows = df.select(
        *columns,
        *POSITION,
        F.col(ERROR),
        raw.cast(RAW_TYPE).alias(RAW),
        F.col(VALUE).isNull().alias(TOMBSTONE),
    )
    # Counted where every record passes: `observedMetrics` of the query's progress.
    rows = rows.observe(
        metrics,
        F.count(F.lit(1)).alias("records"),
        F.count(F.col(ERROR)).alias("dead_letters"),
        F.count_if(F.col(TOMBSTONE)).alias("tombstones"),
    )
    if tombstones == "keep":
        return rows
    if tombstones == "drop":
        rows = rows.where(~F.col(TOMBSTONE))
    return rows.drop(TOMBSTONE)


def good(rows: DataFrame) -> DataFrame:
    """The records of a typed frame that could be read, without the columns about errors."""
    return rows.where(f"{ERROR} IS NULL").drop(ERROR, RAW)


def bad(rows: DataFrame) -> DataFrame:
    """The records of a typed frame that could not be read: position, reason, bytes, headers."""
    return rows.where(F.col(ERROR).isNotNull()).select(*POSITION, ERROR, RAW)


def error_headers(flow: str | None = None) -> Column:
    """The headers of a dead letter: its own, then where it stood, why it is here, and of whom."""

    def header(name: str, value: Column) -> Column:
        return F.struct(
            F.lit(HEADER_PREFIX + name).alias("key"),
            value.cast("string").cast("binary").alias("value"),
        )

    told = F.array(
        header("topic", F.col("topic")),
        header("partition", F.col("partition")),
        header("offset", F.col("offset")),
        header("timestamp", F.unix_millis(F.col("timestamp"))),
        header("reason", F.substring(F.col(ERROR), 1, MAX_REASON_CHARACTERS)),
        *([] if flow is None else [header("flow", F.lit(flow))]),
    ).cast(HEADERS_TYPE)
    own = F.coalesce(F.col(RAW)[HEADERS], F.array().cast(HEADERS_TYPE))
    # What was said when it went aside before, and was sent back, is not said of this time.
    own = F.filter(own, lambda each: ~each["key"].startswith(HEADER_PREFIX))
    return F.concat(own, told)


def dead_letters(rows: DataFrame, topic: str, flow: str | None = None) -> DataFrame:
    """What goes to the dead-letter topic: columns as the sink takes them.

    Key, value and headers are the record's own; headers `penstock.error.*` say where it stood and
    why it could not be read.
    """
    return rows.where(F.col(ERROR).isNotNull()).select(
        F.col("key"),
        F.col(RAW)[VALUE].alias(VALUE),
        error_headers(flow).alias(HEADERS),
        F.lit(topic).alias("topic"),
    )


def routed(
    rows: DataFrame,
    *,
    topic: str | Column,
    value: Column,
    dead_letter_topic: str,
    key: Column | None = None,
    headers: Column | None = None,
) -> DataFrame:
    """Good and bad records in one frame for the sink, which then writes both in one pass.

    `value`, `key` and `headers` say what is written for a good record, from its columns. `key` is
    the record's own if not given.
    """
    is_bad = F.col(ERROR).isNotNull()
    target = F.lit(topic) if isinstance(topic, str) else topic
    own_key = F.col("key") if key is None else key
    own_headers = F.lit(None) if headers is None else headers
    return rows.select(
        F.when(is_bad, F.col("key")).otherwise(own_key.cast("binary")).alias("key"),
        F.when(is_bad, F.col(RAW)[VALUE]).otherwise(value.cast("binary")).alias(VALUE),
        F.when(is_bad, error_headers()).otherwise(own_headers.cast(HEADERS_TYPE)).alias(HEADERS),
        F.when(is_bad, F.lit(dead_letter_topic)).otherwise(target).alias("topic"),
    )
