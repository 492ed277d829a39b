"""What is answered about topics: creating, metadata, deleting, partitions, settings."""

from __future__ import annotations

from time import monotonic
from typing import Any
from uuid import uuid4

from conformance.scenario import scenario
from penstock.wire.messages.alter_configs import AlterableConfig as WholeConfig
from penstock.wire.messages.alter_configs import AlterConfigsRequest
from penstock.wire.messages.alter_configs import AlterConfigsResource as WholeResource
from penstock.wire.messages.create_partitions import (
    CreatePartitionsAssignment,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
)
from penstock.wire.messages.create_topics import (
    CreatableReplicaAssignment,
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
)
from penstock.wire.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from penstock.wire.messages.describe_cluster import DescribeClusterRequest
from penstock.wire.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
)
from penstock.wire.messages.describe_topic_partitions import (
    DescribeTopicPartitionsRequest,
    RequestCursor,
)
from penstock.wire.messages.describe_topic_partitions import TopicRequest as DescribedTopic
from penstock.wire.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from penstock.wire.messages.metadata import MetadataRequest, MetadataRequestTopic
from tests.broker.protocol_client import (
    READY_TIMEOUT_S,
    ProtocolClient,
    error_name,
    listed,
)
from tests.broker.requests import (
    APPEND,
    DELETE,
    LATEST,
    SET,
    SUBTRACT,
    alter,
    batch,
    create,
    delete,
    fetch,
    metadata,
    new_name,
    one,
    produce,
)


def created(client: ProtocolClient, request: CreateTopicsRequest) -> tuple[str, int, int]:
    result = client.call(request).topics[0]
    return error_name(result.error_code), result.num_partitions, result.replication_factor


# ---- creating --------------------------------------------------------------------------------


@scenario()
def numbers_of_partitions_and_replicas(client: ProtocolClient) -> Any:
    """-1 is the broker's default; 0, other negatives and too many replicas are refused."""
    return [
        created(client, create(new_name(), partitions, replicas))
        for partitions, replicas in (
            (1, 1), (3, -1), (-1, 1), (-1, -1), (0, 1), (-2, 1), (1, 0), (1, 2), (1, -2), (1, 3),
        )
    ]  # fmt: skip


@scenario()
def names_of_topics(client: ProtocolClient) -> Any:
    """Up to 249 ASCII letters, digits, `.`, `-` and `_`; neither empty nor one or two dots."""
    unique = uuid4().hex
    names = [
        "", ".", "..", "...", "a" * 249, "a" * 250, f"ok.{unique}", "no/slash", "no space",
        "ümlaut", "no:colon", f"-{unique}", f"_{unique}", "a\0b", "a\n", "*",
    ]  # fmt: skip
    answers = [created(client, create(name))[0] for name in names]
    client.call(delete("...", "a" * 249))
    return answers


@scenario()
def names_that_collide(client: ProtocolClient) -> Any:
    """Names that differ only in a dot and an underscore collide; dashes and capitals do not."""
    base = uuid4().hex
    return [
        created(client, create(name))[0]
        for name in (f"a.{base}", f"a.{base}", f"a_{base}", f"a-{base}", f"A.{base}")
    ]


@scenario()
def only_validated(client: ProtocolClient) -> Any:
    """A creation that is only validated gives the same errors and creates nothing."""
    name = new_name()
    first = created(client, create(name, 4, validate_only=True))
    unknown = client.call(metadata(name)).topics[0].error_code
    bad = created(client, create(name, 4, 3, validate_only=True))
    topic = client.topic()
    there = created(client, create(topic, validate_only=True))
    return first, error_name(unknown), bad, there


@scenario()
def a_topic_twice_in_one_request(client: ProtocolClient) -> Any:
    """Refused once for both."""
    name = new_name()
    wanted = [CreatableTopic(name=name, num_partitions=1, replication_factor=1) for _ in range(2)]
    answer = client.call(CreateTopicsRequest(topics=wanted, timeout_ms=1000))
    return [error_name(result.error_code) for result in answer.topics]


