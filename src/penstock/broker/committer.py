"""The group commit: appends of many requests share one fsync.

Partitions that need a sync are planned on the event loop, run on a few threads, and finished on
the event loop again. At most one sync of a partition is under way; whatever arrives meanwhile is
covered by the next, so the busier the disk the more records each sync carries.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import perf_counter

from penstock.broker.metrics.metering import Histogram
from penstock.log.partition import Partition
from penstock.log.sync import SyncPlan

log = logging.getLogger(__name__)

# A partition, what its sync must do, and when that was asked for.
_Job = tuple[Partition, SyncPlan, float]


class Committer:
    """Syncs partitions in the background; tells `on_synced` of each one done."""

    def __init__(self, on_synced: Callable[[Partition], None], threads: int = 4) -> None:
        self._on_synced = on_synced
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._finished: list[_Job] = []
        self._settling: dict[Partition, list[asyncio.Event]] = {}
        self._lock = threading.Lock()
        self._running = 0
        # How long the disk took, and how long it took from the request until it was known.
        self.sync_seconds = Histogram.of_seconds()
        self.commit_seconds = Histogram.of_seconds()
        self._idle = asyncio.Event()
        self._idle.set()
        self._threads = [
            threading.Thread(target=self._work, name=f"sync-{at}", daemon=True)
            for at in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def request(self, partition: Partition) -> None:
        """Have the partition synced soon, if there is anything to sync."""
        if partition.needs_sync and not partition.gone:
            self._running += 1
            self._idle.clear()
            self._jobs.put((partition, partition.plan_sync(), perf_counter()))

    async def settled(self, partition: Partition) -> None:
        """Wait until no sync of this partition is under way; for one that is `gone`."""
        if partition.sync_running:
            settled = asyncio.Event()
            self._settling.setdefault(partition, []).append(settled)
            await settled.wait()

    async def drain(self) -> None:
        """Wait until no sync is under way."""
        await self._idle.wait()

    async def close(self) -> None:
        await self.drain()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            started = perf_counter()
            job[1].run()
            with self._lock:
                self.sync_seconds.observe(perf_counter() - started)
                self._finished.append(job)
                wake = len(self._finished) == 1
            if wake:
                self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        with self._lock:
            finished, self._finished = self._finished, []
        for partition, plan, requested in finished:
            self._running -= 1
            self.commit_seconds.observe(perf_counter() - requested)
            try:
                partition.finish_sync(plan)
                self.request(partition)
                self._on_synced(partition)
            except Exception:
                # A bug; the other partitions must not wait for ever because of it.
                log.exception("after a sync of %s", partition.id)
            for settled in self._settling.pop(partition, ()):
                settled.set()
        if not self._running:
            self._idle.set()
