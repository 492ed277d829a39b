"""Running flows as people and programs see them: the table, the lines, the metrics."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from penstock.cli.run_metrics import STATES, expose
from penstock.cli.run_view import View, duration, rate, rendered, size
from penstock.spark.flows.manager import Status
from penstock.spark.flows.progress import Progress
from penstock.spark.sinking.manager import SinkStatus, in_words


def status(name: str = "counts", state: str = "running", **more: object) -> Status:
    numbers = Progress(
        batch_id=3, batches=4, rows_in=1000, rows_out=990, dead_letters=10, late_rows=2,
        in_per_s=500.0, out_per_s=1.5, batch_ms=250, lag=7, watermark="2026-01-01T00:00:05.000Z",
        state_rows=12, state_bytes=3_400,
    )  # fmt: skip
    given = {
        "generation": 1, "rebuilding": False, "restarts": 1, "error": "", "advice": "",
        "retry_in_s": None, "progress": numbers, **more,
    }  # fmt: skip
    return Status(name=name, state=state, **given)  # type: ignore[arg-type]


def text_of(*statuses: Status) -> str:
    console = Console(file=io.StringIO(), width=250)
    console.print(rendered([each.as_dict() for each in statuses]))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_tells_all_and_errors_stand_below() -> None:
    waiting = status("away", "waiting", error="no answer", advice="Wait.", retry_in_s=2.4)
    text = text_of(status(), waiting, status(rebuilding=True, generation=2))
    for part in ("counts", "running", "500", "1.5", "1,000", "990", "250 ms", "12 rows, 3.4 kB",
                 "2026-01-01 00:00:05", "again in 2 s", "counts (rebuild)"):  # fmt: skip
        assert part in text
    assert text.index("away: no answer") > text.index("counts (rebuild)")
    assert "Wait." in text


def test_numbers_for_people() -> None:
    assert [rate(value) for value in (0.0, 0.25, 9.99, 12_345.6)] == ["0", "0.2", "10.0", "12,346"]
    assert [size(value) for value in (0, 999, 1_500, 2_500_000)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 MB",
    ]
    assert [duration(value) for value in (5, 9_999, 12_345)] == ["5 ms", "9999 ms", "12.3 s"]


def test_lines_tell_changes_and_progress_once(capsys: pytest.CaptureFixture[str]) -> None:
    with View(plain=True, every_s=0) as view:
        failed = status(state="failed", error="no such column", advice="Mend it.")
        view.changed(failed)
        view.show([status()])
        view.show([status()])
        view.finish([failed])
    # Whoever runs it tells what has failed at the end; once is enough.
    view.tell_failure(failed)
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith(" flow counts: failed")
    assert "rows in 1,000, rows out 990, lag 7" in lines[1]
    assert told.err.split("\n") == ["error: flow counts: no such column", "       Mend it.", ""]


def test_an_outage_is_a_line_when_it_begins_and_one_when_it_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    away = {"error": "cannot reach it", "advice": "Is it there?"}
    with View(plain=True, every_s=0) as view:
        for _ in range(3):
            view.changed(status(state="waiting", **away))
            view.changed(status(state="starting", **away))
            # As it is before the first micro-batch, which fails again.
            view.changed(status(state="running", progress=Progress()))
            view._tell_back([status(state="running", progress=Progress())])
        view.changed(status(state="waiting", error="it is full"))
        view.changed(status(state="starting", progress=Progress()))
        view.changed(status(state="running", progress=Progress()))
        view._tell_back([status(state="running", progress=Progress(batches=1))])
        view._tell_back([status(state="running", progress=Progress(batches=2))])
        view.changed(status(state="waiting", **away))
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    lost = "flow counts: waiting: cannot reach it Is it there?"
    assert lines == [lost, "flow counts: waiting: it is full", "flow counts: running again", lost]


def test_a_flow_and_a_sink_of_one_name_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    flow = status()
    more: Any = {name: getattr(flow, name) for name in Status.__dataclass_fields__}
    sink: Any = SinkStatus(
        **more, topic="t", store="s", position={}, lag=None, lag_s=None, alarming=False, put=1,
        deleted=0,
    )  # fmt: skip
    with View(plain=True, every_s=0) as view:
        view.show([flow, sink])
        view.show([flow, sink])
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert [line.partition(":")[0] for line in lines] == ["flow counts", "sink counts"]


def test_what_is_not_known_of_a_sink_is_not_told() -> None:
    sink = SinkStatus(
        name="orders", state="failed", rebuilding=False, restarts=0, error="no such topic",
        advice="", retry_in_s=None, progress=Progress(), topic="t", store="s", position={},
        lag=None, lag_s=None, alarming=True, put=0, deleted=0,
    )  # fmt: skip
    assert in_words(sink) == "sink orders has failed: no such topic"
    assert in_words(replace(sink, state="waiting")) == "sink orders is far behind t: no such topic"
    assert in_words(replace(sink, state="running", error="", lag=3, lag_s=7.2)) == (
        "sink orders is 3 records and 7 s behind t"
    )


def test_a_terminal_gets_a_live_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    failed = status(state="failed", error="no such column", advice="Mend it.")
    with View(plain=False, every_s=0) as view:
        view.changed(status())
        view.show([failed])
        assert "no such column" in terminal.getvalue()
        before = len(terminal.getvalue())
        view.finish([failed])
    assert "counts" in terminal.getvalue()
    assert "rows in" in terminal.getvalue()
    # It stands below the table no more, and is told on its own.
    assert "no such column" not in terminal.getvalue()[before:]
    view.tell_failure(failed)
    assert "no such column" in capsys.readouterr().err


def test_prometheus_can_read_the_metrics() -> None:
    fresh = status("fresh", "starting", progress=Progress())
    text = expose([status(), status(rebuilding=True), fresh]).decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    rows = {each.labels["flow"]: each.value for each in found["penstock_flow_rows_in"].samples}
    assert rows == {"counts": 1000, "counts-rebuild": 1000, "fresh": 0}
    # What is not known is not told.
    assert {each.labels["flow"] for each in found["penstock_flow_lag_records"].samples} == {
        "counts", "counts-rebuild"
    }  # fmt: skip
    states = [
        each for each in found["penstock_flow_state"].samples if each.labels["flow"] == "fresh"
    ]
    assert {each.labels["state"]: each.value for each in states} == {
        state: float(state == "starting") for state in STATES
    }
