"""What the cluster is: versions, brokers, topics and their partitions, log directories.

There is one broker, which leads every partition.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Final

from penstock.broker.apis.authorized_operations import NOT_REQUESTED, ON_CLUSTER, ON_TOPIC
from penstock.broker.apis.context import RequestContext
from penstock.broker.apis.topics import error_of
from penstock.broker.catalog import ApiError, Topic, check_name
from penstock.broker.config import NODE_ID
from penstock.errors import LogError
from penstock.log.partition import PartitionId
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.api_versions import (
    ApiVersion,
    ApiVersionsRequest,
    ApiVersionsResponse,
    FinalizedFeatureKey,
    SupportedFeatureKey,
)
from penstock.wire.messages.describe_cluster import (
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
)
from penstock.wire.messages.describe_log_dirs import (
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)
from penstock.wire.messages.describe_topic_partitions import (
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
)
from penstock.wire.messages.describe_topic_partitions import (
    ResponseCursor as DescribeCursor,
)
from penstock.wire.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from penstock.wire.zero import ZERO_UUID

if TYPE_CHECKING:
    from penstock.broker.server import Broker

TRANSACTIONS: Final = "transaction.version"
# Kafka's features at the levels of Apache Kafka 4.3, each from the lowest that is offered. A client
# learns from them what it may do, and a tool which version of Kafka it talks to. Those about
# controllers and replicas are not among them: there are none.
FEATURES: Final = {
    "metadata.version": (7, 30),
    "group.version": (0, 1),
    TRANSACTIONS: (0, 2),
    "share.version": (0, 1),
    "streams.version": (0, 1),
}
ANY_FEATURE_FROM_VERSION: Final = 4
NULL_NAMES_FROM_VERSION: Final = 12
SOFTWARE_FROM_VERSION: Final = 3
# Where Kafka's coordinators keep their state, and these do not. Who looks for them must not get
# empty topics that are made on demand.
_KAFKAS_OWN_TOPICS: Final = frozenset({"__consumer_offsets", "__transaction_state"})
_SOFTWARE: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?")
_MAX_PARTITIONS_TOLD: Final = 2_000


def api_versions(
    broker: Broker, request: ApiVersionsRequest | None, context: RequestContext
) -> ApiVersionsResponse:
    """Which APIs in which versions; `request` is None where it could not be read."""
    if (
        request is not None
        and context.version >= SOFTWARE_FROM_VERSION
        and not (
            _SOFTWARE.fullmatch(request.client_software_name)
            and _SOFTWARE.fullmatch(request.client_software_version)
        )
    ):
        return ApiVersionsResponse(error_code=ErrorCode.INVALID_REQUEST)
    may_be_zero = context.version >= ANY_FEATURE_FROM_VERSION
    levels = {name: level for name, (_, level) in FEATURES.items()}
    levels[TRANSACTIONS] = min(levels[TRANSACTIONS], broker.config.transaction_version)
    return ApiVersionsResponse(
        # The lowest level of a feature may be 0, which older clients do not take for one.
        supported_features=[
            SupportedFeatureKey(
                name=name, min_version=low if may_be_zero else max(low, 1), max_version=level
            )
            for name, (low, level) in FEATURES.items()
        ],
        finalized_features_epoch=0,
        finalized_features=[
            FinalizedFeatureKey(name=name, max_version_level=level, min_version_level=level)
            for name, level in levels.items()
            if level
        ],
        api_keys=[
            ApiVersion(
                api_key=endpoint.api_key,
                min_version=(
                    endpoint.min_version
                    if endpoint.advertised_min is None
                    else endpoint.advertised_min
                ),
                max_version=endpoint.max_version,
            )
            for endpoint in broker.endpoints.values()
            if endpoint.is_advertised
        ],
    )


def metadata(
    broker: Broker, request: MetadataRequest, context: RequestContext
) -> MetadataResponse | Awaitable[MetadataResponse]:
    """Brokers and topics; topics that are not there are made if that is allowed.

    Answered at once where nothing is to be made: then the bound on unsent bytes holds.
    """
    wanted, known = request.topics, broker.catalog.topics
    if wanted is None or (context.version == 0 and not wanted):
        every = [_topic_metadata(broker, topic) for topic in known.values()]
        return _metadata(broker, request, every)
    may_create = request.allow_auto_topic_creation and broker.config.auto_create_topics
    if may_create and any(_is_to_be_made(broker, item) for item in wanted):
        return _metadata_of_new(broker, request, wanted, context.version)
    topics = [_asked_topic(broker, item, context.version) for item in wanted]
    return _metadata(broker, request, topics)


def _is_to_be_made(broker: Broker, item: MetadataRequestTopic) -> bool:
    return (
        not is_by_id(item)
        and item.name not in broker.catalog.topics
        and item.name not in _KAFKAS_OWN_TOPICS
    )


async def _metadata_of_new(
    broker: Broker, request: MetadataRequest, wanted: list[MetadataRequestTopic], version: int
) -> MetadataResponse:
    topics: list[MetadataResponseTopic] = []
    for item in wanted:
        if _is_to_be_made(broker, item):
            assert item.name is not None
            try:
                await broker.topics.create_if_absent(item.name)
            except (ApiError, LogError) as error:
                code, _ = error_of(error)
                topics.append(MetadataResponseTopic(error_code=code, name=item.name))
                continue
        topics.append(_asked_topic(broker, item, version))
    return _metadata(broker, request, topics)


def _metadata(
    broker: Broker, request: MetadataRequest, topics: list[MetadataResponseTopic]
) -> MetadataResponse:
    if request.include_topic_authorized_operations:
        for topic in topics:
            # Of a name that is unknown or malformed as well, but of no id.
            if topic.name is not None and topic.error_code != ErrorCode.INVALID_REQUEST:
                topic.topic_authorized_operations = ON_TOPIC
    of_cluster = request.include_cluster_authorized_operations
    host, port = broker.advertised
    return MetadataResponse(
        brokers=[MetadataResponseBroker(node_id=NODE_ID, host=host, port=port)],
        cluster_id=broker.store.cluster_id,
        controller_id=NODE_ID,
        topics=topics,
        cluster_authorized_operations=ON_CLUSTER if of_cluster else NOT_REQUESTED,
    )


def is_by_id(item: MetadataRequestTopic) -> bool:
    """Some leave the name out beside an id, Java's admin client leaves it empty."""
    return item.name is None or item.topic_id != ZERO_UUID


