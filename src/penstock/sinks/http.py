"""HTTP connections that are kept open: the little that sinks need of them, with limits.

Requests that fail before an answer came may have been carried out; whoever sends them must be
able to send them twice.
"""

from __future__ import annotations

import base64
import http.client
import random
import socket
import ssl
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.sinks.errors import StoreAwayError, StoreError, StoreUnreachableError

CONNECT_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 512 << 20
# These say that a later try may succeed.
BUSY: Final = frozenset({408, 425, 429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Server:
    """Where to connect, and how."""

    host: str
    port: int
    tls: bool = False
    ca_file: str = ""
    verify: bool = True
    user: str = ""
    password: str = ""
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    body: bytes
    retry_after_s: float | None = None


class Connection:
    """A connection to one server, made when it is needed. Not for several threads at once."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._open: http.client.HTTPConnection | None = None

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}
    ) -> Answer:
        """Send, and wait for the answer; StoreUnreachableError if there comes none."""
        told = dict(headers)
        if self._server.user:
            pair = f"{self._server.user}:{self._server.password}".encode()
            told["Authorization"] = "Basic " + base64.b64encode(pair).decode("ascii")
        kept = self._open is not None
        try:
            return self._once(method, path, body, told)
        except (http.client.HTTPException, OSError) as error:
            self.close()
            # One that was kept open may have been closed by the other side meanwhile.
            if not kept or isinstance(error, TimeoutError):
                raise self._unreachable(error) from error
        try:
            return self._once(method, path, body, told)
        except (http.client.HTTPException, OSError) as error:
            self.close()
            raise self._unreachable(error) from error

    def _once(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        if self._open is None:
            self._open = self._connect()
        self._open.request(method, path, body, dict(headers))
        answer = self._open.getresponse()
        found = answer.read(ANSWER_BYTES_MAX + 1)
        if len(found) > ANSWER_BYTES_MAX:
            self.close()
            raise StoreError(f"{self._server.host} answers more than {ANSWER_BYTES_MAX} bytes")
        after = answer.headers.get("Retry-After", "")
        return Answer(answer.status, found, float(after) if after.isdigit() else None)

    def _connect(self) -> http.client.HTTPConnection:
        server = self._server
        connect_s = min(CONNECT_S, server.timeout_s)
        if not server.tls:
            made = http.client.HTTPConnection(server.host, server.port, timeout=connect_s)
        else:
            context = ssl.create_default_context(cafile=server.ca_file or None)
            if not server.verify:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            made = http.client.HTTPSConnection(
                server.host, server.port, timeout=connect_s, context=context
            )
        made.connect()
        made.sock.settimeout(server.timeout_s)
        # Small requests must not wait for the answer to the one before.
        made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def _unreachable(self, error: Exception) -> StoreUnreachableError | StoreError:
        where = f"{self._server.host}:{self._server.port}"
        if isinstance(error, ssl.SSLCertVerificationError):
            return StoreError(
                f"{where}: {error.verify_message}",
                advice="Name the certificate of its authority: ca_file=PATH.",
            )
        return StoreAwayError(f"{where} does not answer: {str(error) or type(error).__name__}")

    def close(self) -> None:
        """Close it; the next request makes another."""
        if self._open is not None:
            self._open.close()
            self._open = None


class Connections:
    """As many connections to one server as there are threads that send at the same time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        # Threads may take and give back without a lock.
        self._idle: deque[Connection] = deque()

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}
    ) -> Answer:
        """As a connection does it."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = Connection(self._server)
        try:
            return connection.send(method, path, body, headers)
        finally:
            self._idle.append(connection)

    def close(self) -> None:
        """Close all that nobody sends on; the next request makes another."""
        while self._idle:
            self._idle.pop().close()


class Backoff:
    """Pauses between tries: each twice as long as the last, up to a limit, and never quite the
    same, so that many who wait do not come back together."""

    def __init__(self, first_s: float, most_s: float, chance: random.Random | None = None) -> None:
        self._next_s, self._most_s = first_s, most_s
        self._chance = chance or random.Random()
        self._pause = threading.Event()

    def wait(self, least_s: float | None = None) -> None:
        """Pause; for at least as long as the other side has asked for, within the limit."""
        pause_s = self._next_s * self._chance.uniform(0.5, 1.0)
        self._next_s = min(self._most_s, self._next_s * 2)
        self._pause.wait(min(self._most_s, max(pause_s, least_s or 0.0)))
