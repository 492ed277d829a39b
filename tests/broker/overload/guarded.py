"""Guarded topics for tests: made, filled up to their bound, and read by a group that commits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.broker.overload import Guard
from penstock.broker.server import Broker as Server
from penstock.log.partition import Partition
from penstock.testing.broker import Broker
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from tests.broker.raw import RawClient
from tests.broker.requests import batch_of_size, create, new_name, one, produce
from tests.broker.waits import wait_until

# Small numbers: a topic is full after ten batches, and has five segments then.
BOUND: Final = 100_000
SEGMENT: Final = 20_000
BATCH: Final = 10_000
FULL_AT: Final = BOUND // BATCH
# By name, and with a place for an error's message.
VERSION: Final = 12
COMMIT_VERSION: Final = 8
REFUSED: Final = ErrorCode.KAFKA_STORAGE_ERROR
GROUP: Final = "readers"


def guarded_topic(
    client: RawClient,
    overflow: str,
    settings: Mapping[str, str] | None = None,
    *,
    partitions: int = 1,
    **more: str,
) -> str:
    """A topic that waits for its groups; more settings have `_` for `.` in their names."""
    name = new_name()
    all_settings = {
        "overflow": overflow,
        "overflow.groups": GROUP,
        "retention.bytes": str(BOUND),
        "segment.bytes": str(SEGMENT),
        **{key.replace("_", "."): value for key, value in {**(settings or {}), **more}.items()},
    }
    result = client.call(create(name, partitions, configs=all_settings)).topics[0]
    assert not result.error_code, result.error_message
    return name


def commit_request(
    topic: str, offset: int, *, group: str = GROUP, number: int = 0
) -> OffsetCommitRequest:
    """An offset as a group without members commits it; version 8 and older."""
    item = OffsetCommitRequestPartition(
        partition_index=number, committed_offset=offset, committed_metadata=None
    )
    return OffsetCommitRequest(
        group_id=group,
        generation_id_or_member_epoch=-1,
        member_id="",
        topics=[OffsetCommitRequestTopic(name=topic, partitions=[item])],
    )


def commit(
    client: RawClient, topic: str, offset: int, *, group: str = GROUP, number: int = 0
) -> None:
    """Commit an offset, and wait until that is safe."""
    request = commit_request(topic, offset, group=group, number=number)
    code = client.call(request, COMMIT_VERSION).topics[0].partitions[0].error_code
    assert not code, ErrorCode(code).name


def one_batch(topic: str, *, number: int = 0, acks: int = -1) -> Any:
    return produce(topic, {number: batch_of_size(BATCH)}, acks=acks)


def fill(client: RawClient, topic: str, *, number: int = 0, count: int = FULL_AT) -> None:
    """Write up to the bound."""
    for _ in range(count):
        result = one(client.call(one_batch(topic, number=number), VERSION))
        assert not result.error_code, result.error_message


def partition_of(server: Server, topic: str, number: int = 0) -> Partition:
    partition = server.partition(topic, number)
    assert partition is not None
    return partition


def guard_of(server: Server, topic: str, number: int = 0) -> Guard:
    return server.overload.guards[partition_of(server, topic, number)]


def wait_for_holds(broker: Broker, topic: str, count: int, *, number: int = 0) -> None:
    """Until so many requests wait for room."""
    wait_until(broker, lambda server: len(guard_of(server, topic, number).waiting) == count)


def span(broker: Broker, topic: str, number: int = 0) -> tuple[int, int]:
    """Where a partition begins and ends."""

    def look(server: Server) -> tuple[int, int]:
        partition = partition_of(server, topic, number)
        return partition.log_start, partition.log_end

    return broker.call(look)
