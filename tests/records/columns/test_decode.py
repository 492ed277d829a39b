"""Batches into columns, against our own reader that works record by record, and against damage."""

from __future__ import annotations

import contextlib
import random
import struct

import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptBatchError
from penstock.records import compression
from penstock.records.batch import HEADER_SIZE, TRANSACTIONAL, Buffer, read_header, verify
from penstock.records.columns.decode import SCHEMA, SCHEMA_WITH_HEADERS, Decoded, decode
from penstock.records.control import Marker, encode_marker
from penstock.records.record import BatchOptions, Record, encode, write_varint
from penstock.records.record import decode as read_records
from tests.harness.profiles import DAMAGED_BATCHES, examples
from tests.records.samples import CODECS, options, record_lists

NO_END = 2**63 - 1


def rows(decoded: Decoded) -> list[Record]:
    """What was decoded, as records; their timestamp types must be looked at elsewhere."""
    decoded.batch.validate(full=True)
    columns = decoded.batch.drop_columns("timestamp").to_pydict()
    times = decoded.batch.column("timestamp").cast(pa.int64()).to_pylist()
    headers = columns.get("headers", [[]] * len(times))
    return [
        Record(offset, us // 1000, key, value, tuple((h["key"], h["value"]) for h in found))
        for offset, us, key, value, found in zip(
            columns["offset"], times, columns["key"], columns["value"], headers, strict=True
        )
    ]


def moved(batch: Buffer, base_offset: int) -> bytes:
    return struct.pack(">q", base_offset) + bytes(batch[8:])


def sealed(batch: bytearray) -> bytes:
    struct.pack_into(">I", batch, 17, crc32c(memoryview(batch)[21:]))
    return bytes(batch)


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, list[Record], int]:
    """The bytes of several batches one behind another, with gaps, their records and the end."""
    data, records, at = b"", [], draw(st.integers(0, 2**40))
    for found in draw(st.lists(record_lists(), max_size=4)):
        at += draw(st.integers(0, 5))
        batch = moved(encode(found, draw(options)), at)
        records += list(read_records(batch))
        at = read_header(batch).next_offset
        data += batch
    return data, records, at


@settings(max_examples=examples(50))
@given(answers(), st.booleans())
def test_columns_are_what_the_records_are(
    answer: tuple[bytes, list[Record], int], headers: bool
) -> None:
    data, records, end = answer
    decoded = decode(data, first_offset=0, headers=headers)
    expected = records if headers else [record._replace(headers=()) for record in records]
    assert rows(decoded) == expected
    assert decoded.batch.schema == (SCHEMA_WITH_HEADERS if headers else SCHEMA)
    assert decoded.bytes_used == len(data)
    assert decoded.next_offset == (end if data else 0)
    assert set(decoded.batch.column("timestampType").to_pylist()) <= {0}


@settings(max_examples=examples(50))
@given(answers(), st.integers(0, 30), st.integers(0, 30), st.data())
def test_only_the_asked_range_and_whole_batches(
    answer: tuple[bytes, list[Record], int], skip: int, take: int, data: st.DataObject
) -> None:
    raw, records, _ = answer
    base = records[0].offset if records else 0
    first, end = base + skip, base + skip + take
    cut = data.draw(st.integers(0, len(raw)))
    # What our own reader finds in the batches that are whole and begin before the end.
    expected, at, after = [], 0, first
    while cut - at > HEADER_SIZE and (header := read_header(raw, at)).size <= cut - at:
        if after >= end:
            break
        if header.base_offset >= end:
            after = end
            break
        inside = read_records(raw[at : at + header.size])
        expected += [record for record in inside if first <= record.offset < end]
        at += header.size
        after = min(end, max(after, header.next_offset))
    decoded = decode(raw[:cut], first_offset=first, end_offset=end, headers=True)
    assert rows(decoded) == expected
    assert (decoded.bytes_used, decoded.next_offset) == (at, after)


@settings(max_examples=examples(50))
@given(answers(), st.integers(1, 5000))
def test_a_limit_leaves_the_rest_for_the_next_call(
    answer: tuple[bytes, list[Record], int], limit: int
) -> None:
    data, records, _ = answer
    found: list[Record] = []
    rest, first = data, 0
    while rest:
        decoded = decode(rest, first_offset=first, headers=True, limit_bytes=limit)
        assert decoded.bytes_used > 0
        found += rows(decoded)
        rest, first = rest[decoded.bytes_used :], decoded.next_offset
    assert found == records


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_buffer(kind: type[Buffer]) -> None:
    batch = encode([Record(0, 1, b"k", b"v")])
    assert len(rows(decode(kind(batch), first_offset=0))) == 1
    assert decode(kind(b""), first_offset=7).next_offset == 7


