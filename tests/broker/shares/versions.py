"""What `test_versions` asks of the APIs of queues, in every version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol
from uuid import UUID

from penstock.wire import Message
from penstock.wire.messages.alter_share_group_offsets import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsRequestPartition,
    AlterShareGroupOffsetsRequestTopic,
)
from penstock.wire.messages.delete_share_group_offsets import (
    DeleteShareGroupOffsetsRequest,
    DeleteShareGroupOffsetsRequestTopic,
)
from penstock.wire.messages.describe_share_group_offsets import (
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsRequestGroup,
)
from penstock.wire.messages.list_config_resources import ListConfigResourcesRequest
from penstock.wire.messages.share_acknowledge import (
    AcknowledgementBatch,
    AcknowledgePartition,
    AcknowledgeTopic,
    ShareAcknowledgeRequest,
)
from penstock.wire.messages.share_fetch import FetchPartition, FetchTopic, ShareFetchRequest
from tests.broker.raw import RawClient
from tests.broker.requests import new_name


class Subject(Protocol):
    """A topic with one record in it."""

    client: RawClient
    topic: str
    id: UUID


def _fetch(subject: Subject, group: str) -> ShareFetchRequest:
    wanted = FetchTopic(topic_id=subject.id, partitions=[FetchPartition(partition_index=0)])
    return ShareFetchRequest(
        group_id=group, member_id="member", max_records=10, max_bytes=1 << 20, topics=[wanted]
    )


def _begun(subject: Subject) -> str:
    """A group that has begun to take from the topic, and has taken nothing yet."""
    group = new_name("g")
    subject.client.call(_fetch(subject, group), 1)
    return group


def _acknowledge(subject: Subject, _version: int) -> Message:
    group = _begun(subject)
    # It begins at the end: move it to the record, and take that.
    subject.client.call(_alter(subject, group))
    follow = _fetch(subject, group)
    follow.share_session_epoch = 1
    subject.client.call(follow, 1)
    answer = AcknowledgementBatch(first_offset=0, last_offset=0, acknowledge_types=[1])
    part = AcknowledgePartition(partition_index=0, acknowledgement_batches=[answer])
    return ShareAcknowledgeRequest(
        group_id=group,
        member_id="member",
        share_session_epoch=2,
        topics=[AcknowledgeTopic(topic_id=subject.id, partitions=[part])],
    )


def _alter(subject: Subject, group: str) -> AlterShareGroupOffsetsRequest:
    part = AlterShareGroupOffsetsRequestPartition(partition_index=0, start_offset=0)
    topic = AlterShareGroupOffsetsRequestTopic(topic_name=subject.topic, partitions=[part])
    return AlterShareGroupOffsetsRequest(group_id=group, topics=[topic])


def _describe(subject: Subject, _version: int) -> Message:
    group = DescribeShareGroupOffsetsRequestGroup(group_id=_begun(subject), topics=None)
    return DescribeShareGroupOffsetsRequest(groups=[group])


def _delete(subject: Subject, _version: int) -> Message:
    topic = DeleteShareGroupOffsetsRequestTopic(topic_name=subject.topic)
    return DeleteShareGroupOffsetsRequest(group_id=_begun(subject), topics=[topic])


# The API's key, what to ask, and what must be in the answer.
ASKED_OF_QUEUES: Final[
    dict[int, tuple[Callable[[Any, int], Message], Callable[[Any, Any], bool]]]
] = {
    74: (
        lambda s, v: ListConfigResourcesRequest(resource_types=[2] if v else []),
        lambda s, a: (
            not a.config_resources or s.topic in {item.resource_name for item in a.config_resources}
        ),
    ),
    78: (
        lambda s, v: _fetch(s, new_name("g")),
        lambda s, a: a.acquisition_lock_timeout_ms == 30_000,
    ),
    79: (_acknowledge, lambda s, a: a.responses[0].topic_id == s.id),
    90: (_describe, lambda s, a: a.groups[0].topics[0].partitions[0].start_offset == 1),
    91: (
        lambda s, v: _alter(s, _begun(s)),
        lambda s, a: a.responses[0].partitions[0].partition_index == 0,
    ),
    92: (_delete, lambda s, a: a.responses[0].topic_id == s.id),
}
