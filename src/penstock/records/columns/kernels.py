"""The loops over records, compiled. All of them are in this one file, since numba's cache knows
that a kernel is stale only by the file it stands in.

Reading goes twice over the records: `measure` walks them, checks every length and notes where
keys and values are; then the columns are allocated with their exact sizes, and `fill` copies each
value once. Writing is the same the other way round: `plan` sizes the records and cuts them into
batches, `pack` writes the bytes.

A failure is a number; `decode` has the words for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.records.columns.compiled import (
    copy_bytes,
    helper,
    kernel,
    load_byte,
    load_int32,
    store_byte,
)

# Columns of the table of segments, one row for each batch whose records are read.
SEG_START, SEG_END, SEG_COUNT, SEG_BASE, SEG_LAST_DELTA, SEG_TIME, SEG_KIND = range(7)
SEG_WIDTH = 7

# What `measure` tells: how it ended and where, then totals.
TOLD_ERROR, TOLD_SEGMENT, TOLD_RECORDS, TOLD_KEY_BYTES, TOLD_VALUE_BYTES = range(5)
TOLD_NULL_KEYS, TOLD_NULL_VALUES = 5, 6
TOLD_HEADERS, TOLD_NAME_BYTES, TOLD_HEADER_BYTES, TOLD_NULL_HEADERS = 7, 8, 9, 10
TOLD_WIDTH = 11

OK, BAD_NUMBER, BAD_RECORD, BAD_FIELD, BAD_DELTA, BAD_TAIL, BAD_HEADERS = range(7)

# A record is at least seven bytes: its length, attributes, two deltas, and three counts.
RECORD_BYTES_MIN = 7

_TIME_MAX_US = 2**63 - 1
_TIME_MAX_MS = _TIME_MAX_US // 1000


@helper
def _number(at: int, end: int) -> tuple[Any, int]:
    """The zigzag varint at `at` and the address behind it; behind it is 0 if there is none."""
    if at >= end:
        return 0, 0
    byte = load_byte(at)
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), at + 1
    raw = np.uint64(byte & 0x7F)
    shift = 7
    at += 1
    while at < end:
        byte = load_byte(at)
        at += 1
        if shift == 63 and byte > 1:
            return 0, 0
        raw |= np.uint64(byte & 0x7F) << np.uint64(shift)
        if byte < 0x80:
            half = np.int64(raw >> np.uint64(1))
            return half ^ -np.int64(raw & np.uint64(1)), at
        shift += 7
    return 0, 0


@helper
def _microseconds(ms: int) -> int:
    """The nearest that 64 bits can hold."""
    if ms > _TIME_MAX_MS:
        return _TIME_MAX_US
    return -_TIME_MAX_US if ms < -_TIME_MAX_MS else ms * 1000


@helper
def _bytes(at: int, end: int) -> tuple[int, Any, Any, int]:
    """A nullable field: how it went, where it is (0: null), its length, the address behind it."""
    length, at = _number(at, end)
    if at == 0:
        return BAD_NUMBER, 0, 0, 0
    if length < 0:
        return OK, 0, 0, at
    if length > end - at:
        return BAD_FIELD, 0, 0, 0
    return OK, at, length, at + length


@helper
def _fields(at: int, stop: int) -> tuple[Any, ...]:
    """A record as far as its headers: how it went, its end, the deltas of time and offset, where
    key and value are and how long, where the headers are."""
    length, at = _number(at, stop)
    if at == 0:
        return BAD_NUMBER, 0, 0, 0, 0, 0, 0, 0, 0
    if length < 1 or length > stop - at:
        return BAD_RECORD, 0, 0, 0, 0, 0, 0, 0, 0
    end = at + length
    time_delta, at = _number(at + 1, end)
    if at == 0:
        return BAD_NUMBER, 0, 0, 0, 0, 0, 0, 0, 0
    offset_delta, at = _number(at, end)
    if at == 0:
        return BAD_NUMBER, 0, 0, 0, 0, 0, 0, 0, 0
    error, key_at, key_length, at = _bytes(at, end)
    if error != OK:
        return error, 0, 0, 0, 0, 0, 0, 0, 0
    error, value_at, value_length, at = _bytes(at, end)
    if error != OK:
        return error, 0, 0, 0, 0, 0, 0, 0, 0
    return OK, end, time_delta, offset_delta, key_at, key_length, value_at, value_length, at


@helper
def _walk_headers(at: int, end: int, told: Any) -> bool:
    """Check and count a record's headers; whether they end where the record does."""
    count, at = _number(at, end)
    if at == 0 or count < 0 or count > end - at:
        return False
    for _ in range(count):
        length, at = _number(at, end)
        if at == 0 or length < 0 or length > end - at:
            return False
        at += length
        told[TOLD_NAME_BYTES] += length
        length, at = _number(at, end)
        if at == 0 or length > end - at:
            return False
        if length < 0:
            told[TOLD_NULL_HEADERS] += 1
        else:
            at += length
            told[TOLD_HEADER_BYTES] += length
    told[TOLD_HEADERS] += count
    return at == end


