"""The loop over rows of a binlog event, compiled; see `penstock.capture.kernels` for its rules.

numba keeps the machine code of this file until this file changes: who changes a helper there that
is used here must change something here, too.
"""

# Compiled, a comparison with each is quicker than looking into a collection.
# ruff: noqa: PLR1714, SIM109

from __future__ import annotations

from typing import Any

from penstock.capture.kernels import (
    CREATED,
    DELETED,
    UPDATED_BOTH,
    days_of,
    put_number,
    put_text,
    put_unscaled,
)
from penstock.records.columns.compiled import helper, kernel, load_byte, store_byte

# How a column is stored. SIGNED and UNSIGNED: so many bytes. TEXT: so many bytes say how many
# follow. DECIMAL: digits before and behind the point. DATETIME and TIMESTAMP: digits of a fraction.
SIGNED, UNSIGNED, TEXT, DECIMAL, DATE, DATETIME, TIMESTAMP = range(7)


@helper
def _little(at: int, size: int) -> Any:
    value = 0
    for place in range(size):
        value |= load_byte(at + place) << (8 * place)
    return value


@helper
def _big(at: int, size: int) -> Any:
    value = 0
    for place in range(size):
        value = (value << 8) | load_byte(at + place)
    return value


@helper
def _group_bytes(digits: int) -> Any:
    return (digits + 1) // 2 if digits < 8 else 4


@helper
def _decimal(at: int, whole: int, fraction: int) -> tuple[Any, Any]:
    """The unscaled value of a binary DECIMAL of up to 18 digits, and where it ends; 0 for that if
    a group holds more than its digits can say."""
    first = load_byte(at)
    negative = first < 128
    flip = 255 if negative else 0
    value = 0
    is_first = True
    for part in range(2):
        digits = whole if part == 0 else fraction
        odd = digits % 9
        full = digits // 9
        # Before the point the group that is not full comes first, behind it last.
        for group in range(full + 1):
            is_odd = group == (0 if part == 0 else full)
            count = odd if is_odd else 9
            if not count:
                continue
            number = 0
            for _ in range(_group_bytes(count)):
                byte = load_byte(at)
                if is_first:
                    byte ^= 128
                    is_first = False
                number = (number << 8) | (byte ^ flip)
                at += 1
            most = 1
            for _ in range(count):
                most *= 10
            if number >= most:
                return 0, 0
            value = value * most + number
    return (-value if negative else value), at


