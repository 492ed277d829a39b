"""Transactions through the protocol, in both forms: what is seen, and what is refused how."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import pytest

from penstock.broker.transactions.state import Ids
from penstock.testing.broker import Broker
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
)
from penstock.wire.messages.api_versions import ApiVersionsRequest
from penstock.wire.messages.describe_transactions import DescribeTransactionsRequest
from penstock.wire.messages.list_transactions import ListTransactionsRequest
from penstock.wire.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from penstock.wire.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)
from tests.broker.raw import RawClient
from tests.broker.requests import batch, create, delete, new_name, one, produce
from tests.broker.transactions.raw_producer import RawProducer, read
from tests.broker.waits import wait_until

BOTH_FORMS = pytest.mark.parametrize("form", ["older", "newer"])
NONE = ErrorCode.NONE


@pytest.fixture
def name() -> str:
    return f"txn-{uuid4().hex[:8]}"


def started(client: RawClient, name: str, form: str = "newer") -> RawProducer:
    producer = RawProducer(client, name, form)
    assert not producer.init().error_code
    return producer


# ---- what is seen ------------------------------------------------------------------------


@BOTH_FORMS
def test_records_become_visible_together_or_never(
    client: RawClient, topic: str, name: str, form: str
) -> None:
    producer = started(client, name, form)
    assert producer.send(topic, b"a", b"b") == NONE
    assert producer.send(topic, b"c") == NONE
    assert read(client, topic) == []
    assert read(client, topic, committed=False) == [b"a", b"b", b"c"]
    assert producer.end() == NONE
    assert read(client, topic) == [b"a", b"b", b"c"]
    assert producer.send(topic, b"void") == NONE
    assert producer.end(commit=False) == NONE
    assert producer.send(topic, b"d") == NONE
    assert producer.end() == NONE
    assert read(client, topic) == [b"a", b"b", b"c", b"d"]
    assert read(client, topic, committed=False) == [b"a", b"b", b"c", b"void", b"d"]


@BOTH_FORMS
def test_a_transaction_spans_partitions_and_topics(client: RawClient, name: str, form: str) -> None:
    topics = [new_name(), new_name()]
    for each in topics:
        client.call(create(each, 3))
    producer = started(client, name, form)
    places = [(each, number) for each in topics for number in range(3)]
    for each, number in places:
        assert producer.send(each, b"x", number=number) == NONE
    assert producer.end() == NONE
    assert all(read(client, each, number) == [b"x"] for each, number in places)


def committed_offset(client: RawClient, group: str, topic: str) -> int:
    request = OffsetFetchRequest(
        groups=[
            OffsetFetchRequestGroup(
                group_id=group,
                topics=[OffsetFetchRequestTopics(name=topic, partition_indexes=[0])],
            )
        ]
    )
    part = client.call(request, 9).groups[0].topics[0].partitions[0]
    assert not part.error_code
    return int(part.committed_offset)


@BOTH_FORMS
def test_offsets_are_committed_with_the_records(
    client: RawClient, topic: str, name: str, form: str
) -> None:
    group = f"g-{name}"
    producer = started(client, name, form)
    assert producer.send(topic, b"x") == NONE
    assert producer.send_offset(group, topic, 5) == NONE
    assert committed_offset(client, group, topic) == -1
    assert producer.end() == NONE
    assert committed_offset(client, group, topic) == 5
    assert producer.send_offset(group, topic, 9) == NONE
    assert producer.end(commit=False) == NONE
    assert committed_offset(client, group, topic) == 5
    # Of offsets alone, too.
    assert producer.send_offset(group, topic, 6) == NONE
    assert producer.end() == NONE
    assert committed_offset(client, group, topic) == 6


def test_offsets_of_a_member_that_is_none_are_refused(
    client: RawClient, topic: str, name: str
) -> None:
    producer = started(client, name)
    stale = producer.send_offset(f"g-{name}", topic, 5, generation_id=3, member_id="nobody")
    assert stale in {ErrorCode.ILLEGAL_GENERATION, ErrorCode.UNKNOWN_MEMBER_ID}
    assert producer.send_offset("", topic, 5) == ErrorCode.INVALID_GROUP_ID


def test_the_older_form_must_name_the_group_first(client: RawClient, topic: str, name: str) -> None:
    producer = started(client, name, "older")
    assert producer.send_offset("g", topic, 5, say_so=False) == ErrorCode.TRANSACTION_ABORTABLE
    producer.offsets_version = 3
    assert producer.send_offset("g", topic, 5, say_so=False) == ErrorCode.INVALID_TXN_STATE


# ---- fencing -----------------------------------------------------------------------------


@BOTH_FORMS
def test_a_zombie_writes_nothing_more(client: RawClient, topic: str, name: str, form: str) -> None:
    zombie = started(client, name, form)
    assert zombie.send(topic, b"lost") == NONE
    successor = started(client, name, form)
    # What it left open is aborted by now.
    assert read(client, topic) == []
    fenced = ErrorCode.INVALID_PRODUCER_EPOCH
    assert zombie.send(topic, b"zombie", say_so=False) == fenced
    assert zombie.send_offset("g", topic, 1, say_so=False) == fenced
    assert zombie.end() == ErrorCode.PRODUCER_FENCED
    assert zombie.end(version=1) == fenced
    assert zombie.add(topic, 0) == ErrorCode.PRODUCER_FENCED
    assert zombie.add(topic, 0, version=1) == fenced
    assert zombie.add_group("g") == ErrorCode.PRODUCER_FENCED
    assert zombie.add_group("g", version=1) == fenced
    assert zombie.init(expected=zombie.ids).error_code == ErrorCode.PRODUCER_FENCED
    assert zombie.init(expected=zombie.ids, version=3).error_code == fenced
    assert successor.send(topic, b"good") == NONE
    assert successor.end() == NONE
    assert read(client, topic) == [b"good"]
    assert read(client, topic, committed=False) == [b"lost", b"good"]


@BOTH_FORMS
def test_a_transaction_that_takes_too_long_is_aborted(
    shared: Broker, client: RawClient, topic: str, name: str, form: str
) -> None:
    producer = RawProducer(client, name, form)
    producer.init(timeout_ms=1)
    group = f"g-{name}"
    producer.send(topic, b"late")
    producer.send_offset(group, topic, 7)
    wait_until(
        shared,
        lambda server: server.coordination.transactions.transactions[name].state == "CompleteAbort",
    )
    refused = ErrorCode.INVALID_TXN_STATE if form == "newer" else ErrorCode.PRODUCER_FENCED
    assert producer.end() == refused
    assert producer.send(topic, b"more", say_so=False) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert read(client, topic) == []
    assert committed_offset(client, group, topic) == -1
    if form == "newer":
        # Having aborted it may go on, with the epoch that it is given; here with more time.
        assert producer.end(commit=False) == NONE
    assert not producer.init().error_code
    assert producer.send(topic, b"in time") == NONE
    assert producer.end() == NONE
    assert read(client, topic) == [b"in time"]


def test_the_end_may_be_repeated(client: RawClient, topic: str, name: str) -> None:
    producer = started(client, name)
    producer.send(topic, b"x")
    request = producer.end_request(commit=True)
    first, second = client.call(request, 5), client.call(request, 5)
    assert first == second
    assert (first.producer_id, first.producer_epoch) == (producer.ids.producer_id, 1)
    opposite = producer.end_request(commit=False)
    assert client.call(opposite, 5).error_code == ErrorCode.INVALID_TXN_STATE


# ---- refusals ----------------------------------------------------------------------------


def test_a_write_that_was_not_announced_is_refused(
    client: RawClient, topic: str, name: str
) -> None:
    producer = started(client, name, "older")
    assert producer.send(topic, b"x", say_so=False) == ErrorCode.TRANSACTION_ABORTABLE
    producer.produce_version = 10
    assert producer.send(topic, b"x", say_so=False) == ErrorCode.INVALID_TXN_STATE


def test_transactional_records_need_a_transactional_id(
    client: RawClient, topic: str, name: str
) -> None:
    producer = started(client, name)
    transactional = _transactional_batch(producer.ids)
    part = one(client.call(produce(topic, transactional), 12))
    assert part.error_code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    damaged = bytearray(transactional)
    damaged[-1] ^= 1
    damaged[50] ^= 1
    part = one(client.call(produce(topic, bytes(damaged), transactional_id=name), 12))
    assert part.error_code == ErrorCode.CORRUPT_MESSAGE
    # Plain records are plain records, with or without one.
    part = one(client.call(produce(topic, batch(b"plain"), transactional_id=name), 12))
    assert not part.error_code
    assert read(client, topic) == [b"plain"]


def _transactional_batch(ids: Ids) -> bytes:
    from penstock.records import record
    from penstock.records.record import BatchOptions

    options = BatchOptions(
        producer_id=ids.producer_id, producer_epoch=ids.epoch, base_sequence=0, transactional=True
    )
    return record.simple_batch([b"x"], timestamp_ms=1, options=options)


def test_strangers_are_refused(client: RawClient, topic: str, name: str) -> None:
    producer = started(client, name)
    producer.ids = Ids(producer.ids.producer_id + 1_000_000, 0)
    assert producer.send(topic, b"x") == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert producer.end() == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    producer.name = f"{name}-unknown"
    assert producer.send(topic, b"x") == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert producer.add(topic, 0) == ErrorCode.INVALID_PRODUCER_ID_MAPPING


def test_bad_beginnings_are_refused(client: RawClient, name: str) -> None:
    producer = RawProducer(client, name)
    assert producer.init(timeout_ms=0).error_code == ErrorCode.INVALID_TRANSACTION_TIMEOUT
    assert producer.init(timeout_ms=900_001).error_code == ErrorCode.INVALID_TRANSACTION_TIMEOUT
    assert producer.init(expected=Ids(5, -1)).error_code == ErrorCode.INVALID_REQUEST
    producer.name = ""
    assert producer.init().error_code == ErrorCode.INVALID_REQUEST


def test_nothing_is_added_if_a_partition_is_not_there(
    client: RawClient, topic: str, name: str
) -> None:
    producer = started(client, name, "older")
    request = AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=name,
        v3_and_below_producer_id=producer.ids.producer_id,
        v3_and_below_producer_epoch=producer.ids.epoch,
        v3_and_below_topics=[
            AddPartitionsToTxnTopic(name=topic, partitions=[0, 9]),
            AddPartitionsToTxnTopic(name="nowhere", partitions=[0]),
        ],
    )
    results = client.call(request, 3).results_by_topic_v3_and_below
    codes = [part.partition_error_code for item in results for part in item.results_by_partition]
    missing = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert codes == [ErrorCode.OPERATION_NOT_ATTEMPTED, missing, missing]
    assert producer.describe().transaction_state == "Empty"


def test_several_transactions_are_asked_for_in_one_request(
    client: RawClient, topic: str, name: str
) -> None:
    one_, other = started(client, f"{name}-1"), started(client, f"{name}-2")
    assert one_.send(topic, b"x") == NONE

    def item(producer: RawProducer, *, verify_only: bool) -> AddPartitionsToTxnTransaction:
        return AddPartitionsToTxnTransaction(
            transactional_id=producer.name,
            producer_id=producer.ids.producer_id,
            producer_epoch=producer.ids.epoch,
            verify_only=verify_only,
            topics=[AddPartitionsToTxnTopic(name=topic, partitions=[0])],
        )

    def codes(version: int, *items: AddPartitionsToTxnTransaction) -> list[int]:
        answer = client.call(AddPartitionsToTxnRequest(transactions=list(items)), version)
        return [
            part.partition_error_code
            for result in answer.results_by_transaction
            for topic_result in result.topic_results
            for part in topic_result.results_by_partition
        ]

    both = [item(one_, verify_only=True), item(other, verify_only=True)]
    assert codes(5, *both) == [NONE, ErrorCode.TRANSACTION_ABORTABLE]
    assert codes(4, *both) == [NONE, ErrorCode.INVALID_TXN_STATE]
    assert codes(5, item(other, verify_only=False), item(other, verify_only=True)) == [NONE, NONE]


def test_a_deleted_topic_does_not_keep_a_transaction_from_ending(
    client: RawClient, topic: str, name: str
) -> None:
    gone = new_name()
    client.call(create(gone))
    producer = started(client, name)
    assert producer.send(topic, b"stays") == NONE
    assert producer.send(gone, b"goes") == NONE
    assert not client.call(delete(gone)).responses[0].error_code
    client.call(create(gone))
    assert producer.end() == NONE
    assert read(client, topic) == [b"stays"]
    assert read(client, gone) == []


# ---- questions ---------------------------------------------------------------------------


def test_transactions_are_described(client: RawClient, topic: str, name: str) -> None:
    producer = started(client, name)
    assert producer.describe().transaction_state == "Empty"
    producer.send(topic, b"x")
    state = producer.describe()
    assert (state.transaction_state, state.transaction_timeout_ms) == ("Ongoing", 60_000)
    assert (state.producer_id, state.producer_epoch) == producer.ids
    assert [(item.topic, item.partitions) for item in state.topics] == [(topic, [0])]
    assert state.transaction_start_time_ms > 0
    producer.end(commit=False)
    assert producer.describe().transaction_state == "CompleteAbort"
    producer.name = "unknown"
    assert producer.describe().error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
    empty = client.call(DescribeTransactionsRequest(transactional_ids=[""]))
    assert empty.transaction_states[0].error_code == ErrorCode.INVALID_REQUEST


def test_transactions_are_listed(client: RawClient, topic: str, name: str) -> None:
    idle, busy = started(client, f"{name}-idle"), started(client, f"{name}-busy")
    busy.send(topic, b"x")

    def listed(**filters: object) -> set[str]:
        answer = client.call(ListTransactionsRequest(**filters))  # type: ignore[arg-type]
        assert not answer.error_code
        return {
            item.transactional_id.removeprefix(f"{name}-")
            for item in answer.transaction_states
            if item.transactional_id.startswith(name)
        }

    assert listed() == {"idle", "busy"}
    assert listed(state_filters=["Ongoing"]) == {"busy"}
    assert listed(producer_id_filters=[idle.ids.producer_id]) == {"idle"}
    assert listed(state_filters=["Ongoing"], duration_filter=3_600_000) == set()
    assert listed(transactional_id_pattern=f"{name}-i.*") == {"idle"}
    assert listed(transactional_id_pattern="nothing.*") == set()
    answer = client.call(ListTransactionsRequest(state_filters=["Ongoing", "Odd"]))
    assert answer.unknown_state_filters == ["Odd"]
    answer = client.call(ListTransactionsRequest(transactional_id_pattern="("))
    assert answer.error_code == ErrorCode.INVALID_REGULAR_EXPRESSION
    busy.end()


def test_markers_end_a_transaction_that_hangs(client: RawClient, topic: str, name: str) -> None:
    producer = started(client, name)
    producer.send(topic, b"x")

    def write(where: str, epoch: int, *, commit: bool = False) -> int:
        marker = WritableTxnMarker(
            producer_id=producer.ids.producer_id,
            producer_epoch=epoch,
            transaction_result=commit,
            topics=[WritableTxnMarkerTopic(name=where, partition_indexes=[0])],
        )
        answer = client.call(WriteTxnMarkersRequest(markers=[marker]))
        return int(answer.markers[0].topics[0].partitions[0].error_code)

    assert write("nowhere", 0) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert write(topic, producer.ids.epoch) == NONE
    assert write(topic, producer.ids.epoch - 1) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert read(client, topic) == []


@BOTH_FORMS
def test_a_marker_of_a_stranger_does_not_keep_later_transactions_open(
    client: RawClient, topic: str, name: str, form: str
) -> None:
    producer = started(client, name, form)
    producer.send(topic, b"void")
    marker = WritableTxnMarker(
        producer_id=producer.ids.producer_id,
        producer_epoch=producer.ids.epoch,
        transaction_result=False,
        coordinator_epoch=0x7FFFFFFF,
        topics=[WritableTxnMarkerTopic(name=topic, partition_indexes=[0])],
    )
    answer = client.call(WriteTxnMarkersRequest(markers=[marker]))
    assert answer.markers[0].topics[0].partitions[0].error_code == NONE
    assert producer.end(commit=False) == NONE
    assert producer.send(topic, b"x") == NONE
    assert producer.end() == NONE
    assert read(client, topic) == [b"x"]


def test_clients_are_told_of_the_newer_form(
    shared: Broker, connect: Callable[[Broker], RawClient], client: RawClient
) -> None:
    request = ApiVersionsRequest(client_software_name="t", client_software_version="1")
    answer = client.call(request, 4)
    feature = {item.name: item for item in answer.finalized_features}["transaction.version"]
    assert feature.max_version_level == 2
    supported = {item.name: item for item in answer.supported_features}["transaction.version"]
    assert (supported.min_version, supported.max_version) == (0, 2)
    older = client.call(request, 3)
    assert all(item.min_version >= 1 for item in older.supported_features)
    with Broker(transaction_version=0) as plain:
        answer = connect(plain).call(request, 4)
        assert "transaction.version" not in {item.name for item in answer.finalized_features}
