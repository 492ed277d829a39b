"""A flow that shows each slip of its state: it numbers the rows of each key, and adds them up."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame

from penstock.spark.flows.declare import Flow, flow, stream, topic
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
