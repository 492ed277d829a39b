"""Batches in the codec of their topic, where `compression.type` is not `producer`.

A batch that comes in another codec is unpacked and packed anew before anything else is done with
it, on a thread: neither is for the loop. Meanwhile its request is *held*, as one for a full topic
is (`overload`): it stays in its connection's receive buffer, nothing more is handled of that
connection, and when the batches are ready the request is handled from the start, with them in the
place of its own. So

- what a client sends over a connection is staged in the order in which it was sent, whatever each
  request had to wait for;
- a batch gets its offsets, and is checked against its producer's sequence and transaction, when it
  is staged: nothing that was true before it was packed anew is relied on;
- a request whose client has gone meanwhile is dropped, as its client may send it again over another
  connection; one that waits for a thread for too long is refused, as one for a full topic is;
- a connection has one such request at a time. Its batches are copied for the threads, because the
  buffer is another connection's as soon as the request is held. The copies, and what becomes of
  them, count in the budget of all receive buffers, for as long as a thread works on them even if
  the connection is lost. The threads are few; each unpacks one batch at a time, up to a bound.

A batch that is damaged, or that the log would refuse as it came, is left as it is: `stage` says
why. A batch is refused as too large if it is so before or after, as in Kafka.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.overload import RequestHeldError
from penstock.errors import CorruptBatchError, InvalidRecordError, LogError, StorageError
from penstock.log.intake import MAX_UNFOLDED_BYTES, too_large
from penstock.log.partition import Partition
from penstock.records import compression
from penstock.records.batch import CODEC_MASK, CONTROL, HEADER_SIZE, verify
from penstock.records.record import recompressed

if TYPE_CHECKING:
    from penstock.broker.apis.context import RequestContext
    from penstock.broker.connection import Connection
    from penstock.broker.server import Broker
    from penstock.wire.messages.produce import ProduceRequest

log = logging.getLogger(__name__)

_MAX_THREADS: Final = 4
_ATTRIBUTES_LOW_BYTE: Final = 22
_NO_MEMORY: Final = "all receive buffers are in use"
# Clients that use older versions of Produce cannot use zstd.
ZSTD_FROM_VERSION: Final = 7
TOPIC_IDS_FROM_VERSION: Final = 13

# A batch in a request: which topic, which of its partitions, both counted from 0.
At = tuple[int, int]
# The batch to be staged, writable, or why there is none.
Packed = bytearray | LogError
NOTHING_PACKED: Final[dict[At, Packed]] = {}


class _Job(NamedTuple):
    """A batch, and what it is to become."""

    # In the receive buffer; a copy, once the request is held.
    batch: memoryview | bytes
    codec: int
    level: int | None
    unfolded_limit: int
    max_message_bytes: int


@dataclass(slots=True, eq=False)
class _Held:
    """A connection's request whose batches are packed anew, or have been."""

    connection: Connection
    correlation_id: int
    # Whether the client waits for an answer, and sends the request again if none comes.
    answered: bool
    # Since when it waits for a thread.
    since_s: float
    # What is still to be packed.
    jobs: deque[tuple[At, _Job]]
    # What its batches, old and new, take of the budget of receive buffers.
    taken_bytes: int
    packed: dict[At, Packed] = field(default_factory=dict)
    has_begun: bool = False
    # Whether a thread is at work on one of its batches.
    is_packing: bool = False
    is_ready: bool = False
    # How long the client is asked to wait with the next request.
    throttle_ms: int = 0
    on_lost: Callable[[], None] = lambda: None


