"""A real broker inside the test process: started in milliseconds, gone without a trace.

    with Broker() as broker:
        producer = Producer({"bootstrap.servers": broker.bootstrap})

It is the same broker that `penstock up` runs, on a thread of its own, on a free port of the
loopback (see `ports`), with its data in a temporary directory. By default records stay in the
operating system's cache (durability `os`): nothing in a test waits for a disk.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from penstock.broker.config import BrokerConfig
from penstock.broker.main import run_loop
from penstock.broker.server import Broker as Server
from penstock.errors import ConfigError, PenstockError
from penstock.log.clock import Clock
from penstock.log.disk import Disk
from penstock.testing.ports import lasting_port

T = TypeVar("T")

_START_TIMEOUT_S = 60.0
# So often another port is tried, where somebody takes one in the moment before its start.
_ATTEMPTS = 5


class Broker:
    """A broker for tests. Settings are those of `penstock.broker.config.BrokerConfig`."""

    def __init__(
        self,
        data: str | None = None,
        *,
        disk: Disk | None = None,
        clock: Clock | None = None,
        **settings: Any,
    ) -> None:
        self._owns_data = data is None
        self.data = data or tempfile.mkdtemp(prefix="penstock-test-")
        settings = {"port": 0, "durability": "os", **settings}
        self.config = BrokerConfig(data=self.data, **settings)
        self._disk = disk
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._server: Server | None = None
        self._stop: asyncio.Event | None = None
        self._clean = True
        self._failure: BaseException | None = None
        self._ready = threading.Event()

    @property
    def bootstrap(self) -> str:
        """What goes into `bootstrap.servers`."""
        return f"{self.config.host}:{self.server.port}"

    @property
    def server(self) -> Server:
        """The broker itself, for tests that look inside; touch it through `call`."""
        if self._server is None:
            raise PenstockError("the broker is not running", advice="Use it in a with statement.")
        return self._server

    def start(self) -> Broker:
        """Start; ready for clients on return. It keeps its port over restarts: clients know it."""
        if self.config.port:
            self._launch()
            return self
        given = self.config
        for attempt in range(_ATTEMPTS):
            self.config = replace(given, port=lasting_port(given.host))
            try:
                self._launch()
                break
            except ConfigError as error:
                self.config = given
                if "cannot listen" not in str(error) or attempt + 1 == _ATTEMPTS:
                    raise
        return self

    def _launch(self) -> None:
        self._ready.clear()
        self._failure = None
        self._thread = threading.Thread(target=self._run, name="penstock-broker", daemon=True)
        self._thread.start()
        if not self._ready.wait(_START_TIMEOUT_S):
            raise PenstockError("the broker did not start in time")
        self._raise_failure()
        self.config = replace(self.config, port=self.server.port)

    def stop(self) -> None:
        """Stop cleanly."""
        self._end(clean=True)

    def crash(self) -> None:
        """Stop without syncing or closing anything, as a killed process does."""
        self._end(clean=False)

    def restart(self) -> Broker:
        """Stop cleanly if it runs, and start again on the same data and port."""
        if self._server is not None:
            self.stop()
        return self.start()

    def call(self, function: Callable[[Server], T]) -> T:
        """Run a function on the broker's own thread and return what it returns."""
        server = self.server

        async def on_loop() -> T:
            return function(server)

        return asyncio.run_coroutine_threadsafe(on_loop(), server.loop).result(_START_TIMEOUT_S)

    def _end(self, *, clean: bool) -> None:
        if self._server is None or self._thread is None or self._stop is None:
            return
        self._clean = clean
        self._server.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._server = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            run_loop(self._serve())
        except BaseException as error:  # handed to the thread that started us
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = Server(self.config, disk=self._disk, clock=self._clock)
        await server.start()
        self._server = server
        self._ready.set()
        await self._stop.wait()
        if self._clean:
            await server.stop()
        else:
            await server.crash()

    def __enter__(self) -> Broker:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        finally:
            if self._owns_data:
                shutil.rmtree(self.data, ignore_errors=True)
