"""Dates, moments, times of day and durations as Debezium writes them, to Arrow's types.

All at once. What a type here does not hold is marked and null: infinity, years before 1 and after
9999, and nanoseconds that are not whole microseconds.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.reading.json_times import (
    SECOND,
    days_of,
    days_of_column,
    micros_of,
    micros_of_column,
    micros_of_number,
)

Mask = npt.NDArray[np.bool_]
Answer = tuple[pa.Array, Mask]

LOCAL: Final = pa.timestamp("us")
INSTANT: Final = pa.timestamp("us", "UTC")
CLOCK: Final = pa.time64("us")
# Of years 1 to 9999: days, and microseconds.
DAYS: Final = (-719_162, 2_932_896)
DAY_US: Final = 86_400_000_000
MICROS: Final = (DAYS[0] * DAY_US, (DAYS[1] + 1) * DAY_US - 1)
_HOUR_US: Final = 3_600_000_000
# The longest text of a moment with Z and whole microseconds.
_PLAIN_SIZE: Final = 27
_TOO_EXACT: Final = r"\.[0-9]{6}[0-9]*[1-9]"
_ZONE: Final = r"[T ][0-9:.]+(?:Z|[+-][0-9]{2}(?::?[0-9]{2}){0,2})$"


def _numbers(values: pa.Array) -> tuple[npt.NDArray[np.int64], Mask]:
    there = np.asarray(values.is_valid())
    plain = values.fill_null(0) if values.null_count else values
    return np.asarray(plain).astype(np.int64), there


def _made(numbers: npt.NDArray[Any], there: Mask, unfit: Mask, kind: pa.DataType) -> Answer:
    stored = np.int32 if kind.bit_width == 32 else np.int64
    unfit &= there
    numbers = np.where(there & ~unfit, numbers, 0).astype(stored)
    plain = pa.array(numbers, mask=~there | unfit)
    return plain.view(kind), unfit


def _micros(values: pa.Array, per_us: int, us: int) -> tuple[npt.NDArray[np.int64], Mask, Mask]:
    """Microseconds of numbers, of which `per_us` are one, or each is `us`; which are there, and
    which are no whole microsecond, or more than there are."""
    numbers, there = _numbers(values)
    if per_us > 1:
        unfit: Mask = numbers % per_us != 0
        return numbers // per_us, there, unfit
    most = np.iinfo(np.int64).max // us
    return numbers * us, there, (numbers > most) | (numbers < -most)


def dates(values: pa.Array) -> Answer:
    """Of days since 1970."""
    numbers, there = _numbers(values)
    return _made(numbers, there, (numbers < DAYS[0]) | (numbers > DAYS[1]), pa.date32())


def moments(values: pa.Array, *, per_us: int = 1, us: int = 1) -> Answer:
    """Without a zone, of units since 1970."""
    numbers, there, unfit = _micros(values, per_us, us)
    return _made(numbers, there, unfit | (numbers < MICROS[0]) | (numbers > MICROS[1]), LOCAL)


def seconds(values: pa.Array) -> Answer:
    """Of floats that count seconds since 1970, as Python's do: what is less than a microsecond is
    cut off."""
    there = np.asarray(values.is_valid())
    given = values.cast(pa.string()).cast(pa.float64()).to_pylist()
    found = [None if each is None else micros_of_number(each, SECOND, 1) for each in given]
    unfit = np.array([each is None for each in found], np.bool_)
    numbers = np.array([each or 0 for each in found], np.int64)
    unfit |= (numbers < MICROS[0]) | (numbers > MICROS[1])
    return _made(numbers, there, unfit, INSTANT)


def instants(texts: pa.StringArray) -> Answer:
    """Of texts with a zone, in ISO 8601."""
    made, unfit = spelled_instants(texts)
    unfit |= np.asarray(pc.fill_null(pc.invert(pc.match_substring_regex(texts, _ZONE)), False))
    if (pc.max(pc.binary_length(texts)).as_py() or 0) > _PLAIN_SIZE:
        unfit |= np.asarray(pc.fill_null(pc.match_substring_regex(texts, _TOO_EXACT), False))
    return _only(made, ~unfit), unfit


def spelled_instants(texts: pa.StringArray) -> Answer:
    """Of texts that Spark takes for timestamps; without a zone they are UTC."""
    there = np.asarray(texts.is_valid())
    numbers, fits = micros_of_column(texts)
    for place in np.flatnonzero(there & ~fits).tolist():
        found = micros_of(texts[place].as_py())
        if found is not None:
            numbers[place], fits[place] = found, True
    unfit = ~fits | (numbers < MICROS[0]) | (numbers > MICROS[1])
    return _made(numbers, there, unfit, INSTANT)


def spelled_dates(texts: pa.StringArray) -> Answer:
    there = np.asarray(texts.is_valid())
    numbers, fits = days_of_column(texts)
    for place in np.flatnonzero(there & ~fits).tolist():
        found = days_of(texts[place].as_py())
        if found is not None:
            numbers[place], fits[place] = found, True
    return _made(numbers, there, ~fits | (numbers < DAYS[0]) | (numbers > DAYS[1]), pa.date32())


def clocks(values: pa.Array, *, per_us: int = 1, us: int = 1) -> Answer:
    """Times of a day: what is negative, or a day and longer, is none."""
    numbers, there, unfit = _micros(values, per_us, us)
    return _made(numbers, there, unfit | (numbers < 0) | (numbers >= DAY_US), CLOCK)


def clock_texts(values: pa.Array, *, per_us: int = 1, us: int = 1) -> Answer:
    """HH:MM:SS.ffffff; a duration, which MySQL's TIME may be, with a sign and more hours."""
    numbers, there, unfit = _micros(values, per_us, us)
    unfit &= there
    hours, rest = np.divmod(np.abs(numbers), _HOUR_US)
    shown = pa.array(rest.astype(np.int64)).view(CLOCK).cast(pa.string())
    tail = pc.utf8_slice_codeunits(shown, 2)
    head = pc.utf8_lpad(pa.array(hours).cast(pa.string()), 2, "0")
    sign = pc.if_else(pa.array(numbers < 0), "-", "")
    return _only(pc.binary_join_element_wise(sign, head, tail, ""), there & ~unfit), unfit


