"""What admins do: topics, their settings, groups; and what they are told when it cannot be done."""

from __future__ import annotations

from typing import Any

from confluent_kafka import ConsumerGroupState, ConsumerGroupType, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from conformance.clients import Member, drive, fill, outcome, read_to_end, until, values
from conformance.scenario import REQUEST_TIMEOUT_S, Cluster, scenario
from conformance.scenarios.groups_consumer import description
from conformance.scenarios.offsets import commit


@scenario(
    expected={"partitions": [0, 1, 2], "replicas": 1, "again": "TOPIC_ALREADY_EXISTS", "gone": True}
)
def topics_are_made_and_deleted(cluster: Cluster) -> Any:
    """A topic is there when it has been made, once, and gone when it has been deleted."""
    topic = cluster.name()
    cluster.admin.create_topics([NewTopic(topic, 3)])[topic].result(REQUEST_TIMEOUT_S)
    cluster.protocol.wait_served(topic, 3)
    future = cluster.admin.describe_topics(TopicCollection([topic]))[topic]
    described = future.result(REQUEST_TIMEOUT_S)
    again = outcome(cluster.admin.create_topics([NewTopic(topic, 1)])[topic])
    cluster.admin.delete_topics([topic])[topic].result(REQUEST_TIMEOUT_S)
    until(lambda: topic not in cluster.admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics)
    return {
        "partitions": sorted(part.id for part in described.partitions),
        "replicas": len(described.partitions[0].replicas),
        "again": again,
        "gone": outcome(cluster.admin.delete_topics([topic])[topic]) == "UNKNOWN_TOPIC_OR_PART",
    }


@scenario(
    expected={
        "name": "TOPIC_EXCEPTION",
        "partitions": "INVALID_PARTITIONS",
        "replicas": "INVALID_REPLICATION_FACTOR",
        "setting": "INVALID_CONFIG",
        "value": "INVALID_CONFIG",
        "only checked": (None, False),
    }
)
def topics_that_cannot_be(cluster: Cluster) -> Any:
    """A wrong name, number of partitions or replicas, setting or value is refused."""

    def create_error(name: str, **more: Any) -> str | None:
        topic = NewTopic(name, **{"num_partitions": 1, **more})
        return outcome(cluster.admin.create_topics([topic])[name])

    checked = NewTopic(cluster.name(), 1)
    dry = outcome(cluster.admin.create_topics([checked], validate_only=True)[checked.topic])
    return {
        "name": create_error("no/such name"),
        "partitions": create_error(cluster.name(), num_partitions=0),
        "replicas": create_error(cluster.name(), replication_factor=7),
        "setting": create_error(cluster.name(), config={"no.such.setting": "1"}),
        "value": create_error(cluster.name(), config={"retention.ms": "often"}),
        "only checked": (dry, checked.topic in cluster.admin.list_topics(timeout=60).topics),
    }


@scenario(expected={"grown": 3, "shrunk": "INVALID_PARTITIONS", "unknown": "UNKNOWN_TOPIC_OR_PART"})
def partitions_are_added(cluster: Cluster) -> Any:
    """A topic can grow and not shrink."""
    topic = cluster.topic()

    def grow(name: str, count: int) -> str | None:
        return outcome(cluster.admin.create_partitions([NewPartitions(name, count)])[name])

    assert grow(topic, 3) is None
    until(lambda: len(partitions(cluster, topic)) == 3)
    return {
        "grown": len(partitions(cluster, topic)),
        "shrunk": grow(topic, 2),
        "unknown": grow(cluster.name(), 2),
    }


def partitions(cluster: Cluster, topic: str) -> list[int]:
    metadata = cluster.admin.list_topics(topic, timeout=REQUEST_TIMEOUT_S).topics[topic]
    return sorted(metadata.partitions)


@scenario(
    expected={
        "made with": ("60000", "DYNAMIC_TOPIC_CONFIG"),
        "default": ("delete", "DEFAULT_CONFIG"),
        "changed": "120000",
        "appended": "delete,compact",
        "back": "604800000",
        "unknown": "INVALID_CONFIG",
        "no topic": "UNKNOWN_TOPIC_OR_PART",
    }
)
def settings_are_changed(cluster: Cluster) -> Any:
    """Settings are set, appended to and put back, one by one, and say where they come from."""
    topic = cluster.topic(config={"retention.ms": "60000"})
    observed: dict[str, Any] = {
        "made with": setting(cluster, topic, "retention.ms"),
        "default": setting(cluster, topic, "cleanup.policy"),
    }
    alter(cluster, topic, "retention.ms", "120000")
    observed["changed"] = wait_for(cluster, topic, "retention.ms", "120000")
    alter(cluster, topic, "cleanup.policy", "compact", AlterConfigOpType.APPEND)
    observed["appended"] = wait_for(cluster, topic, "cleanup.policy", "delete,compact")
    alter(cluster, topic, "retention.ms", None, AlterConfigOpType.DELETE)
    observed["back"] = wait_for(cluster, topic, "retention.ms", "604800000")
    observed["unknown"] = alter(cluster, topic, "no.such.setting", "1")
    observed["no topic"] = alter(cluster, cluster.name(), "retention.ms", "1000")
    return observed


