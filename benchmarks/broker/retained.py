"""A log that holds 10 GB beside an empty one: does its length cost anything?

Two brokers run at the same time, one with the long log, one empty, and are measured by turns, so
that whatever else the machine does meets both alike; the idle one costs nothing. Reading starts
where the round's own messages start: both read what was just written, from the page cache.
Then: start after a clean stop, and after SIGKILL in the middle of writing, of both. An
acknowledged message that is gone after the crash is an error, not a figure.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.broker import clients, processes
from benchmarks.broker.clients import ClientError
from benchmarks.broker.servers import Server
from benchmarks.broker.systems import System
from benchmarks.broker.workloads import Plan, progress

FILL_REQUEST_BYTES: Final = 1 << 20
FILL_STEP_REQUESTS: Final = 1000
CRASH_AFTER_S: Final = 1.0
LOG: Final = "log"
RATES: Final = tuple(
    f"{what}_{name}"
    for what in ("produce", "consume", "produce_cpu", "consume_cpu")
    for name in ("empty", "full")
)
# More rounds than elsewhere.
ROUNDS_FACTOR: Final = 2

Entry = dict[str, Any]

MEASURES: Final[dict[str, Callable[[Entry], str]]] = {
    "retained": lambda e: f"{e['gb']:.1f} GB",
    "produce 1 KiB, empty log": lambda e: f"{e['produce_empty']:.0f} MB/s",
    "produce 1 KiB, long log": lambda e: f"{e['produce_full']:.0f} MB/s",
    "produce, long over empty": lambda e: f"{e['produce_ratio']:.2f}",
    "consume 1 KiB, empty log": lambda e: f"{e['consume_empty']:.0f} MB/s",
    "consume 1 KiB, long log": lambda e: f"{e['consume_full']:.0f} MB/s",
    "consume, long over empty": lambda e: f"{e['consume_ratio']:.2f}",
    "processor time of produce, empty / long": lambda e: (
        f"{e['produce_cpu_empty']:.2f} / {e['produce_cpu_full']:.2f} s/GB"
    ),
    "processor time of consume, empty / long": lambda e: (
        f"{e['consume_cpu_empty']:.2f} / {e['consume_cpu_full']:.2f} s/GB"
    ),
    "start after a clean stop": lambda e: f"{e['start_clean_s']:.2f} s",
    "start after a crash, long log": lambda e: (
        f"{e['start_crash_s']:.2f} s (active segment {e['crash_active_mb']:.0f} MB)"
    ),
    "start after a crash, one segment": lambda e: (
        f"{e['start_crash_empty_s']:.2f} s (active segment {e['crash_empty_active_mb']:.0f} MB)"
    ),
    "idle memory after the start": lambda e: f"{e['idle_mb']:.0f} MB",
}


def measure(system: System, plan: Plan, folder: Path, gb: float) -> Entry:
    """The whole comparison for one system."""
    shutil.rmtree(folder, ignore_errors=True)
    full, empty = system.make(folder / "full"), system.make(folder / "empty")
    try:
        full.start()
        empty.start()
        _create(full, LOG)
        _fill(system, full, gb)
        os.sync()
        entry = _rates(full, empty, plan)
        entry |= {"title": f"{system.name}, {system.level}", "gb": gb}
        entry |= _starts(system, full, empty, plan)
        return entry
    finally:
        full.stop(clean=False)
        empty.stop(clean=False)
        shutil.rmtree(folder, ignore_errors=True)


def _create(server: Server, topic: str) -> None:
    clients.run("kafka_bench", "create", addr=server.address, topic=topic)


def _high(server: Server, topic: str) -> int:
    answer = clients.run("kafka_bench", "offsets", addr=server.address, topic=topic)
    return int(answer["high"])


def _fill(system: System, server: Server, gb: float) -> None:
    written = 0
    while written < gb * 1e9:
        left = int((gb * 1e9 - written) // FILL_REQUEST_BYTES) + 1
        answer = clients.run(
            "raw_kafka",
            "produce",
            addr=server.address,
            topic=LOG,
            bytes=FILL_REQUEST_BYTES,
            depth=4,
            seconds=120,
            requests=min(left, FILL_STEP_REQUESTS),
        )
        written += answer["bytes"]
        progress(f"  {system.key}: {written / 1e9:.1f} of {gb:g} GB, {answer['mb_per_s']:.0f} MB/s")


def _rates(full: Server, empty: Server, plan: Plan) -> Entry:
    """Produce and consume by turns on both: medians, and the median of the rounds' ratios.

    Not the best round as elsewhere: one lucky moment of the disk on either side would decide a
    comparison that looks for a difference of a twentieth. The first round only warms.
    """
    rates: dict[str, list[float]] = {name: [] for name in RATES}
    for number in range(1 + plan.rounds * ROUNDS_FACTOR):
        fresh = f"fresh{number}"
        _create(empty, fresh)
        turns = [(empty, fresh, "empty"), (full, LOG, "full")]
        for server, topic, name in turns if number % 2 else reversed(turns):
            for what, value in _turn(server, topic, plan).items():
                rates[f"{what}_{name}"].append(value)
        progress("  " + ", ".join(f"{name} {values[-1]:.2f}" for name, values in rates.items()))
    measured = {name: values[1:] for name, values in rates.items()}
    entry: Entry = {name: median(values) for name, values in measured.items()}
    entry["rounds"] = measured
    for what in ("produce", "consume"):
        pairs = zip(measured[f"{what}_full"], measured[f"{what}_empty"], strict=True)
        entry[f"{what}_ratio"] = median(long / short for long, short in pairs)
    return entry


def _turn(server: Server, topic: str, plan: Plan) -> dict[str, float]:
    """Produce for a while and read it back: MB/s, and the broker's processor time per GB."""
    first = _high(server, topic)
    os.sync()
    begun_s = processes.cpu_s(server.pid)
    produced = clients.run(
        "kafka_bench",
        "produce",
        addr=server.address,
        topic=topic,
        size=1024,
        seconds=plan.produce_s,
        count=plan.produce_count,
    )
    written_s = processes.cpu_s(server.pid)
    consumed = clients.run(
        "kafka_bench",
        "consume",
        addr=server.address,
        topic=topic,
        offset=first,
        count=produced["count"],
    )
    read_s = processes.cpu_s(server.pid)
    gigabytes = produced["bytes"] / 1e9
    return {
        "produce": produced["mb_per_s"],
        "consume": consumed["mb_per_s"],
        "produce_cpu": (written_s - begun_s) / gigabytes,
        "consume_cpu": (read_s - written_s) / gigabytes,
    }


