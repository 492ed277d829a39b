"""Commits when the journal's disk fails: nobody is told of an offset that is not safe.

Entries of many requests are appended and synced together, so one failure meets all of them. The
state in memory, which is ahead by then, is read from the journal again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from penstock.broker.apis.context import RequestContext
from penstock.broker.apis.group_offsets import offset_fetch
from penstock.broker.catalog import JOURNAL_TOPIC
from penstock.broker.config import BrokerConfig
from penstock.broker.connection import Connection
from penstock.broker.groups.classic import STABLE
from penstock.broker.groups.classic_member import SyncCall
from penstock.broker.journal import Entry
from penstock.broker.server import Broker as Server
from penstock.errors import StorageError
from penstock.testing.faults import Operation, SimulatedDisk
from penstock.wire.errors import ErrorCode
from tests.broker.disks import GatedDisk
from tests.broker.group_requests import commit, committed, heartbeat, join, offsets_of, sync
from tests.broker.groups.machine import QUIET_MS, REBALANCE_MS, SESSION_MS, Client, Machine, settle
from tests.broker.raw import RawClient
from tests.broker.requests import create, one
from tests.broker.robustness.disks import broker_on
from tests.broker.robustness.watch import eventually

VERSION = 9
PIPELINED = 20


def told(client: RawClient, *groups: str) -> list[int]:
    """The committed offsets of partition 0, as groups are told."""
    answers = [offsets_of(client.call(committed(group, "t", 0), VERSION)) for group in groups]
    # While the disk fails there is an error instead.
    return [parts[0][1] if parts else -2 for ((_, parts),) in answers]


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_commit_that_is_not_safe_is_not_acknowledged(operation: Operation) -> None:
    disk = SimulatedDisk()
    groups = [f"g{number}" for number in range(PIPELINED)]
    with broker_on(disk) as broker:
        with RawClient(broker.bootstrap) as client:
            client.call(create("t"))
            for group in groups:
                client.call(commit(group, "t", {0: 1}), VERSION)
        disk.fail(operation, times=-1, path_part=JOURNAL_TOPIC)
        with RawClient(broker.bootstrap) as client:
            client.send_all(*((commit(group, "t", {0: 2}), VERSION) for group in groups))
            codes = {one(client.receive()).error_code for _ in groups}
            assert codes == {ErrorCode.COORDINATOR_NOT_AVAILABLE}
            disk.heal()
            eventually(lambda: told(client, *groups) == [1] * PIPELINED, "the old offsets are back")
            for group in groups:
                client.call(commit(group, "t", {0: 3}), VERSION)
            assert told(client, *groups) == [3] * PIPELINED
        broker.crash()
        broker.start()
        with RawClient(broker.bootstrap) as client:
            assert told(client, *groups) == [3] * PIPELINED


def test_a_group_goes_on_after_the_disk_has_failed() -> None:
    disk = SimulatedDisk()
    with broker_on(disk) as broker, RawClient(broker.bootstrap) as client:
        client.call(create("t"))
        member = client.call(join("g")).member_id
        client.call(join("g", member))
        disk.fail("write", times=-1, path_part=JOURNAL_TOPIC)
        # The assignment cannot be written down, so nobody gets it.
        refused = client.call(sync("g", member, 1, {member: b"mine"}))
        assert refused.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
        disk.heal()
        # It asks again, as clients do.
        synced = client.call(sync("g", member, 1, {member: b"mine"}))
        assert (synced.error_code, synced.assignment) == (0, b"mine")
        assert client.call(heartbeat("g", member, 1)).error_code == 0
        broker.crash()
        broker.start()
        with RawClient(broker.bootstrap) as other:
            assert other.call(heartbeat("g", member, 1)).error_code == 0


def test_an_assignment_that_cannot_be_written_holds_nobody_for_ever() -> None:
    machine = Machine()
    leader, other = Client(machine), Client(machine)
    for client in (leader, other):
        client.send_join()
    machine.pass_time(QUIET_MS)
    assert leader.leads
    other.send_sync()
    call = SyncCall(leader.member_id, leader.generation, None, assignments={})
    # The disk fails, and the leader is never heard of again.
    assert leader.group.sync(call, machine.now_ms, machine.elapsed_ms, lambda _: None)
    machine.pass_time(REBALANCE_MS)
    assert other.syncs[-1].code == ErrorCode.REBALANCE_IN_PROGRESS
    other.send_join()
    machine.pass_time(SESSION_MS)
    assert other.leads
    settle([other])
    assert (other.group.state, list(other.group.members)) == (STABLE, [other.member_id])


def test_a_commit_larger_than_a_batch_is_written_in_parts() -> None:
    """What one request may bring is more than the journal takes at once."""
    places = 5_000
    request = commit("g", "t", {0: 7}, metadata="x" * 4_096)
    request.topics[0].partitions *= places
    with broker_on(SimulatedDisk()) as broker:
        with RawClient(broker.bootstrap) as client, RawClient(broker.bootstrap) as other:
            client.call(create("t"))
            answer = client.call(request, VERSION)
            assert {part.error_code for part in answer.topics[0].partitions} == {0}
            assert told(other, "g") == [7]
        broker.crash()
        broker.start()
        with RawClient(broker.bootstrap) as client:
            assert told(client, "g") == [7]


def test_what_is_told_is_what_was_waited_for(tmp_path: Path) -> None:
    """A commit that comes just when the wait is over is not told of: it is not safe."""
    assert asyncio.run(_told_while_another_commits(str(tmp_path))) == 1


async def _told_while_another_commits(data: str) -> int:
    disk = GatedDisk()
    broker = Server(BrokerConfig(data, port=0), disk=disk)
    await broker.start()
    coordination = broker.coordination
    topic = await broker.topics.create("t", 1, {})

    def entry(offset: int) -> Entry:
        return ("offset", "g", "t", 0), (offset, -1, "", topic.id_text, 0, None)

    def commit_another(error: StorageError | None) -> None:
        assert error is None
        coordination.write([entry(2)])

    context = RequestContext(9, 7, 1, None, cast("Connection", None))
    try:
        with disk.closed(JOURNAL_TOPIC):
            coordination.write([entry(1)])
            asked = asyncio.ensure_future(offset_fetch(broker, committed("g", "t", 0), context))
            await asyncio.sleep(0)
            coordination.journal.when_durable(commit_another)
        answer = await asked
    finally:
        await broker.stop()
    return answer.topics[0].partitions[0].committed_offset
