"""What happens when a topic's bound is reached and a named group still needs its records.

A topic whose `overflow` is `block` or `reject` is *guarded*: each of its partitions has a `Guard`,
which knows the first offset that the slowest of the topic's groups needs. Retention removes
nothing from there on (`Partition.keep_from`). While a partition is *full* it takes no records from
producers; what the broker writes itself (transaction markers, dead letters) is never refused.

    full     its bytes have reached `retention.bytes`, or the oldest record that is still needed
             is older than `retention.ms`
    reject   the producer is answered KAFKA_STORAGE_ERROR, which all clients retry
    block    the request is *held*: it stays in its connection's receive buffer, and nothing more
             is read from that connection, until there is room. So it takes no memory, and the
             client feels it as a slow network. A client must not wait for ever, so after a while
             it is answered as with `reject`, and told to slow down. Without acks nobody waits
             for an answer, and the request is held for as long as it takes

Room is made as soon as a group has moved on: the journal tells of every committed offset; once it
is durable, `keep_from` follows and segments that nobody needs go, without waiting for the next
round of housekeeping. A producer that comes in between is held for that moment in either mode.

Offsets that hold no record for a consumer (transaction markers, aborted records, gaps) are not
needed by anyone: a group never commits past them while nothing follows, and would wait for a
producer that waits for it.

Topics that are not guarded cost nothing: their partitions have no guard, and only guarded ones are
asked (`Partition.asks`) when a produce request takes the short way (`produce_single`). There, every
request is checked against the bytes written and staged, so a bound is exceeded by one request at
most. A request that finds a partition full goes the long way, where it may wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final
from uuid import UUID

from penstock.broker.journal import Key
from penstock.errors import StorageError
from penstock.log import retention
from penstock.log.partition import Partition
from penstock.log.segment import Segment
from penstock.records.batch import BatchHeader

if TYPE_CHECKING:
    from penstock.broker.apis.context import RequestContext
    from penstock.broker.connection import Connection
    from penstock.broker.server import Broker
    from penstock.wire.messages.produce import ProduceRequest

log = logging.getLogger(__name__)

BLOCK: Final = "block"
# Batches without records for a consumer that are looked through at a time.
MAX_SKIPPED_BATCHES: Final = 10_000
_PAUSE_AFTER_FAILURE_S: Final = 1.0
# Of one partition: a topic at the speed of its reader is full and has room by turns.
_TELL_FULL_PAUSE_S: Final = 60.0
# Of a journal key that says how far a group is: kind, group, topic or its id, partition.
_PLACE_WORDS: Final = 4
_NO_TIME: Final = -1


class RequestHeldError(Exception):
    """Not a failure: the request stays where it is and is handled again later."""


# ---- one partition ---------------------------------------------------------------------------


def first_record(partition: Partition, offset: int) -> tuple[int, int]:
    """The first offset from `offset` on that holds a record for a consumer, and its time in ms.

    The end of the log if there is none. The time is -1 where it is not known.
    """
    at = max(offset, partition.log_start)
    if at >= partition.log_end:
        return partition.log_end, _NO_TIME
    for archived in partition.archived.segments:
        if at < archived.end_offset and at < partition.segments[0].base_offset:
            # Not looked into: it is not here.
            return at, archived.max_timestamp_ms
    skipped = 0
    for segment, end in _segments_from(partition, at):
        found = segment.find(at)
        if found is None:
            at = max(at, end)
            continue
        for _, header in segment.scan(found[0]):
            if not _is_void(partition, header):
                return max(at, header.base_offset), header.max_timestamp
            at = header.next_offset
            skipped += 1
            if skipped >= MAX_SKIPPED_BATCHES:
                return at, _NO_TIME
        at = max(at, end)
    return partition.log_end, _NO_TIME


async def _first_needed(partition: Partition, offset: int) -> int:
    """`first_record` however far it is, with the loop given back in between."""
    while (found := first_record(partition, offset)[0]) > offset:
        offset = found
        await asyncio.sleep(0)
    return offset


def _segments_from(partition: Partition, offset: int) -> Iterable[tuple[Segment, int]]:
    ends = [*(segment.base_offset for segment in partition.segments[1:]), partition.log_end]
    return [(s, end) for s, end in zip(partition.segments, ends, strict=True) if end > offset]


def _is_void(partition: Partition, header: BatchHeader) -> bool:
    """Whether consumers are given nothing of a batch."""
    if header.is_control:
        return True
    return header.is_transactional and any(
        producer_id == header.producer_id and first_offset <= header.base_offset
        for producer_id, first_offset in partition.aborted(header.base_offset, header.next_offset)
    )


@dataclass(slots=True, eq=False)
class Guard:
    """One partition of a guarded topic: what is still needed of it, and who waits for room."""

    partition: Partition
    # The slowest group, and the first offset that it needs.
    slowest: str = ""
    needed: int = 0
    # Those who wait, the longest first.
    waiting: dict[Hold, None] = field(default_factory=dict)
    # Something has changed that may make room, and it is being looked into.
    dirty: bool = False
    settling: bool = False
    # The end of the log when it was last looked into.
    seen_end: int = -1
    # Whether the log says that it is full, and when it may say so again.
    told_full: bool = False
    tell_again_at: float = 0.0
    _oldest: tuple[int, int] = (-1, _NO_TIME)
    _measured: tuple[object, object, int] = (None, None, 0)

    def full(self, now_ms: int) -> str | None:
        """Why the partition takes nothing now; None if it does."""
        partition, config = self.partition, self.partition.config
        if 0 <= config.retention_bytes <= self.size_bytes:
            bound = f"it holds {self.size_bytes} bytes, retention.bytes={config.retention_bytes}"
        elif config.retention_ms >= 0 and self._is_late(now_ms - config.retention_ms):
            bound = f"what it needs is older than retention.ms={config.retention_ms}"
        else:
            return None
        return (
            f"{partition.id} is full: group {self.slowest!r} needs it from offset {self.needed} "
            f"on, of {partition.log_end}, and {bound}"
        )

    @property
    def size_bytes(self) -> int:
        """What counts for the bound, with what is about to be written."""
        partition = self.partition
        segments, archived, others = self._measured
        if segments is not partition.segments or archived is not partition.archived:
            others = retention.total_bytes(partition) - partition.active.size
            self._measured = (partition.segments, partition.archived, others)
        return others + partition.active.size + partition.staged_bytes

    def _is_late(self, limit_ms: int) -> bool:
        """Whether the oldest record that is needed is from before then."""
        partition = self.partition
        start = max(self.needed, partition.log_start)
        if start >= partition.log_end:
            return False
        segment = partition.segment_for(start)
        if segment.first_timestamp_ms >= limit_ms and start >= segment.base_offset:
            return False
        offset, time_ms = self._oldest
        if offset != start or time_ms == _NO_TIME:
            # What was passed over is not looked at again.
            self.needed, time_ms = self._oldest = first_record(partition, start)
        return 0 <= time_ms < limit_ms

    @property
    def unsettled(self) -> bool:
        """Whether room may be made at any moment."""
        return self.dirty or self.settling or self._awaits_sync

    @property
    def _awaits_sync(self) -> bool:
        """Whether the oldest segment is read by all, and goes as soon as it is synced."""
        partition = self.partition
        if not partition.needs_sync and not partition.sync_running:
            return False
        segments = partition.segments
        end = segments[1].base_offset if len(segments) > 1 else partition.log_end
        return end <= self.needed


# ---- held requests ---------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Hold:
    """A connection whose next request waits for room."""

    connection: Connection
    # Whether an answer is awaited, and must come in time.
    answered: bool
    timer: asyncio.TimerHandle | None = None
    guards: list[Guard] = field(default_factory=list)
    # Whether the connection is suspended for it now.
    waiting: bool = False
    # It has waited long enough: what lies in the buffer is answered now.
    expired: bool = False
    on_lost: Callable[[], None] = lambda: None


class Overload:
    """The guards of one broker, and the requests that they hold."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.guards: dict[Partition, Guard] = {}
        self._by_place: dict[tuple[str, int], Guard] = {}
        self._holds: dict[Connection, Hold] = {}
        self.requests_held = 0
        self.requests_refused = 0
        self._stopped = False

    # ---- which partitions ------------------------------------------------------------------

    def follow(self, partition: Partition) -> None:
        """A partition is there, or its settings have changed."""
        guard = self.guards.get(partition)
        if partition.config.guarded and not partition.gone:
            if guard is None:
                guard = self.guards[partition] = Guard(partition)
                guard.slowest = partition.config.overflow_groups[0]
                self._by_place[partition.id.topic, partition.id.number] = guard
                partition.admits = partial(self._has_room, guard)
            partition.asks = True
            self.look(partition)
            # A bound may have been raised: who waits asks again.
            self._release(guard)
        elif guard is not None:
            self._drop(guard)

    def leave(self, partition: Partition) -> None:
        """The partition is gone."""
        partition.asks, partition.admits = True, bool
        guard = self.guards.get(partition)
        if guard is not None:
            self._drop(guard)

    def _drop(self, guard: Guard) -> None:
        partition = guard.partition
        partition.asks, partition.admits = partition.gone, bool
        del self.guards[partition]
        place = (partition.id.topic, partition.id.number)
        if self._by_place.get(place) is guard:
            del self._by_place[place]
        self._release(guard)
        if not self.guards:
            for hold in list(self._holds.values()):
                self._end(hold)

    # ---- admission -------------------------------------------------------------------------

    def _has_room(self, guard: Guard) -> bool:
        return guard.full(self._broker.now_ms) is None

    def admit(self, request: ProduceRequest, context: RequestContext) -> dict[Partition, str]:
        """The partitions that take nothing of a request, and why not.

        RequestHeldError: the request waits; nothing of it may have been done yet.
        """
        full: dict[Partition, str] = {}
        wait_for: list[Guard] = []
        for guard in self._guards_of(request):
            reason = guard.full(self._broker.now_ms)
            if reason is None or guard.partition.failure is not None:
                continue
            full[guard.partition] = reason
            if guard.seen_end != guard.partition.log_end:
                self.look(guard.partition)
            if guard.unsettled or guard.partition.config.overflow == BLOCK:
                wait_for.append(guard)
        connection = context.connection
        hold = self._holds.get(connection)
        if not wait_for:
            if hold is not None:
                self._end(hold)
        elif hold is not None and hold.expired and request.acks:
            # Answered by itself, so that the client slows down.
            context.throttle_ms = max(context.throttle_ms, self._broker.config.limits.max_hold_ms)
            self._broker.loop.call_soon(self._end, hold)
        else:
            if hold is not None and hold.expired:
                self._end(hold)
                hold = None
            self._hold(hold or self._new_hold(connection, answered=bool(request.acks)), wait_for)
            raise RequestHeldError
        self.requests_refused += bool(full)
        for partition, reason in full.items():
            self._tell_full(self.guards[partition], reason)
        return full

    def _tell_full(self, guard: Guard, reason: str) -> None:
        """A producer was refused, or has waited for long: the operator may want to know."""
        now = self._broker.loop.time()
        if not guard.told_full and now >= guard.tell_again_at:
            guard.told_full, guard.tell_again_at = True, now + _TELL_FULL_PAUSE_S
            held = guard.partition.config.overflow == BLOCK
            log.warning("%s; producers %s", reason, "wait" if held else "are refused")

    def _guards_of(self, request: ProduceRequest) -> list[Guard]:
        guards = []
        for data in request.topic_data:
            topic = self._broker.catalog.by_id.get(data.topic_id) if not data.name else None
            name = data.name if topic is None else topic.name
            for item in data.partition_data:
                guard = self._by_place.get((name, item.index))
                if guard is not None:
                    guards.append(guard)
        return guards

    # ---- holding ---------------------------------------------------------------------------

    def _new_hold(self, connection: Connection, *, answered: bool) -> Hold:
        hold = self._holds[connection] = Hold(connection, answered)
        self._arm(hold)
        hold.on_lost = partial(self._end, hold)
        connection.on_lost.add(hold.on_lost)
        self.requests_held += 1
        return hold

    def _arm(self, hold: Hold) -> None:
        delay_s = self._broker.config.limits.max_hold_ms / 1000
        hold.timer = self._broker.loop.call_later(delay_s, self._expire, hold)

    def _hold(self, hold: Hold, guards: list[Guard]) -> None:
        hold.guards = guards
        hold.waiting = True
        for guard in guards:
            guard.waiting[hold] = None
            # It comes back to `admit`, and not by the short way.
            hold.connection.targets.forget(guard.partition)

    def _let_go(self, hold: Hold) -> None:
        """Have the request handled again."""
        for guard in hold.guards:
            guard.waiting.pop(hold, None)
        hold.guards = []
        if hold.waiting:
            hold.waiting = False
            if not hold.connection.closed and hold.connection.peer_has_left():
                # It will never know: what it sent last is for another connection to repeat.
                hold.connection.close()
            else:
                hold.connection.proceed()

    def _expire(self, hold: Hold) -> None:
        if hold.answered:
            hold.expired = True
            self._let_go(hold)
        elif hold.connection.peer_has_left():
            hold.connection.close()
        else:
            for guard in hold.guards:
                if (reason := guard.full(self._broker.clock.now_ms())) is not None:
                    self._tell_full(guard, reason)
            self._arm(hold)

    def _end(self, hold: Hold) -> None:
        """The request is dealt with, or its connection is gone."""
        hold.connection.on_lost.discard(hold.on_lost)
        if hold.timer is not None:
            hold.timer.cancel()
        if self._holds.get(hold.connection) is hold:
            del self._holds[hold.connection]
        self._let_go(hold)

    def _release(self, guard: Guard) -> None:
        if not guard.waiting and not guard.told_full:
            return
        is_followed = self.guards.get(guard.partition) is guard
        if is_followed and guard.full(self._broker.clock.now_ms()) is not None:
            return
        if guard.told_full:
            guard.told_full = False
            if not guard.partition.gone:
                log.warning("%s has room again", guard.partition.id)
        for hold in list(guard.waiting):
            self._let_go(hold)

    # ---- making room -----------------------------------------------------------------------

    def committed(self, key: Key) -> None:
        """The journal says something new about where a group is."""
        if not self.guards or len(key) != _PLACE_WORDS:
            return
        kind, _, name, number = key
        if kind == "share":
            topic = self._broker.catalog.by_id.get(UUID(str(name)))
            name = "" if topic is None else topic.name
        guard = self._by_place.get((str(name), int(number)))
        if guard is not None:
            # A group that goes back needs more at once; less is needed only once that is safe.
            partition = guard.partition
            partition.keep_from = min(partition.keep_from, self._needed(partition)[1])
            self.look(partition)

    def stop(self) -> None:
        """Make no more room; requests that are held are cut off with their connections."""
        self._stopped = True

    def look_at_all(self) -> None:
        """All that is known of groups may have changed."""
        for guard in self.guards.values():
            self.look(guard.partition)

    def look(self, partition: Partition) -> None:
        """Something has changed that may make room in the partition: see to it soon."""
        guard = self.guards.get(partition)
        if guard is None or self._stopped:
            return
        guard.dirty = True
        if not guard.settling:
            guard.settling = True
            self._broker.spawn(self._settle(guard))

    def synced(self, partition: Partition) -> None:
        """A partition was synced, and more of its segments may go than before."""
        guard = self.guards.get(partition)
        if guard is not None and guard.full(self._broker.clock.now_ms()) is not None:
            self.look(partition)

    def made_room(self, partition: Partition) -> None:
        """Segments of a partition are gone."""
        guard = self.guards.get(partition)
        if guard is not None:
            self._release(guard)

    async def _settle(self, guard: Guard) -> None:
        try:
            while guard.dirty and self.guards.get(guard.partition) is guard:
                guard.dirty = False
                await self._make_room(guard)
        except StorageError as error:
            self._broker.warn_now_and_then(f"making room in {guard.partition.id}", error)
            self._broker.loop.call_later(_PAUSE_AFTER_FAILURE_S, self.look, guard.partition)
        finally:
            guard.settling = False
        self._release(guard)
        if guard.partition.config.overflow != BLOCK and not guard.unsettled:
            # Held only to see whether there would be room: there is none.
            for hold in list(guard.waiting):
                self._let_go(hold)

    async def _make_room(self, guard: Guard) -> None:
        broker, partition = self._broker, guard.partition
        guard.seen_end = partition.log_end
        guard.slowest, place = self._needed(partition)
        guard.needed = needed = place
        # A group that forgets its commit in a power failure must find the records again.
        await broker.coordination.commit(broker.coordination.shares.changes())
        if guard.full(broker.clock.now_ms()) is not None:
            needed = await _first_needed(partition, needed)
        if (now := self._needed(partition)[1]) < place:
            # A group has gone back meanwhile.
            needed = now
        guard.needed = partition.keep_from = needed
        if guard.full(broker.clock.now_ms()) is not None:
            await broker.make_room(partition)

    def _needed(self, partition: Partition) -> tuple[str, int]:
        """The slowest group of a guarded partition, and the first offset that it needs."""
        topic, number = partition.id.topic, partition.id.number
        places = []
        for group in partition.config.overflow_groups:
            offset = self._broker.needed_from(group, topic, number)
            # Who has never committed may want everything there is.
            places.append((partition.log_start if offset is None else offset, group))
        offset, slowest = min(places)
        return slowest, max(offset, partition.log_start)
