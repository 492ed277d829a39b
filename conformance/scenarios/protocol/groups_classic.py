"""What members of classic groups are answered, and what is answered about committed offsets.

A member here is a raw connection that does what the scenario says. Member ids are random, so they
are compared only by what is known of them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from uuid import UUID, uuid4

from conformance.scenario import scenario
from conformance.scenarios.protocol.groups_consumer import ask
from penstock.wire import Message
from tests.broker.group_requests import (
    commit,
    committed,
    committed_by,
    delete_groups,
    describe,
    forget,
    heartbeat,
    join,
    leave,
    list_groups,
    offsets_of,
    subscription,
    sync,
)
from tests.broker.protocol_client import ProtocolClient, error_name
from tests.broker.raw import RawClient
from tests.broker.requests import new_name

OLD_JOIN = 3


def code(client: ProtocolClient, request: Message, version: int | None = None) -> str:
    """The error of an answer as a whole."""
    return error_name(ask(client, request, version).error_code)


def group_name(client: ProtocolClient) -> str:
    """A name for a group whose coordinator is there: Kafka makes it at the first question."""
    name = new_name("g")
    ask(client, heartbeat(name, "nobody", 0))
    return name


def member_of(client: ProtocolClient, group: str, **options: Any) -> tuple[str, int]:
    """Join alone, and sync: the member's id and the generation."""
    member = ask(client, join(group, **options)).member_id
    answer = ask(client, join(group, member, **options))
    assert not answer.error_code, error_name(answer.error_code)
    member = answer.member_id
    instance = options.get("instance")
    synced = ask(
        client, sync(group, member, answer.generation_id, {member: b"mine"}, instance=instance)
    )
    assert (synced.error_code, synced.assignment) == (0, b"mine")
    return member, answer.generation_id


def commit_codes(client: ProtocolClient, request: Message, version: int | None = None) -> list[str]:
    """The error of each partition, in their order: Kafka puts the unknown ones first."""
    answer = client.call(request, version)
    parts = [part for topic in answer.topics for part in topic.partitions]
    return [error_name(one.error_code) for one in sorted(parts, key=lambda p: p.partition_index)]


@scenario()
def one_member_joins(client: ProtocolClient) -> Any:
    """It gets an id first, then leads generation 1; heartbeats of other generations are refused."""
    group = group_name(client)
    first = ask(client, join(group))
    second = ask(client, join(group, first.member_id))
    members = [(one.member_id == second.member_id, one.metadata) for one in second.members]
    synced = ask(
        client, sync(group, second.member_id, second.generation_id, {second.member_id: b"a"})
    )
    return [
        (error_name(first.error_code), first.generation_id, first.leader, first.protocol_name),
        first.member_id.startswith("raw-"),
        (error_name(second.error_code), second.generation_id, second.protocol_name),
        (second.protocol_type, second.leader == second.member_id, second.skip_assignment),
        members,
        (error_name(synced.error_code), synced.assignment, synced.protocol_name),
        code(client, heartbeat(group, second.member_id, second.generation_id)),
        code(client, heartbeat(group, second.member_id, second.generation_id + 1)),
        code(client, heartbeat(group, second.member_id, second.generation_id - 1)),
        code(client, heartbeat(group, "stranger", second.generation_id)),
    ]


@scenario()
def one_member_joins_in_old_versions(client: ProtocolClient) -> Any:
    """Up to version 3 a member joins at once, without asking for an id."""
    results: list[Any] = []
    for version in range(4):
        group = group_name(client)
        answer = ask(client, join(group), version)
        results.append((error_name(answer.error_code), answer.generation_id, answer.protocol_name))
        results.append(len(answer.members))
        synced = ask(
            client, sync(group, answer.member_id, 1, {answer.member_id: b"a"}), min(version, 2)
        )
        results.append((error_name(synced.error_code), synced.assignment))
        left = ask(client, leave(group, (answer.member_id, None)), min(version, 2))
        results.append(error_name(left.error_code))
    return results


