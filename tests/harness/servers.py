"""Real servers for all tests of a run: each is started once, when it is first needed.

The controller of the run owns them. Workers ask for one by name over a Unix socket and get an
object that knows its address and can make databases, and that cannot stop it. Tests that stop,
crash or configure a server start one of their own.

    postgres = servers.get("postgres-system")
"""

from __future__ import annotations

import copy
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.testing.apache_kafka import FOR_TESTS, SMALL_JVM_OPTIONS, ApacheKafka
from tests.harness.needs import DATABASES, GUARD, JAVA

SOCKET_FILE: Final = "servers.sock"
ACCEPT_AGAIN_S: Final = 0.1
POSTGRES_SETTINGS: Final = {
    # Small, so that transactions of some hundred rows are streamed before their commit.
    "logical_decoding_work_mem": "64kB",
    "max_prepared_transactions": "20",
    # For all workers at once.
    "max_connections": "200",
    "max_replication_slots": "100",
    "max_wal_senders": "100",
}
JAVA_SERVERS: Final = frozenset({"kafka", "opensearch"})
MARIADB_SETTINGS: Final = {"max_connections": "200"}


def _postgres(release: str) -> Any:
    from penstock.testing.postgres import PostgresServer, installation

    return PostgresServer(POSTGRES_SETTINGS, of=installation(release))


def _mariadb() -> Any:
    from penstock.testing.mariadb import MariaDB

    return MariaDB(**MARIADB_SETTINGS)


def _mysql() -> Any:
    from penstock.testing.mysql import MySQL

    return MySQL()


def _redis() -> Any:
    from penstock.testing.redis import RedisServer

    return RedisServer()


def _opensearch() -> Any:
    from penstock.testing.opensearch import OpenSearch

    return OpenSearch()


def _kafka() -> Any:
    return ApacheKafka(FOR_TESTS, jvm_options=SMALL_JVM_OPTIONS)


FACTORIES: Final[dict[str, Callable[[], Any]]] = {
    "postgres-system": lambda: _postgres("system"),
    "postgres-16": lambda: _postgres("16"),
    "postgres-18": lambda: _postgres("18"),
    "mariadb": _mariadb,
    "mysql": _mysql,
    "redis": _redis,
    "opensearch": _opensearch,
    "kafka": _kafka,
}


class ServerStartError(Exception):
    """A server that the run shares did not start; what it said."""


class Servers:
    """The owner: starts each server once and ends all of them with the run."""

    def __init__(self, factories: dict[str, Callable[[], Any]] | None = None) -> None:
        self._factories = FACTORIES if factories is None else factories
        self._stack = ExitStack()
        self._locks = {name: threading.Lock() for name in self._factories}
        self._running: dict[str, Any] = {}
        self._failed: dict[str, str] = {}

    def get(self, name: str) -> Any:
        """A server that runs, as a borrower sees it."""
        with self._locks[name]:
            if name in self._failed:
                raise ServerStartError(self._failed[name])
            died = self._death(name)
            if died:
                # Another one would have another address, which those who use it would not know.
                raise ServerStartError(died)
            if name not in self._running:
                try:
                    server = self._factories[name]()
                    self._running[name] = self._stack.enter_context(server)
                except Exception as failure:
                    self._failed[name] = f"{name} did not start: {failure}"
                    raise ServerStartError(self._failed[name]) from failure
            return _borrowed(self._running[name])

    def dead(self) -> list[str]:
        """A line for each server that has ended although the run uses it."""
        return [died for name in list(self._running) if (died := self._death(name))]

    def _death(self, name: str) -> str | None:
        process = getattr(self._running.get(name), "_process", None)
        code = process.poll() if isinstance(process, subprocess.Popen) else None
        if code is None:
            return None
        return f"{name} ended while the run used it, with {code}; tests that use it fail"

    def close(self) -> None:
        self._stack.close()


def _borrowed(server: Any) -> Any:
    """The same server without its process: whoever borrows it cannot end it."""
    copied = copy.copy(server)
    copied._process = None
    return copied


class ServerHost:
    """The owner behind a Unix socket, for the workers of a run."""

    def __init__(self, servers: Servers, folder: Path) -> None:
        self._servers = servers
        self.address = str(folder / SOCKET_FILE)
        self._listener = Listener(self.address, family="AF_UNIX", backlog=64)
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="shared-servers", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        # A thread that accepts notices a closed socket only by a connection.
        with suppress(OSError):
            Client(self.address, family="AF_UNIX").close()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection = self._listener.accept()
            except OSError:
                # A worker that has gone, or too many open files: that passes.
                self._closed.wait(ACCEPT_AGAIN_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        with connection, suppress(EOFError, OSError):
            name = connection.recv()
            try:
                connection.send((True, self._servers.get(name)))
            except ServerStartError as failure:
                connection.send((False, str(failure)))


class RemoteServers:
    """The worker's side: asks the controller, and remembers what it was given."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._known: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        """A server that runs, started by the controller if it was not yet."""
        GUARD.require(JAVA if name in JAVA_SERVERS else DATABASES, name)
        if name not in self._known:
            with Client(self._address, family="AF_UNIX") as connection:
                connection.send(name)
                started, server = connection.recv()
            if not started:
                raise ServerStartError(server)
            self._known[name] = server
        return self._known[name]

    def close(self) -> None:
        """The controller ends the servers."""


# Where the servers of a run are found in pytest's configuration.
servers_key = pytest.StashKey[Servers | RemoteServers]()
