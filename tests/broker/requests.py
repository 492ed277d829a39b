"""Requests as tests write them, and what they look for in the answers.

Every builder returns a message of `penstock.wire`; `one` takes a response with a single topic and
partition apart. Batches are made by `batch`. Touches nothing.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final
from uuid import UUID, uuid4

from crc32c import crc32c

from penstock.records import record
from penstock.records.batch import HEADER, HEADER_SIZE, headers, read_header
from penstock.records.record import BatchOptions, Record
from penstock.wire.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
)
from penstock.wire.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from penstock.wire.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from penstock.wire.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchTopic,
    ForgottenTopic,
)
from penstock.wire.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from penstock.wire.messages.init_producer_id import InitProducerIdRequest
from penstock.wire.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
)
from penstock.wire.messages.metadata import MetadataRequest, MetadataRequestTopic
from penstock.wire.messages.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from penstock.wire.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from penstock.wire.zero import ZERO_UUID

LATEST, EARLIEST, MAX_TIMESTAMP = -1, -2, -3
BY_NAME: Final = {"produce": 12, "fetch": 12}
MIB: Final = 1 << 20
TOPIC_RESOURCE: Final = 2
SET, DELETE, APPEND, SUBTRACT = range(4)


def now_ms() -> int:
    return int(time.time() * 1000)


def new_name(prefix: str = "t") -> str:
    """A topic name that no other test uses."""
    return f"{prefix}-{uuid4().hex[:12]}"


def batch(
    *values: bytes | None,
    key: bytes | None = None,
    at_ms: int | None = None,
    codec: int = 0,
    producer: tuple[int, int, int] | None = None,
) -> bytes:
    """A record batch as a producer sends it; `producer` is its id, epoch and first sequence."""
    options = BatchOptions(codec=codec)
    if producer is not None:
        id_, epoch, sequence = producer
        options = BatchOptions(
            codec=codec, producer_id=id_, producer_epoch=epoch, base_sequence=sequence
        )
    moment = now_ms() if at_ms is None else at_ms
    return record.simple_batch(values or (b"x",), key=key, timestamp_ms=moment, options=options)


def batch_of_size(size: int, **options: Any) -> bytes:
    """A batch of one record, exactly so many bytes long."""
    guess = size - len(batch(b"", **options))
    while (have := len(batch(b"x" * guess, **options))) != size:
        guess += size - have
    return batch(b"x" * guess, **options)


def resealed(raw: bytes, **changes: int) -> bytes:
    """The batch with header fields changed and its checksum right for them."""
    header = read_header(raw)._replace(**changes)
    out = bytearray(HEADER.pack(*header) + raw[HEADER_SIZE:])
    struct.pack_into(">I", out, 17, crc32c(memoryview(out)[21:]))
    return bytes(out)


def records_of(data: bytes | memoryview | None) -> list[Record]:
    """Every record in a fetched stretch of log."""
    raw = bytes(data or b"")
    return [
        item
        for at, header in headers(raw)
        for item in record.decode(memoryview(raw)[at : at + header.size])
    ]


def values_of(data: bytes | memoryview | None) -> list[bytes | None]:
    return [item.value for item in records_of(data)]


# ---- produce and fetch -----------------------------------------------------------------------


def produce(
    topic: str | UUID,
    records: bytes | Mapping[int, bytes | None] | None = None,
    *,
    acks: int = -1,
    transactional_id: str | None = None,
    partition: int = 0,
) -> ProduceRequest:
    """One topic, by name or id; a batch for one partition or a batch for each of several."""
    by_partition = records if isinstance(records, Mapping) else {partition: records}
    name, id_ = name_and_id(topic)
    data = [PartitionProduceData(index=n, records=item) for n, item in by_partition.items()]
    return ProduceRequest(
        transactional_id=transactional_id,
        acks=acks,
        timeout_ms=30_000,
        topic_data=[TopicProduceData(name=name, topic_id=id_, partition_data=data)],
    )


def fetch(
    topic: str | UUID | None,
    offsets: int | Mapping[int, int] = 0,
    *,
    max_wait_ms: int = 0,
    min_bytes: int = 1,
    max_bytes: int = 50 * MIB,
    partition_max_bytes: int = MIB,
    leader_epoch: int = -1,
    session: tuple[int, int] = (0, -1),
    forget: Iterable[tuple[str | UUID, list[int]]] = (),
    isolation_level: int = 0,
) -> FetchRequest:
    """One topic, by name or id, its partitions each from an offset; None asks for no topic."""
    topics: list[FetchTopic] = []
    if topic is not None:
        name, id_ = name_and_id(topic)
        wanted = offsets if isinstance(offsets, Mapping) else {0: offsets}
        partitions = [
            FetchPartition(
                partition=number,
                fetch_offset=offset,
                partition_max_bytes=partition_max_bytes,
                current_leader_epoch=leader_epoch,
            )
            for number, offset in wanted.items()
        ]
        topics.append(FetchTopic(topic=name, topic_id=id_, partitions=partitions))
    forgotten: list[ForgottenTopic] = []
    for gone, numbers in forget:
        name, id_ = name_and_id(gone)
        forgotten.append(ForgottenTopic(topic=name, topic_id=id_, partitions=numbers))
    return FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        isolation_level=isolation_level,
        session_id=session[0],
        session_epoch=session[1],
        topics=topics,
        forgotten_topics_data=forgotten,
    )


def name_and_id(topic: str | UUID) -> tuple[str, UUID]:
    return (topic, ZERO_UUID) if isinstance(topic, str) else ("", topic)


def one(response: Any) -> Any:
    """The only partition's part of an answer about one partition."""
    topics = getattr(response, "responses", None)
    topics = response.topics if topics is None else topics
    assert len(topics) == 1, response
    for name in ("partition_responses", "partitions"):
        parts = getattr(topics[0], name, None)
        if parts is not None:
            assert len(parts) == 1, response
            return parts[0]
    raise AssertionError(f"no partitions in {response!r}")