def _starts(system: System, full: Server, empty: Server, plan: Plan) -> Entry:
    """Start times of the long log, and of the other after a crash for comparison."""
    end = _high(full, LOG)
    clean = []
    for _ in range(max(plan.rounds, 2)):
        full.stop()
        clean.append(full.start())
        if _high(full, LOG) != end:
            raise ClientError(f"{system.name}: the end of the log moved over a clean stop")
    time.sleep(plan.settle_s)
    entry: Entry = {
        "start_clean_s": min(clean),
        "idle_mb": processes.memory_mb(full.pid),
    }
    entry["start_crash_s"], entry["crash_active_mb"] = _crash(system, full, LOG)
    _create(empty, LOG)
    entry["start_crash_empty_s"], entry["crash_empty_active_mb"] = _crash(system, empty, LOG)
    return entry


def _crash(system: System, server: Server, topic: str) -> tuple[float, float]:
    """SIGKILL while a producer writes; the time to start again, the active segment in MB."""
    writer = clients.start(
        "raw_kafka", "produce", addr=server.address, topic=topic, depth=8, seconds=60
    )
    try:
        time.sleep(CRASH_AFTER_S)
        acknowledged = _high(server, topic)
        server.stop(clean=False)
    finally:
        writer.kill()
        writer.wait()
    segments = sorted(server.folder.rglob(f"{topic}-0/*.log"))
    active_mb = segments[-1].stat().st_size / 1e6 if segments else 0.0
    took_s = server.start()
    if _high(server, topic) < acknowledged:
        raise ClientError(f"{system.name}: acknowledged messages are gone after a crash")
    return took_s, active_mb