def test_times_of_the_log_count_where_it_stamped() -> None:
    records = [Record(0, 10, None, b"a"), Record(1, 30, None, b"b"), Record(2, 20, None, b"c")]
    batch = encode(records, BatchOptions(append_time=True))
    decoded = decode(batch + moved(encode(records), 3), first_offset=0)
    assert [r.timestamp_ms for r in rows(decoded)] == [30, 30, 30, 10, 30, 20]
    assert decoded.batch.column("timestampType").to_pylist() == [1, 1, 1, 0, 0, 0]


def test_times_beyond_microseconds_become_the_last_one() -> None:
    records = [Record(0, -(2**62), None, b"a"), Record(1, 2**61, None, b"b")]
    found = decode(encode(records), first_offset=0).batch.column("timestamp").cast(pa.int64())
    assert found.to_pylist() == [-(2**63 - 1), 2**63 - 1]


def test_names_of_headers_that_are_no_text() -> None:
    batch = bytearray(encode([Record(0, 0, None, None, (("name", b"x"), ("m", None)))]))
    at = batch.index(b"name")
    batch[at] = 0xFF
    (found,) = rows(decode(sealed(batch), first_offset=0, headers=True))
    assert found.headers == (("�ame", b"x"), ("m", None))


# ---- transactions --------------------------------------------------------------------------------


@st.composite
def transactions(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int]], list[Record]]:
    """A log of interleaved transactions, what Fetch tells of the aborted ones, and what counts."""
    data, at = b"", draw(st.integers(0, 50))
    open_: dict[int, tuple[int, list[Record]]] = {}
    aborted, visible = [], []
    for producer in draw(st.lists(st.integers(1, 3), max_size=25)):
        step = draw(st.sampled_from(["write", "write", "plain", "commit", "abort"]))
        if step in {"write", "plain"}:
            within = step == "write"
            # A producer writes outside of a transaction only while it has none.
            if not within and producer in open_:
                continue
            count = draw(st.integers(1, 3))
            records = [Record(at + i, 5, None, b"%d" % (at + i)) for i in range(count)]
            options = BatchOptions(
                codec=draw(st.sampled_from(CODECS)), producer_id=producer, transactional=within
            )
            data += encode(records, options)
            if within:
                open_.setdefault(producer, (at, []))[1].extend(records)
            else:
                visible += records
            at += count
        elif producer in open_:
            first, records = open_.pop(producer)
            data += moved(encode_marker(Marker(step == "commit", 0), producer, 0, 5), at)
            at += 1
            if step == "commit":
                visible += records
            else:
                aborted.append((producer, first))
    visible += [record for _, records in open_.values() for record in records]
    return data, aborted, sorted(visible)


@settings(max_examples=examples(50))
@given(transactions(), st.integers(0, 80), st.randoms())
@example((b"", [], []), 0, random.Random(1))
def test_aborted_records_and_markers_are_left_out(
    case: tuple[bytes, list[tuple[int, int]], list[Record]], first: int, rng: random.Random
) -> None:
    data, aborted, visible = case
    rng.shuffle(aborted)
    decoded = decode(data, first_offset=first, aborted=aborted)
    assert rows(decoded) == [record for record in visible if record.offset >= first]
    assert decoded.bytes_used == len(data)
    everything = decode(data, first_offset=0)
    assert not set(visible) - set(rows(everything))


@settings(max_examples=examples(50))
@given(transactions(), st.integers(1, 200))
def test_an_answer_in_steps_is_the_same_as_in_one(
    case: tuple[bytes, list[tuple[int, int]], list[Record]], limit_bytes: int
) -> None:
    """A producer that aborted one transaction and committed the next, with a step between."""
    data, given_aborted, visible = case
    aborted, found, at = tuple(given_aborted), [], 0
    while data:
        decoded = decode(data, first_offset=at, aborted=aborted, limit_bytes=limit_bytes)
        found += rows(decoded)
        assert decoded.bytes_used
        data, at = data[decoded.bytes_used :], decoded.next_offset
        aborted = decoded.aborted
    assert found == visible


def test_after_markers_it_goes_on_behind_them() -> None:
    marker = moved(encode_marker(Marker(True, 0), 4, 0, 5), 9)
    decoded = decode(marker, first_offset=9)
    assert (decoded.batch.num_rows, decoded.next_offset) == (0, 10)


# ---- damage --------------------------------------------------------------------------------------


def body_of(*fields: int | bytes) -> bytes:
    """A record from numbers (as varints) and bytes, with its length before it."""
    item = bytearray()
    for part in fields:
        if isinstance(part, int):
            write_varint(item, part)
        else:
            item += part
    out = bytearray()
    write_varint(out, len(item))
    return bytes(out + item)


def batch_of(body: bytes, count: int = 1, last_delta: int = 0) -> bytes:
    head = bytearray(encode([Record(77, 0, None, None)])[:HEADER_SIZE])
    struct.pack_into(">i", head, 8, HEADER_SIZE - 12 + len(body))
    struct.pack_into(">i", head, 23, last_delta)
    struct.pack_into(">i", head, 57, count)
    return sealed(head + body)


