"""What readers of committed and of uncommitted records see while transactions come and go."""

from __future__ import annotations

from time import monotonic
from typing import Any

from conformance.scenario import scenario
from penstock.records.batch import headers
from penstock.records.record import BatchOptions, Record, encode
from penstock.wire import Message
from penstock.wire.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
)
from penstock.wire.messages.describe_producers import DescribeProducersRequest, TopicRequest
from penstock.wire.messages.end_txn import EndTxnRequest
from penstock.wire.messages.find_coordinator import FindCoordinatorRequest
from penstock.wire.messages.init_producer_id import InitProducerIdRequest
from tests.broker.protocol_client import READY_TIMEOUT_S, ProtocolClient, error_name
from tests.broker.requests import batch, fetch, list_offsets, new_name, now_ms, one, produce

TRANSACTION = 1
COMMITTED, UNCOMMITTED = 1, 0
# The last versions in which partitions are added by a request of their own.
ADD, PRODUCE, END = 3, 11, 3
NOT_YET = {
    "COORDINATOR_NOT_AVAILABLE",
    "COORDINATOR_LOAD_IN_PROGRESS",
    "NOT_COORDINATOR",
    "CONCURRENT_TRANSACTIONS",
}


class Writer:
    """A transactional producer of one topic, request by request."""

    def __init__(self, client: ProtocolClient, topic: str, number: int = 0) -> None:
        self.client = client
        self.topic = topic
        self.name = new_name()
        self.sequence = 0
        # Ahead of the markers' times, and rising: which is the latest must not depend on speed.
        self.time_ms = now_ms() + 60_000 + 10_000 * number
        self._until_it_is_there(
            FindCoordinatorRequest(key=self.name, key_type=TRANSACTION), version=3
        )
        request = InitProducerIdRequest(
            transactional_id=self.name, transaction_timeout_ms=60_000, producer_id=-1,
            producer_epoch=-1,
        )  # fmt: skip
        answer = self._until_it_is_there(request, version=3)
        self.id, self.epoch = answer.producer_id, answer.producer_epoch

    def _until_it_is_there(self, request: Message, version: int) -> Any:
        """Kafka makes the coordinator's log when it is first asked for, and decides in the
        background."""
        deadline = monotonic() + READY_TIMEOUT_S
        while error_name((answer := self.client.call(request, version)).error_code) in NOT_YET:
            assert monotonic() < deadline, error_name(answer.error_code)
        assert not answer.error_code, error_name(answer.error_code)
        return answer

    def begin(self) -> None:
        topics = [AddPartitionsToTxnTopic(name=self.topic, partitions=[0])]
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self.name,
            v3_and_below_producer_id=self.id,
            v3_and_below_producer_epoch=self.epoch,
            v3_and_below_topics=topics,
        )
        deadline = monotonic() + READY_TIMEOUT_S
        while True:
            answer = self.client.call(request, ADD)
            result = answer.results_by_topic_v3_and_below[0].results_by_partition[0]
            error = error_name(result.partition_error_code)
            if error == "NONE":
                return
            assert error in NOT_YET, error
            assert monotonic() < deadline

    def batch(self, *values: bytes, transactional: bool = True) -> bytes:
        options = BatchOptions(
            producer_id=self.id,
            producer_epoch=self.epoch,
            base_sequence=self.sequence,
            transactional=transactional,
        )
        first_ms = self.time_ms + 10 * self.sequence
        records = [Record(at, first_ms + at, None, value) for at, value in enumerate(values)]
        return encode(records, options)

    def write(self, *values: bytes) -> int:
        request = produce(self.topic, self.batch(*values), transactional_id=self.name)
        error, base = self.client.produced(request, PRODUCE)
        assert error == "NONE", error
        self.sequence += len(values)
        return base

    def end(self, *, commit: bool) -> None:
        """And wait until the marker is in the log."""
        request = EndTxnRequest(
            transactional_id=self.name,
            producer_id=self.id,
            producer_epoch=self.epoch,
            committed=commit,
        )
        self._until_it_is_there(request, END)
        deadline = monotonic() + READY_TIMEOUT_S
        while self.state()[-1] >= 0:
            assert monotonic() < deadline

    def state(self) -> tuple[int, ...]:
        """Epoch, last sequence, whether a marker was seen, the start of its transaction."""
        request = DescribeProducersRequest(
            topics=[TopicRequest(name=self.topic, partition_indexes=[0])]
        )
        for item in one(self.client.call(request, 0)).active_producers:
            if item.producer_id == self.id:
                return (
                    item.producer_epoch - self.epoch,
                    item.last_sequence,
                    int(item.coordinator_epoch >= 0),
                    item.current_txn_start_offset,
                )
        raise AssertionError("the producer is not known")


