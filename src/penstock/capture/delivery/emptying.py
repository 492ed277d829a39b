"""The rows that a topic holds when its table is truncated: each of them is deleted by its key.

A database tells only that a table was emptied. Whoever keeps its rows must know which they were,
and the topic tells it: every key that the last event has a row for. The topic is read as it is at
the place of the truncate, with what this log transaction has written before it. A crash at any
moment takes the transaction back, and the next session finds the same rows again.

A delete tells the whole row, as far as the topic has it: a reader may know it by other columns than
the key. The rows go through a file, so that memory stays as it is however many there are; of very
large ones only the key does. What lies before a truncate is not read again by the next one of the
same session.

Several tables may share a topic: `owners` tells whose a row is. Rows of others that are in a topic
which is nobody else's are left alone, too; but then nobody knows whether they were the table's once
(its capture was set otherwise), so it is said that the deletes may not be all there. So it is where
retention has taken rows, and where there are more than fit into one log transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from penstock.capture.delivery.config import CaptureConfig
from penstock.capture.delivery.ghosts import Ghosts
from penstock.capture.delivery.metering import Progress
from penstock.capture.delivery.owners import Owners
from penstock.capture.delivery.writing import Log
from penstock.capture.events.batch import Batch
from penstock.capture.events.settings import JSON
from penstock.capture.events.shape import Shape
from penstock.capture.source import Fragment
from penstock.client.inside import Inside

# Records that are looked at together, and keys whose deletes are handed to the writer together.
_DRAIN_KEYS: Final = 4_000
_DRAIN_BYTES: Final = 8 << 20
# Events that are larger are not kept until the rows are deleted.
_ROW_BYTES: Final = 64 << 10
# So much is written in a second even by a slow machine: what takes longer than a log transaction
# may, at this rate, is not begun.
_ROWS_PER_S: Final = 20_000
_BYTES_PER_S: Final = 50 << 20


class Abandoned(Exception):  # noqa: N818
    """Somebody wants the capture to end: what was begun is taken back."""


class Emptying:
    """Finds the rows of truncated tables for one session of a capture."""

    def __init__(
        self,
        config: CaptureConfig,
        log: Log,
        *,
        tell: Callable[[], None],
        is_over: Callable[[], bool],
        complain: Callable[[str], None],
    ) -> None:
        self._log = log
        self._settings = config.events
        self._keep_bytes = _ROW_BYTES if config.events.format == JSON else 0
        self._folder = Path(config.state_dir) if config.state_dir else None
        self._tell = tell
        self._is_over = is_over
        self._complain = complain
        # Where topics ended at the last truncate of a table: none of its rows lies before.
        self._ends: dict[tuple[str, str], dict[int, int]] = {}
        # Tables, by topic and name, whose last truncate may have left rows.
        self._leaving: set[tuple[str, str]] = set()
        self._under_way: _UnderWay | None = None

    def may_leave_rows(self, shape: Shape) -> bool:
        return (shape.topic, shape.table.full_name) in self._leaving

    def cannot(self, shape: Shape) -> None:
        self._complain(
            f"table {shape.table.full_name} was truncated, and its topic {shape.topic} does not "
            "tell its rows apart: they are not deleted from what is made of it"
        )

    def rows(self, shape: Shape, source: Fragment, batch: Batch) -> Iterator[tuple[bytes, bytes]]:
        self._log.put(batch)
        topic, name = shape.topic, shape.table.full_name
        self._leaving.discard((topic, name))
        look = self._log.look_inside(topic, self._ends.get((topic, name)))
        if look is None:
            return
        self._under_way = _UnderWay(name, look.count)
        ghosts = Ghosts(self._folder)
        total = pending = size = 0
        try:
            owner = self._load(ghosts, shape, source, look)
            if not self._fits(ghosts, shape, owner):
                return
            for row in ghosts.unseen_rows(topic, owner):
                yield row
                total, pending = total + 1, pending + 1
                size += len(row[0]) + len(row[1])
                if pending >= _DRAIN_KEYS or size >= _DRAIN_BYTES:
                    self._log.put(batch)
                    self._did(pending)
                    pending = size = 0
        finally:
            self._under_way = None
            ghosts.close()
        if total >= _DRAIN_KEYS:
            # So many deletes are not worth reading again.
            self._log.put(batch)
            look = self._log.look_inside(topic) or look
        self._ends[topic, name] = look.ends

    def _load(self, ghosts: Ghosts, shape: Shape, source: Fragment, look: Inside) -> str:
        """Find the rows that there are; whose they must be."""
        owners = Owners(self._settings, shape.table)
        owner = owners.named(source)

        def owner_of(value: bytes) -> str | None:
            found = owners.of(value)
            # Others are expected in a topic that is shared.
            return None if shape.may_share and found != owner else found

        topic = shape.topic
        ghosts.load(topic, self._found(look), keep_bytes=self._keep_bytes, owner_of=owner_of)
        if look.is_cut:
            self._leaves(
                shape,
                "has forgotten some of its rows by retention: these are not deleted from what is "
                "made of it",
            )
        others = ghosts.count_others(topic, owner)
        if others:
            self._leaves(
                shape,
                f"holds {others} rows that do not look like its own, but like another table's or "
                "another capture's: these are not deleted",
            )
        return owner

    def _fits(self, ghosts: Ghosts, shape: Shape, owner: str) -> bool:
        """Whether the deletes can be written before the log gives the transaction up."""
        count, size = ghosts.measure(shape.topic, owner)
        if self._under_way is not None:
            self._under_way.estimate += count
        left_s = self._log.time_left_s()
        needed_s = max(count / _ROWS_PER_S, size / _BYTES_PER_S)
        if left_s is None or needed_s <= left_s:
            return True
        self._leaves(
            shape,
            f"holds {count} rows, more than are deleted within transaction_timeout_ms: none of "
            "them is. Raise it (and transaction.max.timeout.ms of the broker), or set "
            "transactions = false; penstock capture snapshot --all deletes the rows, too",
        )
        return False

    def _leaves(self, shape: Shape, why: str) -> None:
        name, topic = shape.table.full_name, shape.topic
        self._leaving.add((topic, name))
        self._complain(f"table {name} was truncated, and its topic {topic} {why}")

    def _found(self, look: Inside) -> Iterator[tuple[bytes, bytes | None]]:
        """Keys and values."""
        for _, batch in look.read():
            for first in range(0, batch.num_rows, _DRAIN_KEYS):
                part = batch.slice(first, _DRAIN_KEYS)
                keys, values = part.column("key").to_pylist(), part.column("value").to_pylist()
                for key, value in zip(keys, values, strict=True):
                    if key is not None:
                        yield key, value
                self._did(len(keys))

    def _did(self, count: int) -> None:
        """So much more is done: tell of it, and go on only if nobody minds."""
        if self._under_way is not None:
            self._under_way.done += count
        self._tell()
        if self._is_over():
            raise Abandoned

    def progress(self) -> Progress | None:
        """How far it has come, if a truncate is under way."""
        now = self._under_way
        return None if now is None else now.progress()


class _UnderWay:
    """How much there is to do, and was done: records that are read, and keys that are deleted."""

    def __init__(self, table: str, estimate: int) -> None:
        self._table = table
        self._began = time.monotonic()
        self.estimate = estimate
        self.done = 0

    def progress(self) -> Progress:
        rate = self.done / max(time.monotonic() - self._began, 1e-3)
        left_s = max(self.estimate - self.done, 0) / rate if rate > 0 else None
        return Progress(self._table, self.done, self.estimate, rate, left_s, is_truncate=True)
