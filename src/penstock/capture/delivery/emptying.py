"""The rows that a topic holds when its table is truncated: each of them is deleted by its key.

A database tells only that a table was emptied. Whoever keeps its rows must know which they were,
and the topic tells it: every key that the last event has a row for. The topic is read as it is at
the place of the truncate, with what this log transaction has written before it. A crash at any
moment takes the transaction back, and the next session finds the same rows again.

A delete tells the whole row, as far as the topic has it: a reader may know it by other columns than
the key. The rows go through a file, so that memory stays as it is however many there are; of very
large ones only the key does. What lies before a truncate is not read again by the next one of the
same session.

Several tables may share a topic. Whose a row is, its event's source block tells; with JSON, that
is. (In Avro it is not looked at: there a shared topic's tables are not told apart.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.capture.delivery.config import CaptureConfig
from penstock.capture.delivery.ghosts import Ghosts
from penstock.capture.delivery.metering import Progress
from penstock.capture.delivery.writing import Log
from penstock.capture.events.batch import Batch
from penstock.capture.events.settings import JSON
from penstock.capture.events.shape import Shape
from penstock.capture.source import Fragment
from penstock.client.inside import Inside

# Records that are looked at together, and keys whose deletes are handed to the writer together.
_DRAIN_KEYS: Final = 4_000
# Events that are larger are not kept until the rows are deleted.
_ROW_BYTES: Final = 64 << 10
# What tells tables apart in a source block.
_OWNER: Final = ("db", "schema", "table")


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
        self._is_json = config.events.format == JSON
        self._folder = Path(config.state_dir) if config.state_dir else None
        self._tell = tell
        self._is_over = is_over
        self._complain = complain
        # Where topics ended at the last truncate of a table: none of its rows lies before.
        self._ends: dict[tuple[str, str], dict[int, int]] = {}
        # Topics whose retention has taken records, so that rows may be unknown.
        self._forgetful: set[str] = set()
        self._under_way: _UnderWay | None = None

    def has_forgotten(self, shape: Shape) -> bool:
        return shape.topic in self._forgetful

    def cannot(self, shape: Shape) -> None:
        self._complain(
            f"table {shape.table.full_name} was truncated, and its topic {shape.topic} does not "
            "tell its rows apart: they are not deleted from what is made of it"
        )

    def rows(self, shape: Shape, source: Fragment, batch: Batch) -> Iterator[tuple[bytes, bytes]]:
        self._log.put(batch)
        topic, name = shape.topic, shape.table.full_name
        look = self._log.look_inside(topic, self._ends.get((topic, name)))
        if look is None:
            return
        self._forgetful.discard(topic)
        if look.is_cut and not self._log.topics.only_compacts(topic):
            self._forgetful.add(topic)
            self._complain(
                f"table {name} was truncated, and its topic {topic} has forgotten some of its rows "
                "by retention: these are not deleted from what is made of it"
            )
        self._under_way = _UnderWay(name, look.count)
        ghosts = Ghosts(self._folder)
        try:
            found = self._found(look, _Owner(source, is_shared=shape.may_share))
            ghosts.load(topic, found, keep_bytes=_ROW_BYTES if self._is_json else 0)
            self._under_way.estimate = look.count + ghosts.count(topic)
            number = 0
            for number, row in enumerate(ghosts.unseen_rows(topic), 1):
                yield row
                if number % _DRAIN_KEYS == 0:
                    self._log.put(batch)
                    self._did(_DRAIN_KEYS)
        finally:
            self._under_way = None
            ghosts.close()
        if number >= _DRAIN_KEYS:
            # So many deletes are not worth reading again.
            self._log.put(batch)
            look = self._log.look_inside(topic) or look
        self._ends[topic, name] = look.ends

    def _found(self, look: Inside, owner: _Owner) -> Iterator[tuple[bytes, bytes | None]]:
        """Keys and values; of rows that are not the table's, no value."""
        for _, batch in look.read():
            for first in range(0, batch.num_rows, _DRAIN_KEYS):
                part = batch.slice(first, _DRAIN_KEYS)
                keys, values = part.column("key").to_pylist(), part.column("value").to_pylist()
                for key, value in zip(keys, values, strict=True):
                    if key is None:
                        continue
                    if value is None or not self._is_json or owner.is_of(value):
                        yield key, value
                    else:
                        yield key, None
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


class _Owner:
    """The table that a truncate is of, as source blocks name it."""

    def __init__(self, source: Fragment, *, is_shared: bool) -> None:
        block: dict[str, Any] = orjson.loads(source)
        self._names = {name: block.get(name) for name in _OWNER}
        # A look is enough where no other table is likely to be here.
        self._signs = [
            b'"%b":%b' % (name.encode(), orjson.dumps(told))
            for name, told in self._names.items()
            if told is not None
        ]
        self._is_shared = is_shared

    def is_of(self, value: bytes) -> bool:
        """Whether an event is of this table."""
        if not self._is_shared and all(sign in value for sign in self._signs):
            return True
        try:
            event = orjson.loads(value)
        except orjson.JSONDecodeError:
            return False
        if isinstance(event, dict) and isinstance(event.get("payload"), dict):
            event = event["payload"]
        block = event.get("source") if isinstance(event, dict) else None
        return isinstance(block, dict) and all(
            block.get(name) == told for name, told in self._names.items()
        )
