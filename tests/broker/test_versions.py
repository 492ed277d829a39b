"""Every API in every version that is offered, and what happens beyond."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from penstock.broker.apis.table import ENDPOINTS
from penstock.broker.config import NODE_ID
from penstock.testing.broker import Broker
from penstock.wire import (
    Message,
    api,
    encoder,
    is_flexible,
    request_header,
)
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.alter_configs import AlterableConfig as WholeConfig
from penstock.wire.messages.alter_configs import AlterConfigsRequest
from penstock.wire.messages.alter_configs import AlterConfigsResource as WholeResource
from penstock.wire.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    ReassignablePartition,
    ReassignableTopic,
)
from penstock.wire.messages.alter_replica_log_dirs import (
    AlterReplicaLogDir,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirTopic,
)
from penstock.wire.messages.api_versions import ApiVersionsRequest
from penstock.wire.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsTopic,
)
from penstock.wire.messages.describe_cluster import DescribeClusterRequest
from penstock.wire.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
)
from penstock.wire.messages.describe_log_dirs import (
    DescribableLogDirTopic,
    DescribeLogDirsRequest,
)
from penstock.wire.messages.describe_producers import DescribeProducersRequest, TopicRequest
from penstock.wire.messages.describe_quorum import (
    DescribeQuorumRequest,
    RequestPartitionData,
    RequestTopicData,
)
from penstock.wire.messages.describe_topic_partitions import DescribeTopicPartitionsRequest
from penstock.wire.messages.elect_leaders import ElectLeadersRequest
from penstock.wire.messages.find_coordinator import FindCoordinatorRequest
from penstock.wire.messages.get_telemetry_subscriptions import GetTelemetrySubscriptionsRequest
from penstock.wire.messages.list_partition_reassignments import ListPartitionReassignmentsRequest
from penstock.wire.messages.push_telemetry import PushTelemetryRequest
from penstock.wire.zero import ZERO_UUID
from tests.broker.groups.versions import ASKED_OF_GROUPS
from tests.broker.groups.versions_assigned import ASKED_OF_ASSIGNED
from tests.broker.raw import RawClient, decode_answer
from tests.broker.requests import (
    LATEST,
    SET,
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
    new_producer,
    one,
    produce,
    values_of,
)
from tests.broker.shares.versions import ASKED_OF_QUEUES
from tests.broker.transactions.versions import ASKED_OF_TRANSACTIONS

API_VERSIONS = 18
# Client metrics are answered, but not offered: nothing here receives them.
HIDDEN = {71, 72}
ALL = [
    (key, version)
    for key, endpoint in ENDPOINTS.items()
    for version in range(endpoint.min_version, endpoint.max_version + 1)
]


class Subject:
    """A topic with one record in it, by name or id as the version wants it."""

    def __init__(self, client: RawClient, topic: str) -> None:
        self.client = client
        self.topic = topic
        self.id: UUID = client.call(metadata(topic)).topics[0].topic_id
        client.call(produce(topic, batch(b"first")), 12)


Ask = Callable[[Subject, int], Message]
Check = Callable[[Subject, Any], bool]


def _describe_configs(subject: Subject, version: int) -> Message:
    resource = DescribeConfigsResource(
        resource_type=2, resource_name=subject.topic, configuration_keys=["retention.ms"]
    )
    return DescribeConfigsRequest(resources=[resource], include_synonyms=True)


def _alter_configs(subject: Subject, version: int) -> Message:
    configs = [WholeConfig(name="retention.ms", value="5")]
    resource = WholeResource(resource_type=2, resource_name=subject.topic, configs=configs)
    return AlterConfigsRequest(resources=[resource])


def _log_dirs(subject: Subject, version: int) -> Message:
    wanted = [DescribableLogDirTopic(topic=subject.topic, partitions=[0])]
    return DescribeLogDirsRequest(topics=wanted)


def _move(subject: Subject, version: int) -> Message:
    """To the log directory where it is."""
    own = subject.client.call(DescribeLogDirsRequest(topics=None)).results[0].log_dir
    topics = [AlterReplicaLogDirTopic(name=subject.topic, partitions=[0])]
    return AlterReplicaLogDirsRequest(dirs=[AlterReplicaLogDir(path=own, topics=topics)])


def _reassign(subject: Subject, version: int) -> Message:
    partitions = [ReassignablePartition(partition_index=0, replicas=[NODE_ID])]
    topics = [ReassignableTopic(name=subject.topic, partitions=partitions)]
    return AlterPartitionReassignmentsRequest(topics=topics)


def _describe_quorum(subject: Subject, version: int) -> Message:
    partitions = [RequestPartitionData(partition_index=0)]
    topics = [RequestTopicData(topic_name="__cluster_metadata", partitions=partitions)]
    return DescribeQuorumRequest(topics=topics)


def _push(subject: Subject, version: int) -> Message:
    told = subject.client.call(GetTelemetrySubscriptionsRequest())
    return PushTelemetryRequest(
        client_instance_id=told.client_instance_id, subscription_id=told.subscription_id
    )


def _has_broker(found: list[Any]) -> bool:
    return len(found) == 1 and (found[0].host, found[0].port > 0) == ("127.0.0.1", True)


def _coordinator(subject: Subject, answer: Any) -> bool:
    if answer.coordinators:
        return [(c.key, c.node_id) for c in answer.coordinators] == [("g", NODE_ID)]
    return bool(answer.node_id == NODE_ID and answer.host == "127.0.0.1")


def _metadata(subject: Subject, answer: Any) -> bool:
    (told,) = answer.topics
    return told.name == subject.topic and len(told.partitions) == 1 and _has_broker(answer.brokers)


# What to ask of each API, and what must be in the answer beside the absence of an error.
ASKED: dict[int, tuple[Ask, Check]] = {
    0: (
        lambda s, v: produce(s.topic if v < 13 else s.id, batch(b"more")),
        lambda s, a: one(a).base_offset == 1,
    ),
    1: (
        lambda s, v: fetch(s.topic if v < 13 else s.id),
        lambda s, a: values_of(one(a).records) == [b"first"],
    ),
    2: (lambda s, v: list_offsets(s.topic, LATEST), lambda s, a: one(a).offset == 1),
    3: (lambda s, v: metadata(s.topic), _metadata),
    10: (lambda s, v: FindCoordinatorRequest(key="g", coordinator_keys=["g"]), _coordinator),
    18: (
        lambda s, v: ApiVersionsRequest(client_software_name="test", client_software_version="1.0"),
        lambda s, a: {k.api_key for k in a.api_keys} == set(ENDPOINTS) - HIDDEN,
    ),
    19: (lambda s, v: create(new_name(), 2), lambda s, a: len(a.topics) == 1),
    20: (lambda s, v: delete(s.topic), lambda s, a: a.responses[0].name == s.topic),
    21: (lambda s, v: delete_records(s.topic, 1), lambda s, a: one(a).low_watermark == 1),
    22: (lambda s, v: new_producer(), lambda s, a: a.producer_id >= 0 and not a.producer_epoch),
    23: (
        lambda s, v: end_of_epoch(s.topic, _epoch(s)),
        lambda s, a: (one(a).leader_epoch, one(a).end_offset) == (_epoch(s), 1),
    ),
    32: (_describe_configs, lambda s, a: a.results[0].configs[0].value == "604800000"),
    33: (_alter_configs, lambda s, a: a.responses[0].resource_name == s.topic),
    34: (_move, lambda s, a: a.results[0].topic_name == s.topic),
    35: (_log_dirs, lambda s, a: one(a.results[0]).partition_size > 0),
    37: (
        lambda s, v: CreatePartitionsRequest(
            topics=[CreatePartitionsTopic(name=s.topic, count=3, assignments=None)]
        ),
        lambda s, a: a.results[0].name == s.topic,
    ),
    43: (
        lambda s, v: ElectLeadersRequest(topic_partitions=None),
        lambda s, a: s.topic in {result.topic for result in a.replica_election_results},
    ),
    44: (
        lambda s, v: alter(s.topic, (SET, "retention.ms", "7")),
        lambda s, a: a.responses[0].resource_name == s.topic,
    ),
    45: (_reassign, lambda s, a: a.responses[0].name == s.topic),
    46: (lambda s, v: ListPartitionReassignmentsRequest(topics=None), lambda s, a: a.topics == []),
    55: (_describe_quorum, lambda s, a: one(a).leader_id == NODE_ID),
    60: (lambda s, v: DescribeClusterRequest(), lambda s, a: _has_broker(a.brokers)),
    61: (
        lambda s, v: DescribeProducersRequest(
            topics=[TopicRequest(name=s.topic, partition_indexes=[0])]
        ),
        lambda s, a: one(a).active_producers == [],
    ),
    71: (
        lambda s, v: GetTelemetrySubscriptionsRequest(),
        lambda s, a: a.client_instance_id != ZERO_UUID and a.requested_metrics == [],
    ),
    72: (_push, lambda s, a: a.throttle_time_ms == 0),
    75: (
        lambda s, v: DescribeTopicPartitionsRequest(),
        lambda s, a: s.topic in {t.name for t in a.topics},
    ),
    **ASKED_OF_ASSIGNED,
    **ASKED_OF_GROUPS,
    **ASKED_OF_QUEUES,
    **ASKED_OF_TRANSACTIONS,
}


def _epoch(subject: Subject) -> int:
    told = subject.client.call(metadata(subject.topic)).topics[0]
    return int(told.partitions[0].leader_epoch)


def errors_in(value: Any) -> list[int]:
    """Every error code in a message, however deep."""
    if isinstance(value, list):
        return [code for item in value for code in errors_in(item)]
    found: list[int] = []
    for field in getattr(value, "SPEC", ()):
        inner = getattr(value, field.name)
        found += [inner] if field.name == "error_code" and inner else errors_in(inner)
    return found


def test_every_api_is_asked_here() -> None:
    assert set(ASKED) == set(ENDPOINTS)


@pytest.mark.parametrize(("key", "version"), ALL, ids=str)
def test_every_version_is_answered(key: int, version: int, client: RawClient, topic: str) -> None:
    subject = Subject(client, topic)
    ask, check = ASKED[key]
    request = ask(subject, version)
    client.send(request, version)
    (_, _, correlation_id) = client.asked.popleft()
    frame = client.receive_frame()
    # Flexible answers have a byte for tags after the correlation id, but for ApiVersions.
    if key != API_VERSIONS and is_flexible(key, version):
        assert frame[4] == 0
    answer = decode_answer(key, version, correlation_id, frame)
    assert errors_in(answer) == []
    assert check(subject, answer), answer


@pytest.mark.parametrize(("key", "version"), ALL, ids=str)
def test_an_empty_request_of_every_version_is_answered(
    key: int, version: int, client: RawClient
) -> None:
    request = api(key).request()
    if key == 0:
        request.acks = -1  # type: ignore[attr-defined]
    client.call(request, version)


@pytest.mark.parametrize("key", [key for key in ENDPOINTS if key != API_VERSIONS])
def test_other_versions_close_the_connection(
    key: int, shared: Broker, connect: Callable[[Broker], RawClient]
) -> None:
    endpoint = ENDPOINTS[key]
    for version in (endpoint.max_version + 1, endpoint.min_version - 1, 32767, -32768):
        client = connect(shared)
        client.send_frame(request_header(key, version, 7, "x") + bytes(64))
        assert client.wait_closed() == b""


@pytest.mark.parametrize("key", [key for key in range(100) if key not in ENDPOINTS])
def test_other_apis_close_the_connection(
    key: int, shared: Broker, connect: Callable[[Broker], RawClient]
) -> None:
    client = connect(shared)
    client.send_frame(request_header(key, 0, 7, "x") + bytes(64))
    assert client.wait_closed() == b""


@pytest.mark.parametrize("version", [5, 6, 100, 32767, -1])
def test_api_versions_too_new_is_answered_in_the_oldest_form(
    version: int, client: RawClient
) -> None:
    client.send_frame(request_header(API_VERSIONS, version, 42, "x") + b"\x03ab\x00")
    answer = decode_answer(API_VERSIONS, 0, 42, client.receive_frame())
    assert answer.error_code == ErrorCode.UNSUPPORTED_VERSION
    assert API_VERSIONS in {item.api_key for item in answer.api_keys}
    # The client may now ask again on the same connection.
    request = ApiVersionsRequest(client_software_name="x", client_software_version="1")
    assert client.call(request, 4).error_code == ErrorCode.NONE


def test_what_api_versions_tells(client: RawClient) -> None:
    answer = client.call(ApiVersionsRequest(), 0)
    told = {item.api_key: (item.min_version, item.max_version) for item in answer.api_keys}
    offered = {
        key: (endpoint.min_version, endpoint.max_version)
        for key, endpoint in ENDPOINTS.items()
        if key not in HIDDEN
    }
    # Produce 0 is told, not answered: librdkafka before 2.11 compresses only if it sees it.
    assert told == {**offered, 0: (0, 13)}


def test_bytes_behind_a_request_do_not_matter(client: RawClient, topic: str) -> None:
    id_ = client.call(metadata(topic)).topics[0].topic_id
    for junk in (b"\0", b"\0\0\0", b"junk", bytes(100)):
        for request in (metadata(topic), produce(id_, batch()), fetch(id_), produce(id_, batch())):
            client.send_frame(client.frame(request) + junk)
            assert errors_in(client.receive()) == []
    assert one(client.call(list_offsets(topic, LATEST))).offset == 8


def with_tags(request: Message, version: int, correlation_id: int) -> bytes:
    """The request with a tagged field that nobody knows, in its header and at its end."""
    tag = b"\x01\x63\x03abc"
    header = request_header(request.API_KEY, version, correlation_id, "x")
    return header[:-1] + tag + encoder(type(request), version)(request)[:-1] + tag


@pytest.mark.parametrize(("key", "version"), [(k, v) for k, v in ALL if is_flexible(k, v)], ids=str)
def test_unknown_tagged_fields_are_skipped(
    key: int, version: int, client: RawClient, topic: str
) -> None:
    subject = Subject(client, topic)
    ask, check = ASKED[key]
    client.send_frame(with_tags(ask(subject, version), version, 77))
    answer = decode_answer(key, version, 77, client.receive_frame())
    assert errors_in(answer) == []
    assert check(subject, answer), answer


@pytest.mark.parametrize("client_id", [None, "", "ü" * 100])
def test_any_client_id_will_do(client_id: str | None, shared: Broker) -> None:
    with RawClient(shared.bootstrap, client_id=client_id) as client:
        assert _has_broker(client.call(metadata()).brokers)


def test_a_frame_may_arrive_byte_by_byte(client: RawClient, topic: str) -> None:
    frame = client.frame(produce(topic, batch(b"slow")), 12)
    for byte in struct.pack(">i", len(frame)) + frame:
        client.send_bytes(bytes((byte,)))
    assert one(client.receive()).base_offset == 0
