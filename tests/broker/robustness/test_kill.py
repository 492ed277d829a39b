"""A real broker process under load, killed with SIGKILL: every acknowledged record is there.

At its offset, once, in order; topics that were made are there, topics that were deleted are not.
`make proof` does this two hundred times.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broker.robustness.killing import KillTest
from tests.harness.profiles import BROKER_KILLS


@pytest.mark.timeout(300)
@pytest.mark.processes
def test_nothing_acknowledged_is_lost_by_being_killed(tmp_path: Path, seed: int) -> None:
    test = KillTest(tmp_path / "data", seed)
    with test.running():
        for _ in range(BROKER_KILLS):
            test.kill_once()
    # The producers have delivered all they had, and nothing is under way any more.
    test.broker.start()
    test.verify()
    test.stop_cleanly()
    print(test.report)
