"""The rules of compaction, one by one: what stays, when a pass runs, what readers see."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptBatchError
from penstock.log.cleaner import CHECKPOINT_FILE, Cleaner, roll_for_compaction
from penstock.log.compaction import DELETE_HORIZON, compact, parse
from penstock.log.config import TopicConfig
from penstock.log.slice import Slice
from penstock.log.swap import PLAN_FILE, Swap
from penstock.records import compression, record
from penstock.records.batch import read_header
from penstock.records.record import BatchOptions, Record
from penstock.testing.clock import START_MS, ManualClock
from penstock.testing.faults import SimulatedDisk
from tests.harness.profiles import examples
from tests.log.keeping import (
    COMPACTED,
    HOUR_MS,
    ID,
    Pair,
    append,
    close_segment,
    consume,
    contents,
    open_store,
    run_pass,
    small_log,
    stored,
    stored_headers,
)

# ---- the rules, one by one -------------------------------------------------------------------


def test_the_latest_record_of_each_key_stays_where_it_is() -> None:
    _, partition, _ = small_log([(b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"c", b"4")])
    result = run_pass(partition)
    assert result is not None
    assert (result.records_read, result.records_kept, result.clean_until) == (4, 3, 4)
    assert contents(partition) == [(1, b"b", b"2"), (2, b"a", b"3"), (3, b"c", b"4")]
    assert partition.log_end == 4
    assert consume(partition) == stored(partition)


def test_the_active_segment_is_left_alone() -> None:
    _, partition, _ = small_log([(b"a", b"1"), (b"b", b"1")])
    append(partition, [(b"a", b"2")])
    run_pass(partition)
    assert contents(partition) == [(0, b"a", b"1"), (1, b"b", b"1"), (2, b"a", b"2")]


def test_a_tombstone_goes_when_readers_have_had_their_time() -> None:
    _, partition, clock = small_log([(b"a", b"1"), (b"b", b"2"), (b"a", None)])
    cleaner = Cleaner(partition)
    result = run_pass(partition, cleaner)
    assert result is not None
    assert result.next_horizon_ms == clock.now_ms() + HOUR_MS
    assert contents(partition) == [(1, b"b", b"2"), (2, b"a", None)]
    (tombstone,) = [h for h in stored_headers(partition) if h.base_offset == 2]
    assert tombstone.attributes & DELETE_HORIZON
    assert tombstone.base_timestamp == clock.now_ms() + HOUR_MS
    assert stored(partition)[-1].timestamp_ms == START_MS
    clock.advance(HOUR_MS - 1)
    assert cleaner.due(clock.now_ms()) is None
    clock.advance(1)
    run_pass(partition, cleaner)
    assert contents(partition) == [(1, b"b", b"2")]
    assert cleaner.due(clock.now_ms()) is None


def test_the_horizon_of_a_tombstone_survives_a_restart() -> None:
    store, partition, clock = small_log([(b"a", None), (b"b", b"1")])
    run_pass(partition)
    disk = partition.disk
    store.close()
    clock.advance(HOUR_MS)
    partition = open_store(COMPACTED, clock, disk).partitions[ID]
    append(partition, [(b"c", b"1")])
    close_segment(partition)
    run_pass(partition)
    assert contents(partition) == [(1, b"b", b"1"), (2, b"c", b"1")]


def test_the_last_batch_of_a_producer_stays_even_if_it_is_empty() -> None:
    clock = ManualClock()
    store = open_store(COMPACTED, clock)
    partition = store.partitions[ID]
    for sequence in range(3):
        options = BatchOptions(compression.ZSTD, 5, 0, 2 * sequence)
        append(partition, [(b"a", b"1"), (b"b", b"2")], options=options)
    append(partition, [(b"a", b"new"), (b"b", b"new")])
    close_segment(partition)
    run_pass(partition)
    kept, plain = stored_headers(partition)
    assert (kept.producer_id, kept.record_count, kept.base_offset, kept.last_offset) == (5, 0, 4, 5)
    assert (kept.base_sequence, kept.last_sequence, kept.codec) == (4, 5, compression.NONE)
    assert plain.record_count == 2
    disk = partition.disk
    store.abandon()
    partition = open_store(COMPACTED, clock, disk).partitions[ID]
    again = bytearray(
        record.encode([Record(0, START_MS, b"a", b"1"), Record(1, START_MS, b"b", b"2")],
                      BatchOptions(compression.ZSTD, 5, 0, 4))
    )  # fmt: skip
    staged = partition.stage(memoryview(again), clock.now_ms())
    assert staged.duplicate
    assert staged.base_offset == 4


def test_records_without_a_key_go() -> None:
    config = TopicConfig(segment_bytes=4000)
    _, partition, _ = small_log([(None, b"1"), (b"a", b"2"), (None, b"3")], config)
    partition.config = COMPACTED
    run_pass(partition)
    assert contents(partition) == [(1, b"a", b"2")]


def test_a_batch_that_is_past_the_bound_on_keys_waits_for_the_next_pass() -> None:
    pairs: list[Pair] = [(b"%d" % (at % 10), b"%d" % at) for at in range(40)]
    _, partition, clock = small_log(pairs)
    cleaner = Cleaner(partition)
    result = run_pass(partition, cleaner, max_keys=4)
    assert result is not None
    assert not result.complete
    assert result.clean_until == 4
    partition.config = TopicConfig(cleanup_policy=("compact",), min_cleanable_dirty_ratio=1.0)
    passes = 1
    while run_pass(partition, cleaner, max_keys=4) is not None:
        passes += 1
        assert passes < 50
    # The last of each key; within one pass of four keys nothing was replaced.
    assert contents(partition) == [(at, b"%d" % (at % 10), b"%d" % at) for at in range(30, 40)]
    assert cleaner.clean_until == 40
    assert clock.now_ms() == START_MS


def test_long_keys_are_told_apart() -> None:
    long, other = b"k" * 5000, b"k" * 4999 + b"x"
    digest_sized = b"d" * 63
    pairs: list[Pair] = [(long, b"1"), (other, b"2"), (digest_sized, b"3"), (long, b"4")]
    _, partition, _ = small_log(pairs)
    run_pass(partition)
    assert [item.value for item in stored(partition)] == [b"2", b"3", b"4"]


def test_small_segments_are_merged() -> None:
    clock = ManualClock()
    partition = open_store(COMPACTED, clock).partitions[ID]
    for number in range(8):
        append(partition, [(b"%d" % number, b"x" * 100)])
        close_segment(partition)
    before = stored(partition)
    assert len(partition.closed) == 8
    result = run_pass(partition)
    assert result is not None
    assert [item.outputs for item in result.replacements] == [(0,)]
    assert len(partition.closed) == 1
    assert stored(partition) == before
    names = set(partition.disk.names(partition.folder))
    assert {name for name in names if name.startswith("00000000000000000003")} == set()


def test_what_has_shrunk_is_merged_at_once_and_outputs_are_filled() -> None:
    pairs: list[Pair] = [(b"%d" % (at % 3 * at), b"x" * 100) for at in range(400)]
    _, partition, _ = small_log(pairs)
    before = len(partition.closed)
    run_pass(partition)
    sizes = [segment.size for segment in partition.closed]
    assert before > 15
    assert all(3800 < size <= 4000 for size in sizes[:-1])
    latest = {key: at for at, (key, _) in enumerate(pairs)}
    assert [item.offset for item in stored(partition)] == sorted(latest.values())
    assert consume(partition) == stored(partition)


def test_what_would_not_change_is_not_written() -> None:
    _, partition, clock = small_log([(b"%d" % at, b"x" * 500) for at in range(20)])
    closed = partition.closed
    assert len(closed) > 2
    result = run_pass(partition)
    assert result is not None
    assert result.replacements == []
    assert partition.closed == closed
    assert Cleaner(partition).due(clock.now_ms()) is None


def test_everything_may_go() -> None:
    _, partition, clock = small_log([(b"a", None), (b"b", None)])
    run_pass(partition)
    clock.advance(HOUR_MS)
    append(partition, [(b"c", b"1")])
    close_segment(partition)
    append(partition, [(b"c", b"2")])
    cleaner = Cleaner(partition)
    run_pass(partition, cleaner)
    assert [item.offset for item in stored(partition)] == [2, 3]
    close_segment(partition)
    run_pass(partition, cleaner)
    assert contents(partition) == [(3, b"c", b"2")]
    assert consume(partition, 0) == stored(partition)
    assert partition.log_start == 0


def test_append_times_stay() -> None:
    config = TopicConfig(
        cleanup_policy=("compact",),
        message_timestamp_type="LogAppendTime",
        min_cleanable_dirty_ratio=0.0,
    )
    clock = ManualClock()
    partition = open_store(config, clock).partitions[ID]
    append(partition, [(b"a", None), (b"b", b"1"), (b"a", b"2"), (b"t", None)], timestamp_ms=5)
    close_segment(partition)
    run_pass(partition)
    assert [(item.offset, item.timestamp_ms) for item in stored(partition)] == [
        (1, START_MS), (2, START_MS), (3, START_MS),
    ]  # fmt: skip


def test_lookups_by_time_see_what_stayed() -> None:
    clock = ManualClock()
    partition = open_store(COMPACTED, clock).partitions[ID]
    for at in range(60):
        append(partition, [(b"%d" % (at % 7), b"x" * 40)], timestamp_ms=START_MS + 10 * at)
    close_segment(partition)
    run_pass(partition)
    kept = stored(partition)
    assert len(kept) == 7
    for wanted in range(START_MS - 5, START_MS + 600, 5):
        expected = next((item.offset for item in kept if item.timestamp_ms >= wanted), None)
        found = partition.offset_for_time(wanted)
        assert (found.offset if found else None) == expected
    newest = partition.max_timestamp()
    assert newest is not None
    assert newest.offset == 59


# ---- when ------------------------------------------------------------------------------------


def test_a_pass_waits_until_enough_is_dirty() -> None:
    config = TopicConfig(
        cleanup_policy=("compact",), min_cleanable_dirty_ratio=0.5, segment_bytes=4000
    )
    _, partition, clock = small_log([(b"%d" % at, b"x" * 100) for at in range(10)], config)
    cleaner = Cleaner(partition)
    assert run_pass(partition, cleaner) is not None
    append(partition, [(b"0", b"x" * 100)])
    close_segment(partition)
    assert cleaner.due(clock.now_ms()) is None
    for at in range(10):
        append(partition, [(b"%d" % at, b"x" * 100)])
    close_segment(partition)
    due = cleaner.due(clock.now_ms())
    assert due is not None
    assert 0.5 < due.ratio < 0.6


def test_young_records_wait_and_old_ones_do_not() -> None:
    config = TopicConfig(
        cleanup_policy=("compact",),
        min_cleanable_dirty_ratio=0.9,
        min_compaction_lag_ms=10_000,
        max_compaction_lag_ms=60_000,
    )
    clock = ManualClock()
    partition = open_store(config, clock).partitions[ID]
    cleaner = Cleaner(partition)
    for _ in range(2):
        append(partition, [(b"a", b"1")])
        close_segment(partition)
        clock.advance(8_000)
    due = cleaner.due(clock.now_ms())
    assert due is not None
    assert len(due.job.inputs) == 1
    run_pass(partition, cleaner)
    clock.advance(20_000)
    # Half of the log is dirty, which is not enough; then it has waited long enough.
    assert cleaner.due(clock.now_ms()) is None
    clock.advance(40_000)
    assert run_pass(partition, cleaner) is not None
    assert contents(partition) == [(1, b"a", b"1")]


def test_the_active_segment_is_closed_when_its_records_must_be_compacted() -> None:
    config = TopicConfig(cleanup_policy=("compact",), max_compaction_lag_ms=60_000)
    clock = ManualClock()
    partition = open_store(config, clock).partitions[ID]
    append(partition, [(b"a", b"1")])
    clock.advance(60_000)
    assert not roll_for_compaction(partition, clock.now_ms())
    clock.advance(1)
    assert roll_for_compaction(partition, clock.now_ms())
    assert not roll_for_compaction(partition, clock.now_ms())
    assert len(partition.segments) == 2


def test_a_checkpoint_that_cannot_be_true_is_not_believed() -> None:
    _, partition, _ = small_log([(b"a", b"1"), (b"a", b"2")])
    cleaner = Cleaner(partition)
    cleaner.clean_until = 1000
    cleaner.save()
    cleaner = Cleaner(partition)
    assert cleaner.clean_until == 1000
    run_pass(partition, cleaner)
    assert contents(partition) == [(1, b"a", b"2")]
    assert Cleaner(partition).clean_until == 2
    path = f"{partition.folder}/{CHECKPOINT_FILE}"
    partition.disk.remove(path)
    assert Cleaner(partition).clean_until == 0


def test_damage_stops_the_pass_and_nothing_else() -> None:
    disk = SimulatedDisk()
    _, partition, _ = small_log([(b"a", b"1" * 50), (b"a", b"2" * 50)], disk=disk)
    disk.damage(partition.closed[0].path(".log"), 100)
    with pytest.raises(CorruptBatchError):
        run_pass(partition)
    assert partition.read(0, 1000) is not None
    assert not disk.exists(f"{partition.folder}/{PLAN_FILE}")


# ---- readers ---------------------------------------------------------------------------------


def test_readers_are_not_disturbed() -> None:
    _, partition, clock = small_log([(b"%d" % (at % 3), b"x" * 100) for at in range(100)])
    for segment in partition.closed:
        segment.release()
    before = stored(partition)
    held = partition.read(0, 1000)
    assert isinstance(held, Slice)
    data = held.file.pread(held.length, held.position)
    due = Cleaner(partition).due(clock.now_ms())
    assert due is not None
    result = compact(partition.disk, partition.folder, due.job)
    swap = Swap(partition, result.replacements)
    swap.prepare()
    swap.load_indexes()
    swap.run()
    # The names are new, the partition has not been told: reads go on in the old files.
    assert consume(partition) == before
    swap.finish()
    assert [item.offset for item in consume(partition)] == [97, 98, 99]
    assert held.file.pread(held.length, held.position) == data
    for offset in range(100):
        found = partition.read(offset, 10)
        assert isinstance(found, Slice)
        head = read_header(found.file.pread(61, found.position))
        assert head.base_offset == max(offset, 97)


def test_a_swap_is_off_when_its_segments_are_gone() -> None:
    _, partition, clock = small_log([(b"a", b"x" * 900) for _ in range(12)])
    due = Cleaner(partition).due(clock.now_ms())
    assert due is not None
    result = compact(partition.disk, partition.folder, due.job)
    partition.replace_segments(partition.closed[:1])
    assert not Swap(partition, result.replacements).valid


# ---- the parser ------------------------------------------------------------------------------

fields = st.one_of(st.none(), st.binary(max_size=70), st.integers(60, 9000).map(bytes))


@settings(max_examples=examples(50))
@given(
    st.lists(st.tuples(st.integers(-(2**40), 2**40), fields, fields), min_size=1, max_size=8),
    st.integers(1, 70_000),
)
def test_columns_say_what_spans_say(rows: list[tuple[int, bytes, bytes]], gap: int) -> None:
    records = [Record(at * gap, time, key, value) for at, (time, key, value) in enumerate(rows)]
    data = bytes(record.payload(record.encode(records)))
    columns = parse(data, len(records))
    spans = list(record.spans(data, len(records)))
    assert columns.starts == [span.start for span in spans] + [spans[-1].end]
    assert columns.offset_deltas == [span.offset_delta for span in spans]
    assert columns.time_deltas == [span.timestamp_delta for span in spans]
    assert columns.tombstones == [at for at, span in enumerate(spans) if not span.has_value]
    assert columns.unkeyed == [at for at, span in enumerate(spans) if span.key is None]
    for key, span in zip(columns.keys, spans, strict=True):
        if span.key is not None and len(span.key) >= 64:
            assert key is not None
            assert len(key) == 64
        else:
            assert key == span.key


@settings(max_examples=examples(50))
@given(st.binary(max_size=80), st.integers(0, 5))
def test_garbage_is_an_error_and_nothing_else(data: bytes, count: int) -> None:
    with contextlib.suppress(CorruptBatchError):
        parse(data, count)
