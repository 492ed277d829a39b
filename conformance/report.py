"""Writes docs/conformance.md: what is promised on both brokers, and what differs and why.

`python -m conformance.report` replaces the page; a test compares it with the scenarios.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Final

import conformance.scenarios  # noqa: F401 - brings the scenarios
from conformance import failover
from conformance.differences import DIFFERENCES
from conformance.scenario import SCENARIOS

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "conformance.md"

_INTRODUCTION: Final = """\
# Conformance

Made from the scenarios by `python -m conformance.report`.

Each scenario is written once, against the API of a Kafka client, and runs unchanged on the embedded
broker and on Apache Kafka 4.3.1 (KRaft, one node, started from its jars). Both must observe what
the scenario says. `make conformance` runs them; they are part of `make test`, and none can be
skipped: without Apache Kafka's jars they fail.
"""
_DETAIL: Final = "[protocol.md](protocol.md) names differences of detail."


def page() -> str:
    """The page as it should be."""
    return "\n".join(line for part in _parts() for line in part) + "\n"


def _parts() -> Iterator[list[str]]:
    yield _INTRODUCTION.splitlines()
    yield ["", "## What differs, and why", "", *_differences()]
    everything = sorted(SCENARIOS.values(), key=lambda found: found.area)
    for area, found in groupby(everything, key=lambda item: item.area):
        module = import_module(f"conformance.scenarios.{area}")
        title = (module.__doc__ or area).strip().splitlines()[0].rstrip(".")
        yield ["", f"## `{area}`", "", f"{title}.", "", "| scenario | promise |", "|---|---|"]
        yield [f"| {item.name.replace('_', ' ')} | {item.says} |" for item in found]
    yield ["", "## When a node fails", "", *_failover()]


def _differences() -> list[str]:
    if not DIFFERENCES:
        return ["Nothing in these scenarios.", "", _DETAIL]
    rows = ["| scenario | Apache Kafka | Penstock | reason |", "|---|---|---|---|"]
    for name, difference in sorted(DIFFERENCES.items()):
        kafka, ours = SCENARIOS[name].expected, difference.penstock
        rows.append(f"| `{name}` | `{kafka}` | `{ours}` | {difference.reason} |")
    return [*rows, "", _DETAIL]


def _failover() -> list[str]:
    text = (failover.__doc__ or "").strip().split("\n\n")[1:]
    return [line for paragraph in text for line in (*paragraph.splitlines(), "")][:-1]


if __name__ == "__main__":
    PAGE.write_text(page())
