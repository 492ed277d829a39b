"""A transactional producer at the level of the protocol: what it sends, and what it is answered.

In the *older* form it says beforehand which partitions and groups belong to a transaction; in the
*newer* (KIP-890) it just writes, and takes a new epoch with each end. It never retries by itself.
"""

from __future__ import annotations

from typing import Any, Final

from penstock.broker.transactions.state import NO_IDS, Ids
from penstock.records import record
from penstock.records.batch import headers
from penstock.records.record import BatchOptions
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from penstock.wire.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
)
from penstock.wire.messages.describe_transactions import DescribeTransactionsRequest
from penstock.wire.messages.end_txn import EndTxnRequest
from penstock.wire.messages.init_producer_id import InitProducerIdRequest
from penstock.wire.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from tests.broker.raw import RawClient
from tests.broker.requests import fetch, now_ms, one, produce

# Versions of Produce, EndTxn and TxnOffsetCommit, oldest and newest of each form.
OLDER: Final = (11, 4, 4)
NEWER: Final = (12, 5, 5)
# Of InitProducerId: KIP-939, which Kafka still calls unstable.
TWO_PHASE_VERSION: Final = 6
FORMS: Final = {"older": OLDER, "newer": NEWER}


class RawProducer:
    """One producer of one transactional id."""

    def __init__(self, client: RawClient, name: str, form: str = "newer") -> None:
        self.client = client
        self.name = name
        self.produce_version, self.end_version, self.offsets_version = FORMS[form]
        self.is_newer = form == "newer"
        self.ids = NO_IDS
        self._sequences: dict[tuple[str, int], int] = {}

    def init(
        self,
        *,
        timeout_ms: int = 60_000,
        expected: Ids = NO_IDS,
        two_phase: bool = False,
        keep: bool = False,
        version: int | None = None,
    ) -> Any:
        """Ask for ids, and go on with them; the answer."""
        request = InitProducerIdRequest(
            transactional_id=self.name,
            transaction_timeout_ms=timeout_ms,
            producer_id=expected.producer_id,
            producer_epoch=expected.epoch,
            enable_2pc=two_phase,
            keep_prepared_txn=keep,
        )
        if version is None and (two_phase or keep):
            version = TWO_PHASE_VERSION
        answer = self.client.call(request, version)
        if not answer.error_code:
            self._go_on_as(Ids(answer.producer_id, answer.producer_epoch))
        return answer

    def _go_on_as(self, ids: Ids) -> None:
        if ids != self.ids:
            self._sequences.clear()
        self.ids = ids

    def add(self, topic: str, *numbers: int, version: int = 3) -> ErrorCode:
        """Say that partitions of one topic belong to the transaction; the first code."""
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self.name,
            v3_and_below_producer_id=self.ids.producer_id,
            v3_and_below_producer_epoch=self.ids.epoch,
            v3_and_below_topics=[AddPartitionsToTxnTopic(name=topic, partitions=list(numbers))],
        )
        answer = self.client.call(request, version)
        parts = answer.results_by_topic_v3_and_below[0].results_by_partition
        return ErrorCode(parts[0].partition_error_code)

    def send(self, topic: str, *values: bytes, number: int = 0, say_so: bool = True) -> ErrorCode:
        """Write a batch in the transaction."""
        if not self.is_newer and say_so and (code := self.add(topic, number)):
            return code
        self.begin_send(topic, *values, number=number)
        code = ErrorCode(one(self.client.receive()).error_code)
        if code:
            self._sequences[topic, number] -= len(values)
        return code

    def begin_send(self, topic: str, *values: bytes, number: int = 0) -> None:
        """Send a batch, without waiting for the answer."""
        sequence = self._sequences.get((topic, number), 0)
        options = BatchOptions(
            producer_id=self.ids.producer_id,
            producer_epoch=self.ids.epoch,
            base_sequence=sequence,
            transactional=True,
        )
        batch = record.simple_batch(values, timestamp_ms=now_ms(), options=options)
        request = produce(topic, {number: batch}, transactional_id=self.name)
        self._sequences[topic, number] = sequence + len(values)
        self.client.send(request, self.produce_version)

    def add_group(self, group: str, version: int = 3) -> ErrorCode:
        request = AddOffsetsToTxnRequest(
            transactional_id=self.name,
            producer_id=self.ids.producer_id,
            producer_epoch=self.ids.epoch,
            group_id=group,
        )
        return ErrorCode(self.client.call(request, version).error_code)

    def send_offset(
        self, group: str, topic: str, offset: int, *, say_so: bool = True, **member: Any
    ) -> ErrorCode:
        """Commit an offset of partition 0 in the transaction."""
        if not self.is_newer and say_so and (code := self.add_group(group)):
            return code
        request = TxnOffsetCommitRequest(
            transactional_id=self.name,
            group_id=group,
            producer_id=self.ids.producer_id,
            producer_epoch=self.ids.epoch,
            topics=[
                TxnOffsetCommitRequestTopic(
                    name=topic,
                    partitions=[
                        TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
                    ],
                )
            ],
            **member,
        )
        return ErrorCode(one(self.client.call(request, self.offsets_version)).error_code)

    def end_request(self, *, commit: bool) -> EndTxnRequest:
        return EndTxnRequest(
            transactional_id=self.name,
            producer_id=self.ids.producer_id,
            producer_epoch=self.ids.epoch,
            committed=commit,
        )

    def end(self, *, commit: bool = True, version: int | None = None) -> ErrorCode:
        version = self.end_version if version is None else version
        answer = self.client.call(self.end_request(commit=commit), version)
        if not answer.error_code and self.is_newer:
            self._go_on_as(Ids(answer.producer_id, answer.producer_epoch))
        return ErrorCode(answer.error_code)

    def describe(self) -> Any:
        request = DescribeTransactionsRequest(transactional_ids=[self.name])
        return self.client.call(request).transaction_states[0]


def read(client: RawClient, topic: str, number: int = 0, *, committed: bool = True) -> list[bytes]:
    """The values that a consumer of this isolation sees, control records left out."""
    request = fetch(topic, {number: 0}, isolation_level=int(committed))
    part = one(client.call(request, 12))
    assert not part.error_code, ErrorCode(part.error_code)
    raw = bytes(part.records or b"")
    aborted = sorted(
        (item.first_offset, item.producer_id) for item in part.aborted_transactions or ()
    )
    voided: set[int] = set()
    values: list[bytes] = []
    for at, header in headers(raw):
        while aborted and aborted[0][0] <= header.last_offset:
            voided.add(aborted.pop(0)[1])
        if header.is_control:
            voided.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in voided):
            items = record.decode(memoryview(raw)[at : at + header.size])
            values += [item.value or b"" for item in items]
    return values
