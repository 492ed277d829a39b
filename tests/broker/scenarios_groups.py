"""What brokers answer to members of classic groups, and about offsets; run on ours and on Kafka.

A member here is a raw connection that does what the scenario says. Member ids are random, so they
are compared only by what is known of them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from uuid import UUID, uuid4

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
from tests.broker.raw import RawClient
from tests.broker.requests import new_name
from tests.broker.scenarios_members import ask
from tests.broker.talk import Talk, error_name, scenario

OLD_JOIN = 3


def code(talk: Talk, request: Message, version: int | None = None) -> str:
    """The error of an answer as a whole."""
    return error_name(ask(talk, request, version).error_code)


def group_name(talk: Talk) -> str:
    """A name for a group whose coordinator is there: Kafka makes it at the first question."""
    name = new_name("g")
    ask(talk, heartbeat(name, "nobody", 0))
    return name


def member_of(talk: Talk, group: str, **options: Any) -> tuple[str, int]:
    """Join alone, and sync: the member's id and the generation."""
    member = ask(talk, join(group, **options)).member_id
    answer = ask(talk, join(group, member, **options))
    assert not answer.error_code, error_name(answer.error_code)
    member = answer.member_id
    instance = options.get("instance")
    synced = ask(
        talk, sync(group, member, answer.generation_id, {member: b"mine"}, instance=instance)
    )
    assert (synced.error_code, synced.assignment) == (0, b"mine")
    return member, answer.generation_id


def commit_codes(talk: Talk, request: Message, version: int | None = None) -> list[str]:
    """The error of each partition, in their order: Kafka tells of the unknown ones first."""
    answer = talk.call(request, version)
    parts = [part for topic in answer.topics for part in topic.partitions]
    return [error_name(one.error_code) for one in sorted(parts, key=lambda p: p.partition_index)]


@scenario
def group_joined_by_one(talk: Talk) -> Any:
    group = group_name(talk)
    first = ask(talk, join(group))
    second = ask(talk, join(group, first.member_id))
    told = [(one.member_id == second.member_id, one.metadata) for one in second.members]
    synced = ask(
        talk, sync(group, second.member_id, second.generation_id, {second.member_id: b"a"})
    )
    return [
        (error_name(first.error_code), first.generation_id, first.leader, first.protocol_name),
        first.member_id.startswith("raw-"),
        (error_name(second.error_code), second.generation_id, second.protocol_name),
        (second.protocol_type, second.leader == second.member_id, second.skip_assignment),
        told,
        (error_name(synced.error_code), synced.assignment, synced.protocol_name),
        code(talk, heartbeat(group, second.member_id, second.generation_id)),
        code(talk, heartbeat(group, second.member_id, second.generation_id + 1)),
        code(talk, heartbeat(group, second.member_id, second.generation_id - 1)),
        code(talk, heartbeat(group, "stranger", second.generation_id)),
    ]


@scenario
def group_joined_in_old_versions(talk: Talk) -> Any:
    results: list[Any] = []
    for version in range(4):
        group = group_name(talk)
        answer = ask(talk, join(group), version)
        results.append((error_name(answer.error_code), answer.generation_id, answer.protocol_name))
        results.append(len(answer.members))
        synced = ask(
            talk, sync(group, answer.member_id, 1, {answer.member_id: b"a"}), min(version, 2)
        )
        results.append((error_name(synced.error_code), synced.assignment))
        left = ask(talk, leave(group, (answer.member_id, None)), min(version, 2))
        results.append(error_name(left.error_code))
    return results


