"""Records in and out of batches, against the code of two Kafka clients, and against damage."""

from __future__ import annotations

import contextlib
import random
import struct
import warnings
from itertools import pairwise
from typing import Any

import aiokafka.record.default_records as aiokafka_records
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptBatchError
from penstock.records import compression
from penstock.records.batch import HEADER_SIZE, headers, read_header, verify
from penstock.records.record import (
    BatchOptions,
    Record,
    decode,
    encode,
    payload,
    read_varint,
    spans,
    surely_keyed,
    write_varint,
)
from tests.harness.profiles import DAMAGED_BATCHES, examples
from tests.records.samples import CODECS, for_other_writers, options, record_lists

with warnings.catch_warnings():
    # It reads its own files in a way that Python 3.11 warns about.
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka.record.default_records as kafka_python_records


@given(record_lists(), options)
@settings(max_examples=examples(66))
def test_what_goes_in_comes_out(records: list[Record], chosen: BatchOptions) -> None:
    assert list(decode(encode(records, chosen))) == records


@given(st.integers(-(2**63), 2**63 - 1))
def test_numbers(value: int) -> None:
    out = bytearray()
    write_varint(out, value)
    assert read_varint(out, 0) == (value, len(out))
    for cut in range(len(out)):
        with pytest.raises(CorruptBatchError):
            read_varint(out[:cut], 0)


keyed_records = st.lists(
    st.builds(
        Record,
        st.just(0),
        st.sampled_from([0, 1, 63, 64, 1 << 20, 1 << 40]),
        st.binary(max_size=3) | st.sampled_from([b"k" * n for n in (63, 64, 8191, 8192)]),
        st.none() | st.sampled_from([b"v" * n for n in (0, 1, 63, 64, 8191, 8192, 1 << 20)]),
    ),
    min_size=1,
    max_size=4,
)


@given(keyed_records, st.data())
@settings(max_examples=examples(100))
def test_the_quick_look_for_keys_takes_nothing_that_the_slow_one_refuses(
    records: list[Record], data: st.DataObject
) -> None:
    numbered = [record._replace(offset=at) for at, record in enumerate(records)]
    body = bytearray(payload(encode(numbered)))
    # It may look away from what is long, never from what is ordinary.
    short = all(
        len(record.key or b"") < 8192 and len(record.value or b"") < 1 << 20 for record in records
    )
    assert surely_keyed(bytes(body), len(records)) or not short
    for at in data.draw(st.lists(st.integers(0, min(len(body), 200) - 1), max_size=3)):
        body[at] = data.draw(st.sampled_from([0, 1, 2, 0x7E, 0x7F, 0x80, 0x81, 0xFF]))
    del body[len(body) - data.draw(st.integers(0, 2)) :]
    count = len(records) + data.draw(st.integers(-1, 1))
    if surely_keyed(bytes(body), count):
        assert all(span.key is not None for span in spans(bytes(body), count))


def test_the_quick_look_for_keys_sees_that_one_is_missing() -> None:
    records = [Record(0, 0, b"k", b"v"), Record(1, 0, None, b"v"), Record(2, 0, b"", None)]
    assert not surely_keyed(bytes(payload(encode(records))), 3)
    assert surely_keyed(bytes(payload(encode(records[::2]))), 2)


def test_numbers_that_are_too_long() -> None:
    for endless in (b"\xff" * 11, b"\xff" * 9 + b"\x02"):
        with pytest.raises(CorruptBatchError):
            read_varint(endless, 0)


@settings(max_examples=examples(50))
@given(record_lists(), options)
def test_spans_know_the_place_the_key_and_whether_there_is_a_value(
    records: list[Record], chosen: BatchOptions
) -> None:
    batch = encode(records, chosen)
    found = list(spans(payload(batch), len(records)))
    assert [(s.offset_delta + records[0].offset, s.key, s.has_value) for s in found] == [
        (r.offset, r.key, r.value is not None) for r in records
    ]
    assert found[0].start == 0
    assert all(a.end == b.start for a, b in pairwise(found))


# ---- against the code of other clients ---------------------------------------------------------

ORACLES = {
    # kafka-python brings no codec but gzip along.
    "kafka-python": (kafka_python_records, [compression.NONE, compression.GZIP]),
    "aiokafka": (aiokafka_records, CODECS),
}
CASES = [
    pytest.param(module, codec, id=f"{name}-{compression.NAMES[codec]}")
    for name, (module, codecs) in ORACLES.items()
    for codec in codecs
]


def as_theirs(record: Record, *, offset: int) -> tuple[object, ...]:
    return (offset, record.timestamp_ms, record.key, record.value, list(record.headers))


