"""Some rows of a table, in the order of its key, at an exact position: what `ask` asks for.

The snapshot for a chunk is taken between two transactions of the stream, so its position is never
behind the stream's (the binlog may be ahead of the tables for a moment; then it is taken again).
The stream goes on up to that position, and there the chunk belongs: every change before it is in
the rows, every later one comes later. Only DDL may be seen a moment before the binlog has it: a
table that is being truncated may be empty already, and the stream says so next.

MySQL does not tell the position of a snapshot. With GTIDs, the chunk is read without any lock once
all that the stream has told is in the tables; it belongs where the binlog ends afterwards, and rows
that change on the way there are left out, for the stream tells them (the watermark method). Without
GTIDs the snapshot begins under a global read lock, as the initial one does.
"""

from __future__ import annotations

import threading
from base64 import b64decode
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from struct import pack, unpack
from time import time_ns
from typing import Any, Final

import orjson

from penstock.capture.mysql import types
from penstock.capture.mysql.blocks import Blocks
from penstock.capture.mysql.connection import (
    Address,
    Connection,
    Server,
    TableChangedError,
    binlog_end,
    connect,
    explained,
    query,
)
from penstock.capture.mysql.replication import force_close
from penstock.capture.mysql.schema import Chooser, KnownTable, known_tables
from penstock.capture.mysql.snapshot import (
    Begun,
    begin,
    begin_unlocked,
    file_number,
    select_of,
    select_rows,
)
from penstock.capture.mysql.textrows import quoted, row_decoder
from penstock.capture.mysql.types import Modes, Native
from penstock.capture.mysql.values import decimal_string
from penstock.capture.source import (
    NULL,
    TRUNCATE,
    CaptureError,
    Chunk,
    ChunkRequest,
    Part,
    Position,
    Row,
    Table,
)

_TRIES: Final = 400
_PAUSE_S: Final = 0.005
_EXECUTED_S: Final = 30
_ALTERED_TRIES: Final = 20
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Place(tuple[int, int]):
    """A place in the binlog, to be compared."""

    @classmethod
    def of(cls, file: str, at: int) -> Place:
        return cls((file_number(file), at))


@dataclass(slots=True)
class Ready:
    """A chunk that waits for its place in the stream."""

    place: Place
    chunk: Chunk
    # Whether rows that change before its place are left out.
    watches: bool = False
    _touched: set[Row] = field(default_factory=set)
    _emptied: bool = False
    # The table's key changed on the way: the chunk must be read again.
    spoiled: bool = False

    def see(self, part: Part) -> None:
        """A part of the stream before its place."""
        if not self.watches:
            return
        mine = self.chunk.table
        for change in part.changes:
            table = change.table
            if (table.database, table.name) != (mine.database, mine.name):
                continue
            names = [column.name for column in table.columns]
            if change.op == TRUNCATE:
                self._emptied = True
            elif table.key != mine.key:
                self.spoiled = True
            else:
                key = [names.index(part) for part in table.key]
                for row in filter(None, (change.before, change.after)):
                    self._touched.add(tuple(row[i] for i in key))

    def finished(self) -> Chunk:
        """The chunk, at its place."""
        chunk = self.chunk
        if self._emptied:
            chunk.rows = []
        elif self._touched:
            names = [column.name for column in chunk.table.columns]
            key = [names.index(part) for part in chunk.table.key]
            chunk.rows = [
                row for row in chunk.rows if tuple(row[i] for i in key) not in self._touched
            ]
        return chunk


class ChunkReader:
    """Reads chunks on a connection of its own."""

    def __init__(
        self, address: Address, server: Server, chooser: Chooser, modes: Modes, name: str, kind: str
    ) -> None:
        self._address = address
        self._server = server
        self._chooser = chooser
        self._modes = modes
        self._name = name
        self._kind = kind
        self._connection: Connection | None = None
        self._pause = threading.Event()

    def read(self, request: ChunkRequest, reached: Position) -> Ready:
        """The chunk, and the place of the stream where it belongs: not before `reached`."""
        for _ in range(_ALTERED_TRIES):
            try:
                return self._read(request, reached)
            except TableChangedError as error:
                changed = error
                self._pause.wait(_PAUSE_S)
        # A condition may name a column that is not there.
        return Ready(Place((0, 0)), _problem(request, str(changed)))

    def _read(self, request: ChunkRequest, reached: Position) -> Ready:
        gtid = str(reached.get("gtid") or "")
        if not self._server.is_mariadb and gtid:
            return self._read_watched(request, gtid)
        now = Place.of(str(reached["file"]), int(reached["pos"]))
        with explained(self._address):
            if self._connection is None:
                self._connection = connect(self._address)
            for _ in range(_TRIES):
                begun = begin([self._connection], self._server)
                place = Place.of(begun.file, begun.at)
                if place >= now:
                    return Ready(place, self._select(request, begun))
                self._pause.wait(_PAUSE_S)
        raise CaptureError(
            f"the tables stay behind the binlog: {begun.file}:{begun.at} after {_TRIES} tries, the"
            f" stream is at {reached['file']}:{reached['pos']}"
        )

    def _read_watched(self, request: ChunkRequest, gtid: str) -> Ready:
        with explained(self._address):
            if self._connection is None:
                self._connection = connect(self._address)
            waited = "SELECT WAIT_FOR_EXECUTED_GTID_SET(%s, %s)"
            if query(self._connection, waited, (gtid, _EXECUTED_S))[0][0] != 0:
                raise CaptureError(
                    f"the tables stay behind the binlog for {_EXECUTED_S} s; the stream is at"
                    f" {gtid}"
                )
            begin_unlocked(self._connection)
            file, at, executed = binlog_end(self._connection, self._server)
            chunk = self._select(request, Begun(file, at, executed, []))
            if self._connection is not None:
                file, at, _ = binlog_end(self._connection, self._server)
        return Ready(Place.of(file, at), chunk, watches=True)

    def _select(self, request: ChunkRequest, begun: Begun) -> Chunk:
        assert self._connection is not None
        database, _, name = request.table.rpartition(".")
        only = (database or self._chooser.database, name)
        found = known_tables(self._connection, self._chooser, self._modes, only)
        known = next(iter(found), None)
        if known is None:
            return _problem(request, f"there is no table {request.table} among the captured ones")
        if not known.table.key:
            return _problem(request, f"{request.table} has no primary key to read it by")
        sql, key = chunk_select(known, request, self._server, self._modes)
        rows: list[Row] = []
        decode = row_decoder(known.columns, self._modes)
        try:
            for some in select_rows(self._connection, self._address, sql, decode):
                rows += some
        except TableChangedError:
            query(self._connection, "ROLLBACK")
            raise
        except CaptureError as error:
            self.close()
            if error.retriable:
                raise
            return _problem(request, str(error))
        query(self._connection, "COMMIT")
        now_us = time_ns() // 1000
        blocks = Blocks(known.table, self._name, self._kind)
        source = blocks.snapshot(
            *(now_us, self._server.server_id, orjson.dumps(begun.gtid or None)),
            *(orjson.dumps(begun.file), begun.at),
        ).replace(b'"snapshot":"true"', b'"snapshot":"incremental"', 1)
        last = tuple(rows[-1][i] for i in key) if rows else None
        return Chunk(request, known.table, rows, source, now_us, last, len(rows) < request.limit)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            force_close(connection)


