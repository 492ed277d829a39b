"""How long a session takes to be ready, in a process of its own, with and without the archive."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

from benchmarks.broker.workloads import progress
from benchmarks.frame import Asked, Cells

_PROGRAM: Final = """
import sys, time
begun = time.perf_counter()
from penstock.spark import session
spark = session("start", master="local[2]")
print(time.perf_counter() - begun)
spark.stop()
"""
TIMEOUT_S: Final = 180.0


def measure(asked: Asked) -> Cells:
    """From the import to a session that answers."""
    systems = {"penstock": {}, "no-archive": {"PENSTOCK_SPARK_ARCHIVE": "off"}}
    found: dict[str, list[float]] = {name: [] for name in systems}
    subprocess.run(
        [sys.executable, "-m", "penstock.spark.archive"], timeout=TIMEOUT_S * 4, check=True
    )
    for _ in range(asked.rounds):
        for name, more in systems.items():
            took = _start(more)
            progress(f"  session {name}: {took:.2f} s")
            found[name].append(took)
    return {"session": found}


def _start(more: dict[str, str]) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return float(done.stdout.split()[-1])
