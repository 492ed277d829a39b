"""Runs of small suites through the harness: what is luck passes, what is a fault fails twice.

Each run takes seconds, so one suite fails in every way at once and the tests look at its parts.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.harness.suites import WITH_WORKERS, Suite

pytestmark = pytest.mark.processes


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


FAILS_ONCE: Final = """
import os
from pathlib import Path

from tests.harness.servers import RemoteServers, Servers, servers_key

def test_unlucky():
    mark = Path("ran")
    first = not mark.exists()
    mark.touch()
    print("for the first time" if first else "again")
    assert not first, "bad | luck"

def test_sound(request):
    # A worker asks the controller for servers, and does not start its own.
    servers = request.config.stash[servers_key]
    assert isinstance(servers, RemoteServers if "PYTEST_XDIST_WORKER" in os.environ else Servers)
"""
WAITS: Final = """
import threading

def test_waits():
    threading.Event().wait(60)
"""
FAILS_TWICE: Final = """
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

def test_seeded(seed):
    known = Path("seed")
    if not known.exists():
        known.write_text(str(seed))
    assert str(seed) != known.read_text()

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

def test_that_starts_java():
    subprocess.run(["java", "-version"])

def test_that_starts_a_process():
    subprocess.run(["true"])

@pytest.mark.processes
def test_that_may_start_a_process():
    subprocess.run(["true"])

def test_deadly():
    os._exit(3)
"""


@dataclass(frozen=True)
class Run:
    """The run of a suite in which one test is unlucky and others are broken."""

    code: int
    output: str
    suite: Suite


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    suite = Suite(tmp_path_factory.mktemp("suite"))
    code, output = suite.run("test", FAILS_ONCE + FAILS_TWICE, *WITH_WORKERS)
    return Run(code, output, suite)


def test_a_test_that_passes_the_second_time_is_flaky(run: Run) -> None:
    assert "flaky: test_suite.py::test_unlucky" in run.output
    assert run.output.count("for the first time") >= 1
    assert "again" in run.output.partition("second run, passed")[2]
    assert "5 failed twice, 1 flaky" in run.output
    (row,) = run.suite.rows()
    assert row.startswith("| `test_suite.py::test_unlucky` |")
    assert "bad \\| luck" in row


@pytest.mark.parametrize(
    "name", ["seeded", "property", "that_starts_java", "that_starts_a_process", "deadly"]
)
def test_a_fault_fails_twice(run: Run, name: str) -> None:
    """A seed and an example are those of the first run; a worker that dies fails its test."""
    assert run.code == 1
    assert f"failed twice: test_suite.py::test_{name}\n" in run.output


def test_what_a_test_starts_must_be_marked(run: Run) -> None:
    assert "mark it with @pytest.mark.java" in run.output
    assert "mark it with @pytest.mark.processes" in run.output
    assert "test_that_may_start_a_process" not in run.output.partition("run once more")[2]


def test_a_flaky_test_is_listed_once_and_proof_gives_no_second_chance(suite: Suite) -> None:
    for expected in ("was added to flaky.md", "is open in flaky.md"):
        (suite.folder / "ran").unlink(missing_ok=True)
        code, output = suite.run("test", FAILS_ONCE)
        assert code == 0, output
        assert expected in output
        assert len(suite.rows()) == 1
    (suite.folder / "ran").unlink()
    code, output = suite.run("proof", FAILS_ONCE)
    assert code == 1, output
    assert "flaky:" not in output


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("os._exit(0)", "died between tests: it exited with 0"),
        ("threading.Event().wait()", "was aborted and was killed by SIGABRT"),
    ],
)
def test_a_worker_that_ends_between_tests_fails_the_run(
    suite: Suite, ending: str, expected: str
) -> None:
    body = """
import os, threading

import pytest

from tests.harness import parallel

parallel.GRACE_S = 2

class Deadly:
    def __eq__(self, other): return False
    def __reduce__(self): ENDING

@pytest.mark.parametrize("number", range(4))
def test_sound(number):
    # All reports have been sent when a worker says that it is done.
    parallel.DONE = Deadly()
"""
    code, output = suite.run("test", body.replace("ENDING", ending), *WITH_WORKERS)
    assert code not in (0, 1), output
    assert "4 passed" in output
    assert expected in output


@pytest.mark.parametrize("arguments", [["-x"], ["--continue-on-collection-errors"]], ids=str)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_run_that_stops_early_gives_no_second_chance(
    suite: Suite, arguments: list[str], workers: str
) -> None:
    """What never ran, or could not be collected, must not go unnoticed."""
    text = FAILS_ONCE
    if arguments == ["-x"]:
        # A worker may run on until it is stopped: something must be left then.
        text += WAITS
    else:
        (suite.folder / "test_broken.py").write_text("import no_such_module_anywhere")
        arguments = [*arguments, "test_broken.py"]
    code, output = suite.run("test", text, "--workers", workers, *arguments)
    assert code == 1, output
    assert "the run stopped early: no second chance" in output
    assert suite.rows() == []


def test_a_run_leaves_no_folder_behind(suite: Suite) -> None:
    body = "def test_quick(): pass"
    with tempfile.TemporaryDirectory() as folder:
        suite.temporary = folder
        for code, output in (suite.run_plainly(body), suite.run("test", body)):
            assert code == 0, output
            assert "1 passed" in output
        assert list(Path(folder).glob("penstock-run-*")) == []


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


def test_check_leaves_out_what_needs_more_than_this_process(suite: Suite) -> None:
    body = """
import pytest

@pytest.mark.java
def test_java():
    assert False

@pytest.mark.databases
def test_databases():
    assert False

@pytest.mark.processes
def test_processes():
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


def test_a_test_must_say_that_it_starts_a_process(suite: Suite) -> None:
    body = """
import subprocess, sys
import pytest

def start():
    subprocess.run([sys.executable, "-c", ""], check=True)

def test_unmarked():
    start()

@pytest.mark.processes
def test_processes():
    start()

@pytest.mark.databases
def test_databases():
    start()

@pytest.mark.proof
def test_proof():
    start()
"""
    code, output = suite.run("proof", body)
    assert code == 1, output
    assert "test_unmarked starts" in output
    assert "1 failed, 3 passed" in output
