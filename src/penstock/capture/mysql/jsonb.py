"""MySQL's binary JSON as text, spelled as the server spells it."""

from __future__ import annotations

import base64
import struct
from decimal import Decimal
from struct import Struct
from typing import Final

import orjson

from penstock.capture.mysql import values
from penstock.capture.mysql.binlog import BinlogError

_DEPTH_MAX: Final = 128
_SMALL_OBJECT, _LARGE_OBJECT, _SMALL_ARRAY, _LARGE_ARRAY, _LITERAL = 0, 1, 2, 3, 4
_INT16, _UINT16, _INT32, _UINT32, _INT64, _UINT64, _DOUBLE, _STRING, _OPAQUE = (
    5, 6, 7, 8, 9, 10, 11, 12, 15
)  # fmt: skip
_NUMBERS: Final = {
    _INT16: Struct("<h"), _UINT16: Struct("<H"), _INT32: Struct("<i"), _UINT32: Struct("<I"),
    _INT64: Struct("<q"), _UINT64: Struct("<Q"),
}  # fmt: skip
_LITERALS: Final = {0: "null", 1: "true", 2: "false"}
_DECIMAL, _DATE, _DATETIME, _TIMESTAMP, _TIME = 246, 10, 12, 7, 11


def render(data: bytes) -> bytes:
    """The text of a JSON document, as a JSON string: what a change event carries."""
    return orjson.dumps(text(data))


def text(data: bytes) -> str:
    """The text of a JSON document."""
    if not data:
        return "null"
    try:
        return _value(data[0], data, 1, 0)
    except (IndexError, struct.error, KeyError, ValueError):
        raise BinlogError("a JSON document that is damaged") from None


def _value(kind: int, data: bytes, at: int, depth: int) -> str:
    if depth > _DEPTH_MAX:
        raise BinlogError(f"a JSON document deeper than {_DEPTH_MAX}")
    if kind in (_SMALL_OBJECT, _LARGE_OBJECT):
        return _object(data, at, kind == _LARGE_OBJECT, depth)
    if kind in (_SMALL_ARRAY, _LARGE_ARRAY):
        return _array(data, at, kind == _LARGE_ARRAY, depth)
    if kind == _LITERAL:
        return _LITERALS[data[at]]
    if kind in _NUMBERS:
        return str(_NUMBERS[kind].unpack_from(data, at)[0])
    if kind == _DOUBLE:
        return _double(Struct("<d").unpack_from(data, at)[0])
    if kind == _STRING:
        return quoted(_sized(data, at).decode("utf-8", "replace"))
    if kind == _OPAQUE:
        return _opaque(data[at], _sized(data, at + 1))
    raise BinlogError(f"a JSON value of unknown kind {kind}")


def _double(value: float) -> str:
    """As the server writes it: with an exponent only beyond 15 digits before or after the point."""
    negative, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    point = len(digits) + exponent
    sign, text = "-" * negative, "".join(map(str, digits))
    if -15 < point <= 15 or not value:
        fixed = f"{Decimal(repr(value)):f}"
        return fixed if "." in fixed else f"{fixed}.0"
    mantissa = f"{text[0]}.{text[1:]}" if len(text) > 1 else text
    return f"{sign}{mantissa}e{point - 1}"


def quoted(value: str) -> str:
    """A string as the server quotes it."""
    return orjson.dumps(value).decode()


def _sized(data: bytes, at: int) -> bytes:
    size = shift = 0
    while True:
        byte = data[at]
        at += 1
        size |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    if at + size > len(data):
        raise BinlogError("a JSON document that is cut")
    return data[at : at + size]


def _head(data: bytes, at: int, large: bool) -> tuple[int, int]:
    width = 4 if large else 2
    return int.from_bytes(data[at : at + width], "little"), width


def _entry(data: bytes, base: int, at: int, large: bool, depth: int) -> str:
    kind = data[at]
    width = 4 if large else 2
    inline = kind in (_LITERAL, _INT16, _UINT16) or (large and kind in (_INT32, _UINT32))
    place = at + 1 if inline else base + int.from_bytes(data[at + 1 : at + 1 + width], "little")
    return _value(kind, data, place, depth + 1)


def _array(data: bytes, base: int, large: bool, depth: int) -> str:
    count, width = _head(data, base, large)
    at = base + 2 * width
    _within(data, at, count, 1 + width)
    entries = (_entry(data, base, at + i * (1 + width), large, depth) for i in range(count))
    return f"[{', '.join(entries)}]"


def _object(data: bytes, base: int, large: bool, depth: int) -> str:
    count, width = _head(data, base, large)
    keys = base + 2 * width
    entries = keys + count * (width + 2)
    _within(data, keys, count, width + 2)
    _within(data, entries, count, 1 + width)
    out = []
    for i in range(count):
        at = keys + i * (width + 2)
        place = base + int.from_bytes(data[at : at + width], "little")
        size = int.from_bytes(data[at + width : at + width + 2], "little")
        key = data[place : place + size].decode("utf-8", "replace")
        value = _entry(data, base, entries + i * (1 + width), large, depth)
        out.append(f"{quoted(key)}: {value}")
    return f"{{{', '.join(out)}}}"


def _within(data: bytes, at: int, count: int, size: int) -> None:
    if at + count * size > len(data):
        raise BinlogError("a JSON document that is cut")


def _opaque(kind: int, raw: bytes) -> str:
    """Values that JSON itself does not have: decimals, dates, bytes."""
    if kind == _DECIMAL:
        size, read = values.decimal_binary(raw[0], raw[1], "string")
        return read(raw[2 : 2 + size]).decode().strip('"')
    if kind == _TIME:
        packed = int.from_bytes(raw, "little", signed=True)
        value = abs(packed)
        whole = value >> 24
        sign = "-" if packed < 0 else ""
        clock = f"{whole >> 12:02d}:{whole >> 6 & 63:02d}:{whole & 63:02d}"
        return f'"{sign}{clock}.{value & 0xFFFFFF:06d}"'
    if kind in (_DATE, _DATETIME, _TIMESTAMP):
        packed = int.from_bytes(raw, "little", signed=True)
        whole, fraction = packed >> 24, packed & 0xFFFFFF
        months = whole >> 22
        day = f"{months // 13:04d}-{months % 13:02d}-{whole >> 17 & 31:02d}"
        if kind == _DATE:
            return f'"{day}"'
        return (
            f'"{day} {whole >> 12 & 31:02d}:{whole >> 6 & 63:02d}:{whole & 63:02d}.{fraction:06d}"'
        )
    return f'"base64:type{kind}:{base64.b64encode(raw).decode()}"'