def _asked_topic(broker: Broker, item: MetadataRequestTopic, version: int) -> MetadataResponseTopic:
    if is_by_id(item):
        if version < NULL_NAMES_FROM_VERSION:
            # These versions carry ids, but one cannot ask by id yet, nor answer without a name.
            return MetadataResponseTopic(
                error_code=ErrorCode.INVALID_REQUEST, name="", topic_id=item.topic_id
            )
        found = broker.catalog.by_id.get(item.topic_id)
        if found is None:
            return MetadataResponseTopic(
                error_code=ErrorCode.UNKNOWN_TOPIC_ID, name=None, topic_id=item.topic_id
            )
        return _topic_metadata(broker, found)
    assert item.name is not None
    try:
        check_name(item.name)
        return _topic_metadata(broker, broker.catalog.topic(item.name))
    except ApiError as error:
        return MetadataResponseTopic(error_code=error.code, name=item.name, topic_id=ZERO_UUID)


def _topic_metadata(broker: Broker, topic: Topic) -> MetadataResponseTopic:
    return MetadataResponseTopic(
        name=topic.name,
        topic_id=topic.id,
        partitions=[
            MetadataResponsePartition(
                partition_index=number,
                leader_id=NODE_ID,
                leader_epoch=broker.leader_epoch,
                replica_nodes=[NODE_ID],
                isr_nodes=[NODE_ID],
            )
            for number in range(topic.partitions)
        ],
    )


