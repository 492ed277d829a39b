"""Kills at random moments, and every record is in the output once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.profiles import SPARK_KILLS
from tests.spark.killing import KillRun, Kind

# The first few: one of each kind.
KINDS: list[Kind] = [
    "driver", "worker", "broker", "group", *["worker", "broker"] * 3,  # type: ignore[list-item]
]  # fmt: skip


@pytest.mark.java
@pytest.mark.timeout(900)
def test_nothing_is_lost_or_doubled_by_kills(tmp_path: Path, seed: int) -> None:
    run = KillRun(tmp_path, seed)
    kinds = KINDS[:SPARK_KILLS]
    run.rng.shuffle(kinds)
    with run.running():
        for kind in kinds:
            run.round(kind)
        run.verify()
    assert sum(run.kills.values()) == SPARK_KILLS
