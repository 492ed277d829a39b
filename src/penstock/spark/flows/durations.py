"""Lengths of time as people write them: "10 seconds", "500 milliseconds", "1 hour"."""

from __future__ import annotations

import re
from typing import Final

from penstock.spark.flows.errors import DeclarationError

_UNITS: Final = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 7 * 86_400_000_000,
}
_DURATION: Final = re.compile(rf"\s*(\d{{1,12}})\s+({'|'.join(_UNITS)})s?\s*")


def microseconds(text: str, what: str) -> int:
    """A length of time in microseconds; DeclarationError, which names `what`, if it is none."""
    found = _DURATION.fullmatch(str(text))
    if found is None:
        raise DeclarationError(
            f"{what}={text!r} is no length of time",
            advice='Write a number and a unit, such as "10 seconds", "500 milliseconds", "1 hour".',
        )
    return int(found[1]) * _UNITS[found[2]]
