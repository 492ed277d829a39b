"""Alerts begin once and end once, however often one looks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.broker.lag.alerts import MAX_PARTITIONS_TOLD, Alert, Alerts, show_seconds
from penstock.broker.lag.formulas import Lag
from tests.harness.profiles import examples

HOUR_S = 3600.0


def lag(
    loss_s: float | None = None, *, records: int = 10, missed: int = 0, kept_s: float | None = None
) -> Lag:
    return Lag(
        committed=0, log_start=missed, log_end=missed + records, records=records, bytes=1,
        seconds=1.0, missed=missed, beyond=0, time_to_loss_s=loss_s, kept_s=kept_s,
    )  # fmt: skip


def look(alerts: Alerts, *lags: Lag) -> list[tuple[str, bool]]:
    found = alerts.observe("g", "t", dict(enumerate(lags)), 0)
    return [(alert.kind, alert.firing) for alert in found]


def test_an_alert_is_given_once_and_ended_once() -> None:
    alerts = Alerts(HOUR_S)
    assert look(alerts, lag(2 * HOUR_S)) == []
    assert look(alerts, lag(HOUR_S - 1)) == [("near-loss", True)]
    assert look(alerts, lag(HOUR_S / 2)) == []
    assert look(alerts, lag(0)) == []
    assert look(alerts, lag(None)) == [("near-loss", False)]
    assert look(alerts, lag(None)) == []
    assert alerts.begun == {"near-loss": 1, "missed": 0}


def test_wavering_around_the_limit_is_one_alert() -> None:
    alerts = Alerts(HOUR_S)
    found = []
    for at in range(20):
        found += look(alerts, lag(HOUR_S * (0.99 if at % 2 else 1.01)))
    assert found == [("near-loss", True)]
    assert look(alerts, lag(HOUR_S * 1.3)) == [("near-loss", False)]


def test_no_lag_no_alert() -> None:
    assert look(Alerts(HOUR_S), lag(5, records=0)) == []


def test_with_short_retention_the_limit_is_a_part_of_it() -> None:
    alerts = Alerts(HOUR_S)
    assert look(alerts, lag(400, kept_s=600)) == []
    assert look(alerts, lag(149, kept_s=600)) == [("near-loss", True)]


def test_none_are_wanted() -> None:
    assert look(Alerts(0), lag(0)) == []


def test_missed_records_are_another_alert() -> None:
    alerts = Alerts(HOUR_S)
    assert look(alerts, lag(None, missed=5)) == [("missed", True)]
    assert look(alerts, lag(10, missed=9)) == [("near-loss", True)]
    assert look(alerts, lag(None)) == [("near-loss", False), ("missed", False)]


def test_partitions_of_a_topic_are_one_alert() -> None:
    alerts = Alerts(HOUR_S)
    lags = {n: lag(float(n + 10), missed=2) for n in range(50)}
    near, missed = alerts.observe("g", "t", lags, 7)
    assert near.partitions == tuple(range(MAX_PARTITIONS_TOLD))
    assert (near.partition_count, near.time_to_loss_s, near.records_behind) == (50, 10.0, 500)
    assert (missed.missed_records, missed.at_ms) == (100, 7)
    assert "and 30 more" in near.in_words()
    lags[3] = lag(None)
    assert alerts.observe("g", "t", lags, 8) == []


def test_only_the_group_that_lags_is_told_of() -> None:
    alerts = Alerts(HOUR_S)
    assert alerts.observe("slow", "t", {0: lag(1)}, 0)
    assert alerts.observe("fast", "t", {0: lag(None, records=0)}, 0) == []
    assert alerts.observe("slow", "u", {0: lag(None, records=0)}, 0) == []
    assert list(alerts.firing) == [("near-loss", "slow", "t")]


def test_a_group_that_goes_ends_its_alerts() -> None:
    alerts = Alerts(HOUR_S)
    alerts.observe("g", "t", {0: lag(1, missed=3)}, 0)
    assert {alert.kind for alert in alerts.forget("g", "t", 1)} == {"near-loss", "missed"}
    assert not alerts.firing


def test_the_words() -> None:
    near = Alert("near-loss", True, "g", "t", 0, (1,), 1, 90.0, 12, 0)
    assert near.in_words() == (
        "group g will miss records of t in 1m 30s: it is 12 records behind and retention catches "
        "up with it (partition 1)"
    )
    assert "at any moment" in Alert("near-loss", True, "g", "t", 0, (1, 2), 2, 0.0).in_words()
    assert (
        "has missed 7 records" in Alert("missed", True, "g", "t", 0, (1,), 1, None, 0, 7).in_words()
    )
    assert "no longer" in Alert("near-loss", False, "g", "t", 0).in_words()
    assert "is back" in Alert("missed", False, "g", "t", 0).in_words()


def test_time_spans_for_people() -> None:
    spans = (0, 0.25, 5, 65, 60, 3725, 90_000)
    assert [show_seconds(s) for s in spans] == [
        "0s",
        "250ms",
        "5s",
        "1m 5s",
        "1m",
        "1h 2m",
        "1d 1h",
    ]


@settings(max_examples=examples(50))
@given(st.lists(st.none() | st.floats(0, 4 * HOUR_S), max_size=40))
def test_beginnings_and_ends_take_turns(times: list[float | None]) -> None:
    alerts = Alerts(HOUR_S)
    changes = [
        firing for s in times for kind, firing in look(alerts, lag(s)) if kind == "near-loss"
    ]
    assert changes == [at % 2 == 0 for at in range(len(changes))]
    below = any(s is not None and s < HOUR_S for s in times)
    assert bool(changes) == below
