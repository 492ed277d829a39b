"""Events into committed transactions.

The binlog has groups of events, each a transaction or one statement, whole and in the order of
commit. A group begins with its GTID and ends with an XID, COMMIT or, rarely, ROLLBACK (of what a
transaction did to tables that cannot roll back). Row events are kept as they came until the end of
the group is seen, and decoded then; only a group beyond `held_max_bytes` is handed on before its
end, and if such a group ends with ROLLBACK the capture stops before anyone takes it for committed.

An XA transaction is in the binlog when it is prepared; whether it counts is told by a later group.
What was prepared is not kept: its place is remembered in the position, and read again at its
commit.

A server that is killed may leave a group in the binlog without its end, or even an event (MariaDB
does not cut it off when it starts again). It was never committed, so it is dropped when the next
file says that the server has just started.

No sockets: raw events in, parts of transactions out. Positions are file, offset and GTID after the
last whole group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from penstock.capture.blocks import Block, Several
from penstock.capture.mysql import binlog as b
from penstock.capture.mysql import ddl, tablemap
from penstock.capture.mysql.blocks import Blocks
from penstock.capture.mysql.charsets import Charsets
from penstock.capture.mysql.gtid import MariadbPosition, MysqlSet
from penstock.capture.mysql.history import Disguised
from penstock.capture.mysql.rows import RowReader, reader_of
from penstock.capture.mysql.types import Modes
from penstock.capture.source import (
    NULL,
    TRUNCATE,
    CaptureError,
    Change,
    Part,
    Position,
    PositionLostError,
    Table,
)

PART_CHANGES: Final = 4096
HELD_MAX_BYTES: Final = 64 << 20
_READERS_MAX: Final = 2000
_HALF: Final = 1 << 31
# MariaDB's stand-in for an event that a replica need not see.
_DUMMY_TABLE: Final = 0xFFFFFF

_STATEMENT_ADVICE: Final = (
    "Set binlog_format=ROW for every session (SET GLOBAL binlog_format='ROW'), then take a new"
    " snapshot; or set the option statements=skip if the change is of no interest."
)


@dataclass(slots=True)
class Context:
    """What the assembling of transactions needs to know."""

    name: str
    kind: str
    chooses: Callable[[str, str], bool]
    charsets: Charsets
    modes: Modes = field(default_factory=Modes)
    # A table as it is now, for a TRUNCATE of one that was not seen before.
    table_now: Callable[[str, str], Table | None] = lambda _database, _name: None
    # The raw events from a place of the binlog on.
    reread: Callable[[str, int], Iterator[bytes]] | None = None
    skip_statements: bool = False
    held_max_bytes: int = HELD_MAX_BYTES
    part_changes: int = PART_CHANGES
    server: str = ""


@dataclass(slots=True, eq=False)
class _Reader:
    """What reads rows of one table map, and says where they came from."""

    rows: RowReader
    blocks: Blocks


@dataclass(slots=True)
class _Held:
    """A row event, or the truncate of a table, that waits for the end of its group."""

    event: b.Event
    at: int
    reader: _Reader | None
    truncated: Table | None = None
    query: bytes = NULL


class Assembler:
    """Takes events one by one, and hands out the parts of committed transactions."""

    def __init__(self, context: Context, position: Position, *, checksum: bool = False) -> None:
        self._context = context
        self.file = str(position["file"])
        self.at = int(position["pos"])
        gtid = str(position.get("gtid") or "")
        self._mariadb = MariadbPosition(gtid if ":" not in gtid else "")
        self._mysql = MysqlSet(gtid if ":" in gtid else "")
        self._is_mysql = ":" in gtid
        self._xa: dict[str, list[Any] | None] = dict(position.get("xa") or {})
        self._disguised = Disguised(position.get("types") or {})
        self._checksum = checksum
        self._readers: dict[bytes, _Reader | None] = {}
        self._tables: dict[int, _Reader | None] = {}
        self._latest: dict[tuple[str, str], Table] = {}
        self._in_group = False
        # Set once for each group.
        self._standalone = False
        self._group_at = (self.file, self.at)
        self._gtid = ""
        # By domain, what it was before this group.
        self._gtid_before: tuple[int, str | None] | None = None
        # The last file ends in the midst of an event: the next must be the first since a start.
        self._torn: CaptureError | None = None
        self._commit_us = 0
        self._thread = NULL
        self._query = NULL
        self._held: list[_Held] = []
        self._held_bytes = 0
        self._savepoints: dict[str, int] = {}
        self._is_xa = False
        self._xa_rows = False
        self._handed_on = 0
        self._changes: list[Change] = []
        self._file_json = orjson.dumps(self.file)
        self._position: dict[str, Any] | None = None

    @property
    def at_boundary(self) -> bool:
        """Between transactions."""
        return not self._in_group

    @property
    def position(self) -> Position:
        """After the last whole group; only between transactions."""
        if self._position is None:
            self._position = {
                "file": self.file,
                "pos": self.at,
                "gtid": str(self._mysql if self._is_mysql else self._mariadb),
                "server": self._context.server,
            }
            if self._xa:
                self._position["xa"] = dict(self._xa)
            types = self._disguised.known()
            if types:
                self._position["types"] = types
        return self._position

    def feed(self, raw: bytes) -> Iterator[Part] | None:
        """Take one event as the server sent it; what it completes must be read to its end before
        the next."""
        event = self._event(raw)
        start = self.at
        self._advance(event)
        return self._take(event, start)

    def _event(self, raw: bytes) -> b.Event:
        return self._frame(raw) if raw[4:5] in _FRAMES else b.parse(raw, checksum=self._checksum)

    def _frame(self, raw: bytes) -> b.Event:
        """An event that tells how others are to be read, or may come before it is told."""
        if raw[4] == b.FORMAT:
            self._checksum = b.format_checksum(raw)
            self._file_begins(b.format_created_s(raw))
            # A file that is being written has a mark that its checksum does not know.
            raw = raw[:17] + bytes([raw[17] & ~1]) + raw[18:]
        elif b.has_checksum(raw):
            # A rotation comes before the format description that tells of checksums.
            return b.parse(raw, checksum=True)
        return b.parse(raw, checksum=self._checksum)

    def torn(self, error: CaptureError) -> None:
        """The file ends in the midst of an event. The next file is to be fed; `error` is raised if
        it is not the first after a crash: then nobody knows what is missing."""
        self._torn = error

    def _file_begins(self, started_s: int) -> None:
        torn, self._torn = self._torn, None
        if torn is not None and not started_s:
            raise torn
        if started_s and self._in_group:
            before = self._gtid_before
            self._rollback()
            if before is not None:
                self._mariadb.put_back(*before)

    def _advance(self, event: b.Event) -> None:
        # Artificial events are in no file. Positions have 32 bits, files may be larger.
        _, kind, _, end, flags, _ = event
        if end and not flags & b.FLAG_ARTIFICIAL and kind not in _UNPLACED:
            self._position = None
            if end > self.at:
                self.at = end
                return
            at = (self.at & ~0xFFFFFFFF) | end
            if at < self.at - _HALF:
                at += 1 << 32
            self.at = max(at, self.at)

    def _take(self, event: b.Event, start: int) -> Iterator[Part] | None:
        kind = event.kind
        if kind in b.ROWS:
            return self._take_rows(event, start)
        if kind == b.TABLE_MAP:
            self._take_table(event)
        elif kind == b.MARIADB_GTID:
            gtid = b.mariadb_gtid(event)
            self._begin(start, gtid.text)
            self._gtid_before = (gtid.domain, self._mariadb.add(gtid.domain, gtid.text))
            self._standalone = bool(gtid.flags & b.GTID_STANDALONE)
            self._is_xa = bool(gtid.flags & b.GTID_PREPARED)
        elif kind == b.XID:
            return self._commit(event)
        elif kind in (b.QUERY, b.QUERY_COMPRESSED):
            return self._take_query(event, start)
        elif kind in _RARE:
            return self._take_rare(event, start)
        return None

    def _take_rare(self, event: b.Event, start: int) -> Iterator[Part] | None:
        kind = event.kind
        if kind == b.ROTATE:
            self._rotate(event)
        elif kind in (b.GTID, b.ANONYMOUS_GTID):
            self._begin_mysql(event, start)
        elif kind == b.XA_PREPARE:
            return self._xa_prepared(event)
        elif kind == b.PAYLOAD:
            return self._take_payload(event, start)
        elif kind in (b.ANNOTATE, b.ROWS_QUERY):
            skip = b.HEADER_SIZE + (1 if kind == b.ROWS_QUERY else 0)
            self._query = orjson.dumps(event.data[skip:].decode("utf-8", "replace"))
        elif kind == b.INCIDENT:
            raise PositionLostError(
                f"the server lost changes before position {self.at} of {self.file}, and says so in"
                " its binlog"
            )
        elif kind == b.GTID_TAGGED:
            raise CaptureError(
                "the binlog has a tagged GTID, which is not supported",
                advice="Run with gtid_next=AUTOMATIC without a tag.",
            )
        elif kind == b.PARTIAL_UPDATE:
            raise CaptureError(
                f"an update before position {self.at} of {self.file} has only a part of its JSON",
                advice="SET GLOBAL binlog_row_value_options = ''; then take a new snapshot.",
            )
        elif not self._context.skip_statements:
            raise CaptureError(
                f"LOAD DATA was logged as a statement before position {self.at} of {self.file}",
                advice=_STATEMENT_ADVICE,
            )
        return None

    # -- groups ------------------------------------------------------------------------------------

    def _rotate(self, event: b.Event) -> None:
        file, at = b.rotate(event)
        if file != self.file or at != self.at:
            self.file, self.at = file, at
            self._file_json = orjson.dumps(file)
            self._position = None

    def _begin(self, start: int, gtid: str) -> None:
        self._in_group = True
        self._standalone = False
        self._group_at = (self.file, start)
        self._gtid = gtid
        self._gtid_before = None
        self._commit_us = 0
        self._thread = self._query = NULL
        self._is_xa = self._xa_rows = False

    def _begin_mysql(self, event: b.Event, start: int) -> None:
        gtid = b.mysql_gtid(event)
        if event.kind == b.GTID:
            self._begin(start, f"{gtid.server}:{gtid.number}")
            self._mysql.add(gtid.server, gtid.number)
            self._is_mysql = True
        else:
            self._begin(start, "")
        self._commit_us = gtid.commit_us
        # The first statement tells: BEGIN, or one that is all of the group.
        self._standalone = True

    def _end(self) -> None:
        self._in_group = False
        self._held = []
        self._held_bytes = 0
        self._savepoints.clear()
        self._tables.clear()
        self._changes = []
        self._handed_on = 0
        self._position = None

    def _take_query(self, event: b.Event, start: int) -> Iterator[Part] | None:
        query = b.query(event)
        said = ddl.classify(query.sql, query.database)
        kind = said.kind
        if kind in (ddl.BEGIN, ddl.XA_OTHER):
            if not self._in_group:
                self._begin(start, "")
            self._standalone = False
            self._thread = b"%d" % query.thread
            self._is_xa = self._is_xa or kind == ddl.XA_OTHER
            return None
        if kind == ddl.COMMIT:
            return self._commit(event)
        if kind == ddl.ROLLBACK:
            self._rollback()
            return None
        if kind == ddl.SAVEPOINT:
            self._savepoints[said.name] = self._handed_on + len(self._held)
        elif kind == ddl.ROLLBACK_TO:
            self._rollback_to(said.name)
        elif kind in (ddl.XA_COMMIT, ddl.XA_ROLLBACK):
            return self._xa_ended(event, said)
        elif kind == ddl.TRUNCATE:
            self._truncated(event, start, said)
        elif kind == ddl.SCHEMA:
            known = self._disguised.known()
            self._disguised.apply(query.sql, query.database)
            if self._disguised.known() != known:
                self._readers.clear()
        elif kind == ddl.CHANGES:
            self._statement(query, said)
        return self._commit(event) if self._standalone or not self._in_group else None

    def _statement(self, query: b.Query, said: ddl.Statement) -> None:
        """A change that is in the binlog as a statement cannot be told row by row."""
        if self._context.skip_statements:
            return
        if said.table is not None and not self._context.chooses(*said.table):
            return
        raise CaptureError(
            f"a change before position {self.at} of {self.file} was logged as a statement, not as"
            f" rows: {query.sql[:200]}",
            advice=_STATEMENT_ADVICE,
        )

    def _truncated(self, event: b.Event, start: int, said: ddl.Statement) -> None:
        place = said.table
        if place is None or not self._context.chooses(*place):
            return
        table = self._latest.get(place) or self._context.table_now(*place)
        if table is None:
            table = Table(place[0], "", place[1], (), ())
        reader = _Reader(
            reader_of(
                tablemap.TableMap(*place, (), ()), self._context.charsets, self._context.modes
            ),
            Blocks(table, self._context.name, self._context.kind),
        )
        self._held.append(_Held(event, start, reader, truncated=table))

    def _rollback(self) -> None:
        if self._handed_on:
            raise CaptureError(
                f"the transaction before position {self.at} of {self.file} is larger than"
                f" {self._context.held_max_bytes} bytes and was rolled back in the binlog",
                advice="Raise the option held_max_bytes above the size of the transaction.",
            )
        self._end()

    def _rollback_to(self, name: str) -> None:
        keep = self._savepoints.get(name)
        if keep is None:
            return
        if self._handed_on > keep:
            self._rollback()
        del self._held[keep - self._handed_on :]

    def _commit(self, event: b.Event) -> Iterator[Part] | None:
        if self._is_xa:
            # Committed in one phase after all; the rows were not kept.
            return self._reread(event, *self._group_at)
        if not self._held and not self._handed_on:
            self._end()
            return None
        return self._deliver(event)

    # -- rows --------------------------------------------------------------------------------------

    def _take_table(self, event: b.Event) -> None:
        body = event.data[b.HEADER_SIZE + 6 :]
        try:
            reader = self._readers[body]
        except KeyError:
            reader = self._readers[body] = self._make_reader(event.data)
        self._tables[b.table_id(event)] = reader

    def _make_reader(self, data: bytes) -> _Reader | None:
        context = self._context
        database, name = tablemap.names_of(data)
        if len(self._readers) >= _READERS_MAX:
            self._readers.clear()
        if not context.chooses(database, name):
            return None
        found = tablemap.parse(data, context.charsets, self._disguised.of(database, name))
        rows = reader_of(found, context.charsets, context.modes)
        if len(self._latest) >= _READERS_MAX:
            self._latest.clear()
        self._latest[database, name] = rows.table
        return _Reader(rows, Blocks(rows.table, context.name, context.kind))

    def _take_rows(self, event: b.Event, start: int) -> Iterator[Part] | None:
        number = b.table_id(event)
        try:
            reader = self._tables[number]
        except KeyError:
            if number == _DUMMY_TABLE:
                return None
            raise b.BinlogError(
                f"rows before position {self.at} of {self.file} are of table {number}, of which"
                " there is no map"
            ) from None
        if reader is None:
            return None
        if self._is_xa:
            self._xa_rows = True
            return None
        self._held.append(_Held(event, start, reader, query=self._query))
        self._held_bytes += len(event.data)
        if self._held_bytes > self._context.held_max_bytes:
            return self._hand_on()
        return None

    def _hand_on(self) -> Iterator[Part]:
        """Part of a transaction whose end was not seen yet, because it is too large to keep."""
        yield from self._parts(is_last=False, commit_us=0)
        self._handed_on += len(self._held)
        self._held = []
        self._held_bytes = 0

    def _deliver(self, event: b.Event) -> Iterator[Part]:
        commit_us = self._commit_us or event.time_s * 1_000_000
        yield from self._parts(is_last=True, commit_us=commit_us)
        self._end()

    def _parts(self, *, is_last: bool, commit_us: int) -> Iterator[Part]:
        gtid = orjson.dumps(self._gtid) if self._gtid else NULL
        name = self._gtid or f"{self._group_at[0]}:{self._group_at[1]}"
        is_first = self._handed_on == 0
        segments: list[list[Change] | Block] = []
        most = self._context.part_changes
        for held in self._held:
            if sum(map(len, segments)) >= most:
                us = commit_us or held.event.time_s * 1_000_000
                yield Part(name, _joined(segments), {}, us, is_first, is_last=False)
                is_first = False
                segments = []
            self._decode(held, gtid, segments)
        if segments or is_last:
            us = commit_us or self._held[-1].event.time_s * 1_000_000
            position = self.position if is_last else {}
            yield Part(name, _joined(segments), position, us, is_first, is_last=is_last)

    def _decode(self, held: _Held, gtid: bytes, segments: list[list[Change] | Block]) -> None:
        event, reader = held.event, held.reader
        assert reader is not None
        ts_us = self._commit_us or event.time_s * 1_000_000
        halves = reader.blocks.halves(
            *(ts_us, event.server_id, gtid, self._file_json, held.at, self._thread, held.query)
        )
        head = None if held.truncated is not None else b.rows_head(event)
        block = None if head is None else reader.rows.block(event.kind, head, halves, ts_us)
        if block is not None:
            segments.append(block)
            return
        if not segments or not isinstance(segments[-1], list):
            segments.append([])
        changes = segments[-1]
        assert isinstance(changes, list)
        if head is not None:
            reader.rows.read(event.kind, head, halves, ts_us, changes)
        elif held.truncated is not None:
            source = halves[0] + b"0" + halves[1]
            changes.append(Change(held.truncated, TRUNCATE, None, None, source, ts_us))

    def _take_payload(self, event: b.Event, start: int) -> Iterator[Part] | None:
        """A transaction that MySQL compressed: its events have no places of their own."""
        for inner in b.payload(event):
            found = self._take(inner, start)
            if found is not None and not self._in_payload_end(inner):
                return self._payload_parts(event, start)
            if found is not None:
                return found
        return None

    def _in_payload_end(self, inner: b.Event) -> bool:
        return inner.kind in (b.XID, b.QUERY, b.XA_PREPARE)

    def _payload_parts(self, event: b.Event, start: int) -> Iterator[Part]:
        """A compressed transaction that is too large to be kept: from its beginning again."""
        self._held, self._held_bytes, self._handed_on = [], 0, 0
        for inner in b.payload(event):
            found = self._take(inner, start)
            if found is not None:
                yield from found

    # -- XA ----------------------------------------------------------------------------------------

    def _xa_prepared(self, event: b.Event) -> Iterator[Part] | None:
        one_phase, name = b.xa_prepare(event)
        if one_phase:
            return self._reread(event, *self._group_at)
        self._xa[name] = list(self._group_at) if self._xa_rows else None
        self._end()
        return None

    def _xa_ended(self, event: b.Event, said: ddl.Statement) -> Iterator[Part] | None:
        if said.name not in self._xa:
            if said.kind == ddl.XA_ROLLBACK:
                self._end()
                return None
            raise PositionLostError(
                f"XA transaction {said.name}, committed before position {self.at} of {self.file},"
                " was prepared before the capture began: its changes are not known"
            )
        place = self._xa.pop(said.name)
        self._position = None
        if said.kind == ddl.XA_ROLLBACK or place is None:
            self._end()
            return None
        return self._reread(event, str(place[0]), int(place[1]))

    def _reread(self, event: b.Event, file: str, at: int) -> Iterator[Part]:
        """Deliver, as of now, the rows of the group that begins at this place."""
        reread = self._context.reread
        if reread is None:
            raise CaptureError("an XA transaction cannot be read again")
        past = Assembler(self._context, {"file": file, "pos": at, "types": self._disguised.known()})
        self._is_xa = False
        # The rows are told as of where they are in the binlog.
        present = self._file_json
        self._file_json = orjson.dumps(file)
        for raw in reread(file, at):
            past._is_past_xa_rows(raw, self)
            if self._held_bytes > self._context.held_max_bytes:
                yield from self._hand_on()
            if past._ended_xa:
                break
        parts = self._deliver(event) if self._held or self._handed_on else None
        if parts is None:
            self._end()
        else:
            yield from parts
        self._file_json = present

    _ended_xa = False

    def _is_past_xa_rows(self, raw: bytes, present: Assembler) -> None:
        """Read one event of a group again; its rows go to the present."""
        event = self._event(raw)
        start = self.at
        self._advance(event)
        kind = event.kind
        if kind == b.TABLE_MAP:
            self._take_table(event)
        elif kind in b.ROWS:
            reader = self._tables.get(b.table_id(event))
            if reader is not None:
                present._held.append(_Held(event, start, reader, query=self._query))
                present._held_bytes += len(event.data)
        elif kind == b.ROTATE:
            self._rotate(event)
        elif kind in (b.XA_PREPARE, b.XID):
            self._ended_xa = True
        elif kind in (b.QUERY, b.QUERY_COMPRESSED):
            said = ddl.classify(b.query(event).sql, "")
            self._ended_xa = said.kind in (ddl.COMMIT, ddl.ROLLBACK)


def _joined(segments: list[list[Change] | Block]) -> Sequence[Change]:
    """The changes of a part."""
    if len(segments) == 1 and isinstance(segments[0], list):
        return segments[0]
    return Several(segments) if segments else []


_FRAMES: Final = frozenset({bytes([b.FORMAT]), bytes([b.ROTATE])})
_UNPLACED: Final = frozenset({b.ROTATE, b.HEARTBEAT, b.HEARTBEAT_V2})
_RARE: Final = frozenset(
    {b.ROTATE, b.GTID, b.ANONYMOUS_GTID, b.XA_PREPARE, b.PAYLOAD, b.ANNOTATE, b.ROWS_QUERY,
     b.INCIDENT, b.GTID_TAGGED, b.PARTIAL_UPDATE, b.BEGIN_LOAD, b.EXECUTE_LOAD}
)  # fmt: skip
