"""The diffs of CONTRIBUTING.md apply to the code as it is."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
DIFFS = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
RECIPES = ("a-broker-api", "a-sink", "a-capture-source", "an-operator", "a-command")


def test_each_recipe_has_a_diff() -> None:
    assert len(DIFFS) == len(RECIPES)
    assert all(f"(#{recipe})" in PAGE for recipe in RECIPES)


@pytest.mark.parametrize("diff", DIFFS, ids=RECIPES)
@pytest.mark.processes
def test_a_diff_applies(diff: str) -> None:
    command = ["git", "apply", "--check", "--verbose", "-"]
    done = subprocess.run(
        command, cwd=ROOT, input=diff, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_files_that_are_named_exist() -> None:
    """Apart from those that the diffs make."""
    made = set(re.findall(r"^\+\+\+ b/(\S+)", PAGE, re.MULTILINE))
    prose = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`((?:src|tests|tools|scripts|conformance|docs)/[\w/.-]+\w)`", prose))
    assert {path for path in named - made if not (ROOT / path).exists()} == set()
