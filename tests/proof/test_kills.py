"""Two hundred times killed with SIGKILL under load, and nothing that was acknowledged is lost.

The same as `tests/broker/robustness/test_kill.py`, on ten data directories one after the other,
so that what is read back after each kill stays small.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.broker.robustness.killing import KillTest
from tests.harness.profiles import SOAK_DIRECTORIES, SOAK_DIRECTORY_KILLS
from tests.proof.progress import say


@pytest.mark.proof
def test_two_hundred_kills(tmp_path: Path, seed: int) -> None:
    lives = acknowledged = made = deleted = 0
    begun = time.monotonic()
    for number in range(SOAK_DIRECTORIES):
        data = tmp_path / f"data-{number}"
        test = KillTest(data, seed + number)
        with test.running():
            for _ in range(SOAK_DIRECTORY_KILLS):
                test.kill_once()
        test.broker.start()
        test.verify()
        test.stop_cleanly()
        report = test.report
        lives, acknowledged = lives + report.lives, acknowledged + report.acknowledged
        made, deleted = made + report.topics_made, deleted + report.topics_deleted
        shutil.rmtree(data)
        say(
            f"directory {number + 1} of {SOAK_DIRECTORIES}: {lives} kills, {acknowledged} records",
            begun,
        )
    assert lives >= SOAK_DIRECTORIES * SOAK_DIRECTORY_KILLS
    say(
        f"summary: {lives} kills, {acknowledged} acknowledged records all there, {made} topics "
        f"made and {deleted} deleted in between; seed {seed}",
        begun,
    )
