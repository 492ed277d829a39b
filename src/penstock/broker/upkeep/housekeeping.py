"""Keeps the log within bounds while the broker runs.

Three tasks on the event loop, each with its own pace, so that none waits for another:

- *upkeep*: segments are closed by age, expired ones removed, silent producers, unused indexes and
  open files let go, failed partitions repaired, checkpoints written;
- *compaction* of keyed topics, in a child process (`compacting`);
- *archiving* of closed segments, on threads (`archiving`).

The event loop is held for a few milliseconds at most at a time. A partition that fails is left
for later and stops nobody else. `run_once` is one round of everything, for tests.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Final

from penstock.broker.upkeep.archiving import ArchiveRounds
from penstock.broker.upkeep.care import Care, Counters, Round, Workshop
from penstock.broker.upkeep.compacting import CompactionRounds, finish_swap
from penstock.broker.upkeep.compactor import ChildCompactor, Compactor
from penstock.errors import DiskFullError, StorageError
from penstock.log import retention
from penstock.log.archive import Archive
from penstock.log.cleaner import roll_for_compaction
from penstock.log.compaction import DEFAULT_MAX_KEYS
from penstock.log.disk import Disk
from penstock.log.partition import Partition
from penstock.log.retention import Removal
from penstock.log.store import LogStore

log = logging.getLogger(__name__)

_PROBE_FILE: Final = "repair-probe.tmp"
# Producers and indexes are looked through this rarely: neither is in a hurry.
_SLOW_EVERY_MS: Final = 60_000


class Housekeeping:
    """The background work of one store."""

    def __init__(
        self,
        store: LogStore,
        *,
        archive: Archive | None = None,
        interval_ms: int = 5_000,
        request_sync: Callable[[Partition], None] | None = None,
        release_waiters: Callable[[Partition], None] | None = None,
        on_removed: Callable[[Partition], None] | None = None,
        compactor: Compactor | None = None,
        max_keys: int = DEFAULT_MAX_KEYS,
    ) -> None:
        """`request_sync` has a partition synced soon by whoever else syncs it; without one
        housekeeping does it itself. `release_waiters` tells those who wait for the sync of a
        failed partition; `on_removed` is told of partitions that have become smaller.
        """
        self._store = store
        self._interval_s = interval_ms / 1000
        self._request_sync = request_sync
        self._release_waiters = release_waiters
        self._on_removed = on_removed
        self._workshop = Workshop(store)
        self._compaction = CompactionRounds(self._workshop, compactor or ChildCompactor(), max_keys)
        self._archiving = ArchiveRounds(self._workshop, archive)
        self._tasks: list[asyncio.Task[None]] = []
        self._relieving: set[asyncio.Task[None]] = set()
        self._slow_due_ms = 0
        self._archiving.attach()

    @property
    def counters(self) -> Counters:
        return self._workshop.counters

    def start(self) -> None:
        """Begin; the first rounds come after one interval."""
        rounds = (self.upkeep, self._compaction.round, self._archiving.round)
        self._tasks = [asyncio.ensure_future(self._repeat(round_)) for round_ in rounds]

    async def stop(self) -> None:
        """End what is under way: short steps to their end, long ones at once."""
        self._workshop.stopping = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []
        if self._relieving:
            await asyncio.wait(self._relieving)
        self._workshop.close()

    async def run_once(self) -> None:
        """One round of everything."""
        await self.upkeep()
        await self._compaction.round()
        await self._archiving.round()

    async def let_go(self, partition: Partition) -> None:
        """Wait until nothing is under way for a partition that is `gone`; nothing begins after.

        Whoever works on a partition names its files by their paths, which a new topic of the
        same name would have too.
        """
        async with self._workshop.care(partition).lock:
            self._workshop.forget(partition)
        try:
            self._archiving.note_deletion(partition)
        except StorageError as error:
            # What it has in the archive stays there.
            log.error("the archived part of %s is left behind: %s", partition.id, error)

    async def _repeat(self, round_: Round) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await round_()
            except Exception:
                # A round guards each partition; whatever comes here must not end the task.
                self.counters.failures += 1
                log.exception("housekeeping failed and goes on")

    # ---- upkeep --------------------------------------------------------------------------

    async def upkeep(self) -> None:
        """Everything that takes little time, for all partitions."""
        self.counters.rounds += 1
        for care in self._workshop.forget_gone():
            self._archiving.note_deletion(care.partition)
        now_ms = self._workshop.now_ms()
        slow = now_ms >= self._slow_due_ms
        if slow:
            self._slow_due_ms = now_ms + _SLOW_EVERY_MS
        removals: list[tuple[Care, Removal]] = []
        for care in await self._workshop.partitions():
            await self._workshop.breathe()
            partition = care.partition
            if partition.failure is not None:
                await self._repair(care)
            if partition.gone or partition.failure is not None:
                continue
            if care.upkeep.ready(now_ms):
                with self._workshop.guard("upkeep of", partition, care.upkeep):
                    await self._tend(care, slow=slow)
            # Also if that failed: on a full disk this is what makes room.
            if care.retention.ready(now_ms) and care.unfinished_swap is None:
                with self._workshop.guard("retention of", partition, care.retention, final=False):
                    removals += [(care, removal) for removal in self._excess(partition)]
        await self._carry_out(removals, checkpoint=True)

    async def _carry_out(self, removals: list[tuple[Care, Removal]], *, checkpoint: bool) -> None:
        """Remove segments; `checkpoint`: also write one if nothing is to be removed."""
        for _, removal in removals:
            removal.begin()
        if (removals or checkpoint) and await self._checkpointed():
            for care, removal in removals:
                with self._workshop.guard("retention of", care.partition, care.retention):
                    async with care.lock:
                        await self._workshop.whole(self._remove(removal))

    async def relieve(self, partition: Partition) -> None:
        """Remove from one partition now what its retention does not keep."""
        if not self._workshop.stopping and not partition.gone:
            task = asyncio.ensure_future(self._relieve(self._workshop.care(partition)))
            self._relieving.add(task)
            task.add_done_callback(self._relieving.discard)
            await asyncio.shield(task)

    async def _relieve(self, care: Care) -> None:
        partition = care.partition
        if partition.failure is not None or care.unfinished_swap is not None:
            return
        removals: list[tuple[Care, Removal]] = []
        with self._workshop.guard("retention of", partition, care.retention, final=False):
            retention.roll_if_alone(partition)
            if partition.needs_sync:
                await self._sync(partition)
            removals = [(care, removal) for removal in self._excess(partition)]
        await self._carry_out(removals, checkpoint=False)

    async def _tend(self, care: Care, *, slow: bool) -> None:
        partition, now_ms = care.partition, self._workshop.now_ms()
        self._archiving.warn_without_archive(partition)
        if care.unfinished_swap is not None:
            async with care.lock:
                await self._workshop.whole(finish_swap(self._workshop, care))
        partition.roll_if_old(now_ms)
        if not roll_for_compaction(partition, now_ms):
            retention.roll_if_expired(partition, now_ms)
        if partition.needs_sync:
            await self._sync(partition)
        if slow:
            partition.producers.expire(now_ms)
            if not care.lock.locked():
                release_unused_indexes(partition)
                release_unused_files(partition)

    async def _sync(self, partition: Partition) -> None:
        if self._request_sync is not None:
            self._request_sync(partition)
        else:
            await self._workshop.whole(self._sync_here(partition))

    async def _sync_here(self, partition: Partition) -> None:
        plan = partition.plan_sync()
        await self._workshop.on_thread(plan.run)
        partition.finish_sync(plan)

    def _excess(self, partition: Partition) -> list[Removal]:
        now_ms = self._workshop.now_ms()
        expired = retention.expired(partition, now_ms)
        if expired is not None:
            return [expired]
        if partition.archived.reader is None:
            return []
        local = retention.local_excess(partition, now_ms)
        return [local] if local is not None else []

    async def _checkpointed(self) -> bool:
        """Whether segments may be removed now."""
        try:
            await self._workshop.checkpoint()
        except DiskFullError as error:
            # Removing segments is what makes room. It is safe without the checkpoint: a log
            # never begins before its first segment.
            log.warning("no checkpoint: %s", error)
        except StorageError as error:
            self.counters.failures += 1
            log.error("no checkpoint, and no segments are removed: %s", error)
            return False
        return True

    async def _remove(self, removal: Removal) -> None:
        if not removal.segments or not removal.valid:
            return
        self.counters.segments_removed += len(removal.segments)
        self.counters.bytes_removed += sum(segment.size for segment in removal.segments)
        removal.detach()
        if self._on_removed is not None:
            self._on_removed(removal.partition)
        if removal.partition.config.durability == "memory":
            removal.erase()
        else:
            await self._workshop.on_thread(removal.erase)

    # ---- repair --------------------------------------------------------------------------

    async def _repair(self, care: Care) -> None:
        """Try to bring back a partition whose disk failed, once the disk works again."""
        partition = care.partition
        if partition.damaged or partition.gone or not care.repair.ready(self._workshop.now_ms()):
            return
        with self._workshop.guard("repairing", partition, care.repair):
            # First see on a thread whether the disk answers at all: the repair holds the loop.
            probe = partial(probe_disk, partition.disk, partition.folder)
            await self._workshop.on_thread(probe)
            if self._release_waiters is not None:
                # They must be told of the failure before what they wrote is cut off.
                self._release_waiters(partition)
            partition.repair()
            if partition.failure is None:
                self.counters.repairs += 1


def probe_disk(disk: Disk, folder: str) -> None:
    """Write, sync and remove a small file; StorageError if the disk does not do that."""
    path = os.path.join(folder, _PROBE_FILE)
    file = disk.open(path, create=True)
    try:
        file.pwritev([b"probe"], 0)
        file.sync()
    finally:
        file.close()
        disk.remove(path)


def release_unused_indexes(partition: Partition) -> None:
    """Let go of the indexes of closed segments that nobody has read since the last time."""
    if partition.config.durability == "memory":
        # Theirs are nowhere else.
        return
    for segment in partition.closed:
        if not segment.used:
            segment.release()
        segment.used = False


def release_unused_files(partition: Partition) -> None:
    """Close the logs that nobody has read or written since the last time, if all is synced.

    They are opened again when they are needed.
    """
    if partition.config.durability == "memory" or not partition.is_synced:
        return
    for segment in partition.segments:
        if not segment.file_used:
            segment.park()
        segment.file_used = False