def settled(client: ProtocolClient, topic: str, high_watermark: int) -> None:
    """Kafka raises its high watermark a moment after it has written."""
    deadline = monotonic() + READY_TIMEOUT_S
    while one(client.call(fetch(topic), 12)).high_watermark < high_watermark:
        assert monotonic() < deadline


def seen(
    client: ProtocolClient, writers: list[Writer], offset: int, level: int, max_bytes: int = 1 << 20
) -> Any:
    """What one fetch brings: bounds, batches, and which transactions among them are void."""
    request = fetch(writers[0].topic, offset, isolation_level=level, partition_max_bytes=max_bytes)
    part = one(client.call(request, 12))
    data = bytes(part.records or b"")
    batches = [header for _, header in headers(data)]
    end = max((header.next_offset for header in batches), default=offset)
    aborted = part.aborted_transactions
    if aborted is not None:
        numbers = {writer.id: number for number, writer in enumerate(writers)}
        # Kafka may also name some that begin behind what it returns.
        aborted = sorted(
            (item.first_offset, numbers[item.producer_id])
            for item in aborted
            if item.first_offset < end
        )
    return (
        error_name(part.error_code),
        part.high_watermark,
        part.last_stable_offset,
        [(header.base_offset, header.is_control, header.is_transactional) for header in batches],
        aborted,
    )


def offset_at(client: ProtocolClient, topic: str, timestamp: int, level: int) -> tuple[str, int]:
    request = list_offsets(topic, timestamp)
    request.isolation_level = level
    part = one(client.call(request, 7))
    return error_name(part.error_code), part.offset


@scenario()
def reading_while_transactions_are_open(client: ProtocolClient) -> Any:
    """The last stable offset stops at the first open transaction; aborted ones are listed."""
    topic = client.topic()
    first, second = writers = [Writer(client, topic, number) for number in range(2)]
    client.fill(topic, batch(b"plain"))
    for writer in writers:
        writer.begin()
        writer.write(b"a", b"b")
    client.call(produce(topic, batch(b"plain")), 12)
    answers: list[Any] = []

    def look(end: int) -> None:
        settled(client, topic, end)
        for level in (UNCOMMITTED, COMMITTED):
            answers.extend(seen(client, writers, offset, level) for offset in range(end + 2))
            answers.extend(offset_at(client, topic, at, level) for at in (-1, -2, -3, 0))
        answers.extend(writer.state() for writer in writers)

    look(6)
    second.end(commit=False)
    look(7)
    first.end(commit=True)
    look(8)
    second.begin()
    second.write(b"c")
    look(9)
    second.end(commit=False)
    look(10)
    return answers


@scenario()
def reading_many_aborted_transactions(client: ProtocolClient) -> Any:
    """Fetches of any offset and size list the aborted transactions they touch."""
    topic = client.topic()
    writers = [Writer(client, topic, number) for number in range(3)]
    for number in range(12):
        writer = writers[number % 3]
        writer.begin()
        writer.write(b"x" * 1500)
        if number >= 2:
            writers[(number - 2) % 3].end(commit=number % 4 == 0)
    for writer in writers[1:]:
        if writer.state()[-1] >= 0:
            writer.end(commit=False)
    answers: list[Any] = [writer.state() for writer in writers]
    end = one(client.call(fetch(topic), 12)).high_watermark
    sizes = (1, 1 << 20)
    answers += [
        seen(client, writers, offset, COMMITTED, size)
        for offset in range(0, end, 3)
        for size in sizes
    ]
    return end, answers


@scenario()
def writing_outside_an_open_transaction(client: ProtocolClient) -> Any:
    """A producer with an open transaction writes nothing outside of it."""
    topic = client.topic()
    writer = Writer(client, topic)
    writer.begin()
    writer.write(b"a")
    beside = client.produced(produce(topic, writer.batch(b"b", transactional=False)), PRODUCE)
    writer.end(commit=True)
    after = client.produced(produce(topic, writer.batch(b"b", transactional=False)), PRODUCE)
    return beside, after
