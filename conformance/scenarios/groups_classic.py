"""Groups by the classic protocol: shares of the work, who leaves, who stays, who is fenced."""

from __future__ import annotations

from typing import Any

from conformance import child
from conformance.clients import Member, drive, drive_for, fill, spread
from conformance.scenario import Cluster, scenario

# As short as the brokers here allow; a member that is killed is missed after this long.
SHORT = {"session_timeout_ms": 1500, "heartbeat_interval_ms": 200}


def filled(cluster: Cluster, partitions: int, each: int) -> str:
    """A topic with `each` records in every partition, all different."""
    topic = cluster.topic(partitions)
    for number in range(partitions):
        fill(cluster, topic, each, number, first=number * each)
    return topic


def numbers(*members: Member) -> list[int]:
    """All that the members have read, in numerical order."""
    return sorted(int(value or -1) for member in members for value in member.values)


@scenario(expected={"partitions": [0, 1, 2, 3], "read": list(range(20)), "errors": []})
def one_member_has_all(cluster: Cluster) -> Any:
    """The only member of a group gets every partition and reads every record."""
    topic = filled(cluster, 4, 5)
    member = Member(cluster, cluster.name("group"), [topic])
    drive([member], lambda: len(member.records) == 20)
    return {"partitions": member.partitions, "read": numbers(member), "errors": member.errors}


@scenario(expected={"shares": [[0, 1], [2, 3]], "alone": [0, 1, 2, 3]})
def members_come_and_go(cluster: Cluster) -> Any:
    """Two members share the partitions in ranges; when one leaves the other gets all."""
    topic = cluster.topic(4)
    group = cluster.name("group")
    first = Member(cluster, group, [topic], **SHORT)
    drive([first], lambda: len(first.partitions) == 4)
    second = Member(cluster, group, [topic], **SHORT)
    drive([first, second], lambda: len(second.partitions) == 2 and len(first.partitions) == 2)
    shares = spread([first, second])
    second.consumer.close()
    drive([first], lambda: len(first.partitions) == 4)
    return {"shares": shares, "alone": first.partitions}


@scenario(expected={"shares": [[0, 2], [1, 3]]})
def round_robin(cluster: Cluster) -> Any:
    """The members' own assignor decides: round robin deals the partitions out in turn."""
    topic = cluster.topic(4)
    group = cluster.name("group")
    how = {**SHORT, "partition_assignment_strategy": "roundrobin"}
    members = [Member(cluster, group, [topic], **how) for _ in range(2)]
    drive(members, lambda: all(len(member.partitions) == 2 for member in members))
    return {"shares": spread(members)}


@scenario(expected={"sizes": [2, 2], "taken away": 2, "kept": True, "assigned at once": 4})
def cooperative_members_keep_what_they_can(cluster: Cluster) -> Any:
    """With the cooperative assignor only the partitions that move are taken from their owner."""
    topic = cluster.topic(4)
    group = cluster.name("group")
    how = {**SHORT, "partition_assignment_strategy": "cooperative-sticky"}
    first = Member(cluster, group, [topic], **how)
    drive([first], lambda: len(first.partitions) == 4)
    before = len(first.assigned[0])
    second = Member(cluster, group, [topic], **how)
    drive([first, second], lambda: len(second.partitions) == 2 and len(first.partitions) == 2)
    moved = [number for part in first.revoked for number in part]
    return {
        "sizes": sorted((len(first.partitions), len(second.partitions))),
        "taken away": len(moved),
        "kept": sorted(moved) == second.partitions,
        "assigned at once": before,
    }


@scenario(expected={"same": True, "disturbed": False, "goes on": ["2", "3"]})
def a_static_member_returns(cluster: Cluster) -> Any:
    """A static member that comes back in time has its partitions again; nobody else notices."""
    topic = cluster.topic(2)
    for number in range(2):
        fill(cluster, topic, 4, number)
    group = cluster.name("group")
    how = {"session_timeout_ms": 20_000, "heartbeat_interval_ms": 200}
    stays = Member(cluster, group, [topic], group_instance_id="stays", **how)
    leaves = Member(cluster, group, [topic], group_instance_id="leaves", **how)
    both = [stays, leaves]
    drive(both, lambda: all(len(m.partitions) == 1 and len(m.records) >= 4 for m in both))
    had = leaves.partitions
    third = next(m for m in leaves.records if m.partition() == had[0] and m.value() == b"1")
    leaves.consumer.commit(message=third, asynchronous=False)
    leaves.consumer.close()
    assignments = len(stays.assigned)
    back = Member(cluster, group, [topic], group_instance_id="leaves", **how)
    drive([stays, back], lambda: len(back.records) == 2)
    drive_for([stays, back])
    return {
        "same": back.partitions == had,
        "disturbed": len(stays.assigned) != assignments,
        "goes on": back.values,
    }


