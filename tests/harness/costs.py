"""What each test costs: processor time, that of the processes it starts included, and files that
stay open: `--costs N`.

Two busy cores end a run no sooner than what all tests cost together, whoever waits for whom, so
this is what to look at when `make test` takes too long. Each worker has a control group of its own
(Linux, cgroup v1, as root), which counts everything that descends from it, detached daemons and the
Java of a Spark session too.

    make test ARGS='--costs 40'
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import pytest

_ROOT: Final = Path("/sys/fs/cgroup/cpuacct")
FILE: Final = "costs.jsonl"


class Cost(NamedTuple):
    """What one test took."""

    nodeid: str
    worker: str
    cpu_s: float
    wall_s: float
    # How many more files and sockets the worker had open afterwards.
    left_open: int = 0


class Meter:
    """Counts for one process and all that descend from it."""

    def __init__(self, name: str, log: Path) -> None:
        self._worker = name
        self._log = log
        self._group = _ROOT / f"penstock-tests-{os.getpid()}"
        self._group.mkdir(exist_ok=True)
        (self._group / "cgroup.procs").write_text(str(os.getpid()))

    def _cpu_s(self) -> float:
        return int((self._group / "cpuacct.usage").read_text()) / 1e9

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool, bool]:
        cpu_s, at_s, files = self._cpu_s(), time.monotonic(), _open_files()
        try:
            return (yield)
        finally:
            cost = Cost(
                item.nodeid,
                self._worker,
                self._cpu_s() - cpu_s,
                time.monotonic() - at_s,
                _open_files() - files,
            )
            # After Ctrl-C the folder of the run may be gone before its workers are.
            with suppress(FileNotFoundError), self._log.open("a") as log:
                log.write(json.dumps(cost) + "\n")


def start(config: pytest.Config, name: str, log: Path) -> None:
    """Count for this process from now on, if that is asked for and can be done."""
    if config.getoption("costs"):
        with suppress(OSError):
            config.pluginmanager.register(Meter(name, log), "penstock-processor-time")


def report(log: Path, count: int) -> list[str]:
    """The lines to show: the costliest files and tests, and the total."""
    if not log.exists():
        return ["no control groups here: --costs needs Linux with cgroup v1, and root"]
    costs = [Cost(*json.loads(line)) for line in log.read_text().splitlines()]
    files: dict[str, list[Cost]] = defaultdict(list)
    for cost in costs:
        files[cost.nodeid.partition("::")[0]].append(cost)
    lines = [f"{sum(cost.cpu_s for cost in costs):8.1f} s  all {len(costs)} tests", ""]
    lines += _costliest(
        (Cost(f"{name} ({len(of)})", "", sum(c.cpu_s for c in of), sum(c.wall_s for c in of))
         for name, of in files.items()), count,
    )  # fmt: skip
    lines += ["", *_costliest(costs, count), "", "files and sockets left open:"]
    leaks = sorted((cost for cost in costs if cost.left_open > 0), key=lambda c: -c.left_open)
    return [*lines, *(f"{cost.left_open:8}  {cost.nodeid}" for cost in leaks[:count])]


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _costliest(costs: Iterable[Cost], count: int) -> list[str]:
    ranked = sorted(costs, key=lambda cost: -cost.cpu_s)[:count]
    return [f"{cost.cpu_s:8.1f} s  {cost.wall_s:6.1f} s  {cost.nodeid}" for cost in ranked]
