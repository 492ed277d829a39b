"""Control records: the marks that a broker puts into the log where a transaction ends.

A control batch is transactional, has its producer's id and epoch, no sequence number, and one
record. The record's key says what it is, its value who decided:

    key    version i16 | type i16 (0: abort, 1: commit; others are not of transactions)
    value  version i16 | coordinator epoch i32

Readers skip control batches, but for a reader of committed records an abort marker ends the
stretch in which it passes over the batches of that producer.

Every transaction writes one to each of its partitions, so they are packed and read as a whole;
what does not look as we write it is taken apart.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from crc32c import crc32c

from penstock.errors import CorruptBatchError
from penstock.records.batch import (
    APPEND_TIME,
    CONTROL,
    CRC_START,
    HEADER,
    HEADER_SIZE,
    LENGTH_BASE,
    MAGIC,
    TRANSACTIONAL,
    Buffer,
)
from penstock.records.record import decode

_VERSION: Final = 0
_ABORT: Final = 0
_COMMIT: Final = 1
_KEY: Final = struct.Struct(">hh")
_VALUE: Final = struct.Struct(">hi")
# The whole record: its length, no attributes, both deltas 0, the key, the value, no headers.
_RECORD: Final = struct.Struct(">5shhshis")
_BEFORE_KEY: Final = b"\x20\x00\x00\x00\x08"
_BEFORE_VALUE: Final = b"\x0c"
_NO_HEADERS: Final = b"\x00"
_CRC: Final = struct.Struct(">I")
_CRC_AT: Final = CRC_START - 4
_SIZE: Final = HEADER_SIZE + _RECORD.size


class Marker(NamedTuple):
    """How a transaction ended, and in which epoch its coordinator decided so."""

    commit: bool
    coordinator_epoch: int


def encode_marker(
    marker: Marker,
    producer_id: int,
    producer_epoch: int,
    timestamp_ms: int,
    *,
    append_time: bool = False,
) -> bytearray:
    """The control batch that ends a producer's transaction."""
    batch = bytearray(_SIZE)
    attributes = CONTROL | TRANSACTIONAL | (APPEND_TIME if append_time else 0)
    HEADER.pack_into(
        batch, 0, 0, _SIZE - LENGTH_BASE, 0, MAGIC, 0, attributes, 0, timestamp_ms, timestamp_ms,
        producer_id, producer_epoch, -1, 1,
    )  # fmt: skip
    kind, epoch = _COMMIT if marker.commit else _ABORT, marker.coordinator_epoch
    _RECORD.pack_into(
        batch, HEADER_SIZE, _BEFORE_KEY, _VERSION, kind, _BEFORE_VALUE, _VERSION, epoch, _NO_HEADERS
    )
    _CRC.pack_into(batch, _CRC_AT, crc32c(memoryview(batch)[CRC_START:]))
    return batch


def read_marker(batch: Buffer) -> Marker | None:
    """What a control batch says of a transaction.

    None if it is of another kind, or has lost its record to compaction.
    """
    if len(batch) == _SIZE:
        before, _, kind, between, _, epoch, after = _RECORD.unpack_from(batch, HEADER_SIZE)
        if (before, between, after) == (_BEFORE_KEY, _BEFORE_VALUE, _NO_HEADERS):
            return _marker(kind, epoch)
    return _read_slowly(batch)


def _marker(kind: int, coordinator_epoch: int) -> Marker | None:
    return Marker(kind == _COMMIT, coordinator_epoch) if kind in (_ABORT, _COMMIT) else None


def _read_slowly(batch: Buffer) -> Marker | None:
    try:
        for record in decode(batch):
            key, value = record.key or b"", record.value or b""
            if len(key) < _KEY.size or len(value) < _VALUE.size:
                return None
            _, kind = _KEY.unpack_from(key)
            _, coordinator_epoch = _VALUE.unpack_from(value)
            return _marker(kind, coordinator_epoch)
    except CorruptBatchError:
        return None
    return None