GOOD = body_of(b"\0", 0, 0, -1, 1, b"v", 0)
DAMAGED = {
    "nothing": batch_of(b""),
    "too many": batch_of(GOOD, count=2),
    "very many": batch_of(GOOD, count=2**31 - 1),
    "tail": batch_of(GOOD + b"\0"),
    "long record": batch_of(b"\x7f" + GOOD),
    "negative record": batch_of(b"\x01" + GOOD),
    "endless number": batch_of(b"\xff" * 20),
    "wide number": batch_of(b"\xff" * 9 + b"\x02" + GOOD),
    "huge record": batch_of(b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01" + GOOD),
    "key": batch_of(body_of(b"\0", 0, 0, 100, b"v", 0, 0)),
    "huge key": batch_of(body_of(b"\0", 0, 0, 2**63 - 1, b"v", 0, 0)),
    "value": batch_of(body_of(b"\0", 0, 0, -1, 100, b"v", 0)),
    "huge value": batch_of(body_of(b"\0", 0, 0, -1, 2**63 - 1, b"v", 0)),
    "offset": batch_of(body_of(b"\0", 0, 1, -1, 1, b"v", 0)),
    "negative offset": batch_of(body_of(b"\0", 0, -1, -1, 1, b"v", 0)),
    "no value": batch_of(body_of(b"\0", 0, 0, 3, b"vvv")),
    "no headers": batch_of(body_of(b"\0", 0, 0, -1, 3, b"vvv")),
    "headers": batch_of(body_of(b"\0", 0, 0, -1, 1, b"v", 5)),
    "negative headers": batch_of(body_of(b"\0", 0, 0, -1, 1, b"v", -5)),
    "header without name": batch_of(body_of(b"\0", 0, 0, -1, 1, b"v", 1, -1, -1, 0)),
    "long name": batch_of(body_of(b"\0", 0, 0, -1, 1, b"v", 1, 90, -1, 0)),
    "long header": batch_of(body_of(b"\0", 0, 0, -1, 1, b"v", 1, 0, 90, 0)),
    "after headers": batch_of(body_of(b"\0", 0, 0, -1, 1, b"v", 0, 0)),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_every_length_is_checked(name: str) -> None:
    batch = DAMAGED[name]
    assert verify(batch).base_offset == 77
    with pytest.raises(CorruptBatchError, match="offset 77 "):
        decode(batch, first_offset=0, headers=True)
    good = moved(encode([Record(0, 0, b"k", b"v")]), 70)
    with pytest.raises(CorruptBatchError, match="offset 77 "):
        decode(good + batch, first_offset=0, headers=True)


def test_a_timestamp_that_overflows() -> None:
    batch = bytearray(batch_of(body_of(b"\0", 2**63 - 1, 0, -1, 1, b"v", 0)))
    struct.pack_into(">q", batch, 27, 5)
    with pytest.raises(CorruptBatchError, match="timestamp"):
        decode(sealed(batch), first_offset=0)


def test_a_wrong_checksum_names_the_batch() -> None:
    good = encode([Record(i, 0, b"k", b"v") for i in range(3)])
    bad = bytearray(moved(good, 3))
    bad[-1] ^= 1
    with pytest.raises(CorruptBatchError, match="offset 3 "):
        decode(good + bytes(bad), first_offset=0)


def test_an_old_format_is_refused() -> None:
    batch = bytearray(encode([Record(5, 0, b"k", b"v")]))
    batch[16] = 1
    with pytest.raises(CorruptBatchError, match="magic"):
        decode(batch, first_offset=0)


@pytest.mark.parametrize("codec", CODECS)
def test_damage_is_corruption_and_nothing_else(codec: int, seed: int) -> None:
    rng = random.Random(seed)
    values = [b"", b"v" * 300, bytes(range(256)), None]
    records = [
        Record(i, i, rng.choice(values), rng.choice(values), (("n", rng.choice(values)),))
        for i in range(20)
    ]
    whole = encode(records, BatchOptions(codec=codec))
    for _ in range(DAMAGED_BATCHES):
        batch = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            batch[rng.randrange(21, len(batch))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        # Unknown attributes aside: markers and append time change what must come out.
        batch[22] = codec
        raw = sealed(batch)
        ours: list[Record] | None = None
        with contextlib.suppress(CorruptBatchError):
            ours = list(read_records(raw))
        try:
            found = rows(decode(raw, first_offset=0, headers=True))
        except CorruptBatchError:
            assert ours is None or read_header(raw).base_offset < 0
        else:
            # Where the times are beyond Arrow's, or the counts nothing, the two may differ.
            if ours is not None and all(abs(r.timestamp_ms) < 2**53 for r in ours):
                assert found == ours


def test_compressed_nonsense_names_the_batch() -> None:
    batch = bytearray(batch_of(b"\x99" * 40))
    for code in compression.NAMES:
        batch[22] = code | TRANSACTIONAL
        with pytest.raises(CorruptBatchError, match="offset 77 "):
            decode(sealed(batch), first_offset=0)
