"""What every system is asked to do, once per round.

    start, settle, idle memory
    warm up (Java compiles what runs often; everyone gets the same)
    produce 100 B, consume them; produce 1 KiB, consume them; publish-to-ack; publish-to-consume
    stop, remove the data

Produce runs for a time, not for a count: a system that does 20,000 messages a second and one that
does 1,000,000 are both measured over the same two seconds. Each cell has a fresh topic. Before a
cell the dirty pages of the one before are written back, so that none pays for another's writes.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.broker import clients, processes, raw
from benchmarks.broker.results import Answer, SystemResult
from benchmarks.broker.servers import Server
from benchmarks.broker.systems import System

SIZES: Final = (100, 1024)


@dataclass(frozen=True)
class Plan:
    """How long and how often."""

    rounds: int = 3
    settle_s: float = 1.0
    warm_s: float = 4.0
    produce_s: float = 2.0
    produce_count: int = 20_000_000
    latency_s: float = 3.0
    latency_count: int = 5000
    raw_s: float = 1.5


QUICK: Final = Plan(
    rounds=1,
    settle_s=0.5,
    warm_s=0.5,
    produce_s=0.6,
    latency_s=0.7,
    latency_count=1000,
    raw_s=0.5,
)


def progress(text: str) -> None:
    """What is going on, on stderr: stdout is for the table."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Driver:
    """One running server and the client that goes with it."""

    system: System
    server: Server
    made: int = 0

    def topic(self) -> str:
        """A fresh topic."""
        self.made += 1
        name = f"bench{self.made}"
        self.call("create", name, *self.system.create)
        return name

    def call(self, mode: str, topic: str, *extra: str, **arguments: int | float) -> Answer:
        return clients.run(
            self.system.program, mode, *extra, addr=self.server.address, topic=topic, **arguments
        )

    def cell(self, mode: str, topic: str, **arguments: int | float) -> Answer:
        """One measurement, with the processor time the server needed for it."""
        before = processes.cpu_s(self.server.pid)
        answer = self.call(mode, topic, **arguments)
        answer["server_cpu_s"] = round(processes.cpu_s(self.server.pid) - before, 2)
        return answer


def run_round(
    system: System, plan: Plan, folder: Path, result: SystemResult, parts: frozenset[str]
) -> None:
    """Start the system on an empty folder, measure, stop, clean up."""
    shutil.rmtree(folder, ignore_errors=True)
    server = system.make(folder)
    try:
        result.start_s.append(round(server.start(), 4))
        time.sleep(plan.settle_s)
        result.idle_mb.append(round(processes.memory_mb(server.pid), 1))
        driver = Driver(system, server)
        with processes.PeakMemory(server.pid) as memory:
            _warm_up(driver, plan)
            if "compare" in parts:
                _throughput(driver, plan, result)
                _latency(driver, plan, result)
        if "compare" in parts:
            result.loaded_mb.append(round(memory.peak_mb, 1))
        if "raw" in parts and system.speaks_kafka:
            raw.measure(server, driver.topic, plan.raw_s, result)
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _warm_up(driver: Driver, plan: Plan) -> None:
    for size in SIZES:
        topic = driver.topic()
        done = driver.call(
            "produce", topic, size=size, seconds=plan.warm_s / 2, count=plan.produce_count
        )
        driver.call("consume", topic, count=done["count"])
        driver.call("delete", topic)


def _throughput(driver: Driver, plan: Plan, result: SystemResult) -> None:
    for size in SIZES:
        topic = driver.topic()
        os.sync()
        done = driver.cell(
            "produce", topic, size=size, seconds=plan.produce_s, count=plan.produce_count
        )
        result.add(f"produce_{size}", done)
        result.add(f"consume_{size}", driver.cell("consume", topic, count=done["count"]))
        driver.call("delete", topic)


def _latency(driver: Driver, plan: Plan, result: SystemResult) -> None:
    os.sync()
    for mode in ("ack", "e2e"):
        topic = driver.topic()
        result.add(
            mode,
            driver.cell(mode, topic, size=100, seconds=plan.latency_s, count=plan.latency_count),
        )
        driver.call("delete", topic)