@scenario()
def joins_that_are_refused(client: ProtocolClient) -> Any:
    """Bad session timeouts, unknown members, protocols that the group does not have."""
    group = group_name(client)
    member, generation = member_of(client, group)
    results = [
        code(client, join("")),
        code(client, join(group, session_ms=999)),
        code(client, join(group, session_ms=1_800_001)),
        code(client, join(group, "stranger")),
        code(client, join(new_name("g"), "stranger")),
        code(client, join(group, protocols={"other": b""})),
        code(client, join(group, protocols={})),
        code(client, join(group, protocol_type="connect")),
        code(client, join(group, protocol_type="")),
        code(client, join(group, "stranger", instance="unknown")),
        code(client, join(new_name("g"), protocols={}), OLD_JOIN),
    ]
    assert code(client, heartbeat(group, member, generation)) == "NONE"
    return results


@scenario()
def requests_of_unknown_members(client: ProtocolClient) -> Any:
    """Sync, heartbeat and leave need the right group, member, generation and protocol."""
    group = group_name(client)
    member, generation = member_of(client, group)
    nowhere = new_name("g")
    return [
        code(client, sync("", member, generation)),
        code(client, sync(nowhere, member, generation)),
        code(client, sync(group, "stranger", generation)),
        code(client, sync(group, member, generation + 1)),
        code(client, sync(group, member, generation, protocol_type="connect")),
        code(client, sync(group, member, generation, protocol_type=None)),
        code(client, sync(group, member, generation, protocol=None)),
        code(client, sync(group, member, generation, protocol=None, protocol_type=None), 4),
        code(client, sync(group, member, generation, protocol="roundrobin")),
        code(client, sync(group, member, generation, instance="unknown")),
        code(client, heartbeat("", member, generation)),
        code(client, heartbeat(nowhere, member, generation)),
        code(client, heartbeat(group, member, generation, "unknown")),
        code(client, leave("", (member, None))),
    ]


@scenario()
def members_leave(client: ProtocolClient) -> Any:
    """Each leaving member gets an answer of its own; a static one leaves by its instance id."""
    group = group_name(client)
    member, generation = member_of(client, group)
    static, _ = member_of(client, other := group_name(client), instance="i")

    def left(name: str, *members: tuple[str, str | None], version: int | None = None) -> Any:
        answer = ask(client, leave(name, *members), version)
        return error_name(answer.error_code), [error_name(one.error_code) for one in answer.members]

    return [
        left(new_name("g"), ("x", None)),
        left(group, ("x", None), (member, "i"), ("", "i"), ("", None)),
        left(group, ("x", None), version=1),
        left(group, (member, None)),
        left(group, (member, None)),
        left(group, (member, None), version=1),
        code(client, heartbeat(group, member, generation)),
        code(client, sync(group, member, generation)),
        left(other, ("wrong", "i")),
        left(other, ("", "i")),
        left(other, (static, "i")),
    ]


@scenario()
def two_members(client: ProtocolClient) -> Any:
    """When a second member joins, the first is told, and both get a new generation."""
    group = group_name(client)
    results: list[Any] = []
    with ExitStack() as stack:
        other = stack.enter_context(RawClient(client.bootstrap))
        both = {"range": b"1", "b": b"2"}
        first, generation = member_of(client, group, protocols=both)
        turned = {"b": b"3", "range": b"4"}
        pending = other.call(join(group, protocols=turned))
        other.send(join(group, pending.member_id, protocols=turned))
        while (error := code(client, heartbeat(group, first, generation))) == "NONE":
            pass
        results.append(error)
        results.append(code(client, sync(group, first, generation)))
        mine = client.call(join(group, first, protocols=both))
        theirs = other.receive()
        results.append((mine.generation_id, theirs.generation_id, mine.leader == first))
        results.append(mine.leader == theirs.leader)
        results.append(sorted(one.metadata for one in mine.members) != [])
        results.append(len(theirs.members))
        chosen = mine.protocol_name
        other.send(sync(group, theirs.member_id, theirs.generation_id, protocol=chosen))
        shares = {first: b"for a", theirs.member_id: b"for b"}
        synced = client.call(sync(group, first, mine.generation_id, shares, protocol=chosen))
        results.append(synced.assignment)
        results.append(other.receive().assignment)
        results.append(code(client, heartbeat(group, first, generation)))
        gone = other.call(leave(group, (theirs.member_id, None)))
        results.append(error_name(gone.members[0].error_code))
        results.append(code(client, heartbeat(group, first, mine.generation_id)))
    return results


