"""Spark to the log, exactly once: what Spark's own Kafka sink does not have.

    write_stream(df, topic="totals", name="totals", checkpoint=..., bootstrap=...).start()
    df.writeStream.foreachBatch(ExactlyOnce("totals", bootstrap, topic="totals").write_batch)
    write(table, topic="totals", bootstrap=...)

- `exactly_once`: the driver's part, with the theory; `marks`: the memory of what was written.
- `tasks`, `packing`: what runs in tasks, from Arrow columns to record batches to partitions.
- `at_least_once`: quicker, and twice after a repetition.
- `columns`: what a frame must look like; `target`: settings and connections.
"""

from __future__ import annotations

from penstock.spark.sink.at_least_once import AtLeastOnce
from penstock.spark.sink.errors import (
    FencedSinkError,
    RepeatedTaskError,
    SinkError,
    SinkUnavailableError,
    StaleCheckpointError,
    TimedOutTransactionError,
)
from penstock.spark.sink.exactly_once import ExactlyOnce, Written
from penstock.spark.sink.writing import Mode, sink, write, write_stream

__all__ = [
    "AtLeastOnce",
    "ExactlyOnce",
    "FencedSinkError",
    "Mode",
    "RepeatedTaskError",
    "SinkError",
    "SinkUnavailableError",
    "StaleCheckpointError",
    "TimedOutTransactionError",
    "Written",
    "sink",
    "write",
    "write_stream",
]
