"""The flows of the project: `penstock run flows.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from penstock.spark import flow, stream, topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Try it: `echo hello | penstock produce texts`
texts = stream("texts", text=True)


@flow(inputs=texts, output=topic("lengths", key="text", compacted=True))
def lengths(texts: DataFrame) -> DataFrame:
    """How long each text is."""
    return texts.select(F.col("value").alias("text"), F.length("value").alias("length"))
