"""Moments and dates of JSON texts, as Spark reads them; the session's zone is UTC.

One text at a time (`micros_of`, `days_of`) by Spark's whole grammar, or a column at once
(`micros_of_column`, `days_of_column`) where the texts have the usual ISO form. The column says
which texts it left: those are for the other way, so both agree on all that the column takes.
"""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa

SECOND: Final = 1_000_000
DAY_SECONDS: Final = 86_400
_LONG: Final = 1 << 63
_INT: Final = 1 << 31
_BLANK: Final = "".join(map(chr, range(33))) + "\x7f"
_TIMESTAMP: Final = re.compile(
    r"([+-]?)([0-9]{4,6})(?:-([0-9]{1,2})(?:-([0-9]{1,2})"
    r"(?:[ T]([0-9]{1,2})(?::([0-9]{1,2})(?::([0-9]{1,2})(?:\.([0-9]*))?([^0-9].*)?)?)?)?)?)?",
    re.DOTALL,
)
_DATE: Final = re.compile(
    r"([+-]?)([0-9]{4,7})(?:-([0-9]{1,2})(?:-([0-9]{1,2})(?:[ T].*)?)?)?", re.DOTALL
)
_OFFSET: Final = re.compile(
    r"([+-])(?:([0-9]{1,2})|([0-9]{2}):?([0-9]{2})|([0-9]{2}):([0-9]{2}):([0-9]{2})"
    r"|([0-9]{2})([0-9]{2})([0-9]{2}))"
)
_REGION: Final = re.compile(r"[A-Za-z][A-Za-z0-9~/._+-]+")
# What Java's three letters stand for.
_SHORT_IDS: Final = {
    "ACT": "Australia/Darwin",
    "AET": "Australia/Sydney",
    "AGT": "America/Argentina/Buenos_Aires",
    "ART": "Africa/Cairo",
    "AST": "America/Anchorage",
    "BET": "America/Sao_Paulo",
    "BST": "Asia/Dhaka",
    "CAT": "Africa/Harare",
    "CNT": "America/St_Johns",
    "CST": "America/Chicago",
    "CTT": "Asia/Shanghai",
    "EAT": "Africa/Addis_Ababa",
    "ECT": "Europe/Paris",
    "EST": "-05:00",
    "HST": "-10:00",
    "IET": "America/Indiana/Indianapolis",
    "IST": "Asia/Kolkata",
    "JST": "Asia/Tokyo",
    "MIT": "Pacific/Apia",
    "MST": "-07:00",
    "NET": "Asia/Yerevan",
    "NST": "Pacific/Auckland",
    "PLT": "Asia/Karachi",
    "PNT": "America/Phoenix",
    "PRT": "America/Puerto_Rico",
    "PST": "America/Los_Angeles",
    "SST": "Pacific/Guadalcanal",
    "VST": "Asia/Ho_Chi_Minh",
}
_MONTH_DAYS: Final = (0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_MONTHS: Final = np.array(_MONTH_DAYS)
# More than the longest ISO form has.
_ROOM: Final = 32
_ZERO, _POINT, _COLON, _DASH, _PLUS, _T, _Z, _SPACE = (ord(c) for c in "0.:-+TZ ")


def micros_of(text: str) -> int | None:
    """Microseconds since 1970 that a text means; None if it is no timestamp."""
    found = _micros(text)
    if found is None and "GMT" in text:
        found = _micros(text.replace("GMT", "", 1))
    return found


def _micros(text: str) -> int | None:
    match = _TIMESTAMP.fullmatch(text.strip(_BLANK))
    if match is None:
        return None
    sign, year, month, day, hour, minute, second, fraction, zone = match.groups()
    days = _days(sign, year, month, day)
    hours, minutes, seconds = int(hour or 0), int(minute or 0), int(second or 0)
    if days is None or hours > 23 or minutes > 59 or seconds > 59:
        return None
    local = days * DAY_SECONDS + hours * 3600 + minutes * 60 + seconds
    offset = 0 if zone is None else _offset(zone.strip(_BLANK[:-1]), local)
    if offset is None:
        return None
    micros = (local - offset) * SECOND + int((fraction or "")[:6].ljust(6, "0"))
    return micros if -_LONG <= micros < _LONG else None


def micros_of_number(value: float, times: int, parts: int) -> int | None:
    """Microseconds since 1970 of a number with a fraction, each of whose units is `times / parts`
    of them; what is less than one is cut off, as in texts.

    None where doubles are so far apart that they do not tell microseconds from each other: of
    seconds from the year 2242 on.
    """
    if not math.isfinite(value):
        return None
    if value.is_integer():
        micros = int(value) * times // parts
    elif math.ulp(value) * times > parts:
        return None
    else:
        # By its digits, which are those that stand in the text.
        micros = math.floor(Decimal(repr(value)) * times / parts)
    return micros if -_LONG <= micros < _LONG else None


def days_of(text: str) -> int | None:
    """Days since 1970 that a text means; None if it is no date."""
    text = text.strip(_BLANK)
    match = _DATE.fullmatch(text) or _DATE.fullmatch(text.replace("GMT", "", 1).strip(_BLANK))
    if match is None:
        return None
    days = _days(*match.groups())
    return days if days is not None and -_INT <= days < _INT else None


def _days(sign: str, year: str, month: str | None, day: str | None) -> int | None:
    """Days since 1970 of a date of the proleptic Gregorian calendar; None if there is none."""
    years, months, days = int(sign + year), int(month or 1), int(day or 1)
    if not 1 <= months <= 12 or days < 1:
        return None
    leap = months == 2 and years % 4 == 0 and (years % 100 != 0 or years % 400 == 0)
    if days > _MONTH_DAYS[months] + leap:
        return None
    return int(_civil(years, months, days))


def _civil(year: Any, month: Any, day: Any) -> Any:
    """Days since 1970, of numbers or of arrays of them; years begin in March to have leap days
    at their end."""
    year = year - (month <= 2)
    era = year // 400
    of_era = year - era * 400
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


def _offset(zone: str, local: int) -> int | None:
    """Seconds that a zone is ahead of UTC at a local time; None if there is no such zone."""
    if zone == "Z":
        return 0
    zone = re.sub(r"([+-])([0-9]):", r"\g<1>0\2:", zone, count=1)
    zone = re.sub(r"([+-])([0-9]{2}):([0-9])$", r"\1\2:0\3", zone, count=1)
    zone = _SHORT_IDS.get(zone, zone)
    for prefix in ("UTC", "GMT", "UT"):
        if zone == prefix:
            return 0
        if zone.startswith((f"{prefix}+", f"{prefix}-")):
            zone = zone[len(prefix) :]
            break
    if zone.startswith(("+", "-")):
        return _fixed_offset(zone)
    region = _region(zone) if _REGION.fullmatch(zone) else None
    if region is None:
        return None
    try:
        moment = datetime(1970, 1, 1, tzinfo=region) + timedelta(seconds=local)
    except OverflowError:
        return None
    ahead = moment.utcoffset()
    return None if ahead is None else int(ahead.total_seconds())


def _fixed_offset(zone: str) -> int | None:
    match = _OFFSET.fullmatch(zone)
    if match is None:
        return None
    sign, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    total = hours * 3600 + minutes * 60 + seconds
    if minutes > 59 or seconds > 59 or total > 18 * 3600:
        return None
    return -total if sign == "-" else total


@lru_cache(maxsize=256)
def _region(name: str) -> ZoneInfo | None:
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, KeyError):
        return None


