"""Time told by the tasks that read: the same late rows and the same watermark as by others."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from penstock.spark.source.planning import Range
from penstock.spark.state import time as clock
from penstock.spark.state.files import StateError, is_because_of
from penstock.spark.state.time import BEGINNING, Times
from penstock.spark.state.watching import (
    Now,
    Told,
    UnreadError,
    Watch,
    Watching,
    Watermark,
)
from tests.harness.profiles import examples

pytestmark = pytest.mark.timeout(300)
LATENESS_US = 10
# A time, if there is one, and whether the record has a value.
Record = tuple[int | None, bool]
# Of the log's partitions: the last is added later.
PARTS = 3


def naive(log: list[list[Record]], cuts: list[list[int]], start: Times) -> list[dict[Any, Any]]:
    """For each micro-batch: what each late row came too late for, one record after the other."""
    times, found = start, []
    reached: dict[int, int] = {}
    at = [0] * PARTS
    for sizes in cuts:
        late = {}
        for part, size in enumerate(sizes):
            for offset in range(at[part], min(len(log[part]), at[part] + size)):
                when, has_value = log[part][offset]
                if when is None:
                    continue
                own = reached[part] - LATENESS_US if part in reached else None
                mark = times.watermark_us
                behind = mark != BEGINNING if own is None else own < mark
                before = mark if behind else own
                if before is not None and when < before and has_value:
                    late[part, offset] = before, behind
                reached[part] = max(when, reached.get(part, when))
            at[part] += size
        seen = [clock.Seen(0, ("t", part), at, at) for part, at in reached.items()]
        times = times.advanced(seen, {0: LATENESS_US})
        found.append({"late": late, "watermark_us": times.watermark_us})
    return found


def watched(
    folder: str, log: list[list[Record]], cuts: list[list[int]], start: Times, rng: random.Random
) -> list[dict[Any, Any]]:
    """The same by tasks, each of which reads a partition in pieces, and some of them twice."""
    watch, times, found = Watch(folder), start, []
    at = [0] * PARTS
    for batch_id, sizes in enumerate(cuts):
        now = Now(batch_id, {0: LATENESS_US}, times)
        watch.begin(now)
        assert watch.now() == now
        late: dict[Any, Any] = {}
        pieces = [log[part][at[part] : at[part] + size] for part, size in enumerate(sizes)]
        for part, (size, rows) in enumerate(zip(sizes, pieces, strict=True)):
            for _ in range(rng.choice([1, 2])):
                late |= read(watch, part, at[part], rows, rng)
            at[part] += size
        heard = watch.heard(batch_id)
        assert heard.tasks == PARTS
        assert sum(each.late for each in heard.parts) == len(late)
        for each in heard.parts:
            offsets = [offset for number, offset in late if number == each.partition]
            assert each.late_at == ((min(offsets), max(offsets)) if offsets else None)
        times = heard.after(now)
        assert sum(each.read for each in heard.parts) == sum(map(len, pieces))
        assert Watermark(watch, batch_id, PARTS)() == times.watermark_us
        with pytest.raises(StateError, match="runs by now"):
            Watermark(watch, batch_id + 1, PARTS)()
        with pytest.raises(UnreadError) as untold:
            Watermark(watch, batch_id, PARTS + 1)()
        assert is_because_of(UnreadError, RuntimeError(f"{untold.typename}: {untold.value}"))
        found.append({"late": late, "watermark_us": times.watermark_us})
    return found


def read(
    watch: Watch, part: int, first: int, rows: list[Record], rng: random.Random
) -> dict[Any, Any]:
    now, ranges = watch.now(), [Range("t", part, first, first + len(rows))]
    watching, late = Watching(now, {("t", part): first}), {}
    at = 0
    while at < len(rows):
        piece = rows[at : at + rng.randint(1, 5)]
        offsets = pa.array(np.arange(len(piece)) + first + at)
        aside = watching.aside(
            ("t", part),
            offsets,
            pa.array([when for when, _ in piece], pa.timestamp("us", "UTC")),
            pa.array([has_value for _, has_value in piece]),
            0,
        )
        for offset, each in zip(offsets.to_pylist(), aside.to_pylist(), strict=True):
            if each is not None:
                late[part, offset] = each["before"], each["behind"]
        at += len(piece)
    watch.tell(now, ranges, watching.told())
    return late


records = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(-50, 50)), st.booleans()), max_size=12
)


@given(
    st.lists(records, min_size=PARTS, max_size=PARTS),
    st.lists(st.lists(st.integers(0, 6), min_size=PARTS, max_size=PARTS), max_size=6),
    st.integers(0, 9),
)
@settings(max_examples=examples(30))
def test_late_rows_and_the_watermark_are_those_of_one_record_after_the_other(
    log: list[list[Record]], cuts: list[list[int]], seed: int
) -> None:
    start = Times({0: {("t", part): None for part in range(PARTS - 1)}})
    with TemporaryDirectory() as folder:
        found = watched(folder, log, cuts, start, random.Random(seed))
    assert found == naive(log, cuts, start)


def test_the_same_rows_are_late_as_by_spark(penstock_spark: SparkSession, tmp_path: Path) -> None:
    rng = random.Random(1)
    log: list[list[Record]] = [
        [(rng.randint(0, 60) + offset, True) for offset in range(40)] for _ in range(PARTS)
    ]
    before = Times({0: {("t", 0): 45, ("t", 1): 20}}, watermark_us=30)
    watch = Watch(str(tmp_path))
    watch.begin(Now(7, {0: LATENESS_US}, before))
    told: dict[Any, Any] = {}
    for part, rows in enumerate(log):
        told |= read(watch, part, 0, rows, rng)
    frame = penstock_spark.createDataFrame(
        [
            ("t", part, offset, datetime.fromtimestamp(when / 1e6, UTC))
            for part, rows in enumerate(log)
            for offset, (when, _) in enumerate(rows)
            if when is not None
        ],
        "_topic string, _partition int, _offset bigint, _time timestamp",
    )
    marked = clock.with_late(frame, LATENESS_US, before.before(0), before.watermark_us)
    found = {
        (row["_partition"], row["_offset"]): (row[clock.BEFORE], row[clock.BEHIND])
        for row in marked.where(clock.LATE).collect()
    }
    assert told == found
    assert {behind for _, behind in told.values()} == {True, False}


def test_a_task_of_a_micro_batch_before_does_not_count(tmp_path: Path) -> None:
    watch = Watch(str(tmp_path))
    now = Now(1, {0: LATENESS_US}, Times({0: {("t", 0): 100}}))
    watch.begin(now)
    watch.tell(now, [Range("t", 0, 5, 9)], [Told("t", 0, 5, 120)])
    watch.tell(now, [Range("t", 0, 0, 5)], [Told("t", 0, 0, 90, late=3, late_at=(1, 4))])
    [told] = watch.heard(1).parts
    assert (told.start, told.late) == (5, 0)
    assert watch.heard(0).tasks == watch.heard(11).tasks == 0
