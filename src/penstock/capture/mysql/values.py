"""Values of MariaDB and MySQL as JSON fragments, as Debezium writes them.

Generated decoders call these, so they are few and short. Two ways lead to each kind of value: the
binlog's binary form and the text of a result set; both give the same bytes for the same value.

A zero date (`0000-00-00`, or a day that does not exist) has no place in time: it becomes null, or
the epoch where the column is NOT NULL, as Debezium does.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Callable, Sequence
from datetime import date
from ipaddress import IPv4Address, IPv6Address
from json.encoder import encode_basestring
from struct import Struct, pack, unpack
from typing import Final
from uuid import UUID

import orjson

NULL: Final = b"null"
_EPOCH: Final = date(1970, 1, 1).toordinal()
_CACHE_MAX: Final = 50_000
_DAYS_OF_400_YEARS: Final = 146_097
FromBytes = Callable[[bytes], bytes]

dumps: Final = orjson.dumps
# A string as orjson would write it, whose results are slow to make if they are kept.
quoted: Final[Callable[[str], str]] = encode_basestring
from_bytes: Final = int.from_bytes


class Cache(dict[bytes, bytes]):
    """Values that were made before; emptied when it is full."""

    def __init__(self, make: FromBytes) -> None:
        self._make = make

    def __missing__(self, raw: bytes) -> bytes:
        if len(self) >= _CACHE_MAX:
            self.clear()
        made = self[raw] = self._make(raw)
        return made


def base64(raw: bytes) -> bytes:
    return b'"%b"' % b2a_base64(raw, newline=False)


def text(raw: bytes) -> bytes:
    """UTF-8 as a JSON string."""
    return quoted(raw.decode("utf-8", "replace")).encode()


# -- numbers ---------------------------------------------------------------------------------------


def float32(value: float) -> bytes:
    """The shortest decimal that is this single-precision number."""
    for digits in (6, 7, 8):
        short = f"{value:.{digits}g}"
        if unpack("f", pack("f", float(short)))[0] == value:
            break
    else:
        short = f"{value:.9g}"
    return repr(float(short)).encode()


def float32_text(raw: bytes) -> bytes:
    # The server is asked for the double that the single is exactly.
    return float32(unpack("f", pack("f", float(raw)))[0])


def double_text(raw: bytes) -> bytes:
    return repr(float(raw)).encode()


def unscaled(value: int) -> bytes:
    """Base64 of the shortest two's complement: Kafka Connect's Decimal."""
    size = (value if value >= 0 else ~value).bit_length() // 8 + 1
    return b'"%b"' % b2a_base64(value.to_bytes(size, "big", signed=True), newline=False)


def decimal_string(value: int, scale: int) -> bytes:
    digits = f"{abs(value):0{scale + 1}d}"
    sign = "-" if value < 0 else ""
    whole = f"{digits[:-scale]}.{digits[-scale:]}" if scale else digits
    return f'"{sign}{whole}"'.encode()


def decimal_shape(precision: int, scale: int) -> list[tuple[int, int]]:
    """The groups of a binary DECIMAL: (bytes, digits) each, from the front."""
    size_of = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
    whole, rest = divmod(precision - scale, 9)
    groups = [(size_of[rest], rest)] if rest else []
    groups += [(4, 9)] * whole
    whole, rest = divmod(scale, 9)
    groups += [(4, 9)] * whole
    return groups + ([(size_of[rest], rest)] if rest else [])


def decimal_binary(precision: int, scale: int, mode: str) -> tuple[int, FromBytes]:
    """How many bytes a binary DECIMAL has, and the function that reads it."""
    groups = decimal_shape(precision, scale)
    size = sum(width for width, _ in groups)
    top, mask = 1 << (8 * size - 1), (1 << (8 * size)) - 1
    shifts: list[tuple[int, int, int]] = []
    at, factor = 0, 1
    for width, digits in reversed(groups):
        shifts.append((at, (1 << (8 * width)) - 1, factor))
        at += 8 * width
        factor *= 10**digits
    finish = decimal_finish(scale, mode)

    def read(raw: bytes) -> bytes:
        packed = from_bytes(raw, "big")
        negative = not packed & top
        packed ^= top
        if negative:
            packed ^= mask
        value = 0
        for shift, ones, power in shifts:
            value += ((packed >> shift) & ones) * power
        return finish(-value if negative else value)

    return size, read


def decimal_finish(scale: int, mode: str) -> Callable[[int], bytes]:
    """precise: Connect's Decimal; string: the digits; double: a number, with a number's limits."""
    if mode == "precise":
        return unscaled
    if mode == "string":
        return lambda value: decimal_string(value, scale)
    return lambda value: repr(value / 10**scale).encode()


def decimal_text(scale: int, mode: str) -> FromBytes:
    finish = decimal_finish(scale, mode)
    return lambda raw: finish(int(raw.replace(b".", b"")))


# -- dates and times -------------------------------------------------------------------------------


def days_of(year: int, month: int, day: int) -> int | None:
    """Days since 1970; None if there is no such day. The year 0 exists for MySQL."""
    try:
        if year == 0:
            return date(400, month, day).toordinal() - _EPOCH - _DAYS_OF_400_YEARS
        return date(year, month, day).toordinal() - _EPOCH
    except ValueError:
        return None


def date_binary(zero: bytes) -> FromBytes:
    def read(raw: bytes) -> bytes:
        packed = from_bytes(raw, "little")
        days = days_of(packed >> 9, packed >> 5 & 15, packed & 31)
        return zero if days is None else b"%d" % days

    return read


def date_text(zero: bytes) -> FromBytes:
    def read(raw: bytes) -> bytes:
        days = days_of(int(raw[:4]), int(raw[5:7]), int(raw[8:10]))
        return zero if days is None else b"%d" % days

    return read


class _Hours(dict[int, int | None]):
    """Seconds since 1970 at the beginning of an hour, by the packed form of DATETIME."""

    def __missing__(self, packed: int) -> int | None:
        if len(self) >= _CACHE_MAX:
            self.clear()
        months = packed >> 10
        days = days_of(months // 13, months % 13, packed >> 5 & 31)
        made = self[packed] = None if days is None else days * 86400 + (packed & 31) * 3600
        return made


_HOURS: Final = _Hours()


def datetime_binary(fsp: int, zero: bytes) -> FromBytes:
    """DATETIME2: 5 bytes and a fraction; milliseconds up to 3 digits, microseconds beyond."""
    fraction_bits = 8 * ((fsp + 1) // 2)
    unit = 1_000_000 if fsp > 3 else 1_000
    # The fraction counts in hundredths, ten-thousandths or millionths.
    steps = 100 ** ((fsp + 1) // 2)
    up, down = (unit // steps, 1) if unit >= steps else (1, steps // unit)
    ones = (1 << fraction_bits) - 1
    hours = _HOURS
    bias = 0x8000000000 << fraction_bits

    def read(raw: bytes) -> bytes:
        packed = from_bytes(raw, "big") - bias
        fraction = packed & ones
        packed >>= fraction_bits
        base = hours[packed >> 12]
        if base is None:
            return zero
        seconds = base + (packed >> 6 & 63) * 60 + (packed & 63)
        return b"%d" % (seconds * unit + fraction * up // down)

    return read


def datetime_text(fsp: int, zero: bytes) -> FromBytes:
    unit = 1_000_000 if fsp > 3 else 1_000
    places = 6 if fsp > 3 else 3

    def read(raw: bytes) -> bytes:
        days = days_of(int(raw[:4]), int(raw[5:7]), int(raw[8:10]))
        if days is None:
            return zero
        seconds = days * 86400 + int(raw[11:13]) * 3600 + int(raw[14:16]) * 60 + int(raw[17:19])
        fraction = int(raw[20:].ljust(places, b"0")[:places]) if len(raw) > 20 else 0
        return b"%d" % (seconds * unit + fraction)

    return read


def _zoned(seconds: int) -> bytes:
    days, rest = divmod(seconds, 86400)
    day = date.fromordinal(days + _EPOCH)
    return b'"%04d-%02d-%02dT%02d:%02d:%02d' % (
        *(day.year, day.month, day.day),
        *(rest // 3600, rest // 60 % 60, rest % 60),
    )


def timestamp_binary(fsp: int, zero: bytes) -> FromBytes:
    """TIMESTAMP2: 4 bytes of seconds and a fraction, as ISO text in UTC."""
    size = (fsp + 1) // 2
    known: dict[bytes, bytes] = {}

    def read(raw: bytes) -> bytes:
        seconds = raw[:4]
        begin = known.get(seconds)
        if begin is None:
            if len(known) >= _CACHE_MAX:
                known.clear()
            begin = known[seconds] = _zoned(from_bytes(seconds, "big"))
        fraction = from_bytes(raw[4:], "big")
        if not fsp:
            return zero if seconds == b"\0\0\0\0" else begin + b'Z"'
        if not fraction and seconds == b"\0\0\0\0":
            return zero
        digits = b"%0*d" % (2 * size, fraction)
        return b'%b.%bZ"' % (begin, digits[:fsp])

    return read


def timestamp_text(zero: bytes) -> FromBytes:
    def read(raw: bytes) -> bytes:
        if raw.startswith(b"0000"):
            return zero
        return b'"%bT%bZ"' % (raw[:10], raw[11:])

    return read


ZERO_TIMESTAMP: Final = b'"1970-01-01T00:00:00Z"'


def time_binary(fsp: int) -> FromBytes:
    """TIME2: 3 bytes and a fraction, signed; microseconds."""
    size = (fsp + 1) // 2
    bits = 8 * size
    bias = 0x800000 << bits
    ones = (1 << bits) - 1
    step = 1_000_000 // 100**size

    def read(raw: bytes) -> bytes:
        packed = from_bytes(raw, "big") - bias
        value = abs(packed)
        whole = value >> bits
        seconds = (whole >> 12) * 3600 + (whole >> 6 & 63) * 60 + (whole & 63)
        micros = seconds * 1_000_000 + (value & ones) * step
        return b"%d" % (-micros if packed < 0 else micros)

    return read


def time_text(raw: bytes) -> bytes:
    negative = raw.startswith(b"-")
    hours, minutes, rest = raw.lstrip(b"-").split(b":")
    seconds = int(hours) * 3600 + int(minutes) * 60 + int(rest[:2])
    micros = seconds * 1_000_000 + (int(rest[3:].ljust(6, b"0")) if len(rest) > 2 else 0)
    return b"%d" % (-micros if negative else micros)


def old_time(raw: bytes) -> bytes:
    """TIME as tables from before MySQL 5.6 keep it: hhmmss as one number."""
    packed = from_bytes(raw, "little", signed=True)
    value = abs(packed)
    micros = (value // 10000 * 3600 + value // 100 % 100 * 60 + value % 100) * 1_000_000
    return b"%d" % (-micros if packed < 0 else micros)


def old_datetime(zero: bytes) -> FromBytes:
    def read(raw: bytes) -> bytes:
        day, clock = divmod(from_bytes(raw, "little"), 1_000_000)
        days = days_of(day // 10000, day // 100 % 100, day % 100)
        if days is None:
            return zero
        seconds = days * 86400 + clock // 10000 * 3600 + clock // 100 % 100 * 60 + clock % 100
        return b"%d" % (seconds * 1000)

    return read


def old_timestamp(zero: bytes) -> FromBytes:
    def read(raw: bytes) -> bytes:
        return _zoned(from_bytes(raw, "little")) + b'Z"' if raw != b"\0\0\0\0" else zero

    return read


# -- the rest --------------------------------------------------------------------------------------


def bits(width: int) -> FromBytes:
    """BIT: a boolean if there is one, else bytes with the lowest first, as Debezium has them."""
    if width == 1:
        return lambda raw: b"true" if raw[-1] & 1 else b"false"
    size = (width + 7) // 8
    return lambda raw: base64(raw[-size:].rjust(size, b"\0")[::-1])


def set_members(values: Sequence[str]) -> FromBytes:
    def read(raw: bytes) -> bytes:
        chosen = from_bytes(raw, "little")
        return dumps(",".join(v for i, v in enumerate(values) if chosen >> i & 1))

    return read


_POINT: Final = Struct("<dd")


def geometry(raw: bytes) -> bytes:
    """SRID and WKB, as the server keeps them."""
    if len(raw) < 4:
        return NULL
    srid, wkb = from_bytes(raw[:4], "little"), raw[4:]
    known = b"%d" % srid if srid else NULL
    return b'{"wkb":%b,"srid":%b}' % (base64(wkb), known)


def point(raw: bytes) -> bytes:
    if len(raw) < 25:
        return NULL
    x, y = _POINT.unpack_from(raw, 9)
    rest = geometry(raw)
    return b'{"x":%b,"y":%b,%b' % (dumps(x), dumps(y), rest[1:])


def uuid(raw: bytes) -> bytes:
    return b'"%b"' % str(UUID(bytes=raw.ljust(16, b"\0"))).encode()


def inet6(raw: bytes) -> bytes:
    return b'"%b"' % inet6_string(raw.ljust(16, b"\0")).encode()


def inet6_string(raw: bytes) -> str:
    """As MariaDB writes it: mapped and compatible IPv4 addresses with dots."""
    if raw[:10] == bytes(10) and raw[10:12] == b"\xff\xff":
        return f"::ffff:{IPv4Address(raw[12:])}"
    if raw[:12] == bytes(12) and raw[12:14] != b"\0\0":
        return f"::{IPv4Address(raw[12:])}"
    return IPv6Address(raw).compressed


def inet4(raw: bytes) -> bytes:
    return b'"%b"' % str(IPv4Address(raw.ljust(4, b"\0"))).encode()
