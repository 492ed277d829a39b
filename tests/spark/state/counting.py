"""Flows that show each slip of their state, and what they must come to, computed without Spark.

One numbers the rows of each key, and adds them up; the other finds for each row the name that was
valid at its time, in micro-batches whose rows come packed.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame

from penstock.spark.flows.declare import Flow, flow, stream, topic
from penstock.spark.joins import enrich
from penstock.spark.state import Shard, apply

# Workers cannot import a module of the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

KEPT = pa.schema([("name", pa.string()), ("nth", pa.int64()), ("total", pa.int64())])
OUT = "name string, nth bigint, total bigint"


@dataclass(frozen=True, slots=True)
class Count:
    """Each row with its number among those of its name, and their sum so far."""

    kind: str = "count"
    describes: str = "rows by name"

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        rows = inputs["rows"].to_pylist() if "rows" in inputs else []
        kept = shard.state.table("counts", KEPT, ["name"])
        names = sorted({row["name"] for row in rows})
        found = kept.get(pa.table({"name": pa.array(names, pa.string())})).to_pylist()
        last = {
            row["name"]: {**row, "nth": row["nth"] or 0, "total": row["total"] or 0}
            for row in ({name: row[name] for name in KEPT.names} for row in found)
        }
        out = []
        for row in rows:
            old = last[row["name"]]
            fresh = {"nth": old["nth"] + 1, "total": old["total"] + row["number"]}
            last[row["name"]] = {"name": row["name"], **fresh}
            out.append(last[row["name"]])
        kept.put(pa.Table.from_pylist(list(last.values()), KEPT))
        return pa.Table.from_pylist(out, KEPT)


def counting(source: str, target: str, batch: int) -> Flow:
    numbers = stream(
        source, json="name string, number bigint", options={"maxOffsetsPerTrigger": str(batch)}
    )

    @flow(inputs=numbers, output=topic(target, key="name", partitions=2), name="counting", shards=2)
    def body(rows: DataFrame) -> DataFrame:
        taken = rows.select("name", "number", "_topic", "_partition", "_offset")
        return apply({"rows": taken}, Count(), key=["name"], schema=OUT)

    return body


def expected(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, int]]]:
    """For each name the numbers and sums, computed without Spark."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        nth, total = found[row["name"]][-1] if found[row["name"]] else (0, 0)
        found[row["name"]].append((nth + 1, total + row["number"]))
    return dict(found)


def told(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, int]]]:
    """The same, of what was written; in the order of the log."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        found[row["name"]].append((row["nth"], row["total"]))
    return dict(found)


def naming(rows: str, names: str, target: str, batch: int) -> Flow:
    """Rows with what their name was called at their time."""
    options = {"maxOffsetsPerTrigger": str(batch)}
    schema = "name string, number bigint, at timestamp"
    inputs = [
        stream(
            rows, json=schema, time="at", lateness="1 second", options=options, idle="1 hour",
        ),
        stream(
            names, changelog="name string, called string", time="_timestamp",
            lateness="1 second", options=options, idle="1 hour",
        ),
    ]  # fmt: skip

    @flow(inputs=inputs, output=topic(target, partitions=2), name="naming", shards=2)
    def body(events: DataFrame, changes: DataFrame) -> DataFrame:
        return enrich(events, changes, on="name", columns=["called"], version="as_of")

    return body


def called(
    rows: Iterable[Mapping[str, Any]], changes: Iterable[Mapping[str, Any]]
) -> list[tuple[str, str, str | None]]:
    """For each row its name, its time and what the last change before it says."""
    known: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for change in changes:
        known[change["name"]].append((change["at"], change["called"]))
    found = []
    for row in rows:
        valid = known[row["name"]]
        last = bisect_right([at for at, _ in valid], row["at"])
        found.append((row["name"], row["at"], valid[last - 1][1] if last else None))
    return sorted(found)
