"""Lag and time to loss: what the numbers mean, and that they move the right way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.broker.lag.formulas import (
    Rates,
    Reading,
    Retention,
    Window,
    kept_s,
    lag_of,
    loss_by_age_s,
    loss_by_size_s,
    retention_of,
    time_to_loss_s,
)
from tests.harness.profiles import examples

NOW_MS = 1_700_000_000_000
HOUR_S = 3600.0
READING = Reading(
    committed=100, log_start=0, log_end=300, bytes_behind=2000, front_ms=NOW_MS - 90_000,
    now_ms=NOW_MS,
)  # fmt: skip
KEEP_HOUR = Retention(seconds=HOUR_S)

rates = st.builds(
    Rates,
    *(st.floats(0, 1e6, allow_subnormal=False) for _ in range(4)),
)
counts = st.integers(1, 10**9)
spans = st.floats(0.001, 1e7, allow_subnormal=False)


# ---- what each number is ---------------------------------------------------------------------


def test_a_group_in_the_log() -> None:
    lag = lag_of(READING, Rates(), KEEP_HOUR)
    assert (lag.records, lag.bytes, lag.seconds) == (200, 2000, 90.0)
    assert (lag.missed, lag.beyond) == (0, 0)
    assert lag.time_to_loss_s == HOUR_S - 90


def test_caught_up_is_nothing_behind_and_nothing_to_lose() -> None:
    lag = lag_of(replace(READING, committed=300, front_ms=None), Rates(written=5), KEEP_HOUR)
    assert (lag.records, lag.bytes, lag.seconds, lag.time_to_loss_s) == (0, 0, 0.0, None)


def test_below_the_start_records_were_missed_and_the_rest_is_behind() -> None:
    lag = lag_of(replace(READING, log_start=150), Rates(), KEEP_HOUR)
    assert (lag.missed, lag.records) == (50, 150)


def test_all_missed() -> None:
    lag = lag_of(replace(READING, log_start=300), Rates(), KEEP_HOUR)
    assert (lag.missed, lag.records, lag.time_to_loss_s) == (200, 0, None)


def test_beyond_the_end_nothing_is_behind() -> None:
    lag = lag_of(replace(READING, committed=310), Rates(), KEEP_HOUR)
    assert (lag.beyond, lag.records, lag.missed, lag.seconds) == (10, 0, 0, 0.0)


def test_a_time_in_the_future_is_not_a_negative_age() -> None:
    assert lag_of(replace(READING, front_ms=NOW_MS + 5), Rates(), KEEP_HOUR).seconds == 0.0


@pytest.mark.parametrize("front_ms", [None, -1])
def test_without_a_time_the_age_is_unknown(front_ms: int | None) -> None:
    lag = lag_of(replace(READING, front_ms=front_ms), Rates(), KEEP_HOUR)
    assert (lag.seconds, lag.time_to_loss_s) == (None, None)


@pytest.mark.parametrize(
    ("policy", "retention_ms", "retention_bytes", "expected"),
    [
        (("delete",), 1000, -1, Retention(1.0, None)),
        (("delete",), -1, 5000, Retention(None, 5000)),
        (("compact",), 1000, 5000, Retention()),
        (("compact", "delete"), 1000, 5000, Retention(1.0, 5000)),
        (("delete",), -1, -1, Retention()),
    ],
)
def test_what_topics_keep(
    policy: tuple[str, ...], retention_ms: int, retention_bytes: int, expected: Retention
) -> None:
    assert retention_of(policy, retention_ms, retention_bytes) == expected


# ---- time to loss ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "age_s", "read", "written", "expected"),
    [
        # Standing still: what is left of the hour.
        (100, 600, 0, 10, 3000),
        # Past the hour: at any moment.
        (100, 3600, 50, 10, 0),
        # Reads the backlog in half an hour, and then as fast as others write.
        (1800, 3000, 1, 1, None),
        (1800, 3000, 1, 0, None),
        # As fast as it was written: always 1000 s behind.
        (1000, 1000, 1, 1, None),
        # The backlog takes two hours: the age grows by half a second each second.
        (7200, 1800, 1, 1, 1800 / 0.75),
        # Reads half of what is written: 100 s for the backlog, then half a second each second.
        (100, 100, 1, 2, 100 + 3500 / 0.5),
    ],
)
def test_loss_by_age(
    records: int, age_s: float, read: float, written: float, expected: float | None
) -> None:
    found = loss_by_age_s(records, age_s, HOUR_S, Rates(read=read, written=written))
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("behind", "read", "written", "expected"),
    [(400, 0, 10, 60), (400, 5, 10, 120), (400, 10, 10, None), (1000, 90, 0, 0), (400, 0, 0, None)],
)
def test_loss_by_size(behind: int, read: float, written: float, expected: float | None) -> None:
    assert loss_by_size_s(behind, 1000, Rates(read_bytes=read, written_bytes=written)) == expected


def test_the_sooner_of_both_counts() -> None:
    both = Retention(seconds=100, bytes=1000)
    assert time_to_loss_s(10, 500, 40, Rates(written_bytes=10), both) == 50
    assert time_to_loss_s(10, 500, 70, Rates(written_bytes=10), both) == 30
    assert time_to_loss_s(10, None, None, Rates(written_bytes=10), both) is None
    assert time_to_loss_s(10, 500, 40, Rates(written_bytes=10), Retention()) is None


def test_how_long_a_record_is_kept() -> None:
    both = Retention(seconds=100, bytes=1000)
    assert kept_s(Rates(written_bytes=50), both) == 20
    assert kept_s(Rates(), both) == 100
    assert kept_s(Rates(written_bytes=50), Retention()) is None


def later(a: float | None, b: float | None) -> bool:
    """Whether b is not sooner than a, but for rounding; None is never."""
    return b is None or (a is not None and b >= a * (1 - 1e-6) - 1e-6)


@settings(max_examples=examples(50))
@given(counts, spans, spans, rates, st.floats(1, 10))
def test_who_reads_faster_loses_later(
    records: int, age_s: float, keep_s: float, now: Rates, factor: float
) -> None:
    faster = replace(now, read=now.read * factor)
    assert later(
        loss_by_age_s(records, age_s, keep_s, now), loss_by_age_s(records, age_s, keep_s, faster)
    )


@settings(max_examples=examples(50))
@given(counts, spans, spans, rates, st.floats(1, 10))
def test_more_writing_never_gives_more_time(
    records: int, age_s: float, keep_s: float, now: Rates, factor: float
) -> None:
    busier = replace(now, written=now.written * factor)
    assert later(
        loss_by_age_s(records, age_s, keep_s, busier), loss_by_age_s(records, age_s, keep_s, now)
    )


@settings(max_examples=examples(50))
@given(counts, spans, spans, rates, st.floats(1, 10))
def test_longer_retention_never_gives_less_time(
    records: int, age_s: float, keep_s: float, now: Rates, factor: float
) -> None:
    assert later(
        loss_by_age_s(records, age_s, keep_s, now),
        loss_by_age_s(records, age_s, keep_s * factor, now),
    )


@settings(max_examples=examples(50))
@given(counts, spans, spans, rates)
def test_standing_still_is_the_soonest(
    records: int, age_s: float, keep_s: float, now: Rates
) -> None:
    still = loss_by_age_s(records, age_s, keep_s, replace(now, read=0))
    assert still == max(0, keep_s - age_s)
    assert later(still, loss_by_age_s(records, age_s, keep_s, now))


@settings(max_examples=examples(50))
@given(
    st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 10**12), rates,
    st.none() | spans, st.none() | st.integers(0, 10**12),
)  # fmt: skip
def test_no_number_is_ever_negative(
    committed: int, start: int, end: int, now: Rates, keep_s: float | None, keep_bytes: int | None
) -> None:
    reading = Reading(committed, start, end, 5, NOW_MS - 1, NOW_MS)
    lag = lag_of(reading, now, Retention(keep_s, keep_bytes))
    assert min(lag.records, lag.missed, lag.beyond, lag.seconds or 0, lag.time_to_loss_s or 0) >= 0
    assert lag.log_start <= lag.log_end
    # Each offset from the committed one to the end is counted once: behind or missed.
    assert lag.records + lag.missed - lag.beyond == lag.log_end - committed
    assert (lag.time_to_loss_s is None) or lag.records


@settings(max_examples=examples(50))
@given(st.integers(0, 100), st.floats(0, 5), st.floats(10, 20), st.floats(0.5, 100))
def test_the_formula_is_what_a_simulation_of_it_gives(
    backlog_s: int, read: float, keep_s: float, written: float
) -> None:
    """Records at an even pace, a reader at another: when is the one at the front too old?"""
    age_s = min(backlog_s, keep_s) * 0.9 + 0.01
    records = max(1, round(age_s * written))
    # Just at the edge a step of the simulation decides.
    assume(abs(records / max(read, 1e-9) - keep_s) > 0.1 * keep_s)
    assume(abs(read - written) > 0.05 * written)
    found = loss_by_age_s(records, age_s, keep_s, Rates(read=read, written=written))
    step_s, position, t = 0.01, 0.0, 0.0
    while t < 300:
        # Record number n of the backlog was written at -age * (1 - n/records); later ones as now.
        if position <= records:
            written_at = -age_s * (1 - position / records)
        else:
            written_at = (position - records) / written
        if t - written_at >= keep_s:
            break
        t += step_s
        # Nobody reads what is not there yet.
        position = min(position + read * step_s, records + written * t)
    else:
        assert found is None or found >= 280
        return
    assert found is not None
    assert found == pytest.approx(t, rel=0.02, abs=0.1)


# ---- rates -----------------------------------------------------------------------------------


def test_rates_are_those_of_the_window() -> None:
    window = Window(span_s=10, samples=5)
    for t in range(101):
        window.add(t, t * 2 if t <= 50 else 100 + (t - 50) * 7)
    assert window.rates() == (7,)
    assert 10 <= window.span_s <= 12


@settings(max_examples=examples(50))
@given(st.lists(st.floats(0.001, 100), max_size=300), st.integers(1, 10))
def test_memory_is_bounded_and_the_span_nearly_kept(steps: list[float], samples: int) -> None:
    window, t = Window(span_s=60, samples=samples), 0.0
    for step in steps:
        t += step
        window.add(t, t * 3)
        assert len(window) <= samples + 3
        if len(window) > 1:
            assert window.rates()[0] == pytest.approx(3)


def test_a_number_that_falls_begins_anew() -> None:
    window = Window()
    window.add(0, 100, 5)
    window.add(10, 200, 6)
    window.add(20, 50, 7)
    assert (len(window), window.span_s, window.rates()) == (1, 0.0, (0.0, 0.0))
    window.add(30, 60, 7)
    assert window.rates() == (1.0, 0.0)
    assert Window().rates() == ()
