"""Changes as they come: the changelog read from a position on, until somebody closes the source.

Each look is one short read transaction: the schema's version, the numbers that are new, the
changelogs of their tables merged by number, and rows that were asked for. No transaction is open
while the reader of the stream works, so neither writers (in rollback mode) nor checkpoints (in
WAL mode) ever wait for it.

Rows of tables that must be read (`ask`, and tables that are read again, see `catalog`) are read in
the same transaction as the last changes before them: they are what the database holds at exactly
that place of the stream. How far such a reading has come is part of the position.
"""

from __future__ import annotations

import os
import sqlite3
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from threading import Event
from time import monotonic, time_ns
from typing import Any, Final
from zlib import crc32

from penstock.capture.blocks import Block, Several, segments_of
from penstock.capture.source import (
    READ,
    TRUNCATE,
    Change,
    Chunk,
    ChunkRequest,
    DatabaseUnreachableError,
    Idle,
    Item,
    Part,
    Position,
    PositionLostError,
    Row,
    Table,
)
from penstock.capture.sqlite.catalog import (
    NOTHING,
    TRUNCATE_AND_READ,
    Catalog,
    Version,
    schema_version,
)
from penstock.capture.sqlite.location import connect, is_busy, mapped
from penstock.capture.sqlite.reading import Pages, fetch
from penstock.capture.sqlite.rowblocks import RowBlocks
from penstock.capture.sqlite.tables import quoted
from penstock.capture.sqlite.values import Blocks, DecodeLog, log_decoder
from penstock.capture.sqlite.watch import Watch

# What one look may take: so many changes, fewer if they are large.
_CHANGES_FIRST: Final = 500
_CHANGES_MAX: Final = 20_000
_PART_BYTES: Final = 32 << 20
# What is visible at once is one transaction, up to so many changes.
TRANSACTION_MAX: Final = 200_000
_PAGE_ROWS: Final = 2_000
# How long others' locks may keep us out.
_LOCKED_MAX_S: Final = 60.0
_STAT_EVERY_S: Final = 1.0
# How long one attempt to make triggers anew waits for others' locks.
_FOLLOW_BUSY_MS: Final = 1_000


@dataclass(slots=True)
class Reader:
    """What is generated for one version of a table."""

    version: Version
    decode: DecodeLog
    row_blocks: RowBlocks
    pages: Pages
    blocks: Blocks
    query: str


@dataclass(slots=True)
class Look:
    """What one read transaction found."""

    changes: Sequence[Change]
    upto: int
    # All that was visible when the transaction began has been told.
    is_end: bool
    # What identifies the transaction that begins here.
    id: str
    chunks: list[Chunk] = field(default_factory=list)
    moved: bool = False


