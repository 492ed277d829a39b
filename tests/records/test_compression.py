"""The codecs: what every client can read, bounded on the way back."""

from __future__ import annotations

import gzip
import struct
import tracemalloc

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptBatchError
from penstock.records import compression
from penstock.records.compression import GZIP, LZ4, SNAPPY, ZSTD, compress, decompress

PACKING = [GZIP, SNAPPY, LZ4, ZSTD]


@given(st.sampled_from(sorted(compression.NAMES)), st.binary(max_size=500), st.integers(1, 300))
def test_there_and_back(codec: int, data: bytes, times: int) -> None:
    whole = data * times
    packed = compress(codec, whole)
    assert bytes(decompress(codec, packed)) == whole
    assert bytes(decompress(codec, memoryview(packed), limit=max(1, len(whole)))) == whole


@pytest.mark.parametrize("codec", PACKING)
def test_nothing_unfolds_beyond_the_limit(codec: int) -> None:
    packed = compress(codec, bytes(100_000))
    assert len(decompress(codec, packed, limit=100_000)) == 100_000
    for limit in (1, 4096, 99_999):
        with pytest.raises(CorruptBatchError):
            decompress(codec, packed, limit=limit)


def test_a_bomb_costs_no_more_than_the_limit() -> None:
    bomb = compress(GZIP, bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBatchError):
            decompress(GZIP, bomb, limit=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_snappy_block_that_lies_about_its_size() -> None:
    with pytest.raises(CorruptBatchError, match="more than"):
        decompress(SNAPPY, b"\xff\xff\xff\xff\x0f" + b"x", limit=1 << 20)


@pytest.mark.parametrize("codec", PACKING)
@pytest.mark.parametrize("data", [b"", b"x", bytes(40), b"\xff" * 40])
def test_what_is_not_compressed_is_corrupt(codec: int, data: bytes) -> None:
    with pytest.raises(CorruptBatchError):
        decompress(codec, data)


@pytest.mark.parametrize("codec", PACKING)
def test_every_cut_is_found(codec: int) -> None:
    packed = compress(codec, b"some text, some text, some more text" * 9)
    for size in range(1, len(packed)):
        try:
            found = bytes(decompress(codec, packed[:size]))
        except CorruptBatchError:
            continue
        # Snappy's frames have no end mark: at their boundaries a cut is a shorter text.
        assert codec == SNAPPY
        assert len(found) == 0


@pytest.mark.parametrize("codec", [-1, 5, 6, 7])
def test_unknown_codecs(codec: int) -> None:
    with pytest.raises(CorruptBatchError):
        compress(codec, b"x")
    with pytest.raises(CorruptBatchError):
        decompress(codec, b"x")


def test_snappy_in_both_framings() -> None:
    text = b"snappy " * 20_000
    java = compress(SNAPPY, text)
    assert java.startswith(b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1))
    assert bytes(decompress(SNAPPY, java)) == text
    # librdkafka writes one raw block.
    assert bytes(decompress(SNAPPY, bytes(cramjam.snappy.compress_raw(text)))) == text


def test_gzip_is_the_standard_one() -> None:
    assert gzip.decompress(compress(GZIP, b"text" * 100)) == b"text" * 100
    assert bytes(decompress(GZIP, gzip.compress(b"text" * 100))) == b"text" * 100
