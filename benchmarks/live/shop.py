"""The shop of `penstock demo`, looked at from the outside while it trades."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import orjson

from benchmarks.broker.clients import BUILD
from benchmarks.broker.workloads import progress
from benchmarks.frame import Asked, Cells
from benchmarks.live.freshness import Appended, Commits, percentile
from benchmarks.live.processes import Usage, command, wait_for
from penstock.cli.demo_parts import memory_bytes

FOLDER: Final = BUILD / "data" / "live"
# Changes of rows a second; with them come about two and a half times as many clicks.
RATE: Final = 60
INPUTS: Final = (
    "shop.customers", "shop.products", "shop.orders", "shop.clicks", "shop.payments",
    "shop.searches",
)  # fmt: skip
# The sink that has an interval of its own is not among those whose freshness counts.
WITH_INTERVAL: Final = "warehouse"
START_S: Final = 300.0
# Sinks tell the freshness of the last minute: that of the start is not to be in it.
SETTLE_S: Final = 60.0
QUICK_SETTLE_S: Final = 20.0
_PROBE_S: Final = 1.0
_PATIENCE_S: Final = 30.0
_STEP_S: Final = 0.005


def measure(asked: Asked) -> Cells:
    """Each round is a demo of its own."""
    cells: Cells = {}
    for _ in range(asked.rounds):
        found = _round(30.0, QUICK_SETTLE_S) if asked.quick else _round(120.0, SETTLE_S)
        progress("  " + ", ".join(f"{name} {value:,.2f}" for name, value in found.items()))
        for name, value in found.items():
            cells.setdefault(name, {}).setdefault("penstock", []).append(value)
    return cells


def _round(seconds: float, settle_s: float) -> dict[str, float]:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    data = FOLDER / "shop"
    arguments = ("demo", "--plain", "--data", str(data), "--listen", "127.0.0.1:0",
                 "--rate", str(RATE))  # fmt: skip
    began = time.monotonic()
    with command(*arguments, folder=FOLDER, log=FOLDER / "demo.log") as demo:
        revenue = Revenue(data / "derived" / "views.db")
        wait_for(revenue.seen, demo, START_S)
        first_s = time.monotonic() - began
        appended = Appended(_bootstrap(data), INPUTS)
        commits = Commits(data / ".penstock" / "flows")
        try:
            appended.start()
            commits.start()
            time.sleep(settle_s)
            used, begin = Usage(), time.time()
            delays = _probed(data, revenue, begin + seconds)
            share, end = used.share(), time.time()
            spent_ms = 1000 * used.spent_s()
            found = {"cpu": share, "memory": memory_bytes([demo.pid]) / 1e9, "first": first_s}
            sinks = _sinks(data)
            commits.look()
        finally:
            commits.close()
            appended.close()
            revenue.close()
        by_flow = commits.ages(appended, begin, end)
        found |= _flows(by_flow) | sinks | _delays(delays)
        batches = commits.batches(begin, end)
        found |= {"batches": batches / (end - begin), "batch_cpu": spent_ms / max(1, batches)}
    return found


def _flows(by_flow: dict[str, list[float]]) -> dict[str, float]:
    """Of the records of all flows, and of each flow by itself for whoever looks."""
    for name, ages in sorted(by_flow.items()):
        if ages:
            p50, p99 = percentile(ages, 0.5), percentile(ages, 0.99)
            progress(f"  {name}: p50 {p50:.2f} s, p99 {p99:.2f} s of {len(ages):,} records")
    ages = [age for each in by_flow.values() for age in each]
    if not ages:
        raise RuntimeError("no flow has committed anything")
    return {"flows_p50": percentile(ages, 0.5), "flows_p99": percentile(ages, 0.99)}


def _delays(delays: list[float]) -> dict[str, float]:
    if not delays:
        raise RuntimeError("no probe has come through")
    return {"row_p50": percentile(delays, 0.5), "row_p99": percentile(delays, 0.99)}


def _bootstrap(data: Path) -> str:
    text = (data / "penstock.toml").read_text()
    found = re.search(r'bootstrap = "([^"]+)"', text)
    assert found is not None
    return found[1]


def _sinks(data: Path) -> dict[str, float]:
    """What the sinks themselves say of the last minute: the worst of those without an interval."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "sinks", "list", "--json"],
        cwd=data, capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    told: list[dict[str, Any]] = orjson.loads(done.stdout)
    known = [each for each in told if each["name"] != WITH_INTERVAL and each["fresh_p50_s"]]
    for each in known:
        progress(f"  sink {each['name']}: p50 {each['fresh_p50_s']}, p99 {each['fresh_p99_s']}")
    return {
        "sinks_p50": max(each["fresh_p50_s"] for each in known),
        "sinks_p99": max(each["fresh_p99_s"] for each in known),
    }


class Revenue:
    """The derived table, watched for countries that come into it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._countries: dict[str, float] = {}
        self.seen = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(_STEP_S if self.seen.is_set() else 0.1):
            if not self._file.exists():
                continue
            address = f"file:{self._file}?mode=ro"
            with suppress(sqlite3.Error), closing(sqlite3.connect(address, uri=True)) as there:
                self._look(there)

    def _look(self, there: sqlite3.Connection) -> None:
        version = -1
        while not self._stop.wait(_STEP_S if self.seen.is_set() else 0.1):
            # Says that somebody has written, without reading the table.
            [(now,)] = there.execute("PRAGMA data_version")
            if now == version:
                continue
            version = now
            rows = there.execute("SELECT country FROM revenue_by_country").fetchall()
            at = time.time()
            with self._changed:
                for (country,) in rows:
                    self._countries.setdefault(country, at)
                self._changed.notify_all()
            if rows:
                self.seen.set()

    def came(self, country: str, timeout_s: float) -> float | None:
        """When a country came into the table."""
        with self._changed:
            self._changed.wait_for(lambda: country in self._countries, timeout_s)
            return self._countries.get(country)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def _probed(data: Path, revenue: Revenue, until: float) -> list[float]:
    """Seconds from the commit of an order, of a customer in a country that nobody else is from,
    to the moment when the country stands in the derived table."""
    delays = []
    with closing(sqlite3.connect(data / "shop.db", timeout=30)) as database:
        database.isolation_level = None
        number = 0
        while (now := time.time()) < until:
            number += 1
            country, key = f"probe-{number}", 1_000_000_000 + number
            database.execute("BEGIN IMMEDIATE")
            database.execute("INSERT INTO customers VALUES (?, 'P', 'p@p', ?)", (key, country))
            database.execute(
                "INSERT INTO orders VALUES (?, ?, 1, 1, 100, 'paid', ?)",
                (key, key, int(now * 1000)),
            )
            database.execute("COMMIT")
            committed = time.time()
            came = revenue.came(country, _PATIENCE_S)
            if came is None:
                raise RuntimeError(f"an order was not counted within {_PATIENCE_S:.0f} s")
            delays.append(max(0.0, came - committed))
            # At other moments of the flows' intervals each time.
            time.sleep(_PROBE_S + 0.137 * (number % 7))
    return delays