@scenario
def group_joins_that_are_refused(talk: Talk) -> Any:
    group = group_name(talk)
    member, generation = member_of(talk, group)
    results = [
        code(talk, join("")),
        code(talk, join(group, session_ms=999)),
        code(talk, join(group, session_ms=1_800_001)),
        code(talk, join(group, "stranger")),
        code(talk, join(new_name("g"), "stranger")),
        code(talk, join(group, protocols={"other": b""})),
        code(talk, join(group, protocols={})),
        code(talk, join(group, protocol_type="connect")),
        code(talk, join(group, protocol_type="")),
        code(talk, join(group, "stranger", instance="unknown")),
        code(talk, join(new_name("g"), protocols={}), OLD_JOIN),
    ]
    assert code(talk, heartbeat(group, member, generation)) == "NONE"
    return results


@scenario
def group_answers_to_strangers(talk: Talk) -> Any:
    group = group_name(talk)
    member, generation = member_of(talk, group)
    nowhere = new_name("g")
    return [
        code(talk, sync("", member, generation)),
        code(talk, sync(nowhere, member, generation)),
        code(talk, sync(group, "stranger", generation)),
        code(talk, sync(group, member, generation + 1)),
        code(talk, sync(group, member, generation, protocol_type="connect")),
        code(talk, sync(group, member, generation, protocol_type=None)),
        code(talk, sync(group, member, generation, protocol=None)),
        code(talk, sync(group, member, generation, protocol=None, protocol_type=None), 4),
        code(talk, sync(group, member, generation, protocol="roundrobin")),
        code(talk, sync(group, member, generation, instance="unknown")),
        code(talk, heartbeat("", member, generation)),
        code(talk, heartbeat(nowhere, member, generation)),
        code(talk, heartbeat(group, member, generation, "unknown")),
        code(talk, leave("", (member, None))),
    ]


@scenario
def group_leaving(talk: Talk) -> Any:
    group = group_name(talk)
    member, generation = member_of(talk, group)
    static, _ = member_of(talk, other := group_name(talk), instance="i")

    def left(name: str, *members: tuple[str, str | None], version: int | None = None) -> Any:
        answer = ask(talk, leave(name, *members), version)
        return error_name(answer.error_code), [error_name(one.error_code) for one in answer.members]

    return [
        left(new_name("g"), ("x", None)),
        left(group, ("x", None), (member, "i"), ("", "i"), ("", None)),
        left(group, ("x", None), version=1),
        left(group, (member, None)),
        left(group, (member, None)),
        left(group, (member, None), version=1),
        code(talk, heartbeat(group, member, generation)),
        code(talk, sync(group, member, generation)),
        left(other, ("wrong", "i")),
        left(other, ("", "i")),
        left(other, (static, "i")),
    ]


@scenario
def group_of_two(talk: Talk) -> Any:
    """The second comes when the first is settled: a new generation, with both."""
    group = group_name(talk)
    results: list[Any] = []
    with ExitStack() as stack:
        other = stack.enter_context(RawClient(talk.bootstrap))
        both = {"range": b"1", "b": b"2"}
        first, generation = member_of(talk, group, protocols=both)
        turned = {"b": b"3", "range": b"4"}
        pending = other.call(join(group, protocols=turned))
        other.send(join(group, pending.member_id, protocols=turned))
        while (told := code(talk, heartbeat(group, first, generation))) == "NONE":
            pass
        results.append(told)
        results.append(code(talk, sync(group, first, generation)))
        mine = talk.call(join(group, first, protocols=both))
        theirs = other.receive()
        results.append((mine.generation_id, theirs.generation_id, mine.leader == first))
        results.append(mine.leader == theirs.leader)
        results.append(sorted(one.metadata for one in mine.members) != [])
        results.append(len(theirs.members))
        chosen = mine.protocol_name
        other.send(sync(group, theirs.member_id, theirs.generation_id, protocol=chosen))
        shares = {first: b"for a", theirs.member_id: b"for b"}
        synced = talk.call(sync(group, first, mine.generation_id, shares, protocol=chosen))
        results.append(synced.assignment)
        results.append(other.receive().assignment)
        results.append(code(talk, heartbeat(group, first, generation)))
        gone = other.call(leave(group, (theirs.member_id, None)))
        results.append(error_name(gone.members[0].error_code))
        results.append(code(talk, heartbeat(group, first, mine.generation_id)))
    return results


