"""Incremental snapshots: which chunk to ask for next, and what a chunk that came means.

Pure: no clock, no database, no log. Tables are read one after the other, chunk by chunk, while the
stream goes on; the cursor is in the capture's state, which is written in the same log transaction
as the rows, so that a snapshot goes on where the log says after any crash.

The size of chunks follows the time they take: small enough to hold nothing up, large enough to get
somewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.capture.delivery.config import SnapshotSettings
from penstock.capture.delivery.state import State, TableSnapshot
from penstock.capture.source import CaptureError, Chunk, ChunkRequest

# Tables that may wait.
QUEUE_MAX: Final = 1_000
CHUNK_ROWS_MIN: Final = 64


@dataclass(frozen=True, slots=True)
class Done:
    """A table that was read to its end, or why it was not."""

    table: str
    rows: int
    problem: str = ""


class Incremental:
    """Works on the queue of a state."""

    def __init__(self, state: State, settings: SnapshotSettings) -> None:
        self._state = state
        self._settings = settings
        self._size = min(settings.chunk_rows, settings.chunk_rows_max)
        self._asked: ChunkRequest | None = None
        self._asked_at = 0.0

    def add(self, id_: str, table: str, where: str = "", estimate: int | None = None) -> None:
        """Have a table read; one that is in the queue with this condition is not read twice."""
        queue = self._state.queue
        if any((item.table, item.where) == (table, where) for item in queue):
            return
        if len(queue) >= QUEUE_MAX:
            raise CaptureError(f"{QUEUE_MAX} snapshots wait already: {table} is left out")
        queue.append(TableSnapshot(id_, table, where, estimate=estimate))

    def drop(self, tables: list[str]) -> None:
        """Forget what waits or is under way, of these tables, or of all if none is named."""
        kept = [item for item in self._state.queue if tables and item.table not in tables]
        if self._asked is not None and all(
            not self._asked.id.startswith(f"{item.id}/") for item in kept[:1]
        ):
            self._asked = None
        self._state.queue[:] = kept

    def next_request(self, now_s: float, now_ms: int) -> ChunkRequest | None:
        """What to ask the source for now, if anything."""
        queue = self._state.queue
        if self._asked is not None or not queue or self._state.queue_paused:
            return None
        item = queue[0]
        item.started_ms = item.started_ms or now_ms
        self._asked = ChunkRequest(
            f"{item.id}/{item.chunks}", item.table, item.cursor, self._size, item.where
        )
        self._asked_at = now_s
        return self._asked

    def is_ours(self, chunk: Chunk) -> bool:
        """Whether a chunk is the one that was asked for, and still wanted."""
        return self._asked is not None and chunk.request.id == self._asked.id

    def take(self, chunk: Chunk, now_s: float) -> Done | None:
        """A chunk is (about to be) in the log: move on. What is told when a table is done."""
        self._asked = None
        item = self._state.queue[0]
        item.chunks += 1
        item.rows += len(chunk.rows)
        if chunk.last_key is not None:
            item.after = [part.decode() for part in chunk.last_key]
        self._adapt(now_s - self._asked_at)
        if chunk.is_last or chunk.problem:
            del self._state.queue[0]
            return Done(item.table, item.rows, chunk.problem)
        return None

    def _adapt(self, took_s: float) -> None:
        wanted_s = self._settings.chunk_ms / 1_000
        if took_s < wanted_s / 2:
            self._size = min(self._size * 2, self._settings.chunk_rows_max)
        elif took_s > wanted_s * 2:
            low = min(CHUNK_ROWS_MIN, self._settings.chunk_rows)
            self._size = max(self._size // 2, low)
