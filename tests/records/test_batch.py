"""The header of a batch: what is read, patched and verified without opening it."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptBatchError
from penstock.records.batch import (
    HEADER_SIZE,
    batch_size,
    headers,
    next_sequence,
    patch,
    read_header,
    stamp_append_time,
    verify,
)
from penstock.records.record import BatchOptions, Record, decode, encode, simple_batch
from tests.harness.profiles import examples
from tests.records.samples import options, record_lists

SAMPLE = encode(
    [Record(7 + at, 1000 + at, b"key", b"value %d" % at, (("h", b"x"),)) for at in range(3)],
    BatchOptions(producer_id=5, producer_epoch=1, base_sequence=9, leader_epoch=2),
)


@settings(max_examples=examples(50))
@given(record_lists(), options)
def test_the_header_tells_what_went_in(records: list[Record], chosen: BatchOptions) -> None:
    batch = encode(records, chosen)
    header = verify(batch)
    assert header.size == batch_size(batch) == len(batch)
    assert header.base_offset == records[0].offset
    assert header.last_offset == records[-1].offset
    assert header.next_offset == records[-1].offset + 1
    assert header.record_count == len(records)
    assert header.base_timestamp == records[0].timestamp_ms
    assert header.max_timestamp == max(record.timestamp_ms for record in records)
    assert header.codec == chosen.codec
    assert header.is_transactional == chosen.transactional
    assert not header.is_control
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (
        chosen.producer_id,
        chosen.producer_epoch,
        chosen.base_sequence,
    )


def test_every_flipped_bit_is_found() -> None:
    # Base offset (8 bytes) and leader epoch (4) are the log's to change and are not covered.
    covered = [at for at in range(len(SAMPLE)) if not (at < 8 or 12 <= at < 16)]
    for at in covered:
        for bit in range(8):
            damaged = bytearray(SAMPLE)
            damaged[at] ^= 1 << bit
            with pytest.raises(CorruptBatchError):
                verify(damaged)


def test_every_cut_is_found() -> None:
    for size in range(len(SAMPLE)):
        with pytest.raises(CorruptBatchError):
            verify(SAMPLE[:size])


@settings(max_examples=examples(50))
@given(st.binary(max_size=200))
@example(bytes(61))
@example(bytes(16) + b"\x02" + bytes(44))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptBatchError):
        verify(data)


@settings(max_examples=examples(50))
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1))
def test_a_patch_changes_the_place_and_nothing_else(offset: int, epoch: int) -> None:
    patched = bytearray(SAMPLE)
    patch(patched, 0, offset, epoch)
    header = read_header(patched)
    assert header == read_header(SAMPLE)._replace(base_offset=offset, leader_epoch=epoch)
    if offset < 2**62:
        verify(patched)


def test_append_time_replaces_the_times_of_all_records() -> None:
    stamped = bytearray(SAMPLE)
    stamp_append_time(stamped, 0, len(stamped), 123_456)
    header = verify(stamped)
    assert header.has_append_time
    assert header.max_timestamp == 123_456
    assert {record.timestamp_ms for record in decode(stamped)} == {123_456}
    assert [r.value for r in decode(stamped)] == [r.value for r in decode(SAMPLE)]


def test_batches_end_to_end() -> None:
    other = simple_batch([b"x"])
    joined = SAMPLE + other + SAMPLE
    places = [at for at, _ in headers(joined)]
    assert places == [0, len(SAMPLE), len(SAMPLE) + len(other)]
    # A batch that does not lie whole in the range is not among them.
    assert [at for at, _ in headers(joined, 0, len(joined) - 1)] == places[:2]
    assert [at for at, _ in headers(joined, len(SAMPLE))] == places[1:]
    assert list(headers(joined[: HEADER_SIZE - 1])) == []
    assert list(headers(bytes(100))) == []


def test_sequences_wrap_to_zero() -> None:
    assert next_sequence(2**31 - 1, 1) == 0
    assert next_sequence(2**31 - 2, 5) == 3
    options_at_end = BatchOptions(producer_id=1, producer_epoch=0, base_sequence=2**31 - 1)
    batch = simple_batch([b"a", b"b"], options=options_at_end)
    assert verify(batch).last_sequence == 0