@scenario()
def a_static_member(client: ProtocolClient) -> Any:
    """When it returns it gets a new id and its old assignment; its old id is fenced."""
    group = group_name(client)
    member, generation = member_of(client, group, instance="i")
    again = ask(client, join(group, instance="i"))
    new = again.member_id
    synced = ask(client, sync(group, new, again.generation_id, instance="i"))
    topic = client.topic()
    return [
        member.startswith("i-"),
        new != member,
        (again.generation_id == generation, again.leader == new, again.skip_assignment),
        len(again.members),
        synced.assignment,
        code(client, heartbeat(group, member, generation, "i")),
        code(client, heartbeat(group, member, generation)),
        code(client, heartbeat(group, new, generation, "i")),
        code(client, heartbeat(group, new, generation)),
        code(client, heartbeat(group, new, generation, "other")),
        code(client, join(group, member, instance="i")),
        code(client, sync(group, member, generation, instance="i")),
        *(
            commit_codes(
                client,
                commit(group, topic, {0: 1}, member=id_, generation=generation, instance="i"),
                9,
            )
            for id_ in (member, new)
        ),
    ]


@scenario()
def a_static_leader_in_an_older_version(client: ProtocolClient) -> Any:
    """It is not told that it leads."""
    group = group_name(client)
    member, generation = member_of(client, group, instance="i")
    again = ask(client, join(group, instance="i"), 8)
    synced = ask(client, sync(group, again.member_id, again.generation_id, instance="i"))
    return [
        (error_name(again.error_code), again.generation_id == generation),
        # It is not told that it leads.
        (again.leader == again.member_id, again.leader == member, len(again.members)),
        synced.assignment,
    ]


@scenario()
def offsets_committed_without_members(client: ProtocolClient) -> Any:
    """Offsets of a group without members are stored and read in every version."""
    topic, group = client.topic(3), group_name(client)
    results = [
        commit_codes(client, commit(group, topic, {0: 5, 1: 6, 9: 7}, metadata="m"), 9),
        commit_codes(client, commit(group, "nowhere", {0: 5}), 9),
        commit_codes(client, commit(group, topic, {0: 5}, metadata="x" * 4_097), 9),
        commit_codes(client, commit(group, topic, {2: 1}, metadata=None), 9),
        commit_codes(client, commit(group, topic, {2: 1}, member="x"), 9),
        commit_codes(client, commit(group, topic, {2: 1}, generation=1), 9),
        commit_codes(client, commit(new_name("g"), topic, {2: 1}, generation=1), 9),
        commit_codes(client, commit(new_name("g"), topic, {2: 1}, generation=1), 8),
    ]
    for version in range(1, 10):
        results.append(offsets_of(client.call(committed(group, topic, 0, 1, 2, 9), version)))
        if version >= 2:
            results.append(offsets_of(client.call(committed(group, None), version)))
    results.append(offsets_of(client.call(committed(new_name("g"), topic, 0), 9)))
    results.append(offsets_of(client.call(committed(new_name("g"), None), 9)))
    results.append(offsets_of(client.call(committed(group, "nowhere", 0), 9)))
    return results


@scenario()
def offsets_by_topic_id(client: ProtocolClient) -> Any:
    """Offsets are committed and read by topic id in version 10, and are the same by name."""
    topic, group = client.topic(2), group_name(client)
    id_ = client.ids[topic]
    unknown = uuid4()
    results = [
        commit_codes(client, commit(group, id_, {0: 5, 7: 1}), 10),
        commit_codes(client, commit(group, unknown, {0: 5}), 10),
        offsets_of(client.call(committed(group, id_, 0, 1), 10)),
        offsets_of(client.call(committed(group, unknown, 0), 10)),
        offsets_of(client.call(committed(group, topic, 0), 9)),
    ]
    everything = client.call(committed(group, None), 10)
    results.append([one.topic_id == id_ for one in everything.groups[0].topics])
    return [*results, isinstance(id_, UUID)]


@scenario()
def offsets_of_several_groups(client: ProtocolClient) -> Any:
    """One request reads offsets of several groups; an unknown one has none."""
    topic = client.topic(2)
    groups = [group_name(client), group_name(client)]
    for at, group in enumerate(groups):
        client.call(commit(group, topic, {0: at}), 9)
    asked = [(groups[0], topic, [0]), (groups[1], topic, [0, 1]), (new_name("g"), topic, [0])]
    return offsets_of(client.call(committed_by(asked), 8))


