"""Rows cut into micro-batches, and what Spark would compute of each, in plain Python."""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import datasketches  # type: ignore[import-untyped]
import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from penstock.spark.state import Operator, Shard, State
from penstock.spark.windows import exact
from penstock.spark.windows.aggregates import Avg, Count, First, Max, Min, Sum
from penstock.spark.windows.merging import Windows, prefix
from penstock.spark.windows.multisets import ApproxQuantile, Multiset
from penstock.spark.windows.sketches import ApproxDistinct, Bloom, CountMin

SECOND = 1_000_000


@dataclass(frozen=True)
class Row:
    """An event, at its place in the only partition of a log."""

    key: str | None
    at_us: int
    number: int | None
    x: float
    offset: int = 0
    # Of which zeros are one, and so are those that are no number.
    kind: float | None = 0.0


def rows(most_s: int = 200) -> st.SearchStrategy[list[Row]]:
    """Out of order, with equal times, copies, and one key that has most of them."""
    key = st.sampled_from(["a", "a", "a", "b", "c", None])
    one = st.builds(
        Row,
        key,
        st.integers(0, most_s).map(lambda at: at * SECOND),
        st.one_of(st.none(), st.integers(-5, 5)),
        # Sums that what is smaller would show in are refused.
        st.floats(-1e18, 1e18).filter(lambda x: x == 0 or abs(x) > 1e-40)
        | st.sampled_from([0.1, 1e-7, -0.0, 1e17]),
        kind=st.sampled_from([0.0, -0.0, 0.0, -0.0, math.nan, None]),
    )
    return st.lists(one, max_size=40).map(
        lambda found: [replace(each, offset=at) for at, each in enumerate(found)]
    )


def in_time(events: Sequence[Row], lateness_us: int) -> list[Row]:
    """Those that are not late by their place."""
    found, latest = [], -(10**18)
    for each in events:
        if each.at_us >= latest - lateness_us:
            found.append(each)
        latest = max(latest, each.at_us)
    return found


def cuts(data: st.DataObject, events: Sequence[Row]) -> list[list[Row]]:
    """Micro-batches, some of them empty."""
    places = sorted(data.draw(st.lists(st.integers(0, len(events)), max_size=5)))
    edges = [0, *places, len(events)]
    return [list(events[a:b]) for a, b in pairwise(edges)]


def watermarks(batches: Sequence[Sequence[Row]], lateness_us: int) -> list[int]:
    found, latest = [], -(10**15)
    for batch in batches:
        latest = max([latest, *(each.at_us for each in batch)])
        found.append(latest - lateness_us)
    return found


def run(
    operator: Operator, batches: Sequence[Mapping[str, pa.Table]], marks: Sequence[int | None]
) -> Iterator[pa.Table]:
    """One micro-batch after the other on the same state."""
    state = State()
    for version, (inputs, mark) in enumerate(zip(batches, marks, strict=True)):
        shard = Shard(0, 1, version, mark, state)
        yield operator.process(shard, {name: each for name, each in inputs.items() if len(each)})


def partials(operator: Windows, events: Sequence[Row]) -> dict[str, pa.Table]:
    """What comes to the operator of a micro-batch."""
    panes: dict[tuple[str | None, int], list[Row]] = defaultdict(list)
    for each in events:
        panes[each.key, each.at_us - each.at_us % operator.shape.pane_us].append(each)
    found: list[dict[str, Any]] = []
    for (key, pane), group in panes.items():
        base = {"key": key, "_key": "-" if key is None else f"1:{key}", "_pane": pane}
        times = [each.at_us for each in group]
        main = {**base, "_set": 0, "_first": min(times), "_last": max(times)}
        for at, (_, aggregate) in enumerate(operator.values):
            values = [(each, _of(each, aggregate.column)) for each in group]
            main |= {
                prefix(at) + end: value
                for end, value in _partial(
                    aggregate, [(r, v) for r, v in values if v is not None]
                ).items()
            }
        found.append(main)
        for at, counted in enumerate(operator.sets.values(), start=1):
            values_ = Counter(_counted(counted, _of(each, counted.column)) for each in group)
            del values_[None]
            found += [{**base, "_set": at, f"_set_{at}": v, "_count": n} for v, n in
                      values_.items()]  # fmt: skip
    return {"rows": pa.Table.from_pylist(found, schema=_schema(operator))} if found else {}


