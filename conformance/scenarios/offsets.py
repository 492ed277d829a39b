"""Committed offsets: kept, moved, deleted, and what a reader does when its offset is gone."""

from __future__ import annotations

from typing import Any

from confluent_kafka import (
    OFFSET_INVALID,
    ConsumerGroupTopicPartitions,
    TopicPartition,
)

from conformance.clients import Member, drive, error_of, fill, outcome, until, values
from conformance.scenario import REQUEST_TIMEOUT_S, Cluster, scenario


def committed(cluster: Cluster, group: str, topic: str, partition: int = 0) -> int:
    """The committed offset of a group; -1 if it has none."""
    consumer = cluster.consumer(group)
    (position,) = consumer.committed([TopicPartition(topic, partition)], timeout=REQUEST_TIMEOUT_S)
    return -1 if position.offset == OFFSET_INVALID else position.offset


def commit(cluster: Cluster, group: str, *places: TopicPartition) -> str | None:
    """Commit offsets without being a member."""
    consumer = cluster.consumer(group)
    return error_of(lambda: consumer.commit(offsets=list(places), asynchronous=False))


@scenario(expected={"before": -1, "after": (3, "a note"), "none": -1, "again": 1})
def commit_and_fetch(cluster: Cluster) -> Any:
    """A committed offset comes back with its metadata, and may go back again."""
    topic, group = cluster.topic(2), cluster.name("group")
    before = committed(cluster, group, topic)
    commit(cluster, group, TopicPartition(topic, 0, 3, metadata="a note"))
    consumer = cluster.consumer(group)
    first, second = consumer.committed(
        [TopicPartition(topic, 0), TopicPartition(topic, 1)], timeout=REQUEST_TIMEOUT_S
    )
    commit(cluster, group, TopicPartition(topic, 0, 1))
    return {
        "before": before,
        "after": (first.offset, first.metadata),
        "none": -1 if second.offset == OFFSET_INVALID else second.offset,
        "again": committed(cluster, group, topic),
    }


@scenario(
    expected={"unknown topic": "UNKNOWN_TOPIC_OR_PART", "metadata": "OFFSET_METADATA_TOO_LARGE"}
)
def commits_that_are_refused(cluster: Cluster) -> Any:
    """Offsets of unknown topics, and notes that are too long, are refused."""
    topic, group = cluster.topic(), cluster.name("group")
    return {
        "unknown topic": commit(cluster, group, TopicPartition(cluster.name(), 0, 3)),
        "metadata": commit(cluster, group, TopicPartition(topic, 0, 3, metadata="x" * 5000)),
    }


@scenario(
    expected={"earliest": ["0", "1", "2", "3"], "latest": ["3"], "none": "_AUTO_OFFSET_RESET"}
)
def without_a_committed_offset(cluster: Cluster) -> Any:
    """A group without an offset starts where its reset policy says, or refuses to."""
    topic = cluster.topic()
    fill(cluster, topic, 3)
    observed: dict[str, Any] = {}
    latest = Member(cluster, cluster.name("group"), [topic], auto_offset_reset="latest")
    drive([latest], lambda: latest.partitions == [0] and position(latest, topic) == 3)
    fill(cluster, topic, 1, first=3)
    earliest = Member(cluster, cluster.name("group"), [topic], auto_offset_reset="earliest")
    none = Member(cluster, cluster.name("group"), [topic], auto_offset_reset="error")
    drive([latest, earliest, none], lambda: len(earliest.records) == 4 and latest.records)
    drive([none], lambda: none.errors)
    observed["earliest"], observed["latest"] = earliest.values, latest.values
    observed["none"] = none.errors[0]
    return observed


def position(member: Member, topic: str) -> int:
    """Where a member goes on reading, once it knows: at the end it has seen the end."""
    low, high = member.consumer.get_watermark_offsets(TopicPartition(topic, 0), cached=True)
    return high if low >= 0 else -1


@scenario(expected={"earliest": ["4", "5"], "error": "_AUTO_OFFSET_RESET"})
def an_offset_below_the_log(cluster: Cluster) -> Any:
    """A committed offset whose records are gone leads to the reset policy, never to silence."""
    topic = cluster.topic()
    fill(cluster, topic, 6)
    groups = [cluster.name("group") for _ in range(2)]
    for group in groups:
        commit(cluster, group, TopicPartition(topic, 0, 1))
    part = TopicPartition(topic, 0, 4)
    cluster.admin.delete_records([part])[part].result(REQUEST_TIMEOUT_S)
    reset = Member(cluster, groups[0], [topic])
    strict = Member(cluster, groups[1], [topic], auto_offset_reset="error")
    drive([reset, strict], lambda: len(reset.records) == 2 and strict.errors)
    return {"earliest": reset.values, "error": strict.errors[0]}


