"""Share groups (KIP-932): records one by one, accepted, released, rejected, and never twice."""

from __future__ import annotations

from typing import Any

from confluent_kafka import AcknowledgeType, Message, ShareConsumer

from conformance.clients import (
    TIMEOUT_S,
    Member,
    drive,
    fill,
    hold,
    received,
    take,
    until,
    value_of,
    values,
    what_comes,
)
from conformance.scenario import Cluster, scenario

ACCEPT, RELEASE, REJECT = AcknowledgeType.ACCEPT, AcknowledgeType.RELEASE, AcknowledgeType.REJECT


def queue(cluster: Cluster, topic: str, **settings: str) -> str:
    """A share group that starts at the beginning and whose members hear from it soon."""
    group = cluster.name("queue")
    named = {name.replace("_", "."): value for name, value in settings.items()}
    cluster.group_config(
        group,
        {"share.auto.offset.reset": "earliest", "share.heartbeat.interval.ms": "200",
         "share.session.timeout.ms": "5000", **named},
    )  # fmt: skip
    return group


def member(cluster: Cluster, group: str, topic: str, **config: Any) -> ShareConsumer:
    consumer = cluster.share_consumer(group, **config)
    consumer.subscribe([topic])
    return consumer


def counts(messages: list[Message]) -> list[tuple[str | None, int | None]]:
    """Values with how often each was delivered."""
    return sorted(((value_of(m), m.delivery_count()) for m in messages), key=str)


@scenario(expected={"first": [("0", 1), ("1", 1), ("2", 1)], "again": []})
def accepted_records_are_gone(cluster: Cluster) -> Any:
    """What a member accepts is delivered to nobody else."""
    topic = cluster.topic()
    fill(cluster, topic, 3)
    group = queue(cluster, topic)
    first = member(cluster, group, topic)
    messages = take(first, 3)
    first.close()
    return {"first": counts(messages), "again": what_comes(member(cluster, group, topic))}


@scenario(expected={"first": [("0", 1), ("1", 1)], "again": [("1", 2)], "then": []})
def released_records_come_again(cluster: Cluster) -> Any:
    """A released record is delivered again, and says that it is the second time."""
    topic = cluster.topic()
    fill(cluster, topic, 2)
    consumer = member(cluster, queue(cluster, topic), topic)
    first = take(consumer, 2, lambda m: RELEASE if m.value() == b"1" else ACCEPT)
    again = take(consumer, 1)
    return {"first": counts(first), "again": counts(again), "then": what_comes(consumer)}


@scenario(expected={"first": [("0", 1), ("1", 1), ("2", 1)], "then": []})
def rejected_records_do_not(cluster: Cluster) -> Any:
    """A rejected record is not delivered again."""
    topic = cluster.topic()
    fill(cluster, topic, 3)
    consumer = member(cluster, queue(cluster, topic), topic)
    first = take(consumer, 3, lambda m: REJECT if m.value() == b"1" else ACCEPT)
    return {"first": counts(first), "then": what_comes(consumer)}


@scenario(expected={"deliveries": [1, 2, 3, 4, 5], "then": []})
def the_delivery_limit(cluster: Cluster) -> Any:
    """After five deliveries a record is not delivered any more."""
    topic = cluster.topic()
    fill(cluster, topic, 1)
    consumer = member(cluster, queue(cluster, topic), topic)
    deliveries: list[int | None] = []
    for _ in range(5):
        deliveries += [m.delivery_count() for m in take(consumer, 1, lambda _: RELEASE)]
    return {"deliveries": deliveries, "then": what_comes(consumer)}


@scenario(expected={"held": [("0", 1), ("1", 1)], "then": [("0", 2), ("1", 2)]})
def a_lock_runs_out(cluster: Cluster) -> Any:
    """What a member keeps to itself for too long is delivered to another."""
    topic = cluster.topic()
    fill(cluster, topic, 2)
    group = queue(cluster, topic, share_record_lock_duration_ms="1000")
    slow = member(cluster, group, topic)
    held: list[Message] = []
    while len(held) < 2:
        held += hold(slow)
    other = member(cluster, group, topic)
    return {"held": counts(held), "then": counts(take(other, 2))}


@scenario(expected={"held": [("0", 1)], "then": [("0", 2)]})
def a_member_that_leaves_gives_back(cluster: Cluster) -> Any:
    """What a member has not acknowledged when it leaves is delivered to another at once."""
    topic = cluster.topic()
    fill(cluster, topic, 1)
    group = queue(cluster, topic)
    first = member(cluster, group, topic)
    held = hold(first)
    first.close()
    return {"held": counts(held), "then": counts(take(member(cluster, group, topic), 1))}


