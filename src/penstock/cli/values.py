"""What people type on the command line, as values, and values as people read them.

Pure functions; a value that makes no sense raises `typer.BadParameter`, which is shown beside
the option it came from and ends the command with status 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NamedTuple

import typer

# A plain number below this is an offset, from here on a time in milliseconds (spring of 1973).
FIRST_TIME_MS: Final = 100_000_000_000

# What each durability of a topic means for a record that was acknowledged.
PROMISES: Final = {
    "disk": "A record acknowledged with acks=all is on disk (fsync): it survives a crash of the "
    "broker and a loss of power.",
    "os": "A record acknowledged with acks=all is with the operating system: it survives a crash "
    "of the broker, but not a loss of power.",
    "memory": "Records are in memory only: none survives a stop of the broker.",
}

_UNITS_MS: Final = {
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 7 * 86_400_000,
}
_UNIT_NAMES: Final = {
    **{unit: unit for unit in _UNITS_MS},
    "millisecond": "ms",
    "sec": "s", "second": "s",
    "min": "m", "minute": "m",
    "hour": "h",
    "day": "d",
    "week": "w",
}  # fmt: skip
_DURATION_PART: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)")


class Start(NamedTuple):
    """Where to start reading: `value` is an offset, a time in ms or a number of records."""

    kind: Literal["beginning", "end", "offset", "last", "time"]
    value: int = 0


def parse_address(
    text: str, *, default_port: int | None = None, default_host: str | None = None
) -> tuple[str, int]:
    """`HOST:PORT`; an IPv6 address stands in brackets, as in `[::1]:9092`."""
    host, colon, port = text.strip().rpartition(":")
    form = "HOST:PORT, as in 127.0.0.1:9092"
    if default_host is not None:
        form = "[HOST:]PORT, as in 9092 or 127.0.0.1:9092"
        host = host or default_host
    if text.strip().startswith("[") and text.strip().endswith("]"):
        host, colon, port = text.strip(), "", ""
    if not colon and default_port is not None:
        host, port = text.strip(), str(default_port)
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise typer.BadParameter(f"{text!r} is not {form}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise typer.BadParameter(f"an IPv6 address stands in brackets: [{host}]:{port}")
    return host, int(port)


def parse_pairs(texts: Iterable[str], *, what: str = "setting") -> dict[str, str]:
    """`name=value` pairs; a name may be there only once."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise typer.BadParameter(f"{text!r} is not a {what} of the form name=value")
        if name.strip() in pairs:
            raise typer.BadParameter(f"{name.strip()} is given twice")
        pairs[name.strip()] = value.strip()
    return pairs


def parse_headers(texts: Iterable[str]) -> list[tuple[str, bytes]]:
    """Record headers as `name=value`; a name may repeat, and values stay as they are."""
    headers = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{text!r} is not a header of the form name=value")
        headers.append((name, value.encode()))
    return headers


def parse_duration_ms(text: str) -> int | None:
    """Milliseconds of `90s`, `2h30m` or `10 minutes`; None if it is not a duration."""
    at, total = 0, 0.0
    text = text.strip().lower()
    while at < len(text):
        match = _DURATION_PART.match(text, at)
        if match is None:
            return None
        name = match.group(2)
        unit = _UNIT_NAMES.get(name) or _UNIT_NAMES.get(name.removesuffix("s"))
        if unit is None:
            return None
        total += float(match.group(1)) * _UNITS_MS[unit]
        at = match.end()
    return int(total) if text else None


def parse_time_ms(text: str, now_ms: int) -> int | None:
    """A point in time as milliseconds since 1970; None if it is none.

    An ISO date or time (the machine's time zone unless it says another), milliseconds since
    1970, a duration with `ago`, or `now`.
    """
    text = text.strip()
    if text == "now":
        return now_ms
    if text.isdecimal():
        return int(text)
    if text.lower().endswith("ago"):
        duration_ms = parse_duration_ms(text[:-3])
        return None if duration_ms is None else now_ms - duration_ms
    try:
        # A time without a zone is meant as the clock on the wall shows it.
        return int(datetime.fromisoformat(text).astimezone().timestamp() * 1000)
    except (ValueError, OverflowError):
        return None


def parse_timestamp(text: str, now_ms: int) -> int:
    """A record's timestamp; as `parse_time_ms`, but it must be one."""
    value = parse_time_ms(text, now_ms)
    if value is None:
        raise typer.BadParameter(f"{text!r} is not a time: {TIME_FORMS}")
    return value


TIME_FORMS: Final = (
    "give an ISO time such as 2026-03-01T12:00:00Z, milliseconds since 1970, or 10m ago"
)


def parse_start(text: str, now_ms: int) -> Start:
    """Where to begin: beginning, end, an offset, -N for the last N records, or a time."""
    text = text.strip()
    if text in ("beginning", "earliest", "start"):
        return Start("beginning")
    if text in ("end", "latest"):
        return Start("end")
    if text.startswith("offset:") and text[7:].isdecimal():
        return Start("offset", int(text[7:]))
    if text.startswith("-") and text[1:].isdecimal():
        return Start("last", int(text[1:]))
    if text.isdecimal() and int(text) < FIRST_TIME_MS:
        return Start("offset", int(text))
    time_ms = parse_time_ms(text.removeprefix("time:"), now_ms)
    if time_ms is None:
        raise typer.BadParameter(
            f"{text!r} is neither beginning, end, an offset, -N nor a time; {TIME_FORMS}"
        )
    return Start("time", time_ms)


def show_time(timestamp_ms: int) -> str:
    """A timestamp for people, in UTC."""
    if timestamp_ms < 0:
        return "-"
    # Counted from 1970 by hand: a record may carry a time that no calendar reaches.
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=timestamp_ms)
    except OverflowError:
        return f"{timestamp_ms} ms"
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{timestamp_ms % 1000:03d}Z"


def show_bytes(count: int) -> str:
    """A size for people."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def show_duration(duration_ms: int) -> str:
    """A duration for people, in the largest unit that gives a whole number."""
    for unit in ("w", "d", "h", "m", "s"):
        size = _UNITS_MS[unit]
        if duration_ms >= size and duration_ms % size == 0 and (unit != "w" or duration_ms > size):
            return f"{duration_ms // size}{unit}"
    return f"{duration_ms}ms"
