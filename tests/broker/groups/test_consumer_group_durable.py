"""Nobody is told what a crash could take back: members, the journal and a disk that fails."""

from __future__ import annotations

import random
from typing import Any

from penstock.broker.catalog import JOURNAL_TOPIC
from penstock.broker.groups.consumer import ConsumerGroup
from penstock.testing.broker import Broker
from penstock.testing.faults import SimulatedDisk
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    RequestTopicPartitions,
)
from tests.broker.disks import GatedDisk
from tests.broker.raw import RawClient
from tests.broker.requests import create
from tests.broker.robustness.disks import broker_on
from tests.broker.waits import wait_until

GROUP = "g"


class Reader:
    """A member that speaks over its own connection."""

    def __init__(self, client: RawClient, id_: str) -> None:
        self.client, self.id = client, id_
        self.epoch = 0
        self.owned: set[tuple[Any, int]] = set()
        # An answer was lost: as clients do, the next request says everything.
        self.unsure = False

    def request(self, *, full: bool = False) -> ConsumerGroupHeartbeatRequest:
        request = ConsumerGroupHeartbeatRequest(
            group_id=GROUP, member_id=self.id, member_epoch=self.epoch
        )
        if self.epoch == 0 or full or self.unsure:
            request.rebalance_timeout_ms = 60_000
            request.subscribed_topic_names = ["t"]
        request.topic_partitions = [
            RequestTopicPartitions(topic_id=topic, partitions=[number])
            for topic, number in self.owned
        ]
        return request

    def take(self, answer: Any) -> int:
        """Do as the answer says; the error code."""
        self.unsure = False
        code = int(answer.error_code)
        if code in (ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID):
            self.epoch, self.owned = 0, set()
        elif not code:
            self.epoch = answer.member_epoch
            if answer.assignment is not None:
                self.owned = {
                    (item.topic_id, number)
                    for item in answer.assignment.topic_partitions
                    for number in item.partitions
                }
        return code

    def beat(self, *, full: bool = False) -> int:
        return self.take(self.client.call(self.request(full=full)))


def test_an_answer_waits_until_what_it_says_is_safe() -> None:
    disk = GatedDisk()
    with (
        Broker(disk=disk, durability="disk") as broker,
        RawClient(broker.bootstrap) as client,
        RawClient(broker.bootstrap) as other,
    ):
        client.call(create("t", 2))
        one, two = Reader(client, "one"), Reader(other, "two")
        with disk.closed(JOURNAL_TOPIC):
            client.send(one.request())
            disk.wait_for_sync()
            assert client.is_silent()
            # A second one would be told that it must wait for the first, which is not sure yet.
            other.send(two.request())
            wait_until(broker, lambda server: len(group_in(server).members) == 2)
            assert client.is_silent()
            assert other.is_silent()
        assert one.take(client.receive()) == ErrorCode.NONE
        assert len(one.owned) == 2
        assert two.take(other.receive()) == ErrorCode.NONE
        assert not two.owned


def group_in(server: Any) -> ConsumerGroup:
    group = server.coordination.groups.get(GROUP)
    assert isinstance(group, ConsumerGroup)
    return group


def test_what_could_not_be_made_safe_has_not_happened() -> None:
    disk = SimulatedDisk(forgets_failed_pages=True)
    with (
        broker_on(disk) as broker,
        RawClient(broker.bootstrap) as client,
        RawClient(broker.bootstrap) as other,
    ):
        client.call(create("t", 2))
        one, two = Reader(client, "one"), Reader(other, "two")
        assert one.beat() == ErrorCode.NONE
        disk.fail("sync", path_part=JOURNAL_TOPIC)
        assert two.beat() == ErrorCode.COORDINATOR_NOT_AVAILABLE
        disk.heal()
        assert {one.beat(), one.beat()} <= {ErrorCode.NONE, ErrorCode.COORDINATOR_NOT_AVAILABLE}
        assert broker.call(lambda server: set(group_in(server).members)) == {"one"}
        assert len(one.owned) == 2
        rebalance(one, two)


def rebalance(*readers: Reader) -> None:
    """Until all have equally many; never has one what another has."""
    for _ in range(10):
        for reader in readers:
            reader.beat()
            check_exclusive(*readers)
    assert [len(reader.owned) for reader in readers] == [2 // len(readers)] * len(readers)


def check_exclusive(*readers: Reader) -> None:
    owned = [partition for reader in readers for partition in reader.owned]
    assert len(owned) == len(set(owned))


def test_a_power_loss_gives_nothing_away(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        lose_power(rng)


def lose_power(rng: random.Random) -> None:
    """Two members in the middle of a rebalance; the power fails; both go on with what they have."""
    disk = SimulatedDisk()
    with broker_on(disk) as broker:
        with RawClient(broker.bootstrap) as client:
            client.call(create("t", 2))
            readers = [Reader(client, "one"), Reader(client, "two")]
            readers[0].beat()
            for _ in range(rng.randrange(6)):
                rng.choice(readers).beat()
            # Two more are on their way; whether they get there nobody knows.
            for reader in readers:
                client.send(reader.request(full=True))
            broker.crash()
    with broker_on(disk.after_crash(), data=broker.data) as broker:
        with RawClient(broker.bootstrap) as client:
            for reader in readers:
                reader.client, reader.unsure = client, True
            check_exclusive(*readers)
            for _ in range(6):
                rng.choice(readers).beat(full=True)
                check_exclusive(*readers)
            rebalance(*readers)
