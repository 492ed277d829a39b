"""Offsets of streams groups (KIP-1071), their deletion, and groups of other kinds beside them."""

from __future__ import annotations

from time import monotonic
from typing import Any, Final

from conformance.scenario import scenario
from conformance.scenarios.protocol.groups_consumer import Member, ask, share_beat
from conformance.scenarios.protocol.groups_streams import (
    configs_of,
    described,
    lone,
    member,
    new_group,
)
from penstock.wire.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from penstock.wire.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from penstock.wire.messages.streams_group_heartbeat import StreamsGroupHeartbeatRequest
from tests.broker.group_requests import (
    commit,
    committed,
    delete_groups,
    describe,
    forget,
    list_groups,
    offsets_of,
)
from tests.broker.groups.streams_members import settle, stateless
from tests.broker.protocol_client import READY_TIMEOUT_S, ProtocolClient, error_name
from tests.broker.requests import new_name

EPOCHS_VERSION: Final = 9


@scenario()
def offsets_by_epoch(client: ProtocolClient) -> Any:
    """A member commits with its epoch, or with an earlier one for tasks that it has since then."""
    topic, group, one = lone(client)
    epoch = one.epoch
    two = member(client, group, "two", stateless(topic))
    two.beat()
    settle(one, two, tasks=2)
    (kept,), (moved,) = ([number for _, number in who.active] for who in (one, two))

    def code(who: str, at: int, number: int, version: int = EPOCHS_VERSION) -> str:
        request = commit(group, topic, {number: 5}, member=who, generation=at)
        answer = client.call(request, version)
        return error_name(answer.topics[0].partitions[0].error_code)

    def fetched(who: str | None, at: int) -> Any:
        request = committed(group, topic, kept)
        request.groups[0].member_id, request.groups[0].member_epoch = who, at
        (found,) = client.call(request, EPOCHS_VERSION).groups
        return error_name(found.error_code)

    return [
        code("one", one.epoch, kept),
        code("one", epoch, kept),
        code("one", epoch, moved),
        code("one", one.epoch + 1, kept),
        code("two", two.epoch, kept),
        code("two", two.epoch - 1, moved),
        code("stranger", one.epoch, kept),
        code("", -1, kept),
        code("one", one.epoch, kept, 8),
        fetched("one", one.epoch),
        fetched("one", one.epoch + 1),
        fetched("stranger", 1),
        fetched(None, -1),
    ]


@scenario()
def offsets_of_an_empty_group(client: ProtocolClient) -> Any:
    """Offsets stay when all have left, until the group is deleted; anyone may commit then."""
    topic, group, one = lone(client)
    client.call(commit(group, topic, {0: 5}, member="one", generation=one.epoch), EPOCHS_VERSION)
    steps: list[Any] = [deletion(client, group), forgotten(client, group, topic)]
    steps += [one.leave(), forgotten(client, group, topic)]
    answer = client.call(commit(group, topic, {1: 7}), EPOCHS_VERSION)
    steps += [answer.topics[0].partitions[0].error_code]
    steps += [offsets_of(client.call(committed(group, topic, 0, 1), EPOCHS_VERSION))]
    steps += [described(client, group)["state"], deletion(client, group)]
    return [str(steps).replace(topic, "TOPIC"), described(client, group), deletion(client, group)]


def deletion(client: ProtocolClient, group: str) -> str:
    return error_name(client.call(delete_groups(group)).results[0].error_code)


def forgotten(client: ProtocolClient, group: str, topic: str) -> list[str]:
    answer = client.call(forget(group, topic, 0))
    return [error_name(answer.error_code)] + [
        error_name(part.error_code) for item in answer.topics for part in item.partitions
    ]


# ---- other kinds of groups -------------------------------------------------------------------


@scenario()
def groups_of_other_kinds(client: ProtocolClient) -> Any:
    """One name belongs to one kind of group: the others do not find it, nor join it."""
    topic, group, _ = lone(client)
    consumers = new_name("g")
    reader = Member(client, consumers, "reader", [topic])
    steps: list[Any] = [reader.beat()[0]]
    steps += [described(client, consumers), described(client, new_name("g"))[0]]
    (told,) = client.call(ConsumerGroupDescribeRequest(group_ids=[group])).groups
    steps += [error_name(told.error_code)]
    for version in (5, 6):
        (old,) = client.call(describe(group), version).groups
        message = (old.error_message or "").replace(group, "GROUP")
        steps += [(error_name(old.error_code), old.group_state, message)]
    steps += [Member(client, group, "reader", [topic]).beat()[0]]
    steps += [error_name(share_beat(client, group, "sharer", 0, [topic]).error_code)]
    steps += [classic_join(client, group)]
    steps += [member(client, consumers, "one", stateless(topic)).error()]
    steps += [listed(client, group, types) for types in ([], ["streams"], ["Streams"], ["share"])]
    return steps


def classic_join(client: ProtocolClient, group: str) -> str:
    request = JoinGroupRequest(
        group_id=group,
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        member_id="",
        protocol_type="consumer",
        protocols=[JoinGroupRequestProtocol(name="range", metadata=b"")],
    )
    return error_name(ask(client, request, 3).error_code)


def listed(client: ProtocolClient, group: str, types: list[str]) -> Any:
    return [
        (item.protocol_type, item.group_type, item.group_state)
        for item in ask(client, list_groups([], types)).groups
        if item.group_id == group
    ]


@scenario()
def an_empty_classic_group_becomes_one_of_streams(client: ProtocolClient) -> Any:
    """It keeps its offsets; an application changes its protocol so."""
    topic, group = client.topic(1), new_group(client)
    deadline = monotonic() + READY_TIMEOUT_S
    while True:
        answer = client.call(commit(group, topic, {0: 5}), EPOCHS_VERSION)
        if not answer.topics[0].partitions[0].error_code or monotonic() > deadline:
            break
    before = listed(client, group, [])
    one = member(client, group, "one", stateless(topic))
    one.beat()
    settle(one, tasks=1)
    after = listed(client, group, [])
    found = offsets_of(client.call(committed(group, topic, 0), EPOCHS_VERSION))
    return [before, after, str(found).replace(topic, "TOPIC")]


@scenario()
def settings_of_streams_groups(client: ProtocolClient) -> Any:
    """The settings of a group that nobody has set are Kafka's defaults."""
    group = new_name("g")
    found = configs_of(client, group)
    ours = ("streams.num.standby.replicas", "streams.session.timeout.ms",
            "streams.initial.rebalance.delay.ms", "streams.assignment.interval.ms")  # fmt: skip
    return {name: found.get(name) for name in ours}


@scenario()
def an_unknown_group_is_beaten(client: ProtocolClient) -> Any:
    """Heartbeats to a group that does not exist do not make it."""
    group = new_name("g")
    request = StreamsGroupHeartbeatRequest(group_id=group, member_id="m", member_epoch=3)
    answer = ask(client, request)
    return [error_name(answer.error_code), described(client, group)]
