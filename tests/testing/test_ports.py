"""Ports for servers of tests: free, outside of what the system hands out, and none twice."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock.testing import ports
from penstock.testing.broker import Broker
from penstock.testing.process import BrokerProcess

HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_none_comes_twice_and_none_is_the_system_s() -> None:
    found = [ports.lasting_port() for _ in range(100)]
    assert len(set(found)) == 100
    if HANDED_OUT.exists():
        first, last = map(int, HANDED_OUT.read_text().split())
        assert not [port for port in found if first <= port <= last]


def test_what_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = ports.lasting_port()
        monkeypatch.setattr(ports, "_PORTS", iter([taken.getsockname()[1], free]))
        assert ports.lasting_port() == free


@pytest.mark.parametrize("kind", ["here", "process"])
@pytest.mark.processes
def test_a_port_that_is_taken_just_then(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one is chosen for a broker that nobody knows yet."""
    made = {"here": Broker, "process": BrokerProcess}[kind](str(tmp_path / "data"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = ports.lasting_port()
        choices = iter([taken.getsockname()[1], free])
        for name in ("broker", "process"):
            monkeypatch.setattr(f"penstock.testing.{name}.lasting_port", lambda *_: next(choices))
        with made as broker:
            assert broker.bootstrap == f"127.0.0.1:{free}"