@scenario(expected={"all": [str(number) for number in range(200)], "both": True, "twice": 0})
def more_members_than_partitions(cluster: Cluster) -> Any:
    """The members of a share group work on one partition side by side, each on its own records."""
    topic = cluster.topic()
    group = queue(cluster, topic)
    members = [member(cluster, group, topic, max_poll_records=10) for _ in range(2)]
    taken: list[list[str | None]] = [[], []]
    sent = 0

    def done() -> bool:
        nonlocal sent
        if sent < 200:
            fill(cluster, topic, 20, first=sent)
            sent += 20
        for number, consumer in enumerate(members):
            for message in received(consumer):
                consumer.acknowledge(message, ACCEPT)
                taken[number].append(value_of(message))
        return sum(map(len, taken)) >= 200

    until(done)
    for consumer in members:
        consumer.commit_sync(TIMEOUT_S)
    everything = taken[0] + taken[1]
    return {
        "all": sorted(set(everything), key=lambda value: int(value or -1)),
        "both": all(taken),
        "twice": len(everything) - len(set(everything)),
    }


@scenario(expected={"slow": "0", "others": ["1", "2", "3"]})
def a_slow_record_holds_nobody_up(cluster: Cluster) -> Any:
    """While one record is being worked on, those behind it go to others."""
    topic = cluster.topic()
    fill(cluster, topic, 1)
    group = queue(cluster, topic)
    slow = member(cluster, group, topic)
    (held,) = hold(slow)
    fill(cluster, topic, 3, first=1)
    return {"slow": value_of(held), "others": values(take(member(cluster, group, topic), 3))}


@scenario(expected={"queue": ["0", "1", "2"], "log": ["0", "1", "2"]})
def a_log_and_a_queue_at_once(cluster: Cluster) -> Any:
    """One group reads a topic as a log, another as a queue: the same records, no copy."""
    topic = cluster.topic()
    fill(cluster, topic, 3)
    consumer = member(cluster, queue(cluster, topic), topic)
    log = Member(cluster, cluster.name("group"), [topic])
    drive([log], lambda: len(log.records) == 3)
    return {"queue": values(take(consumer, 3)), "log": log.values}


@scenario(expected={"before": [], "after": ["late"]})
def a_queue_starts_at_the_end(cluster: Cluster) -> Any:
    """Unless it is told otherwise a share group begins with what comes after it."""
    topic = cluster.topic()
    fill(cluster, topic, 3)
    group = queue(cluster, topic, share_auto_offset_reset="latest")
    consumer = member(cluster, group, topic)
    before = what_comes(consumer, 1.5)
    producer = cluster.producer()
    producer.produce(topic, "late", partition=0)
    assert producer.flush(TIMEOUT_S) == 0
    return {"before": before, "after": values(take(consumer, 1))}


@scenario(expected={"first": ["0", "1"], "again": []})
def polling_accepts(cluster: Cluster) -> Any:
    """In implicit mode the next poll accepts what the one before has brought."""
    topic = cluster.topic()
    fill(cluster, topic, 2)
    group = queue(cluster, topic)
    first = member(cluster, group, topic, share_acknowledgement_mode="implicit")
    messages: list[Message] = []
    while len(messages) < 2:
        messages += received(first)
    received(first)
    first.commit_sync(TIMEOUT_S)
    first.close()
    return {"first": values(messages), "again": what_comes(member(cluster, group, topic))}


@scenario(
    expected={"state": "STABLE", "members": 1, "known": True, "deleted": None, "empty": "EMPTY"}
)
def queues_as_admins_see_them(cluster: Cluster) -> Any:
    """A share group is described with its members and its partitions, and deleted when empty."""
    topic = cluster.topic()
    fill(cluster, topic, 2)
    group = queue(cluster, topic)
    consumer = member(cluster, group, topic)
    take(consumer, 2)
    described = cluster.java.call("describe_share_group", group=group)

    offsets = cluster.java.call("share_group_offsets", group=group)["offsets"]
    consumer.close()
    empty = cluster.java.call("describe_share_group", group=group)["state"]
    deleted = cluster.java.call("delete_share_group", group=group)["results"][group].get("error")
    return {
        "state": described["state"],
        "members": len(described["members"]),
        "known": f"{topic}-0" in offsets,
        "deleted": deleted,
        "empty": empty,
    }
