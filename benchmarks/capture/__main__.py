"""The command line: `python -m benchmarks.capture [--only PART] [--rounds N] [--quick]`.

Parts, each for PostgreSQL, MariaDB and SQLite: `backlog` (changes that were there before the
capture came), `read` (the same, made into events that are thrown away, as Debezium's are), `live`
(changes while they are made as fast as the database takes them), `snapshot` (rows of a table),
`lag` (from the commit to the log at 10,000 changes/s). Processor time is that of the capture's
process alone. The tables go to stdout, `benchmarks/results/capture.json` and `docs/benchmarks.md`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from benchmarks import frame
from benchmarks.broker.clients import BUILD
from benchmarks.broker.servers import Penstock
from benchmarks.broker.workloads import progress
from benchmarks.capture import peers
from benchmarks.capture.databases import DATABASES, Database
from benchmarks.capture.peers import Peer
from benchmarks.frame import Asked, Cells, best, number

SYSTEMS: Final = {"penstock": "Penstock, into the log", "debezium": "Debezium, events thrown away"}
# By cell: title, whether lower is better.
CELLS: Final = {
    "backlog": ("changes/s of a backlog", False),
    "backlog_cpu": ("processor time per change of it, µs", True),
    "read": ("changes/s of a backlog, read and thrown away", False),
    "read_cpu": ("processor time per change of it, µs", True),
    "live": ("changes/s while they are made", False),
    "snapshot": ("rows/s of a snapshot", False),
    "snapshot_cpu": ("processor time per row of it, µs", True),
    "lag_p50": ("commit to log at 10,000 changes/s, p50, ms", True),
    "lag_p99": ("commit to log at 10,000 changes/s, p99, ms", True),
}
Measure = Callable[[Database, "Start", Asked, int], dict[str, float]]
# What the other system's cell is called, where it is another.
SAME_AS: Final = {"read": "backlog", "read_cpu": "backlog_cpu"}


class Start(Protocol):
    """Starts the capture of a round; ours may be told to throw its events away."""

    def __call__(self, *, only_read: bool = False) -> Peer: ...


@contextmanager
def broker() -> Iterator[str]:
    """A log as a user has it: an acknowledged record is on disk."""
    folder = BUILD / "data" / "capture"
    shutil.rmtree(folder, ignore_errors=True)
    server = Penstock(folder, "disk")
    server.start()
    try:
        yield server.address
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _rounds(measure: Measure, systems: Sequence[str], asked: Asked) -> Cells:
    """Every database, every system that can, by turns, each on a fresh table."""
    cells: Cells = {}
    for name, make in DATABASES.items():
        for turn in range(asked.rounds):
            for system in systems:
                database, folder = make(), peers.scratch()
                database.start()
                try:
                    if system == "debezium" and not database.debezium():
                        continue
                    with broker() as bootstrap:
                        start = partial(_start, system, database, bootstrap, folder)
                        found = measure(database, start, asked, turn)
                finally:
                    database.stop()
                    shutil.rmtree(folder, ignore_errors=True)
                shown = ", ".join(f"{cell} {value:,.1f}" for cell, value in found.items())
                progress(f"  {name}, {system}: {shown}")
                for cell, value in found.items():
                    cells.setdefault(f"{name} {cell}", {}).setdefault(system, []).append(value)
    return cells


def _start(
    system: str, database: Database, bootstrap: str, folder: Path, *, only_read: bool = False
) -> Peer:
    if system == "penstock":
        return peers.penstock(database, bootstrap, folder, only_read=only_read)
    return peers.debezium(database, folder)


def _rate(told: dict[str, Any], prefix: str) -> dict[str, float]:
    seconds = max(told["last_us"] - told["first_us"], 1) / 1e6
    used_us = told["cpu_us"] - told["first_cpu_us"]
    return {prefix: told["count"] / seconds, f"{prefix}_cpu": used_us / told["count"]}


def _is_there(peer: Peer, database: Database) -> None:
    """The capture has taken its snapshot and follows the stream: a row comes through."""
    peer.wait_for(1)
    database.insert(range(-1, 0))
    peer.wait_for(2)


def backlog(database: Database, start: Start, asked: Asked, turn: int) -> dict[str, float]:
    """A capture that was away: it knows its position, and finds changes."""
    database.make_table(1)
    with start() as peer:
        _is_there(peer, database)
    changes = database.change(20_000 if asked.quick else 400_000, first=10)
    with start() as peer:
        return _rate(peer.wait_for(changes), "backlog")


def read(database: Database, start: Start, asked: Asked, turn: int) -> dict[str, float]:
    """A backlog, without the log."""
    database.make_table(1)
    with start() as peer:
        _is_there(peer, database)
    changes = database.change(20_000 if asked.quick else 400_000, first=10)
    with start(only_read=True) as peer:
        return _rate(peer.wait_for(changes), "read")


def live(database: Database, start: Start, asked: Asked, turn: int) -> dict[str, float]:
    database.make_table(1)
    with start() as peer:
        _is_there(peer, database)
        peer.ask("clear")
        changes = database.change(20_000 if asked.quick else 300_000, first=10)
        return {"live": _rate(peer.wait_for(changes), "live")["live"]}


def snapshot(database: Database, start: Start, asked: Asked, turn: int) -> dict[str, float]:
    rows = 20_000 if asked.quick else 500_000
    database.make_table(rows)
    with start() as peer:
        return _rate(peer.wait_for(rows), "snapshot")


def lag(database: Database, start: Start, asked: Asked, turn: int) -> dict[str, float]:
    database.make_table(1)
    with start() as peer:
        _is_there(peer, database)
        peer.ask("stamp")
        # A second for warming up.
        warm = database.steadily(10_000, 3.0, first=10)
        peer.wait_for(warm)
        peer.ask("clear")
        done = database.steadily(10_000, 3.0 if asked.quick else 10.0, first=1_000_000)
        told = peer.wait_for(done)
        return {"lag_p50": told["lag_p50_us"] / 1000, "lag_p99": told["lag_p99_us"] / 1000}


PARTS: Final[dict[str, frame.Part]] = {
    "backlog": partial(_rounds, backlog, tuple(SYSTEMS)),
    "read": partial(_rounds, read, ("penstock",)),
    "live": partial(_rounds, live, tuple(SYSTEMS)),
    "snapshot": partial(_rounds, snapshot, tuple(SYSTEMS)),
    "lag": partial(_rounds, lag, tuple(SYSTEMS)),
}


def render(results: dict[str, Any]) -> str:
    cells: Cells = {}
    for part in results["parts"].values():
        cells.update(part["cells"])
    lines = [
        frame.measured_on(results),
        "",
        "| database | measurement | " + " | ".join(SYSTEMS.values()) + " | times Debezium |",
        "|---|---|" + "---:|" * (len(SYSTEMS) + 1),
    ]
    for name in DATABASES:
        for cell, (title, lower) in CELLS.items():
            found = cells.get(f"{name} {cell}")
            if not found:
                continue
            same = cells.get(f"{name} {SAME_AS.get(cell, cell)}", {})
            ours = best(found.get("penstock"), lower=lower)
            theirs = best(same.get("debezium"), lower=lower)
            ratio = "—"
            if ours and theirs:
                ratio = f"{theirs / ours if lower else ours / theirs:.2f}"
            shown = f"{number(ours)} | {number(theirs)}"
            lines.append(f"| {name} | {title} | {shown} | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(frame.run("capture", __doc__ or "", PARTS, render))
