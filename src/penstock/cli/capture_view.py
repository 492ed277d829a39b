"""What `penstock capture` shows: states and rates of captures, and bars for snapshots."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from penstock.cli import output
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.capture.delivery.capture import Capture
    from penstock.capture.delivery.metering import CaptureStatus
    from penstock.client.connection import Cluster

DONE_STATES: Final = frozenset({"stopped", "failed", "never run"})
# What is shown of one that has said nothing for longer, whatever it said last: it does not run.
SILENT: Final = "silent"
SILENT_MS: Final = 10_000
LOOK_S: Final = 0.5
# A capture hears of a snapshot that it was told of within this time.
HEARD_S: Final = 60.0
COLUMNS: Final = (
    "capture", "database", "state", ">changes/s", ">lag p50", ">lag p99", ">events",
    ">database keeps", "snapshot", "problem",
)  # fmt: skip

SCHEMA_COLUMNS: Final = ("table", "topic", ">schema version", ">schema id", "last change")


def status_rows(
    statuses: Sequence[CaptureStatus], database: Callable[[str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """All that is known, for programs; `row` makes a line of it."""
    rows = []
    for item in statuses:
        told = {**asdict(item), "running": is_running(item), "silent_ms": None}
        if item.state not in DONE_STATES and not told["running"]:
            told |= {"state": SILENT, "last_state": item.state, "silent_ms": silent_ms(item)}
        rows.append({**told, "database": database(item.name)})
    return rows


def is_running(status: CaptureStatus) -> bool:
    """Whether a capture that told this last runs now."""
    patience_ms = max(SILENT_MS, 3 * status.told_every_ms)
    return status.state not in DONE_STATES and silent_ms(status) < patience_ms


def silent_ms(status: CaptureStatus) -> int:
    """How long ago it told this."""
    return max(time.time_ns() // 1_000_000 - status.ts_ms, 0)


def wait_ended(cluster: Cluster, name: str, timeout_s: float, stop: threading.Event) -> bool:
    """Wait until a capture does not run, or we are to stop; whether it came to that in time."""
    from penstock.capture.delivery.control import status_of

    deadline = time.monotonic() + timeout_s
    while (status := status_of(cluster, name)) is not None and is_running(status):
        if time.monotonic() >= deadline:
            return False
        if stop.wait(LOOK_S):
            break
    return True


def stop_at_end_of_input(stop: threading.Event) -> None:
    """Stop when whoever started us is gone, however that came: our input ends with it."""

    def watch() -> None:
        while os.read(0, 1 << 10):
            pass
        stop.set()

    threading.Thread(target=watch, name="capture-parent", daemon=True).start()


def _state_text(told: dict[str, Any]) -> str:
    if told["state"] != SILENT:
        return str(told["state"])
    return f"silent for {span(told['silent_ms'] / 1000)} (was {told['last_state']})"


def row(told: dict[str, Any]) -> list[str]:
    kept = told["database"]
    bytes_kept = kept.get("retained_bytes")
    keeps = "-" if bytes_kept is None else size(bytes_kept)
    if kept.get("time_left_s") is not None:
        keeps += f", {span(kept['time_left_s'])} left"
    return [
        told["name"],
        told["kind"] or "-",
        _state_text(told),
        f"{told['changes_per_s']:,.0f}",
        milliseconds(told["lag_ms_p50"]),
        milliseconds(told["lag_ms_p99"]),
        f"{told['events']:,}",
        keeps,
        progress_text(told["snapshot"]),
        told["error"] or kept.get("problem", ""),
    ]


def schema_rows(told: dict[str, Any]) -> list[list[str]]:
    """The tables of a capture, with the schemas that their events have."""
    return [
        [item["table"], item["topic"], str(item["version"]), str(item["id"]), item["changes"]]
        for item in sorted(told["tables"], key=lambda item: str(item["table"]))
    ]


def _show_schemas(told: list[dict[str, Any]], *, every: bool) -> None:
    """Which tables have changed; of a capture that was asked for by name, all tables."""
    for item in told:
        rows = [each for each in schema_rows(item) if every or each[-1]]
        if rows and every:
            output.say("")
            output.print_table(SCHEMA_COLUMNS, rows)
            more = item["table_count"] - len(rows)
            if more > 0:
                output.say(f"and {output.count(more, 'table')} more")
        else:
            for table, topic, version, _, changes in rows:
                output.say(f"{item['name']}: {table} has changed, its events in {topic} have "
                           f"schema version {version}: {changes}")  # fmt: skip


def show(
    look: Callable[[], list[dict[str, Any]]], *, watch: bool, json: bool, schemas: bool = False
) -> None:
    """Once, or again and again until Ctrl-C; with the schemas of all tables if that is wanted."""
    if not watch:
        told = look()
        if json:
            output.write_json(told)
        elif told:
            output.print_table(COLUMNS, map(row, told))
            for item in told:
                if item["state"] == SILENT:
                    output.say(
                        f"{item['name']} has ended without a word; it goes on where it was: "
                        f"penstock capture run {item['name']}"
                    )
                elif item["advice"]:
                    output.say(f"{item['name']}: {item['advice']}")
            _show_schemas(told, every=schemas)
        else:
            output.say("there are no captures; penstock capture add makes one")
        return
    pause = threading.Event()
    if json or not sys.stdout.isatty():
        while True:
            told = look()
            if json:
                output.write_json(told)
            else:
                output.print_table(COLUMNS, map(row, told))
            output.flush()
            pause.wait(1)
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        while True:
            live.update(output.table(COLUMNS, map(row, look())), refresh=True)
            pause.wait(1)


@contextmanager
def follow(capture: Capture, *, live: bool) -> Iterator[None]:
    """A line that changes while a capture runs in this process."""
    if not live:
        yield
        return
    from rich.console import Console
    from rich.live import Live

    done = threading.Event()

    def watch() -> None:
        with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as view:
            while not done.wait(LOOK_S):
                told = {**asdict(capture.status()), "database": {}}
                view.update(output.table(COLUMNS, [row(told)]), refresh=True)

    thread = threading.Thread(target=watch, name="capture-view", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def follow_snapshot(
    cluster: Cluster, name: str, tables: Sequence[str], before: CaptureStatus
) -> None:
    """Show a snapshot that a capture was told to take, until it is done; `before` is what it told
    before that."""
    from penstock.capture.delivery.control import status_of

    begun, heard, last = time.monotonic(), False, ""
    pause = threading.Event()
    while True:
        status = status_of(cluster, name) or before
        _must_run(status, heard=heard)
        if status.snapshot is not None:
            heard = True
            text = progress_text(asdict(status.snapshot))
            if text != last:
                _tell(f"{name}: {text}")
                last = text
        elif _is_at_rest(status) and (heard or _is_newer(status, begun)):
            if sys.stderr.isatty() and last:
                output.say("")
            _must_be_done(status, tables, before)
            output.say(f"{name}: the snapshot of {', '.join(tables) or 'all tables'} is done")
            return
        if not heard and time.monotonic() - begun > HEARD_S:
            raise PenstockError(
                f"{name} has not begun the snapshot", advice="penstock capture status shows why."
            )
        pause.wait(LOOK_S)


def _must_run(status: CaptureStatus, *, heard: bool) -> None:
    """PenstockError if nobody is there who could take the snapshot."""
    again = f"It goes on with the snapshot when it is run: penstock capture run {status.name}"
    if status.state == "failed":
        raise PenstockError(f"{status.name} has stopped: {status.error}", advice=status.advice)
    if status.state == "stopped" and not heard:
        raise PenstockError(f"{status.name} was stopped", advice=again)
    if status.state != "stopped" and not is_running(status):
        raise PenstockError(f"{status.name} has ended without a word", advice=again)


def _is_at_rest(status: CaptureStatus) -> bool:
    """Whether a snapshot that it was told of is over, if it has heard of it."""
    return status.state in {"streaming", "stopped"}


def _must_be_done(status: CaptureStatus, tables: Sequence[str], before: CaptureStatus) -> None:
    """PenstockError if it has told of a problem with one of these tables since."""
    if status.problem_ms <= before.ts_ms:
        return
    words = [word.strip(":,;") for word in status.error.split()]
    if any(fnmatchcase(word, table) for word in words for table in tables):
        raise PenstockError(f"{status.name}: {status.error}")
    output.warn(status.error)


def _is_newer(status: CaptureStatus, begun: float) -> bool:
    """Told so long after it was asked that it would have begun."""
    asked_ms = (time.time() - (time.monotonic() - begun)) * 1000
    return status.ts_ms > asked_ms + 3_000


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
    else:
        output.say(text)


def progress_text(told: dict[str, Any] | None) -> str:
    """`public.orders 42% (1,200,000 rows, 81,000/s, 20 s left)`."""
    if told is None:
        return "-"
    rows, estimate = told["rows"], told["estimate"]
    part = f" {min(rows / estimate, 1):.0%}" if estimate else ""
    left = f", {span(told['time_left_s'])} left" if told["time_left_s"] is not None else ""
    held = ", held" if told["is_paused"] else ""
    waiting = f", {told['waiting']} more wait" if told["waiting"] else ""
    rate = f"{told['rows_per_s']:,.0f}/s"
    what = "truncate of " if told.get("is_truncate") else ""
    return f"{what}{told['table']}{part} ({rows:,} rows, {rate}{left}{held}{waiting})"


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"


def size(count: int) -> str:
    """Bytes for people."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def span(seconds: float) -> str:
    """A duration for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
