"""Rows as they were at an exact position of the binlog, without holding up anyone's writes.

MariaDB ties a consistent snapshot of its transactional tables to a position by itself and tells it
in `binlog_snapshot_file` and `binlog_snapshot_position`. Two connections whose snapshots name the
same position see the same rows; that is how a snapshot is read by several at a time. MySQL has no
such thing: a global read lock is held for the moment it takes to begin (and given up if it cannot
be had within seconds, rather than queue the user's writes behind it).

Rows come as text over one query, read from the socket in large pieces.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from time import monotonic, time_ns
from typing import Any, Final, NamedTuple

import orjson
import pymysql

from penstock.capture.blocks import in_blocks
from penstock.capture.mysql import replication
from penstock.capture.mysql.binlog import length_encoded
from penstock.capture.mysql.blocks import Blocks
from penstock.capture.mysql.connection import (
    Address,
    Connection,
    Server,
    binlog_end,
    connect,
    explained,
    query,
    server_of,
)
from penstock.capture.mysql.replication import COM_QUERY, Packets, error_of, send_command
from penstock.capture.mysql.schema import Chooser, KnownTable, known_tables
from penstock.capture.mysql.textrows import (
    DecodeText,
    TextBlocks,
    row_decoder,
    selected,
    selected_mysql,
    text_blocks,
)
from penstock.capture.mysql.types import DISGUISED, Modes
from penstock.capture.source import (
    CaptureError,
    DatabaseUnreachableError,
    Position,
    Row,
    Snapshot,
    Table,
)

_BATCH_ROWS: Final = 4096
_ALIGN_TRIES: Final = 40
_LOCK_WAIT_S: Final = 5
XA_WAIT_S = 10.0
_REPEATABLE: Final = "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ"
_BEGIN: Final = "START TRANSACTION WITH CONSISTENT SNAPSHOT"


class Begun(NamedTuple):
    """A snapshot's position, and the connections that have it."""

    file: str
    at: int
    gtid: str
    connections: list[Connection]


def begin(connections: Sequence[Connection], server: Server) -> Begun:
    """Begin snapshots at one position."""
    for connection in connections:
        query(connection, _REPEATABLE)
    if not server.is_mariadb:
        return _begin_locked(connections, server)
    places = [_begin_one(connection) for connection in connections]
    for _ in range(_ALIGN_TRIES):
        latest = max(places, key=lambda place: (file_number(place[0]), place[1]))
        if all(place == latest for place in places):
            break
        for i, connection in enumerate(connections):
            if places[i] != latest:
                places[i] = _begin_one(connection)
    latest = max(places, key=lambda place: (file_number(place[0]), place[1]))
    same = [c for c, place in zip(connections, places, strict=True) if place == latest]
    found = query(same[0], "SELECT BINLOG_GTID_POS(%s, %s)", latest)
    return Begun(*latest, str(found[0][0] or ""), same)


def _begin_one(connection: Connection) -> tuple[str, int]:
    query(connection, _BEGIN)
    found = dict(query(connection, "SHOW STATUS LIKE 'binlog_snapshot_%'"))
    known = {str(name).lower(): value for name, value in found.items()}
    file = str(known.get("binlog_snapshot_file") or "")
    if not file:
        raise CaptureError("the server writes no binlog", advice="In my.cnf: log_bin=binlog")
    return file, int(known["binlog_snapshot_position"])


def begin_unlocked(connection: Connection) -> None:
    """Begin a snapshot at nobody knows which position."""
    query(connection, _REPEATABLE)
    query(connection, _BEGIN)


def _begin_locked(connections: Sequence[Connection], server: Server) -> Begun:
    first = connections[0]
    query(first, f"SET SESSION lock_wait_timeout = {_LOCK_WAIT_S}")
    try:
        query(first, "FLUSH TABLES WITH READ LOCK")
        for connection in connections:
            query(connection, _BEGIN)
        place = binlog_end(first, server)
    finally:
        query(first, "UNLOCK TABLES")
    return Begun(*place, list(connections))


def file_number(name: str) -> int:
    """Binlog files are numbered; their names sort by number, not by letter."""
    digits = name.rpartition(".")[2]
    return int(digits) if digits.isdigit() else -1


def select_rows(
    connection: Connection, where: object, sql: str, decode: DecodeText
) -> Iterator[list[Row]]:
    """The rows of a query, some thousand at a time. A reader that stops in the middle leaves the
    connection unusable."""
    for messages in _select(connection, where, sql):
        yield [decode(message, 0) for message in messages]


def select_blocks(
    connection: Connection, where: object, sql: str, decode: DecodeText, blocks: TextBlocks | None
) -> Iterator[Sequence[Row]]:
    """The same, in blocks where that can be."""
    if blocks is None:
        yield from select_rows(connection, where, sql, decode)
        return
    for messages in _select(connection, where, sql):
        yield from in_blocks(
            messages, blocks.block, lambda some: [decode(message, 0) for message in some]
        )