@kernel(
    "void(int64[:,::1], int64, int64, boolean, int64[::1], int64[::1], int32[::1],"
    " int64[::1], int32[::1], int64[::1], int32[::1], int64[::1], int64[::1])"
)
def measure(
    segments: Any,
    first_offset: int,
    end_offset: int,
    with_headers: bool,
    offsets: Any,
    times: Any,
    kinds: Any,
    keys_at: Any,
    key_ends: Any,
    values_at: Any,
    value_ends: Any,
    headers_at: Any,
    told: Any,
) -> None:
    """Walk the records of all segments; of those in the range of offsets, note where they are.

    An address of 0 stands for null. `key_ends` and `value_ends` become Arrow's offsets.
    """
    found = 0
    key_bytes = 0
    value_bytes = 0
    null_keys = 0
    null_values = 0
    key_ends[0] = 0
    value_ends[0] = 0
    error = OK
    for segment in range(segments.shape[0]):
        told[TOLD_SEGMENT] = segment
        at = segments[segment, SEG_START]
        stop = segments[segment, SEG_END]
        base = segments[segment, SEG_BASE]
        last_delta = segments[segment, SEG_LAST_DELTA]
        base_time = segments[segment, SEG_TIME]
        kind = segments[segment, SEG_KIND]
        for _ in range(segments[segment, SEG_COUNT]):
            error, end, time_delta, offset_delta, key_at, key_length, value_at, value_length, at = (
                _fields(at, stop)
            )
            if error != OK:
                break
            time = base_time
            if kind == 0:
                time = base_time + time_delta
                # Both of one sign, and the sum of the other: it did not fit.
                if ((base_time ^ time) & (time_delta ^ time)) < 0:
                    error = BAD_DELTA
                    break
            if offset_delta < 0 or offset_delta > last_delta:
                error = BAD_DELTA
                break
            offset = base + offset_delta
            if first_offset <= offset < end_offset:
                if with_headers:
                    headers_at[found] = at
                    if not _walk_headers(at, end, told):
                        error = BAD_HEADERS
                        break
                offsets[found] = offset
                times[found] = _microseconds(time)
                kinds[found] = kind
                keys_at[found] = key_at
                values_at[found] = value_at
                if key_at == 0:
                    null_keys += 1
                else:
                    key_bytes += key_length
                if value_at == 0:
                    null_values += 1
                else:
                    value_bytes += value_length
                found += 1
                key_ends[found] = key_bytes
                value_ends[found] = value_bytes
            at = end
        if error == OK and at != stop:
            error = BAD_TAIL
        if error != OK:
            break
    told[TOLD_ERROR] = error
    told[TOLD_RECORDS] = found
    told[TOLD_KEY_BYTES] = key_bytes
    told[TOLD_VALUE_BYTES] = value_bytes
    told[TOLD_NULL_KEYS] = null_keys
    told[TOLD_NULL_VALUES] = null_values