class Stream:
    """One reading of the changelog; `items` is what `Source.stream` gives."""

    def __init__(
        self,
        path: Path,
        catalog: Catalog,
        position: Position,
        *,
        watch: Watch,
        asked: deque[ChunkRequest],
        closed: Event,
    ) -> None:
        self._path = path
        self._catalog = catalog
        self._watch = watch
        self._asked = asked
        self._closed = closed
        self._id = str(position.get("id", ""))
        self._seq = int(position.get("seq", 0))
        # Tables that are being read: version and the key that was reached.
        self._reading: list[tuple[int, Row | None]] = [
            (int(version), None if key is None else tuple(part.encode() for part in key))
            for version, key in position.get("reading", ())
        ]
        self._readers: dict[int, Reader] = {}
        self._versions: dict[int, Version] = {}
        self._schema = -1
        self._limit = _CHANGES_FIRST
        # Of the transaction that is being told: its first number, and how many changes so far.
        self._first: str | None = None
        self._goal = 0
        self._told = 0
        self._locked_since: float | None = None
        self._stat_at = 0.0
        self._inode = 0

    @property
    def position(self) -> dict[str, Any]:
        reading = [
            [version, None if key is None else [part.decode() for part in key]]
            for version, key in self._reading
        ]
        made: dict[str, Any] = {"id": self._id, "seq": self._seq}
        return {**made, "reading": reading} if reading else made

    def items(self) -> Iterator[Item]:
        idle_s = self._catalog.settings.idle_ms / 1000
        connection = connect(self._path, read_only=True)
        self._inode = os.stat(self._path).st_ino
        try:
            idle_at = monotonic() + idle_s
            while not self._closed.is_set():
                look = self._look(connection)
                if look is not None:
                    self._watch.quiet()
                    yield from self._tell(look)
                    idle_at = monotonic() + idle_s
                    continue
                now = monotonic()
                if now >= idle_at:
                    self._check_file(now)
                    yield Idle(self.position)
                    idle_at = monotonic() + idle_s
                    continue
                self._watch.wait((idle_at - now) * 1000)
        except sqlite3.Error as error:
            raise mapped(error, self._path) from error
        finally:
            connection.close()

    def _tell(self, look: Look) -> Iterator[Item]:
        if look.changes or look.moved:
            if self._first is None:
                self._first = look.id
                self._told = 0
            first, is_first = self._first, self._told == 0
            self._told += len(look.changes)
            is_last = look.is_end or self._told >= TRANSACTION_MAX
            if is_last:
                self._first = None
            last = segments_of(look.changes)[-1] if look.changes else ()
            ts_us = last[-1].ts_us if last else _now_us()
            if look.changes or not is_first:
                yield Part(first, look.changes, self.position, ts_us, is_first, is_last)
        yield from look.chunks

    # ---- one look --------------------------------------------------------------------------

    def _look(self, connection: sqlite3.Connection) -> Look | None:
        """What is new, if anything."""
        try:
            while not self._closed.is_set():
                connection.execute("BEGIN")
                try:
                    if schema_version(connection) == self._schema:
                        return self._read(connection)
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                self._follow()
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
            now = monotonic()
            self._locked_since = self._locked_since or now
            if now - self._locked_since > _LOCKED_MAX_S:
                raise
        return None

    def _follow(self) -> None:
        """The schema has changed, or we have just begun: see that triggers fit the tables."""
        catalog = self._catalog
        writer = connect(self._path, busy_ms=_FOLLOW_BUSY_MS)
        try:
            if not catalog.is_installed(writer):
                raise PositionLostError(
                    f"{self._path}: the changelog of capture {catalog.settings.name} is not there",
                    advice="Run the capture again and take a new snapshot: "
                    f"penstock capture snapshot --all --capture {catalog.settings.name}",
                )
            self._schema = catalog.follow(writer, self._seq)
            meta, top = catalog.meta(writer), catalog.top(writer)
            self._versions = catalog.versions(writer)
        finally:
            writer.close()
        if meta.id != self._id:
            raise self._lost("it belongs to a changelog that is gone")
        if self._seq < meta.trimmed:
            raise self._lost(f"changes up to {meta.trimmed} are deleted already")
        self._check_top(top)
        # Now, while the versions that ended are still known.
        heirs = [(self._heir(number), after) for number, after in self._reading]
        self._reading = [(heir, after) for heir, after in heirs if heir is not None]
        self._readers = {
            number: reader
            for number, reader in self._readers.items()
            if number in self._versions and reader.version is self._versions[number]
        }

    def _check_top(self, top: int) -> None:
        if self._seq > top:
            raise self._lost(f"the database ends at {top}: it seems to be an older copy")

    def _lost(self, why: str) -> PositionLostError:
        return PositionLostError(f"{self._path}: cannot go on after change {self._seq}: {why}")

    def _read(self, connection: sqlite3.Connection) -> Look | None:
        self._locked_since = None
        top = self._catalog.top(connection)
        self._check_top(top)
        if self._first is None:
            # What a transaction ends with is settled when it begins: a writer that is never done
            # must not keep it open for ever.
            self._goal = top
        upto = min(self._goal, self._seq + self._limit)
        if upto == self._seq and not self._asked and not self._reading and self._first is None:
            return None
        id_ = str(upto) if upto > self._seq else self._id_of_reading()
        look = Look(self._changes(connection, upto), upto, upto == self._goal, id_)
        look.moved = upto > self._seq or self._first is not None
        self._seq = upto
        self._adapt(look.changes)
        if upto == top:
            # Only here is a row what the stream says it is.
            self._read_tables(connection, look)
            # Bounded: a request that comes meanwhile waits for the next look.
            for _ in range(len(self._asked)):
                look.chunks.append(self._chunk(connection, self._asked.popleft()))
        return look

    def _id_of_reading(self) -> str:
        """Where only rows are read, the number has not moved: how far they were read tells this
        transaction from the one before."""
        done = crc32(repr(self._reading).encode())
        return f"{self._seq}.{done:08x}"

    def _changes(self, connection: sqlite3.Connection, upto: int) -> Sequence[Change]:
        """The changes up to a number, of all tables, in order."""
        if upto == self._seq:
            return []
        numbers = connection.execute(
            f"SELECT DISTINCT t FROM {quoted(self._catalog.names.changes)} "
            "WHERE seq > ? AND seq <= ?",
            (self._seq, upto),
        ).fetchall()
        found: list[tuple[list[int], list[Change]]] = []
        for (number,) in numbers:
            if number not in self._versions:
                continue
            reader = self._reader(number)
            rows = fetch(connection, reader.query, (self._seq, upto))
            if rows and len(numbers) == 1 and reader.version.resync == NOTHING:
                return Several(list(reader.row_blocks.changes(rows, reader.blocks)))
            if rows:
                found.append(([row[0] for row in rows], reader.decode(rows, reader.blocks)))
            version = reader.version
            if version.resync != NOTHING and self._seq < version.since <= upto:
                self._reading.append((number, None))
                if version.resync == TRUNCATE_AND_READ:
                    us = _now_us()
                    gone = Change(version.table, TRUNCATE, None, None, reader.blocks.at(us), us)
                    found.append(([version.since], [gone]))
        if len(found) == 1:
            return found[0][1]
        pairs = [pair for seqs, changes in found for pair in zip(seqs, changes, strict=True)]
        pairs.sort(key=itemgetter(0))
        return [change for _, change in pairs]

    def _reader(self, number: int) -> Reader:
        reader = self._readers.get(number)
        if reader is None:
            version = self._versions[number]
            names = [name for name, *_ in version.definition.columns]
            listed = ", ".join(
                quoted(f"{side}_{name}") for side in ("old", "new") for name in names
            )
            decode = log_decoder(version.definition, version.table)
            reader = self._readers[number] = Reader(
                version,
                decode,
                RowBlocks(version.definition, version.table, decode),
                Pages(version.definition),
                blocks_of(version.table, self._path, self._catalog),
                f"SELECT seq, op, at, {listed} FROM {quoted(self._catalog.names.log(number))} "
                "WHERE seq > ? AND seq <= ? ORDER BY seq",
            )
        return reader

    def _adapt(self, changes: Sequence[Change]) -> None:
        """Take fewer at a time where they are large."""
        if not changes:
            return
        size = sum(map(_bytes_of, segments_of(changes)))
        fits = int(_PART_BYTES / max(1.0, size / len(changes)))
        self._limit = max(10, min(fits, self._limit * 4, _CHANGES_MAX))

    # ---- rows of tables --------------------------------------------------------------------

    def _read_tables(self, connection: sqlite3.Connection, look: Look) -> None:
        """Go on with a table that must be read from its beginning."""
        while self._reading:
            number, after = self._reading[0]
            heir = self._heir(number)
            if heir is None:
                del self._reading[0]
                look.moved = True
                continue
            reader = self._reader(heir)
            rows, last = reader.pages.page(connection, after, min(_PAGE_ROWS, self._limit))
            us = _now_us()
            table, block = reader.version.table, reader.blocks.at(us, "incremental")
            look.changes = [
                *look.changes,
                *(Change(table, READ, None, row, block, us) for row in rows),
            ]
            look.moved = True
            if last is None:
                del self._reading[0]
            else:
                self._reading[0] = (heir, last)
            return

    def _heir(self, number: int) -> int | None:
        """The version under which a reading goes on: the same, or the one that followed it in
        place. None where there is none, or where it is read anew by itself."""
        version = self._versions.get(number)
        while version is not None and version.ended is not None:
            name, ended = version.definition.name, version.id
            version = next(
                (
                    v
                    for v in self._versions.values()
                    if v.id > ended and v.definition.name == name and v.resync == NOTHING
                ),
                None,
            )
        return None if version is None else version.id

    def _chunk(self, connection: sqlite3.Connection, request: ChunkRequest) -> Chunk:
        us = _now_us()
        version = next(
            (
                v
                for v in self._versions.values()
                if v.ended is None and v.table.full_name == request.table
            ),
            None,
        )
        if version is None:
            nothing = Table("", "", request.table, (), ())
            problem = f"table {request.table} is not captured"
            return Chunk(request, nothing, [], b"{}", us, None, True, problem)
        reader = self._reader(version.id)
        block = reader.blocks.at(us, "incremental")
        try:
            rows, last = reader.pages.page(
                connection, request.after, max(1, request.limit), request.where
            )
        except sqlite3.Error as error:
            if is_busy(error):
                self._asked.append(request)
                raise
            problem = f"table {request.table} cannot be read: {error}"
            return Chunk(request, version.table, [], block, us, None, True, problem)
        is_last = len(rows) < max(1, request.limit)
        return Chunk(request, version.table, rows, block, us, last, is_last)

    def _check_file(self, now: float) -> None:
        """Whether the file is still the one that we have open."""
        if now < self._stat_at:
            return
        self._stat_at = now + _STAT_EVERY_S
        try:
            same = os.stat(self._path).st_ino == self._inode
        except OSError as error:
            raise DatabaseUnreachableError(f"{self._path} is gone: {error}") from error
        if not same:
            raise DatabaseUnreachableError(f"{self._path} was replaced by another file")


def blocks_of(table: Table, path: Path, catalog: Catalog) -> Blocks:
    settings = catalog.settings
    return Blocks(table, settings.topic_prefix or settings.name, path.name)


def _now_us() -> int:
    return time_ns() // 1000


def _bytes_of(changes: Sequence[Change]) -> float:
    """About what the values of changes take: those of a list by some of them."""
    if isinstance(changes, Block):
        return len(changes.fragments)
    sample = changes[:: max(1, len(changes) // 50)]
    size = sum(
        len(part) for change in sample for row in change[2:4] if row is not None for part in row
    )
    return size / len(sample) * len(changes)
