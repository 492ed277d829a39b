"""Rows of a table read while the stream goes on, put where they are exactly right.

A chunk is read in a transaction of its own, whose snapshot says which transactions it sees. Then a
mark is written into the server's log, and where the mark appears in the stream the rows are put. By
then the stream has told changes that the snapshot did not see; the rows they changed are left out,
because the stream had them, and newer. Which these are is decided by the transactions' numbers, not
by places in the log: a commit can stand in the log a moment before others see it.

- From the moment a request is taken up, every change of its table in the stream is remembered with
  its transaction.
- A snapshot that does not see a transaction which the stream told *before* that moment is thrown
  away, and another one taken: it would bring rows that are too old.
- Where a change left out a large value that it did not touch (TOAST), the row that was read has it:
  then the row is put as the change left it, with that value.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, time_ns
from typing import Final
from uuid import uuid4

import orjson
import psycopg
from psycopg import sql

from penstock.capture.postgres.catalog import Catalog, TableInfo
from penstock.capture.postgres.connect import Connection, PostgresUrl, explained
from penstock.capture.postgres.decoders import Relation
from penstock.capture.postgres.setup import published
from penstock.capture.postgres.snapshot import copy_lines, decode_lines, select
from penstock.capture.source import (
    DELETE,
    TRUNCATE,
    UNAVAILABLE,
    CaptureError,
    Change,
    Chunk,
    ChunkRequest,
    Part,
    Row,
    Table,
)

MARK: Final = "penstock.chunk"
# How many transactions of the stream are remembered, to know what a snapshot must see.
SEEN_MAX: Final = 1 << 16
# Changes of the table while it is read; more of them, and the chunk is read again, half as large.
CHANGES_MAX: Final = 200_000
QUEUE_MAX: Final = 10_000
# How long a transaction that was running when the stream began is taken for one being committed.
SETTLE_S: Final = 5.0
_RETRY_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Visibility:
    """What pg_current_snapshot() says, in the 32 bits that the stream has of a number."""

    xmax: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Visibility:
        _, xmax, running = text.split(":")
        numbers = frozenset(int(xid) & 0xFFFFFFFF for xid in running.split(",") if xid)
        return cls(int(xmax) & 0xFFFFFFFF, numbers)

    def sees(self, xid: int) -> bool:
        return xid not in self.running and precedes(xid, self.xmax)


def precedes(one: int, other: int) -> bool:
    """Whether a transaction's number is older; numbers wrap around."""
    return 0 < (other - one) & 0xFFFFFFFF < 0x80000000


@dataclass(slots=True)
class _Read:
    """What the reading thread found."""

    relation: Relation
    rows: list[Row]
    visible: Visibility
    last_key: Row | None
    is_last: bool


@dataclass(slots=True)
class _Work:
    """One request on its way."""

    request: ChunkRequest
    limit: int
    # Transactions that the snapshot must see.
    before: frozenset[int]
    newest: int | None
    mark: str = field(default_factory=lambda: uuid4().hex)
    # Changes of the table since, each with its transaction.
    changes: list[tuple[int, Change]] = field(default_factory=list)
    overflow: bool = False
    read: _Read | None = None
    problem: str = ""
    error: BaseException | None = None
    # Nobody waits for it any more.
    given_up: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    connection: Connection | None = None

    def give_up(self) -> None:
        """End the reading, wherever it is; its thread ends soon."""
        self.given_up.set()
        connection = self.connection
        if connection is not None:
            with suppress(psycopg.Error):
                connection.cancel()


