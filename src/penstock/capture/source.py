"""The seam between databases and the log: what a source is, and how it tells what changed.

A source reads one database. It speaks of rows in *fragments*: the value of a column as the bytes
of a JSON value, just as Debezium writes it. So a number that the database sent as text is passed
through untouched, and whoever puts an event together only joins bytes. A source decodes with code
that it generates for each table; it never looks a type up for each value.

The stream is a sequence of items, in the order in which the database committed:

- `Part`: some changes of one *committed* transaction. A large one comes in several parts, the last
  has `is_last`. What was rolled back never appears.
- `Chunk`: rows that were asked for by `ask` (an incremental snapshot), at a place in the stream
  where they are exactly what the database holds: a change before this place is in them, a change
  after it comes later in the stream.
- `Idle`: nothing happened for a moment; the position may have moved all the same (other tables'
  changes, heartbeats), so that it can be recorded and the database may forget what lies before it.

A position is a small JSON object that only its source understands; it is kept in the log together
with the events it leads to. `stream(position)` goes on right after it. `confirm` tells the source
that everything up to a position is durable in the log, and only then may the database let go of it.

Threads: one thread uses a source. Only `ask` and `close` may be called from another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from penstock.client.table_schemas import TableColumn
from penstock.errors import PenstockError

Fragment = bytes
Row = tuple[Fragment, ...]
Position = Mapping[str, Any]

NULL: Final = b"null"
# A large value that an UPDATE did not touch, and that the database therefore did not send.
UNAVAILABLE: Final = b'"__debezium_unavailable_value"'

CREATE, UPDATE, DELETE, READ, TRUNCATE, MESSAGE = "c", "u", "d", "r", "t", "m"


class CaptureError(PenstockError):
    """A database cannot be captured, or not any more: why, and what to do about it."""


class DatabaseUnreachableError(CaptureError):
    """The database does not answer (any more); a capture that had reached it tries again."""

    retriable = True


class DatabaseBusyError(DatabaseUnreachableError):
    """The database is there, and something is in the way for a while: it is always tried again."""


class PositionLostError(CaptureError):
    """The database has no longer what comes after the position: going on would skip changes."""

    advice = "Take a new snapshot: penstock capture snapshot --all"


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A table as it was at one place of the stream; after an ALTER TABLE it is another object.

    Rows of this object have one fragment for each of `columns`, in this order.
    """

    # The database, where its tables are grouped below it the schema (else ""), and the name.
    database: str
    schema: str
    name: str
    # They are published with the table: a snapshot and the stream say the same of a column.
    columns: tuple[TableColumn, ...]
    # The columns that tell rows apart: the primary key, or what serves as one. () if nothing does.
    key: tuple[str, ...]

    @property
    def full_name(self) -> str:
        """`schema.name` (PostgreSQL), `database.name` (MySQL), `name` (SQLite)."""
        return ".".join(filter(None, (self.schema or self.database, self.name)))


class Change(NamedTuple):
    """One change of one row, or the TRUNCATE of a table (no rows).

    `before` is None for what is new, and may be None where the database does not tell it; columns
    it does not tell are NULL in it. `source` is the bytes of the JSON object that Debezium calls
    the source block, made by the source.
    """

    table: Table
    op: str
    before: Row | None
    after: Row | None
    source: bytes
    ts_us: int


@dataclass(slots=True)
class Part:
    """Changes of one committed transaction, in order."""

    # What identifies it in this database: the xid, the GTID, the changelog's number.
    transaction: str
    # A list, or columns that look like one (`blocks`).
    changes: Sequence[Change]
    # Where the stream goes on after the transaction; it counts only where is_last.
    position: Position
    commit_ts_us: int
    is_first: bool = True
    is_last: bool = True
    # Logical messages of the transaction: (prefix, content). PostgreSQL only.
    messages: list[tuple[str, bytes]] = field(default_factory=list)


@dataclass(slots=True)
class Idle:
    """Nothing to tell, up to this position."""

    position: Position


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """Read so many rows of a table in the order of its key, after the given key (None: from its
    beginning). `where` is a condition in the database's SQL, or empty."""

    id: str
    table: str
    after: Row | None
    limit: int
    where: str = ""


