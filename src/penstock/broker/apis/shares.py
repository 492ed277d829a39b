"""Records out of a queue, and the consumers' answers back: ShareFetch and ShareAcknowledge.

A fetch first takes the answers that came with it, then gives out what is free. If nothing is, it
waits, and is woken by new records, by locks that end and by answers of others; nobody polls. It
is answered when the answers it brought are safe in the journal. Batches leave as they lie in the
log, with the ranges of offsets in them that are meant.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import UUID

from penstock.broker.apis.context import RequestContext
from penstock.broker.catalog import ApiError, Topic
from penstock.broker.shares.coordinator import Queue
from penstock.broker.shares.delivery import (
    Delivery,
    Wanted,
    deliver,
    end_of,
    readable_to,
    take,
)
from penstock.broker.shares.partition import DYING, RENEW, Acknowledgement, SharePartition
from penstock.broker.shares.sessions import FINAL_EPOCH, INITIAL_EPOCH, Place, ShareSession
from penstock.errors import LogError, StorageError
from penstock.log.partition import Partition
from penstock.log.txn_index import AbortedTransaction
from penstock.wire import decoder, parts_encoder, response_header
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.share_acknowledge import (
    AcknowledgementBatch as AcknowledgedBatch,
)
from penstock.wire.messages.share_acknowledge import (
    PartitionData as AcknowledgedPartition,
)
from penstock.wire.messages.share_acknowledge import (
    ShareAcknowledgeRequest,
    ShareAcknowledgeResponse,
    ShareAcknowledgeTopicResponse,
)
from penstock.wire.messages.share_fetch import (
    AcknowledgementBatch,
    AcquiredRecords,
    PartitionData,
    ShareFetchableTopicResponse,
    ShareFetchRequest,
    ShareFetchResponse,
)

if TYPE_CHECKING:
    from penstock.broker.server import Broker
    from penstock.broker.slot import Slot

log = logging.getLogger(__name__)

_FETCH: Final = 78
_RENEWALS_FROM_VERSION: Final = 2
_RECORD_LIMIT: Final = 1
_DEFAULT_RECORDS: Final = 500
_NO_RECORDS: Final = b""


# ---- answers -----------------------------------------------------------------------------------


def check_batches(
    batches: Sequence[AcknowledgementBatch | AcknowledgedBatch], *, renewals: bool
) -> list[Acknowledgement]:
    """The answers in a request; ApiError if they are none."""
    answers: list[Acknowledgement] = []
    reached = -1
    for batch in batches:
        first, last, kinds = batch.first_offset, batch.last_offset, batch.acknowledge_types
        if first > last or first < reached:
            raise ApiError(ErrorCode.INVALID_REQUEST, "answers must be in order, without overlap")
        if first == reached:
            raise ApiError(ErrorCode.INVALID_RECORD_STATE, f"{first} is answered for twice")
        if len(kinds) != 1 and len(kinds) != last - first + 1:
            raise ApiError(
                ErrorCode.INVALID_REQUEST, "there must be one answer, or one for each record"
            )
        if min(kinds) < 0 or max(kinds) > RENEW or (RENEW in kinds and not renewals):
            raise ApiError(ErrorCode.INVALID_REQUEST, "there is an unknown kind of answer")
        reached = last
        answers.append((first, last, kinds))
    return answers


def acknowledge(
    broker: Broker,
    session: ShareSession,
    place: Place,
    batches: Sequence[AcknowledgementBatch | AcknowledgedBatch],
    *,
    renewals: bool,
) -> tuple[ErrorCode, str | None]:
    """Take a member's answers for one partition; they are safe after the next round."""
    shares = broker.coordination.shares
    topic_id, number = place
    if topic_id not in broker.catalog.by_id:
        return ErrorCode.UNKNOWN_TOPIC_ID, "there is no topic with this id"
    queue = shares.queue(session.group, str(topic_id), number)
    if queue is None:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "nothing was delivered from this partition"
    renewals = renewals and shares.rules(session.group).renewable
    try:
        answers = check_batches(batches, renewals=renewals)
    except ApiError as error:
        return error.code, str(error)
    code = shares.acknowledge(queue, session.member, answers, broker.clock.elapsed_ms())
    return code, "these records are not in this member's hands" if code else None


def _names(request: ShareFetchRequest | ShareAcknowledgeRequest) -> tuple[str, str]:
    if not request.group_id or not request.member_id:
        raise ApiError(ErrorCode.INVALID_REQUEST, "the group's or the member's id is missing")
    return request.group_id, request.member_id


