"""Dead letters: records that a group has given up go to a topic of their own.

A record that was rejected, or delivered as often as the group allows, is written to the group's
dead-letter topic, with headers that say where it came from, how often it was delivered, why it is
here and for which group. Only when the letter is safe is the record finished. A crash in between
writes it again: at least once, never not at all.

The headers' names are those of KIP-1191:

    __dlq.errors.topic  .partition  .offset  .group  .delivery.count  .message

The letter goes to the partition with the source partition's number, modulo the topic's. The topic
is made if it is not there and the broker makes topics by itself. If it cannot be written to, the
records stay given up and it is tried again; they count against the group's limit meanwhile. So it
is where the topic is the queue's own: a letter there would come back to the group, and die again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from penstock.broker.catalog import ApiError, Topic
from penstock.broker.shares.coordinator import Queue
from penstock.broker.shares.partition import DYING, LIMIT_REACHED, REJECTED, Run
from penstock.broker.shares.rounds import ShareRounds
from penstock.errors import CorruptBatchError, OffsetOutOfRangeError, RecordTooLargeError
from penstock.log.archive import ArchivedRead
from penstock.log.config import TopicConfig
from penstock.log.partition import Partition
from penstock.records.batch import BatchHeader, headers
from penstock.records.compression import NONE
from penstock.records.record import BatchOptions, Header, Record, decode, encode
from penstock.wire.errors import ErrorCode

if TYPE_CHECKING:
    from penstock.broker.server import Broker

log = logging.getLogger(__name__)

PREFIX: Final = "__dlq.errors."
TOPIC_HEADER: Final = PREFIX + "topic"
PARTITION_HEADER: Final = PREFIX + "partition"
OFFSET_HEADER: Final = PREFIX + "offset"
GROUP_HEADER: Final = PREFIX + "group"
COUNT_HEADER: Final = PREFIX + "delivery.count"
MESSAGE_HEADER: Final = PREFIX + "message"
MESSAGES: Final = {
    LIMIT_REACHED: "the delivery count has reached its limit",
    REJECTED: "rejected by the consumer",
}
# A topic that says no to this takes no dead letters.
ALLOWED: Final = "errors.deadletterqueue.group.enable"

# Why the letters of a group that reads its dead-letter topic are not written.
READS_ITSELF: Final = (
    "the group itself reads {name!r}: set errors.deadletterqueue.topic.name to another topic"
)

_READ_BYTES: Final = 1 << 20
_RETRY_S: Final = 1.0


class DeadLetters:
    """Writes the dead letters of all queues, one queue after the other."""

    def __init__(self, broker: Broker, rounds: ShareRounds) -> None:
        self._broker = broker
        self._rounds = rounds
        self._due: dict[Queue, None] = {}
        self._running = False

    def add(self, queue: Queue) -> None:
        """The queue has records that are given up."""
        if self._rounds.stopped:
            # They are due again at the next start.
            return
        self._due[queue] = None
        if not self._running:
            self._running = True
            self._broker.loop.call_soon(self._start)

    def _start(self) -> None:
        self._broker.spawn(self._work())

    async def _work(self) -> None:
        failed: list[Queue] = []
        try:
            while self._due:
                queue = next(iter(self._due))
                del self._due[queue]
                try:
                    await self._bury(queue)
                except Exception as error:
                    # The archive may be out of reach in any way; the other queues go on.
                    self._broker.warn_now_and_then(
                        f"writing dead letters of group {queue.group!r}", error
                    )
                    failed.append(queue)
        finally:
            self._running = False
        for queue in failed:
            self._broker.loop.call_later(_RETRY_S, self.add, queue)

    async def _bury(self, queue: Queue) -> None:
        """Write the letters of all records that are given up now."""
        shares = self._broker.coordination.shares
        while queue.share.sizes[DYING] and shares.queue(*queue.key) is queue:
            # A copy: while this waits, the run may grow or be divided.
            run = replace(queue.share.dying()[0])
            # First of all it must be safe that they are given up: otherwise a crash would bring
            # back, to be accepted by somebody, what has a dead letter already.
            if (error := await self._rounds.durable()) is not None:
                if self._rounds.stopped:
                    return
                raise error
            settings = shares.settings(queue.group)
            source = self._source(queue)
            name = settings.errors_deadletterqueue_topic_name
            last = run.last
            if source is not None and name:
                if name == queue.topic:
                    raise ApiError(ErrorCode.INVALID_CONFIG, READS_ITSELF.format(name=name))
                target = await self._target(name)
                records, last = await self._read(source, run)
                copied = settings.errors_deadletterqueue_copy_record_enable
                letters = [_letter(queue, run, record, copied=copied) for record in records]
                await self._write(target, queue.number, letters)
            shares.buried(queue, run.first, last)
            self._rounds.request()

    def _source(self, queue: Queue) -> Partition | None:
        topic = self._broker.catalog.topics.get(queue.topic)
        if topic is None or str(topic.id) != queue.key[1]:
            return None
        return self._broker.partition(queue.topic, queue.number)

    async def _target(self, name: str) -> Topic:
        topic = self._broker.catalog.topics.get(name)
        if topic is None:
            if not self._broker.config.auto_create_topics:
                raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name!r}")
            topic = await self._broker.topics.create_if_absent(name)
        if topic.settings.get(ALLOWED, "true") == "false":
            raise ApiError(ErrorCode.POLICY_VIOLATION, f"{name!r} takes no dead letters")
        return topic

    async def _read(self, source: Partition, run: Run) -> tuple[list[Record], int]:
        """Records of the run, and how far they go: what is not in the log any more is past."""
        first = max(run.first, source.log_start)
        if first > run.last:
            return [], run.last
        try:
            found = source.read(first, _READ_BYTES)
        except OffsetOutOfRangeError:
            return [], run.last
        if found is None:
            return [], run.last
        if isinstance(found, ArchivedRead):
            data = await self._broker.loop.run_in_executor(None, found.load)
        else:
            data = found.read()
        records: list[Record] = []
        reached = first - 1
        for at, header in headers(data):
            if header.base_offset > run.last:
                reached = run.last
                break
            reached = min(header.last_offset, run.last)
            if not header.is_control:
                batch = _records(header, data[at : at + header.size])
                records += [record for record in batch if first <= record.offset <= run.last]
        return records, max(reached, run.first)

    async def _write(self, topic: Topic, number: int, letters: Sequence[Record]) -> None:
        """Append the letters and wait until they are safe."""
        target = self._broker.partition(topic.name, number % topic.partitions)
        if target is None:
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{topic.name!r} is gone")
        now_ms = self._broker.clock.now_ms()
        for batch in _batches(letters, now_ms, target.config):
            target.stage(memoryview(bytearray(batch)), now_ms)
        target.flush()
        self._broker.committer.request(target)
        if not target.syncs:
            self._broker.read_waiters.wake(target)
        await self._broker.sync_waiters.synced(target)


def _records(header: BatchHeader, batch: bytes) -> list[Record]:
    """The records of a batch; of one that nobody can unpack, only where they are."""
    try:
        return list(decode(batch))
    except CorruptBatchError:
        offsets = range(header.base_offset, header.next_offset)
        return [Record(offset, header.max_timestamp, None, None) for offset in offsets]


def _letter(queue: Queue, run: Run, record: Record, *, copied: bool) -> Record:
    told: dict[str, str] = {
        TOPIC_HEADER: queue.topic,
        PARTITION_HEADER: str(queue.number),
        OFFSET_HEADER: str(record.offset),
        GROUP_HEADER: queue.group,
        COUNT_HEADER: str(run.count),
        MESSAGE_HEADER: MESSAGES[run.reason],
    }
    added = tuple((name, value.encode()) for name, value in told.items())
    if not copied:
        return Record(0, 0, None, None, added)
    # A letter that was sent back and died again tells of its last death.
    own = tuple(item for item in record.headers if not item[0].startswith(PREFIX))
    return Record(0, 0, record.key, record.value, (*own, *added))


def _batches(letters: Sequence[Record], now_ms: int, config: TopicConfig) -> Iterator[bytes]:
    """Batches that the topic takes; of a letter that is too large, only what it is about."""
    if not letters:
        return
    # By the log's time: how long a letter is kept counts from the record's death.
    batch = encode(
        [letter._replace(offset=at, timestamp_ms=now_ms) for at, letter in enumerate(letters)],
        BatchOptions(codec=config.codec or NONE),
    )
    max_bytes = config.max_message_bytes
    if len(batch) <= max_bytes:
        yield batch
    elif len(letters) > 1:
        half = len(letters) // 2
        yield from _batches(letters[:half], now_ms, config)
        yield from _batches(letters[half:], now_ms, config)
    else:
        bare = letters[0]._replace(key=None, value=None, headers=_own_headers(letters[0].headers))
        if bare == letters[0]:
            raise RecordTooLargeError(f"a dead letter does not fit into {max_bytes} bytes")
        yield from _batches([bare], now_ms, config)


def _own_headers(all_headers: Sequence[Header]) -> tuple[Header, ...]:
    return tuple(item for item in all_headers if item[0].startswith(PREFIX))
