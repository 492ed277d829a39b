"""The socket of a replica: packets in large reads, and the dump of the binlog.

PyMySQL opens the connection and proves who we are; from then on the socket is read here, as much as
there is at a time. The server speaks only when spoken to, so PyMySQL has nothing buffered.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from struct import pack
from time import monotonic
from typing import Any, Final

from penstock.capture.mysql.connection import Address, Connection, Server, connect, explained, query
from penstock.capture.mysql.gtid import MysqlSet
from penstock.capture.source import CaptureError, DatabaseUnreachableError, PositionLostError

COM_QUERY: Final = 3
_COM_BINLOG_DUMP: Final = 0x12
_COM_REGISTER_SLAVE: Final = 0x15
_COM_BINLOG_DUMP_GTID: Final = 0x1E
_READ_BYTES: Final = 1 << 18
_PACKET_MAX: Final = 0xFFFFFF
# A row may be as large as the server's max_allowed_packet, which is at most 1 GiB.
_MESSAGE_MAX: Final = (1 << 30) + (1 << 20)
_SEND_ANNOTATIONS: Final = 2
_GTID_DUMP: Final = 4
_HEARTBEAT_S: Final = 5
_SILENCE_MAX_S: Final = 60
_LOST: Final = frozenset({1236, 1373, 1789, 29})
_TORN: Final = "truncated in the middle of event"


class BinlogTornError(PositionLostError):
    """A file of the binlog ends in the midst of an event, and what came before it has been told."""


class Packets:
    """Packets from a socket."""

    def __init__(self, connection: Connection, where: object) -> None:
        self._socket: socket.socket = _private(connection, "_sock")
        self._where = where
        self._rest = b""
        # The parts of a message that is longer than a packet may be.
        self._parts: list[bytes] = []
        self._parts_bytes = 0

    def timeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def shutdown(self) -> None:
        """Have the reader, in whatever thread, find the end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def read(self) -> list[bytes]:
        """The messages that have arrived: none if nothing came in time."""
        out: list[bytes] = []
        while not out:
            try:
                data = self._receive()
            except TimeoutError:
                return out
            at = self._split(data, out)
            self._rest = data[at:]
        return out

    def _receive(self) -> bytes:
        """What is left, and more: enough for the packet that is begun."""
        have = [self._rest]
        size = len(self._rest)
        need = 4
        while True:
            if size >= 4:
                head = have[0] if len(have[0]) >= 4 else b"".join(have)[:4]
                need = 4 + int.from_bytes(head[:3], "little")
            try:
                with explained(self._where):
                    more = self._socket.recv(max(_READ_BYTES, min(need - size, 1 << 22)))
            except DatabaseUnreachableError as error:
                if isinstance(error.__cause__, TimeoutError):
                    self._rest = b"".join(have)
                    raise TimeoutError from None
                raise
            if not more:
                raise DatabaseUnreachableError(f"{self._where} closed the connection")
            have.append(more)
            size += len(more)
            if size >= need and size >= 4:
                return b"".join(have)

    def _split(self, data: bytes, out: list[bytes]) -> int:
        at, end = 0, len(data)
        while at + 4 <= end:
            size = data[at] | data[at + 1] << 8 | data[at + 2] << 16
            stop = at + 4 + size
            if stop > end:
                break
            if size == _PACKET_MAX or self._parts:
                self._collect(data[at + 4 : stop], size, out)
            else:
                out.append(data[at + 4 : stop])
            at = stop
        return at

    def _collect(self, part: bytes, size: int, out: list[bytes]) -> None:
        self._parts.append(part)
        self._parts_bytes += size
        if self._parts_bytes > _MESSAGE_MAX:
            raise CaptureError(f"{self._where} sent a message of more than {_MESSAGE_MAX} bytes")
        if size < _PACKET_MAX:
            out.append(b"".join(self._parts))
            self._parts, self._parts_bytes = [], 0


def _private(connection: Connection, name: str) -> Any:
    found = getattr(connection, name, None)
    if found is None:
        raise CaptureError(f"this version of PyMySQL has no {name}")
    return found


def send_command(connection: Connection, command: int, body: bytes) -> None:
    """Send a command whose answer is read here."""
    _private(connection, "_execute_command")(command, body)


def error_of(message: bytes) -> tuple[int, str]:
    """Number and text of an error message."""
    code = int.from_bytes(message[1:3], "little")
    text = message[3:]
    return code, (text[6:] if text[:1] == b"#" else text).decode("utf-8", "replace")