def _problem(request: ChunkRequest, why: str) -> Chunk:
    nothing = Table("", "", request.table, (), ())
    return Chunk(request, nothing, [], NULL, time_ns() // 1000, None, True, problem=why)


def chunk_select(
    known: KnownTable, request: ChunkRequest, server: Server, modes: Modes
) -> tuple[str, list[int]]:
    """The SELECT of a chunk, and the places of the key among its columns."""
    names = [native.name for native in known.columns]
    key = [names.index(part) for part in known.table.key]
    natives = [known.columns[i] for i in key]
    ordered = [_ordered(native) for native in natives]
    conditions = [f"({request.where})"] if request.where else []
    if request.after is not None:
        if len(request.after) != len(key):
            raise CaptureError(f"{request.table} has a key of {len(key)} columns")
        ends = [literal(n, v, modes) for n, v in zip(natives, request.after, strict=True)]
        later = []
        for i, (part, end) in enumerate(zip(ordered, ends, strict=True)):
            same = [f"{p} = {e}" for p, e in zip(ordered[:i], ends[:i], strict=True)]
            later.append("(" + " AND ".join([*same, f"{part} > {end}"]) + ")")
        # The first condition lets the server begin in the middle of its index.
        conditions.append(f"{ordered[0]} >= {ends[0]} AND ({' OR '.join(later)})")
    sql = select_of(known, server)
    if conditions:
        sql += " WHERE " + " AND ".join(conditions)
    return f"{sql} ORDER BY {', '.join(ordered)} LIMIT {int(request.limit)}", key


def _ordered(native: Native) -> str:
    name = quoted(native.name)
    # These sort by number and compare with text by their text.
    return f"({name} + 0)" if native.kind in (types.ENUM, types.SET, types.BIT) else name


def literal(native: Native, fragment: bytes, modes: Modes) -> str:
    """The SQL of a key's value that was given as a fragment."""
    kind = native.kind
    value: Any = orjson.loads(fragment)
    if kind in types.INTEGERS or kind == types.DECIMAL:
        return _number(native, fragment, value, modes)
    if kind in (types.DOUBLE, types.YEAR):
        return fragment.decode()
    if kind == types.FLOAT:
        return repr(unpack("f", pack("f", value))[0])
    if kind == types.BINARY:
        return f"X'{b64decode(value).hex()}'"
    if kind == types.BIT:
        raw = bytes([value]) if isinstance(value, bool) else b64decode(value)
        return str(int.from_bytes(raw, "little"))
    if kind == types.ENUM:
        return str(native.values.index(value) + 1 if value else 0)
    if kind == types.SET:
        chosen = value.split(",") if value else []
        return str(sum(1 << native.values.index(part) for part in chosen))
    if kind == types.DATE:
        return f"DATE'{(_EPOCH + timedelta(days=value)).date().isoformat()}'"
    if kind == types.DATETIME:
        micros = value if native.scale > 3 else value * 1000
        moment = _EPOCH + timedelta(microseconds=micros)
        return f"TIMESTAMP'{moment.replace(tzinfo=None).isoformat(' ')}'"
    if kind == types.TIMESTAMP:
        return f"TIMESTAMP'{value.rstrip('Z').replace('T', ' ')}'"
    if kind == types.TIME:
        seconds, micros = divmod(abs(value), 1_000_000)
        clock = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}.{micros:06d}"
        return f"CAST('{'-' if value < 0 else ''}{clock}' AS TIME(6))"
    return f"_utf8mb4 X'{str(value).encode().hex()}'"


def _number(native: Native, fragment: bytes, value: Any, modes: Modes) -> str:
    if not isinstance(value, str):
        return fragment.decode()
    if native.kind == types.DECIMAL and modes.decimal != "precise":
        return value
    number = int.from_bytes(b64decode(value), "big", signed=True)
    return decimal_string(number, native.scale).decode().strip('"')
