"""Produce: record batches into the log. The hottest path of the broker.

A network read full of requests is one *round*: each request's batches are staged in their
partitions as its frame is read, then every partition is written once, then the requests are
answered, at once or, with acks=all on a topic of durability `disk`, when their records are
synced. The frames lie in the connection's buffer until the round is finished.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final
from uuid import UUID

from penstock.broker.apis.context import RequestContext
from penstock.broker.apis.produce_single import SingleWrite, records_start
from penstock.broker.apis.produce_transactional import admit, is_transactional
from penstock.broker.catalog import Topic
from penstock.broker.recompression import (
    NOTHING_PACKED,
    TOPIC_IDS_FROM_VERSION,
    ZSTD_FROM_VERSION,
    Packed,
)
from penstock.errors import (
    CorruptBatchError,
    InvalidRecordError,
    InvalidTimestampError,
    InvalidTxnStateError,
    LogError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    RecordTooLargeError,
    StorageError,
)
from penstock.log.partition import Partition
from penstock.wire import decoder, encoder, response_header
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.produce import (
    BatchIndexAndErrorMessage,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceResponse,
)
from penstock.wire.zero import ZERO_UUID

if TYPE_CHECKING:
    from penstock.broker.server import Broker
    from penstock.broker.slot import Slot

log = logging.getLogger(__name__)

ZSTD_CODEC: Final = 4
_ATTRIBUTES_LOW_BYTE: Final = 22
# What every client tries again.
FULL: Final = ErrorCode.KAFKA_STORAGE_ERROR
NOTHING_FULL: Final[dict[Partition, str]] = {}

ERROR_CODES: Final[dict[type[LogError], ErrorCode]] = {
    CorruptBatchError: ErrorCode.CORRUPT_MESSAGE,
    InvalidRecordError: ErrorCode.INVALID_RECORD,
    InvalidTimestampError: ErrorCode.INVALID_TIMESTAMP,
    RecordTooLargeError: ErrorCode.MESSAGE_TOO_LARGE,
    OutOfOrderSequenceError: ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
    ProducerFencedError: ErrorCode.INVALID_PRODUCER_EPOCH,
    InvalidTxnStateError: ErrorCode.INVALID_TXN_STATE,
}


class PendingProduce:
    """One request: its results, and how many of them are still waited for."""

    __slots__ = ("acks", "context", "partitions", "responses", "slot", "waiting")

    def __init__(self, context: RequestContext, slot: Slot | None, acks: int) -> None:
        self.context = context
        self.slot = slot
        self.acks = acks
        self.responses: list[TopicProduceResponse] = []
        self.waiting = 0
        # Of a transaction: all that the request names, so that they become part of it together.
        self.partitions: list[tuple[Topic, int]] = []

    def done(self) -> None:
        """Something that was waited for has happened."""
        self.waiting -= 1
        if not self.waiting:
            self.finish()

    def fail_all(self, error: LogError) -> None:
        """Nothing of it is certain; what was refused for another reason stays so."""
        for topic in self.responses:
            for result in topic.partition_responses:
                if not result.error_code:
                    set_error(result, error)

    def finish(self) -> None:
        """Answer, now that nothing is waited for."""
        context = self.context
        failed = [
            r.error_code for t in self.responses for r in t.partition_responses if r.error_code
        ]
        for code in failed:
            context.connection.traffic.errors[0, code] += 1
        if self.slot is None:
            if failed:
                # Nobody waits for an answer: as in Kafka, a cut connection is the only sign.
                context.connection.close("a produce request with acks=0 failed")
            return
        body = ProduceResponse(responses=self.responses, throttle_time_ms=context.throttle_ms)
        self.slot.answer(
            (
                response_header(0, context.version, context.correlation_id),
                encoder(ProduceResponse, context.version)(body),
            )
        )


class PendingWrite:
    """One staged batch of a request."""

    __slots__ = ("acks", "next_offset", "request", "result")

    def __init__(
        self, request: PendingProduce, result: PartitionProduceResponse, next_offset: int
    ) -> None:
        self.request = request
        self.acks = request.acks
        self.result = result
        self.next_offset = next_offset
        request.waiting += 1

    def written(self) -> None:
        """It is written, and nobody waits for a sync."""
        self.request.done()

    def synced(self, error: StorageError | None) -> None:
        """The sync that this batch waited for has happened, or failed."""
        if error is not None:
            set_error(self.result, error)
        self.request.done()

    def fail(self, error: LogError) -> None:
        set_error(self.result, error)
        self.request.done()


class ProduceRound:
    """What one network read asked to append."""

    __slots__ = ("unwritten", "writes")

    def __init__(self) -> None:
        # Requests of which nothing could be staged; the others are answered by their writes.
        self.unwritten: list[PendingProduce] = []
        self.writes: dict[Partition, list[PendingWrite | SingleWrite]] = {}

    def must_flush(self, partition: Partition) -> None:
        """Staging failed for want of the disk: the flush tells those who staged before."""
        self.writes.setdefault(partition, [])


def set_error(result: PartitionProduceResponse, error: LogError) -> None:
    code = ERROR_CODES.get(type(error), ErrorCode.UNKNOWN_SERVER_ERROR)
    if isinstance(error, StorageError):
        code = ErrorCode.KAFKA_STORAGE_ERROR
    result.error_code = code
    result.error_message = str(error)
    result.base_offset = -1
    result.log_append_time_ms = -1
    result.log_start_offset = -1
    if isinstance(error, InvalidRecordError):
        result.record_errors = [
            BatchIndexAndErrorMessage(batch_index=at, batch_index_error_message=str(error))
            for at in error.records
        ]


def handle(broker: Broker, frame: memoryview, at: int, context: RequestContext) -> None:
    """Stage a request's batches; `finish_round` writes and answers."""
    version = context.version
    request, end = decoder(ProduceRequest, version)(frame, at)
    # Its place in the frame is found from the end, so nothing may follow the request.
    recognisable = request.acks and end == len(frame)
    refusal = _refusal(request)
    # Before anything is done: a request may have to wait, for its batches or for a full topic.
    recompression, packed = broker.recompression, NOTHING_PACKED
    if recompression.is_wanted:
        packed = recompression.packed(request, context)
    full = broker.overload.admit(request, context) if broker.overload.guards else NOTHING_FULL
    if recompression.is_wanted:
        recompression.taken(context.connection)
    slot = context.connection.open_slot() if request.acks else None
    pending = PendingProduce(context, slot, request.acks)
    by_id = version >= TOPIC_IDS_FROM_VERSION
    if request.transactional_id is not None:
        pending.partitions = _named(broker, request, by_id=by_id)
    for topic_at, data in enumerate(request.topic_data):
        results: list[PartitionProduceResponse] = []
        pending.responses.append(
            TopicProduceResponse(
                name=data.name, topic_id=data.topic_id, partition_responses=results
            )
        )
        name = _topic_name(broker, data.topic_id) if by_id else data.name
        for item_at, item in enumerate(data.partition_data):
            result = PartitionProduceResponse(index=item.index, base_offset=-1)
            results.append(result)
            if refusal is not None:
                result.error_code, result.error_message = refusal
                continue
            partition = broker.partition(name, item.index) if name is not None else None
            if partition is None:
                result.error_code = (
                    ErrorCode.UNKNOWN_TOPIC_ID
                    if name is None
                    else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                )
                continue
            if partition in full:
                result.error_code, result.error_message = FULL, full[partition]
                continue
            records = packed.get((topic_at, item_at), item.records)
            _stage(broker, partition, records, pending, result, request.transactional_id)
            records_at = records_start(frame, request, version) if recognisable else None
            if records_at is not None and partition.config.codec is None:
                context.connection.targets.learn(frame, records_at, request, partition)
    if not pending.waiting:
        broker.round.unwritten.append(pending)


