"""Each command runs what the one before it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import seeds
from tests.harness.__main__ import MARKS
from tests.harness.profiles import VARIABLE, Profile

ROOT = Path(__file__).resolve().parents[2]


def collected(profile: Profile) -> set[str]:
    """The ids of the tests that a command runs."""
    marks = ["-m", MARKS[profile]] if MARKS[profile] else []
    # Some ids are drawn, from the seed of the run.
    environment = {**os.environ, VARIABLE: profile, seeds.RUN_VARIABLE: str(seeds.run_seed())}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-o", "addopts=", "-p",
         "no:cacheprovider", "--import-mode=importlib", "--verbosity=-1", *marks],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {line for line in done.stdout.splitlines() if "::" in line}


# Collecting takes ten seconds each time.
@pytest.mark.proof
def test_each_command_is_a_superset_of_the_one_before() -> None:
    check, test, proof = (collected(profile) for profile in Profile)
    assert len(check) > 1_000
    assert check - test == set()
    assert test - proof == set()