@dataclass(slots=True)
class Chunk:
    """The answer to a ChunkRequest, at its place in the stream.

    `rows` may be fewer than were read: rows that a change in the stream overtakes are left out.
    """

    request: ChunkRequest
    table: Table
    rows: list[Row]
    source: bytes
    ts_us: int
    # The key of the last row that was read, to go on from; None where nothing was read.
    last_key: Row | None
    # Nothing is left behind it.
    is_last: bool
    # A table that is not there, or has no key: why nothing was read.
    problem: str = ""


Item = Part | Chunk | Idle


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold before a database can be captured."""

    name: str
    ok: bool
    found: str
    # The command or setting that mends it, to be copied. Empty where ok.
    remedy: str = ""
    # False: a warning, the capture works all the same.
    required: bool = True


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """How far the database is ahead of what was confirmed, as the database itself sees it."""

    position: Position | None
    # What the database keeps because of this capture, and the most it may keep (None: no bound).
    retained_bytes: int | None = None
    retained_limit_bytes: int | None = None
    lag_bytes: int | None = None
    # Until the bound is reached, at the present rate; None where there is none.
    time_left_s: float | None = None
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """What a source is told when it is opened."""

    # The capture's name: slots, publications and triggers are named after it.
    name: str
    url: str
    # Tables by their full name, with * and ? as wildcards; later `exclude` takes away.
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    # The name that the source block gives the server; topics begin with it.
    topic_prefix: str = ""
    # How long `stream` waits before it says Idle.
    idle_ms: int = 100
    # Write something small into the database this often, so that quiet tables never hold its log.
    heartbeat_ms: int = 10_000
    # How many processes or connections a snapshot may use.
    snapshot_workers: int = 2
    # What only one kind of database knows: slot, publication, server_id, ...
    options: Mapping[str, str] = field(default_factory=dict)


class Snapshot(ABC):
    """All chosen tables as they were at one position; a context manager."""

    # The stream from here on has every change that is not in the snapshot, and no other.
    position: Position
    tables: Sequence[Table]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def rows(self, table: Table, *, where: str = "") -> Iterator[Sequence[Row]]:
        """The table's rows, a few thousand at a time. Several tables at once, from several
        threads, up to `snapshot_workers`."""

    @abstractmethod
    def source(self, table: Table) -> bytes:
        """The source block of events of this table."""

    @abstractmethod
    def estimate(self, table: Table) -> int | None:
        """About how many rows there are, for a progress bar; None if nobody knows."""

    @abstractmethod
    def close(self) -> None: ...


class Source(ABC):
    """One database, opened to be captured; a context manager."""

    # "postgresql", "mysql", "sqlite": the `connector` of the source block.
    kind: str
    settings: SourceSettings

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def check(self) -> list[Check]:
        """Whether it can be captured; changes nothing in the database."""

    @abstractmethod
    def tables(self) -> list[Table]:
        """The chosen tables as they are now."""

    @abstractmethod
    def setup(self) -> None:
        """Make what the capture needs in the database (slot, publication, triggers); again is
        harmless."""

    @abstractmethod
    def remove(self) -> list[str]:
        """Take all of that away; what was removed, for people. Again is harmless."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """All chosen tables at one position, without a lock that holds up the user's writes."""

    @abstractmethod
    def stream(self, position: Position) -> Iterator[Item]:
        """What was committed after the position; it ends only by `close` or an error.

        PositionLostError if the database no longer has it, DatabaseUnreachableError if it went
        away: open the source anew and stream from the position that was reached.
        """

    @abstractmethod
    def ask(self, request: ChunkRequest) -> None:
        """Have a Chunk put into the stream."""

    @abstractmethod
    def confirm(self, position: Position) -> None:
        """Everything up to here is durable in the log."""

    @abstractmethod
    def status(self) -> SourceStatus:
        """How far behind it is, asked on a connection of its own; works without a stream."""

    @abstractmethod
    def close(self) -> None: ...
