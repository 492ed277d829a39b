"""Some rows of a table, in the order of its key, at an exact position: what `ask` asks for.

The snapshot for a chunk is taken between two transactions of the stream, so its position is never
behind the stream's (the binlog may be ahead of the tables for a moment; then it is taken again).
The stream goes on up to that position, and there the chunk belongs: every change before it is in
the rows, every later one comes later.
"""

from __future__ import annotations

import threading
from base64 import b64decode
from datetime import UTC, datetime, timedelta
from struct import pack, unpack
from time import time_ns
from typing import Any, Final

import orjson

from penstock.capture.mysql import types
from penstock.capture.mysql.blocks import Blocks
from penstock.capture.mysql.connection import Address, Connection, Server, connect, explained, query
from penstock.capture.mysql.replication import force_close
from penstock.capture.mysql.schema import Chooser, KnownTable, known_tables
from penstock.capture.mysql.snapshot import Begun, begin, file_number, select_of, select_rows
from penstock.capture.mysql.textrows import quoted, row_decoder
from penstock.capture.mysql.types import Modes, Native
from penstock.capture.mysql.values import decimal_string
from penstock.capture.source import (
    NULL,
    CaptureError,
    Chunk,
    ChunkRequest,
    Position,
    Row,
    Table,
)

_TRIES: Final = 400
_PAUSE_S: Final = 0.005
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Place(tuple[int, int]):
    """A place in the binlog, to be compared."""

    @classmethod
    def of(cls, file: str, at: int) -> Place:
        return cls((file_number(file), at))


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

    def read(self, request: ChunkRequest, reached: Position) -> tuple[Place, Chunk]:
        """The chunk, and the place of the stream where it belongs: not before `reached`."""
        now = Place.of(str(reached["file"]), int(reached["pos"]))
        with explained(self._address):
            if self._connection is None:
                self._connection = connect(self._address)
            for _ in range(_TRIES):
                begun = begin([self._connection], self._server)
                place = Place.of(begun.file, begun.at)
                if place >= now:
                    return place, self._select(request, begun)
                self._pause.wait(_PAUSE_S)
        raise CaptureError(
            f"the tables stay behind the binlog: {begun.file}:{begun.at} after {_TRIES} tries, the"
            f" stream is at {reached['file']}:{reached['pos']}"
        )

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