@scenario
def group_with_a_static_member(talk: Talk) -> Any:
    group = group_name(talk)
    member, generation = member_of(talk, group, instance="i")
    again = ask(talk, join(group, instance="i"))
    new = again.member_id
    synced = ask(talk, sync(group, new, again.generation_id, instance="i"))
    topic = talk.topic()
    return [
        member.startswith("i-"),
        new != member,
        (again.generation_id == generation, again.leader == new, again.skip_assignment),
        len(again.members),
        synced.assignment,
        code(talk, heartbeat(group, member, generation, "i")),
        code(talk, heartbeat(group, member, generation)),
        code(talk, heartbeat(group, new, generation, "i")),
        code(talk, heartbeat(group, new, generation)),
        code(talk, heartbeat(group, new, generation, "other")),
        code(talk, join(group, member, instance="i")),
        code(talk, sync(group, member, generation, instance="i")),
        commit_codes(
            talk, commit(group, topic, {0: 1}, member=member, generation=generation, instance="i")
        ),
        commit_codes(
            talk, commit(group, topic, {0: 1}, member=new, generation=generation, instance="i")
        ),
    ]  # fmt: skip


@scenario
def group_with_an_older_static_leader(talk: Talk) -> Any:
    group = group_name(talk)
    member, generation = member_of(talk, group, instance="i")
    again = ask(talk, join(group, instance="i"), 8)
    synced = ask(talk, sync(group, again.member_id, again.generation_id, instance="i"))
    return [
        (error_name(again.error_code), again.generation_id == generation),
        # It is not told that it leads.
        (again.leader == again.member_id, again.leader == member, len(again.members)),
        synced.assignment,
    ]


@scenario
def group_offsets_committed_by_hand(talk: Talk) -> Any:
    topic, group = talk.topic(3), group_name(talk)
    results = [
        commit_codes(talk, commit(group, topic, {0: 5, 1: 6, 9: 7}, metadata="m"), 9),
        commit_codes(talk, commit(group, "nowhere", {0: 5}), 9),
        commit_codes(talk, commit(group, topic, {0: 5}, metadata="x" * 4_097), 9),
        commit_codes(talk, commit(group, topic, {2: 1}, metadata=None), 9),
        commit_codes(talk, commit(group, topic, {2: 1}, member="x"), 9),
        commit_codes(talk, commit(group, topic, {2: 1}, generation=1), 9),
        commit_codes(talk, commit(new_name("g"), topic, {2: 1}, generation=1), 9),
        commit_codes(talk, commit(new_name("g"), topic, {2: 1}, generation=1), 8),
    ]
    for version in range(1, 10):
        results.append(offsets_of(talk.call(committed(group, topic, 0, 1, 2, 9), version)))
        if version >= 2:
            results.append(offsets_of(talk.call(committed(group, None), version)))
    results.append(offsets_of(talk.call(committed(new_name("g"), topic, 0), 9)))
    results.append(offsets_of(talk.call(committed(new_name("g"), None), 9)))
    results.append(offsets_of(talk.call(committed(group, "nowhere", 0), 9)))
    return results


@scenario
def group_offsets_by_topic_id(talk: Talk) -> Any:
    topic, group = talk.topic(2), group_name(talk)
    id_ = talk.ids[topic]
    unknown = uuid4()
    results = [
        commit_codes(talk, commit(group, id_, {0: 5, 7: 1}), 10),
        commit_codes(talk, commit(group, unknown, {0: 5}), 10),
        offsets_of(talk.call(committed(group, id_, 0, 1), 10)),
        offsets_of(talk.call(committed(group, unknown, 0), 10)),
        offsets_of(talk.call(committed(group, topic, 0), 9)),
    ]
    everything = talk.call(committed(group, None), 10)
    results.append([one.topic_id == id_ for one in everything.groups[0].topics])
    return [*results, isinstance(id_, UUID)]


