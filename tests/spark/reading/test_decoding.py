"""Records that the source types, against the same records typed by Spark's own expressions."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from penstock.spark.flows import inputs
from penstock.spark.flows.declare import Format, Reading
from penstock.spark.reading.decoding import SPAN, STAMP, typing_of
from penstock.spark.reading.heartbeat_keys import HEARTBEAT
from penstock.spark.source.reading import record_schema

ROW = "id bigint NOT NULL, name string, at timestamp"
GOOD = {"id": 1, "name": "Ann", "at": "2026-03-01T10:00:00.25Z"}
CHANGE = {"before": None, "after": GOOD, "op": "c", "ts_ms": 1_700_000_000_123}
SOURCE = {**CHANGE, "before": GOOD, "op": "u", "source": {"ts_ms": 1_600_000_000_001, "lsn": 3}}


def text(value: Any) -> bytes:
    return json.dumps(value).encode()


ROWS = [
    *map(text, (GOOD, {"id": 2}, {"id": 3, "at": None}, {"name": "no id"}, {"id": "x"}, [], 5)),
    b"{", b"", b"\xff", None,
]  # fmt: skip
CHANGES = [
    *map(text, (CHANGE, SOURCE, {"schema": {}, "payload": SOURCE}, {**CHANGE, "op": None}, {})),
    *map(text, ({**CHANGE, "op": "d", "after": None}, {**CHANGE, "after": {"name": "no id"}})),
    b"nonsense", None,
]  # fmt: skip


def records(values: list[bytes | None]) -> pa.Table:
    """Each value with a key and without; and a heartbeat at the end."""
    keys: list[bytes | None] = [*(b"k" for _ in values), *(None for _ in values), HEARTBEAT]
    count = len(keys)
    columns = {
        "key": keys,
        "value": [*values, *values, None],
        "topic": ["t"] * count,
        "partition": [0] * count,
        "offset": list(range(count)),
        "timestamp": [at * 1_000_000 for at in range(count)],
        "timestampType": [0] * count,
        "headers": [[{"key": "h", "value": b"1"}] if at % 2 else None for at in range(count)],
    }
    return pa.Table.from_pydict(columns, schema=record_schema(headers=True))


@pytest.mark.parametrize(
    ("shape", "values", "time"),
    [
        ("json", ROWS, None),
        ("json", ROWS, "at"),
        ("json", ROWS, STAMP),
        ("changelog", ROWS, None),
        ("changelog", ROWS, STAMP),
        ("debezium", CHANGES, None),
        # Spark's expressions make a row of nulls of what has no value and is no heartbeat.
        ("debezium", CHANGES[:-1], "_changed"),
    ],
)
def test_the_source_types_records_as_spark_does(
    penstock_spark: SparkSession, shape: Format, values: list[bytes | None], time: str | None
) -> None:
    given = records(values)
    typing = typing_of(shape, ROW, time)
    assert typing is not None
    (batch,) = given.combine_chunks().to_batches()
    own = penstock_spark.createDataFrame(pa.Table.from_batches([typing.decode(batch)]))
    raw = penstock_spark.createDataFrame(given)
    how = Reading(shape, ROW)
    found, wanted = (
        inputs.typed(each, how, metrics=name, time=time).drop(SPAN).orderBy("offset").collect()
        for each, name in ((own, "own"), (raw, "spark"))
    )
    assert found == wanted
    assert any(row["_error"] for row in found)


@pytest.mark.parametrize(
    ("shape", "schema", "time"),
    [("avro", "{}", None), ("json", "a decimal(10,2)", None), ("json", "a bigint", "a")],
)
def test_what_is_left_to_spark(
    penstock_spark: SparkSession, shape: str, schema: str, time: str | None
) -> None:
    assert typing_of(shape, schema, time) is None
