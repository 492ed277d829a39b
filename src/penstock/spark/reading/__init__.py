"""Typed reading of topics: JSON, Avro or raw values as columns, with the bad ones set apart.

    rows = reading.json(spark.readStream.format("penstock")...load(), "id BIGINT NOT NULL, ...")
    reading.good(rows)                          # columns of the records that could be read
    reading.dead_letters(rows, "orders.dead")   # the others, as the sink takes them
    reading.routed(rows, topic=..., value=..., dead_letter_topic=...)   # both, in one pass

No record becomes nulls silently, and none is lost: what cannot be read is counted, and keeps its
bytes, its headers, its position and the reason.
"""

from __future__ import annotations

from penstock.spark.reading.avro_values import avro
from penstock.spark.reading.frame import (
    ERROR,
    POSITION,
    RAW,
    TOMBSTONE,
    ReadingError,
    bad,
    dead_letters,
    good,
    routed,
)
from penstock.spark.reading.json_values import json
from penstock.spark.reading.raw_values import raw

__all__ = [
    "ERROR",
    "POSITION",
    "RAW",
    "TOMBSTONE",
    "ReadingError",
    "avro",
    "bad",
    "dead_letters",
    "good",
    "json",
    "raw",
    "routed",
]
