"""Columns into batches, read back by our own reader that works record by record."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.records import compression
from penstock.records.batch import HEADER_SIZE, next_sequence, verify
from penstock.records.columns.decode import HEADER_TYPE, decode
from penstock.records.columns.encode import Packed, encode, from_lists, headers_array
from penstock.records.columns.layout import ColumnsError
from penstock.records.record import Header, Record
from penstock.records.record import decode as read_records
from penstock.records.record import encode as write_records
from tests.harness.profiles import examples
from tests.records.samples import headers as header_lists
from tests.records.samples import payloads

Row = tuple[bytes | None, bytes | None, tuple[Header, ...], int]
rows = st.tuples(payloads, payloads, header_lists, st.integers(-(2**62), 2**62))
codecs = st.sampled_from(sorted(compression.CODES))


def read(packed: list[Packed]) -> list[Row]:
    return [
        (r.key, r.value, r.headers, r.timestamp_ms) for p in packed for r in read_records(p.data)
    ]


@given(st.lists(rows, max_size=20), codecs, st.integers(0, 30_000), st.booleans())
@settings(max_examples=examples(50))
def test_what_goes_in_comes_out(
    given_rows: list[Row], codec: str, batch_bytes: int, transactional: bool
) -> None:
    first_sequence = 2**31 - 5
    packed = from_lists(
        [row[0] for row in given_rows],
        [row[1] for row in given_rows],
        headers=[row[2] for row in given_rows],
        timestamps_ms=[row[3] for row in given_rows],
        codec=codec,
        max_batch_bytes=batch_bytes,
        producer=(9, 3, first_sequence),
        transactional=transactional,
    )
    assert read(packed) == given_rows
    done = 0
    for batch in packed:
        header = verify(batch.data)
        assert (header.base_offset, header.record_count) == (0, batch.count)
        assert header.size == len(batch.data)
        assert header.last_offset_delta == batch.count - 1
        assert (header.producer_id, header.producer_epoch) == (9, 3)
        assert header.base_sequence == batch.first_sequence == next_sequence(first_sequence, done)
        assert header.is_transactional == transactional
        assert compression.NAMES[header.codec] == codec
        times = [row[3] for row in given_rows[done : done + batch.count]]
        assert (header.base_timestamp, header.max_timestamp) == (times[0], max(times))
        assert (batch.base_timestamp, batch.max_timestamp, batch.first) == (
            times[0],
            max(times),
            done,
        )
        done += batch.count


@settings(max_examples=examples(50))
@given(st.lists(rows, min_size=1, max_size=20), st.integers(0, 10_000))
def test_batches_are_as_large_as_allowed(given_rows: list[Row], batch_bytes: int) -> None:
    keys, values = [r[0] for r in given_rows], [r[1] for r in given_rows]
    packed = from_lists(keys, values, timestamps_ms=7, max_batch_bytes=batch_bytes)
    for batch in packed:
        assert batch.count == 1 or len(batch.data) <= batch_bytes
    for batch, after in pairwise(packed):
        # The next record did not fit any more.
        end = batch.first + batch.count
        together = [
            Record(at, 7, keys[batch.first + at], values[batch.first + at])
            for at in range(end + 1 - batch.first)
        ]
        assert len(write_records(together)) > batch_bytes
        assert after.first == end


@settings(max_examples=examples(50))
@given(st.lists(rows, min_size=1, max_size=20))
def test_the_bytes_are_those_of_our_other_writer(given_rows: list[Row]) -> None:
    records = [Record(at, r[3], r[0], r[1], r[2]) for at, r in enumerate(given_rows)]
    (packed,) = from_lists(
        [r.key for r in records],
        [r.value for r in records],
        headers=[r.headers for r in records],
        timestamps_ms=[r.timestamp_ms for r in records],
        max_batch_bytes=1 << 30,
    )
    assert packed.data == write_records(records)


@settings(max_examples=examples(50))
@given(st.lists(rows, max_size=12), st.integers(0, 4), st.integers(0, 12))
def test_slices_and_other_types(given_rows: list[Row], start: int, length: int) -> None:
    wanted = given_rows[start : start + length]
    times = pa.array([r[3] for r in given_rows], pa.int64()).slice(start, length)
    headers = headers_array([r[2] for r in given_rows]).slice(start, length)
    for kind in (pa.binary(), pa.large_binary()):
        keys = pa.array([r[0] for r in given_rows], kind).slice(start, length)
        values = pa.array([r[1] for r in given_rows], kind).slice(start, length)
        assert read(encode(keys, values, headers=headers, timestamps_ms=times)) == wanted
        in_pieces = pa.chunked_array([values, values.slice(0, 0)])
        packed = encode(keys, in_pieces, headers=headers, timestamps_ms=times)
        assert read(packed) == wanted


def test_what_was_decoded_can_be_encoded() -> None:
    records = [Record(i, i, b"k%d" % i, None, (("a", b"b"),) * (i % 3)) for i in range(100)]
    found = decode(write_records(records), first_offset=40, headers=True).batch
    packed = encode(
        found["key"], found["value"], headers=found["headers"], timestamps_ms=found["offset"]
    )
    assert read(packed) == [(r.key, None, r.headers, r.offset) for r in records[40:]]


def test_columns_that_are_not_there() -> None:
    values = pa.array([b"a", None], pa.binary())
    assert [r[:2] for r in read(encode(None, values, timestamps_ms=1))] == [
        (None, b"a"),
        (None, None),
    ]
    assert [r[:2] for r in read(encode(values, None, timestamps_ms=np.int64(1)))] == [
        (b"a", None),
        (None, None),
    ]
    assert encode(None, values.slice(0, 0), timestamps_ms=1) == []
    assert read(encode(pa.array(["ä"]), pa.array([None]), timestamps_ms=[3])) == [
        ("ä".encode(), None, (), 3)
    ]
    nulls = pa.array([None, [{"key": "a", "value": None}]], HEADER_TYPE)
    assert [r[2] for r in read(encode(None, values, headers=nulls, timestamps_ms=1))] == [
        (),
        (("a", None),),
    ]


def test_without_a_producer_there_are_no_sequences() -> None:
    (packed,) = from_lists(None, [b"v"], timestamps_ms=1)
    header = verify(packed.data)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (-1, -1, -1)
    assert packed.first_sequence == -1
    assert len(packed.data) == HEADER_SIZE + 8


def test_what_cannot_be_records_is_refused() -> None:
    values = pa.array([b"a", b"b"])
    cases: list[tuple[str, dict[str, object]]] = [
        ("both", {"keys": None, "values": None}),
        ("lengths", {"keys": values.slice(1), "values": values}),
        ("timestamps", {"keys": None, "values": values, "timestamps_ms": [1, 2, 3]}),
        ("null", {"keys": None, "values": values, "timestamps_ms": pa.array([1, None])}),
        ("int64", {"keys": None, "values": pa.array([1, 2])}),
        ("list", {"keys": None, "values": [b"a"]}),
        ("codec", {"keys": None, "values": values, "codec": "brotli"}),
        ("headers", {"keys": None, "values": values, "headers": values}),
        (
            "no key",
            {
                "keys": None,
                "values": values,
                "headers": pa.array([[{"key": None, "value": b""}], []], HEADER_TYPE),
            },
        ),
        (
            "key and value",
            {"keys": None, "values": values, "headers": pa.array([[None], []], HEADER_TYPE)},
        ),
    ]
    for words, arguments in cases:
        with pytest.raises(ColumnsError, match=words):
            encode(**{"timestamps_ms": 1, **arguments})  # type: ignore[arg-type]