@scenario(expected={"latest": ["9"]})
def an_offset_above_the_log(cluster: Cluster) -> Any:
    """An offset beyond the end is out of range too."""
    topic = cluster.topic()
    fill(cluster, topic, 9)
    group = cluster.name("group")
    commit(cluster, group, TopicPartition(topic, 0, 1000))
    member = Member(cluster, group, [topic], auto_offset_reset="latest")
    count = 9

    def more() -> bool:
        nonlocal count
        if member.partitions and not member.records:
            fill(cluster, topic, 1, first=count)
            count += 1
        return bool(member.records)

    drive([member], more)
    return {"latest": ["9"] if int(member.values[0] or 0) >= 9 else member.values}


@scenario(expected={"listed": {0: 2, 1: 3}, "altered": 1, "busy": "UNKNOWN_MEMBER_ID"})
def offsets_by_an_admin(cluster: Cluster) -> Any:
    """An admin lists and alters the offsets of an empty group; a busy one is left alone."""
    topic, group = cluster.topic(2), cluster.name("group")
    commit(cluster, group, TopicPartition(topic, 0, 2), TopicPartition(topic, 1, 3))
    listed = listing(cluster, group)
    alter(cluster, group, TopicPartition(topic, 0, 1))
    member = Member(cluster, group, [topic])
    drive([member], lambda: len(member.partitions) == 2)
    return {
        "listed": listed,
        "altered": committed(cluster, group, topic),
        "busy": alter(cluster, group, TopicPartition(topic, 0, 0)),
    }


def listing(cluster: Cluster, group: str) -> dict[int, int]:
    """All offsets of a group with one topic, by partition."""
    wanted = [ConsumerGroupTopicPartitions(group)]
    offsets = cluster.admin.list_consumer_group_offsets(wanted)[group].result(REQUEST_TIMEOUT_S)
    return {part.partition: part.offset for part in offsets.topic_partitions}


def alter(cluster: Cluster, group: str, *places: TopicPartition) -> str | None:
    """Set offsets from outside; the name of the first error."""
    wanted = [ConsumerGroupTopicPartitions(group, list(places))]
    future = cluster.admin.alter_consumer_group_offsets(wanted)[group]
    failed = outcome(future)
    if failed is not None:
        return failed
    errors = [part.error for part in future.result().topic_partitions if part.error]
    return errors[0].name() if errors else None


@scenario(
    expected={
        "deleted": {"0": None},
        "left": {1: 3},
        "subscribed": "GroupSubscribedToTopicException",
    }
)
def deleted_offsets(cluster: Cluster) -> Any:
    """Offsets of a partition can be deleted, unless a member is subscribed to its topic."""
    topic, group = cluster.topic(2), cluster.name("group")
    commit(cluster, group, TopicPartition(topic, 0, 2), TopicPartition(topic, 1, 3))
    deleted = delete_offsets(cluster, group, topic, 0)
    left = listing(cluster, group)
    member = Member(cluster, group, [topic])
    drive([member], lambda: len(member.partitions) == 2)
    return {
        "deleted": {"0": deleted},
        "left": left,
        "subscribed": delete_offsets(cluster, group, topic, 1),
    }


def delete_offsets(cluster: Cluster, group: str, topic: str, partition: int) -> str | None:
    answer = cluster.java.call(
        "delete_group_offsets",
        group=group,
        partitions=[{"topic": topic, "partition": partition}],
    )
    result: dict[str, Any] = answer["results"][f"{topic}-{partition}"]
    error = result.get("error")
    return None if error is None else str(error)


@scenario(expected={"gone": -1, "new topic": ["new"]})
def offsets_of_a_deleted_topic(cluster: Cluster) -> Any:
    """A topic that is made anew under an old name does not inherit its committed offsets."""
    topic, group = cluster.topic(), cluster.name("group")
    fill(cluster, topic, 3)
    commit(cluster, group, TopicPartition(topic, 0, 3))
    cluster.admin.delete_topics([topic])[topic].result(REQUEST_TIMEOUT_S)
    cluster.protocol.recreate_topic(topic)
    until(lambda: committed(cluster, group, topic) == -1)
    producer = cluster.producer()
    producer.produce(topic, "new", partition=0)
    assert producer.flush(REQUEST_TIMEOUT_S) == 0
    member = Member(cluster, group, [topic])
    drive([member], lambda: member.records)
    return {"gone": committed(cluster, group, topic), "new topic": values(member.records)}


@scenario(expected={"stale": True, "kept": 1})
def a_commit_after_leaving(cluster: Cluster) -> Any:
    """Whoever is not a member of a busy group cannot commit for it."""
    topic, group = cluster.topic(), cluster.name("group")
    fill(cluster, topic, 3)
    member = Member(cluster, group, [topic])
    drive([member], lambda: len(member.records) == 3)
    member.consumer.commit(message=member.records[0], asynchronous=False)
    refused = commit(cluster, group, TopicPartition(topic, 0, 3))
    return {
        "stale": refused in ("UNKNOWN_MEMBER_ID", "ILLEGAL_GENERATION"),
        "kept": committed(cluster, group, topic),
    }