class Chunker:
    """Takes requests, one at a time, and answers at the mark. `ask` may come from any thread."""

    def __init__(
        self,
        url: PostgresUrl,
        application: str,
        publication: str,
        catalog_of: Callable[[Connection], Catalog],
        source_of: Callable[[Table, int], bytes],
    ) -> None:
        self._url = url
        self._application = application
        self._publication = publication
        self._catalog_of = catalog_of
        self._source_of = source_of
        self._requests: deque[ChunkRequest] = deque()
        self._seen: deque[int] = deque(maxlen=SEEN_MAX)
        self._newest: int | None = None
        # Running when the stream began: perhaps committed before our position, and not yet seen.
        self._suspects: frozenset[int] = frozenset()
        self._suspect_until = 0.0
        self._work: _Work | None = None

    def ask(self, request: ChunkRequest) -> None:
        if len(self._requests) >= QUEUE_MAX:
            raise CaptureError(f"{QUEUE_MAX} chunks were asked for and not yet read")
        self._requests.append(request)

    def begin(self, connection: Connection) -> None:
        """The stream begins."""
        # Every transaction with a number holds a lock on it, until everyone can see what it did.
        rows = connection.execute(
            """SELECT transactionid::text FROM pg_catalog.pg_locks
               WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' AND granted"""
        )
        self._suspects = frozenset(int(row[0]) for row in rows)
        self._suspect_until = monotonic() + SETTLE_S
        self._seen.clear()
        self._newest = None
        work, self._work = self._work, None
        if work is not None:
            work.give_up()
            self._requests.appendleft(work.request)

    def observe(self, part: Part) -> None:
        """A part of a transaction goes into the stream."""
        if not part.transaction:
            return
        xid = int(part.transaction)
        work = self._work
        if work is not None and not work.overflow:
            name = work.request.table
            work.changes += [
                (xid, change) for change in part.changes if change.table.full_name == name
            ]
            if len(work.changes) > CHANGES_MAX:
                work.overflow = True
                work.changes.clear()
        # With its first part: what comes of it later was committed all the same.
        if part.is_first:
            self._seen.append(xid)
            if self._newest is None or precedes(self._newest, xid):
                self._newest = xid

    def step(self) -> None:
        """Take up the next request; raise what went wrong with the present one."""
        work = self._work
        if work is not None:
            if work.error is not None:
                raise work.error
            return
        if not self._requests:
            return
        request = self._requests.popleft()
        self._start(request, request.limit)

    def _start(self, request: ChunkRequest, limit: int) -> None:
        self._work = work = _Work(request, limit, frozenset(self._seen), self._newest)
        work.thread = threading.Thread(
            target=self._run, args=(work,), name="penstock-chunk", daemon=True
        )
        work.thread.start()

    def marked(self, content: bytes) -> Chunk | None:
        """A mark is in the stream: the chunk that belongs here, if it is ours."""
        work = self._work
        if work is None or content.decode(errors="replace") != work.mark:
            return None
        ts_us = time_ns() // 1000
        self._work = None
        if work.read is None:
            table = Table("", *_split(work.request.table), (), ())
            return Chunk(work.request, table, [], b"{}", ts_us, None, True, work.problem)
        read = work.read
        if work.overflow:
            self._start(work.request, max(1, work.limit // 2))
            return None
        late = [change for xid, change in work.changes if not read.visible.sees(xid)]
        if not all(_same_columns(change.table, read.relation.table) for change in late):
            # An ALTER TABLE in between: the rows that were read are of another table.
            self._start(work.request, work.limit)
            return None
        rows = settle(read.relation, read.rows, late)
        table = read.relation.table
        source = self._source_of(table, ts_us)
        return Chunk(work.request, table, rows, source, ts_us, read.last_key, read.is_last)

    def close(self) -> None:
        work, self._work = self._work, None
        if work is not None and work.thread is not None:
            work.give_up()
            work.thread.join()

    def _run(self, work: _Work) -> None:
        """The thread: read, then write the mark."""
        try:
            connection = self._url.connect(application=self._application)
            work.connection = connection
            try:
                try:
                    work.read = self._read(connection, work)
                except CaptureError as error:
                    # What trying again does not help with is the answer.
                    if error.retriable:
                        raise
                    work.problem = str(error)
                if work.given_up.is_set():
                    return
                with explained("cannot mark a chunk in the log"):
                    connection.execute(
                        "SELECT pg_catalog.pg_logical_emit_message(true, %s, %s)",
                        (MARK, work.mark),
                    )
            finally:
                work.connection = None
                connection.close()
        except BaseException as error:  # told to the thread that reads the stream
            work.error = error

    def _read(self, connection: Connection, work: _Work) -> _Read | None:
        while not work.given_up.is_set():
            with explained(f"cannot read a chunk of {work.request.table}"):
                name = connection.execute(
                    """SELECT n.nspname, c.relname FROM pg_catalog.pg_class c
                       JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
                       WHERE n.nspname || '.' || c.relname = %s AND c.relkind IN ('r', 'p')""",
                    (work.request.table,),
                ).fetchone()
                if name is None:
                    work.problem = f"there is no table {work.request.table}"
                    return None
                with connection.transaction(force_rollback=True):
                    connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                    found = self._attempt(connection, work, sql.Identifier(*name))
            if work.problem or found is not None:
                return found
            work.given_up.wait(_RETRY_S)
        return None

    def _attempt(self, connection: Connection, work: _Work, name: sql.Identifier) -> _Read | None:
        """None: the snapshot is too old, or the table cannot be read (`problem` says why)."""
        # The lock first: the snapshot is taken by the first query, so it knows what is locked.
        connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(name))
        row = connection.execute("SELECT pg_catalog.pg_current_snapshot()::text").fetchone()
        assert row is not None
        visible = Visibility.parse(row[0])
        if self._too_old(connection, visible, work):
            return None
        catalog = self._catalog_of(connection)
        info = next(
            (each for each in catalog.tables() if each.full_name == work.request.table), None
        )
        tables = published(connection, self._publication) or {}
        if info is None or work.request.table not in tables:
            work.problem = f"{work.request.table} is not a table that is captured"
            return None
        relation = catalog.relation(info, tables[work.request.table])
        if not relation.table.key:
            work.problem = f"{work.request.table} has no key to read it by"
            return None
        return self._rows(connection, work, relation, info, visible)

    def _too_old(self, connection: Connection, visible: Visibility, work: _Work) -> bool:
        if work.before & visible.running:
            return True
        if work.newest is not None and not precedes(work.newest, visible.xmax):
            return True
        suspects = {xid for xid in self._suspects if not visible.sees(xid)}
        if not suspects:
            return False
        if monotonic() < self._suspect_until:
            return True
        # Still running after that: an ordinary long transaction, or one whose commit is in the log
        # and waits for a synchronous standby, which can take as long as it likes.
        rows = connection.execute(
            """SELECT backend_xid::text FROM pg_catalog.pg_stat_activity
               WHERE wait_event = 'SyncRep' AND backend_xid IS NOT NULL"""
        )
        return any(int(row[0]) in suspects for row in rows)

    def _rows(
        self,
        connection: Connection,
        work: _Work,
        relation: Relation,
        info: TableInfo,
        visible: Visibility,
    ) -> _Read:
        request = work.request
        # In the order of the index; keys in requests are in the order of the columns.
        order = [relation.table.key.index(name) for name in info.key]
        clauses = [f"({request.where})"] if request.where else []
        if request.after is not None:
            clauses.append(_after(connection, info, [request.after[place] for place in order]))
        names = sql.SQL(", ").join(map(sql.Identifier, info.key)).as_string(connection)
        tail = f"ORDER BY {names} LIMIT {int(work.limit) + 1}"
        query = select(relation.table, info, " AND ".join(clauses), tail)
        lines = [line for batch in copy_lines(connection, query, request.table) for line in batch]
        is_last = len(lines) <= work.limit
        lines = lines[: work.limit]
        last_key = None
        if lines:
            texts = relation.key_text(lines[-1], relation.key_columns)
            last_key = tuple(orjson.dumps(text) for text in texts)
        return _Read(relation, decode_lines(relation, lines), visible, last_key, is_last)


def settle(relation: Relation, rows: list[Row], late: Iterable[Change]) -> list[Row]:
    """The rows without those that later changes overtook, or as these left them where they alone
    have a value that the change did not tell."""
    kept: dict[Row, Row] = {relation.key_of(row): row for row in rows}
    # What the stream has told of a row since, and the same with large values filled in.
    told: dict[Row, tuple[Row, Row]] = {}
    for change in late:
        if change.op == TRUNCATE:
            kept.clear()
            told.clear()
            continue
        before = change.before if change.before is not None else change.after
        assert before is not None
        old_key = relation.key_of(before)
        known = told.pop(old_key, None)
        read = kept.pop(old_key, None)
        if change.op == DELETE or change.after is None:
            continue
        base = known[1] if known is not None else read
        stream = known[0] if known is not None else None
        new_key = relation.key_of(change.after)
        kept.pop(new_key, None)
        told[new_key] = (_filled(change.after, stream), _filled(change.after, base))
    settled = [
        full for stream, full in told.values() if UNAVAILABLE in stream and UNAVAILABLE not in full
    ]
    return [*kept.values(), *settled]


def _filled(row: Row, base: Row | None) -> Row:
    if base is None or UNAVAILABLE not in row:
        return row
    return tuple(old if new is UNAVAILABLE else new for new, old in zip(row, base, strict=True))


def _after(connection: Connection, info: TableInfo, key: list[bytes]) -> str:
    """The condition for what comes after a key, in the order of its index."""
    types = {column.name: column.native for column in info.columns}
    names = sql.SQL(", ").join(map(sql.Identifier, info.key))
    literals = sql.SQL(", ").join(
        sql.SQL("{}::" + types[name]).format(sql.Literal(_text(value)))
        for name, value in zip(info.key, key, strict=True)
    )
    return sql.SQL("({}) > ({})").format(names, literals).as_string(connection)


def _text(fragment: bytes) -> str:
    value = orjson.loads(fragment)
    return value if isinstance(value, str) else fragment.decode()


def _same_columns(one: Table, other: Table) -> bool:
    return [(c.name, c.type) for c in one.columns] == [(c.name, c.type) for c in other.columns]


def _split(full_name: str) -> tuple[str, str]:
    schema, _, name = full_name.rpartition(".")
    return schema or "public", name
