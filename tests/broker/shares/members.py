"""Members of share groups for tests: they say exactly what they are told to, over a socket.

`Taker` is one member with its session. It needs no heartbeats: a session is enough to fetch.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self
from uuid import UUID, uuid4

from penstock.records.record import Record
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.describe_share_group_offsets import (
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsRequestGroup,
)
from penstock.wire.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from penstock.wire.messages.share_acknowledge import (
    AcknowledgementBatch as AcknowledgedBatch,
)
from penstock.wire.messages.share_acknowledge import (
    AcknowledgePartition,
    AcknowledgeTopic,
    ShareAcknowledgeRequest,
)
from penstock.wire.messages.share_fetch import (
    AcknowledgementBatch,
    FetchPartition,
    FetchTopic,
    ForgottenTopic,
    ShareFetchRequest,
)
from tests.broker.raw import RawClient
from tests.broker.requests import batch, create, metadata, new_name, produce, records_of

GROUP = 32
ACCEPT, RELEASE, REJECT, RENEW = 1, 2, 3, 4
# First offset, last offset, one kind of answer or one for each.
Answer = tuple[int, int, int | Sequence[int]]


class Reachable(Protocol):
    """A broker, in this process or another."""

    @property
    def bootstrap(self) -> str: ...


@dataclass
class Got:
    """What a fetch of one partition got."""

    error: str
    acknowledge_error: str
    # First offset, last offset, delivery count.
    acquired: list[tuple[int, int, int]]
    records: list[Record]
    # All batches that came, whichever of their records are meant.
    data: bytes

    @property
    def offsets(self) -> list[int]:
        return [at for first, last, _ in self.acquired for at in range(first, last + 1)]

    @property
    def values(self) -> list[bytes | None]:
        return [record.value for record in self.records]


NOTHING = Got("NONE", "NONE", [], [], b"")


class Taker:
    """One member of a share group."""

    def __init__(self, broker: Reachable, group: str, topic: str, *, version: int = 2) -> None:
        self.topic_id: UUID = topic_id(broker, topic)
        self.client = RawClient(broker.bootstrap)
        self.group = group
        self.member = base64.urlsafe_b64encode(uuid4().bytes).decode().rstrip("=")
        self.topic = topic
        self.epoch = 0
        self.version = version

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()

    def request(
        self,
        answers: Sequence[Answer] = (),
        *,
        partitions: Sequence[int] = (0,),
        wait_ms: int = 0,
        max_records: int = 500,
        max_bytes: int = 1 << 20,
        strict: bool = False,
        epoch: int | None = None,
        renew: bool = False,
        forget: Sequence[int] = (),
    ) -> ShareFetchRequest:
        epoch = self.epoch if epoch is None else epoch
        wanted = [
            FetchPartition(
                partition_index=number,
                acknowledgement_batches=[
                    AcknowledgementBatch(
                        first_offset=first, last_offset=last, acknowledge_types=_kinds(kinds)
                    )
                    for first, last, kinds in answers
                ],
            )
            for number in partitions
        ]
        named = epoch == 0 or answers or tuple(partitions) != (0,)
        return ShareFetchRequest(
            group_id=self.group,
            member_id=self.member,
            share_session_epoch=epoch,
            max_wait_ms=0 if renew else wait_ms,
            min_bytes=0 if renew else 1,
            max_bytes=0 if renew else max_bytes,
            max_records=0 if renew else max_records,
            batch_size=max_records,
            share_acquire_mode=int(strict),
            is_renew_ack=renew,
            topics=[FetchTopic(topic_id=self.topic_id, partitions=wanted)] if named else [],
            forgotten_topics_data=[ForgottenTopic(topic_id=self.topic_id, partitions=list(forget))]
            if forget
            else [],
        )

    def send(self, answers: Sequence[Answer] = (), **options: Any) -> None:
        """Ask, and do not wait for the answer."""
        self.client.send(self.request(answers, **options), self.version)
        self._next_epoch(options.get("epoch"))

    def receive(self) -> Got:
        return got_from(self.client.receive())

    def fetch(self, answers: Sequence[Answer] = (), **options: Any) -> Got:
        """Fetch from partition 0, unless told otherwise; ApiError's name if all of it failed."""
        self.send(answers, **options)
        return self.receive()

    def fetch_all(self, answers: Sequence[Answer] = (), **options: Any) -> dict[int, Got]:
        """The same, of several partitions."""
        self.send(answers, **options)
        response = self.client.receive()
        assert not response.error_code, response.error_message
        return {
            part.partition_index: _got(part)
            for topic in response.responses
            for part in topic.partitions
        }

    def acknowledge(
        self,
        *answers: Answer,
        partition: int = 0,
        epoch: int | None = None,
        topic_id: UUID | None = None,
        renew: bool = False,
    ) -> str:
        """Answer for records; the name of the error."""
        item = AcknowledgePartition(
            partition_index=partition,
            acknowledgement_batches=[
                AcknowledgedBatch(
                    first_offset=first, last_offset=last, acknowledge_types=_kinds(kinds)
                )
                for first, last, kinds in answers
            ],
        )
        response = self.client.call(
            ShareAcknowledgeRequest(
                group_id=self.group,
                member_id=self.member,
                share_session_epoch=self.epoch if epoch is None else epoch,
                is_renew_ack=renew,
                topics=[AcknowledgeTopic(topic_id=topic_id or self.topic_id, partitions=[item])],
            ),
            self.version,
        )
        self._next_epoch(epoch)
        if response.error_code:
            return ErrorCode(response.error_code).name
        return ErrorCode(response.responses[0].partitions[0].error_code).name

    def _next_epoch(self, epoch: int | None) -> None:
        if epoch is None:
            self.epoch += 1


