"""Sums of doubles that do not depend on the order of addition.

Addition of doubles rounds, so that a sum depends on the order, and with it on where micro-batches
end: a replay would differ in the last digits. Here every double is first cut, exactly, into ten
integers of 32 bits each, which stand for multiples of 2^96, 2^64, 2^32 and so on down to 2^-192.
Those are added as integers, by Spark and then by us, which no order changes; only the finished sum
is rounded, once, to the nearest double. It is the sum that exact arithmetic gives.

The limits: a finite value of 2^128 (3.4e38, as much as a float can be) or more is refused. Of each
value what is below 2^-192 (1.6e-58) is rounded away, value by value, so still in no order, and
counted: a sum so small that it would show is refused as well.
"""

from __future__ import annotations

from functools import reduce
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.state.operator import ADVICE
from penstock.spark.windows.errors import WindowError
from penstock.spark.windows.grouping import Ints

# The exponents of the limbs, largest first.
EXPONENTS: Final = tuple(range(96, -193, -32))
LIMBS: Final = tuple(f"limb{at}" for at in range(len(EXPONENTS)))
# Sums of what is not finite: infinities and NaN, which no order changes either.
WILD: Final = "wild"
# How many values have lost digits.
LOST: Final = "lost"
LIMIT: Final = 2.0**128
# A double has 53 bits. By two more what is lost is less than half of the last.
_SHOWS: Final = 1 << 55
_TOO_LARGE: Final = (
    "a value to be summed is finite, and 2^128 (3.4e38) or more: sums of doubles are exact only "
    "below that"
)
_TOO_SMALL: Final = (
    "a sum of doubles is so small that digits below 2^-192 (1.6e-58), which are not kept, would "
    "show in it"
)
_SCALE: Final = "Sum the column multiplied by a power of two that brings it into the range."

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
    # `penstock run` knows its own errors by their names.
    told = f"{WindowError.__module__}.WindowError: {_TOO_LARGE}\n{ADVICE}{_SCALE}"
    refusal = F.raise_error(F.lit(told))
    endless = F.isnan(x) | (F.abs(x) == F.lit(float("inf")))
    wild = F.when(endless, x).otherwise(refusal.cast("double"))
    found[WILD] = F.coalesce(F.sum(F.when(x.isNotNull() & ~tame, wild)), F.lit(0.0))
    found[LOST] = F.count_if(tame & (x != upper))
    return found


def _rounded(x: Column, exponent: int) -> Column:
    """x to a multiple of 2^exponent. To multiply by a power of two loses nothing."""
    return F.rint(x * F.lit(2.0**-exponent)) * F.lit(2.0**exponent)


def limbs_of(values: Floats) -> tuple[list[Ints], Floats, Ints]:
    """The same for values here: limbs of each, what is not finite, and what has lost digits."""
    tame = np.abs(values) < LIMIT
    if (np.isfinite(values) & ~tame).any():
        raise WindowError(_TOO_LARGE, advice=_SCALE)
    x = np.where(tame, values, 0.0)
    upper = np.zeros(len(x))
    found = []
    for exponent in EXPONENTS:
        rounded = np.rint(x * 2.0**-exponent) * 2.0**exponent
        found.append(((rounded - upper) * 2.0**-exponent).astype(np.int64))
        upper = rounded
    return found, np.where(tame, 0.0, values), (x != upper).astype(np.int64)


def carried(limbs: list[Ints]) -> list[Ints]:
    """The same sums with each limb but the first between 0 and 2^32: room to add again."""
    found = [each.copy() for each in limbs]
    for at in range(len(found) - 1, 0, -1):
        carry = found[at] >> 32
        found[at] -= carry << 32
        found[at - 1] += carry
    return found


def finished(limbs: list[Ints], wild: Floats, lost: Ints, divisors: Ints | None) -> Floats:
    """The sums, or the averages, each rounded once; WindowError if one is not known so exactly."""
    scale = 1 << -EXPONENTS[-1]
    columns = [each.tolist() for each in limbs]
    by = [scale] * len(wild) if divisors is None else [scale * max(each, 1) for each in
                                                       divisors.tolist()]  # fmt: skip
    totals = [reduce(lambda upper, limb: (upper << 32) + limb, row)
              for row in zip(*columns, strict=True)]  # fmt: skip
    for at in np.flatnonzero((lost > 0) & (wild == 0.0)):
        if abs(totals[at]) < int(lost[at]) * _SHOWS:
            raise WindowError(_TOO_SMALL, advice=_SCALE)
    sums = [total / divisor for total, divisor in zip(totals, by, strict=True)]
    return np.where(wild == 0.0, np.array(sums, dtype=np.float64), wild)


def schema() -> list[tuple[str, pa.DataType]]:
    return [*((each, pa.int64()) for each in LIMBS), (WILD, pa.float64()), (LOST, pa.int64())]
