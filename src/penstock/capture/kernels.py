"""The loops over rows, compiled: rows of streams and of snapshots to fragments, and those to
envelopes.

They do the ordinary and nothing else. What decodes rows stops before the first that has anything
out of the ordinary in it, and the interpreted decoder takes that one; so there is one place that
knows the rare cases, and whatever is decoded here comes out byte for byte as it would there.
"""

# Compiled, a comparison with each is quicker than looking into a collection.
# ruff: noqa: PLR1714, SIM109

from __future__ import annotations

from typing import Any, Final

from penstock.records.columns.compiled import copy_bytes, helper, kernel, load_byte, store_byte

# How a column's text becomes JSON.
COPY, TEXT, QUOTE, BOOLEAN, DECIMAL, TIMESTAMP_US, TIMESTAMPTZ, DATE, FLOAT = range(9)
# Of MySQL: a local time in milliseconds, and one that is told in UTC.
TIMESTAMP_MS, TIMESTAMP_UTC = 9, 10
# What happened to a row, and which of its rows are there.
CREATED, UPDATED, UPDATED_BOTH, DELETED = range(4)

# The most that one byte of text can become: \u00XX.
GROWTH: Final = 6
# And what a value may take beyond that: quotes, a number.
VALUE_BYTES: Final = 32
# What a number takes in decimal, at most.
NUMBER_BYTES: Final = 20
_DIGITS_MAX: Final = 18


@helper
def _uint(at: int, count: int) -> Any:
    value = 0
    for place in range(count):
        value = (value << 8) | load_byte(at + place)
    return value


@helper
def _digits(at: int, count: int) -> Any:
    """So many digits as a number; -1 if they are none."""
    value = 0
    for place in range(count):
        digit = load_byte(at + place) - 48
        if digit < 0 or digit > 9:
            return -1
        value = value * 10 + digit
    return value


@helper
def put_number(to: int, value: int) -> Any:
    """A number in decimal; the address behind it."""
    if value < 0:
        store_byte(to, 45)
        to += 1
        value = -value
    count = 1
    rest = value // 10
    while rest:
        count += 1
        rest //= 10
    at = to + count - 1
    while at >= to:
        store_byte(at, 48 + value % 10)
        value //= 10
        at -= 1
    return to + count


@helper
def _utf8(at: int, end: int) -> Any:
    """How many bytes the character at `at` takes, which is not ASCII; 0 if it is not UTF-8."""
    first = load_byte(at)
    low, high = 0x80, 0xBF
    if 0xC2 <= first <= 0xDF:
        more = 1
    elif 0xE0 <= first <= 0xEF:
        more = 2
        if first == 0xE0:
            low = 0xA0
        elif first == 0xED:
            high = 0x9F
    elif 0xF0 <= first <= 0xF4:
        more = 3
        if first == 0xF0:
            low = 0x90
        elif first == 0xF4:
            high = 0x8F
    else:
        return 0
    if at + more >= end:
        return 0
    for place in range(1, more + 1):
        byte = load_byte(at + place)
        if byte < low or byte > high:
            return 0
        low, high = 0x80, 0xBF
    return more + 1


@helper
def _hex(value: int) -> Any:
    return 48 + value if value < 10 else 87 + value


@helper
def put_text(to: int, at: int, end: int) -> Any:
    """A string of JSON; 0 if it is not UTF-8."""
    store_byte(to, 34)
    to += 1
    while at < end:
        byte = load_byte(at)
        if byte >= 0x80:
            count = _utf8(at, end)
            if not count:
                return 0
            copy_bytes(to, at, count)
            to += count
            at += count
            continue
        at += 1
        if byte >= 0x20 and byte != 34 and byte != 92:
            store_byte(to, byte)
            to += 1
            continue
        store_byte(to, 92)
        if byte == 34 or byte == 92:
            store_byte(to + 1, byte)
        elif byte == 8:
            store_byte(to + 1, 98)
        elif byte == 9:
            store_byte(to + 1, 116)
        elif byte == 10:
            store_byte(to + 1, 110)
        elif byte == 12:
            store_byte(to + 1, 102)
        elif byte == 13:
            store_byte(to + 1, 114)
        else:
            store_byte(to + 1, 117)
            store_byte(to + 2, 48)
            store_byte(to + 3, 48)
            store_byte(to + 4, _hex(byte >> 4))
            store_byte(to + 5, _hex(byte & 15))
            to += 4
        to += 2
    store_byte(to, 34)
    return to + 1


