"""Where the coordinators' state is kept: partition 0 of an internal, compacted topic.

The state of groups, transactions and queues is what the entries of this journal say. An entry is
a key and a value, both JSON: the key is a list whose first item names the kind of thing, the value
is its whole new state, and no value means that it is gone. So the topic can be compacted.

`write` applies entries to the state and appends them, at once and in order; `durable` waits until
everything written so far is safe. Whoever answers a client waits for it first, so that nobody is
ever told of a state that a crash could take back. Entries of many requests share one sync.

`stage` is `write` for those who are going to wait anyway: it applies entries at once, and appends
those of all requests that are handled in one turn of the loop together, as one batch. And what
nobody will wait for can be written without `hurry`: it goes to the disk with whatever comes next,
or a moment later. What would be done again if it were missing can even be `put off`: it is appended
only then, and so is lost with the process as well; where it finds no room, it is tried again.

What is written together is in one batch, and so there wholly or not at all after a crash. Only what
is larger than a batch can be is cut; whoever writes so much puts last what must not be alone.

If the journal's disk fails, the state in memory is ahead of the journal. Then it is *stale*: it is
thrown away and replayed from what is safe, as at a start, before anything else is written.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, NamedTuple

import orjson

from penstock.broker.catalog import JOURNAL_TOPIC
from penstock.broker.waiting import SyncWaiters, WriteDone
from penstock.errors import RecordTooLargeError, StorageError
from penstock.log.config import Durability, TopicConfig
from penstock.log.partition import Partition, PartitionId
from penstock.log.store import LogStore
from penstock.log.sync import FAILED_SYNC_MARK
from penstock.records.batch import MAGIC, BatchHeader
from penstock.records.record import assemble, decode, write_varint

log = logging.getLogger(__name__)

# The same in every data directory: the topic is never told by its id to anyone outside.
JOURNAL_TOPIC_ID: Final = uuid.UUID("70656e73-746f-434b-8000-6a6f75726e61")
# Small segments: what a start replays is bounded by the live state and a few of these.
_SEGMENT_BYTES: Final = 4 << 20
_MAX_BATCH_BYTES: Final = 16 << 20
# What is written together goes into one batch up to this; the rest is for the batch's own header.
_MAX_ENTRIES_BYTES: Final = _MAX_BATCH_BYTES - (1 << 10)
# The most that a record has besides its key and value.
_RECORD_BYTES: Final = 32
# After so long what was not in a hurry is synced, too.
_UNHURRIED_S: Final = 0.1
# How many entries of several requests are appended as one batch.
_MAX_TOGETHER: Final = 1_000

Key = tuple[str | int, ...]
# None as the value: the thing that the key names is gone.
Entry = tuple[Key, Any]
# An entry as it is written: JSON both.
_Pair = tuple[bytes, bytes | None]


class _Pairs(NamedTuple):
    """Entries that belong together, and how much room they need."""

    pairs: list[_Pair]
    size: int


class Journal:
    """The entries of all coordinators, durable."""

    def __init__(self, store: LogStore, waiters: SyncWaiters, durability: Durability) -> None:
        self._store = store
        self._waiters = waiters
        self._durability: Durability = "disk" if durability == "disk" else "os"
        self._partition: Partition | None = None
        self._apply: Callable[[Key, Any], None] = lambda _key, _value: None
        self._forget: Callable[[], None] = lambda: None
        self._begin: Callable[[], None] = lambda: None
        # Whether a sync had failed before this start: what was written then may be missing.
        self.doubtful = False
        self._repairs_seen = 0
        # Applied and not appended yet: what belongs together, in order.
        self._staged: list[_Pairs] = []
        # Whether any of it was more than put off: somebody counts on it.
        self._promised = False
        # Whether it is appended at the end of this turn of the loop.
        self._turning = False
        # Those who wait for what is staged.
        self._awaiting: list[WriteDone] = []
        # Whether the state is ahead of the journal for good: an append failed.
        self._ahead = False
        self._unhurried: asyncio.TimerHandle | None = None

    @property
    def partition(self) -> Partition:
        assert self._partition is not None, "open first"
        return self._partition

    def open(
        self,
        apply: Callable[[Key, Any], None],
        forget: Callable[[], None],
        begin: Callable[[], None],
    ) -> None:
        """Open the topic and replay all of it into `apply`.

        Where everything must be replayed once more, `forget` is called before it and `begin`
        after it: entries that had been applied may be missing then.
        """
        self._apply, self._forget, self._begin = apply, forget, begin
        config = TopicConfig(
            cleanup_policy=("compact",),
            segment_bytes=_SEGMENT_BYTES,
            max_message_bytes=_MAX_BATCH_BYTES,
            durability=self._durability,
        )
        id_ = PartitionId(JOURNAL_TOPIC, 0)
        mark = os.path.join(self._store.folder, str(id_), FAILED_SYNC_MARK)
        self.doubtful = self._store.disk.exists(mark)
        self._partition = self._store.load(id_, config, topic_id=JOURNAL_TOPIC_ID)
        self._partition.own_records = True
        self._replay()

    def write(self, entries: Iterable[Entry], *, hurry: bool = True) -> None:
        """Apply entries and append them; StorageError, and nothing is applied, if that fails.

        RecordTooLargeError, and nothing has happened, if one of them is too large for any batch.
        """
        entries = list(entries)
        if not entries:
            return
        self._refuse_if_stale()
        pairs = _to_pairs(entries)
        end = self.partition.log_end
        try:
            self._append([*self._staged, pairs], hurry=hurry)
        except StorageError as error:
            if self._staged:
                self._keep_or_lose(end, error)
            # Then a part of it will be applied when it is replayed, but was not yet.
            self._ahead = self._ahead or self.partition.log_end > end
            raise
        self._drop_staged()
        for key, value in entries:
            self._apply(key, value)

    def stage(self, entries: Iterable[Entry]) -> None:
        """Apply entries, and append them soon; whether that fails is told to who waits for it.

        RecordTooLargeError, and nothing has happened, if one of them is too large for any batch.
        """
        if not self._hold(entries):
            return
        self._promised = True
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._on_turn)

    def put_off(self, entries: Iterable[Entry]) -> None:
        """Apply entries, and append them with whatever comes next, or a moment later.

        For what follows from the journal as it is: after a crash it must be done again.
        """
        if self._hold(entries):
            self._arm_unhurried()

    def _hold(self, entries: Iterable[Entry]) -> bool:
        """Apply entries that are appended later; whether there are any."""
        entries = list(entries)
        if not entries:
            return False
        self._refuse_if_stale()
        self._staged.append(_to_pairs(entries))
        for key, value in entries:
            self._apply(key, value)
        return True

    async def durable(self) -> None:
        """Wait until everything written so far is safe; StorageError if it is not."""
        self._refuse_if_stale()
        if not self._staged and self.partition.visible >= self.partition.log_end:
            return
        outcome: asyncio.Future[StorageError | None]
        outcome = asyncio.get_running_loop().create_future()

        def done(error: StorageError | None) -> None:
            # Whoever waited may have been cancelled meanwhile.
            if not outcome.done():
                outcome.set_result(error)

        self.when_durable(done)
        error = await outcome
        if error is not None:
            raise error

    def when_durable(self, done: WriteDone) -> None:
        """Call once everything written so far is safe, or cannot be; maybe at once.

        StorageError, and nobody is called, if that is known already.
        """
        self._refuse_if_stale()
        if self._turning:
            self._awaiting.append(done)
        else:
            self._append_staged()
            self._wait_for_sync(done)

    def _wait_for_sync(self, done: WriteDone) -> None:
        partition = self.partition
        if partition.visible >= partition.log_end:
            done(None)
            return
        self._waiters.add(partition, partition.log_end, done)
        self._waiters.request_sync(partition)

    def _on_turn(self) -> None:
        """The end of a turn of the loop: append what its requests have staged."""
        self._turning = False
        if self._is_stale:
            # What was staged rests on a state that is lost.
            self._lose(StorageError("the journal's disk has failed"))
            return
        try:
            self._append_staged()
        except StorageError as error:
            self._refuse_awaiting(error)
        awaiting, self._awaiting = self._awaiting, []
        for done in awaiting:
            self._wait_for_sync(done)

    def _append_staged(self) -> None:
        if not self._staged:
            return
        end = self.partition.log_end
        try:
            self._append(self._staged)
        except StorageError as error:
            self._keep_or_lose(end, error)
            raise
        self._drop_staged()

    def _append(self, written: list[_Pairs], *, hurry: bool = True) -> None:
        now_ms = self._store.clock.now_ms()
        for pairs in _together(written):
            self.partition.append(_encode(pairs, now_ms))
        if hurry:
            self._waiters.request_sync(self.partition)
        else:
            self._arm_unhurried()

    def _arm_unhurried(self) -> None:
        if self._unhurried is None:
            loop = asyncio.get_running_loop()
            self._unhurried = loop.call_later(_UNHURRIED_S, self._sync_unhurried)

    def _sync_unhurried(self) -> None:
        self._unhurried = None
        if self._is_stale:
            # Whoever comes next reads it again.
            return
        with suppress(StorageError):
            self._append_staged()
        self._waiters.request_sync(self.partition)

    def stop(self, *, keep: bool = True) -> None:
        """No sync is begun from here any more: whoever closes the log syncs everything.

        Without `keep` what was put off is lost, as if the process were killed.
        """
        if keep and not self._is_stale:
            with suppress(StorageError):
                self._append_staged()
        if self._unhurried is not None:
            self._unhurried.cancel()
            self._unhurried = None

    def _keep_or_lose(self, end: int, error: StorageError) -> None:
        """An append of what is staged has failed; `end` is where the log ended before.

        What was only put off is owed to nobody yet: it can wait until there is room. Unless some of
        it is appended, or the disk has failed, so that what came before may be gone, too.
        """
        if self._promised or self.partition.log_end > end or self._is_stale:
            self._lose(error)
        else:
            self._arm_unhurried()

    def _drop_staged(self) -> None:
        self._staged = []
        self._promised = False

    def _lose(self, error: StorageError) -> None:
        """What was staged is not in the journal: say so to those who wait for it."""
        self._ahead = True
        self._drop_staged()
        self._refuse_awaiting(error)

    def _refuse_awaiting(self, error: StorageError) -> None:
        awaiting, self._awaiting = self._awaiting, []
        for done in awaiting:
            done(error)

    @property
    def _is_stale(self) -> bool:
        partition = self.partition
        failed = partition.failure is not None or partition.repairs != self._repairs_seen
        return failed or self._ahead

    def _refuse_if_stale(self) -> None:
        """Get the state back to what is safe; whoever asked has seen another and must ask again."""
        if not self._is_stale:
            return
        partition = self.partition
        self._lose(StorageError("the journal's disk has failed"))
        # Whoever waits for a sync is told of the failure before what they wrote is cut off.
        self._waiters.release(partition)
        partition.repair()
        if partition.failure is not None:
            raise partition.failure.with_traceback(None)
        log.warning("the journal's disk had failed; the state is read from it again")
        self._repairs_seen = partition.repairs
        self._ahead = False
        try:
            self._forget()
            self._replay()
            self._begin()
        except BaseException:
            # What was to follow from it is not all written: once more, from the beginning.
            self._ahead = True
            raise
        raise StorageError("the state was read again from the journal; ask once more")

    def _replay(self) -> None:
        for header, batch in self.partition.batches():
            if header.is_control:
                continue
            for record in decode(batch):
                if record.key is not None:
                    value = None if record.value is None else orjson.loads(record.value)
                    self._apply(tuple(orjson.loads(record.key)), value)


def _to_pairs(entries: list[Entry]) -> _Pairs:
    """Entries as they are written; RecordTooLargeError if one cannot be."""
    pairs: list[_Pair] = []
    size = 0
    for key, value in entries:
        name = orjson.dumps(key)
        state = None if value is None else orjson.dumps(value)
        pairs.append((name, state))
        size += _size(name, state)
    if size > _MAX_ENTRIES_BYTES:
        largest = max(_size(*pair) for pair in pairs)
        if largest > _MAX_ENTRIES_BYTES:
            raise RecordTooLargeError(f"an entry of {largest} bytes is too large for the journal")
    return _Pairs(pairs, size)


def _size(name: bytes, state: bytes | None) -> int:
    return _RECORD_BYTES + len(name) + len(state or b"")


def _together(written: list[_Pairs]) -> Iterator[list[_Pair]]:
    """Batches of what several requests write; what belongs together stays so where it can."""
    batch: list[_Pair] = []
    size = 0
    for pairs, more in written:
        crowded = len(batch) + len(pairs) > _MAX_TOGETHER or size + more > _MAX_ENTRIES_BYTES
        if batch and crowded:
            yield batch
            batch, size = [], 0
        if more > _MAX_ENTRIES_BYTES:
            yield from _cut(pairs)
        else:
            batch += pairs
            size += more
    if batch:
        yield batch


def _cut(pairs: list[_Pair]) -> Iterator[list[_Pair]]:
    """As much at a time as a batch can hold."""
    batch: list[_Pair] = []
    size = 0
    for pair in pairs:
        more = _size(*pair)
        if size + more > _MAX_ENTRIES_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(pair)
        size += more
    yield batch


def _encode(pairs: list[_Pair], now_ms: int) -> bytes:
    """A batch with a record for each entry, written without a detour: offsets are committed often.

    A record: its length; attributes and the distance in time, 0 both; the distance in offset; key
    and value, each after its length; the number of headers, 0.
    """
    parts: list[bytes] = []
    for delta, (name, state) in enumerate(pairs):
        length = _varint(-1 if state is None else len(state))
        item = b"".join(
            (b"\0\0", _varint(delta), _varint(len(name)), name, length, state or b"", b"\0")
        )
        parts += (_varint(len(item)), item)
    header = BatchHeader(
        base_offset=0,
        batch_length=0,
        leader_epoch=0,
        magic=MAGIC,
        crc=0,
        attributes=0,
        last_offset_delta=len(pairs) - 1,
        base_timestamp=now_ms,
        max_timestamp=now_ms,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        record_count=len(pairs),
    )
    return assemble(header, b"".join(parts))


@lru_cache(maxsize=4_096)
def _varint(value: int) -> bytes:
    """Lengths and distances are small, and the same again and again."""
    out = bytearray()
    write_varint(out, value)
    return bytes(out)
