"""A segment: lookups against a plain scan, sealed and rebuilt indexes, what a crash leaves."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import StorageError
from penstock.log.segment import Segment, create_segment, open_segment
from penstock.records.batch import BatchHeader, verify
from penstock.records.record import Record, encode
from penstock.testing.faults import SimulatedDisk
from tests.harness.profiles import examples

BASE = 1000


class Made(NamedTuple):
    """A segment and what it holds."""

    disk: SimulatedDisk
    segment: Segment
    batches: list[tuple[int, BatchHeader]]


def make(steps: list[tuple[int, int, int, int]], interval: int = 200) -> Made:
    """Batches of (records, offsets left out before it, timestamp, bytes of value)."""
    disk = SimulatedDisk()
    disk.make_dirs("/log")
    segment = create_segment(disk, "/log", BASE)
    segment.index_interval_bytes = interval
    offset, position = BASE, 0
    found = []
    for count, gap, timestamp_ms, size in steps:
        offset += gap
        data = encode([Record(offset + at, timestamp_ms, None, b"x" * size) for at in range(count)])
        header = verify(data)
        segment.write([data])
        segment.account(data, position, len(data), header.last_offset, header.max_timestamp)
        found.append((position, header))
        offset, position = header.next_offset, position + len(data)
    return Made(disk, segment, found)


steps = st.lists(
    st.tuples(
        st.integers(1, 3), st.integers(0, 2), st.integers(-1, 40), st.sampled_from((0, 30, 150))
    ),
    max_size=40,
)
segments = st.builds(make, steps, st.sampled_from((0, 100, 500, 10_000)))


@settings(max_examples=examples(50))
@given(segments, st.integers(BASE - 3, BASE + 150))
def test_find_by_offset(made: Made, offset: int) -> None:
    naive = next((item for item in made.batches if item[1].last_offset >= offset), None)
    assert made.segment.find(offset) == naive
    assert list(made.segment.scan(0)) == made.batches


@settings(max_examples=examples(50))
@given(segments, st.integers(-2, 45))
def test_find_by_time(made: Made, timestamp_ms: int) -> None:
    naive = next((item for item in made.batches if item[1].max_timestamp >= timestamp_ms), None)
    # Batches without a time (-1) are never what is looked for.
    if timestamp_ms >= 0:
        assert made.segment.find_by_time(timestamp_ms) == naive
    times = [header.max_timestamp for _, header in made.batches]
    assert made.segment.max_timestamp_ms == max(times, default=-1)


@settings(max_examples=examples(50))
@given(segments, st.integers(0, 40), st.integers(0, 3000))
def test_slices_end_between_batches(made: Made, at: int, max_bytes: int) -> None:
    if not made.batches:
        return
    position, _ = made.batches[at % len(made.batches)]
    boundaries = {place for place, _ in made.batches} | {made.segment.size}
    end = made.segment.end_of_slice(position, max_bytes, made.segment.size)
    assert end in boundaries
    assert position <= end
    assert end - position <= max_bytes or end == made.segment.size
    fits = [b for b in boundaries if position <= b <= position + max_bytes]
    # An index entry may cut it short, but something comes out whenever something fits.
    assert (end > position) == (max(fits) > position)


@settings(max_examples=examples(50))
@given(segments)
def test_stored_indexes_are_what_a_rebuild_gives(made: Made) -> None:
    segment = made.segment
    segment.write_indexes()
    stored = open_segment(made.disk, "/log", BASE)
    assert stored.max_timestamp_ms == segment.max_timestamp_ms
    assert (stored.index.offsets, stored.index.positions) == (
        segment.index.offsets,
        segment.index.positions,
    )
    again = open_segment(made.disk, "/log", BASE)
    again.index_interval_bytes = segment.index_interval_bytes
    again.rebuild_indexes()
    assert again.index.to_bytes() == segment.index.to_bytes()
    assert (again.digest, again.size) == (segment.digest, segment.size)
    assert (again.max_timestamp_ms, again.max_timestamp_offset) == (
        segment.max_timestamp_ms,
        segment.max_timestamp_offset,
    )
    # The last entry, the largest timestamp, is added when a segment is closed.
    rebuilt = again.time_index.to_bytes()
    assert stored.time_index.to_bytes()[: len(rebuilt)] == rebuilt


@settings(max_examples=examples(50))
@given(segments, st.data())
def test_damaged_indexes_are_not_believed(made: Made, data: st.DataObject) -> None:
    made.segment.write_indexes()
    suffix = data.draw(st.sampled_from((".index", ".timeindex")))
    path = made.segment.path(suffix)
    size = made.disk.open(path).size()
    if not size:
        return
    made.disk.damage(path, data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 255)))
    opened = open_segment(made.disk, "/log", BASE)
    assert opened.max_timestamp_ms == made.segment.max_timestamp_ms
    for offset in range(BASE, BASE + 130, 7):
        assert opened.find(offset) == made.segment.find(offset)


TEN = [(2, 0, 10 + at, 50) for at in range(10)]


def test_a_verified_scan_ends_where_the_segment_is_not_whole() -> None:
    made = make(TEN)
    whole = made.segment.file.pread(made.segment.size, 0)
    for size in range(0, len(whole), 13):
        segment = make([]).segment
        segment.file.pwritev([whole[:size]], 0)
        expected = [item for item in made.batches if item[0] + item[1].size <= size]
        assert list(segment.scan_verified()) == expected


def test_a_verified_scan_does_not_go_back() -> None:
    made = make(TEN)
    first = made.segment.file.pread(made.batches[1][0], 0)
    # The first batch once more behind the last: a whole batch, but not the next one.
    made.segment.file.pwritev([first], made.segment.size)
    assert list(made.segment.scan_verified()) == made.batches


def test_long_batches_in_a_verified_scan() -> None:
    made = make([(1, 0, 5, 3 << 20), (1, 0, 6, 10), (1, 0, 7, 3 << 20), (1, 0, 8, 2 << 20)])
    assert list(made.segment.scan_verified()) == made.batches
    assert list(made.segment.scan(0)) == made.batches


def test_truncating() -> None:
    made = make(TEN)
    position, header = made.batches[4]
    made.segment.truncate(position)
    assert list(made.segment.scan(0)) == made.batches[:4]
    assert made.segment.max_timestamp_ms == 13
    assert made.segment.find(header.base_offset) is None


def test_writing_again_brings_to_disk_what_a_failed_sync_lost() -> None:
    made = make(TEN)
    made.disk.fail("sync")
    with pytest.raises(StorageError):
        made.segment.file.sync()
    made.segment.write_again()
    made.disk.sync_dir("/")
    made.disk.sync_dir("/log")
    after = made.disk.after_crash()
    assert list(open_segment(after, "/log", BASE).scan_verified()) == made.batches


def test_offsets_that_do_not_fit_a_relative_number() -> None:
    segment = make([]).segment
    assert segment.fits(BASE + 2**31 - 1)
    assert not segment.fits(BASE + 2**31)


def test_a_failing_disk_does_not_leave_half_an_index() -> None:
    made = make(TEN)
    size = made.segment.size
    made.disk.fail("read")
    with pytest.raises(StorageError):
        made.segment.rebuild_indexes()
    assert made.segment.size == size
    assert made.segment.find(made.batches[-1][1].base_offset) == made.batches[-1]
