"""Events of the binlog: framing, checksums, and the fields of those that a capture needs.

Every event begins with the same 19 bytes: time, type, server, size, where the next one begins, and
flags. With binlog_checksum=CRC32 it ends with a checksum of all that is before. Which of the two
holds is said by the format description at the beginning of each file.

Nothing here knows of sockets. Whatever is not an event raises BinlogError.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from struct import Struct
from typing import Final, NamedTuple
from uuid import UUID

import cramjam

from penstock.capture.source import CaptureError

HEADER: Final = Struct("<IBIIIH")
HEADER_SIZE: Final = 19
CHECKSUM_SIZE: Final = 4
# What zlib.crc32 gives for any bytes that are followed by their own checksum.
_RESIDUE: Final = 0x2144DF1C
# One event may not be larger when unpacked; the servers' own limit is 1 GiB.
UNPACKED_MAX: Final = 1 << 30

QUERY, STOP, ROTATE, INTVAR, RAND, USER_VAR, FORMAT, XID = 2, 3, 4, 5, 13, 14, 15, 16
BEGIN_LOAD, EXECUTE_LOAD, TABLE_MAP = 17, 18, 19
WRITE_V1, UPDATE_V1, DELETE_V1, INCIDENT, HEARTBEAT, ROWS_QUERY = 23, 24, 25, 26, 27, 29
WRITE_V2, UPDATE_V2, DELETE_V2, GTID, ANONYMOUS_GTID, PREVIOUS_GTIDS = 30, 31, 32, 33, 34, 35
XA_PREPARE, PARTIAL_UPDATE, PAYLOAD, HEARTBEAT_V2, GTID_TAGGED = 38, 39, 40, 41, 42
ANNOTATE, CHECKPOINT, MARIADB_GTID, GTID_LIST, START_ENCRYPTION = 160, 161, 162, 163, 164
QUERY_COMPRESSED = 165
WRITE_C1, UPDATE_C1, DELETE_C1, WRITE_C2, UPDATE_C2, DELETE_C2 = 166, 167, 168, 169, 170, 171

INSERTS: Final = frozenset({WRITE_V1, WRITE_V2, WRITE_C1, WRITE_C2})
UPDATES: Final = frozenset({UPDATE_V1, UPDATE_V2, UPDATE_C1, UPDATE_C2})
DELETES: Final = frozenset({DELETE_V1, DELETE_V2, DELETE_C1, DELETE_C2})
ROWS: Final = INSERTS | UPDATES | DELETES
_ROWS_V2: Final = frozenset({WRITE_V2, UPDATE_V2, DELETE_V2, WRITE_C2, UPDATE_C2, DELETE_C2})
_ROWS_COMPRESSED: Final = frozenset(
    {WRITE_C1, UPDATE_C1, DELETE_C1, WRITE_C2, UPDATE_C2, DELETE_C2}
)

FLAG_ARTIFICIAL: Final = 0x20
# Of a MariaDB GTID event: no event ends the group, the statement that follows is all of it.
GTID_STANDALONE: Final = 1
# It is prepared for XA; whether it counts is told by a later group.
GTID_PREPARED: Final = 64


class BinlogError(CaptureError):
    """Bytes that are not the event they should be."""

    advice = "Compare with the server's own reading: mariadb-binlog --verify-binlog-checksum FILE."


class Event(NamedTuple):
    """One event; `data` begins at its header and ends before its checksum."""

    time_s: int
    kind: int
    server_id: int
    # Where the next event begins, its low 32 bits; 0 for what is in no file.
    end: int
    flags: int
    data: bytes


def parse(data: bytes, *, checksum: bool) -> Event:
    """The event in these bytes, which are exactly one."""
    if len(data) < HEADER_SIZE:
        raise BinlogError(f"{len(data)} bytes are no event")
    time_s, kind, server_id, size, end, flags = HEADER.unpack_from(data)
    if size != len(data):
        raise BinlogError(f"an event says it has {size} bytes, it has {len(data)}")
    if checksum:
        if zlib.crc32(data) != _RESIDUE:
            raise BinlogError(f"wrong checksum of the event that ends at {end}")
        data = data[:-CHECKSUM_SIZE]
    return Event(time_s, kind, server_id, end, flags, data)


def format_checksum(data: bytes) -> bool:
    """Of a whole format description: whether it and the events after it have checksums."""
    # The algorithm is the last byte before the room of the checksum.
    if len(data) < HEADER_SIZE + 62:
        raise BinlogError("a format description that is cut")
    return data[-CHECKSUM_SIZE - 1] == 1


def format_created_s(data: bytes) -> int:
    """Of a whole format description: when the server started, if its first file since begins here;
    else 0."""
    at = HEADER_SIZE + 52
    return int.from_bytes(data[at : at + 4], "little")


def has_checksum(data: bytes) -> bool:
    """Whether these bytes end with a checksum of what is before it."""
    return zlib.crc32(data) == _RESIDUE


def rotate(event: Event) -> tuple[str, int]:
    """The file that comes next, and where in it."""
    body = event.data[HEADER_SIZE:]
    if len(body) < 9:
        raise BinlogError("a rotation that is cut")
    return body[8:].rstrip(b"\0").decode("utf-8", "replace"), int.from_bytes(body[:8], "little")


class Query(NamedTuple):
    """A statement."""

    thread: int
    database: str
    sql: str
    error: int


_QUERY: Final = Struct("<IIBHH")


def query(event: Event) -> Query:
    """The statement of a query event, compressed or not."""
    data = event.data
    try:
        thread, _, size, error, status = _QUERY.unpack_from(data, HEADER_SIZE)
        at = HEADER_SIZE + _QUERY.size + status
        if at + size + 1 > len(data):
            raise BinlogError("a statement that is cut")
        database = data[at : at + size].decode("utf-8", "replace")
        sql = data[at + size + 1 :]
        if event.kind == QUERY_COMPRESSED:
            sql = inflate(sql)
    except struct.error:
        raise BinlogError("a statement that is cut") from None
    return Query(thread, database, sql.decode("utf-8", "replace"), error)


def inflate(data: bytes) -> bytes:
    """What MariaDB compressed with log_bin_compress."""
    if not data or data[0] & 0xF0 != 0x80:
        raise BinlogError("a compressed event of an unknown kind")
    width = data[0] & 7
    size = int.from_bytes(data[1 : 1 + width], "big")
    if size > UNPACKED_MAX:
        raise BinlogError(f"a compressed event that says it has {size} bytes")
    try:
        out = zlib.decompressobj().decompress(data[1 + width :], size + 1)
    except zlib.error as error:
        raise BinlogError(f"a compressed event is damaged: {error}") from None
    if len(out) != size:
        raise BinlogError(f"a compressed event should have {size} bytes")
    return out


class MariadbGtid(NamedTuple):
    """The id of a group of events."""

    domain: int
    server_id: int
    sequence: int
    flags: int

    @property
    def text(self) -> str:
        return f"{self.domain}-{self.server_id}-{self.sequence}"


_MARIADB_GTID: Final = Struct("<QIB")


def mariadb_gtid(event: Event) -> MariadbGtid:
    """The beginning of a group in MariaDB."""
    try:
        sequence, domain, flags = _MARIADB_GTID.unpack_from(event.data, HEADER_SIZE)
    except struct.error:
        raise BinlogError("a GTID that is cut") from None
    return MariadbGtid(domain, event.server_id, sequence, flags)


class MysqlGtid(NamedTuple):
    """The id of a transaction, and when it was committed if the server tells (else 0)."""

    server: str
    number: int
    commit_us: int


def mysql_gtid(event: Event) -> MysqlGtid:
    """The beginning of a transaction in MySQL, with an id or anonymous."""
    data = event.data
    at = HEADER_SIZE
    if len(data) < at + 25:
        raise BinlogError("a GTID that is cut")
    server = str(UUID(bytes=data[at + 1 : at + 17]))
    number = int.from_bytes(data[at + 17 : at + 25], "little")
    # Flags 1, server 16, number 8, kind 1, last committed 8, sequence 8, then microseconds.
    stamp = data[at + 42 : at + 49]
    commit_us = int.from_bytes(stamp, "little") & ~(1 << 55) if len(stamp) == 7 else 0
    return MysqlGtid(server, number, commit_us)


def xa_prepare(event: Event) -> tuple[bool, str]:
    """Whether it commits in one phase, and the XA id as `ddl.xid_text` spells it."""
    data = event.data
    try:
        one_phase, number, first, second = struct.unpack_from("<BIII", data, HEADER_SIZE)
    except struct.error:
        raise BinlogError("an XA PREPARE that is cut") from None
    at = HEADER_SIZE + 13
    if at + first + second > len(data):
        raise BinlogError("an XA PREPARE that is cut")
    return bool(one_phase), (
        f"{data[at : at + first].hex()},{data[at + first : at + first + second].hex()},{number}"
    )


def payload(event: Event) -> Iterator[Event]:
    """The events inside of MySQL's compressed transaction; they have no checksums."""
    data, at = event.data, HEADER_SIZE
    kind, size = 255, -1
    while True:
        field, at = length_encoded(data, at)
        if field == 0:
            break
        width, at = length_encoded(data, at)
        value, _ = length_encoded(data, at)
        at += width
        if field == 2:
            kind = value
        elif field == 3:
            size = value
    packed = data[at:]
    if kind == 0:
        if not 0 <= size <= UNPACKED_MAX:
            raise BinlogError(f"a compressed transaction that says it has {size} bytes")
        try:
            packed = bytes(cramjam.zstd.decompress(packed, output_len=size))
        except cramjam.DecompressionError as error:
            raise BinlogError(f"a compressed transaction is damaged: {error}") from None
    elif kind != 255:
        raise BinlogError(f"a transaction compressed in an unknown way, {kind}")
    at = 0
    while at < len(packed):
        size = int.from_bytes(packed[at + 9 : at + 13], "little")
        if size < HEADER_SIZE or at + size > len(packed):
            raise BinlogError("a compressed transaction that is cut")
        yield parse(packed[at : at + size], checksum=False)
        at += size


