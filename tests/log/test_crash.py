"""Thousands of crashes at random points, each recovered and checked against the model."""

from __future__ import annotations

import pytest

from penstock.log.config import TopicConfig
from penstock.log.partition import PartitionId
from penstock.testing.faults import SimulatedCrash
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
LIVES = 8


def live_and_die(seed: int, *, faults: bool = False) -> Machine:
    machine = Machine(seed, CONFIGS)
    if faults:
        machine.mischief = machine.break_things
    machine.disk.crash_at(machine.rng.randint(1, 300))
    try:
        machine.start()
        machine.run(200)
    except SimulatedCrash:
        pass
    for _ in range(LIVES):
        machine.crash_and_recover()
        machine.disk.crash_at(machine.rng.randint(1, 400))
        try:
            machine.run(150)
        except SimulatedCrash:
            pass
    return machine


@pytest.mark.parametrize("part", range(4))
def test_nothing_acknowledged_is_lost(part: int, seed: int) -> None:
    for number in range(90):
        try:
            live_and_die(seed + 1000 * part + number)
        except BaseException as error:
            error.add_note(f"seed {seed + 1000 * part + number}")
            raise
