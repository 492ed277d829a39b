"""Failed tests, kept so that they can be run once more with the same seeds.

The controller writes one line of JSON per failed phase of a test: its id, what it printed, and its
seed. In the second run the `seed` fixture takes the seed from there, and hypothesis replays the
failing examples from its database, so that a fault that depends on them fails twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import pytest

# The folder of the run; a plain pytest has a folder of its own and keeps no failures.
RUN_VARIABLE: Final = "PENSTOCK_TEST_RUN"
# The file with the failures to run again.
REPLAY_VARIABLE: Final = "PENSTOCK_TEST_REPLAY"
FIRST_FILE: Final = "failures.jsonl"
SECOND_FILE: Final = "second.jsonl"
SEED_PROPERTY: Final = "seed"
# Of one test; a longer text is cut in the middle.
TEXT_LIMIT: Final = 20_000


@dataclass(frozen=True)
class Outcome:
    """One phase of a test: whether it failed, and its output."""

    nodeid: str
    phase: str
    failed: bool
    text: str
    seed: int | None = None


def outcome_of(report: pytest.TestReport) -> Outcome:
    """What is kept of a report."""
    parts = [report.longreprtext] if report.longreprtext else []
    parts += [f"---- {name} ----\n{text}" for name, text in report.sections]
    seeds = [value for name, value in report.user_properties if name == SEED_PROPERTY]
    seed = seeds[-1] if seeds and isinstance(seeds[-1], int) else None
    return Outcome(report.nodeid, report.when, report.failed, _cut("\n".join(parts)), seed)


def _cut(text: str) -> str:
    if len(text) <= TEXT_LIMIT:
        return text
    half = TEXT_LIMIT // 2
    return f"{text[:half]}\n[... {len(text) - TEXT_LIMIT} characters ...]\n{text[-half:]}"


def append(file: Path, outcome: Outcome) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(asdict(outcome)) + "\n")


def read(file: Path) -> list[Outcome]:
    """All outcomes in a file; none if there is no file."""
    return list(_lines(file)) if file.exists() else []


def _lines(file: Path) -> Iterator[Outcome]:
    for line in file.read_text().splitlines():
        yield Outcome(**json.loads(line))


def by_test(outcomes: list[Outcome]) -> dict[str, list[Outcome]]:
    """The outcomes of each test, in the order in which they came."""
    grouped: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        grouped.setdefault(outcome.nodeid, []).append(outcome)
    return grouped