@pytest.mark.parametrize(("module", "codec"), CASES)
@settings(max_examples=examples(40))
@given(records=record_lists())
def test_others_read_ours(module: Any, codec: int, records: list[Record]) -> None:
    batch = encode(records, BatchOptions(codec=codec, producer_id=3, producer_epoch=1))
    theirs = module.DefaultRecordBatch(batch)
    assert theirs.validate_crc()
    assert [(r.offset, r.timestamp, r.key, r.value, list(r.headers)) for r in theirs] == [
        as_theirs(record, offset=record.offset) for record in records
    ]
    assert theirs.base_offset == records[0].offset
    assert theirs.last_offset_delta == records[-1].offset - records[0].offset


@pytest.mark.parametrize(("module", "codec"), CASES)
@settings(max_examples=examples(40))
@given(records=record_lists().map(for_other_writers))
def test_we_read_others(module: Any, codec: int, records: list[Record]) -> None:
    builder = module.DefaultRecordBatchBuilder(
        magic=2,
        compression_type=codec,
        is_transactional=0,
        producer_id=7,
        producer_epoch=2,
        base_sequence=11,
        batch_size=1 << 20,
    )
    # Their writers number records from 0.
    for at, item in enumerate(records):
        times = item.timestamp_ms
        assert builder.append(at, times, item.key, item.value, list(item.headers)) is not None
    batch = bytes(builder.build())
    header = verify(batch)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (7, 2, 11)
    assert header.codec in {codec, compression.NONE}
    assert [tuple(record) for record in decode(batch)] == [
        (at, item.timestamp_ms, item.key, item.value, item.headers)
        for at, item in enumerate(records)
    ]


# ---- damage --------------------------------------------------------------------------------------


def with_checksum(batch: bytearray) -> bytes:
    """A batch whose inside is wrong but whose checksum is right: a faulty client's."""
    struct.pack_into(">I", batch, 17, crc32c(memoryview(batch)[21:]))
    return bytes(batch)


def read_everything(batch: bytes) -> None:
    """All that may look into a batch; CorruptBatchError is the only way to fail."""
    with contextlib.suppress(CorruptBatchError):
        list(decode(batch, limit=1 << 22))
    if len(batch) < HEADER_SIZE:
        return
    with contextlib.suppress(CorruptBatchError):
        list(spans(payload(batch, limit=1 << 22), read_header(batch).record_count))


@pytest.mark.parametrize("codec", CODECS)
def test_damage_is_corruption_and_nothing_else(codec: int, seed: int) -> None:
    rng = random.Random(seed)
    values = [b"", b"v" * 300, bytes(range(256)), None]
    records = [
        Record(at, 1000 + at, rng.choice(values), rng.choice(values), (("name", b"h"),))
        for at in range(20)
    ]
    batch = encode(records, BatchOptions(codec=codec))
    for _ in range(DAMAGED_BATCHES):
        damaged = bytearray(batch)
        for _ in range(rng.choice((1, 1, 2, 8))):
            # Half of it in the header, where lengths, counts and the codec are.
            at = rng.randrange(8, HEADER_SIZE) if rng.random() < 0.5 else rng.randrange(len(batch))
            damaged[at] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        if rng.random() < 0.2:
            del damaged[rng.randrange(len(damaged)) :]
        read_everything(bytes(damaged))
        if len(damaged) >= HEADER_SIZE:
            read_everything(with_checksum(damaged))
            list(headers(damaged))


@settings(max_examples=examples(50))
@given(st.binary(max_size=300))
def test_noise_is_corruption_and_nothing_else(noise: bytes) -> None:
    read_everything(noise)


@settings(max_examples=examples(50))
@given(st.binary(max_size=60), st.sampled_from(CODECS), st.integers(-1, 2**31 - 1))
def test_noise_behind_a_header_is_too(noise: bytes, codec: int, count: int) -> None:
    batch = bytearray(encode([Record(0, 0, None, b"")], BatchOptions(codec=codec)))[:HEADER_SIZE]
    batch += noise
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    struct.pack_into(">i", batch, 57, count)
    read_everything(with_checksum(batch))


def test_fields_that_reach_into_the_next_record() -> None:
    first = bytearray(b"\x00\x00\x00\x01")  # attributes, two deltas, no key; the value is missing
    body = bytes([len(first) * 2]) + bytes(first) + b"\x02\x00"
    with pytest.raises(CorruptBatchError):
        list(spans(body, 1))


def test_a_record_without_a_place_in_its_batch() -> None:
    good = encode([Record(0, 5, b"k", b"v"), Record(1, 6, b"k", b"v")])
    body = bytearray(good)
    # The second record's offset delta, behind its length, attributes and timestamp delta.
    at = HEADER_SIZE + good[HEADER_SIZE] // 2 + 1 + 3
    assert body[at] == 2
    body[at] = 8
    with pytest.raises(CorruptBatchError, match="offset delta"):
        list(decode(with_checksum(body)))
