"""Approximate aggregates of a fixed size: distinct counts, frequencies, membership.

Spark's own sketches where it has them, and merged so that the order never shows: HyperLogLog
(Apache DataSketches, merged by its Python package, which reads the same bytes), count-min (Spark's
format, added up by columns); the Bloom filter is ours, since Spark's is not open to queries.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import datasketches  # type: ignore[import-untyped]
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.state.numbering import whole
from penstock.spark.windows.aggregates import Aggregate
from penstock.spark.windows.errors import WindowError
from penstock.spark.windows.grouping import Groups

_COUNT_MIN_SEED: Final = 42
_COUNT_MIN_VERSION: Final = 1
_PRIME: Final = (1 << 31) - 1
_MOST_BLOOM_BITS: Final = 1 << 27


@dataclass(frozen=True)
class Sketch(Aggregate):
    """Bytes that are merged by a function of ours."""

    @property
    def refusal(self) -> str:
        kind = self.type
        fit = pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_binary(kind)
        return "" if fit else "it is neither an integer nor text nor bytes: cast it to a string"

    def fields(self) -> dict[str, tuple[pa.DataType, str]]:
        return {"sketch": (pa.binary(), "")}

    def merged(self, rows: pa.Table, at: str, groups: Groups) -> dict[str, pa.Array]:
        parts = whole(rows[at + "sketch"]).take(pa.array(groups.order)).to_pylist()
        found = []
        for start, end in zip(groups.starts.tolist(), groups.ends.tolist(), strict=True):
            some = [each for each in parts[start:end] if each is not None]
            found.append(some[0] if len(some) == 1 else self.united(some) if some else None)
        return {"sketch": pa.array(found, pa.binary())}

    def united(self, parts: list[bytes]) -> bytes:
        """One sketch for what several have seen."""
        raise NotImplementedError


@dataclass(frozen=True)
class ApproxDistinct(Sketch):
    """How many different values, by HyperLogLog with 2^precision registers."""

    precision: int = 12

    @property
    def refusal(self) -> str:
        fit = 4 <= self.precision <= 21
        return super().refusal if fit else f"precision={self.precision} is not between 4 and 21"

    @property
    def error(self) -> str:
        return f"standard error {1.04 / math.sqrt(1 << self.precision):.2%} of the count"

    @property
    def result(self) -> pa.DataType:
        return pa.int64()

    def partials(self, value: Column, order: Sequence[Column]) -> dict[str, Column]:
        if pa.types.is_integer(self.type):
            value = value.cast("bigint")
        return {"sketch": F.hll_sketch_agg(value, F.lit(self.precision))}

    def _union(self, parts: list[bytes]) -> Any:
        union = datasketches.hll_union(self.precision)
        for each in parts:
            union.update(datasketches.hll_sketch.deserialize(each))
        return union

    def united(self, parts: list[bytes]) -> bytes:
        return bytes(self._union(parts).get_result(datasketches.HLL_8).serialize_compact())

    def finished(self, rows: pa.Table, at: str) -> pa.Array:
        # Through a union even if there is one part: what never was merged estimates otherwise.
        return pa.array(
            [round(self._union([each]).get_estimate()) if each is not None else 0
             for each in rows[at + "sketch"].to_pylist()],
            pa.int64(),
        )  # fmt: skip


@dataclass(frozen=True)
class CountMin(Sketch):
    """How often values occur, never too low: a sketch, or estimates of the values in `of`."""

    of: tuple[str | int, ...] = ()
    relative_error: float = 0.001
    confidence: float = 0.99

    @property
    def refusal(self) -> str:
        if not (0 < self.relative_error < 1 and 0 < self.confidence < 1):
            return "relative_error and confidence must be between 0 and 1"
        return super().refusal

    @property
    def error(self) -> str:
        return (
            f"never below, and with probability {self.confidence} at most "
            f"{self.relative_error:.3%} of all counts above"
        )

    @property
    def result(self) -> pa.DataType:
        return pa.map_(pa.string(), pa.int64()) if self.of else pa.binary()

    def partials(self, value: Column, order: Sequence[Column]) -> dict[str, Column]:
        sketch = F.count_min_sketch(
            value.cast("bigint") if pa.types.is_integer(self.type) else value,
            F.lit(self.relative_error), F.lit(self.confidence), F.lit(_COUNT_MIN_SEED),
        )  # fmt: skip
        return {"sketch": sketch}

    def united(self, parts: list[bytes]) -> bytes:
        tables = [_Table.read(each) for each in parts]
        return tables[0].plus(tables[1:]).write()

    def finished(self, rows: pa.Table, at: str) -> pa.Array:
        sketches = rows[at + "sketch"].to_pylist()
        if not self.of:
            return pa.array(sketches, pa.binary())
        found = [
            None if each is None else [(str(item), frequency(each, item)) for item in self.of]
            for each in sketches
        ]
        return pa.array(found, self.result)


@dataclass(frozen=True)
class _Table:
    """A count-min sketch as Spark writes it."""

    total: int
    multipliers: tuple[int, ...]
    counts: NDArray[np.int64]

    @classmethod
    def read(cls, data: bytes) -> _Table:
        version, total, depth, width = struct.unpack_from(">iqii", data)
        if version != _COUNT_MIN_VERSION:
            raise WindowError(f"a count-min sketch is of version {version}, which is not known")
        head = 20
        multipliers = struct.unpack_from(f">{depth}q", data, head)
        cells = np.frombuffer(data, ">i8", depth * width, head + 8 * depth)
        return cls(total, multipliers, cells.astype(np.int64).reshape(depth, width))

    def plus(self, others: list[_Table]) -> _Table:
        counts = self.counts.copy()
        for each in others:
            counts += each.counts
        return _Table(self.total + sum(each.total for each in others), self.multipliers, counts)

    def write(self) -> bytes:
        depth, width = self.counts.shape
        head = struct.pack(f">iqii{depth}q", 1, self.total, depth, width, *self.multipliers)
        return head + self.counts.astype(">i8").tobytes()


def frequency(sketch: bytes, item: str | int | bytes) -> int:
    """How often a count-min sketch has seen a value, at most."""
    table = _Table.read(sketch)
    depth, width = table.counts.shape
    if isinstance(item, int):
        columns = [_of_number(item, each, width) for each in table.multipliers]
    else:
        data = item.encode() if isinstance(item, str) else item
        first = _murmur3(data, 0)
        second = _murmur3(data, first)
        columns = [abs(_signed(first + at * second)) % width for at in range(depth)]
    return int(min(table.counts[row, column] for row, column in enumerate(columns)))


def _of_number(item: int, multiplier: int, width: int) -> int:
    mixed = (multiplier * item) & (2**64 - 1)
    mixed = mixed - 2**64 if mixed >= 2**63 else mixed
    mixed = (mixed + (mixed >> 32)) & _PRIME
    return mixed % width


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value


def _murmur3(data: bytes, seed: int) -> int:
    """Murmur3 of 32 bits as Spark has it: the bytes of the tail are mixed in one by one, signed."""

    def rotated(value: int, by: int) -> int:
        return ((value << by) | (value >> (32 - by))) & 0xFFFFFFFF

    def mixed(hashed: int, word: int) -> int:
        word = rotated((word * 0xCC9E2D51) & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        return (rotated(hashed ^ word, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF

    hashed = seed & 0xFFFFFFFF
    aligned = len(data) - len(data) % 4
    for (word,) in struct.iter_unpack("<I", data[:aligned]):
        hashed = mixed(hashed, word)
    for byte in data[aligned:]:
        hashed = mixed(hashed, (byte - 256 if byte > 127 else byte) & 0xFFFFFFFF)
    hashed ^= len(data)
    hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return _signed(hashed ^ (hashed >> 16))


@dataclass(frozen=True)
class Bloom(Sketch):
    """Which values have occurred: a filter to ask with `may_contain`; never a false no."""

    items: int = 10_000
    false_positives: float = 0.01

    @property
    def refusal(self) -> str:
        if not (self.items >= 1 and 0 < self.false_positives < 1):
            return "items must be at least 1, and false_positives between 0 and 1"
        if self.bits > _MOST_BLOOM_BITS:
            return f"a filter would have {self.bits // 8:,} bytes, and may have 16 MiB"
        return super().refusal

    @property
    def error(self) -> str:
        return (
            f"never a false no; a false yes with probability {self.false_positives} "
            f"once it has {self.items:,} values"
        )

    @property
    def bits(self) -> int:
        needed = -self.items * math.log(self.false_positives) / math.log(2) ** 2
        return max(64, 64 * math.ceil(needed / 64))

    @property
    def hashes(self) -> int:
        return min(20, max(1, round(self.bits / self.items * math.log(2))))

    @property
    def result(self) -> pa.DataType:
        return pa.binary()

    def partials(self, value: Column, order: Sequence[Column]) -> dict[str, Column]:
        return {"hashes": F.collect_set(F.when(value.isNotNull(), F.xxhash64(value)))}

    def fields(self) -> dict[str, tuple[pa.DataType, str]]:
        return {"sketch": (pa.binary(), "")}

    def arrived(self, rows: pa.Table, at: str) -> dict[str, pa.Array]:
        """Filters from the hashes that Spark has collected."""
        found = []
        for each in whole(rows[at + "hashes"]):
            numbers = np.asarray(each.values.to_numpy(zero_copy_only=False), dtype=np.int64)
            bits = np.zeros(self.bits, dtype=np.uint8)
            low, high = numbers & 0x7FFFFFFF, (numbers >> 32) & 0x7FFFFFFF
            for turn in range(self.hashes):
                bits[(low + turn * high) % self.bits] = 1
            found.append(np.packbits(bits, bitorder="little").tobytes())
        return {"sketch": pa.array(found, pa.binary())}

    def united(self, parts: list[bytes]) -> bytes:
        whole_ = np.frombuffer(parts[0], np.uint8).copy()
        for each in parts[1:]:
            whole_ |= np.frombuffer(each, np.uint8)
        return whole_.tobytes()

    def finished(self, rows: pa.Table, at: str) -> pa.Array:
        return whole(rows[at + "sketch"])

    def may_contain(self, sketch: Column, value: Column) -> Column:
        """Whether a filter of this shape may have seen a value, as an expression of Spark."""
        hashed = F.xxhash64(value)
        low = hashed.bitwiseAND(F.lit(0x7FFFFFFF))
        high = F.shiftright(hashed, 32).bitwiseAND(F.lit(0x7FFFFFFF))
        answer = F.lit(True)
        for at in range(self.hashes):
            place = F.pmod(low + F.lit(at) * high, F.lit(self.bits))
            byte = F.substring(sketch, F.floor(place / F.lit(8)).cast("int") + F.lit(1), F.lit(1))
            number = F.conv(F.hex(byte), 16, 10).cast("int")
            power = F.pow(F.lit(2.0), F.pmod(place, F.lit(8))).cast("int")
            answer = answer & (number.bitwiseAND(power) != F.lit(0))
        return F.when(sketch.isNotNull() & value.isNotNull(), answer)