def _of(row: Row, column: Any) -> Any:
    return 1 if column is None else getattr(row, column)


def _partial(aggregate: object, values: list[tuple[Row, Any]]) -> dict[str, Any]:
    only = [v for _, v in values]
    match aggregate:
        case Multiset():
            return {}
        case Count():
            return {"n": len(only)}
        case Sum() | Avg() if aggregate.type == pa.float64():
            limbs, wild, lost = exact.limbs_of(np.array(only, dtype=np.float64))
            sums = {name: int(limb.sum()) for name, limb in zip(exact.LIMBS, limbs, strict=True)}
            more = {exact.WILD: float(wild.sum()), exact.LOST: int(lost.sum())}
            return {**sums, **more, "n": len(only)}
        case Sum():
            return {"sum": sum(only) if only else None, "n": len(only)}
        case Min():
            best = (max if isinstance(aggregate, Max) else min)(only, default=None)
            return {aggregate.function: best if best is None else best + 0}
        case First():
            if not values:
                return {}
            choose = max if aggregate.last else min
            row, value = choose(values, key=lambda each: (each[0].at_us, each[0].offset))
            return {"order0": row.at_us, "order1": "t", "order2": 0, "order3": row.offset,
                    "value": value}  # fmt: skip
        case ApproxDistinct():
            sketch = datasketches.hll_sketch(aggregate.precision, datasketches.HLL_8)
            for value in only:
                sketch.update(value)
            return {"sketch": bytes(sketch.serialize_compact())}
        case CountMin():
            return {"sketch": count_min(only, aggregate)}
        case Bloom():
            return {"hashes": sorted({hashed(value) for value in only})}
        case _:
            raise AssertionError(aggregate)


def _counted(counted: Multiset, value: Any) -> Any:
    if not isinstance(counted, ApproxQuantile):
        return value
    if value is None or math.isnan(value):
        return None
    gamma = (1 + counted.accuracy) / (1 - counted.accuracy)
    size = min(max(abs(value), 1e-300), 1e300)
    code = math.ceil(math.log(size) / math.log(gamma)) + (1 << 40)
    return 0 if value == 0 else code if value > 0 else -code


def hashed(value: int) -> int:
    """Any hash of 64 bits will do: which one it is is between Spark's two ends."""
    digest = hashlib.blake2b(str(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def count_min(values: Sequence[int], shape: CountMin) -> bytes:
    """As org.apache.spark.util.sketch.CountMinSketchImpl builds and writes it."""
    depth = math.ceil(-math.log1p(-shape.confidence) / math.log(2))
    width = math.ceil(2 / shape.relative_error)
    multipliers, seed = [], 42 ^ 0x5DEECE66D
    for _ in range(depth):  # java.util.Random(42).nextInt(Integer.MAX_VALUE)
        seed = (seed * 0x5DEECE66D + 0xB) & ((1 << 48) - 1)
        multipliers.append((seed >> 17) % (2**31 - 1))
    cells = [[0] * width for _ in range(depth)]
    for value in values:
        for row, multiplier in zip(cells, multipliers, strict=True):
            mixed = multiplier * value
            mixed = (mixed + (mixed >> 32)) & (2**31 - 1)
            row[mixed % width] += 1
    head = struct.pack(f">iqii{depth}q", 1, len(values), depth, width, *multipliers)
    return head + b"".join(struct.pack(f">{width}q", *row) for row in cells)


def _schema(operator: Windows) -> pa.Schema:
    fields = [("key", pa.string()), ("_key", pa.string()), ("_pane", pa.int64()),
              ("_set", pa.int32()), ("_first", pa.int64()), ("_last", pa.int64()),
              ("_count", pa.int64())]  # fmt: skip
    for at, (_, each) in enumerate(operator.values):
        if isinstance(each, Bloom):
            fields.append((prefix(at) + "hashes", pa.list_(pa.int64())))
        else:
            fields += [(prefix(at) + end, kind) for end, (kind, _) in each.fields().items()]
    for at, counted in enumerate(operator.sets.values(), start=1):
        fields.append((f"_set_{at}", counted.counted))
    return pa.schema(fields)