Column = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]


def micros_of_column(texts: pa.StringArray) -> Column:
    """Microseconds of texts such as 2026-01-02T03:04:05.678Z, and which of them have that form.

    With `T` or a blank, up to nine digits of a fraction, `Z`, +hh:mm or no zone; or a date alone.
    """
    data, start, length = _parts(texts)
    days, fits = _iso_days(data, start)
    midnight = fits & (length == 10)
    at = _reader(data, start)
    fits &= length >= 19
    fits &= (at(10) == _T) | (at(10) == _SPACE)
    fits &= (at(13) == _COLON) & (at(16) == _COLON)
    hour, minute, second = (_two(at, place, fits) for place in (11, 14, 17))
    fits &= (hour < 24) & (minute < 60) & (second < 60)
    end = _reader(data, start + length)
    zulu = end(-1) == _Z
    sign = end(-6)
    zoned = (length >= 25) & ((sign == _PLUS) | (sign == _DASH))
    ahead = np.zeros(len(length), np.int64)
    if zoned.any():
        zone = np.ones(len(length), np.bool_)
        hours, minutes = _two(end, -5, zone), _two(end, -2, zone)
        zone &= (end(-3) == _COLON) & (minutes < 60) & (hours < 18)
        fits &= zone | ~zoned
        ahead = np.where(zoned, hours * 60 + minutes, 0) * np.where(sign == _DASH, -60, 60)
    body = length - np.where(zoned, 6, np.where(zulu, 1, 0))
    micros = _fraction(at, body, fits)
    seconds = days * DAY_SECONDS + hour * 3600 + minute * 60 + second - ahead
    micros += seconds * SECOND
    if midnight.any():
        micros = np.where(midnight, days * (DAY_SECONDS * SECOND), micros)
        fits |= midnight
    return micros, fits


