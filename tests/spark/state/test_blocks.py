"""Whether rows may be late, told from blocks of them, or from what the source says of spans."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T  # noqa: N812

from penstock.spark.reading.decoding import SPAN, STAMP, Typing
from penstock.spark.source.reading import record_schema
from penstock.spark.state.time import Seen, Times

LATENESS_US = 10
SIZE = 4
ROW = T.StructType([T.StructField("a", T.LongType())]).json()


def is_late_somewhere(times: list[int], before: int | None) -> bool:
    reached = before
    for at in times:
        if reached is not None and at < reached - LATENESS_US:
            return True
        reached = at if reached is None else max(reached, at)
    return False


@given(
    st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=30), min_size=1, max_size=3),
    st.one_of(st.none(), st.integers(0, 60)),
)
def test_no_late_row_is_overlooked(partitions: list[list[int]], before: int | None) -> None:
    known = Times({0: {("t", number): before for number in range(len(partitions))}})
    blocks = [
        Seen(0, ("t", number), min(rows[begin : begin + SIZE]), max(rows[begin : begin + SIZE]))
        for number, rows in enumerate(partitions)
        for begin in range(0, len(rows), SIZE)
    ]
    if any(is_late_somewhere(rows, before) for rows in partitions):
        assert known.may_any_be_late(blocks, LATENESS_US)


def spans(rows: list[int], sizes: list[int]) -> list[Seen]:
    """What the source says of a partition that comes in pieces of these sizes."""
    typing = Typing("json", ROW, STAMP)
    found, begin = [], 0
    for size in [*sizes, len(rows)]:
        piece = rows[begin : begin + size]
        begin += len(piece)
        if piece:
            columns = {
                "key": [None] * len(piece),
                "value": [b"{}"] * len(piece),
                "topic": ["t"] * len(piece),
                "partition": [0] * len(piece),
                "offset": list(range(begin - len(piece), begin)),
                "timestamp": piece,
                "timestampType": [0] * len(piece),
            }
            batch = pa.RecordBatch.from_pydict(columns, schema=record_schema(headers=False))
            first, *others = typing.decode(batch).column(SPAN).to_pylist()
            assert others == [None] * (len(piece) - 1)
            found.append(Seen(0, ("t", 0), first["least"], first["latest"], first["behind"]))
    return found


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=30),
    st.lists(st.integers(1, 9), max_size=5),
    st.one_of(st.none(), st.integers(0, 60)),
)
def test_spans_tell_exactly(rows: list[int], sizes: list[int], before: int | None) -> None:
    known = Times({0: {("t", 0): before}})
    told = known.may_any_be_late(spans(rows, sizes), LATENESS_US)
    assert told == is_late_somewhere(rows, before)


def test_a_long_micro_batch_in_order_has_no_late_rows() -> None:
    blocks = [Seen(0, ("t", 0), at, at + 9) for at in range(0, 100_000, 10)]
    assert Times().may_be_late(Seen(0, ("t", 0), 0, 100_000), LATENESS_US)
    assert not Times().may_any_be_late(blocks, LATENESS_US)