@scenario()
def settings_at_creation(client: ProtocolClient) -> Any:
    """Which values of topic settings are taken, and which are refused."""
    cases: list[tuple[str, str | None]] = [
        ("retention.ms", "1000"), ("retention.ms", "x"), ("retention.ms", "-2"),
        ("no.such.setting", "1"), ("cleanup.policy", "delete,compact"),
        ("cleanup.policy", "shred"), ("max.message.bytes", "-1"), ("retention.ms", None),
        ("segment.bytes", "0"), ("message.timestamp.type", "Whenever"), ("segment.ms", "0"),
        ("compression.type", "producer"), ("min.insync.replicas", "0"),
        ("message.timestamp.type", "LogAppendTime"), ("unclean.leader.election.enable", "false"),
        ("flush.messages", "1"), ("index.interval.bytes", "100"),
        ("min.cleanable.dirty.ratio", "0.1"), ("min.cleanable.dirty.ratio", "1.1"),
        ("delete.retention.ms", "5"), ("preallocate", "true"), ("segment.jitter.ms", "5"),
        ("segment.index.bytes", "1048576"), ("file.delete.delay.ms", "1"),
        ("max.compaction.lag.ms", "9"), ("min.compaction.lag.ms", "9"), ("flush.ms", "1"),
        ("retention.bytes", "4096"), ("local.retention.ms", "-2"), ("remote.storage.enable", "no"),
        ("follower.replication.throttled.replicas", "*"),
        ("leader.replication.throttled.replicas", ""),
    ]  # fmt: skip
    answers = []
    for name, value in cases:
        topic = CreatableTopic(
            name=new_name(),
            num_partitions=1,
            replication_factor=1,
            configs=[CreatableTopicConfig(name=name, value=value)],
        )
        answers.append((name, created(client, CreateTopicsRequest(topics=[topic]))[0]))
    return answers


@scenario()
def assignments_at_creation(client: ProtocolClient) -> Any:
    """Replica assignments name all partitions from 0, known brokers, and exclude counts."""
    cases: list[tuple[int, int, dict[int, list[int]]]] = [
        (-1, -1, {0: [1], 1: [1]}), (2, -1, {0: [1], 1: [1]}), (-1, 1, {0: [1]}),
        (-1, -1, {0: [2]}), (-1, -1, {1: [1]}), (-1, -1, {0: [1, 1]}), (-1, -1, {0: []}),
        (-1, -1, {0: [1], 1: [1, 2]}),
    ]  # fmt: skip
    answers = []
    for partitions, replicas, assignment in cases:
        topic = CreatableTopic(
            name=new_name(),
            num_partitions=partitions,
            replication_factor=replicas,
            assignments=[
                CreatableReplicaAssignment(partition_index=number, broker_ids=brokers)
                for number, brokers in assignment.items()
            ],
        )
        answers.append(created(client, CreateTopicsRequest(topics=[topic])))
    return answers


@scenario()
def what_create_topics_returns(client: ProtocolClient) -> Any:
    """Id, settings and where they come from; leaders and replicas follow in the metadata."""
    name = new_name()
    result = client.call(create(name, 3, retention_ms="5000")).topics[0]
    client.wait_served(name, 3)
    described = client.call(metadata(name)).topics[0]
    source = {item.name: (item.value, item.config_source) for item in result.configs}
    return (
        result.topic_id == described.topic_id,
        source["retention.ms"],
        source["max.message.bytes"],
        sorted(part.partition_index for part in described.partitions),
        {(part.leader_id, tuple(part.replica_nodes), tuple(part.isr_nodes))
         for part in described.partitions},
    )  # fmt: skip


# ---- metadata --------------------------------------------------------------------------------


@scenario()
def metadata_of_what_is_not_there(client: ProtocolClient) -> Any:
    """Unknown names, malformed names and unknown ids are different errors."""
    return [
        error_name(client.call(metadata(name)).topics[0].error_code)
        for name in (new_name(), "", "no/slash", "a" * 250, ".", uuid4())
    ]


@scenario()
def metadata_by_name_and_id(client: ProtocolClient) -> Any:
    """A topic is found by its id, with or without a name."""
    topic = client.topic()
    both = MetadataRequest(
        topics=[MetadataRequestTopic(name=topic, topic_id=client.ids[topic])],
        allow_auto_topic_creation=False,
    )
    by_id = client.call(metadata(client.ids[topic])).topics[0]
    by_both = client.call(both).topics[0]
    # As Java's admin client asks: an id, and a name that is empty.
    nameless = []
    for id_ in (client.ids[topic], uuid4()):
        wanted = [MetadataRequestTopic(name="", topic_id=id_)]
        request = MetadataRequest(topics=wanted, allow_auto_topic_creation=True)
        described = client.call(request).topics[0]
        nameless.append(
            (error_name(described.error_code), described.name == topic, described.topic_id == id_)
        )
    return (
        nameless,
        error_name(by_both.error_code),
        (error_name(by_id.error_code), by_id.name == topic, by_id.topic_id == client.ids[topic]),
    )