def duration_texts(values: pa.Array, *, per_us: int = 1) -> Answer:
    """ISO 8601 in hours, minutes and seconds, each with the sign: PT1H30M, PT-0.5S.

    The smallest and the largest number are infinities.
    """
    numbers, there = _numbers(values)
    ends = np.iinfo(np.int64)
    unfit = there & ((numbers == ends.min) | (numbers == ends.max))
    size = np.abs(np.where(unfit, 0, numbers))
    digits = 6 if per_us == 1 else 9
    seconds, part = np.divmod(size, 10**digits)
    hours, seconds = np.divmod(seconds, 3600)
    minutes, seconds = np.divmod(seconds, 60)
    sign = pc.if_else(pa.array(numbers < 0), "-", "")

    def piece(count: npt.NDArray[np.int64], unit: str) -> pa.Array:
        text = pc.binary_join_element_wise(sign, pa.array(count).cast(pa.string()), unit, "")
        return pc.if_else(pa.array(count != 0), text, "")

    fraction = pc.utf8_rtrim(pc.utf8_lpad(pa.array(part).cast(pa.string()), digits, "0"), "0")
    fraction = pc.if_else(
        pa.array(part != 0), pc.binary_join_element_wise(".", fraction, ""), ""
    )  # fmt: skip
    whole = pa.array(seconds).cast(pa.string())
    last = pc.binary_join_element_wise(sign, whole, fraction, "S", "")
    shows = (seconds != 0) | (part != 0) | ((hours == 0) & (minutes == 0))
    last = pc.if_else(pa.array(shows), last, "")
    made = pc.binary_join_element_wise("PT", piece(hours, "H"), piece(minutes, "M"), last, "")
    return _only(made, there & ~unfit), unfit


def texts_of(moments_: pa.Array) -> pa.StringArray:
    """Moments as 2026-01-02T03:04:05.678901, with a Z if they have a zone."""
    zoned = moments_.type.tz is not None
    plain = moments_.cast(LOCAL) if zoned else moments_
    text = pc.replace_substring(plain.cast(pa.string()), " ", "T")
    return pc.binary_join_element_wise(text, "Z", "") if zoned else text


def _only(texts: pa.Array, keep: Mask) -> pa.Array:
    return texts if keep.all() else pc.if_else(pa.array(keep), texts, None)
