"""Guarded topics under random writers, groups and restarts: what must hold at every moment.

Nothing that a group still needs is dropped, the bound is exceeded by one request at most, what was
acknowledged is there, and once the groups have read everything every producer is answered.
"""

from __future__ import annotations

import random
from time import monotonic

import pytest

from penstock.broker.config import Limits
from penstock.broker.server import Broker as Server
from penstock.testing.broker import Broker
from penstock.wire.errors import ErrorCode
from tests.broker.conftest import NEVER_MS
from tests.broker.disks import HastyDisk
from tests.broker.overload.guarded import (
    BATCH,
    BOUND,
    REFUSED,
    VERSION,
    commit,
    guard_of,
    guarded_topic,
    one_batch,
    partition_of,
    span,
)
from tests.broker.raw import RawClient
from tests.broker.requests import one
from tests.harness.profiles import GUARDED_RUNS, GUARDED_STEPS

PATIENCE_S = 60.0
GROUPS = ("a", "b")


class Run:
    """One broker, one guarded topic, some writers and two groups."""

    def __init__(self, broker: Broker, rng: random.Random, overflow: str) -> None:
        self.broker, self.rng = broker, rng
        self.admin = RawClient(broker.bootstrap)
        self.topic = guarded_topic(self.admin, overflow, {"overflow_groups": ",".join(GROUPS)})
        self.writers = [RawClient(broker.bootstrap) for _ in range(4)]
        self.places = dict.fromkeys(GROUPS, 0)
        self.acknowledged: list[int] = []

    def close(self) -> None:
        for client in (self.admin, *self.writers):
            client.close()

    def write(self) -> None:
        writer = self.rng.choice(self.writers)
        for _ in range(self.rng.choice([1, 1, 3, 12])):
            writer.send(one_batch(self.topic), VERSION)

    def collect(self) -> None:
        """Take the answers that are there."""
        for writer in self.writers:
            while writer.asked and not writer.is_silent():
                result = one(writer.receive())
                assert result.error_code in (ErrorCode.NONE, REFUSED), result
                if not result.error_code:
                    self.acknowledged.append(result.base_offset)

    def read(self) -> None:
        """A group reads on, or now and then goes back to what is still there."""
        group = self.rng.choice(GROUPS)
        back = self.rng.random() < 0.2
        start, end = span(self.broker, self.topic)
        place = self.rng.randint(start if back else self.places[group], end)
        commit(self.admin, self.topic, place, group=group)
        # What went in the same moment it cannot have; from now on it can rely on the rest.
        self.places[group] = max(place, span(self.broker, self.topic)[0])

    def restart(self) -> None:
        self.collect()
        self.close()
        self.rng.choice((self.broker.stop, self.broker.crash))()
        self.broker.start()
        self.admin = RawClient(self.broker.bootstrap)
        self.writers = [RawClient(self.broker.bootstrap) for _ in self.writers]

    def check(self) -> None:
        def look(server: Server) -> tuple[int, int, int]:
            partition = partition_of(server, self.topic)
            return partition.log_start, partition.log_end, guard_of(server, self.topic).size_bytes

        start, end, size = self.broker.call(look)
        assert start <= min(self.places.values())
        assert size < BOUND + BATCH
        assert len(set(self.acknowledged)) == len(self.acknowledged)
        assert max(self.acknowledged, default=-1) < end

    def finish(self) -> None:
        deadline = monotonic() + PATIENCE_S
        while any(writer.asked for writer in self.writers):
            assert monotonic() < deadline, "somebody is still waiting"
            for group in GROUPS:
                self.places[group] = span(self.broker, self.topic)[1]
                commit(self.admin, self.topic, self.places[group], group=group)
            self.collect()


@pytest.mark.parametrize("overflow", ["block", "reject"])
@pytest.mark.parametrize("seed", range(GUARDED_RUNS))
def test_what_must_hold_at_every_moment(seed: int, overflow: str) -> None:
    rng = random.Random(f"{seed} {overflow}")
    limits = Limits(max_hold_ms=rng.choice([10, NEVER_MS]))
    with Broker(disk=HastyDisk(), housekeeping_interval_ms=50, limits=limits) as broker:
        run = Run(broker, rng, overflow)
        try:
            for _ in range(GUARDED_STEPS):
                step = rng.choices(
                    (run.write, run.collect, run.read, run.restart), (40, 30, 30, 1)
                )[0]
                step()
                run.check()
            run.finish()
            run.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {overflow}: {error}") from error
        finally:
            run.close()