@kernel("void(int64, int64[::1], int32[::1], int64, int64)")
def fill(count: int, places: Any, ends: Any, data: int, validity: int) -> None:
    """Copy values from where they are into a column; `validity` is a bitmap, or 0 for none."""
    for i in range(count):
        length = ends[i + 1] - ends[i]
        if length > 0:
            copy_bytes(data + ends[i], places[i], length)
    if validity != 0:
        bits = 0
        for i in range(count):
            if places[i] != 0:
                bits |= 1 << (i & 7)
            if i & 7 == 7:
                store_byte(validity + (i >> 3), bits)
                bits = 0
        if count & 7:
            store_byte(validity + (count >> 3), bits)


@kernel(
    "void(int64, int64[::1], int32[::1], int64[::1], int32[::1], int64[::1], int32[::1], int64)"
)
def find_headers(
    count: int,
    headers_at: Any,
    list_ends: Any,
    names_at: Any,
    name_ends: Any,
    contents_at: Any,
    content_ends: Any,
    end: int,
) -> None:
    """Note where names and contents of all headers are. `measure` has checked every length;
    `end` is an address that none of them passes."""
    found = 0
    name_bytes = 0
    content_bytes = 0
    list_ends[0] = 0
    name_ends[0] = 0
    content_ends[0] = 0
    for i in range(count):
        number, at = _number(headers_at[i], end)
        for _ in range(number):
            length, at = _number(at, end)
            names_at[found] = at
            at += length
            name_bytes += length
            length, at = _number(at, end)
            contents_at[found] = 0
            if length >= 0:
                contents_at[found] = at
                at += length
                content_bytes += length
            found += 1
            name_ends[found] = name_bytes
            content_ends[found] = content_bytes
        list_ends[i + 1] = found


# ---- writing -------------------------------------------------------------------------------------

# A column as a kernel sees it: addresses of validity (0: none), offsets and data, and whether it
# is there at all (0: all null).
COL_VALID, COL_FIRST, COL_ENDS, COL_DATA, COL_HERE = range(5)
COL_WIDTH = 5


@helper
def _size_of(value: int) -> int:
    """How many bytes a number takes as a zigzag varint."""
    raw = np.uint64(value << 1) ^ np.uint64(value >> 63)
    size = 1
    while raw >= np.uint64(0x80):
        raw >>= np.uint64(7)
        size += 1
    return size


@helper
def _put(at: int, value: int) -> int:
    """Write a zigzag varint; the address behind it."""
    raw = np.uint64(value << 1) ^ np.uint64(value >> 63)
    while raw >= np.uint64(0x80):
        store_byte(at, np.int64(raw & np.uint64(0x7F)) | 0x80)
        at += 1
        raw >>= np.uint64(7)
    store_byte(at, np.int64(raw))
    return at + 1


@helper
def _length_at(column: Any, i: int) -> Any:
    """How long the i-th value of a column is; -1 if it is null."""
    if column[COL_HERE] == 0:
        return -1
    place = column[COL_FIRST] + i
    valid = column[COL_VALID]
    if valid != 0 and (load_byte(valid + (place >> 3)) >> (place & 7)) & 1 == 0:
        return -1
    ends = column[COL_ENDS] + 4 * place
    return load_int32(ends + 4) - load_int32(ends)


@helper
def _address_at(column: Any, i: int) -> Any:
    return column[COL_DATA] + load_int32(column[COL_ENDS] + 4 * (column[COL_FIRST] + i))


@helper
def _put_value(at: int, column: Any, i: int) -> int:
    length = _length_at(column, i)
    at = _put(at, length)
    if length > 0:
        copy_bytes(at, _address_at(column, i), length)
        at += length
    return at


@helper
def _size_of_value(column: Any, i: int) -> Any:
    length = _length_at(column, i)
    return _size_of(length) + max(length, 0)


@helper
def _headers_of(lists: Any, i: int) -> tuple[int, int]:
    """Where the headers of a record begin and end in the columns of names and contents."""
    if _length_at(lists, i) <= 0:
        return 0, 0
    ends = lists[COL_ENDS] + 4 * (lists[COL_FIRST] + i)
    return load_int32(ends), load_int32(ends + 4)


