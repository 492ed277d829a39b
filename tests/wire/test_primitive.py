"""Variable-length integers and compact strings."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire import WireError
from penstock.wire.primitive import (
    decode_compact_string,
    decode_uvarint,
    decode_varint,
    encode_compact_string,
    encode_uvarint,
    encode_varint,
    skip_tags,
    unzigzag,
    zigzag,
)


@given(st.integers(0, (1 << 64) - 1))
def test_unsigned_round_trip(value: int) -> None:
    data = encode_uvarint(value)
    assert len(data) == max(1, -(-value.bit_length() // 7))
    assert decode_uvarint(b"." + data, 1, bits=64) == (value, 1 + len(data))
    for size in range(len(data)):
        with pytest.raises(WireError):
            decode_uvarint(data[:size], 0, bits=64)


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_signed_round_trip(value: int) -> None:
    assert unzigzag(zigzag(value)) == value
    data = encode_varint(value)
    assert decode_varint(memoryview(data), 0, bits=64) == (value, len(data))


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (0, b"\0"),
        (127, b"\x7f"),
        (128, b"\x80\1"),
        (300, b"\xac\2"),
        (2**32 - 1, b"\xff" * 4 + b"\x0f"),
    ],
)
def test_known_unsigned(value: int, data: bytes) -> None:
    assert encode_uvarint(value) == data
    assert decode_uvarint(data, 0) == (value, len(data))


@pytest.mark.parametrize(("value", "data"), [(0, b"\0"), (-1, b"\1"), (1, b"\2"), (-64, b"\x7f")])
def test_known_signed(value: int, data: bytes) -> None:
    assert encode_varint(value) == data


def test_out_of_range_is_refused() -> None:
    for data in (b"\xff" * 5 + b"\1", b"\xff" * 4 + b"\x10", b"\x80" * 100):
        with pytest.raises(WireError):
            decode_uvarint(data, 0)
    for value in (-1, 1 << 64):
        with pytest.raises(WireError):
            encode_uvarint(value)


@given(st.none() | st.text(max_size=200))
def test_compact_string_round_trip(value: str | None) -> None:
    data = encode_compact_string(value)
    assert decode_compact_string(data, 0) == (value, len(data))
    for size in range(len(data)):
        with pytest.raises(WireError):
            decode_compact_string(data[:size], 0)


def test_bad_compact_strings_are_refused() -> None:
    with pytest.raises(WireError):
        encode_compact_string("x" * 32768)
    with pytest.raises(WireError):
        decode_compact_string(encode_uvarint(32769) + b"x" * 32768, 0)
    with pytest.raises(WireError):
        decode_compact_string(b"\2\xff", 0)


@given(st.binary(max_size=40))
def test_skipping_tags_never_leaves_the_buffer(data: bytes) -> None:
    with suppress(WireError):
        assert 0 < skip_tags(data, 0) <= len(data)
