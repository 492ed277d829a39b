"""The socket part: a replication connection in COPY mode, and what the server must hear from us.

psycopg has no call for replication, but what libpq offers is there: START_REPLICATION puts the
connection into COPY in both directions, then frames are taken from it and status updates put into
it. The server ends a connection from which it hears nothing for `wal_sender_timeout`, so a thread
repeats our status every few seconds, also while whoever reads the stream is busy. libpq's
connection is not made for two threads: a lock is held around every use of it, for a batch of
frames at most.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from time import monotonic, time_ns
from typing import Final

import psycopg
from psycopg import sql
from psycopg.pq import DiagnosticField, ExecStatus
from psycopg.pq.abc import PGresult

from penstock.capture.postgres import pgoutput
from penstock.capture.postgres.connect import Connection, PostgresUrl, as_bytes, one_line
from penstock.capture.source import (
    CaptureError,
    DatabaseUnreachableError,
    PositionLostError,
)

STATUS_EVERY_S: Final = 2.0
BATCH_FRAMES: Final = 1000
BATCH_BYTES: Final = 4 << 20
SLOT_BUSY_S: Final = 10.0
# object_in_use: the slot is read by a connection that is not quite gone, or by another capture.
_IN_USE: Final = "55006"
# object_not_in_prerequisite_state (the slot was given up), undefined_object (no such slot, no such
# publication at that place of the log), undefined_file (its part of the log is gone).
_GONE: Final = ("55000", "42704", "58P01")


class Replication:
    """One stream from a slot. `confirm` and `close` may come from other threads."""

    def __init__(self, url: PostgresUrl, *, application: str) -> None:
        self._connection: Connection = url.connect(application=application, replication=True)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._poll = select.poll()
        self._flushed = 0
        self._written = 0
        self._said_at = 0.0
        self._said = (0, 0)
        # The server asked for a word from us: it may wait for a confirmation to shut down.
        self.reply_wanted = False
        self._keeper = threading.Thread(target=self._keep, name="penstock-wal-status", daemon=True)

    def start(
        self, slot: str, publication: str, lsn: int, *, streaming: bool, wait_s: float = SLOT_BUSY_S
    ) -> None:
        """Begin after a position. A slot that a dying connection still holds is waited for."""
        options = [
            sql.SQL("proto_version {}").format(sql.Literal("2" if streaming else "1")),
            sql.SQL("publication_names {}").format(
                sql.Literal(sql.Identifier(publication).as_string(None))
            ),
            sql.SQL("messages 'true'"),
        ]
        if streaming:
            options.append(sql.SQL("streaming 'on'"))
        command = sql.SQL("START_REPLICATION SLOT {} LOGICAL {} ({})").format(
            sql.Identifier(slot),
            sql.SQL(pgoutput.format_lsn(lsn)),
            sql.SQL(", ").join(options),
        )
        text = command.as_bytes(None)
        if as_bytes(self._connection):
            self._connection.execute("SET client_encoding TO 'SQL_ASCII'")
        deadline = monotonic() + wait_s
        while True:
            result = self._connection.pgconn.exec_(text)
            if result.status == ExecStatus.COPY_BOTH:
                break
            if _state(result) != _IN_USE:
                raise _explained(result, f"slot {slot}")
            if monotonic() > deadline:
                raise DatabaseUnreachableError(
                    f"slot {slot}: {_message(result)}",
                    advice="Another run of this capture reads it; only one can.",
                )
            self._closed.wait(0.05)
        # Nothing is confirmed until we are told so: the position need not be durable anywhere.
        self._written = lsn
        self._poll.register(self._connection.pgconn.socket, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)
        self._keeper.start()

    def frames(self, timeout_s: float) -> list[bytes]:
        """What has come, padded; waits for the first of it. Empty: nothing came, or woken."""
        found = self._drain()
        if found or self._closed.is_set():
            return found
        for descriptor, _ in self._poll.poll(max(0.0, timeout_s) * 1000):
            if descriptor == self._wake_read.fileno():
                self._wake_read.recv(1024)
        with self._lock:
            if self._closed.is_set():
                return []
            try:
                self._connection.pgconn.consume_input()
            except psycopg.Error as error:
                raise self._lost(error) from error
        return self._drain()

    def _drain(self) -> list[bytes]:
        """Up to a batch of the frames that are in memory already."""
        found: list[bytes] = []
        size = 0
        pad = pgoutput.PAD
        with self._lock:
            if self._closed.is_set():
                return found
            get = self._connection.pgconn.get_copy_data
            try:
                while len(found) < BATCH_FRAMES and size < BATCH_BYTES:
                    count, data = get(1)
                    if count <= 0:
                        if count < 0:
                            self._ended()
                        break
                    frame = bytes(data) + pad
                    found.append(frame)
                    size += count
                    if frame[0] == 107 and count >= 18 and frame[17]:
                        self.reply_wanted = True
                        self._say(force=True)
            except psycopg.Error as error:
                raise self._lost(error) from error
        return found

    def _ended(self) -> None:
        """The server ended the stream: it says why, or shuts down."""
        while (result := self._connection.pgconn.get_result()) is not None:
            if result.status == ExecStatus.FATAL_ERROR:
                raise _explained(result, "the stream broke")
        raise DatabaseUnreachableError("the server ended the stream")

    def _lost(self, error: psycopg.Error) -> CaptureError:
        return DatabaseUnreachableError(f"the stream broke: {one_line(error)}")

    def confirm(self, lsn: int) -> None:
        """The server may forget what lies before."""
        with self._lock:
            if lsn > self._flushed:
                self._flushed = lsn
                if not self._closed.is_set():
                    self._say(force=self.reply_wanted)
                    self.reply_wanted = False

    def reached(self, lsn: int) -> None:
        """All before it was read, though nobody need have kept it."""
        self._written = max(self._written, lsn)

    def wake(self) -> None:
        """Let `frames` return now."""
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")

    def _say(self, *, force: bool = False) -> None:
        """Tell the server how far we are; the lock is held."""
        now = monotonic()
        state = (max(self._written, self._flushed), self._flushed)
        due = now - self._said_at
        if not force and due < STATUS_EVERY_S and (state == self._said or due < 0.1):
            return
        update = pgoutput.status_update(*state, time_ns() // 1000)
        # A broken connection is for the reader to find.
        with contextlib.suppress(psycopg.Error):
            self._connection.pgconn.put_copy_data(update)
            self._connection.pgconn.flush()
        self._said_at = now
        self._said = state

    def _keep(self) -> None:
        while not self._closed.wait(STATUS_EVERY_S / 4):
            with self._lock:
                if not self._closed.is_set():
                    self._say()

    def close(self) -> None:
        """End the stream; whoever waits in `frames` returns."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.wake()
        with self._lock:
            with contextlib.suppress(psycopg.Error):
                self._connection.pgconn.finish()
            self._connection.close()
        if self._keeper.is_alive():
            self._keeper.join()

    def release(self) -> None:
        """Close, and give back what the thread in `frames` uses; only that thread may."""
        self.close()
        self._wake_read.close()
        self._wake_write.close()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()


def _state(result: PGresult) -> str:
    return (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()


def _message(result: PGresult) -> str:
    return " ".join(result.error_message.decode(errors="replace").split())


def _explained(result: PGresult, doing: str) -> CaptureError:
    """An error of the server by its code: words depend on the server's language."""
    message = f"{doing}: {_message(result)}"
    if _state(result) in _GONE:
        return PositionLostError(
            f"the database no longer has what comes next: {message}",
            advice="Remove the capture and add it again; it then takes a new snapshot.",
        )
    return DatabaseUnreachableError(message)
