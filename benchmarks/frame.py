"""What the benchmarks have in common: the command line, the file of results, the page of tables.

A benchmark has *parts*; a part measures some *cells* (a rate, a latency) for some *systems*, each
in several rounds, the systems by turns. `run` runs the parts that were asked for and keeps the
earlier results of the others, so that a long benchmark can be run piece by piece; each part says
when it was measured and how busy the machine was before it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import FrameType
from typing import Any, Final

from benchmarks.broker import docs
from benchmarks.broker.clients import BUILD, ROOT
from benchmarks.broker.results import describe_machine
from benchmarks.broker.workloads import progress

RESULTS: Final = ROOT / "benchmarks" / "results"

# By cell, by system: one value per round.
Cells = dict[str, dict[str, list[float]]]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks of a part."""

    rounds: int
    quick: bool


Part = Callable[[Asked], Cells]
Render = Callable[[dict[str, Any]], str]


def run(name: str, description: str, parts: Mapping[str, Part], render: Render) -> int:
    """The program: `python -m benchmarks.NAME [--only PART] [--rounds N] [--quick]`."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument(
        "--only", "--case", action="append", choices=list(parts), help="may be repeated"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="of each measurement; the best counts"
    )
    parser.add_argument("--quick", action="store_true", help="one short round, nothing is written")
    options = parser.parse_args()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    asked = Asked(1 if options.quick else options.rounds, options.quick)
    path = RESULTS / f"{name}.json"
    results: dict[str, Any] = {"parts": {}}
    if path.exists() and not options.quick:
        results = json.loads(path.read_text())
    results["machine"] = describe_machine(BUILD / "data")
    failures = 0
    try:
        for part in options.only or parts:
            progress(f"{name}: {part}")
            load = f"{os.getloadavg()[0]:.1f}"
            try:
                cells = parts[part](asked)
            except Exception as error:
                failures += 1
                progress(f"  {part} failed: {type(error).__name__}: {error}")
                continue
            today = datetime.now(UTC).strftime("%Y-%m-%d")
            results["parts"][part] = {"date": today, "load": load, "cells": cells}
            # After each part: what was measured is not lost with what fails later.
            if not options.quick:
                _save(name, results, render)
    except KeyboardInterrupt:
        progress("interrupted; the parts that were finished are kept")
        return 130
    print(render(results))
    return 1 if failures else 0


def _save(name: str, results: dict[str, Any], render: Render) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    docs.replace_section(docs.DOCS, f"bench-{name}", render(results))


def measured_on(results: dict[str, Any]) -> str:
    """Where and when, as one sentence."""
    machine = results["machine"]
    when = ", ".join(
        f"{part} {found['date']} (load before {found['load']})"
        for part, found in results["parts"].items()
    )
    return (
        f"Measured on {machine['cpu']}, {machine['memory']} of memory, {machine['disk']}; "
        f"{machine['system']}, Python {machine['python']}: {when}. Best of the rounds."
    )


def best(values: list[float] | None, *, lower: bool = False) -> float | None:
    """The best round: noise mostly slows down."""
    if not values:
        return None
    return min(values) if lower else max(values)


def number(value: float | None, unit: str = "") -> str:
    """A figure for people: 2.47M, 116k, 257 ms."""
    if value is None:
        return "—"
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}{unit}"
    return f"{value:.3g}{unit}"


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
