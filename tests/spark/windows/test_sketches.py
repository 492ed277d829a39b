"""Approximate aggregates on Arrow: their bounds hold, and where micro-batches end never shows."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.spark import windows as w
from penstock.spark.windows.aggregates import Aggregate
from penstock.spark.windows.errors import WindowError
from penstock.spark.windows.merging import Windows
from penstock.spark.windows.shapes import Hops
from penstock.spark.windows.sketches import Bloom, CountMin
from tests.harness.profiles import examples
from tests.spark.windows.cutting import SECOND, Row, count_min, cuts, hashed, partials, run

SIZE_S, EVERY_S = 10, 5
KEY = pa.schema([("key", pa.string())])
ASKED = (0, 1, 7)
ERROR, ACCURACY, ITEMS = 0.01, 0.02, 300
COUNTS = cast("CountMin", w.count_min("number", relative_error=ERROR).bound("number", pa.int64()))
BLOOM = cast("Bloom", w.bloom("number", items=ITEMS).bound("number", pa.int64()))
VALUES: tuple[tuple[str, Aggregate], ...] = (
    ("kinds", w.approx_distinct("number").bound("number", pa.int64())),
    ("counts", COUNTS),
    (
        "asked",
        w.count_min("number", of=ASKED, relative_error=ERROR).bound("number", pa.int64()),
    ),
    ("seen", BLOOM),
    ("median", w.approx_quantile("x", 0.5, accuracy=ACCURACY).bound("x", pa.float64())),
    ("most", w.approx_quantile("x", 1.0, accuracy=ACCURACY).bound("x", pa.float64())),
)


def windows() -> Windows:
    shape = Hops(SIZE_S * SECOND, EVERY_S * SECOND)
    return Windows(KEY, VALUES, shape, early=False, allowed_us=0, whole=False)


def events(seed: int) -> list[Row]:
    """Few events or many, of few values or many, some of them null."""
    luck = random.Random(seed)
    spread = luck.choice([1, 30, 2_000])
    return [
        Row(
            luck.choice(["a", "a", "b", None]),
            luck.randrange(30) * SECOND,
            luck.randrange(spread) if luck.random() < 0.9 else None,
            luck.choice([0.0, math.nan, luck.uniform(-1e6, 1e6), luck.expovariate(1)]),
            offset=at,
        )
        for at in range(luck.choice([0, 3, 60, 300]))
    ]


def results(batches: Sequence[Sequence[Row]]) -> dict[tuple[str | None, int], dict[str, Any]]:
    """The windows after so many micro-batches and the end of time."""
    operator = windows()
    tables = [*(partials(operator, each) for each in batches), {}]
    marks = [*(-(10**15) for _ in batches), 10**12]
    out = pa.concat_tables(run(operator, tables, marks)).to_pylist()
    return {(row["key"], round(row["window_start"].timestamp())): row for row in out}


def may_contain(sketch: bytes, shape: Bloom, value: int) -> bool:
    low, high = hashed(value) & 0x7FFFFFFF, (hashed(value) >> 32) & 0x7FFFFFFF
    places = [(low + turn * high) % shape.bits for turn in range(shape.hashes)]
    return all(sketch[place // 8] >> place % 8 & 1 for place in places)


@settings(max_examples=examples(12))
@given(st.integers(0, 10**6), st.data())
def test_bounds_hold_however_the_log_is_cut(seed: int, data: st.DataObject) -> None:
    rows = events(seed)
    found = results(cuts(data, rows))
    # To the last byte: so a replay in other micro-batches gives the same.
    assert repr(found) == repr(results([rows]))
    inside: dict[tuple[str | None, int], list[Row]] = defaultdict(list)
    for row in rows:
        first = row.at_us // SECOND // EVERY_S * EVERY_S
        for start in range(first, first - SIZE_S, -EVERY_S):
            inside[row.key, start].append(row)
    assert set(found) == set(inside)
    for window, group in inside.items():
        check(found[window], group)


def check(row: dict[str, Any], group: Sequence[Row]) -> None:
    counts = Counter(each.number for each in group if each.number is not None)
    # So few are counted without an error worth mentioning.
    assert row["kinds"] == pytest.approx(len(counts), abs=max(1, 0.08 * len(counts)))
    for number in ASKED:
        estimate = dict(row["asked"])[str(number)]
        assert estimate == w.frequency(row["counts"], number) >= counts[number]
    # One sketch for what several have seen is that of all of it, as Spark would build it.
    assert row["counts"] == count_min([*counts.elements()], COUNTS)
    assert all(may_contain(row["seen"], BLOOM, number) for number in counts)
    numbers = sorted(each.x for each in group if not math.isnan(each.x))
    for name, p in (("median", 0.5), ("most", 1.0)):
        if numbers:
            at_rank = numbers[max(0, math.ceil(p * len(numbers)) - 1)]
            assert row[name] == pytest.approx(at_rank, rel=ACCURACY + 1e-9)
        else:
            assert row[name] is None


def test_errors_are_as_large_as_is_said_and_no_larger(seed: int) -> None:
    """Of ten thousand events: the errors that are promised with a probability."""
    rng = np.random.default_rng(seed)
    numbers = (rng.zipf(1.3, 10_000) % 5_000).tolist()
    rows = [Row("a", 0, number, 0.0, at) for at, number in enumerate(numbers)]
    found = results([rows[at : at + 1_000] for at in range(0, 10_000, 1_000)])["a", 0]
    counts = Counter(numbers)
    # Five times the standard error.
    assert found["kinds"] == pytest.approx(len(counts), rel=5 * 1.04 / math.sqrt(1 << 12))
    off = [w.frequency(found["counts"], number) - count for number, count in counts.items()]
    assert min(off) >= 0
    assert sum(each > ERROR * 10_000 for each in off) <= 0.01 * len(off)


def test_a_full_filter_is_seldom_wrong(seed: int) -> None:
    luck = random.Random(seed)
    known = luck.sample(range(10**9), ITEMS)
    rows = [Row("a", 0, number, 0.0, at) for at, number in enumerate(known)]
    seen = results([rows[:100], rows[100:]])["a", 0]["seen"]
    assert all(may_contain(seen, BLOOM, number) for number in known)
    others = set(luck.sample(range(10**9), 5_000)) - set(known)
    wrong = sum(may_contain(seen, BLOOM, number) for number in others)
    # One in a hundred is what was asked for.
    assert wrong < 0.03 * len(others)


def test_a_sketch_of_another_version_is_refused() -> None:
    sketch = count_min([1, 2], COUNTS)
    with pytest.raises(WindowError, match="of version 9, which is not known"):
        w.frequency((9).to_bytes(4, "big") + sketch[4:], 1)


@pytest.mark.parametrize(
    ("aggregate", "kind", "message"),
    [
        (w.approx_distinct("number"), pa.float64(), "cast it to a string"),
        (w.approx_distinct("number", precision=3), pa.int64(), "not between 4 and 21"),
        (w.count_min("number", relative_error=1.0), pa.int64(), "between 0 and 1"),
        (w.bloom("number", items=0), pa.int64(), "items must be at least 1"),
        (w.bloom("number", items=10**9), pa.int64(), "may have 16 MiB"),
        (w.approx_quantile("number", 0.5, accuracy=0.6), pa.int64(), "not between 0.00001 and"),
        (w.approx_quantile("number", 1.5), pa.int64(), "p=1.5 is not between 0 and 1"),
    ],
)
def test_what_cannot_be_had_is_said(aggregate: Aggregate, kind: pa.DataType, message: str) -> None:
    assert message in aggregate.bound("number", kind).refusal
