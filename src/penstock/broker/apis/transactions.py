"""Transactions: producers' ids, what belongs to a transaction, its end; and questions about them.

Commands of the coordinator say what is to be written and whether something must be carried out
first; here that is done, and the answer waits for it. What only opens a transaction or adds to it
is not waited for, unless the transaction is to be decided by somebody else (`endures`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from penstock.broker.apis.context import RequestContext
from penstock.broker.catalog import Topic
from penstock.broker.groups.offsets import NewOffset
from penstock.broker.groups.patterns import PatternError, TopicPattern
from penstock.broker.transactions.coordinator import InitRequest, Outcome, Then
from penstock.broker.transactions.state import Ids, State
from penstock.errors import CoordinatorFencedError, LogError, StorageError
from penstock.log.partition import Partition
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.add_offsets_to_txn import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
)
from penstock.wire.messages.add_partitions_to_txn import (
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnResult,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTopicResult,
)
from penstock.wire.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    TopicData,
    TransactionState,
)
from penstock.wire.messages.end_txn import EndTxnRequest, EndTxnResponse
from penstock.wire.messages.init_producer_id import (
    InitProducerIdRequest,
    InitProducerIdResponse,
)
from penstock.wire.messages.list_transactions import (
    ListTransactionsRequest,
    ListTransactionsResponse,
)
from penstock.wire.messages.list_transactions import (
    TransactionState as ListedTransaction,
)
from penstock.wire.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)
from penstock.wire.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)

if TYPE_CHECKING:
    from penstock.broker.server import Broker

# Versions before these know fencing by its older name.
FENCED_FROM_INIT_VERSION: Final = 4
FENCED_FROM_VERSION: Final = 2
# Versions before these do not know that a transaction can only be aborted.
ABORTABLE_FROM_ADD_VERSION: Final = 5
ABORTABLE_FROM_OFFSETS_VERSION: Final = 4
# From here on a producer is given a new epoch with each end: KIP-890.
BUMPS_FROM_END_VERSION: Final = 5
IMPLICIT_FROM_OFFSETS_VERSION: Final = 5
BATCHED_FROM_ADD_VERSION: Final = 4

_OLD_FENCED: Final = ErrorCode.INVALID_PRODUCER_EPOCH
_NO_SUCH: Final = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _fenced(code: ErrorCode, version: int, known_from: int) -> ErrorCode:
    if code == ErrorCode.PRODUCER_FENCED and version < known_from:
        return _OLD_FENCED
    return code


def _abortable(code: ErrorCode, version: int, known_from: int) -> ErrorCode:
    if code == ErrorCode.TRANSACTION_ABORTABLE and version < known_from:
        return ErrorCode.INVALID_TXN_STATE
    return code


async def _ready_to_open(broker: Broker, name: str) -> None:
    """The end of the transaction before is durable: the next has the same epoch."""
    if broker.coordination.transactions.would_open(name):
        await broker.coordination.commit()


async def _settled(broker: Broker, name: str) -> None:
    """What was added to a transaction is durable, where that is promised."""
    if broker.coordination.transactions.endures(name):
        await broker.coordination.commit()


# ---- beginning ---------------------------------------------------------------------------


async def init_producer_id(
    broker: Broker, request: InitProducerIdRequest, context: RequestContext
) -> InitProducerIdResponse:
    """Ids for a producer: new ones, or the next epoch of its transactional id."""
    if (request.producer_id < 0) != (request.producer_epoch < 0):
        return _refused(ErrorCode.INVALID_REQUEST)
    if request.transactional_id is None:
        # Nobody proves that an id is theirs, so one that a producer names is not handed out again.
        try:
            producer_id = await broker.next_producer_id()
        except LogError:
            return _refused(ErrorCode.KAFKA_STORAGE_ERROR)
        return InitProducerIdResponse(producer_id=producer_id, producer_epoch=0)
    known = Ids(request.producer_id, request.producer_epoch)
    outcome = await _init(
        broker,
        InitRequest(
            request.transactional_id,
            request.transaction_timeout_ms,
            expected=known if known.producer_id >= 0 else None,
            two_phase=request.enable_2pc,
            keep_prepared=request.keep_prepared_txn,
        ),
    )
    if outcome.code:
        return _refused(_fenced(outcome.code, context.version, FENCED_FROM_INIT_VERSION))
    return InitProducerIdResponse(
        producer_id=outcome.ids.producer_id,
        producer_epoch=outcome.ids.epoch,
        ongoing_txn_producer_id=outcome.ongoing.producer_id,
        ongoing_txn_producer_epoch=outcome.ongoing.epoch,
    )


def _refused(code: ErrorCode) -> InitProducerIdResponse:
    return InitProducerIdResponse(error_code=code, producer_id=-1, producer_epoch=-1)


async def _init(broker: Broker, request: InitRequest) -> Outcome:
    """Ask until there is an answer: what the one before left open is aborted first."""
    coordination = broker.coordination
    fresh_id: int | None = None
    while True:
        outcome = coordination.transactions.init(
            request, fresh_id=fresh_id, now_ms=broker.clock.now_ms()
        )
        coordination.write(outcome.entries)
        if outcome.then == Then.NEW_ID:
            fresh_id = await broker.next_producer_id()
        elif outcome.then == Then.FINISH:
            try:
                await coordination.markers.finished(request.name)
            except TimeoutError:
                return Outcome(code=ErrorCode.CONCURRENT_TRANSACTIONS)
        else:
            await coordination.commit()
            return outcome


# ---- writing -----------------------------------------------------------------------------


async def add_partitions_to_txn(
    broker: Broker, request: AddPartitionsToTxnRequest, context: RequestContext
) -> AddPartitionsToTxnResponse:
    """Make partitions part of a transaction: all that are named, or none."""
    version = context.version
    if version < BATCHED_FROM_ADD_VERSION:
        name = request.v3_and_below_transactional_id
        ids = Ids(request.v3_and_below_producer_id, request.v3_and_below_producer_epoch)
        await _ready_to_open(broker, name)
        results = _add_partitions(broker, name, ids, request.v3_and_below_topics, False, version)
        await _settled(broker, name)
        return AddPartitionsToTxnResponse(results_by_topic_v3_and_below=results)
    response = AddPartitionsToTxnResponse()
    for item in request.transactions:
        ids = Ids(item.producer_id, item.producer_epoch)
        await _ready_to_open(broker, item.transactional_id)
        results = _add_partitions(
            broker, item.transactional_id, ids, item.topics, item.verify_only, version
        )
        response.results_by_transaction.append(
            AddPartitionsToTxnResult(transactional_id=item.transactional_id, topic_results=results)
        )
        await _settled(broker, item.transactional_id)
    return response


def _add_partitions(
    broker: Broker,
    name: str,
    ids: Ids,
    topics: Sequence[AddPartitionsToTxnTopic],
    verify_only: bool,
    version: int,
) -> list[AddPartitionsToTxnTopicResult]:
    places = [(topic.name, number) for topic in topics for number in topic.partitions]
    found = [(broker.catalog.topics.get(topic), number) for topic, number in places]
    known = [(topic, number) for topic, number in found if _is_there(topic, number)]
    codes: list[ErrorCode]
    if len(known) < len(found):
        # As in Kafka nothing is added if something is not there.
        codes = [
            ErrorCode.OPERATION_NOT_ATTEMPTED if _is_there(topic, number) else _NO_SUCH
            for topic, number in found
        ]
    elif verify_only:
        transactions = broker.coordination.transactions
        codes = [
            _abortable(
                transactions.holds(name, ids, topic, number), version, ABORTABLE_FROM_ADD_VERSION
            )
            for topic, number in known
            if topic is not None
        ]
    else:
        code, entries = broker.coordination.transactions.add_partitions(
            name,
            ids,
            [(topic, number) for topic, number in known if topic is not None],
            now_ms=broker.clock.now_ms(),
            elapsed_ms=broker.clock.elapsed_ms(),
        )
        broker.coordination.write(entries)
        codes = [_fenced(code, version, FENCED_FROM_VERSION)] * len(places)
    code_of = iter(codes)
    return [
        AddPartitionsToTxnTopicResult(
            name=topic.name,
            results_by_partition=[
                AddPartitionsToTxnPartitionResult(
                    partition_index=number, partition_error_code=next(code_of)
                )
                for number in topic.partitions
            ],
        )
        for topic in topics
    ]


def _is_there(topic: Topic | None, number: int) -> bool:
    return topic is not None and 0 <= number < topic.partitions


async def add_offsets_to_txn(
    broker: Broker, request: AddOffsetsToTxnRequest, context: RequestContext
) -> AddOffsetsToTxnResponse:
    """Make the offsets of a group part of a transaction."""
    if not request.group_id:
        return AddOffsetsToTxnResponse(error_code=ErrorCode.INVALID_GROUP_ID)
    name = request.transactional_id
    await _ready_to_open(broker, name)
    code, entries = broker.coordination.transactions.add_group(
        name,
        Ids(request.producer_id, request.producer_epoch),
        request.group_id,
        now_ms=broker.clock.now_ms(),
        elapsed_ms=broker.clock.elapsed_ms(),
    )
    broker.coordination.write(entries)
    await _settled(broker, name)
    return AddOffsetsToTxnResponse(error_code=_fenced(code, context.version, FENCED_FROM_VERSION))


async def txn_offset_commit(
    broker: Broker, request: TxnOffsetCommitRequest, context: RequestContext
) -> TxnOffsetCommitResponse:
    """Offsets that become a group's when the transaction is committed, and never otherwise."""
    coordination, version = broker.coordination, context.version
    now_ms = broker.clock.now_ms()
    offsets = [
        NewOffset(
            topic.name,
            item.partition_index,
            item.committed_offset,
            item.committed_leader_epoch,
            item.committed_metadata,
        )
        for topic in request.topics
        for item in topic.partitions
    ]
    if not request.group_id:
        return _offset_answer(request, [ErrorCode.INVALID_GROUP_ID] * len(offsets))
    code, entries = coordination.transactions.admit_offsets(
        request.transactional_id,
        Ids(request.producer_id, request.producer_epoch),
        request.group_id,
        implicit=version >= IMPLICIT_FROM_OFFSETS_VERSION,
        now_ms=now_ms,
        elapsed_ms=broker.clock.elapsed_ms(),
    )
    if code:
        code = _abortable(code, version, ABORTABLE_FROM_OFFSETS_VERSION)
        return _offset_answer(request, [code] * len(offsets))
    codes, pending = coordination.groups.commit_in_transaction(
        request.producer_id,
        request.group_id,
        request.member_id,
        request.generation_id,
        request.group_instance_id,
        offsets,
        version=version,
        now_ms=now_ms,
    )
    # Together: offsets never are pending in a transaction that does not know their group.
    coordination.write([*entries, *pending] if pending else [])
    await _settled(broker, request.transactional_id)
    return _offset_answer(request, codes)