@scenario()
def no_topics_and_all_topics(client: ProtocolClient) -> Any:
    """An empty list means all topics in version 0 and none since; null means all."""
    topic = client.topic()
    everything = MetadataRequest(topics=None)
    nothing = MetadataRequest(topics=[])
    results = []
    for request, version in (
        (everything, 1), (nothing, 0), (nothing, 1), (everything, 12), (nothing, 12),
    ):  # fmt: skip
        answer = client.call(request, version)
        results.append((topic in {item.name for item in answer.topics}, len(answer.brokers)))
    return results


@scenario()
def topics_created_by_metadata_requests(client: ProtocolClient) -> Any:
    """Metadata creates a topic where it is allowed to, unless the name is malformed."""
    base = uuid4().hex
    answers = []
    for name in (f"a.{base}", "no/slash", "", "a" * 250):
        not_yet = ("UNKNOWN_TOPIC_OR_PARTITION", "LEADER_NOT_AVAILABLE")
        while True:
            answer = client.call(metadata(name, create_missing=True)).topics[0]
            if error_name(answer.error_code) not in not_yet:
                break
        answers.append((error_name(answer.error_code), len(answer.partitions)))
    return answers


@scenario()
def requests_that_create_no_topics(client: ProtocolClient) -> Any:
    """Neither produce, fetch nor list offsets create a topic, nor Metadata by id."""
    name, id_ = new_name(), uuid4()
    return [
        client.produced(produce(name, batch()))[0],
        error_name(one(client.call(fetch(name), 12)).error_code),
        listed(client, name, LATEST),
        error_name(client.call(metadata(name)).topics[0].error_code),
        error_name(client.call(metadata(id_, create_missing=True)).topics[0].error_code),
        error_name(client.call(metadata(name)).topics[0].error_code),
    ]


@scenario()
def the_cluster(client: ProtocolClient) -> Any:
    """Its id, its one broker and its controller, the same by DescribeCluster and Metadata."""
    answer = client.call(DescribeClusterRequest(endpoint_type=1))
    controllers = client.call(DescribeClusterRequest(endpoint_type=2))
    by_metadata = client.call(metadata())
    return (
        error_name(answer.error_code),
        answer.cluster_id == by_metadata.cluster_id,
        [broker.broker_id for broker in answer.brokers],
        [f"{broker.host}:{broker.port}" for broker in answer.brokers] == [client.bootstrap],
        answer.controller_id,
        by_metadata.controller_id,
        controllers.error_code != 0,
    )


@scenario()
def pages_of_partitions(client: ProtocolClient) -> Any:
    """DescribeTopicPartitions goes on where the last page ended, across topics."""
    prefix = f"zz{uuid4().hex}"
    names = [f"{prefix}-{number}" for number in range(3)]
    for name, partitions in zip(names, (2, 3, 1), strict=True):
        client.create_topic(name, partitions)
    pages = []
    cursor = None
    while True:
        answer = client.call(
            DescribeTopicPartitionsRequest(
                topics=[DescribedTopic(name=name) for name in [*names, f"{prefix}-none"]],
                response_partition_limit=2,
                cursor=cursor,
            )
        )
        page = [
            (names.index(t.name) if t.name in names else -1, error_name(t.error_code),
             [p.partition_index for p in t.partitions])
            for t in answer.topics
        ]  # fmt: skip
        pages.append(page)
        if answer.next_cursor is None:
            return pages
        cursor = RequestCursor(
            topic_name=answer.next_cursor.topic_name,
            partition_index=answer.next_cursor.partition_index,
        )
        assert len(pages) < 10, pages


# ---- deleting and growing --------------------------------------------------------------------


def deleted(client: ProtocolClient, request: DeleteTopicsRequest) -> list[str]:
    return [error_name(result.error_code) for result in client.call(request).responses]


@scenario()
def deleting_topics(client: ProtocolClient) -> Any:
    """By name or by id, not by both or neither; a deleted topic is unknown."""
    by_name, by_id = client.topic(), client.topic()
    both = DeleteTopicState(name=by_name, topic_id=client.ids[by_name])
    neither = DeleteTopicState(name=None)
    return [
        deleted(client, DeleteTopicsRequest(topics=[both], timeout_ms=1000)),
        deleted(client, DeleteTopicsRequest(topics=[neither], timeout_ms=1000)),
        deleted(client, delete(by_name)),
        deleted(client, delete(by_name)),
        deleted(client, delete(client.ids[by_id])),
        deleted(client, delete(client.ids[by_id])),
        deleted(client, delete("")),
    ]