def length_encoded(data: bytes, at: int) -> tuple[int, int]:
    """A length-encoded number and where it ends."""
    try:
        first = data[at]
    except IndexError:
        raise BinlogError("a number that is cut") from None
    if first < 251:
        return first, at + 1
    width = {252: 2, 253: 3, 254: 8}.get(first, 0)
    if not width or at + 1 + width > len(data):
        raise BinlogError("a number that is cut")
    return int.from_bytes(data[at + 1 : at + 1 + width], "little"), at + 1 + width


class RowsHead(NamedTuple):
    """What stands before the rows of a row event; `data` from `at` on are the rows."""

    table_id: int
    columns: int
    # Which columns the rows have, as bitmaps: before and after for an update, else the same.
    before: bytes
    after: bytes
    data: bytes
    at: int


def table_id(event: Event) -> int:
    """The table of a table map or row event."""
    return int.from_bytes(event.data[HEADER_SIZE : HEADER_SIZE + 6], "little")


def rows_head(event: Event) -> RowsHead:
    """The head of a row event; compressed rows are unpacked."""
    data, kind = event.data, event.kind
    at = HEADER_SIZE + 8
    if kind in _ROWS_V2:
        # The length of the extra data counts its own two bytes.
        at += max(2, int.from_bytes(data[at : at + 2], "little"))
    columns, at = length_encoded(data, at)
    width = (columns + 7) // 8
    before = after = data[at : at + width]
    at += width
    if kind in UPDATES:
        after = data[at : at + width]
        at += width
    if at > len(data) or columns > 4096:
        raise BinlogError("rows that are cut")
    if kind in _ROWS_COMPRESSED:
        data, at = inflate(data[at:]), 0
    return RowsHead(table_id(event), columns, before, after, data, at)
