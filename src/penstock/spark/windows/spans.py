"""Lengths of time as people write them: "5 minutes", "1 hour 30 minutes", "250 ms"."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

from penstock.errors import ConfigError

_UNITS_US: Final = {
    "us": 1, "microsecond": 1,
    "ms": 1_000, "millisecond": 1_000,
    "s": 1_000_000, "sec": 1_000_000, "second": 1_000_000,
    "min": 60_000_000, "minute": 60_000_000,
    "h": 3_600_000_000, "hour": 3_600_000_000,
    "d": 86_400_000_000, "day": 86_400_000_000,
    "w": 604_800_000_000, "week": 604_800_000_000,
}  # fmt: skip
_PART: Final = re.compile(r"\s*([+-]?)\s*(\d+)\s*([a-zA-Z]+)")
# Ten thousand years: beyond it lies a mistake, and soon the end of what 64 bits hold.
MOST_US: Final = 10_000 * 366 * 86_400_000_000

Span = str | timedelta


def microseconds(span: Span, what: str, *, least: int | None = 1) -> int:
    """How long a span is; `what` names it in the message if it is none."""
    if not isinstance(span, Span):
        raise ConfigError(
            f"{what}={span!r} is not a length of time",
            advice='Write a number and a unit, such as "10 s", "5 minutes" or "7 days".',
        )
    total = _of_text(span, what) if isinstance(span, str) else span // timedelta(microseconds=1)
    if abs(total) > MOST_US or (least is not None and total < least):
        raise ConfigError(
            f"{what}={span!r} is {'too short' if total < MOST_US else 'too long'}",
            advice='Give a length of time, such as "5 minutes".',
        )
    return total


def _of_text(text: str, what: str) -> int:
    total, at = 0, 0
    while at < len(text.rstrip()):
        part = _PART.match(text, at)
        unit = part and _UNITS_US.get(part[3].lower(), _UNITS_US.get(part[3].lower().rstrip("s")))
        if part is None or unit is None:
            raise ConfigError(
                f"{what}={text!r} is not a length of time, from {text[at:].strip()!r} on",
                advice='Write numbers and units, such as "1 hour 30 minutes", "10 s" or "7 days".',
            )
        total += (-1 if part[1] == "-" else 1) * int(part[2]) * unit
        at = part.end()
    if at == 0:
        raise ConfigError(f"{what} is empty", advice='Write it as "5 minutes".')
    return total


def shown(length_us: int) -> str:
    """A length of time in the largest unit that it is whole numbers of."""
    for unit in ("day", "hour", "minute", "second", "millisecond"):
        count, rest = divmod(length_us, _UNITS_US[unit])
        if not rest and (count or unit == "second"):
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return f"{length_us} microseconds"
