"""Items of a source into the log, in transactions of the log: the heart of a capture.

It works on a thread of its own, beside the one that reads the database. A log transaction holds
whole source transactions: many small ones together, as many as came while the last one was being
committed, or one large one alone, however large. With the events goes the state: the position they
lead to, cursors of snapshots, signals that were heard. So the log never says less or more than what
was done.

What others ask for by signals is done here, too, since it changes the state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

from penstock.capture.blocks import Block, segments_of
from penstock.capture.delivery.commands import Commands
from penstock.capture.delivery.config import CaptureConfig
from penstock.capture.delivery.emptying import Abandoned, Emptying
from penstock.capture.delivery.ghosts import Ghosts
from penstock.capture.delivery.handover import Handover
from penstock.capture.delivery.incremental import Incremental
from penstock.capture.delivery.listening import Listener
from penstock.capture.delivery.marks import INCREMENTAL, Marked, Marks, with_mark
from penstock.capture.delivery.metering import Meter, Progress
from penstock.capture.delivery.owners import Owners
from penstock.capture.delivery.pace import Pace
from penstock.capture.delivery.state import DONE, RUNNING, State
from penstock.capture.delivery.writing import Log
from penstock.capture.events.batch import Batch
from penstock.capture.events.changes import COMPOSERS_MAX, Events
from penstock.capture.events.composer import Composer
from penstock.capture.source import (
    TRUNCATE,
    Chunk,
    ChunkRequest,
    Fragment,
    Idle,
    Item,
    Part,
    Position,
    Row,
    Table,
)

# Records that are put together before they are handed to the writer.
_DRAIN_RECORDS: Final = 4_000


@dataclass(frozen=True, slots=True)
class SnapshotBegin:
    """All tables are going to be read at one position."""

    estimate: int | None


@dataclass(frozen=True, slots=True)
class SnapshotRows:
    table: Table
    rows: Sequence[Row]
    source: Fragment


@dataclass(frozen=True, slots=True)
class TableEnd:
    table: Table
    source: Fragment


@dataclass(frozen=True, slots=True)
class SnapshotEnd:
    """All rows have been read; the stream goes on from the position."""

    position: Position
    tables: list[str]


@dataclass(frozen=True, slots=True)
class TablesThere:
    """The tables that the database has by now; of some of them no change may ever have come."""

    tables: list[Table]


Work = Item | SnapshotBegin | SnapshotRows | TableEnd | SnapshotEnd | TablesThere


class Deliverer:
    """Delivers what one session of a capture reads."""

    def __init__(
        self,
        config: CaptureConfig,
        log: Log,
        events: Events,
        state: State,
        meter: Meter,
        *,
        ask: Callable[[ChunkRequest], None],
        listener: Listener,
        tell: Callable[[], None],
        known_tables: list[Table],
        emptying: Emptying,
    ) -> None:
        self._config = config
        self._log = log
        self._events = events
        self.state = state
        self.meter = meter
        self.incremental = Incremental(state, config.snapshot)
        self._ask = ask
        self._listener = listener
        # Called now and then, to tell people how it goes.
        self._tell = tell
        self._emptying = emptying
        names = [table.full_name for table in known_tables]
        self.commands = Commands(config, state, self.incremental, names)
        self._known = set(state.tables)
        self._looked_at: set[Table] = set()
        self._batch = Batch()
        self._batched = 0
        self._is_inside = False
        self._uncommitted_since: float | None = None
        self._recorded_at = time.monotonic()
        self._pace = Pace(config.delivery.linger_ms / 1_000, self._recorded_at)
        self._recorded: Position | None = state.position
        self._next_tick = 0.0
        self._marks: Marks | None = None
        self._sources: dict[Table, Fragment] = {}
        self._ghosts: Ghosts | None = None
        # The source may forget what lies before it.
        self.confirmed: Position | None = None
        # Why the session is to end: "pause", "stop", "snapshot"; "" while it goes on.
        self.wish = ""

    # ---- the loop ------------------------------------------------------------------------

    def run(self, handover: Handover[Work]) -> None:
        """Deliver until nothing comes any more; whole transactions that came are committed."""
        control_s = self._config.delivery.control_ms / 1_000
        try:
            while not handover.is_over:
                since, wait_s = self._uncommitted_since, control_s
                if since is not None and not self._is_inside:
                    wait_s = self._pace.wait_s(since, time.monotonic())
                works = handover.take(wait_s)
                self._events.moment.tick()
                for work in works:
                    if type(work) is Part:
                        self._part(work)
                    else:
                        self._work(work)
                if self._batched:
                    # What came together is written together; nothing piles up here.
                    self._drain()
                self._rest()
            self._finish()
        except Abandoned:
            self._log.abort()
            self.meter.dropped()
        finally:
            if self._ghosts is not None:
                self._ghosts.close()

    def _rest(self) -> None:
        """What is done between items."""
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + self._config.delivery.control_ms / 1_000
            self.control()
        self._request_chunk()
        since = self._uncommitted_since
        if since is not None and not self._is_inside:
            if not self._pace.wait_s(since, now):
                self.commit()
        elif since is None and self._is_due(now):
            self.commit()

    def _is_due(self, now: float) -> bool:
        """Whether the position has moved without any change, and that should be recorded."""
        waited_ms = (now - self._recorded_at) * 1_000
        return (
            self.state.position != self._recorded and waited_ms >= self._config.delivery.position_ms
        )

    def _finish(self) -> None:
        if self._is_inside:
            self._log.abort()
            self.meter.dropped()
        elif self._uncommitted_since is not None or self.state.position != self._recorded:
            self.commit()

    def commit(self) -> None:
        """Everything up to here is in the log, with the state."""
        self._drain()
        self._log.commit(self.state)
        self.meter.committed()
        self._uncommitted_since = None
        self._recorded_at = time.monotonic()
        self._pace.committed(self._recorded_at)
        self._recorded = self.confirmed = self.state.position

    def _drain(self) -> None:
        self._log.put(self._batch)
        self._batched = 0

    def _added(self, count: int) -> None:
        self._batched += count
        self._pace.added(count)
        self.state.events += count
        if self._uncommitted_since is None:
            self._uncommitted_since = time.monotonic()
        if self._batched >= _DRAIN_RECORDS:
            self._drain()

    def _is_full(self) -> bool:
        settings = self._config.delivery
        return (
            self._log.records + self._batched >= settings.batch_changes
            or self._log.size_bytes >= settings.batch_bytes
        )

    # ---- items ---------------------------------------------------------------------------

    def _work(self, work: Work) -> None:
        if self.wish:
            # The session ends: what still comes is read again by the next one.
            return
        match work:
            case Idle():
                if not self._is_inside:
                    self.state.position = work.position
            case Chunk():
                self._chunk(work)
            case SnapshotBegin():
                self._begin_snapshot(work)
            case SnapshotRows():
                self._rows(work)
            case TableEnd():
                self._table_end(work)
            case SnapshotEnd():
                self._snapshot_end(work)
            case TablesThere():
                new = [table for table in work.tables if table.full_name not in self._known]
                self._events.introduce(new)
                for table in new:
                    self.discover(table.full_name)
        if not self._is_inside and self._is_full():
            self.commit()

    def _part(self, part: Part) -> None:
        """By far the most frequent item."""
        if self.wish:
            return
        is_own = not part.is_last or _begins_with_truncate(part)
        if part.is_first and is_own and self._uncommitted_since is not None:
            # A large transaction has a log transaction of its own; so has what takes a while.
            self.commit()
        if self._config.snapshot.new_tables:
            looked_at = self._looked_at
            for changes in segments_of(part.changes):
                # All changes of a block are of one table.
                for change in changes[:1] if isinstance(changes, Block) else changes:
                    if change.table not in looked_at:
                        self._discover(change.table)
        self._is_inside = not part.is_last
        count = self._events.part(part, self._batch)
        if count or self._batch.count or self._uncommitted_since is not None:
            self.meter.part(len(part.changes), part.commit_ts_us, is_last=part.is_last)
            self._added(count)
        # Otherwise nothing of it is to be written: only the position moves, as if it were idle.
        if part.is_last:
            self.state.position = part.position
            if self._is_full():
                self.commit()

    def _chunk(self, chunk: Chunk) -> None:
        if not self.incremental.is_ours(chunk):
            return
        source = with_mark(chunk.source, INCREMENTAL)
        count = self._events.rows(chunk.table, chunk.rows, source, self._batch)
        self.meter.snapshot_rows += len(chunk.rows)
        done = self.incremental.take(chunk, time.monotonic())
        if done is not None and done.problem:
            self.commands.complain(f"the snapshot of {done.table} was given up: {done.problem}")
        self._added(count)

    def _request_chunk(self) -> None:
        now_ms = time.time_ns() // 1_000_000
        is_new = bool(self.state.queue) and not self.state.queue[0].started_ms
        request = self.incremental.next_request(time.monotonic(), now_ms)
        if request is not None:
            if is_new or request.after is None:
                self.meter.begin_snapshot(self.state.queue[0].estimate)
            self._ask(request)

    def _discover(self, table: Table) -> None:
        """A table that no snapshot has read is read from now on, beside its changes."""
        if len(self._looked_at) >= COMPOSERS_MAX:
            self._looked_at.clear()
        self._looked_at.add(table)
        if table.full_name not in self._known:
            self.discover(table.full_name)

    def discover(self, name: str) -> None:
        self._known.add(name)
        self.state.tables = sorted(self._known)
        self.incremental.add(uuid4().hex, name, self.commands.where(name))

    # ---- the snapshot of all tables ------------------------------------------------------

    def _begin_snapshot(self, begin: SnapshotBegin) -> None:
        self._marks = Marks()
        folder = Path(self._config.state_dir) if self._config.state_dir else None
        self._ghosts = Ghosts(folder)
        self.state.snapshot = RUNNING
        self.state.queue.clear()
        self.meter.begin_snapshot(begin.estimate)
        self.commit()

    def _rows(self, work: SnapshotRows) -> None:
        assert self._marks is not None
        self._sources[work.table] = work.source
        topic = self._haunted(work.table, work.source)
        if topic is not None and self._ghosts is not None:
            composer = self._events.composer(work.table, work.source)
            assert isinstance(composer, Composer)
            self._ghosts.seen(topic, composer.keys_of(work.rows))
        self.meter.snapshot_rows += len(work.rows)
        self._emit(self._marks.add(work.table, work.rows))

    def _table_end(self, work: TableEnd) -> None:
        assert self._marks is not None
        self._sources[work.table] = work.source
        topic = self._haunted(work.table, work.source)
        if topic is not None and self._ghosts is not None:
            composer = self._events.composer(work.table, work.source)
            assert isinstance(composer, Composer)
            owner = Owners(self._config.events, work.table).named(work.source)
            for key, event in self._ghosts.unseen_rows(topic, owner):
                composer.gone(key, work.source, self._batch, event=event)
                self._added(1)
                if self._is_full():
                    self.commit()
            others = 0 if composer.shape.may_share else self._ghosts.count_others(topic, owner)
            if others:
                self.commands.complain(
                    f"the topic {topic} holds {others} rows that do not look like its table's own, "
                    "but like another one's or another capture's: they are not deleted"
                )
        self._emit(self._marks.end(work.table))

    def _snapshot_end(self, work: SnapshotEnd) -> None:
        if self._marks is not None:
            self._emit(self._marks.finish())
        self.state.position = work.position
        self.state.snapshot = DONE
        self._known.update(work.tables)
        self.state.tables = sorted(self._known)
        self._marks = None
        self.commit()

    def _emit(self, marked: list[Marked]) -> None:
        for table, rows, mark in marked:
            source = with_mark(self._sources[table], mark)
            self._added(self._events.rows(table, rows, source, self._batch))

    def _haunted(self, table: Table, source: Fragment) -> str | None:
        """The topic of a table, if it may hold rows that are gone; it is read the first time."""
        composer = self._events.composer(table, source)
        if not isinstance(composer, Composer) or not composer.is_keyed or self._ghosts is None:
            return None
        if not self._ghosts.knows(composer.topic):
            records = self._log.read(composer.topic)
            owners = Owners(self._config.events, table)
            self._ghosts.load(composer.topic, records, owner_of=owners.of)
        return composer.topic if self._ghosts.has_any(composer.topic) else None

    # ---- control -------------------------------------------------------------------------

    def control(self) -> None:
        """Hear what others say, and do it; what it changes is committed at once."""
        self._tell()
        if self._is_inside:
            # They wait for the end of the transaction: nothing can be committed before.
            return
        heard, after = self._listener.hear(self.state.signals)
        if after == self.state.signals:
            return
        for signal in heard:
            self.wish = self.commands.obey(signal, self.wish)
        self.state.signals = after
        if heard:
            self.commit()

    @property
    def unfilled(self) -> int:
        """Unavailable values that the log did not have either."""
        return self._events.missed

    # ---- what is told --------------------------------------------------------------------

    def progress(self) -> Progress | None:
        """How far a truncate or a snapshot has come, if one is under way."""
        emptied = self._emptying.progress()
        if emptied is not None:
            return emptied
        meter = self.meter
        if self._marks is not None:
            return meter.progress("", meter.snapshot_rows, meter.snapshot_estimate)
        queue = self.state.queue
        if not queue:
            return None
        item = queue[0]
        return meter.progress(
            item.table,
            item.rows,
            item.estimate,
            is_incremental=True,
            is_paused=self.state.queue_paused,
            waiting=len(queue) - 1,
        )


def _begins_with_truncate(part: Part) -> bool:
    changes = part.changes
    return isinstance(changes, list) and bool(changes) and changes[0].op == TRUNCATE
