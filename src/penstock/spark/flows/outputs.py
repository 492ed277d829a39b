"""Rows into records: what a flow gives, as the sink of topics takes it.

A record's value is the row as JSON, without the columns whose names begin with `_`. Of these one
is special: where `_deleted` is true the value is null, a tombstone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from penstock.client import topics
from penstock.spark.flows.declare import Flow, Topic
from penstock.spark.flows.errors import UserCodeError
from penstock.spark.flows.inputs import Place
from penstock.spark.flows.versions import physical
from penstock.spark.reading.frame import HEADERS_TYPE
from penstock.spark.sql import JSON

DELETED: Final = "_deleted"
COLUMNS: Final = ("key", "value", "headers", "topic")


def topic_rows(rows: DataFrame, output: Topic, target: str) -> DataFrame:
    """The records for a topic: columns key, value, headers and topic."""
    return _raw(rows, target) if output.format == "raw" else _json(rows, output, target)


def _json(rows: DataFrame, output: Topic, target: str) -> DataFrame:
    for name in output.key:
        if name not in rows.columns:
            raise UserCodeError(
                f"the rows for topic {output.name!r} have no column {name!r}, which is to be its "
                f"key; they have {', '.join(rows.columns)}",
                advice="Let the function return it, or change key= of the topic.",
            )
    shown = [name for name in rows.columns if not name.startswith("_")]
    if not shown:
        raise UserCodeError(
            f"the rows for topic {output.name!r} have no columns to write",
            advice="Columns whose names begin with _ are not written; give one another name.",
        )
    value = F.to_json(F.struct(*(F.col(f"`{name}`") for name in shown)), JSON)
    if DELETED in rows.columns:
        value = F.when(~F.coalesce(F.col(DELETED), F.lit(False)), value)
    return rows.select(
        _key(output.key).alias("key"),
        value.cast("binary").alias("value"),
        F.lit(None).cast(HEADERS_TYPE).alias("headers"),
        F.lit(target).alias("topic"),
    )


def _key(names: Sequence[str]) -> Column:
    if not names:
        return F.lit(None).cast("binary")
    if len(names) == 1:
        return F.col(f"`{names[0]}`").cast("string").cast("binary")
    return F.to_json(F.struct(*(F.col(f"`{name}`") for name in names)), JSON).cast("binary")


def _raw(rows: DataFrame, target: str) -> DataFrame:
    if "value" not in rows.columns:
        raise UserCodeError(
            f"the rows for raw topic {target!r} have no column value; they have "
            f"{', '.join(rows.columns)}",
            advice="Return the columns key and value, or leave out raw=True.",
        )
    key = F.col("key").cast("binary") if "key" in rows.columns else F.lit(None).cast("binary")
    headers = F.col("headers") if "headers" in rows.columns else F.lit(None)
    return rows.select(
        key.alias("key"),
        F.col("value").cast("binary").alias("value"),
        headers.cast(HEADERS_TYPE).alias("headers"),
        F.lit(target).alias("topic"),
    )


def make_topics(place: Place, flow: Flow, generation: int) -> None:
    """Make the topics that a flow, of a generation already, writes: those that are not there."""
    with place.cluster() as cluster:
        for each in flow.topics:
            settings = {"cleanup.policy": "compact"} if each.compacted else {}
            topics.create(
                cluster,
                physical(each.name, generation),
                partitions=each.partitions or topics.DEFAULT,
                config={**settings, **each.settings},
                exists_ok=True,
            )
        for declared in flow.streams:
            for aside in (declared.dead_letters, declared.late):
                if aside is not None:
                    topics.create(cluster, aside, exists_ok=True)