def _refusal(request: ProduceRequest) -> tuple[ErrorCode, str] | None:
    if request.acks not in (-1, 0, 1):
        return ErrorCode.INVALID_REQUIRED_ACKS, f"acks={request.acks} is not -1, 0 or 1"
    return None


def _topic_name(broker: Broker, topic_id: UUID) -> str | None:
    topic = broker.catalog.by_id.get(topic_id)
    return topic.name if topic is not None and topic_id != ZERO_UUID else None


def _named(broker: Broker, request: ProduceRequest, *, by_id: bool) -> list[tuple[Topic, int]]:
    """The partitions that a request names, as far as they are there."""
    found: list[tuple[Topic, int]] = []
    for data in request.topic_data:
        name = _topic_name(broker, data.topic_id) if by_id else data.name
        topic = broker.catalog.topics.get(name) if name is not None else None
        if topic is not None:
            found += [
                (topic, item.index)
                for item in data.partition_data
                if 0 <= item.index < topic.partitions
            ]
    return found


def _stage(
    broker: Broker,
    partition: Partition,
    records: bytes | memoryview | Packed | None,
    pending: PendingProduce,
    result: PartitionProduceResponse,
    transactional_id: str | None,
) -> None:
    round_ = broker.round
    if isinstance(records, LogError):
        set_error(result, records)
        return
    is_packed = isinstance(records, bytearray)
    view = _writable(records)
    try:
        if (
            pending.context.version < ZSTD_FROM_VERSION
            and not is_packed
            and len(view) > _ATTRIBUTES_LOW_BYTE
            and view[_ATTRIBUTES_LOW_BYTE] & 0x07 == ZSTD_CODEC
        ):
            result.error_code = ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
            return
        in_transaction = False
        if transactional_id is not None and is_transactional(view):
            result.error_code = admit(broker, pending, transactional_id, partition, view)
            if result.error_code:
                return
            in_transaction = True
        staged = partition.stage(view, broker.now_ms, in_transaction)
    except StorageError as error:
        round_.must_flush(partition)
        set_error(result, error)
        return
    except LogError as error:
        set_error(result, error)
        if isinstance(error, InvalidTxnStateError) and is_transactional(view):
            # It belongs to a transaction, and the request does not say to whose.
            result.error_code = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        return
    result.base_offset = staged.base_offset
    result.log_append_time_ms = staged.append_time_ms
    result.log_start_offset = partition.log_start
    write = PendingWrite(pending, result, staged.next_offset)
    writes = round_.writes.get(partition)
    if writes is None:
        round_.writes[partition] = [write]
    else:
        writes.append(write)


