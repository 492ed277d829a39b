"""What members of groups are answered whose partitions the broker assigns (KIP-848, KIP-932).

Heartbeats of consumer groups (KIP-848) and share groups (KIP-932): joining, epochs, giving up and
getting partitions, leaving, static members, and everything that must be refused.

Kafka computes targets now and then, not at once, and counts its epochs from 2. So what is compared
is not each step, but what comes of it.
"""

from __future__ import annotations

from time import monotonic
from typing import Any, Final
from uuid import UUID

from conformance.scenario import scenario
from penstock.wire import Message
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from penstock.wire.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    RequestTopicPartitions,
)
from penstock.wire.messages.find_coordinator import FindCoordinatorRequest
from penstock.wire.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from penstock.wire.messages.share_group_describe import ShareGroupDescribeRequest
from penstock.wire.messages.share_group_heartbeat import ShareGroupHeartbeatRequest
from tests.broker.protocol_client import READY_TIMEOUT_S, ProtocolClient, error_name
from tests.broker.requests import delete, new_name

NOT_YET: Final = {
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.NOT_COORDINATOR,
}


def ask(client: ProtocolClient, request: Message, version: int | None = None) -> Any:
    """An answer of the coordinator; Kafka may have to make it first."""
    deadline = monotonic() + READY_TIMEOUT_S
    while True:
        answer = client.call(request, version)
        if getattr(answer, "error_code", 0) not in NOT_YET or monotonic() > deadline:
            return answer
        client.call(FindCoordinatorRequest(key_type=0, coordinator_keys=["any"]), 4)


class Member:
    """One member of a group, as far as its side of the conversation goes."""

    def __init__(
        self,
        client: ProtocolClient,
        group: str,
        id_: str,
        topics: list[str] | None = None,
        **more: Any,
    ) -> None:
        self.client, self.group, self.id, self.topics, self.more = client, group, id_, topics, more
        self.epoch = self.previous = 0
        self.owned: list[tuple[UUID, list[int]]] = []

    def beat(self, *, version: int = 1, full: bool = False, **fields: Any) -> Any:
        """The error's name, the epoch if it is none of a member, and how many partitions it has."""
        request = ConsumerGroupHeartbeatRequest(
            group_id=self.group, member_id=self.id, member_epoch=self.epoch, **self.more
        )
        if self.epoch == 0 or full:
            request.rebalance_timeout_ms = 60_000
            request.subscribed_topic_names = self.topics
            request.topic_partitions = self.partitions()
        for name, value in fields.items():
            setattr(request, name, value)
        answer = ask(self.client, request, version)
        if not answer.error_code:
            if self.epoch != answer.member_epoch:
                self.previous = self.epoch
            self.id, self.epoch = answer.member_id, answer.member_epoch
            if answer.assignment is not None:
                self.owned = [
                    (item.topic_id, sorted(item.partitions))
                    for item in answer.assignment.topic_partitions
                ]
        return error_name(answer.error_code), min(answer.member_epoch, 1), self.count

    @property
    def count(self) -> int:
        return sum(len(numbers) for _, numbers in self.owned)

    def partitions(self) -> list[RequestTopicPartitions]:
        return [
            RequestTopicPartitions(topic_id=topic, partitions=list(numbers))
            for topic, numbers in self.owned
        ]

    def acknowledge(self) -> Any:
        """Confirm the partitions that were assigned."""
        return self.beat(topic_partitions=self.partitions())


def share_beat(
    client: ProtocolClient, group: str, id_: str, epoch: int, topics: list[str] | None
) -> Any:
    request = ShareGroupHeartbeatRequest(
        group_id=group, member_id=id_, member_epoch=epoch, subscribed_topic_names=topics
    )
    return ask(client, request)


def known_topic(client: ProtocolClient, partitions: int = 1) -> str:
    """A new topic that the coordinator knows: Kafka's hears of it a moment later."""
    topic = client.topic(partitions)
    probe = Member(client, new_name("g"), "probe", [topic])
    settle({probe: partitions})
    probe.beat(member_epoch=-1)
    return topic