def setting(cluster: Cluster, topic: str, name: str) -> tuple[str | None, str]:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    futures = cluster.admin.describe_configs([resource])
    entry = futures[resource].result(REQUEST_TIMEOUT_S)[name]
    return entry.value, ConfigSource(entry.source).name


def wait_for(cluster: Cluster, topic: str, name: str, value: str) -> str:
    """The value, once it is in force: Apache Kafka answers before its broker has heard of it."""
    until(lambda: setting(cluster, topic, name)[0] == value)
    return value


def alter(
    cluster: Cluster, topic: str, name: str, value: str | None,
    how: AlterConfigOpType = AlterConfigOpType.SET,
) -> str | None:  # fmt: skip
    entry = ConfigEntry(name, value, incremental_operation=how)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    return outcome(next(iter(cluster.admin.incremental_alter_configs([resource]).values())))


@scenario(
    expected={
        "busy": ("STABLE", "CLASSIC", "range", [[0, 1]]),
        "delete busy": "NON_EMPTY_GROUP",
        "empty": "EMPTY",
        "deleted": None,
        "again": "GROUP_ID_NOT_FOUND",
    }
)
def groups_are_described_and_deleted(cluster: Cluster) -> Any:
    """A group tells its state and its members; it can be deleted once it is empty."""
    topic, group = cluster.topic(2), cluster.name("group")
    member = Member(cluster, group, [topic])
    drive([member], lambda: len(member.partitions) == 2)
    drive([member], lambda: description(cluster, group).state == ConsumerGroupState.STABLE)
    busy = description(cluster, group)
    members = [
        sorted(part.partition for part in m.assignment.topic_partitions) for m in busy.members
    ]
    observed: dict[str, Any] = {
        "busy": (busy.state.name, busy.type.name, busy.partition_assignor, members),
        "delete busy": delete_group(cluster, group),
    }
    member.consumer.commit(offsets=[TopicPartition(topic, 0, 0)], asynchronous=False)
    member.consumer.close()
    observed["empty"] = description(cluster, group).state.name
    observed["deleted"] = delete_group(cluster, group)
    observed["again"] = delete_group(cluster, group)
    return observed


def delete_group(cluster: Cluster, group: str) -> str | None:
    return outcome(cluster.admin.delete_consumer_groups([group])[group])


@scenario(expected={"all": [("CLASSIC", "EMPTY"), ("CLASSIC", "STABLE")], "stable": 1, "new": 0})
def groups_are_listed(cluster: Cluster) -> Any:
    """Groups are listed with state and type, and may be asked for by either."""
    topic = cluster.topic()
    groups = [cluster.name("group") for _ in range(2)]
    commit(cluster, groups[0], TopicPartition(topic, 0, 0))
    member = Member(cluster, groups[1], [topic])
    drive([member], lambda: len(member.partitions) == 1)
    drive([member], lambda: description(cluster, groups[1]).state == ConsumerGroupState.STABLE)

    def listed(**wanted: Any) -> list[tuple[str, str]]:
        listing = cluster.admin.list_consumer_groups(**wanted).result(REQUEST_TIMEOUT_S)
        assert not listing.errors, listing.errors
        return sorted((g.type.name, g.state.name) for g in listing.valid if g.group_id in groups)

    return {
        "all": listed(),
        "stable": len(listed(states={ConsumerGroupState.STABLE})),
        "new": len(listed(types={ConsumerGroupType.CONSUMER})),
    }


@scenario(expected={"state": "DEAD"})
def a_group_that_is_not_there(cluster: Cluster) -> Any:
    """Describing an unknown group says that it is dead."""
    return {"state": described_or_error(cluster, cluster.name("group"))}


def described_or_error(cluster: Cluster, group: str) -> str:
    future = cluster.admin.describe_consumer_groups([group])[group]
    failed = outcome(future)
    return str(future.result().state.name) if failed is None else failed


@scenario(expected={"nodes": 1, "id": True, "old records": ["2"]})
def the_cluster_itself(cluster: Cluster) -> Any:
    """The cluster has an id and its nodes; records are deleted up to an offset."""
    described = cluster.admin.describe_cluster().result(REQUEST_TIMEOUT_S)
    topic = cluster.topic()
    fill(cluster, topic, 3)
    part = TopicPartition(topic, 0, 2)
    cluster.admin.delete_records([part])[part].result(REQUEST_TIMEOUT_S)
    return {
        "nodes": len(described.nodes),
        "id": bool(described.cluster_id),
        "old records": values(read_to_end(cluster, topic, start=2)),
    }
