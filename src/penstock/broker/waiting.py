"""Those who wait for a partition: writers for their records to be safe, readers for new ones.

Nobody polls. A writer is called once its offset is visible or the partition has failed; a reader
is called when the partition's visible end has moved, or its topic is gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from penstock.broker.committer import Committer
from penstock.errors import StorageError
from penstock.log.partition import Partition

# Called with None when the records are safe, with the error when they are not.
WriteDone = Callable[[StorageError | None], None]
ReadReady = Callable[[], None]


class SyncWaiters:
    """Writers that wait for the group commit, per partition in the order of their offsets."""

    def __init__(self) -> None:
        self._waiting: dict[Partition, deque[tuple[int, WriteDone]]] = {}
        self._committer: Committer | None = None

    def attach(self, committer: Committer) -> None:
        self._committer = committer

    def add(self, partition: Partition, next_offset: int, done: WriteDone) -> None:
        """`done` is called once everything below `next_offset` is safe."""
        queue = self._waiting.get(partition)
        if queue is None:
            queue = self._waiting[partition] = deque()
        queue.append((next_offset, done))

    def request_sync(self, partition: Partition) -> None:
        assert self._committer is not None
        self._committer.request(partition)

    def release(self, partition: Partition) -> None:
        """After a sync: call whoever need not wait any longer."""
        queue = self._waiting.get(partition)
        if queue is None:
            return
        failure = partition.failure
        if partition.gone and failure is None:
            failure = StorageError(f"the topic of {partition.id} was deleted")
        visible = partition.visible
        while queue and (queue[0][0] <= visible or failure is not None):
            next_offset, done = queue.popleft()
            done(None if next_offset <= visible else failure)
        if not queue:
            del self._waiting[partition]

    async def synced(self, partition: Partition) -> None:
        """Wait until everything written to the partition so far is safe."""
        if partition.visible >= partition.log_end:
            return
        outcome: asyncio.Future[StorageError | None]
        outcome = asyncio.get_running_loop().create_future()

        def done(error: StorageError | None) -> None:
            # Whoever waited may have been cancelled meanwhile.
            if not outcome.done():
                outcome.set_result(error)

        self.add(partition, partition.log_end, done)
        self.request_sync(partition)
        error = await outcome
        if error is not None:
            raise error


class NameLocks:
    """One at a time for each name: a topic is not made while one of its name is deleted."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, list[None]]] = {}

    @asynccontextmanager
    async def alone(self, name: str) -> AsyncIterator[None]:
        lock, users = self._locks.setdefault(name, (asyncio.Lock(), []))
        users.append(None)
        try:
            async with lock:
                yield
        finally:
            users.pop()
            if not users:
                del self._locks[name]


class ReadWaiters:
    """Readers that wait for new records, per partition."""

    def __init__(self) -> None:
        self._waiting: dict[Partition, dict[object, ReadReady]] = {}

    def add(self, partition: Partition, reader: object, ready: ReadReady) -> None:
        self._waiting.setdefault(partition, {})[reader] = ready

    def discard(self, partition: Partition, reader: object) -> None:
        readers = self._waiting.get(partition)
        if readers is not None:
            readers.pop(reader, None)
            if not readers:
                del self._waiting[partition]

    def wake(self, partition: Partition) -> None:
        """The partition's visible end has moved."""
        readers = self._waiting.get(partition)
        if readers:
            for ready in list(readers.values()):
                ready()
