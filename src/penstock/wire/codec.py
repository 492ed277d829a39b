"""Decoders and encoders, one function per (message class, version), made when first asked for.

Theory: `decoding` and `encoding` write Python source from a class's field descriptions; here the
source is compiled, given its helpers and kept. The set of classes and versions is fixed, so the
caches are bounded.

A decoder takes a buffer and a position, and returns the message and the position after it. Pass
the frame's own bytes or a view of exactly the frame: unless the message carries records, a view is
copied first. Records in a view come out as views of it, without copy, and so live only as long as
the buffer keeps its content. An encoder takes the message and returns its bytes; both raise only
`WireError` for whatever is wrong with the bytes or the values. Touches no sockets and no files.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache, lru_cache

from penstock.errors import WireError
from penstock.wire.message import Message
from penstock.wire.primitive import (
    ONE_BYTE,
    STRING_BYTES_MAX,
    Buffer,
    encode_uvarint,
    long_uvarint,
    skip_tagged_fields,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar
    from uuid import UUID

    M = TypeVar("M", bound=Message)
    Decoder = Callable[[Buffer, int], tuple[M, int]]
    Encoder = Callable[[M], bytes]
    PartsEncoder = Callable[[M], list[Buffer]]

REQUEST_ELEMENTS_MAX = 1 << 20
RESPONSE_ELEMENTS_MAX = 1 << 24
"""How many array elements one message may have in total, however long the frame is. A request
comes from anyone; a response comes from a broker, which may describe a large cluster."""

_decoders: dict[tuple[type[Message], int], Any] = {}
_encoders: dict[tuple[type[Message], int], Any] = {}
_parts_encoders: dict[tuple[type[Message], int], Any] = {}


def decoder(cls: type[M], version: int) -> Decoder[M]:
    """The function that reads this version of this message."""
    found = _decoders.get((cls, version))
    if found is None:
        from penstock.wire.decoding import DecoderSource

        _check_version(cls, version)
        limit = REQUEST_ELEMENTS_MAX if cls.IS_REQUEST else RESPONSE_ELEMENTS_MAX
        source = DecoderSource(cls, version, limit)
        names = _compile(source.lines, source.names, cls, version)
        found = _decoders[cls, version] = names["decode"]
    made: Decoder[M] = found
    return made


def encoder(cls: type[M], version: int) -> Encoder[M]:
    """The function that writes this version of this message into one byte string."""
    found = _encoders.get((cls, version))
    if found is None:
        parts = parts_encoder(cls, version)
        join = b"".join

        def encode(message: M) -> bytes:
            return join(parts(message))

        found = _encoders[cls, version] = encode
    made: Encoder[M] = found
    return made


def parts_encoder(cls: type[M], version: int) -> PartsEncoder[M]:
    """Like `encoder`, but gives the pieces, among them the caller's own records, uncopied."""
    found = _parts_encoders.get((cls, version))
    if found is None:
        from penstock.wire.encoding import EncoderSource

        _check_version(cls, version)
        source = EncoderSource(cls, version)
        names = _compile(source.lines, source.names, cls, version)
        found = _parts_encoders[cls, version] = names["encode_parts"]
    made: PartsEncoder[M] = found
    return made


def _check_version(cls: type[Message], version: int) -> None:
    if not cls.VERSIONS[0] <= version <= cls.UNSTABLE_MAX:
        raise WireError(f"{cls.NAME} has no version {version}")


def _encode_string_length(size_plus_one: int) -> bytes:
    if size_plus_one > STRING_BYTES_MAX + 1:
        raise ValueError(f"string of {size_plus_one - 1} bytes is too long")
    return encode_uvarint(size_plus_one)


def _long_string_length(buf: Buffer, pos: int, first: int) -> tuple[int, int]:
    size_plus_one, pos = long_uvarint(buf, pos, first)
    if size_plus_one > STRING_BYTES_MAX + 1:
        raise WireError(f"string of {size_plus_one - 1} bytes is too long")
    return size_plus_one, pos


@cache
def _helpers() -> dict[str, object]:
    from uuid import UUID  # costs a few ms, and not every process needs a codec

    @lru_cache(maxsize=4096)  # topic ids repeat in every request; building one costs 1 µs
    def uuid_of(raw: bytes) -> UUID:
        return UUID(bytes=raw)

    return {
        "WireError": WireError,
        "new": object.__new__,
        "struct_error": struct.error,
        "unpack_many": struct.unpack_from,
        "pack_many": struct.pack,
        "one_byte": ONE_BYTE,
        "long_uvarint": long_uvarint,
        "long_string_length": _long_string_length,
        "skip_tagged_fields": skip_tagged_fields,
        "encode_uvarint": encode_uvarint,
        "encode_string_length": _encode_string_length,
        "uuid_of": uuid_of,
        "zero_uuid": UUID(int=0),
    }


def _compile(
    lines: list[str], names: dict[str, object], cls: type[Message], version: int
) -> dict[str, Any]:
    scope: dict[str, Any] = {**_helpers(), **names}
    code = compile("\n".join(lines), f"<{cls.NAME} v{version}>", "exec")
    exec(code, scope)
    return scope