def settle(counts: dict[Member, int]) -> list[str]:
    """All members send heartbeats and confirm assignments until each has so many partitions."""
    deadline = monotonic() + READY_TIMEOUT_S
    errors = {"NONE"}
    while any(member.count != count for member, count in counts.items()):
        assert monotonic() < deadline, [member.owned for member in counts]
        for member in counts:
            before = member.owned
            errors.add(member.beat()[0])
            if member.owned != before:
                errors.add(member.acknowledge()[0])
    return sorted(errors)


@scenario()
def members_join_share_and_leave(client: ProtocolClient) -> Any:
    """Members divide the partitions among themselves; what one leaves, another gets."""
    topic, group = known_topic(client, 4), new_name("g")
    one, two, three = (Member(client, group, id_, [topic]) for id_ in ("one", "two", "three"))
    steps: list[Any] = [one.beat(), one.beat(), two.beat()]
    steps += [settle({one: 2, two: 2}), three.beat()[0]]
    steps += [two.beat(member_epoch=-1)[:2], settle({one: 2, three: 2})]
    owned = sorted(numbers for member in (one, three) for _, n in member.owned for numbers in n)
    two.epoch = 1
    return [*steps, owned, two.beat()[0]]


@scenario()
def a_partition_is_revoked_first(client: ProtocolClient) -> Any:
    """A partition goes to its new owner when the old one has said that it gave it up."""
    topic, group = known_topic(client, 2), new_name("g")
    one, two = (Member(client, group, id_, [topic]) for id_ in ("one", "two"))
    one.beat()
    two.beat()
    deadline = monotonic() + READY_TIMEOUT_S
    while one.count == 2 and monotonic() < deadline:
        one.beat()
    epoch = one.epoch
    # Its partition is revoked, but it has not confirmed that.
    steps = [one.beat(), two.beat(), two.beat(), one.epoch == epoch]
    one.acknowledge()
    two.beat()
    return [*steps, one.epoch > epoch, two.count]


@scenario()
def members_send_full_heartbeats(client: ProtocolClient) -> Any:
    """A member may repeat everything it said before, and may join again with its id."""
    topic, group = known_topic(client, 3), new_name("g")
    one = Member(client, group, "one", [topic])
    steps = [one.beat(), one.beat(full=True)]
    epoch, one.epoch, one.owned = one.epoch, 0, []
    return [*steps, one.beat(), one.epoch == epoch, one.beat()]


@scenario()
def members_with_wrong_epochs(client: ProtocolClient) -> Any:
    """A wrong epoch is fenced; a member that left or never joined is unknown."""
    topic, group = known_topic(client, 2), new_name("g")
    one = Member(client, group, "one", [topic])
    one.epoch = 1
    steps = [one.beat()]
    one.epoch = 0
    steps += [one.beat()]
    for epoch in (one.epoch + 1, one.epoch - 1 or 99, 77):
        steps += [one.beat(member_epoch=epoch)[0]]
    steps += [one.beat(member_epoch=-1)[:2], one.beat()[0]]
    stranger = Member(client, group, "stranger", [topic])
    stranger.epoch = 1
    return [*steps, stranger.beat(), stranger.beat(member_epoch=-1)]


@scenario()
def members_that_missed_a_response(client: ProtocolClient) -> Any:
    """A member may repeat its previous epoch if it claims no more partitions than are its own."""
    topic, group = known_topic(client, 2), new_name("g")
    one, two = (Member(client, group, id_, [topic]) for id_ in ("one", "two"))
    one.beat()
    two.beat()
    everything = one.owned
    settle({one: 1, two: 1})
    # It has not heard of its new epoch, and reads no more than it may.
    one.epoch = one.previous
    steps = [one.beat(full=True)[0], one.epoch > one.previous]
    one.epoch = one.previous
    steps += [one.beat()[0], one.beat(topic_partitions=[])[0]]
    one.epoch, one.owned = one.previous, everything
    return [*steps, one.beat(full=True)[0]]


@scenario()
def static_members(client: ProtocolClient) -> Any:
    """An instance id belongs to one member until it leaves; the next one gets its partitions."""
    topic, group = known_topic(client, 2), new_name("g")
    one = Member(client, group, "one", [topic], instance_id="i")
    other = Member(client, group, "other", [topic], instance_id="i")
    steps = [one.beat(), other.beat()]
    other.epoch = 1
    steps += [other.beat(), other.beat(member_epoch=-2), other.beat(member_epoch=-1)]
    steps += [one.beat(member_epoch=-2), one.beat(member_epoch=1)]
    other.epoch = 0
    steps += [other.beat(), other.beat(), one.beat(member_epoch=1)]
    unknown = Member(client, group, "unknown", [topic], instance_id="j")
    unknown.epoch = 1
    steps += [unknown.beat(), unknown.beat(member_epoch=-2)]
    other.epoch = -1
    return [*steps, other.beat(), other.beat(member_epoch=1)]