def _kinds(kinds: int | Sequence[int]) -> list[int]:
    return [kinds] if isinstance(kinds, int) else list(kinds)


def _got(part: Any) -> Got:
    acquired = [(a.first_offset, a.last_offset, a.delivery_count) for a in part.acquired_records]
    data = bytes(part.records or b"")
    meant = [
        record
        for record in records_of(data)
        if any(first <= record.offset <= last for first, last, _ in acquired)
    ]
    return Got(
        ErrorCode(part.error_code).name,
        ErrorCode(part.acknowledge_error_code).name,
        acquired,
        meant,
        data,
    )


def got_from(response: Any) -> Got:
    if response.error_code:
        return Got(ErrorCode(response.error_code).name, "NONE", [], [], b"")
    parts = [part for topic in response.responses for part in topic.partitions]
    assert len(parts) <= 1, parts
    return _got(parts[0]) if parts else NOTHING


def topic_id(broker: Reachable, topic: str) -> UUID:
    with RawClient(broker.bootstrap) as client:
        found: UUID = client.call(metadata(topic)).topics[0].topic_id
    return found


def set_group(broker: Reachable, group: str, **settings: str) -> None:
    """Set a group's settings, given as keywords with `_` for `.`."""
    configs = [
        AlterableConfig(name=name.replace("_", "."), config_operation=0, value=value)
        for name, value in settings.items()
    ]
    resource = AlterConfigsResource(resource_type=GROUP, resource_name=group, configs=configs)
    with RawClient(broker.bootstrap) as client:
        result = client.call(IncrementalAlterConfigsRequest(resources=[resource])).responses[0]
    assert not result.error_code, result.error_message


def new_queue(
    broker: Reachable,
    *,
    partitions: int = 1,
    configs: dict[str, str] | None = None,
    **settings: str,
) -> tuple[str, str]:
    """A topic, and a group that reads it from the beginning."""
    topic, group = new_name(), new_name("g")
    with RawClient(broker.bootstrap) as client:
        result = client.call(create(topic, partitions, configs=configs)).topics[0]
    assert not result.error_code, result.error_message
    set_group(broker, group, **{"share_auto_offset_reset": "earliest", **settings})
    return topic, group


def fill(broker: Reachable, topic: str, *values: bytes, partition: int = 0, **options: Any) -> None:
    """Write one batch of values."""
    send_batch(broker, topic, batch(*values, **options), partition)


def send_batch(broker: Reachable, topic: str, data: bytes, partition: int = 0) -> None:
    with RawClient(broker.bootstrap) as client:
        response = client.call(produce(topic, {partition: data}), 12)
    result = response.responses[0].partition_responses[0]
    assert not result.error_code, result.error_message


def lag_of(broker: Reachable, group: str) -> int:
    """How many records the group has not finished, as an administrator sees it."""
    wanted = DescribeShareGroupOffsetsRequestGroup(group_id=group, topics=None)
    with RawClient(broker.bootstrap) as client:
        answer = client.call(DescribeShareGroupOffsetsRequest(groups=[wanted])).groups[0]
    assert not answer.error_code, answer.error_message
    return sum(part.lag for topic in answer.topics for part in topic.partitions)


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % at for at in range(first, first + count)]
