"""What `test_versions` asks of groups assigned by the broker, and of quotas, in every version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol
from uuid import UUID, uuid4

from penstock.wire import Message
from penstock.wire.messages.alter_client_quotas import (
    AlterClientQuotasRequest,
    OpData,
    RequestEntityData,
    RequestEntryData,
)
from penstock.wire.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from penstock.wire.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from penstock.wire.messages.describe_client_quotas import DescribeClientQuotasRequest
from penstock.wire.messages.share_group_describe import ShareGroupDescribeRequest
from penstock.wire.messages.share_group_heartbeat import ShareGroupHeartbeatRequest
from penstock.wire.messages.streams_group_describe import StreamsGroupDescribeRequest
from penstock.wire.messages.streams_group_heartbeat import StreamsGroupHeartbeatRequest
from tests.broker.groups.streams_members import StreamsClient, stateless
from tests.broker.raw import RawClient
from tests.broker.requests import new_name


class Subject(Protocol):
    """A topic with one record in it."""

    client: RawClient
    topic: str
    id: UUID


Ask = Callable[[Any, int], Message]
Check = Callable[[Any, Any], bool]


def _join(subject: Subject, version: int) -> ConsumerGroupHeartbeatRequest:
    return ConsumerGroupHeartbeatRequest(
        group_id=new_name(),
        member_id=str(uuid4()),
        rebalance_timeout_ms=60_000,
        subscribed_topic_names=[subject.topic],
        topic_partitions=[],
    )


def _share(subject: Subject, version: int) -> ShareGroupHeartbeatRequest:
    return ShareGroupHeartbeatRequest(
        group_id=new_name(), member_id=str(uuid4()), subscribed_topic_names=[subject.topic]
    )


def _describe(subject: Subject, version: int) -> Message:
    joined = _join(subject, version)
    subject.client.call(joined)
    return ConsumerGroupDescribeRequest(group_ids=[joined.group_id])


def _describe_share(subject: Subject, version: int) -> Message:
    joined = _share(subject, version)
    subject.client.call(joined)
    return ShareGroupDescribeRequest(group_ids=[joined.group_id])


def _streams(subject: Subject, version: int) -> StreamsGroupHeartbeatRequest:
    client = StreamsClient(subject.client.call, new_name(), str(uuid4()), stateless(subject.topic))
    return client.request()


def _describe_streams(subject: Subject, version: int) -> Message:
    joined = _streams(subject, version)
    subject.client.call(joined)
    return StreamsGroupDescribeRequest(group_ids=[joined.group_id])


def _quota(subject: Subject, version: int) -> Message:
    entry = RequestEntryData(
        entity=[RequestEntityData(entity_type="client-id", entity_name=new_name())],
        ops=[OpData(key="producer_byte_rate", value=1e12)],
    )
    return AlterClientQuotasRequest(entries=[entry])


ASKED_OF_ASSIGNED: Final[dict[int, tuple[Ask, Check]]] = {
    48: (lambda s, v: DescribeClientQuotasRequest(), lambda s, a: a.entries is not None),
    49: (_quota, lambda s, a: len(a.entries) == 1),
    68: (_join, lambda s, a: a.member_epoch > 0),
    69: (_describe, lambda s, a: len(a.groups[0].members) == 1),
    76: (_share, lambda s, a: a.member_epoch > 0),
    88: (_streams, lambda s, a: a.member_epoch > 0),
    89: (_describe_streams, lambda s, a: len(a.groups[0].members) == 1),
    77: (_describe_share, lambda s, a: len(a.groups[0].members) == 1),
}
