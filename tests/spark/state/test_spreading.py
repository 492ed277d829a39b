"""Shards told in Python are those that Spark tells: its own hash is the oracle."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.state import spreading

ROWS = 400


def of(kind: pa.DataType, dice: random.Random) -> Any:
    if pa.types.is_boolean(kind):
        return dice.random() < 0.5
    if pa.types.is_integer(kind):
        bits = kind.bit_width - 1
        return dice.choice([0, -1, (1 << bits) - 1, -(1 << bits), dice.randrange(1 << bits)])
    if pa.types.is_floating(kind):
        odd = [0.0, -0.0, float("nan"), float("inf"), -float("inf")]
        return dice.choice([*odd, float(np.float32(dice.uniform(-1e9, 1e9)))])
    if pa.types.is_date(kind):
        return date(1970, 1, 1) + timedelta(days=dice.randrange(-100_000, 100_000))
    if pa.types.is_timestamp(kind):
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=dice.randrange(1 << 50))
    if pa.types.is_decimal(kind):
        few = dice.choice([0, 1, 127, 128, 129, 10 ** (kind.precision - 1)])
        digits = dice.choice([few, dice.randrange(10**kind.precision)])
        # Not by arithmetic, which would round to 28 digits.
        return Decimal((dice.randrange(2), tuple(map(int, str(digits))), -kind.scale))
    size = dice.choice([0, 1, 3, 4, 7, 8, 11, 12, 31, 32, 33, 64, 100])
    text = "".join(dice.choice("abcdeäß漢🙂") for _ in range(size))
    return text if pa.types.is_string(kind) else text.encode()


KINDS = [
    pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(),
    pa.date32(), pa.timestamp("us", "UTC"), pa.decimal128(10, 2), pa.decimal128(18, 0),
    pa.decimal128(19, 3), pa.decimal128(38, 10), pa.string(), pa.binary(),
]  # fmt: skip


def test_hashes_are_sparks(spark: SparkSession, seed: int) -> None:
    dice = random.Random(seed)
    columns = {}
    for at, kind in enumerate(KINDS):
        values = [of(kind, dice) if dice.random() < 0.9 else None for _ in range(ROWS)]
        columns[f"c{at}"] = pa.array(values, kind)
    rows = pa.table({"at": pa.array(range(ROWS)), **columns})
    single = [[name] for name in columns]
    several = [dice.sample(list(columns), dice.randrange(2, 5)) for _ in range(20)]
    keys = [*single, *several]
    asked = [F.xxhash64(*key).alias(f"h{at}") for at, key in enumerate(keys)]
    found = spark.createDataFrame(rows).select("at", *asked).toArrow().sort_by("at")
    for at, key in enumerate(keys):
        theirs = found[f"h{at}"].to_numpy()
        ours = spreading.hashes([rows[name].chunk(0) for name in key])
        kinds = [str(rows.schema.field(name).type) for name in key]
        assert (ours.view(np.int64) == theirs).all(), kinds
        # Of a slice, too.
        part = rows.slice(100, 50)
        assert (spreading.shards_of(part, key, 7) == np.mod(theirs[100:150], 7)).all(), kinds


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_can_be_told_is_told(kind: pa.DataType) -> None:
    assert spreading.can_tell(kind)


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.timestamp("ns")], ids=str
)
def test_other_columns_are_not_told(kind: pa.DataType) -> None:
    assert not spreading.can_tell(kind)


def test_rows_stay_in_their_order_and_none_is_lost() -> None:
    rows = pa.table({"key": pa.array([i % 10 for i in range(1000)]), "at": pa.array(range(1000))})
    parts = spreading.spread(rows, ["key"], 4)
    assert len(parts) == 4
    assert sorted(pa.concat_tables(parts)["at"].to_pylist()) == list(range(1000))
    for each in parts:
        assert each["at"].to_pylist() == sorted(each["at"].to_pylist())
    keys = [set(each["key"].to_pylist()) for each in parts]
    assert sum(map(len, keys)) == 10
    # Without a key there is one shard.
    assert [len(each) for each in spreading.spread(rows, [], 3)] == [1000, 0, 0]
