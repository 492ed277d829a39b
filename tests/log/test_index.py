"""The two indexes of a segment against plain lists."""

from __future__ import annotations

import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.log.index import OffsetIndex, TimeIndex
from tests.harness.profiles import examples

rising = st.lists(st.integers(0, 10_000), unique=True, max_size=30).map(sorted)


@st.composite
def offset_indexes(draw: st.DrawFn) -> tuple[OffsetIndex, list[tuple[int, int]]]:
    offsets = draw(rising)
    positions = sorted(draw(st.sets(st.integers(0, 10_000), min_size=30, max_size=30)))
    pairs = list(zip(offsets, positions, strict=False))
    index = OffsetIndex()
    for offset, position in pairs:
        index.append(offset, position)
    return index, pairs


@settings(max_examples=examples(50))
@given(offset_indexes(), st.integers(-5, 11_000))
def test_floors_of_the_offset_index(
    made: tuple[OffsetIndex, list[tuple[int, int]]], wanted: int
) -> None:
    index, pairs = made
    by_offset = [position for offset, position in pairs if offset <= wanted]
    assert index.floor_position(wanted) == (by_offset[-1] if by_offset else 0)
    by_position = [position for _, position in pairs if position <= wanted]
    assert index.floor_of_position(wanted) == (by_position[-1] if by_position else 0)


@settings(max_examples=examples(50))
@given(offset_indexes())
def test_the_offset_index_on_disk(made: tuple[OffsetIndex, list[tuple[int, int]]]) -> None:
    index, pairs = made
    data = index.to_bytes()
    assert data == b"".join(struct.pack(">ii", *pair) for pair in pairs)
    back = OffsetIndex.from_bytes(data, 20_000)
    assert back is not None
    assert (back.offsets, back.positions) == (index.offsets, index.positions)
    assert not pairs or OffsetIndex.from_bytes(data, pairs[-1][1]) is None, "beyond the segment"
    assert OffsetIndex.from_bytes(data + b"\x00", 20_000) is None


def test_an_offset_index_that_does_not_rise_is_refused() -> None:
    for pairs in ([(1, 5), (1, 9)], [(1, 5), (2, 5)], [(2, 5), (1, 9)], [(1, -5), (2, 9)]):
        data = b"".join(struct.pack(">ii", *pair) for pair in pairs)
        assert OffsetIndex.from_bytes(data, 100) is None


entries = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=30)


@settings(max_examples=examples(50))
@given(entries, st.integers(-5, 60))
def test_the_time_index_keeps_only_news(seen: list[tuple[int, int]], wanted: int) -> None:
    index = TimeIndex()
    kept: list[tuple[int, int]] = []
    offset = 0
    for timestamp_ms, step in seen:
        offset += step
        index.append(timestamp_ms, offset)
        if not kept or timestamp_ms > kept[-1][0]:
            kept.append((timestamp_ms, offset))
    assert list(zip(index.timestamps, index.offsets, strict=True)) == kept
    earlier = [at for timestamp_ms, at in kept if timestamp_ms < wanted]
    assert index.floor_offset(wanted) == (earlier[-1] if earlier else 0)
    data = index.to_bytes()
    assert data == b"".join(struct.pack(">qi", *entry) for entry in kept)
    back = TimeIndex.from_bytes(data)
    assert back is not None
    assert (back.timestamps, back.offsets) == (index.timestamps, index.offsets)
    assert TimeIndex.from_bytes(data + b"\x00") is None


def test_a_time_index_that_does_not_rise_is_refused() -> None:
    data = struct.pack(">qi", 5, 1) + struct.pack(">qi", 5, 2)
    assert TimeIndex.from_bytes(data) is None
