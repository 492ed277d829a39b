"""Arrow -> record batches: columns as the bytes that Produce sends.

Records go into as few batches as `max_batch_bytes` allows, counted before compression; a record
that is larger by itself gets a batch of its own, which the topic may still refuse. An idempotent
producer's sequence numbers run on from batch to batch. Offsets count from 0 in every batch: the
log gives it its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.records import compression
from penstock.records.batch import (
    CRC_START,
    HEADER,
    HEADER_SIZE,
    LENGTH_BASE,
    MAGIC,
    NO_PRODUCER_ID,
    TRANSACTIONAL,
    next_sequence,
)
from penstock.records.columns import kernels
from penstock.records.columns.decode import HEADER_TYPE
from penstock.records.columns.layout import ColumnsError, as_binary, table_of
from penstock.records.record import Header

DEFAULT_BATCH_BYTES: Final = 1 << 20
# The checksum's place in the header, and what it covers of it.
_CRC_AT: Final = CRC_START - 4
# A batch's length is a signed 32-bit number.
_BATCH_BYTES_MAX: Final = (1 << 31) - 1 - HEADER_SIZE


@dataclass(frozen=True, slots=True)
class Packed:
    """One batch, ready to be sent."""

    data: bytes
    # How many records are in it, and which of the given ones is its first.
    count: int
    first: int
    base_timestamp: int
    max_timestamp: int
    # -1 without a producer.
    first_sequence: int


def encode(
    keys: pa.Array | None,
    values: pa.Array | None,
    *,
    headers: pa.Array | None = None,
    timestamps_ms: Any,
    codec: str = "none",
    max_batch_bytes: int = DEFAULT_BATCH_BYTES,
    producer: tuple[int, int, int] | None = None,
    transactional: bool = False,
) -> list[Packed]:
    """Pack columns of bytes into batches.

    A column that is None is all null (not both); `headers` are lists of (key, value) structs;
    `timestamps_ms` is one for all, or an int64 array. `producer` is (producer id, epoch, sequence
    number of the first record).
    """
    given = [
        None if keys is None else as_binary(keys, "keys"),
        None if values is None else as_binary(values, "values"),
    ]
    count = _count(given, headers)
    times = _times(timestamps_ms, count)
    if count == 0:
        return []
    columns = [*given, *_header_columns(headers)]
    table = table_of(*columns)
    one_time = int(len(times) == 1)
    sizes = np.empty(count, np.int64)
    starts = np.empty(count, np.int64)
    ends = np.empty(count, np.int64)
    room = max(max_batch_bytes - HEADER_SIZE, 0)
    batches = kernels.plan(count, table, times, one_time, room, sizes, starts, ends)
    largest = int(np.diff(ends[:batches], prepend=0).max())
    if largest > _BATCH_BYTES_MAX:
        raise ColumnsError(f"a record of {largest} bytes does not fit a batch")
    scratch = pa.allocate_buffer(largest)
    code = _codec(codec)
    packed = []
    bounds = [*starts[:batches].tolist(), count]
    for at in range(batches):
        first, last = bounds[at], bounds[at + 1]
        end = kernels.pack(first, last, table, times, one_time, sizes, scratch.address)
        body = memoryview(scratch)[: end - scratch.address]
        packed.append(_batch(body, code, first, last, times, producer, transactional))
    return packed


def from_lists(
    keys: Sequence[bytes | None] | None,
    values: Sequence[bytes | None] | None,
    *,
    headers: Sequence[Sequence[Header]] | None = None,
    timestamps_ms: int | Sequence[int],
    codec: str = "none",
    max_batch_bytes: int = DEFAULT_BATCH_BYTES,
    producer: tuple[int, int, int] | None = None,
    transactional: bool = False,
) -> list[Packed]:
    """As `encode`, from lists."""
    return encode(
        None if keys is None else pa.array(keys, pa.binary()),
        None if values is None else pa.array(values, pa.binary()),
        headers=None if headers is None else headers_array(headers),
        timestamps_ms=timestamps_ms,
        codec=codec,
        max_batch_bytes=max_batch_bytes,
        producer=producer,
        transactional=transactional,
    )


def headers_array(headers: Sequence[Sequence[Header]]) -> pa.Array:
    """Headers of records as the column that `encode` takes."""
    ends = np.zeros(len(headers) + 1, np.int32)
    np.cumsum([len(of_record) for of_record in headers], out=ends[1:])
    names = pa.array([name for of_record in headers for name, _ in of_record], pa.string())
    contents = pa.array([value for of_record in headers for _, value in of_record], pa.binary())
    pairs = pa.StructArray.from_arrays([names, contents], fields=list(HEADER_TYPE.value_type))
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pairs)


def _count(columns: list[pa.Array | None], headers: pa.Array | None) -> int:
    lengths = {len(column) for column in (*columns, headers) if column is not None}
    if all(column is None for column in columns):
        raise ColumnsError("records need keys or values; both are missing")
    if len(lengths) != 1:
        raise ColumnsError(f"columns of different lengths: {sorted(lengths)}")
    return lengths.pop()


def _times(timestamps_ms: Any, count: int) -> Any:
    """An int64 array of one timestamp, or of one for each record."""
    if isinstance(timestamps_ms, int | np.integer):
        return np.array([timestamps_ms], np.int64)
    if isinstance(timestamps_ms, pa.Array | pa.ChunkedArray):
        if timestamps_ms.null_count:
            raise ColumnsError("timestamps must not be null")
        timestamps_ms = timestamps_ms.to_numpy(zero_copy_only=False)
    times = np.require(timestamps_ms, np.int64, ["C_CONTIGUOUS", "WRITEABLE"])
    if times.shape != (count,):
        raise ColumnsError(f"{times.shape} timestamps for {count} records")
    return times


def _header_columns(headers: pa.Array | None) -> list[pa.Array | None]:
    """Lists, names and contents; the positions in the lists count from their columns' beginning."""
    if headers is None:
        return [None, None, None]
    if isinstance(headers, pa.ChunkedArray):
        headers = headers.combine_chunks()
    kind = headers.type
    if not (pa.types.is_list(kind) and pa.types.is_struct(kind.value_type)):
        raise ColumnsError(f"headers are of type {kind}, not {HEADER_TYPE}")
    # `values` are not cut to the slice, as the lists' offsets are not; a struct's fields are.
    pairs = headers.values
    if pairs.null_count or kind.value_type.num_fields != 2:
        raise ColumnsError(f"headers of type {kind} have no key and value each")
    names, contents = as_binary(pairs.field(0), "names"), as_binary(pairs.field(1), "contents")
    if names.null_count:
        raise ColumnsError("a header has no key")
    return [headers, names, contents]