@scenario()
def a_topic_deleted_twice_in_one_request(client: ProtocolClient) -> Any:
    """Refused, and the topic is still there."""
    topic = client.topic()
    return deleted(client, delete(topic, topic)), deleted(client, delete(topic))


@scenario()
def more_partitions(client: ProtocolClient) -> Any:
    """The count only grows; assignments must fit the new partitions."""
    topic = client.topic(2)
    answers = []
    for name, count, assignments in (
        (topic, 3, None), (topic, 3, None), (topic, 1, None), (topic, 0, None), (topic, -1, None),
        (topic, 4, [[1]]), (topic, 6, [[1]]), (topic, 5, [[2]]), (topic, 5, [[1, 1]]),
        ("nowhere", 5, None), (topic, 5, [[]]),
    ):  # fmt: skip
        wanted = CreatePartitionsTopic(
            name=name,
            count=count,
            assignments=None
            if assignments is None
            else [CreatePartitionsAssignment(broker_ids=ids) for ids in assignments],
        )
        answer = client.call(CreatePartitionsRequest(topics=[wanted], timeout_ms=10_000))
        answers.append(error_name(answer.results[0].error_code))
    client.wait_served(topic, 4)
    return answers


@scenario()
def more_partitions_only_validated(client: ProtocolClient) -> Any:
    """The count stays as it is."""
    topic = client.topic()
    wanted = [CreatePartitionsTopic(name=topic, count=5, assignments=None)]
    answer = client.call(CreatePartitionsRequest(topics=wanted, timeout_ms=99, validate_only=True))
    described = client.call(metadata(topic)).topics[0]
    return error_name(answer.results[0].error_code), len(described.partitions)


# ---- settings --------------------------------------------------------------------------------


def altered(client: ProtocolClient, *args: Any, **kwargs: Any) -> str:
    return error_name(client.call(alter(*args, **kwargs)).responses[0].error_code)


Settings = list[tuple[str, str, int]]


def settings(client: ProtocolClient, topic: str, *names: str) -> Settings:
    resource = DescribeConfigsResource(
        resource_type=2, resource_name=topic, configuration_keys=list(names)
    )
    result = client.call(DescribeConfigsRequest(resources=[resource])).results[0]
    assert not result.error_code, result
    return sorted((item.name, item.value, item.config_source) for item in result.configs)


def settings_become(client: ProtocolClient, topic: str, **expected: str) -> Settings:
    """These settings once they are as expected: Kafka shows a change a moment after it."""
    wanted = {name.replace("_", "."): value for name, value in expected.items()}
    deadline = monotonic() + READY_TIMEOUT_S
    while True:
        described = settings(client, topic, *wanted)
        if {name: value for name, value, _ in described} == wanted or monotonic() > deadline:
            return described


@scenario()
def settings_set_and_unset(client: ProtocolClient) -> Any:
    """Settings are set, reset, appended to and subtracted from, and shown with their source."""
    topic = client.topic(retention_ms="1000", cleanup_policy="delete")
    now = {"retention_ms": "1000", "max_message_bytes": "1048588", "cleanup_policy": "delete"}
    states: list[Any] = [settings_become(client, topic, **now)]
    week = "604800000"
    changes: list[tuple[list[tuple[int, str, str | None]], dict[str, str]]] = [
        ([(SET, "max.message.bytes", "2000")], {"max_message_bytes": "2000"}),
        ([(DELETE, "retention.ms", None)], {"retention_ms": week}),
        ([(APPEND, "cleanup.policy", "compact")], {"cleanup_policy": "delete,compact"}),
        ([(SUBTRACT, "cleanup.policy", "delete")], {"cleanup_policy": "compact"}),
        (
            [(DELETE, "cleanup.policy", None), (SET, "retention.ms", "7")],
            {"cleanup_policy": "delete", "retention_ms": "7"},
        ),
    ]
    for steps, change in changes:
        now |= change
        states += [altered(client, topic, *steps), settings_become(client, topic, **now)]
    return states


