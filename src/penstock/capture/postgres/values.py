"""PostgreSQL's text of a value to the JSON that Debezium writes for it.

The text is what a session of ours gets: ISO dates in UTC, `postgres` intervals, hex bytea, dollars
without a locale. Every function here takes the bytes of one value that is not NULL.

What JSON or Debezium's types cannot say:
- numeric NaN and infinity have no unscaled value: where decimals are `precise` they are the words
  "NaN", "Inf" and "-Inf", which no decoder of base64 takes for a number. Otherwise they are "NaN",
  "Infinity" and "-Infinity", as for floats.
- date infinity is the largest and the smallest int32; timestamp infinity is Debezium's
  9223372036825200000 and -9223372036832400000; timestamptz infinity the same instants in words.
- an array of several dimensions is an array of arrays.
"""

from __future__ import annotations

import re
from base64 import b64encode
from binascii import b2a_base64
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from json.encoder import encode_basestring
from struct import pack
from typing import Final

import orjson

from penstock.capture.source import NULL

Convert = Callable[[bytes], bytes]


DAY_US: Final = 86_400_000_000
_EPOCH_ORDINAL: Final = date(1970, 1, 1).toordinal()
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC).replace(tzinfo=None)
_US: Final = timedelta(microseconds=1)
_KNOWN_DATES_MAX: Final = 1 << 16
# The length of a month when an interval must be one number, as in Debezium.
_DAYS_PER_MONTH: Final = 365.25 / 12

_dates: dict[bytes, int] = {}


def text(value: bytes) -> bytes:
    """A string. In a database without an encoding (SQL_ASCII) bytes need not be UTF-8."""
    # As orjson would write it, whose results are slow to make if they are kept.
    try:
        return encode_basestring(value.decode()).encode()
    except UnicodeDecodeError:
        return encode_basestring(value.decode(errors="replace")).encode()


def floating(value: bytes) -> bytes:
    # All that is not a number ends with a letter.
    return value if value[-1] < 58 else b'"%b"' % value


def boolean(value: bytes) -> bytes:
    return b"true" if value == b"t" else b"false"


def bytea(value: bytes) -> bytes:
    return b'"%b"' % b64encode(bytes.fromhex(value[2:].decode()))


def unscaled(number: int) -> bytes:
    """The bytes of an integer as Connect's Decimal has them, as few as can be, in base64."""
    size = (number if number >= 0 else ~number).bit_length() // 8 + 1
    data = number.to_bytes(size, "big", signed=True)
    return b'"%b"' % b2a_base64(data, newline=False)


# What numeric prints for what is not a number, and the words for it in the place of base64.
_NOT_A_NUMBER: Final = {b"NaN": b'"NaN"', b"Infinity": b'"Inf"', b"-Infinity": b'"-Inf"'}


def _word(value: bytes) -> bytes:
    word = _NOT_A_NUMBER.get(value)
    if word is None:
        raise ValueError(f"{value!r} is no numeric")
    return word


