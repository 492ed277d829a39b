"""Servers of a run: started once, when they are first asked for, by whoever owns them."""

from __future__ import annotations

import errno
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.harness.servers import RemoteServers, ServerHost, Servers, ServerStartError


class FakeServer:
    """Counts its starts and stops; a server with a process, as far as borrowers can tell."""

    starts = 0
    stops = 0

    def __init__(self, port: int) -> None:
        self.port = port
        self._process: Any = None

    def __enter__(self) -> FakeServer:
        type(self).starts += 1
        self._process = threading.Lock()
        return self

    def __exit__(self, *_: object) -> None:
        type(self).stops += 1


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeServer, "starts", 0)
    monkeypatch.setattr(FakeServer, "stops", 0)


def broken() -> Any:
    raise OSError("no such program")


@pytest.mark.databases
def test_borrowers_in_other_threads_and_processes_share_one_server(tmp_path: Path) -> None:
    owner = Servers({"postgres": lambda: FakeServer(5432)})
    host = ServerHost(owner, tmp_path)
    try:
        ports: list[int] = []
        threads = [
            threading.Thread(
                target=lambda: ports.append(RemoteServers(host.address).get("postgres").port)
            )
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ports == [5432] * 8
        assert FakeServer.starts == 1
        assert RemoteServers(host.address).get("postgres")._process is None
    finally:
        host.close()
        owner.close()
    assert FakeServer.stops == 1


@pytest.mark.databases
def test_a_server_that_does_not_start_is_tried_once_and_tells_why(tmp_path: Path) -> None:
    owner = Servers({"postgres": broken})
    host = ServerHost(owner, tmp_path)
    try:
        for _ in range(2):
            with pytest.raises(ServerStartError, match="no such program"):
                RemoteServers(host.address).get("postgres")
    finally:
        host.close()
        owner.close()


@pytest.mark.databases
def test_a_server_that_died_is_named(tmp_path: Path) -> None:
    server = FakeServer(5432)
    owner = Servers({"postgres": lambda: server})
    host = ServerHost(owner, tmp_path)
    try:
        RemoteServers(host.address).get("postgres")
        assert owner.dead() == []
        server._process = subprocess.Popen(["false"])
        server._process.wait()
        (line,) = owner.dead()
        assert "postgres ended while the run used it, with 1" in line
        with pytest.raises(ServerStartError, match="postgres ended while the run used it"):
            RemoteServers(host.address).get("postgres")
    finally:
        host.close()
        owner.close()


@pytest.mark.databases
def test_a_connection_that_fails_is_not_the_last(tmp_path: Path) -> None:
    owner = Servers({"postgres": lambda: FakeServer(5432)})
    host = ServerHost(owner, tmp_path)
    accept, failed = host._listener.accept, threading.Event()

    def fail_once() -> Any:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, "too many open files")
        return accept()

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host._listener, "accept", fail_once)
            for _ in range(2):
                assert RemoteServers(host.address).get("postgres").port == 5432
        assert failed.is_set()
    finally:
        host.close()
        owner.close()