@scenario(expected={"fenced": True, "other": [0, 1]})
def a_static_member_twice(cluster: Cluster) -> Any:
    """Of two members that claim the same static id, the older one is fenced."""
    topic = cluster.topic(2)
    group = cluster.name("group")
    how = {**SHORT, "group_instance_id": "one"}
    older = Member(cluster, group, [topic], **how)
    drive([older], lambda: len(older.partitions) == 2)
    newer = Member(cluster, group, [topic], **how)
    drive([older, newer], lambda: older.errors and len(newer.partitions) == 2)
    return {
        "fenced": bool({"FENCED_INSTANCE_ID", "_FATAL"} & set(older.errors)),
        "other": newer.partitions,
    }


@scenario(expected={"first": list(range(10)), "second": list(range(10))})
def groups_do_not_disturb_each_other(cluster: Cluster) -> Any:
    """Every group gets every record, however the members of each share them."""
    topic = filled(cluster, 2, 5)
    one = Member(cluster, cluster.name("group"), [topic])
    group = cluster.name("group")
    pair = [Member(cluster, group, [topic], **SHORT) for _ in range(2)]
    drive([one, *pair], lambda: len(one.records) == 10 and len(set(numbers(*pair))) == 10)
    return {"first": numbers(one), "second": sorted(set(numbers(*pair)))}


@scenario(expected={"taken over": [4, 5, 6, 7, 8, 9]})
def a_killed_member_is_replaced(cluster: Cluster) -> Any:
    """When a member dies, another goes on at the last committed offset."""
    topic = filled(cluster, 1, 10)
    group = cluster.name("group")
    first = child.start(cluster, group, topic, 4, **SHORT)
    second = Member(cluster, group, [topic], **SHORT)
    first.kill()
    drive([second], lambda: len(second.records) == 6)
    return {"taken over": numbers(second)}


@scenario(expected={"now": 1, "later": 2, "other": 0})
def subscription_by_pattern(cluster: Cluster) -> Any:
    """A pattern takes in the topics that match it, those that are made later too."""
    prefix = cluster.name("many")
    cluster.protocol.create_topic(f"{prefix}-a")
    cluster.protocol.create_topic(f"other-{prefix}")
    member = Member(cluster, cluster.name("group"), [f"^{prefix}-.*"], **SHORT)
    drive([member], lambda: len(member.partitions) == 1)
    now = len(member.partitions)
    cluster.protocol.create_topic(f"{prefix}-b")
    drive([member], lambda: len(member.partitions) == 2)
    names = [part.topic for part in member.consumer.assignment()]
    return {
        "now": now,
        "later": len(names),
        "other": sum(name.startswith("other") for name in names),
    }


@scenario(expected={"refused": True, "undisturbed": [0]})
def protocols_that_do_not_agree(cluster: Cluster) -> Any:
    """A member whose assignors the group does not share is refused."""
    topic = cluster.topic()
    group = cluster.name("group")
    first = Member(cluster, group, [topic], **SHORT)
    drive([first], lambda: len(first.partitions) == 1)
    how = {**SHORT, "partition_assignment_strategy": "cooperative-sticky"}
    second = Member(cluster, group, [topic], **how)
    drive([first, second], lambda: second.errors)
    return {
        "refused": "INCONSISTENT_GROUP_PROTOCOL" in second.errors,
        "undisturbed": first.partitions,
    }


@scenario(expected="INVALID_SESSION_TIMEOUT")
def a_session_that_is_too_short(cluster: Cluster) -> Any:
    """A session time-out below what the broker allows is refused."""
    member = Member(
        cluster,
        cluster.name("group"),
        [cluster.topic()],
        session_timeout_ms=50,
        heartbeat_interval_ms=10,
    )
    drive([member], lambda: member.errors)
    return member.errors[0]
