"""Writing frames to the log in one call: streams and tables, exactly once or at least once."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, get_args

from pyspark.sql import DataFrame
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.spark.sink.at_least_once import AtLeastOnce
from penstock.spark.sink.columns import prepare
from penstock.spark.sink.errors import SinkError
from penstock.spark.sink.exactly_once import ExactlyOnce, Written

Mode = Literal["exactly-once", "at-least-once"]
EXACTLY_ONCE: Final = "exactly-once"


def sink(
    mode: Mode,
    *,
    name: str,
    bootstrap: str,
    topic: str | None = None,
    options: Mapping[str, str] | None = None,
) -> ExactlyOnce | AtLeastOnce:
    """The sink of a mode, for `foreachBatch`."""
    if mode not in get_args(Mode):
        raise SinkError(f"there is no mode {mode!r}", advice=f"Use {' or '.join(get_args(Mode))}.")
    if mode == EXACTLY_ONCE:
        return ExactlyOnce(name, bootstrap, topic=topic, options=options)
    return AtLeastOnce(bootstrap, topic=topic, options=options)


def write_stream(
    df: DataFrame,
    *,
    name: str,
    checkpoint: str | Path,
    bootstrap: str,
    topic: str | None = None,
    mode: Mode = "exactly-once",
    output_mode: str = "append",
    options: Mapping[str, str] | None = None,
) -> DataStreamWriter:
    """A stream to the log: `write_stream(df, ...).trigger(...).start()`.

    `df` has the columns of Spark's Kafka sink: `value`, and if you like `key`, `topic`,
    `partition`, `headers`, and a `timestamp`. Exactly once needs a name that is this query's alone
    and stays the same over restarts, as the checkpoint does. Readers see each micro-batch at once
    and whole if they read committed records only (`isolation.level`).
    """
    # In the stream's own plan, once, and not in each of its batches.
    rows = prepare(df, topic)
    into = sink(mode, name=name, bootstrap=bootstrap, topic=topic, options=options)
    into.is_prepared = True
    return (
        rows.writeStream.queryName(name)
        .outputMode(output_mode)
        .option("checkpointLocation", str(checkpoint))
        .foreachBatch(into.write_batch)
    )


def write(
    df: DataFrame,
    *,
    bootstrap: str,
    topic: str | None = None,
    mode: Mode = "exactly-once",
    name: str | None = None,
    batch_id: int | None = None,
    options: Mapping[str, str] | None = None,
) -> Written:
    """A table to the log, in one transaction: all of it or nothing.

    With a name and a number, a write that was done before is recognised and skipped; the numbers of
    a name must rise. Without them it is written each time.
    """
    if (name is None) != (batch_id is None):
        raise SinkError(
            "name and batch_id go together", advice="Give both, or neither to write each time."
        )
    into = sink(
        mode,
        name=name or f"once-{uuid.uuid4()}",
        bootstrap=bootstrap,
        topic=topic,
        options=options,
    )
    try:
        into.write_batch(df, batch_id or 0)
    finally:
        into.close()
    assert into.last is not None
    return into.last
