"""Transactions that the server streams before they are committed, kept until they are.

Their messages lie in memory up to a bound for all of them together; then the largest goes to a
temporary file. A savepoint that is rolled back takes its messages along. What all of them may take
on disk has a bound too, and passing it is an error and not a full disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from struct import Struct
from typing import IO, Final

from penstock.capture.source import CaptureError

MEMORY_MAX_BYTES: Final = 64 << 20
DISK_MAX_BYTES: Final = 64 << 30
# What a message takes in a list besides its bytes, about.
_OVERHEAD_BYTES: Final = 100
_HEAD: Final = Struct(">II")


class SpoolFullError(CaptureError):
    """Transactions in progress are larger than what may be kept of them."""

    advice = (
        "Give the capture more room (option spool.max.bytes), or let the server keep them: "
        "option streaming=off."
    )


class _Transaction:
    """The messages of one, those in the file before those in memory."""

    __slots__ = ("aborted", "bytes", "file", "messages")

    def __init__(self) -> None:
        self.messages: list[tuple[int, bytes]] = []
        self.bytes = 0
        self.file: IO[bytes] | None = None
        self.aborted: set[int] = set()


class Spool:
    """All streamed transactions that are in progress."""

    def __init__(
        self, memory_max_bytes: int = MEMORY_MAX_BYTES, disk_max_bytes: int = DISK_MAX_BYTES
    ) -> None:
        self._memory_max_bytes = memory_max_bytes
        self._disk_max_bytes = disk_max_bytes
        self._transactions: dict[int, _Transaction] = {}
        self.memory_bytes = 0
        self.disk_bytes = 0

    def __len__(self) -> int:
        return len(self._transactions)

    def add(self, xid: int, subxid: int, message: bytes) -> None:
        """A message of a transaction, or of a savepoint in it."""
        transaction = self._transactions.get(xid)
        if transaction is None:
            transaction = self._transactions[xid] = _Transaction()
        size = len(message) + _OVERHEAD_BYTES
        transaction.messages.append((subxid, message))
        transaction.bytes += size
        self.memory_bytes += size
        if self.memory_bytes > self._memory_max_bytes:
            self._spill()

    def abort(self, xid: int, subxid: int) -> None:
        """Roll back the transaction, or a savepoint of it."""
        if xid == subxid:
            self.forget(xid)
        elif xid in self._transactions:
            self._transactions[xid].aborted.add(subxid)

    def take(self, xid: int) -> Iterator[bytes]:
        """The messages that count, in order; afterwards they are gone."""
        transaction = self._transactions.get(xid)
        if transaction is None:
            return
        try:
            aborted = transaction.aborted
            if transaction.file is not None:
                transaction.file.seek(0)
                while head := transaction.file.read(_HEAD.size):
                    subxid, length = _HEAD.unpack(head)
                    message = transaction.file.read(length)
                    if subxid not in aborted:
                        yield message
            for subxid, message in transaction.messages:
                if subxid not in aborted:
                    yield message
        finally:
            self.forget(xid)

    def forget(self, xid: int) -> None:
        transaction = self._transactions.pop(xid, None)
        if transaction is None:
            return
        self.memory_bytes -= transaction.bytes
        if transaction.file is not None:
            self.disk_bytes -= transaction.file.seek(0, 2)
            transaction.file.close()

    def close(self) -> None:
        for xid in list(self._transactions):
            self.forget(xid)

    def _spill(self) -> None:
        transaction = max(self._transactions.values(), key=lambda each: each.bytes)
        if transaction.file is None:
            transaction.file = tempfile.TemporaryFile(prefix="penstock-spool-")  # noqa: SIM115
        size = sum(len(message) + _HEAD.size for _, message in transaction.messages)
        if self.disk_bytes + size > self._disk_max_bytes:
            raise SpoolFullError(
                f"transactions in progress take more than {self._disk_max_bytes} bytes"
            )
        file = transaction.file
        file.seek(0, 2)
        for subxid, message in transaction.messages:
            file.write(_HEAD.pack(subxid, len(message)))
            file.write(message)
        self.disk_bytes += size
        self.memory_bytes -= transaction.bytes
        transaction.messages.clear()
        transaction.bytes = 0
