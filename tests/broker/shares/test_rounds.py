"""Answers on their way into the journal: confirmed when they are safe, written together."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from penstock.broker.catalog import JOURNAL_TOPIC
from penstock.broker.server import Broker as Server
from penstock.broker.shares.rounds import Outcome
from penstock.errors import StorageError
from penstock.log.disk import OsDisk, OsFile
from penstock.records.record import decode
from penstock.testing.broker import Broker
from penstock.wire.zero import ZERO_UUID
from tests.broker.disks import GatedDisk
from tests.broker.shares.members import ACCEPT, Taker, fill, new_queue, numbered
from tests.broker.waits import wait_until

NEVER_MS = 3_600_000


class FailingFile(OsFile):
    """A file that does not sync while its disk fails."""

    __slots__ = ("_disk",)

    def __init__(self, fd: int, path: str, disk: FailingDisk) -> None:
        super().__init__(fd, path)
        self._disk = disk

    def sync(self) -> None:
        if self._disk.fails and JOURNAL_TOPIC in self.path:
            raise StorageError("the disk is on fire")
        super().sync()


class FailingDisk(OsDisk):
    """The real disk, but the journal cannot be synced while `fails`."""

    def __init__(self) -> None:
        self.fails = False

    def open(self, path: str, *, create: bool = False) -> OsFile:
        plain = super().open(path, create=create)
        failing = FailingFile(os.dup(plain.fileno()), path, self)
        plain.close()
        return failing


@pytest.fixture
def disk() -> GatedDisk:
    return GatedDisk()


@pytest.fixture
def gated(disk: GatedDisk) -> Iterator[Broker]:
    with Broker(disk=disk, durability="disk", housekeeping_interval_ms=NEVER_MS) as broker:
        yield broker
        disk.let_pass()


def entries(broker: Broker) -> int:
    """How many entries about queues the journal holds."""

    def count(server: object) -> int:
        journal = broker.server.coordination.journal.partition
        found = [record for _, batch in journal.batches() for record in decode(batch)]
        return sum(
            record.key is not None and record.key.startswith(b'["share"') for record in found
        )

    return broker.call(count)


def test_an_answer_is_confirmed_when_it_is_safe(gated: Broker, disk: GatedDisk) -> None:
    topic, group = new_queue(gated)
    fill(gated, topic, *numbered(4))
    with Taker(gated, group, topic) as taker, Taker(gated, group, topic) as other:
        taker.fetch()
        other.fetch()
        with disk.closed(JOURNAL_TOPIC):
            taker.send([(0, 1, ACCEPT)])
            disk.wait_for_sync()
            # The queue is worked on meanwhile.
            assert other.fetch().error == "NONE"
            assert taker.client.is_silent()
        assert taker.receive().acknowledge_error == "NONE"


def test_what_others_have_staged_is_waited_for(gated: Broker, disk: GatedDisk) -> None:
    """Whoever makes room in a topic takes the changes along, before the round comes to it."""

    def ask(server: Server) -> Outcome:
        outcome = server.queues.rounds.durable()
        server.coordination.journal.stage([(("share", "g", str(ZERO_UUID), 0), None)])
        return outcome

    with disk.closed(JOURNAL_TOPIC):
        outcome = gated.call(ask)
        disk.wait_for_sync()
        assert not gated.call(lambda _: outcome.done())
    wait_until(gated, lambda _: outcome.done())
    assert gated.call(lambda _: outcome.result()) is None


def test_answers_of_many_are_written_together(gated: Broker, disk: GatedDisk) -> None:
    topic, group = new_queue(gated)
    for at in range(8):
        fill(gated, topic, b"%d" % at)
    takers = [Taker(gated, group, topic) for _ in range(8)]
    held = [taker.fetch(max_records=1).offsets[0] for taker in takers]
    before = entries(gated)
    with disk.closed(JOURNAL_TOPIC):
        takers[0].send([(held[0], held[0], ACCEPT)])
        disk.wait_for_sync()
        for taker, offset in list(zip(takers, held, strict=True))[1:]:
            taker.send([(offset, offset, ACCEPT)])
        wait_until(gated, lambda server: _locked(gated, group) == 0)
    for taker in takers:
        assert taker.receive().acknowledge_error == "NONE"
        taker.client.close()
    # One for the first, one for all that gathered behind it.
    assert entries(gated) - before <= 3


def _locked(broker: Broker, group: str) -> int:
    return broker.server.coordination.shares.queues_of(group)[0].share.locked


def test_a_failing_journal_is_told_and_nothing_confirmed_is_lost() -> None:
    disk = FailingDisk()
    with Broker(disk=disk, durability="disk", housekeeping_interval_ms=NEVER_MS) as broker:
        topic, group = new_queue(broker)
        fill(broker, topic, *numbered(6))
        with Taker(broker, group, topic) as taker:
            taker.fetch()
            assert taker.acknowledge((0, 1, ACCEPT)) == "NONE"
            disk.fails = True
            assert taker.acknowledge((2, 3, ACCEPT)) == "KAFKA_STORAGE_ERROR"
            disk.fails = False
            # The state is what is safe: nobody has anything, and a new session begins.
            error = taker.fetch().error
            assert error in ("NONE", "SHARE_SESSION_NOT_FOUND")
        with Taker(broker, group, topic) as taker:
            seen: set[int] = set()
            while not seen >= {2, 3, 4, 5}:
                got = taker.fetch(wait_ms=5_000)
                if got.error != "NONE":
                    taker.epoch = 0
                seen |= set(got.offsets)
            assert not seen & {0, 1}
            assert taker.acknowledge((2, 5, ACCEPT)) == "NONE"
        broker.restart()
        with Taker(broker, group, topic) as taker:
            assert taker.fetch().offsets == []
