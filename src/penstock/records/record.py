"""Records inside a batch: opened for those who must look, and packed for those who write.

The log and the broker pass batches through unopened; compaction, validation of keyed topics,
lookups by timestamp, the command line and tests come here. Every length is checked before it is
believed: a damaged batch raises CorruptBatchError, nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from crc32c import crc32c

from penstock.errors import CorruptBatchError
from penstock.records import compression
from penstock.records.batch import (
    APPEND_TIME,
    CODEC_MASK,
    CONTROL,
    HEADER,
    HEADER_SIZE,
    LENGTH_BASE,
    MAGIC,
    NO_PRODUCER_ID,
    TRANSACTIONAL,
    BatchHeader,
    Buffer,
    read_header,
)

Header = tuple[str, bytes | None]


class Record(NamedTuple):
    """One record with its absolute offset and timestamp."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()


class RecordSpan(NamedTuple):
    """Where a record lies in its decompressed batch, its fields read only as far as the key."""

    start: int
    end: int
    offset_delta: int
    timestamp_delta: int
    key: bytes | None
    has_value: bool


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What a batch says about itself, apart from its records."""

    codec: int = compression.NONE
    producer_id: int = NO_PRODUCER_ID
    producer_epoch: int = -1
    base_sequence: int = -1
    transactional: bool = False
    control: bool = False
    append_time: bool = False
    leader_epoch: int = 0


# Two numbers of five bytes.
_ORDINARY_DISTANCES: Final = 9


def read_varint(data: Buffer, at: int) -> tuple[int, int]:
    """A zigzag varint and the position after it."""
    raw = shift = 0
    try:
        while True:
            byte = data[at]
            at += 1
            raw |= (byte & 0x7F) << shift
            if byte < 0x80:
                if raw >> 64:
                    raise CorruptBatchError("a number has more than 64 bits")
                return (raw >> 1) ^ -(raw & 1), at
            shift += 7
            if shift > 63:
                raise CorruptBatchError("a number is longer than ten bytes")
    except IndexError:
        raise CorruptBatchError("a record ends in the middle of a number") from None


def write_varint(out: bytearray, value: int) -> None:
    raw = (value << 1) ^ (value >> 63)
    raw &= 0xFFFFFFFFFFFFFFFF
    while raw >= 0x80:
        out.append((raw & 0x7F) | 0x80)
        raw >>= 7
    out.append(raw)


def payload(batch: Buffer, limit: int = compression.DEFAULT_LIMIT_BYTES) -> bytes | memoryview:
    """The decompressed records of a whole batch."""
    header = _whole(batch)
    body = memoryview(batch)[HEADER_SIZE : header.size]
    return compression.decompress(header.codec, body, limit)


def _whole(batch: Buffer) -> BatchHeader:
    if len(batch) < HEADER_SIZE:
        raise CorruptBatchError(f"{len(batch)} bytes are too few for a batch header")
    header = read_header(batch)
    if not HEADER_SIZE <= header.size <= len(batch):
        raise CorruptBatchError(f"a batch of {header.size} bytes in {len(batch)}")
    return header


def spans(data: Buffer, record_count: int) -> Iterator[RecordSpan]:
    """Walk decompressed records, reading no further than the key and whether there is a value."""
    at, end_of_data = 0, len(data)
    for _ in range(record_count):
        start = at
        length, at = read_varint(data, at)
        end = at + length
        if length < 0 or end > end_of_data:
            raise CorruptBatchError(f"a record of {length} bytes does not fit its batch")
        timestamp_delta, at = read_varint(data, at + 1)
        offset_delta, at = read_varint(data, at)
        key, at = _nullable_bytes(data, at, end)
        value_length, at = read_varint(data, at)
        if at + max(value_length, 0) > end:
            raise CorruptBatchError("a record's fields are longer than the record")
        yield RecordSpan(start, end, offset_delta, timestamp_delta, key, value_length >= 0)
        at = end
    if at != end_of_data:
        raise CorruptBatchError(f"{end_of_data - at} bytes follow the last record of a batch")


def surely_keyed(data: bytes, record_count: int) -> bool:
    """Whether `spans` would find well-formed records that all have a key.

    Several times as quick, for it knows the ordinary only: False says nothing, look at `spans`.
    """
    at = 0
    try:
        for _ in range(record_count):
            length = data[at]
            at += 1
            if length & 0x80:
                length += (data[at] - 1) << 7
                at += 1
                if length & 0x4000:
                    length += (data[at] - 1) << 14
                    at += 1
                    if length & 0x200000:
                        return False
            if length & 1:
                return False
            end = at + (length >> 1)
            # Behind the attributes are the distances in time and in offset, of any length.
            begun = at = at + 1
            while data[at] & 0x80:
                at += 1
            at += 1
            while data[at] & 0x80:
                at += 1
            key = data[at + 1]
            if key & 1 or at - begun > _ORDINARY_DISTANCES:
                return False
            at += 2
            if key & 0x80:
                key += (data[at] - 1) << 7
                at += 1
                if key & 0x4000:
                    return False
            at += key >> 1
            value = data[at]
            at += 1
            if value & 0x80:
                value += (data[at] - 1) << 7
                at += 1
                if value & 0x4000:
                    value += (data[at] - 1) << 14
                    at += 1
                    if value & 0x200000:
                        return False
            # An odd number is a negative one: no value.
            if at + (0 if value & 1 else value >> 1) > end:
                return False
            at = end
    except IndexError:
        return False
    return at == len(data)


def decode(batch: Buffer, limit: int = compression.DEFAULT_LIMIT_BYTES) -> Iterator[Record]:
    """The records of a whole batch. Control batches come out too; see `is_control`."""
    header = _whole(batch)
    data = payload(batch, limit)
    for span in spans(data, header.record_count):
        timestamp = header.max_timestamp
        if not header.has_append_time:
            timestamp = header.base_timestamp + span.timestamp_delta
        if not 0 <= span.offset_delta <= header.last_offset_delta or abs(timestamp) >> 63:
            raise CorruptBatchError(
                f"a record claims offset delta {span.offset_delta} and timestamp {timestamp}"
            )
        value, headers = _after_key(data, span)
        yield Record(header.base_offset + span.offset_delta, timestamp, span.key, value, headers)


def _after_key(data: Buffer, span: RecordSpan) -> tuple[bytes | None, tuple[Header, ...]]:
    _, at = read_varint(data, span.start)
    _, at = read_varint(data, at + 1)
    _, at = read_varint(data, at)
    _, at = _nullable_bytes(data, at, span.end)
    value, at = _nullable_bytes(data, at, span.end)
    count, at = read_varint(data, at)
    if count < 0 or count > span.end - at:
        raise CorruptBatchError(f"a record claims {count} headers")
    headers: list[Header] = []
    for _ in range(count):
        name, at = _nullable_bytes(data, at, span.end)
        if name is None:
            raise CorruptBatchError("a record header has no name")
        header_value, at = _nullable_bytes(data, at, span.end)
        headers.append((name.decode("utf-8", "replace"), header_value))
    if at != span.end:
        raise CorruptBatchError("a record is longer than its fields")
    return value, tuple(headers)


def _nullable_bytes(data: Buffer, at: int, end: int) -> tuple[bytes | None, int]:
    length, at = read_varint(data, at)
    if length < 0:
        return None, at
    if at + length > end:
        raise CorruptBatchError(f"a field of {length} bytes does not fit its record")
    return bytes(data[at : at + length]), at + length


def encode(records: Sequence[Record], options: BatchOptions | None = None) -> bytes:
    """One batch of `records`; offsets may have gaps but must rise, and at least one is needed."""
    first = records[0]
    body = bytearray()
    for record in records:
        _encode_record(body, record, first)
    opt = options or BatchOptions()
    head = BatchHeader(
        base_offset=first.offset,
        batch_length=0,
        leader_epoch=opt.leader_epoch,
        magic=MAGIC,
        crc=0,
        attributes=attributes_of(opt),
        last_offset_delta=records[-1].offset - first.offset,
        base_timestamp=first.timestamp_ms,
        max_timestamp=max(record.timestamp_ms for record in records),
        producer_id=opt.producer_id,
        producer_epoch=opt.producer_epoch,
        base_sequence=opt.base_sequence,
        record_count=len(records),
    )
    return assemble(head, bytes(body))


def attributes_of(options: BatchOptions) -> int:
    return (
        options.codec
        | (TRANSACTIONAL if options.transactional else 0)
        | (CONTROL if options.control else 0)
        | (APPEND_TIME if options.append_time else 0)
    )


def assemble(header: BatchHeader, body: bytes | memoryview, level: int | None = None) -> bytes:
    """A whole batch from a header and its records, compressed here; length and CRC are set."""
    packed = compression.compress(header.codec, bytes(body), level)
    header = header._replace(batch_length=HEADER_SIZE - LENGTH_BASE + len(packed), crc=0)
    raw = bytearray(HEADER.pack(*header) + packed)
    struct.pack_into(">I", raw, 17, crc32c(memoryview(raw)[21:]))
    return bytes(raw)


def _encode_record(out: bytearray, record: Record, first: Record) -> None:
    item = bytearray(b"\x00")
    write_varint(item, record.timestamp_ms - first.timestamp_ms)
    write_varint(item, record.offset - first.offset)
    _write_nullable(item, record.key)
    _write_nullable(item, record.value)
    write_varint(item, len(record.headers))
    for name, value in record.headers:
        _write_nullable(item, name.encode())
        _write_nullable(item, value)
    write_varint(out, len(item))
    out += item


def _write_nullable(out: bytearray, value: bytes | None) -> None:
    if value is None:
        write_varint(out, -1)
        return
    write_varint(out, len(value))
    out += value


def recompressed(batch: Buffer, codec: int, level: int | None, limit: int) -> bytes:
    """The same batch in another codec; CorruptBatchError if its records cannot be unpacked."""
    header = _whole(batch)
    body = compression.decompress(header.codec, memoryview(batch)[HEADER_SIZE : header.size], limit)
    attributes = header.attributes & ~CODEC_MASK | codec
    return assemble(header._replace(attributes=attributes), body, level)


def simple_batch(
    values: Iterable[bytes | None],
    *,
    key: bytes | None = None,
    timestamp_ms: int = 0,
    options: BatchOptions | None = None,
) -> bytes:
    """A batch of values at one time, offsets from 0: what tests and small writers need."""
    records = [Record(at, timestamp_ms, key, value) for at, value in enumerate(values)]
    return encode(records, options)
