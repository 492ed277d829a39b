"""Tests that failed once and then passed: printed with both outputs, and kept in a list.

The list is `tests/flaky.md`, a table with one row per test. A row is added by the run that saw it,
and removed by whoever has found and mended the cause.
"""

from __future__ import annotations

import datetime
import os
import subprocess
from pathlib import Path
from typing import Final

from tests.harness.failures import Outcome

PAGE_VARIABLE: Final = "PENSTOCK_FLAKY_PAGE"
_PAGE: Final = Path(__file__).resolve().parent.parent / "flaky.md"
_REASON_LIMIT: Final = 120


def report(nodeid: str, first: list[Outcome], second: list[Outcome]) -> None:
    """Print both outputs, and add the test to the list unless it is there."""
    print(f"\nflaky: {nodeid}")
    for title, outcomes in (("first run, failed", first), ("second run, passed", second)):
        print(f"  ==== {title} ====")
        for outcome in outcomes:
            if outcome.text:
                print(f"  {outcome.phase}:\n{outcome.text}")
    page = Path(os.environ.get(PAGE_VARIABLE) or _PAGE)
    added = add(page, nodeid, reason(first))
    print(f"flaky: {nodeid} {'was added to' if added else 'is open in'} {page.name}")


def reason(outcomes: list[Outcome]) -> str:
    """The line of the failure that says most: pytest marks it with an E."""
    lines = [line for outcome in outcomes for line in outcome.text.splitlines()]
    marked = [line[1:].strip() for line in lines if line.startswith("E  ")]
    return (marked or lines or ["no output"])[0][:_REASON_LIMIT]


def add(page: Path, nodeid: str, why: str) -> bool:
    """Add a row; False if the test has one."""
    text = page.read_text()
    if f"| `{nodeid}` |" in text:
        return False
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    escaped = why.replace("|", "\\|")
    page.write_text(f"{text.rstrip()}\n| `{nodeid}` | {today} | {_commit()} | {escaped} |\n")
    return True


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
