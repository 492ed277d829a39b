"""Crashes at random points, each recovered and checked against the model.

A seed is one machine: it lives, crashes and recovers several times. To see one again that
failed, run `PENSTOCK_SEED=… pytest tests/log/test_crash.py`: the first machine has that seed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest

from penstock.log.config import TopicConfig
from penstock.log.partition import PartitionId
from penstock.testing.faults import SimulatedCrash
from tests.harness.profiles import LOG_CRASHES
from tests.log.crash_model import Machine

CONFIGS = {
    PartitionId("disk", 0): TopicConfig(segment_bytes=3000, index_interval_bytes=400),
    PartitionId("os", 0): TopicConfig(
        segment_bytes=2000, index_interval_bytes=300, durability="os", segment_ms=20_000
    ),
    PartitionId("stamped", 0): TopicConfig(
        segment_bytes=1200, index_interval_bytes=0, message_timestamp_type="LogAppendTime"
    ),
}
LIVES = 9


def live_and_die(seed: int, *, faults: bool = False) -> Machine:
    """One machine through several lives, some of them short."""
    machine = Machine(seed, CONFIGS)
    if faults:
        machine.mischief = machine.break_things
    machine.disk.crash_at(machine.rng.randint(1, 300))
    with contextlib.suppress(SimulatedCrash):
        machine.start()
        machine.run(150)
    for _ in range(LIVES):
        machine.crash_and_recover()
        machine.disk.crash_at(machine.rng.randint(1, machine.rng.choice((20, 100, 400))))
        with contextlib.suppress(SimulatedCrash):
            machine.run(150)
    return machine


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The engine has much to say about broken disks."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("faults", [False, True], ids=["crashes", "crashes-and-faults"])
@pytest.mark.parametrize("part", range(3))
def test_nothing_that_was_promised_is_lost(part: int, faults: bool, seed: int) -> None:
    crashes = 0
    number = seed + 1_000_000 * part
    while crashes < LOG_CRASHES:
        try:
            crashes += live_and_die(number, faults=faults).crashes
        except BaseException as error:
            error.add_note(f"to repeat: PENSTOCK_SEED={number}; faults={faults}")
            raise
        number += 1
