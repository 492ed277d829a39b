"""Groups by the consumer protocol (KIP-848), where the broker assigns the partitions."""

from __future__ import annotations

from typing import Any

from confluent_kafka import ConsumerGroupState, ConsumerGroupType

from conformance.clients import Member, drive, drive_for, fill, spread
from conformance.scenario import REQUEST_TIMEOUT_S, Cluster, scenario
from conformance.scenarios.groups_classic import filled, numbers

NEW: dict[str, Any] = {"group_protocol": "consumer"}


def group_of(cluster: Cluster) -> str:
    """A group whose members hear from each other soon."""
    group = cluster.name("group")
    cluster.group_config(
        group,
        {"consumer.heartbeat.interval.ms": "200", "consumer.session.timeout.ms": "2000"},
    )
    return group


@scenario(expected={"partitions": [0, 1, 2, 3], "read": list(range(20)), "errors": []})
def one_member_has_all(cluster: Cluster) -> Any:
    """The only member of a group gets every partition and reads every record."""
    topic = filled(cluster, 4, 5)
    member = Member(cluster, group_of(cluster), [topic], **NEW)
    drive([member], lambda: len(member.records) == 20)
    return {"partitions": member.partitions, "read": numbers(member), "errors": member.errors}


@scenario(expected={"sizes": [2, 2], "all": [0, 1, 2, 3], "moved": 2, "alone": [0, 1, 2, 3]})
def members_come_and_go(cluster: Cluster) -> Any:
    """Two members share the partitions, only what moves is taken away, and one inherits all."""
    topic = cluster.topic(4)
    group = group_of(cluster)
    first = Member(cluster, group, [topic], **NEW)
    drive([first], lambda: len(first.partitions) == 4)
    second = Member(cluster, group, [topic], **NEW)
    drive([first, second], lambda: len(second.partitions) == 2 and len(first.partitions) == 2)
    observed = {
        "sizes": sorted((len(first.partitions), len(second.partitions))),
        "all": sorted(first.partitions + second.partitions),
        "moved": sum(map(len, first.revoked)),
    }
    second.consumer.close()
    drive([first], lambda: len(first.partitions) == 4)
    return {**observed, "alone": first.partitions}


@scenario(expected={"shares": [[0, 1], [2, 3]]})
def the_range_assignor(cluster: Cluster) -> Any:
    """A group that asks for ranges gets neighbouring partitions for each member."""
    topic = cluster.topic(4)
    group = group_of(cluster)
    how = {**NEW, "group_remote_assignor": "range"}
    members = [Member(cluster, group, [topic], **how) for _ in range(2)]
    drive(members, lambda: all(len(member.partitions) == 2 for member in members))
    return {"shares": spread(members)}


@scenario(expected={"error": "_FATAL", "because of the assignor": True})
def an_assignor_that_nobody_knows(cluster: Cluster) -> Any:
    """An assignor that the broker does not have is refused."""
    how = {**NEW, "group_remote_assignor": "no-such-assignor"}
    member = Member(cluster, group_of(cluster), [cluster.topic()], **how)
    drive([member], lambda: member.errors)
    return {
        "error": member.errors[0],
        "because of the assignor": "assignor or its version range" in member.reasons[0],
    }


@scenario(expected={"before": ["0", "1", "2", "3"], "after": ["2", "3"]})
def committed_offsets_are_kept(cluster: Cluster) -> Any:
    """The next member goes on at the offset that the one before has committed."""
    topic = cluster.topic()
    fill(cluster, topic, 4)
    group = group_of(cluster)
    first = Member(cluster, group, [topic], **NEW)
    drive([first], lambda: len(first.records) == 4)
    first.consumer.commit(message=first.records[1], asynchronous=False)
    first.consumer.close()
    second = Member(cluster, group, [topic], **NEW)
    drive([second], lambda: len(second.records) == 2)
    return {"before": first.values, "after": second.values}


