"""Sums of doubles that do not depend on the order of addition.

Addition of doubles rounds, so that a sum depends on the order, and with it on where micro-batches
end: a replay would differ in the last digits. Here every double is first cut, exactly, into six
integers of 32 bits each, which stand for multiples of 2^64, 2^32, 1, 2^-32, 2^-64 and 2^-96. Those
are added as integers, by Spark and then by us, which no order changes; only the finished sum is
rounded, once, to the nearest double. It is the sum that exact arithmetic gives.

The limits: of each value what is below 2^-96 (about 1.3e-29) is rounded away, value by value, so
still in no order; and a value of 2^96 (about 7.9e28) or more counts as infinite.
"""

from __future__ import annotations

from functools import reduce
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.windows.grouping import Ints

# The exponents of the limbs, largest first.
EXPONENTS: Final = (64, 32, 0, -32, -64, -96)
LIMBS: Final = tuple(f"limb{at}" for at in range(len(EXPONENTS)))
# Sums of what is not finite: infinities and NaN, which no order changes either.
WILD: Final = "wild"
LIMIT: Final = 2.0**96
_LIMB: Final = 2.0**32

Floats = NDArray[np.float64]


def partials(value: Column) -> dict[str, Column]:
    """The limbs of a group's sum, and what is not finite, for Spark to compute."""
    x = value.cast("double")
    tame = F.abs(x) < F.lit(LIMIT)  # NaN is greater than everything in Spark
    upper: Column | None = None
    found = {}
    for name, exponent in zip(LIMBS, EXPONENTS, strict=True):
        rounded = _rounded(x, exponent)
        part = rounded if upper is None else rounded - upper
        scaled = (part * F.lit(2.0**-exponent)).cast("bigint")
        found[name] = F.coalesce(F.sum(F.when(tame, scaled)), F.lit(0).cast("bigint"))
        upper = rounded
    endless = x.isNotNull() & ~tame
    as_endless = F.when(F.isnan(x), x).otherwise(x * F.lit(float("inf")))
    found[WILD] = F.coalesce(F.sum(F.when(endless, as_endless)), F.lit(0.0))
    return found


def _rounded(x: Column, exponent: int) -> Column:
    """x to a multiple of 2^exponent. What is large is one, and what is not loses its end so."""
    magic = F.lit(1.5 * 2.0 ** (52 + exponent))
    return F.when(F.abs(x) < F.lit(2.0 ** (51 + exponent)), (x + magic) - magic).otherwise(x)


def limbs_of(values: Floats) -> tuple[list[Ints], Floats]:
    """The same for values here: limbs of each, and what is not finite."""
    tame = np.abs(values) < LIMIT
    x = np.where(tame, values, 0.0)
    upper = np.zeros(len(x))
    found = []
    for exponent in EXPONENTS:
        magic = 1.5 * 2.0 ** (52 + exponent)
        rounded = np.where(np.abs(x) < 2.0 ** (51 + exponent), (x + magic) - magic, x)
        found.append(((rounded - upper) * 2.0**-exponent).astype(np.int64))
        upper = rounded
    with np.errstate(invalid="ignore"):
        wild = np.where(tame, 0.0, np.where(np.isnan(values), values, values * np.inf))
    return found, wild


def carried(limbs: list[Ints]) -> list[Ints]:
    """The same sums with each limb but the first between 0 and 2^32: room to add again."""
    found = [each.copy() for each in limbs]
    for at in range(len(found) - 1, 0, -1):
        carry = found[at] >> 32
        found[at] -= carry << 32
        found[at - 1] += carry
    return found


def finished(limbs: list[Ints], wild: Floats, divisors: Ints | None) -> Floats:
    """The sums, or the averages, each rounded once."""
    scale = 1 << -EXPONENTS[-1]
    columns = [each.tolist() for each in limbs]
    by = [scale] * len(wild) if divisors is None else [scale * max(each, 1) for each in
                                                       divisors.tolist()]  # fmt: skip
    sums = [
        reduce(lambda upper, limb: (upper << 32) + limb, row) / divisor
        for row, divisor in zip(zip(*columns, strict=True), by, strict=True)
    ]
    return np.where(wild == 0.0, np.array(sums, dtype=np.float64), wild)


def schema() -> list[tuple[str, pa.DataType]]:
    return [*((each, pa.int64()) for each in LIMBS), (WILD, pa.float64())]
