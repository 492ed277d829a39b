"""Topics made, grown, emptied and deleted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Final, TypeVar
from uuid import UUID

from penstock.broker.apis.context import RequestContext
from penstock.broker.catalog import ApiError, Topic
from penstock.broker.config import NODE_ID
from penstock.errors import LogError, OffsetOutOfRangeError, StorageError
from penstock.log.config import SETTINGS
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
)
from penstock.wire.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfigs,
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from penstock.wire.messages.delete_records import (
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)
from penstock.wire.messages.delete_topics import (
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from penstock.wire.zero import ZERO_UUID

if TYPE_CHECKING:
    from penstock.broker.server import Broker

K = TypeVar("K", bound=Hashable)

log = logging.getLogger(__name__)

# Kafka's ConfigSource of a value that the topic itself sets, and of a default.
FROM_TOPIC: Final = 1
FROM_DEFAULT: Final = 5
NAMES_OR_IDS_FROM_VERSION: Final = 6
TO_THE_END: Final = -1
MAX_MESSAGE_LENGTH: Final = 1_000


def error_of(error: LogError | ApiError) -> tuple[ErrorCode, str]:
    """How an error that stopped a request is answered."""
    # A message may quote what the client sent: no longer than an answer can carry.
    message = str(error)[:MAX_MESSAGE_LENGTH]
    if isinstance(error, ApiError):
        return error.code, message
    return ErrorCode.KAFKA_STORAGE_ERROR, message


def repeated(names: Iterable[K]) -> set[K]:
    """Names that a request has more than once; such parts are refused, as in Kafka."""
    return {name for name, count in Counter(names).items() if count > 1}


async def create_topics(
    broker: Broker, request: CreateTopicsRequest, context: RequestContext
) -> CreateTopicsResponse:
    twice = repeated(topic.name for topic in request.topics)
    results: list[CreatableTopicResult] = []
    seen: set[str] = set()
    for wanted in request.topics:
        if wanted.name in seen:
            continue
        seen.add(wanted.name)
        result = CreatableTopicResult(
            name=wanted.name, error_message=None, num_partitions=-1, replication_factor=-1,
            configs=None,
        )  # fmt: skip
        results.append(result)
        try:
            if wanted.name in twice:
                raise ApiError(
                    ErrorCode.INVALID_REQUEST, f"{wanted.name!r} is in the request twice"
                )
            await _create(broker, wanted, result, validate_only=request.validate_only)
        except (ApiError, LogError) as error:
            result.error_code, result.error_message = error_of(error)
    return CreateTopicsResponse(topics=results)


def check_replicas(assignments: Iterable[list[int]]) -> None:
    """ApiError if a partition is to be anywhere but here."""
    if any(replicas != [NODE_ID] for replicas in assignments):
        raise ApiError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"there is only broker {NODE_ID} to assign to"
        )


async def _create(
    broker: Broker, wanted: CreatableTopic, result: CreatableTopicResult, *, validate_only: bool
) -> None:
    partitions = wanted.num_partitions
    if wanted.assignments:
        if wanted.num_partitions != -1 or wanted.replication_factor != -1:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                "give either an assignment or the numbers of partitions and replicas",
            )
        numbers = sorted(item.partition_index for item in wanted.assignments)
        if numbers != list(range(len(numbers))):
            raise ApiError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT, "partitions are counted from 0 without gaps"
            )
        check_replicas(item.broker_ids for item in wanted.assignments)
        partitions = len(numbers)
    elif wanted.replication_factor not in (-1, 1):
        raise ApiError(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"replication factor {wanted.replication_factor}: there is one broker, so 1 at most",
        )
    if partitions != -1 and partitions < 1:
        raise ApiError(ErrorCode.INVALID_PARTITIONS, f"{partitions} partitions are too few")
    settings: dict[str, str] = {}
    for config in wanted.configs:
        if config.value is None:
            raise ApiError(ErrorCode.INVALID_CONFIG, f"{config.name} has no value")
        settings[config.name] = config.value
    if validate_only:
        broker.catalog.create_topic(wanted.name, partitions, settings)
        count = broker.config.default_partitions if partitions == -1 else partitions
    else:
        topic = await broker.topics.create(wanted.name, partitions, settings)
        result.topic_id, count = topic.id, topic.partitions
    result.num_partitions = count
    result.replication_factor = 1
    result.configs = _told_settings(broker, settings)


def _told_settings(broker: Broker, overrides: dict[str, str]) -> list[CreatableTopicConfigs]:
    defaults = broker.catalog.topic_defaults()
    return [
        CreatableTopicConfigs(
            name=name,
            value=overrides.get(name, defaults.get(name, setting.render(setting.default))),
            config_source=FROM_TOPIC if name in overrides else FROM_DEFAULT,
        )
        for name, setting in SETTINGS.items()
    ]


async def delete_topics(
    broker: Broker, request: DeleteTopicsRequest, context: RequestContext
) -> DeleteTopicsResponse:
    wanted = list(request.topics)
    if context.version < NAMES_OR_IDS_FROM_VERSION:
        wanted = [DeleteTopicState(name=name) for name in request.topic_names]
    twice = repeated((item.name, item.topic_id) for item in wanted)
    results: list[DeletableTopicResult] = []
    seen: set[tuple[str | None, UUID]] = set()
    for item in wanted:
        if (item.name, item.topic_id) in seen:
            continue
        seen.add((item.name, item.topic_id))
        result = DeletableTopicResult(name=item.name, topic_id=item.topic_id, error_message=None)
        results.append(result)
        try:
            if (item.name, item.topic_id) in twice:
                raise ApiError(ErrorCode.INVALID_REQUEST, "the topic is in the request twice")
            topic = _topic_of(broker, item)
            result.name, result.topic_id = topic.name, topic.id
            await broker.topics.delete(topic)
        except (ApiError, LogError) as error:
            result.error_code, result.error_message = error_of(error)
    return DeleteTopicsResponse(responses=results)


def _topic_of(broker: Broker, item: DeleteTopicState) -> Topic:
    if (item.name is None) == (item.topic_id == ZERO_UUID):
        raise ApiError(ErrorCode.INVALID_REQUEST, "give either a topic's name or its id")
    if item.name is not None:
        topic = broker.catalog.topics.get(item.name)
        if topic is None:
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no such topic")
        return topic
    topic = broker.catalog.by_id.get(item.topic_id)
    if topic is None:
        raise ApiError(ErrorCode.UNKNOWN_TOPIC_ID, "there is no topic with this id")
    return topic


async def create_partitions(
    broker: Broker, request: CreatePartitionsRequest, context: RequestContext
) -> CreatePartitionsResponse:
    twice = repeated(topic.name for topic in request.topics)
    results: list[CreatePartitionsTopicResult] = []
    for wanted in request.topics:
        result = CreatePartitionsTopicResult(name=wanted.name, error_message=None)
        results.append(result)
        try:
            if wanted.name in twice:
                raise ApiError(ErrorCode.INVALID_REQUEST, "the topic is in the request twice")
            await _grow(broker, wanted, validate_only=request.validate_only)
        except (ApiError, LogError) as error:
            result.error_code, result.error_message = error_of(error)
    return CreatePartitionsResponse(results=results)


async def _grow(broker: Broker, wanted: CreatePartitionsTopic, *, validate_only: bool) -> None:
    topic = broker.catalog.topics.get(wanted.name)
    if topic is None:
        raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no such topic")
    if wanted.assignments and wanted.count > topic.partitions:
        if len(wanted.assignments) != wanted.count - topic.partitions:
            raise ApiError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                "an assignment for each new partition is needed",
            )
        check_replicas(item.broker_ids for item in wanted.assignments)
    if validate_only:
        broker.catalog.add_partitions(topic, wanted.count)
    else:
        await broker.topics.add_partitions(topic.name, wanted.count)


async def delete_records(
    broker: Broker, request: DeleteRecordsRequest, context: RequestContext
) -> DeleteRecordsResponse:
    """Raise the start of partitions; durable before it is answered."""
    topics: list[DeleteRecordsTopicResult] = []
    changed: list[DeleteRecordsPartitionResult] = []
    for topic in request.topics:
        results: list[DeleteRecordsPartitionResult] = []
        topics.append(DeleteRecordsTopicResult(name=topic.name, partitions=results))
        for item in topic.partitions:
            result = DeleteRecordsPartitionResult(
                partition_index=item.partition_index, low_watermark=-1
            )
            results.append(result)
            partition = broker.partition(topic.name, item.partition_index)
            if partition is None:
                result.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                continue
            if partition.config.compacted and not partition.config.deleted_by_age:
                result.error_code = ErrorCode.POLICY_VIOLATION
                continue
            offset = partition.visible if item.offset == TO_THE_END else item.offset
            try:
                partition.delete_before(offset)
            except OffsetOutOfRangeError:
                result.error_code = ErrorCode.OFFSET_OUT_OF_RANGE
                continue
            broker.overload.look(partition)
            result.low_watermark = partition.log_start
            changed.append(result)
    if changed:
        try:
            broker.store.checkpoint()
        except StorageError as error:
            log.warning("records are deleted, but after a crash may be back: %s", error)
            for result in changed:
                result.error_code, result.low_watermark = ErrorCode.KAFKA_STORAGE_ERROR, -1
    return DeleteRecordsResponse(topics=topics)