def describe_cluster(
    broker: Broker, request: DescribeClusterRequest, context: RequestContext
) -> DescribeClusterResponse:
    host, port = broker.advertised
    if request.endpoint_type != 1:
        return DescribeClusterResponse(
            error_code=ErrorCode.UNSUPPORTED_ENDPOINT_TYPE,
            error_message="only brokers are described here",
        )
    return DescribeClusterResponse(
        endpoint_type=request.endpoint_type,
        cluster_id=broker.store.cluster_id,
        controller_id=NODE_ID,
        brokers=[DescribeClusterBroker(broker_id=NODE_ID, host=host, port=port)],
        cluster_authorized_operations=(
            ON_CLUSTER if request.include_cluster_authorized_operations else NOT_REQUESTED
        ),
    )


def describe_log_dirs(
    broker: Broker, request: DescribeLogDirsRequest, context: RequestContext
) -> DescribeLogDirsResponse:
    """How much each partition holds, and how much room there is."""
    if request.topics is None:
        wanted = [
            (topic.name, list(range(topic.partitions))) for topic in broker.catalog.topics.values()
        ]
    else:
        wanted = [(item.topic, list(item.partitions)) for item in request.topics]
    topics: list[DescribeLogDirsTopic] = []
    for name, numbers in wanted:
        partitions = [
            DescribeLogDirsPartition(
                partition_index=number, partition_size=found.size_bytes, offset_lag=0
            )
            for number in numbers
            if (found := broker.store.partitions.get(PartitionId(name, number))) is not None
        ]
        if partitions:
            topics.append(DescribeLogDirsTopic(name=name, partitions=partitions))
    total, _, free = shutil.disk_usage(broker.store.folder)
    result = DescribeLogDirsResult(
        log_dir=broker.store.folder, topics=topics, total_bytes=total, usable_bytes=free
    )
    return DescribeLogDirsResponse(results=[result])


def describe_topic_partitions(
    broker: Broker, request: DescribeTopicPartitionsRequest, context: RequestContext
) -> DescribeTopicPartitionsResponse:
    """Topics a page at a time; a cursor says where the next page begins."""
    limit = max(1, min(request.response_partition_limit, _MAX_PARTITIONS_TOLD))
    names = sorted({item.name for item in request.topics} or broker.catalog.topics)
    first_partition = 0
    if request.cursor is not None:
        names = [name for name in names if name >= request.cursor.topic_name]
        if names and names[0] == request.cursor.topic_name:
            first_partition = max(0, request.cursor.partition_index)
    response = DescribeTopicPartitionsResponse(next_cursor=None)
    for name in names:
        if limit <= 0:
            response.next_cursor = DescribeCursor(topic_name=name, partition_index=0)
            break
        topic = broker.catalog.topics.get(name)
        if topic is None:
            code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            response.topics.append(
                DescribeTopicPartitionsResponseTopic(
                    error_code=code, name=name, topic_authorized_operations=ON_TOPIC
                )
            )
            continue
        numbers = range(first_partition, min(topic.partitions, first_partition + limit))
        response.topics.append(_described(broker, topic, numbers))
        limit -= len(numbers)
        if numbers.stop < topic.partitions:
            follows = numbers.stop
            response.next_cursor = DescribeCursor(topic_name=name, partition_index=follows)
            break
        first_partition = 0
    return response


def _described(
    broker: Broker, topic: Topic, numbers: range
) -> DescribeTopicPartitionsResponseTopic:
    return DescribeTopicPartitionsResponseTopic(
        name=topic.name,
        topic_id=topic.id,
        topic_authorized_operations=ON_TOPIC,
        partitions=[
            DescribeTopicPartitionsResponsePartition(
                partition_index=number,
                leader_id=NODE_ID,
                leader_epoch=broker.leader_epoch,
                replica_nodes=[NODE_ID],
                isr_nodes=[NODE_ID],
                eligible_leader_replicas=[],
                last_known_elr=[],
            )
            for number in numbers
        ],
    )
