"""What members of share groups are answered: deliveries, acknowledgements, sessions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from select import select
from time import monotonic
from typing import Any, Final

from conformance.scenario import scenario
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.alter_share_group_offsets import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsRequestPartition,
    AlterShareGroupOffsetsRequestTopic,
)
from penstock.wire.messages.find_coordinator import FindCoordinatorRequest
from penstock.wire.messages.list_groups import ListGroupsRequest
from penstock.wire.messages.share_group_heartbeat import ShareGroupHeartbeatRequest
from tests.broker.protocol_client import READY_TIMEOUT_S, ProtocolClient, error_name
from tests.broker.requests import batch, new_name, produce
from tests.broker.shares.members import (
    ACCEPT,
    REJECT,
    RELEASE,
    RENEW,
    Answer,
    Got,
    Taker,
    lag_of,
    numbered,
    set_group,
)

NOT_YET: Final = frozenset({ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.NOT_COORDINATOR})


def joined(client: ProtocolClient, taker: Taker) -> None:
    """Make the member one of its group: Kafka begins a queue only for a group that is there."""
    deadline = monotonic() + READY_TIMEOUT_S
    while True:
        # Kafka makes its coordinator when it is first asked for.
        client.call(FindCoordinatorRequest(key_type=0, coordinator_keys=[taker.group]), 4)
        answer = client.call(
            ShareGroupHeartbeatRequest(
                group_id=taker.group,
                member_id=taker.member,
                member_epoch=0,
                subscribed_topic_names=[taker.topic],
            )
        )
        if not answer.error_code:
            return
        assert monotonic() < deadline, error_name(answer.error_code)


def beat(client: ProtocolClient, taker: Taker, epoch: int) -> str:
    """What a member is answered to a heartbeat; -1 is its last."""
    answer = client.call(
        ShareGroupHeartbeatRequest(group_id=taker.group, member_id=taker.member, member_epoch=epoch)
    )
    return error_name(answer.error_code)


def first(taker: Taker, **options: Any) -> Got:
    """The first records that come; a queue may take a moment to begin."""
    deadline = monotonic() + READY_TIMEOUT_S
    while not (got := taker.fetch(wait_ms=500, **options)).acquired:
        assert monotonic() < deadline, got
    return got


@contextmanager
def takers(client: ProtocolClient, *sizes: int, count: int = 1) -> Iterator[list[Taker]]:
    """Members of a new group, and batches of these sizes for them."""
    topic, group = client.topic(), new_name("g")
    client.fill(topic, *(batch(*numbered(size)) for size in sizes))
    set_group(client, group, share_auto_offset_reset="earliest")
    members = [Taker(client, group, topic) for _ in range(count)]
    try:
        joined(client, members[0])
        yield members
    finally:
        for member in members:
            member.client.close()


@scenario()
def acknowledgements(client: ProtocolClient) -> Any:
    """Accepted, rejected and skipped records are done; released ones are delivered again."""
    with takers(client, 6, 2) as (one,):
        seen = [first(one).acquired]
        kinds = [ACCEPT, RELEASE, REJECT, 0, RELEASE, ACCEPT]
        seen.append(one.acknowledge((0, 5, kinds)))  # type: ignore[arg-type]
        seen.append(first(one).acquired)
        again = one.fetch([(1, 1, ACCEPT), (4, 4, RELEASE)], wait_ms=500)
        return seen, again.acknowledge_error, again.acquired


@scenario()
def acknowledgements_that_are_refused(client: ProtocolClient) -> Any:
    """Ranges out of order, unknown types, records that the member does not hold."""
    wrong: list[list[Answer]] = [
        [(5, 5, ACCEPT)],
        [(0, 5, ACCEPT)],
        [(3, 2, ACCEPT)],
        [(2, 3, ACCEPT), (3, 4, ACCEPT)],
        [(2, 3, ACCEPT), (0, 1, ACCEPT)],
        [(0, 2, [ACCEPT, ACCEPT])],
        [(0, 0, 9)],
        [(0, 0, -1)],
        [(0, 0, RENEW)],
    ]
    with takers(client, 5, count=2) as (one, other):
        first(one)
        other.fetch()
        answers = [one.acknowledge(*answer) for answer in wrong]
        fetched = [one.fetch(answer).acknowledge_error for answer in wrong]
        foreign = other.acknowledge((0, 4, ACCEPT))
        taken = [one.acknowledge((0, 4, ACCEPT)) for _ in range(2)]
        return answers, fetched, foreign, taken


@scenario()
def epochs_of_sessions(client: ProtocolClient) -> Any:
    """A session begins with epoch 0, goes up by one and ends with -1; other epochs are refused."""
    with takers(client, 3) as (one,):
        before = [
            one.fetch(epoch=1).error,
            one.acknowledge((0, 0, ACCEPT), epoch=1),
            one.fetch(epoch=-1).error,
            one.fetch([(0, 0, ACCEPT)], epoch=0).error,
        ]
        first(one)
        after = [
            one.fetch(epoch=one.epoch + 4).error,
            one.acknowledge((0, 0, ACCEPT), epoch=0),
            one.fetch().error,
            one.acknowledge((0, 0, ACCEPT), epoch=-1),
            one.fetch().error,
        ]
        return before, after


@scenario()
def sessions_that_end(client: ProtocolClient) -> Any:
    """What a session held when it ended goes to other members."""
    results = []
    for how in ("goodbye", "goodbye with answers", "lost"):
        with takers(client, 4, count=2) as (one, other):
            first(one)
            if how == "goodbye":
                one.fetch(epoch=-1)
            elif how == "lost":
                one.client.close()
            else:
                one.fetch([(0, 1, ACCEPT)], epoch=-1)
            results.append((how, first(other).acquired))
    return results


@scenario()
def answers_after_a_member_has_left(client: ProtocolClient) -> Any:
    """A closing member leaves its group and answers at once, on two connections, in any order."""
    with takers(client, 10, count=2) as (one, other):
        first(one)
        left = beat(client, one, epoch=-1)
        kept = other.fetch().acquired
        answered = one.acknowledge((0, 9, ACCEPT), epoch=-1)
        return left, kept, answered, other.fetch(wait_ms=500).acquired


@scenario()
def a_member_leaves_without_an_answer(client: ProtocolClient) -> Any:
    """What it holds is still its own until its session ends; then it goes to others."""
    with takers(client, 4, count=2) as (one, other):
        first(one)
        left = beat(client, one, epoch=-1)
        kept = other.fetch().acquired
        ended = one.acknowledge((1, 2, ACCEPT), epoch=-1)
        return left, kept, ended, first(other).acquired


@scenario()
def how_much_is_acquired(client: ProtocolClient) -> Any:
    """As many records as asked for in strict mode, whole batches otherwise."""
    with takers(client, 10, 10, 10, count=3) as (one, other, third):
        strict = first(one, max_records=4, strict=True).offsets
        whole = first(other, max_records=4).offsets
        rest = first(third, max_records=100).offsets
        return strict, whole, rest


@scenario()
def locks_are_renewed(client: ProtocolClient) -> Any:
    """A lock is renewed; a request that renews may not ask for records."""
    with takers(client, 3) as (one,):
        first(one)
        taken = one.acknowledge((0, 1, RENEW), renew=True)
        fetched = one.fetch([(0, 2, RENEW)], renew=True).acknowledge_error
        request = one.request([(0, 0, RENEW)], renew=True)
        request.max_records = 5
        one.client.send(request, 2)
        both = one.receive().error
        return taken, fetched, both


@scenario()
def lag(client: ProtocolClient) -> Any:
    """Lag counts the records that are not finished, also behind a gap."""
    with takers(client, 10) as (one,):
        first(one)
        one.acknowledge((0, 2, ACCEPT), (5, 6, ACCEPT))
        lags = [lag_of(client, one.group)]
        one.acknowledge((3, 4, ACCEPT))
        lags.append(lag_of(client, one.group))
        return lags


@scenario()
def members_that_wait_take_turns(client: ProtocolClient) -> Any:
    """Whoever has waited longest gets the next record: none is left out."""
    with waiting_takers(client, 3) as members:
        served = [0] * len(members)
        for number in range(1, 13):
            client.produced(produce(members[0].topic, batch(b"x")))
            at = served_one(members)
            got = members[at].receive()
            assert got.offsets == [number], got
            served[at] += 1
            members[at].send([(number, number, ACCEPT)], wait_ms=30_000)
            # It waits before the next record comes.
            lag_of(client, members[at].group)
        return min(served) >= 3, sum(served)


@scenario()
def each_that_waits_gets_a_batch(client: ProtocolClient) -> Any:
    """A member that was served leaves the next batch to those that still wait."""
    with waiting_takers(client, 3) as members:
        waiting, sizes = list(members), []
        for size in (201, 199, 200):
            client.produced(produce(members[0].topic, batch(*numbered(size))))
            served = waiting.pop(served_one(waiting))
            sizes.append(len(served.receive().offsets))
        return sizes


@contextmanager
def waiting_takers(client: ProtocolClient, count: int) -> Iterator[list[Taker]]:
    """Members of a new group, all waiting for records from offset 1 on."""
    with takers(client, 1, count=count) as members:
        first(members[0])
        members[0].acknowledge((0, 0, ACCEPT))
        for member in members:
            member.send(wait_ms=30_000)
            lag_of(client, member.group)
        yield members


def served_one(members: list[Taker]) -> int:
    """Which of the members has an answer; waits until one has."""
    sockets = [member.client.socket for member in members]
    ready, _, _ = select(sockets, [], [], READY_TIMEOUT_S)
    assert len(ready) == 1, f"{len(ready)} were served"
    return sockets.index(ready[0])


# ---- offsets -----------------------------------------------------------------------------


def altered(client: ProtocolClient, group: str, *wanted: tuple[str, int, int]) -> Any:
    """What is answered to moving a group: of the whole, or of each topic, partition and offset."""
    request = AlterShareGroupOffsetsRequest(
        group_id=group,
        topics=[
            AlterShareGroupOffsetsRequestTopic(
                topic_name=topic,
                partitions=[
                    AlterShareGroupOffsetsRequestPartition(
                        partition_index=number, start_offset=offset
                    )
                ],
            )
            for topic, number, offset in wanted
        ],
    )
    deadline = monotonic() + READY_TIMEOUT_S
    client.call(FindCoordinatorRequest(key_type=0, coordinator_keys=[group]), 4)
    while (answer := client.call(request)).error_code in NOT_YET:
        assert monotonic() < deadline, error_name(answer.error_code)
    if answer.error_code:
        return error_name(answer.error_code)
    return [
        (item.partition_index, error_name(item.error_code))
        for topic in answer.responses
        for item in topic.partitions
    ]


def share_groups(client: ProtocolClient, *groups: str) -> list[tuple[str, str]]:
    """States and types of these groups, as they are listed."""
    listed = client.call(ListGroupsRequest()).groups
    return [(item.group_state, item.group_type) for item in listed if item.group_id in groups]


@scenario()
def offsets_of_a_group_that_is_not_there(client: ProtocolClient) -> Any:
    """Moving a group that does not exist makes it; it begins there."""
    topic, group, other = client.topic(), new_name("g"), new_name("g")
    client.fill(topic, batch(*numbered(10)))
    answers = [
        altered(client, other, ("nowhere", 0, 1)),
        altered(client, other, (topic, 7, 1)),
        share_groups(client, other),
        altered(client, group, (topic, 0, 6)),
        share_groups(client, group),
    ]
    with Taker(client, group, topic) as taker:
        joined(client, taker)
        return answers, first(taker).acquired
