"""Values as they are: bytes, or text that is checked to be text."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.reading.frame import ERROR, VALUE, Tombstones, check_input, finish


def raw(
    df: DataFrame,
    *,
    text: bool = False,
    tombstones: Tombstones = "keep",
    metrics: str = "reading",
) -> DataFrame:
    """The values of a topic's frame as bytes, or as text; what is not UTF-8 is an error then.

    The answer has `value` and the columns that `json` gives.
    """
    check_input(df, tombstones)
    value = F.col(VALUE)
    reason = F.when(value.isNull(), F.lit("the value is null") if tombstones == "error" else None)
    parsed = value
    if text:
        parsed = value.cast("string")
        reason = reason.when(~F.is_valid_utf8(parsed), F.lit("the value is not UTF-8"))
    rows = df.withColumn(ERROR, reason.cast("string"))
    return finish(
        rows,
        parsed=F.struct(parsed.alias(VALUE)),
        fields=[VALUE],
        into=None,
        tombstones=tombstones,
        metrics=metrics,
    )
