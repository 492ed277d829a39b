"""Aggregates over how often each value occurs: distinct, top, quantiles.

Spark counts each value within a key and window, and what is kept is a row for each value with its
count, which is merged by addition. Approximate quantiles keep counts of buckets that grow by a
fixed ratio in the place of values: a sketch (DDSketch) that merges without loss. Sketches of the
KLL kind, which Spark has built in, draw at random what they keep, so that a replay would answer
otherwise; that is why they are not used here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.state.numbering import whole
from penstock.spark.windows.aggregates import Aggregate
from penstock.spark.windows.grouping import Ints, lists

# Buckets of negative numbers are below zero, those of positive ones above: so they keep the order.
_SHIFT: Final = 1 << 40


@dataclass(frozen=True)
class Counts:
    """The values of some windows, sorted by window and value, with how often each occurs."""

    values: pa.Array
    counts: Ints
    # Where the values of each window begin and end.
    starts: Ints
    ends: Ints


@dataclass(frozen=True)
class Multiset(Aggregate):
    """An aggregate over values with counts."""

    @property
    def refusal(self) -> str:
        return "it is a list or a struct" if pa.types.is_nested(self.type) else ""

    @property
    def counted(self) -> pa.DataType:
        """The type of what is counted."""
        return pa.float64() if pa.types.is_floating(self.type) else self.type

    def value(self, value: Column) -> Column:
        """What is counted: null is not."""
        if pa.types.is_floating(self.type):
            return value.cast("double") + F.lit(0.0)
        return value

    @property
    def shared(self) -> str:
        """The same for aggregates that count the same."""
        return f"{self.column}: values"

    def partials(self, value: Column, order: object) -> dict[str, Column]:
        return {}

    def fields(self) -> dict[str, tuple[pa.DataType, str]]:
        return {}

    def of_counts(self, found: Counts) -> pa.Array:
        """The value of each window."""
        raise NotImplementedError


@dataclass(frozen=True)
class Distinct(Multiset):
    """How many different values, exactly."""

    @property
    def result(self) -> pa.DataType:
        return pa.int64()

    def of_counts(self, found: Counts) -> pa.Array:
        return pa.array(found.ends - found.starts)


@dataclass(frozen=True)
class TopK(Multiset):
    """The most frequent values with their counts, exactly; of equal counts the lesser value."""

    k: int = 10

    @property
    def refusal(self) -> str:
        return super().refusal or ("" if self.k >= 1 else f"k={self.k} is less than 1")

    @property
    def result(self) -> pa.DataType:
        # Arrow and Spark write such a type alike only with these names and nulls.
        item = pa.struct([("value", self.counted), ("count", pa.int64())])
        return pa.list_(item)

    def of_counts(self, found: Counts) -> pa.Array:
        sizes = found.ends - found.starts
        window = np.repeat(np.arange(len(sizes)), sizes)
        # Values are sorted already, so that a stable sort leaves the lesser first.
        order = np.lexsort((-found.counts, window))
        rank = np.arange(len(order)) - np.repeat(found.starts, sizes)
        chosen = order[rank < self.k]
        items = pa.StructArray.from_arrays(
            [found.values.take(pa.array(chosen)), pa.array(found.counts[chosen])],
            names=["value", "count"],
        )
        return lists(items, np.cumsum(np.minimum(sizes, self.k)))


def _ranked(found: Counts, rank: Ints) -> Ints:
    """Where in each window the value with a rank (from 0) is."""
    upto = np.cumsum(found.counts)
    before = np.where(found.starts > 0, upto[np.maximum(found.starts - 1, 0)], 0)
    return np.searchsorted(upto, before + rank, side="right").astype(np.int64)


def _sizes(found: Counts) -> Ints:
    upto = np.concatenate([[0], np.cumsum(found.counts)])
    return np.asarray(upto[found.ends] - upto[found.starts], dtype=np.int64)


@dataclass(frozen=True)
class Quantile(Multiset):
    """The quantile, exactly; between two values the line between them (SQL's percentile_cont)."""

    p: float = 0.5

    @property
    def refusal(self) -> str:
        if not 0 <= self.p <= 1:
            return f"p={self.p} is not between 0 and 1"
        if not (pa.types.is_integer(self.type) or pa.types.is_floating(self.type)
                or pa.types.is_decimal(self.type)):  # fmt: skip
            return "it is not a number"
        return ""

    @property
    def counted(self) -> pa.DataType:
        return pa.float64()

    @property
    def result(self) -> pa.DataType:
        return pa.float64()

    @property
    def shared(self) -> str:
        return f"{self.column}: numbers"

    def value(self, value: Column) -> Column:
        x = value.cast("double") + F.lit(0.0)
        return F.when(~F.isnan(x), x)

    def of_counts(self, found: Counts) -> pa.Array:
        n = _sizes(found)
        some = n > 0
        at = self.p * np.maximum(n - 1, 0)
        low = np.floor(at).astype(np.int64)
        values = self.numbers_of(found.values)
        if not len(values):
            return pa.nulls(len(n), pa.float64())
        end = len(values) - 1
        below = values[np.minimum(_ranked(found, low), end)]
        above = values[np.minimum(_ranked(found, np.minimum(low + 1, np.maximum(n - 1, 0))), end)]
        share = at - low
        # Where both are the same the line is flat, at infinity too.
        line = np.where(below == above, below, below + (above - below) * share)
        return pa.array(line, mask=~some)

    def numbers_of(self, values: pa.Array) -> np.ndarray[Any, Any]:
        return np.asarray(whole(values).to_numpy(zero_copy_only=False), dtype=np.float64)


@dataclass(frozen=True)
class ApproxQuantile(Quantile):
    """The quantile from buckets: off by at most `accuracy` of the value itself."""

    accuracy: float = 0.01

    @property
    def refusal(self) -> str:
        if not 1e-5 <= self.accuracy <= 0.5:
            return f"accuracy={self.accuracy} is not between 0.00001 and 0.5"
        return super().refusal

    @property
    def error(self) -> str:
        return f"at most {self.accuracy:.3%} of the value at its rank, always"

    @property
    def counted(self) -> pa.DataType:
        return pa.int64()

    @property
    def shared(self) -> str:
        return f"{self.column}: buckets of {self.accuracy}"

    @property
    def _gamma(self) -> float:
        return (1 + self.accuracy) / (1 - self.accuracy)

    def value(self, value: Column) -> Column:
        x = value.cast("double")
        # Denormal and infinite numbers count as the least and greatest that have a bucket.
        size = F.least(F.greatest(F.abs(x), F.lit(1e-300)), F.lit(1e300))
        bucket = F.ceil(F.log(size) / F.lit(float(np.log(self._gamma)))).cast("bigint")
        code = bucket + F.lit(_SHIFT)
        signed = F.when(x > 0, code).when(x < 0, -code).otherwise(F.lit(0).cast("bigint"))
        return F.when(x.isNotNull() & ~F.isnan(x), signed)

    def of_counts(self, found: Counts) -> pa.Array:
        n = _sizes(found)
        if not len(found.values):
            return pa.nulls(len(n), pa.float64())
        rank = np.maximum(np.ceil(self.p * n).astype(np.int64) - 1, 0)
        at = np.minimum(_ranked(found, rank), len(found.values) - 1)
        codes = np.asarray(found.values.to_numpy(zero_copy_only=False), dtype=np.int64)[at]
        gamma = self._gamma
        size = 2 * np.power(gamma, (np.abs(codes) - _SHIFT).astype(np.float64)) / (gamma + 1)
        return pa.array(np.where(codes == 0, 0.0, np.sign(codes) * size), mask=n == 0)
