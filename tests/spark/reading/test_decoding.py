"""Records that the source types, against the same records typed by Spark's own expressions."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import types as T  # noqa: N812

from penstock.spark.flows import inputs
from penstock.spark.flows.declare import Format, Reading
from penstock.spark.flows.errors import DeclarationError
from penstock.spark.reading import ERROR
from penstock.spark.reading.decoding import (
    SPAN,
    STAMP,
    TIME,
    VALUE,
    TimeRules,
    Typing,
    typing_of,
)
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
    [("avro", "{}", None), ("json", "a binary", None), ("json", "a double", "a")],
)
def test_what_is_left_to_spark(
    penstock_spark: SparkSession, shape: str, schema: str, time: str | None
) -> None:
    assert typing_of(shape, schema, time) is None


HOUR_US = 3_600_000_000
EVENTS = "n bigint, at timestamp, kind string"
# The records were written in the first seconds of 1970.
TIMED = [
    *map(
        text,
        (
            {"n": 5_000, "at": "1970-01-01T00:00:05Z", "kind": "order"},
            {"n": 3_600_000, "at": "1970-01-01T01:00:00Z", "kind": "order"},
            # More than an hour after they were written.
            {"n": 9_000_000, "at": "1970-01-01T02:30:00Z", "kind": "order"},
            # In a year that no calendar has.
            {"n": 1_767_225_600_000_000, "at": "+58849-01-01T00:00:00Z", "kind": "order"},
            {"n": 2**62, "at": "+290000-01-01T00:00:00Z", "kind": "other"},
            {"n": None, "at": None, "kind": "order"},
            {"kind": "other"},
            {"n": "x", "at": "soon", "kind": "other"},
        ),
    ),
    None,
]


@pytest.mark.parametrize("time", ["n", "at"])
@pytest.mark.parametrize("where", [None, "kind = 'order'", "kind = 'order' AND _offset > 0"])
def test_times_that_cannot_be_are_told_alike(
    penstock_spark: SparkSession, time: str, where: str | None
) -> None:
    """By the source, and by Spark's expressions where these say which records count."""
    rules = TimeRules("ms", HOUR_US, where)
    given = records(TIMED)
    typing = typing_of("json", EVENTS, time, rules=rules)
    assert typing is not None
    (batch,) = given.combine_chunks().to_batches()
    own = penstock_spark.createDataFrame(pa.Table.from_batches([typing.decode(batch)]))
    raw = penstock_spark.createDataFrame(given)
    how = Reading("json", EVENTS)
    wanted_columns = [VALUE, TIME, ERROR, "key", "offset"]
    found, wanted = (
        inputs.typed(each, how, metrics=name, time=time, rules=rules)
        .select(wanted_columns)
        .orderBy("offset")
        .collect()
        for each, name in ((own, "own"), (raw, "spark"))
    )
    assert found == wanted
    half = [row for row in found if row.key == b"k"]
    reasons = [row[ERROR] for row in half if row[ERROR]]
    if where is None:
        assert len(half) == len(TIMED)
        assert sum("may be 3600 s (max_future)" in each for each in reasons) == 1
    else:
        # What is not chosen has no time that could be wrong; what cannot be read is told.
        assert {row[VALUE].kind for row in half if row[VALUE] is not None} == {"order"}
        assert sum("is not" in each for each in reasons) == 1
    assert sum("is out of range" in each for each in reasons) == (2 if where is None else 1)
    assert sum("is missing or null" in each for each in reasons) == (2 if where is None else 1)


@pytest.mark.parametrize(("unit", "count"), [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
def test_numbers_count_what_the_stream_says(unit: str, count: int) -> None:
    """Whole numbers in a column of timestamps, and as the event time; many of them, and a few odd
    ones that are read one by one."""
    schema = T.StructType(
        [T.StructField("at", T.TimestampType()), T.StructField("n", T.LongType())]
    )
    moment = datetime(2026, 1, 1, 12, 30, tzinfo=UTC)
    whole = int(moment.timestamp()) * count
    values: list[bytes | None] = [text({"at": whole, "n": whole})] * 40
    values += [text({"at": moment.isoformat(), "n": whole}), text({"at": float(whole), "n": whole})]
    values.append(text({"at": False, "n": whole}))
    (batch,) = records(values).combine_chunks().to_batches()
    for time in ("at", "n"):
        typing = Typing("json", schema.json(), time, unit=unit)
        told = typing.decode(batch).slice(0, len(values)).to_pylist()
        assert [row[TIME] for row in told] == [moment] * 42 + [None]
        assert {row[VALUE]["at"] for row in told[:-1]} == {moment}
        assert told[-1][ERROR] == "field at is not timestamp: false"


def test_a_time_without_a_unit_counts_seconds_and_says_so_if_it_cannot() -> None:
    schema = T.StructType([T.StructField("at", T.TimestampType())])
    (batch,) = records([b'{"at": 1700000000}', b'{"at": 1700000000000}']).to_batches()
    told = Typing("json", schema.json(), "at").decode(batch).to_pylist()
    assert told[0][TIME] == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert told[1][ERROR] == (
        "the event time at is out of range: year 55840; numbers are read as s, which time_unit "
        "changes"
    )
    assert told[1][TIME] is None


def test_a_condition_that_cannot_be_is_told(penstock_spark: SparkSession) -> None:
    given = penstock_spark.createDataFrame(records(TIMED))
    rules = TimeRules(where="sort = 'order'")
    with pytest.raises(
        DeclarationError, match=r"where=\"sort = 'order'\" is no condition"
    ) as caught:
        inputs.typed(given, Reading("json", EVENTS), metrics="m", time="at", rules=rules)
    assert "sort" in str(caught.value)
    assert "_timestamp" in caught.value.advice
