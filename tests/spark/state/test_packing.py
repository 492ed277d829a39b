"""Rows packed where they are read: the shards are Spark's, and no row is lost or changed."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.reading.decoding import ASIDE_TYPE, PACKED, Typing
from penstock.spark.state.packing import Packing, unpacked
from penstock.spark.state.spreading import shards_of_columns as shards_of

pytestmark = pytest.mark.timeout(300)
SHARDS = 7


def test_shards_are_those_of_spark(penstock_spark: SparkSession) -> None:
    rng = random.Random(3)
    rows = [
        (
            at,
            None if rng.random() < 0.1 else rng.randint(-(1 << 63), (1 << 63) - 1),
            None if rng.random() < 0.1 else "".join(rng.choices("aé€😀z", k=rng.randint(0, 40))),
        )
        for at in range(500)
    ]
    frame = penstock_spark.createDataFrame(rows, "at int, number bigint, text string")
    for key in (["number"], ["text"], ["text", "number"]):
        shard = F.pmod(F.xxhash64(*key), F.lit(SHARDS)).alias("shard")
        found = frame.select("at", *key, shard).toArrow().sort_by("at").combine_chunks()
        columns = [found[name].chunk(0) for name in key]
        assert shards_of(columns, SHARDS).tolist() == found["shard"].to_pylist()
        some = [each.slice(100, 50) for each in columns]
        assert shards_of(some, SHARDS).tolist() == found["shard"].to_pylist()[100:150]


class Told:
    """Says that every tenth row is late."""

    def aside(
        self,
        part: tuple[str, int],
        offsets: pa.Array,
        times: pa.Array,
        has_value: pa.BooleanArray,
        bad: int,
    ) -> pa.Array:
        late = np.asarray(offsets) % 10 == 0
        said = [{"before": 1, "behind": False} if each else None for each in late]
        return pa.array(said, ASIDE_TYPE)


def test_good_rows_are_packed_and_others_are_not(penstock_spark: SparkSession) -> None:
    # A name that Arrow would take for a path to another column.
    columns = "id int, name string, `.name` string, at timestamp"
    schema = penstock_spark.createDataFrame([], columns).schema
    typing = Typing("json", schema.json(), "at", watch="", packs=True)
    count = 1000
    values = [
        None if at % 50 == 1 else b"{" if at % 50 == 2
        else b'{"id":%d,"name":"n%d",".name":"d%d","at":"2026-01-01T00:00:00Z"}' % (at % 97, at, at)
        for at in range(count)
    ]  # fmt: skip
    records = pa.RecordBatch.from_pydict({
        "key": pa.nulls(count, pa.binary()),
        "value": pa.array(values, pa.binary()),
        "topic": pa.array(["t"] * count),
        "partition": pa.array([3] * count, pa.int32()),
        "offset": pa.array(range(count), pa.int64()),
        "timestamp": pa.array([5] * count, pa.timestamp("us", "UTC")),
    })  # fmt: skip
    rows = typing.decode(records, Told())
    taken = {"e": "name", "d": ".name", "p": "_partition", "o": "_offset", "k": "id"}
    packing = Packing(tuple(taken.items()), ("k",), ("k",))
    told = packing.packed(rows, SHARDS)
    assert told.schema == rows.schema
    blobs = pa.Table.from_batches([told.filter(told.column(PACKED).is_valid())])
    others = told.filter(told.column(PACKED).is_null())
    late_or_bad = [at for at in range(count) if at % 50 == 2 or at % 10 == 0]
    assert sorted(others.column("offset").to_pylist()) == late_or_bad
    left = []
    for shard in range(SHARDS):
        is_own = pc.equal(pc.struct_field(blobs[PACKED], "shard"), shard)
        found = unpacked(pc.struct_field(blobs[PACKED].filter(is_own), "rows"))
        assert found.schema.field("k").type == pa.int64()
        assert set(shards_of([found["k"].chunk(0)], SHARDS).tolist()) == {shard}
        assert set(found["p"].to_pylist()) == {3}
        left += found.select(["o", "k", "e", "d"]).to_pylist()
    good = [at for at in range(count) if at % 50 not in {1, 2} and at % 10]
    assert sorted(left, key=lambda row: row["o"]) == [
        {"o": at, "k": at % 97, "e": f"n{at}", "d": f"d{at}"} for at in good
    ]
    with pytest.raises(AssertionError, match="not meant to be packed"):
        packing.packed(rows.drop_columns([PACKED]), SHARDS)
    nothing = packing.packed(rows.slice(0, 0), SHARDS)
    assert len(nothing) == 0
    assert replace(packing, longs=()) != packing
