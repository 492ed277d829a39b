"""What `test_versions` asks of the APIs of transactions, in every version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from penstock.wire import Message
from penstock.wire.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from penstock.wire.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
)
from penstock.wire.messages.describe_transactions import DescribeTransactionsRequest
from penstock.wire.messages.list_transactions import ListTransactionsRequest
from penstock.wire.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from penstock.wire.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)
from tests.broker.raw import RawClient
from tests.broker.transactions.raw_producer import RawProducer


class Subject(Protocol):
    """A topic with one record in it."""

    client: RawClient
    topic: str


def _producer(subject: Subject) -> RawProducer:
    """A producer of the topic's own."""
    producer = RawProducer(subject.client, f"txn-{subject.topic}")
    producer.init()
    return producer


def _add_partitions(subject: Subject, version: int) -> Message:
    producer = _producer(subject)
    topics = [AddPartitionsToTxnTopic(name=subject.topic, partitions=[0])]
    if version < 4:
        return AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=producer.name,
            v3_and_below_producer_id=producer.ids.producer_id,
            v3_and_below_producer_epoch=producer.ids.epoch,
            v3_and_below_topics=topics,
        )
    item = AddPartitionsToTxnTransaction(
        transactional_id=producer.name,
        producer_id=producer.ids.producer_id,
        producer_epoch=producer.ids.epoch,
        topics=topics,
    )
    return AddPartitionsToTxnRequest(transactions=[item])


def _is_added(subject: Subject, answer: Any) -> bool:
    topics = answer.results_by_topic_v3_and_below
    for result in answer.results_by_transaction:
        topics = result.topic_results
    ((part,),) = (item.results_by_partition for item in topics)
    return not part.partition_error_code


def _add_offsets(subject: Subject, version: int) -> Message:
    producer = _producer(subject)
    return AddOffsetsToTxnRequest(
        transactional_id=producer.name,
        producer_id=producer.ids.producer_id,
        producer_epoch=producer.ids.epoch,
        group_id="g",
    )


def _end(subject: Subject, version: int) -> Message:
    producer = _producer(subject)
    producer.send(subject.topic, b"x")
    return producer.end_request(commit=True)


def _markers(subject: Subject, version: int) -> Message:
    producer = _producer(subject)
    producer.send(subject.topic, b"x")
    topics = [WritableTxnMarkerTopic(name=subject.topic, partition_indexes=[0])]
    marker = WritableTxnMarker(
        producer_id=producer.ids.producer_id, producer_epoch=producer.ids.epoch, topics=topics
    )
    return WriteTxnMarkersRequest(markers=[marker])


def _offsets(subject: Subject, version: int) -> Message:
    producer = _producer(subject)
    producer.add_group("g")
    part = TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=1)
    return TxnOffsetCommitRequest(
        transactional_id=producer.name,
        group_id="g",
        producer_id=producer.ids.producer_id,
        producer_epoch=producer.ids.epoch,
        topics=[TxnOffsetCommitRequestTopic(name=subject.topic, partitions=[part])],
    )


def _describe(subject: Subject, version: int) -> Message:
    return DescribeTransactionsRequest(transactional_ids=[_producer(subject).name])


def _list(subject: Subject, version: int) -> Message:
    _producer(subject)
    return ListTransactionsRequest(state_filters=["Empty"])


def _is_listed(subject: Subject, answer: Any) -> bool:
    names = {item.transactional_id for item in answer.transaction_states}
    return f"txn-{subject.topic}" in names


ASKED_OF_TRANSACTIONS: Final[
    dict[int, tuple[Callable[[Subject, int], Message], Callable[[Subject, Any], bool]]]
] = {
    24: (_add_partitions, _is_added),
    25: (_add_offsets, lambda s, a: True),
    26: (_end, lambda s, a: True),
    27: (_markers, lambda s, a: len(a.markers) == 1),
    28: (_offsets, lambda s, a: a.topics[0].name == s.topic),
    65: (_describe, lambda s, a: a.transaction_states[0].transaction_state == "Empty"),
    66: (_list, _is_listed),
}
