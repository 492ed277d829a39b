"""Windows over streams, by event time: tumbling, hopping, session, sliding.

    from penstock.spark import windows as w

    @flow(inputs=[stream("orders", json="...", time="at", lateness="1 minute")], output=topic("n"))
    def per_minute(orders):
        return w.tumbling(orders, "1 minute", by=["country"],
                          values={"orders": w.count(), "total": w.sum("amount")})

What comes out: the columns of `by`, `window_start`, `window_end` (which is not inside), the values,
and `is_final`.

**When.** With `emit="final"` a window comes out once, when the watermark has passed its end, so
that nothing can change it. With `emit="early"` each micro-batch also gives the windows that it has
changed, with `is_final` false: how many such rows there are depends on micro-batches, what the
final ones say does not.

**Stragglers.** A stream takes rows that are late by up to its `lateness`, and its watermark waits
that long. To see windows sooner give `allowed_lateness`, up to the lateness of the stream: windows
are then final that much earlier, and are emitted again with the next `revision` (a column that is
there then) if stragglers change them, until the watermark has passed. How many revisions there are
depends on micro-batches; the last one of each window does not.

**In batch**, over a DataFrame that is no stream, all windows come out as final; if the rows have
the column `_watermark_end`, those that it has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.spark.windows.aggregates import Aggregate, Avg, Count, First, Last, Max, Min, Sum
from penstock.spark.windows.analytics import compare, rate, rolling
from penstock.spark.windows.declare import hopping, session, tumbling
from penstock.spark.windows.dedup import deduplicated
from penstock.spark.windows.errors import WindowError
from penstock.spark.windows.multisets import ApproxQuantile, Distinct, Quantile, TopK
from penstock.spark.windows.sketches import ApproxDistinct, Bloom, CountMin, frequency
from penstock.spark.windows.sliding import sliding

__all__ = [
    "Aggregate", "WindowError", "approx_distinct", "approx_quantile", "avg", "bloom", "compare",
    "count", "count_min", "deduplicated", "distinct", "first", "frequency", "hopping", "last",
    "max", "min", "quantile", "rate", "rolling", "session", "sliding", "sum", "top_k", "tumbling",
]  # fmt: skip


def count(column: Any = None) -> Count:
    """How many events; of a column, how many that are not null."""
    return Count(column)


def sum(column: Any) -> Sum:
    """The exact sum: of integers in 64 bits, of decimals, of doubles rounded once at the end."""
    return Sum(column)


def avg(column: Any) -> Avg:
    """The exact sum by the number of values."""
    return Avg(column)


def min(column: Any) -> Min:
    """The least value."""
    return Min(column)


def max(column: Any) -> Max:
    """The greatest value."""
    return Max(column)


def first(column: Any) -> First:
    """The value of the earliest event."""
    return First(column)


def last(column: Any) -> Last:
    """The value of the latest event."""
    return Last(column)


def distinct(column: Any) -> Distinct:
    """How many different values, exactly: all of them are kept while the window is open."""
    return Distinct(column)


def top_k(column: Any, k: int = 10) -> TopK:
    """The most frequent values with their counts, exactly."""
    return TopK(column, k=k)


def quantile(column: Any, p: float) -> Quantile:
    """A quantile, exactly: all different values are kept while the window is open."""
    return Quantile(column, p=p)


def approx_quantile(column: Any, p: float, *, accuracy: float = 0.01) -> ApproxQuantile:
    """A quantile, off by at most `accuracy` of the value; some hundred numbers are kept."""
    return ApproxQuantile(column, p=p, accuracy=accuracy)


def approx_distinct(column: Any, *, precision: int = 12) -> ApproxDistinct:
    """How many different values, by HyperLogLog of 2^precision bytes: 12 is off by 1.6%."""
    return ApproxDistinct(column, precision=precision)


def count_min(
    column: Any,
    *,
    of: Sequence[str | int] = (),
    relative_error: float = 0.001,
    confidence: float = 0.99,
) -> CountMin:
    """How often values occur: a map for the values in `of`, otherwise a sketch (`frequency`)."""
    return CountMin(column, of=tuple(of), relative_error=relative_error, confidence=confidence)


def bloom(column: Any, *, items: int = 10_000, false_positives: float = 0.01) -> Bloom:
    """Which values have occurred, as a filter to ask with its `may_contain`."""
    return Bloom(column, items=items, false_positives=false_positives)
