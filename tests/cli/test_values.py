"""What people type, as values."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.output import count, json_bytes, text_bytes
from penstock.cli.produce import from_json
from penstock.cli.values import (
    Start,
    parse_address,
    parse_duration_ms,
    parse_headers,
    parse_pairs,
    parse_start,
    parse_time_ms,
    show_bytes,
    show_duration,
    show_time,
)

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:9092", ("127.0.0.1", 9092)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:9092", ("::1", 9092)),
        (" host:1 ", ("host", 1)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["", "host", ":9092", "host:", "host:x", "host:65536", "::1:9092"])
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("host", ("host", 9092)), ("[::1]", ("::1", 9092)), ("host:1", ("host", 1))],
)
def test_an_address_without_a_port(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text, default_port=9092) == expected


def test_pairs() -> None:
    assert parse_pairs(["a=1", " b = x=y ", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    for wrong in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(typer.BadParameter):
            parse_pairs(wrong)


def test_headers_may_repeat() -> None:
    assert parse_headers(["a=1", "a= 2=3"]) == [("a", b"1"), ("a", b" 2=3")]
    with pytest.raises(typer.BadParameter):
        parse_headers(["a"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10m", 600_000),
        ("90s", 90_000),
        ("2h30m", 9_000_000),
        ("1.5 hours", 5_400_000),
        ("3 days 4 hours", 273_600_000 + 0),
        ("1w", 604_800_000),
        ("250ms", 250),
        ("5 mins", 300_000),
        ("", None),
        ("10", None),
        ("10x", None),
        ("ten minutes", None),
    ],
)
def test_durations(text: str, expected: int | None) -> None:
    assert parse_duration_ms(text) == expected


def test_times() -> None:
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
    noon_ms = int(noon.timestamp() * 1000)
    assert parse_time_ms("2026-03-01T12:00:00Z", NOW_MS) == noon_ms
    assert parse_time_ms("2026-03-01T13:00:00+01:00", NOW_MS) == noon_ms
    assert parse_time_ms("2026-03-01T12:00:00.250Z", NOW_MS) == noon_ms + 250
    assert parse_time_ms("1700000000000", NOW_MS) == 1_700_000_000_000
    assert parse_time_ms("10m ago", NOW_MS) == NOW_MS - 600_000
    assert parse_time_ms("now", NOW_MS) == NOW_MS
    local = datetime(2026, 3, 1).astimezone()
    assert parse_time_ms("2026-03-01", NOW_MS) == int(local.timestamp() * 1000)
    assert parse_time_ms("soon", NOW_MS) is None
    assert parse_time_ms("x ago", NOW_MS) is None
    assert parse_time_ms("0001-01-01", NOW_MS) in {None, -62_135_596_800_000}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("beginning", Start("beginning")),
        ("end", Start("end")),
        ("42", Start("offset", 42)),
        ("offset:200000000000", Start("offset", 200_000_000_000)),
        ("-5", Start("last", 5)),
        ("1700000000000", Start("time", 1_700_000_000_000)),
        ("time:5", Start("time", 5)),
        ("10m ago", Start("time", NOW_MS - 600_000)),
    ],
)
def test_where_to_start(text: str, expected: Start) -> None:
    assert parse_start(text, NOW_MS) == expected


def test_a_wrong_start_says_what_is_right() -> None:
    with pytest.raises(typer.BadParameter, match="10m ago"):
        parse_start("yesterdayish", NOW_MS)


@given(st.text())
def test_any_text_is_a_start_or_refused(text: str) -> None:
    with contextlib.suppress(typer.BadParameter):
        parse_start(text, NOW_MS)


def test_showing() -> None:
    assert show_time(1_700_000_000_123) == "2023-11-14T22:13:20.123Z"
    assert show_time(-1) == "-"
    assert show_time(1 << 62).endswith("ms")
    assert [show_bytes(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3.0 TiB",
    ]  # fmt: skip
    assert [show_duration(n) for n in (86_400_000, 604_800_000, 90_000, 1_209_600_000, 5)] == [
        "1d", "7d", "90s", "2w", "5ms",
    ]  # fmt: skip
    assert [count(n, "batch") for n in (0, 1, 2000)] == ["0 batches", "1 batch", "2,000 batches"]


@given(st.one_of(st.none(), st.binary()))
def test_bytes_survive_json(data: bytes | None) -> None:
    assert from_json(json_bytes(data)) == data


@given(st.binary())
def test_bytes_for_people_stay_on_a_line(data: bytes) -> None:
    assert text_bytes(data).isprintable()
