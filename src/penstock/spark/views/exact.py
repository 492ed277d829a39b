"""Sums of floats without rounding, so that what is taken away again leaves nothing behind.

A finite float is a whole number of 2**-1074, and Python's integers have no limit: the sum of a
group is such an integer, kept as its bytes. It does not depend on the order, nor on how rows were
spread over micro-batches. Infinities and NaN are counted beside it. Only the answer is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.spark.views.columns import Indices

_SCALE: Final = 1074
_ONE: Final = 1 << _SCALE
# The parts of a kept sum: how many NaN, infinities above and below, and zero bits left out.
_HEAD: Final = 8
TYPE: Final = pa.binary()

_Sum = tuple[int, int, int, int]  # the sum, NaN, +inf, -inf
_NOTHING: Final[_Sum] = (0, 0, 0, 0)


def added(old: pa.Array, numbers: Indices, values: pa.Array, weights: Indices) -> pa.Array:
    """The sums of groups after `values`, each of the group `numbers` says, times its weight."""
    sums = [_read(each) for each in old.to_pylist()]
    floats = values.to_numpy(zero_copy_only=False).astype(np.float64)
    finite = np.isfinite(floats)
    there = ~values.is_null().to_numpy(zero_copy_only=False)
    for at in np.flatnonzero(there):
        group, value, weight = int(numbers[at]), float(floats[at]), int(weights[at])
        total, nan, above, below = sums[group]
        if finite[at]:
            top, bottom = value.as_integer_ratio()
            total += weight * top * (_ONE // bottom)
        elif math.isnan(value):
            nan += weight
        elif value > 0:
            above += weight
        else:
            below += weight
        sums[group] = total, nan, above, below
    return pa.array([_written(each) for each in sums], TYPE)


def rounded(kept: pa.Array, counts: Sequence[int] | None = None) -> list[float]:
    """The nearest floats to the sums; with counts, to the averages."""
    found = []
    for at, each in enumerate(kept.to_pylist()):
        total, nan, above, below = _read(each)
        if nan or (above and below):
            found.append(math.nan)
        elif above or below:
            found.append(math.inf if above else -math.inf)
        else:
            found.append(_divided(total, _ONE * (counts[at] or 1 if counts is not None else 1)))
    return found


def _divided(top: int, bottom: int) -> float:
    try:
        return top / bottom
    except OverflowError:
        return math.inf if top > 0 else -math.inf


def _read(kept: Any) -> _Sum:
    if kept is None:
        return _NOTHING
    nan, above, below, zeros = (
        int.from_bytes(kept[at : at + _HEAD], "little") for at in range(0, 4 * _HEAD, _HEAD)
    )
    return int.from_bytes(kept[4 * _HEAD :], "little", signed=True) << zeros, nan, above, below


def _written(kept: _Sum) -> bytes:
    total, *counts = kept
    zeros = (total & -total).bit_length() - 1 if total else 0
    short = total >> zeros
    head = b"".join(each.to_bytes(_HEAD, "little") for each in (*counts, zeros))
    return head + short.to_bytes(short.bit_length() // 8 + 1, "little", signed=True)
