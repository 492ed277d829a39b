"""Variable-length integers and compact strings, for hand-written hot paths and the codec.

Reads take (buffer, position) and return (value, next position). Everything that is wrong with the
input is a `WireError`; no read goes past the end of the buffer, no length is believed before it is
compared with the bytes that are there. Touches nothing but bytes.
"""

from __future__ import annotations

from penstock.errors import WireError

Buffer = bytes | memoryview

STRING_BYTES_MAX = 0x7FFF
"""Kafka's limit for a string, in bytes of UTF-8, whichever length prefix it has."""


def encode_uvarint(value: int) -> bytes:
    """Unsigned LEB128 of a non-negative integer below 2**64."""
    if 0 <= value < 128:
        return ONE_BYTE[value]
    if not 0 <= value < 1 << 64:
        raise WireError(f"{value} is out of range for an unsigned varint")
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


ONE_BYTE = tuple(bytes((i,)) for i in range(128))


def decode_uvarint(buf: Buffer, pos: int, bits: int = 32) -> tuple[int, int]:
    """Read an unsigned varint of at most `bits` bits."""
    try:
        byte = buf[pos]
        if byte < 128:
            return byte, pos + 1
        value, pos = long_uvarint(buf, pos + 1, byte, bits)
    except IndexError:
        raise WireError("truncated varint") from None
    return value, pos


def long_uvarint(buf: Buffer, pos: int, first: int, bits: int = 32) -> tuple[int, int]:
    """Go on with a varint whose first byte had the continuation bit; IndexError if truncated."""
    value = first & 127
    shift = 7
    while True:
        byte = buf[pos]
        pos += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
        if shift >= bits:
            raise WireError("varint is too long")
    if value >> bits:
        raise WireError("varint is out of range")
    return value, pos


def zigzag(value: int) -> int:
    """Map a signed integer to an unsigned one so that small magnitudes stay small."""
    return value << 1 if value >= 0 else (~value << 1) | 1


def unzigzag(value: int) -> int:
    return (value >> 1) ^ -(value & 1)


def encode_varint(value: int) -> bytes:
    """Zigzag varint, as in records."""
    return encode_uvarint(zigzag(value))


def decode_varint(buf: Buffer, pos: int, bits: int = 32) -> tuple[int, int]:
    value, pos = decode_uvarint(buf, pos, bits)
    return (value >> 1) ^ -(value & 1), pos


def encode_compact_string(value: str | None) -> bytes:
    if value is None:
        return b"\0"
    data = value.encode()
    if len(data) > STRING_BYTES_MAX:
        raise WireError(f"string of {len(data)} bytes is too long")
    return encode_uvarint(len(data) + 1) + data


def decode_compact_string(buf: Buffer, pos: int) -> tuple[str | None, int]:
    length, pos = decode_uvarint(buf, pos)
    if length == 0:
        return None, pos
    end = pos + length - 1
    if length > STRING_BYTES_MAX + 1 or end > len(buf):
        raise WireError("string runs past the end")
    try:
        return str(buf[pos:end], "utf-8"), end
    except UnicodeDecodeError:
        raise WireError("string is not UTF-8") from None


def skip_tags(buf: Buffer, pos: int) -> int:
    """Step over a section of tagged fields, known or not."""
    try:
        count = buf[pos]
        pos += 1
        return skip_tagged_fields(buf, pos, count) if count else pos
    except IndexError:
        raise WireError("truncated tagged fields") from None


def skip_tagged_fields(buf: Buffer, pos: int, count: int) -> int:
    """Step over tagged fields after the first byte of their count; IndexError if truncated."""
    end = len(buf)
    if count > 127:
        count, pos = long_uvarint(buf, pos, count)
    for _ in range(count):
        tag = buf[pos]
        pos += 1
        if tag > 127:
            tag, pos = long_uvarint(buf, pos, tag)
        size = buf[pos]
        pos += 1
        if size > 127:
            size, pos = long_uvarint(buf, pos, size)
        pos += size
        if pos > end:
            raise WireError("tagged field runs past the end")
    return pos
