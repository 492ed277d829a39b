"""Where the catalog's records are kept: partition 0 of an internal, compacted topic.

One command at a time: its records are durable before they are applied and before anyone is
answered. A start reads the topic from its beginning.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Final

from penstock.broker.catalog import METADATA_TOPIC, Catalog, KeyValue
from penstock.broker.waiting import SyncWaiters
from penstock.log.config import TopicConfig
from penstock.log.partition import Partition, PartitionId
from penstock.log.store import LogStore
from penstock.records.record import Record, decode, encode

# The same in every data directory: the topic is never told by its id to anyone outside.
METADATA_TOPIC_ID: Final = uuid.UUID("70656e73-746f-434b-8000-6d6574616461")
_CONFIG: Final = TopicConfig(
    cleanup_policy=("compact",), segment_bytes=16 << 20, max_message_bytes=16 << 20
)


class MetadataLog:
    """The catalog, durable."""

    def __init__(self, store: LogStore, catalog: Catalog, waiters: SyncWaiters) -> None:
        self._store = store
        self._catalog = catalog
        self._waiters = waiters
        self._lock = asyncio.Lock()
        self._partition: Partition | None = None
        # Topics that were deleted before this start, as far as that is not compacted away.
        self.deleted: set[uuid.UUID] = set()

    @property
    def partition(self) -> Partition:
        assert self._partition is not None, "open first"
        return self._partition

    def open(self) -> None:
        """Open the topic and replay all of it."""
        id_ = PartitionId(METADATA_TOPIC, 0)
        self._partition = self._store.load(id_, _CONFIG, topic_id=METADATA_TOPIC_ID)
        for header, batch in self._partition.batches():
            if header.is_control:
                continue
            for record in decode(batch):
                if record.key is None:
                    continue
                gone = self._catalog.replay(record.key, record.value)
                if gone is not None:
                    self.deleted.add(gone.id)

    async def commit(
        self,
        command: Callable[[], list[KeyValue]],
        prepare: Callable[[list[KeyValue]], Awaitable[None]] | None = None,
    ) -> None:
        """Run a command against the state as it is now, make its records durable, apply them.

        `prepare` is done before that, so that nothing is promised which cannot be kept.
        """
        async with self._lock:
            records = command()
            if not records:
                return
            if prepare is not None:
                await prepare(records)
            if self.partition.failure is not None:
                self.partition.repair()
            self.partition.append(self._batch(records))
            await self._waiters.synced(self.partition)
            self._apply(records)

    def commit_at_start(self, records: list[KeyValue]) -> None:
        """The same before the broker serves anyone, without waiting for a loop."""
        self.partition.append(self._batch(records))
        plan = self.partition.plan_sync()
        plan.run()
        self.partition.finish_sync(plan)
        if self.partition.failure is not None:
            raise self.partition.failure
        self._apply(records)

    def _batch(self, records: list[KeyValue]) -> bytes:
        now_ms = self._store.clock.now_ms()
        return encode([Record(at, now_ms, *pair) for at, pair in enumerate(records)])

    def _apply(self, records: list[KeyValue]) -> None:
        for key, value in records:
            self._catalog.replay(key, value)
