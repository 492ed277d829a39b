"""Record batches -> Arrow: the bytes of a Fetch answer as columns.

What a consumer must not see is left out: markers, records of aborted transactions, and what lies
outside of the asked range of offsets (a broker answers with whole batches, so the first may begin
before it). `next_offset` counts all of that as passed.

Every batch's checksum is compared, and every length is checked before it is believed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.errors import CorruptBatchError
from penstock.records import compression
from penstock.records.batch import (
    HEADER_SIZE,
    LENGTH_BASE,
    MIN_BATCH_LENGTH,
    BatchHeader,
    Buffer,
    batch_size,
    verify,
)
from penstock.records.columns import kernels
from penstock.records.control import read_marker

# Nothing has a higher offset.
_NO_END: Final = 2**63 - 1
# More unfolded bytes than this are not put into one RecordBatch: what follows is left for the next
# call. So the 32-bit offsets of Arrow's binary columns are never exceeded.
DEFAULT_LIMIT_BYTES: Final = 512 << 20

HEADER_TYPE: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestampType", pa.int32()),
    ]
)
SCHEMA_WITH_HEADERS: Final = SCHEMA.append(pa.field("headers", HEADER_TYPE))

_WORDS: Final = {
    kernels.BAD_NUMBER: "a record has a number that is cut short or too long",
    kernels.BAD_RECORD: "a record does not fit its batch",
    kernels.BAD_FIELD: "a field does not fit its record",
    kernels.BAD_DELTA: "a record claims an offset outside of its batch, or an impossible timestamp",
    kernels.BAD_TAIL: "bytes follow the last record",
    kernels.BAD_HEADERS: "a record's headers do not fit it",
}


@dataclass(frozen=True, slots=True)
class Decoded:
    """Records as columns, and where to go on."""

    batch: pa.RecordBatch
    # Where to fetch next: after the last batch that was looked at, whatever it held.
    next_offset: int
    # Bytes of the batches that were looked at; what follows is a cut batch, or beyond the end or
    # the limit.
    bytes_used: int
    # What to give as `aborted` for what follows in the same data. The same list again would not
    # do: it names transactions whose markers have been passed, and their producers live on.
    aborted: tuple[tuple[int, int], ...] = ()


def decode(
    data: Buffer,
    *,
    first_offset: int,
    end_offset: int | None = None,
    aborted: Iterable[tuple[int, int]] = (),
    headers: bool = False,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
) -> Decoded:
    """The records of `data` with offsets from `first_offset` up to `end_offset` (not included).

    `aborted` are the (producer id, first offset) pairs that Fetch tells to readers of committed
    records; leave it empty to read uncommitted ones. The last batch may be cut: it is not used.
    Timestamps beyond what microseconds can hold become the nearest that they can.
    CorruptBatchError if a batch is damaged; it names the batch's base offset.
    """
    opened = _Opened(first_offset, _NO_END if end_offset is None else end_offset, aborted)
    opened.read(data, limit_bytes)
    batch = opened.columns(headers)
    return Decoded(batch, opened.next_offset, opened.bytes_used, opened.aborted)


class _Opened:
    """The batches of one answer, verified and decompressed, as a table of segments."""

    def __init__(
        self, first_offset: int, end_offset: int, aborted: Iterable[tuple[int, int]]
    ) -> None:
        self.first_offset = first_offset
        self.end_offset = end_offset
        self.next_offset = first_offset
        self.bytes_used = 0
        # Aborted transactions that begin later, the nearest last; and those that we are in.
        self._later = sorted(((first, producer) for producer, first in aborted), reverse=True)
        self._inside: set[int] = set()
        self._segments: list[tuple[int, int, int, int, int, int, int]] = []
        # What the addresses in the segments point into.
        self._alive: list[Any] = []
        self._records = 0

    def read(self, data: Buffer, limit_bytes: int) -> None:
        view = memoryview(data)
        start = _address(view) if view else 0
        self._alive.append(view)
        end, at, unfolded = len(view), 0, 0
        while end - at > LENGTH_BASE and self.next_offset < self.end_offset:
            size = batch_size(view, at)
            if size > end - at and size >= LENGTH_BASE + MIN_BATCH_LENGTH:
                break
            header = _verified(view, at)
            if header.base_offset >= self.end_offset:
                self.next_offset = self.end_offset
                break
            if self._wanted(header, view, at):
                body = view[at + HEADER_SIZE : at + size]
                body_at = start + at + HEADER_SIZE
                if header.codec:
                    body = _unfolded(header, body)
                    body_at = _address(body) if body else 0
                if unfolded and unfolded + len(body) > limit_bytes:
                    break
                unfolded += len(body)
                self._add(header, body, body_at)
            at += size
            self.bytes_used = at
            self.next_offset = min(self.end_offset, max(self.next_offset, header.next_offset))

    def _wanted(self, header: BatchHeader, view: memoryview, at: int) -> bool:
        """Whether readers may see the batch; keeps the account of aborted transactions."""
        later = self._later
        while later and later[-1][0] <= header.last_offset:
            self._inside.add(later.pop()[1])
        if header.is_control:
            if header.producer_id in self._inside:
                marker = read_marker(view[at : at + header.size])
                if marker is not None and not marker.commit:
                    self._inside.discard(header.producer_id)
            return False
        if header.is_transactional and header.producer_id in self._inside:
            return False
        return header.last_offset >= self.first_offset and header.record_count > 0

    @property
    def aborted(self) -> tuple[tuple[int, int], ...]:
        """The account as it stands: what we are in, and what begins later."""
        inside = [(producer, self.next_offset) for producer in sorted(self._inside)]
        return (*inside, *((producer, first) for first, producer in reversed(self._later)))

    def _add(self, header: BatchHeader, body: memoryview, start: int) -> None:
        if header.record_count * kernels.RECORD_BYTES_MIN > len(body):
            raise _corrupt(
                header.base_offset, f"{header.record_count} records in {len(body)} bytes"
            )
        self._alive.append(body)
        self._records += header.record_count
        stamped = header.has_append_time
        self._segments.append(
            (
                start,
                start + len(body),
                header.record_count,
                header.base_offset,
                header.last_offset_delta,
                header.max_timestamp if stamped else header.base_timestamp,
                int(stamped),
            )
        )

    def columns(self, headers: bool) -> pa.RecordBatch:
        """All segments as one RecordBatch."""
        room = self._records
        if room == 0:
            schema = SCHEMA_WITH_HEADERS if headers else SCHEMA
            return pa.RecordBatch.from_pylist([], schema=schema)
        segments = np.array(self._segments, dtype=np.int64).reshape(-1, kernels.SEG_WIDTH)
        offsets, offsets_buffer = _column(room, np.int64)
        times, times_buffer = _column(room, np.int64)
        kinds, kinds_buffer = _column(room, np.int32)
        key_ends, key_ends_buffer = _column(room + 1, np.int32)
        value_ends, value_ends_buffer = _column(room + 1, np.int32)
        keys_at = np.empty(room, np.int64)
        values_at = np.empty(room, np.int64)
        headers_at = np.empty(room if headers else 0, np.int64)
        told = np.zeros(kernels.TOLD_WIDTH, np.int64)
        kernels.measure(
            segments, self.first_offset, self.end_offset, headers, offsets, times, kinds,
            keys_at, key_ends, values_at, value_ends, headers_at, told,
        )  # fmt: skip
        if told[kernels.TOLD_ERROR]:
            base = self._segments[int(told[kernels.TOLD_SEGMENT])][kernels.SEG_BASE]
            raise _corrupt(base, _WORDS[int(told[kernels.TOLD_ERROR])])
        count = int(told[kernels.TOLD_RECORDS])
        arrays = [
            _binary(keys_at[:count], key_ends, key_ends_buffer, told[kernels.TOLD_NULL_KEYS]),
            _binary(
                values_at[:count], value_ends, value_ends_buffer, told[kernels.TOLD_NULL_VALUES]
            ),
            pa.Array.from_buffers(pa.int64(), count, [None, offsets_buffer], 0),
            pa.Array.from_buffers(SCHEMA.field("timestamp").type, count, [None, times_buffer], 0),
            pa.Array.from_buffers(pa.int32(), count, [None, kinds_buffer], 0),
        ]
        if not headers:
            return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
        end = int(segments[:, kernels.SEG_END].max())
        arrays.append(_headers(count, headers_at, told, end))
        return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA_WITH_HEADERS)


def _column(size: int, kind: type[np.generic]) -> tuple[Any, pa.Buffer]:
    """Memory for a column from Arrow's pool, which has it ready, and numpy's view of it."""
    buffer = pa.allocate_buffer(size * np.dtype(kind).itemsize)
    return np.frombuffer(buffer, dtype=kind), buffer


def _binary(places: Any, ends: Any, ends_buffer: pa.Buffer, nulls: int) -> pa.Array:
    """The column of the bytes at these places."""
    count = len(places)
    data = pa.allocate_buffer(int(ends[count]))
    validity = pa.allocate_buffer((count + 7) // 8) if nulls else None
    kernels.fill(count, places, ends, data.address, validity.address if validity else 0)
    return pa.Array.from_buffers(
        pa.binary(), count, [validity, ends_buffer, data], null_count=int(nulls)
    )


def _headers(count: int, headers_at: Any, told: Any, end: int) -> pa.Array:
    room = int(told[kernels.TOLD_HEADERS])
    list_ends, list_ends_buffer = _column(count + 1, np.int32)
    name_ends, name_ends_buffer = _column(room + 1, np.int32)
    content_ends, content_ends_buffer = _column(room + 1, np.int32)
    names_at = np.empty(room, np.int64)
    contents_at = np.empty(room, np.int64)
    kernels.find_headers(
        count, headers_at, list_ends, names_at, name_ends, contents_at, content_ends, end
    )
    names = _text(_binary(names_at, name_ends, name_ends_buffer, 0))
    nulls = told[kernels.TOLD_NULL_HEADERS]
    contents = _binary(contents_at, content_ends, content_ends_buffer, nulls)
    pairs = pa.StructArray.from_arrays([names, contents], fields=list(HEADER_TYPE.value_type))
    return pa.Array.from_buffers(
        HEADER_TYPE, count, [None, list_ends_buffer], null_count=0, children=[pairs]
    )


def _text(names: pa.Array) -> pa.Array:
    """Names of headers as text; bytes that are not UTF-8 are replaced, as clients do."""
    try:
        return names.cast(pa.string())
    except pa.ArrowInvalid:
        replaced = [name.decode("utf-8", "replace") for name in names.to_pylist()]
        return pa.array(replaced, pa.string())


def _address(view: Buffer) -> int:
    found: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return found


def _verified(view: memoryview, at: int) -> BatchHeader:
    try:
        return verify(view, at)
    except CorruptBatchError as error:
        raise _corrupt(_base_offset(view, at), str(error)) from error


def _base_offset(view: memoryview, at: int) -> int:
    """As the first bytes of a batch tell it, be the rest as it may."""
    return int.from_bytes(view[at : at + 8], "big", signed=True)


def _unfolded(header: BatchHeader, body: memoryview) -> memoryview:
    try:
        return memoryview(compression.decompress(header.codec, body))
    except CorruptBatchError as error:
        raise _corrupt(header.base_offset, str(error)) from error


def _corrupt(base_offset: int, why: str) -> CorruptBatchError:
    return CorruptBatchError(
        f"the batch at offset {base_offset} is damaged: {why}",
        advice="Look at the log with `penstock log verify`; read on behind the batch to skip it.",
    )
