"""Tests that end their worker, or never end: the run tells which and why, and goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pytest

from tests.harness.suites import WITH_WORKERS, Suite

# Each of seven tests has a process of its own the second time, and a busy machine may be slow.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

BODY: Final = """
import os, signal, struct, sys, threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import parallel

parallel.GRACE_S = 2

def is_first(name):
    mark = Path(name)
    first = not mark.exists()
    mark.touch()
    return first

def test_unlucky():
    assert not is_first("unlucky")

def test_skipped_later():
    if not is_first("skipped"):
        pytest.skip("not now")
    assert False

def test_deadly_for_one_seed(seed):
    known = Path("seed")
    if not known.exists():
        known.write_text(str(seed))
    if str(seed) == known.read_text():
        print("printed by the dead")
        os._exit(3)

@given(st.integers(0, 10_000_000))
def test_deadly_for_one_example(number):
    known = Path("example")
    if not known.exists() and number > 5_000_000:
        known.write_text(str(number))
    if known.exists() and str(number) == known.read_text():
        os._exit(4)

def test_half_a_message(request):
    worker = request.config.pluginmanager.get_plugin("penstock-worker")
    os.write(worker._connection.fileno(), struct.pack("!i", 1_000) + b"half")
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.timeout(1)
def test_slow():
    bystander = threading.Thread(target=threading.Event().wait, daemon=True)
    bystander.name = "the-bystander"
    bystander.start()
    threading.Event().wait()

@pytest.mark.timeout(1)
def test_stuck():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    threading.Event().wait()

def test_sound():
    pass
"""
FAULTS: Final = (
    "skipped_later", "deadly_for_one_seed", "deadly_for_one_example", "half_a_message", "slow",
    "stuck",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """The run of the suite above."""

    code: int
    output: str

    def failure(self, name: str) -> str:
        """The first run's text on a failed test."""
        text = self.output.partition(f"_ {name} _")[2]
        return text.partition("\n______")[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(*Suite(tmp_path_factory.mktemp("suite")).run("test", BODY, *WITH_WORKERS))


@pytest.mark.parametrize("name", FAULTS)
def test_it_fails_twice(run: Run, name: str) -> None:
    """Seeds and examples repeat even if they end the process; to be skipped is not to pass."""
    assert run.code == 1
    assert f"failed twice: test_suite.py::test_{name}\n" in run.output


def test_the_others_are_not_dragged_along(run: Run) -> None:
    assert "flaky: test_suite.py::test_unlucky" in run.output
    assert "6 failed twice, 1 flaky" in run.output
    assert "7 failed, 1 passed" in run.output


def test_the_dead_leave_their_status_seed_and_output(run: Run) -> None:
    text = run.failure("test_deadly_for_one_seed")
    assert "exited with 3 while it ran test_suite.py::test_deadly_for_one_seed" in text
    assert "to repeat: PENSTOCK_SEED=" in text
    assert "printed by the dead" in text
    assert "was killed by SIGKILL" in run.failure("test_half_a_message")


def test_a_timeout_shows_the_stacks_of_all_threads(run: Run) -> None:
    assert "Stack of the-bystander" in run.failure("test_slow")


def test_what_no_signal_interrupts_is_aborted_and_shows_its_stack(run: Run) -> None:
    text = run.failure("test_stuck")
    assert "was aborted and was killed by SIGABRT" in text
    assert "in test_stuck" in text