def _writable(records: bytes | bytearray | memoryview | None) -> memoryview:
    if isinstance(records, memoryview):
        return records
    return memoryview(records if isinstance(records, bytearray) else bytearray(records or b""))


def _flush(
    partition: Partition, staged: list[PendingWrite | SingleWrite]
) -> list[PendingWrite | SingleWrite]:
    """Write what is staged; those that are in the log. The others have been told why not."""
    try:
        partition.flush()
    except StorageError as error:
        log.warning("%s: %s", partition.id, error)
        for write in staged:
            if write.next_offset > partition.log_end:
                write.fail(error)
        # What a roll in the midst of the round wrote before the failure is there all the same.
        return [write for write in staged if write.next_offset <= partition.log_end]
    except Exception as error:
        # A bug. The bytes that were staged lie in a buffer that is used again: they must go.
        log.exception("writing to %s", partition.id)
        partition.refuse_staged(StorageError(f"writing failed: {error!r}"))
        for write in staged:
            write.fail(StorageError("writing failed"))
        return []
    return staged


def finish_round(broker: Broker, round_: ProduceRound) -> None:
    """Write every partition once; then answer, or wait for the sync.

    In this order: nothing that could fail comes between the staging and the writing.
    """
    written = [
        (partition, _flush(partition, staged)) for partition, staged in round_.writes.items()
    ]
    for partition, writes in written:
        if partition.syncs:
            visible, waiters = partition.visible, broker.sync_waiters
            for write in writes:
                if write.acks == -1 and write.next_offset > visible:
                    waiters.add(partition, write.next_offset, write.synced)
                else:
                    write.written()
        else:
            for write in writes:
                write.written()
            broker.read_waiters.wake(partition)
        broker.committer.request(partition)
        if partition.failure is not None:
            broker.sync_waiters.release(partition)
    for request in round_.unwritten:
        request.finish()