@scenario(expected={"same": True, "disturbed": False})
def a_static_member_returns(cluster: Cluster) -> Any:
    """A static member that comes back in time has its partitions again; nobody else notices."""
    topic = cluster.topic(4)
    group = cluster.name("group")
    cluster.group_config(
        group,
        {"consumer.heartbeat.interval.ms": "200", "consumer.session.timeout.ms": "20000"},
    )
    stays = Member(cluster, group, [topic], group_instance_id="stays", **NEW)
    leaves = Member(cluster, group, [topic], group_instance_id="leaves", **NEW)
    both = [stays, leaves]
    drive(both, lambda: all(len(member.partitions) == 2 for member in both))
    had, callbacks = leaves.partitions, len(stays.assigned) + len(stays.revoked)
    leaves.consumer.close()
    back = Member(cluster, group, [topic], group_instance_id="leaves", **NEW)
    drive([stays, back], lambda: len(back.partitions) == 2)
    drive_for([stays, back])
    return {
        "same": back.partitions == had,
        "disturbed": len(stays.assigned) + len(stays.revoked) != callbacks,
    }


@scenario(expected={"topics": 2, "other": 0})
def subscription_by_pattern(cluster: Cluster) -> Any:
    """A pattern is matched by the broker against all topics."""
    prefix = cluster.name("many")
    for name in (f"{prefix}-a", f"{prefix}-b", f"other-{prefix}"):
        cluster.protocol.create_topic(name)
    member = Member(cluster, group_of(cluster), [f"^{prefix}-.*"], **NEW)
    drive([member], lambda: len(member.partitions) == 2)
    names = [part.topic for part in member.consumer.assignment()]
    return {"topics": len(names), "other": sum(name.startswith("other") for name in names)}


@scenario(expected={"sizes": [3, 3], "topics": [3, 3]})
def several_topics(cluster: Cluster) -> Any:
    """The partitions of all subscribed topics are spread over all members."""
    topics = [cluster.topic(3), cluster.topic(3)]
    group = group_of(cluster)
    members = [Member(cluster, group, topics, **NEW) for _ in range(2)]
    drive(members, lambda: all(len(member.partitions) == 3 for member in members))
    owned = [part.topic for member in members for part in member.consumer.assignment()]
    return {
        "sizes": [len(member.partitions) for member in members],
        "topics": [owned.count(topic) for topic in topics],
    }


@scenario(expected={"before": "CLASSIC", "after": "CONSUMER", "goes on": ["2", "3"]})
def a_group_changes_its_protocol(cluster: Cluster) -> Any:
    """An empty classic group becomes one of the new protocol and keeps its offsets."""
    topic = cluster.topic()
    fill(cluster, topic, 4)
    group = group_of(cluster)
    old = Member(cluster, group, [topic])
    drive([old], lambda: len(old.records) == 4)
    old.consumer.commit(message=old.records[1], asynchronous=False)
    before = description(cluster, group).type
    old.consumer.close()
    new = Member(cluster, group, [topic], **NEW)
    drive([new], lambda: len(new.records) == 2)
    after = description(cluster, group).type
    return {"before": before.name, "after": after.name, "goes on": new.values}


@scenario(
    expected={"state": "STABLE", "type": "CONSUMER", "assignor": "uniform", "parts": [[0, 1]]}
)
def what_is_said_of_a_group(cluster: Cluster) -> Any:
    """Describing a group tells its state, its assignor and what each member has."""
    topic = cluster.topic(2)
    group = group_of(cluster)
    member = Member(cluster, group, [topic], **NEW)
    drive([member], lambda: len(member.partitions) == 2)
    drive([member], lambda: description(cluster, group).state == ConsumerGroupState.STABLE)
    described = description(cluster, group)
    assert described.type == ConsumerGroupType.CONSUMER
    return {
        "state": described.state.name,
        "type": described.type.name,
        "assignor": described.partition_assignor,
        "parts": [
            sorted(part.partition for part in member.assignment.topic_partitions)
            for member in described.members
        ],
    }


def description(cluster: Cluster, group: str) -> Any:
    """A group as the broker describes it."""
    return cluster.admin.describe_consumer_groups([group])[group].result(REQUEST_TIMEOUT_S)