@helper
def _two(to: int, value: int) -> Any:
    store_byte(to, 48 + value // 10)
    store_byte(to + 1, 48 + value % 10)
    return to + 2


@helper
def _put_timestamp(to: int, seconds: int, fraction: int, digits: int) -> Any:
    """Seconds since 1970, and a fraction that has two digits for each of its bytes."""
    days, rest = seconds // 86_400, seconds % 86_400
    # The calendar that begins in March: https://howardhinnant.github.io/date_algorithms.html
    shifted = days + 719_468
    era = shifted // 146_097
    of_era = shifted - era * 146_097
    year_of_era = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    part = (5 * of_year + 2) // 153
    day = of_year - (153 * part + 2) // 5 + 1
    month = part + 3 if part < 10 else part - 9
    year = year_of_era + era * 400 + (1 if month <= 2 else 0)
    store_byte(to, 34)
    to = _two(to + 1, year // 100)
    to = _two(to, year % 100)
    store_byte(to, 45)
    to = _two(to + 1, month)
    store_byte(to, 45)
    to = _two(to + 1, day)
    store_byte(to, 84)
    to = _two(to + 1, rest // 3600)
    store_byte(to, 58)
    to = _two(to + 1, rest // 60 % 60)
    store_byte(to, 58)
    to = _two(to + 1, rest % 60)
    if digits:
        store_byte(to, 46)
        stored = (digits + 1) // 2 * 2
        for place in range(stored):
            unit = 1
            for _ in range(stored - 1 - place):
                unit *= 10
            if place < digits:
                store_byte(to + 1 + place, 48 + fraction // unit % 10)
        to += 1 + digits
    store_byte(to, 90)
    store_byte(to + 1, 34)
    return to + 2


@helper
def _datetime(at: int, digits: int) -> Any:
    """A DATETIME in milliseconds, or in microseconds if it has more digits; a very small number if
    it is out of the ordinary."""
    size = (digits + 1) // 2
    packed = _big(at, 5) - 0x8000000000
    months = packed >> 22
    days = days_of(months // 13, months % 13, packed >> 17 & 31)
    if packed < 0 or days < -(1 << 39):
        return -(1 << 62)
    seconds = days * 86_400 + (packed >> 12 & 31) * 3600 + (packed >> 6 & 63) * 60 + (packed & 63)
    fraction = _big(at + 5, size)
    unit = 1_000_000 if digits > 3 else 1_000
    steps = 1
    for _ in range(size):
        steps *= 100
    if unit >= steps:
        return seconds * unit + fraction * (unit // steps)
    return seconds * unit + fraction // (steps // unit)


@helper
def _value(to: int, at: int, end: int, code: int, a: int, b: int) -> tuple[Any, Any]:
    """One value as JSON: the address behind it, or 0 if it is not ordinary; and where it ends."""
    if code == SIGNED or code == UNSIGNED:
        value = _little(at, a)
        if code == SIGNED and a < 8 and value >> (8 * a - 1):
            value -= 1 << (8 * a)
        if a == 8 and ((code == UNSIGNED and value < 0) or value == -(1 << 63)):
            return 0, at
        return put_number(to, value), at + a
    if code == TEXT:
        if at + a > end:
            return 0, at
        size = _little(at, a)
        at += a
        if at + size > end:
            return 0, at
        return put_text(to, at, at + size), at + size
    if code == DECIMAL:
        value, behind = _decimal(at, a, b)
        return (put_unscaled(to, value) if behind else 0), behind
    if code == DATE:
        packed = _little(at, 3)
        days = days_of(packed >> 9, packed >> 5 & 15, packed & 31)
        return (0 if days < -(1 << 39) else put_number(to, days)), at + 3
    size = (b + 1) // 2
    if code == DATETIME:
        value = _datetime(at, b)
        return (0 if value == -(1 << 62) else put_number(to, value)), at + 5 + size
    seconds, fraction = _big(at, 4), _big(at + 4, size)
    most = 1
    for _ in range(size):
        most *= 100
    if not seconds or fraction >= most:
        return 0, at
    return _put_timestamp(to, seconds, fraction, b), at + 4 + size


@helper
def _image(
    at: int, end: int, to: int, out: int, columns: Any, places: Any, row: int, slot: int
) -> tuple[Any, Any]:
    """One row image with all its columns; where it and its fragments end, or 0 if it is out of the
    ordinary."""
    count = len(columns)
    nulls = at
    at += (count + 7) // 8
    for column in range(count):
        if at > end:
            return 0, to
        if load_byte(nulls + column // 8) >> (column % 8) & 1:
            for byte in (110, 117, 108, 108):
                store_byte(to, byte)
                to += 1
        else:
            least = columns[column, 3]
            if at + least > end:
                return 0, to
            behind, at = _value(
                to, at, end, columns[column, 0], columns[column, 1], columns[column, 2]
            )
            if not behind:
                return 0, to
            to = behind
        places[row, slot + column + 1] = to - out
    return (at if at <= end else 0), to


@kernel("int64(int64, int64, int64[:, ::1], int64, int64, int64[:, ::1])")
def decode_images(data: int, end: int, columns: Any, op: int, out: int, places: Any) -> int:
    """The rows of one event; how many, or -1 if there is one that is out of the ordinary, or more
    than `places` has room for. Of a column: how it is stored, two numbers of that, and how many
    bytes it has at least."""
    count = len(columns)
    at, to = data, out
    row = 0
    while at < end:
        if row >= len(places):
            return -1
        for slot in range(2 * count + 1):
            places[row, slot] = to - out
        if op == UPDATED_BOTH or op == DELETED:
            at, to = _image(at, end, to, out, columns, places, row, 0)
            if not at:
                return -1
        for slot in range(count, 2 * count + 1):
            places[row, slot] = to - out
        if op == UPDATED_BOTH or op == CREATED:
            at, to = _image(at, end, to, out, columns, places, row, count)
            if not at:
                return -1
        row += 1
    return row
