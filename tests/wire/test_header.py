"""Headers: against kio, and on damaged input."""

from __future__ import annotations

import io
from importlib import import_module
from typing import Any

import pytest
from kio.serial import entity_reader, entity_writer

from penstock.wire import (
    APIS,
    Api,
    WireError,
    decode_request_header,
    decode_response_header,
    is_flexible,
    request_header,
    response_header,
)
from tests.wire.samples import name_of, some_versions

API_VERSIONS = 18
PRODUCE = 0


def kio_header(api: Api, version: int, role: str) -> Any:
    """kio's class of the header that goes with this version of the API."""
    module = import_module(f"kio.schema.{api.module}.v{version}.{role}")
    return getattr(module, f"{api.name}{role.title()}").__header_schema__


@pytest.mark.parametrize("api", APIS.values(), ids=name_of)
def test_headers_are_those_of_kio(api: Api) -> None:
    for version in some_versions(range(api.versions[0], api.unstable_max + 1)):
        for client_id in ("me", "", None):
            ours = request_header(api.key, version, 77, client_id)
            theirs = kio_header(api, version, "request")
            entity, size = entity_reader(theirs)(ours, 0)
            assert size == len(ours)
            assert entity.request_api_key == api.key
            assert entity.request_api_version == version
            assert entity.correlation_id == 77
            assert entity.client_id == client_id
            read = decode_request_header(b"??" + ours + b"!", 2)
            assert read == (api.key, version, 77, client_id, 2 + len(ours))

        theirs = kio_header(api, version, "response")
        out = io.BytesIO()
        entity_writer(theirs)(out, theirs(correlation_id=-5))
        assert response_header(api.key, version, -5) == out.getvalue()
        assert decode_response_header(api.key, version, out.getvalue()) == (-5, out.tell())


def test_tagged_fields_of_headers_are_skipped() -> None:
    flexible = request_header(PRODUCE, 9, 1, "c")
    with_tags = flexible[:-1] + b"\1\x09\2ab"
    assert decode_request_header(with_tags, 0) == (PRODUCE, 9, 1, "c", len(with_tags))
    answer = response_header(PRODUCE, 9, 1)[:-1] + b"\1\x09\2ab"
    assert decode_response_header(PRODUCE, 9, answer) == (1, len(answer))


def test_the_header_of_an_api_versions_response_never_has_tags() -> None:
    assert is_flexible(API_VERSIONS, 3)
    assert len(response_header(API_VERSIONS, 3, 1)) == 4
    assert len(response_header(PRODUCE, 9, 1)) == 5


def test_unknown_apis_and_versions_can_be_told_apart() -> None:
    unknown = b"\x7f\xff\0\3\0\0\0\1\xff\xff"
    assert decode_request_header(unknown, 0) == (32767, 3, 1, None, 10)
    assert decode_request_header(b"\0\x12\xff\xff\0\0\0\1\xff\xff", 0)[:2] == (API_VERSIONS, -1)
    future = request_header(API_VERSIONS, 99, 1, None)
    assert decode_request_header(future, 0) == (API_VERSIONS, 99, 1, None, len(future))


def test_damaged_headers_are_refused() -> None:
    good = request_header(PRODUCE, 9, 1, "client")
    for size in range(len(good)):
        with pytest.raises(WireError):
            decode_request_header(memoryview(good)[:size], 0)
    for bad in (b"\xff\xfe", b"\x7f\xff", b"\0\1\xff"):
        with pytest.raises(WireError):
            decode_request_header(good[:8] + bad + b"abc", 0)
    answer = response_header(PRODUCE, 9, 1)
    for size in range(len(answer)):
        with pytest.raises(WireError):
            decode_response_header(PRODUCE, 9, answer[:size])


def test_a_header_that_cannot_be_written_is_a_wire_error() -> None:
    with pytest.raises(WireError):
        request_header(PRODUCE, 9, 1 << 31, "c")
    with pytest.raises(WireError):
        request_header(PRODUCE, 9, 1, "c" * 40_000)
