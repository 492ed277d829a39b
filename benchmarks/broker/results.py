"""What was measured, as data: kept in one JSON file, merged run by run.

A cell is one measurement (a rate, a latency). Machines are noisy, so each cell is measured in
several rounds, the rounds of all systems interleaved, and the best round counts: noise mostly
slows down. Not always (a disk with bursts can flatter one), so every round stays in the file. A
part that was not run again keeps its earlier result.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final, Self

import psutil

Answer = dict[str, Any]

DISK_BLOCK_BYTES: Final = 1 << 20
DISK_BLOCKS: Final = 256
DISK_TRIES: Final = 4
DISK_PAGE_BYTES: Final = 4096
DISK_PAGES: Final = 300


@dataclass
class SystemResult:
    """One row: everything about one system at one durability."""

    key: str
    name: str
    level: str
    durability: str
    version: str = ""
    missing: str = ""
    # When the run was that measured this row: only rows of one run are compared by ratios.
    run: str = ""
    start_s: list[float] = field(default_factory=list)
    idle_mb: list[float] = field(default_factory=list)
    loaded_mb: list[float] = field(default_factory=list)
    # By name of the cell, one answer of the client per round.
    cells: dict[str, list[Answer]] = field(default_factory=dict)

    def add(self, cell: str, answer: Answer) -> None:
        self.cells.setdefault(cell, []).append(answer)

    def best(self, cell: str) -> Answer | None:
        """The best round: the highest rate, or the lowest p99 of a latency."""
        answers = self.cells.get(cell)
        if not answers:
            return None
        if "mb_per_s" in answers[0]:
            return max(answers, key=lambda answer: float(answer["mb_per_s"]))
        return min(answers, key=lambda answer: float(answer["p99_us"]))

    def value(self, cell: str, name: str) -> float | None:
        best = self.best(cell)
        return None if best is None else float(best[name])


@dataclass
class Results:
    """A whole run, or several merged."""

    machine: dict[str, str] = field(default_factory=dict)
    systems: dict[str, SystemResult] = field(default_factory=dict)
    # By key of the system: what `retained` found.
    retained: dict[str, dict[str, Any]] = field(default_factory=dict)
    # By key of the system and size: what `crowd` found.
    crowd: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Self:
        if not path.exists():
            return cls()
        data = json.loads(path.read_text())
        systems = {key: SystemResult(**row) for key, row in data["systems"].items()}
        return cls(data["machine"], systems, data["retained"], data.get("crowd", {}))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def describe_machine(data: Path) -> dict[str, str]:
    """Where and when: enough to read the figures, nothing that names the machine."""
    return {
        "load": f"{os.getloadavg()[0]:.1f}",
        "disk": _describe_disk(data),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": f"{os.cpu_count()} cores of {_cpu_model()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
    }


def _describe_disk(data: Path) -> str:
    """What an fsync costs here: without it the figures at `disk` say nothing."""
    data.mkdir(parents=True, exist_ok=True)
    path = data / "probe"
    try:
        with path.open("wb", buffering=0) as file:
            megabytes = DISK_BLOCKS * DISK_BLOCK_BYTES / 1e6
            rates = [
                megabytes / _write(file, DISK_BLOCK_BYTES, DISK_BLOCKS) for _ in range(DISK_TRIES)
            ]
            took_ms = sorted(_write(file, DISK_PAGE_BYTES, 1) * 1000 for _ in range(DISK_PAGES))
    finally:
        path.unlink(missing_ok=True)
    return (
        f"a disk that writes {min(rates):.0f} to {max(rates):.0f} MB/s and fsyncs an appended "
        f"4 KiB in {median(took_ms):.2f} ms (p99 {took_ms[int(DISK_PAGES * 0.99)]:.1f} ms)"
    )


def _write(file: FileIO, size: int, times: int) -> float:
    """Seconds to write some blocks and fsync them."""
    block = bytes(size)
    begun = perf_counter()
    for _ in range(times):
        file.write(block)
    os.fsync(file.fileno())
    return perf_counter() - begun


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