@helper
def _base64(value: int) -> Any:
    if value < 26:
        return 65 + value
    if value < 52:
        return 71 + value
    if value < 62:
        return value - 4
    return 43 if value == 62 else 47


@helper
def _put_decimal(to: int, at: int, end: int) -> Any:
    """The unscaled value in as few bytes as hold it with its sign, in base64; 0: not a number that
    fits."""
    negative = load_byte(at) == 45
    if negative:
        at += 1
    if end - at > _DIGITS_MAX:
        return 0
    value = 0
    while at < end:
        byte = load_byte(at)
        at += 1
        if byte == 46:
            continue
        if byte < 48 or byte > 57:
            return 0
        value = value * 10 + byte - 48
    return put_unscaled(to, -value if negative else value)


@helper
def put_unscaled(to: int, value: int) -> Any:
    """A number in as few bytes as hold it with its sign, in base64; the address behind it."""
    bits = 0
    rest = value if value >= 0 else ~value
    while rest:
        bits += 1
        rest >>= 1
    size = bits // 8 + 1
    store_byte(to, 34)
    to += 1
    place = size
    while place > 0:
        have = min(place, 3)
        group = 0
        for taken in range(3):
            group <<= 8
            if taken < have:
                group |= (value >> (8 * (place - 1 - taken))) & 255
        store_byte(to, _base64((group >> 18) & 63))
        store_byte(to + 1, _base64((group >> 12) & 63))
        store_byte(to + 2, _base64((group >> 6) & 63) if have > 1 else 61)
        store_byte(to + 3, _base64(group & 63) if have > 2 else 61)
        to += 4
        place -= have
    store_byte(to, 34)
    return to + 1


@helper
def _is_leap(year: int) -> Any:
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


@helper
def days_of(year: int, month: int, day: int) -> Any:
    """Days since 1970; a very small number if there is no such day in the years 1 to 9999."""
    if year < 1 or year > 9999 or month < 1 or month > 12 or day < 1:
        return -(1 << 40)
    longest = 31
    if month == 2:
        longest = 29 if _is_leap(year) else 28
    elif month == 4 or month == 6 or month == 9 or month == 11:
        longest = 30
    if day > longest:
        return -(1 << 40)
    if month <= 2:
        year -= 1
        month += 12
    of_year = (153 * (month - 3) + 2) // 5 + day - 1
    return year * 365 + year // 4 - year // 100 + year // 400 + of_year - 719_468


@helper
def _day(at: int) -> Any:
    """YYYY-MM-DD as days since 1970; a very small number if it is not one."""
    if load_byte(at + 4) != 45 or load_byte(at + 7) != 45:
        return -(1 << 40)
    return days_of(_digits(at, 4), _digits(at + 5, 2), _digits(at + 8, 2))


@helper
def _time_us(at: int, end: int) -> Any:
    """HH:MM:SS[.ffffff] in microseconds; -1 if it is not that."""
    size = end - at
    if size < 8 or size == 9 or size > 15:
        return -1
    hours, minutes, seconds = _digits(at, 2), _digits(at + 3, 2), _digits(at + 6, 2)
    if load_byte(at + 2) != 58 or load_byte(at + 5) != 58:
        return -1
    if hours < 0 or hours > 23 or minutes < 0 or minutes > 59 or seconds < 0 or seconds > 59:
        return -1
    us = 0
    if size > 8:
        us = _digits(at + 9, size - 9)
        if load_byte(at + 8) != 46 or us < 0:
            return -1
        for _ in range(15 - size):
            us *= 10
    return ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + us