@scenario()
def bad_heartbeats(client: ProtocolClient) -> Any:
    """Heartbeats with missing or impossible fields are refused and create no group."""
    topic, group = known_topic(client), new_name("g")
    bad: tuple[dict[str, Any], ...] = (
        {"member_id": ""},
        {"group_id": ""},
        {"instance_id": ""},
        {"rack_id": ""},
        {"rebalance_timeout_ms": -1},
        {"topic_partitions": None},
        {"topic_partitions": [RequestTopicPartitions(partitions=[0])]},
        {"subscribed_topic_names": None},
        {"member_epoch": -2},
        {"member_epoch": -3},
        {"member_epoch": -1},
        {"member_epoch": 1},
        {"server_assignor": "sticky"},
        {"subscribed_topic_names": None, "subscribed_topic_regex": "("},
        {"subscribed_topic_names": None, "subscribed_topic_regex": "(?=a)"},
    )
    answers = [Member(client, group, "bad", [topic]).beat(**fields) for fields in bad]
    described = client.call(ConsumerGroupDescribeRequest(group_ids=[group])).groups[0]
    return answers, error_name(described.error_code)


@scenario()
def a_member_without_an_id_gets_one_in_version_0(client: ProtocolClient) -> Any:
    topic = known_topic(client)
    one = Member(client, new_name("g"), "", [topic])
    return one.beat(version=0), bool(one.id), one.beat(version=0)


@scenario()
def members_without_topics(client: ProtocolClient) -> Any:
    """Who subscribes to nothing, or to an unknown topic, is a member without partitions."""
    group, missing = new_name("g"), new_name()
    nothing, later = Member(client, group, "one", []), Member(client, group, "two", [missing])
    return [nothing.beat(), later.beat(), nothing.beat()]


@scenario()
def a_changed_subscription(client: ProtocolClient) -> Any:
    """New topics are assigned, and dropped ones are revoked at once."""
    topics = [known_topic(client, 2), known_topic(client, 3)]
    one = Member(client, new_name("g"), "one", topics[:1])
    steps = [one.beat(), one.beat(subscribed_topic_names=topics)[0], settle({one: 5})]
    # Topics that it dropped are revoked at once.
    steps += [one.beat(subscribed_topic_names=topics[1:]), one.acknowledge()]
    return [*steps, settle({one: 3})]


@scenario()
def ranges_of_two_topics(client: ProtocolClient) -> Any:
    """The range assignor gives each member the same range of every topic."""
    topics = sorted((known_topic(client, 3), known_topic(client, 3)))
    group = new_name("g")
    one, two = (Member(client, group, id_, topics, server_assignor="range") for id_ in ("1", "2"))
    one.beat()
    two.beat()
    settle({one: 4, two: 2})
    return [sorted(numbers for _, numbers in member.owned) for member in (one, two)]


@scenario()
def described_consumer_groups(client: ProtocolClient) -> Any:
    """A group is described with its state, epochs, assignor, members and their assignments."""
    topic, group = known_topic(client, 2), new_name("g")
    one = Member(client, group, "one", [topic], rack_id="r")
    one.beat()

    def described(version: int) -> Any:
        request = ConsumerGroupDescribeRequest(group_ids=[group, new_name("none")])
        return [
            (
                error_name(described_group.error_code),
                described_group.group_state,
                described_group.group_epoch == described_group.assignment_epoch,
                described_group.assignor_name,
                [
                    (
                        member.member_id,
                        member.instance_id,
                        member.rack_id,
                        member.member_epoch == one.epoch,
                        member.client_id,
                        member.client_host,
                        [name == topic for name in member.subscribed_topic_names],
                        member.subscribed_topic_regex or None,
                        [
                            (item.topic_name == topic, sorted(item.partitions))
                            for item in member.assignment.topic_partitions
                        ],
                        [
                            (item.topic_id == client.ids[topic], sorted(item.partitions))
                            for item in member.target_assignment.topic_partitions
                        ],
                        member.member_type,
                    )
                    for member in described_group.members
                ],
            )
            for described_group in sorted(
                client.call(request, version).groups, key=lambda item: item.group_id != group
            )
        ]

    states = [described(0), described(1)]
    two = Member(client, group, "two", [topic])
    two.beat()
    settle({one: 1, two: 1})
    states.append([state[:2] for state in described(1)])
    for member in (one, two):
        member.epoch = -1
        member.beat()
    states.append([state[:2] for state in described(1)])
    return states


