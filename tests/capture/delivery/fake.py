"""A database in memory, and a source that reads it: what the runner is tested with.

Its log is a list of committed transactions; a position is how many of them have been read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import orjson

from penstock.capture.source import (
    Change,
    Check,
    Chunk,
    ChunkRequest,
    Idle,
    Item,
    Part,
    Position,
    PositionLostError,
    Row,
    Snapshot,
    Source,
    SourceSettings,
    SourceStatus,
    Table,
)
from penstock.client.table_schemas import TableColumn, ValueType

STRING = ValueType("string")
INT = ValueType("int64")


def table(name: str) -> Table:
    columns = (TableColumn("id", INT, optional=False), TableColumn("text", STRING))
    return Table("", "", name, columns, ("id",))


@dataclass(frozen=True, slots=True)
class Step:
    """What a transaction does to a row: None deletes it."""

    table: str
    id: int
    text: str | None


@dataclass(frozen=True, slots=True)
class Truncate:
    """What empties a table."""

    table: str


Transaction = Sequence[Step | Truncate]


@dataclass
class Database:
    """Rows by table and id; one lock around everything."""

    tables: dict[str, Table] = field(default_factory=dict)
    rows: dict[str, dict[int, str]] = field(default_factory=dict)
    log: list[list[Change]] = field(default_factory=list)
    # What lies before it is gone.
    log_start: int = 0
    is_set_up: bool = False
    confirmed: int = -1
    lock: threading.RLock = field(default_factory=threading.RLock)
    # As source blocks name the server and the database.
    server: str = "fake"
    name: str = "shop"

    def create(self, name: str, made: Table | None = None) -> Table:
        self.rows[name] = {}
        self.tables[name] = made or table(name)
        return self.tables[name]

    def commit(self, *steps: Step | Truncate) -> None:
        with self.lock:
            changes = [change for step in steps if (change := self._apply(step)) is not None]
            if self.is_set_up and changes:
                self.log.append(changes)

    def block(self, made: Table, snapshot: str) -> bytes:
        return orjson.dumps(
            {
                "version": "1",
                "connector": "fake",
                "name": self.server,
                "ts_ms": 1,
                "snapshot": snapshot,
                "db": self.name,
                "table": made.name,
            }
        )

    def _apply(self, step: Step | Truncate) -> Change | None:
        rows = self.rows[step.table]
        if isinstance(step, Truncate):
            rows.clear()
            made = self.tables[step.table]
            return Change(made, "t", None, None, self.block(made, "false"), 1)
        old = rows.pop(step.id, None)
        before = None if old is None else _row(step.id, old)
        after = None if step.text is None else _row(step.id, step.text)
        if step.text is not None:
            rows[step.id] = step.text
        if before is None and after is None:
            return None
        op = "c" if before is None else "d" if after is None else "u"
        made = self.tables[step.table]
        return Change(made, op, before, after, self.block(made, "false"), 1)


def _row(id_: int, text: str) -> Row:
    return (b"%d" % id_, orjson.dumps(text))


class FakeSnapshot(Snapshot):
    def __init__(self, source: FakeSource) -> None:
        database = source.database
        self._source = source
        with database.lock:
            self.position = {"n": len(database.log)}
            self.tables = list(database.tables.values())
            self._rows = {
                name: [_row(id_, text) for id_, text in sorted(rows.items())]
                for name, rows in database.rows.items()
            }

    def rows(self, table: Table, *, where: str = "") -> Iterator[list[Row]]:
        rows = self._rows[table.name]
        size = self._source.rows_per_read
        for at in range(0, len(rows), size):
            self._source.happens("rows")
            yield rows[at : at + size]

    def source(self, table: Table) -> bytes:
        return self._source.database.block(table, "true")

    def estimate(self, table: Table) -> int | None:
        return len(self._rows[table.name])

    def close(self) -> None:
        pass


class FakeSource(Source):
    """Reads a Database. `happens` is told of every step, and may raise."""

    kind = "fake"

    def __init__(
        self,
        settings: SourceSettings,
        database: Database,
        *,
        stop: threading.Event | None = None,
        happens: Callable[[str], None] = lambda step: None,
        changes_per_part: int = 2,
        rows_per_read: int = 2,
        checks: list[Check] | None = None,
        pause_s: float = 0.0,
    ) -> None:
        self.settings = settings
        self.database = database
        self.happens = happens
        self.rows_per_read = rows_per_read
        self._stop = stop
        self._changes_per_part = changes_per_part
        self._checks = checks or []
        # Between parts, so that they do not all come together.
        self._pause_s = pause_s
        self._requests: SimpleQueue[ChunkRequest] = SimpleQueue()
        self._closed = threading.Event()
        self.asked: list[ChunkRequest] = []

    def check(self) -> list[Check]:
        return self._checks

    def tables(self) -> list[Table]:
        return list(self.database.tables.values())

    def setup(self) -> None:
        self.database.is_set_up = True

    def remove(self) -> list[str]:
        self.database.is_set_up = False
        return []

    def snapshot(self) -> Snapshot:
        self.happens("snapshot")
        return FakeSnapshot(self)

    def stream(self, position: Position) -> Iterator[Item]:
        at = int(position["n"])
        began = at
        if at < self.database.log_start:
            raise PositionLostError(f"{at} is gone: the log begins at {self.database.log_start}")
        while not self._closed.is_set():
            while at < len(self.database.log):
                changes = self.database.log[at]
                at += 1
                for part in self._parts(changes, at):
                    self.happens("part")
                    yield part
                    self._closed.wait(self._pause_s)
            try:
                request = self._requests.get(timeout=self.settings.idle_ms / 1_000)
            except Empty:
                request = None
            if request is not None:
                with self.database.lock:
                    if at == len(self.database.log):
                        chunk = self._chunk(request)
                        request = None
                if request is not None:
                    self._requests.put(request)
                else:
                    yield chunk
                continue
            yield Idle({"n": at})
            done = at == len(self.database.log) and max(self.database.confirmed, began) >= at
            if self._stop is not None and done:
                self._stop.set()

    def _parts(self, changes: list[Change], after: int) -> Iterator[Part]:
        size = self._changes_per_part
        for start in range(0, len(changes), size):
            yield Part(
                str(after),
                changes[start : start + size],
                {"n": after},
                1,
                is_first=start == 0,
                is_last=start + size >= len(changes),
            )

    def _chunk(self, request: ChunkRequest) -> Chunk:
        made = self.database.tables.get(request.table)
        if made is None:
            gone = table(request.table)
            return Chunk(request, gone, [], b"{}", 1, None, True, problem="there is no such table")
        first = -1 if request.after is None else int(request.after[0])
        ids = [id_ for id_ in sorted(self.database.rows[request.table]) if id_ > first]
        taken = ids[: request.limit]
        rows = [_row(id_, self.database.rows[request.table][id_]) for id_ in taken]
        last = (b"%d" % taken[-1],) if taken else None
        block = self.database.block(made, "incremental")
        return Chunk(request, made, rows, block, 1, last, len(ids) <= request.limit)

    def ask(self, request: ChunkRequest) -> None:
        self.asked.append(request)
        self.happens("ask")
        self._requests.put(request)

    def confirm(self, position: Position) -> None:
        self.happens("confirm")
        self.database.confirmed = max(self.database.confirmed, int(position["n"]))

    def status(self) -> SourceStatus:
        return SourceStatus({"n": len(self.database.log)})

    def close(self) -> None:
        self._closed.set()


def parsed(value: bytes | None) -> Any:
    return None if value is None else orjson.loads(value)