class Dump:
    """The binlog from a place on, as the server sends it to a replica."""

    def __init__(self, address: Address, server: Server, replica_id: int) -> None:
        self._address = address
        self._server = server
        self._id = replica_id
        self._connection = connect(address)
        self._packets = Packets(self._connection, address)
        self._heard = monotonic()
        self._closed = False

    def start(self, file: str, at: int, *, gtid: str | None, annotate: bool = False) -> None:
        """Ask for all from a file and position on; with a GTID, for all that it does not have."""
        with explained(self._address):
            self._prepare(gtid)
            self.register()
            flags = _SEND_ANNOTATIONS if annotate else 0
            if gtid is not None and not self._server.is_mariadb:
                ids = MysqlSet(gtid).encoded()
                body = pack("<HII", flags | _GTID_DUMP, self._id, 0)
                body += pack("<QI", 4, len(ids)) + ids
                send_command(self._connection, _COM_BINLOG_DUMP_GTID, body)
                return
            if gtid is not None:
                file, at = "", 4
            if at >= 1 << 32:
                raise PositionLostError(f"position {at} of {file} cannot be asked for")
            body = pack("<IHI", at, flags, self._id) + file.encode()
            send_command(self._connection, _COM_BINLOG_DUMP, body)

    def _prepare(self, gtid: str | None) -> None:
        connection = self._connection
        period = _HEARTBEAT_S * 1_000_000_000
        settings = [f"@master_heartbeat_period = {period}", "@master_binlog_checksum = 'CRC32'"]
        if self._server.is_mariadb:
            settings.append("@mariadb_slave_capability = 4")
            if gtid is not None:
                settings.append(f"@slave_connect_state = '{gtid}'")
                settings += ["@slave_gtid_strict_mode = 0", "@slave_gtid_ignore_duplicates = 0"]
        else:
            settings += [
                f"@source_heartbeat_period = {period}",
                "@source_binlog_checksum = 'CRC32'",
            ]
            settings.append(f"@slave_uuid = '{_uuid(self._id)}'")
            settings.append(f"@replica_uuid = '{_uuid(self._id)}'")
        query(connection, f"SET {', '.join(settings)}")

    def register(self) -> None:
        name = b"penstock"
        body = pack("<IB", self._id, len(name)) + name + b"\0\0" + pack("<HII", 0, 0, 0)
        send_command(self._connection, _COM_REGISTER_SLAVE, body)
        for message in self._packets.read():
            if message[0] == 0xFF:
                code, text = error_of(message)
                raise CaptureError(
                    f"{self._address} takes no replicas from this user: {text} (error {code})",
                    advice="GRANT REPLICATION SLAVE ON *.* TO 'user'@'%';",
                )

    def events(self, timeout_s: float) -> Iterator[list[bytes]]:
        """The events as they arrive, several at a time; none if nothing came in time. Ends when it
        is closed."""
        packets = self._packets
        packets.timeout(timeout_s)
        while not self._is_closed():
            try:
                messages = packets.read()
            except DatabaseUnreachableError:
                if self._is_closed():
                    return
                raise
            if messages:
                self._heard = monotonic()
                if messages[-1][0] != 0:
                    error = self._last_word(messages.pop())
                    if isinstance(error, BinlogTornError):
                        # What was sent before is whole, and does not come again.
                        yield [message[1:] for message in messages]
                    raise error
            elif monotonic() - self._heard > _SILENCE_MAX_S:
                raise DatabaseUnreachableError(
                    f"{self._address} has not even sent a heartbeat for {_SILENCE_MAX_S} s"
                )
            yield [message[1:] for message in messages]

    def _last_word(self, message: bytes) -> CaptureError:
        """The server ends a dump with an error or an EOF; why, and what it means."""
        if message[0] == 0xFE:
            return DatabaseUnreachableError(f"{self._address} ended the binlog; it shuts down")
        code, text = error_of(message)
        if code in _LOST and "same server" in text:
            return CaptureError(
                f"another replica took over: {text}",
                advice="Give this capture a server id of its own with the option server_id.",
            )
        if code in _LOST:
            kind = BinlogTornError if _TORN in text else PositionLostError
            return kind(f"{self._address} no longer has the binlog to go on from: {text}")
        return DatabaseUnreachableError(f"{self._address} ended the binlog: {text} (error {code})")

    def _is_closed(self) -> bool:
        # Another thread may have closed it meanwhile.
        return self._closed

    def close(self) -> None:
        """From any thread."""
        self._closed = True
        self._packets.shutdown()

    def dispose(self) -> None:
        """Let go of the connection; from the thread that reads."""
        self.close()
        force_close(self._connection)


def _uuid(number: int) -> str:
    return f"70656e73-746f-636b-8000-{number:012x}"


def force_close(connection: Connection) -> None:
    """Close without a goodbye: an answer may be on its way. Again is harmless."""
    close = getattr(connection, "_force_close", None)
    if close is not None:
        close()