@scenario()
def offsets_committed_by_members(client: ProtocolClient) -> Any:
    """Only a current member of the current generation commits, and not during a rebalance."""
    topic, group = client.topic(), group_name(client)
    member, generation = member_of(client, group)

    def committing(**who: Any) -> list[str]:
        return commit_codes(client, commit(group, topic, {0: 1}, **who), 9)

    results = [
        committing(member=member, generation=generation),
        committing(member=member, generation=generation + 1),
        committing(member="stranger", generation=generation),
        committing(),
        committing(member=member),
        committing(member=member, generation=generation, instance="unknown"),
    ]
    joined = ask(client, join(group, member))
    results.append(committing(member=member, generation=joined.generation_id))
    ask(client, leave(group, (member, None)))
    return [*results, committing(), committing(member=member, generation=joined.generation_id)]


@scenario()
def offsets_are_deleted(client: ProtocolClient) -> Any:
    """Offsets of a topic that a member subscribes to cannot be deleted."""
    read, other, group = client.topic(2), client.topic(), group_name(client)
    client.call(commit(group, read, {0: 1, 1: 2}), 9)
    client.call(commit(group, other, {0: 3}), 9)
    member, _ = member_of(client, group, protocols={"range": subscription(read)})

    def forgotten(topic: str, *numbers: int, of: str = group) -> Any:
        answer = ask(client, forget(of, topic, *numbers))
        codes = [error_name(part.error_code) for one in answer.topics for part in one.partitions]
        return error_name(answer.error_code), codes

    results = [
        forgotten(read, 0),
        forgotten(other, 0),
        forgotten("nowhere", 0),
        forgotten(read, 0, of=new_name("g")),
    ]
    ask(client, leave(group, (member, None)))
    results.append(forgotten(read, 0))
    results.append(offsets_of(client.call(committed(group, None), 9)))
    return results


@scenario()
def groups_are_described(client: ProtocolClient) -> Any:
    """State, protocol and members, for a group that is stable, rebalancing, empty or unknown."""
    group, simple, topic = group_name(client), group_name(client), client.topic()
    client.call(commit(simple, topic, {0: 1}), 9)
    member, _ = member_of(client, group, protocols={"range": b"sent"})

    def described(name: str, version: int | None = None) -> Any:
        (described_group,) = ask(client, describe(name), version).groups
        return (
            error_name(described_group.error_code),
            described_group.group_state,
            described_group.protocol_type,
            described_group.protocol_data,
            [
                (one.member_id == member, one.client_id, one.client_host, one.member_metadata)
                for one in described_group.members
            ],
            [one.member_assignment for one in described_group.members],
        )

    nowhere = new_name("g")
    results = [
        described(group),
        described(group, 0),
        described(simple),
        described(nowhere),
        described(nowhere, 5),
    ]
    # No answer yet, so the group is in the middle of its round.
    joined = ask(client, join(group, member, protocols={"range": b"new"}))
    results.append((error_name(joined.error_code), described(group)))
    ask(client, leave(group, (member, None)))
    return [*results, described(group)]


@scenario()
def groups_are_listed_and_deleted(client: ProtocolClient) -> Any:
    """Groups are filtered by state and type; one with members cannot be deleted."""
    group, simple, topic = group_name(client), group_name(client), client.topic()
    client.call(commit(simple, topic, {0: 1}), 9)
    member, _ = member_of(client, group)

    def listed(version: int | None = None, **filters: Any) -> Any:
        answer = ask(client, list_groups(**filters), version)
        return sorted(
            (one.protocol_type, one.group_state, one.group_type)
            for one in answer.groups
            if one.group_id in (group, simple)
        )

    def deleted(*names: str) -> Any:
        answer = ask(client, delete_groups(*names))
        return {one.group_id: error_name(one.error_code) for one in answer.results}

    results: list[Any] = [
        listed(),
        listed(0),
        listed(4),
        listed(states=["Stable"]),
        listed(states=["stable", "Empty"]),
        listed(states=["Nonsense"]),
        listed(types=["classic"]),
        listed(types=["Consumer"]),
    ]
    codes = deleted(group, simple, new_name("g"))
    results.append([codes.pop(group), codes.pop(simple), *codes.values()])
    ask(client, leave(group, (member, None)))
    results.append(list(deleted(group).values()))
    return [*results, listed(), offsets_of(client.call(committed(simple, None), 9))]
