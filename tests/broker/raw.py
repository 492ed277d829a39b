"""A tiny synchronous client for tests: request objects in, response objects out, bytes on demand.

It does what it is told and nothing by itself: no retries, no version negotiation, no metadata.
Works on any broker that speaks the protocol. Touches one socket.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from types import TracebackType
from typing import Any, Final, Self

from penstock.broker.apis.table import ENDPOINTS
from penstock.wire import Message, api, decode_response_header, decoder, encoder, request_header

TIMEOUT_S: Final = 60.0
_LENGTH: Final = struct.Struct(">i")


class ConnectionEndedError(Exception):
    """The broker has closed the connection."""


class RawClient:
    """One connection. Requests may be pipelined: `send` several, then `receive` as many."""

    def __init__(
        self,
        bootstrap: str,
        *,
        client_id: str | None = "raw",
        timeout_s: float = TIMEOUT_S,
        receive_buffer_bytes: int | None = None,
    ) -> None:
        host, port = bootstrap.rsplit(":", 1)
        self.socket = socket.socket()
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(timeout_s)
        try:
            self.socket.connect((host, int(port)))
        except OSError:
            self.socket.close()
            raise
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._client_id = client_id
        self._next_correlation_id = 1
        # What was asked and not yet answered: API, version, correlation id.
        self.asked: deque[tuple[int, int, int]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    # ---- messages --------------------------------------------------------------------------

    def frame(self, request: Message, version: int | None = None) -> bytes:
        """The bytes of a request without their length; an answer to it is expected from now on."""
        version = latest(request) if version is None else version
        correlation_id = self._next_correlation_id
        self._next_correlation_id += 1
        self.asked.append((request.API_KEY, version, correlation_id))
        header = request_header(request.API_KEY, version, correlation_id, self._client_id)
        return header + encoder(type(request), version)(request)

    def send(self, request: Message, version: int | None = None) -> None:
        self.send_frame(self.frame(request, version))

    def send_all(self, *requests: Message | tuple[Message, int]) -> None:
        """Several requests in one write."""
        frames = [
            self.frame(*item) if isinstance(item, tuple) else self.frame(item) for item in requests
        ]
        self.socket.sendall(b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames))

    def send_unanswered(self, request: Message, version: int | None = None) -> None:
        """A request that gets no answer, such as a produce with acks=0."""
        frame = self.frame(request, version)
        self.asked.pop()
        self.send_frame(frame)

    def receive(self) -> Any:
        """The answer to the oldest request that has none yet."""
        key, version, correlation_id = self.asked.popleft()
        return decode_answer(key, version, correlation_id, self.receive_frame())

    def call(self, request: Message, version: int | None = None) -> Any:
        """Ask and wait for the answer."""
        self.send(request, version)
        return self.receive()

    # ---- bytes -----------------------------------------------------------------------------

    def send_bytes(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send_frame(self, frame: bytes) -> None:
        self.socket.sendall(_LENGTH.pack(len(frame)) + frame)

    def receive_frame(self) -> bytes:
        """The next frame without its length; ConnectionEndedError if there is none."""
        (length,) = _LENGTH.unpack(self.receive_bytes(4))
        return self.receive_bytes(length)

    def receive_bytes(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            try:
                got = self.socket.recv_into(view)
            except ConnectionResetError:
                got = 0
            if not got:
                raise ConnectionEndedError(f"{count - len(view)} of {count} bytes came")
            view = view[got:]
        return bytes(data)

    def is_silent(self) -> bool:
        """Whether nothing has arrived that was not read yet."""
        self.socket.setblocking(False)
        try:
            with contextlib.suppress(BlockingIOError):
                return not self.socket.recv(1, socket.MSG_PEEK) and False
            return True
        finally:
            self.socket.settimeout(TIMEOUT_S)

    def wait_closed(self) -> bytes:
        """Wait until the broker closes; what it still sent before that."""
        rest = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while data := self.socket.recv(1 << 16):
                rest += data
        return bytes(rest)


def latest(request: Message) -> int:
    """The newest version of a request that the broker offers and Kafka calls stable."""
    return min(ENDPOINTS[request.API_KEY].max_version, type(request).VERSIONS[1])


def decode_answer(key: int, version: int, correlation_id: int, frame: bytes) -> Any:
    """The response in a frame, every byte of it accounted for."""
    got_id, at = decode_response_header(key, version, frame)
    assert got_id == correlation_id, f"answer to {got_id}, expected {correlation_id}"
    response, end = decoder(api(key).response, version)(frame, at)
    assert end == len(frame), f"{len(frame) - end} bytes follow the response"
    return response