def _offset_answer(
    request: TxnOffsetCommitRequest, codes: Iterable[ErrorCode]
) -> TxnOffsetCommitResponse:
    code_of = iter(codes)
    return TxnOffsetCommitResponse(
        topics=[
            TxnOffsetCommitResponseTopic(
                name=topic.name,
                partitions=[
                    TxnOffsetCommitResponsePartition(
                        partition_index=item.partition_index, error_code=next(code_of)
                    )
                    for item in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )


# ---- ending ------------------------------------------------------------------------------


async def end_txn(
    broker: Broker, request: EndTxnRequest, context: RequestContext
) -> EndTxnResponse:
    """Commit or abort; on the answer everything is done, and readers see it."""
    coordination = broker.coordination
    name = request.transactional_id
    fresh_id: int | None = None
    while True:
        outcome = coordination.transactions.end(
            name,
            Ids(request.producer_id, request.producer_epoch),
            commit=request.committed,
            bumps=context.version >= BUMPS_FROM_END_VERSION,
            fresh_id=fresh_id,
            now_ms=broker.clock.now_ms(),
        )
        if outcome.then != Then.NEW_ID:
            break
        fresh_id = await broker.next_producer_id()
    coordination.write(outcome.entries)
    code = outcome.code
    if outcome.then == Then.FINISH:
        try:
            await coordination.markers.finished(name)
        except TimeoutError:
            code = ErrorCode.CONCURRENT_TRANSACTIONS
    else:
        await coordination.commit()
    if code:
        return EndTxnResponse(error_code=_fenced(code, context.version, FENCED_FROM_VERSION))
    return EndTxnResponse(producer_id=outcome.ids.producer_id, producer_epoch=outcome.ids.epoch)


async def write_txn_markers(
    broker: Broker, request: WriteTxnMarkersRequest, context: RequestContext
) -> WriteTxnMarkersResponse:
    """Markers as somebody asks for them: Kafka's tools end a transaction so that hangs."""
    response = WriteTxnMarkersResponse()
    for marker in request.markers:
        results = [
            WritableTxnMarkerTopicResult(
                name=topic.name,
                partitions=[
                    WritableTxnMarkerPartitionResult(
                        partition_index=number,
                        error_code=await _write_marker(
                            broker, broker.partition(topic.name, number), marker
                        ),
                    )
                    for number in topic.partition_indexes
                ],
            )
            for topic in marker.topics
        ]
        response.markers.append(
            WritableTxnMarkerResult(producer_id=marker.producer_id, topics=results)
        )
    return response


async def _write_marker(
    broker: Broker, partition: Partition | None, marker: WritableTxnMarker
) -> ErrorCode:
    if partition is None:
        return _NO_SUCH
    try:
        await broker.coordination.markers.write_as_told(
            partition,
            Ids(marker.producer_id, marker.producer_epoch),
            commit=marker.transaction_result,
            coordinator_epoch=marker.coordinator_epoch,
        )
    except StorageError:
        return ErrorCode.KAFKA_STORAGE_ERROR
    except CoordinatorFencedError:
        return ErrorCode.TRANSACTION_COORDINATOR_FENCED
    except LogError:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return ErrorCode.NONE


# ---- questions ---------------------------------------------------------------------------


async def describe_transactions(
    broker: Broker, request: DescribeTransactionsRequest, context: RequestContext
) -> DescribeTransactionsResponse:
    described = [_described(broker, name) for name in request.transactional_ids]
    await broker.coordination.commit()
    return DescribeTransactionsResponse(transaction_states=described)


def _described(broker: Broker, name: str) -> TransactionState:
    txn = broker.coordination.transactions.transactions.get(name)
    if txn is None:
        code = ErrorCode.TRANSACTIONAL_ID_NOT_FOUND if name else ErrorCode.INVALID_REQUEST
        return TransactionState(error_code=code, transactional_id=name)
    return TransactionState(
        transactional_id=name,
        transaction_state=txn.state.value,
        transaction_timeout_ms=txn.shown_timeout_ms,
        transaction_start_time_ms=txn.started_ms,
        producer_id=txn.shown_ids.producer_id,
        producer_epoch=txn.shown_ids.epoch,
        topics=[
            TopicData(topic=parts.topic, partitions=sorted(parts.numbers))
            for parts in txn.partitions.values()
        ],
    )


async def list_transactions(
    broker: Broker, request: ListTransactionsRequest, context: RequestContext
) -> ListTransactionsResponse:
    names = {state.value for state in State}
    unknown = [name for name in request.state_filters if name not in names]
    found = broker.coordination.transactions.listed(
        states=request.state_filters,
        producer_ids=request.producer_id_filters,
        longer_than_ms=request.duration_filter,
        now_ms=broker.clock.now_ms(),
    )
    if request.transactional_id_pattern:
        try:
            pattern = TopicPattern(request.transactional_id_pattern)
            matching = pattern.matching(txn.name for txn in found)
        except PatternError:
            return ListTransactionsResponse(error_code=ErrorCode.INVALID_REGULAR_EXPRESSION)
        found = [txn for txn in found if txn.name in matching]
    await broker.coordination.commit()
    return ListTransactionsResponse(
        unknown_state_filters=unknown,
        transaction_states=[
            ListedTransaction(
                transactional_id=txn.name,
                producer_id=txn.shown_ids.producer_id,
                transaction_state=txn.state.value,
            )
            for txn in found
        ],
    )