# ---- the rest --------------------------------------------------------------------------------


def create(
    name: str,
    partitions: int = 1,
    replication_factor: int = 1,
    *,
    validate_only: bool = False,
    configs: Mapping[str, str] | None = None,
    **more_configs: str,
) -> CreateTopicsRequest:
    """One topic; settings are given by name, or as keywords with `_` for `.`."""
    topic = CreatableTopic(
        name=name,
        num_partitions=partitions,
        replication_factor=replication_factor,
        configs=[
            CreatableTopicConfig(name=key.replace("_", "."), value=value)
            for key, value in {**(configs or {}), **more_configs}.items()
        ],
    )
    return CreateTopicsRequest(topics=[topic], timeout_ms=30_000, validate_only=validate_only)


def delete(*topics: str | UUID) -> DeleteTopicsRequest:
    states = [
        DeleteTopicState(name=topic)
        if isinstance(topic, str)
        else DeleteTopicState(name=None, topic_id=topic)
        for topic in topics
    ]
    names = [topic for topic in topics if isinstance(topic, str)]
    return DeleteTopicsRequest(topics=states, topic_names=names, timeout_ms=30_000)


def metadata(*topics: str | UUID, create_missing: bool = False) -> MetadataRequest:
    wanted = [
        MetadataRequestTopic(name=topic)
        if isinstance(topic, str)
        else MetadataRequestTopic(name=None, topic_id=topic)
        for topic in topics
    ]
    return MetadataRequest(topics=wanted, allow_auto_topic_creation=create_missing)


def list_offsets(
    topic: str, timestamp: int, *, partition: int = 0, leader_epoch: int = -1
) -> ListOffsetsRequest:
    item = ListOffsetsPartition(
        partition_index=partition, timestamp=timestamp, current_leader_epoch=leader_epoch
    )
    return ListOffsetsRequest(
        replica_id=-1, topics=[ListOffsetsTopic(name=topic, partitions=[item])], timeout_ms=5_000
    )


def end_of_epoch(topic: str, epoch: int, *, current: int = -1) -> OffsetForLeaderEpochRequest:
    item = OffsetForLeaderPartition(partition=0, current_leader_epoch=current, leader_epoch=epoch)
    return OffsetForLeaderEpochRequest(
        replica_id=-1, topics=[OffsetForLeaderTopic(topic=topic, partitions=[item])]
    )


def delete_records(topic: str, before: int, *, partition: int = 0) -> DeleteRecordsRequest:
    item = DeleteRecordsPartition(partition_index=partition, offset=before)
    return DeleteRecordsRequest(
        topics=[DeleteRecordsTopic(name=topic, partitions=[item])], timeout_ms=30_000
    )


def new_producer(id_: int = -1, epoch: int = -1) -> InitProducerIdRequest:
    return InitProducerIdRequest(
        transactional_id=None, transaction_timeout_ms=60_000, producer_id=id_, producer_epoch=epoch
    )


def alter(
    topic: str, *steps: tuple[int, str, str | None], validate_only: bool = False
) -> IncrementalAlterConfigsRequest:
    """Change a topic's settings step by step: operation, name, value."""
    configs = [
        AlterableConfig(name=name, config_operation=operation, value=value)
        for operation, name, value in steps
    ]
    resource = AlterConfigsResource(
        resource_type=TOPIC_RESOURCE, resource_name=topic, configs=configs
    )
    return IncrementalAlterConfigsRequest(resources=[resource], validate_only=validate_only)
