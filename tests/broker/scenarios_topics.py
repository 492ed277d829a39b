"""What brokers answer about topics, settings and offsets; run on ours and on Apache Kafka."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

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
from penstock.wire.messages.describe_producers import DescribeProducersRequest, TopicRequest
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
from tests.broker.requests import (
    APPEND,
    DELETE,
    EARLIEST,
    LATEST,
    MAX_TIMESTAMP,
    SET,
    SUBTRACT,
    alter,
    batch,
    create,
    delete,
    delete_records,
    end_of_epoch,
    fetch,
    list_offsets,
    metadata,
    new_name,
    one,
    produce,
)
from tests.broker.talk import Talk, error_name, scenario


def created(talk: Talk, request: CreateTopicsRequest) -> tuple[str, int, int]:
    result = talk.call(request).topics[0]
    return error_name(result.error_code), result.num_partitions, result.replication_factor


# ---- creating --------------------------------------------------------------------------------


@scenario
def numbers_of_partitions_and_replicas(talk: Talk) -> Any:
    return [
        created(talk, create(new_name(), partitions, replicas))
        for partitions, replicas in (
            (1, 1), (3, -1), (-1, 1), (-1, -1), (0, 1), (-2, 1), (1, 0), (1, 2), (1, -2), (1, 3),
        )
    ]  # fmt: skip


@scenario
def names_of_topics(talk: Talk) -> Any:
    unique = uuid4().hex
    names = [
        "", ".", "..", "...", "a" * 249, "a" * 250, f"ok.{unique}", "no/slash", "no space",
        "ümlaut", "no:colon", f"-{unique}", f"_{unique}", "a\0b", "a\n", "*",
    ]  # fmt: skip
    answers = [created(talk, create(name))[0] for name in names]
    talk.call(delete("...", "a" * 249))
    return answers


@scenario
def names_that_collide(talk: Talk) -> Any:
    base = uuid4().hex
    return [
        created(talk, create(name))[0]
        for name in (f"a.{base}", f"a.{base}", f"a_{base}", f"a-{base}", f"A.{base}")
    ]


@scenario
def only_validated(talk: Talk) -> Any:
    name = new_name()
    first = created(talk, create(name, 4, validate_only=True))
    told = talk.call(metadata(name)).topics[0].error_code
    bad = created(talk, create(name, 4, 3, validate_only=True))
    topic = talk.topic()
    there = created(talk, create(topic, validate_only=True))
    return first, error_name(told), bad, there


@scenario
def a_topic_twice_in_one_request(talk: Talk) -> Any:
    name = new_name()
    wanted = [CreatableTopic(name=name, num_partitions=1, replication_factor=1) for _ in range(2)]
    answer = talk.call(CreateTopicsRequest(topics=wanted, timeout_ms=1000))
    return [error_name(result.error_code) for result in answer.topics]


@scenario
def settings_at_creation(talk: Talk) -> Any:
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
        answers.append((name, created(talk, CreateTopicsRequest(topics=[topic]))[0]))
    return answers


@scenario
def assignments_at_creation(talk: Talk) -> Any:
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
        answers.append(created(talk, CreateTopicsRequest(topics=[topic])))
    return answers


@scenario
def what_creation_tells(talk: Talk) -> Any:
    name = new_name()
    result = talk.call(create(name, 3, retention_ms="5000")).topics[0]
    talk.wait_served(name, 3)
    told = talk.call(metadata(name)).topics[0]
    source = {item.name: (item.value, item.config_source) for item in result.configs}
    return (
        result.topic_id == told.topic_id,
        source["retention.ms"],
        source["max.message.bytes"],
        [part.partition_index for part in sorted(told.partitions, key=lambda p: p.partition_index)],
        {(part.leader_id, tuple(part.replica_nodes), tuple(part.isr_nodes))
         for part in told.partitions},
    )  # fmt: skip


# ---- metadata --------------------------------------------------------------------------------


@scenario
def metadata_of_what_is_not_there(talk: Talk) -> Any:
    return [
        error_name(talk.call(metadata(name)).topics[0].error_code)
        for name in (new_name(), "", "no/slash", "a" * 250, ".", uuid4())
    ]


@scenario
def metadata_by_name_and_id_at_once(talk: Talk) -> Any:
    topic = talk.topic()
    both = MetadataRequest(
        topics=[MetadataRequestTopic(name=topic, topic_id=talk.ids[topic])],
        allow_auto_topic_creation=False,
    )
    by_id = talk.call(metadata(talk.ids[topic])).topics[0]
    told = talk.call(both).topics[0]
    # As Java's admin client asks: an id, and a name that is empty.
    nameless = []
    for id_ in (talk.ids[topic], uuid4()):
        wanted = [MetadataRequestTopic(name="", topic_id=id_)]
        request = MetadataRequest(topics=wanted, allow_auto_topic_creation=True)
        found = talk.call(request).topics[0]
        nameless.append((error_name(found.error_code), found.name == topic, found.topic_id == id_))
    return (
        nameless,
        error_name(told.error_code),
        (error_name(by_id.error_code), by_id.name == topic, by_id.topic_id == talk.ids[topic]),
    )


@scenario
def no_topics_and_all_topics(talk: Talk) -> Any:
    topic = talk.topic()
    everything = MetadataRequest(topics=None)
    nothing = MetadataRequest(topics=[])
    return [
        [topic in {told.name for told in talk.call(request, version).topics}, len(brokers)]
        for request, version in (
            (everything, 1), (nothing, 0), (nothing, 1), (everything, 12), (nothing, 12),
        )
        for brokers in [talk.call(request, version).brokers]
    ]  # fmt: skip


@scenario
def topics_made_by_asking_for_them(talk: Talk) -> Any:
    base = uuid4().hex
    answers = []
    for name in (f"a.{base}", "no/slash", "", "a" * 250):
        not_yet = ("UNKNOWN_TOPIC_OR_PARTITION", "LEADER_NOT_AVAILABLE")
        while True:
            told = talk.call(metadata(name, create_missing=True)).topics[0]
            if error_name(told.error_code) not in not_yet:
                break
        answers.append((error_name(told.error_code), len(told.partitions)))
    return answers


@scenario
def who_does_not_make_topics(talk: Talk) -> Any:
    """Neither a producer nor a consumer makes a topic, and Metadata only where it is allowed."""
    name, id_ = new_name(), uuid4()
    return [
        talk.produced(produce(name, batch()))[0],
        error_name(one(talk.call(fetch(name), 12)).error_code),
        listed(talk, name, LATEST),
        error_name(talk.call(metadata(name)).topics[0].error_code),
        error_name(talk.call(metadata(id_, create_missing=True)).topics[0].error_code),
        error_name(talk.call(metadata(name)).topics[0].error_code),
    ]


@scenario
def the_cluster(talk: Talk) -> Any:
    answer = talk.call(DescribeClusterRequest(endpoint_type=1))
    controllers = talk.call(DescribeClusterRequest(endpoint_type=2))
    told = talk.call(metadata())
    return (
        error_name(answer.error_code),
        answer.cluster_id == told.cluster_id,
        [broker.broker_id for broker in answer.brokers],
        [f"{broker.host}:{broker.port}" for broker in answer.brokers] == [talk.bootstrap],
        answer.controller_id,
        told.controller_id,
        controllers.error_code != 0,
    )


@scenario
def pages_of_partitions(talk: Talk) -> Any:
    prefix = f"zz{uuid4().hex}"
    names = [talk.topic(partitions, name=f"{prefix}-{n}") for n, partitions in enumerate((2, 3, 1))]
    pages = []
    cursor = None
    while True:
        answer = talk.call(
            DescribeTopicPartitionsRequest(
                topics=[DescribedTopic(name=name) for name in [*names, f"{prefix}-none"]],
                response_partition_limit=2,
                cursor=cursor,
            )
        )
        told = [
            (names.index(t.name) if t.name in names else -1, error_name(t.error_code),
             [p.partition_index for p in t.partitions])
            for t in answer.topics
        ]  # fmt: skip
        pages.append(told)
        if answer.next_cursor is None:
            return pages
        cursor = RequestCursor(
            topic_name=answer.next_cursor.topic_name,
            partition_index=answer.next_cursor.partition_index,
        )
        assert len(pages) < 10, pages


# ---- deleting and growing --------------------------------------------------------------------


def deleted(talk: Talk, request: DeleteTopicsRequest) -> list[str]:
    return [error_name(result.error_code) for result in talk.call(request).responses]


@scenario
def deleting_topics(talk: Talk) -> Any:
    by_name, by_id = talk.topic(), talk.topic()
    both = DeleteTopicState(name=by_name, topic_id=talk.ids[by_name])
    neither = DeleteTopicState(name=None)
    return [
        deleted(talk, DeleteTopicsRequest(topics=[both], timeout_ms=1000)),
        deleted(talk, DeleteTopicsRequest(topics=[neither], timeout_ms=1000)),
        deleted(talk, delete(by_name)),
        deleted(talk, delete(by_name)),
        deleted(talk, delete(talk.ids[by_id])),
        deleted(talk, delete(talk.ids[by_id])),
        deleted(talk, delete("")),
    ]


@scenario
def deleting_a_topic_twice_at_once(talk: Talk) -> Any:
    topic = talk.topic()
    return deleted(talk, delete(topic, topic)), deleted(talk, delete(topic))


@scenario
def more_partitions(talk: Talk) -> Any:
    topic = talk.topic(2)
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
        answer = talk.call(CreatePartitionsRequest(topics=[wanted], timeout_ms=10_000))
        answers.append(error_name(answer.results[0].error_code))
    talk.wait_served(topic, 4)
    return answers


@scenario
def more_partitions_only_validated(talk: Talk) -> Any:
    topic = talk.topic()
    wanted = [CreatePartitionsTopic(name=topic, count=5, assignments=None)]
    answer = talk.call(CreatePartitionsRequest(topics=wanted, timeout_ms=99, validate_only=True))
    told = talk.call(metadata(topic)).topics[0]
    return error_name(answer.results[0].error_code), len(told.partitions)


# ---- settings --------------------------------------------------------------------------------


def altered(talk: Talk, *args: Any, **kwargs: Any) -> str:
    return error_name(talk.call(alter(*args, **kwargs)).responses[0].error_code)


def settings(talk: Talk, topic: str, *names: str) -> list[tuple[str, str, int]]:
    resource = DescribeConfigsResource(
        resource_type=2, resource_name=topic, configuration_keys=list(names)
    )
    result = talk.call(DescribeConfigsRequest(resources=[resource])).results[0]
    assert not result.error_code, result
    return sorted((item.name, item.value, item.config_source) for item in result.configs)


@scenario
def settings_set_and_unset(talk: Talk) -> Any:
    topic = talk.topic(retention_ms="1000", cleanup_policy="delete")
    names = ("retention.ms", "max.message.bytes", "cleanup.policy")
    states = [settings(talk, topic, *names)]
    for steps in (
        [(SET, "max.message.bytes", "2000")],
        [(DELETE, "retention.ms", None)],
        [(APPEND, "cleanup.policy", "compact")],
        [(SUBTRACT, "cleanup.policy", "delete")],
        [(DELETE, "cleanup.policy", None), (SET, "retention.ms", "7")],
    ):
        states.append((altered(talk, topic, *steps), settings(talk, topic, *names)))  # type: ignore[arg-type]
    return states


@scenario
def settings_that_are_refused(talk: Talk) -> Any:
    topic = talk.topic()
    return [
        altered(talk, topic, (SET, "retention.ms", "x")),
        altered(talk, topic, (SET, "no.such.setting", "1")),
        altered(talk, topic, (DELETE, "no.such.setting", None)),
        altered(talk, topic, (SET, "retention.ms", None)),
        altered(talk, topic, (APPEND, "retention.ms", "1")),
        altered(talk, topic, (SET, "cleanup.policy", "shred")),
        altered(talk, topic, (SET, "retention.ms", "1"), (SET, "retention.ms", "2")),
        altered(talk, topic, (SET, "retention.ms", "1"), (SET, "segment.bytes", "no")),
        altered(talk, "nowhere", (SET, "retention.ms", "1")),
        settings(talk, topic, "retention.ms"),
    ]


@scenario
def settings_only_validated(talk: Talk) -> Any:
    topic = talk.topic()
    return [
        altered(talk, topic, (SET, "retention.ms", "1"), validate_only=True),
        altered(talk, topic, (SET, "retention.ms", "x"), validate_only=True),
        altered(talk, "nowhere", (SET, "retention.ms", "1"), validate_only=True),
        settings(talk, topic, "retention.ms"),
    ]


@scenario
def the_same_resource_twice(talk: Talk) -> Any:
    topic = talk.topic()
    resources = [
        AlterConfigsResource(
            resource_type=2,
            resource_name=topic,
            configs=[AlterableConfig(name="retention.ms", config_operation=SET, value=str(n))],
        )
        for n in (1, 2)
    ]
    answer = talk.call(IncrementalAlterConfigsRequest(resources=resources))
    return [error_name(r.error_code) for r in answer.responses], settings(
        talk, topic, "retention.ms"
    )


@scenario
def settings_replaced_as_a_whole(talk: Talk) -> Any:
    topic = talk.topic(retention_ms="1000")
    names = ("retention.ms", "max.message.bytes")
    answers = []
    for configs in ({"max.message.bytes": "3000"}, {"x": "1"}, {"max.message.bytes": "y"}, {}):
        resource = WholeResource(
            resource_type=2,
            resource_name=topic,
            configs=[WholeConfig(name=name, value=value) for name, value in configs.items()],
        )
        answer = talk.call(AlterConfigsRequest(resources=[resource]))
        answers.append((error_name(answer.responses[0].error_code), settings(talk, topic, *names)))
    return answers


@scenario
def settings_of_odd_resources(talk: Talk) -> Any:
    topic = talk.topic()
    answers = []
    for kind, name in ((2, "nowhere"), (2, ""), (2, "no/slash"), (4, "99"), (4, "x"), (3, topic)):
        resource = DescribeConfigsResource(
            resource_type=kind, resource_name=name, configuration_keys=None
        )
        answer = talk.call(DescribeConfigsRequest(resources=[resource]))
        answers.append((kind, name == topic or name, error_name(answer.results[0].error_code)))
    return answers


@scenario
def which_settings_are_described(talk: Talk) -> Any:
    topic = talk.topic()
    counts = []
    for keys in (None, [], ["retention.ms"], ["no.such.setting"], ["retention.ms", "x"]):
        resource = DescribeConfigsResource(
            resource_type=2, resource_name=topic, configuration_keys=keys
        )
        answer = talk.call(DescribeConfigsRequest(resources=[resource])).results[0]
        counts.append((error_name(answer.error_code), min(len(answer.configs), 2)))
    return counts


@scenario
def synonyms_and_documentation(talk: Talk) -> Any:
    topic = talk.topic(retention_ms="5")
    resource = DescribeConfigsResource(
        resource_type=2, resource_name=topic, configuration_keys=["retention.ms"]
    )
    found = []
    for flag in (True, False):
        request = DescribeConfigsRequest(
            resources=[resource], include_synonyms=flag, include_documentation=flag
        )
        item = talk.call(request).results[0].configs[0]
        synonym = [(s.name, s.value, s.source) for s in item.synonyms][:1]
        found.append((item.value, item.config_source, item.config_type, item.read_only,
                      item.is_sensitive, bool(item.documentation), synonym))  # fmt: skip
    return found


# ---- offsets ---------------------------------------------------------------------------------


def listed(talk: Talk, topic: str, at: int, version: int | None = None, **kw: int) -> Any:
    part = one(talk.call(list_offsets(topic, at, **kw), version))
    return error_name(part.error_code), part.offset, part.timestamp


@scenario
def offsets_by_time(talk: Talk) -> Any:
    topic = talk.topic()
    talk.fill(topic, *(batch(b"a", b"b", at_ms=at) for at in (1000, 2000, 5000, 3000)))
    times = (LATEST, EARLIEST, MAX_TIMESTAMP, 0, 1000, 1001, 2000, 4000, 5000, 5001)
    return [listed(talk, topic, at) for at in times]


@scenario
def offsets_of_an_empty_partition(talk: Talk) -> Any:
    topic = talk.topic()
    return [listed(talk, topic, at) for at in (LATEST, EARLIEST, MAX_TIMESTAMP, 0, -4, -5)]


@scenario
def special_times_in_old_versions(talk: Talk) -> Any:
    topic = talk.topic()
    talk.fill(topic, batch(b"a", at_ms=1000))
    return [
        listed(talk, topic, at, version)
        for at, version in (
            (-1, 1), (-2, 1), (-3, 6), (-3, 7), (-4, 7), (-4, 8), (-5, 8), (-5, 9), (-6, 10),
            (-7, 10), (-100, 10),
        )
    ]  # fmt: skip


@scenario
def offsets_of_what_is_not_there(talk: Talk) -> Any:
    topic = talk.topic()
    return [
        listed(talk, "nowhere", LATEST),
        listed(talk, topic, LATEST, partition=9),
        listed(talk, topic, LATEST, partition=-1),
    ]


@scenario
def epochs_of_those_who_ask(talk: Talk) -> Any:
    topic = talk.topic()
    now = talk.leader_epoch(topic)
    return [
        [listed(talk, topic, LATEST, leader_epoch=epoch) for epoch in (-1, now, now + 1)],
        [
            (error_name(part.error_code), part.end_offset)
            for epoch in (-1, now, now + 1)
            for part in [one(talk.call(end_of_epoch(topic, now, current=epoch)))]
        ],
    ]


@scenario
def the_epoch_of_listed_offsets(talk: Talk) -> Any:
    topic = talk.topic()
    now = talk.leader_epoch(topic)
    empty = [one(talk.call(list_offsets(topic, at))).leader_epoch == now for at in (-1, -2)]
    talk.fill(topic, batch(b"a", at_ms=1000))
    full = [
        one(talk.call(list_offsets(topic, at))).leader_epoch == now
        for at in (LATEST, EARLIEST, MAX_TIMESTAMP, 500)
    ]
    return empty, full, one(talk.call(list_offsets(topic, 5000))).leader_epoch


@scenario
def ends_of_epochs(talk: Talk) -> Any:
    topic = talk.topic()
    now = talk.leader_epoch(topic)
    answers = []
    for item in (None, batch(b"a", b"b")):
        if item is not None:
            talk.fill(topic, item)
        for epoch in (now, now + 1, now + 100, -1):
            part = one(talk.call(end_of_epoch(topic, epoch)))
            told = part.leader_epoch - now if part.leader_epoch >= 0 else None
            answers.append((error_name(part.error_code), told, part.end_offset))
    answers.append(error_name(one(talk.call(end_of_epoch("nowhere", 0))).error_code))
    return answers


@scenario
def deleting_records(talk: Talk) -> Any:
    topic = talk.topic()
    talk.fill(topic, *(batch(b"a", b"b") for _ in range(5)))
    answers = []
    for before in (3, 1, 3, 11, -2, 10, -1):
        part = one(talk.call(delete_records(topic, before)))
        answers.append((error_name(part.error_code), part.low_watermark))
        answers.append(listed(talk, topic, EARLIEST))
    for name, number in (("nowhere", 0), (topic, 5)):
        part = one(talk.call(delete_records(name, 0, partition=number)))
        answers.append((error_name(part.error_code), part.low_watermark))
    return answers, talk.produced(produce(topic, batch(b"next")))


@scenario
def deleting_records_of_a_compacted_topic(talk: Talk) -> Any:
    answers = []
    for policy in ("compact", "compact,delete"):
        topic = talk.topic(cleanup_policy=policy)
        talk.fill(topic, batch(b"a", key=b"k"))
        part = one(talk.call(delete_records(topic, -1)))
        answers.append((error_name(part.error_code), part.low_watermark))
    return answers


@scenario
def offsets_after_deleting_records(talk: Talk) -> Any:
    topic = talk.topic()
    talk.fill(topic, *(batch(b"a", b"b", at_ms=at) for at in (1000, 2000, 3000)))
    talk.call(delete_records(topic, 3))
    return [listed(talk, topic, at) for at in (LATEST, EARLIEST, MAX_TIMESTAMP, 500, 1500, 2500)]


@scenario
def producers_of_a_partition(talk: Talk) -> Any:
    topic, pid = talk.topic(), talk.producer_id()
    talk.fill(topic, batch(b"a", b"b", b"c", at_ms=77, producer=(pid, 0, 0)))

    def describe(name: str, number: int) -> Any:
        request = DescribeProducersRequest(
            topics=[TopicRequest(name=name, partition_indexes=[number])]
        )
        part = one(talk.call(request))
        return error_name(part.error_code), [
            (p.producer_id == pid, p.producer_epoch, p.last_sequence, p.last_timestamp,
             p.current_txn_start_offset, p.coordinator_epoch)
            for p in part.active_producers
        ]  # fmt: skip

    return describe(topic, 0), describe(topic, 5), describe("nowhere", 0)


@scenario
def a_topic_made_anew_has_another_id(talk: Talk) -> Any:
    topic = talk.topic()
    old: UUID = talk.ids[topic]
    talk.fill(topic, batch(b"old"))
    talk.call(delete(topic))
    while created(talk, create(topic))[0] == "TOPIC_ALREADY_EXISTS":
        pass
    talk.wait_served(topic)
    new = talk.call(metadata(topic)).topics[0].topic_id
    return (
        old != new,
        error_name(talk.call(metadata(old)).topics[0].error_code),
        talk.produced(produce(old, batch()), 13)[0],
        talk.produced(produce(new, batch()), 13),
        listed(talk, topic, LATEST)[1],
    )
