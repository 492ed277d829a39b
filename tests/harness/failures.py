"""Failed tests, kept so that they can be run once more.

The controller writes one line of JSON per failed phase of a test: its id and what it printed. A
file says that the run came to its end. Only then may failed tests have a second chance: of a run
that stopped early nobody knows what else would have failed. In the second run each test has the
seed of the first (see `seeds`), and hypothesis replays failing examples from its database, so that
a fault that depends on them fails twice.
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
# The id of the one test to run again.
REPLAY_VARIABLE: Final = "PENSTOCK_TEST_REPLAY"
FIRST_FILE: Final = "failures.jsonl"
SECOND_FILE: Final = "second.jsonl"
# Exists if everything was collected and every test came to an end.
COMPLETE_FILE: Final = "complete"
# Of one test; a longer text is cut in the middle.
TEXT_LIMIT: Final = 20_000


@dataclass(frozen=True)
class Outcome:
    """One phase of a test: `passed`, `failed` or `skipped`, and its output."""

    nodeid: str
    phase: str
    outcome: str
    text: str


def outcome_of(report: pytest.TestReport) -> Outcome:
    """What is kept of a report."""
    parts = [report.longreprtext] if report.longreprtext else []
    parts += [f"---- {name} ----\n{text}" for name, text in report.sections]
    return Outcome(report.nodeid, report.when, report.outcome, _cut("\n".join(parts)))


def has_passed(outcomes: list[Outcome]) -> bool:
    """Whether a test ran to its end and passed; a skipped one, or half of one, has not."""
    phases = {outcome.phase: outcome.outcome for outcome in outcomes}
    return phases.get("call") == phases.get("teardown") == "passed" and "failed" not in (
        outcome.outcome for outcome in outcomes
    )


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