@scenario
def group_offsets_of_several_groups(talk: Talk) -> Any:
    topic = talk.topic(2)
    groups = [group_name(talk), group_name(talk)]
    for at, group in enumerate(groups):
        talk.call(commit(group, topic, {0: at}), 9)
    asked = [(groups[0], topic, [0]), (groups[1], topic, [0, 1]), (new_name("g"), topic, [0])]
    return offsets_of(talk.call(committed_by(asked), 8))


@scenario
def group_offsets_of_members(talk: Talk) -> Any:
    topic, group = talk.topic(), group_name(talk)
    member, generation = member_of(talk, group)

    def committing(**who: Any) -> list[str]:
        return commit_codes(talk, commit(group, topic, {0: 1}, **who), 9)

    results = [
        committing(member=member, generation=generation),
        committing(member=member, generation=generation + 1),
        committing(member="stranger", generation=generation),
        committing(),
        committing(member=member),
        committing(member=member, generation=generation, instance="unknown"),
    ]
    joined = ask(talk, join(group, member))
    results.append(committing(member=member, generation=joined.generation_id))
    ask(talk, leave(group, (member, None)))
    return [*results, committing(), committing(member=member, generation=joined.generation_id)]


@scenario
def group_offsets_forgotten(talk: Talk) -> Any:
    read, other, group = talk.topic(2), talk.topic(), group_name(talk)
    talk.call(commit(group, read, {0: 1, 1: 2}), 9)
    talk.call(commit(group, other, {0: 3}), 9)
    member, _ = member_of(talk, group, protocols={"range": subscription(read)})

    def forgotten(topic: str, *numbers: int, of: str = group) -> Any:
        answer = ask(talk, forget(of, topic, *numbers))
        codes = [error_name(part.error_code) for one in answer.topics for part in one.partitions]
        return error_name(answer.error_code), codes

    results = [
        forgotten(read, 0),
        forgotten(other, 0),
        forgotten("nowhere", 0),
        forgotten(read, 0, of=new_name("g")),
    ]
    ask(talk, leave(group, (member, None)))
    results.append(forgotten(read, 0))
    results.append(offsets_of(talk.call(committed(group, None), 9)))
    return results


@scenario
def group_described(talk: Talk) -> Any:
    group, simple, topic = group_name(talk), group_name(talk), talk.topic()
    talk.call(commit(simple, topic, {0: 1}), 9)
    member, _ = member_of(talk, group, protocols={"range": b"sent"})

    def described(name: str, version: int | None = None) -> Any:
        (told,) = ask(talk, describe(name), version).groups
        return (
            error_name(told.error_code),
            told.group_state,
            told.protocol_type,
            told.protocol_data,
            [
                (one.member_id == member, one.client_id, one.client_host, one.member_metadata)
                for one in told.members
            ],
            [one.member_assignment for one in told.members],
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
    joined = ask(talk, join(group, member, protocols={"range": b"new"}))
    results.append((error_name(joined.error_code), described(group)))
    ask(talk, leave(group, (member, None)))
    return [*results, described(group)]


@scenario
def group_listed_and_deleted(talk: Talk) -> Any:
    group, simple, topic = group_name(talk), group_name(talk), talk.topic()
    talk.call(commit(simple, topic, {0: 1}), 9)
    member, _ = member_of(talk, group)

    def listed(version: int | None = None, **filters: Any) -> Any:
        answer = ask(talk, list_groups(**filters), version)
        return sorted(
            (one.protocol_type, one.group_state, one.group_type)
            for one in answer.groups
            if one.group_id in (group, simple)
        )

    def deleted(*names: str) -> Any:
        answer = ask(talk, delete_groups(*names))
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
    ask(talk, leave(group, (member, None)))
    results.append(list(deleted(group).values()))
    return [*results, listed(), offsets_of(talk.call(committed(simple, None), 9))]
