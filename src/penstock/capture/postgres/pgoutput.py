"""The messages of `pgoutput`, protocol versions 1 and 2: bytes in, values out.

A frame is what the server sends in COPY mode: `w`, three numbers (where this is in the write-ahead
log, where the log ends, the server's clock) and a message; or `k`, a keepalive. Rows are not
decoded here but by code that is generated for each relation (`decoders`). Times are microseconds
since 2000 on the wire and since 1970 here.

Frames are padded by `PAD` bytes, so that the row decoders may read a few bytes too far.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

from penstock.capture.source import CaptureError

EPOCH_2000_US: Final = 946_684_800_000_000
PAD: Final = b"\0\0\0\0\0\0\0\0"
# Where the message begins in a `w` frame, and where what follows its first byte.
MESSAGE_AT: Final = 25
BODY_AT: Final = 26

_UINT16: Final = Struct(">H")
_UINT32: Final = Struct(">I")
_INT32: Final = Struct(">i")
_UINT64: Final = Struct(">Q")
_INT64: Final = Struct(">q")
_BEGIN: Final = Struct(">QqI")
_COMMIT: Final = Struct(">BQQq")


class MalformedError(CaptureError):
    """Bytes that are no message of pgoutput."""

    advice = "This is a fault of the connection or of Penstock; try again, and report it."


@dataclass(frozen=True, slots=True)
class RelationColumn:
    name: str
    type_oid: int
    typmod: int
    is_key: bool


@dataclass(frozen=True, slots=True)
class RelationMessage:
    """What a table looks like from here on."""

    oid: int
    schema: str
    name: str
    # d default, f full, i index, n nothing
    identity: str
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class TypeMessage:
    """The name of a type that is not built in; of a domain, that of its base type."""

    oid: int
    schema: str
    name: str


class Begin(NamedTuple):
    final_lsn: int
    commit_ts_us: int
    xid: int


class Commit(NamedTuple):
    commit_lsn: int
    end_lsn: int
    commit_ts_us: int


@dataclass(frozen=True, slots=True)
class StreamCommit:
    xid: int
    commit_lsn: int
    end_lsn: int
    commit_ts_us: int


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    transactional: bool
    lsn: int
    prefix: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Keepalive:
    wal_end: int
    reply_wanted: bool


class _Reader:
    """Walks over a frame; whatever does not fit is a MalformedError."""

    def __init__(self, frame: bytes, at: int = BODY_AT) -> None:
        self._frame = frame
        self._end = len(frame) - len(PAD)
        self._at = at

    def _take(self, count: int) -> int:
        at = self._at
        if count < 0 or at + count > self._end:
            raise MalformedError("a message of the replication stream is cut short")
        self._at = at + count
        return at

    def uint8(self) -> int:
        return self._frame[self._take(1)]

    def uint16(self) -> int:
        return int(_UINT16.unpack_from(self._frame, self._take(2))[0])

    def uint32(self) -> int:
        return int(_UINT32.unpack_from(self._frame, self._take(4))[0])

    def int32(self) -> int:
        return int(_INT32.unpack_from(self._frame, self._take(4))[0])

    def uint64(self) -> int:
        return int(_UINT64.unpack_from(self._frame, self._take(8))[0])

    def time_us(self) -> int:
        return int(_INT64.unpack_from(self._frame, self._take(8))[0]) + EPOCH_2000_US

    def data(self) -> bytes:
        count = self.uint32()
        at = self._take(count)
        return self._frame[at : at + count]

    def string(self) -> str:
        end = self._frame.find(b"\0", self._at, self._end)
        if end < 0:
            raise MalformedError("a name in the replication stream has no end")
        value = self._frame[self._at : end]
        self._at = end + 1
        return value.decode(errors="replace")

    def done(self) -> None:
        if self._at != self._end:
            raise MalformedError("a message of the replication stream is longer than it says")


def begin(frame: bytes) -> Begin:
    # These two come with every transaction, so they are read at once.
    if len(frame) != BODY_AT + _BEGIN.size + len(PAD):
        raise MalformedError("a BEGIN in the replication stream has a wrong length")
    final_lsn, ts_us, xid = _BEGIN.unpack_from(frame, BODY_AT)
    return Begin(final_lsn, ts_us + EPOCH_2000_US, xid)


def commit(frame: bytes) -> Commit:
    if len(frame) != BODY_AT + _COMMIT.size + len(PAD):
        raise MalformedError("a COMMIT in the replication stream has a wrong length")
    _, commit_lsn, end_lsn, ts_us = _COMMIT.unpack_from(frame, BODY_AT)
    return Commit(commit_lsn, end_lsn, ts_us + EPOCH_2000_US)


def relation(frame: bytes) -> RelationMessage:
    reader = _Reader(frame)
    oid, schema, name = reader.uint32(), reader.string(), reader.string()
    identity = chr(reader.uint8())
    columns = []
    for _ in range(reader.uint16()):
        flags = reader.uint8()
        columns.append(
            RelationColumn(
                name=reader.string(),
                type_oid=reader.uint32(),
                typmod=reader.int32(),
                is_key=bool(flags & 1),
            )
        )
    reader.done()
    return RelationMessage(oid, schema or "pg_catalog", name, identity, tuple(columns))


def type_name(frame: bytes) -> TypeMessage:
    reader = _Reader(frame)
    message = TypeMessage(reader.uint32(), reader.string() or "pg_catalog", reader.string())
    reader.done()
    return message


def truncate(frame: bytes) -> list[bytes]:
    """The relations, each as its four bytes."""
    reader = _Reader(frame)
    count = reader.uint32()
    reader.uint8()
    if len(frame) - len(PAD) != BODY_AT + 5 + 4 * count:
        raise MalformedError("a TRUNCATE in the replication stream has a wrong length")
    start = BODY_AT + 5
    return [frame[at : at + 4] for at in range(start, start + 4 * count, 4)]


def logical_message(frame: bytes) -> LogicalMessage:
    reader = _Reader(frame)
    flags = reader.uint8()
    message = LogicalMessage(bool(flags & 1), reader.uint64(), reader.string(), reader.data())
    reader.done()
    return message


def stream_start(frame: bytes) -> int:
    """The transaction that is being streamed."""
    reader = _Reader(frame)
    xid = reader.uint32()
    reader.uint8()
    reader.done()
    return xid


def stream_commit(frame: bytes) -> StreamCommit:
    reader = _Reader(frame)
    xid = reader.uint32()
    reader.uint8()
    message = StreamCommit(xid, reader.uint64(), reader.uint64(), reader.time_us())
    reader.done()
    return message


def stream_abort(frame: bytes) -> tuple[int, int]:
    """The transaction, and the part of it that was rolled back (itself, or a savepoint)."""
    reader = _Reader(frame)
    xids = reader.uint32(), reader.uint32()
    reader.done()
    return xids


def keepalive(frame: bytes) -> Keepalive:
    reader = _Reader(frame, 1)
    wal_end = reader.uint64()
    reader.time_us()
    message = Keepalive(wal_end, bool(reader.uint8()))
    reader.done()
    return message


def status_update(written: int, flushed: int, now_us: int, *, reply: bool = False) -> bytes:
    """What we tell the server: how far we have read, and how far it may forget."""
    return b"r" + b"".join(
        (
            _UINT64.pack(written),
            _UINT64.pack(flushed),
            _UINT64.pack(flushed),
            _INT64.pack(now_us - EPOCH_2000_US),
            b"\1" if reply else b"\0",
        )
    )


def split_lines(data: bytes) -> Iterator[bytes]:
    """The rows of COPY's text format: a newline inside of a value is written as \\n."""
    yield from data.removesuffix(b"\n").split(b"\n")


def parse_lsn(value: str) -> int:
    """16/B374D848 as a number."""
    high, _, low = value.partition("/")
    return int(high, 16) << 32 | int(low, 16)


def format_lsn(value: int) -> str:
    return f"{value >> 32:X}/{value & 0xFFFFFFFF:X}"
