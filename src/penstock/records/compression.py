"""The five codecs of the Kafka protocol, as clients write them.

Only those who open batches come here; on the way through the broker batches stay compressed. So
the library behind it is imported where it is used: a broker starts without it.
Decompression is bounded: a batch that claims to unfold into more than `limit` bytes is refused.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from typing import Final

from penstock.errors import CorruptBatchError

NONE: Final = 0
GZIP: Final = 1
SNAPPY: Final = 2
LZ4: Final = 3
ZSTD: Final = 4

NAMES: Final = {NONE: "none", GZIP: "gzip", SNAPPY: "snappy", LZ4: "lz4", ZSTD: "zstd"}
CODES: Final = {name: code for code, name in NAMES.items()}

DEFAULT_LIMIT_BYTES: Final = 256 << 20

# Java clients write snappy in blocks behind this header (magic, version, compatible version).
_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_BYTES: Final = 32 * 1024


def compress(codec: int, data: bytes | memoryview, level: int | None = None) -> bytes:
    """`data` under `codec`, in the framing that every Kafka client reads.

    A `level` is the codec's own; snappy has none.
    """
    import cramjam

    match codec:
        case 0:
            return bytes(data)
        case 1:
            return bytes(cramjam.gzip.compress(data, level))
        case 2:
            return _snappy_compress(data)
        case 3:
            # Kafka's Java reader refuses frames whose blocks refer to earlier ones. The default
            # level is the thorough kind of LZ4: three times the work for a tenth less.
            lz4 = cramjam.lz4.Compressor(level=1 if level is None else level, block_linked=False)
            lz4.compress(bytes(data))
            return bytes(lz4.finish())
        case 4:
            return bytes(cramjam.zstd.compress(data, level))
    raise CorruptBatchError(f"unknown compression codec {codec}")


def decompress(
    codec: int, data: bytes | memoryview, limit: int = DEFAULT_LIMIT_BYTES
) -> bytes | memoryview:
    """What `data` unfolds to; CorruptBatchError if it is damaged or larger than `limit`."""
    if codec == NONE:
        return data
    import cramjam

    try:
        if codec == GZIP:
            return _gunzip(data, limit)
        if codec == SNAPPY:
            return _snappy_decompress(bytes(data), limit)
        if codec == LZ4:
            return _bounded(cramjam.lz4.decompress_into, data, limit)
        if codec == ZSTD:
            return _bounded(cramjam.zstd.decompress_into, data, limit)
    except (cramjam.DecompressionError, zlib.error, struct.error, IndexError) as error:
        name = NAMES[codec]
        raise CorruptBatchError(f"{name} data does not decompress: {error}") from error
    raise CorruptBatchError(f"unknown compression codec {codec}")


def _bounded(decompress_into: object, data: bytes | memoryview, limit: int) -> memoryview:
    """Try growing buffers up to the limit: the formats need not state the unfolded size."""
    import cramjam

    assert callable(decompress_into)
    size = min(limit, max(64 * 1024, len(data) * 6))
    while True:
        # Large ones from the system, which gives pages only as they are written: damaged data
        # ends early and must not cost the limit.
        target = bytearray(size) if size <= 1 << 20 else mmap.mmap(-1, size)
        try:
            written = decompress_into(data, target)
        except cramjam.DecompressionError:
            if size >= limit:
                raise
        else:
            return memoryview(target)[:written]
        size = min(limit, size * 4)


def _gunzip(data: bytes | memoryview, limit: int) -> bytes:
    inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    out = inflater.decompress(data, limit)
    if inflater.unconsumed_tail:
        raise CorruptBatchError(f"gzip data unfolds to more than {limit} bytes")
    if not inflater.eof:
        raise CorruptBatchError("gzip data is cut short")
    return out


def _snappy_compress(data: bytes | memoryview) -> bytes:
    import cramjam

    parts = [_XERIAL_HEADER]
    for at in range(0, len(data), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(data[at : at + _XERIAL_BLOCK_BYTES]))
        parts += [struct.pack(">i", len(block)), block]
    return b"".join(parts)


def _snappy_decompress(data: bytes, limit: int) -> bytes:
    if not data.startswith(_XERIAL_MAGIC):
        return _snappy_block(data, limit)
    parts: list[bytes] = []
    total, at = 0, len(_XERIAL_HEADER)
    while at < len(data):
        (length,) = struct.unpack_from(">i", data, at)
        at += 4
        if not 0 < length <= len(data) - at:
            raise CorruptBatchError(f"snappy block of {length} bytes does not fit")
        parts.append(_snappy_block(data[at : at + length], limit - total))
        total += len(parts[-1])
        at += length
    return b"".join(parts)


def _snappy_block(data: bytes, limit: int) -> bytes:
    import cramjam

    # A raw block opens with its unfolded size as a varint.
    size = shift = 0
    for at in range(min(5, len(data))):
        size |= (data[at] & 0x7F) << shift
        if data[at] < 0x80:
            break
        shift += 7
    if size > limit:
        raise CorruptBatchError(f"snappy data unfolds to more than {limit} bytes")
    return bytes(cramjam.snappy.decompress_raw(data))
