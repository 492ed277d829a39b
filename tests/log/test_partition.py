"""One partition in good health: offsets, rolling, reading, lookups by time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import (
    CorruptBatchError,
    InvalidRecordError,
    InvalidTimestampError,
    OffsetOutOfRangeError,
    RecordTooLargeError,
)
from penstock.log.config import HOUR_MS, Durability, TopicConfig
from penstock.log.partition import Partition
from penstock.log.slice import Slice
from penstock.records.batch import headers
from penstock.records.record import BatchOptions, Record, encode
from penstock.testing.clock import START_MS
from tests.harness.profiles import examples
from tests.log.engine import SMALL, Engine, batch, numbered, read, texts


def offsets_of(piece: object) -> list[int]:
    assert isinstance(piece, Slice)
    return [header.base_offset for _, header in headers(piece.read())]


def needs_sync(partition: Partition) -> bool:
    return partition.needs_sync


# ---- writing -----------------------------------------------------------------------------------


def test_offsets_count_records() -> None:
    engine = Engine()
    partition = engine.partition
    assert partition.append(batch("a")) == 0
    assert partition.append(batch("b", "c", "d")) == 1
    assert partition.append(batch("e")) == 4
    assert (partition.log_start, partition.visible, partition.log_end) == (0, 0, 5)
    engine.sync()
    assert partition.visible == 5
    assert [record.offset for record in read(partition)] == [0, 1, 2, 3, 4]


def test_many_are_staged_and_written_at_once() -> None:
    engine = Engine(TopicConfig())
    partition = engine.partition
    views = [memoryview(bytearray(batch(f"{at}", f"{at}+"))) for at in range(10)]
    staged = [partition.stage(view, START_MS) for view in views]
    assert [item.base_offset for item in staged] == list(range(0, 20, 2))
    assert partition.log_end == 0
    before = engine.disk.operations
    partition.flush()
    # The epoch's checkpoint is six; the records are one.
    assert engine.disk.operations - before == 7
    assert partition.log_end == 20
    engine.sync()
    assert texts(partition)[-1] == "9+"


def test_visible_is_what_durability_says() -> None:
    expected: dict[Durability, int] = {"disk": 0, "os": 1, "memory": 1}
    for durability, seen in expected.items():
        engine = Engine(replace(SMALL, durability=durability))
        engine.write("a", sync=False)
        assert engine.partition.visible == seen
        assert len(texts(engine.partition)) == seen


def test_the_log_stamps_records() -> None:
    engine = Engine(replace(SMALL, message_timestamp_type="LogAppendTime"))
    engine.clock.set(5_000)
    staged = engine.partition.stage(memoryview(bytearray(batch("a", "b"))), 5_000)
    engine.partition.flush()
    engine.sync()
    assert staged.append_time_ms == 5_000
    assert [record.timestamp_ms for record in read(engine.partition)] == [5_000, 5_000]


def test_a_repeated_batch_gets_its_first_offsets() -> None:
    engine = Engine(replace(SMALL, message_timestamp_type="LogAppendTime"))
    partition = engine.partition
    partition.append(batch("a", "b", producer=(1, 0, 0)))
    partition.append(batch("c"))
    engine.clock.advance(77)
    again = partition.stage(memoryview(bytearray(batch("a", "b", producer=(1, 0, 0)))), START_MS)
    assert again == (0, 2, True, START_MS)
    partition.flush()
    assert partition.log_end == 3


def bad(data: bytes, at: int, mask: int = 0xFF) -> bytes:
    damaged = bytearray(data)
    damaged[at] ^= mask
    return bytes(damaged)


GOOD = batch("some text")
REFUSED = {
    "empty": (b"", InvalidRecordError),
    "cut": (GOOD[:-1], InvalidRecordError),
    "short": (GOOD[:30], InvalidRecordError),
    "checksum": (bad(GOOD, 70), CorruptBatchError),
    "old format": (bad(GOOD, 16, 0x03), InvalidRecordError),
    "two": (GOOD + GOOD, InvalidRecordError),
    "control": (encode([Record(0, START_MS, b"", b"")], BatchOptions(control=True)),
                InvalidRecordError),
    "transaction": (encode([Record(0, START_MS, b"", b"")], BatchOptions(transactional=True)),
                    InvalidRecordError),
    "gaps": (encode([Record(0, START_MS, b"", b""), Record(2, START_MS, b"", b"")]),
             InvalidRecordError),
    "large": (batch("x" * 2000), RecordTooLargeError),
    "future": (batch("x", timestamp_ms=START_MS + 2 * HOUR_MS), InvalidTimestampError),
    "past": (batch("x", timestamp_ms=START_MS - 2 * HOUR_MS), InvalidTimestampError),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_leaves_no_trace(name: str) -> None:
    config = replace(SMALL, max_message_bytes=1500, message_timestamp_before_max_ms=HOUR_MS)
    engine = Engine(config)
    engine.write("before")
    data, error = REFUSED[name]
    with pytest.raises(error):
        engine.partition.stage(memoryview(bytearray(data)), START_MS)
    engine.write("after")
    assert texts(engine.partition) == ["before", "after"]


def test_a_keyed_topic_takes_only_keys() -> None:
    engine = Engine(replace(SMALL, cleanup_policy=("compact",)))
    engine.write("with a key")
    with pytest.raises(InvalidRecordError, match="key"):
        engine.partition.append(encode([Record(0, START_MS, None, b"x")]))
    assert engine.partition.log_end == 1


def test_records_without_a_time_are_taken() -> None:
    engine = Engine(replace(SMALL, message_timestamp_before_max_ms=HOUR_MS))
    engine.partition.append(batch("x", timestamp_ms=-1))
    engine.sync()
    assert [record.timestamp_ms for record in read(engine.partition)] == [-1]
    assert engine.partition.max_timestamp() is None
    assert engine.partition.offset_for_time(0) is None


# ---- rolling -----------------------------------------------------------------------------------


def test_a_full_segment_is_closed() -> None:
    engine = Engine()
    engine.write(*numbered(range(40)))
    partition = engine.partition
    assert len(partition.segments) > 4
    assert all(0 < segment.size <= SMALL.segment_bytes for segment in partition.segments)
    assert texts(partition) == numbered(range(40))
    bases = [segment.base_offset for segment in partition.segments]
    assert engine.names(".log") == [f"{base:020d}.log" for base in bases]
    assert engine.names(".snapshot") == [f"{base:020d}.snapshot" for base in bases[1:]]


def test_a_batch_larger_than_a_segment_gets_its_own() -> None:
    engine = Engine()
    engine.write("a", "x" * 1500, "b")
    assert [segment.base_offset for segment in engine.partition.segments] == [0, 1, 2]


def test_a_segment_spans_no_more_than_its_time() -> None:
    engine = Engine(replace(SMALL, segment_ms=100))
    engine.write("a")
    engine.clock.advance(100)
    engine.write("b")
    assert len(engine.partition.segments) == 1
    engine.clock.advance(1)
    engine.write("c")
    assert [segment.base_offset for segment in engine.partition.segments] == [0, 2]
    # Also when nothing is written, but an empty one is never closed.
    engine.partition.roll_if_old(engine.clock.advance(100))
    assert len(engine.partition.segments) == 2
    engine.partition.roll_if_old(engine.clock.advance(1))
    engine.partition.roll_if_old(engine.clock.advance(1000))
    assert [segment.base_offset for segment in engine.partition.segments] == [0, 2, 3]


def test_closing_a_segment_does_not_change_what_is_visible() -> None:
    engine = Engine()
    engine.write("a")
    engine.write("b", sync=False)
    engine.partition.roll()
    engine.write("c", sync=False)
    assert texts(engine.partition) == ["a"]
    engine.sync()
    assert texts(engine.partition) == ["a", "b", "c"]


# ---- syncing -----------------------------------------------------------------------------------


def test_a_sync_covers_what_was_there_when_it_was_planned() -> None:
    engine = Engine()
    partition = engine.partition
    engine.write("a", sync=False)
    plan = partition.plan_sync()
    assert not needs_sync(partition)
    engine.write("b", sync=False)
    plan.run()
    partition.finish_sync(plan)
    assert texts(partition) == ["a"]
    assert needs_sync(partition)
    # Also if the segment was closed in the meantime.
    plan = partition.plan_sync()
    partition.roll()
    engine.write("c", sync=False)
    plan.run()
    partition.finish_sync(plan)
    assert texts(partition) == ["a", "b"]
    engine.sync()
    assert texts(partition) == ["a", "b", "c"]
    assert not needs_sync(partition)


def test_with_durability_os_only_closed_segments_are_synced() -> None:
    engine = Engine(replace(SMALL, durability="os"))
    engine.write("a", sync=False)
    assert not needs_sync(engine.partition)
    assert engine.partition.recovery_point == 0
    engine.partition.roll()
    assert needs_sync(engine.partition)
    engine.write("b", sync=False)
    engine.sync()
    assert engine.partition.recovery_point == 1
    assert texts(engine.lose_power())[:1] == ["a"]


def test_the_recovery_point_waits_for_the_indexes() -> None:
    engine = Engine()
    engine.write("a", "b")
    assert engine.partition.recovery_point == 2
    engine.partition.roll()
    # All records are synced, but not yet what belongs to the closed segment.
    assert engine.partition.recovery_point == 1
    assert engine.partition.closed == []
    engine.sync()
    assert engine.partition.recovery_point == 2
    assert len(engine.partition.closed) == 1


# ---- reading -----------------------------------------------------------------------------------


def test_reading_from_within_a_batch() -> None:
    engine = Engine()
    engine.partition.append(batch("a", "b", "c"))
    engine.sync()
    assert offsets_of(engine.partition.read(2, 1000)) == [0]


def test_the_first_batch_comes_whole() -> None:
    engine = Engine()
    engine.write("x" * 300, "y")
    partition = engine.partition
    assert offsets_of(partition.read(0, 1)) == [0]
    assert partition.read(0, 1, whole_first=False) is None
    assert offsets_of(partition.read(0, 10_000)) == [0, 1]


def test_readers_stop_at_a_limit() -> None:
    engine = Engine()
    engine.write(*numbered(range(20)))
    for limit in range(21):
        found: list[int] = []
        while (piece := engine.partition.read(len(found), 10_000, limit=limit)) is not None:
            found += offsets_of(piece)
        assert found == list(range(limit))


def test_out_of_range() -> None:
    engine = Engine()
    engine.write("a", "b")
    engine.write("c", sync=False)
    partition = engine.partition
    for offset in (-1, 4):
        with pytest.raises(OffsetOutOfRangeError):
            partition.read(offset, 100)
    # Between visible and the end there is only nothing to read yet.
    assert partition.read(2, 100) is None
    assert partition.read(3, 100) is None
    partition.delete_before(1)
    with pytest.raises(OffsetOutOfRangeError):
        partition.read(0, 100)
    for offset in (-1, 3):
        with pytest.raises(OffsetOutOfRangeError):
            partition.delete_before(offset)
    partition.delete_before(0)
    assert partition.log_start == 1


# ---- lookups by time ---------------------------------------------------------------------------

batches = st.lists(st.lists(st.integers(-1, 60), min_size=1, max_size=3), min_size=1, max_size=25)


@given(batches, st.integers(0, 25), st.floats(0, 1), st.sampled_from((0, 150, 100_000)))
@settings(max_examples=examples(60))
def test_lookups_by_time_agree_with_a_scan(
    times: list[list[int]], synced: int, start: float, interval: int
) -> None:
    """Out of order, over several segments, with records that are deleted or not visible yet."""
    config = replace(SMALL, segment_bytes=1024, index_interval_bytes=interval)
    engine = Engine(config)
    partition = engine.partition
    for number, group in enumerate(times):
        records = [Record(at, time, b"k", b"x" * 90) for at, time in enumerate(group)]
        partition.append(encode(records))
        if number + 1 == synced:
            engine.sync()
    partition.delete_before(int(partition.visible * start))
    visible = read(partition)
    for timestamp_ms in (0, 7, 30, 59, 60, 61):
        naive = next((r for r in visible if r.timestamp_ms >= timestamp_ms), None)
        found = partition.offset_for_time(timestamp_ms)
        assert (found and found[:2]) == (naive and naive[:2])
    newest = max((record.timestamp_ms for record in visible), default=-1)
    latest = partition.max_timestamp()
    if newest < 0:
        assert latest is None
    else:
        first = next(record for record in visible if record.timestamp_ms == newest)
        assert latest is not None
        assert latest[:2] == first[:2]
