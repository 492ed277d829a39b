"""Where the coordinators' state is kept: partition 0 of an internal, compacted topic.

The state of groups, transactions and queues is what the entries of this journal say. An entry is
a key and a value, both JSON: the key is a list whose first item names the kind of thing, the value
is its whole new state, and no value means that it is gone. So the topic can be compacted.

`write` applies entries to the state and appends them, at once and in order; `durable` waits until
everything written so far is safe. Whoever answers a client waits for it first, so that nobody is
ever told of a state that a crash could take back. Entries of many requests share one sync.

If the journal's disk fails, the state in memory is ahead of the journal. Then it is *stale*: it is
thrown away and replayed from what is safe, as at a start, before anything else is written.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Final

import orjson

from penstock.broker.catalog import JOURNAL_TOPIC
from penstock.broker.waiting import SyncWaiters
from penstock.errors import StorageError
from penstock.log.config import Durability, TopicConfig
from penstock.log.partition import Partition, PartitionId
from penstock.log.store import LogStore
from penstock.records.record import Record, decode, encode

log = logging.getLogger(__name__)

# The same in every data directory: the topic is never told by its id to anyone outside.
JOURNAL_TOPIC_ID: Final = uuid.UUID("70656e73-746f-434b-8000-6a6f75726e61")
# Small segments: what a start replays is bounded by the live state and a few of these.
_SEGMENT_BYTES: Final = 4 << 20
_MAX_BATCH_BYTES: Final = 16 << 20

Key = tuple[str | int, ...]
# None as the value: the thing that the key names is gone.
Entry = tuple[Key, Any]


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
        self._repairs_seen = 0

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
        self._partition = self._store.load(
            PartitionId(JOURNAL_TOPIC, 0), config, topic_id=JOURNAL_TOPIC_ID
        )
        self._replay()

    def write(self, entries: Iterable[Entry]) -> None:
        """Apply entries and append them; StorageError, and nothing is applied, if that fails."""
        entries = list(entries)
        if not entries:
            return
        self._refuse_if_stale()
        now_ms = self._store.clock.now_ms()
        records = [
            Record(at, now_ms, orjson.dumps(key), None if value is None else orjson.dumps(value))
            for at, (key, value) in enumerate(entries)
        ]
        self.partition.append(encode(records))
        self._waiters.request_sync(self.partition)
        for key, value in entries:
            self._apply(key, value)

    async def durable(self) -> None:
        """Wait until everything written so far is safe; StorageError if it is not."""
        self._refuse_if_stale()
        await self._waiters.synced(self.partition)

    def _refuse_if_stale(self) -> None:
        """Get the state back to what is safe; whoever asked has seen another and must ask again."""
        partition = self.partition
        if partition.failure is None and partition.repairs == self._repairs_seen:
            return
        partition.repair()
        if partition.failure is not None:
            raise partition.failure.with_traceback(None)
        log.warning("the journal's disk had failed; the state is read from it again")
        self._repairs_seen = partition.repairs
        self._forget()
        self._replay()
        self._begin()
        raise StorageError("the state was read again from the journal; ask once more")

    def _replay(self) -> None:
        for header, batch in self.partition.batches():
            if header.is_control:
                continue
            for record in decode(batch):
                if record.key is not None:
                    value = None if record.value is None else orjson.loads(record.value)
                    self._apply(tuple(orjson.loads(record.key)), value)