@kernel("int64(int64, int64[:,::1], int64[::1], int64, int64, int64[::1], int64[::1], int64[::1])")
def plan(
    count: int,
    columns: Any,
    times: Any,
    one_time: int,
    batch_bytes: int,
    sizes: Any,
    starts: Any,
    ends: Any,
) -> int:
    """Size every record and cut them into batches; how many batches.

    `columns` are keys, values, lists of headers, their names, their contents. `times` has one
    entry, or one for each record (`one_time` false). `sizes` gets the bytes of each record without
    the length before it, `starts` the first record of each batch, `ends` where its bytes end.
    """
    batches = 0
    total = 0
    batch_from = 0
    base_time = times[0]
    batch_start = 0
    for i in range(count):
        time = times[0] if one_time else times[i]
        fixed = 1 + _size_of_value(columns[0], i) + _size_of_value(columns[1], i)
        begin, end = _headers_of(columns[2], i)
        fixed += _size_of(end - begin)
        for j in range(begin, end):
            fixed += _size_of_value(columns[3], j) + _size_of_value(columns[4], j)
        if i > 0:
            size = fixed + _size_of(time - base_time) + _size_of(i - batch_start)
            if total - batch_from + size + _size_of(size) > batch_bytes:
                ends[batches] = total
                batches += 1
                starts[batches] = i
                batch_from = total
                batch_start = i
                base_time = time
        else:
            starts[0] = 0
        size = fixed + _size_of(time - base_time) + _size_of(i - batch_start)
        sizes[i] = size
        total += size + _size_of(size)
    ends[batches] = total
    return batches + 1


@kernel("int64(int64, int64, int64[:,::1], int64[::1], int64, int64[::1], int64)")
def pack(
    first: int, last: int, columns: Any, times: Any, one_time: int, sizes: Any, at: int
) -> int:
    """Write the records `first` to `last` (not included) as one batch's; the address behind."""
    base_time = times[0] if one_time else times[first]
    for i in range(first, last):
        time = times[0] if one_time else times[i]
        at = _put(at, sizes[i])
        store_byte(at, 0)
        at = _put(at + 1, time - base_time)
        at = _put(at, i - first)
        at = _put_value(at, columns[0], i)
        at = _put_value(at, columns[1], i)
        begin, end = _headers_of(columns[2], i)
        at = _put(at, end - begin)
        for j in range(begin, end):
            at = _put_value(at, columns[3], j)
            at = _put_value(at, columns[4], j)
    return at


# ---- partitions ----------------------------------------------------------------------------------

_M = np.uint32(0x5BD1E995)
_SEED = np.uint32(0x9747B28C)


@helper
def _murmur2(at: int, length: int) -> Any:
    """Kafka's 32-bit murmur2."""
    h = _SEED ^ np.uint32(length)
    for word in range(length >> 2):
        k = np.uint32(load_int32(at + 4 * word) & 0xFFFFFFFF)
        k = np.uint32(k * _M)
        k ^= k >> np.uint32(24)
        k = np.uint32(k * _M)
        h = np.uint32(h * _M)
        h ^= k
    rest = length & 3
    tail = at + (length & ~3)
    if rest == 3:
        h ^= np.uint32(load_byte(tail + 2) << 16)
    if rest >= 2:
        h ^= np.uint32(load_byte(tail + 1) << 8)
    if rest >= 1:
        h ^= np.uint32(load_byte(tail))
        h = np.uint32(h * _M)
    h ^= h >> np.uint32(13)
    h = np.uint32(h * _M)
    h ^= h >> np.uint32(15)
    return h


@kernel("void(int64, int64[::1], int64, int32[::1])")
def place(count: int, column: Any, partitions: int, placed: Any) -> None:
    """The partition of each key; -1 for null ones."""
    for i in range(count):
        length = _length_at(column, i)
        if length < 0:
            placed[i] = -1
        else:
            positive = np.int64(_murmur2(_address_at(column, i), length)) & 0x7FFFFFFF
            placed[i] = positive % partitions
