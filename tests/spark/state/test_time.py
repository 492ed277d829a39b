"""Event time: late or not by the place in the log, however it is cut into micro-batches."""

from __future__ import annotations

import random
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.state import Shard, State, corrected, marked, watermark_of
from penstock.spark.state.time import BEGINNING, LATE, Seen, Times, TimesFolder, with_late
from tests.harness.profiles import examples

pytestmark = pytest.mark.timeout(300)
LATENESS_US = 10_000_000
# Partition, offset, time in seconds.
Record = tuple[int, int, int]


def naive(records: Iterable[Record]) -> tuple[set[tuple[int, int]], int]:
    """The late ones and the watermark, one record after the other."""
    latest: dict[int, int] = {}
    late = set()
    for part, offset, second in sorted(records):
        at = second * 1_000_000
        if part in latest and at < latest[part] - LATENESS_US:
            late.add((part, offset))
        latest[part] = max(at, latest.get(part, at))
    return late, min(latest.values()) - LATENESS_US


def frame(spark: SparkSession, records: list[Record]) -> DataFrame:
    rows = [("t", p, o, datetime.fromtimestamp(s, UTC)) for p, o, s in records]
    return spark.createDataFrame(
        rows, "_topic string, _partition int, _offset bigint, _time timestamp"
    )


def some_records(seed: int) -> list[Record]:
    rng = random.Random(seed)
    found = []
    for part in range(3):
        at = 1_000
        for offset in range(60):
            at += rng.choice([0, 1, 5])
            found.append((part, offset, at - rng.choice([0, 0, 5, 10, 11, 30])))
    return found


def batches_of(records: list[Record], rng: random.Random) -> list[list[Record]]:
    """The same log, cut anyhow: each partition is read on from where it was."""
    left = {part: sorted(r for r in records if r[0] == part) for part in {r[0] for r in records}}
    found = []
    while any(left.values()):
        taken = []
        for part, rows in left.items():
            count = rng.randint(0, 40)
            taken += rows[:count]
            left[part] = rows[count:]
        found.append(taken)
    return [each for each in found if each]


def look(records: list[Record]) -> list[Seen]:
    parts = {part for part, _, _ in records}
    times = {part: [s * 1_000_000 for p, _, s in records if p == part] for part in parts}
    return [Seen(0, ("t", part), min(found), max(found)) for part, found in times.items()]


def test_late_is_the_same_in_any_micro_batches(
    penstock_spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    records = some_records(seed)
    wanted, end = naive(records)
    assert wanted
    folder = TimesFolder(str(tmp_path))
    late = set()
    for version, batch in enumerate(batches_of(records, random.Random(seed))):
        times = folder.before(version) or Times({0: {("t", part): None for part in range(3)}})
        seen = look(batch)
        rows = with_late(frame(penstock_spark, batch), LATENESS_US, times.before(0))
        found = {
            (each["_partition"], each["_offset"])
            for each in rows.where(LATE).select("_partition", "_offset").collect()
        }
        assert not found or any(times.may_be_late(each, LATENESS_US) for each in seen)
        late |= found
        folder.write(version, times.advanced(seen, {0: LATENESS_US}))
    last = folder.before(1_000)
    assert last is not None
    assert (late, last.watermark_us) == (wanted, end)
    # And in plain batch.
    good, bad = marked(frame(penstock_spark, records), time="_time", lateness="10 seconds")
    assert {(each["_partition"], each["_offset"]) for each in bad.collect()} == wanted
    kept = good.collect()
    assert len(kept) == len(records) - len(wanted)
    assert {each["_watermark_end"].timestamp() for each in kept} == {end / 1e6}


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 100)), max_size=8)))
@settings(max_examples=examples(30))
def test_the_watermark_never_goes_back_and_is_before_all_that_is_on_time(
    batches: list[list[tuple[int, int]]],
) -> None:
    times = Times({0: {("t", part): None for part in range(3)}})
    latest: dict[int, int] = {}
    for batch in batches:
        before = times.watermark_us
        seen = look([(part, 0, second) for part, second in batch])
        may = {each.part[1]: times.may_be_late(each, LATENESS_US) for each in seen}
        for part, second in batch:
            at = second * 1_000_000
            late = at < latest.get(part, at) - LATENESS_US
            assert late <= may[part]
            assert late or at >= before
            latest[part] = max(at, latest.get(part, at))
        times = Times.of(times.advanced(seen, {0: LATENESS_US}).as_json())
        assert times.watermark_us >= before
    wanted = min(latest.values()) - LATENESS_US if len(latest) == 3 else BEGINNING
    assert times.watermark_us == wanted
    # A partition that nobody knew may say something that is over.
    over = Seen(0, ("t", 3), times.watermark_us - 1, times.watermark_us + 1)
    assert times.may_be_late(over, LATENESS_US)


def test_operators_find_the_watermark_of_a_batch() -> None:
    def rows(second: int) -> pa.Table:
        at = datetime.fromtimestamp(second, UTC)
        return pa.table({"_watermark_end": pa.array([at, at], pa.timestamp("us", "UTC"))})

    plain = Shard(0, 1, 0, None, State())
    assert watermark_of({"a": rows(7), "b": rows(5)}, plain) == 5_000_000
    assert watermark_of({"a": pa.table({"n": [1]})}, plain) is None
    assert watermark_of({"a": rows(7)}, Shard(0, 1, 0, 3, State())) == 3


def test_device_clocks(penstock_spark: SparkSession) -> None:
    wrong = timedelta(days=400)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    row: tuple[Any, ...] = (at - wrong, at - wrong + timedelta(seconds=30), at + timedelta(hours=1))
    rows = penstock_spark.createDataFrame([row], "o timestamp, s timestamp, r timestamp")
    [found] = rows.select(F.unix_seconds(corrected("o", "s", "r")).alias("at")).collect()
    assert found["at"] == (at + timedelta(hours=1) - timedelta(seconds=30)).timestamp()
