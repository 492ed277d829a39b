"""Records that came too late, as they go to their topic."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.reading.frame import HEADERS_TYPE
from penstock.spark.state import time as clock

_PLACE: Final = ["topic", "partition", "offset"]


def late_letters(records: DataFrame, told: DataFrame, topic: str) -> DataFrame:
    """What goes to the topic for late records: as they were read, and why they are late."""
    found = records.join(told, _PLACE)

    def header(name: str, value: Column) -> Column:
        return F.struct(
            F.lit(f"penstock.late.{name}").alias("key"),
            value.cast("string").cast("binary").alias("value"),
        )

    at, mark = F.unix_millis(clock.TIME), F.col(clock.BEFORE)
    whose = F.when(
        F.col(clock.BEHIND),
        F.lit(" s before what the flow had told up to, when its partition had not come so far"),
    ).otherwise(F.lit(" s before what its partition had reached, less the lateness"))
    headers = F.array(
        header("topic", F.col("topic")),
        header("partition", F.col("partition")),
        header("offset", F.col("offset")),
        header("timestamp", F.unix_millis("timestamp")),
        header("time", at),
        header("watermark", F.floor(mark / 1000)),
        header(
            "reason",
            F.concat(
                F.lit("its time is "), F.round((mark - F.unix_micros(clock.TIME)) / 1e6, 3), whose
            ),
        ),
    ).cast(HEADERS_TYPE)  # fmt: skip
    own = F.coalesce(F.col("headers"), F.array().cast(HEADERS_TYPE))
    return found.select(
        "key", "value", F.concat(own, headers).alias("headers"), F.lit(topic).alias("topic")
    )