async def share_acknowledge(
    broker: Broker, request: ShareAcknowledgeRequest, context: RequestContext
) -> ShareAcknowledgeResponse:
    group, member = _names(request)
    epoch = request.share_session_epoch
    if epoch == INITIAL_EPOCH:
        raise ApiError(
            ErrorCode.INVALID_SHARE_SESSION_EPOCH, "a session does not begin with an answer"
        )
    queues = broker.queues
    session = queues.sessions.go_on(group, member, epoch)
    results: list[AcknowledgedPartition] = []
    topics: list[ShareAcknowledgeTopicResponse] = []
    for topic in request.topics:
        parts: list[AcknowledgedPartition] = []
        topics.append(ShareAcknowledgeTopicResponse(topic_id=topic.topic_id, partitions=parts))
        for item in topic.partitions:
            code, message = acknowledge(
                broker,
                session,
                (topic.topic_id, item.partition_index),
                item.acknowledgement_batches,
                renewals=request.is_renew_ack,
            )
            parts.append(
                AcknowledgedPartition(
                    partition_index=item.partition_index, error_code=code, error_message=message
                )
            )
        results += parts
    if epoch == FINAL_EPOCH:
        queues.end_session(session)
    if (await queues.rounds.durable()) is not None:
        for result in results:
            if not result.error_code:
                result.error_code = ErrorCode.KAFKA_STORAGE_ERROR
    return ShareAcknowledgeResponse(
        responses=topics,
        acquisition_lock_timeout_ms=broker.coordination.shares.rules(group).lock_ms,
    )


# ---- fetches -----------------------------------------------------------------------------------


def fetch(broker: Broker, frame: memoryview, at: int, context: RequestContext) -> None:
    """Find the session, take the answers, then give out records or wait for some."""
    request, _ = decoder(ShareFetchRequest, context.version)(frame, at)
    # Records staged by earlier requests of this read must be there before they are read.
    broker.finish_round()
    slot = context.connection.open_slot()
    try:
        PendingShareFetch(broker, context, request, slot).start()
    except ApiError as error:
        response = ShareFetchResponse(error_code=error.code, error_message=str(error))
        answer(slot, context, response)


def answer(slot: Slot, context: RequestContext, response: ShareFetchResponse) -> None:
    response.throttle_time_ms = context.throttle_ms
    parts = parts_encoder(ShareFetchResponse, context.version)(response)
    parts.insert(0, response_header(_FETCH, context.version, context.correlation_id))
    slot.answer(parts)


