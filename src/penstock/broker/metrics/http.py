"""The metrics over HTTP: a server that knows two pages and nothing else.

`GET /metrics` is for Prometheus, `GET /healthz` says with 200 or 503 whether the broker can do its
work. One request a connection, answered and closed. Who connects can neither make it read much
(the request's head is bounded), nor wait long, nor open many connections at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from penstock.broker.metrics.collect import expose
from penstock.broker.metrics.exposition import CONTENT_TYPE
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.broker.server import Broker

log = logging.getLogger(__name__)

MAX_HEAD_BYTES: Final = 8 * 1024
MAX_CONNECTIONS: Final = 32
TIMEOUT_S: Final = 10.0
# What is still taken, and for how long, from who is answered before all was read.
MAX_REST_BYTES: Final = 64 * 1024
REST_TIMEOUT_S: Final = 1.0
_PLAIN: Final = "text/plain; charset=utf-8"

# Status, type and content.
Answer = tuple[HTTPStatus, str, bytes]


class MetricsServer:
    """Listens for as long as the broker runs."""

    def __init__(self, broker: Broker, host: str, port: int) -> None:
        self._broker = broker
        self._host = host
        self.port = port
        # Whether there is something to tell.
        self.ready = False
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._pages: dict[bytes, Callable[[], Awaitable[Answer]]] = {
            b"/metrics": self._metrics,
            b"/healthz": self._health,
        }

    async def start(self) -> None:
        """Listen; ConfigError if that cannot be."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host, self.port, limit=MAX_HEAD_BYTES
            )
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {self._host}:{self.port}: {error.strerror}",
                advice="Choose another address with --metrics, or stop what uses this one.",
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def address(self) -> str:
        """Where the metrics are."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}/metrics"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._open) >= MAX_CONNECTIONS:
                _write(writer, HTTPStatus.SERVICE_UNAVAILABLE, _PLAIN, b"too many connections\n")
                if len(self._open) < 2 * MAX_CONNECTIONS:
                    self._open.add(task)
                    await _take_rest(reader, writer)
                return
            self._open.add(task)
            async with asyncio.timeout(TIMEOUT_S):
                await self._answer(reader, writer)
        except (TimeoutError, ConnectionError):
            pass
        except asyncio.CancelledError:
            # The broker stops. The server's own bookkeeping takes a cancelled task for a failure.
            pass
        except Exception:
            log.exception("serving metrics")
        finally:
            self._open.discard(task)
            with contextlib.suppress(Exception):
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return
        except asyncio.LimitOverrunError:
            _write(writer, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _PLAIN, b"too long\n")
            await _take_rest(reader, writer)
            return
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        page = self._pages.get(rest.partition(b" ")[0].partition(b"?")[0])
        if method not in (b"GET", b"HEAD"):
            status, kind, body = HTTPStatus.METHOD_NOT_ALLOWED, _PLAIN, b"GET only\n"
        elif page is None:
            status, kind, body = HTTPStatus.NOT_FOUND, _PLAIN, b"see /metrics and /healthz\n"
        elif not self.ready:
            status, kind, body = HTTPStatus.SERVICE_UNAVAILABLE, _PLAIN, b"starting\n"
        else:
            status, kind, body = await page()
        _write(writer, status, kind, body, with_body=method != b"HEAD")
        await writer.drain()

    async def _metrics(self) -> Answer:
        return HTTPStatus.OK, CONTENT_TYPE, await expose(self._broker)

    async def _health(self) -> Answer:
        """Whether what everything else depends on can be written: topics and coordinators."""
        failures = self._broker.failures()
        if not failures:
            return HTTPStatus.OK, _PLAIN, b"ok\n"
        text = "".join(f"{failure}\n" for failure in failures)
        return HTTPStatus.SERVICE_UNAVAILABLE, _PLAIN, text.encode()


async def _take_rest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End our side and read what comes: closed with bytes unread, the answer could be lost."""
    await writer.drain()
    writer.write_eof()
    taken = 0
    async with asyncio.timeout(REST_TIMEOUT_S):
        while taken < MAX_REST_BYTES and (more := await reader.read(MAX_HEAD_BYTES)):
            taken += len(more)


def _write(
    writer: asyncio.StreamWriter, status: HTTPStatus, kind: str, body: bytes, *,
    with_body: bool = True,
) -> None:  # fmt: skip
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + (body if with_body else b""))
