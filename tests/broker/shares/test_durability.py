"""What was acknowledged stays so, over restarts, crashes and failing disks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.testing.broker import Broker
from penstock.testing.process import BrokerProcess
from tests.broker.disks import HastyDisk
from tests.broker.requests import create, delete
from tests.broker.shares.members import (
    ACCEPT,
    RELEASE,
    Taker,
    fill,
    lag_of,
    new_queue,
    numbered,
)

NEVER_MS = 3_600_000


@pytest.fixture(params=["disk", "os"])
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    disk = HastyDisk()
    with Broker(disk=disk, durability=request.param, housekeeping_interval_ms=NEVER_MS) as own:
        yield own


@pytest.mark.parametrize("how", ["stop", "crash"])
def test_acknowledged_records_are_not_delivered_after_a_restart(broker: Broker, how: str) -> None:
    topic, group = new_queue(broker)
    fill(broker, topic, *numbered(10))
    with Taker(broker, group, topic) as taker:
        taker.fetch()
        kinds = [ACCEPT, ACCEPT, RELEASE, ACCEPT]
        assert taker.acknowledge((0, 3, kinds), (7, 8, ACCEPT)) == "NONE"
    broker.crash() if how == "crash" else broker.stop()
    broker.start()
    with Taker(broker, group, topic) as taker:
        got = taker.fetch()
        assert got.offsets == [2, 4, 5, 6, 9]
        assert {count for _, _, count in got.acquired} == {2}


def test_the_place_where_a_group_began_is_kept(broker: Broker) -> None:
    """Records written after the first fetch are not skipped because of a restart."""
    topic, group = new_queue(broker, share_auto_offset_reset="latest")
    fill(broker, topic, b"before")
    with Taker(broker, group, topic) as taker:
        assert taker.fetch().offsets == []
        # Answered only after the round in which the group's beginning was written.
        taker.acknowledge((0, 0, ACCEPT))
        fill(broker, topic, b"after")
    broker.crash()
    broker.start()
    with Taker(broker, group, topic) as taker:
        assert taker.fetch().values == [b"after"]


def test_a_stop_with_consumers_at_work_is_clean(broker: Broker) -> None:
    topic, group = new_queue(broker)
    fill(broker, topic, *numbered(10))
    with Taker(broker, group, topic) as one, Taker(broker, group, topic) as other:
        one.fetch(max_records=1)
        other.fetch()
        other.send(wait_ms=60_000)
        one.send([(0, 4, ACCEPT)], wait_ms=0)
        assert one.receive().acknowledge_error == "NONE"
        broker.stop()
    broker.start()
    assert broker.call(lambda server: server.store.was_clean)
    with Taker(broker, group, topic) as one:
        assert one.fetch().acquired == [(5, 9, 2)]


def test_a_topic_made_anew_is_read_anew(broker: Broker) -> None:
    topic, group = new_queue(broker)
    fill(broker, topic, *numbered(3))
    with Taker(broker, group, topic) as taker:
        taker.fetch()
        taker.acknowledge((0, 2, ACCEPT))
        taker.client.call(delete(topic))
        taker.client.call(create(topic))
    broker.restart()
    fill(broker, topic, *numbered(2))
    with Taker(broker, group, topic) as taker:
        assert taker.fetch().offsets == [0, 1]


@pytest.mark.processes
def test_killed_again_and_again_under_load(tmp_path: Path, seed: int) -> None:
    """Every record is delivered, and none after it was acknowledged."""
    rng = random.Random(seed)
    count, kills = 160, 0
    done: set[int] = set()
    seen: set[int] = set()
    with BrokerProcess(tmp_path / "data", durability="disk") as process:
        topic, group = new_queue(process, share_delivery_count_limit="1000")
        for first in range(0, count, 20):
            fill(process, topic, *numbered(20, first))
        while True:
            with Taker(process, group, topic) as taker:
                for _ in range(rng.randrange(1, 8)):
                    got = taker.fetch(max_records=rng.randrange(1, 40), strict=True).offsets
                    assert not done & set(got), "delivered although acknowledged"
                    seen |= set(got)
                    answers = [(at, at, ACCEPT) for at in got if rng.random() < 0.8]
                    if answers:
                        assert taker.acknowledge(*answers) == "NONE"
                        done |= {at for at, _, _ in answers}
                if kills < 2 and len(done) > kills * 50:
                    kills += 1
                    got = taker.fetch(max_records=20, strict=True).offsets
                    seen |= set(got)
                    # Whether these are taken is never told.
                    taker.send([(at, at, ACCEPT) for at in got])
                    process.kill()
                    process.start()
            if not lag_of(process, group):
                break
    assert seen == set(range(count))
    assert kills == 2