@scenario()
def groups_of_another_kind(client: ProtocolClient) -> Any:
    """A group of one kind is unknown to the others; a share group takes no classic members."""
    topic, consumers, sharers = known_topic(client), new_name("g"), new_name("s")
    Member(client, consumers, "one", [topic]).beat()
    share_beat(client, sharers, "one", 0, [topic])
    errors = [
        Member(client, sharers, "two", [topic]).beat(),
        error_name(share_beat(client, consumers, "two", 0, [topic]).error_code),
    ]
    for group, request in (
        (consumers, ShareGroupDescribeRequest(group_ids=[consumers])),
        (sharers, ConsumerGroupDescribeRequest(group_ids=[sharers])),
    ):
        assert group in request.group_ids
        errors.append(error_name(client.call(request).groups[0].error_code))
    protocol = JoinGroupRequestProtocol(name="range", metadata=b"")
    join = JoinGroupRequest(
        group_id=sharers,
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=[protocol],
    )
    return [*errors, error_name(ask(client, join).error_code)]


@scenario()
def share_members(client: ProtocolClient) -> Any:
    """Members of share groups join, are refused, described, and leave."""
    topic, group = known_topic(client, 2), new_name("s")
    answers = []
    for id_, epoch, topics in (
        ("one", 1, None),
        ("one", 0, None),
        ("one", 0, []),
        ("", 0, [topic]),
        ("one", -2, None),
        ("one", 0, [topic]),
        ("two", 1, None),
        ("two", -1, None),
        ("one", 9, None),
    ):
        answer = share_beat(client, group, id_, epoch, topics)
        answers.append((error_name(answer.error_code), answer.member_id))
    # Kafka assigns partitions once it has made their state.
    deadline, assigned, epoch = monotonic() + READY_TIMEOUT_S, 0, 0
    while assigned < 2 and monotonic() < deadline:
        answer = share_beat(client, group, "one", 0, [topic])
        epoch = answer.member_epoch
        assigned = sum(len(item.partitions) for item in answer.assignment.topic_partitions)
    shown = sorted(
        client.call(ShareGroupDescribeRequest(group_ids=[group, new_name("none")])).groups,
        key=lambda item: item.group_id != group,
    )
    members = [
        (
            member.member_id,
            member.member_epoch == epoch,
            member.client_id,
            member.client_host,
            [name == topic for name in member.subscribed_topic_names],
            [sorted(item.partitions) for item in member.assignment.topic_partitions],
        )
        for member in shown[0].members
    ]
    states = [(error_name(item.error_code), item.group_state) for item in shown]
    left = share_beat(client, group, "one", -1, None)
    after = client.call(ShareGroupDescribeRequest(group_ids=[group])).groups[0].group_state
    return answers, assigned, members, states, shown[0].assignor_name, left.member_epoch, after


@scenario()
def a_deleted_topic_is_revoked(client: ProtocolClient) -> Any:
    """A deleted topic is taken from its reader; one of the same name is assigned as a new topic."""
    kept, gone = known_topic(client, 1), known_topic(client, 2)
    one = Member(client, new_name("g"), "one", [kept, gone])
    steps = [one.beat()[2]]
    client.call(delete(gone))
    deadline = monotonic() + READY_TIMEOUT_S
    while len(one.owned) != 1 and monotonic() < deadline:
        one.beat()
    steps.append(one.owned == [(client.ids[kept], [0])])
    one.acknowledge()
    # A topic of the same name is another one.
    client.recreate_topic(gone)
    new_id = client.ids[gone]
    while len(one.owned) != 2 and monotonic() < deadline:
        one.beat()
    return [*steps, sorted(one.owned) == sorted([(client.ids[kept], [0]), (new_id, [0])])]
