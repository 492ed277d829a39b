"""Fetch: record batches out of the log, waiting for them where there are none.

A fetch that finds less than it asked for waits, for as long as it allows, and is woken by the
partitions it reads from; nobody polls. The answer holds *slices* of the log's files, which the
connection sends from there. What lies in the archive is loaded on another thread.

A reader of committed records stops at the last stable offset, and is told which transactions among
what it gets were aborted: it passes over their records itself.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import UUID

from penstock.broker.apis.context import RequestContext
from penstock.broker.fetch_sessions import FetchedPartition, Session, SessionError
from penstock.errors import LogError, OffsetOutOfRangeError
from penstock.log.archive import ArchivedRead
from penstock.log.partition import Partition
from penstock.log.slice import Slice
from penstock.log.txn_index import AbortedTransaction
from penstock.records.batch import headers
from penstock.wire import decoder, parts_encoder, response_header
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.fetch import AbortedTransaction as AbortedInAnswer
from penstock.wire.messages.fetch import (
    FetchableTopicResponse,
    FetchRequest,
    FetchResponse,
    PartitionData,
)
from penstock.wire.zero import ZERO_UUID

if TYPE_CHECKING:
    from penstock.broker.server import Broker
    from penstock.broker.slot import Slot

log = logging.getLogger(__name__)

READ_COMMITTED: Final = 1
_NO_RECORDS: Final = b""


class PendingFetch:
    """One fetch, from its request to its answer."""

    def __init__(
        self, broker: Broker, context: RequestContext, request: FetchRequest, session: Session
    ) -> None:
        self.broker = broker
        self.context = context
        self.slot: Slot = context.connection.open_slot()
        self.request = request
        self.session = session
        self.committed = request.isolation_level == READ_COMMITTED
        self.min_bytes = min(request.min_bytes, request.max_bytes)
        # Whether there is no reason to wait, however little was found.
        self.urgent = False
        self.watched: list[Partition] = []
        self.timer: asyncio.TimerHandle | None = None
        self.done = False

    def start(self) -> None:
        """Answer now, or wait for records."""
        results, size, urgent = self.collect()
        # Who names no partition waits for none: a consumer that closes ends its session so.
        waits = self.request.max_wait_ms > 0 and self.session.partitions
        if urgent or size >= self.min_bytes or not waits:
            self.finish(results)
            return
        for item in self.session.partitions.values():
            partition = self.broker.partition(item.topic, item.number)
            if partition is not None:
                self.broker.read_waiters.add(partition, self, self.wake)
                self.watched.append(partition)
        self.context.connection.on_lost.add(self.forget)
        delay_s = self.request.max_wait_ms / 1000
        self.timer = self.broker.loop.call_later(delay_s, self.expire)

    def wake(self) -> None:
        """A partition has something new: answer if it is enough."""
        results, size, urgent = self.collect()
        if urgent or size >= self.min_bytes:
            self.finish(results)

    def expire(self) -> None:
        """The wait is over: answer with what there is."""
        self.finish(self.collect()[0])

    def forget(self) -> None:
        self.done = True
        if self.timer is not None:
            self.timer.cancel()
        for partition in self.watched:
            self.broker.read_waiters.discard(partition, self)
        self.watched = []
        self.context.connection.on_lost.discard(self.forget)

    # ---- reading -------------------------------------------------------------------------

    def collect(self) -> tuple[list[tuple[FetchedPartition, PartitionData]], int, bool]:
        """What can be read now: results, their bytes, and whether to answer at once."""
        budget = min(self.request.max_bytes, self.broker.config.limits.max_fetch_bytes)
        results: list[tuple[FetchedPartition, PartitionData]] = []
        size, self.urgent = 0, False
        for item in self.session.partitions.values():
            data = self._read(item, budget - size, first=size == 0)
            results.append((item, data))
            records: Any = data.records
            if isinstance(records, ArchivedRead):
                self.urgent = True
                size += item.max_bytes
            elif records is not None:
                size += len(records)
            if data.error_code:
                self.urgent = True
                self.broker.traffic.errors[1, data.error_code] += 1
        return results, size, self.urgent

    def _read(self, item: FetchedPartition, budget: int, *, first: bool) -> PartitionData:
        partition = self.broker.partition(item.topic, item.number)
        data = PartitionData(
            partition_index=item.number,
            high_watermark=-1,
            last_stable_offset=-1,
            log_start_offset=-1,
            aborted_transactions=None,
            records=_NO_RECORDS,
        )
        if item.topic_id != ZERO_UUID and item.topic_id not in self.broker.catalog.by_id:
            # Deleted, and perhaps created anew under the same name: not what was asked for.
            data.error_code = ErrorCode.UNKNOWN_TOPIC_ID
            return data
        if partition is None:
            data.error_code = item.unknown_code
            return data
        data.error_code = check_epoch(partition, item.leader_epoch)
        if data.error_code:
            return data
        data.high_watermark = limit = partition.visible
        data.last_stable_offset = partition.stable
        data.log_start_offset = partition.log_start
        if self.committed:
            limit = data.last_stable_offset
            data.aborted_transactions = []
        allowed = min(item.max_bytes, budget)
        if allowed <= 0 and not first:
            self.urgent = self.urgent or item.offset < limit
            return data
        try:
            found = partition.read(item.offset, max(allowed, 0), whole_first=first, limit=limit)
            if self.committed and isinstance(found, Slice):
                end = partition.end_of(item.offset, found, limit)
                data.aborted_transactions = told(partition.aborted(item.offset, end))
        except OffsetOutOfRangeError:
            data.error_code = ErrorCode.OFFSET_OUT_OF_RANGE
            data.high_watermark = data.last_stable_offset = data.log_start_offset = -1
            data.aborted_transactions = None
            return data
        except LogError as error:
            log.error("reading %s at %d: %s", partition.id, item.offset, error)
            data.error_code = ErrorCode.KAFKA_STORAGE_ERROR
            return data
        # More than fits is there, so nothing is gained by waiting.
        if found is not None:
            data.records = cast("Any", found)
            more = isinstance(found, Slice) and not partition.is_last(found, limit)
            self.urgent = self.urgent or more
        elif not first and item.offset < limit:
            self.urgent = True
        return data

    # ---- answering -----------------------------------------------------------------------

    def finish(self, results: list[tuple[FetchedPartition, PartitionData]]) -> None:
        if self.done:
            return
        self.forget()
        if any(isinstance(data.records, ArchivedRead) for _, data in results):
            self.broker.spawn(self._finish_from_archive(results))
        else:
            self._answer(results)

    async def _finish_from_archive(
        self, results: list[tuple[FetchedPartition, PartitionData]]
    ) -> None:
        # One at a time and connection, so that they are not all in memory together.
        await self.context.connection.turn_of(self.slot)
        for item, data in results:
            archived: Any = data.records
            if not isinstance(archived, ArchivedRead) or self.context.connection.closed:
                continue
            try:
                records = await self.broker.loop.run_in_executor(None, archived.load)
                if self.committed:
                    data.aborted_transactions = await self._aborted(item, archived, records)
                data.records = records
            except Exception as error:
                # A store out of reach is for the reader to retry, whatever went wrong with it.
                self.broker.warn_now_and_then("reading from the archive", error)
                data.records = _NO_RECORDS
                data.error_code = ErrorCode.KAFKA_STORAGE_ERROR
        self._answer(results)

    async def _aborted(
        self, item: FetchedPartition, archived: ArchivedRead, records: bytes
    ) -> list[AbortedInAnswer]:
        """The aborted transactions among what came from the archive."""
        end = max((header.next_offset for _, header in headers(records)), default=item.offset)
        partition = self.broker.partition(item.topic, item.number)
        # At one moment: a segment that leaves the local disk is in the archive before.
        log_, local = archived.log, list[AbortedTransaction]()
        if partition is not None:
            log_ = partition.archived
            local = partition.aborted_transactions(item.offset, end)
        lookup = partial(log_.aborted_transactions, item.offset, end)
        away = await self.broker.loop.run_in_executor(None, lookup)
        # Some segments are in both places.
        found = {entry.last_offset: entry for entry in (*away, *local)}
        return told([(entry.producer_id, entry.first_offset) for entry in found.values()])

    def _answer(self, results: list[tuple[FetchedPartition, PartitionData]]) -> None:
        topics: dict[tuple[str, UUID], FetchableTopicResponse] = {}
        for item, data in results:
            if not self.session.must_tell(item, data):
                continue
            topic = topics.get((item.topic, item.topic_id))
            if topic is None:
                topic = topics[item.topic, item.topic_id] = FetchableTopicResponse(
                    topic=item.topic, topic_id=item.topic_id
                )
            topic.partitions.append(data)
        response = FetchResponse(session_id=self.session.id, responses=list(topics.values()))
        response.throttle_time_ms = self.context.throttle_ms
        if self.context.quota is not None:
            size = sum(len(data.records or ()) for _, data in results)
            response.throttle_time_ms = self.context.quota.consumed(size)
        answer(self.slot, self.context, response)


def told(aborted: list[tuple[int, int]]) -> list[AbortedInAnswer]:
    return [AbortedInAnswer(producer_id=id_, first_offset=first) for id_, first in aborted]


def answer(slot: Slot, context: RequestContext, response: FetchResponse) -> None:
    version = context.version
    parts = parts_encoder(FetchResponse, version)(response)
    parts.insert(0, response_header(1, version, context.correlation_id))
    slot.answer(cast("list[bytes | memoryview | Slice]", parts))


def check_epoch(partition: Partition, client_epoch: int) -> ErrorCode:
    """What a client's knowledge of the leader's epoch deserves."""
    if client_epoch < 0 or client_epoch == partition.leader_epoch:
        return ErrorCode.NONE
    if client_epoch < partition.leader_epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    return ErrorCode.UNKNOWN_LEADER_EPOCH


def handle(broker: Broker, frame: memoryview, at: int, context: RequestContext) -> None:
    """Find the fetch's session and partitions, then read or wait."""
    request, _ = decoder(FetchRequest, context.version)(frame, at)
    try:
        session = broker.fetch_sessions.session_for(request, context.version, broker.catalog)
    except SessionError as error:
        slot = context.connection.open_slot()
        answer(slot, context, FetchResponse(error_code=error.code, session_id=0))
        return
    if context.quota is not None:
        request.max_bytes = min(request.max_bytes, context.quota.most_bytes)
    # Records staged by earlier requests of this read must be there before they are read.
    broker.finish_round()
    PendingFetch(broker, context, request, session).start()
