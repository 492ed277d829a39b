"""Record batch headers (magic 2): read, verify and patch them without opening the batch.

A batch is 61 bytes of header and then its records, usually compressed together:

    base_offset i64 | batch_length i32 | leader_epoch i32 | magic i8 | crc u32 |
    attributes i16 | last_offset_delta i32 | base_timestamp i64 | max_timestamp i64 |
    producer_id i64 | producer_epoch i16 | base_sequence i32 | record_count i32

`batch_length` counts from byte 12; the CRC-32C covers everything from `attributes` on. So base
offset and leader epoch, which only the log knows, are patched without touching the checksum,
and a batch goes from the producer's socket to the disk to the consumer unopened.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from crc32c import crc32c

from penstock.errors import CorruptBatchError

Buffer = bytes | bytearray | memoryview

HEADER: Final = struct.Struct(">qiibIhiqqqhii")
HEADER_SIZE: Final = HEADER.size
# Bytes before `batch_length` starts to count.
LENGTH_BASE: Final = 12
# A batch shorter than this cannot hold its own header.
MIN_BATCH_LENGTH: Final = HEADER_SIZE - LENGTH_BASE
CRC_START: Final = 21
MAGIC: Final = 2

CODEC_MASK: Final = 0x07
APPEND_TIME: Final = 0x08
TRANSACTIONAL: Final = 0x10
CONTROL: Final = 0x20

NO_PRODUCER_ID: Final = -1
NO_TIMESTAMP: Final = -1

_LENGTH = struct.Struct(">i")
_CRC = struct.Struct(">I")
_OFFSET = struct.Struct(">q")
_EPOCH = struct.Struct(">i")
_ATTRIBUTES = struct.Struct(">h")
_TIMESTAMP = struct.Struct(">q")

assert HEADER_SIZE == 61


class BatchHeader(NamedTuple):
    """The fields of a batch header, in the order in which they are on the wire."""

    base_offset: int
    batch_length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size(self) -> int:
        """Bytes of the whole batch."""
        return self.batch_length + LENGTH_BASE

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def last_sequence(self) -> int:
        """-1 where the batch has no sequence numbers, as markers and plain batches."""
        if self.base_sequence < 0:
            return -1
        return next_sequence(self.base_sequence, self.last_offset_delta)

    @property
    def codec(self) -> int:
        return self.attributes & CODEC_MASK

    @property
    def has_append_time(self) -> bool:
        return bool(self.attributes & APPEND_TIME)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL)


def next_sequence(sequence: int, step: int) -> int:
    """A producer's sequence number `step` records later; it wraps to 0 after 2^31 - 1."""
    return (sequence + step) & 0x7FFFFFFF


def read_header(buffer: Buffer, at: int = 0) -> BatchHeader:
    """The header at `at`; the caller has made sure that 61 bytes are there."""
    return BatchHeader._make(HEADER.unpack_from(buffer, at))


def batch_size(buffer: Buffer, at: int = 0) -> int:
    """Bytes of the batch that starts at `at`; needs its first 12 bytes."""
    (length,) = _LENGTH.unpack_from(buffer, at + 8)
    return int(length) + LENGTH_BASE


def verify(buffer: Buffer, at: int = 0) -> BatchHeader:
    """The header at `at` if the batch is whole and unharmed; CorruptBatchError otherwise."""
    available = len(buffer) - at
    if available < HEADER_SIZE:
        raise CorruptBatchError(f"{available} bytes are too few for a batch header")
    header = read_header(buffer, at)
    if header.magic != MAGIC:
        raise CorruptBatchError(f"magic byte {header.magic}, expected {MAGIC}")
    if not MIN_BATCH_LENGTH <= header.batch_length <= available - LENGTH_BASE:
        raise CorruptBatchError(f"batch length {header.batch_length} does not fit {available}")
    if crc32c(memoryview(buffer)[at + CRC_START : at + header.size]) != header.crc:
        raise CorruptBatchError(f"checksum of the batch at offset {header.base_offset} is wrong")
    if header.record_count < 0 or header.last_offset_delta < 0 or header.base_offset < 0:
        raise CorruptBatchError(
            f"impossible counts: {header.record_count} records, last delta "
            f"{header.last_offset_delta}, base offset {header.base_offset}"
        )
    return header


def patch(buffer: bytearray | memoryview, at: int, base_offset: int, leader_epoch: int) -> None:
    """Give the batch its place in the log. Neither field is under the checksum."""
    _OFFSET.pack_into(buffer, at, base_offset)
    _EPOCH.pack_into(buffer, at + LENGTH_BASE, leader_epoch)


def stamp_append_time(buffer: bytearray | memoryview, at: int, size: int, now_ms: int) -> None:
    """Mark the batch as stamped by the log at `now_ms`, and give it its new checksum."""
    (attributes,) = _ATTRIBUTES.unpack_from(buffer, at + 21)
    _ATTRIBUTES.pack_into(buffer, at + 21, attributes | APPEND_TIME)
    _TIMESTAMP.pack_into(buffer, at + 35, now_ms)
    _reseal(buffer, at, size)


def clear_append_time(buffer: bytearray | memoryview, at: int, size: int) -> None:
    """Let the records' own timestamps count again, and give the batch its new checksum."""
    (attributes,) = _ATTRIBUTES.unpack_from(buffer, at + 21)
    _ATTRIBUTES.pack_into(buffer, at + 21, attributes & ~APPEND_TIME)
    _reseal(buffer, at, size)


def _reseal(buffer: bytearray | memoryview, at: int, size: int) -> None:
    checksum = crc32c(memoryview(buffer)[at + CRC_START : at + size])
    _CRC.pack_into(buffer, at + 17, checksum)


def headers(
    buffer: Buffer, at: int = 0, end: int | None = None
) -> Iterator[tuple[int, BatchHeader]]:
    """Positions and headers of the batches that lie whole in `buffer[at:end]`, unverified."""
    stop = len(buffer) if end is None else end
    while at + HEADER_SIZE <= stop:
        header = read_header(buffer, at)
        if header.batch_length < MIN_BATCH_LENGTH or at + header.size > stop:
            return
        yield at, header
        at += header.size
