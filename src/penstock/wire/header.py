"""Request and response headers, by hand: every frame has one.

Theory: a request header has version 2 (with tagged fields) where the API's version is flexible, and
version 1 before; a response header has version 1 or 0 likewise, except that the ApiVersions
response always has version 0, because a client reads it before it knows what the broker speaks.
The client id keeps its two-byte length in every version. Knows the index of APIs and nothing else.
"""

from __future__ import annotations

from struct import Struct as Layout
from struct import error as struct_error

from penstock.errors import WireError
from penstock.wire.index import INDEX
from penstock.wire.primitive import Buffer, skip_tagged_fields

API_VERSIONS = 18

_FIXED = Layout(">hhih")
_CORRELATION = Layout(">i")
_CORRELATION_TAGS = Layout(">ix")
_FLEXIBLE_FROM = {key: row[5] for key, row in INDEX.items()}
_NEVER = 1 << 15


def is_flexible(api_key: int, version: int) -> bool:
    """Whether this version of the API uses compact lengths and tagged fields."""
    return version >= _FLEXIBLE_FROM.get(api_key, _NEVER)


def decode_request_header(buf: Buffer, pos: int) -> tuple[int, int, int, str | None, int]:
    """Read (api key, api version, correlation id, client id, position of the body).

    An API that is not in the index is read as if not flexible: the first three values are right
    whatever follows, which is enough to refuse it.
    """
    try:
        api_key, version, correlation_id, size = _FIXED.unpack_from(buf, pos)
        pos += 10
        client_id = None
        if size >= 0:
            end = pos + size
            if end > len(buf):
                raise WireError("request header: client id runs past the end")
            client_id = str(buf[pos:end], "utf-8")
            pos = end
        elif size != -1:
            raise WireError("request header: negative length of the client id")
        if version >= _FLEXIBLE_FROM.get(api_key, _NEVER):
            tags = buf[pos]
            pos += 1
            if tags:
                pos = skip_tagged_fields(buf, pos, tags)
    except (struct_error, IndexError):
        raise WireError("request header: truncated") from None
    except UnicodeDecodeError:
        raise WireError("request header: client id is not UTF-8") from None
    return api_key, version, correlation_id, client_id, pos


def request_header(
    api_key: int, version: int, correlation_id: int, client_id: str | None = None
) -> bytes:
    """The header that goes before a request's body."""
    name = b"" if client_id is None else client_id.encode()
    size = -1 if client_id is None else len(name)
    try:
        header = _FIXED.pack(api_key, version, correlation_id, size) + name
    except struct_error as e:
        raise WireError(f"request header: cannot be written: {e}") from e
    return header + b"\0" if is_flexible(api_key, version) else header


def response_header(api_key: int, version: int, correlation_id: int) -> bytes:
    """The header that goes before a response's body."""
    if api_key != API_VERSIONS and version >= _FLEXIBLE_FROM.get(api_key, _NEVER):
        return _CORRELATION_TAGS.pack(correlation_id)
    return _CORRELATION.pack(correlation_id)


def decode_response_header(
    api_key: int, version: int, buf: Buffer, pos: int = 0
) -> tuple[int, int]:
    """Read (correlation id, position of the body) of the answer to such a request."""
    try:
        (correlation_id,) = _CORRELATION.unpack_from(buf, pos)
        pos += 4
        if api_key != API_VERSIONS and is_flexible(api_key, version):
            tags = buf[pos]
            pos += 1
            if tags:
                pos = skip_tagged_fields(buf, pos, tags)
    except (struct_error, IndexError):
        raise WireError("response header: truncated") from None
    return correlation_id, pos