@scenario()
def settings_that_are_refused(client: ProtocolClient) -> Any:
    """Wrong values, unknown settings, one setting twice: nothing is changed."""
    topic = client.topic()
    return [
        altered(client, topic, (SET, "retention.ms", "x")),
        altered(client, topic, (SET, "no.such.setting", "1")),
        altered(client, topic, (DELETE, "no.such.setting", None)),
        altered(client, topic, (SET, "retention.ms", None)),
        altered(client, topic, (APPEND, "retention.ms", "1")),
        altered(client, topic, (SET, "cleanup.policy", "shred")),
        altered(client, topic, (SET, "retention.ms", "1"), (SET, "retention.ms", "2")),
        altered(client, topic, (SET, "retention.ms", "1"), (SET, "segment.bytes", "no")),
        altered(client, "nowhere", (SET, "retention.ms", "1")),
        settings(client, topic, "retention.ms"),
    ]


@scenario()
def settings_only_validated(client: ProtocolClient) -> Any:
    """Errors are the same, and nothing is changed."""
    topic = client.topic()
    return [
        altered(client, topic, (SET, "retention.ms", "1"), validate_only=True),
        altered(client, topic, (SET, "retention.ms", "x"), validate_only=True),
        altered(client, "nowhere", (SET, "retention.ms", "1"), validate_only=True),
        settings(client, topic, "retention.ms"),
    ]


@scenario()
def the_same_resource_twice(client: ProtocolClient) -> Any:
    """Both changes are refused."""
    topic = client.topic()
    resources = [
        AlterConfigsResource(
            resource_type=2,
            resource_name=topic,
            configs=[AlterableConfig(name="retention.ms", config_operation=SET, value=str(n))],
        )
        for n in (1, 2)
    ]
    answer = client.call(IncrementalAlterConfigsRequest(resources=resources))
    return [error_name(r.error_code) for r in answer.responses], settings(
        client, topic, "retention.ms"
    )


@scenario()
def settings_replaced_as_a_whole(client: ProtocolClient) -> Any:
    """AlterConfigs resets what it does not name, and does nothing if it fails."""
    topic = client.topic(retention_ms="1000")
    answers = []
    for configs, size in (
        ({"max.message.bytes": "3000"}, "3000"),
        ({"x": "1"}, "3000"),
        ({"max.message.bytes": "y"}, "3000"),
        ({}, "1048588"),
    ):
        resource = WholeResource(
            resource_type=2,
            resource_name=topic,
            configs=[WholeConfig(name=name, value=value) for name, value in configs.items()],
        )
        answer = client.call(AlterConfigsRequest(resources=[resource]))
        described = settings_become(client, topic, retention_ms="604800000", max_message_bytes=size)
        answers.append((error_name(answer.responses[0].error_code), described))
    return answers


@scenario()
def settings_of_unknown_resources(client: ProtocolClient) -> Any:
    """Unknown and malformed topics, unknown brokers and types of resources are refused."""
    topic = client.topic()
    answers = []
    for kind, name in ((2, "nowhere"), (2, ""), (2, "no/slash"), (4, "99"), (4, "x"), (3, topic)):
        resource = DescribeConfigsResource(
            resource_type=kind, resource_name=name, configuration_keys=None
        )
        answer = client.call(DescribeConfigsRequest(resources=[resource]))
        answers.append((kind, name == topic or name, error_name(answer.results[0].error_code)))
    return answers


@scenario()
def which_settings_are_described(client: ProtocolClient) -> Any:
    """All of them for null or an empty list; otherwise those that are named and known."""
    topic = client.topic()
    counts = []
    for keys in (None, [], ["retention.ms"], ["no.such.setting"], ["retention.ms", "x"]):
        resource = DescribeConfigsResource(
            resource_type=2, resource_name=topic, configuration_keys=keys
        )
        answer = client.call(DescribeConfigsRequest(resources=[resource])).results[0]
        counts.append((error_name(answer.error_code), min(len(answer.configs), 2)))
    return counts


@scenario()
def synonyms_and_documentation(client: ProtocolClient) -> Any:
    """They are given when asked for."""
    topic = client.topic(retention_ms="5")
    resource = DescribeConfigsResource(
        resource_type=2, resource_name=topic, configuration_keys=["retention.ms"]
    )
    descriptions = []
    for flag in (True, False):
        request = DescribeConfigsRequest(
            resources=[resource], include_synonyms=flag, include_documentation=flag
        )
        item = client.call(request).results[0].configs[0]
        synonym = [(s.name, s.value, s.source) for s in item.synonyms][:1]
        descriptions.append((item.value, item.config_source, item.config_type, item.read_only,
                      item.is_sensitive, bool(item.documentation), synonym))  # fmt: skip
    return descriptions
