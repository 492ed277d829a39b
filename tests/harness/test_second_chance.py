"""Runs of small suites through the harness: what is luck passes, what is a fault fails twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.harness.flaky import PAGE_VARIABLE

ROOT: Final = Path(__file__).resolve().parents[2]
CONFTEST: Final = (ROOT / "tests" / "conftest.py").read_text()
PAGE: Final = "| test | seen | commit | failure |\n|---|---|---|---|\n"


class Suite:
    """A suite in a folder of its own, with the harness and the fixtures of this one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.page = folder / "flaky.md"
        self.page.write_text(PAGE)
        (folder / "pytest.ini").write_text(
            "[pytest]\nmarkers =\n  java\n  databases\n  independent\n  proof\n"
        )
        (folder / "conftest.py").write_text(
            f'{CONFTEST}\npytest_plugins = ["tests.harness.plugin"]\n'
        )

    def run(self, profile: str, body: str) -> tuple[int, str]:
        """The exit code and the output of a run."""
        (self.folder / "test_suite.py").write_text(body)
        done = subprocess.run(
            [sys.executable, "-m", "tests.harness", profile, "-n", "2", "--rootdir",
             str(self.folder), "-c", str(self.folder / "pytest.ini"), "test_suite.py"],
            env={**os.environ, "PYTHONPATH": str(ROOT), PAGE_VARIABLE: str(self.page)},
            cwd=self.folder, capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


FAILS_ONCE: Final = """
from pathlib import Path

def test_unlucky():
    mark = Path("ran")
    first = not mark.exists()
    mark.touch()
    print("for the first time" if first else "again")
    assert not first, "bad | luck"

def test_sound():
    pass
"""


def test_a_test_that_passes_the_second_time_is_flaky(suite: Suite) -> None:
    code, output = suite.run("test", FAILS_ONCE)
    assert code == 0, output
    assert "flaky: test_suite.py::test_unlucky" in output
    assert output.count("for the first time") >= 1
    assert "again" in output.partition("second run, passed")[2]
    assert "0 failed twice, 1 flaky" in output
    rows = suite.page.read_text().splitlines()[2:]
    assert len(rows) == 1
    assert rows[0].startswith("| `test_suite.py::test_unlucky` |")
    assert "bad \\| luck" in rows[0]


def test_a_flaky_test_is_listed_once(suite: Suite) -> None:
    for _ in range(2):
        (suite.folder / "ran").unlink(missing_ok=True)
        code, output = suite.run("test", FAILS_ONCE)
        assert code == 0, output
    assert "is open in flaky.md" in output
    assert len(suite.page.read_text().splitlines()) == 3


def test_proof_gives_no_second_chance(suite: Suite) -> None:
    code, output = suite.run("proof", FAILS_ONCE)
    assert code == 1, output
    assert "flaky:" not in output


def test_a_fault_that_depends_on_the_seed_fails_twice(suite: Suite) -> None:
    body = """
from pathlib import Path

def test_seeded(seed):
    known = Path("seed")
    if not known.exists():
        known.write_text(str(seed))
    assert str(seed) != known.read_text()
"""
    code, output = suite.run("test", body)
    assert code == 1, output
    assert "failed twice: test_suite.py::test_seeded" in output


def test_hypothesis_replays_the_example_that_failed(suite: Suite) -> None:
    body = """
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

SHOWN = Path("shown")

@settings(max_examples=300)
@given(st.integers(0, 10_000_000))
def test_property(number):
    # Only the first run can find it by chance: the second has one example of its own.
    if not SHOWN.exists() and number < 5_000_000:
        return
    if SHOWN.exists() and str(number) not in SHOWN.read_text().split():
        return
    with SHOWN.open("a") as shown:
        shown.write(f"{number} ")
    assert False
"""
    code, output = suite.run("test", body)
    assert code == 1, output
    assert "failed twice: test_suite.py::test_property" in output


def test_a_worker_that_dies_is_a_failure_of_its_test(suite: Suite) -> None:
    body = """
import os

def test_deadly():
    os._exit(3)
"""
    code, output = suite.run("test", body)
    assert code == 1, output
    assert "failed twice: test_suite.py::test_deadly" in output


def test_many_failures_are_no_bad_luck(suite: Suite) -> None:
    body = """
import pytest

@pytest.mark.parametrize("number", range(20))
def test_broken(number):
    assert False
"""
    code, output = suite.run("test", body)
    assert code == 1, output
    assert "run once more" not in output


def test_a_file_that_cannot_be_imported_fails_the_run(suite: Suite) -> None:
    code, output = suite.run("test", "import no_such_module_anywhere")
    assert code != 0, output
    assert "no_such_module_anywhere" in output


def test_check_leaves_out_what_needs_more_than_python(suite: Suite) -> None:
    body = """
import pytest

@pytest.mark.java
def test_java():
    assert False

@pytest.mark.databases
def test_databases():
    assert False

@pytest.mark.proof
def test_long():
    assert False

def test_quick():
    pass
"""
    code, output = suite.run("check", body)
    assert code == 0, output
    assert "1 passed" in output


def test_a_test_that_starts_java_must_say_so(suite: Suite) -> None:
    body = """
import subprocess

def test_unmarked():
    subprocess.run(["java", "-version"])
"""
    code, output = suite.run("test", body)
    assert code == 1, output
    assert "mark it with @pytest.mark.java" in output