def _select(connection: Connection, where: object, sql: str) -> Iterator[list[bytes]]:
    """The rows of a query as the server sends them."""
    with explained(where):
        send_command(connection, COM_QUERY, sql.encode())
    packets = Packets(connection, where)
    rows: list[bytes] = []
    # The number of columns, their descriptions, and an EOF come before the rows.
    ahead = -1
    while True:
        for message in _some(packets, where):
            first = message[0]
            if first == 0xFF:
                code, text = error_of(message)
                with explained(where):
                    raise pymysql.err.OperationalError(code, text)
            if ahead:
                ahead = length_encoded(message, 0)[0] + 1 if ahead < 0 else ahead - 1
                continue
            if first == 0xFE and len(message) < 9:
                if rows:
                    yield rows
                return
            rows.append(message)
        if len(rows) >= _BATCH_ROWS:
            yield rows
            rows = []


def _some(packets: Packets, where: object) -> list[bytes]:
    messages = packets.read()
    if not messages:
        raise DatabaseUnreachableError(f"{where} does not answer")
    return messages


def select_of(known: KnownTable, server: Server, where: str = "") -> str:
    """The SELECT whose text is exact."""
    form = selected if server.is_mariadb else selected_mysql
    columns = ", ".join(map(form, known.columns))
    return f"SELECT {columns} FROM {known.place}" + (f" WHERE ({where})" if where else "")


class MysqlSnapshot(Snapshot):
    """All chosen tables at one position."""

    def __init__(
        self,
        address: Address,
        chooser: Chooser,
        modes: Modes,
        *,
        name: str,
        kind: str,
        workers: int,
    ) -> None:
        self._address = address
        self._modes = modes
        self._connections: list[Connection] = []
        try:
            self._open(chooser, name, kind, max(1, workers))
        except BaseException:
            self.close()
            raise

    def _open(self, chooser: Chooser, name: str, kind: str, workers: int) -> None:
        for _ in range(workers):
            self._connections.append(connect(self._address))
        first = self._connections[0]
        with explained(self._address):
            self._server = server = server_of(first)
            _wait_for_xa(first)
            file, at, gtid, usable = begin(self._connections, server)
            self._known = known_tables(usable[0], chooser, self._modes)
        for spare in set(self._connections) - set(usable):
            spare.close()
            self._connections.remove(spare)
        position: dict[str, Any] = {"file": file, "pos": at, "gtid": gtid, "server": server.uid}
        types = {
            known.table.full_name: {n.name: n.kind for n in known.columns if n.kind in DISGUISED}
            for known in self._known
        }
        types = {table: columns for table, columns in types.items() if columns}
        if types:
            position["types"] = types
        self.position: Position = position
        self.tables = [known.table for known in self._known]
        self._by_table = {id(known.table): known for known in self._known}
        now_us = time_ns() // 1000
        gtid_json = orjson.dumps(gtid or None)
        self._sources = {
            id(known.table): Blocks(known.table, name, kind).snapshot(
                now_us, server.server_id, gtid_json, orjson.dumps(file), at
            )
            for known in self._known
        }
        self._free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        for connection in self._connections:
            self._free.put(connection)

    def rows(self, table: Table, *, where: str = "") -> Iterator[Sequence[Row]]:
        """One table at a time on each connection; a thread waits for a free one."""
        known = self._by_table[id(table)]
        decode = row_decoder(known.columns, self._modes)
        blocks = text_blocks(known.columns, self._modes)
        connection = self._free.get()
        whole = False
        try:
            sql = select_of(known, self._server, where)
            yield from select_blocks(connection, self._address, sql, decode, blocks)
            whole = True
        except CaptureError as error:
            # The server said no, and waits for the next question.
            whole = not isinstance(error, DatabaseUnreachableError)
            raise
        finally:
            if not whole:
                # What is left of the answer would be taken for the next one's.
                _close(connection)
            self._free.put(connection)

    def source(self, table: Table) -> bytes:
        return self._sources[id(table)]

    def estimate(self, table: Table) -> int | None:
        return self._by_table[id(table)].rows

    @property
    def workers(self) -> int:
        """How many tables can be read at a time."""
        return len(self._connections)

    def close(self) -> None:
        for connection in self._connections:
            _close(connection)
        self._connections = []


def _wait_for_xa(connection: Connection) -> None:
    """Until no XA transaction is prepared: a snapshot does not tell where it is in the binlog."""
    pause = threading.Event()
    deadline = monotonic() + XA_WAIT_S
    while True:
        try:
            prepared = query(connection, "XA RECOVER")
        except pymysql.MySQLError:
            # MySQL 8 shows them only to who may see them; the stream finds out.
            return
        if not prepared:
            return
        if monotonic() > deadline:
            raise CaptureError(
                f"{len(prepared)} XA transactions are prepared and not committed for longer than"
                f" {XA_WAIT_S} s; a snapshot cannot tell where they are in the binlog",
                advice="Commit or roll them back (XA RECOVER lists them), then try again.",
            )
        pause.wait(0.05)


def _close(connection: Any) -> None:
    replication.force_close(connection)
