"""Producing: raw record batches to partitions, several requests on their way at once.

Theory: each partition has a lane, in which its batches wait in order. Each leader has a connection
of its own with up to five requests on their way; a request takes one batch of each lane at most, as
Kafka demands, so that a broker, which remembers the last five batches of a producer, knows any of
them that comes twice. Answers come in order.

When a batch fails in a way that may pass, its lane waits until everything of it that is on its way
has been answered for, then sends it all again in the old order. What the broker has already is
acknowledged as a duplicate; what arrived before its predecessors was refused as out of sequence,
and now comes in its turn. So idempotent batches are written once each and in order, whatever
connections do. The first batch of a producer in a lane goes alone: a broker that does not know the
producer yet would take a later one as its first. Batches without a producer id are sent one at a
time for each lane: they keep their order, but may be there twice after a lost answer.

Invariant: a batch is in exactly one of its lane's `waiting`, `flying` and `failed`, or done. One
thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

from penstock.client.connection import Address, Cluster, Connection, Pending, show_address
from penstock.client.errors import (
    ClientError,
    LostRecordsError,
    RefusedError,
    UnreachableError,
    refused,
)
from penstock.client.fetching import readable
from penstock.client.metadata import Metadata, Place
from penstock.client.retrying import UNKNOWN_TOPIC_S, gave_up, pause_after
from penstock.records.batch import NO_PRODUCER_ID, read_header
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)

MAX_IN_FLIGHT: Final = 5
# What may be held here, sent or not, before `send` waits.
MAX_BYTES: Final = 16 << 20
MAX_REQUEST_BYTES: Final = 4 << 20
TIMEOUT_S: Final = 120.0
REQUEST_TIMEOUT_S: Final = 30.0
# The newest version in which a partition must be part of the transaction already: from the next
# on a write adds it, and so a late one might begin a transaction where its epoch is still good.
_ADDED_VERSION: Final = 11
# The newest version with topic names.
_NEWEST_VERSION: Final = 12
_SLACK_S: Final = 5.0
_FEW_LANES: Final = 8
_LOOK_BYTES: Final = 256 << 10
# The longest wait before everything is looked at again.
_STEP_S: Final = 0.5
_UNKNOWN: Final = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
_WRITTEN: Final = frozenset((ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER))


@dataclass(slots=True, eq=False)
class _Batch:
    data: bytes | memoryview
    # The order within its lane.
    number: int
    count: int
    # Producer id and epoch; None: it is not idempotent.
    ids: tuple[int, int] | None


@dataclass(slots=True, eq=False)
class _Lane:
    """The batches of one partition, in order."""

    place: Place
    waiting: deque[_Batch] = field(default_factory=deque)
    flying: list[_Batch] = field(default_factory=list)
    failed: list[_Batch] = field(default_factory=list)
    sent: int = 0
    # The producer that the broker knows here, because it has acknowledged a batch of it.
    known: tuple[int, int] | None = None
    # Since when, how often and why it is in trouble, and when it is worth another try.
    since: float | None = None
    attempts: int = 0
    again_at: float = 0.0
    reason: ClientError | None = None

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.flying or self.failed)

    def may_send(self, now: float) -> bool:
        if not self.waiting or self.failed or self.again_at > now:
            return False
        ids = self.waiting[0].ids
        # Of a producer that is new to it, a broker takes any batch as the first.
        return not self.flying or (ids is not None and ids == self.known)


@dataclass(slots=True, eq=False)
class _Flight:
    """A request on its way."""

    pending: Pending
    batches: list[tuple[_Lane, _Batch]]
    due: float


@dataclass(slots=True, eq=False)
class _Link:
    connection: Connection
    flights: deque[_Flight] = field(default_factory=deque)


class Sender:
    """Sends batches that are packed already; a context manager, which flushes at its end.

    With a `transactional_id` the batches belong to the transaction of that id, and their partitions
    must have been added to it (`transacting`), unless `adds_partitions` says that writes add them.

    After an error nothing more can be sent: whoever uses it decides what to do about the batches
    that were not acknowledged.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        transactional_id: str | None = None,
        acks: int = -1,
        max_in_flight: int = MAX_IN_FLIGHT,
        max_bytes: int = MAX_BYTES,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        timeout_s: float = TIMEOUT_S,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        metadata: Metadata | None = None,
    ) -> None:
        if acks not in {-1, 1}:
            raise ClientError(f"acks={acks}: a batch must be acknowledged, by all (-1) or one (1)")
        if not 1 <= max_in_flight <= MAX_IN_FLIGHT:
            raise ClientError(f"max_in_flight={max_in_flight} is not from 1 to {MAX_IN_FLIGHT}")
        self._cluster = cluster
        self._transactional_id = transactional_id
        self._acks = acks
        self._max_in_flight = max_in_flight
        self._max_bytes = max_bytes
        self._max_request_bytes = max_request_bytes
        self._timeout_s = timeout_s
        self._request_timeout_s = request_timeout_s
        self._metadata = metadata or Metadata(cluster, timeout_s=timeout_s)
        self._lanes: dict[Place, _Lane] = {}
        # Lanes with something to do.
        self._busy: dict[Place, _Lane] = {}
        self._links: dict[Address, _Link] = {}
        self._held_bytes = 0
        self._unseen_bytes = 0
        self._failure: ClientError | None = None
        # May change while nothing is on its way.
        self.adds_partitions = False
        # Where the next record goes, after the last acknowledged batch of a partition.
        self.ends: dict[Place, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Drop what has not been acknowledged."""
        for link in self._links.values():
            link.connection.close()
        self._links.clear()
        self._lanes.clear()
        self._busy.clear()
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """What has been given and is not acknowledged."""
        return self._held_bytes

    # ---- sending -------------------------------------------------------------------------

    def send(
        self, topic: str, partition: int, data: bytes | memoryview, *, hold: bool = False
    ) -> None:
        """Send one batch; waits while too much is on its way.

        Errors may be those of earlier batches. What was given must not change until `flush`. With
        `hold` it may wait for the next one or for `flush`, to share a request with others.
        """
        self._raise_failure()
        place = (topic, partition)
        lane = self._lanes.get(place)
        if lane is None:
            lane = self._lanes[place] = _Lane(place)
        header = read_header(data)
        ids = (header.producer_id, header.producer_epoch)
        named = ids if header.producer_id != NO_PRODUCER_ID else None
        lane.waiting.append(_Batch(data, lane.sent, header.record_count, named))
        lane.sent += 1
        self._busy[place] = lane
        self._held_bytes += len(data)
        self._unseen_bytes += len(data)
        # With many lanes not at each batch: each look at them takes time, and a later one finds
        # more to put into a request.
        few = len(self._busy) <= _FEW_LANES and not hold
        if few or self._unseen_bytes >= _LOOK_BYTES:
            self._unseen_bytes = 0
            self._step(0.0)
        while self._held_bytes > self._max_bytes and self._busy:
            self._step(_STEP_S)

    def flush(self) -> None:
        """Wait until everything that was given is acknowledged."""
        self._raise_failure()
        while self._busy:
            self._step(_STEP_S)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _step(self, wait_s: float) -> None:
        """Send what can be sent, and take what has been answered."""
        try:
            self._launch()
            self._gather(wait_s)
            self._launch()
        except BaseException as error:
            self._failure = (
                error
                if isinstance(error, ClientError)
                else ClientError(f"sending was interrupted: {error!r}")
            )
            self.close()
            raise

    # ---- requests ------------------------------------------------------------------------

    def _launch(self) -> None:
        """Fill the connections with requests."""
        now = time.monotonic()
        by_leader: dict[Address, list[_Lane]] = {}
        for lane in list(self._busy.values()):
            if not lane.may_send(now):
                continue
            try:
                address = self._metadata.leader_now(*lane.place)
            except ClientError as error:
                self._trouble((lane,), error)
            else:
                by_leader.setdefault(address, []).append(lane)
        for address, lanes in by_leader.items():
            link = self._link(address, lanes)
            while link is not None and len(link.flights) < self._max_in_flight:
                if not self._fly(address, link, lanes):
                    break

    def _link(self, address: Address, lanes: list[_Lane]) -> _Link | None:
        link = self._links.get(address)
        if link is not None and not link.flights and not link.connection.is_open:
            self._links.pop(address).connection.close()
            link = None
        if link is None:
            try:
                connection = self._cluster.connect(address)
            except ClientError as error:
                self._trouble(lanes, error)
                return None
            connection.set_timeout(self._request_timeout_s)
            link = self._links[address] = _Link(connection)
        return link

    def _fly(self, address: Address, link: _Link, lanes: list[_Lane]) -> bool:
        """Send one request with a batch of each lane that has one; False if none has."""
        now = time.monotonic()
        batches: list[tuple[_Lane, _Batch]] = []
        size = 0
        for lane in lanes:
            if not lane.may_send(now):
                continue
            next_size = size + len(lane.waiting[0].data)
            if batches and next_size > self._max_request_bytes:
                continue
            size = next_size
            batch = lane.waiting.popleft()
            lane.flying.append(batch)
            batches.append((lane, batch))
        if not batches:
            return False
        due = now + self._request_timeout_s + _SLACK_S
        try:
            newest = _NEWEST_VERSION if self.adds_partitions else _ADDED_VERSION
            pending = link.connection.submit(self._request(batches), at_most=newest)
        except ClientError as error:
            link.flights.append(_Flight(Pending(0, 0, 0), batches, due))
            self._lose(address, error)
            return False
        link.flights.append(_Flight(pending, batches, due))
        return True

    def _request(self, batches: list[tuple[_Lane, _Batch]]) -> ProduceRequest:
        topics: dict[str, list[PartitionProduceData]] = {}
        for lane, batch in batches:
            topic, number = lane.place
            item = PartitionProduceData(index=number, records=batch.data)
            topics.setdefault(topic, []).append(item)
        return ProduceRequest(
            transactional_id=self._transactional_id,
            acks=self._acks,
            timeout_ms=int(self._request_timeout_s * 1000),
            topic_data=[
                TopicProduceData(name=name, partition_data=items) for name, items in topics.items()
            ],
        )

    # ---- answers -------------------------------------------------------------------------

    def _gather(self, wait_s: float) -> None:
        """Take the answers that are there; wait a while for the first."""
        waiting = {
            link.connection.fileno(): address
            for address, link in self._links.items()
            if link.flights
        }
        now = time.monotonic()
        if not waiting:
            times = [lane.again_at for lane in self._busy.values()]
            if wait_s and times:
                time.sleep(max(0.0, min(min(times) - now, wait_s)))
            return
        buffered = [
            descriptor
            for descriptor, address in waiting.items()
            if self._links[address].connection.is_buffered()
        ]
        ready = buffered or readable(waiting, wait_s)
        for descriptor in ready:
            self._take(waiting[descriptor])
        for address in list(self._links):
            link = self._links[address]
            if link.flights and link.flights[0].due < now:
                where = show_address(address)
                self._lose(address, UnreachableError(f"{where} does not answer a Produce"))

    def _take(self, address: Address) -> None:
        link = self._links[address]
        flight = link.flights[0]
        try:
            told = link.connection.receive(flight.pending)
        except ClientError as error:
            self._lose(address, error)
            return
        link.flights.popleft()
        answers = {
            (topic.name, part.index): part
            for topic in told.responses
            for part in topic.partition_responses
        }
        for lane, batch in flight.batches:
            self._settle(lane, batch, answers.get(lane.place))

    def _settle(self, lane: _Lane, batch: _Batch, part: Any) -> None:
        """What the broker says of one batch."""
        topic, number = lane.place
        doing = f"writing to {topic}-{number}"
        if part is None:
            raise ClientError(f"{doing}: the broker's answer does not mention it")
        if part.error_code in _WRITTEN:
            lane.flying.remove(batch)
            lane.known = batch.ids
            self._held_bytes -= len(batch.data)
            lane.since, lane.attempts, lane.again_at = None, 0, 0.0
            if part.base_offset >= 0:
                self.ends[lane.place] = part.base_offset + batch.count
            self._regroup(lane)
            return
        error = refused(doing, part.error_code, part.error_message)
        if part.error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
            first = min(other.number for other in (*lane.failed, *lane.flying))
            if first == batch.number:
                # All before it were acknowledged.
                raise LostRecordsError(f"{doing}: the broker does not know the records before")
        elif part.error_code == ErrorCode.UNKNOWN_PRODUCER_ID:
            raise LostRecordsError(f"{doing}: the broker does not know the producer any more")
        elif not error.retriable:
            raise error
        lane.flying.remove(batch)
        lane.failed.append(batch)
        if error.retriable:
            self._trouble((lane,), error)
        self._regroup(lane)

    def _regroup(self, lane: _Lane) -> None:
        """Once nothing is on its way any more, what failed is the next to be sent, in order."""
        if lane.failed and not lane.flying:
            lane.failed.sort(key=lambda batch: batch.number, reverse=True)
            lane.waiting.extendleft(lane.failed)
            lane.failed.clear()
        if lane.is_idle:
            self._busy.pop(lane.place, None)

    # ---- trouble -------------------------------------------------------------------------

    def _lose(self, address: Address, error: ClientError) -> None:
        """A connection is gone: nobody knows what became of what was on its way."""
        link = self._links.pop(address)
        link.connection.close()
        lanes: dict[Place, _Lane] = {}
        for flight in link.flights:
            for lane, batch in flight.batches:
                lane.flying.remove(batch)
                lane.failed.append(batch)
                lanes[lane.place] = lane
        self._trouble(lanes.values(), error)
        for lane in lanes.values():
            self._regroup(lane)

    def _trouble(self, lanes: Collection[_Lane], error: ClientError) -> None:
        """These are to be tried again later; raise if it has been so for too long."""
        now = time.monotonic()
        self._metadata.forget({lane.place[0] for lane in lanes})
        for lane in lanes:
            if not error.retriable:
                raise error
            lane.since = now if lane.since is None else lane.since
            unknown = isinstance(error, RefusedError) and error.code == _UNKNOWN
            limit_s = min(self._timeout_s, UNKNOWN_TOPIC_S) if unknown else self._timeout_s
            if now - lane.since > limit_s:
                if unknown:
                    # Not there, and it will not appear by itself.
                    raise error
                topic, number = lane.place
                doing = f"writing to {topic}-{number}"
                raise gave_up(doing, now - lane.since, error) from error
            lane.reason = error
            lane.again_at = now + pause_after(lane.attempts)
            lane.attempts += 1