class Recompression:
    """The topics of one broker that choose their codec, and the requests that wait for it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        # The partitions that store batches in a codec of their own.
        self.partitions: set[Partition] = set()
        self._held: dict[Connection, _Held] = {}
        # Those that wait for a thread, and how many threads are at work.
        self._waiting: deque[_Held] = deque()
        self._packing = 0
        self._threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._executor: ThreadPoolExecutor | None = None
        self._stopped = False
        # How many batches were packed anew.
        self.batches = 0

    # ---- which partitions ------------------------------------------------------------------

    @property
    def is_wanted(self) -> bool:
        """Whether requests to produce must come by here at all."""
        return bool(self.partitions or self._held)

    def follow(self, partitions: Iterable[Partition], *, fresh: bool = False) -> None:
        """Partitions are there, which are `fresh` if nobody can have used them, or have changed."""
        joined: set[Partition] = set()
        for partition in partitions:
            if partition.config.codec is None or partition.gone:
                self.leave(partition)
            elif partition not in self.partitions:
                self.partitions.add(partition)
                joined.add(partition)
        if joined and not fresh:
            for connection in self._broker.connections:
                # What comes by the short way is staged as it is.
                connection.targets.forget_all(joined)

    def leave(self, partition: Partition) -> None:
        """The partition is gone, or stores batches as they come."""
        self.partitions.discard(partition)

    def stop(self) -> None:
        """Pack nothing more; requests that are held are cut off with their connections."""
        self._stopped = True
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    # ---- requests --------------------------------------------------------------------------

    def packed(self, request: ProduceRequest, context: RequestContext) -> dict[At, Packed]:
        """What is to be staged in the place of a request's own batches.

        RequestHeldError: the request waits; nothing of it may have been done yet. `taken` must
        follow once it is not held any more, for whatever other reason.
        """
        connection = context.connection
        held = self._held.get(connection)
        if held is not None and held.correlation_id == context.correlation_id:
            assert held.is_ready, "a held request is handled before it is ready"
            context.throttle_ms = max(context.throttle_ms, held.throttle_ms)
            return held.packed
        jobs = self._jobs(request, context.version)
        if not jobs:
            return NOTHING_PACKED
        copied_bytes = sum(len(job.batch) for _, job in jobs)
        if not self._broker.buffer_pool.take(copied_bytes):
            connection.close(_NO_MEMORY)
            raise RequestHeldError
        # Only now, for they may be as many as there is memory.
        jobs = deque((at, job._replace(batch=bytes(job.batch))) for at, job in jobs)
        now_s = self._broker.loop.time()
        held = self._held[connection] = _Held(
            connection, context.correlation_id, bool(request.acks), now_s, jobs, copied_bytes
        )
        held.on_lost = partial(self.taken, connection)
        connection.on_lost.add(held.on_lost)
        self._waiting.append(held)
        # Once the connection is suspended.
        self._broker.loop.call_soon(self._start)
        raise RequestHeldError

    def taken(self, connection: Connection) -> None:
        """The request that was held is dealt with, or its connection is gone."""
        held = self._held.pop(connection, None)
        if held is not None:
            connection.on_lost.discard(held.on_lost)
            if not held.is_packing:
                self._give_back(held)

    def _give_back(self, held: _Held) -> None:
        self._broker.buffer_pool.put_back(held.taken_bytes)
        # It may lie in the queue still.
        held.taken_bytes, held.packed = 0, {}
        held.jobs.clear()

    def _start(self) -> None:
        """Give threads that are free the next batches, in the order in which requests came."""
        while self._waiting and self._packing < self._threads and not self._stopped:
            held = self._waiting.popleft()
            if held.connection.closed:
                continue
            if _is_alone(held):
                held.connection.close()
            elif held.answered and not held.has_begun and self._is_late(held):
                self._refuse(held)
            else:
                self._pack_next(held)

    def _is_late(self, held: _Held) -> bool:
        waited_s = self._broker.loop.time() - held.since_s
        return waited_s * 1000 > self._broker.config.limits.max_hold_ms

    def _refuse(self, held: _Held) -> None:
        """It has waited for too long: its client, which may have given up by then, tries again."""
        error = StorageError("too many batches wait for being compressed anew")
        held.packed = {at: error for at, _ in held.jobs}
        held.throttle_ms = self._broker.config.limits.max_hold_ms
        self._broker.warn_now_and_then("packing batches anew", error)
        self._ready(held)

    def _pack_next(self, held: _Held) -> None:
        held.has_begun = True
        at, job = held.jobs.popleft()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="recompression")
        self._packing += 1
        held.is_packing = True
        work = self._broker.loop.run_in_executor(self._executor, _pack, job)
        work.add_done_callback(partial(self._finished, held, at, job))

    def _finished(
        self, held: _Held, at: At, job: _Job, work: asyncio.Future[Packed | None]
    ) -> None:
        self._packing -= 1
        held.is_packing = False
        if held.connection not in self._held:
            # It was lost meanwhile, and nobody works on its batches any more.
            self._give_back(held)
        if work.cancelled():
            # The broker stops.
            return
        if (error := work.exception()) is not None:
            # A bug, and this client's batch met it.
            log.error("packing batches anew: %r", error, exc_info=error)
            held.connection.close()
        elif not held.connection.closed:
            self._keep(held, at, job, work.result())
        self._start()

    def _keep(self, held: _Held, at: At, job: _Job, result: Packed | None) -> None:
        if result is not None:
            pool, size = self._broker.buffer_pool, 0
            if isinstance(result, bytearray):
                size = len(result)
            if not pool.take(size):
                held.connection.close(_NO_MEMORY)
                return
            pool.put_back(len(job.batch))
            held.taken_bytes += size - len(job.batch)
            held.packed[at] = result
            self.batches += 1
        if held.jobs:
            self._waiting.appendleft(held)
        else:
            self._ready(held)

    def _ready(self, held: _Held) -> None:
        """Have the request handled again."""
        held.is_ready = True
        if _is_alone(held):
            # It will never know: what it sent last is for another connection to repeat.
            held.connection.close()
        else:
            held.connection.proceed()

    def _jobs(self, request: ProduceRequest, version: int) -> deque[tuple[At, _Job]]:
        jobs: deque[tuple[At, _Job]] = deque()
        broker = self._broker
        for topic_at, data in enumerate(request.topic_data):
            name: str | None = data.name
            if version >= TOPIC_IDS_FROM_VERSION:
                topic = broker.catalog.by_id.get(data.topic_id)
                name = None if topic is None else topic.name
            for at, item in enumerate(data.partition_data):
                partition = broker.partition(name, item.index) if name is not None else None
                if partition is None or partition not in self.partitions or item.records is None:
                    continue
                job = _job(partition, memoryview(item.records), version)
                if job is not None:
                    jobs.append(((topic_at, at), job))
        return jobs


def _job(partition: Partition, batch: memoryview, version: int) -> _Job | None:
    """What is to be done with a batch; None if it is staged, or refused, as it is."""
    config = partition.config
    if config.codec is None or not HEADER_SIZE <= len(batch) <= config.max_message_bytes:
        return None
    attributes = batch[_ATTRIBUTES_LOW_BYTE]
    came_in = attributes & CODEC_MASK
    is_too_new = came_in == compression.ZSTD and version < ZSTD_FROM_VERSION
    if came_in == config.codec or attributes & CONTROL or is_too_new:
        return None
    limit = max(MAX_UNFOLDED_BYTES, config.max_message_bytes)
    return _Job(batch, config.codec, config.codec_level, limit, config.max_message_bytes)


def _is_alone(held: _Held) -> bool:
    """Whether the client has gone that would have sent the request again: it may do so by now.

    One that asks for no answers sends nothing twice, and may leave once it has sent everything.
    """
    return held.answered and held.connection.peer_has_left()


def _pack(job: _Job) -> Packed | None:
    """The batch in its new codec, or why its records cannot be unpacked; None if it is none."""
    try:
        header = verify(job.batch)
    except CorruptBatchError:
        return None
    if header.size != len(job.batch):
        return None
    try:
        packed = bytearray(recompressed(job.batch, job.codec, job.level, job.unfolded_limit))
    except CorruptBatchError as error:
        # It came as its producer made it: sending it again would not help.
        return InvalidRecordError(f"the batch cannot be unpacked: {error}")
    if len(packed) > job.max_message_bytes:
        # What the log would say; there may be many, and each many times as large as it came.
        return too_large(len(packed), job.max_message_bytes)
    return packed