class PendingShareFetch:
    """One fetch, from its request to its answer."""

    def __init__(
        self, broker: Broker, context: RequestContext, request: ShareFetchRequest, slot: Slot
    ) -> None:
        self.broker = broker
        self.context = context
        self.request = request
        self.slot = slot
        group, member = _names(request)
        self.settings = broker.coordination.shares.settings(group)
        self.rules = broker.coordination.shares.rules(group)
        self.session = self._session_for(group, member)
        self.results: dict[Place, PartitionData] = {}
        # Whether the answer says something that must be safe first.
        self.acknowledges = False
        self.urgent = False
        self.watched: list[tuple[Partition, Queue]] = []
        self.timer: asyncio.TimerHandle | None = None
        self.done = False

    def _session_for(self, group: str, member: str) -> ShareSession:
        request, queues = self.request, self.broker.queues
        epoch = request.share_session_epoch
        answers = any(p.acknowledgement_batches for t in request.topics for p in t.partitions)
        if request.is_renew_ack and (
            request.max_wait_ms or request.min_bytes or request.max_bytes or request.max_records
        ):
            raise ApiError(ErrorCode.INVALID_REQUEST, "who renews locks fetches nothing")
        if epoch == INITIAL_EPOCH:
            if answers:
                raise ApiError(ErrorCode.INVALID_REQUEST, "a session does not begin with an answer")
            session = queues.begin_session(group, member, self.context.connection)
        else:
            session = queues.sessions.go_on(group, member, epoch)
        if epoch != FINAL_EPOCH:
            session.update(
                ((t.topic_id, p.partition_index) for t in request.topics for p in t.partitions),
                ((t.topic_id, n) for t in request.forgotten_topics_data for n in t.partitions),
            )
        return session

    def start(self) -> None:
        """Take the answers; then give out what is free, or wait."""
        self._acknowledge()
        if self.request.share_session_epoch == FINAL_EPOCH:
            self.broker.queues.end_session(self.session)
            self.acknowledges = True
            self.finish()
        elif self.request.is_renew_ack or self.collect() or self.request.max_wait_ms <= 0:
            self.finish()
        else:
            self._wait()

    def _acknowledge(self) -> None:
        for topic in self.request.topics:
            for item in topic.partitions:
                if not item.acknowledgement_batches:
                    continue
                place = (topic.topic_id, item.partition_index)
                result = self._result(place)
                result.acknowledge_error_code, result.acknowledge_error_message = acknowledge(
                    self.broker,
                    self.session,
                    place,
                    item.acknowledgement_batches,
                    renewals=self.request.is_renew_ack,
                )
                self.acknowledges = True
        if self.acknowledges:
            # Now, while it may wait for records.
            self.broker.queues.rounds.request()

    def _result(self, place: Place) -> PartitionData:
        result = self.results.get(place)
        if result is None:
            result = self.results[place] = PartitionData(
                partition_index=place[1], records=_NO_RECORDS
            )
        return result

    # ---- waiting -------------------------------------------------------------------------

    def _wait(self) -> None:
        for place in self.session.partitions:
            found = self._find(place)
            if isinstance(found, tuple):
                partition, queue = found
                self.broker.read_waiters.add(partition, self, self.wake)
                queue.waiting[self] = self.wake
                self.watched.append(found)
        self.context.connection.on_lost.add(self.forget)
        self.timer = self.broker.loop.call_later(self.request.max_wait_ms / 1000, self.finish)

    def wake(self) -> None:
        """Something has become free, perhaps."""
        if self.done:
            return
        # Whoever has no session any more would only keep records from others.
        if not self._has_session() or self.collect():
            self.finish()

    def _has_session(self) -> bool:
        session = self.session
        return self.broker.queues.sessions.find(session.group, session.member) is session

    def forget(self) -> None:
        self.done = True
        if self.timer is not None:
            self.timer.cancel()
        for partition, queue in self.watched:
            self.broker.read_waiters.discard(partition, self)
            queue.waiting.pop(self, None)
        self.watched = []
        self.context.connection.on_lost.discard(self.forget)

    # ---- giving out ----------------------------------------------------------------------

    def collect(self) -> bool:
        """Give out what is free; whether there is anything to answer now."""
        request = self.request
        records_left = request.max_records if request.max_records > 0 else _DEFAULT_RECORDS
        bytes_left = min(request.max_bytes, self.broker.config.limits.max_fetch_bytes)
        self.urgent = False
        for place in list(self.session.partitions):
            if records_left <= 0 or bytes_left <= 0:
                break
            found = self._find(place)
            if not isinstance(found, tuple):
                self._result(place).error_code = found
                self.urgent = True
                continue
            partition, queue = found
            wanted = Wanted(
                member=self.session.member,
                deadline_ms=self.broker.clock.elapsed_ms() + self.rules.lock_ms,
                max_records=records_left,
                max_bytes=bytes_left,
                strict=request.share_acquire_mode == _RECORD_LIMIT,
                read_committed=self.settings.read_committed,
                fair_share=self._fair_share(partition, queue),
            )
            delivery = self._deliver(place, partition, queue, wanted)
            if self.done:
                # It is answered with what is loaded from the archive; the others come next.
                break
            if delivery is not None:
                records_left -= delivery.count
                bytes_left -= len(delivery.records)
        return self.urgent

    def _fair_share(self, partition: Partition, queue: Queue) -> int | None:
        """How many records leave as much for each of the others that wait; None if nobody does.

        Many batches may become visible at once, by one sync.
        """
        waiting = len(queue.waiting)
        if waiting < 2 or self not in queue.waiting:
            return None
        limit = readable_to(partition, read_committed=self.settings.read_committed)
        return -(-queue.share.free(limit) // waiting)

    def _find(self, place: Place) -> tuple[Partition, Queue] | ErrorCode:
        """The partition and the group's queue in it; the error where there is none."""
        topic_id, number = place
        topic = self.broker.catalog.by_id.get(topic_id)
        if topic is None:
            return ErrorCode.UNKNOWN_TOPIC_ID
        partition = self.broker.partition(topic.name, number)
        if partition is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        queue = self.broker.coordination.shares.queue(self.session.group, str(topic_id), number)
        if queue is None:
            try:
                queue = self._open(topic, partition, number)
            except ApiError as error:
                return error.code
            except LogError as error:
                self.broker.warn_now_and_then(f"beginning to read {partition.id}", error)
                return ErrorCode.KAFKA_STORAGE_ERROR
        return partition, queue

    def _open(self, topic: Topic, partition: Partition, number: int) -> Queue:
        """Begin to read a partition, where the group's settings say."""
        settings = self.settings
        if settings.share_auto_offset_reset == "earliest":
            start = partition.log_start
        elif (back_ms := settings.reset_back_ms) is not None:
            at = partition.offset_for_time(self.broker.clock.now_ms() - back_ms)
            start = partition.visible if at is None else at.offset
        else:
            start = partition.visible
        queue = self.broker.coordination.shares.open(self.session.group, topic, number, start)
        self.broker.queues.rounds.request()
        return queue

    def _deliver(
        self, place: Place, partition: Partition, queue: Queue, wanted: Wanted
    ) -> Delivery | None:
        shares = self.broker.coordination.shares
        before = queue.share.start, queue.share.sizes[DYING]
        try:
            delivery = deliver(queue.share, partition, wanted, self.rules)
        except LogError as error:
            log.error("reading %s for group %s: %s", partition.id, queue.group, error)
            self._result(place).error_code = ErrorCode.KAFKA_STORAGE_ERROR
            self.urgent = True
            return None
        finally:
            shares.searched(queue, *before)
        if delivery is None:
            return None
        self.urgent = True
        if delivery.archived is not None:
            share = queue.share
            self.broker.spawn(self._load(place, partition, queue, share, wanted, delivery))
            self.forget()
            return None
        self._hand_over(place, queue, wanted, delivery)
        return delivery

    def _hand_over(self, place: Place, queue: Queue, wanted: Wanted, delivery: Delivery) -> None:
        result = self._result(place)
        result.records = cast("Any", delivery.records)
        result.acquired_records = [
            AcquiredRecords(first_offset=first, last_offset=last, delivery_count=count)
            for first, last, count in delivery.acquired
        ]
        self.session.served(place)
        self.broker.coordination.shares.locked(queue, wanted.deadline_ms)
        self.broker.coordination.arm()

    async def _load(
        self,
        place: Place,
        partition: Partition,
        queue: Queue,
        share: SharePartition,
        wanted: Wanted,
        found: Delivery,
    ) -> None:
        """Give out records that are in the archive."""
        assert found.archived is not None
        shares = self.broker.coordination.shares
        try:
            data = await self.broker.loop.run_in_executor(None, found.archived.load)
            aborted: list[AbortedTransaction] = []
            if wanted.read_committed:
                aborted = await self._aborted(partition, found.offset, end_of(data, found.offset))
        except Exception as error:
            # A store out of reach is for the reader to retry, whatever went wrong with it.
            self.broker.warn_now_and_then("reading from the archive", error)
            self._result(place).error_code = ErrorCode.KAFKA_STORAGE_ERROR
        else:
            # What was forgotten or moved meanwhile is not to be read from there.
            is_current = shares.queue(*queue.key) is queue and queue.share is share
            if is_current and self._has_session():
                before = share.start, share.sizes[DYING]
                wanted.deadline_ms = self.broker.clock.elapsed_ms() + self.rules.lock_ms
                delivery = take(share, data, found.offset, wanted, self.rules, aborted)
                shares.searched(queue, *before)
                if delivery.acquired:
                    self._hand_over(place, queue, wanted, delivery)
        finally:
            self._finish_now()

    async def _aborted(
        self, partition: Partition, start: int, end: int
    ) -> list[AbortedTransaction]:
        """The transactions that were aborted in a stretch of the archive."""
        # At one moment: a segment that leaves the local disk is in the archive before.
        local = partition.aborted_transactions(start, end)
        lookup = partial(partition.archived.aborted_transactions, start, end)
        return [*local, *await self.broker.loop.run_in_executor(None, lookup)]

    # ---- answering -----------------------------------------------------------------------

    def finish(self) -> None:
        """Answer with what there is."""
        if not self.done:
            self.forget()
            self._finish_now()

    def _finish_now(self) -> None:
        if self.acknowledges:
            self.broker.queues.rounds.durable().add_done_callback(self._safe)
        else:
            self._answer()

    def _safe(self, outcome: asyncio.Future[StorageError | None]) -> None:
        if outcome.result() is not None:
            for result in self.results.values():
                if not result.acknowledge_error_code:
                    result.acknowledge_error_code = ErrorCode.KAFKA_STORAGE_ERROR
        self._answer()

    def _answer(self) -> None:
        topics: dict[UUID, ShareFetchableTopicResponse] = {}
        for (topic_id, _), result in self.results.items():
            topic = topics.get(topic_id)
            if topic is None:
                topic = topics[topic_id] = ShareFetchableTopicResponse(topic_id=topic_id)
            topic.partitions.append(result)
        response = ShareFetchResponse(
            acquisition_lock_timeout_ms=self.rules.lock_ms, responses=list(topics.values())
        )
        if self.context.quota is not None:
            size = sum(len(result.records or ()) for result in self.results.values())
            self.context.throttle_ms = self.context.quota.consumed(size)
        answer(self.slot, self.context, response)
