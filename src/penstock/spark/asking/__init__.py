"""A flow that answers: questions from a topic, answers to whoever asked.

    @flow(inputs=stream("questions"), output=topic("answers", raw=True))
    def taxes(records):
        asked = questions(records, json="country string, amount double")
        return replies(asked.withColumn("tax", F.col("amount") * 0.19), columns=["tax"])

and on the other side, without Spark, `penstock.client.asking.Asker("...").ask({...})`. The topic of
the answers is the one that askers are told to read; `replies` gives each answer the key of its
asker, so that it comes to the partition where it is waited for.

Whatever the flow does in between, it keeps the column `_asked`: joins with tables, `enrich`, a
filter (what it takes out gets no answer, and its asker waits in vain). An answer belongs to the
same transaction as everything else that the micro-batch writes, so it is there exactly once, after
a failure too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812

from penstock.client.asking import ERROR, ID, REPLY_KEY
from penstock.spark.flows.errors import DeclarationError
from penstock.spark.places import before
from penstock.spark.reading.frame import HEADERS_TYPE
from penstock.spark.sql import JSON

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

ASKED: Final = "_asked"
# A text in this column is the reason why a question cannot be answered.
REASON: Final = "_error"
_CORRUPT: Final = "_corrupt"

__all__ = ["ASKED", "REASON", "questions", "replies"]


def questions(records: DataFrame, *, json: str | None = None) -> DataFrame:
    """The questions among the records of a raw stream.

    With `json`, a schema, the value is parsed into columns; a question that does not fit is
    answered with an error by `replies`. Otherwise it is the text `value`. `_asked` says who asks;
    records that are no questions are left out.
    """
    where = before()
    if "headers" not in records.columns or "value" not in records.columns:
        raise DeclarationError(
            f"{where}questions: these are no records with headers; the columns are "
            f"{', '.join(records.columns)}",
            advice='Declare the stream without a schema, stream("TOPIC"), and give it here.',
        )
    name, key = _header(ID), _header(REPLY_KEY)
    found = records.where(name.isNotNull() & key.isNotNull())
    text = F.col("value").cast("string")
    asked = F.struct(name.alias("id"), key.alias("key"))
    if json is None:
        return found.select(
            text.alias("value"), asked.alias(ASKED), F.lit(None).cast("string").alias(REASON)
        )
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    parsed = F.from_json(text, f"{json}, {_CORRUPT} string", options)
    rows = found.select(parsed.alias("_parsed"), asked.alias(ASKED), text.alias("_text"))
    wrong = (
        F.col("_text").isNull()
        | F.col("_parsed").isNull()
        | F.col(f"_parsed.{_CORRUPT}").isNotNull()
    )
    reason = F.when(
        wrong, F.concat(F.lit("the question does not fit "), F.lit(json), F.lit(": "),
                        F.coalesce(F.substring("_text", 1, 200), F.lit("it has no value")))
    )  # fmt: skip
    return rows.select("_parsed.*", ASKED, reason.alias(REASON)).drop(_CORRUPT)


def replies(
    rows: DataFrame, *, columns: Sequence[str] | None = None, value: Column | None = None
) -> DataFrame:
    """Answers as records, for topic(TOPIC, raw=True).

    The value is JSON of `columns`, of all those whose names do not begin with `_` if not given, or
    `value`, text or bytes. Where the column `_error` has a text, the asker gets an error that says
    so.
    """
    where = before()
    if ASKED not in rows.columns:
        raise DeclarationError(
            f"{where}replies: the rows have no column {ASKED!r}, which says who asked; they have "
            f"{', '.join(rows.columns)}",
            advice="Begin with questions(...), and keep the column in every select.",
        )
    if value is None:
        shown = columns or [each for each in rows.columns if not each.startswith("_")]
        value = F.to_json(F.struct(*(F.col(f"`{each}`") for each in shown)), JSON)
    headers = F.array(_made(ID, F.col(f"{ASKED}.id")))
    if REASON in rows.columns:
        wrong = F.col(REASON).isNotNull()
        value = F.when(~wrong, value)
        reason = F.array(_made(ERROR, F.col(REASON).cast("binary")))
        headers = F.when(wrong, F.concat(headers, reason)).otherwise(headers)
    return rows.select(
        F.col(f"{ASKED}.key").alias("key"),
        value.cast("binary").alias("value"),
        headers.cast(HEADERS_TYPE).alias("headers"),
    )


def _header(name: str) -> Column:
    """The first header of a name; null if there is none."""
    found = F.filter(F.col("headers"), lambda each: each["key"] == F.lit(name))
    return F.get(found, F.lit(0))["value"]


def _made(name: str, value: Column) -> Column:
    return F.struct(F.lit(name).alias("key"), value.alias("value"))
