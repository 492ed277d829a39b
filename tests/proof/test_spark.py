"""Two hundred kills of drivers, Python workers and brokers under a stream, in ten runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.harness.profiles import SOAK_SPARK_KILLS, SOAK_SPARK_RUNS
from tests.proof.progress import say
from tests.spark.killing import KillRun, Kind

KINDS: tuple[Kind, ...] = ("driver", "group", "worker", "worker", "broker", "broker")


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(SOAK_SPARK_RUNS))
def test_nothing_is_lost_or_doubled_by_two_hundred_kills(
    tmp_path: Path, seed: int, number: int
) -> None:
    begun = time.monotonic()
    run = KillRun(tmp_path, seed)
    with run.running():
        for _ in range(SOAK_SPARK_KILLS):
            run.round(run.rng.choice(KINDS))
        run.verify()
    told = ", ".join(f"{count} of {kind}" for kind, count in sorted(run.kills.items()))
    say(
        f"run {number + 1} of {SOAK_SPARK_RUNS}: {told}; {len(run.fed)} records; seed {seed}", begun
    )