def _codec(name: str) -> int:
    code = compression.CODES.get(name)
    if code is None:
        raise ColumnsError(
            f"unknown codec {name!r}", advice=f"Choose one of {', '.join(compression.CODES)}."
        )
    return code


def _batch(
    body: memoryview,
    codec: int,
    first: int,
    last: int,
    times: Any,
    producer: tuple[int, int, int] | None,
    transactional: bool,
) -> Packed:
    shrunk = compression.compress(codec, body) if codec else body
    own = times[:1] if len(times) == 1 else times[first:last]
    base_time, max_time = int(own[0]), int(own.max())
    producer_id, epoch, sequence = producer or (NO_PRODUCER_ID, -1, -1)
    if producer is not None:
        sequence = next_sequence(sequence, first)
    attributes = codec | (TRANSACTIONAL if transactional else 0)
    length = HEADER_SIZE - LENGTH_BASE + len(shrunk)
    fields = (attributes, last - first - 1, base_time, max_time, producer_id, epoch, sequence)
    covered = HEADER.pack(0, length, 0, MAGIC, 0, *fields, last - first)[CRC_START:]
    checksum = crc32c(shrunk, crc32c(covered))
    head = HEADER.pack(0, length, 0, MAGIC, checksum, *fields, last - first)
    data = b"".join((head, shrunk))
    return Packed(data, last - first, first, base_time, max_time, sequence)
