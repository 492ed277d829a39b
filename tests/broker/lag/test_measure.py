"""Bytes behind an offset are what adding up all batches gives."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.log import retention
from penstock.log.config import TopicConfig
from penstock.log.measure import bytes_from, bytes_since, locate, tail_of
from penstock.log.partition import Partition
from penstock.records.record import simple_batch
from tests.harness.profiles import examples
from tests.log.engine import Engine

CONFIG = TopicConfig(segment_bytes=1000, index_interval_bytes=200)
sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 300)), min_size=1, max_size=30)


def filled(batches: list[tuple[int, int]], unsynced: int = 0) -> Engine:
    engine = Engine(CONFIG)
    for at, (records, size) in enumerate(batches):
        if at == len(batches) - unsynced:
            engine.sync()
        values = [b"x" * size] * records
        engine.partition.append(simple_batch(values, timestamp_ms=engine.clock.advance(10)))
    if not unsynced:
        engine.sync()
    return engine


def expected(partition: Partition, offset: int) -> tuple[int, int | None]:
    """The bytes from the offset's batch on, and that batch's time, by looking at all batches."""
    front = max(offset, partition.log_start)
    found = [
        header
        for header, _ in partition.batches()
        if header.last_offset >= front and header.base_offset < partition.visible
    ]
    if front >= partition.visible or not found:
        return 0, None
    return sum(header.size for header in found), found[0].base_timestamp


def measured(partition: Partition, offset: int) -> tuple[int, int | None]:
    place = locate(partition, offset)
    if place is None:
        return 0, None
    return bytes_from(partition, place), place.timestamp_ms


@settings(max_examples=examples(60))
@given(sizes, st.integers(0, 3), st.data())
def test_bytes_and_time_are_exact(
    batches: list[tuple[int, int]], unsynced: int, data: st.DataObject
) -> None:
    engine = filled(batches, min(unsynced, len(batches)))
    partition = engine.partition
    start = data.draw(st.integers(0, partition.visible))
    partition.delete_before(start)
    for offset in range(-1, partition.log_end + 2):
        assert measured(partition, offset) == expected(partition, offset)


@settings(max_examples=examples(50))
@given(sizes, sizes)
def test_what_was_written_since(
    before: list[tuple[int, int]], after: list[tuple[int, int]]
) -> None:
    engine = filled(before)
    partition = engine.partition
    tail, size = tail_of(partition), partition.size_bytes
    assert bytes_since(partition, tail) == 0
    for records, length in after:
        partition.append(simple_batch([b"x" * length] * records, timestamp_ms=1))
    assert bytes_since(partition, tail) == partition.size_bytes - size


def test_a_place_stays_right_while_the_log_grows_and_shrinks() -> None:
    engine = filled([(2, 200)] * 20)
    partition = engine.partition
    place = locate(partition, 31)
    assert place is not None
    behind = bytes_from(partition, place)
    engine.write("more")
    assert bytes_from(partition, place) > behind
    partition.delete_before(30)
    removal = retention.expired(partition, engine.clock.now_ms())
    assert removal is not None
    removal.begin()
    removal.detach()
    assert (bytes_from(partition, place), place.timestamp_ms) == expected(partition, 31)


def test_the_log_stamps_the_time() -> None:
    engine = Engine(TopicConfig(segment_bytes=1000, message_timestamp_type="LogAppendTime"))
    engine.clock.advance(5)
    engine.partition.append(simple_batch([b"x"], timestamp_ms=17))
    engine.sync()
    place = locate(engine.partition, 0)
    assert place is not None
    assert place.timestamp_ms == engine.clock.now_ms()
