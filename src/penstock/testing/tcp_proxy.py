"""A TCP proxy that breaks things: slow, lossy, cut at a byte, or not there at all.

Put it between a client and a server and change its mind while they talk:

    with TcpProxy("127.0.0.1:9092") as proxy:
        proxy.delay_ms = 50                      # every byte arrives later, none is reordered
        proxy.rate_bytes_per_s = 100_000         # and no faster than this
        proxy.cut_after(1000, towards="client")  # the next connection ends within an answer
        proxy.pause()                            # nothing moves, nothing is lost, until resume()
        proxy.swallow = True                     # what is sent disappears; connections stay open
        proxy.refuse = True                      # new connections are closed at once
        proxy.cut()                              # all connections are reset now

Settings hold for both directions and take effect at once, also on open connections. Memory is
bounded: a connection holds a few chunks in flight, then the sender has to wait.

The proxy runs in a thread of its own and listens on 127.0.0.1 only. Its methods may be called
from any other thread and return when what they ask for is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

Side = Literal["server", "client"]
Result = TypeVar("Result")

_CHUNK_BYTES: Final = 64 * 1024
# Chunks that a direction holds while they are delayed.
_CHUNKS_IN_FLIGHT: Final = 64
_CALL_TIMEOUT_S: Final = 30.0
# Of the event loop, from an accepted socket to the call of `_come`, and from an end to its closing.
_ROUNDS: Final = 5
# On with zero seconds to linger: closing sends a reset.
_RESET: Final = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class _Cut:
    """Connections to end after so many bytes one way."""

    towards: Side
    after_bytes: int
    times: int
    reset: bool


class _Connection:
    """One client and its connection to the server."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.writers: dict[Side, asyncio.StreamWriter] = {"client": client, "server": server}
        self.passed_bytes: dict[Side, int] = {"client": 0, "server": 0}
        self.cut: _Cut | None = None
        self.tasks: list[asyncio.Task[None]] = []

    def end(self, *, reset: bool) -> None:
        for writer in self.writers.values():
            if reset:
                sock = writer.get_extra_info("socket")
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()
            else:
                writer.close()
        for task in self.tasks:
            task.cancel()


