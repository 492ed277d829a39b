"""What housekeeping knows of each partition, and how its work is kept from harming any other.

Work on a partition is done in steps that alternate between the event loop, which owns partitions,
and threads, which may wait for a disk or an archive. Two rules keep this safe:

- whatever removes, replaces or releases closed segments of a partition, or changes its manifest,
  holds the partition's lock from the first step to the last (`Care.lock`);
- steps that belong together run to their end even when the broker stops (`Workshop.whole`).

A failure is logged, counted and retried later, ever more rarely; it never leaves the partition
that it belongs to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from penstock.errors import PenstockError
from penstock.log.cleaner import Cleaner
from penstock.log.compaction import Result
from penstock.log.partition import Partition, PartitionId
from penstock.log.store import LogStore
from penstock.log.swap import Swap

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_RETRY_MS: Final = 1_000
_LAST_RETRY_MS: Final = 60_000
# The event loop is given back at least this often.
_SLICE_S: Final = 0.002


@dataclass(slots=True)
class Backoff:
    """When something that failed may be tried again."""

    not_before_ms: int = 0
    delay_ms: int = 0

    def ready(self, now_ms: int) -> bool:
        return now_ms >= self.not_before_ms

    def failed(self, now_ms: int) -> None:
        self.delay_ms = min(max(self.delay_ms * 2, _FIRST_RETRY_MS), _LAST_RETRY_MS)
        self.not_before_ms = now_ms + self.delay_ms

    def succeeded(self) -> None:
        self.not_before_ms = self.delay_ms = 0


@dataclass(slots=True)
class Care:
    """What is remembered of one partition between rounds."""

    partition: Partition
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    repair: Backoff = field(default_factory=Backoff)
    upkeep: Backoff = field(default_factory=Backoff)
    retention: Backoff = field(default_factory=Backoff)
    compaction: Backoff = field(default_factory=Backoff)
    archiving: Backoff = field(default_factory=Backoff)
    cleaner: Cleaner | None = None
    # Decided and not carried out, because the disk failed in between.
    unfinished_swap: tuple[Swap, Result] | None = None
    reconciled: bool = False


@dataclass(slots=True)
class Counters:
    """What housekeeping has done since the start."""

    rounds: int = 0
    failures: int = 0
    segments_removed: int = 0
    bytes_removed: int = 0
    compactions: int = 0
    records_compacted: int = 0
    records_removed: int = 0
    segments_archived: int = 0
    bytes_archived: int = 0
    repairs: int = 0


class Workshop:
    """What all kinds of housekeeping share: the store, threads, the memory of partitions."""

    def __init__(self, store: LogStore) -> None:
        self.store = store
        self.counters = Counters()
        self.stopping = False
        self._threads = ThreadPoolExecutor(3, thread_name_prefix="housekeeping")
        self._cares: dict[PartitionId, Care] = {}
        self._slice_end = 0.0

    def now_ms(self) -> int:
        return self.store.clock.now_ms()

    def care(self, partition: Partition) -> Care:
        """What is known of the partition; a new one of the same name is known afresh."""
        known = self._cares.get(partition.id)
        if known is None or known.partition is not partition:
            known = self._cares[partition.id] = Care(partition)
        return known

    def forget(self, partition: Partition) -> None:
        """Let go of one partition, with the files that it holds open."""
        if partition.id in self._cares and self._cares[partition.id].partition is partition:
            del self._cares[partition.id]

    def forget_gone(self) -> list[Care]:
        """Let go of partitions that were deleted; what was known of them."""
        gone = [
            care for care in self._cares.values() if care.partition.gone and not care.lock.locked()
        ]
        for care in gone:
            del self._cares[care.partition.id]
        return gone

    async def partitions(self) -> list[Care]:
        """Those there are now, cared for in slices: the loop is not held for all of them."""
        await self.breathe()
        return [self.care(partition) for partition in self.store.partitions.values()]

    async def breathe(self) -> None:
        """Give the loop back if this round has held it long enough."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._slice_end:
            await asyncio.sleep(0)
            self._slice_end = loop.time() + _SLICE_S

    async def on_thread(self, work: Callable[[], T]) -> T:
        """Run what may block, and wait for it."""
        result = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        self._slice_end = 0.0
        return result

    async def whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Run steps that belong together to their end, even if the broker stops meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("while stopping: %s", error)
            raise

    async def checkpoint(self) -> None:
        """Write down where partitions begin and how far they are synced; durable on return."""
        rows = self.store.checkpoint_rows()
        await self.on_thread(lambda: self.store.write_checkpoint(rows))

    @contextmanager
    def guard(
        self, doing: str, partition: Partition, backoff: Backoff, *, final: bool = True
    ) -> Iterator[None]:
        """Keep a failure where it belongs. Only the `final` step makes a success."""
        try:
            yield
        except Exception as error:
            backoff.failed(self.now_ms())
            if partition.gone or self.stopping:
                return
            self.counters.failures += 1
            # What is not one of our own errors is a bug, and its trace is wanted.
            trace = None if isinstance(error, PenstockError) else error
            log.error(
                "%s %s: %s; again in %d s", doing, partition.id, error,
                backoff.delay_ms // 1000, exc_info=trace,
            )  # fmt: skip
        else:
            if final:
                backoff.succeeded()

    def close(self) -> None:
        self.stopping = True
        self._threads.shutdown(wait=False, cancel_futures=True)


Round = Callable[[], Awaitable[None]]
