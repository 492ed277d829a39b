"""Writes docs/conformance.md: what is promised on both brokers, and what differs and why.

`python -m conformance.report` replaces the page; a test compares it with the scenarios.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Final

import conformance.scenarios  # noqa: F401 - brings the scenarios
from conformance import failover
from conformance.differences import DIFFERENCES
from conformance.scenario import SCENARIOS, Scenario

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "conformance.md"

_INTRODUCTION: Final = """\
# Conformance

Made from the scenarios by `python -m conformance.report`.

Each scenario is written once and runs unchanged on the embedded broker and on Apache Kafka 4.3.1
(KRaft, one node, started from its jars). `make conformance` runs them; they are part of
`make test`, and none can be skipped: without Apache Kafka's jars they fail.
"""
_DETAIL: Final = "[protocol.md](protocol.md) names differences of detail."
_CLIENTS: Final = """\
## Through clients

Written against the APIs of Kafka clients. Each says what must be observed, and both brokers must
show it.
"""
_PROTOCOL: Final = """\
## Request by request

Single requests of the Kafka protocol, right and wrong ones, in old and new versions. Whatever
Apache Kafka answers is the expectation: error codes, offsets and all other values that do not
differ from run to run must be the same.
"""


def page() -> str:
    """The page as it should be."""
    return "\n".join(line for part in _parts() for line in part) + "\n"


def _parts() -> Iterator[list[str]]:
    yield _INTRODUCTION.splitlines()
    yield ["", "## What differs, and why", "", *_differences()]
    yield ["", *_CLIENTS.splitlines()]
    for area, scenarios in _areas(is_protocol=False):
        yield [*_heading(area), "| scenario | promise |", "|---|---|"]
        yield [f"| {_title(scenario)} | {scenario.promise} |" for scenario in scenarios]
    yield ["", *_PROTOCOL.splitlines()]
    for area, scenarios in _areas(is_protocol=True):
        yield [*_heading(area), *(_item(scenario) for scenario in scenarios)]
    yield ["", "## When a node fails", "", *_failover()]


def _areas(*, is_protocol: bool) -> Iterator[tuple[str, Iterator[Scenario]]]:
    chosen = [scenario for scenario in SCENARIOS.values() if scenario.is_protocol == is_protocol]
    yield from groupby(sorted(chosen, key=attrgetter("area")), key=attrgetter("area"))


def _heading(area: str) -> list[str]:
    module = import_module(f"conformance.scenarios.{area}")
    title = (module.__doc__ or area).strip().splitlines()[0].rstrip(".")
    return ["", f"### `{area}`", "", f"{title}.", ""]


def _title(scenario: Scenario) -> str:
    return scenario.name.replace("_", " ")


def _item(scenario: Scenario) -> str:
    promise = f": {scenario.promise}" if scenario.promise else ""
    return f"- **{_title(scenario)}**{promise}"


def _differences() -> list[str]:
    if not DIFFERENCES:
        return ["Nothing in these scenarios.", "", _DETAIL]
    rows = ["| scenario | Apache Kafka | Penstock | reason |", "|---|---|---|---|"]
    for name, difference in sorted(DIFFERENCES.items()):
        scenario = SCENARIOS[name]
        kafka = f"`{scenario.expected}`" if scenario.has_expectation else "something else"
        rows.append(f"| `{name}` | {kafka} | `{difference.penstock}` | {difference.reason} |")
    return [*rows, "", _DETAIL]


def _failover() -> list[str]:
    text = (failover.__doc__ or "").strip().split("\n\n")[1:]
    return [line for paragraph in text for line in (*paragraph.splitlines(), "")][:-1]


if __name__ == "__main__":
    PAGE.write_text(page())