class TcpProxy:
    """See the module. A context manager; `start` and `close` do the same by hand."""

    def __init__(self, target: str, port: int = 0) -> None:
        host, _, number = target.rpartition(":")
        self._target = (host or "127.0.0.1", int(number))
        self.port = port
        self.delay_ms = 0.0
        self.rate_bytes_per_s: float | None = None
        self.swallow = False
        self.refuse = False
        # Connections since the start, and bytes that reached each side.
        self.accepted = 0
        self.passed_bytes: dict[Side, int] = {"client": 0, "server": 0}
        self._open: set[_Connection] = set()
        # Whoever has come, from the moment of coming, with the task that serves it.
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._cuts: list[_Cut] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    @property
    def address(self) -> str:
        """Where clients connect to: `host:port`."""
        return f"127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._open)

    # ---- life ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Listen; the port is known on return."""
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(ready)), name="tcp-proxy", daemon=True
        )
        self._thread.start()
        ready.result(_CALL_TIMEOUT_S)

    def close(self) -> None:
        """Reset what is open and stop listening."""
        thread, loop = self._thread, self._loop
        if thread is None or loop is None:
            return
        loop.call_soon_threadsafe(self._stop.set)
        thread.join(_CALL_TIMEOUT_S)
        self._thread = self._loop = None

    async def _serve(self, ready: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        try:
            server = await asyncio.start_server(self._come, "127.0.0.1", self.port)
        except OSError as error:
            ready.set_exception(error)
            return
        self.port = server.sockets[0].getsockname()[1]
        ready.set_result(None)
        try:
            await self._stop.wait()
        finally:
            # Who was accepted a moment ago comes within the next few rounds, and only while the
            # server is open.
            for listening in server.sockets:
                self._loop.remove_reader(listening.fileno())
            await self._rounds()
            server.close()
            tasks = [task for connection in self._open for task in connection.tasks]
            self._end_all(reset=True)
            for task, client in self._clients.items():
                # A task that is cancelled before it has begun closes nothing.
                client.transport.abort()
                task.cancel()
            await asyncio.gather(*tasks, *self._clients, return_exceptions=True)
            # What was ended is closed in the loop's next round.
            await self._rounds()

    async def _rounds(self) -> None:
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)

    # ---- what can be asked of it ---------------------------------------------------------

    def cut(self, *, reset: bool = True) -> int:
        """End all connections, by a reset or politely; how many there were."""
        return self._on_loop(lambda: self._end_all(reset=reset))

    def cut_after(
        self, after_bytes: int, *, towards: Side, times: int = 1, reset: bool = False
    ) -> None:
        """End the next connections once so many bytes have gone one way, not one more."""
        self._cuts.append(_Cut(towards, after_bytes, times, reset))

    def pause(self) -> None:
        """Hold everything back."""
        self._on_loop(self._running.clear)

    def resume(self) -> None:
        self._on_loop(self._running.set)

    def wait_for(self, condition: Callable[[TcpProxy], bool], timeout_s: float = 10.0) -> None:
        """Wait until the condition holds, such as `lambda proxy: proxy.connections == 2`."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self), timeout_s):
                raise TimeoutError(f"the proxy did not get there within {timeout_s} s")

    def _on_loop(self, action: Callable[[], Result]) -> Result:
        assert self._loop is not None, "the proxy is not running"

        async def run() -> Result:
            return action()

        work: Coroutine[Any, Any, Result] = run()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_TIMEOUT_S)

    def _end_all(self, *, reset: bool) -> int:
        connections = list(self._open)
        for connection in connections:
            connection.end(reset=reset)
        return len(connections)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # ---- connections ---------------------------------------------------------------------

    def _come(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._accept(from_client, to_client))
        self._clients[task] = to_client
        task.add_done_callback(self._clients.pop)

    async def _accept(
        self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        self.accepted += 1
        if self.refuse:
            to_client.transport.abort()
            self._notify()
            return
        try:
            from_server, to_server = await asyncio.open_connection(*self._target)
        except OSError:
            to_client.transport.abort()
            self._notify()
            return
        except asyncio.CancelledError:
            # The proxy is closed while the server has not answered yet.
            to_client.transport.abort()
            raise
        connection = _Connection(to_client, to_server)
        connection.cut = self._take_cut()
        self._open.add(connection)
        connection.tasks = [
            asyncio.create_task(self._pump(connection, from_client, "server")),
            asyncio.create_task(self._pump(connection, from_server, "client")),
        ]
        self._notify()
        await asyncio.gather(*connection.tasks, return_exceptions=True)
        connection.end(reset=False)
        self._open.discard(connection)
        self._notify()

    def _take_cut(self) -> _Cut | None:
        for cut in self._cuts:
            if cut.times:
                cut.times -= 1
                return cut
        return None

    async def _pump(
        self, connection: _Connection, reader: asyncio.StreamReader, towards: Side
    ) -> None:
        """Read on one side, deliver on the other, in time; ends with either side."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS_IN_FLIGHT)
        delivery = asyncio.create_task(self._deliver(connection, chunks, towards))
        connection.tasks.append(delivery)
        try:
            while data := await reader.read(_CHUNK_BYTES):
                await chunks.put((monotonic() + self.delay_ms / 1000, data))
        except OSError:
            pass
        await chunks.put((monotonic() + self.delay_ms / 1000, b""))
        await delivery

    async def _deliver(
        self,
        connection: _Connection,
        chunks: asyncio.Queue[tuple[float, bytes]],
        towards: Side,
    ) -> None:
        writer = connection.writers[towards]
        # So that `drain` means that the system has it, and a cut loses nothing before it.
        writer.transport.set_write_buffer_limits(0)
        with contextlib.suppress(OSError):
            while True:
                due, data = await chunks.get()
                await asyncio.sleep(max(0.0, due - monotonic()))
                await self._running.wait()
                if not data:
                    # One side is done sending; the other may still have something to say.
                    if writer.can_write_eof():
                        writer.write_eof()
                    return
                if not self.swallow:
                    await self._write(connection, writer, towards, data)

    async def _write(
        self, connection: _Connection, writer: asyncio.StreamWriter, towards: Side, data: bytes
    ) -> None:
        cut = connection.cut
        room = len(data)
        if cut is not None and cut.towards == towards:
            room = cut.after_bytes - connection.passed_bytes[towards]
        for piece in self._pieces(data[:room]):
            if self.rate_bytes_per_s:
                await asyncio.sleep(len(piece) / self.rate_bytes_per_s)
            writer.write(piece)
            await writer.drain()
            connection.passed_bytes[towards] += len(piece)
            self.passed_bytes[towards] += len(piece)
        self._notify()
        if cut is not None and room < len(data):
            connection.end(reset=cut.reset)

    def _pieces(self, data: bytes) -> list[bytes]:
        """With a rate, what fits into a twentieth of a second at a time."""
        if not self.rate_bytes_per_s:
            return [data] if data else []
        size = max(1, int(self.rate_bytes_per_s / 20))
        return [data[at : at + size] for at in range(0, len(data), size)]
