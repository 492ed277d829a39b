"""Ten kills at random moments, and every record is in the output once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.killing import KillRun, Kind

KINDS: list[Kind] = ["driver", "group", *["worker"] * 4, *["broker"] * 4]  # type: ignore[list-item]


@pytest.mark.timeout(900)
def test_nothing_is_lost_or_doubled_by_ten_kills(tmp_path: Path, seed: int) -> None:
    run = KillRun(tmp_path, seed)
    run.rng.shuffle(KINDS)
    with run.running():
        for kind in KINDS:
            run.round(kind)
        run.verify()
    assert sum(run.kills.values()) == 10