def decimal(scale: int) -> Convert:
    """numeric(p, s) to its unscaled value; the server always prints s digits."""
    if scale < 0:
        unit = 10**-scale

        def coarse(value: bytes) -> bytes:
            return _word(value) if value[-1] > 57 else unscaled(int(value) // unit)

        return coarse

    def convert(value: bytes) -> bytes:
        if value[-1] > 57:
            return _word(value)
        return unscaled(int(value.replace(b".", b"")))

    return convert


def variable_decimal(value: bytes) -> bytes:
    """numeric without a scale: each value says its own."""
    if value[-1] > 57:
        return b'{"scale":0,"value":%b}' % _word(value)
    whole, _, fraction = value.partition(b".")
    return b'{"scale":%d,"value":%b}' % (len(fraction), unscaled(int(whole + fraction)))


def money(value: bytes) -> bytes:
    """-$1,234.56, in cents."""
    digits = value.translate(None, b"$,.()")
    return unscaled(-int(digits[1:]) if digits[:1] == b"-" else int(digits))


def money_text(value: bytes) -> bytes:
    return b'"%b"' % value.translate(None, b"$,")


def money_number(value: bytes) -> bytes:
    return value.translate(None, b"$,")


def days_from_civil(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01 in the proleptic Gregorian calendar, for any year."""
    year -= month <= 2
    era = year // 400
    of_era = year - era * 400
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


def _days(value: bytes) -> int:
    """A date without BC or with it; remembered, because dates repeat."""
    known = _dates.get(value)
    if known is not None:
        return known
    if len(value) == 10:
        days = date.fromisoformat(value.decode()).toordinal() - _EPOCH_ORDINAL
    else:
        plain, _, era = value.partition(b" ")
        year, month, day = (int(part) for part in plain.split(b"-"))
        days = days_from_civil(1 - year if era == b"BC" else year, month, day)
    if len(_dates) >= _KNOWN_DATES_MAX:
        _dates.clear()
    _dates[value] = days
    return days


def date_days(value: bytes) -> bytes:
    if value[-1] == 121:  # infinity
        return b"-2147483648" if value[0] == 45 else b"2147483647"
    return b"%d" % _days(value)


def _time_us(value: bytes) -> int:
    """HH:MM:SS[.ffffff], hours to 24."""
    seconds = int(value[0:2]) * 3600 + int(value[3:5]) * 60 + int(value[6:8])
    return seconds * 1_000_000 + (int(value[9:].ljust(6, b"0")) if len(value) > 8 else 0)


def time_us(value: bytes) -> bytes:
    return b"%d" % _time_us(value)


def time_ms(value: bytes) -> bytes:
    return b"%d" % (_time_us(value) // 1000)


def _far_timestamp_us(value: bytes) -> int:
    """What Python's datetime cannot hold: BC and years above 9999."""
    parts = value.split(b" ")
    day = parts[0] + (b" BC" if parts[-1] == b"BC" else b"")
    return _days(day) * DAY_US + _time_us(parts[1])


def timestamp_us(value: bytes) -> bytes:
    try:
        return b"%d" % ((datetime.fromisoformat(value.decode()) - _EPOCH) // _US)
    except (ValueError, TypeError):
        return _timestamp_special(value, 1)


def timestamp_ms(value: bytes) -> bytes:
    try:
        return b"%d" % ((datetime.fromisoformat(value.decode()) - _EPOCH) // _US // 1000)
    except (ValueError, TypeError):
        return _timestamp_special(value, 1000)


def _timestamp_special(value: bytes, unit_us: int) -> bytes:
    if value == b"infinity":
        return b"9223372036825200000"
    if value == b"-infinity":
        return b"-9223372036832400000"
    return b"%d" % (_far_timestamp_us(value) // unit_us)


def timestamptz(value: bytes) -> bytes:
    """ISO 8601 in UTC, which is the zone of our sessions."""
    if value[-3:] == b"+00" and value[10:11] == b" ":
        return b'"%bT%bZ"' % (value[:10], value[11:-3])
    if value == b"infinity":
        return b'"+292278994-08-16T23:00:00Z"'
    if value == b"-infinity":
        return b'"-292275055-05-16T23:00:00Z"'
    # ISO 8601 has a sign before years of more than four digits, and a year 0 that is 1 BC.
    day, time, *era = value.split(b" ")
    year, month, dom = day.split(b"-")
    if era:
        number = 1 - int(year)
        year = b"%05d" % number if number < 0 else b"0000"
    else:
        year = b"+" + year
    return b'"%b-%b-%bT%bZ"' % (year, month, dom, time.removesuffix(b"+00"))


def timetz(value: bytes) -> bytes:
    """HH:MM:SS[.f]+HH[:MM[:SS]] to the same moment in UTC."""
    at = max(value.rfind(b"+"), value.rfind(b"-"))
    time, zone = value[:at], value[at:]
    if zone != b"+00":
        parts = [int(part) for part in zone[1:].split(b":")]
        offset = sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
        us = _time_us(time) - (offset if zone[0] == 43 else -offset) * 1_000_000
        seconds, fraction = divmod(us % DAY_US, 1_000_000)
        tail = b".%06d" % fraction if fraction else b""
        time = b"%02d:%02d:%02d%b" % (
            seconds // 3600,
            seconds // 60 % 60,
            seconds % 60,
            tail.rstrip(b"0"),
        )
    return b'"%bZ"' % time


_INTERVAL: Final = re.compile(
    rb"(?:(-?\d+) years? ?)?(?:(-?\d+) mons? ?)?(?:(-?\d+) days? ?)?"
    rb"(?:(-?)(\d+):(\d\d):(\d\d)(?:\.(\d+))?)?"
)


def _interval_parts(value: bytes) -> tuple[int, int, int] | None:
    """Months, days and microseconds; None for the infinity of PostgreSQL 17."""
    found = _INTERVAL.fullmatch(value.replace(b"+", b""))
    if found is None:
        return None
    years, months, days, sign, hours, minutes, seconds, fraction = found.groups()
    us = (int(hours or 0) * 3600 + int(minutes or 0) * 60 + int(seconds or 0)) * 1_000_000
    us += int((fraction or b"").ljust(6, b"0")[:6] or 0)
    return int(years or 0) * 12 + int(months or 0), int(days or 0), -us if sign else us


def interval_us(value: bytes) -> bytes:
    """One number, a month being 30.4375 days."""
    parts = _interval_parts(value)
    if parts is None:
        return b"-9223372036854775808" if value[:1] == b"-" else b"9223372036854775807"
    months, days, us = parts
    return b"%d" % (int(months * _DAYS_PER_MONTH * DAY_US) + days * DAY_US + us)


def interval_iso(value: bytes) -> bytes:
    """P1Y2M3DT4H5M6.789S, all fields as Debezium writes them."""
    parts = _interval_parts(value)
    if parts is None:
        return text(value)
    months, days, us = parts
    years, months = int(months / 12), months - int(months / 12) * 12
    sign, us = (-1 if us < 0 else 1), abs(us)
    seconds, fraction = divmod(us, 1_000_000)
    tail = (".%06d" % fraction).rstrip("0") if fraction else ""  # noqa: UP031
    lead = "-" if sign < 0 and seconds % 60 == 0 and fraction else ""
    return (
        f'"P{years}Y{months}M{days}DT{sign * (seconds // 3600)}H'
        f'{sign * (seconds // 60 % 60)}M{lead}{sign * (seconds % 60)}{tail}S"'
    ).encode()


def one_bit(value: bytes) -> bytes:
    return b"true" if value == b"1" else b"false"


def bits(value: bytes) -> bytes:
    """Bits to bytes, the last bit being the lowest of the first byte."""
    data = int(value or b"0", 2).to_bytes((len(value) + 7) // 8, "little")
    return b'"%b"' % b64encode(data)


def point(value: bytes) -> bytes:
    x, y = value[1:-1].split(b",")
    wkb = b64encode(pack("<BIdd", 1, 1, float(x), float(y)))
    return b'{"x":%b,"y":%b,"wkb":"%b","srid":null}' % (floating(x), floating(y), wkb)


_PAIR: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"=>(?:"((?:[^"\\]|\\.)*)"|NULL)', re.DOTALL)
_ESCAPED: Final = re.compile(rb"\\(.)", re.DOTALL)


def hstore(value: bytes) -> bytes:
    """A string that holds a JSON object."""
    pairs = {
        _ESCAPED.sub(rb"\1", found[1]).decode(errors="replace"): None
        if found[2] is None
        else _ESCAPED.sub(rb"\1", found[2]).decode(errors="replace")
        for found in _PAIR.finditer(value)
    }
    return orjson.dumps(orjson.dumps(pairs).decode())


_ELEMENT: Final = re.compile(rb'[{}]|"((?:[^"\\]|\\.)*)"|[^,{}"]+', re.DOTALL)


def array(element: Convert, delimiter: bytes = b",") -> Convert:
    """{1,2,NULL} to a JSON array of its elements, nested as it is."""
    scan = (
        _ELEMENT
        if delimiter == b","
        else re.compile(_ELEMENT.pattern.replace(b"^,", b"^" + delimiter), re.DOTALL)
    )

    def convert(value: bytes) -> bytes:
        # [2:3]={...} says where the indexes begin; JSON cannot.
        if value[0] == 91:
            value = value[value.index(b"=") + 1 :]
        out: list[bytes] = []
        for found in scan.finditer(value):
            token = found[0]
            if token == b"{":
                if out and out[-1] != b"[":
                    out.append(b",")
                out.append(b"[")
                continue
            if token == b"}":
                out.append(b"]")
                continue
            if out[-1] != b"[":
                out.append(b",")
            if token[0] == 34:
                quoted = found[1]
                out.append(element(_ESCAPED.sub(rb"\1", quoted) if b"\\" in quoted else quoted))
            else:
                out.append(NULL if token == b"NULL" else element(token))
        return b"".join(out)

    return convert
