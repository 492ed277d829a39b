"""How fresh a derived store is: how old records were when they were committed, over a minute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

WINDOW_S: Final = 60.0
_SLICES: Final = 12
# Ages from a millisecond to a week, each step 8% above the one before.
_STEP: Final = np.log(1.08)
_BINS: Final = 270


class Freshness:
    """Ages in slices of five seconds, as counts in logarithmic bins."""

    def __init__(self, clock: Any = time.time) -> None:
        self._clock = clock
        self._slices: deque[tuple[int, Any]] = deque(maxlen=_SLICES + 1)

    def add(self, times: Sequence[pa.Array]) -> None:
        """Records with these times (microseconds) were committed now."""
        if not times:
            return
        now = self._clock()
        told = np.concatenate([np.asarray(each.cast(pa.int64())) for each in times])
        ages_ms = np.maximum((now * 1e6 - told) / 1e3, 1.0)
        bins = np.minimum((np.log(ages_ms) / _STEP).astype(np.int64), _BINS - 1)
        counts = np.bincount(bins, minlength=_BINS)
        number = int(now // (WINDOW_S / _SLICES))
        if self._slices and self._slices[-1][0] == number:
            self._slices[-1][1][:] += counts
        else:
            self._slices.append((number, counts))

    def percentiles(self) -> tuple[float, float] | None:
        """The ages in seconds that half, and 99%, of the records were below; None without any."""
        oldest = int(self._clock() // (WINDOW_S / _SLICES)) - _SLICES
        counts = [counts for number, counts in self._slices if number >= oldest]
        if not counts:
            return None
        total = np.cumsum(np.sum(counts, axis=0))
        p50, p99 = (_age_s(int(np.searchsorted(total, share * total[-1]))) for share in (0.5, 0.99))
        return p50, p99


def _age_s(number: int) -> float:
    return round(float(np.exp((number + 0.5) * _STEP)) / 1e3, 4)
