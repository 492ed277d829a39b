"""Consumers of every kind for a long time, with a broker that is killed again and again.

The same as `tests/broker/robustness/test_consumers_*.py`, in rounds on fresh data, until
`PENSTOCK_SOAK_MINUTES` are over (five unless set) and the broker was killed often enough.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.broker.robustness.consumers_churn import Churn
from tests.broker.robustness.consumers_pipeline import FAULTS, HOLD, PROTOCOLS, Pipeline
from tests.broker.robustness.consumers_queue import QueueTest
from tests.harness.profiles import SOAK_FAULTS, SOAK_KILLS, SOAK_MINUTES, SOAK_RECORDS
from tests.proof.progress import say

Test = Pipeline | Churn | QueueTest
Round = Callable[[Path, int], Test]


def soak(data: Path, seed: int, rounds: list[Round]) -> None:
    """One round after the other, until there were enough of them."""
    begun = time.monotonic()
    kills = records = 0
    for number, make in enumerate(itertools.cycle(rounds)):
        if kills >= SOAK_KILLS and time.monotonic() - begun > SOAK_MINUTES * 60:
            break
        test = make(data, seed + number)
        try:
            test.run(SOAK_FAULTS)
        except BaseException:
            say(f"round {number} failed; its own seed was {seed + number}", begun)
            raise
        kills += test.scene.kills
        records += test.source.count
        shutil.rmtree(data)
        say(f"round {number}: {test.report()}", begun)
    say(f"summary: {records} records, {kills} broker kills, no problem; seed {seed}", begun)


@pytest.mark.proof
@pytest.mark.independent
def test_exactly_once(tmp_path: Path, seed: int) -> None:
    def make(protocol: str) -> Round:
        return lambda data, own: Pipeline(
            data, own, total=SOAK_RECORDS, protocol=protocol, faults=(*FAULTS, HOLD)
        )

    soak(tmp_path / "data", seed, [make(protocol) for protocol in PROTOCOLS])


@pytest.mark.proof
@pytest.mark.independent
def test_groups_under_churn(tmp_path: Path, seed: int) -> None:
    def make(protocol: str) -> Round:
        return lambda data, own: Churn(data, own, total=SOAK_RECORDS, protocol=protocol)

    soak(tmp_path / "data", seed, [make(protocol) for protocol in PROTOCOLS])


@pytest.mark.proof
@pytest.mark.independent
def test_queues(tmp_path: Path, seed: int) -> None:
    def make(ordered: bool) -> Round:
        return lambda data, own: QueueTest(data, own, total=SOAK_RECORDS, ordered=ordered)

    soak(tmp_path / "data", seed, [make(ordered) for ordered in (False, True)])
