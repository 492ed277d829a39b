"""Times that a store has no place for: a row with one is put aside, not stored as another time.

Capture gives PostgreSQL's `infinity` as a moment some 292,000 years from now, and its dates before
Christ as days before the year 1.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

_EPOCH_DAY: Final = dt.date(1970, 1, 1)
DAY_US: Final = 86_400_000_000
# The years 1 to 9999, first and last: in days, and in microseconds.
DAY_RANGE: Final = ((dt.date.min - _EPOCH_DAY).days, (dt.date.max - _EPOCH_DAY).days)
US_RANGE: Final = (DAY_RANGE[0] * DAY_US, (DAY_RANGE[1] + 1) * DAY_US - 1)
Unfit = tuple[pa.ChunkedArray, str]
"""Which rows do not fit, true and false, and why."""


@dataclass(frozen=True, slots=True)
class Times:
    """What a store has a place for: the first and the last day and moment, since 1970."""

    days: tuple[int, int]
    moments_us: tuple[int, int]
    told: str

    def unfit(self, rows: pa.Table) -> list[Unfit]:
        """The rows with other times, by columns."""
        return [
            found
            for name, column in zip(rows.column_names, rows.columns, strict=True)
            if (found := self._outside(name, column)) is not None
        ]

    def _outside(self, name: str, column: pa.ChunkedArray) -> Unfit | None:
        kind = column.type
        if pa.types.is_date32(kind):
            numbers, (first, last) = column.cast(pa.int32()), self.days
        elif pa.types.is_timestamp(kind):
            numbers, (first, last) = column.cast(pa.int64()), self.moments_us
        elif pa.types.is_time64(kind):
            numbers, (first, last) = column.cast(pa.int64()), (0, DAY_US - 1)
        else:
            return None
        outside = pc.or_(pc.less(numbers, first), pc.greater(numbers, last))
        what = "is no time of a day" if pa.types.is_time64(kind) else f"is not {self.told}"
        return outside, f"column {name} {what}"


# What is the same text, and in the same order, to all who write times as text.
WRITTEN: Final = Times(DAY_RANGE, US_RANGE, "of the years 1 to 9999")