@helper
def _put_timestamp(to: int, at: int, end: int, unit_us: int) -> Any:
    if end - at < 19 or load_byte(at + 10) != 32:
        return 0
    days, us = _day(at), _time_us(at + 11, end)
    if days < -(1 << 39) or us < 0:
        return 0
    return put_number(to, days * (86_400_000_000 // unit_us) + us // unit_us)


@helper
def _put_timestamp_utc(to: int, at: int, end: int) -> Any:
    size = end - at
    if size < 19 or load_byte(at + 10) != 32:
        return 0
    if _day(at) < -(1 << 39) or _time_us(at + 11, end) < 0:
        return 0
    store_byte(to, 34)
    copy_bytes(to + 1, at, size)
    store_byte(to + 11, 84)
    store_byte(to + 1 + size, 90)
    store_byte(to + 2 + size, 34)
    return to + 3 + size


@helper
def _put_timestamptz(to: int, at: int, end: int) -> Any:
    """YYYY-MM-DD HH:MM:SS[.f]+00, whatever the digits."""
    if end - at < 22 or load_byte(at + 10) != 32:
        return 0
    if load_byte(end - 3) != 43 or load_byte(end - 2) != 48 or load_byte(end - 1) != 48:
        return 0
    store_byte(to, 34)
    copy_bytes(to + 1, at, 10)
    store_byte(to + 11, 84)
    size = end - 3 - (at + 11)
    copy_bytes(to + 12, at + 11, size)
    store_byte(to + 12 + size, 90)
    store_byte(to + 13 + size, 34)
    return to + 14 + size


@helper
def _put_value(to: int, at: int, end: int, code: int) -> Any:
    """A value that is not NULL as JSON; the address behind it, or 0 if it is not ordinary."""
    size = end - at
    if code == TEXT:
        return put_text(to, at, end)
    if size == 0:
        return 0
    is_number = code == FLOAT and load_byte(end - 1) < 58
    if code == COPY or is_number:
        copy_bytes(to, at, size)
        return to + size
    if code == QUOTE or code == FLOAT:
        store_byte(to, 34)
        copy_bytes(to + 1, at, size)
        store_byte(to + 1 + size, 34)
        return to + size + 2
    if code == DECIMAL:
        return _put_decimal(to, at, end)
    if code == TIMESTAMP_US:
        return _put_timestamp(to, at, end, 1)
    if code == TIMESTAMP_MS:
        return _put_timestamp(to, at, end, 1_000)
    if code == TIMESTAMP_UTC:
        return _put_timestamp_utc(to, at, end)
    if code == TIMESTAMPTZ:
        return _put_timestamptz(to, at, end)
    if code == BOOLEAN:
        is_true = size == 1 and load_byte(at) == 116
        for byte in (116, 114, 117, 101) if is_true else (102, 97, 108, 115):
            store_byte(to, byte)
            to += 1
        if not is_true:
            store_byte(to, 101)
            to += 1
        return to
    if code == DATE and size == 10:
        days = _day(at)
        return 0 if days < -(1 << 39) else put_number(to, days)
    return 0


@helper
def _tuple(
    at: int,
    end: int,
    to: int,
    out: int,
    codes: Any,
    needed: Any,
    must: int,
    places: Any,
    row: int,
    slot: int,
) -> tuple[Any, Any]:
    """One tuple of a message: fragments to `to`, their ends to `places`. Where the tuple and the
    fragments end, or 0 if it is out of the ordinary."""
    columns = len(codes)
    if at + 2 > end or _uint(at, 2) != columns:
        return 0, to
    at += 2
    for column in range(columns):
        if at >= end:
            return 0, to
        kind = load_byte(at)
        at += 1
        if kind == 110:
            if must and needed[column]:
                return 0, to
            for byte in (110, 117, 108, 108):
                store_byte(to, byte)
                to += 1
        elif kind == 116:
            if at + 4 > end:
                return 0, to
            size = _uint(at, 4)
            at += 4
            if at + size > end:
                return 0, to
            behind = _put_value(to, at, at + size, codes[column])
            if not behind:
                return 0, to
            to = behind
            at += size
        else:
            return 0, to
        places[row, slot + column + 1] = to - out
    return at, to


@kernel(
    "int64(int64, int64[::1], int64, int64[::1], int64[::1], int64, int64[:, ::1], int64[::1],"
    " int64[::1])"
)
def decode_rows(
    data: int,
    ends: Any,
    pad: int,
    codes: Any,
    needed: Any,
    out: int,
    places: Any,
    ops: Any,
    numbers: Any,
) -> int:
    """Frames with changes of one relation; how many were decoded, up to one that is out of the
    ordinary. `places` are where a row's fragments are in `out`: first those of what it was, then
    those of what it is."""
    columns = len(codes)
    to = out
    start = data
    for row in range(len(ends)):
        end = data + ends[row] - pad
        if start + 31 > end:
            return row
        kind = load_byte(start + 25)
        what = load_byte(start + 30)
        at = start + 31
        begun = to
        places[row, 0] = to - out
        if kind == 73 and what == 78:
            ops[row] = CREATED
        elif kind == 85 and what == 78:
            ops[row] = UPDATED
        elif kind == 85 and what == 79:
            ops[row] = UPDATED_BOTH
        elif kind == 68 and (what == 75 or what == 79):
            ops[row] = DELETED
        else:
            return row
        if ops[row] >= UPDATED_BOTH:
            at, to = _tuple(at, end, to, out, codes, needed, 0, places, row, 0)
            if not at:
                return row
        else:
            for column in range(columns):
                places[row, column + 1] = begun - out
        if ops[row] == UPDATED_BOTH:
            if at >= end or load_byte(at) != 78:
                return row
            at += 1
        if ops[row] != DELETED:
            at, to = _tuple(at, end, to, out, codes, needed, 1, places, row, columns)
            if not at:
                return row
        else:
            for column in range(columns):
                places[row, columns + column + 1] = to - out
        if at != end:
            return row
        numbers[row] = _uint(start + 1, 8)
        start = data + ends[row]
    return len(ends)


@helper
def _unescape(to: int, at: int, end: int) -> Any:
    """COPY's text of a value without its backslashes; the address behind it."""
    while at < end:
        byte = load_byte(at)
        if byte == 92 and at + 1 < end:
            at += 1
            byte = load_byte(at)
            if byte == 98:
                byte = 8
            elif byte == 102:
                byte = 12
            elif byte == 110:
                byte = 10
            elif byte == 114:
                byte = 13
            elif byte == 116:
                byte = 9
            elif byte == 118:
                byte = 11
        store_byte(to, byte)
        to += 1
        at += 1
    return to


@kernel("int64(int64, int64[::1], int64[::1], int64[::1], int64, int64, int64[:, ::1])")
def decode_lines(
    data: int, ends: Any, codes: Any, needed: Any, room: int, out: int, places: Any
) -> int:
    """Lines of COPY without their newlines; how many were decoded, up to one that is out of the
    ordinary. `room` is for one value. `places` are as `decode_rows` has them for an insert."""
    columns = len(codes)
    to = out
    at = data
    for row in range(len(ends)):
        end = data + ends[row]
        for slot in range(columns + 1):
            places[row, slot] = to - out
        for column in range(columns):
            stop = at
            escaped = False
            while stop < end:
                byte = load_byte(stop)
                if byte == 9:
                    break
                escaped |= byte == 92
                stop += 1
            # A tab follows each value but the last.
            if (stop < end) != (column < columns - 1):
                return row
            first, last = at, stop
            at = stop + 1
            if escaped:
                if last - first == 2 and load_byte(first + 1) == 78:
                    if needed[column]:
                        return row
                    for byte in (110, 117, 108, 108):
                        store_byte(to, byte)
                        to += 1
                    places[row, columns + column + 1] = to - out
                    continue
                last = _unescape(room, first, last)
                first = room
            behind = _put_value(to, first, last, codes[column])
            if not behind:
                return row
            to = behind
            places[row, columns + column + 1] = to - out
        at = end
    return len(ends)


@kernel("int64(int64, int64[::1], int64[::1], int64, int64[:, ::1])")
def decode_texts(data: int, ends: Any, codes: Any, out: int, places: Any) -> int:
    """As `decode_lines`, for rows of MySQL's text protocol: each value behind its length."""
    columns = len(codes)
    to = out
    at = data
    for row in range(len(ends)):
        end = data + ends[row]
        for slot in range(columns + 1):
            places[row, slot] = to - out
        for column in range(columns):
            if at >= end:
                return row
            size = load_byte(at)
            at += 1
            if size == 251:
                for byte in (110, 117, 108, 108):
                    store_byte(to, byte)
                    to += 1
                places[row, columns + column + 1] = to - out
                continue
            if size == 252 or size == 253:
                more = size - 250
                if at + more > end:
                    return row
                size = 0
                for place in range(more):
                    size |= load_byte(at + place) << (8 * place)
                at += more
            elif size > 253:
                return row
            if at + size > end:
                return row
            behind = _put_value(to, at, at + size, codes[column])
            if not behind:
                return row
            to = behind
            at += size
            places[row, columns + column + 1] = to - out
        if at != end:
            return row
    return len(ends)


@kernel("int64(int64, int64[:, ::1], int64[::1], int64[::1])")
def same_keys(fragments: int, places: Any, ops: Any, keys: Any) -> int:
    """How many rows there are before one whose key an update changes."""
    columns = (places.shape[1] - 1) // 2
    for row in range(len(ops)):
        if ops[row] != UPDATED_BOTH:
            continue
        for column in keys:
            old, new = places[row, column], places[row, columns + column]
            size = places[row, column + 1] - old
            if places[row, columns + column + 1] - new != size:
                return row
            for place in range(size):
                if load_byte(fragments + old + place) != load_byte(fragments + new + place):
                    return row
    return len(ops)


@kernel(
    "int64(int64, int64[:, ::1], int64[::1], int64[::1], int64, int64, int64[:, ::1], int64[::1],"
    " int64[::1], int64, int64, int64[::1], int64[::1], uint8[::1])"
)
def compose_rows(
    fragments: int,
    places: Any,
    ops: Any,
    numbers: Any,
    mentions: int,
    literals: int,
    values_at: Any,
    keys_at: Any,
    keys: Any,
    key_out: int,
    value_out: int,
    key_ends: Any,
    value_ends: Any,
    valid: Any,
) -> int:
    """Keys and envelopes of rows; how many records. `values_at` says for each operation where its
    literals stand: one before each fragment, and after the last; then one after each mention of the
    row's number. Its last line says by its first number whether a tombstone follows a delete."""
    columns = (places.shape[1] - 1) // 2
    key_to, to = key_out, value_out
    made = 0
    for row in range(len(ops)):
        op = ops[row]
        first = columns if op == CREATED or op == UPDATED else 0
        count = 2 * columns if op == UPDATED_BOTH else columns
        at = 0
        for slot in range(first, first + count):
            start, size = values_at[op, at], values_at[op, at + 1] - values_at[op, at]
            copy_bytes(to, literals + start, size)
            to += size
            at += 1
            size = places[row, slot + 1] - places[row, slot]
            copy_bytes(to, fragments + places[row, slot], size)
            to += size
        for mention in range(mentions + 1):
            start, size = values_at[op, at], values_at[op, at + 1] - values_at[op, at]
            copy_bytes(to, literals + start, size)
            to += size
            at += 1
            if mention < mentions:
                to = put_number(to, numbers[row])
        first = 0 if op == DELETED else columns
        begun = key_to
        for place in range(len(keys)):
            start, size = keys_at[place], keys_at[place + 1] - keys_at[place]
            copy_bytes(key_to, literals + start, size)
            key_to += size
            slot = first + keys[place]
            size = places[row, slot + 1] - places[row, slot]
            copy_bytes(key_to, fragments + places[row, slot], size)
            key_to += size
        last = len(keys)
        copy_bytes(key_to, literals + keys_at[last], keys_at[last + 1] - keys_at[last])
        key_to += keys_at[last + 1] - keys_at[last]
        valid[made] = 1
        made += 1
        key_ends[made] = key_to - key_out
        value_ends[made] = to - value_out
        if op == DELETED and values_at[4, 0]:
            size = key_to - begun
            copy_bytes(key_to, begun, size)
            key_to += size
            valid[made] = 0
            made += 1
            key_ends[made] = key_to - key_out
            value_ends[made] = to - value_out
    return made