def _fraction(at: Any, body: npt.NDArray[np.int64], fits: npt.NDArray[np.bool_]) -> Any:
    """Microseconds after the point at place 19, where the text without its zone ends there or
    after one to nine digits; nanoseconds are cut off."""
    micros = np.zeros(len(body), np.int64)
    longest = int(body.max(initial=0))
    fits &= (body == 19) | ((body > 20) & (body <= 29) & (at(19) == _POINT))
    for place in range(20, min(longest, 29)):
        here = body > place
        digit = at(place) - np.uint8(_ZERO)
        fits &= ~here | (digit <= 9)
        if place < 26:
            micros += np.where(here, digit, 0).astype(np.int64) * 10 ** (25 - place)
    return micros


def days_of_column(texts: pa.StringArray) -> Column:
    """Days of texts such as 2026-01-02, and which of them have that form."""
    data, start, length = _parts(texts)
    days, fits = _iso_days(data, start)
    return days, fits & (length == 10)


def _iso_days(data: npt.NDArray[np.uint8], start: npt.NDArray[np.int64]) -> Column:
    at = _reader(data, start)
    fits = (at(4) == _DASH) & (at(7) == _DASH)
    year = _two(at, 0, fits) * 100 + _two(at, 2, fits)
    month, day = _two(at, 5, fits), _two(at, 8, fits)
    leap = (month == 2) & (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
    fits &= (year > 0) & (month >= 1) & (month <= 12) & (day >= 1)
    fits &= day <= _MONTHS[np.clip(month, 0, 12)] + leap
    return _civil(year, month, day), fits


def _two(at: Any, place: int, fits: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """The number that two digits make; where they are none it does not fit."""
    # Bytes below the digits wrap around to large numbers.
    high, low = at(place) - np.uint8(_ZERO), at(place + 1) - np.uint8(_ZERO)
    fits &= (high <= 9) & (low <= 9)
    number: npt.NDArray[np.int64] = high.astype(np.int64) * 10 + low
    return number


def _parts(texts: pa.StringArray) -> tuple[npt.NDArray[np.uint8], Any, Any]:
    """The bytes of texts, and where each begins and how long it is.

    There is room around the bytes: a place is read first, and whether the text has it is checked
    after.
    """
    _, where, bytes_ = texts.buffers()
    offsets = np.frombuffer(where, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    data = np.zeros(last - first + 2 * _ROOM, np.uint8)
    if last > first:
        data[_ROOM:-_ROOM] = np.frombuffer(bytes_, np.uint8)[first:last]
    start = offsets[:-1].astype(np.int64) + (_ROOM - first)
    return data, start, np.diff(offsets)


def _reader(data: npt.NDArray[np.uint8], start: npt.NDArray[np.int64]) -> Any:
    """Reads the byte at a place of every text."""

    def at(place: int) -> npt.NDArray[np.uint8]:
        return data[start + place]

    return at
