"""What users and we test with: a broker in a fixture, faults on demand, foreign Kafka code.

    from penstock.testing import Broker

    with Broker() as broker:
        ...  # any Kafka client, with bootstrap.servers = broker.bootstrap

May import every other room; no other room but the command line may import this one. Names are
loaded when first used: the kit brings the whole broker along.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.testing.broker import Broker
    from penstock.testing.clock import ManualClock
    from penstock.testing.faults import SimulatedCrash, SimulatedDisk
    from penstock.testing.flows import FlowTester
    from penstock.testing.tcp_proxy import TcpProxy

__all__ = ["Broker", "FlowTester", "ManualClock", "SimulatedCrash", "SimulatedDisk", "TcpProxy"]

_MODULES = {
    "Broker": "broker",
    "FlowTester": "flows",
    "ManualClock": "clock",
    "SimulatedCrash": "faults",
    "SimulatedDisk": "faults",
    "TcpProxy": "tcp_proxy",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
